"""What all ways of lying on ranks share, and the two simple ones: copies, and our own units.

`ShardedParam` is what a rank holds of a parameter, `GroupSums` adds clipped sums of some of them
over granules, passes and ranks, `ParallelAdapter` is the base of the adapters. Sums are integers
([Note: sums on a grid] in privacy/mechanism.py), so that the order in which they are added does not
matter: the backend's own is as good as any.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.nn.parallel import DistributedDataParallel

from unison.capture import Capture
from unison.capture.capture import PLACING
from unison.capture.tracked import Source, Tracked, find_params
from unison.errors import BadInput, UnsupportedOperation
from unison.parallel.exchange import buckets
from unison.rng import Box
from unison.shard.deal import BatchPlan
from unison.shard.engine import context_of
from unison.shard.flat_group import PLAIN, RECOMPUTE
from unison.shard.fsdp2 import set_attribute
from unison.shard.granules import PerGranule, refuse_reentrant
from unison.shard.layout import FlatLayout, Slot
from unison.shard.ranks import Ranks, checksum, same_on_every_rank
from unison.shard.reducers import FastReducer, Parts
from unison.shard.sharded_tensor import ShardedTensor, local_part
from unison.shard.unit import Unit, unit_of
from unison.torch_internals import canonical_name, is_dtensor

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

    @cached_property
    def start(self) -> int:
        """First of its elements that this rank holds, in row-major order."""
        return self.ranges[self.place][0]

    @cached_property
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

    @cached_property
    def box(self) -> Box:
        """Which elements of the parameter are here."""
        return self.cut or Box.flat(self.start, self.stop, self.numel)

    @property
    def local(self) -> Tensor:
        """This rank's part of the parameter, in its own memory."""
        return local_part(self.parameter)

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
        if type(gradient) is Tensor and gradient.shape == shape and not gradient.requires_grad:
            return gradient  # most are, and every view costs the host microseconds at every step
        if gradient is None:
            return torch.zeros_like(local_part(self.parameter.detach())).reshape(shape)
        with torch._C.DisableTorchFunctionSubclass():
            return local_part(gradient.detach()).reshape(shape)


# --- who trains a parameter -----------------------------------------------------------------------

private_trainings: weakref.WeakSet[Any] = weakref.WeakSet()
"""What trains parameters privately; each says which by `trained`."""
curvatures: weakref.WeakSet[Any] = weakref.WeakSet()
"""What takes curvature of batches for parameters, likewise."""


def find_shared(params: Mapping[str, Tensor], trainers: Iterable[Any]) -> str | None:
    """Return the name of a parameter that any of the trainers trains too; None if there is none.

    One parameter is one object, or the same memory under another: modules that share layers, a
    tied weight, a view, `nn.Parameter(weight.data)`. Memory is looked at anew every time, since
    parameters move.
    """
    theirs = [each for trainer in trainers for each in trainer.trained]
    ids, extents = {id(each) for each in theirs}, [_extent(each) for each in theirs]
    for name, each in params.items() if theirs else ():
        start, stop = _extent(each)
        if id(each) in ids or any(start < end and begin < stop for begin, end in extents):
            return name
    return None


def _extent(param: Tensor) -> tuple[int, int]:
    """The bytes [start, stop) of this rank's part; none of an empty, freed or meta tensor."""
    part = local_part(param)
    while is_functorch_wrapped_tensor(part):  # inside of torch.func's grad or vmap
        part = get_unwrapped(part)
    start = part.data_ptr() if part.numel() else 0
    strides = zip(part.shape, part.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in strides)
    return (start, start + (last + 1) * part.element_size()) if start else (0, 0)


def write_gradients(pairs: Iterable[tuple[ShardedParam, Tensor]]) -> None:
    """Put other values into this rank's parts of gradients, where there are any.

    Args:
        pairs: Parameters, and the values of this rank's part, in any shape.
    """
    parts, values = [], []
    with torch._C.DisableTorchFunctionSubclass():
        for each, value in pairs:
            if each.parameter.grad is not None:
                part = each.parameter.grad
                if type(part) is not Tensor:
                    part = local_part(part)
                if part.data_ptr() == value.data_ptr() and part.dtype == value.dtype:
                    continue  # it was made there
                parts.append(part)
                values.append(value if value.shape == part.shape else value.reshape(part.shape))
        if parts:
            torch._foreach_copy_(parts, values)


# --- sums -----------------------------------------------------------------------------------------


MakeSums = Callable[[int, Sequence[str], Sequence[Tensor | None] | None], list[Tensor | None]]
"""(granule, names, before) -> this rank's clipped sums of these parameters, None for one not used.

Every name is asked for once per granule, and memory is given back as it goes. Sums are integers;
they are added in place to those of `before`, where there are some."""


