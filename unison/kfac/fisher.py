"""Gradients at the outputs, for labels that are drawn, given, or all there are.

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

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from unison.errors import BadInput
from unison.kfac.config import KFACConfig
from unison.kfac.passes import Pass, PassPart
from unison.parallel.granules import tensors_of
from unison.rng import Box, Key, Stream, normal, uniform

ROW = 1 << 24  # tokens that a row could have
BLOCK = 256  # classes whose probabilities are added up first
MOST_EXACT = 1024  # outputs for which all labels are gone through


class Likelihood(Protocol):
    """Gradients of -log p with respect to outputs z [batch, tokens, outputs]."""

    def drawn(self, z: Tensor, stream: Stream, first_row: int) -> Tensor:
        """The gradient for labels drawn from the model; rows are numbered from `first_row`."""
        ...

    def columns(self, z: Tensor) -> Iterator[Tensor]:
        """Columns of a square root of the expected Hessian, each of the shape of z."""
        ...


class CategoricalLikelihood:
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


class BernoulliLikelihood:
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


class GaussianLikelihood:
    """A mean with unit variance for every output: the loss is half the squared error."""

    def drawn(self, z: Tensor, stream: Stream, first_row: int) -> Tensor:
        """-ε, which does not depend on z."""
        return -normal(stream, _box(z, first_row), dtype=wide(z.dtype), device=z.device)

    def columns(self, z: Tensor) -> Iterator[Tensor]:
        """e_c, for every output c."""
        yield from _one_by_one(torch.ones_like(z, dtype=wide(z.dtype)))


LIKELIHOOD: dict[str, Likelihood] = {
    "categorical": CategoricalLikelihood(),
    "bernoulli": BernoulliLikelihood(),
    "gaussian": GaussianLikelihood(),
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


# --- gradients of the outputs ---------------------------------------------------------------------


class Sampled:
    """Labels for one pass; `backward` keeps their gradients, `KFAC.step` makes records of them.

    It does what `loss.backward(retain_graph=True)` would, as far as the curvature is concerned, and
    leaves `.grad` of all parameters alone.

    Args:
        current: The pass.
        logits: Made of its outputs [batch, ..., outputs].
        mask: Which tokens count [batch, ...], broadcast against the tokens; None if all do.
        config: For the kind of Fisher matrix and the likelihood.
        step: Number of the step: it names the stream.
        divisor: What the user's loss divides by; None for the number of labels, or 1.
        passes: Where the pass is kept.
    """

    def __init__(
        self,
        current: Pass,
        logits: Tensor,
        mask: Tensor | None,
        config: KFACConfig,
        step: int,
        divisor: float | None,
        passes: list[Pass],
    ) -> None:
        self._pass, self._mask = current, mask
        self._logits: Tensor | None = logits  # until they were looked at: they hold a graph
        self._config, self._divisor, self._passes = config, divisor, passes
        self._stream = Stream(Key.from_seed(config.seed), "labels", step=step, purpose="kfac")

    def backward(self, retain_graph: bool = True) -> None:
        """Keep the gradients of these labels.

        Args:
            retain_graph: The user's own backward pass comes later, so that the graph must stay.

        Raises:
            BadInput: If it must not, or this was called before.
        """
        if not retain_graph:
            raise BadInput(
                "kfac.sample(...).backward() comes before loss.backward(), which needs the graph: "
                "pass retain_graph=True"
            )
        if any(self._pass is each for each in self._passes):
            raise BadInput("kfac.sample(...).backward() was called twice for one forward pass")
        assert self._logits is not None
        parts, logits = self._pass.parts, tensors_of(self._logits)
        self._logits = None
        if len(logits) != len(parts):
            raise BadInput(
                f"expected logits of {len(parts)} granules, found {len(logits)}: take them from "
                "the last forward pass"
            )
        masks: list[Tensor | None] = [None] * len(parts)
        if self._mask is not None:
            masks = list(tensors_of(self._mask))
            if len(masks) != len(parts):
                raise BadInput(f"expected a mask of {len(parts)} granules, found {len(masks)}")
        for part, each, mask in zip(parts, logits, masks, strict=True):
            self._keep(part, each, mask)
        self._passes.append(self._pass)

    def _keep(self, part: PassPart, logits: Tensor, mask: Tensor | None) -> None:
        """Keep the gradients of one part's outputs, and let the outputs go."""
        rows, outputs = self._pass.num_rows, part.outputs
        if logits.ndim < 2 or logits.shape[0] != rows:
            raise BadInput(
                f"expected logits [batch of {rows}, ..., outputs], found {list(logits.shape)}"
            )
        z = _with_tokens(logits)
        part.mask = _full_mask(mask, part.is_real, logits.shape[:-1], z.device)
        part.num_terms = z.shape[:-1].numel() if part.mask is None else int(part.mask.sum())
        own = [place for place, output in outputs.items() if output is logits]
        if self._config.fisher == "empirical":
            self._wait_for_loss(part)
        elif own and self._config.fisher in ("mc", "forward"):
            # Nothing lies between them: drawn again from the same logits when they are needed, as
            # those of a language model are large.
            part.gradients = [{own[0]: partial(self._draw, part)}]
        else:
            part.gradients = [_sent_back(outputs, logits, each) for each in self._columns(z, part)]
        part.outputs = {}

    def _draw(self, part: PassPart, logits: Tensor) -> Tensor:
        return next(self._columns(_with_tokens(logits), part)).view(logits.shape)

    def _columns(self, z: Tensor, part: PassPart) -> Iterator[Tensor]:
        """Gradients of the logits [batch, tokens, outputs], zero for tokens that do not count."""
        for column in self._all_columns(z, part):
            if part.mask is None:
                yield column
            else:
                yield torch.where(part.mask.unsqueeze(-1), column, 0.0)

    def _all_columns(self, z: Tensor, part: PassPart) -> Iterator[Tensor]:
        likelihood = LIKELIHOOD[self._config.likelihood]
        match self._config.fisher:
            case "mc":
                yield likelihood.drawn(z, self._stream, part.first_id)
            case "exact":
                if z.shape[-1] > MOST_EXACT:
                    raise BadInput(
                        f"fisher='exact' needs a backward pass for each of {z.shape[-1]} outputs, "
                        f"at most {MOST_EXACT}; use fisher='mc'"
                    )
                yield from likelihood.columns(z)
            case "forward":  # inputs are all that is looked at
                yield torch.zeros_like(z)
            case other:
                raise AssertionError(f"no rule for fisher={other!r}")

    def _wait_for_loss(self, part: PassPart) -> None:
        """Take the gradients of the user's own loss, as those of a sum."""
        scale = self._divisor
        if scale is None:
            scale = part.num_terms if self._config.loss_reduction == "mean" else 1
        sums: dict[int, Tensor] = {}
        part.gradients = [sums]

        def keep(place: int, gradient: Tensor) -> None:
            scaled = gradient.detach() * float(scale)
            sums[place] = sums[place] + scaled if place in sums else scaled

        for place, output in part.outputs.items():
            output.register_hook(partial(keep, place))


