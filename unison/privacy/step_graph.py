"""The end of a step as a CUDA graph: noise, division and the optimizer, launched as one.

[Note: what may change] A graph repeats its launches, with the numbers and the addresses that they
had. The recipes of the noise, which hold the key of a step, lie at a fixed place and are filled
before every replay. All else is compared before it, and the graph is recorded again where it is
another: hyperparameters that are Python numbers, the optimizer's state (a checkpoint was loaded),
the divisor. A learning rate that is a tensor may change without.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from unison.errors import UnsupportedOperation
from unison.kernels.multi_tensor import Tables, tables_kept
from unison.parallel import ShardedParam
from unison.privacy.noise import Shares, erase, release_by


@dataclass(frozen=True, eq=False)
class _Recording:
    """A graph, and what it was recorded with.

    Attributes:
        graph: The graph.
        tables: Memory that it reads, filled.
        shares: What the sums are made of, at fixed places.
        recipes: Where the noise's recipes are put; None without noise.
        gradients: What it writes, in the order of the shares.
        numbers: See `_numbers_of`; and the divisor.
        tensors: See `_tensors_of`.
    """

    graph: torch.cuda.CUDAGraph
    tables: Tables
    shares: Shares
    recipes: Tensor | None
    gradients: Sequence[Tensor]
    numbers: Sequence[Any]
    tensors: Sequence[Tensor]


class StepGraph:
    """Noise, division and `optimizer.step()`, recorded when they come for the second time.

    The first time they run as they are: most optimizers make their state in their first step, and a
    graph that made it would make it anew in every step.

    Args:
        optimizer: Its `step` is recorded.
        owned: The parameters, whole, on one CUDA device.

    Attributes:
        has_begun: Whether a step was taken without the graph.
    """

    def __init__(self, optimizer: Optimizer, owned: Sequence[ShardedParam]) -> None:
        _refuse_unfit(optimizer)
        self._optimizer, self._owned = optimizer, owned
        self._recordings: dict[int, _Recording] = {}
        self.has_begun = False

    def replay(
        self,
        source: int,
        shares: Callable[[], Shares],
        *,
        recipes: Tensor | None,
        divisor: float,
    ) -> Iterator[tuple[ShardedParam, Tensor]]:
        """Take the step, and return the gradients that it was taken with.

        Args:
            source: A number for what the sums are made of.
            shares: What they are made of, at places that do not change while the number is the
                same; asked for where a graph is recorded.
            recipes: See `recipes_for`.
            divisor: See `release_by`.
        """
        numbers = [*_numbers_of(self._optimizer), divisor, recipes is None]
        tensors = _tensors_of(self._optimizer)
        found = self._recordings.get(source)
        if found is None or not _is_of(found, numbers, tensors):
            self._recordings.pop(source, None)  # its memory, first
            found = self._recordings[source] = self._record(shares(), recipes, divisor, numbers)
        if recipes is None:
            found.graph.replay()
        else:
            assert found.recipes is not None
            pinned = recipes.pin_memory()
            recipes.zero_()
            found.recipes.copy_(pinned, non_blocking=True)
            found.graph.replay()
            erase(pinned, found.recipes)  # in which the graph has left zeros
        return zip(self._owned, found.gradients, strict=True)

    def _record(
        self, shares: Shares, recipes: Tensor | None, divisor: float, numbers: Sequence[Any]
    ) -> _Recording:
        device = shares.values[0].device
        place = None if recipes is None else torch.zeros_like(recipes, device=device)
        release_by(shares, place, divisor)  # compiles and looks up what a recording cannot
        graph, tables = torch.cuda.CUDAGraph(), Tables(device)
        with tables_kept(tables), torch.cuda.graph(graph):
            gradients = release_by(shares, place, divisor)
            for owned, gradient in zip(self._owned, gradients, strict=True):
                owned.parameter.grad = owned.as_gradient(gradient)
            self._optimizer.step()
        tables.fill()
        tensors = _tensors_of(self._optimizer)
        return _Recording(graph, tables, shares, place, gradients, numbers, tensors)


def is_recording() -> bool:
    """Whether work is being recorded, so that what hooks see does not happen."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _is_of(recording: _Recording, numbers: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    """Whether a recording would be made of these."""
    return (
        recording.numbers == numbers
        and len(recording.tensors) == len(tensors)
        and all(a is b for a, b in zip(recording.tensors, tensors, strict=True))
    )


def _numbers_of(optimizer: Optimizer) -> list[Any]:
    """What a recorded step would go on with, whatever is set later."""
    return [
        (key, value)
        for group in optimizer.param_groups
        for key, value in group.items()
        if key != "params" and not isinstance(value, Tensor)
    ]


def _tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """What a recorded step reads and writes: parameters, state, rates that are tensors."""
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        found += [value for value in group.values() if isinstance(value, Tensor)]
        for parameter in group["params"]:
            found.append(parameter)
            state = optimizer.state.get(parameter)
            if state:
                found += [value for value in state.values() if isinstance(value, Tensor)]
    return found


def _refuse_unfit(optimizer: Optimizer) -> None:
    """Refuse what a graph cannot repeat, before a step is silently left out.

    Raises:
        UnsupportedOperation: Naming the optimizer, and the remedy.
    """
    name = type(optimizer).__name__
    if not all(group.get("capturable", True) for group in optimizer.param_groups):
        raise UnsupportedOperation(
            f"{name} counts its steps on the host, which a CUDA graph cannot repeat: build it with "
            "capturable=True, or capture_graph(..., with_optimizer=False)"
        )
    hooks = chain(
        optimizer._optimizer_step_pre_hooks.values(),
        optimizer._optimizer_step_post_hooks.values(),
        _global_optimizer_pre_hooks.values(),
        _global_optimizer_post_hooks.values(),
    )
    # Our own know of recordings, or have nothing to say of private training.
    if not all(each.__module__.startswith("unison.") for each in hooks):
        raise UnsupportedOperation(
            f"{name} has step hooks, which a CUDA graph would call once and never again: remove "
            "them, or capture_graph(..., with_optimizer=False)"
        )
