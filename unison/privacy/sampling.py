"""How a step chooses its records: what the loader does and what the accountant counts.

Adjacency is zero-out for all of them: a record is replaced by an empty one that is still drawn at
the same positions, so that the size of the data set is public (`accounting.ADJACENCY`).

A logical batch, the records of a step, is cut into the physical batches that ranks run as passes,
one after the other.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from unison import check
from unison.errors import BadInput
from unison.kernels.random import Cipher, Distribution, Recipe, fill_rows
from unison.rng import Key, Permutation, Stream, poisson_sample

_PURPOSE = "sampling"  # keeps membership apart from the noise under the same key
_PRIORITIES = 1 << 62  # two of a million records share a priority once in ten million steps
_ROUNDING = 1e-9  # 1 / rate may miss a whole number by this much, relative


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Every record takes part with probability `rate`, independently; batches may be empty.

    Attributes:
        rate: Probability of each record at each step.
    """

    rate: float

    def __post_init__(self) -> None:
        check.probability(rate=self.rate)


@dataclass(frozen=True, kw_only=True)
class TruncatedPoisson:
    """Poisson sampling, of which at most `capacity` records are kept, chosen at random.

    Attributes:
        rate: Probability of each record at each step, before truncation.
        capacity: Most records in a batch.
        num_records: Size of the data set, which this accounting treats as public.
    """

    rate: float
    capacity: int
    num_records: int

    def __post_init__(self) -> None:
        check.probability(rate=self.rate)
        check.positive(capacity=self.capacity, num_records=self.num_records)


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """Each epoch is a permutation of all records, cut into batches of a fixed size.

    No amplification is claimed: a record takes part once per epoch, and nobody is asked to believe
    that the order stays secret. What is left over at the end of an epoch is dropped.

    Guarantees:
        Accounting counts one pass over the data per `epoch_of(step)`. It is right if the batch of a
        step is a function of `epoch_of(step)` and `position_of(step)` alone: a loader that is left
        in the middle of an epoch goes on there, and does not begin a new permutation.

    Attributes:
        batch_size: Records in every batch.
        num_records: Size of the data set, which is public here.
    """

    batch_size: int
    num_records: int

    def __post_init__(self) -> None:
        check.positive(batch_size=self.batch_size, num_records=self.num_records)
        if self.batch_size > self.num_records:
            raise BadInput(
                f"expected batch_size <= num_records, found {self.batch_size=} {self.num_records=}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        return self.num_records // self.batch_size

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to; steps count from 0.

        >>> Shuffled(batch_size=4, num_records=11).epoch_of(5)
        2
        """
        return step // self.steps_per_epoch

    def position_of(self, step: int) -> int:
        """Which batch of its epoch a step takes."""
        return step % self.steps_per_epoch


Sampling = Poisson | TruncatedPoisson | Shuffled


def steps_per_epoch(sampling: Sampling) -> int:
    """Steps in which each record is expected once (Poisson, rounded up) or taken at most once."""
    if isinstance(sampling, Shuffled):
        return sampling.steps_per_epoch
    if not isinstance(sampling, Poisson | TruncatedPoisson):
        raise BadInput(
            f"expected Poisson, TruncatedPoisson or Shuffled sampling, found {sampling!r}"
        )
    if sampling.rate == 0:
        raise BadInput(
            "a sampling rate of 0 draws no record at any step, so an epoch never ends; use "
            "expected_batch_size / num_records"
        )
    steps = 1 / sampling.rate
    nearest = round(steps)  # a rate of 1/49 in floating point still makes 49 steps
    return nearest if math.isclose(steps, nearest, rel_tol=_ROUNDING) else math.ceil(steps)


def usual_batch_size(sampling: Sampling, num_records: int) -> int:
    """Records that hardly any step draws more than: four standard deviations above the mean.

    >>> usual_batch_size(Poisson(rate=0.01), 10_000), usual_batch_size(Poisson(rate=1.0), 50)
    (140, 50)
    """
    if isinstance(sampling, Shuffled):
        return sampling.batch_size
    mean = sampling.rate * num_records
    most = min(num_records, math.ceil(mean + 4 * math.sqrt(mean * (1 - sampling.rate))))
    return max(1, min(most, sampling.capacity) if isinstance(sampling, TruncatedPoisson) else most)


KINDS: dict[str, type[Sampling]] = {
    "poisson": Poisson,
    "truncated": TruncatedPoisson,
    "shuffled": Shuffled,
}


def to_fields(sampling: Sampling) -> dict[str, Any]:
    """A sampling as values that JSON can hold.

    >>> to_fields(Poisson(rate=0.25))
    {'kind': 'poisson', 'rate': 0.25}
    """
    kinds = {kind: name for name, kind in KINDS.items()}
    return {"kind": kinds[type(sampling)], **asdict(sampling)}


def from_fields(fields: Mapping[str, Any]) -> Sampling:
    """The sampling that `to_fields` described.

    Raises:
        BadInput: If the fields describe none.
    """
    values = dict(fields)
    kind = values.pop("kind", None)
    if kind not in KINDS:
        raise BadInput(f"expected a sampling of kind {', '.join(KINDS)}, found {fields!r}")
    try:
        return KINDS[kind](**values)
    except TypeError as error:
        raise BadInput(f"the fields do not describe a sampling ({error}): {fields!r}") from None


class Draws:
    """The records of every step of a run, as a function of (key, sampling, step).

    Guarantees:
        The draw of a step is the same in whichever process and order it is asked for, and changes
        no state, no global random generator included. Membership of a Poisson draw is decided by
        ChaCha20 for each record by itself, so no two records, steps or ranks share a decision.
        Under a key from entropy, nobody without the key can tell a draw from a random one; the key
        dies with its process, so a resumed run draws anew.

    Args:
        sampling: How records are chosen.
        key: Root key of the run; on several ranks the same one (`Key.shared`).
        num_records: Size of the data set.

    Attributes:
        steps_per_epoch: Steps in which each record is expected once (Poisson, rounded up) or taken
            at most once (shuffled). A public number.
    """

    def __init__(self, sampling: Sampling, key: Key, num_records: int) -> None:
        check.positive(num_records=num_records)
        if not isinstance(key, Key):
            raise BadInput(
                f"expected a unison.rng.Key, found {type(key).__name__}. Remedy: "
                "Key.from_entropy(), or Key.from_seed(seed) for a run that can be repeated"
            )
        self.steps_per_epoch = steps_per_epoch(sampling)
        if not isinstance(sampling, Poisson) and sampling.num_records != num_records:
            raise BadInput(
                f"{sampling!r} was made for {sampling.num_records} records, found {num_records} "
                "in the data set; its accounting would not hold. Remedy: build it with num_records="
                "len(dataset)"
            )
        self.sampling, self.num_records = sampling, num_records
        self._key = key

    def records(self, step: int) -> Tensor:
        """Return the records of a step [batch], int64: ascending, or in shuffled order."""
        check.not_negative(step=step)
        sampling = self.sampling
        with torch.device("cpu"):  # whatever the user's default device is
            if isinstance(sampling, Shuffled):
                epoch, position = divmod(step, self.steps_per_epoch)
                order = Permutation(Stream(self._key, "shuffle", epoch, _PURPOSE), self.num_records)
                first = position * sampling.batch_size
                return order(torch.arange(first, first + sampling.batch_size))
            stream = Stream(self._key, "membership", step, _PURPOSE, Cipher.CHACHA20)
            members = poisson_sample(stream, self.num_records, sampling.rate)
            if isinstance(sampling, Poisson) or len(members) <= sampling.capacity:
                return members
            # Those of lowest priority, which is a function of (key, step, record), are kept.
            stream = Stream(self._key, "truncation", step, _PURPOSE, Cipher.CHACHA20)
            limits = (0, _PRIORITIES)
            recipe = Recipe(stream.cipher, stream.words, Distribution.INTEGERS, (), limits)
            priorities = torch.empty_like(members)
            fill_rows(priorities, recipe, members, 1)
            kept = priorities.argsort(stable=True)[: sampling.capacity]
            return members[kept].sort().values

    def __repr__(self) -> str:
        return f"Draws({self.sampling!r}, num_records={self.num_records})"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PhysicalBatch:
    """What one pass of this rank holds of a logical batch. Everything but `step` is private.

    Attributes:
        step: Number of the logical batch.
        record_ids: Records of this pass in the data set [rows], int64; in the order of the batch's
            rows.
        first_position: Position in the logical batch of the first row.
        index: Number of this pass in the logical batch.
        num_passes: Passes in the logical batch, the same on every rank.
        logical_size: Records in the logical batch, over all ranks and passes.
    """

    step: int
    record_ids: Tensor
    first_position: int
    index: int
    num_passes: int
    logical_size: int

    @property
    def num_samples(self) -> int:
        """Records in this pass; 0 where the draw, or this rank's part of it, is empty."""
        return len(self.record_ids)

    @property
    def is_first(self) -> bool:
        """Whether this pass opens the logical batch."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this pass closes the logical batch."""
        return self.index == self.num_passes - 1

    def __repr__(self) -> str:
        # Records and their number say who took part: they stay out of logs and tracebacks.
        return (
            f"PhysicalBatch(step={self.step}, is_first={self.is_first}, is_last={self.is_last}; "
            "records withheld)"
        )


def cut_passes(
    num_samples: int,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    granule: int = 1,
    max_physical_batch_size: int | None = None,
) -> list[range]:
    """Cut the positions of a logical batch into the passes of one rank.

    Ranks hold contiguous runs of whole granules, as even as can be; a rank's run is cut into
    passes from its front.

    Guarantees:
        Every rank gets the same number of passes, at least one. Each position is in exactly one
        pass of one rank; over ranks, then passes, positions ascend. Only the last granule of the
        batch may be short.

    Args:
        num_samples: Size of the logical batch, over all ranks.
        rank: The rank whose passes to return.
        num_ranks: Ranks that share the batch.
        granule: Samples that stay together on one rank and in one pass.
        max_physical_batch_size: Most samples in a pass, a multiple of `granule`; no limit by
            default.

    Returns:
        The positions of each pass; empty where the rank has no samples left.

    >>> cut_passes(10, rank=1, num_ranks=2, max_physical_batch_size=3)
    [range(5, 8), range(8, 10)]
    >>> cut_passes(1, rank=0, num_ranks=2), cut_passes(1, rank=1, num_ranks=2)
    ([range(0, 0)], [range(0, 1)])
    """
    check.not_negative(num_samples=num_samples)
    check.positive(granule=granule)
    if not 0 <= rank < num_ranks:
        raise BadInput(f"expected 0 <= rank < num_ranks, found {rank=} {num_ranks=}")
    if max_physical_batch_size is not None:
        check.positive(max_physical_batch_size=max_physical_batch_size)
        if max_physical_batch_size % granule:
            raise BadInput(
                "max_physical_batch_size must be a multiple of granule, found "
                f"{max_physical_batch_size=} {granule=}"
            )
    num_granules = -(-num_samples // granule)
    edges = [each * num_granules // num_ranks * granule for each in range(num_ranks + 1)]
    longest = max(granule, *(high - low for low, high in itertools.pairwise(edges)))
    size = max_physical_batch_size or longest
    num_passes = -(-longest // size)
    stop = min(edges[rank + 1], num_samples)
    starts = [min(edges[rank] + index * size, stop) for index in range(num_passes)]
    return [range(start, min(start + size, stop)) for start in starts]


def physical_batches(
    record_ids: Tensor,
    *,
    step: int,
    rank: int = 0,
    num_ranks: int = 1,
    granule: int = 1,
    max_physical_batch_size: int | None = None,
) -> Iterator[PhysicalBatch]:
    """Yield the passes of one rank over the drawn records of a step."""
    runs = cut_passes(
        len(record_ids),
        rank=rank,
        num_ranks=num_ranks,
        granule=granule,
        max_physical_batch_size=max_physical_batch_size,
    )
    for index, run in enumerate(runs):
        yield PhysicalBatch(
            step=step,
            record_ids=record_ids[run.start : run.stop],
            first_position=run.start,
            index=index,
            num_passes=len(runs),
            logical_size=len(record_ids),
        )
