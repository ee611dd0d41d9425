"""One use of parameters by an operation, and the records that become of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from unison.capture.again import Place, Repeats
from unison.capture.parts import local, record_of
from unison.capture.tracked import Tracked
from unison.errors import BadInput, UnsupportedOperation
from unison.ops import Builder, Layout, Product, Record, Streamed

OnRecord = Callable[[str, Record], None]
OnProduct = Callable[[str, Product], bool]


class Taker(Protocol):
    """Who takes the records: a capture."""

    on_record: OnRecord
    on_product: OnProduct | None
    recorded_late: set[str]
    repeats: Repeats
    streams: bool


@dataclass(eq=False, slots=True)
class Use:
    """The uses of parameters by one operation, waiting for its output's gradient."""

    capture: Taker
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
