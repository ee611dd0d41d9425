"""What ranks share: each batch, of which a rank gets its rows, its norms, and the ledger.

Batches are padded, and have a plan as `unison.deal` makes it.

A pass without records (an empty draw, or a rank that got none of it) has one row of padding, which
counts for nothing: its coefficient is 0. So every rank runs the same units in every pass, models
need not know batches of no rows, and the loss of an empty batch is a number.

Padding is zeros, or a public record of the user's, and never one of the data: whether a draw was
padded, and with what, may show in what a model does beside its gradients. What a row of padding
computes is left out by selection, not by a product with 0: of zeros, `log` has no finite gradient.
"""

import itertools
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from unison.errors import BadInput
from unison.privacy.ledger import DataSalt, Ledger, Session, commit_to_data
from unison.privacy.mechanism import Mechanism
from unison.privacy.sampling import PhysicalBatch
from unison.rng import Key
from unison.shard.deal import (
    BatchPlan,
    current_plan,
    padded_rows,
    plan_batch,
    publish_plan,
    take_mean_was_used,
)
from unison.shard.deal import batch_mean as batch_mean
from unison.shard.deal import local_batch_mean as local_batch_mean
from unison.shard.digest import fingerprint as fingerprint
from unison.shard.each_granule import granular_pass
from unison.shard.flat_group import PLAIN
from unison.shard.granules import PerGranule
from unison.shard.ranks import Ranks
from unison.shard.sharded_tensor import show_shards as show_shards


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


