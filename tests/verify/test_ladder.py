"""Traces of runs on any number of ranks, and where two of them first part."""

import itertools
import math
import random
import re
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from tests.harness import World, run_on_ranks
from tests.privacy.parallel import Model, attach, cut, losses, mesh_for
from tests.verify.faults import (
    ANY,
    FAULTS,
    PRIVATE,
    SUBJECTS,
    flipped_bit,
    other_sigma,
    replicas_counted_twice,
    swapped_rows,
)
from unison.shard import batch_mean
from unison.verify import RUNGS, Case, Subject, Trace, cases, compare, trace

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


# ---- thirty faults at random places --------------------------------------------------------------


def steps_of(world: World, file: Path, case: Case, plant: Callable[[], Any]) -> None:
    """Train three steps with a fault in one of them."""
    with plant():
        cases.run_case(case, Subject(steps=3), file)


@pytest.mark.full
@pytest.mark.parametrize("number", range(30))
def test_a_fault_at_a_random_place_is_named(number, folder, tmp_path):
    """A flipped bit, a swapped row, a changed σ: the step, and the parameter or row."""
    rng, kind = random.Random(number), number % 3
    case = PRIVATE if kind == 2 else Case()
    one, other = folder / f"three-{case.training}", tmp_path / "b"
    if not one.exists():
        run_on_ranks(1, steps_of, one, case, nullcontext, timeout=120)
    step = rng.randrange(3)
    if kind == 0:
        sizes = {e.name: e.numel for e in Trace.open(one).entries.values() if e.rung == RUNGS[-1]}
        name = rng.choice(sorted(sizes))
        element, bit = rng.randrange(sizes[name]), rng.randrange(23)
        plant = partial(flipped_bit, step, name, element, bit)
    elif kind == 1:
        rows = sorted(rng.sample(range(6), 2))
        plant = partial(swapped_rows, step, *rows)
    else:
        factor = rng.choice([0.5, 0.9, 0.98, 1.02, 1.1, 2.0])
        plant = partial(other_sigma, step, factor)
    run_on_ranks(2, steps_of, other, case, plant, timeout=120)
    first = compare(one, other).first
    assert first is not None
    assert first.step == step
    if kind == 0:
        assert (first.rung, first.name) == ("updated parameters", name)
        found = next(e for e in Trace.open(one).entries.values() if e.name == name)
        if first.values is None:
            low, high = map(int, (re.findall(r"\d+", first.where) * 2)[:2])
            assert low <= element <= high < low + found.numel // 16 + 2
        else:
            index = list(map(int, np.unravel_index(element, found.shape)))
            assert first.where == f"element {index}"
            assert first.ulps is not None
    elif kind == 1:
        assert first.rung == "inputs"
        assert f"rows {rows[0]}, {rows[1]} are swapped" in str(first.cause)
    else:
        assert first.rung == "noise"
        told = re.search(r"σ is ([\d.]+) times", str(first.cause))
        assert told is not None, first
        assert abs(float(told[1]) / factor - 1) < 0.01


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


@pytest.mark.full
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


# ---- models of users -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "loss", "words"),
    [
        ("mlp", "squares", None),
        ("normalised", "squares", "cannot be trained on --granule 1 rows of .*ValueError"),
        ("mlp", "mean_square", r"must give one loss per row, found shape \[\] for 1 rows"),
        ("mlp", None, "the model's loss cannot be guessed"),
    ],
)
def test_a_model_is_tried_before_it_is_trained(build, loss, words):
    """On every rank, since some models ask for ranks."""
    loss = loss and f"{SUBJECTS}:{loss}"
    subject = Subject(build=f"{SUBJECTS}:{build}", data=f"{SUBJECTS}:rows", loss=loss, granule=1)
    found = subject.complaint()
    assert found is None if words is None else re.search(words, found or "")
