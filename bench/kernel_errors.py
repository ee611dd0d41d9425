"""How far a kernel is from float64, and whether all of its runs give the same bits."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

# The most that a result from inputs of a dtype may be off.
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 1e-5, torch.float16: 1e-5}


@dataclass(frozen=True)
class Outcome:
    """What one check found.

    Attributes:
        kernel: Its name, and which of its results.
        dtype: Of the inputs.
        shape: Of the inputs, in words.
        error: The largest error of a result.
        relative_to: What the error is a part of.
        limit: The most that it may be.
        is_same: Whether all runs gave the same bits.
    """

    kernel: str
    dtype: str
    shape: str
    error: float
    relative_to: str
    limit: float
    is_same: bool

    @property
    def is_kept(self) -> bool:
        """Whether the limit holds, and all runs gave the same bits."""
        return self.is_same and self.error <= self.limit  # not so if the error is not a number

    def figures(self) -> dict[str, Any]:
        """Return the fields, and whether all is well, as figures of a result file."""
        error = self.error if math.isfinite(self.error) else str(self.error)
        return {**asdict(self), "error": error, "is_kept": self.is_kept}


@dataclass(frozen=True)
class Setting:
    """Where and how checks run.

    Attributes:
        device: `"cuda"` or `"cpu"`; on the latter shapes are tiny.
        seed: Of the inputs.
        repeats: Runs of every kernel.
    """

    device: str
    seed: int
    repeats: int

    @property
    def is_small(self) -> bool:
        """Whether kernels are interpreted, a thousand times slower than compiled."""
        return self.device == "cpu"

    def generator(self) -> torch.Generator:
        """Return a generator of inputs."""
        return torch.Generator(self.device).manual_seed(self.seed)


class Runs:
    """Repeats a kernel, and collects what is found."""

    def __init__(self, setting: Setting, dtype: torch.dtype) -> None:
        self._setting, self._dtype = setting, dtype
        self.outcomes: list[Outcome] = []

    def repeat(self, run: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], bool]:
        """Return the results of a run, and whether all runs agree to the bit."""
        first = run()
        is_same = True
        for _ in range(self._setting.repeats - 1):
            is_same &= all(map(same_bits, run(), first))
        return first, is_same

    def add(
        self,
        kernel: str,
        shape: object,
        error: float,
        relative_to: str,
        is_same: bool,
        limit: float | None = None,
    ) -> None:
        """Note what a check found."""
        limit = LIMITS[self._dtype] if limit is None else limit
        name = str(self._dtype).removeprefix("torch.")
        self.outcomes.append(Outcome(kernel, name, str(shape), error, relative_to, limit, is_same))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def largest_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a part of the largest number that was expected."""
    scale = float(expected.abs().max()) or 1.0
    return float((found.double() - expected).abs().max()) / scale


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the length of the difference as a part of the length of what was expected."""
    return float((found.double() - expected).norm() / expected.norm())


def norm_error(squared: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """Return the largest difference of norms [batch] as a part of `scale`, or of the norms."""
    norms = expected.sqrt()
    difference = (squared.double().clamp(min=0).sqrt() - norms).abs()
    return float((difference / (norms if scale is None else scale)).max())
