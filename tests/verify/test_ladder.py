"""Traces of runs on any number of ranks, and where two of them first part."""

import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.harness import World, run_on_ranks
from tests.verify.faults import ANY, FAULTS
from unison.verify import compare
from unison.verify.cases import run_case

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
        run_case(fault.case, subject, file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


def reference(folder: Path, name: str) -> Path:
    """The trace of a fault's run without it, on one rank; made once for all that share it."""
    fault = FAULTS[name]
    made = f"{fault.case}, {fault.subject.build}, {fault.step == 0}, {fault.reference}"
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
    assert first.values is not None, first
    assert first.values[0] != first.values[1]
