"""The whole state of an optimizer: by name, out of shards and into them."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.harness import World, ranks, run_on_ranks
from tests.shard.state.common import (
    adamw,
    groups_of,
    make_zoo,
    same_state,
    sharded_zoo,
    take_steps,
)
from unison.errors import BadInput, UnsupportedOperation
from unison.shard import (
    digest,
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)


def sgd(model):
    return torch.optim.SGD(groups_of(model), lr=0.01, momentum=0.9)


def plain_sgd(model):
    return torch.optim.SGD(groups_of(model), lr=0.01)


def nadam(model):
    return torch.optim.NAdam(groups_of(model), lr=0.01)


def adagrad(model):
    return torch.optim.Adagrad(groups_of(model), lr=0.01)


def one_by_one(model):
    return adamw(model, foreach=False)


def fused(model):
    return adamw(model, fused=True)


def amsgrad(model):
    return adamw(model, amsgrad=True)


OPTIMIZERS = [adamw, fused, amsgrad, sgd, nadam]
OPTIMIZERS += [
    pytest.param(make, marks=pytest.mark.full) for make in (one_by_one, plain_sgd, adagrad)
]


def train(world: World, make, rank0_only: bool = False):
    """Three steps; returns the whole state and the digest after two more."""
    model = sharded_zoo()
    optimizer = make(model)
    take_steps(model, optimizer, 3)
    state = full_optimizer_state_dict(model, optimizer, rank0_only=rank0_only)
    parameters = full_state_dict(model, rank0_only=rank0_only)
    take_steps(model, optimizer, 2, first=3)
    return state, parameters, digest(model)


def resume(world: World, make, state, parameters, holders: str = "all") -> str:
    model = sharded_zoo(seed=9, how="root")
    optimizer = make(model)
    is_given = holders == "all" or world.rank == 0
    load_full_state_dict(model, parameters if is_given else None)
    load_full_optimizer_state_dict(model, optimizer, state if is_given else None)
    take_steps(model, optimizer, 2, first=3)
    return digest(model)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_training_goes_on_from_a_whole_state(make):
    runs = run_on_ranks(2, train, make)
    state, parameters, expected = runs[0]
    assert same_state(state, runs[1][0])
    assert run_on_ranks(2, resume, make, state, parameters, "rank 0") == [expected] * 2
    alone = run_on_ranks(1, train, make)[0]
    assert alone[0]["state"].keys() == state["state"].keys()
    assert run_on_ranks(1, resume, make, *alone[:2])[0] == alone[2]


@ranks(1, 2, 3)
def test_state_has_the_parameters_shapes_and_torchs_own_layout(world):
    model = sharded_zoo()
    optimizer = adamw(model)
    take_steps(model, optimizer, 1)
    found = full_optimizer_state_dict(model, optimizer)
    plain = make_zoo()
    reference = adamw(plain)
    take_steps(plain, reference, 1)
    expected: dict = get_optimizer_state_dict(plain, reference)
    # torch makes up empty state for what never had a gradient; we keep none.
    for name in ("unused", "empty"):
        assert name not in found["state"]
        expected["state"].pop(name, None)
    assert found["state"].keys() == expected["state"].keys()
    for name, values in expected["state"].items():
        assert {key: value.shape for key, value in found["state"][name].items()} == {
            key: value.shape for key, value in values.items()
        }
    assert [group["params"] for group in found["param_groups"]] == [
        group["params"] for group in expected["param_groups"]
    ]


@pytest.mark.parametrize("make", [adamw, nadam])
def test_plain_optimizer_goes_both_ways(make):
    plain = make_zoo()
    optimizer = make(plain)
    take_steps(plain, optimizer, 2)
    state = full_optimizer_state_dict(plain, optimizer)
    assert state["state"]["scale"]["exp_avg"].shape == state["state"]["scale"]["step"].shape == ()
    sharded = sharded_zoo(seed=3)
    other = make(sharded)
    load_full_optimizer_state_dict(sharded, other, state)
    assert same_state(full_optimizer_state_dict(sharded, other), state)
    again = make(plain)
    load_full_optimizer_state_dict(plain, again, state)
    assert same_state(full_optimizer_state_dict(plain, again), state)


@ranks(2)
def test_rank_0_only_and_no_steps_yet(world):
    model = sharded_zoo()
    optimizer = adamw(model)
    state = full_optimizer_state_dict(model, optimizer, rank0_only=True)
    if world.rank == 0:
        assert state["state"] == {}
        assert len(state["param_groups"]) == 2
    else:
        assert state == {}
    take_steps(model, optimizer, 1)
    load_full_optimizer_state_dict(model, optimizer, state or None)
    assert not optimizer.state  # what there was is gone, as it was not in the state


@ranks(2)
def test_groups_go_by_name(world):
    model = sharded_zoo()
    optimizer = adamw(model)
    take_steps(model, optimizer, 2)
    state = full_optimizer_state_dict(model, optimizer)
    second, first = groups_of(model)
    second["params"].reverse()
    other = torch.optim.AdamW(
        [first, {"params": second["params"][:4]}, {"params": second["params"][4:]}],
        lr=torch.tensor(0.5),
        betas=(0.5, 0.5),
        foreach=False,
    )
    load_full_optimizer_state_dict(model, other, state)
    assert [float(group["lr"]) for group in other.param_groups] == pytest.approx([0.02, 0.01, 0.01])
    assert isinstance(other.param_groups[1]["lr"], torch.Tensor)
    assert all(group["betas"] == (0.9, 0.999) for group in other.param_groups)
    assert all(group["foreach"] is False for group in other.param_groups)
    found = full_optimizer_state_dict(model, other)
    assert same_state({**found, "param_groups": 0}, {**state, "param_groups": 0})


@ranks(2)
def test_steps_do_not_write_into_the_state_given(world):
    model = sharded_zoo()
    optimizer = adamw(model)
    take_steps(model, optimizer, 1)
    state = full_optimizer_state_dict(model, optimizer)
    kept = copy.deepcopy(state)
    load_full_optimizer_state_dict(model, optimizer, state)
    take_steps(model, optimizer, 2, first=1)
    assert same_state(state, kept)


@ranks(2)
def test_groups_that_cannot_be_joined_are_refused(world):
    model = sharded_zoo()
    state = full_optimizer_state_dict(model, adamw(model))
    joined = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(BadInput, match=r"saved with (lr|weight_decay) .*; group them apart"):
        load_full_optimizer_state_dict(model, joined, state if world.rank == 0 else None)
    other = torch.optim.AdamW(groups_of(model)[:1])
    with pytest.raises(BadInput, match=r"only in the optimizer \[\], only in the state \['embed"):
        load_full_optimizer_state_dict(model, other, state)
    with pytest.raises(BadInput, match="expected 'state' and 'param_groups'"):
        load_full_optimizer_state_dict(model, other, {"state": {}})


@ranks(2)
def test_parameters_of_another_module_are_refused(world):
    model = sharded_zoo()
    optimizer = adamw(make_zoo())
    with pytest.raises(BadInput, match="make the optimizer after sharding"):
        full_optimizer_state_dict(model, optimizer)


@ranks(2)
def test_state_that_differs_between_ranks_is_found(world):
    model = sharded_zoo()
    optimizer = adamw(model)
    take_steps(model, optimizer, 1)
    if world.rank == 1:
        del optimizer.state[model.get_parameter("layers.0.up.weight")]
    with pytest.raises(BadInput, match=r"layers.0.up.weight: .* absent"):
        full_optimizer_state_dict(model, optimizer)


def test_what_is_not_elementwise_is_refused():
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(UnsupportedOperation, match="only elementwise optimizers can be saved"):
        full_optimizer_state_dict(model, optimizer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["history"] = [1, 2]
    with pytest.raises(UnsupportedOperation, match="'history' of 'weight' is of type list"):
        full_optimizer_state_dict(model, optimizer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(UnsupportedOperation, match="hyperparameter 'hook'"):
        full_optimizer_state_dict(model, optimizer)


@ranks(1, 2)
def test_state_in_another_dtype_keeps_it(world):
    model = sharded_zoo()
    optimizer = adamw(model)
    take_steps(model, optimizer, 1)
    for values in optimizer.state.values():
        values["exp_avg"] = values["exp_avg"].double() + 1e-12
    state = full_optimizer_state_dict(model, optimizer)
    other = adamw(model)
    load_full_optimizer_state_dict(model, other, state)
    assert same_state(full_optimizer_state_dict(model, other), state)
