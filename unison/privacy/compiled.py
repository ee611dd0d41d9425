"""Private passes under torch.compile: the module's forward, compiled with slots for its records.

What is compiled is tried out first, on the first batch of each kind, before anything is spent: its
per-sample norms must be those of the eager capture, parameter by parameter. A module for which that
does not work runs as it is, and a warning says why.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from unison.capture import AxisTable, Capture, state_kept
from unison.capture.compiled import CompiledCapture, DynamoBackend
from unison.clip import Clipping, Learned, Plan
from unison.errors import UnsupportedOperation
from unison.privacy.inputs import Inputs, OutputDims, probe_losses
from unison.rng.draw_mode import outside_draws

MAX_KINDS = 16  # of batches, each with kernels of its own


class CompiledPass:
    """Stands for a `Capture` in a pass that is compiled."""

    def __init__(self, capture: CompiledCapture, axes: AxisTable) -> None:
        self.axes, self.is_outside = axes, False
        self.anchors: dict[torch.device, Tensor] = {}
        self._capture = capture

    def take_records(self, clipping: Clipping) -> None:
        """Hand over what the backward pass has left."""
        for name, record in self._capture.take():
            clipping.take(name, record)

    def release(self) -> None:
        """Forget the pass."""
        self._capture.drop()


class CompiledForward:
    """What `module.forward` is while private passes are compiled; a copy of the module has its own.

    Args:
        module: The user's module.
        inner: The backend that compiles it.

    Attributes:
        refusal: Why the module runs uncompiled; None if it does not.
    """

    def __init__(self, module: nn.Module, inner: DynamoBackend) -> None:
        self._module, self._eager = module, module.forward
        self._had_own = "forward" in vars(module)
        self._capture, self._compiled = self._compile(inner)
        self._learned: dict[tuple[int, int], Learned] = {}  # kinds of batches that were tried
        self._is_compiled = False  # the pass that runs
        self.refusal: str | None = None
        module.forward = self

    def _compile(self, inner: DynamoBackend) -> tuple[CompiledCapture, Callable[..., Any]]:
        capture = CompiledCapture(self._module, inner)
        compiled = torch.compile(self._eager, backend=capture, dynamic=False, fullgraph=True)
        return capture, compiled

    def detach(self) -> None:
        """Give the module its own forward back."""
        if self._had_own:
            self._module.forward = self._eager
        else:
            del vars(self._module)["forward"]

    # A copy of the module runs what the user wrote ([Note: copies are plain] in border.py): the
    # class's forward, or one that the user had put on the instance.

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        if self._had_own:
            return copy.deepcopy(self._eager, memo)
        return type(self._module).forward.__get__(memo[id(self._module)])

    def __reduce__(self) -> tuple[Any, ...]:
        return (partial, (self._eager,)) if self._had_own else (getattr, (self._module, "forward"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if not self._is_compiled:
            return self._eager(*args, **kwargs)
        with _disable_current_modes(), torch._dynamo.config.patch(recompile_limit=4 * MAX_KINDS):
            return self._compiled(*args, **kwargs)

    @contextmanager
    def running(self, num_rows: int, axes: AxisTable) -> Iterator[CompiledPass]:
        """Around a forward pass that is compiled."""
        self._is_compiled = True
        try:
            with self._capture.forward(num_rows, axes):
                yield CompiledPass(self._capture, axes)
        finally:
            self._is_compiled = False

    # --- trying it out ---------------------------------------------------------------------------

    def takes(self, inputs: Inputs, learned: Learned, plan: Plan, num_rows: int) -> bool:
        """Whether batches of a kind are compiled; the first of each is tried out.

        Args:
            inputs: What the module is given.
            learned: What is known of batches like that.
            plan: How they are clipped.
            num_rows: How many rows this one has.
        """
        kind = id(learned), num_rows
        if self.refusal is None and kind not in self._learned:
            self._learned[kind] = learned
            self.refusal = self._refusal_of(inputs, learned, plan, num_rows)
            if self.refusal is not None:
                warnings.warn(
                    f"private passes of {type(self._module).__name__} run uncompiled: "
                    f"{self.refusal}",
                    stacklevel=2,
                )
        return self.refusal is None

    def _refusal_of(
        self, inputs: Inputs, learned: Learned, plan: Plan, num_rows: int
    ) -> str | None:
        if plan.num_forwards != 1 or plan.num_backwards != 1:
            return "clipping takes two passes over the model; use clipping='auto' and more memory"
        if learned.axes.is_traced:
            return "values decide where rows of samples lie, which a graph cannot follow"
        if len(self._learned) > MAX_KINDS:
            return (
                f"batches come in more than {MAX_KINDS} shapes, and each would be compiled; pad "
                "them to a few lengths"
            )
        samples = inputs.samples
        with outside_draws(), state_kept(self._module, samples) as state:
            expected = self._eager_norms(inputs, learned, plan, num_rows)
            state.restore()
            try:
                found = self._compiled_norms(inputs, learned, plan, num_rows)
            except Exception as error:  # Dynamo and backends raise anything
                return _reason(error)
        return _difference(found, expected)

    def _eager_norms(
        self, inputs: Inputs, learned: Learned, plan: Plan, num_rows: int
    ) -> Mapping[str, Tensor]:
        norms = _Norms(learned, plan, inputs, num_rows)
        capture = Capture(self._module, num_rows, axes=learned.axes, on_record=norms.clipping.take)
        with capture.installed():
            norms.send_back(self._eager)
        return norms.by_name()

    def _compiled_norms(
        self, inputs: Inputs, learned: Learned, plan: Plan, num_rows: int
    ) -> Mapping[str, Tensor]:
        """Of the same graphs, but in the kernels of an eager pass: these can be compared."""
        norms = _Norms(learned, plan, inputs, num_rows)
        capture, compiled = self._compile(torch._dynamo.lookup_backend("aot_eager"))
        with capture.forward(num_rows, learned.axes), _disable_current_modes():
            norms.send_back(compiled)
        for name, record in capture.take():
            norms.clipping.take(name, record)
        return norms.by_name()


class _Norms:
    """Per-sample norms of a pass whose loss stands in for the user's."""

    def __init__(self, learned: Learned, plan: Plan, inputs: Inputs, num_rows: int) -> None:
        self._inputs, self._num_rows = inputs, num_rows
        self.clipping = Clipping(plan, num_rows, learned.storage)

    def send_back(self, forward: Callable[..., Any]) -> None:
        """Run a forward pass and its backward pass."""
        inputs = self._inputs
        with torch.enable_grad():
            output = inputs.run(forward, inputs.samples)
            dims = OutputDims(inputs.dim, inputs.rows).of(output, self._num_rows)
            losses = probe_losses(output, self._num_rows, dims, inputs.rows)
            assert losses is not None  # it was learned of the same output
            losses.sum().backward()

    def by_name(self) -> Mapping[str, Tensor]:
        """The norms [rows] of each parameter that was used."""
        return {name: each.squared.sqrt() for name, each in self.clipping.norms().items()}


