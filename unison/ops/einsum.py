"""`torch.einsum` of an input and a parameter: a linear map where its letters say so."""

import string
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.ops.layout import Layout
from unison.ops.linear import as_computed, wide
from unison.ops.records import Dense, Product, Record
from unison.ops.registry import Tap, rule


def of_operand(
    layout: Layout,
    g: Tensor,
    x: Tensor,
    *,
    shape: tuple[int, ...],
    terms: tuple[str, str, str],
) -> Record:
    """Record of w in y = einsum("x,w->y"); `terms` are the letters of x, w and y.

    Raises:
        UnsupportedOperation: If the parameter, or the output alone, has the letter of the samples.
    """
    of_x, of_w, of_y = terms
    index = layout.index
    dims = [] if index is None else [dim for dim, size in enumerate(index.shape) if size != 1]
    if len(dims) > 1:
        raise UnsupportedOperation(
            f"einsum({of_x},{of_w}->{of_y}) where samples lie in several dimensions of the output"
        )
    sample = of_y[dims[0] if dims else layout.axis]
    if sample in of_w or sample not in of_x:
        raise UnsupportedOperation(
            f"einsum({of_x},{of_w}->{of_y}) where {sample!r} holds the samples: only the input and "
            "the output may have it"
        )
    # A new letter for the samples, in front; the old one stays for what is flattened into it.
    new = next(letter for letter in string.ascii_letters if letter not in of_x + of_w + of_y)
    x, of_x = _split(x, of_x, sample, layout, new)
    g, of_y = _split(g, of_y, sample, layout, new)
    incoming = [letter for letter in of_w if letter in of_x and letter not in of_y]
    outgoing = [letter for letter in of_w if letter in of_y and letter not in of_x]
    tokens = [letter for letter in of_x if letter in of_y and letter not in of_w]
    is_map = len(incoming) + len(outgoing) == len(of_w) and set(of_x) == {*tokens, *incoming}
    for is_transposed, order in ((False, outgoing + incoming), (True, incoming + outgoing)):
        if is_map and list(of_w) == order:
            a = _grouped(x, of_x, tokens, incoming)
            return Product(a, _grouped(g, of_y, tokens, outgoing), is_transposed, shape)
    return Dense(torch.einsum(f"{of_x},{of_y}->{new}{of_w}", wide(x), wide(g)))


def _split(value: Tensor, term: str, sample: str, layout: Layout, new: str) -> tuple[Tensor, str]:
    """[..., samples * rest, ...] to [samples, rest, ...]."""
    axis = term.index(sample)
    front = value.movedim(axis, 0)
    index = (
        None if layout.index is None else layout.index.reshape(-1, *(1 for _ in front.shape[1:]))
    )
    rows = Layout(layout.batch, 0, index).rows(front, num_features=front.ndim - 1)
    return rows, new + sample + term[:axis] + term[axis + 1 :]


def _grouped(value: Tensor, term: str, tokens: list[str], features: list[str]) -> Tensor:
    """Bring a tensor to [batch, tokens, features]; the first of `tokens` is the batch."""
    ordered = value.permute([term.index(letter) for letter in tokens + features])
    sizes = ordered.shape
    num_rows = sizes[1 : len(tokens)].numel()
    return ordered.reshape(sizes[0], num_rows, sizes[len(tokens) :].numel())


@rule(torch.einsum)
def einsum(tap: Tap, *args: Any) -> Any:
    """`torch.einsum` of two operands, without an ellipsis or a letter twice in one term."""
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    tracked = [tap.tracks(each) for each in operands]
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return NotImplemented
    inputs, of_y = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    if tracked.count(True) != 1 or len(operands) != 2:
        return NotImplemented
    place = tracked.index(True)
    of_w, of_x = terms[place], terms[1 - place]
    is_plain = all(len(set(term)) == len(term) for term in (of_w, of_x, of_y))
    if not is_plain or not set(of_w) <= set(of_x + of_y):
        return NotImplemented
    x, y = operands[1 - place], torch.einsum(equation, *(tap.plain(each) for each in operands))
    sizes = dict(zip(of_x + of_y, (*x.shape, *y.shape), strict=True))
    if any(sizes[i] != n for i, n in zip(of_w, tap.plain(operands[place]).shape, strict=True)):
        return NotImplemented  # a dimension of 1 that is broadcast
    builder = partial(of_operand, terms=(of_x, of_w, of_y))
    return tap(y, saved=(as_computed(x, y),), uses=[(operands[place], builder)])
