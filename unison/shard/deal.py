"""One global batch, dealt to ranks in granules; and its mean, which knows nothing of ranks."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only, tree_unflatten

from unison import check
from unison.errors import BadInput
from unison.rng import BatchDraws, Key
from unison.shard.granules import PLAN, TAKES_GRANULES, PerGranule, join, plan_of
from unison.shard.ranks import Ranks, checksum, same_on_every_rank
from unison.shard.reducers import sum_over_granules
from unison.torch_internals import WithGradients

# ------------------------------------------------------------------------------------------------
# Plain tensors of a dealt batch, which hand its plan on to what is computed of them.
#
# [Note: where the plan goes] A reader may look ahead, so that the batch which was handed out last
# is not the one in use. What a batch is (its plan) therefore goes with its tensors: through
# copies to a device, casts, slices and stacks, as `DealtTensor`; into a sharded model, which takes
# plain tensors, and out at its outputs; and with everything that needs gradients as a note at its
# autograd node, where `batch_mean` finds it again. So the type is met before a model and in
# losses without gradients only, and costs some ten microseconds for each operation there. What
# leaves torch (numpy and back) loses its plan; then the batch that the model ran last, or that
# was handed out since, is meant.

_BASE_OF = Tensor._base.__get__  # type: ignore[attr-defined]
_MAX_NODES = 1000  # of a loss, between it and the outputs of the model


class DealtTensor(Tensor):
    """A tensor that knows the plan of its batch; see [Note: where the plan goes]."""

    @staticmethod
    def of(value: Tensor, plan: Any) -> "DealtTensor":
        """A tensor with the same memory that knows its plan."""
        made = value.as_subclass(DealtTensor)
        setattr(made, PLAN, plan)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function, and let what it returns know the plan."""
        kwargs = kwargs or {}
        is_compiling = torch.compiler.is_compiling()
        if is_compiling or set(types) == {DealtTensor} or func in TAKES_GRANULES:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        else:  # of the other types, each with its own ways
            result = func(*without_plan(args), **without_plan(kwargs))
        if is_compiling or not isinstance(result, Tensor | tuple | list | dict):
            return result
        # As a dealt one a view's base would be a view itself; Dynamo asks on until there is none.
        if type(result) is torch.Size or func == _BASE_OF:
            return result
        # Mostly it is `x.f(...)` or `f(x, ...)`; to look through everything takes longer.
        first = args[0] if args else None
        plan = getattr(first, PLAN, None) if type(first) is DealtTensor else plan_of((args, kwargs))
        if isinstance(result, Tensor) and any(result is each for each in args):  # written in place
            setattr(result, PLAN, plan)
            return result
        return hand_on(result, plan)

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(proto)  # a file has no use for the plan

    def __deepcopy__(self, memo: dict[int, Any]) -> "DealtTensor":
        if id(self) not in memo:
            memo[id(self)] = DealtTensor.of(
                self.as_subclass(Tensor).__deepcopy__(memo), plan_of(self)
            )
        return memo[id(self)]


def without_plan(value: Any) -> Any:
    """A nested value with plain tensors in the place of dealt ones."""
    return tree_map_only(DealtTensor, lambda each: each.as_subclass(Tensor), value)


def hand_on(value: Any, plan: Any) -> Any:
    """Let what was computed of a batch know its plan; returns what to use in its place."""
    if type(value) is Tensor:
        if value.grad_fn is None:
            return value if value.requires_grad else DealtTensor.of(value, plan)
        value.grad_fn.metadata[PLAN] = plan  # type: ignore[index]
        return value
    if type(value) is dict:
        return {key: hand_on(each, plan) for key, each in value.items()}
    is_structseq = type(value).__module__ == "torch.return_types"  # of `x.max(dim=0)`
    if type(value) in (tuple, list) or is_structseq:
        return type(value)([hand_on(each, plan) for each in value])
    for each in tree_iter(value):  # in a class of the user's: left as it is
        if type(each) is Tensor and each.grad_fn is not None:
            each.grad_fn.metadata[PLAN] = plan  # type: ignore[index]
        elif type(each) is Tensor:
            setattr(each, PLAN, plan)
    return value


