"""Gradients at the outputs for labels that are drawn, given, or all there are."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.errors import BadInput
from unison.kfac.config import KFACConfig
from unison.kfac.likelihood import LIKELIHOOD
from unison.kfac.owners.batches import tensors_of
from unison.kfac.passes import Part, Pass
from unison.rng import Key, Stream

MOST_EXACT = 1024  # outputs for which all labels are gone through


@dataclass(eq=False)
class Sampled:
    """Labels for one pass; `backward` keeps their gradients, `KFAC.step` makes records of them.

    It does what `loss.backward(retain_graph=True)` would, as far as the curvature is concerned, and
    leaves `.grad` of all parameters alone.
    """

    keep: "Keep"

    def backward(self, retain_graph: bool = True) -> None:
        """Keep the gradients of these labels.

        Args:
            retain_graph: The user's own backward pass comes later, so that the graph must stay.

        Raises:
            BadInput: If it must not.
        """
        if not retain_graph:
            raise BadInput(
                "kfac.sample(...).backward() comes before loss.backward(), which needs the graph: "
                "pass retain_graph=True"
            )
        self.keep()


class Drawn:
    """A gradient of logits that is made where it is needed: a language model's are large.

    Args:
        columns: Makes the one there is from logits [batch, tokens, outputs].
        part: The part of the pass that they belong to.
    """

    def __init__(self, columns: Callable[[Tensor, Part], Iterator[Tensor]], part: Part) -> None:
        self._columns, self._part = columns, part

    def __call__(self, logits: Tensor) -> Tensor:
        """The gradient of the same logits, computed again."""
        z = logits.detach()
        z = z.reshape(len(z), z.shape[1:-1].numel(), z.shape[-1])
        return next(self._columns(z, self._part)).view(logits.shape)


class Keep:
    """Makes the gradients of one pass, when it is called.

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

    def __call__(self) -> None:
        """Make them, and let the outputs go."""
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
            self._of_part(part, each, mask)
        self._passes.append(self._pass)

    def _of_part(self, part: Part, logits: Tensor, mask: Tensor | None) -> None:
        rows = self._pass.num_rows
        if logits.ndim < 2 or logits.shape[0] != rows:
            raise BadInput(
                f"expected logits [batch of {rows}, ..., outputs], found {list(logits.shape)}"
            )
        tokens = logits.shape[1:-1].numel()
        z = logits.detach().reshape(rows, tokens, logits.shape[-1])
        part.mask = _full_mask(mask, part.is_real, logits.shape[:-1], z.device)
        counted = rows * tokens if part.mask is None else part.mask.sum()
        part.num_terms = int(counted)
        if self._config.fisher == "empirical":
            self._wait_for_loss(part)
            return
        own = [place for place, output in part.outputs.items() if output is logits]
        if own and self._config.fisher in ("mc", "forward"):
            # Nothing lies between them: drawn again from the same logits when they are needed.
            part.gradients = [{own[0]: Drawn(self._columns, part)}]
        else:
            part.gradients = [
                self._sent_back(part, logits, each) for each in self._columns(z, part)
            ]
        part.outputs = {}

    def _sent_back(self, part: Part, logits: Tensor, column: Tensor) -> dict[int, Tensor]:
        """The gradients of the module's outputs from one of the logits."""
        places, outputs = list(part.outputs), list(part.outputs.values())
        found = torch.autograd.grad(
            logits,
            outputs,
            column.view(logits.shape).to(logits.dtype),
            retain_graph=True,
            allow_unused=True,
        )
        pairs = zip(places, found, strict=True)
        gradients = {place: gradient for place, gradient in pairs if gradient is not None}
        if not gradients:
            raise BadInput(
                "the logits were not made of what the module's last forward pass returned; call "
                "kfac.sample with them before the module runs again"
            )
        return gradients

    def _columns(self, z: Tensor, part: Part) -> Iterator[Tensor]:
        """Gradients of the logits [batch, tokens, outputs], zero for tokens that do not count."""
        for column in self._all_columns(z, part):
            if part.mask is None:
                yield column
            else:
                yield torch.where(part.mask.unsqueeze(-1), column, 0.0)

    def _all_columns(self, z: Tensor, part: Part) -> Iterator[Tensor]:
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

    def _wait_for_loss(self, part: Part) -> None:
        """Take the gradients of the user's own loss, as those of a sum."""
        is_mean = self._config.loss_reduction == "mean"
        own = part.num_terms if is_mean else 1
        scale = float(own if self._divisor is None else self._divisor)
        sums: dict[int, Tensor] = {}
        part.gradients = [sums]

        def keep(place: int, gradient: Tensor) -> None:
            scaled = gradient.detach() * scale
            sums[place] = sums[place] + scaled if place in sums else scaled

        for place, output in part.outputs.items():
            output.register_hook(lambda gradient, place=place: keep(place, gradient))
        part.outputs = {}


def what_is_missing(passes: Sequence[Pass]) -> str:
    """What the user forgot before an update of the factors, in words; nothing if nothing."""
    if not passes:
        return (
            "no labels were sampled: `if kfac.wants_statistics: "
            "kfac.sample(logits).backward(retain_graph=True)` before loss.backward(), on every rank"
        )
    columns = [each for own in passes for part in own.parts for each in part.gradients]
    if not all(columns):
        return (
            "fisher='empirical' takes the gradients of loss.backward(), which did not run between "
            "kfac.sample(...) and kfac.step()"
        )
    return ""


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
