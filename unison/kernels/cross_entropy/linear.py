"""Linear map and cross-entropy in one: token losses from hidden states, without the logits.

[Note: what is kept] Between forward and backward only the inputs and one number per token are kept,
the log-sum-exp of its logits. The backward pass makes the logits again, chunk by chunk: a third
GEMM beside the two that it needs anyway, for logits [batch, tokens, vocab] that never exist.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from unison import check
from unison.errors import BadInput, UnsupportedOperation
from unison.kernels.cross_entropy.autocast import as_autocast, plain_arithmetic
from unison.kernels.cross_entropy.head import Head

IGNORE_INDEX = -100
REDUCTIONS = ("none", "sample_mean")


class Shared(Protocol):
    """Who may have made the gradient of the hidden states already, from the same chunks."""

    def hidden_gradient(self, g: Tensor) -> Tensor | None:
        """Give it away, if it is that of the token gradients `g`."""
        ...


def linear_cross_entropy(
    hidden: Tensor,  # [batch, tokens, d]
    weight: Tensor,  # [vocab, d]
    labels: Tensor,  # [batch, tokens]
    *,
    bias: Tensor | None = None,  # [vocab]
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "none",
    chunk: int | None = None,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T + bias`, without holding the logits of all tokens.

    Logits exist for one chunk of tokens at a time, in the dtype of the inputs; sums over the
    vocabulary are float32 (float64 for float64 inputs). Under autocast the inputs are cast as for
    `F.linear`. In a model that is trained privately, the head's weight may be tied and is clipped
    like any other.

    Args:
        hidden: What goes into the head [batch, tokens, d].
        weight: The head's weight [vocab, d].
        labels: The token to predict at each position [batch, tokens].
        bias: The head's bias [vocab].
        ignore_index: The label of tokens that do not count: loss 0 and no gradient.
        reduction: `"none"` for one loss per token, `"sample_mean"` for one per sample: the mean
            over its own counted tokens, as `unison.per_sample_loss` has it.
        chunk: Most tokens whose logits exist at once; chosen from the shapes unless given. It
            changes rounding only.

    Returns:
        Losses in nats, float32 at least: [batch, tokens] or [batch].

    Raises:
        BadInput: If shapes, dtypes or options do not fit, or on a CPU a label is not in the
            vocabulary (elsewhere its loss is NaN).
        UnsupportedOperation: In a backward pass with `create_graph=True`.
    """
    tensors = (hidden, weight, labels, bias)
    if has_torch_function(tensors):
        return handle_torch_function(
            linear_cross_entropy,
            tensors,
            hidden,
            weight,
            labels,
            bias=bias,
            ignore_index=ignore_index,
            reduction=reduction,
            chunk=chunk,
        )
    head = make_head(hidden, weight, labels, bias, ignore_index, reduction, chunk)
    return reduced(token_losses(head)[0], head, reduction)


def make_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    reduction: str,
    chunk: int | None,
) -> Head:
    """Check the arguments of `linear_cross_entropy`, and cast them as autocast asks."""
    check.one_of(REDUCTIONS, reduction=reduction)
    if chunk is not None:
        check.positive(chunk=chunk)
    _check_shapes(hidden, weight, labels, bias)
    hidden, weight, bias = as_autocast(hidden), as_autocast(weight), as_autocast(bias)
    dtypes = {each.dtype for each in (hidden, weight, bias) if each is not None}
    if len(dtypes) > 1 or not hidden.is_floating_point():
        raise BadInput(
            "expected hidden, weight and bias of one floating-point dtype, found "
            f"{sorted(map(str, dtypes))}; convert them, or use autocast"
        )
    return Head(
        hidden=hidden,
        weight=weight,
        bias=bias,
        labels=labels.long(),
        ignore_index=ignore_index,
        chunk=chunk,
    )


def token_losses(head: Head, shared: Shared | None = None) -> tuple[Tensor, Tensor]:
    """Make losses, with a graph, and log-sum-exps of all tokens: [batch, tokens] each."""
    return _TokenLosses.apply(  # type: ignore[return-value]
        head.hidden, head.weight, head.bias, head.labels, head.ignore_index, head.chunk, shared
    )


def reduced(losses: Tensor, head: Head, reduction: str) -> Tensor:
    """Token losses [batch, tokens] as asked for."""
    if reduction == "none":
        return losses
    return sample_means(losses, head.labels, head.ignore_index)


def sample_means(losses: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Mean of each sample's losses [batch, tokens] over its counted tokens; 0 if there is none."""
    return losses.sum(dim=1) / (labels != ignore_index).sum(dim=1).clamp(min=1)


class _TokenLosses(torch.autograd.Function):
    """See [Note: what is kept]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        chunk: int | None,
        shared: Shared | None,
    ) -> tuple[Tensor, Tensor]:
        head = Head(
            hidden=hidden,
            weight=weight,
            bias=bias,
            labels=labels,
            ignore_index=ignore_index,
            chunk=chunk,
        )
        with plain_arithmetic(hidden.device):
            losses, lse = head.losses()
        ctx.save_for_backward(hidden, weight, bias, labels, lse)
        ctx.ignore_index, ctx.chunk, ctx.shared = ignore_index, chunk, shared
        ctx.mark_non_differentiable(lse)
        return losses, lse

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise UnsupportedOperation(
                "linear_cross_entropy has no second derivative (create_graph=True); compute "
                "F.cross_entropy of the logits instead"
            )
        hidden, weight, bias, labels, lse = ctx.saved_tensors  # asked for once: see capture/tap
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        if ctx.shared is not None:
            made = ctx.shared.hidden_gradient(g)
            if made is not None:
                is_alone = of_hidden and not of_weight and not of_bias
                assert is_alone, "the capture makes the records of the others"
                return made.view_as(hidden), None, None, None, None, None, None
        head = Head(
            hidden=hidden,
            weight=weight,
            bias=bias,
            labels=labels,
            ignore_index=ctx.ignore_index,
            chunk=ctx.chunk,
        )
        with plain_arithmetic(hidden.device):
            found = head.gradients(
                lse, g, of_hidden=of_hidden, of_weight=of_weight, of_bias=of_bias
            )
        return *found, None, None, None, None


def _check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    for each in (hidden, weight, bias):
        if hasattr(each, "device_mesh"):
            raise UnsupportedOperation(
                "linear_cross_entropy of a DTensor: its vocabulary or its tokens lie on several "
                "ranks. Redistribute it and use to_local(), or compute the logits"
            )
    fits = (
        hidden.ndim == 3
        and weight.ndim == 2
        and weight.shape[0] > 0
        and weight.shape[1] == hidden.shape[2]
        and labels.shape == hidden.shape[:2]
        and not labels.is_floating_point()
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if not fits:
        found = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
        shapes = ", ".join(
            f"{name} {list(each.shape)} {each.dtype}"
            for name, each in found.items()
            if each is not None
        )
        raise BadInput(
            "expected hidden [batch, tokens, d], weight [vocab, d], labels [batch, tokens] of "
            f"integers and bias [vocab], found {shapes}"
        )
