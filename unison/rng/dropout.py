"""Dropout whose mask depends on (key, step, layer, global sample, position), not on the rank.

[Note: which call of a layer this is]
Inside a `dropout_context` the masks of a layer are numbered 0, 1, 2, ... in the order of its calls,
so a layer used twice gets two masks. Activation checkpointing runs a part of the forward again
during backward, and must see the *same* numbers, in whatever order and thread the recompute comes.
So each call draws a ticket from torch's default CPU generator, and (layer, ticket) -> (context,
number) is noted. Checkpointing restores that generator before it recomputes
(`preserve_rng_state=True`, its default), so the recompute draws the same tickets and finds its
notes. The ticket decides nothing about the mask. A recompute whose ticket is unknown raises.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from unison import check
from unison.errors import BadInput
from unison.kernels.random import Distribution, Recipe, fill_rows
from unison.rng.keys import Key
from unison.rng.streams import MAX_ELEMENTS, Stream

MAX_NOTES = 1 << 16


@dataclass(eq=False)
class DropoutContext:
    """One pass over a batch: its key, step, and the global index of each row's sample."""

    key: Key
    step: int
    sample_ids: torch.Tensor  # int64 [batch], CPU
    counts: dict[str, int] = field(default_factory=dict)
    parts: dict[tuple[int, int], "DropoutContext"] = field(default_factory=dict)

    def part(self, index: int, num_parts: int) -> "DropoutContext":
        """Return the context of one of equal parts of the rows; the same object each time."""
        if (index, num_parts) not in self.parts:
            ids = self.sample_ids.view(num_parts, -1)[index]
            self.parts[index, num_parts] = DropoutContext(self.key, self.step, ids)
        return self.parts[index, num_parts]


@dataclass(frozen=True)
class _Call:
    context: DropoutContext
    number: int


# One per process and not per thread: on CUDA the recompute runs in a thread of the autograd engine.
_current: DropoutContext | None = None
_notes: OrderedDict[tuple[str, int], _Call] = OrderedDict()


@contextmanager
def dropout_context(
    key: Key, step: int, sample_ids: torch.Tensor | Sequence[int]
) -> Iterator[DropoutContext]:
    """Say which step this is and which samples the rows of the batch are.

    Enter it once for each micro-batch, around the forward pass; the backward pass may run inside
    or after it.

    Args:
        key: Root key.
        step: Training step.
        sample_ids: Global index of the sample in each row, along dim 0 of every dropout input.
    """
    global _current
    check.not_negative(step=step)
    ids = torch.as_tensor(sample_ids, dtype=torch.int64, device="cpu").reshape(-1)
    if len(ids) and int(ids.min()) < 0:
        raise BadInput(f"expected sample ids of 0 or more, found {int(ids.min())}")
    previous, _current = _current, DropoutContext(key, step, ids)
    try:
        yield _current
    finally:
        _current = previous


@contextmanager
def outside_dropout_context() -> Iterator[None]:
    """Let passes in this block be nobody's batch: a module is tried out with other rows."""
    global _current
    previous, _current = _current, None
    try:
        yield
    finally:
        _current = previous


@contextmanager
def rows_of_granule(index: int, num_granules: int) -> Iterator[None]:
    """Let the rows of one granule be the batch, where a batch is computed granule by granule.

    Calls of a layer are numbered within each granule, so that a row's mask is the one it would get
    in the whole batch. Outside of a `dropout_context` this does nothing.
    """
    global _current
    whole = _current
    if whole is None:
        yield
        return
    _current = whole.part(index, num_granules)
    try:
        yield
    finally:
        _current = whole


