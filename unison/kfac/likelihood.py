"""What a model's outputs say about a label: gradients for labels drawn from the model itself.

The Fisher matrix is the second moment of ∂ log p(y | x) / ∂θ where y is drawn from the *model*. Its
curvature at the outputs is known in closed form, so no loss is built: a likelihood gives the
gradient of the negative log-likelihood with respect to the outputs, for drawn labels (`drawn`) or
as the columns of a square root of its expectation (`columns`: Σ_c column column' = Hessian).

| likelihood | outputs z | gradient for a drawn y | Hessian |
|---|---|---|---|
| categorical | logits | softmax(z) - e_y | diag(p) - pp' |
| bernoulli | logits, one per question | σ(z) - y | diag(p(1 - p)) |
| gaussian | means, unit variance | -ε | I |

[Note: which label a token gets] A draw is a function of (seed, step, global row, token, output): no
rank, batch size or padded length enters. Rows are `ROW` elements apart in the stream.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from unison.rng import Box, Stream, normal, uniform

ROW = 1 << 24  # tokens that a row could have
BLOCK = 256  # classes whose probabilities are added up first


class Likelihood(Protocol):
    """Gradients of -log p with respect to outputs z [batch, tokens, outputs]."""

    def drawn(self, z: Tensor, stream: Stream, first_row: int) -> Tensor:
        """The gradient for labels drawn from the model; rows are numbered from `first_row`."""
        ...

    def columns(self, z: Tensor) -> Iterator[Tensor]:
        """Columns of a square root of the expected Hessian, each of the shape of z."""
        ...


class Categorical:
    """One of several classes, from logits."""

    def drawn(self, z: Tensor, stream: Stream, first_row: int) -> Tensor:
        """Softmax(z) - e_y."""
        batch, tokens, _ = z.shape
        box = Box((first_row + batch, ROW), (first_row, 0), (first_row + batch, tokens))
        u = uniform(stream, box, dtype=torch.float64, device=z.device)
        gradient = torch.softmax(z, dim=-1, dtype=wide(z.dtype))
        y = drawn_classes(gradient, u).unsqueeze(-1)
        return gradient.scatter_add_(-1, y, gradient.new_full((), -1.0).expand(y.shape))

    def columns(self, z: Tensor) -> Iterator[Tensor]:
        """√p_c (p - e_c), for every class c."""
        p = torch.softmax(z.to(wide(z.dtype)), dim=-1)
        for c in range(z.shape[-1]):
            column = p.clone()
            column[..., c] -= 1
            yield column * p[..., c : c + 1].sqrt()


class Bernoulli:
    """A yes or no for every output, from logits."""

    def drawn(self, z: Tensor, stream: Stream, first_row: int) -> Tensor:
        """σ(z) - y."""
        p = torch.sigmoid(z.double())
        u = uniform(stream, _box(z, first_row), dtype=torch.float64, device=z.device)
        return (p - (u < p).double()).to(wide(z.dtype))

    def columns(self, z: Tensor) -> Iterator[Tensor]:
        """√(p(1 - p)) e_c, for every output c."""
        p = torch.sigmoid(z.to(wide(z.dtype)))
        yield from _one_by_one((p * (1 - p)).sqrt())


class Gaussian:
    """A mean with unit variance for every output: the loss is half the squared error."""

    def drawn(self, z: Tensor, stream: Stream, first_row: int) -> Tensor:
        """-ε, which does not depend on z."""
        return -normal(stream, _box(z, first_row), dtype=wide(z.dtype), device=z.device)

    def columns(self, z: Tensor) -> Iterator[Tensor]:
        """e_c, for every output c."""
        yield from _one_by_one(torch.ones_like(z, dtype=wide(z.dtype)))


LIKELIHOOD: dict[str, Likelihood] = {
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(),
}


def drawn_classes(p: Tensor, u: Tensor) -> Tensor:  # [..., classes], [...] -> [...]
    """The class in which u, uniform in [0, 1), falls if classes lie side by side, p wide each.

    Sums are in float64, of blocks of classes and then inside of one block: a language model's
    probabilities are read once, and never all held in float64.
    """
    classes = p.shape[-1]
    full = classes // BLOCK * BLOCK
    sums = p[..., :full].unflatten(-1, (-1, BLOCK)).sum(dim=-1, dtype=torch.float64)
    if full < classes:
        rest = p[..., full:].sum(dim=-1, keepdim=True, dtype=torch.float64)
        sums = torch.cat([sums, rest], dim=-1)  # [..., blocks]
    below = sums.cumsum(dim=-1)
    # The last sum is 1 but for rounding; scaled by it, no u falls past the last class.
    place = (u * below[..., -1]).unsqueeze(-1)
    block = torch.searchsorted(below, place, right=True).clamp_(max=sums.shape[-1] - 1)
    place = place - (below - sums).gather(-1, block)
    inside = block * BLOCK + torch.arange(BLOCK, device=p.device)  # [..., BLOCK]
    own = p.gather(-1, inside.clamp(max=classes - 1)).double()
    own = torch.where(inside < classes, own, 0.0).cumsum(dim=-1)
    found = block * BLOCK + torch.searchsorted(own, place, right=True).clamp_(max=BLOCK - 1)
    return found.clamp_(max=classes - 1).squeeze(-1)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Float32, or float64 where that was given."""
    return torch.promote_types(dtype, torch.float32)


def _box(z: Tensor, first_row: int) -> Box:
    batch, tokens, outputs = z.shape
    return Box(
        (first_row + batch, ROW, outputs), (first_row, 0, 0), (first_row + batch, tokens, outputs)
    )


def _one_by_one(values: Tensor) -> Iterator[Tensor]:
    for c in range(values.shape[-1]):
        column = torch.zeros_like(values)
        column[..., c] = values[..., c]
        yield column
