"""Labels of the model, and the gradients at its outputs that they make.

The Fisher matrix is the second moment of ∂ log p(y | x) / ∂θ where y is drawn from the *model*. Its
curvature at the outputs is known in closed form, so no loss is built: a likelihood gives the
gradient of the negative log-likelihood with respect to the outputs, for drawn labels (`DRAWN`) or
as the columns of a square root of its expectation (`COLUMNS`: Σ_c column column' = Hessian).

| likelihood | outputs z | gradient for a drawn y | Hessian |
|---|---|---|---|
| categorical | logits | softmax(z) - e_y | diag(p) - pp' |
| bernoulli | logits, one per question | σ(z) - y | diag(p(1 - p)) |
| gaussian | means, unit variance | -ε | I |

[Note: one label at a time] The columns of all tokens of a sample go back at once only where that
changes nothing. A layer before attention gets gradients of many tokens' labels, and their cross
products are not in the Fisher matrix. So `exact` sends back one column of one token after the other
where a row has few (`MOST_EXACT`), and elsewhere gives each (row, token, column) a random sign:
cross products then cancel on average. Where tokens do not mix, signs change nothing.

[Note: which label a token gets] A draw is a function of (seed, step, global row, token, output): no
rank, batch size or padded length enters. Rows are `ROW` elements apart in the stream.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from unison.capture import RngAutocastState
from unison.errors import BadInput
from unison.kernels.available import takes, wide_dtype
from unison.kfac.config import KFACConfig
from unison.parallel.exchange import parts_of, tensors_of
from unison.rng import BatchDraws, Box, Key, Stream, normal, uniform
from unison.torch_internals import has_values

ROW = 1 << 24  # tokens that a row could have
BLOCK = 256  # classes whose probabilities are added up first
MOST_EXACT = 1024  # outputs for which all labels are gone through, and labels of a row one by one
MOST_SHIFT = 0.1  # of a gradient; rounding and small terms beside the likelihood make less
MOST_SENT = 1 << 20  # elements of a row's gradients that are kept for that

Gradient = Tensor | Callable[[Tensor], Tensor]
"""The gradient of an output, or what makes it from the output."""


@dataclass(eq=False)
class PassPart:
    """One granule of a pass, or all of it.

    Attributes:
        granule: Its global number; None for a pass that comes whole.
        outputs: Which of the module's outputs gradients reach, by their place in it, as the user
            sees them; let go once their gradients are known.
        first_id: Global number of the first row.
        is_real: Which rows are samples [batch]; None if all are.
        gradients: Columns of gradients of the outputs, by place.
        scale: What to multiply them with.
        mask: Which labels count [batch, tokens], bool; None if all do.
        token_mask: Which tokens inside of the module are real [batch, tokens], bool; None if they
            are those of the labels.
        num_terms: How many labels there are.
        num_outputs: Outputs of each.
        logits: Which output the logits are, by its place; None if they are made of outputs.
        draws: For every token a number in [0, 1) that is its own [batch, tokens], where the true
            Fisher matrix of the head is asked for.
        head_share: Tokens with smaller draws make columns of the head.
    """

    granule: int | None
    outputs: dict[int, Tensor]
    first_id: int
    is_real: Tensor | None
    gradients: Sequence[Mapping[int, Gradient]] = ()
    scale: float = 1.0
    mask: Tensor | None = None
    token_mask: Tensor | None = None
    num_terms: int = 0
    num_outputs: int = 0
    logits: int | None = None
    draws: Tensor | None = None
    head_share: float = 1.0


@dataclass(eq=False)
class Pass:
    """A forward pass of the user's.

    Attributes:
        inputs: What the module was called with: (args, kwargs).
        num_rows: Rows of the batch, or of each granule.
        edges: Rank r holds the granules [edges[r], edges[r + 1]) of the logical batch; empty for
            passes that come whole.
        surroundings: Generators and autocast as they were.
        draws: The random numbers of samples, and how many it had drawn before; None if it draws
            from generators.
        parts: Its granules.
        has_loss: Whether a loss was sent back through it since labels were drawn.
    """

    inputs: tuple[tuple, dict[str, Any]]
    num_rows: int
    edges: tuple[int, ...]
    surroundings: RngAutocastState
    draws: tuple[BatchDraws, list[tuple[int, int]]] | None
    parts: list[PassPart]
    has_loss: bool = False

    @property
    def num_real(self) -> int:
        """Rows of it that are samples."""
        real = [self.num_rows if p.is_real is None else int(p.is_real.sum()) for p in self.parts]
        return sum(real)

    @cached_property
    def inputs_of_parts(self) -> list[Any]:
        """What each of its parts was called with."""
        return parts_of(self.inputs, len(self.parts))


# --- likelihoods: gradients of -log p with respect to outputs z [batch, tokens, outputs] ----------


def _draw_categorical(z: Tensor, stream: Stream, first_row: int) -> Tensor:
    """Softmax(z) - e_y for drawn classes y, from logits; rows are numbered from `first_row`."""
    u = uniform(stream, _box(z[..., 0], first_row), dtype=torch.float64, device=z.device)
    if z.is_cuda and takes(z) and z.stride(-1) == 1:  # in the dtype in which it is sent back
        return import_module("unison.kernels.kfac_triton").drawn(z, u)
    gradient = torch.softmax(z, dim=-1, dtype=wide_dtype(z.dtype))
    y = drawn_classes(gradient, u).unsqueeze(-1)
    return gradient.scatter_add_(-1, y, gradient.new_full((), -1.0).expand(y.shape))


def _draw_bernoulli(z: Tensor, stream: Stream, first_row: int) -> Tensor:
    """σ(z) - y for a drawn yes or no y per output, from logits."""
    p = torch.sigmoid(z.double())
    u = uniform(stream, _box(z, first_row), dtype=torch.float64, device=z.device)
    return (p - (u < p).double()).to(wide_dtype(z.dtype))


def _draw_gaussian(z: Tensor, stream: Stream, first_row: int) -> Tensor:
    """-ε for means z of unit variance (the loss is half the squared error); not a matter of z."""
    return -normal(stream, _box(z, first_row), dtype=wide_dtype(z.dtype), device=z.device)


def _categorical_column(z: Tensor, c: int) -> Tensor:
    """√p_c (p - e_c) of class c."""
    column = torch.softmax(z, dim=-1, dtype=wide_dtype(z.dtype))
    root = column[..., c : c + 1].sqrt()
    column[..., c] -= 1
    return column * root


def _bernoulli_column(z: Tensor, c: int) -> Tensor:
    """√(p(1 - p)) e_c of output c."""
    p = torch.sigmoid(z[..., c].to(wide_dtype(z.dtype)))
    column = _gaussian_column(z, c)
    column[..., c] = (p * (1 - p)).sqrt()
    return column


def _gaussian_column(z: Tensor, c: int) -> Tensor:
    """e_c of output c."""
    column = torch.zeros_like(z, dtype=wide_dtype(z.dtype))
    column[..., c] = 1.0
    return column


DRAWN: dict[str, Callable[[Tensor, Stream, int], Tensor]] = {
    "categorical": _draw_categorical,
    "bernoulli": _draw_bernoulli,
    "gaussian": _draw_gaussian,
}
COLUMNS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "categorical": _categorical_column,
    "bernoulli": _bernoulli_column,
    "gaussian": _gaussian_column,
}


def drawn_classes(p: Tensor, u: Tensor) -> Tensor:  # [..., classes], [...] -> [...]
    """The class in which u, uniform in [0, 1), falls if classes lie side by side, p wide each.

    Blocks of classes are added up as they are, and the rest is done in float64: a language model's
    probabilities are read once. To be asked for another dtype, a GPU's sum makes a copy of them.
    """
    classes = p.shape[-1]
    full = classes // BLOCK * BLOCK
    sums = p[..., :full].unflatten(-1, (-1, BLOCK)).sum(dim=-1).double()
    if full < classes:
        rest = p[..., full:].sum(dim=-1, keepdim=True).double()
        sums = torch.cat([sums, rest], dim=-1)  # [..., blocks]
    below = sums.cumsum(dim=-1)
    # The last sum is 1 but for rounding; scaled by it, no u falls past the last class.
    place = (u * below[..., -1]).unsqueeze(-1)
    block = torch.searchsorted(below, place, right=True).clamp_(max=sums.shape[-1] - 1)
    place = place - (below - sums).gather(-1, block)
    inside = block * BLOCK + torch.arange(BLOCK, device=p.device)  # [..., BLOCK]
    own = p.gather(-1, inside.clamp(max=classes - 1)).double()
    own = torch.where(inside < classes, own, 0.0).cumsum(dim=-1)
    # A block's sum was rounded: scaled, too, so that no class of probability 0 lies behind it.
    place = place / sums.gather(-1, block) * own[..., -1:]
    found = block * BLOCK + torch.searchsorted(own, place, right=True).clamp_(max=BLOCK - 1)
    return found.clamp_(max=classes - 1).squeeze(-1)


def _box(like: Tensor, first_row: int) -> Box:
    """The elements of outputs, or of their tokens, with all rows `ROW` tokens apart."""
    batch, tokens, *outputs = like.shape
    last, none = first_row + batch, [0] * len(outputs)
    return Box((last, ROW, *outputs), (first_row, 0, *none), (last, tokens, *outputs))


# --- gradients of the outputs ---------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Sampled:
    """Labels for one pass; `backward` keeps their gradients, `KFAC.step` makes records of them.

    It does what `loss.backward(retain_graph=True)` would, as far as the curvature is concerned, and
    leaves `.grad` of all parameters alone.

    Attributes:
        current: The pass.
        logits: Made of its outputs [batch, ..., outputs]; None once they were looked at, since they
            hold a graph.
        mask: Which labels count [batch, ...], broadcast against the labels; None if all do.
        token_mask: Which tokens inside of the module are real [batch, ...]; None if all are, or are
            those of the labels.
        config: For the kind of Fisher matrix and the likelihood.
        step: Number of the step: it names the stream.
        divisor: What the user's loss divides by; None for the number of labels, or 1.
        passes: Where the pass is kept.
        shifts: Where it is noted how the loss changes with all logits of a token; None if that
            need not be known.
    """

    current: Pass
    logits: Tensor | None
    mask: Tensor | None
    token_mask: Tensor | None
    config: KFACConfig
    step: int
    divisor: float | None
    passes: list[Pass]
    shifts: list[Tensor] | None

    def _stream(self, name: str) -> Stream:
        return Stream(Key.from_seed(self.config.seed), name, step=self.step, purpose="kfac")

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
        if any(self.current is each for each in self.passes):
            raise BadInput("kfac.sample(...).backward() was called twice for one forward pass")
        assert self.logits is not None
        parts, logits = self.current.parts, tensors_of(self.logits)
        self.logits = None
        if len(logits) != len(parts):
            raise BadInput(
                f"expected logits of {len(parts)} granules, found {len(logits)}: take them from "
                "the last forward pass"
            )
        masks = []
        for each in (self.mask, self.token_mask):
            own = [None] * len(parts) if each is None else tensors_of(each)
            if len(own) != len(parts):
                raise BadInput(f"expected a mask of {len(parts)} granules, found {len(own)}")
            masks.append(own)
        for part, each, *own in zip(parts, logits, *masks, strict=True):
            self._keep(part, each, *own)
        self.passes.append(self.current)

    def _keep(
        self, part: PassPart, logits: Tensor, mask: Tensor | None, token_mask: Tensor | None
    ) -> None:
        """Keep the gradients of one part's outputs, and let the outputs go."""
        rows, outputs = self.current.num_rows, part.outputs
        if logits.ndim < 2 or logits.shape[0] != rows:
            raise BadInput(
                f"expected logits [batch of {rows}, ..., outputs], found {list(logits.shape)}"
            )
        z = _with_tokens(logits)
        part.num_outputs = logits.shape[-1]
        part.mask = _full_mask(mask, part.is_real, logits.shape[:-1], z.device)
        part.num_terms = z.shape[:-1].numel() if part.mask is None else int(part.mask.sum())
        if token_mask is not None:
            if token_mask.ndim < 2 or len(token_mask) != rows:
                raise BadInput(
                    f"expected a token_mask [batch of {rows}, tokens], found "
                    f"{list(token_mask.shape)}"
                )
            real = _full_mask(token_mask, part.is_real, token_mask.shape, z.device)
            assert real is not None
            part.token_mask = real if part.mask is None else real & part.mask.any(1, keepdim=True)
        if self.shifts is not None and logits.requires_grad:
            logits.register_hook(partial(_note_shift, self.shifts))
        own = [place for place, output in outputs.items() if output is logits]
        part.logits = own[0] if own else None
        if self.config.head == "exact":
            if not own:
                raise BadInput(
                    "head='exact' is of the matrix that makes the logits, and these are not what "
                    "the module returned: pass kfac.sample its own output, or head='sampled'"
                )
            of_tokens = _box(z[..., 0], part.first_id)
            part.draws = uniform(
                self._stream("head"), of_tokens, dtype=torch.float32, device=z.device
            )
        if self.config.fisher == "empirical":
            self._wait_for_loss(part)
        elif own:
            # Nothing lies between them: made again from the same logits when they are needed, as
            # those of a language model are large.
            columns = self._columns(z, part, has_room=True)
            part.gradients = [{own[0]: partial(_made_again, make)} for make in columns]
        else:
            columns = self._columns(z, part, has_room=False)
            part.gradients = [_sent_back(outputs, logits, make(z)) for make in columns]
        # Gradients of the drawn labels have passed: what comes from here on is the user's loss.
        note = partial(_note_loss, weakref.ref(self.current))  # a graph must not keep the inputs
        for output in outputs.values():
            output.register_hook(note)
        part.outputs = {}

    def _columns(
        self, z: Tensor, part: PassPart, *, has_room: bool
    ) -> list[Callable[[Tensor], Tensor]]:
        """What makes the gradients of the logits [batch, tokens, outputs], one backward pass each.

        Args:
            z: The logits.
            part: What they are of; its mask is there.
            has_room: Whether gradients are made when they are needed, rather than kept.
        """
        fisher, (_, tokens, outputs) = self.config.fisher, z.shape
        if fisher == "mc":
            draw, stream = DRAWN[self.config.likelihood], self._stream("labels")
            return [lambda z: _counted_only(draw(z, stream, part.first_id), part.mask)]
        if fisher == "forward":  # inputs are all that is looked at
            return [torch.zeros_like]
        if outputs > MOST_EXACT:
            raise BadInput(
                f"fisher='exact' needs a backward pass for each of {outputs} outputs, "
                f"at most {MOST_EXACT}; use fisher='mc'"
            )
        num_labels = max(tokens, 1) * outputs  # of a row, whatever rows a rank has
        row_size = sum(each[:1].numel() for each in part.outputs.values())
        if num_labels <= MOST_EXACT and (has_room or num_labels * row_size <= MOST_SENT):
            places = [(token, c) for token in range(max(tokens, 1)) for c in range(outputs)]
            return [partial(self._exact_column, part=part, token=t, c=c) for t, c in places]
        return [partial(self._exact_column, part=part, token=None, c=c) for c in range(outputs)]

    def _exact_column(self, z: Tensor, *, part: PassPart, token: int | None, c: int) -> Tensor:
        """Column c of one token's labels; for None of all tokens', with a sign each."""
        column = _counted_only(COLUMNS[self.config.likelihood](z, c), part.mask)
        if token is not None:
            kept = torch.zeros_like(column)
            kept[:, token : token + 1] = column[:, token : token + 1]
            return kept
        batch, tokens, outputs = z.shape
        first, last = part.first_id, part.first_id + batch
        box = Box((last, ROW, outputs), (first, 0, c), (last, tokens, c + 1))
        is_turned = uniform(self._stream("signs"), box, dtype=torch.float32, device=z.device) < 0.5
        return torch.where(is_turned, -column, column)

    def _wait_for_loss(self, part: PassPart) -> None:
        """Take the gradients of the user's own loss, as those of a sum."""
        scale = self.divisor
        if scale is None:
            scale = part.num_terms if self.config.loss_reduction == "mean" else 1
        sums: dict[int, Tensor] = {}
        part.gradients, part.scale = [sums], float(scale)

        def keep(place: int, gradient: Tensor) -> None:
            own = gradient.detach()
            sums[place] = sums[place] + own if place in sums else own

        for place, output in part.outputs.items():
            output.register_hook(partial(keep, place))