class Dropout(nn.Module):
    """A drop-in for `nn.Dropout` whose masks do not depend on the rank or the micro-batch.

    Guarantees:
        Inside a `dropout_context`, the mask of a row depends on (key, step, layer name, number of
        the call in this context, sample id, position in the row) only, with the probability exact
        to 2^-63; it is the same again when activation checkpointing recomputes the layer
        (`preserve_rng_state` must stay on). Backward keeps no mask: it draws it again.

    Outside a context the layer works as in any script: the mask then hangs on torch's default
    generator (`torch.manual_seed` repeats it), and rows count as samples 0, 1, 2, ...

    Args:
        p: Probability of an element to be zeroed.
        inplace: Write the result into the input.
        name: Names the stream; `name_dropouts(model)` sets it to the module's full name.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, *, name: str | None = None) -> None:
        super().__init__()
        check.probability(p=p)
        self.p = p
        self.inplace = inplace
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Zero elements with probability p and scale the others by 1 / (1 - p), in training."""
        if not self.training or self.p == 0.0:
            return x
        if has_torch_function_unary(x):  # for example one value per granule: each has its own rows
            return handle_torch_function(Dropout.forward, (x,), self, x)
        result = _Drop.apply(x, self._mask_source(x), self.p)
        return x.copy_(result) if self.inplace else result

    def extra_repr(self) -> str:
        """Return what `repr` shows between the parentheses."""
        named = f", name={self.name!r}" if self.name is not None else ""
        return f"p={self.p}, inplace={self.inplace}{named}"

    def _mask_source(self, x: torch.Tensor) -> "_MaskSource":
        ticket = int(torch.randint(0, 2**63 - 1, ()))
        is_recompute = torch._C._current_graph_task_id() != -1
        if is_recompute:
            call = _notes.get((self.name or "", ticket))
            if call is None and _current is not None:
                raise BadInput(
                    f"dropout {self.name!r} ran during backward and its forward call was not "
                    "recognised: leave preserve_rng_state=True in torch.utils.checkpoint"
                )
        else:
            call = self._new_call(ticket)
        rows = x.shape[0] if x.dim() else 1
        if call is None:
            ids = torch.arange(rows)
            stream = Stream(
                Key.from_seed(torch.initial_seed()), self.name or "", ticket, "dropout.plain"
            )
        else:
            ids = call.context.sample_ids
            if len(ids) != rows:
                raise BadInput(
                    f"dropout {self.name!r}: the context names {len(ids)} samples, the input has "
                    f"{rows} rows (shape {list(x.shape)}); dim 0 must be the batch"
                )
            context = call.context
            stream = Stream(context.key, f"{self.name}#{call.number}", context.step, "dropout")
        return _MaskSource(stream, ids, x.numel() // rows if rows else 0)

    def _new_call(self, ticket: int) -> _Call | None:
        if _current is None:
            _notes.pop((self.name or "", ticket), None)
            return None
        if self.name is None:
            raise BadInput(
                "a Dropout inside a dropout_context needs a name, since two layers must not share "
                "masks: call name_dropouts(model) once after building the model"
            )
        number = _current.counts.get(self.name, 0)
        _current.counts[self.name] = number + 1
        call = _notes[self.name, ticket] = _Call(_current, number)
        if len(_notes) > MAX_NOTES:
            _notes.popitem(last=False)
        return call


def name_dropouts(model: nn.Module) -> nn.Module:
    """Give every `Dropout` of the model its full name in the model; return the model."""
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            module.name = name or "dropout"
    return model


@dataclass(frozen=True, eq=False)
class _MaskSource:
    stream: Stream
    ids: torch.Tensor  # int64 [batch], CPU
    positions: int  # elements in a row

    def keep(self, x: torch.Tensor, p: float) -> torch.Tensor:  # bool, shape of x
        if len(self.ids) and (int(self.ids.max()) + 1) * self.positions >= MAX_ELEMENTS:
            raise BadInput(f"sample id {int(self.ids.max())} is too large for dropout")
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        # Kept when the 63-bit draw is at or above p: an element dropped at p stays dropped above.
        limit = int(p * 2.0**63) - 1 if p < 1 else (1 << 63) - 1
        recipe = Recipe(self.stream.cipher, self.stream.words, Distribution.BERNOULLI, (), (limit,))
        fill_rows(mask, recipe, self.ids * self.positions, self.positions)
        return mask.logical_not_()


class _Drop(torch.autograd.Function):
    """Multiply by the mask and 1 / (1 - p); backward does the same to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, source: _MaskSource, p: float) -> torch.Tensor:
        ctx.source, ctx.p = source, p
        scale = 1.0 / (1.0 - p) if p < 1 else 0.0
        return torch.where(source.keep(x, p), x * scale, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, None, None]:
        return _Drop.apply(grads[0], ctx.source, ctx.p), None, None
