"""Compiled private training on ranks: the oracle's result, and in granules the same bits."""

import functools
import warnings
from dataclasses import replace
from operator import attrgetter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.harness import World, run_on_ranks
from tests.privacy.common import attach
from tests.privacy.sharded import CONFIG, losses, oracle_run, private_run, relative, shard
from tests.privacy.sharded import rows as all_rows
from tests.privacy.test_compiled import passes_of
from unison.errors import BadInput
from unison.models import build
from unison.shard.flat_group import FlatGroup, MixedPrecision
from unison.shard.unit import units_of

STEPS: dict[str, Any] = {"rate": 0.06, "steps": 6}  # two of them empty, most ranks without samples
ALL = ("losses", "norms", "digest")


def run(world: World, case: dict[str, Any]) -> dict[str, Any]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's compiler
        warnings.filterwarnings("error", message=".*compiled")
        return private_run(world, **{**STEPS, **case})


@functools.cache
def oracle() -> dict[str, Any]:
    return oracle_run(**STEPS)


def check_bits(
    sizes: dict[int, str], case: dict[str, Any], what: tuple[str, ...] = ALL
) -> dict[str, Any]:
    """One result at every number of ranks, each with its sharding; return it."""
    alone = run_on_ranks(1, run, {"how": "none", **case})[0]
    for size, how in sizes.items():
        for found in run_on_ranks(size, run, {"how": how, **case}):
            for each in what:
                assert found[each] == alone[each], (size, how, each)
    return alone


@pytest.mark.full
@pytest.mark.parametrize(("size", "how"), [(2, "zero3"), (3, "zero2"), (2, "ddp")])
def test_steps_are_those_of_the_oracle(size, how):
    found = run_on_ranks(size, run, {"how": how, "compile": {"backend": "aot_eager"}})[0]
    assert found["sizes"] == oracle()["sizes"]
    assert relative(found, oracle()) <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_digest_at_1_2_and_3_ranks(backend):
    check_bits({1: "zero3", 2: "zero3", 3: "root"}, {"granule": 2, "compile": {"backend": backend}})


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_dropout_and_accumulation(backend):
    """Masks belong to samples, in compiled blocks as in the eager parts around them."""
    case = {
        "granule": 2,
        "physical": 2,
        "config": replace(CONFIG, dropout=0.3),
        "compile": {"backend": backend},
        "steps": 3,
    }
    found = check_bits({2: "zero3"}, case, ("norms", "digest"))
    expected = run_on_ranks(1, run, {"how": "none", **case, "compile": False})[0]
    assert relative(found, expected) <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("physical", [None, 2])
@pytest.mark.parametrize("granule", [None, 2])
def test_the_whole_cross(backend, dropout, physical, granule):
    """Sharded at 1 and 2 ranks: one digest in granules, and the eager run's result."""
    case = {
        "granule": granule,
        "physical": physical,
        "config": replace(CONFIG, dropout=dropout),
        "compile": {"backend": backend},
        "steps": 3,
    }
    if granule is not None:
        found = [check_bits({1: "zero3", 2: "zero3"}, case, ("norms", "digest"))]
    else:
        found = [run_on_ranks(size, run, {"how": "zero3", **case})[0] for size in (1, 2)]
    if granule is None and dropout:
        return  # masks are the compiler's own: that it trains is all there is to see
    expected = run_on_ranks(1, run, {"how": "none", **case, "compile": False})[0]
    for each in found:
        assert relative(each, expected) <= 1e-5


# ---- ranks that differ ---------------------------------------------------------------------------


def lone_run(world: World, how: str, compile: Any) -> tuple[int, str, int]:  # noqa: A002
    """Steps until one rank alone has shorter rows, what was said of it, and steps in the ledger."""
    torch._dynamo.reset()
    model = shard(build(CONFIG, seed=3), how, world, "fast")
    engine, module, optimizer, loader = attach(
        model,
        data_loader=DataLoader(TensorDataset(all_rows()), batch_size=4, shuffle=True),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        poisson_sampling=False,
        compile=compile,
    )
    num_steps, said = 0, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for (ids,) in loader:
                own = ids[:, :7] if num_steps == 2 and world.rank == 1 else ids
                optimizer.zero_grad()
                losses(module, own).mean().backward()
                optimizer.step()
                num_steps += 1
        except BadInput as error:
            said = str(error)
    return num_steps, said, engine.ledger.num_intents


