"""The trace itself: a mode of torch in which the numbers of samples follow their elements."""

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from unison.capture.axes import Call
from unison.capture.row_rules import (
    LISTS,
    MIXED,
    RULES,
    VIEWS,
    Arguments,
    Find,
    Found,
    RowRule,
    RowSamples,
    along_dims,
    compressed,
    lost,
    pointwise,
    reduced,
    view_rule,
)
from unison.errors import UnsupportedOperation
from unison.ops.records import NOBODY, Layout, index_in_order

# --- functions -----------------------------------------------------------------------------------


@cache
def _rule_of(func: Any) -> tuple[str, RowRule | None, list[str], Arguments]:
    """Return a function's name, its rule, and the names and defaults of its arguments.

    The name is without the mark of a function that works in place.
    """
    schema = func._schema
    namespace, _, plain = schema.name.partition("::")
    base = plain.rstrip("_") if not plain.startswith("__") else plain
    names = [each.name for each in schema.arguments]
    given = {each.name: each.default_value for each in schema.arguments}
    defaults = {name: value for name, value in given.items() if value is not None}
    rule = view_rule(func, names) if base in VIEWS else RULES.get(base)
    if rule is None and namespace == "aten" and _is_pointwise(func, base):
        rule = pointwise
    if rule is None and base.startswith("_fft"):
        rule = along_dims
    if namespace not in ("aten", "prims", "transformers"):
        rule = None  # somebody's own function may do anything with rows
    return base, rule, names, defaults


def _is_pointwise(func: Any, base: str) -> bool:
    packet = getattr(torch.ops.aten, base, None)
    names = [] if packet is None else packet.overloads()
    return any(
        torch.Tag.pointwise in each.tags for each in (func, *(getattr(packet, n) for n in names))
    )


def rows_after(
    known: Find, func: Any, args: tuple, kwargs: Arguments, outputs: Sequence[Tensor]
) -> list[RowSamples | None]:
    """Return the samples of each output; None for what was made without the batch."""
    inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    found = [each for each in map(known, inputs) if each is not None]
    real = [each for each in found if not each.is_random]
    if not real:
        if not found and torch.Tag.nondeterministic_seeded not in func.tags:
            return [None for _ in outputs]
        return [
            RowSamples(torch.full((1,) * each.ndim, NOBODY, device=each.device), is_random=True)
            for each in outputs
        ]
    base, rule, names, defaults = _rule_of(func)
    if base in _FRESH:
        return [None for _ in outputs]
    is_by_value = any(each.is_by_value for each in real) or base in _MOVERS
    lost_by = next((each.lost_by for each in real if each.lost_by is not None), None)
    made: Any = None
    if rule is not None:
        only = len(outputs) == 1 and base not in LISTS
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        try:
            made = rule(known, arguments, outputs[0] if only else outputs)
        except _NOT_FORESEEN:  # nobody can tell: an operation with a parameter will refuse it
            made = None
    several = list(made) if isinstance(made, list | tuple) else [made] * len(outputs)
    return [
        _rows(each, ids, func._schema.name, is_by_value=is_by_value, lost_by=lost_by)
        for each, ids in zip(outputs, several, strict=True)
    ]


def _rows(
    output: Tensor, made: Found, name: str, *, is_by_value: bool, lost_by: str | None
) -> RowSamples:
    if isinstance(made, RowSamples):
        is_by_value |= made.is_by_value
        made = made.ids
    if made is not None:
        sizes = zip(made.shape, output.shape, strict=False)
        if made.ndim != output.ndim or any(a not in (1, b) for a, b in sizes):
            made = None
    made = (lost(output, name).ids if made is None else made).to(output.device)
    if lost_by is None and bool((made == MIXED).any()):
        lost_by = name
    return RowSamples(made, is_by_value=is_by_value, lost_by=lost_by)


