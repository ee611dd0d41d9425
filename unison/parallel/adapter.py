"""What all ways of lying on ranks share.

`ShardedParam` is what a rank holds of a parameter, `GroupSums` adds clipped sums of some of them
over granules, passes and ranks, `ParallelAdapter` is the base of the adapters. Sums are integers
([Note: sums on a grid] in privacy/mechanism.py), so that the order in which they are added does not
matter: the backend's own is as good as any.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from unison.capture import Capture
from unison.capture.capture import PLACING
from unison.errors import UnsupportedOperation
from unison.ops import Record
from unison.parallel.exchange import buckets
from unison.rng import Box
from unison.shard.deal import BatchPlan
from unison.shard.flat_group import PLAIN, RECOMPUTE
from unison.shard.layout import FlatLayout, ShardPiece
from unison.shard.ranks import Axes, Ranks
from unison.shard.reducers import FastReducer, Parts
from unison.shard.sharded_tensor import ShardedTensor, is_dtensor, local_part

T = TypeVar("T")

BYTES_PER_BUCKET = 64 << 20  # of sums: large for the network, small beside a model


@dataclass(frozen=True, eq=False)
class ShardedParam:
    """A trainable parameter, and which of its elements each rank holds.

    Attributes:
        name: Its canonical name: noise and curvature hang on it.
        parameter: What the optimizer holds on this rank.
        shape: Of the whole parameter.
        ranges: The elements [start, stop) of the flattened whole at each place; all ranks are
            copies of these places, `replica * num_places + place`.
        place: This rank's.
        cut: Which elements are here, where they are no run of the flattened whole; `ranges` then
            only counts them.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    place: int = 0
    cut: Box | None = None

    @classmethod
    def whole(cls, name: str, parameter: nn.Parameter) -> "ShardedParam":
        """A parameter of which every rank holds all."""
        return cls(name, parameter, tuple(parameter.shape), ((0, parameter.numel()),))

    @cached_property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def start(self) -> int:
        """First of its elements that this rank holds, in row-major order."""
        return self.ranges[self.place][0]

    @property
    def stop(self) -> int:
        """One past the last."""
        return self.ranges[self.place][1]

    @cached_property
    def is_part(self) -> bool:
        """Whether this rank holds some of the elements only."""
        return self.stop - self.start < self.numel

    @cached_property
    def is_dtensor(self) -> bool:
        """Whether the optimizer holds a distributed tensor."""
        return is_dtensor(self.parameter)

    @property
    def box(self) -> Box:
        """Which elements of the parameter are here."""
        return self.cut or Box.flat(self.start, self.stop, self.numel)

    def as_gradient(self, values: Tensor) -> Tensor:
        """A gradient of these elements, as the optimizer wants to find it in `.grad`."""
        parameter: Any = self.parameter
        if values.device != parameter.device:
            values = values.to(parameter.device)
        if isinstance(parameter, ShardedTensor):
            return ShardedTensor(values.view(-1), parameter.placement)
        if not self.is_dtensor:
            return values if values.shape == self.shape else values.view(self.shape)
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            values.view(local_part(parameter).shape),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def gradient(self, shape: Sequence[int] = (-1,)) -> Tensor:
        """This rank's part of the gradient in some shape, or flat; zeros where there is none."""
        gradient = self.parameter.grad
        if gradient is None:
            return torch.zeros_like(local_part(self.parameter.detach())).reshape(shape)
        with torch._C.DisableTorchFunctionSubclass():
            return local_part(gradient.detach()).reshape(shape)


def write_gradients(pairs: Iterable[tuple[ShardedParam, Tensor]]) -> None:
    """Put other values into this rank's parts of gradients, where there are any.

    Args:
        pairs: Parameters, and the values of this rank's part, in any shape.
    """
    parts, values = [], []
    with torch._C.DisableTorchFunctionSubclass():
        for each, value in pairs:
            if each.parameter.grad is not None:
                part = local_part(each.parameter.grad.detach())
                parts.append(part)
                values.append(value.reshape(part.shape))
        if parts:
            torch._foreach_copy_(parts, values)


# --- sums -----------------------------------------------------------------------------------------


class MakeSums(Protocol):
    """Makes this rank's clipped sums; it gives memory back as it goes.

    Attributes:
        dtype: Of the sums, integers; the same on every rank.
    """

    @property
    def dtype(self) -> torch.dtype:
        """See above."""
        ...

    def __call__(
        self, granule: int, names: Sequence[str], before: Sequence[Tensor | None] | None = None
    ) -> list[Tensor | None]:
        """Return the sums of these parameters, None for one not used.

        Every name is asked for once per granule.

        Args:
            granule: Which.
            names: Of the parameters.
            before: Sums of theirs, to which these are added in place; None for one that has none.
        """
        ...


