"""What torch and its wrappers do inside: wrapped parameters, function modes, Dynamo.

Dynamo itself is imported where it is used: that takes a second.
"""

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from operator import is_
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from unison.errors import UnsupportedOperation

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# --- runs without values --------------------------------------------------------------------------

_planned_for: str | None = None
_planned_bytes: int | None = None


@contextmanager
def without_values(machine: str, num_bytes: int | None = None) -> Iterator[None]:
    """Let modules on the meta device run in the block: their memory is counted, no value is known.

    What refuses them elsewhere, and what compares values, stands aside.

    Args:
        machine: The kind of device whose choices are made, `"cpu"` or `"cuda"`.
        num_bytes: What the device has; None if that is not to matter.
    """
    global _planned_for, _planned_bytes
    before = _planned_for, _planned_bytes
    _planned_for, _planned_bytes = machine, num_bytes
    try:
        yield
    finally:
        _planned_for, _planned_bytes = before


def has_values() -> bool:
    """Whether tensors have values, so that they can be compared."""
    return _planned_for is None


def tracer() -> str | None:
    """What traces the code that runs, which writes down whatever else runs with it; or None."""
    if torch.jit.is_tracing():
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return "make_fx" if proxies is not None and proxies.get_proxy_mode() is not None else None


def machine_of(device: torch.device) -> str:
    """The kind of a device; of one without values, the kind that it stands for."""
    return _planned_for if _planned_for is not None and device.type == "meta" else device.type


def is_recording() -> bool:
    """Whether a CUDA graph is being recorded, so that what runs does not happen."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


# What a GPU holds beside tensors. One H200 alone held 0.76 GiB, and its allocator 1 to 11 % more
# than tensors took (bench/plan_gpu.py); NCCL's buffers of several ranks have not been measured.
RUNTIME_BYTES = 2 << 30  # CUDA's context, NCCL's buffers, workspaces of cuBLAS
RESERVED_SHARE = 0.08  # of the peak: what the allocator holds and cannot use


def room_for_tensors(device: torch.device) -> int | None:
    """Bytes that this process's tensors may take on a GPU, with a margin; None on other devices.

    On a GPU that is what is free and what the process holds already, in a plan all that it has.
    """
    has = _planned_bytes if device.type == "meta" else None
    if device.type == "cuda":
        has = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return None if has is None else int((has - RUNTIME_BYTES) / (1 + RESERVED_SHARE))


def sent_to_host(value: Tensor) -> Callable[[], Tensor]:
    """Copy a small tensor to the host while its device goes on; return what reads it there.

    To read the tensor itself would wait for all that was queued after it, and a GPU that has
    nothing queued stands still until the host has come to the next pass's kernels.
    """
    if machine_of(value.device) != "cuda":
        return lambda: value
    on_host = value.to("cpu", non_blocking=True)
    if not value.is_cuda:  # a plan's
        return lambda: on_host
    event = torch.cuda.Event()
    event.record()

    def read() -> Tensor:
        event.synchronize()
        return on_host

    return read


# --- custom functions and functional_call, of which torch tells no function mode ------------------

OnApply = Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]

_CustomFunction: Any = torch.autograd.function._SingleLevelFunction
_told_of_apply: list[OnApply] = []
_put_in_place = stateless._reparametrize_module


def tell_of_apply(listener: OnApply) -> None:
    """Have a listener asked, the last one first, whenever a custom function is applied.

    Args:
        listener: Is given what applies the function, under the function's name, and its arguments;
            it returns what comes out, or NotImplemented.
    """
    _told_of_apply.append(listener)
    _CustomFunction.apply = classmethod(_told_apply)
    stateless._reparametrize_module = _put_in_place_of_marks


def tell_no_more(listener: OnApply) -> None:
    """Undo `tell_of_apply`."""
    _told_of_apply.remove(listener)
    if not _told_of_apply:
        del _CustomFunction.apply
        stateless._reparametrize_module = _put_in_place


def _told_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply`, while somebody is told.

    It lies between `Function` and its base in C++, so that it is found by a `MyFunction.apply` that
    was looked up long before, too.
    """
    run: Any = partial(super(_CustomFunction, cls).apply)
    if not cls.__module__.startswith("unison."):
        run.__name__ = cls.__name__
        for listener in reversed(_told_of_apply):
            output = listener(run, args, kwargs)
            if output is not NotImplemented:
                return output
    return run(*args, **kwargs)


@contextmanager
def _put_in_place_of_marks(
    module: nn.Module, given: dict[str, Tensor], *args: Any, **kwargs: Any
) -> Iterator[None]:
    """What `functional_call` does, also for parameters that an attribute of that name hides."""
    names = module.named_parameters(remove_duplicate=False)
    chosen = {id(each) for name, each in names if name in given}  # and where these are tied
    hidden: list[tuple[dict[str, Any], str, Any]] = []
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if id(parameter) in chosen and name in vars(each):
                hidden.append((vars(each), name, vars(each).pop(name)))
    try:
        with _put_in_place(module, given, *args, **kwargs):
            yield
    finally:
        for attributes, name, value in hidden:
            attributes[name] = value


