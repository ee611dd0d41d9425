"""A part of a tensor has the bits that the whole has there, and costs no more than a part."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import assert_same_bits
from tests.shard.deferred.cases import CASES, SEED, Copied, Distributions, Scaled, Sliced
from unison.shard import materialize, meta_init
from unison.shard.deferred import tape
from unison.shard.deferred.recorder import recipe_of
from unison.shard.deferred.tape import (
    Operand,
    Streams,
    evaluate,
    fill_part_,
    number_draws,
    part_of,
)


def recorded(case) -> tuple[dict[str, Operand], Streams]:
    with meta_init():
        module = case()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    operands = {name: recipe_of(tensor).operand for name, tensor in tensors.items()}
    return operands, number_draws(SEED, operands.items())


@pytest.mark.parametrize("chunk", [67, 1 << 18])
@pytest.mark.parametrize("case", CASES)
def test_parts_are_those_of_the_whole(case, chunk, monkeypatch):
    monkeypatch.setattr(tape, "CHUNK", chunk)
    operands, streams = recorded(case)
    for name, operand in operands.items():
        whole = evaluate(operand, streams).reshape(-1)
        length = whole.numel()
        for start, stop in [
            (0, length),
            (0, length // 3),
            (length // 3, length - 1),
            (length, length),
        ]:
            stop = max(start, stop)
            part = torch.empty(stop - start, dtype=whole.dtype)
            fill_part_(part, operand, start, streams)
            assert_same_bits({name: part}, {name: whole[start:stop]})


LOCAL = [
    (Scaled, ["a", "b", "c", "d"]),
    (Sliced, ["w"]),
    (Copied, ["a", "b", "joint"]),
    (Distributions, ["bernoulli", "like", "normal", "order", "integers", "bytes"]),
]


@pytest.mark.parametrize(("case", "names"), LOCAL)
def test_what_works_element_by_element_is_made_in_parts(case, names):
    operands, streams = recorded(case)
    for name in names:
        operand = operands[name]
        assert part_of(operand.op, operand.dtype, streams) is not None, name


def transcendental() -> Tensor:
    return torch.rand(40).erfinv_()


def product_of_tensors() -> Tensor:
    return torch.randn(40) * torch.arange(40.0)


def fused() -> Tensor:
    return torch.randn(40).add_(1.0, alpha=0.3)


def many_writes() -> Tensor:
    x = torch.zeros(3000)
    for i in range(0, 3000, 2):
        x[i] = i
    return x


@pytest.mark.parametrize("make", [transcendental, product_of_tensors, fused, many_writes])
def test_what_does_not_is_made_whole(make):
    operands, streams = recorded(lambda: nn.ParameterDict({"w": nn.Parameter(make())}))
    operand = operands["w"]
    assert part_of(operand.op, operand.dtype, streams) is None
    assert evaluate(operand, streams).isfinite().all()


@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=4),
    cuts=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(1, 3)), max_size=4),
    order=st.randoms(use_true_random=False),
    low=st.integers(0, 200),
    length=st.integers(0, 200),
)
def test_a_range_of_a_storage_knows_its_elements(shape, cuts, order, low, length):
    """Against a table of which element of a tensor, if any, lies at each place of the storage."""
    storage = torch.full((torch.Size(shape).numel() + 3,), -1)
    view = storage[2:-1].view(shape)
    for dim, (start, size, step) in enumerate(cuts[: len(shape)]):
        view = view.transpose(0, dim)[start : start + size : step].transpose(0, dim)
    if order.random() < 0.3 and view.dim() > 1:
        view = view.transpose(0, -1)
    view.copy_(torch.arange(view.numel()).view(view.shape))
    operand = Operand.of(view)
    if not operand.is_ordered:
        assert not view.is_contiguous()
        return
    high = min(low + length, storage.numel())
    low = min(low, high)
    first, last, where = operand.overlap(low, high)
    found = torch.full((high - low,), -1)
    found[where] = torch.arange(first, last)
    assert found.tolist() == storage[low:high].tolist()


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else [result]:
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_a_part_needs_no_memory_for_the_whole(monkeypatch):
    monkeypatch.setattr(tape, "CHUNK", 500)

    def large() -> nn.Module:
        module = nn.Module()
        module.w = nn.Parameter(torch.randn(1000, 1000) * 0.02)
        module.w.data[7].fill_(0)
        module.w.data[:, 3:9].zero_()
        return module

    operands, streams = recorded(large)
    part = torch.empty(2000)
    with LargestTensor() as largest:
        fill_part_(part, operands["w"], 6500, streams)
    assert largest.numel <= 1 << 16  # what the generator works with at a time
    assert (part[500:1500] == 0).all()
    assert (part[:500] != 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gets_the_bits_of_the_cpu(case):
    with meta_init():
        first, second = case(), case()
    on_cpu, on_gpu = materialize(first, seed=SEED), materialize(second, seed=SEED, device="cuda")
    found = {**dict(on_gpu.named_parameters()), **dict(on_gpu.named_buffers())}
    assert all(tensor.is_cuda for tensor in found.values())
    for name, value in {**dict(on_cpu.named_parameters()), **dict(on_cpu.named_buffers())}.items():
        assert_same_bits(found[name].detach().cpu(), value.detach())
