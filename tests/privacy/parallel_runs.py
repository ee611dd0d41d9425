"""Runs of cut modules, and what the oracle says of them."""

import functools
from typing import Any

import torch
from torch import Tensor

from tests.harness import World, oracle
from tests.privacy.parallel import (
    EXPECTED_BATCH_SIZE,
    Model,
    losses,
    private_run,
    records,
)


def run(world: World, case: dict) -> dict:
    return private_run(world, **case)


@functools.cache
def alone(**case: Any) -> dict:
    return private_run(None, **case)


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error of a parameter, relative to the whole."""
    scale = sum(float(each.double().square().sum()) for each in expected.values()) ** 0.5
    errors = [float((found[name].double() - expected[name].double()).norm()) for name in expected]
    return max(errors) / scale


@functools.cache
def oracle_norms(kind: str) -> Tensor:
    """Of all records."""
    return oracle.per_sample_norms(Model(kind), losses, records())


def without_noise(kind: str) -> dict[str, Any]:
    """A step whose result the oracle knows, in which half of all records are clipped."""
    clip_norm = float(oracle_norms(kind).median())
    return {"kind": kind, "steps": 1, "noise_multiplier": 0.0, "max_grad_norm": clip_norm}


def check_oracle(found: dict, case: dict) -> None:
    """Norms, coefficients and sums of the first step, without noise."""
    clip_norm, ids = case["max_grad_norm"], found["records"][0]
    norms = oracle_norms(case["kind"])[ids]
    assert norms.min() < clip_norm < norms.max()
    assert torch.allclose(found["norms"][0], norms, rtol=1e-6, atol=0.0)
    sums = oracle.clipped_sum(Model(case["kind"]), losses, records()[ids], clip_norm)
    gradients = {n: g * EXPECTED_BATCH_SIZE for n, g in found["gradients"][0].items()}
    assert relative(gradients, sums) < 1e-6
