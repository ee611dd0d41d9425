"""Compiled private training on ranks: the oracle's result, and in granules the same bits."""

import functools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness import World, run_on_ranks
from tests.privacy.sharded import CONFIG, oracle_run, private_run, relative

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
