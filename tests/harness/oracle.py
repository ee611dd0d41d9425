"""The oracle: float64, one sample at a time, plain autograd, nothing clever.

Every function takes a model, `per_sample_loss(model, batch) -> [batch]` and a batch. The model is
copied to float64 and left untouched; floating-point tensors of the batch are converted too.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

PerSampleLoss = Callable[[nn.Module, Any], Tensor]


def per_sample_gradients(
    model: nn.Module, per_sample_loss: PerSampleLoss, batch: Any
) -> dict[str, Tensor]:
    """Return the gradient of every sample's loss with respect to every trainable parameter.

    Args:
        model: the model as the user wrote it, without hooks of ours. Frozen parameters are
            skipped; a tied parameter appears once, under its first name.
        per_sample_loss: maps the model and a batch to one loss per sample. It is called with
            batches of one sample.
        batch: a tensor, or tuples, lists and dicts of tensors, batched on dim 0; leaves that are
            not tensors are passed on as they are.

    Returns:
        `{name: [batch, *shape]}` in float64; zeros for a parameter that the loss does not use.
    """
    model = copy.deepcopy(model).double()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    params = [p for p in model.parameters() if p.requires_grad]
    size = batch_size(batch)
    gradients = {
        name: torch.zeros(size, *p.shape, dtype=torch.float64)
        for name, p in zip(names, params, strict=True)
    }
    for i in range(size):
        with torch.enable_grad():
            loss = per_sample_loss(model, _sample(batch, i))
        if loss.numel() != 1:
            raise ValueError(
                "per_sample_loss must return one loss per sample, found shape "
                f"{list(loss.shape)} for a batch of one"
            )
        found = torch.autograd.grad(loss.sum(), params, allow_unused=True)
        for name, gradient in zip(names, found, strict=True):
            if gradient is not None:
                gradients[name][i] = gradient.to_dense()
    return gradients


def per_sample_norms(model: nn.Module, per_sample_loss: PerSampleLoss, batch: Any) -> Tensor:
    """Return the L2 norm of every sample's whole gradient, tied parameters once: [batch]."""
    return norms_of(per_sample_gradients(model, per_sample_loss, batch), batch_size(batch))


def clipped_sum(
    model: nn.Module, per_sample_loss: PerSampleLoss, batch: Any, max_grad_norm: float
) -> dict[str, Tensor]:
    """Return Σ_b min(1, C / norm_b) · gradient_b for every parameter: `{name: [*shape]}`.

    A sample with a gradient that is not finite anywhere is left out of every sum.
    """
    gradients = per_sample_gradients(model, per_sample_loss, batch)
    norms = norms_of(gradients, batch_size(batch))
    kept = norms.isfinite()  # a NaN or an infinity in any element makes the norm so
    coefficients = clip_coefficients(norms[kept], max_grad_norm)
    return {
        name: torch.einsum("b,b...->...", coefficients, gradient[kept])
        for name, gradient in gradients.items()
    }


def mean_gradient(
    model: nn.Module, per_sample_loss: PerSampleLoss, batch: Any
) -> dict[str, Tensor]:
    """Return the mean over samples of the unclipped gradients; zeros for a batch of 0."""
    gradients = per_sample_gradients(model, per_sample_loss, batch)
    return {name: g.sum(0) / max(1, len(g)) for name, g in gradients.items()}


def norms_of(gradients: dict[str, Tensor], size: int) -> Tensor:
    """Return the L2 norm over all parameters of `{name: [batch, *shape]}`: [batch]."""
    squares = torch.zeros(size, dtype=torch.float64)
    for gradient in gradients.values():
        squares += gradient.reshape(size, gradient[0:1].numel() if size else 0).square().sum(1)
    return squares.sqrt()


def clip_coefficients(norms: Tensor, max_grad_norm: float) -> Tensor:
    """Return min(1, C / norm), which is 1 for a norm of 0: [batch]."""
    return (max_grad_norm / norms).clamp(max=1.0)


def batch_size(batch: Any) -> int:
    """Return the length of dim 0 on which all tensors of a batch agree."""
    sizes = {len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)}
    if len(sizes) != 1:
        raise ValueError(f"expected tensors of one length on dim 0, found lengths {sorted(sizes)}")
    return sizes.pop()


def _sample(batch: Any, i: int) -> Any:
    """Return sample `i` as a batch of one, in float64 where the batch is floating point."""

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        row = leaf[i : i + 1].detach()  # [1, ...]
        return row.double() if row.is_floating_point() else row

    return pytree.tree_map(take, batch)
