"""What crosses the border of a private module: arguments, outputs, buffers, gradients, copies.

[Note: copies are plain] EMA, `copy.deepcopy`, `torch.save(module)` and pickling take a module with
its hooks. Ours lead to the engine, and so to keys and the ledger: a copy must not have them, or it
would train into the original's gradients. Parameters and optimizers leave their hooks behind
themselves; modules do not, so ours turn into a function that does nothing.

[Note: left behind] A module may keep what it computed: as an attribute, in a list that a hook
appends to, in a closure. Detached, it is a constant to the user's loss, though rows may meet in it.
So in the passes whose loss is checked again (1, 2, 4, 8, …) a function mode runs beside forward and
notes what is made of *values* of the batch. What is made of parameters, sizes and constants alone
(positions, causal masks) is none of it, and neither are buffers, which have a check of their own.

It is no dispatch mode: beside one, torch takes other kernels, which give other bits. What
torch.compile, torch.jit and numpy make in forward is not seen.
"""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

from unison.capture.capture import ANCHOR
from unison.capture.tracked import Tracked
from unison.errors import BadInput, UnsupportedOperation
from unison.privacy.loss_tape import (
    OURS,
    Handling,
    LossRecorder,
    handling_of,
    leaves_in,
    line_of,
    memory_of,
)
from unison.privacy.sampling import unpacked
from unison.torch_internals import graph_leaves, is_dtensor, take_away, tell_no_more, tell_of_apply

# --- arguments and outputs ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments of a forward pass over some samples.

    Attributes:
        leaves: All that the arguments are made of; of what has several granules, the first.
        spec: How.
        places: Which leaves hold the samples.
        dim: Their dimension of the samples.
        rows: How many rows of it belong to one sample.
        device: Where the samples lie.
        kind: The structure, shapes and dtypes, without the number of samples; and which numbers are
            0, and what other arguments say.
    """

    leaves: Sequence[Any]
    spec: TreeSpec
    places: Sequence[int]
    dim: int
    rows: int
    device: torch.device
    kind: tuple

    @property
    def samples(self) -> tuple[Tensor, ...]:
        """The tensors that hold the samples, samples first; gradients do not reach the user's.

        What is given twice (ids that are labels, too) is one tensor: compilers ask for that.
        """

        def first(leaf: Tensor) -> Tensor:
            rows = leaf.detach().movedim(self.dim, 0)
            return rows if self.rows == 1 else rows.unflatten(0, (-1, self.rows))

        return tuple(_each_once(first, [self.leaves[place] for place in self.places]))

    def run(self, module: Callable[..., Any], samples: Sequence[Tensor]) -> Any:
        """Call a module with the same arguments but other samples."""

        def back(tensor: Tensor) -> Tensor:
            rows = tensor if self.rows == 1 else tensor.flatten(0, 1)
            return rows.movedim(0, self.dim)

        leaves = list(self.leaves)
        for place, tensor in zip(self.places, _each_once(back, samples), strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return module(*args, **kwargs)


def inputs_of(
    args: tuple, kwargs: dict[str, Any], num_samples: int, *, dim: int, rows: int
) -> Inputs:
    """Find the tensors that hold one entry per row of the batch.

    Raises:
        BadInput: If there is none: the module was given something else than the batch.
        UnsupportedOperation: Naming an argument that takes gradients. What the batch's gradient
            reaches before the module is neither clipped nor noised: the `.grad` of a leaf would be
            that of single records, and a layer before the module would train on it.
    """
    leaves, spec = tree_flatten((args, kwargs))
    leaves = [unpacked(leaf)[0] for leaf in leaves]
    if not any(holds_samples(leaf, num_samples * rows, dim) for leaf in leaves):
        rows = 1  # the module takes all rows of a record at once
    num_rows = num_samples * rows
    places = [place for place, leaf in enumerate(leaves) if holds_samples(leaf, num_rows, dim)]
    if not places:
        shapes = [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        raise BadInput(
            f"the loader handed out {num_samples} samples, and the module was given tensors of "
            f"shapes {shapes}, none of which has {num_rows} rows in dimension {dim}. Give it the "
            "whole batch (max_physical_batch_size= cuts large ones), and make_private("
            "batch_first=False) if samples lie in dimension 1"
        )
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            numbered = tree_unflatten(range(len(leaves)), spec)
            paths = [(f"argument {i}", each) for i, each in enumerate(numbered[0])]
            paths += [(f"argument {name!r}", each) for name, each in numbered[1].items()]
            where = next(name for name, each in paths if place in tree_leaves(each))
            raise UnsupportedOperation(
                f"{where} of the module, of shape {list(leaf.shape)}, takes gradients, which would "
                "leave the step neither clipped nor noised. If it is a batch, give the module "
                "x.detach(); for adversarial rows take torch.autograd.grad(loss, x) between "
                "module.eval() and module.train(); if something trainable made it, put that into "
                "the module that make_private gets"
            )
    kind: list[Any] = [str(spec)]
    for place in places:
        shape = leaves[place].shape
        kind.append((place, shape[:dim] + shape[dim + 1 :], leaves[place].dtype))
    # A switch, or what has no effect as long as it is 0.
    plain = [each for each in leaves if isinstance(each, bool | int | float | str)]
    kind += [each if isinstance(each, bool | str) else each != 0 for each in plain]
    return Inputs(leaves, spec, places, dim, rows, leaves[places[0]].device, tuple(kind))


def _each_once(make: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Map tensors; one that is there twice is mapped once."""
    made: dict[int, Tensor] = {}
    for each in tensors:
        if id(each) not in made:
            made[id(each)] = make(each)
    return [made[id(each)] for each in tensors]


