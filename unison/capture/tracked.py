"""Tracked parameters: tensors that tell the capture of every operation that touches them.

[Note: by operation] Peers hook classes of modules and miss what they did not list: a tied head, a
module with a forward of its own, a bare parameter. A tracked tensor is a subclass of `Tensor` whose
`__torch_function__` torch calls for any function it is passed to. It lies in the instance
dictionary of the module, which Python looks at before `nn.Module.__getattr__` looks into
`_parameters`: optimizers and `named_parameters()` go on seeing the parameter itself.

[Note: no way past] What torch functions do not see (a custom `autograd.Function`, code that kept
the parameter in a list of its own) would get no record. Tracked tensors and parameters therefore
take gradients: records are made from the values without a graph, so a gradient that arrives came
by another way, and raises.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from unison.capture.parts import local, moved_back, span_of
from unison.errors import BadInput, UnsupportedOperation
from unison.kernels.available import is_traced
from unison.ops import Record
from unison.torch_internals import canonical_name, is_dtensor

if TYPE_CHECKING:
    from unison.capture.capture import Capture

Back = Callable[[Record], Record]


class Place(NamedTuple):
    """Where a parameter lies; a tied one lies in several places."""

    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    name: str  # canonical: the first one of a tied parameter, without wrappers


@dataclass(eq=False)
class ParamRegistry:
    """The modules and parameters of a model, as of the last look.

    Attributes:
        modules: By name.
        places: Of all parameters, in the order of `named_parameters()`.
        tracked: Tracked tensors of the last pass, by the ids of their parameters, which the next
            one may have. They hold the parameters' memory: who empties it lets that go.
    """

    modules: list[tuple[str, nn.Module]]
    places: list[Place]
    tracked: "dict[int, Tracked]" = field(default_factory=dict)


def find_params(module: nn.Module) -> tuple[list[tuple[str, nn.Module]], list[Place]]:
    """Return all modules of a model by name, and all places of its parameters."""
    modules = list(module.named_modules())
    places: list[Place] = []
    names: dict[int, str] = {}
    for path, each in modules:
        for attribute, parameter in each._parameters.items():
            if parameter is not None:
                if type(parameter) is Tracked:
                    del each._parameters[attribute]
                    raise UnsupportedOperation(
                        f"forward assigns {parameter.of_parameters[0]!r} to the attribute "
                        f"{attribute!r} of {type(each).__name__}, which makes it a parameter "
                        "of that name too. Keep it in a local variable, or tie it in __init__"
                    )
                name = names.get(id(parameter))
                if name is None:
                    name = canonical_name(f"{path}.{attribute}" if path else attribute)
                    names[id(parameter)] = name
                places.append(Place(each, attribute, parameter, name))
    return modules, places


@contextmanager
def marked(params: ParamRegistry, listener: "Capture", *, is_guarded: bool) -> Iterator[None]:
    """Put a tracked tensor in all places of every trained parameter for this block.

    Args:
        params: All places of all parameters.
        listener: Is told of the uses of the tracked tensors.
        is_guarded: As in `Capture.installed`.
    """
    tracked: dict[int, Tracked] = {}
    earlier = params.tracked
    hidden: list[tuple[dict[str, Any], str, Any]] = []
    with ExitStack() as guards:
        try:
            for module, attribute, parameter, name in params.places:
                if not parameter.requires_grad:
                    continue
                attributes = module.__dict__
                # What another context put in the parameter's place is what is computed with.
                before = attributes.get(attribute)
                if id(parameter) not in tracked:
                    made = earlier.get(id(parameter)) if before is None else None
                    if made is None or not made.is_of(name, parameter):
                        value = parameter if before is None else before
                        made = Tracked.of(value, (Source(name),), listener)
                        is_whole = type(made.value) is Tensor or not is_dtensor(value)
                        made.is_parameter = isinstance(value, nn.Parameter) and is_whole
                        made._is_param = made.is_parameter  # for `isinstance(w, nn.Parameter)`
                    made.listener = listener
                    tracked[id(parameter)] = made
                    if is_guarded:
                        hook = partial(refuse_gradient, name)
                        guards.callback(parameter.register_hook(hook).remove)
                hidden.append((attributes, attribute, before))
                attributes[attribute] = tracked[id(parameter)]
            params.tracked = tracked
            yield
        finally:
            for attributes, attribute, before in hidden:
                if before is None:
                    attributes.pop(attribute, None)
                else:
                    attributes[attribute] = before


@dataclass(frozen=True, eq=False)
class Source:
    """What a tracked tensor was made of.

    Attributes:
        name: The parameter's canonical name; a tied one has one.
        back: Turns a record of the tensor into one of the parameter; None where they are the same.
    """

    name: str
    back: Back | None = None

    def through(self, step: Back) -> "Source":
        """The source of something made of the tensor; `step` leads back to the tensor."""
        before = self.back
        back = step if before is None else lambda record: before(step(record))
        return Source(self.name, back)


class Tracked(Tensor):
    """A parameter, or something made of parameters alone, whose uses are recorded."""

    value: Tensor  # the same memory without the mark and without a graph
    sources: tuple[Source, ...]  # several where it was made of several parameters
    of_parameters: tuple[str, ...]  # names of the sources, each once (torch 2.11 has a `names`)
    listener: "Capture"  # is told of operations
    is_parameter: bool = False  # as it is, and not something made of it
    shares_memory: bool = False  # with another one: neither sees what is written to the other
    expanded_from: "Tracked | None" = None  # what it is for every sample, or row

    @staticmethod
    def of(value: Tensor, sources: tuple[Source, ...], listener: "Capture") -> "Tracked":
        """Mark a tensor; it shares the memory."""
        shell = value = value.detach()
        if is_traced(value):  # of which no subclass is made
            with _disable_current_modes():  # those that trace would make it one of theirs
                shell = torch.empty(value.shape, dtype=value.dtype, device="meta")
        elif is_dtensor(value):
            # Of a DTensor no subclass is made: the whole's shape, without its memory.
            shell = torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)
        tracked = torch.Tensor._make_subclass(Tracked, shell, True)
        tracked.value, tracked.sources, tracked.listener = value, sources, listener
        tracked.of_parameters = tuple(dict.fromkeys([source.name for source in sources]))
        with torch._C.DisableTorchFunctionSubclass():
            tracked.register_hook(partial(refuse_gradient, tracked.of_parameters[0]))
        return tracked

    def is_of(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether it is this parameter as it is now: not moved since, nor given other memory."""
        if type(parameter) is not nn.Parameter or self.of_parameters != (name,):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            now, then = parameter, self.value
            is_same = now.data_ptr() == then.data_ptr() and now.stride() == then.stride()
            return is_same and (now.shape, now.dtype, now.device) == (
                then.shape,
                then.dtype,
                then.device,
            )

    def through(self, step: Back, value: Tensor) -> "Tracked":
        """Mark something made of this tensor; `step` leads a record of it back to one of this."""
        sources = tuple(source.through(step) for source in self.sources)
        return Tracked.of(value, sources, self.listener)

    # --- what parallel plans ask distributed tensors ---------------------------------------------

    @property
    def placements(self) -> Any:
        """How the value lies on ranks, if it is a distributed tensor."""
        return self.value.placements  # type: ignore[attr-defined]

    @property
    def device_mesh(self) -> Any:
        """The ranks that it lies on."""
        return self.value.device_mesh  # type: ignore[attr-defined]

    def redistribute(self, *args: Any, **kwargs: Any) -> "Tracked":
        """The same values, placed in another way."""
        before: Any = self.value
        after = before.redistribute(*args, **kwargs)
        step = partial(
            moved_back,
            before=span_of(before),
            after=span_of(after),
            shape=tuple(before.shape),
            mesh=before.device_mesh,
        )
        return self.through(step, after)

    def to_local(self, **kwargs: Any) -> "Tracked":
        """This rank's part, as a tensor of its own; its records are those of the part."""
        if kwargs or self.value.placements[0].is_partial():  # type: ignore[attr-defined]
            raise UnsupportedOperation(
                f"{self.of_parameters[0]}: to_local of a summand, or with placements for its "
                "gradient; redistribute it before"
            )
        return Tracked.of(local(self.value), self.sources, self.listener)

    def _refuse_copy(self, *_: Any) -> NoReturn:
        raise BadInput(
            f"the module is copied or pickled between a forward pass and its backward pass, while "
            f"the capture stands in the place of {self.of_parameters[0]}. Copy it after backward()"
        )

    __deepcopy__ = __reduce_ex__ = __reduce__ = _refuse_copy  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Hand the call to the capture of the first tracked tensor, in lists and tuples too."""
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, Tracked):
                    return item.listener.call(func, args, kwargs)
        raise AssertionError("torch called a tracked tensor's function without one")


_OWN = ("value", "sources", "of_parameters", "listener")


def mark_in_place(target: Tensor, made: Tracked) -> bool:
    """Let a tensor be what an in-place operation makes of it; False if views of it would not be."""
    if type(target) is Tracked:
        is_alone = not (target.is_parameter or target.shares_memory)
    else:
        storage = target.untyped_storage()
        # The tensor holds it, and so does the name here.
        is_alone = torch._C._storage_Use_Count(storage._cdata) == 2  # type: ignore[attr-defined]
        is_alone &= type(target) is Tensor and not target.requires_grad
    if not is_alone:
        return False
    if type(target) is not Tracked:
        target.__class__ = Tracked
        with torch._C.DisableTorchFunctionSubclass():
            target.requires_grad_()
            target.register_hook(partial(refuse_gradient, made.of_parameters[0]))
    for name in _OWN:
        setattr(target, name, getattr(made, name))
    target.expanded_from = None  # type: ignore[attr-defined]
    return True


def unmark(target: Tracked) -> None:
    """Give back what `mark_in_place` took, with the values that were written."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        value = target.value
        for name in (*_OWN, "shares_memory", "expanded_from"):
            vars(target).pop(name, None)
        target._backward_hooks = None
        target.__class__ = Tensor  # type: ignore[assignment]
        target.requires_grad_(False).copy_(value)


