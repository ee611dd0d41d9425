"""Passes that statistics are made of: kept from the user's, and run once more under the capture.

[Note: a pass of its own] Statistics are not taken from the user's own graph. There, every operation
would have to be watched while DDP, FSDP2 or units expect gradients of it. Instead the inputs of the
pass and the gradients of the drawn labels with respect to the module's *outputs* are kept, and
`kfac.step()` runs the module once more, under the capture, when the user's pass is over: training
computes the same bits with statistics as without, and no two graphs are in memory at a time.

What compiles the user's passes compiles these too. They are tried out like private passes ([Note:
whole, or by blocks] in privacy/compiled.py): the first part of each kind runs both ways, and must
make the same sums. A module for which that does not work runs as it is, and a warning says why.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from unison.capture import AxisTable, Capture, RngAutocastState, batch_size_of, learn_axes, resized
from unison.capture.compiled_forward import CapturedPasses
from unison.capture.torch_compile import backend_of_caller
from unison.dynamo import DynamoBackend
from unison.errors import UnsupportedOperation
from unison.kfac.config import KFACConfig
from unison.kfac.factors import PartSums
from unison.kfac.layers import Layer, Survey, bias_names
from unison.kfac.phases import phase
from unison.parallel import ParallelAdapter
from unison.parallel.granules import (
    BatchRows,
    draws_of_pass,
    joined,
    parts_of,
    requires_grad,
    rows_of,
    tensors_of,
)
from unison.rng import BatchDraws
from unison.rng.draw_mode import drawing_again, of_granule, outside_draws

NUM_SURVEYED = 2  # rows of the small pass that layers are found from
MAX_KINDS = 16  # of parts that are compiled, each with kernels of its own
LEAST_SUM = 1e-4  # of the largest sums of the same kind, which are squares
TOLERANCE = 0.05  # samples that were mistaken for others are off by more, bfloat16 by less

Gradient = Tensor | Callable[[Tensor], Tensor]
"""The gradient of an output, or what makes it from the output."""


@dataclass(eq=False)
class PassPart:
    """One granule of a pass, or all of it.

    Attributes:
        granule: Its global number; None for a pass that comes whole.
        outputs: Which of the module's outputs gradients reach, by their place in it, as the user
            sees them; let go once their gradients are known.
        first_id: Global number of the first row.
        is_real: Which rows are samples [batch]; None if all are.
        gradients: Columns of gradients of the outputs, by place.
        mask: Which tokens count [batch, tokens], bool; None if all do.
        num_terms: How many labels there are.
    """

    granule: int | None
    outputs: dict[int, Tensor]
    first_id: int
    is_real: Tensor | None
    gradients: Sequence[Mapping[int, Gradient]] = ()
    mask: Tensor | None = None
    num_terms: int = 0


@dataclass(eq=False)
class Pass:
    """A forward pass of the user's.

    Attributes:
        inputs: What the module was called with: (args, kwargs).
        num_rows: Rows of the batch, or of each granule.
        rows: Which samples they are.
        surroundings: Generators and autocast as they were.
        draws: The random numbers of samples, and how many it had drawn before; None if it draws
            from generators.
        parts: Its granules.
    """

    inputs: tuple[tuple, dict[str, Any]]
    num_rows: int
    rows: BatchRows
    surroundings: RngAutocastState
    draws: tuple[BatchDraws, list[tuple[int, int]]] | None
    parts: list[PassPart]

    @cached_property
    def inputs_of_parts(self) -> list[Any]:
        """What each of its parts was called with."""
        return parts_of(self.inputs, len(self.parts))


class PassRecorder:
    """Keeps forward passes of a module while statistics are wanted; nothing else is touched.

    Args:
        module: What the user calls.
        adapter: How its parameters lie on ranks.
        is_wanted: Whether passes are to be kept.

    Attributes:
        current: The last pass; None before the first and after `forget`.
        backend: What compiles the code around the module, as of the last pass; None if nothing.
    """

    def __init__(
        self, module: nn.Module, adapter: ParallelAdapter, is_wanted: Callable[[], bool]
    ) -> None:
        self._module, self._adapter, self._is_wanted = module, adapter, is_wanted
        self.current: Pass | None = None
        self.backend: DynamoBackend | None = None
        self.is_paused = False
        self._num_rows = 0  # of all ranks in earlier batches of this step
        self._surroundings: RngAutocastState | None = None
        self._draws: tuple[BatchDraws, list[tuple[int, int]]] | None = None
        self._handles = [
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            module.register_forward_hook(self._after_forward, with_kwargs=True),
        ]

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        _as_python(self._before)(module, args, kwargs)

    def _after_forward(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
    ) -> Any:
        return _as_python(self._after)(args, kwargs, output)

    def detach(self) -> None:
        """Leave the module as it was."""
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PassRecorder":
        """Copies of the module share the hooks, which do nothing for them."""
        return self

    def forget(self) -> None:
        """Begin another step."""
        self.current, self._num_rows = None, 0

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        is_ours = module is self._module and not self.is_paused
        self._surroundings = None
        if is_ours and torch.is_grad_enabled() and self._is_wanted():
            refuse_private(self._module)
            self.backend = backend_of_caller()
            self._surroundings = RngAutocastState.here(module)
            draws = draws_of_pass((args, kwargs))
            self._draws = draws and (draws, draws.state())

    def _after(self, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        surroundings, self._surroundings = self._surroundings, None
        if surroundings is None:
            return None
        inputs, ranks = (args, kwargs), self._adapter.ranks
        num_rows = batch_size_of(inputs)
        rows, self._num_rows = rows_of(inputs, num_rows, ranks, self._num_rows)
        granules: Sequence[int | None] = rows.granules or (None,)
        parts = [
            PassPart(granule, {}, first, real)
            for granule, first, real in zip(granules, rows.first_ids, rows.is_real, strict=True)
        ]
        flat, spec = tree_flatten(output)
        for place, value in enumerate(flat):
            if requires_grad(value):
                # Another tensor than the one that units and FSDP2 wait for gradients of.
                seen = [each.view_as(each) for each in tensors_of(value)]
                for part, each in zip(parts, seen, strict=True):
                    part.outputs[place] = each
                flat[place] = joined(seen, value)
        self.current = Pass(inputs, num_rows, rows, surroundings, self._draws, parts)
        return tree_unflatten(flat, spec)


def _as_python(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Let a hook run as it is where the module around it is compiled, which goes on below it."""
    if not torch.compiler.is_compiling():
        return hook
    return torch.compiler.disable(hook, reason="KFAC keeps what goes into the module")


