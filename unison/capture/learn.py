"""Learning where samples lie in the operations of a model.

Most models move no rows: samples lie where `learn_axes` has found them, in every batch. Others
select, sort or mask rows by values, read values to decide what to do, or lay rows out in another
order than sample by sample. They are found by one pass with a trace, structurally: that rows were
sorted by values is seen even if this batch was in order already. Only their passes are traced.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from unison.capture.axes import (
    KIND,
    NO_AXIS,
    AxisTable,
    Seen,
    axes_of,
    batch_size_of,
    learn_calls,
    learn_common,
)
from unison.capture.capture import Capture, Met
from unison.capture.probes import ProbeState
from unison.capture.recompute import checkpointing_quiet
from unison.capture.row_rules import is_mixed
from unison.errors import BadInput, UnsupportedOperation
from unison.ops.records import NOBODY, index_in_order
from unison.rng.draw_mode import other_generator_states
from unison.torch_internals import FunctionMode, has_values, is_dtensor

Run = Callable[[nn.Module, Any], Tensor]  # (module, batch) -> losses [batch]
Agree = Callable[[bool], bool]  # whether it is so on any rank that runs the model together

MAX_ROUNDS = 50  # one for each operation in the longest chain of parameters alone


def resized(batch: Any, num_samples: int) -> Any:
    """Return a batch of another size, with samples repeated if there are too few."""

    def rows(value: Tensor) -> Tensor:
        return value[torch.arange(num_samples, device=value.device) % value.shape[0]]

    return tree_map_only(Tensor, rows, batch)


def learn_axes(
    module: nn.Module,
    run: Run,
    batch: Any,
    axes: AxisTable | None = None,
    *,
    state: ProbeState | None = None,
    agree: Agree = bool,
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
        agree: Tells whether something is so on any rank; ranks run as many passes.

    Raises:
        BadInput: If the batch is empty.
        UnsupportedOperation: If no answer can be found.
    """
    if batch_size_of(batch) == 0:
        raise BadInput("expected samples to learn from, found a batch of 0")
    axes = AxisTable() if axes is None else axes
    for _ in range(MAX_ROUNDS):
        num_new = learn_calls(axes, *_two_passes(module, run, batch, axes, state))
        if not agree(num_new > 0):
            return axes
    raise UnsupportedOperation(
        f"after {MAX_ROUNDS} passes it is still not known where samples lie in this model"
    )


def _two_passes(
    module: nn.Module, run: Run, batch: Any, axes: AxisTable, state: ProbeState | None = None
) -> tuple[list[Seen], list[Seen], tuple[int, int]]:
    """Run with two numbers of samples.

    Returns:
        The operations that touch parameters in either pass, and the numbers.
    """
    size = batch_size_of(batch)
    other = size - 1 if size > 2 else size + 1  # one sample alone is often a case of its own
    calls = []
    for each in (size, other):
        some = resized(batch, each)
        if state is not None:
            state.restore()
        capture = Capture(module, each, axes=axes, on_record=lambda *_: None)
        with capture.learning() as seen, generators_kept(batch), checkpointing_quiet():
            run(module, some)
        calls.append(seen)
    return calls[0], calls[1], (size, other)


