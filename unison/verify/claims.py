"""What unison promises, as claims that can be tried: the table of docs/design.md, section 2.

Each claim names a reference training and others that must come to the same: to the bit, or to a
tolerance. All of them run as real processes, those of one number of ranks in one launch; their
traces are then compared rung by rung.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from unison.clip import MODES
from unison.verify.cases import Case, Subject, run_cases
from unison.verify.ladder import Comparison, compare

DEPTHS = {"quick": (2,), "default": (2, 4), "full": (2, 3, 4, 8)}
"""The numbers of ranks that are tried beside one."""
ROUNDING = 1e-5  # how far two ways to compute one thing may be apart, as a part of it

Run = tuple[Case, int]
"""A case and its number of ranks."""
Launch = Callable[..., Any]
"""`launch(work, cases, num_ranks=n)` runs `work(cases)` on n new ranks, returns the first's result;
`unison.train.run_on_local_ranks`."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A promise.

    Attributes:
        name: It, in words.
        quantity: What is compared.
        reference: The training that the others must agree with.
        runs: The others.
        tolerance: How far they may be apart, as a part of what is compared; 0 for the same bits.
    """

    name: str
    quantity: str
    reference: Run
    runs: tuple[Run, ...]
    tolerance: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a claim.

    Attributes:
        claim: The claim's name.
        quantity: What was compared.
        num_runs: Trainings that were compared with the reference.
        num_ranks: Numbers of ranks that they had.
        tolerance: How far they may be apart.
        largest: The largest difference of any quantity, as a part of it; 0 for the same bits.
        faults: Of each training that is off: what it was, and where it first parts.
    """

    claim: str
    quantity: str
    num_runs: int
    num_ranks: list[int]
    tolerance: float
    largest: float
    faults: list[str]

    @property
    def holds(self) -> bool:
        """Whether the claim holds."""
        return not self.faults


def claims(depth: str = "default") -> list[Claim]:
    """All claims, tried as far as one of `DEPTHS` says."""
    sizes, is_quick = DEPTHS[depth], depth == "quick"
    plain, private = Case(), Case(training="private")
    kfac, fast = Case(training="kfac"), Case(reducer="fast")

    def of(
        quantity: str,
        reference: Case,
        cases: Sequence[Case],
        ranks: Sequence[int] = sizes,
        tolerance: float = 0.0,
    ) -> dict[str, Any]:
        """A claim's fields; its reference is trained on one rank."""
        runs = tuple((case, size) for size in ranks for case in cases)
        told = {"quantity": quantity, "runs": runs, "tolerance": tolerance}
        return {"reference": (reference, 1), **told}

    def variants(case: Case, **settings: Sequence[Any]) -> list[Case]:
        return [
            replace(case, **{name: value}) for name, values in settings.items() for value in values
        ]

    shardings = ["zero3", "root"] if is_quick else ["zero3", "zero2", "root", "hybrid"]
    held = ["zero3", "ddp"] if is_quick else ["none", "zero3", "ddp", "fsdp2"]
    summed = ["zero3"] if is_quick else ["zero3", "ddp", "fsdp2"]
    one_pass = [mode for mode, choice in MODES.items() if choice.num_forwards == 1]
    modes = ["ghost", "grad_materialize"] if is_quick else one_pass
    everything = "every rung, from initial to updated parameters"
    with_sums = "norms, coefficients, sums, noise, and every other rung"
    factors = "factors, inverses, directions, and every other rung"
    passes: dict[str, Any] = {"micro_batch": [2], "recompute": [True]}
    found = {
        "world size and sharding change no bit of training": of(
            everything, plain, variants(plain, shard=shardings)
        ),
        "micro-batches and recompute change no bit of training": of(
            everything, plain, variants(plain, **passes), (1, *sizes)
        ),
        "world size and sharding change no bit of private training": of(
            with_sums, replace(private, shard="none"), variants(private, shard=held)
        ),
        "micro-batches and recompute change no bit of private training": of(
            with_sums, private, variants(private, **passes)
        ),
        "clipping modes change rounding only": of(
            with_sums, private, variants(private, clipping=modes), (1,), ROUNDING
        ),
        "the fast reducer changes rounding only": of(
            everything, fast, variants(fast, shard=summed), tolerance=ROUNDING
        ),
        "world size changes no bit of K-FAC": of(
            factors, kfac, [kfac] if is_quick else variants(kfac, shard=["zero3", "root"])
        ),
    }
    if not is_quick:
        for case, what in {
            plain: "compiled training",
            private: "compiled private training",
        }.items():
            compiled, quantity = replace(case, compile=True), "every rung but activations"
            found |= {
                f"world size changes no bit of {what}": of(quantity, compiled, [compiled]),
                f"{what} changes rounding only": of(quantity, case, [compiled], (1,), ROUNDING),
            }
        found["K-FAC's way to reduce factors changes no bit"] = of(
            factors, kfac, variants(kfac, reduction=["factor"]), (1, *sizes)
        )
    for case in variants(private, clipping=one_pass) if depth == "full" else ():
        name = f"world size changes no bit with clipping {case.clipping!r}"
        found[name] = of(with_sums, case, [case])
    return [Claim(name=name, **fields) for name, fields in found.items()]