def refuse_private(module: nn.Module) -> None:
    """Refuse curvature of batches that are trained on privately.

    Raises:
        UnsupportedOperation: If a privacy engine is attached to the module.
    """
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    for hook in hooks:
        owner = getattr(hook, "__self__", None) or getattr(hook, "func", hook)
        if type(owner).__module__.startswith("unison.privacy") or (
            getattr(owner, "__module__", "") or ""
        ).startswith("unison.privacy"):
            raise UnsupportedOperation(
                "the module is trained privately, and curvature of the private batch without noise "
                "of its own would leak it: a preconditioned step is then no longer private. Take "
                "curvature of public data, or train without KFAC"
            )


# --- under the capture ----------------------------------------------------------------------------


class Collector:
    """Runs passes of a module under the capture.

    Args:
        adapter: How its parameters lie on ranks.
        config: What is collected.
    """

    def __init__(self, adapter: ParallelAdapter, config: KFACConfig) -> None:
        self._adapter, self._config = adapter, config
        self._module = adapter.module
        self._axes: AxisTable | None = None

    def find_layers(self, example: Pass) -> list[Layer]:
        """Find the layers from a small pass; every rank runs one. See layers.py."""
        shapes = {each.name: each.shape for each in self._adapter.params}
        survey = Survey(bias_names(shapes))
        inputs = _with_rows(example.inputs_of_parts[0], NUM_SURVEYED)
        with self._prepared(example, has_rows=False):
            capture = self._capture(NUM_SURVEYED, inputs, survey.record)
            with capture.installed(), torch.enable_grad():
                flat = tree_flatten(_call(self._module, inputs))[0]
                outputs = [each for each in flat if requires_grad(each)]
                with self._in_full_precision():
                    torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        return survey.layers(shapes, self._config)

    def run(
        self,
        passes: Sequence[Pass],
        layers: Sequence[Layer],
        num_parts: int,
        like: Tensor,
        compiled: "CompiledStatistics | None",
    ) -> Iterator[tuple[int | None, list[Tensor | None]]]:
        """Make the sums of all parts of some passes.

        Args:
            passes: This rank's.
            layers: What to make sums of.
            num_parts: The most parts that any rank has: every rank runs as many, so that all call
                the same collectives.
            like: Of the dtype and on the device that sums are made in.
            compiled: Compiles the passes; None if they run as they are.

        Yields:
            Each part's granule, and its sums by layer.
        """
        for each in passes:
            for index, part in enumerate(each.parts):
                num_parts -= 1
                yield part.granule, self._sums(each, index, layers, compiled).vectors(like)
        for _ in range(num_parts):  # a rank with fewer parts keeps the others company
            self._sums(passes[-1], 0, [], compiled)

    def _sums(
        self,
        each: Pass,
        index: int,
        layers: Sequence[Layer],
        compiled: "CompiledStatistics | None",
    ) -> PartSums:
        """Make the sums of one part of a pass."""
        part = each.parts[index]

        def run(is_compiled: bool) -> PartSums:
            sums = PartSums(layers, self._config, part.mask, part.num_terms)
            self._run_part(each, index, sums, compiled if is_compiled else None)
            return sums

        return run(False) if compiled is None else compiled.sums(run)

    def _run_part(
        self, each: Pass, index: int, sums: PartSums, compiled: "CompiledStatistics | None"
    ) -> None:
        part, inputs, rows = each.parts[index], each.inputs_of_parts[index], each.num_rows
        is_empty = rows == 0
        if is_empty:  # a rank without rows runs one of zeros, and counts nothing of it
            rows, inputs = 1, _with_rows(inputs, 1)
            sums = PartSums([], self._config, part.mask, part.num_terms)
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
                flat = tree_flatten(_call(self._module, inputs))[0]
                with self._in_full_precision():
                    for number, column in enumerate(part.gradients, start=1):
                        outputs = [flat[place] for place in column]
                        values = [
                            _gradient_of(flat[place], None if is_empty else value)
                            for place, value in column.items()
                        ]
                        is_kept = number < len(part.gradients)
                        torch.autograd.backward(outputs, values, retain_graph=is_kept)
                        sums.end_column()
            capture.release()

    def _in_full_precision(self) -> AbstractContextManager[object]:
        """No autocast, which would round the sums that are made of records."""
        return torch.autocast(self._adapter.device.type, enabled=False)

    @contextmanager
    def _prepared(self, each: Pass, *, has_rows: bool) -> Iterator[None]:
        """All as it was in the user's pass; buffers and generators are put back afterwards.

        Args:
            each: The pass.
            has_rows: Whether the rows are those of the pass, which have numbers of their own.
        """
        draws, state = each.draws if each.draws is not None and has_rows else (None, None)
        with each.surroundings.restored(), drawing_again(draws, state), _buffers_kept(self._module):
            yield

    def _capture(self, rows: int, inputs: Any, on_record: Any) -> Capture:
        if self._axes is None:
            example = _with_rows(inputs, max(rows, NUM_SURVEYED))
            with outside_draws():
                self._axes = learn_axes(self._module, _call, example)
        capture = Capture(self._module, rows, axes=self._axes, on_record=on_record)
        capture.factored = {each.name for each in self._adapter.params}
        return capture