class GroupSums:
    """The sums of one group: begun by `take`, exchanged by `start`, complete after `finish`.

    Sharded ones are exchanged after every pass, so that no whole gradient is held longer. Where
    every rank holds the whole gradient anyway, that is once per logical batch.

    To reducers it is the flat group that they sum (see `unison.shard.flat_group`).

    Args:
        params: The parameters, one per slot of the layout.
        axes: The ranks.
        layout: Where the sums lie in the buffer that is exchanged.
        device: Where it is.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        axes: Axes,
        layout: FlatLayout,
        device: torch.device,
    ) -> None:
        self.params, self.names = params, [each.name for each in params]
        self.axes, self.ranks = axes, axes.shard
        self.layout, self.slots = layout, layout.slots
        self.device, self.reduce_dtype = device, torch.int64
        self._reducer: FastReducer | None = None
        self._totals: Parts = [None] * len(self.slots)
        self._is_alone = axes.all.size == 1  # nothing is exchanged

    def piece_places(self) -> list[ShardPiece]:
        """What this rank holds of each slot."""
        return self.layout.pieces(self.ranks.rank, self.ranks.size)

    def take(self, granule: int, make_sums: MakeSums) -> None:
        """Take this rank's sums of one granule."""
        self.reduce_dtype = make_sums.dtype
        sums = self._make(granule, make_sums)
        if self._is_alone:
            self._add(sums)
            return
        if self._reducer is None:
            self._reducer = FastReducer(self)  # type: ignore[arg-type]
        self._reducer.take(granule, sums)

    def _make(self, granule: int, make_sums: MakeSums) -> Parts:
        return make_sums(granule, self.names, self._totals if self._is_alone else None)

    def start(self, *, is_last: bool) -> None:
        """Begin to exchange what this pass, or the whole logical batch, has come to."""
        if self._reducer is not None and (is_last or self.ranks.size > 1):
            self._reducer.start()

    def finish(self, *, is_last: bool) -> None:
        """Wait for the exchange, and add its result to that of earlier passes."""
        if self._reducer is not None and (is_last or self.ranks.size > 1):
            self._add(self._reducer.finish())
            self._reducer = None

    def _add(self, parts: Parts) -> None:
        for slot, part in enumerate(parts):
            before = self._totals[slot]
            if part is None or part is before:
                continue
            self._totals[slot] = part.reshape(-1) if before is None else before.add_(part.view(-1))

    def take_totals(self) -> Iterator[tuple[ShardedParam, Tensor]]:
        """Hand out what this rank holds of each sum; zeros where nobody used a parameter."""
        return zip(self.params, self._taken(), strict=True)

    def _taken(self) -> list[Tensor]:
        totals = self._totals
        self.drop()
        return [
            torch.zeros(place.numel, dtype=self.reduce_dtype, device=self.device)
            if total is None
            else total
            for total, place in zip(totals, self.piece_places(), strict=True)
        ]

    def drop(self) -> None:
        """Forget what there is."""
        self._reducer = None
        self._totals = [None] * len(self.slots)


def in_buckets(params: Sequence[ShardedParam], ranks: Ranks) -> list[GroupSums]:
    """Groups of parameters of which all ranks hold as much, and keep the whole sum.

    Args:
        params: In an order that every rank shares.
        ranks: The ranks whose sums are added; each has other samples.
    """
    axes = Axes(all=ranks, shard=Ranks(None), replicas=ranks)
    most = BYTES_PER_BUCKET if ranks.size > 1 else math.inf
    found = []
    for (_, device), alike in groupby(params, lambda p: (p.parameter.dtype, p.parameter.device)):
        for bucket in buckets(alike, lambda each: 4 * (each.stop - each.start), most):
            held = [(each.name, each.cut.sides if each.cut else each.shape) for each in bucket]
            found.append(GroupSums(bucket, axes, FlatLayout.of(held), device))
    return found


# --- adapters -------------------------------------------------------------------------------------


