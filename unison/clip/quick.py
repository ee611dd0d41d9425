"""Kept gradients of a known use, made from its gradient and input without records in between.

See [Note: known uses] in `unison/capture/sites.py`. Only what the general way has done before is
done here, by the same functions on the same tensors: `materialize` of one use of a matrix, of a
bias, and of a norm's gain and offset.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from unison.capture.sites import PlainUse
from unison.clip.factored import Factors
from unison.clip.measured import can_multiply, kept_dtype
from unison.clip.waiting import Kept, biases_like, norms_like
from unison.kernels import affine
from unison.kernels.factored import are_taken
from unison.ops import Layout, Product
from unison.ops.linear import of_bias, of_transposed, of_weight
from unison.ops.norm import Affine


class Room(Protocol):
    """Who keeps gradients: a clipping."""

    def room_for(self, maker: "KeptMaker") -> Kept | None:
        """Return where a maker keeps the gradients of its parameters; None if there are some."""
        ...


Step = Callable[[Kept, Tensor, Tensor, Tensor], None]
"""(where per-sample gradients are kept, g, x, g as autograd has it): g and x are [batch, tokens,
features]."""


def maker_of(
    uses: Sequence[PlainUse],
    layout: Layout,
    g: Tensor,
    x: Tensor,
    factored: Collection[str] = (),
) -> "KeptMaker | None":
    """Return what makes the kept gradients of such a use; None if it needs records.

    Args:
        uses: The parameters that were used: each once, and compiled kernels took its records.
        layout: Where the samples lie.
        g: The gradient of what came out.
        x: What went in.
        factored: Names of those whose gradients are not formed: their factors are kept.
    """
    is_plain = type(g) is Tensor and g.is_contiguous() and x.is_contiguous()
    if not is_plain or layout.axis != 0 or min(g.ndim, x.ndim) < 2 or g.numel() == 0:
        return None
    rows, inputs = layout.rows(g), layout.rows(x)
    steps = _steps(uses, rows, inputs, factored)
    if steps is None:
        return None
    names = frozenset([use.name for use in uses])
    is_aligned = not names.isdisjoint(factored)
    return KeptMaker(names, steps, (g, x), (rows, inputs), is_aligned=is_aligned)


class KeptMaker:
    """Makes the kept gradients of one use in every pass: of the same shapes, strides and dtypes.

    Args:
        names: Of the parameters that were used.
        steps: What to do.
        given: g and x of a use, contiguous.
        rows: The same two as [batch, tokens, features].
        is_aligned: Whether they have to lie at multiples of 16 bytes.
    """

    __slots__ = ("_device", "_dtype", "_in_rows", "_is_aligned", "_shape", "_steps", "names")

    def __init__(
        self,
        names: frozenset[str],
        steps: Sequence[Step],
        given: tuple[Tensor, Tensor],
        rows: tuple[Tensor, Tensor],
        *,
        is_aligned: bool,
    ) -> None:
        self.names, self._steps, self._is_aligned = names, steps, is_aligned
        g, x = given
        self._shape, self._dtype, self._device = g.shape, g.dtype, g.device
        shapes = rows[0].shape, rows[1].shape
        self._in_rows = None if shapes == (g.shape, x.shape) else shapes

    def __call__(self, keeper: Room, g: Tensor, x: Tensor) -> bool:
        """Keep the gradients of a use, if all is as it was; a site compares x."""
        is_known = type(g) is Tensor and g.dtype is self._dtype and g.device == self._device
        is_known = is_known and g.shape == self._shape
        if not (is_known and g.is_contiguous() and x.is_contiguous()):
            return False
        if self._is_aligned and (g.data_ptr() | x.data_ptr()) % 16:
            return False
        kept = keeper.room_for(self)
        if kept is None:
            return False
        rows, inputs = g, x
        if self._in_rows is not None:
            rows, inputs = g.view(self._in_rows[0]), x.view(self._in_rows[1])
        for step in self._steps:
            step(kept, rows, inputs, g)
        return True


def _steps(
    uses: Sequence[PlainUse], g: Tensor, x: Tensor, factored: Collection[str]
) -> list[Step] | None:
    """Return a step for every use, or one for gain and offset together; None if one has none."""
    found: list[Step] = []
    norm = getattr(uses[0].builder, "__self__", None)
    if isinstance(norm, Affine):
        step = _affine_step(uses, norm, g, x)
        return None if step is None else [step]
    for name, shape, builder in uses:
        if builder in (of_weight, of_transposed):
            is_transposed = builder is of_transposed
            left, right = (x, g) if is_transposed else (g, x)
            product = Product(x, g, is_transposed, shape)
            is_matrix = shape == (left.shape[2], right.shape[2])
            if not is_matrix:
                return None
            if name in factored and are_taken(left, right):
                found.append(_factored_step(name, shape, is_transposed=is_transposed))
            elif name not in factored and can_multiply(left, right, kept_dtype([product])):
                found.append(partial(_transposed_step if is_transposed else _matrix_step, name))
            else:
                return None
        elif builder is of_bias and shape == g.shape[2:]:
            found.append(_bias_step(name, g))
        else:
            return None
    return found


def _matrix_step(name: str, kept: Kept, g: Tensor, x: Tensor, _: Tensor) -> None:
    kept.found[name] = torch.bmm(g.mT, x)


def _transposed_step(name: str, kept: Kept, g: Tensor, x: Tensor, _: Tensor) -> None:
    kept.found[name] = torch.bmm(x.mT, g)


def _factored_step(name: str, shape: tuple[int, ...], *, is_transposed: bool) -> Step:
    """Return the step of a matrix whose factors are kept."""

    def step(kept: Kept, g: Tensor, x: Tensor, held: Tensor) -> None:
        left, right = (x, g) if is_transposed else (g, x)
        versions = left._version, right._version
        kept.factors[name] = Factors(left, right, is_transposed, shape, held, versions)

    return step


def _bias_step(name: str, g: Tensor) -> Step:
    """Return the step of a bias whose output has a gradient like this one."""
    if not affine.can_wait(g):
        return partial(_bias_step_at_once, name)
    kind, num_bytes = biases_like(g), g.nbytes

    def step(kept: Kept, g: Tensor, _: Tensor, held: Tensor) -> None:
        kept.wait(kind, (name,), (g,), held, num_bytes)

    return step


def _bias_step_at_once(name: str, kept: Kept, g: Tensor, x: Tensor, _: Tensor) -> None:
    kept.found[name] = affine.column_sums(g)


def _affine_step(uses: Sequence[PlainUse], norm: Affine, g: Tensor, x: Tensor) -> Step | None:
    """Return the step of a norm whose gain is used, and whose offset is if it has one."""
    wanted = [norm.gain, norm.offset] if norm.has_offset else [norm.gain]
    is_whole = [use.builder for use in uses] == wanted and affine.is_taken(x, g)
    if not is_whole or any(use.shape != g.shape[2:] for use in uses):
        return None
    names, num_bytes = [use.name for use in uses], x.nbytes + g.nbytes
    kind = norms_like(x, g, norm.eps, is_centred=norm.is_centred, has_offset=norm.has_offset)

    def step(kept: Kept, g: Tensor, x: Tensor, held: Tensor) -> None:
        kept.wait(kind, names, (x, g), held, num_bytes)

    return step