def holds_samples(leaf: Any, num_samples: int, dim: int) -> bool:
    """Whether an argument, or a part of an output, has an entry per sample."""
    return isinstance(leaf, Tensor) and leaf.ndim > dim and leaf.shape[dim] == num_samples


def output_dims(dim: int, rows: int = 1) -> Callable[[Any, int], list[int | None]]:
    """Find out which dimension of each part of a module's output holds the samples.

    A sequence-first network may take [time, samples, features] and return [samples, classes]: what
    changes with the number of samples is known once the module has run with two of them.

    Args:
        dim: Where they lie in the inputs, and in outputs as long as nothing else is known.
        rows: How many rows belong to one sample.

    Returns:
        Takes an output and its number of samples; returns the dimension in each leaf, or None.
    """
    seen: dict[int, list[tuple[int, ...]]] = {}  # by number of samples

    def dims_of(output: Any, num_samples: int) -> list[int | None]:
        leaves = tree_leaves(output)
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else () for leaf in leaves]
        seen.setdefault(num_samples, shapes)
        for other, known in seen.items():
            if other != num_samples and len(known) == len(shapes):
                return [
                    _changed(now, num_samples * rows, then, other * rows)
                    for now, then in zip(shapes, known, strict=True)
                ]
        # One number of samples is all that was seen.
        found = []
        for shape in shapes:
            dims = [each for each, size in enumerate(shape) if size == num_samples * rows]
            found.append(dim if dim in dims else dims[0] if dims else None)
        return found

    return dims_of


def _changed(
    now: tuple[int, ...], num_now: int, then: tuple[int, ...], num_then: int
) -> int | None:
    if len(now) != len(then):
        return None
    dims = [d for d, (a, b) in enumerate(zip(now, then, strict=True)) if a != b]
    is_one = len(dims) == 1 and (now[dims[0]], then[dims[0]]) == (num_now, num_then)
    return dims[0] if is_one else None


def probe_losses(
    output: Any, num_samples: int, dims: Sequence[int | None], rows: int = 1
) -> tuple[Tensor | None, Tensor | None]:
    """Make losses of a module's output to send back, which stand in for one that is not known yet.

    Every element has a weight of its own, so that normalised outputs, which sum to a constant, have
    a gradient too. All terms are positive: in a sum of millions that cancel, rounding would look as
    if samples mixed.

    Args:
        output: What the module returned.
        num_samples: The number of samples.
        dims: Where they lie in each leaf of the output.
        rows: How many rows belong to one sample.

    Returns:
        One number per sample [samples], float64, or None if no part of the output holds them; and
        the sum of the parts that are of the whole batch and take gradients, such as a model's own
        loss, or None if there is none.
    """
    total: Tensor | None = None
    shared: list[Tensor] = []
    for leaf, dim in zip(tree_leaves(output), dims, strict=True):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            continue
        if dim is not None and holds_samples(leaf, num_samples * rows, dim):
            whole = leaf.full_tensor() if is_dtensor(leaf) else leaf
            part = _ProbeLoss.apply(whole.movedim(dim, 0).reshape(num_samples, -1))
            total = part if total is None else total + part  # type: ignore[assignment]
        elif leaf.requires_grad:
            shared.append(leaf.flatten().sum().double())
    return total, torch.stack(shared).sum() if shared else None


