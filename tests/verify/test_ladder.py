"""Traces of runs on any number of ranks, and where two of them first part."""

import itertools
import math
import zlib
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from tests.harness import World, run_on_ranks
from tests.privacy.parallel import Model, attach, cut, losses, mesh_for
from tests.verify.faults import ANY, FAULTS, replicas_counted_twice
from unison.shard import batch_mean
from unison.verify import cases, compare, trace

IN_EVERY_RUN = {  # the others are for `make test-full`
    "swapped rows",
    "a module that divides by the world size",
    "norms summed over the data axis",
    "a dropped rank",
    "a flipped bit",
}


def traced(world: World, file: Path, name: str, *, is_faulty: bool) -> None:
    """Train what a fault is planted in, with it or without, as long as it takes to show."""
    fault = FAULTS[name]
    subject = replace(fault.subject, steps=1 if fault.step == 0 else 2)
    with fault.plant() if is_faulty else fault.reference():
        cases.run_case(fault.case, subject, file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


def reference(folder: Path, name: str) -> Path:
    """The trace of a fault's run without it, on one rank; made once for all that share it."""
    fault = FAULTS[name]
    made = f"{fault.case}, {fault.subject}, {fault.step == 0}, {fault.reference}"
    file = folder / f"{zlib.crc32(made.encode())}.trace"
    if not file.exists():
        run_on_ranks(1, partial(traced, is_faulty=False), file, name)
    return file


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.full)
        for name in FAULTS
    ],
)
def test_a_planted_fault_is_found_and_named_at_its_rung(name, folder, tmp_path):
    fault = FAULTS[name]
    file = tmp_path / "b.trace"
    run_on_ranks(2, partial(traced, is_faulty=True), file, name, timeout=120)
    first = compare(reference(folder, name), file).first
    assert first is not None
    assert first.rung == fault.rung, first
    assert fault.cause in str(first.cause), first
    assert fault.step in (ANY, first.step), first
    assert fault.name in (None, first.name), first
    if first.distance < math.inf:  # or it is of another size
        assert first.values is not None, first
        assert first.values[0] != first.values[1]


def cut_in_two(world: World | None, file: Path, *, is_faulty: bool) -> None:
    """Train privately, cut along a tensor axis where there are ranks."""
    model: nn.Module = Model("attention")
    if world is not None:
        model = cut(model, mesh_for(world, world.size), "usual")
    engine, model, optimizer, loader = attach(model)
    plant = replicas_counted_twice() if is_faulty else nullcontext()
    with plant, trace(file, model, optimizer, activations=False) as tracer:
        for (ids,) in itertools.islice(loader, 1):
            tracer.loss(batch_mean(losses(model, ids))).backward()
            optimizer.step()
    engine.detach()


def test_replicas_along_a_tensor_axis_count_once(tmp_path):
    """A cut model rounds otherwise, so the two are compared to a tolerance."""
    cut_in_two(None, tmp_path / "whole", is_faulty=False)
    for is_faulty in (False, True):
        file = tmp_path / f"{is_faulty}"
        run_on_ranks(2, partial(cut_in_two, is_faulty=is_faulty), file)
        found = compare(tmp_path / "whole", file, tolerance=1e-4)
        if not is_faulty:
            assert found.is_equal, found.verdict
            continue
        assert found.first is not None
        assert found.first.rung == "per-sample norms"
        assert "replicated along a tensor axis" in str(found.first.cause)


def test_the_docs_list_the_faults():
    listed = (Path(__file__).parents[2] / "docs/verify.md").read_text()
    for name, fault in FAULTS.items():
        assert f"| {name} | {fault.rung} | “{fault.cause}” |" in listed
