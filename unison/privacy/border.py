"""Where the user's code meets torch's own helpers: copies, `GradScaler`, autograd in forward.

[Note: copies are plain] EMA, `copy.deepcopy`, `torch.save(module)` and pickling take a module with
its hooks. Ours lead to the engine, and so to keys and the ledger: a copy must not have them, or it
would train into the original's gradients. Parameters and optimizers leave their hooks behind
themselves; modules do not, so ours turn into a function that does nothing.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from unison.capture.capture import ANCHOR
from unison.capture.tracked import Tracked
from unison.errors import UnsupportedOperation


class ModuleHook:
    """A hook on a module that stays behind when the module is copied or pickled.

    Args:
        call: What the hook does.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        """Run the hook."""
        return self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nullcontext().__exit__  # takes anything and returns None

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


# --- autograd in forward --------------------------------------------------------------------------


class DerivativesRefused(TorchFunctionMode):
    """Refuses what differentiates inside of a module's forward, while it is learned of.

    A derivative of the module's own layers runs backward through the capture, which would take it
    for the loss's; and a second derivative leaves no records at all.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Run anything but a backward pass."""
        if func is torch.autograd.grad or func is Tensor.backward:
            name = "torch.autograd.grad" if func is torch.autograd.grad else "backward"
            raise UnsupportedOperation(
                f"the module calls {name} in its forward pass (as physics-informed losses do): the "
                "derivative depends on parameters in a way that leaves no per-sample gradient. "
                "Write the derivative out as operations of the forward pass"
            )
        return func(*args, **(kwargs or {}))


def leaves_of(losses: Tensor) -> list[Tensor]:
    """Return the tensors that a backward pass of losses would leave gradients at."""
    found: list[Tensor] = []
    waiting, seen = [losses.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of an accumulator
        is_own = type(variable) is Tracked or hasattr(variable, ANCHOR)
        if variable is not None and not is_own:
            found.append(variable)
        waiting += [each for each, _ in node.next_functions]
    return found


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
