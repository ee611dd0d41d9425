"""Learning where samples lie in the operations of a model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from unison.capture.axes import AxisTable
from unison.capture.capture import Capture
from unison.capture.probe_state import ProbeState
from unison.capture.recompute import checkpointing_quiet
from unison.errors import BadInput, UnsupportedOperation
from unison.ops import Record

Run = Callable[[nn.Module, Any], Tensor]  # (module, batch) -> losses [batch]

MAX_ROUNDS = 10


def batch_size_of(batch: Any) -> int:
    """Samples in a batch: the common size of its tensors' first dimension.

    Raises:
        BadInput: If the tensors do not agree.
    """
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in _tensors(batch)}
    if len(sizes) != 1 or None in sizes:
        raise BadInput(
            "expected a batch of tensors with one sample per row of dimension 0, found sizes "
            f"{sorted(map(str, sizes))}"
        )
    return sizes.pop()  # type: ignore[return-value]


def resized(batch: Any, num_samples: int) -> Any:
    """A batch of another size, of the same samples, repeated if there are too few."""

    def rows(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value[torch.arange(num_samples, device=value.device) % value.shape[0]]

    return tree_map(rows, batch)


def learn_axes(
    module: nn.Module,
    run: Run,
    batch: Any,
    axes: AxisTable | None = None,
    *,
    state: ProbeState | None = None,
) -> AxisTable:
    """Find where samples lie in every operation that touches a parameter; see axes.py.

    The model runs without gradients, twice or a few times, and torch's generators are left as they
    were. Rows are taken to lie sample by sample, as many for each; `learn_rows` makes sure of it.

    Args:
        module: The model.
        run: One loss per sample.
        batch: Samples to learn from.
        axes: A table to fill, rather than a new one.
        state: What each pass begins with, if it is to be the same.

    Raises:
        BadInput: If the batch is empty.
        UnsupportedOperation: If no answer can be found.
    """
    size = batch_size_of(batch)
    if size == 0:
        raise BadInput("expected samples to learn from, found a batch of 0")
    axes = AxisTable() if axes is None else axes
    other = size - 1 if size > 2 else size + 1  # one sample alone is often a case of its own
    for _ in range(MAX_ROUNDS):
        many, fewer = (
            _seen(
                Capture(module, each, axes=axes, on_record=_nothing),
                run,
                resized(batch, each),
                state,
            )
            for each in (size, other)
        )
        if axes.learn(many, fewer, (size, other)) == 0:
            return axes
    raise UnsupportedOperation(
        f"after {MAX_ROUNDS} passes it is still not known where samples lie in this model"
    )


def _seen(capture: Capture, run: Run, batch: Any, state: ProbeState | None) -> list:
    if state is not None:
        state.restore()
    with capture.learning() as seen, generators_kept(batch), checkpointing_quiet():
        run(capture.module, batch)
    return seen


def generators_kept(batch: Any) -> Any:
    """Leave torch's generators as they are found, on the CPU and where the batch is."""
    return torch.random.fork_rng(devices=list(_devices(batch)))


def _devices(batch: Any) -> set[torch.device]:
    return {leaf.device for leaf in _tensors(batch) if leaf.is_cuda}


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _nothing(name: str, record: Record) -> None:
    pass
