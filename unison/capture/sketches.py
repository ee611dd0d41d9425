"""What one pass leaves of each row: its losses, and a sketch of each of its gradients.

Per-sample gradients are too large to keep for comparison. A *sketch* of each is: its inner products
with a few random matrices u vᵀ, which differ, with probability 1, where gradients do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from unison.capture.parts import local
from unison.ops import Dense, Lookup, Product, Record, Streamed

_NUM_SKETCHES = 2
_WIDE = 1 << 22  # elements that are made float64 at once


@dataclass
class RowResults:
    """What one pass left of each row.

    Attributes:
        losses: [batch], or None where there is one of the whole batch.
        sketches: Of each parameter's per-sample gradients [batch, sketches], in the order in which
            they came: last layers first.
        buffers: Fingerprints of all buffers after the pass.
        written: Names of those that it wrote to.
    """

    losses: Tensor | None
    sketches: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)

    def differs(self, other: "RowResults", kept: Tensor, tolerance: float) -> list[str] | None:
        """Names of the parameters whose gradients of kept rows differ.

        It is empty where outputs alone do, and None where nothing does.

        Args:
            other: Of another pass.
            kept: The rows to compare [batch].
            tolerance: Of the row's scale; 0 compares bits.
        """
        names = sorted({*self.sketches, *other.sketches})
        found = []
        if names:
            mine, others = self._stacked(names, len(kept)), other._stacked(names, len(kept))
            scale = mine.abs().nan_to_num(0, 0, 0).amax((0, 2))  # [batch]
            differ = _differ(mine, others, tolerance * scale[None, :, None])
            differ = differ[:, kept].flatten(1).any(1)
            order = list(self.sketches)
            found = [name for name, each in zip(names, differ.tolist(), strict=True) if each]
            found.sort(key=lambda name: -order.index(name) if name in order else 0)
        if found:
            return found
        if self.losses is None or other.losses is None:
            return None
        differ = _differ(self.losses, other.losses, tolerance * self.losses.abs())
        return [] if bool(differ[kept].any()) else None

    def reached(self, kept: Tensor) -> list[str]:
        """Names of the parameters of which rows that are not kept have a gradient.

        Where their losses have the weight 0, that is exactly 0, or 0 · inf.
        """
        found = {name: each[~kept].nan_to_num(0, 0, 0) for name, each in self.sketches.items()}
        return [name for name, each in found.items() if bool(each.any())]

    def of_first(self, num_rows: int) -> "RowResults":
        """What it left of the first rows."""
        losses = None if self.losses is None else self.losses[:num_rows]
        return RowResults(losses, {name: each[:num_rows] for name, each in self.sketches.items()})

    def is_finite_beside(self, base: "RowResults", kept: Tensor) -> bool:
        """Whether kept rows are finite wherever those of another pass are."""
        pairs: list[tuple[Tensor | None, Tensor | None]] = [(self.losses, base.losses)]
        pairs += [(each, base.sketches.get(name)) for name, each in self.sketches.items()]
        return all(
            bool((mine.isfinite() | ~theirs.isfinite())[kept].all())
            for mine, theirs in pairs
            if mine is not None and theirs is not None
        )

    def _stacked(self, names: Sequence[str], size: int) -> Tensor:
        nothing = torch.zeros(size, _NUM_SKETCHES, dtype=torch.float64)
        return torch.stack([self.sketches.get(name, nothing) for name in names])


def _differ(first: Tensor, second: Tensor, tolerance: Tensor) -> Tensor:
    is_same = (first == second) | (first.isnan() & second.isnan())
    return ~(is_same | ((first - second).abs() <= tolerance))


class Sketches:
    """Adds up sketches of per-sample gradients as records come."""

    def __init__(self, batch: int) -> None:
        self._batch, self.found = batch, {}

    def take(self, name: str, record: Record | Streamed) -> None:
        """Add a record's."""
        if isinstance(record, Streamed):
            for samples, piece in record.first_chunks():
                self._add(name, samples.start or 0, _sketch(piece))
        else:
            self._add(name, 0, _sketch(record))

    def _add(self, name: str, start: int, values: Tensor) -> None:
        total = self.found.get(name)
        if total is None:
            total = values.new_zeros(self._batch, _NUM_SKETCHES)
            self.found[name] = total
        total[start : start + len(values)] += values.to(total.device)


@torch.no_grad()
def _sketch(record: Record) -> Tensor:
    """Inner products of each sample's gradient with random matrices [batch, sketches], float64."""
    match record:
        case Product():
            left = _projected(record.g, "g")  # [batch, tokens, sketches]
            return (left * _projected(record.a, "a")).sum(1)
        case Lookup():
            rows = _directions(record.shape[0], "a", record.g.device)
            found = rows[record.ids.clamp(min=0)]  # [batch, tokens, sketches]
            found = torch.where((record.ids >= 0).unsqueeze(-1), found, 0.0)
            projected = _projected(record.g, "g")
            # 0 · NaN is NaN, and padding counts for nothing.
            return torch.where(found == 0, 0.0, projected * found).sum(1)
        case Dense():
            value = record.value.flatten(2) if record.value.ndim > 2 else record.value
            value = value.unsqueeze(1) if value.ndim == 2 else value  # [batch, rows, columns]
            value = value.view(len(value), 1, 1) if value.ndim == 1 else value
            rows = _directions(value.shape[1], "a", value.device)
            return (_projected(value, "g") * rows).sum(1)
    raise AssertionError(f"no rule for {record!r}")


def _projected(x: Tensor, name: str) -> Tensor:
    """[batch, tokens, features] times random directions: [batch, tokens, sketches], float64."""
    x = local(x.detach())
    keys = _directions(x.shape[-1], name, x.device)
    if x.numel() <= _WIDE:
        return x.double() @ keys
    return torch.stack([row.double() @ keys for row in x])


@lru_cache(maxsize=256)
def _directions(size: int, name: str, device: torch.device) -> Tensor:
    """Random directions [size, sketches], the same ones every time."""
    generator = torch.Generator().manual_seed(size * 2 + (name == "a"))
    values = torch.randn(size, _NUM_SKETCHES, generator=generator, dtype=torch.float64)
    return values.to(device)