PassSums = tuple[MakeSums, BatchPlan, Sequence[int], torch.dtype]
"""What `ParallelAdapter.add` is given of a pass."""


class GroupSums:
    """The sums of one group: begun by `take`, exchanged by `start`, complete after `finish`.

    Sharded ones are exchanged after every pass, so that no whole gradient is held longer. Where
    every rank holds the whole gradient anyway, that is once per logical batch.

    Args:
        params: The parameters, one per slot of the layout.
        ranks: Everyone.
        layout: Where the sums lie in the buffer that is exchanged; None for lines, as FSDP2 lays
            gradients out: see [Note: lines] in fsdp2.py.
        device: Where it is.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        ranks: Ranks,
        layout: FlatLayout | None,
        device: torch.device,
    ) -> None:
        self._params, self.names = params, [each.name for each in params]
        self._widths = [each.ranges[0][1] for each in params] if layout is None else None
        if self._widths is not None:  # to the reducer, all lines together are one parameter
            length = ranks.shard.size * sum(self._widths)
            layout = FlatLayout(
                (Slot("lines", (length,), 0),), length, ranks.shard.size, alignment=1
            )
        assert layout is not None
        self._ranks, self._layout = ranks, layout
        self.numel = sum(each.numel for each in params)
        self._like = torch.empty(0, dtype=torch.int64, device=device)
        self._is_alone = ranks.size == 1  # nothing is exchanged
        self.drop()

    def take(self, granules: Sequence[int], make_sums: MakeSums, dtype: torch.dtype) -> None:
        """Take this rank's sums of some granules."""
        self._like = self._like.to(dtype)
        before = self._totals if self._is_alone and self._widths is None else None
        for granule in granules:
            sums: Parts = make_sums(granule, self.names, before)
            if self._widths is not None:
                sums = [self._lines(sums)]
            if self._is_alone:
                self._add(sums)
                continue
            if self._reducer is None:
                self._reducer = FastReducer(self._layout, self._ranks, self._like)
            self._reducer.take(granule, sums)

    def _lines(self, sums: Parts) -> Tensor:  # [ranks * length of a line]
        """The lines of all ranks; zeros where nothing was used."""
        wholes = [
            self._like.new_zeros(each.shape) if total is None else total.reshape(each.shape)
            for each, total in zip(self._params, sums, strict=True)
            if each.numel
        ]
        size = self._ranks.shard.size
        return torch._chunk_cat(wholes, 0, size).view(-1) if wholes else self._like.new_zeros(0)

    def start(self, *, is_last: bool) -> bool:
        """Begin to exchange what this pass, or the whole logical batch, has come to.

        Returns:
            Whether there is anything to `finish`.
        """
        if self._reducer is None or not (is_last or self._ranks.shard.size > 1):
            return False
        self._reducer.start()
        return True

    def finish(self) -> None:
        """Wait for the exchange, and add its result to that of earlier passes."""
        assert self._reducer is not None
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
        rank = self._ranks.shard.rank
        totals = [
            self._like.new_zeros(stop - start) if total is None else total
            for total, (start, stop, _) in zip(self._totals, self._layout.pieces[rank], strict=True)
        ]
        self.drop()
        if self._widths is not None:  # of which the last rows may be padding
            columns = zip(self._params, totals[0].split(self._widths), strict=True)
            totals = [column[: each.stop - each.start] for each, column in columns]
        return zip(self._params, totals, strict=True)

    def drop(self) -> None:
        """Forget what there is."""
        self._reducer: FastReducer | None = None
        self._totals: Parts = [None] * len(self._layout.slots)


def in_buckets(params: Sequence[ShardedParam], ranks: Ranks) -> list[GroupSums]:
    """Groups of parameters of which all ranks hold as much, and keep the whole sum.

    Args:
        params: In an order that every rank shares.
        ranks: The ranks whose sums are added; each has other samples.
    """
    copies = Ranks(ranks.group, shard=Ranks(None), replicas=ranks)
    most = BYTES_PER_BUCKET if ranks.size > 1 else math.inf
    found = []
    for (_, device), alike in groupby(params, lambda p: (p.parameter.dtype, p.parameter.device)):
        for bucket in buckets(alike, lambda each: 4 * (each.stop - each.start), most):
            held = [(each.name, each.cut.sides if each.cut else each.shape) for each in bucket]
            found.append(GroupSums(bucket, copies, FlatLayout.of(held), device))
    return found


# --- adapters -------------------------------------------------------------------------------------