# They move rows by values, and have no rule: what comes out is lost, and not forgotten.
_MOVERS = {
    *("take", "put", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
    *("unique_dim_consecutive", "argwhere", "nonzero_static", "multinomial", "segment_reduce"),
}
# They read no values.
_FRESH = {"new_zeros", "new_empty", "new_ones", "new_full", "new_empty_strided"}
_NOT_FORESEEN = (RuntimeError, IndexError, KeyError, TypeError, ValueError, StopIteration)


# --- the trace -----------------------------------------------------------------------------------


class RowTrace(TorchDispatchMode):
    """A dispatch mode that follows samples through all that is computed in its block.

    See [Note: the sample of every row].

    Args:
        batch: Number of samples.
    """

    supports_higher_order_operators = True  # they are refused in a sentence

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch
        self._known: weakref.WeakKeyDictionary[Any, dict[tuple, RowSamples]] = (
            weakref.WeakKeyDictionary()
        )
        self.opaque: str | None = None  # a function whose output has no memory of its own

    def begin(self, tensor: Tensor, dim: int, per_sample: int = 1) -> None:
        """Let each row of a dimension, or as many as one sample has, be one sample."""
        with _disable_current_modes():
            ids = torch.arange(tensor.shape[dim], device=tensor.device) // per_sample
            ids = ids.reshape([-1 if d == dim else 1 for d in range(tensor.ndim)])
            self.put(tensor, RowSamples(ids))

    def put(self, tensor: Tensor, rows: RowSamples) -> None:
        """Set the samples of a tensor."""
        storage = _storage(tensor)
        if storage is None:
            self.opaque = self.opaque or f"a {type(tensor).__name__}"
            return
        self._known.setdefault(storage, {})[_geometry(tensor)] = rows

    def forget(self, tensor: Tensor) -> None:
        """Forget the samples of a tensor's storage."""
        storage = _storage(tensor)
        if storage is not None:
            self._known.pop(storage, None)

    def find(self, tensor: Tensor) -> RowSamples | None:
        """The samples of a tensor; None if it was made without the batch."""
        storage = _storage(tensor)
        if storage is None:
            return None if self.opaque is None else lost(tensor, self.opaque)
        known = self._known.get(storage)
        if known is None:
            return None
        place = _geometry(tensor)
        if place not in known:
            known[place] = _seen_through(known, tensor)
        return known[place]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, and follow the samples through it."""
        if isinstance(func, HigherOrderOperator):
            raise UnsupportedOperation(
                f"{func.name()} runs a function of the user's by itself, where samples are not "
                "followed. Use operations on tensors instead, such as "
                "F.scaled_dot_product_attention with a mask in the place of flex_attention"
            )
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        outputs = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        if not outputs:
            return output
        rows = rows_after(self.find, func, args, kwargs, outputs)
        given = tree_leaves((args, kwargs))
        for each, found in zip(outputs, rows, strict=True):
            if found is not None:
                is_in_place = any(each is value for value in given)
                (self.write if is_in_place else self.put)(each, found)
        return output

    # --- what a capture asks ---------------------------------------------------------------------

    def layout_of(self, tensor: Tensor) -> Layout | None:
        """Where the samples lie in a tensor; None if it was made without them.

        Raises:
            UnsupportedOperation: If samples are mixed in it, or nobody can tell whose it is.
        """
        with _disable_current_modes():
            rows = self.find(tensor)
            if rows is None or rows.is_random:
                return None
            if rows.ids.numel() and bool((rows.ids == NOBODY).all()):
                return None
            if bool((rows.ids == MIXED).any()):
                raise UnsupportedOperation(
                    f"it is not known which sample each row belongs to: {rows.lost_by} has mixed "
                    "samples, or moved rows in a way that is not followed. Select and sort rows "
                    "with torch's own functions of indices, masks and sorting, and let a sample's "
                    "rows depend on the sample alone"
                )
            return self._layout(rows.ids, tensor)

    def _layout(self, ids: Tensor, tensor: Tensor) -> Layout:
        if self.batch == 1 and tensor.ndim > 1:
            return Layout(1, 0)
        for dim, size in enumerate(tensor.shape):
            if size % self.batch or ids.shape[dim] != size or size < 2:
                continue
            expected = index_in_order(size, self.batch, dim, tensor.ndim, ids.device)
            # Rows of nobody among those of samples in their order are where a sample left a gap.
            if bool(((ids == expected) | (ids == NOBODY)).all()):
                return Layout(self.batch, dim)
        return Layout(self.batch, 0, compressed(ids))

    def aligned(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return a copy of a tensor without samples that has those of another one."""
        with _disable_current_modes():
            rows, own = self.find(like), self.find(tensor)
            if rows is None or own is not None:
                return tensor
            sizes = zip(tensor.shape, like.shape, strict=True)
            dims = [dim for dim, (a, b) in enumerate(sizes) if a != b]
            tensor = tensor.clone()  # others may have views of it, which are nobody's
            self.put(tensor, replace(rows, ids=reduced(rows.ids, dims, keepdim=True)))
            return tensor

    # --- what happens ----------------------------------------------------------------------------

    def write(self, target: Tensor, rows: RowSamples) -> None:
        """Set the samples of a tensor that was written in place, and of all its views."""
        before = self.find(target)
        if before is not None and torch.equal(before.ids, rows.ids):
            if rows.is_by_value and not before.is_by_value:
                self.put(target, rows)
            return
        storage = _storage(target)
        if storage is None:
            self.put(target, rows)
            return
        known = self._known.setdefault(storage, {})
        size = storage.nbytes() // target.element_size()
        if target.numel() == size and not set(known) - {_geometry(target)}:
            self.put(target, rows)
            return
        if any(key[3].itemsize != target.element_size() for key in known):
            for key in known:
                known[key] = lost(target, "a write to a view of another type", len(key[1]))
            self.put(target, lost(target, "a write to a view of another type"))
            return
        ids = torch.full((size,), NOBODY, device=target.device)  # of all that memory, in its order
        for (offset, shape, stride, _), each in known.items():
            _written_to(ids, each.ids.expand(shape), offset, stride)
        _written_to(
            ids, rows.ids.expand(target.shape), int(target.storage_offset()), target.stride()
        )
        others = [*known.values(), rows]
        written = RowSamples(
            ids,
            is_by_value=any(each.is_by_value for each in others),
            lost_by=next((each.lost_by for each in others if each.lost_by is not None), None),
        )
        # Views are looked up in the whole, as they are asked for.
        known.clear()
        known[0, torch.Size([size]), (1,), target.dtype] = replace(written, ids=compressed(ids))


def _written_to(flat: Tensor, ids: Tensor, offset: int, stride: Sequence[int]) -> None:
    for dim, step in enumerate(stride):
        if step == 0 and ids.shape[dim]:  # several elements in one place
            ids = ids.narrow(dim, 0, 1)
    flat.as_strided(ids.shape, stride, offset).copy_(ids)


def _seen_through(known: dict[tuple, RowSamples], tensor: Tensor) -> RowSamples:
    """The samples of a view that was made before its memory was written to."""
    first, last = tensor.storage_offset(), tensor.storage_offset()
    last += sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    for (offset, shape, stride, dtype), rows in known.items():
        is_whole = stride == torch.empty(shape, device="meta").stride()
        end = offset + math.prod(shape)
        if is_whole and dtype == tensor.dtype and offset <= first and last < end:
            ids = rows.ids.expand(shape).contiguous()
            view = ids.as_strided(tensor.shape, tensor.stride(), first - offset)
            return replace(rows, ids=compressed(view))
    return lost(tensor, "a view made elsewhere")


def _storage(tensor: Tensor) -> Any:
    """The storage of a tensor; None if it has none of its own."""
    try:
        return None if tensor.is_nested else tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, nested, a wrapper of others
        return None


def _geometry(tensor: Tensor) -> tuple:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def check_constant(call: Call, saved: Sequence[Tensor], dim: int, output: Tensor) -> None:
    """Make sure that rows which are taken for samples by their place are all the same.

    Such as zeros, which a recurrent network begins with. Those of a batch that was read out of
    torch and back would lie wherever that put them.

    Raises:
        UnsupportedOperation: If they are not.
    """
    with _disable_current_modes():
        rows = [x for x in saved if x.ndim > dim and x.shape[dim] == output.shape[dim] > 1]
        if all(bool((each == each.narrow(dim, 0, 1)).all()) for each in rows):
            return
    raise UnsupportedOperation(
        f"{', '.join(call.names)}: {call} is given rows that come neither from the batch by "
        "torch's functions nor are the same for all samples, so that it is not known whose they "
        "are. Do not take values out of torch (numpy, lists) to make rows of them"
    )