class _ProbeLoss(torch.autograd.Function):
    """Σ_i w_i (x_i + 1)² / n of each row, in float64: a last bit of an output is seen in it.

    Row by row, in both directions: logits are the largest tensors of a model, and this is not the
    place to hold several of them in float64.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # [samples, values] -> [samples]
        ctx.save_for_backward(rows)
        weights = _weights(rows)
        found = [(row.double() + 1).square_().mul_(weights).mean() for row in rows]
        return torch.stack(found) if found else rows.new_zeros(0, dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        weights, gradient = _weights(rows) * (2 / max(1, rows.shape[1])), torch.empty_like(rows)
        for row, into, factor in zip(rows, gradient, g, strict=True):
            into.copy_((row.double() + 1).mul_(weights).mul_(factor))
        return gradient


def _weights(rows: Tensor) -> Tensor:
    return 1.5 + torch.arange(rows.shape[1], device=rows.device, dtype=torch.float64).cos()


# --- copies of the module -------------------------------------------------------------------------


def _do_nothing(*_: Any, **__: Any) -> None:
    """What is left of a hook."""


class ModuleHook(partial):
    """A hook on a module that stays behind when the module is copied or pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleHook":
        return ModuleHook(_do_nothing)

    @property
    def __name__(self) -> str:
        if sys._getframe(1).f_globals.get("__name__") == "torch.jit._recursive":
            raise UnsupportedOperation(
                "torch.jit.script compiles a module's hooks, and those of a private module, or of "
                "a copy of one, are no code for it: script the module before make_private or after "
                "engine.detach(), or a new one that has loaded its state_dict()"
            )
        raise AttributeError("__name__")

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the standard library: a saved module can be loaded where there is no unison.
        return getattr, (nullcontext(), "__exit__")


# --- GradScaler -----------------------------------------------------------------------------------

_scaled_task = -1  # number of the last backward pass that began at a scaled loss
_num_watching = 0
_original: dict[type, Callable[..., Any]] = {}  # `scale` of each class while somebody watches


@contextmanager
def scaled_losses_noticed() -> Iterator[None]:
    """Let `refuse_scaled_loss` know of losses that a `GradScaler` makes in this block.

    A scaled gradient looks like any other, and the scaler shows itself to nobody but the loss: so
    its `scale` is wrapped while an engine is attached.
    """
    global _num_watching
    if _num_watching == 0:
        for kind in _with_subclasses(torch.amp.GradScaler):
            if "scale" in vars(kind):
                _original[kind] = kind.scale
                kind.scale = _noticed(kind.scale)
    _num_watching += 1
    try:
        yield
    finally:
        _num_watching -= 1
        if _num_watching == 0:
            for kind, scale in _original.items():
                kind.scale = scale  # type: ignore[attr-defined]
            _original.clear()


def _with_subclasses(kind: type) -> list[Any]:
    return [kind, *(each for sub in kind.__subclasses__() for each in _with_subclasses(sub))]


