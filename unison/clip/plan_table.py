"""Plans as text: a table of what layers do, and a longer one of what they could have done."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from unison.clip.alternatives import Alternative
from unison.clip.layers import Layer

if TYPE_CHECKING:
    from unison.clip.plan import LayerPlan, Plan

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")  # of a block, in the middle of a name


def table(plan: "Plan") -> str:
    """Return one line for all layers of a kind, and a line about all of them.

    Layers are of a kind if their names differ in numbers alone, and they record and do the same.
    Times and bytes are those of all layers in the line together.
    """
    lines = [("layer", "layers", "records", "method", "kept MB", "predicted ms", "measured ms")]
    for kind in _kinds(plan.layers):
        first = kind[0]
        name = first.layer.name if len(kind) == 1 else _NUMBER.sub("*", first.layer.name)
        chosen = [each.chosen for each in kind]
        lines.append(
            (
                name,
                str(len(kind)),
                _records(first.layer),
                str(first.chosen.choice),
                _megabytes(sum(each.cost.kept_bytes for each in chosen)),
                _milliseconds(sum(each.seconds for each in chosen)),
                _measured(chosen),
            )
        )
    return _text(plan, lines, is_number={1, 4, 5, 6})


def details(plan: "Plan") -> str:
    """Return one line per layer and alternative, chosen marked with *."""
    header = ("layer", "records", "", "method", "GFLOP", "moved MB", "kept MB")
    lines: list[tuple[str, ...]] = [(*header, "predicted ms", "measured ms")]
    for each in plan.layers:
        heads = [(each.layer.name, _records(each.layer))]
        heads += [("", "")] * (len(each.alternatives) - 1)
        for head, option in zip(heads, each.alternatives, strict=True):
            mark = "*" if option == each.chosen else ""
            lines.append(
                (
                    *head,
                    mark,
                    str(option.choice),
                    f"{option.cost.flops / 1e9:,.3f}",
                    f"{option.cost.moved_bytes / 1e6:,.2f}",
                    f"{option.cost.kept_bytes / 1e6:,.2f}",
                    _milliseconds(option.seconds),
                    _measured([option]),
                )
            )
    return _text(plan, lines, is_number={4, 5, 6, 7, 8})


def _text(plan: "Plan", lines: Sequence[Sequence[str]], is_number: set[int]) -> str:
    if plan.timed_on is None:  # nothing stands in the last column
        lines = [line[:-1] for line in lines]
    return "\n".join([*_aligned(lines, is_number), "", *_about(plan)])


def _kinds(layers: Iterable["LayerPlan"]) -> list[list["LayerPlan"]]:
    """Group layers of a kind, in the order of the first of each."""
    kinds: dict[tuple, list[LayerPlan]] = {}
    for each in layers:
        layer = each.layer
        is_timed = each.chosen.measured is not None
        name = _NUMBER.sub("*", layer.name)
        key = (name, layer.batch, layer.itemsize, layer.uses, each.chosen.choice, is_timed)
        kinds.setdefault(key, []).append(each)
    return list(kinds.values())


def _records(layer: Layer) -> str:
    """Return samples, and tokens × rows × columns of every use."""
    uses = [f"{use.kind} {use.tokens}×{use.rows}×{use.columns}" for use in layer.uses]
    return f"{layer.batch} × ({', '.join(uses)})" if len(uses) > 1 else f"{layer.batch} × {uses[0]}"


def _measured(chosen: Sequence[Alternative]) -> str:
    seconds = [each.measured for each in chosen if each.measured is not None]
    return _milliseconds(sum(seconds)) if seconds else "–"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f}"


def _about(plan: "Plan") -> list[str]:
    """Return what holds of all layers together."""
    budget = "none" if plan.memory_budget is None else f"{_megabytes(plan.memory_budget)} MB"
    lines = [
        f"mode {plan.mode}, machine {plan.machine}, memory budget {budget}: "
        f"{plan.num_forwards} forward, {plan.num_backwards} backward, "
        f"{_megabytes(plan.bytes_needed)} MB, {_milliseconds(plan.seconds)} ms"
    ]
    if plan.timed_on is not None:
        num_timed = sum(each.chosen.measured is not None for each in plan.layers)
        lines.append(f"{num_timed} of {len(plan.layers)} layers timed on {plan.timed_on}")
    return lines


def _aligned(lines: Sequence[Sequence[str]], is_number: set[int]) -> list[str]:
    """Return lines with columns one below the other, numbers at their right end."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in is_number else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
