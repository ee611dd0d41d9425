"""Under autocast: no sample adds more than C, whatever was rounded on the way."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.capture.common import make
from tests.clip.hard import HARD
from tests.clip.models import Deep, ids, losses
from tests.harness import assert_close
from unison.clip import MODES, clipped_gradients
from unison.clip.functional import ClippedGradients


def in_full(value: object) -> object:
    return pytest.param(value, marks=pytest.mark.full)


ALL_MODES = [*MODES, "auto"]
AUTOCAST = [torch.bfloat16, in_full(torch.float16)]
ALWAYS = ("cancelling", "cancelling lookups", "constant")
MODELS = ["tied", "conv2d", "non-reentrant checkpoint"]

pytestmark = pytest.mark.filterwarnings("ignore:no rule for", "ignore:There is a performance drop")


def norm_of(found: ClippedGradients) -> float:
    """The norm of all sums together, in float64."""
    return math.sqrt(math.fsum(float(each.double().square().sum()) for each in found.sums.values()))


def clipped(
    model: nn.Module, loss, batch: Tensor, dtype: torch.dtype, max_norm: float, mode: str
) -> ClippedGradients:
    with torch.autocast("cpu", dtype=dtype):
        return clipped_gradients(model, loss, batch, max_norm=max_norm, mode=mode)


def scaled(model: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


@pytest.mark.parametrize("dtype", AUTOCAST, ids=str)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_no_sample_adds_more_than_the_bound(mode, dtype):
    """The share of one sample, as computed; and not much less than it may be."""
    for name in MODELS:
        for factor in (0.3, 3.0):
            model, batch, loss = make(name, 1)
            model = scaled(model.float(), factor)
            batch = batch.float() if batch.is_floating_point() else batch
            norm = float(clipped(model, loss, batch, dtype, 1.0, mode).norms)
            for max_norm in (1e-3, 0.9 * norm):
                share = norm_of(clipped(model, loss, batch, dtype, max_norm, mode))
                assert share <= max_norm, (name, factor, share / max_norm - 1)
                assert share >= min(norm, max_norm) * (1 - 1e-5), (name, factor)


@pytest.mark.parametrize("dtype", AUTOCAST, ids=str)
@pytest.mark.parametrize("case", [each if each in ALWAYS else in_full(each) for each in HARD])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_tokens_that_cancel_and_tokens_that_are_one(mode, case, dtype):
    torch.manual_seed(0)
    model, loss = HARD[case].make(), HARD[case].loss
    batch = HARD[case].batch(1)
    norm = float(clipped(model, loss, batch, dtype, 1.0, mode).norms)
    for max_norm in (1e-3, 0.3 * norm or 1.0, 0.999 * norm or 1.0):
        share = norm_of(clipped(model, loss, batch, dtype, max_norm, mode))
        assert share <= max_norm, share / max_norm - 1


@pytest.mark.parametrize("kind", ["cancelling", "cancelling lookups"])
def test_tokens_that_cancel_do(kind):
    """Their gradients add up to a small part of what they would without signs."""
    torch.manual_seed(0)
    case = HARD[kind]
    model, batch = case.make(), case.batch(1)
    small = clipped(model, case.loss, batch, torch.bfloat16, 1.0, "ghost_bk").norms
    model.get_buffer("weights").abs_()
    large = clipped(model, case.loss, batch, torch.bfloat16, 1.0, "ghost_bk").norms
    assert small < 0.02 * large


@pytest.mark.parametrize("case", ["cancelling", in_full("constant"), in_full("one large token")])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_the_share_of_a_sample_among_others(mode, case):
    """The others are not finite and so add nothing: what is left is computed as in a batch."""
    torch.manual_seed(0)
    model, loss = HARD[case].make(), HARD[case].loss
    batch = HARD[case].batch(4)
    clipped(model, loss, batch, torch.bfloat16, 1.0, mode)  # learn from samples that are finite
    for sample in (0, 2):
        alone = torch.full_like(batch, torch.nan)
        alone[sample] = batch[sample]
        found = clipped(model, loss, alone, torch.bfloat16, 0.01, mode)
        assert found.num_dropped == 3
        assert 0.009 < norm_of(found) <= 0.01


def loop_norms(model: nn.Module, batch: Tensor) -> Tensor:
    """Norms of each sample's gradient, one sample at a time, by autograd under autocast."""
    found = []
    for i in range(len(batch)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = losses(model, batch[i : i + 1]).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append(torch.stack([each.double().norm() for each in gradients]).norm())
    return torch.stack(found)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_norms_are_those_of_a_loop_under_autocast(is_checkpointed):
    """autograd rounds weight gradients to bfloat16, records do not: they agree up to that."""
    torch.manual_seed(0)
    model, batch = Deep(is_checkpointed=is_checkpointed, is_tied=True), ids()
    expected = loop_norms(model, batch)
    norms = {
        mode: clipped(model, losses, batch, torch.bfloat16, 1.0, mode).norms for mode in ALL_MODES
    }
    for mode, found in norms.items():
        assert_close(found, expected, dtype=torch.bfloat16)
        # All modes measure the same records.
        torch.testing.assert_close(found, norms["ghost_bk"], rtol=1e-6, atol=0.0, msg=mode)


def test_autocast_is_learned_apart_from_what_was_learned_without():
    """The same model and batch, with and without: records have other dtypes."""
    torch.manual_seed(0)
    model, batch = Deep(), ids()
    plain = clipped_gradients(model, losses, batch, max_norm=1.0, mode="flash_fuse_bk")
    narrow = clipped(model, losses, batch, torch.bfloat16, 1.0, "flash_fuse_bk")
    sizes = [
        {each.layer.name: each.layer.itemsize for each in found.plan.layers}["head.weight"]
        for found in (plain, narrow)
    ]
    assert sizes == [4, 2]
    assert all(value.dtype == torch.float32 for value in narrow.sums.values())
