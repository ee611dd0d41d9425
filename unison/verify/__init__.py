"""Checks of claims: whether two runs hold the same bits, and whether a model's pass is pure."""

from unison.verify.purity import Purity, purity
from unison.verify.runs import RunComparison, RunFolder, compare_runs

__all__ = ["Purity", "RunComparison", "RunFolder", "compare_runs", "purity"]
