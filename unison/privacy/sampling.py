"""The records of a step: how they are drawn, cut into passes, padded, and dealt to ranks.

What the loader draws is what the accountant counts. Adjacency is zero-out for all of them: a record
is replaced by an empty one that is still drawn at the same positions, so that the size of the data
set is public (`accounting.ADJACENCY`).

A logical batch, the records of a step, is cut into the physical batches that ranks run as passes,
one after the other. Each is padded, and has a plan as `unison.deal` makes it.

A pass without records (an empty draw, or a rank that got none of it) has one row of padding, which
counts for nothing: its coefficient is 0. So every rank runs the same units in every pass, models
need not know batches of no rows, and the loss of an empty batch is a number.

Padding is zeros, or a public record of the user's, and never one of the data: whether a draw was
padded, and with what, may show in what a model does beside its gradients. What a row of padding
computes is left out by selection, not by a product with 0: of zeros, `log` has no finite gradient.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from unison import check
from unison.config import Privacy
from unison.errors import BadInput
from unison.kernels.random import Cipher, Distribution, Recipe, fill_rows
from unison.rng import Key, Permutation, Stream, poisson_sample
from unison.shard.deal import (
    BatchPlan,
    padded_rows,
    plan_batch,
)
from unison.shard.deal import batch_mean as batch_mean
from unison.shard.deal import current_plan as current_plan
from unison.shard.deal import local_batch_mean as local_batch_mean
from unison.shard.deal import publish_plan as publish_plan
from unison.shard.deal import take_mean_was_used as take_mean_was_used
from unison.shard.digest import fingerprint as fingerprint
from unison.shard.each_granule import granular_pass as granular_pass
from unison.shard.flat_group import PLAIN as PLAIN
from unison.shard.granules import PerGranule
from unison.shard.guard import compare_across_ranks as compare_across_ranks
from unison.shard.ranks import Ranks
from unison.shard.ranks import gather_objects as gather_objects
from unison.shard.ranks import meet as meet
from unison.shard.sharded_tensor import show_shards as show_shards

_PURPOSE = "sampling"  # keeps membership apart from the noise under the same key
_SHUFFLED_AT_ONCE = 1 << 12  # records
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


def sampling_for(privacy: Privacy, batch_size: int, num_rows: int) -> Sampling:
    """How a run draws its rows.

    Args:
        privacy: What the run applies.
        batch_size: Rows that a step draws, as expected, on all ranks together.
        num_rows: Rows to draw from.

    Raises:
        BadInput: If there are too few rows for that, or for δ.
    """
    if batch_size > num_rows:
        raise BadInput(
            f"a private run draws its batches from all rows, found batches of {batch_size} and "
            f"{num_rows} rows; lower the batch size, or give more data"
        )
    if privacy.delta * num_rows >= 1:
        raise BadInput(
            f"delta must lie below 1 / number of rows, found {privacy.delta:g} with {num_rows:,} "
            "rows: publishing a row at random would pass as private"
        )
    match privacy.sampling:
        case "poisson":
            return Poisson(rate=batch_size / num_rows)
        case "truncated":
            assert privacy.capacity is not None
            return TruncatedPoisson(
                rate=batch_size / num_rows, capacity=privacy.capacity, num_records=num_rows
            )
        case "shuffled":
            return Shuffled(batch_size=batch_size, num_records=num_rows)
        case other:
            raise AssertionError(f"no rule for the sampling {other!r}")


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


def check_drawing(sampling: Sampling, key: Key, num_records: int) -> None:
    """Make sure that records of a data set can be drawn so.

    Raises:
        BadInput: If they cannot, or the sampling was made for another data set.
    """
    check.positive(num_records=num_records)
    if not isinstance(key, Key):
        raise BadInput(
            f"expected a unison.rng.Key, found {type(key).__name__}. Remedy: "
            "Key.from_entropy(), or Key.from_seed(seed) for a run that can be repeated"
        )
    steps_per_epoch(sampling)
    if not isinstance(sampling, Poisson) and sampling.num_records != num_records:
        raise BadInput(
            f"{sampling!r} was made for {sampling.num_records} records, found {num_records} "
            "in the data set; its accounting would not hold. Remedy: build it with num_records="
            "len(dataset)"
        )


def drawn_records(
    sampling: Sampling, key: Key, num_records: int, steps: Iterable[int]
) -> Iterator[Tensor]:
    """Yield the records of each step [batch], int64: ascending, or in shuffled order.

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
        steps: Their numbers.
    """
    order, order_of = torch.empty(0, device="cpu"), (-1, -1)
    for step in steps:
        check.not_negative(step=step)
        with torch.device("cpu"):  # whatever the user's default device is
            if isinstance(sampling, Shuffled):
                # The order is made for many steps at once: a permutation of few records takes as
                # long as one of thousands, milliseconds in which a GPU would wait for its batch.
                size, num_steps = sampling.batch_size, sampling.steps_per_epoch
                epoch, position = divmod(step, num_steps)
                at_once = max(1, _SHUFFLED_AT_ONCE // size)
                first = position - position % at_once
                if (epoch, first) != order_of:
                    end = min(first + at_once, num_steps)
                    permutation = Permutation(Stream(key, "shuffle", epoch, _PURPOSE), num_records)
                    order = permutation(torch.arange(first * size, end * size))
                    order_of = epoch, first
                drawn = order.view(-1, size)[position - first].clone()
            else:
                stream = Stream(key, "membership", step, _PURPOSE, Cipher.CHACHA20)
                drawn = poisson_sample(stream, num_records, sampling.rate)
            if isinstance(sampling, TruncatedPoisson) and len(drawn) > sampling.capacity:
                # Those of lowest priority, which is a function of (key, step, record), are kept.
                stream = Stream(key, "truncation", step, _PURPOSE, Cipher.CHACHA20)
                limits = (0, _PRIORITIES)
                recipe = Recipe(stream.cipher, stream.words, Distribution.INTEGERS, (), limits)
                priorities = torch.empty_like(drawn)
                fill_rows(priorities, recipe, drawn, 1)
                kept = priorities.argsort(stable=True)[: sampling.capacity]
                drawn = drawn[kept].sort().values
        yield drawn


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
        num_samples: Records in this pass; 0 where the draw, or this rank's part of it, is empty.
        is_first: Whether this pass opens the logical batch.
        is_last: Whether this pass closes the logical batch.
        max_rows: Most records in a pass of the logical batch; None for no limit.
    """

    step: int
    record_ids: Tensor
    first_position: int
    index: int
    num_passes: int
    logical_size: int
    num_samples: int
    is_first: bool
    is_last: bool
    max_rows: int | None = None

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


