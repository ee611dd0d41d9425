"""What a builder needs of an operation's tensors to make the record of a part of its parameter.

A parameter that is cut over ranks along one dimension has records of its part alone. Where the
tensors around the operation are cut alike, nothing has to travel: a matrix that is cut by rows
meets a gradient that is cut by columns and an input that is whole. This table says which dimension
of which tensor goes with which dimension of the parameter. What is not in it is made from whole
tensors, and the part taken from the result (`part_of`): always right, and more to send.
"""

from collections.abc import Callable
from functools import partial

from unison.ops.embedding import of_table
from unison.ops.linear import of_bias, of_transposed, of_weight
from unison.ops.norm import of_gain, of_offset
from unison.ops.registry import Builder

Needs = tuple[int | None, tuple[int | None, ...]]
"""Along which dimension the gradient, and each saved tensor that is read, must be cut as the
parameter is; None for a whole one."""

# (dimension of the cut, dimensions of the parameter) -> what is needed
_CUTS: dict[Builder, Callable[[int, int], Needs | None]] = {
    of_weight: lambda dim, _: (-1, (None,)) if dim == 0 else (None, (-1,)),
    of_transposed: lambda dim, _: (None, (-1,)) if dim == 0 else (-1, (None,)),
    of_bias: lambda dim, ndim: (dim - ndim, ()),
    of_table: lambda dim, _: None if dim == 0 else (-1, (None,)),
}

# How many of the saved tensors a builder reads, where it does not read all.
_NUM_READ: dict[Builder, int] = {of_bias: 0, of_offset: 0}

# They make dense records that add up over tokens. What they read has the shape of the output.
_ADDING_TOKENS: frozenset[Builder] = frozenset({of_bias, of_offset, of_gain})


def needs_for_cut(builder: Builder, dim: int, ndim: int) -> Needs | None:
    """What the record of a part can be made of directly; None where it cannot.

    Args:
        builder: Makes the record.
        dim: The dimension along which the parameter is cut.
        ndim: Dimensions of the parameter.
    """
    found = _CUTS.get(_plain(builder))
    return None if found is None else found(dim, ndim)


def num_read(builder: Builder, num_saved: int) -> int:
    """How many of the saved tensors a builder reads."""
    return _NUM_READ.get(_plain(builder), num_saved)


def adds_tokens(builder: Builder) -> bool:
    """Whether a builder makes, of some of the tokens, a part of the whole record's sum."""
    # With statistics per channel the other dimensions are no tokens.
    is_per_channel = isinstance(builder, partial) and "broadcast" in builder.keywords
    return _plain(builder) in _ADDING_TOKENS and not is_per_channel


def _plain(builder: Builder) -> Builder:
    """A builder without the options that a rule gave it."""
    return builder.func if isinstance(builder, partial) else builder
