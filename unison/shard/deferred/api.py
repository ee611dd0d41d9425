"""Deferred initialisation: build a model without memory, shard it, fill what each rank holds."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from unison.errors import BadInput
from unison.rng.inits import TruncatedNormal
from unison.shard.deferred.fill import fill_places, find_places
from unison.shard.deferred.recorder import (
    ORIGINALS,
    Originals,
    Pretence,
    Recorder,
    active_recorder,
    label,
    make_copyable,
    set_active_recorder,
)
from unison.shard.deferred.tape import Registered, has_no_memory, without_generator

M = TypeVar("M", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])

_IS_REGISTERED = "_unison_is_registered"


@contextmanager
def meta_init() -> Iterator[None]:
    """Build modules without memory, and record how their tensors get their values.

    Inside, tensors are made without memory, whatever device is asked for, and every operation on
    them is recorded. They say that they are on the CPU, so that code which looks does all it would
    do there. Values that do not depend on random draws can be read (`item()`, `tolist()`,
    `numpy()`). Afterwards parameters and buffers are on the meta device: the module can be sharded,
    and `unison.materialize` fills it.

    torch's generators are neither used nor changed. May be nested.

    >>> with meta_init():
    ...     layer = nn.Linear(1000, 1000)
    >>> layer.weight.is_meta
    True
    >>> materialize(layer, seed=0).weight.std() < 0.02
    tensor(True)

    Raises:
        UnsupportedOperation: Code inside reads the value of a random draw, or passes a generator.
    """
    if active_recorder() is not None:
        yield
        return
    recorder = Recorder()

    def on_registration(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and has_no_memory(tensor) and not is_lazy(tensor):
            recorder.remember(tensor)
            make_copyable(tensor)
            vars(module).setdefault(ORIGINALS, Originals())[name] = tensor

    with ExitStack() as stack:
        for handle in (
            register_module_parameter_registration_hook(on_registration),
            register_module_buffer_registration_hook(on_registration),
        ):
            stack.callback(handle.remove)
        stack.enter_context(_truncated_normals_recorded())
        stack.callback(set_active_recorder, None)
        set_active_recorder(recorder)
        stack.enter_context(recorder)
        stack.enter_context(Pretence(recorder))
        yield
    if recorder.refusal is not None:
        raise recorder.refusal
    for tensor in recorder.remembered():
        label(tensor)


def materialize(module: M, *, seed: int, device: torch.device | str | None = None) -> M:
    """Fill a module that was built under `unison.meta_init`, in place.

    Parameters, buffers and other tensors that the module holds get memory and their initial values,
    as their recorded init makes them. Of a sharded module (`unison.fully_shard`, PyTorch's FSDP2)
    each rank makes its own part only. Called again, it fills the module anew.

    Guarantees:
        A value depends on the seed, on the recorded operations, and, where they are random, on the
        name of the parameter and the index of the element; not on the number of ranks, the device,
        the number of threads or the state of torch's generators. A parameter that is filled by one
        draw gets the bits of `unison.rng.fill_`.

    Args:
        module: What to fill. Names, on which random values hang, are counted from here: call it on
            the whole model.
        seed: Seed of the random values.
        device: Where to put the tensors; torch's default device unless given. Under FSDP2 the
            mesh's. Tensors that have values already keep them and move there.

    Returns:
        The same module; its parameters are the same objects.

    Raises:
        BadInput: A tensor has no memory and no record, or was changed after its recording ended.
        UnsupportedOperation: A tensor depends on an operation that cannot be replayed.
    """
    if not isinstance(module, nn.Module):
        raise BadInput(f"materialize takes a module, found {type(module).__name__}")
    if active_recorder() is not None:
        raise BadInput("call unison.materialize after the `with unison.meta_init():` block")
    where = None if device is None else torch.empty(0, device=device).device
    if (where or torch.get_default_device()).type == "meta":
        raise BadInput("expected a device with memory, found 'meta'; pass another device=")
    places = find_places(module)
    if not any(place.recipe is not None for place in places):
        raise BadInput(
            f"no tensor of this {type(module).__name__} was built under unison.meta_init(), so "
            "there is nothing to fill; its tensors have the values that they were given"
        )
    fill_places(module, places, seed, where)
    return module


def register_init(function: F) -> F:
    """Make an init function of your own replayable; also as a decorator.

    The function takes a tensor first and fills it in place. Under `unison.meta_init` a call is
    recorded as one operation and made later, on a real tensor of the full shape on the CPU. Random
    torch functions inside it then draw from unison's streams, so that the result depends on the
    seed and the parameter's name. Outside `meta_init` it runs as it is.

    It is needed where an init looks at random values to decide what to do; most functions work
    without.

    >>> @register_init
    ... def sorted_normal_(tensor):
    ...     return tensor.normal_().copy_(tensor.flatten().sort().values.view_as(tensor))

    Args:
        function: Called as `function(tensor, *args, **kwargs)`. Tensors among the other arguments
            are read, not written. It must not draw from anything but torch.

    Returns:
        The function to use in its place.
    """
    if not callable(function):
        raise BadInput(f"register_init takes a function, found {function!r}")
    if hasattr(function, _IS_REGISTERED):
        raise BadInput(f"{function} is registered already")
    registered = Registered(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        recorder = active_recorder()
        if recorder is None or not (
            args and isinstance(args[0], Tensor) and has_no_memory(args[0])
        ):
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            recorder.call(registered, args, kwargs)
        return args[0]

    setattr(wrapper, _IS_REGISTERED, True)
    return wrapper  # type: ignore[return-value]


@contextmanager
def _truncated_normals_recorded() -> Iterator[None]:
    """Record `nn.init.trunc_normal_` as one draw: torch's own redraws until all values fit.

    The private function is the one place through which all callers go, also those that imported
    `trunc_normal_` by name before.
    """
    original = nn.init._no_grad_trunc_normal_

    def record(
        tensor: Tensor, mean: Any, std: Any, a: Any, b: Any, generator: Any = None
    ) -> Tensor:
        recorder = active_recorder()
        if recorder is None or not has_no_memory(tensor):
            return original(tensor, mean, std, a, b, generator=generator)
        without_generator("nn.init.trunc_normal_", {"generator": generator})
        with torch._C.DisableTorchFunction():
            recorder.fill(tensor, TruncatedNormal(mean=mean, std=std, low=a, high=b))
        return tensor

    nn.init._no_grad_trunc_normal_ = record
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original