def _made_again(make: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    return make(_with_tokens(logits)).view(logits.shape)


def _note_loss(own: "weakref.ref[Pass]", _: Tensor) -> None:
    if (current := own()) is not None:
        current.has_loss = True


def _note_shift(shifts: list[Tensor], gradient: Tensor) -> None:
    """Note how much of a loss's gradient is one number for all logits of a token."""
    gradient = gradient.detach().float()
    shifts.append(gradient.sum(dim=-1).abs().sum() / gradient.abs().sum())


def warn_of_shifts(shifts: Sequence[Tensor], likelihood: str) -> None:
    """Warn of a loss that is not the likelihood's.

    No loss of class probabilities changes when one number is added to all logits of a token.
    """
    is_asked = likelihood == "categorical" and has_values()
    if is_asked and any(float(each) > MOST_SHIFT for each in shifts):
        warnings.warn(
            "likelihood='categorical' takes the outputs for logits of classes, and the loss is not "
            "one of class probabilities: it changes when one number is added to all outputs of a "
            "label. Pass KFACConfig(likelihood='gaussian') for squared errors, 'bernoulli' for "
            "several yes or no in one",
            stacklevel=5,  # of whoever calls `step`
        )


def _counted_only(column: Tensor, mask: Tensor | None) -> Tensor:
    """Zeros for tokens that do not count."""
    return column if mask is None else torch.where(mask[..., None], column, 0.0)


def _with_tokens(logits: Tensor) -> Tensor:  # [batch, ..., outputs] -> [batch, tokens, outputs]
    return logits.detach().reshape(len(logits), logits.shape[1:-1].numel(), logits.shape[-1])


def _sent_back(outputs: Mapping[int, Tensor], logits: Tensor, column: Tensor) -> dict[int, Tensor]:
    """The gradients of the module's outputs from one of the logits."""
    found: Sequence[Tensor | None] = [None] * len(outputs)
    if logits.requires_grad:
        found = torch.autograd.grad(
            logits,
            list(outputs.values()),
            column.view(logits.shape).to(logits.dtype),
            retain_graph=True,
            allow_unused=True,
        )
    pairs = zip(outputs, found, strict=True)
    gradients = {place: each for place, each in pairs if each is not None}
    if not gradients:
        raise BadInput(
            "the logits were not made of what the module's last forward pass returned; call "
            "kfac.sample with them before the module runs again"
        )
    return gradients


def with_loss(passes: Sequence[Pass], step: int) -> Sequence[Pass]:
    """The passes that a loss was sent back through; a warning tells of the others.

    A loop that gives a batch up after `kfac.sample` leaves such a pass behind. Where no pass has a
    loss, gradients were made of other ones, and all count.
    """
    kept = [each for each in passes if each.has_loss]
    if len(kept) in (0, len(passes)):
        return passes
    warnings.warn(
        f"step {step} updates the factors without {len(passes) - len(kept)} of {len(passes)} "
        "sampled passes, through which loss.backward() did not go. Call kfac.forget() where the "
        "loop gives a batch up",
        stacklevel=6,  # of whoever calls `step`, past torch.no_grad
    )
    return kept


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
