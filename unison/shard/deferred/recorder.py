"""Recording: while a module is built, its tensors have no memory and each operation goes on a tape.

[Note: pretence] Tensors made inside are plain meta tensors, so the module never holds anything else
and nothing has to be converted at the end. But code that builds models asks tensors where they are,
and skips its work if the answer is "meta" (transformers leaves out its whole init). So in a
function mode `_answer_as_cpu` lets them say "cpu" for as long as recording lasts, and this dispatch
mode, below it, sees every operation that really happens.
"""

import copy
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from unison.errors import BadInput, UnsupportedOperation
from unison.rng.inits import Constant, Init, TruncatedNormal
from unison.shard.deferred.tape import (
    FORMULAS,
    MAKES_BLANK,
    Op,
    Operand,
    describe,
    evaluate,
    has_no_memory,
    operand_of,
    ops_behind,
    serials,
    set_version,
    without_generator,
)
from unison.shard.each_granule import written_by
from unison.shard.flat_group import RECIPE
from unison.torch_internals import DispatchMode, FunctionMode

aten = torch.ops.aten
META, CPU = torch.device("meta"), torch.device("cpu")

# In-place operations that do not read what they write over. Those with an `out=` do not either.
OVERWRITES = {"copy_", "fill_", "normal_", "uniform_", "zero_"}

_local = threading.local()


def active_recorder() -> "Recorder | None":
    """Return the recorder of the `meta_init` that this thread is in, if any."""
    return getattr(_local, "recorder", None)


