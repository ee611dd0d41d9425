"""Passes that statistics are to be made of: what went into the module, and gradients at its output.

[Note: a pass of its own] Statistics are not taken from the user's own graph. There, every operation
would have to be watched while DDP, FSDP2 or units expect gradients of it. Instead the inputs of the
pass and the gradients of the drawn labels with respect to the module's *outputs* are kept, and
`kfac.step()` runs the module once more, under the capture, when the user's pass is over: training
computes the same bits with statistics as without, and no two graphs are in memory at a time.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from unison.capture import RngAutocastState, batch_size_of
from unison.capture.torch_compile import backend_of_caller
from unison.dynamo import DynamoBackend
from unison.errors import UnsupportedOperation
from unison.kfac.owners.base import Owner
from unison.kfac.owners.batches import (
    Rows,
    draws_of_pass,
    joined,
    requires_grad,
    rows_of,
    tensors_of,
)
from unison.rng import BatchDraws

Gradient = Tensor | Callable[[Tensor], Tensor]
"""The gradient of an output, or what makes it from the output."""


@dataclass(eq=False)
class Part:
    """One granule of a pass, or all of it.

    Attributes:
        granule: Its global number; None for a pass that comes whole.
        outputs: Which of the module's outputs gradients reach, by their place in it, as the user
            sees them; let go once their gradients are known.
        gradients: Columns of gradients of the outputs, by place.
        mask: Which tokens count [batch, tokens], bool; None if all do.
        num_terms: How many labels there are.
        first_id: Global number of the first row.
        is_real: Which rows are samples [batch]; None if all are.
    """

    granule: int | None
    outputs: dict[int, Tensor]
    first_id: int
    is_real: Tensor | None
    gradients: Sequence[Mapping[int, Gradient]] = ()
    mask: Tensor | None = None
    num_terms: int = 0


@dataclass(eq=False)
class Pass:
    """A forward pass of the user's.

    Attributes:
        inputs: What the module was called with: (args, kwargs).
        num_rows: Rows of the batch, or of each granule.
        rows: Which samples they are.
        surroundings: Generators and autocast as they were.
        draws: The random numbers of samples, and how many it had drawn before; None if it draws
            from generators.
        parts: Its granules.
    """

    inputs: tuple[tuple, dict[str, Any]]
    num_rows: int
    rows: Rows
    surroundings: RngAutocastState
    draws: tuple[BatchDraws, list[tuple[int, int]]] | None
    parts: list[Part]


class Watch:
    """Sees forward passes of a module while statistics are wanted; nothing else is touched.

    Args:
        module: What the user calls.
        owner: Who holds its parameters.
        is_wanted: Whether passes are to be kept.

    Attributes:
        current: The last pass; None before the first and after `forget`.
        backend: What compiles the code around the module, as of the last pass; None if nothing.
    """

    def __init__(self, module: nn.Module, owner: Owner, is_wanted: Callable[[], bool]) -> None:
        self._module, self._owner, self._is_wanted = module, owner, is_wanted
        self.current: Pass | None = None
        self.backend: DynamoBackend | None = None
        self.is_paused = False
        self._num_rows = 0  # of all ranks in earlier batches of this step
        self._surroundings: RngAutocastState | None = None
        self._draws: tuple[BatchDraws, list[tuple[int, int]]] | None = None
        self._handles = [
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            module.register_forward_hook(self._after_forward, with_kwargs=True),
        ]

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        _as_python(self._before)(module, args, kwargs)

    def _after_forward(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
    ) -> Any:
        return _as_python(self._after)(module, args, kwargs, output)

    def detach(self) -> None:
        """Leave the module as it was."""
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Watch":
        """Copies of the module share the hooks, which do nothing for them."""
        return self

    def forget(self) -> None:
        """Begin another step."""
        self.current, self._num_rows = None, 0

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        is_ours = module is self._module and not self.is_paused
        is_watched = is_ours and torch.is_grad_enabled() and self._is_wanted()
        self._surroundings = None
        if is_watched:
            refuse_private(self._module)
            self.backend = backend_of_caller()
            self._surroundings = RngAutocastState.here(module)
            draws = draws_of_pass((args, kwargs))
            self._draws = draws and (draws, draws.state())

    def _after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        surroundings, self._surroundings = self._surroundings, None
        if surroundings is None:
            return None
        num_rows = batch_size_of((args, kwargs))
        rows, self._num_rows = rows_of((args, kwargs), num_rows, self._owner.ranks, self._num_rows)
        granules: Sequence[int | None] = rows.granules or (None,)
        parts = [
            Part(granule, {}, first, real)
            for granule, first, real in zip(granules, rows.first_ids, rows.is_real, strict=True)
        ]
        flat, spec = tree_flatten(output)
        for place, value in enumerate(flat):
            if requires_grad(value):
                # Another tensor than the one that units and FSDP2 wait for gradients of.
                seen = [each.view_as(each) for each in tensors_of(value)]
                for part, each in zip(parts, seen, strict=True):
                    part.outputs[place] = each
                flat[place] = joined(seen, value)
        self.current = Pass((args, kwargs), num_rows, rows, surroundings, self._draws, parts)
        return tree_unflatten(flat, spec)


def _as_python(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Let a hook run as it is where the module around it is compiled, which goes on below it."""
    if not torch.compiler.is_compiling():
        return hook
    return torch.compiler.disable(hook, reason="KFAC keeps what goes into the module")


def asker(kfac: Any) -> Callable[[], bool]:
    """Ask for `wants_statistics` without keeping the object: its module has hooks that ask."""
    reference = weakref.ref(kfac)

    def is_wanted() -> bool:
        found = reference()
        return found is not None and found.wants_statistics

    return is_wanted


def refuse_private(module: nn.Module) -> None:
    """Refuse curvature of batches that are trained on privately.

    Raises:
        UnsupportedOperation: If a privacy engine is attached to the module.
    """
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    for hook in hooks:
        owner = getattr(hook, "__self__", None) or getattr(hook, "func", hook)
        if type(owner).__module__.startswith("unison.privacy") or (
            getattr(owner, "__module__", "") or ""
        ).startswith("unison.privacy"):
            raise UnsupportedOperation(
                "the module is trained privately, and curvature of the private batch without noise "
                "of its own would leak it: a preconditioned step is then no longer private. Take "
                "curvature of public data, or train without KFAC"
            )