class BatchDealer:
    """Presents the loader's batches to the module.

    Args:
        ranks: The ranks that share each logical batch.
        granule: Samples per granule; None leaves a rank's rows in one piece.
        max_physical_batch_size: Most rows in a pass.
        batch_dim: Dimension of the samples in the tensors of a batch.
        rows_per_sample: Rows of those tensors that belong to one sample, one after the other.
        usual_size: Samples that hardly any logical batch has more of; 1 if nothing is known.
        key: Of what the model draws, where there are granules; secret unless the noise is not.
        padding: A batch of one public record to pad with, as `collate_fn` makes it; None for zeros.

    Attributes:
        has_fixed_size: Whether passes are padded to the few sizes that clipping is planned for, so
            that a compiled module meets no others.
    """

    def __init__(
        self,
        ranks: Ranks,
        granule: int | None,
        max_physical_batch_size: int | None,
        batch_dim: int = 0,
        rows_per_sample: int = 1,
        usual_size: int = 1,
        key: Key | None = None,
        padding: Any = None,
    ) -> None:
        self.ranks, self.granule, self._dim = ranks, granule, batch_dim
        self._rows_per_sample = rows_per_sample
        self.max_physical_batch_size = max_physical_batch_size
        self._usual_size, self._key = usual_size, key
        self._padding, self.has_fixed_size = padding, False
        self.plan: BatchPlan | None = None
        self.parts: Sequence[Part] = ()
        self.most_rows = 1  # what ranks plan for, since they must plan alike: see `rows_to_plan`

    def present(self, batch: Any, physical: PhysicalBatch) -> Any:
        """Return a batch with its padding, in granules if asked; its plan becomes the current one.

        Args:
            batch: What the loader has loaded: this pass's records.
            physical: What it is.
        """
        granule = self.granule or 1
        plans = plan_batch(
            physical.logical_size,
            granule=granule,
            ranks=self.ranks,
            step=physical.step,
            is_granular=self.granule is not None,
            granules_per_pass=self.max_physical_batch_size
            and self.max_physical_batch_size // granule,
            key=self._key,
        )
        self.plan = plan = plans[physical.index]
        ids = plan.sample_ids
        assert len(plans) == physical.num_passes
        assert int((ids >= 0).sum()) == physical.num_samples
        if self.granule is None:
            longest = max(high - low for low, high in itertools.pairwise(plan.edges))
            rest = longest - physical.index * (self.max_physical_batch_size or longest)
            most = max(1, min(self.max_physical_batch_size or longest, rest))
            self.most_rows = self.rows_to_plan(most)
            if self.has_fixed_size:
                nobodys = (plan.num_granules,) * (self.most_rows - len(ids))
                self.plan = plan = replace(plan, granule_ids=(*plan.granule_ids, *nobodys))
                ids = plan.sample_ids
            pieces = [(PLAIN, ids)]
        else:
            self.most_rows = granule
            pieces = zip(plan.granule_ids, ids.split(granule), strict=True)
        self.parts = [
            Part(number, each >= 0, len(each), each[each >= 0]) for number, each in pieces
        ]
        publish_plan(plan)
        take_mean_was_used()
        if self.granule is None and len(ids) == physical.num_samples:
            return batch
        leaves, spec = tree_flatten(batch, is_leaf=_is_column)
        rows = self._rows_of_padding(len(leaves), spec)
        return tree_unflatten(
            [
                self._padded(leaf, row, physical.num_samples, plan)
                for leaf, row in zip(leaves, rows, strict=True)
            ],
            spec,
        )

    def _rows_of_padding(self, num_leaves: int, spec: TreeSpec) -> list[Any]:
        """What to pad each leaf of a batch with; None for zeros."""
        if self._padding is None:
            return [None] * num_leaves
        rows, own = tree_flatten(self._padding, is_leaf=_is_column)
        if own != spec:
            raise BadInput(
                f"collate_fn made {own} of padding_row and {spec} of records; give make_private a "
                "padding_row as the data set gives records"
            )
        return rows

    def watched(self, module: nn.Module, inputs: Any) -> AbstractContextManager[None]:
        """Around a forward pass: what it draws belongs to samples, if they come in granules."""
        if self.granule is None:
            return nullcontext()
        return granular_pass(type(module).__name__, module, inputs, looks_at_writes=False)

    def rows_to_plan(self, num_rows: int) -> int:
        """Return how many rows to plan clipping for, where a part has these on any rank.

        Poisson sampling gives every batch another size, and to plan takes longer than a step. So
        nearly all sizes share one plan, of the largest of them: what fits a memory budget then
        fits it with fewer rows.
        """
        if self.granule is not None:
            return num_rows  # granules are all of one size
        most = self.max_physical_batch_size
        rows = -(-self._usual_size // self.ranks.size)
        rows = rows if most is None else min(rows, most)
        while rows < num_rows:
            rows *= 2
        return rows if most is None or num_rows > most else min(rows, most)

    def end(self) -> None:
        """Let the last batch be no one's current one any more."""
        if self.plan is not None and current_plan() is self.plan:
            publish_plan(None)

    def _padded(self, leaf: Any, padding: Any, num_samples: int, plan: BatchPlan) -> Any:
        if isinstance(leaf, list) and padding and len(leaf) == num_samples:
            entries = iter(leaf)
            return [next(entries) if is_real else padding[0] for is_real in plan.sample_ids >= 0]
        if not isinstance(leaf, Tensor) or leaf.ndim <= self._dim:
            return leaf
        rows = self._rows_per_sample if leaf.shape[self._dim] != num_samples else 1
        if leaf.shape[self._dim] != num_samples * rows:
            raise BadInput(
                f"expected {num_samples * rows} rows in dimension {self._dim} of every tensor of "
                f"the batch, found {list(leaf.shape)}; make_private(batch_first=...) says where "
                "they lie"
            )
        if plan.is_granular and self._dim:
            raise BadInput("granules need samples in dimension 0 of every tensor: batch_first=True")
        samples = leaf.movedim(self._dim, 0)
        row = None if padding is None else _fitted(padding.movedim(self._dim, 0), samples)
        if rows == 1:
            return padded_rows(samples, plan, row).movedim(0, self._dim)
        padded = padded_rows(samples.reshape(num_samples, rows, *samples.shape[1:]), plan, row)
        return padded.flatten(0, 1).movedim(0, self._dim)

    @property
    def num_rows(self) -> int:
        """Rows of this pass's tensors, padding included, all granules together."""
        return sum(part.num_rows for part in self.parts) * self._rows_per_sample

    def loss_factor(self, part: Part, loss_reduction: str) -> float:
        """What undoes the mean in the user's loss, so that gradients are those of single samples.

        Args:
            part: Rows that were computed together.
            loss_reduction: `"mean"` or `"sum"`.
        """
        assert self.plan is not None
        if loss_reduction == "sum":
            if self._mean_was_used:
                raise BadInput(
                    "the loss was made by unison.batch_mean, a mean, and loss_reduction is 'sum'"
                )
            return 1.0
        return float(max(1, self.plan.num_samples) if self._mean_was_used else part.num_rows)

    _mean_was_used = False

    def begin_backward(self) -> None:
        """Note how the loss was made, which its backward pass has told by now."""
        self._mean_was_used = take_mean_was_used()


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


class FixedRows:
    """The rows of passes that are all of one size, in the place of `BatchDealer`."""

    def __init__(self, num_rows: int) -> None:
        self.parts: Sequence[Part] = [
            Part(PLAIN, torch.ones(num_rows, dtype=torch.bool), num_rows, torch.arange(num_rows))
        ]
        self.most_rows = num_rows

    def watched(self, module: nn.Module, inputs: Any) -> AbstractContextManager[None]:
        """Around a forward pass; see `BatchDealer`: there are no granules here."""
        return nullcontext()

    def begin_backward(self) -> None:
        """Refuse a loss over more rows than those of the pass."""
        if take_mean_was_used():
            raise BadInput("unison.batch_mean in a recorded pass: return one loss per row instead")


def plain_leaf(leaf: Any) -> Any:
    """The first granule of a value that has several; anything else as it is."""
    return leaf.parts[0] if isinstance(leaf, PerGranule) else leaf


def unpacked(leaf: Tensor) -> list[Tensor]:
    """The tensors that a value is made of: its granules, or itself."""
    return leaf.parts if isinstance(leaf, PerGranule) else [leaf]


def packed(leaf: Tensor, tensors: list[Tensor]) -> Tensor:
    """A value like `leaf` of other tensors."""
    return PerGranule.of(tensors) if isinstance(leaf, PerGranule) else tensors[0]


# ---- the ledger: the first rank writes it, and all of them count ---------------------------------


def open_on_ranks(
    path: str | os.PathLike[str] | None,
    mechanism: Mechanism,
    accountant: str,
    ranks: Ranks,
    session: Session,
    *,
    data_salt: DataSalt | None = None,
    data_id: str | None = None,
) -> Ledger:
    """Open the ledger on the first rank, and copies of what it holds on the others; a collective.

    All ranks know what was spent, so that they decide alike whether a step fits the budget.

    Args:
        path: The file; only the first rank touches it.
        mechanism: What the session applies.
        accountant: The accountant.
        ranks: The ranks that train together.
        session: What the session says of itself.
        data_salt: See `commit_to_data`; only the first rank looks at it.
        data_id: The same.

    Raises:
        BadInput: On every rank, if the first one cannot open the file.
    """
    ledger, error = None, ""
    if ranks.rank == 0:
        try:
            session = commit_to_data(session, salt=data_salt, data_id=data_id, ledger=path)
            ledger = Ledger.open(path, mechanism=mechanism, accountant=accountant, session=session)
        except Exception as found:
            if ranks.size == 1:
                raise
            error = str(found)
    if ranks.size == 1:
        assert ledger is not None
        return ledger
    state = {"error": error} if ledger is None else ledger.state_dict()
    told = [json.dumps(state) if ranks.rank == 0 else ""]
    dist.broadcast_object_list(told, group=ranks.group, group_src=0, device=device_of(ranks))
    state = json.loads(told[0])
    if "error" in state:
        raise BadInput(f"the first rank could not open the ledger: {state['error']}")
    if ledger is None:
        ledger = Ledger.open(None, mechanism=mechanism, accountant=accountant, session=session)
        ledger.load_state_dict(state)
        ledger.is_copy = not state["is_in_memory"]
    return ledger


def device_of(ranks: Ranks) -> torch.device:
    """Where small objects must be to go over the ranks' network."""
    is_nccl = dist.get_backend(ranks.group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