def physical_batches(record_ids: Tensor, *, step: int, **share: Any) -> Iterator[PhysicalBatch]:
    """Yield the passes of one rank over the drawn records of a step; `share` as in `cut_passes`."""
    runs = cut_passes(len(record_ids), **share)
    for index, run in enumerate(runs):
        yield PhysicalBatch(
            step=step,
            record_ids=record_ids[run.start : run.stop],
            first_position=run.start,
            index=index,
            num_passes=len(runs),
            logical_size=len(record_ids),
            num_samples=len(run),
            is_first=index == 0,
            is_last=index == len(runs) - 1,
            max_rows=share.get("max_physical_batch_size"),
        )


class Part(NamedTuple):
    """Rows that are computed together: a granule, or all of a pass that is not cut into granules.

    Attributes:
        granule: Its global number; PLAIN for a pass that is not cut.
        is_real: Which rows are records, and not padding [rows].
        num_rows: Rows, padding included.
        positions: Where the real rows stand in the logical batch [real rows].
    """

    granule: int
    is_real: Tensor
    num_rows: int
    positions: Tensor


@dataclass(eq=False)
class Dealing:
    """How the loader's batches are presented to the module, and what the one in hand holds.

    Attributes:
        ranks: The ranks that share each logical batch.
        granule: Samples per granule; None leaves a rank's rows in one piece.
        max_physical_batch_size: Most rows in a pass.
        batch_dim: Dimension of the samples in the tensors of a batch.
        rows_per_sample: Rows of those tensors that belong to one sample, one after the other.
        usual_size: Samples that hardly any logical batch has more of; 1 if nothing is known.
        key: Of what the model draws, where there are granules; secret unless the noise is not.
        padding: A batch of one public record to pad with, as `collate_fn` makes it; None for zeros.
        has_fixed_size: Whether passes are padded to the few sizes that clipping is planned for, so
            that a compiled module meets no others.
        mean_was_used: Whether the running backward pass began at a `batch_mean`.
        plan: Of the batch that was presented last.
        parts: Its rows.
        most_rows: What ranks plan for, since they must plan alike: see `rows_to_plan`.
    """

    ranks: Ranks
    granule: int | None
    max_physical_batch_size: int | None
    batch_dim: int = 0
    rows_per_sample: int = 1
    usual_size: int = 1
    key: Key | None = None
    padding: Any = None
    has_fixed_size: bool = False
    mean_was_used: bool = False
    plan: BatchPlan | None = None
    parts: Sequence[Part] = ()
    most_rows: int = 1


