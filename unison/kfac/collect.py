"""Running kept passes once more, under the capture, and making sums of their records."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from unison.capture import AxisTable, Capture, learn_axes, resized
from unison.kfac.compiled import CompiledStatistics
from unison.kfac.config import KFACConfig
from unison.kfac.layers import Layer, Survey, bias_names
from unison.kfac.owners import Owner
from unison.kfac.owners.batches import parts_of
from unison.kfac.packing import Packing
from unison.kfac.part_sums import PartSums
from unison.kfac.passes import Gradient, Part, Pass
from unison.kfac.phases import phase
from unison.rng.draw_mode import drawing_again, of_granule, outside_draws

NUM_SURVEYED = 2  # rows of the small pass that layers are found from


class Collector:
    """Runs passes of a module under the capture.

    Args:
        owner: Holds the parameters.
        config: What is collected.
    """

    def __init__(self, owner: Owner, config: KFACConfig) -> None:
        self._owner, self._config = owner, config
        self._axes: AxisTable | None = None

    def find_layers(self, example: Pass) -> list[Layer]:
        """Find the layers from a small pass; every rank runs one. See layers.py."""
        names = [held.name for held in self._owner.held]
        survey = Survey(bias_names(names))
        inputs = parts_of(example.inputs, len(example.parts))[0]
        inputs = _with_rows(inputs, NUM_SURVEYED)
        with self._prepared(example, has_rows=False):
            capture = self._capture(NUM_SURVEYED, inputs, survey.record)
            with capture.installed(), torch.enable_grad():
                flat = tree_flatten(self._owner.module(*inputs[0], **inputs[1]))[0]
                outputs = [each for each in flat if _takes_gradient(each)]
                with self._in_full_precision():
                    torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        return survey.layers({each.name: each.shape for each in self._owner.held}, self._config)

    def run(
        self,
        passes: Sequence[Pass],
        layers: Sequence[Layer],
        num_parts: int,
        like: Tensor,
        packing: Packing,
        compiled: CompiledStatistics | None,
    ) -> Iterator[tuple[int | None, list[Tensor | None]]]:
        """Make the sums of all parts of some passes.

        Args:
            passes: This rank's.
            layers: What to make sums of.
            num_parts: The most parts that any rank has: every rank runs as many, so that all call
                the same collectives.
            like: Of the dtype and on the device that sums are made in.
            packing: How matrices are given away.
            compiled: Compiles the passes; None if they run as they are.

        Yields:
            Each part's granule, and its sums by layer.
        """
        done = 0
        for each in passes:
            for index, part in enumerate(each.parts):
                sums = self._sums(each, index, layers, packing, compiled)
                done += 1
                yield part.granule, sums.vectors(like)
        for _ in range(num_parts - done):  # a rank with fewer parts keeps the others company
            self._sums(passes[-1], 0, [], packing, compiled)

    def _sums(
        self,
        each: Pass,
        index: int,
        layers: Sequence[Layer],
        packing: Packing,
        compiled: CompiledStatistics | None,
    ) -> PartSums:
        """Make the sums of one part of a pass."""
        part = each.parts[index]
        inputs = parts_of(each.inputs, len(each.parts))[index]

        def run(is_compiled: bool) -> PartSums:
            sums = PartSums(layers, self._config, part, packing)
            self._run_part(each, index, inputs, sums, compiled if is_compiled else None)
            return sums

        return run(False) if compiled is None else compiled.sums(run)

    def _run_part(
        self,
        each: Pass,
        index: int,
        inputs: Any,
        sums: PartSums,
        compiled: CompiledStatistics | None,
    ) -> None:
        part, is_empty = each.parts[index], each.num_rows == 0
        # A rank without rows runs one of zeros, and counts nothing of it.
        rows = 1 if is_empty else each.num_rows
        if is_empty:
            inputs = _with_rows(inputs, rows)
            sums = PartSums([], self._config, part)
        with (
            self._prepared(each, has_rows=not is_empty),
            nullcontext() if part.granule is None else of_granule(index),  # of the draws there
        ):
            capture = self._capture(rows, inputs, sums.record)
            with (
                capture.installed(),
                nullcontext() if compiled is None else compiled.running([capture]),
                torch.enable_grad(),
            ):
                flat = tree_flatten(self._owner.module(*inputs[0], **inputs[1]))[0]
                with self._in_full_precision():
                    self._send_back(flat, part, sums, is_empty=is_empty)
            capture.release()

    def _send_back(
        self, flat: Sequence[Any], part: Part, sums: PartSums, *, is_empty: bool
    ) -> None:
        """Send a part's gradients back from the outputs, column after column."""
        for number, gradients in enumerate(part.gradients, start=1):
            outputs = [flat[place] for place in gradients]
            values = [
                _gradient_of(flat[place], None if is_empty else value)
                for place, value in gradients.items()
            ]
            is_last = number == len(part.gradients)
            torch.autograd.backward(outputs, values, retain_graph=not is_last)
            sums.end_column()

    def _in_full_precision(self) -> AbstractContextManager[object]:
        """No autocast, which would round the sums that are made of records."""
        return torch.autocast(self._owner.device.type, enabled=False)

    @contextmanager
    def _prepared(self, each: Pass, *, has_rows: bool) -> Iterator[None]:
        """All as it was in the user's pass; buffers and generators are put back afterwards.

        Args:
            each: The pass.
            has_rows: Whether the rows are those of the pass, which have numbers of their own.
        """
        draws, state = each.draws if each.draws is not None and has_rows else (None, None)
        with (
            each.surroundings.restored(),
            drawing_again(draws, state),
            _buffers_kept(self._owner.module),
        ):
            yield

    def _capture(self, rows: int, inputs: Any, on_record: Any) -> Capture:
        module = self._owner.module
        if self._axes is None:
            example = _with_rows(inputs, max(rows, NUM_SURVEYED))
            with outside_draws():
                self._axes = learn_axes(module, _call, example)
        capture = Capture(module, rows, axes=self._axes, on_record=on_record)
        capture.factored = {held.name for held in self._owner.held}
        return capture


def kinds_of(passes: Sequence[Pass]) -> list[Hashable]:
    """What makes compiled code of parts another one: how many rows they have, and how long."""
    found: list[Hashable] = []
    for each in passes:
        for inputs in parts_of(each.inputs, len(each.parts)):
            flat = tree_flatten(inputs)[0]
            shapes = (tuple(value.shape) for value in flat if isinstance(value, Tensor))
            found.append((each.num_rows, *shapes))
    return found


def _gradient_of(output: Tensor, gradient: Gradient | None) -> Tensor:
    """What to send back from an output; zeros for None."""
    if gradient is None:
        return torch.zeros_like(output)
    with phase("labels"):
        value = gradient if isinstance(gradient, Tensor) else gradient(output)
        return value.to(output.dtype)


def _call(module: nn.Module, inputs: Any) -> Any:
    return module(*inputs[0], **inputs[1])


def _takes_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _with_rows(inputs: Any, num_rows: int) -> Any:
    """Inputs of another number of rows, the same ones again and again; zeros if there are none."""

    def filled(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[0]:
            return value
        return value.new_zeros(num_rows, *value.shape[1:])

    return resized(tree_map(filled, inputs), num_rows)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Undo what a pass writes to buffers: running statistics have seen the batch already."""
    kept = [(each, each.detach().clone(), each._version) for each in module.buffers()]
    try:
        yield
    finally:
        for each, value, version in kept:
            if each._version != version:
                with torch.no_grad():
                    each.copy_(value)
