"""Capture: every use of every parameter in a forward pass, recorded in its backward pass.

The only code that intercepts a pass. It leaves records, as data, by parameter name.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unison.capture.axes import NO_AXIS, Axes, AxisTable, Call, Seen
from unison.capture.expression import derive, is_always_expression
from unison.capture.fallback import is_in_place, per_sample_fallback
from unison.capture.names import places
from unison.capture.refuse import refuse_compiled
from unison.capture.tap import tap
from unison.capture.tracked import Source, Tracked, all_plain, plain, refuse_gradient
from unison.errors import UnsupportedOperation
from unison.ops import RULES, Builder, Layout, Record

OnRecord = Callable[[str, Record], None]

# They give the values up on purpose, or read none: what comes out is not followed.
UNFOLLOWED = {
    Tensor.detach,
    torch.detach,
    Tensor.data.__get__,  # type: ignore[attr-defined]
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    Tensor.new_zeros,
    Tensor.new_ones,
    Tensor.new_empty,
    Tensor.new_tensor,
}

# Questions about the tensor itself, asked often.
FACTS = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    torch.is_floating_point,
    Tensor.__len__,
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad"),
            *("grad_fn", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested"),
        )
    ),
}


class _Expression(Exception):
    """An output does not depend on the batch."""


@dataclass(eq=False, slots=True)
class _Use:
    """The uses of parameters by one operation, waiting for its output's gradient."""

    capture: "Capture"
    layout: Layout
    uses: Sequence[tuple[Tracked, Builder]]

    def record(self, g: Tensor, saved: tuple[Tensor, ...]) -> None:
        for tracked, builder in self.uses:
            record = builder(self.layout, g, *saved, shape=tuple(tracked.value.shape))
            for source in tracked.sources:
                self.capture.on_record(source.name, source.of(record))