def present(dealing: Dealing, batch: Any, physical: PhysicalBatch) -> Any:
    """Return a batch with its padding, in granules if asked; its plan becomes the current one.

    Args:
        dealing: How.
        batch: What the loader has loaded: this pass's records.
        physical: What it is.
    """
    granule = dealing.granule or 1
    plans = plan_batch(
        physical.logical_size,
        granule=granule,
        ranks=dealing.ranks,
        step=physical.step,
        is_granular=dealing.granule is not None,
        granules_per_pass=physical.max_rows and physical.max_rows // granule,
        key=dealing.key,
    )
    dealing.plan = plan = plans[physical.index]
    ids = plan.sample_ids
    assert len(plans) == physical.num_passes
    assert int((ids >= 0).sum()) == physical.num_samples
    if dealing.granule is None:
        longest = max(high - low for low, high in itertools.pairwise(plan.edges))
        size = physical.max_rows or longest
        most = max(1, min(size, longest - physical.index * size))
        dealing.most_rows = rows_to_plan(dealing, most, physical.max_rows)
        if dealing.has_fixed_size:
            nobodys = (plan.num_granules,) * (dealing.most_rows - len(ids))
            dealing.plan = plan = replace(plan, granule_ids=(*plan.granule_ids, *nobodys))
            ids = plan.sample_ids
        pieces = [(PLAIN, ids)]
    else:
        dealing.most_rows = granule
        pieces = zip(plan.granule_ids, ids.split(granule), strict=True)
    dealing.parts = [Part(number, each >= 0, len(each), each[each >= 0]) for number, each in pieces]
    publish_plan(plan)
    take_mean_was_used()
    if dealing.granule is None and len(ids) == physical.num_samples:
        return batch
    leaves, spec = tree_flatten(batch, is_leaf=_is_column)
    rows: list[Any] = [None] * len(leaves)  # zeros
    if dealing.padding is not None:
        rows, own = tree_flatten(dealing.padding, is_leaf=_is_column)
        if own != spec:
            raise BadInput(
                f"collate_fn made {own} of padding_row and {spec} of records; give make_private a "
                "padding_row as the data set gives records"
            )
    padded = [
        _padded(dealing, leaf, row, physical.num_samples, plan)
        for leaf, row in zip(leaves, rows, strict=True)
    ]
    return tree_unflatten(padded, spec)


def rows_to_plan(dealing: Dealing, num_rows: int, most: int | None = None) -> int:
    """Return how many rows to plan clipping for, where a part has these on any rank.

    Poisson sampling gives every batch another size, and to plan takes longer than a step. So
    nearly all sizes share one plan, of the largest of them: what fits a memory budget then
    fits it with fewer rows.

    Args:
        dealing: How batches are presented.
        num_rows: Rows of the longest part.
        most: Most rows of these passes, if they are to have fewer than all may have.
    """
    if dealing.granule is not None:
        return num_rows  # granules are all of one size
    most = most or dealing.max_physical_batch_size
    rows = -(-dealing.usual_size // dealing.ranks.size)
    rows = rows if most is None else min(rows, most)
    while rows < num_rows:
        rows *= 2
    return rows if most is None or num_rows > most else min(rows, most)


def _padded(dealing: Dealing, leaf: Any, padding: Any, num_samples: int, plan: BatchPlan) -> Any:
    if isinstance(leaf, list) and padding and len(leaf) == num_samples:
        entries = iter(leaf)
        return [next(entries) if is_real else padding[0] for is_real in plan.sample_ids >= 0]
    dim = dealing.batch_dim
    if not isinstance(leaf, Tensor) or leaf.ndim <= dim:
        return leaf
    rows = dealing.rows_per_sample if leaf.shape[dim] != num_samples else 1
    if leaf.shape[dim] != num_samples * rows:
        raise BadInput(
            f"expected {num_samples * rows} rows in dimension {dim} of every tensor of "
            f"the batch, found {list(leaf.shape)}; make_private(batch_first=...) says where "
            "they lie"
        )
    if plan.is_granular and dim:
        raise BadInput("granules need samples in dimension 0 of every tensor: batch_first=True")
    samples = leaf.movedim(dim, 0)
    row = None if padding is None else _fitted(padding.movedim(dim, 0), samples)
    if rows == 1:
        return padded_rows(samples, plan, row).movedim(0, dim)
    padded = padded_rows(samples.reshape(num_samples, rows, *samples.shape[1:]), plan, row)
    return padded.flatten(0, 1).movedim(0, dim)


def _is_column(value: Any) -> bool:
    """Whether it is a list of one plain value per sample, perhaps of none."""
    return isinstance(value, list) and all(
        isinstance(each, str | bytes | int | float | None) for each in value
    )


def _fitted(padding: Tensor, samples: Tensor) -> Tensor:
    """A row of padding [rows of a sample, ...], cut to the shape that the records of a batch have.

    Raises:
        BadInput: It is shorter than they are, or another kind of tensor.
    """
    sizes = list(zip(padding.shape[1:], samples.shape[1:], strict=False))
    if padding.ndim != samples.ndim or any(own < size for own, size in sizes):
        raise BadInput(
            f"padding_row has shape {list(padding.shape[1:])} where records of this batch have "
            f"{list(samples.shape[1:])}; make it as long as the longest record"
        )
    return padding[(slice(None), *(slice(size) for _, size in sizes))]


def unpacked(leaf: Any) -> list[Any]:
    """What a value is made of: its granules, or itself."""
    return leaf.parts if isinstance(leaf, PerGranule) else [leaf]


def packed(leaf: Tensor, tensors: list[Tensor]) -> Tensor:
    """A value like `leaf` of other tensors."""
    return PerGranule.of(tensors) if isinstance(leaf, PerGranule) else tensors[0]