def _difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Why norms are not those that were expected; None if they are."""
    for name in sorted(found.keys() ^ expected.keys()):
        where = "outside of the compiled graph" if name in expected else "in compiled graphs alone"
        return f"{name!r} is used {where}"
    for name, wanted in expected.items():
        scale = wanted.max().clamp(min=1e-30)
        off = float(((found[name] - wanted).abs() / scale).max())
        if not off < _TOLERANCE:
            return f"per-sample norms of {name!r} differ by {off:.1%} from those of an eager pass"
    return None


_TOLERANCE = 0.05  # samples that were mistaken for others are off by more, bfloat16 by less


def _reason(error: BaseException) -> str:
    """What a compiler's error says, in a line."""
    error = getattr(error, "inner_exception", error)  # of Dynamo's BackendCompilerFailed
    if isinstance(error, UnsupportedOperation):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    source = next((line for line in reversed(lines) if line.startswith("File ")), "")
    return " ".join([f"{type(error).__name__}: {lines[0] if lines else ''}", source]).strip()


# --- what the user has compiled -------------------------------------------------------------------


def unwrapped(module: Any, undo: ExitStack) -> tuple[nn.Module, DynamoBackend | None]:
    """The module inside of what `torch.compile(module)` returned, and the user's backend.

    The wrapper goes on to work: it calls the module as it is, until `undo` is closed.
    """
    if type(module).__name__ != "OptimizedModule":  # importing it takes a second
        return module, None
    undo.callback(setattr, module, "forward", module.forward)
    module.forward = module._orig_mod.__call__
    return module._orig_mod, torch._dynamo.eval_frame.innermost_backend(module.dynamo_ctx.callback)


def uncompile(module: nn.Module, undo: ExitStack) -> DynamoBackend | None:
    """Undo `module.compile()`, of the module and its parts: private passes are compiled whole.

    Args:
        module: The user's module.
        undo: Gives it back as it was, when it is closed.

    Returns:
        The user's backend; None if nothing was compiled.
    """
    found: list[DynamoBackend] = []
    for child in module.modules():
        compiled = child._compiled_call_impl
        if compiled is not None:
            found.append(backend_in(compiled))
            child._compiled_call_impl = None
            undo.callback(setattr, child, "_compiled_call_impl", compiled)
        forward: Any = vars(child).get("forward")
        if hasattr(forward, "_torchdynamo_orig_callable"):
            found.append(backend_in(forward))
            child.forward = forward._torchdynamo_orig_callable
            undo.callback(setattr, child, "forward", forward)
    return found[0] if found else None


def backend_of(options: Mapping[str, Any]) -> DynamoBackend:
    """The backend that torch.compile would use, with its mode and options.

    Args:
        options: Arguments of `torch.compile`.
    """
    return backend_in(torch.compile(_nothing, **options))


def backend_in(compiled: Callable[..., Any]) -> DynamoBackend:
    """The backend of a function that torch.compile made."""
    cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
    return torch._dynamo.eval_frame.innermost_backend(cells["callback"].cell_contents)


def _nothing() -> None:
    pass
