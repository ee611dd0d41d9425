"""Where the user's loop meets torch's own helpers: copies of the module, and `GradScaler`.

[Note: copies are plain] EMA, `copy.deepcopy`, `torch.save(module)` and pickling take a module with
its hooks. Ours lead to the engine, and so to keys and the ledger: a copy must not have them, or it
would train into the original's gradients. Parameters and optimizers leave their hooks behind
themselves; modules do not, so ours turn into a function that does nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

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
