"""One batch's records on their way to clipped sums: planned for, used more often, used less."""

import pytest
import torch
from torch import Tensor, nn

from tests.harness.oracle import clipped_sum, per_sample_norms
from unison.clip import MODES, Clipping, Storage, clipped_gradients, learn, plan_clipping
from unison.clip.costs import describe
from unison.errors import UnsupportedOperation
from unison.ops import Product


class Repeats(nn.Module):
    """Uses a layer as often as it is told, and another one not if that is twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)
        self.num_repeats = 1

    def forward(self, x: Tensor) -> Tensor:  # [batch, 3, 6]
        for _ in range(self.num_repeats):
            x = torch.tanh(self.layer(x))
        return x if self.num_repeats == 2 else self.other(x)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum((1, 2))


def batch(size: int) -> Tensor:
    return torch.randn(size, 3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


PASSES = {mode: choice.num_backwards + choice.num_forwards - 1 for mode, choice in MODES.items()}


@pytest.mark.parametrize("mode", [*(mode for mode in MODES if PASSES[mode] == 1), "auto"])
@pytest.mark.parametrize("order", [(1, 3, 2), (3, 1, 2)], ids=str)
def test_used_more_or_less_often_than_planned(mode, order):
    torch.manual_seed(0)
    model, x = Repeats().double(), batch(4)
    for model.num_repeats in order:
        norms = per_sample_norms(model, losses, x)
        max_norm = float(norms.median())
        found = clipped_gradients(model, losses, x, max_norm=max_norm, mode=mode)
        torch.testing.assert_close(found.norms, norms, rtol=1e-9, atol=0.0)
        for name, value in clipped_sum(model, losses, x, max_norm).items():
            torch.testing.assert_close(found.sums[name].double(), value, rtol=1e-6, atol=1e-7)


class Shortened(nn.Module):
    """Cuts rows to a length of its own, as code does that cuts a batch to its longest row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.length = 1

    def forward(self, x: Tensor) -> Tensor:  # [batch, 3, 6]
        return self.layer(x[:, : self.length])


@pytest.mark.parametrize("mode", [*(mode for mode in MODES if PASSES[mode] == 1), "auto"])
@pytest.mark.parametrize("order", [(1, 3, 2), (3, 1)], ids=str)
def test_other_tokens_than_planned_for(mode, order):
    """What one token is planned for (the product of two norms) is not what three take."""
    torch.manual_seed(0)
    model, x = Shortened().double(), batch(4)
    for model.length in order:
        found = clipped_gradients(model, losses, x, max_norm=1.0, mode=mode)
        norms = per_sample_norms(model, losses, x)
        torch.testing.assert_close(found.norms, norms, rtol=1e-9, atol=0.0)
        for name, value in clipped_sum(model, losses, x, 1.0).items():
            torch.testing.assert_close(found.sums[name].double(), value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", [mode for mode in MODES if PASSES[mode] == 2])
def test_two_passes_refuse_what_they_did_not_plan_for(mode):
    torch.manual_seed(0)
    model = Repeats().double()
    clipped_gradients(model, losses, batch(4), max_norm=1.0, mode=mode)
    model.num_repeats = 3
    with pytest.raises(UnsupportedOperation, match=r"layer\.\w+ was used more .* keeps records"):
        clipped_gradients(model, losses, batch(4), max_norm=1.0, mode=mode)


def test_the_first_batch_and_the_second_give_the_same_bits():
    torch.manual_seed(0)
    model = Repeats()
    x = batch(5).float()
    first, second = (clipped_gradients(model, losses, x, max_norm=0.5) for _ in range(2))
    assert torch.equal(first.norms, second.norms)
    for name, value in first.sums.items():
        assert torch.equal(value, second.sums[name])


def test_per_sample_gradients_use_the_same_memory_again():
    torch.manual_seed(0)
    model = Repeats()
    x = batch(5).float()
    clipped_gradients(model, losses, x, max_norm=0.5, mode="grad_materialize")
    storage = learn(model, losses, x).storage
    kept = {key: value.data_ptr() for key, value in storage._free.items()}
    assert kept
    clipped_gradients(model, losses, x, max_norm=0.5, mode="grad_materialize")
    assert {key: value.data_ptr() for key, value in storage._free.items()} == kept


def test_storage_lends_a_tensor_once():
    storage, cpu = Storage(), torch.device("cpu")
    first = storage.lend("w", (2, 3), torch.float32, cpu)
    second = storage.lend("w", (2, 3), torch.float32, cpu)
    assert first.data_ptr() != second.data_ptr()
    storage.give_back("w", first)
    again = storage.lend("w", (3, 2), torch.float32, cpu)
    assert again.data_ptr() == first.data_ptr()
    assert again.shape == (3, 2)
    storage.give_back("w", again)
    storage.lend("w", (4, 3), torch.float32, cpu)  # another batch size: the old memory goes
    assert not storage._free


def test_sums_that_kernels_take_as_two_numbers():
    """A float64 sum is handed out in float32, and nothing of it is lost."""
    records = {"w": Product(batch(4), batch(4) * 0.3, False, (6, 6))}
    layers = [describe(name, [record]) for name, record in records.items()]
    coefficients = {"w": torch.tensor([1.0, 0.5, 0.25, 0.1], dtype=torch.float64)}
    clippings = [Clipping(plan_clipping(layers, mode="ghost_bk"), 4) for _ in range(2)]
    for each in clippings:
        each.take("w", records["w"])
        each.norms()
    ((_, expected),) = clippings[0].clipped_sums(coefficients)
    values, weights = clippings[1].shares(coefficients)["w"]
    assert (expected.dtype, values.dtype, len(values)) == (torch.float64, torch.float32, 2)
    found = torch.einsum("n,n...->...", weights, values.double())
    torch.testing.assert_close(found, expected, rtol=2**-46, atol=0.0)
