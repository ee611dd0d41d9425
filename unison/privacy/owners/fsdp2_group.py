"""One of FSDP2's groups of parameters: what its modules see, and its part of the sums.

[Note: lines] FSDP2 cuts every parameter into runs of rows (of dimension 0), one per rank, of equal
length but for the last ones, which may be short or empty. Rows of a contiguous tensor are a run of
its elements. The sums of a group are laid out as FSDP2 lays gradients out: one line per rank, with
its rows of each parameter, padded to the length of the first rank's. To the reducers, all lines
together are one flat parameter, cut into as many parts as there are ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unison.capture import Capture
from unison.capture.tracked import Source, Tracked
from unison.errors import UnsupportedOperation
from unison.privacy.owners.base import Owned
from unison.privacy.owners.sums import GroupSums
from unison.privacy.owners.units import capture_of
from unison.shard.flat_group import PLAIN, RECOMPUTE, ParameterUse
from unison.shard.fsdp2 import set_attribute
from unison.shard.granules import PerGranule
from unison.shard.layout import FlatLayout, ShardPiece, Slot
from unison.shard.ranks import Axes, Ranks
from unison.shard.sharded_tensor import element_ranges
from unison.shard.unit import Attributes, Hidden


@dataclass(frozen=True, eq=False)
class Rows(Owned):
    """This rank's rows of a parameter.

    Attributes:
        fsdp: FSDP2's record of the parameter, an `FSDPParam`.
        column: Where they begin in the rank's line.
        width: Elements that every line has for the parameter.
    """

    fsdp: Any
    column: int
    width: int

    @property
    def uses(self) -> list[ParameterUse]:
        """Where modules hold the parameter."""
        info = self.fsdp._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        return [
            ParameterUse(info.module, info.param_name),
            *(ParameterUse(*place) for place in shared),
        ]

    def as_gradient(self, values: Tensor) -> Tensor:
        """A distributed tensor that is cut as the parameter is."""
        local = values.view(self.fsdp.sharded_size).to(self.parameter.device)
        return self.fsdp.to_sharded_dtensor(local)


class _Lines(FlatLayout):
    """Lines of equal length, one per rank; FSDP2 does not align them."""

    def shard_length(self, world_size: int) -> int:
        return self.length // world_size


class FSDP2Group:
    """One of FSDP2's groups of parameters; what the reducers call a group, see sums.py.

    Args:
        fsdp: The `FSDPParamGroup`.
        rows: Its trainable parameters, at least one.
        axes: The ranks.
        has_children: Whether there are FSDP2 modules inside of the group's module.
    """

    can_repeat = False

    def __init__(self, fsdp: Any, rows: Sequence[Rows], axes: Axes, *, has_children: bool) -> None:
        self.fsdp, self.rows, self.axes = fsdp, rows, axes
        self.names = [each.name for each in rows]
        self.device: torch.device = fsdp.device
        self.reduce_dtype = torch.int64
        length = axes.shard.size * (rows[-1].column + rows[-1].width)
        self.layout: FlatLayout = _Lines((Slot("lines", (length,), 0),), length)
        self.sums = GroupSums(self)
        self._has_children = has_children
        self._attributes = Attributes([[each.uses for each in rows]])
        self._captures: Mapping[int, Capture] = {}  # of the pass under way
        self._tracked: dict[int, list[Tracked]] = {}  # by granule
        self._hidden: Hidden | None = None  # while tracked tensors are in place

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the group's parameters."""
        return self.axes.shard

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All lines together."""
        return self.layout.slots

    def piece_places(self) -> list[ShardPiece]:
        """This rank's line."""
        return self.layout.pieces(self.ranks.rank, self.ranks.size)

    def lines(
        self, sums: Sequence[Tensor | None], dtype: torch.dtype
    ) -> Tensor:  # [ranks * length of a line]
        """Lay the sums of the parameters out; zeros where one was not used."""
        lines = torch.zeros(self.layout.length, dtype=dtype, device=self.device)
        size = self.ranks.size
        by_rank = lines.view(size, self.layout.shard_length(size))
        for each, total in zip(self.rows, sums, strict=True):
            if total is None or total.numel() == 0:
                continue
            flat = total.reshape(-1)
            num_full, rest = divmod(len(flat), each.width)  # ranks that have all their rows
            columns = by_rank[:, each.column : each.column + each.width]
            columns[:num_full] = flat[: num_full * each.width].view(num_full, each.width)
            if rest:
                columns[num_full, :rest] = flat[num_full * each.width :]
        return lines

    def totals(self) -> Iterator[tuple[Owned, Tensor]]:
        """This rank's rows of the sums over ranks, parameter by parameter."""
        (line,) = self.sums.take_totals()
        for each in self.rows:
            yield each, line[each.column :][: each.stop - each.start]

    # --- tracked parameters ----------------------------------------------------------------------

    def attach(self, undo: ExitStack) -> None:
        """Follow what FSDP2 lets its modules see, until `undo` is closed."""
        fsdp, show_full = self.fsdp, self.fsdp._to_unsharded

        def show_full_and_place() -> None:
            show_full()
            self.place()

        set_attribute(undo, fsdp, "_to_unsharded", show_full_and_place)
        for name in ("_to_sharded", "_to_sharded_post_forward"):
            set_attribute(undo, fsdp, name, _both(self.take_away, getattr(fsdp, name)))
        set_attribute(undo, fsdp, "post_backward", _both(self.refuse_gradients, fsdp.post_backward))
        if hasattr(fsdp, "reduce_scatter_unused_params"):  # torch 2.13: it would sum zeros
            set_attribute(undo, fsdp, "reduce_scatter_unused_params", False)

    def begin(self, captures: Mapping[int, Capture]) -> Mapping[int, Capture]:
        """ParameterUse other captures; returns those before."""
        self.take_away()
        before, self._captures, self._tracked = self._captures, captures, {}
        self.place()
        return before

    def place(self) -> None:
        """Let modules see tracked parameters, if there are full ones and a capture."""
        if self._captures and self._hidden is None and self.fsdp.is_unsharded:
            self._hidden = self._attributes.shadow([self._seen()])

    def take_away(self) -> None:
        """Let modules see what FSDP2 shows them."""
        if self._hidden is not None:
            self._attributes.restore(self._hidden)
            self._hidden = None

    def _seen(self) -> Sequence[Tensor]:
        if PLAIN in self._captures:
            return self._of(PLAIN)
        if self._has_children:
            granules = [self._of(granule) for granule in self._captures]
            return [PerGranule.of(each) for each in zip(*granules, strict=True)]
        # Modules without others inside run granule by granule and see `of_granule`; this is for
        # what checkpointing computes again inside of them.
        return self._of(RECOMPUTE)

    def of_granule(self, index: int) -> AbstractContextManager[None]:
        """Let modules see what one granule of the batch computes with."""
        if not self._captures or PLAIN in self._captures:
            return nullcontext()
        return self._attributes.shadowed([self._of(list(self._captures)[index])])

    def _of(self, granule: int) -> list[Tracked]:
        if granule not in self._tracked:
            capture = capture_of(self._captures, granule)
            # FSDP2 gives the memory of full parameters back and fills it again; the tensors stay.
            self._tracked[granule] = [
                Tracked.of(each.fsdp.unsharded_param, (Source(each.name, each.shape),), capture)
                for each in self.rows
            ]
        return self._tracked[granule]

    def refuse_gradients(self) -> None:
        """Refuse gradients that autograd brought.

        Raises:
            UnsupportedOperation: Naming the parameter.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for index, each in enumerate(self.rows):
                full = getattr(each.fsdp, "_unsharded_param", None)  # None before the first pass
                seen = [full, *(tracked[index] for tracked in self._tracked.values())]
                reached = [tensor for tensor in seen if tensor is not None]
                if any(tensor.grad is not None for tensor in reached):
                    for tensor in reached:
                        tensor.grad = None
                    raise UnsupportedOperation(
                        f"a gradient reached {each.name!r} itself, where it would be neither "
                        "clipped nor noised. It came from a pass in evaluation mode, from a custom "
                        "autograd.Function, or from code that kept the parameter elsewhere than in "
                        "its module. Train in training mode, and use torch functions on the "
                        "module's attribute"
                    )


def rows_of(fsdp: Any, names: Mapping[int, str], ranks: Ranks) -> Iterator[Rows]:
    """The trainable parameters of one of FSDP2's groups."""
    column = 0
    for each in fsdp.fsdp_params:
        info = each._module_info
        parameter = info.module._parameters[info.param_name]
        if parameter.requires_grad:
            ranges = element_ranges(parameter, ranks.size)
            width = ranges[0][1]
            shape = tuple(parameter.shape)
            yield Rows(
                names[id(parameter)], parameter, shape, *ranges[ranks.rank], each, column, width
            )
            column += width


def _both(first: Callable[[], None], then: Callable[..., None]) -> Callable[..., None]:
    def both(*args: Any) -> None:
        first()
        then(*args)

    return both
