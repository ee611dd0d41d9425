"""The loader of private training: draws a logical batch, hands it out in physical batches.

[Note: one shape] Kernels round otherwise at other shapes. So what a record computes depends on the
shape of its batch, and that must not depend on other records: their number is the draw's, which
knows of no record, and their rows have one public shape (`PrivateLoader._fit`); see
docs/proof.md.
"""

import copy
import dataclasses
import inspect
import itertools
import numbers
import random
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from operator import gt
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, Dataset

from unison import check
from unison.errors import BadInput, UnsupportedOperation
from unison.privacy.arguments import KEPT_SETTINGS, refuse_contradiction, refuse_unknown_loader
from unison.privacy.sampling import (
    PhysicalBatch,
    Sampling,
    check_drawing,
    cut_passes,
    drawn_records,
    physical_batches,
    steps_per_epoch,
)
from unison.rng import Key

if TYPE_CHECKING:
    from unison.privacy.training import PrivateTraining

_PLAIN = (str, bytes, numbers.Number, np.generic, type(None), torch.dtype, torch.device)
PUBLIC = "public"
_IGNORED = -100  # a label that losses leave out

Path = tuple[Any, ...]
"""Names or numbers of the containers around a part of a batch, and its own."""

Dims = dict[Path, int | None]
"""The dimension of records in each part of a batch; None if it does not grow with their number."""

RowShape = str | Mapping[Any, int | Sequence[int]] | None
"""How `make_private(row_shape=)` says which shape rows have."""


