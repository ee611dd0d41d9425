"""Every adapter says what lies on which rank, and leaves the module as it was."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import unison
from tests.harness import World, ranks
from unison.errors import BadInput
from unison.parallel import (
    FSDP2,
    ParallelAdapter,
    TensorParallel,
    Units,
    adapter_class,
    adapter_of,
    write_gradients,
)
from unison.parallel.adapter import ShardedParam, in_buckets
from unison.shard.ranks import Ranks
from unison.shard.sharded_tensor import local_part

SHAPES = {"0.weight": (5, 3), "0.bias": (5,), "2.weight": (7, 5), "2.bias": (7,)}


def new_sums(granule: int, names: Any, before: Any) -> list[Tensor | None]:
    """Make sums that do not go on from those of the passes before."""
    found = [torch.full((5, 3), float(granule), dtype=torch.float64), None]
    return found[: len(names)]


def test_sums_of_several_passes_are_added():
    params = [nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(4))]
    named = [ShardedParam.whole(f"p{i}", each) for i, each in enumerate(params)]
    (group,) = in_buckets(named, Ranks(None))
    for granule in (1, 2, 4):
        group.take([granule], new_sums, torch.float64)
    totals = [total.tolist() for _, total in group.take_totals()]
    assert totals == [[7.0] * 15, [0.0] * 4]


def test_sums_of_a_pass_that_broke_off_are_added_to_no_others():
    """Some groups have them and some do not: only a new logical batch is sound."""
    adapter = adapter_of(nn.Linear(3, 5, bias=False))
    (group,) = adapter._sums
    later = partial(new_sums)
    pass_of = SimpleNamespace(closes_logical_batch=False)
    common: Any = pass_of, [1], torch.float64
    adapter.begin(new_sums, *common, is_complete=lambda names: True)
    adapter._add_complete(group)
    for add in (partial(adapter.begin, is_complete=lambda names: True), adapter.add):
        with pytest.raises(BadInput, match="an earlier backward pass of this logical batch broke"):
            add(later, *common)
    adapter.drop()
    adapter.begin(later, *common, is_complete=lambda names: False)
    adapter._add_complete(group)
    adapter.add(later, *common)
    adapter.add(new_sums, *common)
    assert [total.tolist() for _, total in adapter.totals()] == [[2.0] * 15]


def build(world: World, how: str) -> tuple[nn.Module, type]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7))
    match how:
        case "none":
            return model, ParallelAdapter
        case "ddp":
            return DistributedDataParallel(model), ParallelAdapter
        case "units":
            return unison.fully_shard(model), Units
        case "fsdp2":
            return fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (world.size,))), FSDP2  # type: ignore[return-value]
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as cut

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return cut(model, init_device_mesh("cpu", (world.size,)), plan), TensorParallel


@pytest.mark.parametrize("how", ["none", "ddp", "units", "fsdp2", "tensor"])
@ranks(2)
def test_what_lies_where(world, how):
    model, expected = build(world, how)
    assert adapter_class(model) is expected
    adapter = adapter_of(model)
    assert {each.name: each.shape for each in adapter.params} == SHAPES
    for each in adapter.params:
        whole = torch.arange(each.numel).view(each.shape)
        here = each.box
        own = whole[tuple(map(slice, here.start, here.stop))] if each.cut else whole.view(-1)
        own = own if each.cut else own[each.start : each.stop]
        assert own.numel() == local_part(each.parameter.detach()).numel() == each.stop - each.start
        assert each.is_part == (own.numel() < each.numel)
        # A gradient of these elements is what the optimizer would find there.
        each.parameter.grad = each.as_gradient(own.float().reshape(-1))
        assert each.parameter.grad.shape == each.parameter.shape
        assert type(each.parameter.grad) is not Tensor or not each.is_part
        assert torch.equal(each.gradient(), own.reshape(-1).float())
        if each.cut is None:  # the places of a copy hold every element once
            edges = [edge for places in each.ranges for edge in places]
            assert len(each.ranges) == adapter.num_places
            assert (edges[0], edges[-1]) == (0, each.numel)
            assert edges[1:-1:2] == edges[2::2]
    write_gradients((each, torch.ones(each.stop - each.start)) for each in adapter.params)
    assert all(each.gradient().eq(1).all() for each in adapter.params)


def held(model: nn.Module) -> dict[str, Any]:
    """What attaching might leave behind, in all modules."""
    return {name: dict(vars(each)) for name, each in model.named_modules()}


@pytest.mark.parametrize("how", ["none", "ddp", "units", "fsdp2", "tensor"])
@ranks(2)
def test_nothing_is_left_behind(world, how):
    model, _ = build(world, how)
    adapter = adapter_of(model, is_ordered=how in ("fsdp2", "tensor"))
    before = held(model)
    adapter.attach()
    assert how in ("none", "ddp", "tensor") or held(model) != before
    adapter.detach()
    assert held(model) == before
    with adapter.observing():
        pass
    assert held(model) == before


@pytest.mark.parametrize("how", ["none", "tensor"])
@ranks(2)
def test_copies_that_differ_are_refused(world, how):
    model, _ = build(world, how)
    with torch.no_grad():
        bias: Any = model.get_parameter("2.bias")  # replicated along the tensor axis
        local_part(bias).add_(world.rank)
    adapter = adapter_of(model)
    with pytest.raises(BadInput, match="hold different"):
        adapter.attach()