@pytest.mark.full
@pytest.mark.parametrize("compile", [False, {"backend": "aot_eager"}])
def test_a_rank_that_alone_has_other_shapes(compile):  # noqa: A002
    """Where passes are collectives every rank says so, before anything is spent; else it is right.

    The rank would learn of the new shape by passes of its own, and the others would wait.
    """
    for num_steps, said, num_intents in run_on_ranks(2, lone_run, "zero3", compile):
        assert "different shapes in one pass" in said
        assert num_steps == num_intents == 2
    for num_steps, said, _ in run_on_ranks(2, lone_run, "ddp", compile):
        assert (num_steps, said) == (6, "")


# ---- memory --------------------------------------------------------------------------------------

# Weights are most of it; fewer than numba is asked to draw, which compiles for a minute at first.
WIDE = replace(CONFIG, d_model=48, d_ff=192, num_layers=2)


def kept_by(loss: Tensor) -> dict[int, int]:
    """Bytes of the memory that the graph of a loss holds on to, by its address.

    Memory of parameters that are not gathered at the moment has none.
    """
    found: dict[int, int] = {}
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [each for each, _ in node.next_functions]
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        saved += [*getattr(node, "saved_tensors", ()), *getattr(node, "_tensors_no_vc_check", ())]
        for each in saved:
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return found


def memory_run(world: World, compile: Any, precision: str) -> dict[str, Any]:  # noqa: A002
    """Bytes that a step keeps from forward to backward, and the most that it has gathered."""
    torch._dynamo.reset()
    policy = MixedPrecision(param=torch.bfloat16 if precision == "policy" else None)
    model = unison.auto_shard(build(WIDE, seed=3), gradient_divisor=1, mp_policy=policy)
    size = 2 * world.size  # of one row per rank the checks learn nothing, and run in every step
    ids = torch.arange(3 * size)[:, None] + torch.arange(4)
    engine, module, optimizer, loader = attach(
        model,
        data_loader=DataLoader(TensorDataset(ids), batch_size=size, shuffle=True),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        poisson_sampling=False,
        recheck=False,
        compile=compile,
    )
    units = units_of(model)
    groups = [group for unit in units for group in unit.groups]
    blocks = [group for unit in units[1:] for group in unit.groups]
    found: dict[str, Any] = {"peak": 0, "num_gathers": 0, "blocks": sum(map(full_bytes, blocks))}

    def gathered(of: list[FlatGroup]) -> int:
        return sum(each.full.untyped_storage().nbytes() for each in of)

    def start_gather(group: FlatGroup, start: Any = FlatGroup.start_gather) -> None:
        found["num_gathers"] += group.phase == "sharded"
        start(group)
        found["peak"] = max(found["peak"], gathered(groups))

    for step, (rows,) in enumerate(loader):
        with (
            warnings.catch_warnings(),
            mock.patch.object(FlatGroup, "start_gather", start_gather if step else gather_as_ever),
        ):
            warnings.simplefilter("ignore")
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                loss = losses(module, rows).mean()
            own = {each.full.untyped_storage()._cdata for each in groups}
            kept = kept_by(loss).items()
            found["kept"] = sum(size for place, size in kept if place not in own)
            found["gathered"] = gathered(blocks)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["after"] = gathered(groups)
    if compile:
        assert all(each.refusal is None for each in passes_of(engine).forwards)
        assert passes_of(engine).num_graphs == 1
    engine.detach()
    return found


gather_as_ever = FlatGroup.start_gather
full_bytes = attrgetter("full_bytes")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "precision",
    ["float32", *(pytest.param(x, marks=pytest.mark.full) for x in ("policy", "autocast"))],
)
def test_compiled_units_keep_nothing_of_what_they_gather(backend, precision):
    """AOTAutograd saves weights for the backward pass: as views of memory that is freed."""
    expected = run_on_ranks(2, memory_run, False, precision)[0]
    found = run_on_ranks(2, memory_run, {"backend": backend}, precision)[0]
    assert found["gathered"] == found["after"] == 0
    assert found["peak"] == expected["peak"]
    # In both steps every block twice, and the root, which stays.
    assert found["num_gathers"] == expected["num_gathers"] == 2 * (2 * WIDE.num_layers + 1)
    assert found["kept"] <= 1.05 * expected["kept"]
    if precision != "autocast":  # whose casts of weights are kept, eager or compiled
        assert found["kept"] < 0.2 * found["blocks"]