class PrivateLoader:
    """A `DataLoader` whose batches are drawn as the privacy accounting assumes.

    One pass over it is one epoch: `len(loader)` logical batches, fewer if the epoch was begun
    before (a `break`, a resumed run). Steps are numbered on and on across epochs. A logical batch
    that is larger than `max_physical_batch_size` comes in several physical batches, one after the
    other; `current` says what the one in the user's hands is.

    Guarantees:
        The records of a step are those of `drawn_records`, whichever settings the loader has.
        `current` belongs to the batch that was handed out last, also where workers have read
        ahead. The user's generator, and torch's, numpy's and Python's global ones, are not used for
        drawing. A draw of no records gives a batch of zero rows.

    Args:
        data_loader: The user's loader. Its data set, `collate_fn`, workers and memory settings are
            kept; the order of its records is replaced.
        sampling: How records are drawn.
        key: Root key of the run; the same on every rank.
        max_physical_batch_size: Most records in a physical batch.
        rank: The rank that loads; every rank loads its own part of the same draw.
        num_ranks: Ranks that share each logical batch.
        granule: Records that stay together on one rank and in one pass.
        rows_per_record: Rows that `collate_fn` makes of each record, one after the other.
        device: Where to put the tensors of a batch; None leaves them where they are.
        row_shape: `"public"` if lengths are no secret; or the shape of a record's row by the name
            (or place) of a tensor in the batch, which shorter ones are padded to; None if they are
            of one shape as they come.
        padding_row: A record to take padding from, as the data set gives records; zeros unless
            given, and -100 for `"labels"`.

    Attributes:
        padding: A batch of that record; None if there is none.
        current: What was handed out last; None before the first batch and after an epoch's end.
        training: What is trained on the batches. It is asked before a logical batch is drawn, where
            what it raises the user's loop raises, presents every batch, and is told when the loop
            is left or a logical batch given up. None if nothing is.
        digests: Of some records, part by part; see `refuse_mixing`.

    Raises:
        BadInput: The loader's settings contradict the sampling.
        UnsupportedOperation: The loader chooses records in a way that would have to be replaced.
    """

    def __init__(
        self,
        data_loader: DataLoader[Any],
        sampling: Sampling,
        key: Key,
        *,
        max_physical_batch_size: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        granule: int = 1,
        rows_per_record: int = 1,
        device: torch.device | None = None,
        row_shape: RowShape = None,
        padding_row: Any = None,
    ) -> None:
        if isinstance(data_loader, PrivateLoader):
            raise BadInput(
                "the loader is private already: drawing from its draws would have another "
                "sampling rate than the ledger says. Remedy: pass the DataLoader it was made from"
            )
        refuse_unknown_loader(data_loader)
        num_records = len(data_loader.dataset)  # type: ignore[arg-type]
        check_drawing(sampling, key, num_records)
        refuse_contradiction(data_loader, sampling)
        self._sampling, self._key, self._num_records = sampling, key, num_records
        self._share: dict[str, Any] = {
            "rank": rank,
            "num_ranks": num_ranks,
            "granule": granule,
            "max_physical_batch_size": max_physical_batch_size,
        }
        cut_passes(0, **self._share)  # raises here what it would raise at the first step
        self._requests, self._batch_size = _Requests(), data_loader.batch_size
        # The user's settings, with the records that are drawn.
        settings = {name: getattr(data_loader, name) for name in KEPT_SETTINGS}
        self._loader = DataLoader(data_loader.dataset, batch_sampler=self._requests, **settings)
        self.padding = None if padding_row is None else self.collate_fn([padding_row])
        if isinstance(row_shape, str):
            check.one_of([PUBLIC], row_shape=row_shape)
        self._are_public = row_shape == PUBLIC
        given = row_shape if isinstance(row_shape, Mapping) else {}
        self._wanted = {
            key: (size,) if isinstance(size, int) else tuple(size) for key, size in given.items()
        }
        self._known: dict[Path, tuple[int, ...]] = {}  # shapes of rows
        self._rows_per_record, self._device = rows_per_record, device
        self._dims: Dims = {}  # none until they are learned
        self._empty: Any = None  # a batch of no records: the same structure and dtypes
        self._next_step = 0
        self._iteration: weakref.ref[Generator[Any, None, None]] | None = None
        self.current: PhysicalBatch | None = None
        self.training: PrivateTraining | None = None
        self.digests: dict[str, str] = {}

    @property
    def sampling(self) -> Sampling:
        """How records are drawn."""
        return self._sampling

    @property
    def unit(self) -> str:
        """What is protected, in words."""
        return "one row of the data set" + (", but not its length" if self._are_public else "")

    @property
    def dataset(self) -> Dataset[Any]:
        """The user's data set."""
        return self._loader.dataset

    @property
    def batch_size(self) -> int | None:
        """The batch size that the user's loader was built with."""
        return self._batch_size

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any]:
        """The user's collate function."""
        return self._loader.collate_fn

    @property
    def num_workers(self) -> int:
        """Worker processes that read records."""
        return self._loader.num_workers

    @property
    def next_step(self) -> int:
        """The step that is drawn next, or that of the logical batch that is still open."""
        return self._next_step

    @property
    def is_open(self) -> bool:
        """Whether a logical batch is handed out in part."""
        return self.current is not None and not self.current.is_last

    def __len__(self) -> int:
        """Logical batches in an epoch, a public number: optimizer steps, not physical batches."""
        return steps_per_epoch(self._sampling)

    @property
    def sampler(self) -> NoReturn:
        """There is none: accelerate's `skip_first_batches` would make another loader of it.

        Raises:
            AttributeError: Always, so that `hasattr` says no.
        """
        raise AttributeError(
            "a PrivateLoader has no sampler of its own: it draws records by a secret key, and none "
            "may be skipped or drawn by another sampler, as accelerate's skip_first_batches would. "
            "To go on after a stop load the engine's state, which says where the loader was"
        )

    batch_sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        if self._live() is not None:
            raise BadInput(
                "this loader is being iterated over already; two iterations would mix their "
                "logical batches. Remedy: finish or delete the first one, or call abandon()"
            )
        if self.is_open:
            raise BadInput(
                f"the logical batch of step {self._next_step} was left before its last physical "
                "batch, so its gradient is incomplete. Remedy: leave the loop only where "
                "`loader.current.is_last`, or give the step up with loader.abandon()"
            )
        self._refuse_trainer()
        iteration = self._hand_out()
        self._iteration = weakref.ref(iteration)
        return iteration

    def abandon(self) -> None:
        """End the iteration under way and give up a logical batch that is not trained on yet.

        Its step is drawn again by the next iteration.
        """
        live, current, training = self._live(), self.current, self.training
        if current is not None and training is not None and training.on_abandon():
            self._next_step = current.step  # also where its last physical batch was handed out
        if live is not None:
            live.close()
        self.current = None

    def limit_rows(self, max_rows: int | None) -> None:
        """Let a physical batch have so many records at most, in steps that are yet to be drawn."""
        self._share["max_physical_batch_size"] = max_rows

    def set_start_step(self, step: int) -> None:
        """Go on from a step, as a resumed run does.

        Raises:
            BadInput: An iteration is under way, or a logical batch is open.
        """
        check.not_negative(step=step)
        if self._live() is not None or self.is_open:
            raise BadInput(
                f"cannot go on from step {step} in the middle of step {self._next_step}. Remedy: "
                "finish the iteration, or call abandon() first"
            )
        self._next_step = step
        self.current = None

    def renew(self, key: Key) -> None:
        """Draw under another key from now on, as before a step is repeated.

        Raises:
            BadInput: An iteration is under way, or a logical batch is open.
        """
        self.set_start_step(self._next_step)
        self._key = key

    def state_dict(self) -> dict[str, int]:
        """What a resumed run needs: the next step. Never the key."""
        return {"next_step": self._next_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from where `state_dict` was taken."""
        if set(state) != {"next_step"}:
            raise BadInput(f"expected the state of a PrivateLoader, found keys {sorted(state)}")
        self.set_start_step(state["next_step"])

    def __repr__(self) -> str:
        return f"PrivateLoader({self.sampling!r}, next_step={self._next_step})"

    def _live(self) -> Generator[Any, None, None] | None:
        """The iteration that someone still holds and that has not ended."""
        iteration = self._iteration() if self._iteration is not None else None
        if iteration is None or inspect.getgeneratorstate(iteration) == inspect.GEN_CLOSED:
            return None
        return iteration

    def _refuse_trainer(self) -> None:
        """Make sure that no Trainer takes physical batches for steps, or several for one step.

        Raises:
            BadInput: It is iterated over by a Trainer of transformers with such settings.
        """
        frame: Any = sys._getframe(1) if "transformers.trainer" in sys.modules else None
        while frame is not None and frame.f_globals.get("__name__") != "transformers.trainer":
            if frame.f_globals.get("__name__") == "unison.hf.trainer":
                return
            frame = frame.f_back
        if frame is None:
            return
        accumulation = frame.f_locals["self"].args.gradient_accumulation_steps
        limit = self._share["max_physical_batch_size"]
        found = f"max_physical_batch_size={limit}" if limit is not None else ""
        found = f"gradient_accumulation_steps={accumulation}" if accumulation > 1 else found
        if found:
            raise BadInput(
                f"transformers' Trainer takes batches of the loader for steps, and with {found} "
                "they are not: it would end too early, or add up noise. Use "
                "unison.hf.PrivateTrainer(..., privacy=unison.Privacy(...)) in its place"
            )

    def _hand_out(self) -> Generator[Any, None, None]:
        # Workers are given passes before the user gets them. Both read one list of passes, so the
        # n-th batch that comes back is of the n-th pass that holds records.
        first = self._next_step
        steps = range(first, (first // len(self) + 1) * len(self))  # to the end of its epoch
        drawn = drawn_records(self._sampling, self._key, self._num_records, steps)
        # Nothing that workers are given may hold this loader: garbage in a circle has its queues
        # closed before its workers are told to end, and they are waited for, 5 seconds each.
        share = self._share
        passes, ahead = itertools.tee(
            each
            for step, records in zip(steps, drawn, strict=True)
            for each in physical_batches(records, step=step, **share)
        )
        wanted = (each.record_ids.tolist() for each in ahead if each.num_samples)
        # Before the first batch, record 0 once and twice: what grows from the first to the second
        # holds records. And two others, which may be longer.
        last = self._num_records - 1
        probes = [] if self._dims else [[0], [0, 0], [last // 2], [last]]
        self._requests.pending = itertools.chain(probes, wanted)
        self._loader.generator = self._seeds_of_workers()
        loaded = iter(self._loader)
        if not self._dims:
            with _kept_generators():
                self._learn_layout(loaded)
        try:
            for each in passes:
                if each.is_first and self.training is not None:
                    self.training.before_draw(each.step)
                try:
                    if each.num_samples:
                        batch = next(loaded)
                    else:
                        batch = map_parts(self._empty, self._dims, without_rows, is_new=True)
                    check_rows(batch, self._dims, each.num_samples, self._rows_per_record)
                    batch = map_parts(batch, self._dims, self._fit)
                except BaseException:  # a file, Ctrl-C: nobody has the batch: its step is not open
                    if self.training is not None:
                        self.training.on_abandon()
                    self.current = None
                    raise
                self.current = each
                if each.is_last:
                    self._next_step = each.step + 1
                yield batch if self.training is None else self.training.present(batch, each)
                if self.training is not None:
                    self.training.recorder.remove()
        except GeneratorExit:  # the loop was left, perhaps with a batch that is yet to go backward
            self.leave()
            raise
        self.current = None

    def leave(self) -> None:
        """Follow no operations after the last batch's backward pass, until the next is drawn."""
        if self.training is not None:
            self.training.recorder.leave()

    def _learn_layout(self, loaded: Iterator[Any]) -> None:
        """Learn what batches look like, before any record is drawn.

        Raises:
            UnsupportedOperation: Part of the batch cannot be cut into records, or its rows of
                numbers lie in no tensor, where a loss could be followed.
            BadInput: If rows of record 0 and of some others do not have one shape, `row_shape`
                names what is not in the batch, or records are mixed.
        """
        try:
            one, two = next(loaded), next(loaded)
        except Exception as error:
            error.add_note(
                "Raised while record 0 was read once and twice, to learn where a batch holds its "
                "records: Poisson sampling may draw one record, or none."
            )
            raise
        dims, not_one_tensor = learn_dims(one, two, self._rows_per_record)
        # Cut now, so that what cannot be rebuilt fails before the first step, and so that no
        # record stays in memory.
        self._empty = map_parts(one, dims, without_rows, is_new=True)
        map_parts(self._empty, dims, self._fit)
        met = {path[-1] if path else None for path in self._known}
        if missing := [key for key in self._wanted if key not in met]:
            raise BadInput(
                f"row_shape has {missing[0]!r}, and the batch that collate_fn returns has tensors "
                f"{sorted(met, key=str)}; name those, or their places in a tuple"
            )
        for _ in range(2):
            try:
                batch = next(loaded)
            except Exception:  # a record that cannot be read alone is told of when it is drawn
                continue
            map_parts(batch, dims, self._fit)
        if not_one_tensor is not None and self.training is not None:
            raise UnsupportedOperation(
                f"collate_fn returns {not_one_tensor}, of which nobody sees what the loss "
                "makes of it. Return one tensor with the records along a dimension: "
                "torch.stack(rows), after torch.nn.utils.rnn.pad_sequence or the like where shapes "
                "differ; torch.from_numpy(array)"
            )
        self._refuse_mixing()
        self._dims = dims

    def _refuse_mixing(self) -> None:
        """Make sure that `collate_fn` makes each record's rows of that record alone.

        Raises:
            BadInput: It does not.
        """
        from unison.privacy.mixing import refuse_mixing  # asks this file where records lie

        settings = {name: getattr(self._loader, name) for name in KEPT_SETTINGS}
        seeds, salt = self._seeds_of_workers(), self._key.derive("records")
        self.digests = refuse_mixing(self.dataset, self._rows_per_record, settings, seeds, salt)

    def _fit(self, value: Any, dim: int | None, path: Path) -> Any:
        """Return one part of a batch, records along `dim`, with rows of the shape they should have.

        Raises:
            BadInput: If rows are longer, or of another shape than those before.
        """
        if dim is not None and isinstance(value, Tensor | np.ndarray):
            key, found = path[-1] if path else None, (*value.shape[:dim], *value.shape[dim + 1 :])
            wanted = self._wanted.get(key, found)
            if wanted != found:
                if len(wanted) != len(found) or any(map(gt, found, wanted)):
                    raise BadInput(
                        f"rows of {_name(path)} have shape {list(found)}, and row_shape is "
                        f"{list(wanted)}: cut longer records in the data set, or give a larger "
                        "row_shape"
                    )
                padding = self.padding
                for each in path:
                    padding = (_parts(padding) or {}).get(each)
                value, found = _grown(value, dim, wanted, padding, key), wanted
            known = self._known.setdefault(path, found)
            if known != found and not self._are_public:
                longest = list(map(max, found, known))
                raise BadInput(
                    f"rows of {_name(path)} have shape {list(found)} in this batch and "
                    f"{list(known)} in another: how long its neighbours are would show in how a "
                    "record's gradient is rounded. Pad all rows to one length "
                    "(padding='max_length'), or let make_private do it: "
                    f"row_shape={{{key!r}: {longest}, ...}}; if lengths are public, "
                    "row_shape='public'"
                )
        if self._device is not None and isinstance(value, Tensor):
            value = value.to(self._device, non_blocking=True)
        return value

    def _seeds_of_workers(self) -> torch.Generator:
        """Where the data loader takes its workers' seeds from, instead of the global generator."""
        secret = self._key.derive("workers", self._next_step, self._share["rank"], size=8)
        generator = torch.Generator(device=torch.get_default_device())
        return generator.manual_seed(int.from_bytes(secret, "little") >> 1)


class _Requests:
    """The lists of records that the inner loader reads; set anew before each iteration."""

    def __init__(self) -> None:
        self.pending: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.pending


@contextmanager
def _kept_generators() -> Iterator[None]:
    """Undo what reading a record takes from the global generators in this process."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - data sets may use the old state
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


# ---- what a collated batch looks like ------------------------------------------------------------


def learn_dims(one: Any, two: Any, rows_per_record: int = 1) -> tuple[Dims, str | None]:
    """Learn where records lie, from a batch of one record and one of two.

    A dimension's size does not tell whether it counts records: the one that grows from 1 to 2 does.
    Tensors, arrays, lists and tuples may hold rows; dicts and other mappings, lists, tuples, named
    tuples, dataclasses and classes registered with torch's pytrees may hold parts.

    Returns:
        The dimensions; and the name of a part whose rows of numbers do not lie in one tensor, None
        if there is none.

    Raises:
        UnsupportedOperation: Part of the batch cannot be cut into records, or nothing in it has
            one row per record.
    """
    dims: Dims = {}
    not_one_tensor: str | None = None

    def learn(one: Any, two: Any, path: Path) -> None:
        nonlocal not_one_tensor
        if type(one) is not type(two):
            raise UnsupportedOperation(
                f"collate_fn returns {type(one).__name__} for one record and {type(two).__name__} "
                f"for two at {_name(path)}. Remedy: return the same structure for any number of "
                "records"
            )
        if isinstance(one, Tensor | np.ndarray):
            dim = dims[path] = _dim_of_records(one, two, _name(path), rows_per_record)
            if isinstance(one, np.ndarray) and dim is not None and one.dtype.kind in "biufc":
                not_one_tensor = f"a NumPy array at {_name(path)}"
            return
        grows = (1, 2), (rows_per_record, 2 * rows_per_record)
        if isinstance(one, list | tuple) and (len(one), len(two)) in grows:
            dims[path] = 0
            if any(isinstance(leaf, Tensor | np.ndarray) for leaf in tree_flatten(one)[0]):
                not_one_tensor = f"tensors in a {type(one).__name__} at {_name(path)}"
            return
        parts, others = _parts(one), _parts(two)
        if parts is None or others is None:
            if not isinstance(one, _PLAIN) and (one == two) is not True:
                raise UnsupportedOperation(
                    f"do not know how to find the records of {_name(path)}, of class "
                    f"{type(one).__name__}. Remedy: return tensors, arrays, lists, mappings, named "
                    "tuples or dataclasses from collate_fn, or register the class with "
                    "torch.utils._pytree.register_pytree_node"
                )
            dims[path] = None
            return
        if list(parts) != list(others):
            raise UnsupportedOperation(
                f"collate_fn returns other parts for two records than for one at {_name(path)}: "
                f"{list(others)} and {list(parts)}. Remedy: return the same structure for any "
                "number of records"
            )
        for key in parts:
            learn(parts[key], others[key], (*path, key))

    learn(one, two, ())
    if all(dim is None for dim in dims.values()):
        raise UnsupportedOperation(
            f"nothing in the batch that collate_fn returns ({type(one).__name__}) has one row "
            "per record, so its samples cannot be told apart. Remedy: return tensors with the "
            "records along one dimension"
        )
    return dims, not_one_tensor


def check_rows(batch: Any, dims: Dims, num_records: int, rows_per_record: int = 1) -> None:
    """Make sure that every part with rows has those of `num_records`.

    Raises:
        BadInput: It has more or fewer, or is missing; naming the part.
    """
    for path, dim in dims.items():
        if dim is None:
            continue
        value = batch
        for depth, key in enumerate(path, 1):
            parts = _parts(value) or {}
            if key not in parts:
                raise BadInput(
                    f"collate_fn returned a batch without {_name(path[:depth])}, which the "
                    "batch of record 0 has. Remedy: return the same structure for every batch"
                )
            value = parts[key]
        shape = [len(value)] if isinstance(value, list | tuple) else []
        if isinstance(value, Tensor | np.ndarray):
            shape = list(value.shape)
        rows = shape[dim] if dim < len(shape) else "no"
        if rows not in (num_records, num_records * rows_per_record):
            raise BadInput(
                f"collate_fn was given {num_records} records and returned {rows} rows in "
                f"{_name(path)} (shape {shape}, records along dim {dim}); each record must "
                f"give exactly {rows_per_record} (make_private(rows_per_sample=)), or its gradient "
                "cannot be clipped. Remedy: filter or expand records in the data set, not in "
                "collate_fn"
            )


def contents_of(
    batch: Any, dims: Dims, num_records: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, list[Any]]]:
    """Return, by the name of a part, the shape of a row and what each record has there.

    What has no rows counts as every record's, where it is a tensor or an array of floating
    point numbers; else it is left out. Contents can be hashed, and are equal if all bits are.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    columns: dict[str, list[Any]] = {}

    def collect(value: Any, dim: int | None, path: Path) -> Any:
        is_array = isinstance(value, Tensor | np.ndarray)
        if dim is None:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            if is_float or (isinstance(value, np.ndarray) and value.dtype.kind == "f"):
                shapes[_name(path)] = tuple(value.shape)
                columns[_name(path)] = [_content(value)] * num_records
            return value
        if is_array:
            shapes[_name(path)] = (*value.shape[:dim], *value.shape[dim + 1 :])
        rows = value if not is_array else value.swapaxes(dim, 0)
        each = len(rows) // num_records
        columns[_name(path)] = [
            tuple(_content(row) for row in rows[i * each : (i + 1) * each])
            for i in range(num_records)
        ]
        return value

    map_parts(batch, dims, collect)
    return shapes, columns


def map_parts(
    value: Any,
    dims: Dims,
    change: Callable[[Any, int | None, Path], Any],
    path: Path = (),
    is_new: bool = False,
) -> Any:
    """A batch of what `change` makes of each part; itself if all stay, unless it `is_new`.

    Args:
        value: The batch, or a part of it.
        dims: Where its records lie.
        change: Takes a part, its dimension of records or None, and its path.
        path: Of the value.
        is_new: Whether all containers are made anew.
    """
    if path in dims:
        return change(value, dims[path], path)
    parts = _parts(value) or {}
    made = {key: map_parts(parts[key], dims, change, (*path, key), is_new) for key in parts}
    is_changed = any(made[key] is not parts[key] for key in parts)
    return _rebuilt(value, made, _name(path)) if is_new or is_changed else value


def without_rows(value: Any, dim: int | None, _: Path) -> Any:
    """Return a part of a batch of no records: a copy of what does not grow with their number."""
    if dim is None:
        return value.clone() if isinstance(value, Tensor) else copy.copy(value)
    if isinstance(value, Tensor):
        return value.narrow(dim, 0, 0).clone()
    if isinstance(value, np.ndarray):
        return value[(slice(None),) * dim + (slice(0, 0),)].copy()
    return value[:0]


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


def _dim_of_records(one: Any, two: Any, path: str, rows: int) -> int | None:
    """The dimension of an array that counts records; None if none does."""
    if isinstance(one, Tensor) and (one.is_nested or two.is_nested):
        raise UnsupportedOperation(
            f"{path} is a nested tensor, whose rows cannot be cut. Remedy: pad it in collate_fn"
        )
    before, after = list(one.shape), list(two.shape)
    if len(before) == len(after):
        sizes = enumerate(zip(before, after, strict=True))
        grown = [dim for dim, size in sizes if size in ((rows, 2 * rows), (1, 2))]
        if len(grown) == 1:
            return grown[0]
        if before == after:
            return None
    raise UnsupportedOperation(
        f"{path} has shape {before} for one record and {after} for two: no single dimension "
        "counts the records. Remedy: return tensors with one row per record from collate_fn (pad, "
        "do not concatenate or squeeze)"
    )


def _name(path: Path) -> str:
    return "batch" + "".join(f"[{key!r}]" for key in path)


def _content(value: Any) -> Any:
    """What a part of a batch holds, to be compared and hashed; None for unknown objects."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return value.shape, tuple(map(_content, value.ravel().tolist()))
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Tensor):
        # The clone has a stride of 1, also where there is one element.
        flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
        flat = flat.clone(memory_format=torch.contiguous_format)
        return value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    parts = _parts(value)
    if parts is None:
        return None
    return type(value), tuple((repr(key), _content(part)) for key, part in parts.items())


def _parts(value: Any) -> dict[Any, Any] | None:
    """The parts of a container by name or number, or None if it is none."""
    if isinstance(value, _PLAIN):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # The other fields are made by __post_init__, again when the batch is rebuilt.
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return {name: getattr(value, name) for name in names}
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
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
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