def refuse_gradient(name: str, gradient: Tensor | None) -> None:
    """Raise for a gradient that came past the capture; a hook of tensors.

    Autograd calls hooks, with None, where a function was given the tensor and has no gradient.
    """
    if gradient is not None:
        raise UnsupportedOperation(
            f"a gradient reached {name!r} from an operation that was not seen: a custom "
            "autograd.Function, or code that took the parameter from parameters(), state_dict() or "
            "a list of its own. Use torch functions on the module's attribute (self.layer.weight)"
        )


def plain(value: Any) -> Any:
    """A tracked tensor without its mark; anything else as it is."""
    return value.value if type(value) is Tracked else value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A function on everything in nested lists, tuples and dictionaries."""
    if isinstance(value, list | tuple):
        return like(value, [mapped(function, item) for item in value])
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    return function(value)


all_plain = partial(mapped, plain)


def like(value: Any, items: list[Any]) -> Any:
    """Items in a sequence of the type of `value`; named tuples take theirs one by one."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


# They give the values up on purpose, or read none: what comes out is not followed.
UNFOLLOWED = {
    *(Tensor.detach, torch.detach, Tensor.data.__get__),  # type: ignore[attr-defined]
    *(torch.zeros_like, torch.ones_like, torch.empty_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_tensor),
}

# Questions about the tensor itself, asked often.
FACTS = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__),
    *(Tensor.is_contiguous, Tensor.is_floating_point, torch.is_floating_point),
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad"),
            *("grad_fn", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested"),
        )
    ),
}
