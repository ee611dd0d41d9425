"""The loader of private training: draws a logical batch, hands it out in physical batches."""

import inspect
import itertools
import random
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from unison import check
from unison.errors import BadInput
from unison.privacy.arguments import refuse_contradiction, refuse_unknown_loader
from unison.privacy.collate import BatchLayout, RowShapes
from unison.privacy.draws import Draws
from unison.privacy.passes import PhysicalBatch, cut_passes, physical_batches
from unison.privacy.sampling import Sampling
from unison.rng import Key

# Record 0, once and twice: what grows from the first batch to the second holds records.
_PROBES = ([0], [0, 0])


class PrivateLoader:
    """A `DataLoader` whose batches are drawn as the privacy accounting assumes.

    One pass over it is one epoch: `len(loader)` logical batches, fewer if the epoch was begun
    before (a `break`, a resumed run). Steps are numbered on and on across epochs. A logical batch
    that is larger than `max_physical_batch_size` comes in several physical batches, one after the
    other; `current` says what the one in the user's hands is.

    Guarantees:
        The records of step s are `Draws(sampling, key, len(dataset)).records(s)`, whichever
        settings the loader has. `current` belongs to the batch that was handed out last, also
        where workers have read ahead. The user's generator, and torch's, numpy's and Python's
        global ones, are not used for drawing. A draw of no records gives a batch of zero rows.

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

    Attributes:
        rows: Sees to it that rows have one shape.
        current: What was handed out last; None before the first batch and after an epoch's end.
        present: Called with every batch and what it is; what it returns is handed out.
        after_use: Called when the user's code asks for the next batch.
        on_leave: Called when the loop is left before its end.
        before_draw: Called with the number of a logical batch before anything of it is handed out;
            what it raises, the user's loop raises.
        on_abandon: Called by `abandon` with the physical batch handed out last; returns whether its
            logical batch was given up, and can be drawn again.

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
    ) -> None:
        if isinstance(data_loader, PrivateLoader):
            raise BadInput(
                "the loader is private already: drawing from its draws would have another "
                "sampling rate than the ledger says. Remedy: pass the DataLoader it was made from"
            )
        refuse_unknown_loader(data_loader)
        self._draws = Draws(sampling, key, len(data_loader.dataset))  # type: ignore[arg-type]
        refuse_contradiction(data_loader, self._draws)
        self._key = key
        self._share: dict[str, Any] = {
            "rank": rank,
            "num_ranks": num_ranks,
            "granule": granule,
            "max_physical_batch_size": max_physical_batch_size,
        }
        cut_passes(0, **self._share)  # raises here what it would raise at the first step
        self._requests = _Requests()
        self._batch_size = data_loader.batch_size
        self._loader = _same_loader(data_loader, self._requests)
        self._layout: BatchLayout | None = None
        self.rows = RowShapes()
        self._rows_per_record = rows_per_record
        self._next_step = 0
        self._iteration: weakref.ref[Generator[Any, None, None]] | None = None
        self.current: PhysicalBatch | None = None
        self.present: Callable[[Any, PhysicalBatch], Any] | None = None
        self.after_use: Callable[[], None] | None = None
        self.on_leave: Callable[[], None] | None = None
        self.before_draw: Callable[[int], None] | None = None
        self.on_abandon: Callable[[PhysicalBatch], bool] | None = None

    @property
    def sampling(self) -> Sampling:
        """How records are drawn."""
        return self._draws.sampling

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
        return self._draws.steps_per_epoch

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
        iteration = self._hand_out()
        self._iteration = weakref.ref(iteration)
        return iteration

    def abandon(self) -> None:
        """End the iteration under way and give up a logical batch that is not trained on yet.

        Its step is drawn again by the next iteration.
        """
        live, current = self._live(), self.current
        if current is not None and self.on_abandon is not None and self.on_abandon(current):
            self._next_step = current.step  # also where its last physical batch was handed out
        if live is not None:
            live.close()
        self.current = None

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
        self._draws = Draws(self.sampling, key, self._draws.num_records)
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

    @property
    def _probes(self) -> Sequence[list[int]]:
        """What is read before the first batch: records that may be longer than others are."""
        last = self._draws.num_records - 1
        return [*_PROBES, [last // 2], [last]]

    def _live(self) -> Generator[Any, None, None] | None:
        """The iteration that someone still holds and that has not ended."""
        iteration = self._iteration() if self._iteration is not None else None
        if iteration is None or inspect.getgeneratorstate(iteration) == inspect.GEN_CLOSED:
            return None
        return iteration

    def _hand_out(self) -> Generator[Any, None, None]:
        # Workers are given passes before the user gets them. Both read one list of passes, so the
        # n-th batch that comes back is of the n-th pass that holds records.
        passes, ahead = itertools.tee(self._passes())
        wanted = (each.record_ids.tolist() for each in ahead if each.num_samples)
        probes = () if self._layout is not None else self._probes
        self._requests.pending = itertools.chain(probes, wanted)
        self._loader.generator = self._seeds_of_workers()
        loaded = iter(self._loader)
        if self._layout is None:
            with _kept_generators():
                self._layout = _learn_layout(loaded, self._rows_per_record)
                self._learn_shapes(self._layout, loaded)
        try:
            yield from self._loaded(passes, loaded)
        except GeneratorExit:  # the loop was left, perhaps with a batch that is yet to go backward
            if self.on_leave is not None:
                self.on_leave()
            raise

    def _learn_shapes(self, layout: BatchLayout, loaded: Iterator[Any]) -> None:
        """Make sure that rows of record 0 and of some others have one shape, before any is drawn.

        Raises:
            BadInput: If they do not.
        """
        layout.fitted(layout.empty(), self.rows)  # of record 0
        self.rows.check_names()
        for _ in range(len(self._probes) - len(_PROBES)):
            try:
                batch = next(loaded)
            except Exception:  # a record that cannot be read alone is told of when it is drawn
                continue
            layout.fitted(batch, self.rows)

    def _loaded(
        self, passes: Iterator[PhysicalBatch], loaded: Iterator[Any]
    ) -> Generator[Any, None, None]:
        assert self._layout is not None
        for each in passes:
            if each.is_first and self.before_draw is not None:
                self.before_draw(each.step)
            batch = next(loaded) if each.num_samples else self._layout.empty()
            self._layout.check(batch, each.num_samples)
            batch = self._layout.fitted(batch, self.rows)
            self.current = each
            if each.is_last:
                self._next_step = each.step + 1
            handed_out = batch if self.present is None else self.present(batch, each)
            yield handed_out
            if self.after_use is not None:
                self.after_use()
        self.current = None

    def _passes(self) -> Iterator[PhysicalBatch]:
        """The passes from the next step to the end of its epoch."""
        first = self._next_step
        end = (first // len(self) + 1) * len(self)
        for step in range(first, end):
            yield from physical_batches(self._draws.records(step), step=step, **self._share)

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


def _same_loader(data_loader: DataLoader[Any], requests: _Requests) -> DataLoader[Any]:
    """A loader with the user's settings that reads the records it is told to."""
    return DataLoader(
        data_loader.dataset,
        batch_sampler=requests,
        num_workers=data_loader.num_workers,
        collate_fn=data_loader.collate_fn,
        pin_memory=data_loader.pin_memory,
        timeout=data_loader.timeout,
        worker_init_fn=data_loader.worker_init_fn,
        multiprocessing_context=data_loader.multiprocessing_context,
        prefetch_factor=data_loader.prefetch_factor,
        persistent_workers=data_loader.persistent_workers,
        pin_memory_device=data_loader.pin_memory_device,
        in_order=data_loader.in_order,
    )


def _learn_layout(loaded: Iterator[Any], rows_per_record: int) -> BatchLayout:
    try:
        one, two = next(loaded), next(loaded)
    except Exception as error:
        error.add_note(
            "Raised while record 0 was read once and twice, to learn where a batch holds its "
            "records: Poisson sampling may draw one record, or none."
        )
        raise
    return BatchLayout(one, two, rows_per_record)


@contextmanager
def _kept_generators() -> Iterator[None]:
    """Undo what reading a record takes from the global generators in this process."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - data sets may use the old state
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