def try_claims(
    tried: Sequence[Claim],
    *,
    launch: Launch,
    folder: Path,
    subject: Subject | None = None,
    on_launch: Callable[[int, int], object] = lambda size, count: None,
) -> list[Verdict]:
    """Train what the claims name, and compare.

    Args:
        tried: The claims.
        launch: Starts ranks.
        folder: Where traces go.
        subject: What is trained; a small GPT-2 unless given.
        on_launch: Told the number of ranks and of trainings before each launch.
    """
    subject = subject or Subject()
    runs = list(dict.fromkeys(run for claim in tried for run in (claim.reference, *claim.runs)))
    files = {run: folder / f"{number}.trace" for number, run in enumerate(runs)}

    def train(
        chosen: Sequence[Run], keep: tuple[tuple[str, str], ...] = ()
    ) -> dict[Run, str | None]:
        refusals: dict[Run, str | None] = {}
        for size in sorted({size for _, size in chosen}):
            own = [run for run in chosen if run[1] == size]
            on_launch(size, len(own))
            work = partial(run_cases, subject=subject, keep=keep)
            cases = [(run[0], files[run]) for run in own]
            refusals |= dict(zip(own, launch(work, cases, num_ranks=size), strict=True))
        return refusals

    def compared(claim: Claim, run: Run) -> Comparison:
        found = compare(files[claim.reference], files[run], tolerance=claim.tolerance)
        first = found.first
        if first is not None and first.values is None and first.distance < math.inf:
            # None of the values that were kept differ: keep all of this quantity, once more.
            train([claim.reference, run], ((first.rung, first.name),))
            found = compare(files[claim.reference], files[run], tolerance=claim.tolerance)
        return found

    refusals = train(runs)
    verdicts = []
    for claim in tried:
        largest, faults = 0.0, []
        for run in claim.runs:
            refusal = refusals[run] or refusals[claim.reference]
            if refusal is not None:
                faults.append(f"{in_words(run)} could not be trained: {refusal}")
                largest = math.inf
                continue
            found = compared(claim, run)
            largest = max(largest, found.largest)
            if not found.is_equal:
                said = found.verdict[0].lower() + found.verdict[1:]
                # The files are gone by the time it is read.
                for source, words in zip(found.sources, ("the reference", "this run"), strict=True):
                    said = said.replace(source, words)
                faults.append(f"{in_words(run)} and the reference: {said}")
        verdicts.append(
            Verdict(
                claim=claim.name,
                quantity=claim.quantity,
                num_runs=len(claim.runs),
                num_ranks=sorted({size for _, size in claim.runs}),
                tolerance=claim.tolerance,
                largest=largest,
                faults=faults,
            )
        )
    return verdicts


def in_words(run: Run) -> str:
    """A training, for people."""
    case, size = run
    return f"{case} on {size} rank{'s' if size > 1 else ''}"
