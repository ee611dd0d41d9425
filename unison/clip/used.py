"""A parameter that a batch has used: what is held of its uses until its clipped sum is made."""

import math
from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor

from unison.clip.bounds import SampleNorms
from unison.clip.factored import CHOICE, Factors
from unison.clip.matrix import tensors_of
from unison.clip.modes import MODES, Choice
from unison.errors import UnsupportedOperation
from unison.ops import Dense, Record

KEPT = MODES["grad_materialize"]


@dataclass(eq=False)
class UsedParameter:
    """The uses of one parameter by one batch.

    Attributes:
        name: Its name.
        records: What is waiting to be measured, or to be added up.
        comes_again: Which records of the first pass a second one makes again.
        choice: Its methods, once it was measured.
        norms: Its samples' norms; None while records wait.
        num_missing: Records that were dropped, and that a second pass has not made again yet.
        lent: Storage of its per-sample gradients.
        total: The float64 sum of records that have come again, while others are missing.
        clipped: Its clipped sum, where a second pass made it.
        is_fast: Whether compiled kernels take its records.
        is_waiting: Whether its per-sample gradients lie there, or its factors, not measured yet.
        factors: Of its one use, where kernels measure and add them up with those of others.
    """

    name: str
    records: list[Record] = field(default_factory=list)
    comes_again: list[bool] = field(default_factory=list)
    choice: Choice | None = None
    norms: SampleNorms | None = None
    num_missing: int = 0
    lent: Tensor | None = None
    total: Tensor | None = None
    clipped: Tensor | None = None
    is_fast: bool = False
    is_waiting: bool = False
    factors: Factors | None = None

    @property
    def kept(self) -> Tensor | None:
        """Per-sample gradients that compiled kernels take, with those of other parameters."""
        only = self.records[0] if self.is_fast and len(self.records) == 1 else None
        return only.value if isinstance(only, Dense) else None

    @property
    def is_worth_adding(self) -> bool:
        """Whether a float64 sum is smaller than the records that it would stand for."""
        held = sum(each.nbytes for record in self.records for each in tensors_of(record))
        return 8 * math.prod(self.records[-1].shape) <= held

    @classmethod
    def of_kept(cls, name: str, value: Tensor) -> "UsedParameter":
        """A parameter that was used once, and whose per-sample gradients are kept."""
        return cls(name, [Dense(value)], [False], KEPT, is_fast=True, is_waiting=True)

    @classmethod
    def of_factors(cls, name: str, factors: Factors) -> "UsedParameter":
        """A parameter that was used once, and whose factors are kept."""
        made = cls(name, [factors.product], [False], CHOICE, is_fast=True, is_waiting=True)
        made.factors = factors
        return made

    def refuse(self, what: str) -> NoReturn:
        """Raise for a use that came otherwise than expected."""
        raise UnsupportedOperation(
            f"{self.name} {what}. Use a clipping mode that keeps records, such as 'flash_fuse_bk'"
        )
