"""Running kept passes once more, under the capture, and making sums of their records."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from unison.capture import AxisTable, Capture, learn_axes, resized
from unison.errors import BadInput
from unison.kfac.config import KFACConfig
from unison.kfac.factors import diagonal_sums, kronecker_sums, token_weights
from unison.kfac.layers import Layer, Method, Survey, bias_names, plain_record
from unison.kfac.owners import Owner
from unison.kfac.owners.batches import parts_of
from unison.kfac.packing import FOLDED, Packing
from unison.kfac.passes import Gradient, Part, Pass
from unison.kfac.phases import phase
from unison.ops import Product, Record
from unison.rng.draw_mode import drawing_again, of_granule, outside_draws

NUM_SURVEYED = 2  # rows of the small pass that layers are found from


class PartSums:
    """Sums over one part of a pass, layer by layer; what the capture calls.

    Args:
        layers: All layers.
        config: For the form of weight sharing and the kind of Fisher matrix.
        part: The part; only its mask and number of labels are read.
        packing: How matrices are given away.
    """

    def __init__(
        self, layers: Sequence[Layer], config: KFACConfig, part: Part, packing: Packing = FOLDED
    ) -> None:
        self._layers, self._config, self._part = layers, config, part
        self._packing = packing
        self._by_parameter = {layer.name: layer for layer in layers}
        self._has_g = config.fisher != "forward"
        self._is_first = True  # of several columns: inputs are counted once
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._uses: dict[str, list[Record]] = {}

    def record(self, name: str, record: Record) -> None:
        """Take a use of a parameter."""
        layer = self._by_parameter.get(name)
        if layer is None or layer.method is Method.IDENTITY:
            return  # a bias comes with its weight
        record = plain_record(record)
        if layer.method is Method.DIAGONAL:
            self._uses.setdefault(name, []).append(record)
        elif isinstance(record, Product):
            self._add_kronecker(layer, record)

    def _add_kronecker(self, layer: Layer, record: Product) -> None:
        if (record.g.shape[-1], record.a.shape[-1]) != (layer.rows, layer.columns):
            raise BadInput(
                f"{layer.name} was used as a matrix of {layer.rows} x {layer.columns}, and is now "
                f"used as one of {record.g.shape[-1]} x {record.a.shape[-1]}"
            )
        weights = token_weights(self._part.mask, record.g.shape[1], layer.name)
        with phase("products"):
            found = kronecker_sums(
                record,
                weights,
                sharing=self._config.sharing,
                has_bias=layer.bias is not None,
                wants_a=self._is_first,
                wants_g=self._has_g,
            )
        if found.a is not None:
            self._add(layer.name, "a", found.a)
            self._add(layer.name, "tokens", found.num_tokens)
        if found.g is not None:
            self._add(layer.name, "g", found.g)

    def end_column(self) -> None:
        """End a backward pass: all uses of every parameter are there."""
        is_counted = None if self._part.mask is None else self._part.mask.any(dim=1)
        with phase("products"):
            for name, records in self._uses.items():
                self._add(name, "d", diagonal_sums(records, is_counted))
        self._uses.clear()
        self._is_first = False

    def _add(self, name: str, side: str, value: Tensor) -> None:
        before = self._sums.get((name, side))
        self._sums[name, side] = value if before is None else before.add_(value)

    def vectors(self, like: Tensor) -> list[Tensor | None]:
        """What ranks add up, one vector per layer: sums, then what to divide them by.

        The sums are gone afterwards: the capture, which knows this object, is freed late.
        """
        return [self._vector(layer, like) for layer in self._layers]

    def _vector(self, layer: Layer, like: Tensor) -> Tensor | None:
        take, name = self._sums.pop, layer.name
        if (name, "d") in self._sums:
            values = [take((name, "d")).reshape(-1)]
        elif (name, "a") in self._sums:
            sides = ("a", "g") if self._has_g else ("a",)
            values = [self._packing.pack(take((name, side))) for side in sides]
            values.append(take((name, "tokens")).reshape(1))
        else:
            return None
        values.append(like.new_full((1,), float(self._part.num_terms)))
        return torch.cat([value.to(like) for value in values])


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
    ) -> Iterator[tuple[int | None, list[Tensor | None]]]:
        """Make the sums of all parts of some passes.

        Args:
            passes: This rank's.
            layers: What to make sums of.
            num_parts: The most parts that any rank has: every rank runs as many, so that all call
                the same collectives.
            like: Of the dtype and on the device that sums are made in.
            packing: How matrices are given away.

        Yields:
            Each part's granule, and its sums by layer.
        """
        done = 0
        for each in passes:
            inputs = parts_of(each.inputs, len(each.parts))
            for index, (part, own) in enumerate(zip(each.parts, inputs, strict=True)):
                sums = PartSums(layers, self._config, part, packing)
                self._run_part(each, index, part, own, sums)
                done += 1
                yield part.granule, sums.vectors(like)
        for _ in range(num_parts - done):  # a rank with fewer parts keeps the others company
            each = passes[-1]
            part, inputs = each.parts[0], parts_of(each.inputs, len(each.parts))[0]
            self._run_part(each, 0, part, inputs, PartSums([], self._config, part))

    def _run_part(self, each: Pass, index: int, part: Part, inputs: Any, sums: PartSums) -> None:
        is_empty = each.num_rows == 0
        # A rank without rows runs one of zeros, and counts nothing of it.
        rows = 1 if is_empty else each.num_rows
        if is_empty:
            inputs = _with_rows(inputs, rows)
            sums = PartSums([], self._config, part)
        granule = nullcontext()
        if part.granule is not None:
            granule = of_granule(index)
        with self._prepared(each, has_rows=not is_empty), granule:
            capture = self._capture(rows, inputs, sums.record)
            with capture.installed(), torch.enable_grad():
                flat = tree_flatten(self._owner.module(*inputs[0], **inputs[1]))[0]
                with self._in_full_precision():
                    self._send_back(flat, part, sums, is_empty=is_empty)

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
        return Capture(module, rows, axes=self._axes, on_record=on_record)


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
