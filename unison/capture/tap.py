"""Uses of parameters by an operation, and the tap on its output that makes records of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from unison.capture.parts import local, record_of
from unison.capture.recompute import NOBODY, NoRecorder, Place
from unison.capture.tracked import Tracked
from unison.errors import BadInput, UnsupportedOperation
from unison.ops import Builder, Layout, Product, Record, Streamed

if TYPE_CHECKING:
    from unison.capture.capture import Capture

_as_no_view = torch.ops.aten._unsafe_view.default


OnRecord = Callable[[str, Record], None]
OnProduct = Callable[[str, Product], bool]


@dataclass(eq=False, slots=True)
class OperationUse:
    """The uses of parameters by one operation, whose records are made when its gradient comes."""

    capture: "Capture"
    layout: Layout | None  # None if it was made in a backward pass, and is not known there
    uses: Sequence[tuple[Tracked, Builder]]
    number: int | None = None  # in the forward pass, if it can be met again
    is_late: bool = False  # made in a backward pass

    def records(
        self, g: Tensor, saved: tuple[Tensor, ...], places: Sequence[Place] | None = None
    ) -> Iterator[tuple[Place, str, Record]]:
        """Make the records, or some of them: where each belongs, its parameter, the record."""
        layout = self.layout
        if layout is None:
            name = self.uses[0][0].of_parameters[0]
            raise UnsupportedOperation(
                f"{name}: rows of this model lie where values have put them, and reentrant "
                "activation checkpointing runs it where samples are not followed; use "
                "use_reentrant=False"
            )
        layout.check_nobodys(g)
        is_whole = type(g) is Tensor and all(type(each) is Tensor for each in saved)
        for i, (tracked, builder) in enumerate(self.uses):
            if places is not None and all(i != place[0] for place in places):
                continue
            if layout.index is not None:
                record = _indexed(layout, tracked, builder, g, saved)
            elif is_whole:
                record = builder(layout, g, *saved, shape=tuple(tracked.value.shape))
            else:
                record = record_of(builder, layout, tracked.value, g, saved)
            for j, source in enumerate(tracked.sources):
                if places is None or (i, j) in places:
                    yield (i, j), source.name, source.of(record)

    def record(self, g: Tensor, saved: tuple[Tensor, ...]) -> None:
        """Hand the records over, now that the gradient of the output has come."""
        capture, number, places = self.capture, self.number, []
        for place, name, record in self.records(g, saved):
            if self.is_late:
                capture.recorded_late.add(name)
            if isinstance(record, Streamed) and not capture.streams:
                record = record.as_product()
            if number is None or capture.on_product is None or not isinstance(record, Product):
                capture.on_record(name, record)
            elif capture.on_product(name, record):
                places.append(place)
        if places:
            assert number is not None
            capture.repeats.keep(number, g, tuple(map(local, saved)), places)


def _indexed(
    layout: Layout, tracked: Tracked, builder: Builder, g: Tensor, saved: tuple[Tensor, ...]
) -> Record:
    """Make a record of rows that lie where values have put them."""
    try:
        return builder(layout, g, *saved, shape=tuple(tracked.value.shape))
    except BadInput as error:
        raise UnsupportedOperation(
            f"{tracked.of_parameters[0]}: its rows lie where values have put them, and {error}"
        ) from None


class _InPlace(torch.autograd.Function):
    """Marks a fresh tensor as its own output.

    The mark costs no copy, and the tensor may be changed in place later (a view could not). It
    needs a tensor whose own backward does not read it. What is saved goes through autograd, so that
    activation checkpointing drops it and makes it again.
    """

    @staticmethod
    def forward(
        ctx: Any, use: OperationUse, output: Tensor, anchor: Tensor, *saved: Tensor
    ) -> Tensor:
        ctx.use, ctx.num_saved = use, len(saved)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)  # no gradient is no use, in every pass
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple:  # type: ignore[override]
        _record(ctx, g)
        return None, g, None, *(None for _ in range(ctx.num_saved))


class _Copied(torch.autograd.Function):
    """The same, for tensors that share memory with others."""

    @staticmethod
    def forward(
        ctx: Any, use: OperationUse, output: Tensor, anchor: Tensor, *saved: Tensor
    ) -> Tensor:
        ctx.use, ctx.num_saved = use, len(saved)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)  # no gradient is no use, in every pass
        return output.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple:  # type: ignore[override]
        _record(ctx, g)
        return None, g, None, *(None for _ in range(ctx.num_saved))


def _record(ctx: Any, g: Tensor | None) -> None:
    if g is None:
        return
    try:
        saved = ctx.saved_tensors  # asked for once: checkpointing makes them again for it
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            refuse_changed()
        raise
    ctx.use.record(g, tuple(value.detach() for value in saved))


def tap(
    use: OperationUse | NoRecorder,
    output: Tensor,
    anchor: Tensor,
    saved: tuple[Tensor, ...],
    *,
    is_fresh: bool,
) -> Tensor:
    """Let `use` see the gradient of `output`.

    Args:
        use: Who records.
        output: What an operation returned.
        anchor: A scalar that requires a gradient, so that one comes even if no input does.
        saved: What the record is made of.
        is_fresh: Whether the operation made the output new and does not need it in its backward.
    """
    if not is_fresh:
        return _Copied.apply(use, output, anchor, *saved)  # type: ignore[return-value]
    return _InPlace.apply(use, _own(output), anchor, *saved)  # type: ignore[return-value]


def refuse_second() -> NoReturn:
    """Raise for a gradient that comes again."""
    raise BadInput(
        "a second backward pass over one forward pass: its inputs are gone. Call backward once per "
        "batch"
    )


def refuse_changed() -> NoReturn:
    """Raise for an input that is not what went in."""
    raise UnsupportedOperation(
        "an input of a layer was changed in place after the layer had used it, and its gradient is "
        "made of it; use an operation with a result of its own"
    )


def tapped_again(output: Tensor, anchor: Tensor, *, is_fresh: bool) -> Tensor:
    """What `tap` returns, in the same place in memory, with no graph behind it.

    It requires a gradient as it did the first time: kernels are chosen by that.
    """
    return tap(NOBODY, output.detach(), anchor, (), is_fresh=is_fresh)


def _own(output: Tensor) -> Tensor:
    """Let a view of something that nobody else sees be none.

    A linear map makes one, where it reshapes what it made.
    """
    return output if output._base is None else _as_no_view(output, output.shape)
