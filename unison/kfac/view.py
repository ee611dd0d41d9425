"""How K-FAC shows itself: one line per layer."""

from collections.abc import Mapping, Sequence

from unison.kfac.assignment import Assignment
from unison.kfac.layers import Layer, Method


def table(
    layers: Sequence[Layer],
    assignment: Assignment,
    held: Mapping[int, Mapping[str, int]],
    usage: Mapping[str, int],
) -> str:
    """Method, size, owners and bytes of every layer.

    Args:
        layers: All layers.
        assignment: Who owns them.
        held: Bytes that this rank holds of its layers, by what for.
        usage: The same of all of them together.
    """
    rows = [("layer", "method", "size", "owner", "bytes here", "")]
    for index, layer in enumerate(layers):
        own = assignment.owners[index]
        whose = "all" if len(own) == assignment.num_ranks else ", ".join(map(str, sorted(own)))
        size = _size(sum(held[index].values())) if index in held else "-"
        name = layer.name if layer.bias is None else f"{layer.name} + bias"
        rows.append((name, layer.method.value, _sides(layer), whose, size, layer.why))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]
        ).rstrip()
        for row in rows
    ]
    total = ", ".join(f"{what} {_size(count)}" for what, count in usage.items())
    return "\n".join(["KFAC(", *(f"  {line}" for line in lines), f"  here: {total}", ")"])


def _sides(layer: Layer) -> str:
    if layer.method is Method.KRONECKER:
        return f"G {layer.d_out} x A {layer.d_in}"
    return f"{layer.numel}"


def _size(count: int) -> str:
    """Bytes, for people.

    >>> [_size(count) for count in (0, 1500, 2_500_000)]
    ['0 B', '1.5 kB', '2.5 MB']
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
