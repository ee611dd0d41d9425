"""Learning where samples lie, and making sure that they do not mix."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from unison.capture.again import checkpointing_quiet
from unison.capture.axes import AxisTable
from unison.capture.capture import Capture
from unison.errors import BadInput, UnsupportedOperation
from unison.ops import Dense, Lookup, Product, Record, Streamed

Run = Callable[[nn.Module, Any], Tensor]  # (module, batch) -> losses [batch]

MAX_ROUNDS = 10
LARGEST_CHANGE = 1e-2  # relative: more than kernels for other sizes round differently in bfloat16


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


def learn_axes(module: nn.Module, run: Run, batch: Any, axes: AxisTable | None = None) -> AxisTable:
    """Find where samples lie in every operation that touches a parameter; see axes.py.

    The model runs without gradients, twice or a few times, and torch's generators are left as they
    were. Rows are taken to lie sample by sample, as many for each; `learn_rows` makes sure of it.

    Args:
        module: The model.
        run: One loss per sample.
        batch: Samples to learn from.
        axes: A table to fill, rather than a new one.

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
            _seen(Capture(module, each, axes=axes, on_record=_nothing), run, resized(batch, each))
            for each in (size, other)
        )
        if axes.learn(many, fewer, (size, other)) == 0:
            return axes
    raise UnsupportedOperation(
        f"after {MAX_ROUNDS} passes it is still not known where samples lie in this model"
    )


def check_samples_apart(module: nn.Module, run: Run, batch: Any, axes: AxisTable) -> None:
    """Make sure that a sample's loss depends on its own rows only.

    One sample's loss is sent back at a time; every recorded gradient must be zero on the rows of
    the others. Rows that were permuted (as a mixture of experts routes tokens), flattened token by
    token, or normalised over the batch give wrong norms otherwise, without an error. Then samples
    leave the batch, and the losses of the others must stay: inputs may mix before any parameter.
    That is not asked of a model that draws random numbers, which change with the batch anyway.

    Raises:
        UnsupportedOperation: Naming the parameter.
    """
    size = max(batch_size_of(batch), 3)
    batch = resized(batch, size)
    for sample in {0, size - 1}:
        others = torch.arange(size) != sample

        def check(name: str, record: Record, others: Tensor = others, sample: int = sample) -> None:
            if bool((_gradient(record)[others.to(_gradient(record).device)] != 0).any()):
                raise UnsupportedOperation(
                    f"samples mix before {name!r}: the loss of sample {sample} has a gradient on "
                    "the rows of other samples. Batch norm, routing of tokens to experts, a loss "
                    "over the whole batch and flattening token by token do that; a sample must "
                    "keep its own rows"
                )

        capture = Capture(module, size, axes=axes, on_record=check)
        with capture.installed(is_guarded=True), generators_kept(batch), torch.enable_grad():
            with capture.following(batch):
                losses = run(module, batch)
            if losses.shape != (size,):
                raise BadInput(
                    f"expected one loss per sample, [{size}], found {list(losses.shape)}"
                )
            losses[sample].backward()
    _check_losses_apart(module, run, batch, size)


def _check_losses_apart(module: nn.Module, run: Run, batch: Any, size: int) -> None:
    def losses(num_samples: int, num_drawn: int = 0) -> Tensor:
        with generators_kept(batch), torch.no_grad(), checkpointing_quiet():
            for device in {torch.device("cpu"), *_devices(batch)}:
                torch.rand(num_drawn, device=device)
            return run(module, resized(batch, num_samples)).double()

    all_losses = losses(size)
    if not torch.equal(all_losses, losses(size, num_drawn=1)):
        return  # it draws random numbers
    num_left = (size + 1) // 2
    change = (losses(num_left) - all_losses[:num_left]).abs().max()
    if float(change) > LARGEST_CHANGE * float(all_losses.abs().max()):
        raise UnsupportedOperation(
            f"samples mix: when {size - num_left} of {size} samples leave the batch, the losses of "
            f"the others change by up to {float(change):.2g}. Statistics over the batch do that; a "
            "sample's loss must depend on the sample alone"
        )


def _gradient(record: Record) -> Tensor:
    match record:
        case Product() | Lookup() | Streamed():
            return record.g
        case Dense():
            return record.value
    raise AssertionError(f"no rule for {record!r}")


def _seen(capture: Capture, run: Run, batch: Any) -> list:
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