def _with_tokens(logits: Tensor) -> Tensor:  # [batch, ..., outputs] -> [batch, tokens, outputs]
    return logits.detach().reshape(len(logits), logits.shape[1:-1].numel(), logits.shape[-1])


def _sent_back(outputs: Mapping[int, Tensor], logits: Tensor, column: Tensor) -> dict[int, Tensor]:
    """The gradients of the module's outputs from one of the logits."""
    found = torch.autograd.grad(
        logits,
        list(outputs.values()),
        column.view(logits.shape).to(logits.dtype),
        retain_graph=True,
        allow_unused=True,
    )
    gradients = {
        place: each for place, each in zip(outputs, found, strict=True) if each is not None
    }
    if not gradients:
        raise BadInput(
            "the logits were not made of what the module's last forward pass returned; call "
            "kfac.sample with them before the module runs again"
        )
    return gradients


def refuse_missing(passes: Sequence[Pass], step: int) -> None:
    """Refuse what the user forgot before an update of the factors.

    Raises:
        BadInput: With what to call.
    """
    if not passes:
        raise BadInput(
            f"step {step} updates the factors, and no labels were sampled: `if "
            "kfac.wants_statistics: kfac.sample(logits).backward(retain_graph=True)` before "
            "loss.backward(), on every rank"
        )
    if not all(column for own in passes for part in own.parts for column in part.gradients):
        raise BadInput(
            f"step {step} updates the factors, and fisher='empirical' takes the gradients of "
            "loss.backward(), which did not run between kfac.sample(...) and kfac.step()"
        )


def _full_mask(
    mask: Tensor | None, is_real: Tensor | None, shape: torch.Size, device: torch.device
) -> Tensor | None:
    """Which tokens count [batch, tokens]: those of the user's mask in rows that are samples."""
    rows, tokens = shape[0], shape[1:].numel()
    if mask is not None:
        extra = len(shape) - mask.ndim
        if extra < 0:
            raise BadInput(f"expected a mask of shape {list(shape)}, found {list(mask.shape)}")
        mask = mask.detach().to(device).view(*mask.shape, *([1] * extra))
        try:
            mask = (mask != 0).expand(shape).reshape(rows, tokens)
        except RuntimeError:
            raise BadInput(
                f"expected a mask of shape {list(shape)}, found {list(mask.shape)}"
            ) from None
    if is_real is None or bool(is_real.all()):
        return mask
    real = is_real.to(device)[:, None].expand(rows, tokens)
    return real if mask is None else mask & real
