"""The whole state of a model: out of shards, and into them."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from tests.harness import RanksFailed, World, ranks, run_on_ranks
from tests.shard.common import DECODER, GPT2, shard
from tests.shard.state.common import make_zoo, sharded_zoo
from unison.errors import BadInput, UnsupportedOperation
from unison.models import build, load, save
from unison.shard import (
    digest,
    full_parameters,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    open_weights,
)
from unison.shard.sharded_tensor import local_part


def assert_same(found: dict, expected: dict) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("how", ["auto", "root"])
@ranks(1, 2, 3)
def test_state_of_shards_is_that_of_the_plain_model(world, how):
    expected = make_zoo().state_dict()
    found = full_state_dict(sharded_zoo(how=how))
    assert_same(found, expected)
    assert found["head.weight"] is found["embed.weight"]
    plain = make_zoo(seed=1)
    plain.load_state_dict(found)
    assert_same(plain.state_dict(), expected)


@ranks(1, 3)
def test_copies_are_copies_cast_and_rank_0_only(world):
    model = sharded_zoo()
    before = digest(model)
    only = full_state_dict(model, rank0_only=True, dtype=torch.float64)
    assert bool(only) == (world.rank == 0)
    if only:
        dtypes = {name: value.dtype for name, value in only.items()}
        assert dtypes.pop("norm.num_batches_tracked") is dtypes.pop("kept") is torch.int64
        assert set(dtypes.values()) == {torch.float64}
    for value in full_state_dict(model).values():
        value.zero_()
    assert digest(model) == before


@pytest.mark.parametrize("holders", ["all", "rank 0"])
@ranks(1, 2, 3)
def test_shards_take_a_plain_state(world, holders):
    source = make_zoo(seed=7)
    source.norm.num_batches_tracked.add_(3)
    model = sharded_zoo(seed=world.rank)
    state = source.state_dict() if holders == "all" or world.rank == 0 else None
    report = load_full_state_dict(model, state)
    assert report == ([], [])
    assert digest(model) == digest(source)
    assert_same(full_state_dict(model), source.state_dict())
    assert model.norm.num_batches_tracked == 3


@ranks(2)
def test_a_loaded_model_computes_with_the_new_values(world):
    ids = torch.arange(10).view(2, 5)
    model, other = sharded_zoo().eval(), make_zoo(seed=3).eval()
    with torch.no_grad():
        model(ids)
        load_full_state_dict(model, other.state_dict())
        assert torch.equal(model(ids), other(ids))


class Counting(Mapping):
    """A mapping that loads what is asked for, and counts."""

    def __init__(self, state):
        self.state, self.read = state, []

    def __iter__(self):
        return iter(self.state)

    def __len__(self):
        return len(self.state)

    def __getitem__(self, name):
        value = self.state[name]
        self.read.append(name)
        return value


@ranks(2, 3)
def test_names_of_ties_buffers_and_wrappers(world):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self._checkpoint_wrapped_module = module

        def forward(self, *args):
            return self._checkpoint_wrapped_module(*args)

    model = make_zoo()
    model.layers[0] = Wrapper(model.layers[0])
    shard(model, "auto")
    assert_same(full_state_dict(model), make_zoo().state_dict())
    load_full_state_dict(model, make_zoo(seed=2).state_dict())
    assert digest(model) == digest(make_zoo(seed=2))


def fault(world: World, change, holders="all", strict=True) -> str:
    state = make_zoo(seed=1).state_dict()
    change(state)
    model = sharded_zoo()
    before = digest(model)
    state = state if holders == "all" or world.rank == 0 else {}
    with pytest.raises(BadInput) as caught:
        load_full_state_dict(model, state, strict=strict)
    assert digest(model) == before
    return str(caught.value)


def forget(state):
    del state["scale"], state["layers.1.up.weight"]


def add(state):
    state["layers.9.up.weight"] = torch.zeros(3)


def bend(state):
    state["low.weight"] = torch.zeros(12, 13)


def tear(state):
    state["head.weight"] = state["embed.weight"] + 1


FAULTS = {
    "missing": (forget, r"missing \['scale', 'layers.1.up.weight'\]"),
    "unexpected": (add, r"unexpected \['layers.9.up.weight'\]"),
    "shape": (bend, r"'low.weight' has the shape \[12, 13\] instead of \[12, 12\]"),
}


@pytest.mark.parametrize("holders", ["all", "rank 0"])
@pytest.mark.parametrize("case", FAULTS)
def test_misfits_are_named_on_every_rank(case, holders):
    change, message = FAULTS[case]
    found = run_on_ranks(2, fault, change, holders)
    assert found[0] == found[1]
    with pytest.raises(BadInput, match=message):
        raise BadInput(found[0])


def fault_of_ties(world: World) -> None:
    state = make_zoo().state_dict()
    tear(state)
    load_full_state_dict(sharded_zoo(), state if world.rank == 0 else None)


def test_ties_that_differ_are_refused():
    with pytest.raises(RanksFailed, match=r"'embed\.weight' and 'head\.weight' are tied"):
        run_on_ranks(2, fault_of_ties)


@ranks(2)
def test_not_strict_reports_and_leaves_the_rest(world):
    state = make_zoo(seed=1).state_dict()
    forget(state)
    add(state)
    model = sharded_zoo()
    report = load_full_state_dict(model, state if world.rank == 0 else None, strict=False)
    assert report.missing == ["scale", "layers.1.up.weight"]
    assert report.unexpected == ["layers.9.up.weight"]
    found, old, new = full_state_dict(model), make_zoo().state_dict(), make_zoo(seed=1).state_dict()
    for name in found:
        expected = old if name in report.missing else new
        assert torch.equal(found[name], expected[name]), name


@ranks(3)
def test_state_on_some_ranks_is_refused(world):
    state = make_zoo().state_dict() if world.rank < 2 else None
    with pytest.raises(BadInput, match=r"on rank 0 or on every rank, found it on \[0, 1\]"):
        load_full_state_dict(sharded_zoo(), state)


class Broken(Counting):
    def __getitem__(self, name):
        if name == "low.weight":
            raise OSError("no such device")
        return super().__getitem__(name)


@pytest.mark.parametrize("holders", ["all", "rank 0"])
@ranks(2)
def test_a_read_error_of_one_rank_is_one_of_all(world, holders):
    state = make_zoo().state_dict()
    state = Broken(state) if world.rank == 0 else Counting(state)
    with pytest.raises(OSError, match="no such device"):
        load_full_state_dict(sharded_zoo(), state if holders == "all" or world.rank == 0 else None)


@ranks(3)
def test_a_rank_reads_what_it_keeps(world):
    model = shard(build(DECODER), "auto")
    state = Counting(build(DECODER, seed=5).state_dict())
    load_full_state_dict(model, state)
    kept = {name for name, piece in model.named_parameters() if local_part(piece).numel()}
    assert set(state.read) == kept
    assert kept < set(state.keys())
    assert digest(model) == digest(build(DECODER, seed=5))


@pytest.mark.parametrize("config", [GPT2, DECODER], ids=["tied", "untied"])
@ranks(1, 2)
def test_model_files_go_both_ways(world, tmp_path, config):
    model = shard(build(config, seed=4), "auto")
    parameters = dict(full_parameters(model))
    if world.rank == 0:
        save(config, parameters, tmp_path)
    world.barrier()
    assert digest(load(tmp_path)) == digest(model)
    other = shard(build(config, seed=5), "root")
    with open_weights(tmp_path / "model.safetensors") as weights:
        load_full_state_dict(other, weights if world.rank == 0 else None)
    assert digest(other) == digest(model)


def test_weights_that_are_no_file_are_refused(tmp_path):
    with pytest.raises(BadInput, match="found none"), open_weights(tmp_path / "a"):
        pass
    (tmp_path / "a").write_bytes(b"not one")
    with pytest.raises(BadInput, match="not a whole file"), open_weights(tmp_path / "a"):
        pass


def test_what_has_no_values_or_no_tensors_is_refused():
    with torch.device("meta"):
        without_memory = nn.Linear(2, 2)
    with pytest.raises(BadInput, match="'weight' is on the meta device"):
        full_state_dict(without_memory)

    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(UnsupportedOperation, match="keeps extra state"):
        full_state_dict(nn.Sequential(Extra(2, 2)))


def test_one_process_without_a_group():
    model = fully_shard(make_zoo())
    assert_same(full_state_dict(model), make_zoo().state_dict())
    load_full_state_dict(model, make_zoo(seed=1).state_dict())
    assert digest(model) == digest(make_zoo(seed=1))
    plain = nn.Conv2d(3, 4, 2)
    plain.weight.data = plain.weight.data.to(memory_format=torch.channels_last)
    other = nn.Conv2d(3, 4, 2)
    load_full_state_dict(plain, other.state_dict())
    assert_same(full_state_dict(plain), other.state_dict())