class Capture:
    """Records the uses of a module's trainable parameters, for one number of samples.

    Args:
        module: The model.
        batch: Number of samples.
        axes: Where samples lie, as learned; an empty table only learns.
        on_record: Called with a parameter's name and a record, once per use, in the backward pass.
    """

    def __init__(
        self, module: nn.Module, batch: int, *, axes: AxisTable, on_record: OnRecord
    ) -> None:
        self.module, self.batch, self.axes, self.on_record = module, batch, axes, on_record
        self.seen: list[Seen] | None = None  # while learning
        self.used: set[str] = set()
        self._anchor: Tensor | None = None
        self._current: tuple[Call, Axes | None] | None = None  # what a rule runs for
        self._layouts: dict[int, Layout] = {}

    @contextmanager
    def installed(self, *, is_guarded: bool = False) -> Iterator["Capture"]:
        """Put tracked tensors in the place of the parameters; they must stay for the backward pass.

        Code that activation checkpointing runs again needs them too.

        Args:
            is_guarded: Whether gradients that reach a parameter itself raise too: it was kept
                elsewhere than in its module. It costs microseconds per parameter, so that it is
                asked for once, where the samples are checked.

        Raises:
            UnsupportedOperation: If the module is compiled, or a gradient went past the capture.
        """
        refuse_compiled(self.module)
        tracked: dict[int, Tracked] = {}
        hidden: list[tuple[dict[str, Any], str, Any]] = []
        guards: list[RemovableHandle] = []
        try:
            for module, attribute, parameter, name in places(self.module):
                if not parameter.requires_grad:
                    continue
                attributes = module.__dict__
                # What another context put in the parameter's place is what is computed with.
                before = attributes.get(attribute)
                if id(parameter) not in tracked:
                    value = parameter if before is None else before
                    source = Source(name, tuple(value.shape))
                    tracked[id(parameter)] = Tracked.of(value, (source,), self)
                    if is_guarded:
                        hook = partial(refuse_gradient, name)
                        guards.append(parameter.register_hook(hook))
                hidden.append((attributes, attribute, before))
                attributes[attribute] = tracked[id(parameter)]
            with _flat_weights_renewed(self.module):
                yield self
            _refuse_gradients(tracked.values())
        finally:
            for attributes, attribute, before in hidden:
                if before is None:
                    attributes.pop(attribute, None)
                else:
                    attributes[attribute] = before
            for guard in guards:
                guard.remove()

    @contextmanager
    def learning(self) -> Iterator[list[Seen]]:
        """Only write down what is called and what comes out."""
        self.seen = []
        try:
            with self.installed(), torch.no_grad():
                yield self.seen
        finally:
            self.seen = None

    # --- what tracked tensors call ---------------------------------------------------------------

    def call(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a torch function that touches a tracked tensor."""
        if func in FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        is_learning = self.seen is not None
        if func in UNFOLLOWED or not (is_learning or torch.is_grad_enabled()):
            return func(*all_plain(args), **all_plain(kwargs))
        if is_always_expression(func, args):
            return derive(self, func, args, kwargs)
        rule = RULES.get(func)
        call = self._call_of(func, args, kwargs)
        if torch._C._are_functorch_transforms_active():
            raise UnsupportedOperation(
                f"{call} inside of torch.func or vmap, where the samples are not seen; write the "
                "model for a batch"
            )
        axes = self.axes.find(call)
        if rule is None:
            return self._without_rule(call, axes, args, kwargs)
        if axes is not None and axes[0] is NO_AXIS and not is_learning:
            return derive(self, func, args, kwargs)
        before, self._current = self._current, (call, axes)
        try:
            output = rule(self, *args, **kwargs)
        except _Expression:
            return derive(self, func, args, kwargs)
        except UnsupportedOperation as error:
            names = ", ".join(call.names)
            message = str(error)
            raise UnsupportedOperation(
                message if message.startswith(names) else f"{names}: {message}"
            ) from None
        finally:
            self._current = before
        if output is NotImplemented:
            return self._without_rule(call, axes, args, kwargs)
        return output

    def _call_of(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Call:
        names: tuple[str, ...] = ()
        shapes: list[tuple[int, ...]] = []
        items: Sequence[Any] = (*args, *kwargs.values()) if kwargs else args
        for value in items:
            for item in value if isinstance(value, list | tuple) else (value,):
                if type(item) is Tracked:
                    shapes.append(item.value.shape)
                    names = tuple(dict.fromkeys(names + item.names)) if names else item.names
                elif isinstance(item, Tensor):
                    shapes.append(item.shape)
        return Call(func, names, tuple(shapes), self.batch)

    def _without_rule(
        self, call: Call, axes: Axes | None, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        func = call.func
        if self.seen is None and axes is not None:
            if axes[0] is NO_AXIS:
                return derive(self, func, args, kwargs)
            before, self._current = self._current, (call, axes)
            try:
                return per_sample_fallback(self, call, axes, args, kwargs)
            finally:
                self._current = before
        if is_in_place(func) or "out" in kwargs:
            raise UnsupportedOperation(
                f"{call} writes in place and has no rule; write it as an operation with a result"
            )
        output = func(*all_plain(args), **all_plain(kwargs))
        if not _has_float_tensor(output):
            return output  # a size, a device, a mask: nothing to record
        if self.seen is None:
            self.axes.axis(call)  # raises
        assert self.seen is not None
        self.seen.append(Seen(call, _shape(output), _digest(output, args, kwargs)))
        if axes is not None and axes[0] is NO_AXIS:
            return derive(self, func, args, kwargs)
        return output

    # --- what rules call -------------------------------------------------------------------------

    def plain(self, value: Any) -> Any:
        """A value without its mark."""
        return plain(value)

    def tracks(self, value: Any) -> bool:
        """Whether a value's uses are recorded."""
        return type(value) is Tracked

    def __call__(
        self,
        output: Tensor,
        *,
        saved: Sequence[Tensor],
        uses: Sequence[tuple[Any, Builder]],
        is_fresh: bool = True,
    ) -> Tensor:
        """Record the uses of parameters that made `output`, when its gradient comes."""
        assert self._current is not None
        call, axes = self._current
        if self.seen is not None:
            self.seen.append(Seen(call, tuple(output.shape), _digest(output, saved, {})))
            if axes is not None and axes[0] is NO_AXIS:
                raise _Expression
            return output
        axis = self.axes.axis(call) if axes is None else axes[0]
        assert axis is not None
        tracked = [(value, builder) for value, builder in uses if type(value) is Tracked]
        for value, _ in tracked:
            self.used.update(value.names)
        layout = self._layouts.get(axis) or self._layouts.setdefault(axis, Layout(self.batch, axis))
        if self._anchor is None or self._anchor.device != output.device:
            self._anchor = torch.zeros((), device=output.device, requires_grad=True)
        use = _Use(self, layout, tracked)
        return tap(use, output, self._anchor, tuple(saved), is_fresh=is_fresh)


def _has_float_tensor(value: Any) -> bool:
    items = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(item, Tensor) and item.is_floating_point() for item in items)


def _shape(value: Any) -> tuple[int, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    return next(tuple(item.shape) for item in items if isinstance(item, Tensor))


def _digest(output: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """A few numbers that change with the values; None where parameters are all that went in."""
    values = (*args, *kwargs.values())
    if not any(isinstance(value, Tensor) and type(value) is not Tracked for value in values):
        return None
    items = output if isinstance(output, list | tuple) else [output]
    first = next(item for item in items if isinstance(item, Tensor)).detach().double()
    return torch.stack([first.sum(), first.square().sum()])


def _refuse_gradients(tracked: Iterable[Tracked]) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        for each in tracked:
            if each.grad is not None:
                refuse_gradient(each.names[0])


@contextmanager
def _flat_weights_renewed(module: nn.Module) -> Iterator[None]:
    """Let recurrent modules, which keep a second list of their parameters, see the same ones.

    They notice that their parameters are others, and would flatten them for cuDNN.
    """
    found = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    kept = [(child._flat_weights, child._flat_weight_refs) for child in found]
    for child in found:
        weights = [getattr(child, name, None) for name in child._flat_weights_names]
        child._flat_weights = weights
        child._flat_weight_refs = [each if each is None else ref(each) for each in weights]
    try:
        yield
    finally:
        for child, (weights, refs) in zip(found, kept, strict=True):
            child._flat_weights, child._flat_weight_refs = weights, refs
