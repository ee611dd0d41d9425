"""Values that change from step to step: small pure functions of the step, which counts from 0.

A schedule must be a function of the step alone. A budget looks ahead with it, and a resumed run
reads it anew. Any callable will do; those here also describe themselves in the ledger.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from unison import check

Schedule = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Exponential:
    """Multiplied by `factor` at every step.

    >>> [Exponential(start=8.0, factor=0.5)(step) for step in range(3)]
    [8.0, 4.0, 2.0]
    """

    start: float
    factor: float

    def __post_init__(self) -> None:
        check.positive(start=self.start, factor=self.factor)

    def __call__(self, step: int) -> float:
        """The value at a step."""
        return self.start * self.factor**step


@dataclass(frozen=True, kw_only=True)
class Stairs:
    """Multiplied by `factor` after every `every` steps.

    >>> [Stairs(start=8.0, factor=0.5, every=2)(step) for step in range(4)]
    [8.0, 8.0, 4.0, 4.0]
    """

    start: float
    factor: float
    every: int

    def __post_init__(self) -> None:
        check.positive(start=self.start, factor=self.factor, every=self.every)

    def __call__(self, step: int) -> float:
        """The value at a step."""
        return self.start * self.factor ** (step // self.every)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """On a straight line from `start` to `end` in `steps` steps, and `end` after that.

    >>> [Linear(start=4.0, end=2.0, steps=2)(step) for step in range(4)]
    [4.0, 3.0, 2.0, 2.0]
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check.positive(start=self.start, end=self.end, steps=self.steps)

    def __call__(self, step: int) -> float:
        """The value at a step."""
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """On half a cosine from `start` to `end` in `steps` steps, and `end` after that.

    >>> [round(Cosine(start=4.0, end=2.0, steps=4)(step), 3) for step in (0, 1, 2, 4, 9)]
    [4.0, 3.707, 3.0, 2.0, 2.0]
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check.positive(start=self.start, end=self.end, steps=self.steps)

    def __call__(self, step: int) -> float:
        """The value at a step."""
        part = min(step / self.steps, 1.0)
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * part)) / 2


def describe(value: float | Schedule) -> float | dict[str, Any]:
    """A constant as itself, and a schedule as its name and settings.

    >>> describe(1.5), describe(Stairs(start=2.0, factor=0.5, every=10))
    (1.5, {'schedule': 'Stairs', 'start': 2.0, 'factor': 0.5, 'every': 10})
    """
    if not callable(value):
        return float(value)
    kind = type(value)
    if kind.__module__ == __name__ and is_dataclass(value):
        return {"schedule": kind.__name__, **asdict(value)}
    # Only the name: the repr of a user's object may hold anything.
    return {"schedule": getattr(value, "__qualname__", kind.__qualname__)}