class WithGradients(torch.autograd.Function):
    """What a function makes of tensors, whose gradients another one makes of that of the result.

    `WithGradients.apply(make, gradients, *tensors)` returns `make()`, and in the backward pass
    `gradients(gradient)` returns one for each of the tensors.
    """

    @staticmethod
    def forward(ctx: Any, make: Any, gradients: Any, *tensors: Tensor) -> Tensor:
        """Make the result; nothing in it is differentiated."""
        ctx.gradients = gradients
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """Make the gradients."""
        return None, None, *ctx.gradients(gradient)


# --- canonical parameter names: what wrappers add to a name is not part of it ---------------------

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@lru_cache(maxsize=1 << 14)  # all names are asked for in every step
def canonical_name(name: str) -> str:
    """Strip what DDP, torch.compile and checkpoint wrappers put into a parameter's name.

    Streams of noise and initial values hang on names, so a wrapper must not change them.

    >>> canonical_name("module.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a module's `state_dict` holds, by name."""
    for path, each in module.named_modules():
        for key, value in each._buffers.items():
            if value is not None and key not in each._non_persistent_buffers_set:
                yield (f"{path}.{key}" if path else key), value


# --- attributes of modules that a pass may write --------------------------------------------------

_INTERNAL = frozenset(vars(nn.Module()))  # hooks, children, tensors: not a model's own attributes
_HOOKS = [name for name in vars(nn.Module()) if "_hooks" in name and "state_dict" not in name]
_MUTABLE = (list, dict, set, deque)


def kept_attributes(module: nn.Module) -> tuple[list[Tensor], Callable[[], None]]:
    """Keep what the attributes of modules, and of plain objects that they hold, are bound to.

    Returns:
        Tensors among them, which a pass may write in place; and what puts all else back, contents
        of lists, dictionaries and sets, and hooks included.
    """
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    contents: list[tuple[Any, Any]] = []
    tensors: list[Tensor] = []
    known: set[int] = set()

    def keep(attributes: dict[str, Any], *, is_module: bool = True) -> None:
        own = {key: value for key, value in attributes.items() if not is_module or _is_own(key)}
        kept.append((attributes, own))
        for value in own.values():
            is_mutable = isinstance(value, _MUTABLE)
            if id(value) in known or not (is_module or is_mutable):
                continue
            known.add(id(value))
            if is_mutable:
                contents.append((value, dict(value) if isinstance(value, dict) else list(value)))
            elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                tensors.append(value)
            elif is_plain_object(value):
                keep(vars(value), is_module=False)

    def put_back() -> None:
        for attributes, own in kept:
            for key in [key for key in attributes if _is_own(key) and key not in own]:
                del attributes[key]
            for key, value in own.items():
                if attributes.get(key) is not value or key not in attributes:
                    attributes[key] = value
        for value, before in contents:
            _refill(value, before)

    for child in module.modules():
        if not type(child).__module__.startswith(("torch.nn.parallel", "torch.distributed")):
            keep(vars(child))
            # A forward pass may put hooks on its parts once, and note that it has.
            hooks = [vars(child).get(name, {}) for name in _HOOKS]
            contents.extend((each, dict(each)) for each in hooks)
    return tensors, put_back


def _is_own(name: str) -> bool:
    return name not in _INTERNAL and not name.startswith("_unison")


def is_plain_object(value: Any) -> bool:
    """Whether an attribute is an object of the model's author, whose attributes are state."""
    if isinstance(value, type | nn.Module | Tensor) or not hasattr(value, "__dict__"):
        return False
    if callable(value) and hasattr(value, "__code__"):
        return False
    return type(value).__module__.split(".")[0] not in {"torch", "unison", "builtins", "types"}


def _refill(value: Any, before: Any) -> None:
    """Put the contents of a list, dictionary or set back; the object stays."""
    if isinstance(value, dict):
        is_same = list(value) == list(before) and all(map(is_, value.values(), before.values()))
    else:
        is_same = len(value) == len(before) and all(map(is_, value, before))
    if is_same:
        return
    value.clear()
    value.update(before) if isinstance(value, dict | set) else value.extend(before)


# --- tensors and graphs ---------------------------------------------------------------------------


GATHERED = "_unison_gathered"  # on a tensor whose memory is given back when a module has run


def is_dtensor(value: Any) -> "TypeGuard[DTensor]":
    """Whether a tensor is a distributed one."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)


def graph_leaves(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves that a backward pass of some tensors would come to."""
    waiting, seen = [each.grad_fn for each in tensors], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of an accumulator
        if leaf is not None:
            yield leaf
        waiting += [each for each, _ in node.next_functions]


# --- torch's function modes, and their stack ------------------------------------------------------