def _gradient_of(output: Tensor, gradient: Gradient | None) -> Tensor:
    """What to send back from an output; zeros for None."""
    if gradient is None:
        return torch.zeros_like(output)
    with phase("labels"):
        value = gradient if isinstance(gradient, Tensor) else gradient(output)
        return value.to(output.dtype)


def _call(module: nn.Module, inputs: Any) -> Any:
    return module(*inputs[0], **inputs[1])


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


# --- compiled -------------------------------------------------------------------------------------


class CompiledStatistics(CapturedPasses):
    """Compiles a module's passes for statistics.

    Args:
        module: What runs under the capture.
        inner: The backend that compiles the user's passes.
        is_granular: Whether passes are cut into granules.
        agree: Whether something is so on any rank; a collective.
        keeps_graph: Whether several backward passes go through one graph.

    Attributes:
        settings: The backend, and whether passes are cut.
    """

    what = "passes for statistics"

    def __init__(
        self,
        module: nn.Module,
        inner: DynamoBackend,
        *,
        is_granular: bool,
        agree: Callable[[bool], bool],
        keeps_graph: bool,
    ) -> None:
        super().__init__(module, inner, is_granular=is_granular, agree=agree)
        self.settings = inner, is_granular
        self._keeps_graph = keeps_graph
        self._kinds: set[Hashable] = set()
        self._is_new = True  # a kind of some part of the update under way, on any rank

    @property
    def is_aside(self) -> bool:
        """Whether the module does not run for statistics; see `CapturedPasses`."""
        return self.is_trying or not self._captures

    @contextmanager
    def attached(self, passes: Sequence[Pass]) -> Iterator[None]:
        """Around an update; a collective.

        Args:
            passes: Those that this rank runs.
        """
        if self.refusal is None:
            kinds = [_kind(each, inputs) for each in passes for inputs in each.inputs_of_parts]
            self._is_new = self._agree(not self._kinds.issuperset(kinds))
            self._kinds.update(kinds)
        self.attach()
        try:
            is_new = self.refusal is None and self._is_new
            if is_new and self._agree(len(self._kinds) > MAX_KINDS):
                self._refuse(
                    f"batches come in more than {MAX_KINDS} shapes, and each would be compiled; "
                    "pad them to a few lengths"
                )
            yield
        finally:
            self.detach()

    @contextmanager
    def running(self, captures: Sequence[Capture]) -> Iterator[None]:
        """Around a pass that is compiled; see `CapturedPasses`."""
        config: Any = torch._functorch.config  # type: ignore[attr-defined]
        # A backward pass that may give the graph's buffers away may come only once.
        is_kept = config.patch(donated_buffer=False) if self._keeps_graph else nullcontext()
        with is_kept, super().running(captures):
            yield

    def sums(self, run: Callable[[bool], PartSums]) -> PartSums:
        """Make the sums of a part; the first ones of each kind are compared with eager ones.

        Args:
            run: Makes them, of a pass that is compiled (True) or runs as it is.
        """
        if self.refusal is not None or not self._is_new:
            return run(self.refusal is None)
        expected, backend = run(False), self._inner
        found: list[PartSums] = []

        def run_compiled() -> PartSums:
            sums = run(True)
            if self._inner is backend:  # the user's
                found.append(sums)
            return sums

        self._try_out(lambda: self._compare(run_compiled, lambda sums: _difference(sums, expected)))
        return expected if self.refusal is not None else found[-1]


def _kind(each: Pass, inputs: Any) -> Hashable:
    """What makes compiled code of parts another one: how many rows they have, and how long."""
    flat = tree_flatten(inputs)[0]
    return each.num_rows, *(tuple(value.shape) for value in flat if isinstance(value, Tensor))


def _difference(found: PartSums, expected: PartSums) -> str | None:
    """Why sums are not those that were expected; None if they are."""
    for name, side in sorted(found.sums.keys() ^ expected.sums.keys()):
        return f"{side!r} of {name!r} comes out of one of a compiled and an eager pass alone"
    sizes = {key: wanted.abs().max() for key, wanted in expected.sums.items()}
    largest: dict[str, Tensor] = {}
    for (_, side), size in sizes.items():
        largest[side] = torch.maximum(size, largest.get(side, size))
    for (name, side), size in sizes.items():
        # Softmax does not see a bias of keys: its gradient is nothing but rounding.
        scale = torch.maximum(size, LEAST_SUM * largest[side]).clamp(min=1e-30)
        off = float((found.sums[name, side] - expected.sums[name, side]).abs().max() / scale)
        if not off < TOLERANCE:
            return f"{side!r} of {name!r} differs by {off:.1%} from that of an eager pass"
    return None