class Recorder(DispatchMode):
    """Runs operations on meta tensors and puts them on the tape."""

    def __init__(self) -> None:
        super().__init__(self._see)
        self.refusal: UnsupportedOperation | None = None  # the first, kept in case it is swallowed
        self.module_tensors: dict[int, weakref.ref[Tensor]] = {}  # what belongs to a module, by id

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        # In here a meta tensor is a meta tensor.
        with torch._C.DisableTorchFunction(), self.keeping_refusals():
            return self._run(func, args, dict(kwargs))

    @contextmanager
    def keeping_refusals(self) -> Iterator[None]:
        """Remember what was refused: code that builds modules may catch it and do something else.

        torch's parametrizations do, and leave the parameter as it was.
        """
        try:
            yield
        except UnsupportedOperation as error:
            self.refusal = self.refusal or error
            raise

    def remember(self, tensor: Tensor) -> None:
        """Keep track of a tensor that belongs to a module, without keeping it alive.

        `copy.deepcopy` of it copies how it is made.
        """
        self.module_tensors[id(tensor)] = weakref.ref(tensor)
        tensor.__deepcopy__ = Copier(tensor)  # type: ignore[method-assign]

    # --- operations ------------------------------------------------------------------------------

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = _tensors((args, kwargs))
        if func is aten.lift_fresh.default:
            return self.lift(args[0])
        if tensors and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)  # tensors from outside, that have memory
        kwargs = without_generator(func, kwargs)
        for tensor in tensors:
            if tensor.is_meta and operand_of(tensor) is None:
                set_version(tensor, object(), Op(None))
        if func in FORMULAS:
            with self:
                return FORMULAS[func](*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:  # `item`, `equal`: Python gets to know
            return self._run_on_values(func, args, kwargs)
        is_view = torch.Tag.inplace_view in func.tags  # `t_`, `resize_`: changes the view only
        written = [] if is_view else written_by(func, args, kwargs)
        _refuse_memory(func, args, written)
        if "device" in kwargs or (
            not tensors and any(each.name == "device" for each in func._schema.arguments)
        ):
            kwargs["device"] = CPU  # where it will be evaluated
        on_meta = {"device": META} if "device" in kwargs else {}
        twins, named_twins = tree_map(_meta_twin, (args, kwargs))
        try:
            result = func(*twins, **{**named_twins, **on_meta})
        except NotImplementedError:  # no kernel, because the shape of the result depends on values
            return self._run_on_values(func, args, kwargs)
        results = _tensors(result)
        fresh = tuple(_take_in(tensor) for tensor in results)
        made = [tensor for tensor, place in zip(results, fresh, strict=True) if place is not None]
        if func in MAKES_BLANK or not (written or made):
            return result  # no new content: views lie on a storage that is known
        init = describe(func, args, kwargs)
        if init is None and func in (aten.copy_.default, aten.fill_.Tensor):
            init = _constant_of(args[1], args[0].dtype)
        if init is not None:
            (target,) = written or made
            self.record([target], Op(init, (_blank_if_covered(target),)))
            return result
        operands, keywords = tree_map(to_operand, (args, kwargs))
        if func._overloadpacket.__name__ in OVERWRITES:
            operands = (_blank_if_covered(args[0]), *operands[1:])
        elif isinstance(kwargs.get("out"), Tensor):
            keywords["out"] = _blank_if_covered(kwargs["out"])
        self.record(written + made, Op(func, operands, keywords, fresh))
        return result

    def record(self, changed: Sequence[Tensor], op: Op) -> None:
        """Put an operation on the tape, which changed the content of some tensors."""
        for tensor in changed:
            set_version(tensor, _known(tensor).buffer, op)
            if isinstance(tensor, nn.Parameter):
                self.module_tensors[id(tensor)] = weakref.ref(tensor)

    # --- values ----------------------------------------------------------------------------------

    def lift(self, value: Tensor) -> Tensor:
        """Return a tensor without memory that stands for a copy of `value`."""
        if value.is_meta:
            return value
        lifted = _meta_twin(value)
        op = Op(aten.clone.default, (value.detach().clone(),), {}, (_take_in(lifted),))
        self.record([lifted], op)
        return lifted

    def values(self, tensor: Tensor, reader: object) -> Tensor:
        """Return the values of a tensor on the tape, on the CPU.

        Raises:
            UnsupportedOperation: They depend on random draws, which have no values yet.
        """
        operand = _known(tensor)
        drawn = next((op for op in ops_behind(operand) if op.draws), None)
        if drawn is not None:
            call = drawn.call
            what = getattr(call, "__qualname__", repr(call)) if drawn.is_registered else call
            raise UnsupportedOperation(
                f"{reader} needs the values of a tensor of shape {list(tensor.shape)} while the "
                f"module is being built, but they depend on a random draw ({what}), which is "
                "made later by unison.materialize. Make the decision from shapes or settings; or "
                "put the code into a function fn(tensor, ...) that fills its first argument and "
                "decorate it with unison.register_init"
            )
        with _disable_current_modes():
            return evaluate(operand, {})

    def _run_on_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def value_of(leaf: Any) -> Any:
            has_none = isinstance(leaf, Tensor) and leaf.is_meta
            return self.values(leaf, func) if has_none else leaf

        args, kwargs = tree_map(value_of, (args, kwargs))
        result = func(*args, **kwargs)
        return tree_map(lambda leaf: self.lift(leaf) if isinstance(leaf, Tensor) else leaf, result)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _known(tensor: Tensor) -> Operand:
    operand = operand_of(tensor)
    assert operand is not None, "every tensor that reaches the tape has been taken in"
    return operand


def _take_in(tensor: Tensor) -> Operand | None:
    """Give a tensor on a new storage a first version; returns where it lies, or None for a view."""
    if operand_of(tensor) is not None:
        return None
    set_version(tensor, object(), None)
    return operand_of(tensor)


def to_operand(leaf: Any) -> Any:
    """Return what stands for an argument on the tape."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not leaf.is_meta:
        return leaf.detach().clone()  # as it is now: it may be changed later
    return _known(leaf)


def _blank_if_covered(target: Tensor) -> Operand:
    """The operand of something that is written and not read: what it covers need not be made."""
    operand = _known(target)
    if operand.covers(target.untyped_storage().nbytes()):
        return replace(operand, op=None)
    return operand


def _constant_of(source: Tensor, dtype: torch.dtype) -> Init | None:
    """The constant that all of `source` is known to be, as `weight[0] = 0.0` makes one."""
    operand = _known(source) if source.is_meta else None
    op = None if operand is None else operand.op
    if operand is None or op is None or not isinstance(op.call, Constant):
        return None
    filled = op.args[0]
    is_all = filled.is_contiguous and filled.offset == 0 and filled.end >= operand.end
    return op.call if is_all and filled.dtype == source.dtype == dtype else None


def _refuse_memory(func: Any, args: tuple[Any, ...], written: list[Tensor]) -> None:
    """Refuse what ties values that are not there yet to memory that is."""
    for leaf in args:
        if isinstance(leaf, torch.UntypedStorage) and leaf.device != META:
            raise UnsupportedOperation(
                f"{func} puts a tensor onto memory read from somewhere, as torch.load does; load "
                "outside unison.meta_init() and copy_() the values inside"
            )
    for tensor in written:
        if not tensor.is_meta:
            raise UnsupportedOperation(
                f"{func} writes values that will only be there after unison.materialize into a "
                f"tensor of shape {list(tensor.shape)} that was made outside unison.meta_init(); "
                "make that tensor inside too"
            )


def _meta_twin(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.is_meta:
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)


# ------------------------------------------------------------------------------------------------
# What tensors without memory answer while a module is built: they are on the CPU, like any other.
#
# See [Note: pretence]. Requests for values that do not depend on random draws are served by
# evaluating the tape.


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to` without the device: there is only one here."""
    other = kwargs.pop("other", None)
    kwargs.pop("device", None)
    names = ["dtype", "non_blocking", "copy"]
    if args and isinstance(args[0], Tensor):
        other, args, names = args[0], args[1:], names[1:]
    elif args and not isinstance(args[0], torch.dtype):  # a device, or None for one
        args = args[1:]
    kwargs.update(zip(names, args, strict=False))
    dtype = kwargs.pop("dtype", None) or (tensor if other is None else other).dtype
    return tensor.to(dtype=dtype, **kwargs)


def _new_tensor(tensor: Tensor, data: Any, **kwargs: Any) -> Tensor:
    kwargs.pop("device", None)
    return torch.tensor(data, **{"dtype": tensor.dtype, **kwargs})


def _as_tensor(index: Any) -> Any:
    """A list of numbers in an index as a tensor, as torch makes one itself, on the right device."""
    if isinstance(index, tuple):
        return tuple(_as_tensor(part) for part in index)
    is_array = hasattr(index, "__array__") and not isinstance(index, Tensor)
    is_numbers = isinstance(index, list | range) and all(
        isinstance(leaf, int | Tensor) for leaf in tree_leaves(list(index))
    )
    return torch.tensor(index) if is_array or is_numbers else index


def _set(tensor: Tensor, index: Any, value: Any) -> None:
    tensor[_as_tensor(index)] = value


ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.device.__get__: lambda tensor: CPU,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda tensor: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda tensor: True,  # type: ignore[attr-defined]
    Tensor.get_device: lambda tensor: -1,
    Tensor.__repr__: lambda tensor, **_: object.__repr__(tensor),
    Tensor.__getitem__: lambda tensor, index: tensor[_as_tensor(index)],
    Tensor.__setitem__: _set,
    Tensor.to: _to,
    Tensor.cpu: lambda tensor, *_, **__: tensor,
    Tensor.cuda: lambda tensor, *_, **__: tensor,
    Tensor.new_tensor: _new_tensor,
}
READS_VALUES = {Tensor.tolist, Tensor.numpy, Tensor.__array__}