def plan_of_loss(losses: Tensor) -> Any:
    """The plan of the batch that losses were computed of; None if it is not known."""
    plan = plan_of(losses)
    if isinstance(losses, PerGranule):
        return plan
    nodes: deque[Any] = deque([losses.grad_fn])
    seen: set[Any] = set()
    while plan is None and nodes and len(seen) < _MAX_NODES:
        node = nodes.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            plan = node.metadata.get(PLAN)
            nodes.extend(below for below, _ in node.next_functions)
    return plan


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What a global batch is, and which part of it this rank computes in one pass.

    Attributes:
        step: Number of the logical batch, counted from 0 by the loader that dealt it.
        num_samples: Samples in the logical batch, over all ranks and passes.
        granule: Samples per granule.
        edges: Rank r holds the granules [edges[r], edges[r + 1]) of the logical batch.
        rank: This rank.
        granule_ids: Global numbers of the granules of this pass; a ghost past the end where the
            rank has none.
        is_granular: Whether the batch's tensors come as one value per granule.
        closes_logical_batch: Whether this is the last pass, after which the optimizer steps.
        ranks: The ranks that share the batch.
        accumulation: The same object for all passes of one logical batch, with what they share:
            models as they were before the first one, running statistics (see each_granule.py).
        key: Of the random numbers that the model draws; None leaves them to torch.
    """

    step: int
    num_samples: int
    granule: int
    edges: tuple[int, ...]
    rank: int
    granule_ids: tuple[int, ...]
    is_granular: bool
    closes_logical_batch: bool
    ranks: Ranks = field(repr=False, compare=False)
    accumulation: dict[Any, Any] = field(repr=False, compare=False)
    key: Key | None = field(repr=False, compare=False)

    @property
    def num_granules(self) -> int:
        """Granules in the logical batch."""
        return self.edges[-1]

    @cached_property
    def sample_ids(self) -> Tensor:
        """Position in the global batch of each row of this pass [rows]; -1 for a row of padding."""
        ids = self.row_ids
        is_real = (ids < self.num_samples) & (ids < self.edges[self.rank + 1] * self.granule)
        return torch.where(is_real, ids, -1)

    @cached_property
    def row_ids(self) -> Tensor:
        """As `sample_ids`; rows of padding go on past the batch, or past this rank's part."""
        first = torch.tensor(self.granule_ids) * self.granule
        return (first[:, None] + torch.arange(self.granule)).view(-1)

    @cached_property
    def draws(self) -> BatchDraws | None:
        """The random numbers that models draw in passes over this batch; None leaves it to torch.

        Rows of padding draw as well, or a model would run otherwise where there are some.
        """
        if self.key is None or not self.is_granular:
            return None
        return BatchDraws(
            self.key,
            self.step,
            self.row_ids,
            len(self.granule_ids),
            lambda results: join(results, "a draw", self),
        )

    @property
    def weights(self) -> Tensor:
        """1 for a row that counts and 0 for one that does not [rows], float64."""
        return (self.sample_ids >= 0).double()


_current: BatchPlan | None = None
_mean_was_used = False  # whether the running backward pass began at a `batch_mean`


def take_mean_was_used() -> bool:
    """Whether a backward pass went through `batch_mean` since the last time this was asked."""
    global _mean_was_used
    was_used, _mean_was_used = _mean_was_used, False
    return was_used


def publish_plan(plan: BatchPlan | None) -> None:
    """Make a plan the current one; for loaders that deal by themselves."""
    global _current
    _current = plan


def current_plan() -> BatchPlan | None:
    """The plan of the batch that a sharded model ran last, or that was handed out since.

    A reader that looks ahead has been handed other batches by the time one is used: the batch's own
    tensors know its plan, and a model that runs on them makes it the current one.
    """
    return _current


def checked_plan(plan: BatchPlan | None, num_granules: int) -> BatchPlan:
    """The plan of a batch, if it is one of as many granules.

    Raises:
        BadInput: If it is not.
    """
    if plan is None or len(plan.granule_ids) != num_granules:
        found = "no dealt batch" if plan is None else f"a plan of {len(plan.granule_ids)}"
        raise BadInput(
            f"expected the plan of a batch of {num_granules} granules, found {found}; call the "
            "model with the batch that unison.deal handed out last"
        )
    return plan


