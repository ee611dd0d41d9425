"""Passes that statistics are made of: the user's are kept, and run again under the capture.

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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from unison.capture import (
    AxisTable,
    Capture,
    RngAutocastState,
    batch_size_of,
    learn_axes,
    resized,
    rng_autocast_state,
)
from unison.capture.compiled_forward import CapturedPasses
from unison.errors import UnsupportedOperation
from unison.kernels.available import wide_dtype
from unison.kfac.config import KFACConfig
from unison.kfac.factors import PartSums, phase
from unison.kfac.labels import Gradient, Pass, PassPart
from unison.kfac.layers import Layer, Method, layers_of
from unison.ops import Record, plain_record
from unison.parallel import ParallelAdapter, find_shared, private_trainings
from unison.parallel.exchange import draws_of_pass, joined, requires_grad, rows_of, tensors_of
from unison.rng import BatchDraws
from unison.rng.draw_mode import drawing_again, of_granule, outside_draws
from unison.torch_internals import DynamoBackend, backend_of_caller, kept_attributes, machine_of

NUM_SURVEYED = 2  # rows of the small pass that layers are found from
LEAST_SUM = 1e-4  # of the largest sums of the same kind, which are squares
TOLERANCE = 0.05  # samples that were mistaken for others are off by more, bfloat16 by less

# --- the user's passes ----------------------------------------------------------------------------


class PassRecorder:
    """Keeps forward passes of a module while statistics are wanted, and runs them under a capture.

    Args:
        module: What the user calls.
        adapter: How its parameters lie on ranks; its own module, inside of DDP, runs again.
        config: What is collected.
        is_wanted: Whether passes are to be kept.

    Attributes:
        current: The last pass; None before the first and after `forget`.
        backend: What compiles the code around the module, as of the last pass; None if nothing.
        is_paused: Whether the module runs for statistics, and not to be trained.
        axes: Where samples lie in each operation; None until it is learnt.
    """

    def __init__(
        self,
        module: nn.Module,
        adapter: ParallelAdapter,
        config: KFACConfig,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._module, self._adapter, self._config = module, adapter, config
        self._is_wanted = is_wanted
        self.axes: AxisTable | None = None
        self.current: Pass | None = None
        self.backend: DynamoBackend | None = None
        self.is_paused = False
        self._num_rows = 0  # of all ranks in earlier batches of this step
        self._surroundings: RngAutocastState | None = None
        self._draws: tuple[BatchDraws, list[tuple[int, int]]] | None = None
        before, after = partial(_as_python, self._before), partial(_as_python, self._after)
        self._handles = [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

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
            refuse_private(dict(module.named_parameters()))
            self.backend = backend_of_caller()
            self._surroundings = rng_autocast_state(module)
            draws = draws_of_pass((args, kwargs))
            self._draws = draws and (draws, draws.state())

    def _after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        surroundings, self._surroundings = self._surroundings, None
        if surroundings is None:
            return None
        # The graph below the module is the user's, who sends one gradient through it.
        inputs = tree_map(lambda x: x.detach() if requires_grad(x) else x, (args, kwargs))
        ranks = self._adapter.ranks
        num_rows = batch_size_of(inputs)
        rows, edges, self._num_rows = rows_of(inputs, num_rows, ranks, self._num_rows)
        parts = [PassPart(granule, {}, first, is_real) for granule, first, is_real in rows]
        flat, spec = tree_flatten(output)
        for place, value in enumerate(flat):
            if requires_grad(value):
                # Another tensor than the one that units and FSDP2 wait for gradients of.
                seen = [each.view_as(each) for each in tensors_of(value)]
                for part, each in zip(parts, seen, strict=True):
                    part.outputs[place] = each
                flat[place] = joined(seen, value)
        self.current = Pass(inputs, num_rows, edges, surroundings, self._draws, parts)
        return tree_unflatten(flat, spec)

    # --- under the capture ------------------------------------------------------------------------

    def find_layers(self, example: Pass, num_rows: int) -> list[Layer]:
        """Find the layers from a small pass; every rank runs one. See factors.py.

        Args:
            example: A pass of the update.
            num_rows: Rows of the update, of all ranks.
        """
        uses: dict[str, list[Record]] = {}

        def note(name: str, record: Any) -> None:
            uses.setdefault(name, []).append(plain_record(record))

        inputs = _with_rows(example.inputs_of_parts[0], NUM_SURVEYED)
        with self._prepared(example, has_rows=False):
            capture = self._capture(NUM_SURVEYED, inputs, note)
            with capture.installed(), torch.enable_grad():
                flat = tree_flatten(_call(self._adapter.module, inputs))[0]
                outputs = [each for each in flat if requires_grad(each)]
                with self._in_full_precision():
                    torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        shapes = {each.name: each.shape for each in self._adapter.params}
        num_outputs, machine = example.parts[0].num_outputs, machine_of(self._adapter.device)
        return layers_of(uses, shapes, self._config, num_rows, num_outputs, machine)

    def run(
        self,
        passes: Sequence[Pass],
        layers: Sequence[Layer],
        num_parts: int,
        num_columns: int,
        compiled: "CompiledStatistics | None",
    ) -> Iterator[tuple[int | None, PartSums]]:
        """Make the sums of all parts of some passes.

        Args:
            passes: This rank's.
            layers: What to make sums of.
            num_parts: The most parts that any rank has: every rank runs as many, so that all call
                the same collectives.
            num_columns: The most backward passes that any part of any rank needs, likewise.
            compiled: Compiles the passes; None if they run as they are.

        Yields:
            Each part's granule, and its sums.
        """
        runs = [
            (part.granule, partial(self._run_part, each, index, layers, num_columns))
            for each in passes
            for index, part in enumerate(each.parts)
        ]
        for granule, run in runs:
            yield granule, run(None) if compiled is None else compiled.sums(run)
        # A rank with fewer parts keeps the others company.
        run = partial(self._run_part, passes[-1], 0, [], num_columns)
        for _ in range(num_parts - len(runs)):
            run(None) if compiled is None else compiled.sums(run)

    def _run_part(
        self,
        each: Pass,
        index: int,
        layers: Sequence[Layer],
        num_columns: int,
        compiled: "CompiledStatistics | None",
    ) -> PartSums:
        """Make the sums of one part of a pass, compiled if that may be."""
        part, inputs, rows = each.parts[index], each.inputs_of_parts[index], each.num_rows
        is_empty = rows == 0
        of_names = {layer.name: layer for layer in layers}
        sums = taken = PartSums(of_names, self._config, part.mask, part.token_mask, part.num_terms)
        if is_empty:  # a rank without rows runs one of zeros, and counts nothing of it
            rows, inputs = 1, _with_rows(inputs, 1)
            taken = PartSums({}, self._config, None, None, 0)
        with (
            self._prepared(each, has_rows=not is_empty),
            nullcontext() if part.granule is None else of_granule(index),  # of the draws there
        ):
            capture = self._capture(rows, inputs, taken.record)
            if layers:  # a bias comes with its weight
                wanted = {each.name for each in layers if each.method is not Method.IDENTITY}
                capture.ignored = set(capture.factored) - wanted
            with (
                capture.installed(),
                nullcontext() if compiled is None else compiled.running([capture]),
                torch.enable_grad(),
            ):
                flat = tree_flatten(_call(self._adapter.module, inputs))[0]
                with self._in_full_precision():
                    if part.logits is not None and part.draws is not None and not is_empty:
                        is_chosen = part.draws < part.head_share if part.head_share < 1 else None
                        taken.take_head(flat[part.logits].detach(), is_chosen)
                    for number in range(num_columns):
                        is_there = number < len(part.gradients) and not is_empty
                        column = part.gradients[number if is_there else 0]
                        outputs = [flat[place] for place in column]
                        values = [
                            _gradient_of(flat[place], value if is_there else None, part.scale)
                            for place, value in column.items()
                        ]
                        is_kept = number + 1 < num_columns
                        torch.autograd.backward(outputs, values, retain_graph=is_kept)
                        taken.end_column()
            capture.release()
        return sums

    def _in_full_precision(self) -> AbstractContextManager[object]:
        """No autocast, which would round the sums that are made of records."""
        return torch.autocast(machine_of(self._adapter.device), enabled=False)

    @contextmanager
    def _prepared(self, each: Pass, *, has_rows: bool) -> Iterator[None]:
        """All as it was in the user's pass; generators and the module are put back afterwards.

        Args:
            each: The pass.
            has_rows: Whether the rows are those of the pass, which have numbers of their own.
        """
        draws, state = each.draws if each.draws is not None and has_rows else (None, None)
        with (
            each.surroundings(),
            drawing_again(draws, state),
            _contents_kept(self._adapter.module),
        ):
            yield

    def _capture(self, rows: int, inputs: Any, on_record: Any) -> Capture:
        if self.axes is None:
            example = _with_rows(inputs, max(rows, NUM_SURVEYED))
            with outside_draws():
                self.axes = learn_axes(self._adapter.module, _call, example)
        capture = Capture(self._adapter.module, rows, axes=self.axes, on_record=on_record)
        capture.factored = {each.name for each in self._adapter.params}
        return capture


def _as_python(hook: Callable[..., Any], *args: Any) -> Any:
    """Run a hook as it is where the module around it is compiled, which goes on below it."""
    if torch.compiler.is_compiling():
        hook = torch.compiler.disable(hook, reason="KFAC keeps what goes into the module")
    return hook(*args)


def refuse_private(params: Mapping[str, Tensor]) -> None:
    """Refuse curvature for parameters that are trained privately.

    Raises:
        UnsupportedOperation: Naming one, whatever modules hold it.
    """
    if (name := find_shared(params, private_trainings)) is not None:
        raise UnsupportedOperation(
            f"{name} is trained privately, and curvature of the private batch without noise of its "
            "own would leak it: a preconditioned step is then no longer private. Train without "
            "KFAC, or detach() the privacy engine first"
        )


def _gradient_of(output: Tensor, gradient: Gradient | None, scale: float) -> Tensor:
    """What to send back from an output; zeros for None."""
    if gradient is None:
        return torch.zeros_like(output)
    with phase("labels"):
        value = gradient if isinstance(gradient, Tensor) else gradient(output)
        if scale != 1.0:  # in float32: float16 may have no room for a sum's gradient before
            value = value.to(wide_dtype(value.dtype)) * scale
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
def _contents_kept(module: nn.Module) -> Iterator[None]:
    """Undo what a pass writes to the module: running statistics have seen the batch already."""
    tensors, put_attributes_back = kept_attributes(module)
    tensors += module.buffers()
    written = [each for each in tensors if not each.is_inference()]
    kept = [(each, each.detach().clone(), each._version) for each in written]
    try:
        yield
    finally:
        put_attributes_back()
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
            if is_new and self._agree(len(self._kinds) > self.max_kinds):
                self._refuse(self._too_many_kinds)
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

    def forget_kinds(self) -> None:
        """Compare again what was compared: it was not finite."""
        self._kinds.clear()

    def sums(self, run: "Callable[[CompiledStatistics | None], PartSums]") -> PartSums:
        """Make the sums of a part; the first ones of each kind are compared with eager ones.

        Args:
            run: Makes them, of a pass that this object compiles, or, with None, runs as it is.
        """
        if self.refusal is not None or not self._is_new:
            return run(self if self.refusal is None else None)
        expected, backend = run(None), self._inner
        found: list[PartSums] = []

        def run_compiled() -> PartSums:
            sums = run(self)
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
    values, wanted = (
        {**each.sums, **{key: torch.cat(rows) for key, rows in each.columns.items()}}
        for each in (found, expected)
    )
    for name, side in sorted(values.keys() ^ wanted.keys()):
        return f"{side!r} of {name!r} comes out of one of a compiled and an eager pass alone"
    sizes = {key: each.abs().max() for key, each in wanted.items() if each.numel()}
    largest: dict[str, Tensor] = {}
    for (_, side), size in sizes.items():
        largest[side] = torch.maximum(size, largest.get(side, size))
    if not all(torch.isfinite(size) for size in largest.values()):
        return None  # nothing can be told; the step is left out, and the next one compares
    for (name, side), size in sizes.items():
        # Softmax does not see a bias of keys: its gradient is nothing but rounding.
        scale = torch.maximum(size, LEAST_SUM * largest[side]).clamp(min=1e-30)
        off = float((values[name, side] - wanted[name, side]).abs().max() / scale)
        if not off < TOLERANCE:
            return f"{side!r} of {name!r} differs by {off:.1%} from that of an eager pass"
    return None
