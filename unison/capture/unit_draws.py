"""Numbers that a model draws to decide what to run, and that decide nothing.

Many models of transformers may drop a layer: `if torch.rand([]) < self.layerdrop`. A compiler stops
there, since a value decides what comes next. Where `layerdrop` is 0, as it mostly is, it does not:
no number in [0, 1) is smaller. So a model that cannot be traced is traced once more, while
`torch.rand([])` is a number of which no more is known than that it lies in [0, 1); and it is that
while the graph runs, whose guards ask for what was there when it was traced. Where the number
decides something it is drawn, and the model is compiled in parts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_rand = torch.rand


class UnitDraw:
    """A number in [0, 1) that is drawn where it matters."""

    def __lt__(self, other: Any) -> bool | Tensor:
        if isinstance(other, int | float):
            if other <= 0:
                return False
            if other >= 1:
                return True
        return _rand([]) < other


def _rand_or_unit(*size: Any, **options: Any) -> Any:
    is_number = len(size) == 1 and isinstance(size[0], list | tuple) and len(size[0]) == 0
    return UnitDraw() if is_number and not options else _rand(*size, **options)


@contextmanager
def unit_draws_known() -> Iterator[None]:
    """Let `torch.rand([])` be a `UnitDraw` in this block."""
    torch.rand = _rand_or_unit
    try:
        yield
    finally:
        torch.rand = _rand