def _noticed(scale: Callable[..., Any]) -> Callable[..., Any]:
    def noticed(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if self.is_enabled():
            for leaf in tree_leaves(scaled):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(_note_task)
        return scaled

    return noticed


def _note_task(_: Tensor) -> None:
    """A hook of a scaled loss: all of this backward pass is scaled."""
    global _scaled_task
    _scaled_task = torch._C._current_graph_task_id()


def refuse_scaled_loss() -> None:
    """Make sure that the backward pass under way did not begin at a `GradScaler`'s loss.

    Raises:
        UnsupportedOperation: It did. Its norms are those of the scaled gradients, so that all of
            them would be clipped; and whether a scale overflows tells of records.
    """
    if torch._C._current_graph_task_id() == _scaled_task:
        raise UnsupportedOperation(
            "a GradScaler scaled the loss: every norm would be too large by its scale and be "
            "clipped, and the steps that it skips would tell of single records. Train with "
            "torch.autocast(dtype=torch.bfloat16), which needs no scaler, or with "
            "GradScaler(enabled=False)"
        )


# --- autograd and collectives in forward ----------------------------------------------------------

_OF_WRAPPERS = tuple(f"{torch.__path__[0]}/{each}" for each in ("distributed/fsdp", "nn/parallel"))
_OF_WRAPPERS += (f"{torch.__path__[0]}/distributed/tensor", OURS)


def check_in_forward(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a torch function in a module's forward that is learned of, or refuse it.

    A derivative of the module's own layers runs backward through the capture, which would take it
    for the loss's; and a second derivative leaves no records at all. A collective of the module's
    own brings rows in that are replaced on another rank, where nobody looks.
    """
    if handling_of(func)[0] is Handling.COLLECTIVE and dist.get_world_size() > 1:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(torch.__path__[0]):
            if frame.f_code.co_filename.startswith(_OF_WRAPPERS):
                return func(*args, **kwargs)  # gathers parameters, or parts of rows
            frame = frame.f_back
        if not frame.f_code.co_filename.startswith(_OF_WRAPPERS):
            raise UnsupportedOperation(
                f"the module calls {handling_of(func)[1]} in its forward pass "
                f"({line_of(frame)}), which brings rows of other ranks into those of this one. "
                "Leave the collective out: the gradients of all ranks are added up in any case"
            )
    if func is torch.autograd.grad or func is Tensor.backward:
        name = "torch.autograd.grad" if func is torch.autograd.grad else "backward"
        raise UnsupportedOperation(
            f"the module calls {name} in its forward pass (as physics-informed losses do): the "
            "derivative depends on parameters in a way that leaves no per-sample gradient. "
            "Write the derivative out as operations of the forward pass"
        )
    return func(*args, **kwargs)


def leaves_of(losses: Tensor) -> list[Tensor]:
    """Return the tensors that a backward pass of losses would leave gradients at, but for ours."""
    found = graph_leaves([losses])
    return [each for each in found if type(each) is not Tracked and not hasattr(each, ANCHOR)]


def refuse_leaves(leaves: "Sequence[ref[Tensor]]") -> None:
    """Make sure that nobody holds a tensor at which a backward pass leaves a raw gradient.

    Args:
        leaves: What was reached in passes whose graphs are gone. What forward makes for itself is
            gone by now, too: nobody can look at its gradient, nor train it.

    Raises:
        UnsupportedOperation: Naming the shape.
    """
    if any(each() is not None for each in leaves):
        gc.collect()  # of what hangs together in a circle nobody holds anything
    for each in leaves:
        leaf = each()
        if leaf is not None:
            raise UnsupportedOperation(
                f"the module uses a tensor of shape {list(leaf.shape)} that takes gradients and is "
                "none of its parameters, where they would be neither clipped nor noised: make it "
                "an nn.Parameter of the module before make_private, or detach() it"
            )


# --- buffers, which get no noise ------------------------------------------------------


BufferVersions = dict[int, tuple[Tensor, int]]
"""Buffers and their versions, by id; buffers are held, so that no id comes again."""


def buffer_versions(modules: Sequence[tuple[str, nn.Module]]) -> BufferVersions:
    """Return the versions of all buffers of modules."""
    return {
        id(value): (value, 0 if value.is_inference() else value._version)
        for _, module in modules
        for value in module._buffers.values()
        if value is not None
    }


def refuse_written(
    modules: Sequence[tuple[str, nn.Module]],
    before: BufferVersions,
    is_allowed: Callable[[str], bool],
) -> None:
    """Refuse buffers that a pass wrote to, unless it is known that they hold nothing of the data.

    What the forward pass writes there is saved without noise. Whether values depend on the batch is
    found out where the module is checked; here versions are compared, which takes microseconds, so
    that what is written in a later pass for the first time is refused before that pass is released.
    (Writing through `.data` leaves no version; the check compares values, and sees it.)

    Args:
        modules: All modules, by name.
        before: `buffer_versions` when the pass began.
        is_allowed: Whether a buffer of this name may be written.

    Raises:
        UnsupportedOperation: Naming a buffer that was written.
    """
    for path, module in modules:
        for key, value in module._buffers.items():
            if value is None:
                continue
            name = f"{path}.{key}" if path else key
            _, version = before.get(id(value), (value, None))
            now = 0 if value.is_inference() else value._version
            if version != now and not is_allowed(name):
                raise UnsupportedOperation(
                    f"this pass wrote to the buffer {name!r}, which is saved with the model "
                    "and gets no noise; passes that were checked did not. Keep statistics of "
                    "the data out of buffers, or say that it may be published: make_private("
                    f"public_buffers=[{name!r}])"
                )


# --- what forward leaves behind -------------------------------------------------------------------

# They take shapes of what they are given, and no values.
_NEW = {
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    *("randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"),
    "new_tensor",
}
_OF_THE_FIRST = {"type_as", "to", "expand_as", "view_as", "reshape_as"}  # values, that is


class ForwardWatch(TorchFunctionMode):
    """Notes what is made of the values of a batch.

    Args:
        module: What runs.
        given: What it is given of the batch.
        recorder: Where it is noted.
    """

    def __init__(self, module: nn.Module, given: Iterable[Tensor], recorder: LossRecorder) -> None:
        super().__init__()
        self._module, self._recorder = module, recorder
        self._given = {id(each): each for each in given}
        # Buffers are looked at by other means, and the batch itself is known.
        held = (*self._given.values(), *module.parameters(), *module.buffers())
        self._known = {memory_of(each) for each in held}
        self._is_applying = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch all that is done in this block."""
        tell_of_apply(self._applied)
        torch.overrides._push_mode(self)
        try:
            yield
        finally:
            take_away(self)
            tell_no_more(self._applied)
            for each in self._module.buffers():  # one that forward has put in the place of another
                self._recorder.kept.pop(id(each), None)
            self._given.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and note what it makes of the batch."""
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():  # dynamo follows modes, and not what this one does
            handling, name = handling_of(func)
            if name not in _NEW:
                with torch._C.DisableTorchFunctionSubclass():
                    self._note(handling, name, args, kwargs or {}, result)
        return result

    def _is_made(self, value: Any) -> bool:
        return id(value) in self._given or self._recorder.is_kept(value)

    def _note(
        self, handling: Handling, name: str, args: tuple, kwargs: dict[str, Any], result: Any
    ) -> None:
        if handling in (Handling.QUESTION, Handling.SIZE, Handling.BACKWARD):
            return
        given = [each for each in leaves_in((args, kwargs)) if isinstance(each, Tensor)]
        if not any(map(self._is_made, given[: 1 if name in _OF_THE_FIRST else None])):
            return
        is_write = handling is Handling.WRITE
        targets = args[:1] if is_write else kwargs.get("out")
        for each in leaves_in(targets):
            if isinstance(each, Tensor) and memory_of(each) not in self._known:
                self._recorder.keep(each, is_written=True)
        if targets is None:
            # A view of a constant, as broadcast_tensors gives beside others, is one.
            others = [each for each in given if not self._is_made(each)]
            constants = {memory_of(each) for each in others}
            for each in tree_leaves(result):
                if not isinstance(each, Tensor) or id(each) in self._given:
                    continue
                if not constants or memory_of(each) not in constants:
                    self._recorder.keep(each)

    def _applied(self, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Note what a custom `autograd.Function` makes, whoever else is told of it and runs it."""
        is_told = any(mode is self for mode in _get_current_function_mode_stack())
        if self._is_applying or not is_told:
            return NotImplemented
        self._is_applying = True
        try:
            result = run.func.__self__.apply(*args, **kwargs)  # type: ignore[attr-defined]
        finally:
            self._is_applying = False
        with torch._C.DisableTorchFunctionSubclass():
            self._note(Handling.OPERATION, run.__name__, args, kwargs, result)
        return result
