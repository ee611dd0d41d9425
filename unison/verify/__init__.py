"""Checks of claims: whether runs hold the same bits, where they part, whether a model is pure."""

from unison.verify.cases import SHARDINGS, Case, Subject, imported
from unison.verify.claims import DEPTHS, Claim, Verdict, claims, try_claims
from unison.verify.ladder import Comparison, Difference, compare
from unison.verify.page import page
from unison.verify.purity import Purity, purity
from unison.verify.quantities import RUNGS, Quantity, Trace
from unison.verify.runs import RunComparison, compare_runs
from unison.verify.trace import Tracer, trace