class ParallelAdapter:
    """Knows how a module's parameters lie on ranks, and adds sums up over passes and ranks.

    This one is for copies of the module on every rank: one process, several, or torch's DDP, past
    whose own sums passes for statistics run the module inside. DDP's sum is left out: it would add
    gradients as autograd leaves them, and there are none. Each other way has a subclass.

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
        is_alone: Whether this rank's own sums of a pass, in any order, are those over all ranks.
        can_repeat: Whether the module's forward may be run again when a backward pass ends.
        runs_together: Whether the module's passes are collectives: all ranks run them, or none.
        computes_with_dtensors: Whether the module sees parameters in parts.
        why_uncompiled: Why the module's passes cannot go through torch.compile; None if they can.
    """

    module: nn.Module
    everyone: Ranks
    ranks: Ranks
    num_places = 1
    is_alone = False
    device: torch.device
    params: Sequence[ShardedParam]
    can_repeat = True
    runs_together = False
    computes_with_dtensors = False
    why_uncompiled: str | None = None
    _ddp: DistributedDataParallel | None = None  # around the module

    def __init__(self, module: nn.Module, *, is_ordered: bool) -> None:
        self.module, self.is_ordered = module, is_ordered
        self._sums: list[GroupSums] = []  # in an order that every rank shares
        self._begun: PassSums | None = None  # see `begin`; and what is left of it to be added
        self._left: list[GroupSums] = []
        self._is_complete: Callable[[Sequence[str]], bool] | None = None
        self._running: GroupSums | None = None  # whose sums are exchanged
        self._undo = ExitStack()
        self._find_params()

    def _find_params(self) -> None:
        """Set `params`, who holds them, and the groups in which their sums are added."""
        if isinstance(self.module, nn.DataParallel):
            raise UnsupportedOperation(
                "nn.DataParallel copies the module in every pass; use one process per device"
            )
        if isinstance(self.module, DistributedDataParallel):
            self._ddp, self.module = self.module, self.module.module
        self.ranks = Ranks(self._ddp.process_group) if self._ddp else Ranks.of(None)
        self.everyone, self.is_alone = self.ranks, self.ranks.size == 1 and not self.is_ordered
        trained = trained_params(self.module)
        self.params = [ShardedParam.whole(name, each) for name, each in trained.items()]
        self.device = next((each.device for each in trained.values()), torch.device("cpu"))
        self._sums = in_buckets(self.params, self.ranks)

    # --- tracked parameters ----------------------------------------------------------------------

    def attach(self) -> None:
        """Let captures take the place of autograd's gradients until `detach`; a collective.

        An error halfway leaves things for `detach` to undo.

        Raises:
            BadInput: The ranks hold different parameters.
        """
        if not are_equal(self.ranks, self.params):
            raise BadInput(
                "the ranks hold different parameters; build the module from one seed on every "
                "rank, or broadcast it"
            )
        if self._ddp is not None:
            self._silence(self._ddp)

    def _silence(self, ddp: DistributedDataParallel) -> None:
        """Let DDP wait for no gradients: none come, and sums go over ranks by themselves."""
        set_attribute(self._undo, ddp, "require_backward_grad_sync", False)
        if ddp.static_graph:  # else its first backward pass would learn what the graph is like
            set_attribute(self._undo, ddp, "_static_graph_delay_allreduce_enqueued", True)

    def detach(self) -> None:
        """Leave the module as it was."""
        self._undo.close()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Let captures be installed in the module; around everything that runs under one."""
        yield  # a capture puts tracked parameters in place by itself

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
        """Put tracked parameters in place, for each granule those of its capture.

        Raises:
            BadInput: The module has been wrapped in DDP since, for other ranks.
        """
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is not None and ddp is not self._ddp and ddp.module is self.module:
            if Ranks(ddp.process_group).size != self.ranks.size:
                raise BadInput(
                    "make_private ran before the ranks were known to each other, so each would "
                    "draw and train alone: make the process group (or the Accelerator) first"
                )
            self._ddp = ddp  # wrapped after make_private; it asks for gradients after the forward
            self._silence(ddp)
        if list(captures) == [PLAIN]:
            return captures[PLAIN].installed()
        return self._in_granules(captures)

    @contextmanager
    def _in_granules(self, captures: Mapping[int, Capture]) -> Iterator[None]:
        """Let each granule compute with parameters of its own capture."""
        found: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for owner, attribute, parameter, name in find_params(self.module)[1]:
                if not parameter.requires_grad:
                    continue
                if id(parameter) not in found:
                    parts = [tracked(name, parameter, each) for each in captures.values()]
                    found[id(parameter)] = PerGranule.of(parts)
                owner.__dict__[attribute] = found[id(parameter)]
                stack.callback(owner.__dict__.pop, attribute, None)
            yield

    def ordinary_bytes(self) -> int:
        """Roughly what this rank's device holds in ordinary training, beside activations.

        Weights, gradients and two moments; and of parameters in parts two groups at a time, whole,
        with their sums: one computes or is added up, the other is on its way over ranks.
        """
        parts = [(local_part(each), each.requires_grad) for each in self.module.parameters()]
        here = [each for each in parts if each[0].device.type == self.device.type]
        held = sum(part.nbytes * (4 if is_trained else 1) for part, is_trained in here)
        return held + 16 * self._widest

    @property
    def _widest(self) -> int:
        """Elements of the largest group of which a rank holds a part."""
        return max((each.numel for each in self._sums), default=0) if self.num_places > 1 else 0

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

    def begin(
        self,
        make_sums: MakeSums,
        plan: BatchPlan,
        granules: Sequence[int],
        dtype: torch.dtype,
        is_complete: Callable[[Sequence[str]], bool],
    ) -> None:
        """Add the sums of a pass from here on, those of each group as soon as they are complete.

        A second backward pass makes whole sums, and of a sharded module no rank should hold those
        of more than a unit. Every rank calls it, and then `add` for what is left.

        Args:
            make_sums: As for `add`, like the next three.
            plan: Likewise.
            granules: Likewise.
            dtype: Likewise.
            is_complete: Whether the second pass has come by all uses of some parameters.
        """
        self._refuse_broken(make_sums)
        self._begun, self._left = (make_sums, plan, granules, dtype), list(self._sums)
        self._is_complete = is_complete

    def add(
        self, make_sums: MakeSums, plan: BatchPlan, granules: Sequence[int], dtype: torch.dtype
    ) -> None:
        """Add the sums of a pass; with the last pass of a logical batch, over ranks.

        Every rank calls it for every pass. The sums of one group are made while those of the one
        before are exchanged: never more than one exchange holds memory.

        Args:
            make_sums: Makes this rank's sums.
            plan: Of the pass.
            granules: This rank's, in the order in which they are added.
            dtype: Of the sums, the same on every rank.
        """
        self._refuse_broken(make_sums)
        left = self._sums if self._begun is None else self._left
        self._begun, self._left = None, []
        for group in left:
            self._add_group(group, (make_sums, plan, granules, dtype))
        self._finish_running()

    def _refuse_broken(self, make_sums: MakeSums) -> None:
        if self._begun is not None and self._begun[0] is not make_sums:
            raise BadInput(
                "an earlier backward pass of this logical batch broke off when a part of its sums "
                "had been added; iterate over the loader anew, which gives that batch up"
            )

    def _add_complete(self, group: GroupSums) -> None:
        """The backward pass is through with a group's parameters: add its sums, if any are begun.

        Ranks come here in one order, as they come to sums of ordinary gradients.
        """
        if self._begun is not None and group in self._left:
            assert self._is_complete is not None
            if self._is_complete(group.names):
                self._add_group(group, self._begun)
                self._left.remove(group)

    def _add_group(self, group: GroupSums, sums: PassSums) -> None:
        make_sums, plan, granules, dtype = sums
        group.take(granules, make_sums, dtype)
        self._finish_running()
        if group.start(is_last=plan.closes_logical_batch):
            self._running = group

    def _finish_running(self) -> None:
        if self._running is not None:
            self._running.finish()
            self._running = None

    def totals(self) -> Iterator[tuple[ShardedParam, Tensor]]:
        """Hand out the sums of a logical batch over all ranks [stop - start], and forget them."""
        for group in self._sums:
            yield from group.take_totals()

    def drop(self) -> None:
        """Forget the sums of a logical batch that was given up."""
        self._begun, self._left, self._running = None, [], None
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
    return Capture(
        some.module, some.batch, axes=some.axes, on_record=lambda name, _: refuse_reentrant(name)
    )


def tracked(name: str, value: Tensor, capture: Capture) -> Tracked:
    """What a capture computes with in the place of a parameter."""
    return Tracked.of(value, (Source(name),), capture)


def trained_params(module: nn.Module) -> dict[str, Any]:
    """Each trainable parameter once, by its canonical name."""
    found: dict[str, Any] = {}
    for place in find_params(module)[1]:
        if place.parameter.requires_grad:
            found.setdefault(place.name, place.parameter)
    return found


def are_equal(ranks: Ranks, params: Sequence[ShardedParam]) -> bool:
    """Whether ranks hold the same bytes of these parameters; a collective."""
    if ranks.size == 1 or not params:
        return True
    sums = torch.stack([checksum(local_part(each.parameter.detach())) for each in params])
    return same_on_every_rank(ranks, sums.to(params[0].parameter.device))


# --- parameters under `unison.fully_shard` --------------------------------------------------------
#
# The units go on gathering and freeing parameters as in ordinary training. What they compute with
# are tracked tensors, so autograd brings them no gradients; when the coefficients are known, the
# clipped sums of one unit after the other are made and summed over ranks, each rank keeping its
# part.


class Units(ParallelAdapter):
    """The units of a sharded module.

    Raises:
        BadInput: Not all trainable parameters are in units.
    """

    can_repeat = False
    runs_together = True

    def _find_params(self) -> None:
        root = unit_of(self.module)
        if root is None:
            raise BadInput(
                "parts of the module are sharded and the module itself is not; call "
                "unison.fully_shard on it too, or unison.auto_shard"
            )
        self.is_ordered = root.reducer == "ordered"
        self._root, self._units = root, context_of(root).units
        self.ranks = self.everyone = root.ranks
        self.num_places = root.ranks.shard.size
        self.device = context_of(root).groups[0].device
        self._names = {
            id(piece): canonical_name(name) for name, piece in self.module.named_parameters()
        }
        found: dict[int, ShardedParam] = {}
        self._of_unit: dict[Unit, list[GroupSums]] = {}
        for group in (group for unit in self._units for group in unit.trainable):
            params = [
                ShardedParam(self._names[id(piece)], piece, slot.shape, own, root.ranks.shard.rank)
                for piece, slot, own in zip(
                    group.pieces, group.slots, group.layout.ranges, strict=True
                )
            ]
            found.update({id(each.parameter): each for each in params})
            self._sums.append(GroupSums(params, group.ranks, group.layout, group.device))
            self._of_unit.setdefault(group.unit, []).append(self._sums[-1])
        self.params = [found[id(piece)] for piece in self.module.parameters() if id(piece) in found]
        # The backward pass reaches the last units first, and so did their gradients before.
        self._sums.reverse()

    def ordinary_bytes(self) -> int:
        """See `ParallelAdapter`; parameters of the root, and of ZeRO-2's units, stay gathered."""
        held = 0
        for group in context_of(self._root).groups:
            copies = 4 if group.requires_grad else 1
            held += group.shard.nbytes * (copies if self._root.offload is None else 1)
        full = {unit: sum(group.full_bytes for group in unit.groups) for unit in self._units}
        kept = {unit for unit in self._units if unit.reshard_after_forward is False}
        kept.add(self._root)
        at_once = sorted(full[unit] for unit in self._units if unit not in kept)[-2:]
        return held + sum(at_once) + sum(full[unit] for unit in kept) + 8 * self._widest

    def attach(self) -> None:
        """See `ParallelAdapter`."""
        self._root.runs_hooks_first = True
        self._undo.callback(setattr, self._root, "runs_hooks_first", False)
        self._undo.callback(setattr, context_of(self._root), "compares_ways", False)
        self._let_captures_place(self._undo)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """See `ParallelAdapter`."""
        with ExitStack() as undo:
            self._let_captures_place(undo)
            yield

    @contextmanager
    def installed(self, captures: Mapping[int, Capture]) -> Iterator[None]:
        """Let units compute with tracked parameters; see `ParallelAdapter`."""
        before = [unit.leaf_source for unit in self._units]
        found: dict[tuple[Unit, int], list[list[Tensor]]] = {}

        def leaves(unit: Unit, granule: int) -> list[list[Tensor]]:
            if (unit, granule) not in found:
                found[unit, granule] = self._leaves(unit, capture_of(captures, granule))
            return found[unit, granule]

        context_of(self._root).compares_ways = any(
            each.axes.is_traced or each.is_learning for each in captures.values()
        )
        for unit in self._units:
            unit.leaf_source, unit.on_complete = leaves, self._complete
        try:
            yield
        finally:
            for unit, source in zip(self._units, before, strict=True):
                unit.leaf_source, unit.on_complete = source, None

    def _complete(self, unit: Unit) -> None:
        for group in self._of_unit.get(unit, ()):
            self._add_complete(group)

    def _leaves(self, unit: Unit, capture: Capture) -> list[list[Tensor]]:
        found = []
        for group in unit.groups:
            views = [base.detach() for base in group.bases]
            if group.requires_grad:
                views = [
                    tracked(self._names[id(piece)], view, capture)
                    for piece, view in zip(group.pieces, views, strict=True)
                ]
            found.append(views)
        return found
