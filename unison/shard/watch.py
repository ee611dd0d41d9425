"""Watching a pass over granules: whose random numbers it draws, and that it is what it must be.

The same bits on any number of ranks need a forward pass that depends on nothing but parameters and
the granule. What a model does beside that is made right (draws in rng/draw_mode.py, what it is
given in each_granule.py, what it leaves in module_state.py) or refused. Two looks make sure of it:
in every pass torch's own generators must not move, and in some passes every operation is looked
at.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from unison.errors import UnsupportedOperation
from unison.rng.draw_mode import current_draws, following, nothing_else_drawn
from unison.rng.draws import is_draw, is_seeding
from unison.shard.granules import draws_of, num_granules_of, plan_of
from unison.shard.guard.records import caller, lines_of
from unison.shard.module_state import begin_pass

FIRST_PASSES = 2  # of a loader, in which every operation is looked at
LATER_PASSES = 64  # one of so many, after that


@contextmanager
def granular_pass(
    name: str, module: nn.Module, inputs: Any, *, looks_at_writes: bool
) -> Iterator[None]:
    """Around a module's forward pass: the outermost one over a batch in granules is watched.

    Args:
        name: The module's name, for messages.
        module: The module.
        inputs: What it is called with.
        looks_at_writes: Whether nobody else (the capture of private training) writes meanwhile.

    Raises:
        UnsupportedOperation: If it draws, or writes to tensors, in a way that depends on ranks.
    """
    global _looking
    num_granules = num_granules_of(inputs)
    is_recompute = torch._C._current_graph_task_id() != -1
    plan = plan_of(inputs)
    draws = None
    if num_granules and not is_recompute:
        draws = draws_of(plan, num_granules)
    if draws is None or draws is current_draws():
        yield
        return
    if plan is not None:
        begin_pass(module, plan)
    with following(draws), nothing_else_drawn(name):
        if plan is None or not _is_looked_at(plan.step):
            yield
            return
        _refuse_sync_batch_norm(name, module)
        others = _other_generators()
        before, _looking = _looking, Look(name) if looks_at_writes else None
        try:
            with _looking or Look(name):
                yield
        finally:
            _looking = before
        if _other_generators() != others:
            raise UnsupportedOperation(
                f"{name} draws from Python's random or from numpy, whose numbers would be others "
                "at another number of ranks; draw with torch.rand and the like"
            )


def _refuse_sync_batch_norm(name: str, module: nn.Module) -> None:
    """Refuse a layer that talks to other ranks once per granule: they have different numbers."""
    for path, each in module.named_modules():
        if isinstance(each, nn.SyncBatchNorm) and each.training:
            raise UnsupportedOperation(
                f"{name}: {path} is a SyncBatchNorm, whose ranks would wait for one another once "
                "per granule; use BatchNorm, whose running statistics are means over all granules"
            )


def _other_generators() -> tuple[Any, ...]:
    """The states of Python's and numpy's generators."""
    kind, words, *rest = np.random.get_state()  # noqa: NPY002 - models that draw so
    return random.getstate(), kind, words.tobytes(), *rest  # type: ignore[union-attr]


def _is_looked_at(step: int) -> bool:
    """Whether the pass is one of those whose operations are looked at; the same on all ranks."""
    return step < FIRST_PASSES or (step * 0x9E3779B1 & 0xFFFFFFFF) % LATER_PASSES == 0


class Look(TorchDispatchMode):
    """Looks at every operation of a pass for draws that nobody counts and writes that all see.

    Args:
        name: The module's name, for messages.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._own: set[int] | None = None  # memory that the running granule may write to

    @contextmanager
    def granule(self, *own: Any) -> Iterator[None]:
        """Let a block be a granule's: it may write to what it makes and to these values."""
        before = self._own
        self._own = {_memory(value) for value in tree_iter(own) if isinstance(value, Tensor)}
        try:
            yield
        finally:
            self._own = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Look at an operation and run it."""
        kwargs = kwargs or {}
        if current_draws() is None:  # a module is tried out, and this is nobody's batch
            return func(*args, **kwargs)
        if not is_seeding() and is_draw(func, args, kwargs):
            raise UnsupportedOperation(
                f"{self._name}: {_name_of(func)} draws random numbers in a way that cannot be "
                "given to samples, so that they would be others at another number of ranks; draw "
                "with torch.rand, torch.bernoulli, F.dropout and the like"
            )
        if self._own is not None and func._schema.is_mutable:
            self._check_writes(func, args, kwargs)
        result = func(*args, **kwargs)
        if self._own is not None:
            self._own.update(
                _memory(value) for value in tree_iter(result) if isinstance(value, Tensor)
            )
        return result

    def _check_writes(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        assert self._own is not None
        given = zip(func._schema.arguments, args, strict=False)
        written = [value for argument, value in given if argument.is_write]
        written += [
            kwargs.get(each.name) for each in func._schema.arguments[len(args) :] if each.is_write
        ]
        for value in tree_iter(written):
            if isinstance(value, Tensor) and value.numel() and _memory(value) not in self._own:
                line = lines_of(caller(sys._getframe(1))[1])[0]
                raise UnsupportedOperation(
                    f"{self._name}: {_name_of(func)} writes to a tensor of shape "
                    f"{list(value.shape)} that was there before, at {line}. All granules share it, "
                    "so that its value would depend on how many of them a rank has; return the new "
                    "value from the forward pass and set it outside"
                )


_looking: Look | None = None


def look_at_granule(*own: Any) -> AbstractContextManager[None]:
    """Let a block be a granule's for whoever looks."""
    return nullcontext() if _looking is None else _looking.granule(*own)


def _name_of(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def _memory(value: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return value.untyped_storage().data_ptr()