def generators_kept(batch: Any) -> Any:
    """Leave torch's generators as they are found, on the CPU and where the batch is."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return torch.random.fork_rng(devices={leaf.device for leaf in tensors if leaf.is_cuda})


# --- whether rows must be followed ----------------------------------------------------------------

NUM_FOLLOWED = 3  # samples at least: of one sample alone, every row is its own


def learn_rows(
    module: nn.Module,
    run: Run,
    batch: Any,
    *,
    state: ProbeState | None = None,
    agree: Agree = bool,
    has_dtensors: bool | None = None,
) -> AxisTable:
    """Find where samples lie, as `learn_axes`, and whether they must be followed in every pass.

    Args:
        module: The model.
        run: One loss per sample.
        batch: Some samples.
        state: What each pass begins with, if it is to be the same.
        agree: Tells whether something is so on any rank; ranks do the same.
        has_dtensors: Whether the module computes with DTensors; if it has some, unless given.

    Raises:
        BadInput: If the batch is empty.
        UnsupportedOperation: If no answer can be found.
    """
    if has_dtensors is None:
        has_dtensors = any(map(is_dtensor, module.parameters()))
    if has_dtensors or not has_values():
        # Below DTensors there is no batch to follow, and rows are followed by value.
        return learn_axes(module, run, batch, state=state, agree=agree)
    met, has_numbers, may_branch = _follow(module, run, batch)
    by_value = has_numbers or any(rows is not None and rows.is_by_value for _, rows, _ in met)
    if agree(by_value):
        return _learn_partly(module, run, batch, agree)
    axes: AxisTable | None = AxisTable(rows_per_sample={})
    try:
        learn_axes(module, run, batch, axes, state=state, agree=agree)
    except UnsupportedOperation:
        if any(layout is None and rows and is_mixed(rows) for _, rows, layout in met):
            raise
        axes = None
    if axes is not None:
        trained = {name for name, each in module.named_parameters() if each.requires_grad}
        used = {name for call, _, _ in met for name in call.names}
        has_other_paths = may_branch and not trained <= used
        if has_other_paths or any(_is_out_of_order(each, axes) for each in met):
            axes = None
    if agree(axes is None) or axes is None:
        return _learn_partly(module, run, batch, agree)
    return axes


def _follow(module: nn.Module, run: Run, batch: Any) -> tuple[list[Met], bool, bool]:
    """Run a pass with a trace.

    Returns:
        What parameters have met in it; whether numbers were read that change from batch to batch,
        which may become sizes and indices; and whether the next pass may do something else, since
        anything was read, or Python's own random numbers were drawn.
    """
    batch = resized(batch, max(NUM_FOLLOWED, batch_size_of(batch)))
    capture = Capture(module, batch_size_of(batch), axes=AxisTable(), on_record=lambda *_: None)
    reads: set[str] = set()

    def noted(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        values: Sequence[Any] = args[:1] if func in _READS else ()
        if func is Tensor.__getitem__:
            keys = args[1] if isinstance(args[1], tuple) else args[1:]
            values = [x for x in keys if isinstance(x, Tensor) and x.ndim == 0]
            values = [x for x in values if x.dtype != torch.bool]
        for value in values:
            trace = capture.trace
            if trace is not None and isinstance(value, Tensor) and trace.find(value) is not None:
                reads.add("truth" if func is Tensor.__bool__ else "number")
        return func(*args, **kwargs)

    state = other_generator_states()
    with (
        generators_kept(batch),
        checkpointing_quiet(),
        FunctionMode(noted),
        capture.meeting(batch) as met,
    ):
        run(module, batch)
    return met, "number" in reads, bool(reads) or state != other_generator_states()


def _is_out_of_order(met: Met, axes: AxisTable) -> bool:
    """Whether rows do not lie sample by sample, as many for each, where the table says."""
    call, rows, _ = met
    known = axes_of(axes, call)
    dim = NO_AXIS if known is None else known[0]
    if dim is None or rows is None or is_mixed(rows):
        return False  # the table is what is known of it, and is checked by gradients
    ids, size = rows.ids, call.batch
    if ids.shape[dim] % size:
        return True
    expected = index_in_order(ids.shape[dim], size, dim, ids.ndim, ids.device)
    return not bool(((ids == expected) | (ids == NOBODY)).all())


def _learn_partly(module: nn.Module, run: Run, batch: Any, agree: Agree) -> AxisTable:
    """Learn what two sizes tell of a model that is going to be traced."""
    axes, expressions = AxisTable(is_traced=True), AxisTable()
    for _ in range(MAX_ROUNDS):
        many, fewer, sizes = _two_passes(module, run, batch, expressions)
        learn_common(axes, many, fewer, sizes)
        # As many rows for both sizes, by chance, look as if no sample were in them: only what is
        # made of nothing but parameters is known to be an expression.
        is_new = False
        for call in [seen.call for seen in many if seen.digest is None]:
            found = axes_of(axes, call)
            if found is None or found[0] is not NO_AXIS or axes_of(expressions, call) is not None:
                continue
            expressions.by_kind.setdefault(call[KIND], {})[call] = found
            is_new = True
        if not agree(is_new):
            break
    return axes


_READS = {
    *(Tensor.__bool__, Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__),
    *(Tensor.__int__, Tensor.__float__, Tensor.__index__),
}