class ParallelAdapter:
    """Knows how a module's parameters lie on ranks, and adds sums up over passes and ranks.

    Args:
        module: The user's module.
        is_ordered: Whether sums must not depend on the number of ranks.

    Attributes:
        module: What to run a pass of, under a capture.
        everyone: All ranks that train together: they have one key and one ledger.
        ranks: The ranks that share each logical batch, and hold other samples of it.
        num_places: Over how many of them one copy of the parameters is spread.
        device: Where the module computes and ranks exchange; parameters may lie elsewhere.
        params: Every trainable parameter, in the model's order.
        is_ordered: Whether passes are cut into granules: the same bits on any number of ranks.
        can_repeat: Whether the module's forward may be run again when a backward pass ends.
        runs_together: Whether the module's passes are collectives: all ranks run them, or none.
        why_uncompiled: Why the module's passes cannot go through torch.compile; None if they can.
    """

    module: nn.Module
    ranks: Ranks
    num_places = 1
    device: torch.device
    params: Sequence[ShardedParam]
    can_repeat = False
    runs_together = True
    why_uncompiled: str | None = None

    def __init__(self, module: nn.Module, *, is_ordered: bool) -> None:
        self.module, self.is_ordered = module, is_ordered
        self._sums: list[GroupSums] = []  # in an order that every rank shares
        self._undo = ExitStack()

    @property
    def everyone(self) -> Ranks:
        """All ranks that train together; see above."""
        return self.ranks

    @property
    def is_alone(self) -> bool:
        """Whether this rank's own sums of a pass, in any order, are those over all ranks."""
        return False

    # --- tracked parameters ----------------------------------------------------------------------

    def attach(self) -> None:
        """Let captures take the place of autograd's gradients until `detach`; a collective.

        An error halfway leaves things for `detach` to undo.
        """

    def detach(self) -> None:
        """Leave the module as it was."""
        self._undo.close()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Let captures be installed in the module; around everything that runs under one."""
        with ExitStack() as undo:
            self._let_captures_place(undo)
            yield

    def _let_captures_place(self, undo: ExitStack) -> None:
        """Let a capture of the module call `_placing`, until `undo` is closed."""
        self.module.__dict__[PLACING] = self._placing
        undo.callback(self.module.__dict__.pop, PLACING, None)

    def _placing(self, capture: Capture) -> AbstractContextManager[object]:
        return self.installed({PLAIN: capture})

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelAdapter":
        """Copies of the module share it; who trains one makes another."""
        return self

    def installed(self, captures: Mapping[int, Capture]) -> AbstractContextManager[object]:
        """Put tracked parameters in place, for each granule those of its capture."""
        raise NotImplementedError

    # --- agreement along a tensor axis -----------------------------------------------------------

    def agreed(self, value: T) -> T:
        """A value that ranks which run the same rows must share; here each has its own rows."""
        return value

    def whole_norms(self, norms: Mapping[str, T]) -> Mapping[str, T]:
        """The norms of samples over whole parameters, from those over what this rank records.

        Every rank calls it once for every part of a pass.

        Args:
            norms: By parameter; a dataclass of `squared` and `upper` [rows] each.
        """
        return norms

    # --- sums ------------------------------------------------------------------------------------

    def add(self, make_sums: MakeSums, plan: BatchPlan, granules: Sequence[int]) -> None:
        """Add the sums of a pass; with the last pass of a logical batch, over ranks.

        Every rank calls it for every pass. The sums of one group are made while those of the one
        before are exchanged: never more than one exchange holds memory.
        """
        is_last = plan.closes_logical_batch
        running: GroupSums | None = None
        for group in self._sums:
            for granule in granules:
                group.take(granule, make_sums)
            if running is not None:
                running.finish(is_last=is_last)
            group.start(is_last=is_last)
            running = group
        if running is not None:
            running.finish(is_last=is_last)

    def totals(self) -> Iterator[tuple[ShardedParam, Tensor]]:
        """Hand out the sums of a logical batch over all ranks [stop - start], and forget them."""
        for group in self._sums:
            yield from group.take_totals()

    def drop(self) -> None:
        """Forget the sums of a logical batch that was given up."""
        for group in self._sums:
            group.drop()


def capture_of(captures: Mapping[int, Capture], granule: int) -> Capture:
    """The capture of a granule, or one for code that checkpointing runs again."""
    if granule in captures:
        return captures[granule]
    some = next(iter(captures.values()))
    assert granule in (PLAIN, RECOMPUTE)
    # Code that checkpointing runs again: the graph of the first run keeps its own captures, and
    # what is recorded here would be of another granule.
    return Capture(some.module, some.batch, axes=some.axes, on_record=_refuse_record)


def _refuse_record(name: str, record: Record) -> None:
    raise UnsupportedOperation(
        f"{name} is under reentrant checkpointing, which hides from the ordered reducer which "
        "granule it computes; pass use_reentrant=False to torch.utils.checkpoint"
    )
