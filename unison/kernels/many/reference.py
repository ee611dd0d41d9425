"""Per-sample gradients of many parameters, in plain torch: one after the other."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unison.kernels.random import Recipe, fill_rows
from unison.kernels.random.recipe import FLOATS_AT, bits_float
from unison.kernels.random.reference import ROUND_MAGIC


def squares(values: Sequence[Tensor]) -> Tensor:
    """Return Σ x² of every tensor and sample: [tensors, samples], float64."""
    rows = [each.reshape(len(each), math.prod(each.shape[1:])) for each in values]
    return torch.stack([each.double().square().sum(1) for each in rows])


def combine(
    values: Sequence[Tensor],
    weights: Tensor,
    outs: Sequence[Tensor],
    *,
    add: bool,
    spacing: float = 1.0,
) -> None:
    """Write Σ_b w_b X_b of every tensor to its output, or add it; made in float64.

    One sample after the other, as the kernel does.
    """
    for each, row, out in zip(values, weights, outs, strict=True):
        total = torch.zeros_like(out, dtype=torch.float64)
        for x, weight in zip(each, row.double(), strict=False):  # the row may be longer: zeros
            total += weight * x.double().reshape(out.shape).masked_fill(weight == 0, 0.0)
        total /= spacing
        if not out.is_floating_point():
            total.round_()
        out.copy_(out + total if add else total)


def noise(recipes: Tensor, starts: Sequence[int], outs: Sequence[Tensor]) -> None:
    """Fill float32 outputs with secure noise: each from its own recipe, from an element on."""
    for packed, start, out in zip(recipes.cpu(), starts, outs, strict=True):
        fill_rows(out, Recipe.unpack(packed), torch.tensor([start]), out.numel())


def release(
    values: Sequence[Tensor],
    weights: Tensor,
    recipes: Tensor | None,
    starts: Sequence[int],
    divisor: float,
    outs: Sequence[Tensor],
) -> None:
    """Combine, add noise on its grid, divide, and cast to each output's dtype."""
    totals = [torch.empty_like(out, dtype=torch.float64) for out in outs]
    combine(values, weights, totals, add=False)
    if recipes is not None:
        drawn = [torch.empty_like(total, dtype=torch.float32) for total in totals]
        noise(recipes, starts, drawn)
        for total, each, recipe in zip(totals, drawn, recipes.cpu(), strict=True):
            spacing = bits_float(int(recipe[FLOATS_AT + 1]))
            on_grid = (total / spacing + ROUND_MAGIC - ROUND_MAGIC) * spacing
            total.copy_(on_grid + each.double())
    for total, out in zip(totals, outs, strict=True):
        made = total if out.dtype == torch.float64 else total.float()
        out.copy_(made * torch.tensor(1.0 / divisor, dtype=torch.float32))