class FunctionMode(TorchFunctionMode):
    """A function mode that lets a function stand in for each torch function of its block.

    Args:
        call: Called with the torch function, its arguments, and its keyword arguments.
    """

    def __init__(self, call: Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Let the function decide."""
        return self._call(func, args, kwargs or {})


class DispatchMode(TorchDispatchMode):
    """As `FunctionMode`, for the operations of torch's dispatcher."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, for seconds, to hide this class from it

    def __init__(self, call: Callable[[Any, tuple, dict[str, Any]], Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Let the function decide."""
        return self._call(func, args, kwargs or {})


def push_lowest(mode: TorchFunctionMode) -> None:
    """Put a mode below all others: `with torch.device(...)` takes what is on top as it ends.

    Only the default device wants to be lower.
    """
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    with _cleared(down_to=default):
        torch.overrides._push_mode(mode)


def take_away(mode: TorchFunctionMode) -> None:
    """Take a mode off the stack, wherever it is; nothing happens if it is not there."""
    if any(each is mode for each in _get_current_function_mode_stack()):
        with _cleared(down_to=mode):
            torch.overrides._pop_mode()


@contextmanager
def pushed_lowest(mode: TorchFunctionMode) -> Iterator[None]:
    """Have a mode below all others for a block."""
    push_lowest(mode)
    try:
        yield
    finally:
        take_away(mode)


@contextmanager
def taken_away(mode: TorchFunctionMode) -> Iterator[None]:
    """Have a mode nowhere on the stack for a block."""
    is_there = any(each is mode for each in _get_current_function_mode_stack())
    take_away(mode)
    try:
        yield
    finally:
        if is_there:
            push_lowest(mode)


@contextmanager
def _cleared(*, down_to: Any) -> Iterator[None]:
    """Take modes off torch's stack for a block, down to one, which stays, and put them back."""
    above = []
    while (stack := _get_current_function_mode_stack()) and stack[-1] is not down_to:
        above.append(torch.overrides._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(above):
            torch.overrides._push_mode(mode)


def autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """Return what autocast casts to on CPUs and on GPUs; None where it is off."""
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    )


# --- what torch.compile has made, and what compiles for it ----------------------------------------

DynamoBackend = Callable[[GraphModule, list[Any]], Callable[..., Any]]
"""(graph, examples of its inputs) -> what runs it; as `torch.compile(backend=)` takes it."""

ORIGINAL = "_torchdynamo_orig_callable"  # of a function that torch.compile made: what it was


def backend_of(options: Mapping[str, Any]) -> DynamoBackend:
    """The backend that torch.compile would use, with its mode and options.

    Args:
        options: Arguments of `torch.compile`.
    """
    return backend_in(torch.compile(lambda: None, **options))


def backend_in(compiled: Callable[..., Any]) -> DynamoBackend:
    """The backend of a function that torch.compile made."""
    cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
    return torch._dynamo.eval_frame.innermost_backend(cells["callback"].cell_contents)


def pinned(backend: DynamoBackend) -> DynamoBackend:
    """The same backend, which chooses nothing by timing: each choice has bits of its own.

    Inductor tries several kernels and takes the fastest, which is another one from run to run.
    """
    config = getattr(backend, "config", None)
    if type(backend).__name__ != "_TorchCompileInductorWrapper" or not isinstance(config, dict):
        return backend
    made: Any = copy.copy(backend)
    made.config = {**config, "deterministic": True}
    return made


COMPILED_CALL = "_compiled_call_impl"  # of a module that was compiled in place


def refuse_compiled(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Make sure that no part of a module is compiled.

    A compiled graph does not ask tracked tensors.

    Args:
        modules: All parts, by name.

    Raises:
        UnsupportedOperation: Naming the part.
    """
    name = compiled_part(modules)
    if name is not None:
        raise UnsupportedOperation(
            f"module {name!r} is compiled, and what a compiled graph does to parameters is not "
            "seen; use the model as it was before torch.compile: make_private(compile=True) "
            "compiles private passes"
        )


def compiled_part(modules: Iterable[tuple[str, nn.Module]]) -> str | None:
    """Return the name of the first module that was compiled, or that one was put into since.

    Args:
        modules: All parts of a module, by name, as of some time ago.
    """
    for name, module in modules:
        children: Any = module._modules.values()
        wrappers = [each for each in children if type(each).__name__ == "OptimizedModule"]
        is_compiled = any(hasattr(each.forward, ORIGINAL) for each in (module, *wrappers))
        if is_compiled or getattr(module, COMPILED_CALL) is not None:
            return name or type(module).__name__
    return None


def backend_of_caller() -> DynamoBackend | None:
    """The backend of compiled code that the running call comes from, where it runs as Python.

    So it does in a private pass: Dynamo leaves code alone while a function mode looks on.
    """
    frame: Any = sys._getframe(1) if "torch._dynamo.eval_frame" in sys.modules else None
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper":
            callback = frame.f_locals.get("callback")
            if callback is not None:
                return torch._dynamo.eval_frame.innermost_backend(callback)
        frame = frame.f_back
    return None
