"""`bench.kernels_gpu` on a CPU: what it checks, and what it makes of it."""

import json
import math
import sys

import pytest
import torch

from bench import kernel_checks, kernel_errors, kernels_gpu
from bench.kernel_errors import LIMITS, Outcome, Runs, Setting, norm_error, same_bits
from tests.kernels.interpreted import interpreted

SETTING = Setting("cpu", seed=4, repeats=2)


def outcome(**changes) -> Outcome:
    fields = {
        "kernel": "tile",
        "dtype": "float32",
        "shape": "3×4",
        "error": 1e-7,
        "relative_to": "norm",
        "limit": 2e-6,
        "is_same": True,
    }
    return Outcome(**(fields | changes))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.full) if family == "affine" else family
        for family in kernel_checks.FAMILIES
    ],
)
@interpreted
def test_kernels_keep_their_limits(family):
    outcomes = kernel_checks.FAMILIES[family](SETTING, torch.float32)
    assert outcomes
    assert [each for each in outcomes if not each.is_kept] == []


def test_an_error_or_other_bits_are_not_kept():
    assert outcome().is_kept
    assert not outcome(error=3e-6).is_kept
    assert not outcome(error=math.nan).is_kept
    assert not outcome(is_same=False).is_kept
    json.dumps(outcome(error=math.nan).figures(), allow_nan=False)


def test_runs_that_differ_are_seen():
    runs, numbers = Runs(SETTING, torch.float32), iter([1.0, 1.0 + 2**-23])
    _, is_same = runs.repeat(lambda: (torch.tensor([next(numbers)]),))
    assert not is_same
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))


def test_errors_are_relative():
    squares = torch.tensor([4.0, 100.0], dtype=torch.float64)
    assert norm_error(squares * 1.21, squares) == pytest.approx(0.1)
    mass = torch.tensor([20.0, 1000.0], dtype=torch.float64)
    assert norm_error(squares * 1.21, squares, mass) == pytest.approx(0.01)
    assert kernel_errors.relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == 0.1


def test_the_worst_of_each_kernel_is_reported():
    rows = kernels_gpu.summary(
        [outcome(), outcome(error=1e-6), outcome(kernel="gram", is_same=False)]
    )
    assert [row["largest_error"] for row in rows] == [1e-6, 1e-7]
    assert [row["is_same_in_all_runs"] for row in rows] == [True, False]
    rows = kernels_gpu.summary([outcome(error=math.nan), outcome()])
    assert rows[0]["largest_error"] == "nan"


def test_the_script_says_if_a_limit_is_not_kept(tmp_path, monkeypatch, capsys):
    arguments = ["bench", "--device", "cpu", "--repeats", "2", "--seed", "7"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--out", str(tmp_path)])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernels_gpu.main() == 0
    figures = json.loads((tmp_path / "kernels-cpu.json").read_text())["figures"]
    assert figures["is_kept"]
    assert figures["left_out"] == list(kernel_checks.NEED_TRITON)
    assert figures["seed"] == 7
    monkeypatch.setitem(LIMITS, torch.float32, 1e-12)
    assert kernels_gpu.main() == 1
    assert "not kept" in capsys.readouterr().err