# Functions that make a tensor of given values; on the meta device they would forget them.
MAKES_FROM_VALUES = {torch.tensor, torch.as_tensor, torch.asarray}


def _answer_as_cpu(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Answer for tensors without memory, or let torch do so."""
    if not (func in ANSWERS or func in READS_VALUES or func in MAKES_FROM_VALUES):
        return func(*args, **kwargs)
    # Without torch functions, so that a `torch.device` context does not interfere either.
    with torch._C.DisableTorchFunction(), recorder.keeping_refusals():
        if func in MAKES_FROM_VALUES:
            return func(*args, **{k: v for k, v in kwargs.items() if k != "device"})
        if not args[0].is_meta:
            return func(*args, **kwargs)
        if func in READS_VALUES:
            values = recorder.values(args[0], f"Tensor.{func.__name__}")
            return func(values, *args[1:], **kwargs)
        return ANSWERS[func](*args, **kwargs)


# ------------------------------------------------------------------------------------------------
# A recipe: how to make the values of one tensor. It travels on the tensor itself.


ORIGINALS = "_unison_originals"  # on a module: its tensors as they were built


@dataclass(frozen=True)
class InitRecipe:
    """How to make the values of a tensor.

    Attributes:
        operand: What to evaluate.
        num_writes: torch's count of writes to the tensor when its recording ended.
    """

    operand: Operand
    num_writes: int

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # Of a tensor that has values: the copy's are the same, and not for `materialize` to change.
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        # Who saves a module saves its values; a file must not need unison to be read.
        return OrderedDict, ()


class BuiltTensors(dict[str, Tensor]):
    """The parameters and buffers of a module as they were built, by attribute.

    PyTorch's FSDP2 puts other objects in the place of parameters, and a cast in that of buffers,
    and so they lose what hangs on them.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "BuiltTensors":
        return BuiltTensors({name: copy.deepcopy(tensor, memo) for name, tensor in self.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()


class Copier:
    """The `__deepcopy__` of a tensor without memory: the copy gets a recipe too.

    A copy is drawn under its own name, so that blocks made by copying one block start differently,
    as they would had each been constructed.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __call__(self, memo: dict[Any, Any]) -> Tensor:
        """Return the copy, as `copy.deepcopy` asks for it."""
        original = self._tensor
        if id(original) not in memo:
            memo[id(original)] = _copied(original, memo)
        return memo[id(original)]

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a module built under unison.meta_init() has no values to save yet; call "
            "unison.materialize(module, seed=...) first"
        )


def recipe_of(tensor: Tensor) -> InitRecipe | None:
    """Return how to make a tensor's values, if it was built under `meta_init`."""
    label = getattr(tensor, RECIPE, None)
    if not isinstance(label, InitRecipe):
        label = None
    operand = operand_of(tensor) if has_no_memory(tensor) else None
    if operand is None:  # it has memory, or was cast since and lies on another storage
        return label
    return InitRecipe(operand, tensor._version if label is None else label.num_writes)


def label(tensor: Tensor) -> None:
    """Write a tensor's recipe on it, so that it survives sharding and copying."""
    setattr(tensor, RECIPE, InitRecipe(_known(tensor), tensor._version))
    tensor.__deepcopy__ = Copier(tensor)  # type: ignore[method-assign]


def foreign_attributes(tensor: Tensor) -> dict[str, Any]:
    """What others have set on a tensor."""
    ours = (RECIPE, "__deepcopy__")
    return {name: value for name, value in vars(tensor).items() if name not in ours}


def _copied(original: Tensor, memo: dict[Any, Any]) -> Tensor:
    twin = torch.empty_strided(
        original.shape, original.stride(), dtype=original.dtype, device="meta"
    )
    recipe = recipe_of(original)
    if recipe is not None:
        # Operations of the copy's own, and so draws; what tensors have in common, `memo` keeps so.
        # One after the other: a tape may be longer than Python's stack is deep.
        for op in ops_behind(recipe.operand):
            if id(op) not in memo:
                memo.update((id(tensor), tensor) for tensor in op.leaves(Tensor))
                copy.deepcopy(op, memo).serial = next(serials)
        operand = copy.deepcopy(recipe.operand, memo)
        buffer, op = operand.buffer, operand.op
        if operand != Operand.of(twin):
            buffer = object()
            fresh = (Operand.of(twin, buffer),)
            op = Op(aten._to_copy.default, (operand,), {"dtype": twin.dtype}, fresh)
        set_version(twin, buffer, op)
    if isinstance(original, nn.Parameter):  # torch's own copies of these have no attributes either
        twin = torch.Tensor._make_subclass(type(original), twin, original.requires_grad)
    else:
        vars(twin).update(copy.deepcopy(foreign_attributes(original), memo))
    recorder = active_recorder()
    if recorder is not None:
        recorder.remember(twin)
    elif recipe is not None:
        label(twin)
    return twin


# ---- the context ---------------------------------------------------------------------------------

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

    >>> import unison
    >>> with meta_init():
    ...     layer = nn.Linear(1000, 1000)
    >>> layer.weight.is_meta
    True
    >>> unison.materialize(layer, seed=0).weight.std() < 0.02
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
            vars(module).setdefault(ORIGINALS, BuiltTensors())[name] = tensor

    with ExitStack() as stack:
        for handle in (
            register_module_parameter_registration_hook(on_registration),
            register_module_buffer_registration_hook(on_registration),
        ):
            stack.callback(handle.remove)
        # The private function is the one place through which all callers of `trunc_normal_` go,
        # also those that imported it by name before.
        original = nn.init._no_grad_trunc_normal_
        stack.callback(setattr, nn.init, "_no_grad_trunc_normal_", original)
        nn.init._no_grad_trunc_normal_ = functools.partial(_truncated_normal, original)
        stack.callback(setattr, _local, "recorder", None)
        _local.recorder = recorder
        stack.enter_context(recorder)
        stack.enter_context(FunctionMode(functools.partial(_answer_as_cpu, recorder)))
        yield
    if recorder.refusal is not None:
        raise recorder.refusal
    # A tensor with a weak reference to it cannot be given memory, and whoever holds the recorder
    # still, torch's stack of modes or a traceback, would hold these.
    references = list(recorder.module_tensors.values())
    recorder.module_tensors.clear()
    for reference in references:
        tensor = reference()
        if tensor is not None and tensor.is_meta and operand_of(tensor) is not None:
            label(tensor)


def _truncated_normal(
    original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Record `nn.init.trunc_normal_` as one draw: torch's own redraws until all values fit."""
    recorder = active_recorder()
    if recorder is None or not has_no_memory(tensor):
        return original(tensor, *args, **kwargs)
    without_generator("nn.init.trunc_normal_", kwargs)
    mean, std, a, b = args
    with torch._C.DisableTorchFunction():
        init = TruncatedNormal(mean=mean, std=std, low=a, high=b)
        recorder.record([tensor], Op(init, (_blank_if_covered(tensor),)))
    return tensor


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

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        recorder = active_recorder()
        if recorder is None or not (
            args and isinstance(args[0], Tensor) and has_no_memory(args[0])
        ):
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            recorder.record([args[0]], Op(function, *tree_map(to_operand, (args, kwargs))))
        return args[0]

    setattr(wrapper, _IS_REGISTERED, True)
    return wrapper  # type: ignore[return-value]
