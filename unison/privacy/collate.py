"""What a collated batch looks like: where its records lie, and how it looks without any.

[Note: one shape] Kernels round otherwise at other shapes. So what a record computes depends on the
shape of its batch, and that must not depend on other records: their number is the draw's, which
knows of no record, and their rows have one public shape (`RowShapes`). docs/proof.md has the rest.
"""

import copy
import dataclasses
import numbers
from collections.abc import Mapping, MutableMapping, Sequence
from operator import gt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from unison import check
from unison.errors import BadInput, UnsupportedOperation

_PLAIN = (str, bytes, numbers.Number, np.generic, type(None), torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A tensor, an array or a list with one entry per record along `dim`."""

    dim: int


@dataclasses.dataclass(frozen=True)
class _Fixed:
    """Something that does not grow with the number of records."""


@dataclasses.dataclass(frozen=True)
class _Group:
    """A container of parts."""

    parts: dict[Any, "_Part"]


_Part = _Rows | _Fixed | _Group


class BatchLayout:
    """Where the records of a collated batch lie, learned from batches of one and of two records.

    A dimension's size does not tell whether it counts records: the one that grows from 1 to 2 does.
    Tensors, arrays, lists and tuples may hold rows; dicts and other mappings, lists, tuples, named
    tuples, dataclasses and classes registered with torch's pytrees may hold parts.

    Args:
        one: A batch of one record.
        two: A batch of two records.
        rows_per_record: Rows that each record has.

    Raises:
        UnsupportedOperation: Part of the batch cannot be cut into records, or nothing in it has
            one row per record.
    """

    def __init__(self, one: Any, two: Any, rows_per_record: int = 1) -> None:
        self._rows = rows_per_record
        self._root = _learn(one, two, "batch", rows_per_record)
        if not _has_rows(self._root):
            raise UnsupportedOperation(
                f"nothing in the batch that collate_fn returns ({type(one).__name__}) has one row "
                "per record, so its samples cannot be told apart. Remedy: return tensors with the "
                "records along one dimension"
            )
        # Cut now, so that what cannot be rebuilt fails before the first step, and so that no
        # record stays in memory.
        self._empty = _cut(one, self._root, "batch")

    def empty(self) -> Any:
        """Return a new batch of no records: the same structure and dtypes, zero rows.

        What does not grow with the number of records is a copy of what the batch of one had.
        """
        return _cut(self._empty, self._root, "batch")

    def check(self, batch: Any, num_records: int) -> None:
        """Make sure that every part with rows has `num_records` of them.

        Raises:
            BadInput: It has more or fewer, or is missing; naming the part.
        """
        _check(batch, self._root, num_records, self._rows, "batch")

    def fitted(self, batch: Any, shapes: "RowShapes") -> Any:
        """Return a batch whose rows have their public shapes; see `RowShapes`."""
        return _fitted(batch, self._root, shapes.padding, shapes, "batch", None)


PUBLIC = "public"
_IGNORED = -100  # a label that losses leave out

RowShape = str | Mapping[Any, int | Sequence[int]] | None
"""How `make_private(row_shape=)` says which shape rows have."""


class RowShapes:
    """Sees to it that the rows of all records have one shape, which is public.

    Args:
        row_shape: `"public"` if lengths are no secret; or the shape of a record's row by the name
            (or place) of a tensor in the batch, which shorter ones are padded to; None if they are
            of one shape as they come.
        padding: A batch of one record to take padding from; zeros unless given, and -100 for
            `"labels"`.
    """

    def __init__(self, row_shape: RowShape = None, padding: Any = None) -> None:
        if isinstance(row_shape, str):
            check.one_of([PUBLIC], row_shape=row_shape)
        self._are_public = row_shape == PUBLIC
        given = row_shape if isinstance(row_shape, Mapping) else {}
        self._wanted = {
            key: (size,) if isinstance(size, int) else tuple(size) for key, size in given.items()
        }
        self._known: dict[str, tuple[int, ...]] = {}
        self._met: set[Any] = set()  # names of tensors with rows
        self.padding = padding

    def check_names(self) -> None:
        """Make sure that every tensor that `row_shape` names has been met.

        Raises:
            BadInput: Naming one that has not.
        """
        if missing := [key for key in self._wanted if key not in self._met]:
            raise BadInput(
                f"row_shape has {missing[0]!r}, and the batch that collate_fn returns has tensors "
                f"{sorted(self._met, key=str)}; name those, or their places in a tuple"
            )

    @property
    def unit(self) -> str:
        """What is protected, in words."""
        return "one row of the data set" + (", but not its length" if self._are_public else "")

    def fit(self, value: Any, dim: int, padding: Any, path: str, key: Any) -> Any:
        """Return one part of a batch with rows of the shape that they should have.

        Raises:
            BadInput: If rows are longer, or of another shape than those before.
        """
        if not isinstance(value, Tensor | np.ndarray):
            return value
        self._met.add(key)
        wanted, found = self._wanted.get(key), _row_shape(value, dim)
        if wanted is not None and wanted != found:
            if len(wanted) != len(found) or any(map(gt, found, wanted)):
                raise BadInput(
                    f"rows of {path} have shape {list(found)}, and row_shape is {list(wanted)}: "
                    "cut longer records in the data set, or give a larger row_shape"
                )
            value, found = _grown(value, dim, wanted, padding, key), wanted
        known = self._known.setdefault(path, found)
        if known != found and not self._are_public:
            raise BadInput(
                f"rows of {path} have shape {list(found)} in this batch and {list(known)} in "
                "another: how long its neighbours are would show in how a record's gradient is "
                "rounded. Pad all rows to one length (padding='max_length'), or let make_private "
                f"do it: row_shape={{{key!r}: {list(map(max, found, known))}, ...}}; if lengths "
                "are public, row_shape='public'"
            )
        return value


def _row_shape(value: Any, dim: int) -> tuple[int, ...]:
    shape = tuple(value.shape)
    return (*shape[:dim], *shape[dim + 1 :])


def _grown(value: Any, dim: int, wanted: tuple[int, ...], padding: Any, key: Any) -> Any:
    """Return rows [records, ...] at the beginning of larger ones."""
    rows = torch.as_tensor(value).movedim(dim, 0)
    if padding is None:
        grown = rows.new_full((len(rows), *wanted), _IGNORED if key == "labels" else 0)
    else:
        row = torch.as_tensor(padding).movedim(dim, 0)[:1]
        if tuple(row.shape[1:]) != wanted:
            raise BadInput(
                f"padding_row has shape {list(row.shape[1:])} at {key!r}, and row_shape says "
                f"{list(wanted)}"
            )
        grown = row.expand(len(rows), *wanted).clone()
    grown[(slice(None), *map(slice, rows.shape[1:]))] = rows
    grown = grown.movedim(0, dim)
    return grown if isinstance(value, Tensor) else grown.numpy()


def _fitted(value: Any, part: _Part, padding: Any, shapes: RowShapes, path: str, key: Any) -> Any:
    match part:
        case _Rows(dim):
            return shapes.fit(value, dim, padding, path, key)
        case _Fixed():
            return value
        case _Group(parts):
            found, others = _parts(value) or {}, _parts(padding) or {}
            made = {
                name: _fitted(
                    found[name], inner, others.get(name), shapes, f"{path}[{name!r}]", name
                )
                for name, inner in parts.items()
                if name in found
            }
            changed = any(made[name] is not found[name] for name in made)
            return _rebuilt(value, {**found, **made}, path) if changed else value


def _learn(one: Any, two: Any, path: str, rows: int) -> _Part:
    if type(one) is not type(two):
        raise UnsupportedOperation(
            f"collate_fn returns {type(one).__name__} for one record and {type(two).__name__} for "
            f"two at {path}. Remedy: return the same structure for any number of records"
        )
    if isinstance(one, Tensor | np.ndarray):
        return _learn_array(one, two, path, rows)
    if isinstance(one, list | tuple) and (len(one), len(two)) in ((1, 2), (rows, 2 * rows)):
        return _Rows(0)
    parts, others = _parts(one), _parts(two)
    if parts is None or others is None:
        if isinstance(one, _PLAIN) or (one == two) is True:
            return _Fixed()
        raise UnsupportedOperation(
            f"do not know how to find the records of {path}, of class {type(one).__name__}. "
            "Remedy: return tensors, arrays, lists, mappings, named tuples or dataclasses from "
            "collate_fn, or register the class with torch.utils._pytree.register_pytree_node"
        )
    if list(parts) != list(others):
        raise UnsupportedOperation(
            f"collate_fn returns other parts for two records than for one at {path}: "
            f"{list(others)} and {list(parts)}. Remedy: return the same structure for any number "
            "of records"
        )
    return _Group({key: _learn(parts[key], others[key], f"{path}[{key!r}]", rows) for key in parts})


def _learn_array(one: Any, two: Any, path: str, rows: int) -> _Part:
    if isinstance(one, Tensor) and (one.is_nested or two.is_nested):
        raise UnsupportedOperation(
            f"{path} is a nested tensor, whose rows cannot be cut. Remedy: pad it in collate_fn"
        )
    before, after = list(one.shape), list(two.shape)
    if len(before) == len(after):
        sizes = enumerate(zip(before, after, strict=True))
        grown = [dim for dim, size in sizes if size in ((rows, 2 * rows), (1, 2))]
        if len(grown) == 1:
            return _Rows(grown[0])
        if before == after:
            return _Fixed()
    raise UnsupportedOperation(
        f"{path} has shape {before} for one record and {after} for two: no single dimension "
        "counts the records. Remedy: return tensors with one row per record from collate_fn (pad, "
        "do not concatenate or squeeze)"
    )


def _has_rows(part: _Part) -> bool:
    return isinstance(part, _Rows) or (
        isinstance(part, _Group) and any(map(_has_rows, part.parts.values()))
    )


def _cut(value: Any, part: _Part, path: str) -> Any:
    """A copy of `value` with no rows left."""
    match part:
        case _Rows(dim):
            if isinstance(value, Tensor):
                return value.narrow(dim, 0, 0).clone()
            if isinstance(value, np.ndarray):
                return value[(slice(None),) * dim + (slice(0, 0),)].copy()
            return value[:0]
        case _Fixed():
            return value.clone() if isinstance(value, Tensor) else copy.copy(value)
        case _Group(parts):
            found = _parts(value)
            assert found is not None
            cut = {key: _cut(found[key], parts[key], f"{path}[{key!r}]") for key in parts}
            return _rebuilt(value, cut, path)


def _check(value: Any, part: _Part, num_records: int, each: int, path: str) -> None:
    match part:
        case _Rows(dim):
            shape = _shape(value)
            rows = shape[dim] if dim < len(shape) else "no"
            if rows not in (num_records, num_records * each):
                raise BadInput(
                    f"collate_fn was given {num_records} records and returned {rows} rows in "
                    f"{path} (shape {shape}, records along dim {dim}); each record must give "
                    f"exactly {each} (make_private(rows_per_sample=)), or its gradient cannot be "
                    "clipped. Remedy: filter or expand records in the data set, not in collate_fn"
                )
        case _Group(parts):
            found = _parts(value) or {}
            for key, inner in parts.items():
                if key not in found and _has_rows(inner):
                    raise BadInput(
                        f"collate_fn returned a batch without {path}[{key!r}], which the batch of "
                        "record 0 has. Remedy: return the same structure for every batch"
                    )
                if key in found:
                    _check(found[key], inner, num_records, each, f"{path}[{key!r}]")
        case _Fixed():
            pass


def _shape(value: Any) -> list[int]:
    if isinstance(value, Tensor | np.ndarray):
        return list(value.shape)
    return [len(value)] if isinstance(value, list | tuple) else []


def _parts(value: Any) -> dict[Any, Any] | None:
    """The parts of a container by name or number, or None if it is none."""
    if isinstance(value, _PLAIN):
        return None
    if _is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in _init_fields(value)}
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", range(len(value)))
        return dict(zip(names, value, strict=True))
    flat, spec = tree_flatten(value, is_leaf=lambda node: node is not value)
    return None if spec.is_leaf() else dict(enumerate(flat))


def _rebuilt(value: Any, parts: dict[Any, Any], path: str) -> Any:
    """A container like `value`, of other parts."""
    try:
        if _is_dataclass(value):
            return dataclasses.replace(value, **parts)
        if isinstance(value, MutableMapping):
            clone = copy.copy(value)  # keeps what the class holds beside its items
            clone.update(parts)
            return clone
        if isinstance(value, Mapping):
            return type(value)(parts)  # type: ignore[call-arg]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*parts.values())
        if isinstance(value, list | tuple):
            return type(value)(parts.values())
        _, spec = tree_flatten(value, is_leaf=lambda node: node is not value)
        return tree_unflatten(list(parts.values()), spec)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UnsupportedOperation(
            f"cannot make an empty {type(value).__name__} for {path}: {error}. Poisson sampling "
            "may draw no record at all. Remedy: return a dict, a tuple or a dataclass that can be "
            "built from its parts"
        ) from error


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _init_fields(value: Any) -> list[dataclasses.Field[Any]]:
    # The others are made by __post_init__, and are made again when the batch is rebuilt.
    return [field for field in dataclasses.fields(value) if field.init]