def plan_batch(
    num_samples: int,
    *,
    granule: int,
    ranks: Ranks,
    step: int,
    is_granular: bool,
    granules_per_pass: int | None = None,
    key: Key | None = None,
) -> list[BatchPlan]:
    """Cut a global batch into granules and deal them: contiguous runs, as even as can be.

    Returns:
        One plan per pass; every rank has the same number of passes.
    """
    num_granules = -(-num_samples // granule)
    edges = tuple(rank * num_granules // ranks.size for rank in range(ranks.size + 1))
    most = max(1, *(high - low for low, high in itertools.pairwise(edges)))
    per_pass = granules_per_pass or most
    num_passes = -(-most // per_pass)
    mine = list(range(edges[ranks.rank], edges[ranks.rank + 1]))
    accumulation: dict[Any, Any] = {}
    return [
        BatchPlan(
            step=step,
            num_samples=num_samples,
            granule=granule,
            edges=edges,
            rank=ranks.rank,
            granule_ids=tuple(mine[index * per_pass : (index + 1) * per_pass]) or (num_granules,),
            is_granular=is_granular,
            closes_logical_batch=index == num_passes - 1,
            ranks=ranks,
            accumulation=accumulation,
            key=key,
        )
        for index in range(num_passes)
    ]


@dataclass(eq=False)
class DealtLoader:
    """A loader of this rank's part of every global batch; see `deal`."""

    loader: Iterable[Any]
    mesh: DeviceMesh | None
    granule: int | None
    granules_per_pass: int | None
    step: int  # number of the next batch

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        global _current
        ranks = Ranks.of(self.mesh)
        mine: BatchPlan | None = None
        key = None if self.granule is None else Key.from_seed(torch.initial_seed())
        if key is not None and ranks.size > 1:  # the first rank's is everybody's
            key = key.agree(ranks.group)
        try:
            for batch in self.loader:
                for mine, dealt in self._dealt(batch, ranks, key):
                    _current = mine
                    yield dealt
        finally:
            # What comes after the loop is not this batch. A loop that was left early ends when its
            # iterator is collected; by then another loader may have dealt.
            if _current is mine:
                _current = None

    def _dealt(self, batch: Any, ranks: Ranks, key: Key | None) -> Iterator[tuple[BatchPlan, Any]]:
        """Each pass of one global batch: its plan, and this rank's part."""
        flat, spec = tree_flatten(batch, is_leaf=_is_column)
        flat = [torch.as_tensor(item) if isinstance(item, np.ndarray) else item for item in flat]
        num_samples = _num_samples(flat)
        _check_same_batch(flat, ranks)
        plans = plan_batch(
            num_samples,
            granule=self.granule or 1,
            ranks=ranks,
            step=self.step,
            is_granular=self.granule is not None,
            granules_per_pass=self.granules_per_pass,
            key=key,
        )
        self.step += 1
        for plan in plans:
            yield plan, tree_unflatten([_part(item, plan) for item in flat], spec)


def deal(
    loader: Iterable[Any],
    mesh: DeviceMesh | None = None,
    granule: int | None = None,
    micro_batch: int | None = None,
    first_step: int = 0,
) -> DealtLoader:
    """Cut each global batch into granules and hand every rank its own.

    The loader must give the *same global batch* on every rank (build it with one seed everywhere
    and without a distributed sampler). The dealt loader hands out this rank's rows, padded with
    rows of weight zero to whole granules, and publishes a `BatchPlan`, which `batch_mean` and
    ordered units read. A rank without samples gets one granule of weight zero, so that all ranks
    run the same passes.

    Args:
        loader: Any iterable of tensors, or of tuples, lists and dicts of them, with samples along
            dimension 0. Numpy arrays become tensors. A list with one value per sample (texts,
            names) is dealt as they are; other values go to every rank.
        mesh: The ranks to deal to, in the mesh's order; all by default.
        granule: Samples per granule. Given, tensors come as one value per granule, which the
            ordered reducer needs; the size is part of the experiment and changes the bits. None
            hands out tensors that can be used as plain ones; see `DealtTensor`.
        micro_batch: At most this many rows per pass, where a rank's part does not fit at once. A
            global batch then comes in several passes, of which the last has
            `current_plan().closes_logical_batch`: step the optimizer there. It changes no bit with
            the ordered reducer.
        first_step: Number of the first batch. With granules, what a model draws (dropout) depends
            on the seed of torch's generator on the first rank, as it is when a loop begins, on the
            number of the batch, counted on over loops, and on the sample; a run that is resumed
            goes on with the same numbers if it says where it is.

    Returns:
        The loader of this rank's part.
    """
    check.not_negative(first_step=first_step)
    if granule is not None:
        check.positive(granule=granule)
    granules_per_pass = None
    if micro_batch is not None:
        check.positive(micro_batch=micro_batch)
        granules_per_pass, rest = divmod(micro_batch, granule or 1)
        if rest:
            raise BadInput(
                f"micro_batch must be a multiple of granule, found {micro_batch=} {granule=}"
            )
    return DealtLoader(loader, mesh, granule, granules_per_pass, first_step)


def batch_mean(per_sample_losses: Tensor) -> Tensor:
    """The mean over the *global* batch; its gradient is this rank's part of it.

    Where a batch comes in several passes this is the pass's share of the mean: the shares add up.
    Use it with `gradient_divisor=1`: the losses are divided by the global count here, once. The
    value is the same number on every rank, and at every world size if the losses are.

    Args:
        per_sample_losses: One loss per row of a dealt batch [rows], rows of weight zero included.

    Returns:
        A scalar. Every rank must call this: it is a collective.

    Raises:
        BadInput: If there is no dealt batch, or the losses do not fit it.
    """
    if has_torch_function_unary(per_sample_losses):  # who follows operations is told of this one
        return handle_torch_function(batch_mean, (per_sample_losses,), per_sample_losses)
    return _batch_mean(per_sample_losses)


def local_batch_mean(per_sample_losses: Tensor) -> Tensor:
    """As `batch_mean`, with the same gradient and without a collective: a share of its value."""
    return _batch_mean(per_sample_losses, is_local=True)


def _batch_mean(per_sample_losses: Tensor, is_local: bool = False) -> Tensor:
    plan = plan_of_loss(per_sample_losses) or current_plan()
    if plan is None:
        raise BadInput("batch_mean needs a batch from unison.deal(loader), found none dealt yet")
    is_granular = isinstance(per_sample_losses, PerGranule)
    parts = per_sample_losses.parts if is_granular else [per_sample_losses]
    rows = plan.granule if is_granular else len(plan.sample_ids)
    for part in parts:
        if part.shape != (rows,):
            raise BadInput(
                f"expected one loss per sample, [{rows}], found {list(part.shape)}; use "
                "reduction='none' and average over each sample's own tokens"
            )
    if is_local:
        plan = replace(plan, ranks=Ranks(None))
    scales: list[Tensor] = []

    def make() -> Tensor:
        count = max(plan.num_samples, 1)
        flat = torch.cat([loss.detach().reshape(-1) for loss in parts])
        weights = plan.weights.to(flat.device)
        of_parts = zip(weights.split([len(loss) for loss in parts]), parts, strict=True)
        scales.extend((weight / count).to(loss.dtype) for weight, loss in of_parts)
        # A row of weight zero may hold anything, NaN included: select, do not multiply.
        counted = torch.where(weights > 0, flat.double(), 0.0)
        sums = counted.view(-1, plan.granule).sum(dim=1)  # [granules of this rank]
        of_granules = dict(zip(plan.granule_ids, sums, strict=True))
        total = sum_over_granules(of_granules, plan)
        return (sums.new_zeros(()) if total is None else total / count).to(flat.dtype)

    def gradients(gradient: Tensor) -> list[Tensor]:
        global _mean_was_used
        _mean_was_used = True
        return [gradient * scale for scale in scales]

    return WithGradients.apply(make, gradients, *parts)  # type: ignore[return-value]


TAKES_GRANULES.add(batch_mean)


def _num_samples(flat: list[Any]) -> int:
    counts = {value.shape[0] if value.ndim else None for value in flat if isinstance(value, Tensor)}
    counts |= {len(value) for value in flat if isinstance(value, list)}
    if len(counts) != 1 or None in counts:
        raise BadInput(
            "deal expects tensors with the batch's samples along dimension 0, and lists of one "
            f"value per sample, found sizes {sorted(map(str, counts))}"
        )
    return counts.pop()  # type: ignore[return-value]


def _is_column(value: Any) -> bool:
    """Whether it is a list of one plain value per sample, and not one that holds tensors."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, str | bytes | int | float | None) for each in value)
    )


def _check_same_batch(flat: list[Any], ranks: Ranks) -> None:
    """Refuse batches that differ between ranks: then nobody holds the global batch."""
    sums = [checksum(value) for value in flat if isinstance(value, Tensor) and ranks.size > 1]
    if sums and not same_on_every_rank(ranks, torch.stack(sums).sum(dim=0)):
        raise BadInput(
            "deal found different batches on different ranks; build the loader with the same seed "
            "on every rank and without a DistributedSampler, deal does the splitting"
        )


def _part(value: Any, plan: BatchPlan) -> Any:
    """This pass's rows of a tensor of the global batch, filled up with copies of its first row.

    What counts for nothing is computed all the same: of zeros, `log` and `1 / x` have no gradient.
    """
    ids = plan.sample_ids
    if isinstance(value, list) and value:
        return [value[index] for index in ids.clamp(min=0).tolist()]
    if not isinstance(value, Tensor):
        return value
    rows = padded_rows(value, plan) if len(value) == 0 else _cut(value[ids.clamp(min=0)], plan)
    return rows if plan.is_granular else DealtTensor.of(rows, plan)


def padded_rows(value: Tensor, plan: BatchPlan, padding: Tensor | None = None) -> Tensor:
    """The rows of this pass [samples, ...], padded, cut into granules if asked.

    Args:
        value: The samples of the pass, without padding.
        plan: Its plan.
        padding: A row [...] to pad with; zeros unless given.
    """
    ids = plan.sample_ids
    rows = value.new_zeros(len(ids), *value.shape[1:])
    if padding is not None:
        rows[ids < 0] = padding.to(rows)
    rows[ids >= 0] = value
    return _cut(rows, plan)


def _cut(rows: Tensor, plan: BatchPlan) -> Tensor:
    if not plan.is_granular:
        setattr(rows, PLAN, plan)
        return rows
    return PerGranule.of([part.clone() for part in rows.split(plan.granule)], plan)
