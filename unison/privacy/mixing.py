"""Finds collate functions that make one record's rows of another record.

Mixup, or a mean over the batch, puts a record into the rows of others, where no clipping bounds it.
So one record of a small batch is replaced: the rows of all others must keep their bits.
"""

import copy
import functools
import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from unison.errors import BadInput
from unison.privacy.loader import Dims, check_rows, contents_of, learn_dims

NUM_ROWS = 4  # even, as mixtures of halves or pairs may ask for
_NUM_SEEDS = 8  # a mixture may be drawn for half of the batches, or map a record to itself
_NUM_REPEATS = 8  # of what changed, which a generator may have done that is not found here
_MAX_OBJECTS = 2000  # that are searched for generators
Columns = dict[str, list[Any]]
Generators = list[tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]]


def refuse_mixing(
    dataset: Dataset[Any],
    rows_per_record: int,
    settings: dict[str, Any],
    workers_seed: torch.Generator,
    salt: bytes,
) -> dict[str, str]:
    """Make sure that no row of a collated batch changes with another record.

    The records are read by a loader of their own, in a worker if the user has workers, so that
    neither the requests nor the generators of the workers that train know of it.

    Guarantees:
        A function that makes each row of its own record and the generators is not refused, unless a
        floating point tensor without rows holds something of the records. Generators that are found
        have their state from before afterwards.

    Args:
        dataset: The records.
        rows_per_record: Rows that `collate_fn` makes of each record.
        settings: Those of the user's loader that are kept.
        workers_seed: Where the worker takes its seed from.
        salt: Of the digests: secret, since they are of records.

    Returns:
        A digest of the first records for each part of the batch that is the same when they are read
        again, so that ranks can tell whether they have one data set. Nothing draws it.

    Raises:
        BadInput: A row does; naming the part of the batch. Or no records can be tried.
    """
    num_records = len(dataset)  # type: ignore[arg-type]
    settings = settings | {
        "collate_fn": MixingProbe(settings["collate_fn"], rows_per_record, salt),
        "num_workers": min(settings["num_workers"], 1),
        "persistent_workers": False,
        "pin_memory": False,
        "timeout": 0,
    }
    failed: list[tuple[list[int], Exception]] = []
    for shift in (0, 1):  # other records, should one of the first not be readable
        wanted = min(NUM_ROWS + 1, num_records - shift)
        if wanted < 2:
            return {}
        last = num_records - 1 - shift
        ids = [position * last // (wanted - 1) for position in range(wanted)]
        probes = DataLoader(dataset, batch_sampler=[ids * 2], generator=workers_seed, **settings)
        try:
            ((found, digests),) = probes
        except Exception as error:  # a record that cannot be read is told of when it is drawn
            failed.append((ids, error))
            continue
        if found is not None:
            raise BadInput(
                f"collate_fn mixes records: a row at {found} changed when another record of the "
                "batch was replaced, and clipping bounds only what a record does in its own row. "
                "Remedy: make each row of its own record alone (no mixup, CutMix or statistics of "
                "the batch in collate_fn), or mix augmentations of one record in the data set"
            )
        return digests
    (ids, error), *_ = failed
    raise BadInput(
        f"whether collate_fn mixes records cannot be tried: with records {ids[:-1]} of the data "
        f"set, or their neighbours, it ends in {type(error).__name__}: {str(error)[:200]}. Remedy: "
        "let every record be readable, and collate_fn take any number of records"
    ) from error


class MixingProbe:
    """Takes a collate function's place: returns where a batch of the records is mixed, or None.

    Beside it, digests of what they hold. The records come twice.
    """

    def __init__(
        self, collate_fn: Callable[[list[Any]], Any], rows_per_record: int, salt: bytes
    ) -> None:
        self._collate_fn, self._salt = collate_fn, salt
        self._rows_per_record = rows_per_record
        self._dims: Dims = {}

    def __call__(self, read: Sequence[Any]) -> tuple[str | None, dict[str, str]]:
        """Replace each of the first records by another, under several seeds."""
        records, again = read[: len(read) // 2], read[len(read) // 2 :]
        generators = _global_generators() + _generators_in(self._collate_fn)
        with _kept(generators):
            rows, others = list(records[:NUM_ROWS]), records[NUM_ROWS:]
            if len(records) <= NUM_ROWS:  # of few records, another one comes twice
                others = [*rows[1:], rows[0]]
            one, two = self._collate(rows[:1]), self._collate([rows[0]] * 2)
            self._dims, _ = learn_dims(one, two, self._rows_per_record)
            columns, columns_again = (
                self._seeded(list(each[:NUM_ROWS]), 0, generators)[2] for each in (records, again)
            )
            digests = {
                name: hashlib.blake2b(repr(column).encode(), key=self._salt).hexdigest()
                for name, column in columns.items()
                if column == columns_again[name]
            }
            found: str | None = None
            unstable: set[str] = set()  # parts that differ under one seed, for no record's sake
            for seed in range(_NUM_SEEDS):
                before, shapes, columns, after = self._seeded(rows, seed, generators)
                for place in range(len(rows)):
                    changed = [*rows[:place], others[place % len(others)], *rows[place + 1 :]]
                    _, new_shapes, new_columns, new_after = self._seeded(changed, seed, generators)
                    if new_shapes != shapes:  # padded to another length: the row shape's business
                        continue
                    if new_after != after:
                        return None, digests  # records say how often is drawn: later draws move
                    names = [name for name in columns if name not in unstable]
                    if found or _mixed_part(columns, new_columns, names, place) is None:
                        continue
                    for _ in range(_NUM_REPEATS):
                        for records_again, known in ((rows, columns), (changed, new_columns)):
                            now = self._seeded(records_again, seed, generators)[2]
                            unstable.update(each for each in known if now[each] != known[each])
                    names = [name for name in names if name not in unstable]
                    found = _mixed_part(columns, new_columns, names, place)
                if after == before:  # nothing was drawn: other seeds would give the same
                    break
        return found, digests

    def _collate(self, records: list[Any]) -> Any:
        # A collate function may take its records apart. Some cannot be copied, such as open files.
        with suppress(Exception):
            records = [copy.deepcopy(each) for each in records]  # the same one may come twice
        return self._collate_fn(records)

    def _seeded(
        self, records: list[Any], seed: int, generators: Generators
    ) -> tuple[Any, Any, Columns, Any]:
        """Collate under a seed: the generators' states before and after, shapes and contents."""
        for _, _, set_seed in generators:
            set_seed(seed)
        before = [_content(get()) for get, _, _ in generators]
        batch = self._collate(records)
        after = [_content(get()) for get, _, _ in generators]
        check_rows(batch, self._dims, len(records), self._rows_per_record)
        return before, *contents_of(batch, self._dims, len(records)), after


def _kept_rows(columns: Columns, others: Columns, place: int) -> bool:
    """Whether all records but one have the same rows, in any order."""
    rows = list(zip(*columns.values(), strict=True))
    other_rows = list(zip(*others.values(), strict=True))
    if all(rows[i] == other_rows[i] for i in range(len(rows)) if i != place):
        return True
    return (Counter(rows) & Counter(other_rows)).total() >= len(rows) - 1


def _mixed_part(columns: Columns, others: Columns, names: list[str], place: int) -> str | None:
    """The first part whose rows changed by themselves, or else with other parts; None if none."""
    if not names:
        return None
    if _kept_rows({n: columns[n] for n in names}, {n: others[n] for n in names}, place):
        return None
    for subset in [*([name] for name in names), names]:
        if not _kept_rows({n: columns[n] for n in subset}, {n: others[n] for n in subset}, place):
            return subset[0]
    return None


# ---- generators ----------------------------------------------------------------------------------


def _global_generators() -> Generators:
    found: Generators = [
        (random.getstate, random.setstate, random.seed),
        (np.random.get_state, np.random.set_state, np.random.seed),
        (torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
    ]
    if torch.cuda.is_initialized():
        found.append((torch.cuda.get_rng_state, torch.cuda.set_rng_state, torch.cuda.manual_seed))
    return found


def _generators_in(function: Any) -> Generators:
    """Generators that a function refers to: in attributes, closures, globals and arguments.

    The nearest ones first, and only some thousand objects deep.
    """
    found: Generators = []
    level, seen = [function], {}
    while level and len(seen) < _MAX_OBJECTS:
        following: list[Any] = []
        for each in level:
            if id(each) in seen or isinstance(each, ModuleType | type | Tensor | nn.Module):
                continue
            seen[id(each)] = each
            if isinstance(each, random.SystemRandom):
                continue
            if isinstance(each, random.Random):
                found.append((each.getstate, each.setstate, each.seed))
            elif isinstance(each, np.random.RandomState):
                found.append((each.get_state, each.set_state, each.seed))
            elif isinstance(each, torch.Generator):
                if each.device.type == "cpu" or torch.cuda.is_initialized():  # not in a fork
                    found.append((each.get_state, each.set_state, each.manual_seed))
            elif isinstance(each, np.random.Generator):
                found.append(_of_numpy(each.bit_generator))
            elif isinstance(each, functools.partial):
                following += [each.func, *each.args, *each.keywords.values()]
            elif isinstance(each, MethodType):
                following += [each.__func__, each.__self__]
            elif isinstance(each, FunctionType):
                following += _referred(each)
            elif isinstance(each, list | tuple | dict):
                values = each.values() if isinstance(each, dict) else each
                following += itertools.islice(values, 100)
            elif hasattr(each, "__dict__"):
                following += vars(each).values()
                following += [vars(base).get("__call__") for base in type(each).__mro__]
        level = following
    return found


def _of_numpy(bits: Any) -> tuple[Callable[[], Any], Callable[[Any], None], Callable[[int], None]]:
    def set_state(state: Any) -> None:
        bits.state = state

    return lambda: bits.state, set_state, lambda seed: set_state(type(bits)(seed).state)


def _referred(function: FunctionType) -> list[Any]:
    """What a function's body, closure and defaults refer to."""
    codes, names = [function.__code__], set()
    for code in codes:
        names.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a cell that is yet to be filled
            found.append(cell.cell_contents)
    return [*found, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


@contextmanager
def _kept(generators: Generators) -> Iterator[None]:
    states = [get() for get, _, _ in generators]
    try:
        yield
    finally:
        for (_, set_state, _), state in zip(generators, states, strict=True):
            set_state(state)


def _content(state: Any) -> Any:
    """A generator's state as something that can be compared."""
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, dict):
        return {key: _content(value) for key, value in state.items()}
    if isinstance(state, tuple):  # Python's own has 625 numbers, too many to call this for each
        return tuple(each if isinstance(each, int) else _content(each) for each in state)
    return state
