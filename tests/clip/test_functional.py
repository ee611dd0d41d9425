"""The whole of clipping against the loop over samples: every mode, every way to use a parameter."""

import pytest
import torch
from torch import nn

from tests.capture.common import CASES, floats, make, squares
from tests.harness.oracle import clipped_sum, per_sample_norms
from unison.clip import MODES
from unison.clip.functional import clipped_gradients
from unison.errors import BadInput, UnsupportedOperation

ALL_MODES = [*MODES, "auto"]
QUICK = (
    "linear 3-d",
    "tied",
    "layer norm",
    "conv2d",
    "bare parameters",
    "non-reentrant checkpoint",
)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-6}  # sums are rounded to float32 in the end

pytestmark = pytest.mark.filterwarnings("ignore:no rule for", "ignore:There is a performance drop")


def check(name: str, mode: str, size: int = 5, dtype: torch.dtype = torch.float64) -> None:
    model, batch, loss = make(name, size)
    plain = make("non-reentrant checkpoint", size)[0] if name.startswith("reentrant") else model
    norms = per_sample_norms(plain, loss, batch)
    max_norm = float(norms.median())  # some samples are clipped and some are not
    expected = clipped_sum(plain, loss, batch, max_norm)
    model = model.to(dtype)
    batch = batch.to(dtype) if batch.is_floating_point() else batch
    found = clipped_gradients(model, loss, batch, max_norm=max_norm, mode=mode)
    assert found.sums.keys() == expected.keys()
    torch.testing.assert_close(found.norms, norms, rtol=TOLERANCE[dtype], atol=0.0)
    total = sum(value.norm() ** 2 for value in expected.values()) ** 0.5
    for key, value in expected.items():
        error = (found.sums[key].double() - value).norm()
        assert error <= TOLERANCE[dtype] * total, (key, float(error / total))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("name", QUICK)
def test_against_the_loop(name, mode):
    check(name, mode)


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("name", CASES)
def test_against_the_loop_everywhere(name, mode, size):
    check(name, mode, size)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("name", ["linear 3-d", "tied", "conv2d"])
def test_float32(name, mode):
    check(name, mode, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_no_sample_adds_more_than_the_bound(mode, dtype):
    """The share of one sample, as computed, and not as it was meant to be."""
    for scale in (1e-3, 1.0, 30.0):
        model, batch, loss = make("tied", 1)
        model = model.to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale ** (1 / 3))
        for max_norm in (1e-2, 0.7):
            found = clipped_gradients(model, loss, batch, max_norm=max_norm, mode=mode)
            share = sum(value.double().square().sum() for value in found.sums.values()).sqrt()
            assert share <= max_norm


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_sample_that_is_not_finite_is_left_out(mode):
    model, batch, loss = make("linear 3-d")
    model = model.float()
    batch = batch.float()
    others = clipped_gradients(model, loss, batch[1:], max_norm=1.0, mode=mode)
    batch[0, 2, 1] = torch.nan
    found = clipped_gradients(model, loss, batch, max_norm=1.0, mode=mode, is_checked=False)
    assert found.num_dropped == 1
    assert found.coefficients[0] == 0
    for name, value in others.sums.items():
        torch.testing.assert_close(found.sums[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_an_empty_batch_gives_zeros(mode):
    model, batch, loss = make("tied")
    found = clipped_gradients(model, loss, batch[:0], max_norm=1.0, mode=mode)
    assert found.norms.shape == (0,)
    assert all(not value.any() for value in found.sums.values())


def test_a_parameter_without_a_use_adds_zeros():
    model, batch, loss = make("frozen")
    found = clipped_gradients(model, loss, batch, max_norm=1.0)
    assert not found.sums["never.weight"].any()
    assert "first.weight" not in found.sums  # it is frozen


def test_automatic_clipping_scales_every_sample():
    model, batch, loss = make("linear 3-d")
    found = clipped_gradients(model, loss, batch, max_norm=0.5, rule="automatic")
    expected = 0.5 / (found.norms + 0.01)
    torch.testing.assert_close(found.coefficients, expected, rtol=1e-6, atol=0.0)


def test_auto_says_what_it_chose():
    model, batch, loss = make("tied")
    plan = clipped_gradients(model, loss, batch, max_norm=1.0).plan
    text = str(plan)
    assert "table.weight" in text
    assert "middle.bias" in text


def test_losses_that_mix_samples_are_refused():
    def mixing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        losses = squares(model, batch)
        return losses / losses.sum()

    with pytest.raises(UnsupportedOperation, match="samples mix"):
        clipped_gradients(nn.Linear(6, 3).double(), mixing, floats(6)(5), max_norm=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "gost"}, "did you mean 'ghost'"),
        ({"rule": "flatt"}, "did you mean 'flat'"),
        ({"max_norm": 0.0}, "max_norm"),
    ],
)
def test_bad_arguments(options, message):
    model, batch, loss = make("linear 2-d")
    with pytest.raises(BadInput, match=message):
        clipped_gradients(model, loss, batch, **{"max_norm": 1.0, **options})


def test_one_loss_for_the_batch_is_refused():
    model, batch, _ = make("linear 2-d")
    with pytest.raises(BadInput, match="one loss per sample"):
        clipped_gradients(model, lambda m, b: m(b).square().mean(), batch, max_norm=1.0)
