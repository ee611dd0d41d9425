"""Passes that statistics are made of, and gradients at their outputs, for labels of the model.

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

[Note: a pass of its own] Statistics are not taken from the user's own graph. There, every operation
would have to be watched while DDP, FSDP2 or units expect gradients of it. Instead the inputs of the
pass and the gradients of the drawn labels with respect to the module's *outputs* are kept, and
`kfac.step()` runs the module once more, under the capture, when the user's pass is over: training
computes the same bits with statistics as without, and no two graphs are in memory at a time.

What compiles the user's passes compiles these too. They are tried out like private passes ([Note:
whole, or by blocks] in privacy/compiled.py): the first part of each kind runs both ways, and must
make the same sums. A module for which that does not work runs as it is, and a warning says why.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from unison.capture import AxisTable, Capture, RngAutocastState, batch_size_of, learn_axes, resized
from unison.capture.compiled_forward import CapturedPasses
from unison.capture.torch_compile import backend_of_caller
from unison.errors import BadInput, UnsupportedOperation
from unison.kfac.config import KFACConfig
from unison.kfac.factors import Layer, PartSums, layers_of, phase, plain_record
from unison.ops import Record
from unison.parallel import ParallelAdapter, find_shared, private_trainings
from unison.parallel.granules import (
    BatchRows,
    draws_of_pass,
    joined,
    parts_of,
    requires_grad,
    rows_of,
    tensors_of,
)
from unison.rng import BatchDraws, Box, Key, Stream, normal, uniform
from unison.rng.draw_mode import drawing_again, of_granule, outside_draws
from unison.torch_internals import DynamoBackend, has_values, machine_of

ROW = 1 << 24  # tokens that a row could have
BLOCK = 256  # classes whose probabilities are added up first
MOST_EXACT = 1024  # outputs for which all labels are gone through, and labels of a row one by one
MOST_SHIFT = 0.1  # of a gradient; rounding and small terms beside the likelihood make less
MOST_SENT = 1 << 20  # elements of a row's gradients that are kept for that
NUM_SURVEYED = 2  # rows of the small pass that layers are found from
MAX_KINDS = 16  # of parts that are compiled, each with kernels of its own
LEAST_SUM = 1e-4  # of the largest sums of the same kind, which are squares
TOLERANCE = 0.05  # samples that were mistaken for others are off by more, bfloat16 by less

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


@dataclass(eq=False)
class Pass:
    """A forward pass of the user's.

    Attributes:
        inputs: What the module was called with: (args, kwargs).
        num_rows: Rows of the batch, or of each granule.
        rows: Which samples they are.
        surroundings: Generators and autocast as they were.
        draws: The random numbers of samples, and how many it had drawn before; None if it draws
            from generators.
        parts: Its granules.
    """

    inputs: tuple[tuple, dict[str, Any]]
    num_rows: int
    rows: BatchRows
    surroundings: RngAutocastState
    draws: tuple[BatchDraws, list[tuple[int, int]]] | None
    parts: list[PassPart]

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
    gradient = torch.softmax(z, dim=-1, dtype=wide(z.dtype))
    y = drawn_classes(gradient, u).unsqueeze(-1)
    return gradient.scatter_add_(-1, y, gradient.new_full((), -1.0).expand(y.shape))


def _draw_bernoulli(z: Tensor, stream: Stream, first_row: int) -> Tensor:
    """σ(z) - y for a drawn yes or no y per output, from logits."""
    p = torch.sigmoid(z.double())
    u = uniform(stream, _box(z, first_row), dtype=torch.float64, device=z.device)
    return (p - (u < p).double()).to(wide(z.dtype))


def _draw_gaussian(z: Tensor, stream: Stream, first_row: int) -> Tensor:
    """-ε for means z of unit variance (the loss is half the squared error); not a matter of z."""
    return -normal(stream, _box(z, first_row), dtype=wide(z.dtype), device=z.device)


def _categorical_column(z: Tensor, c: int) -> Tensor:
    """√p_c (p - e_c) of class c."""
    column = torch.softmax(z, dim=-1, dtype=wide(z.dtype))
    root = column[..., c : c + 1].sqrt()
    column[..., c] -= 1
    return column * root


def _bernoulli_column(z: Tensor, c: int) -> Tensor:
    """√(p(1 - p)) e_c of output c."""
    p = torch.sigmoid(z[..., c].to(wide(z.dtype)))
    return _one_output(z, c, (p * (1 - p)).sqrt())


def _gaussian_column(z: Tensor, c: int) -> Tensor:
    """e_c of output c."""
    return _one_output(z, c, 1.0)


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


def _box(like: Tensor, first_row: int) -> Box:
    """The elements of outputs, or of their tokens, with all rows `ROW` tokens apart."""
    batch, tokens, *outputs = like.shape
    last = first_row + batch
    return Box(
        (last, ROW, *outputs), (first_row, 0, *(0 for _ in outputs)), (last, tokens, *outputs)
    )


def _one_output(z: Tensor, c: int, value: Tensor | float) -> Tensor:
    column = torch.zeros_like(z, dtype=wide(z.dtype))
    column[..., c] = value
    return column


# --- gradients of the outputs ---------------------------------------------------------------------


class Sampled:
    """Labels for one pass; `backward` keeps their gradients, `KFAC.step` makes records of them.

    It does what `loss.backward(retain_graph=True)` would, as far as the curvature is concerned, and
    leaves `.grad` of all parameters alone.

    Args:
        current: The pass.
        logits: Made of its outputs [batch, ..., outputs].
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

    def __init__(
        self,
        current: Pass,
        logits: Tensor,
        mask: Tensor | None,
        token_mask: Tensor | None,
        config: KFACConfig,
        step: int,
        divisor: float | None,
        passes: list[Pass],
        shifts: list[Tensor] | None,
    ) -> None:
        self._pass, self._masks = current, (mask, token_mask)
        self._shifts = shifts
        self._logits: Tensor | None = logits  # until they were looked at: they hold a graph
        self._config, self._divisor, self._passes = config, divisor, passes
        key = Key.from_seed(config.seed)
        self._stream = Stream(key, "labels", step=step, purpose="kfac")
        self._signs = Stream(key, "signs", step=step, purpose="kfac")

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
        masks = [
            [None] * len(parts) if each is None else list(tensors_of(each)) for each in self._masks
        ]
        for each in masks:
            if len(each) != len(parts):
                raise BadInput(f"expected a mask of {len(parts)} granules, found {len(each)}")
        for part, each, *own in zip(parts, logits, *masks, strict=True):
            self._keep(part, each, *own)
        self._passes.append(self._pass)

    def _keep(
        self, part: PassPart, logits: Tensor, mask: Tensor | None, token_mask: Tensor | None
    ) -> None:
        """Keep the gradients of one part's outputs, and let the outputs go."""
        rows, outputs = self._pass.num_rows, part.outputs
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
        if self._shifts is not None and logits.requires_grad:
            logits.register_hook(partial(_note_shift, self._shifts))
        own = [place for place, output in outputs.items() if output is logits]
        if self._config.fisher == "empirical":
            self._wait_for_loss(part)
            part.outputs = {}
            return
        columns = self._columns(z, part, has_room=bool(own))
        if own:
            # Nothing lies between them: made again from the same logits when they are needed, as
            # those of a language model are large.
            part.gradients = [{own[0]: partial(self._draw, make)} for make in columns]
        else:
            part.gradients = [_sent_back(outputs, logits, make(z)) for make in columns]
        part.outputs = {}

    def _draw(self, make: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
        return make(_with_tokens(logits)).view(logits.shape)

    def _columns(
        self, z: Tensor, part: PassPart, *, has_room: bool
    ) -> list[Callable[[Tensor], Tensor]]:
        """What makes the gradients of the logits [batch, tokens, outputs], one backward pass each.

        Args:
            z: The logits.
            part: What they are of; its mask is there.
            has_room: Whether gradients are made when they are needed, rather than kept.
        """
        fisher, (_, tokens, outputs) = self._config.fisher, z.shape
        if fisher == "mc":
            draw = DRAWN[self._config.likelihood]
            return [lambda z: _counted_only(draw(z, self._stream, part.first_id), part.mask)]
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
        column = _counted_only(COLUMNS[self._config.likelihood](z, c), part.mask)
        if token is not None:
            kept = torch.zeros_like(column)
            kept[:, token : token + 1] = column[:, token : token + 1]
            return kept
        batch, tokens, outputs = z.shape
        first, last = part.first_id, part.first_id + batch
        box = Box((last, ROW, outputs), (first, 0, c), (last, tokens, c + 1))
        is_turned = uniform(self._signs, box, dtype=torch.float32, device=z.device) < 0.5
        return torch.where(is_turned, -column, column)

    def _wait_for_loss(self, part: PassPart) -> None:
        """Take the gradients of the user's own loss, as those of a sum."""
        scale = self._divisor
        if scale is None:
            scale = part.num_terms if self._config.loss_reduction == "mean" else 1
        sums: dict[int, Tensor] = {}
        part.gradients, part.scale = [sums], float(scale)

        def keep(place: int, gradient: Tensor) -> None:
            own = gradient.detach()
            sums[place] = sums[place] + own if place in sums else own

        for place, output in part.outputs.items():
            output.register_hook(partial(keep, place))


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


# --- the user's passes ----------------------------------------------------------------------------


class PassRecorder:
    """Keeps forward passes of a module while statistics are wanted; nothing else is touched.

    Args:
        module: What the user calls.
        adapter: How its parameters lie on ranks.
        is_wanted: Whether passes are to be kept.

    Attributes:
        current: The last pass; None before the first and after `forget`.
        backend: What compiles the code around the module, as of the last pass; None if nothing.
    """

    def __init__(
        self, module: nn.Module, adapter: ParallelAdapter, is_wanted: Callable[[], bool]
    ) -> None:
        self._module, self._adapter, self._is_wanted = module, adapter, is_wanted
        self.current: Pass | None = None
        self.backend: DynamoBackend | None = None
        self.is_paused = False
        self._num_rows = 0  # of all ranks in earlier batches of this step
        self._surroundings: RngAutocastState | None = None
        self._draws: tuple[BatchDraws, list[tuple[int, int]]] | None = None
        before, after = partial(_as_python, self._before), partial(_as_python, self._after)
        self._handles = [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def detach(self) -> None:
        """Leave the module as it was."""
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PassRecorder":
        """Copies of the module share the hooks, which do nothing for them."""
        return self

    def forget(self) -> None:
        """Begin another step."""
        self.current, self._num_rows = None, 0

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        is_ours = module is self._module and not self.is_paused
        self._surroundings = None
        if is_ours and torch.is_grad_enabled() and self._is_wanted():
            refuse_private(dict(module.named_parameters()))
            self.backend = backend_of_caller()
            self._surroundings = RngAutocastState.here(module)
            draws = draws_of_pass((args, kwargs))
            self._draws = draws and (draws, draws.state())

    def _after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        surroundings, self._surroundings = self._surroundings, None
        if surroundings is None:
            return None
        inputs, ranks = (args, kwargs), self._adapter.ranks
        num_rows = batch_size_of(inputs)
        rows, self._num_rows = rows_of(inputs, num_rows, ranks, self._num_rows)
        granules: Sequence[int | None] = rows.granules or (None,)
        parts = [
            PassPart(granule, {}, first, real)
            for granule, first, real in zip(granules, rows.first_ids, rows.is_real, strict=True)
        ]
        flat, spec = tree_flatten(output)
        for place, value in enumerate(flat):
            if requires_grad(value):
                # Another tensor than the one that units and FSDP2 wait for gradients of.
                seen = [each.view_as(each) for each in tensors_of(value)]
                for part, each in zip(parts, seen, strict=True):
                    part.outputs[place] = each
                flat[place] = joined(seen, value)
        self.current = Pass(inputs, num_rows, rows, surroundings, self._draws, parts)
        return tree_unflatten(flat, spec)


def _as_python(hook: Callable[..., Any], *args: Any) -> Any:
    """Run a hook as it is where the module around it is compiled, which goes on below it."""
    if torch.compiler.is_compiling():
        hook = torch.compiler.disable(hook, reason="KFAC keeps what goes into the module")
    return hook(*args)


def refuse_private(params: Mapping[str, Tensor]) -> None:
    """Refuse curvature for parameters that are trained privately.

    Raises:
        UnsupportedOperation: Naming one, whatever modules hold it.
    """
    if (name := find_shared(params, private_trainings)) is not None:
        raise UnsupportedOperation(
            f"{name} is trained privately, and curvature of the private batch without noise of its "
            "own would leak it: a preconditioned step is then no longer private. Train without "
            "KFAC, or detach() the privacy engine first"
        )


# --- under the capture ----------------------------------------------------------------------------


class Collector:
    """Runs passes of a module under the capture.

    Args:
        adapter: How its parameters lie on ranks.
        config: What is collected.
    """

    def __init__(self, adapter: ParallelAdapter, config: KFACConfig) -> None:
        self._adapter, self._config = adapter, config
        self._module = adapter.module
        self._axes: AxisTable | None = None
        self._num_columns = 1

    def find_layers(self, example: Pass, num_rows: int) -> list[Layer]:
        """Find the layers from a small pass; every rank runs one. See factors.py.

        Args:
            example: A pass of the update.
            num_rows: Rows of the update, of all ranks.
        """
        uses: dict[str, list[Record]] = {}

        def note(name: str, record: Any) -> None:
            uses.setdefault(name, []).append(plain_record(record))

        inputs = _with_rows(example.inputs_of_parts[0], NUM_SURVEYED)
        with self._prepared(example, has_rows=False):
            capture = self._capture(NUM_SURVEYED, inputs, note)
            with capture.installed(), torch.enable_grad():
                flat = tree_flatten(_call(self._module, inputs))[0]
                outputs = [each for each in flat if requires_grad(each)]
                with self._in_full_precision():
                    torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        shapes = {each.name: each.shape for each in self._adapter.params}
        return layers_of(uses, shapes, self._config, num_rows, example.parts[0].num_outputs)

    def run(
        self,
        passes: Sequence[Pass],
        layers: Sequence[Layer],
        num_parts: int,
        num_columns: int,
        like: Tensor,
        compiled: "CompiledStatistics | None",
    ) -> Iterator[tuple[int | None, list[Tensor | None], dict[tuple[str, str], Tensor]]]:
        """Make the sums of all parts of some passes.

        Args:
            passes: This rank's.
            layers: What to make sums of.
            num_parts: The most parts that any rank has: every rank runs as many, so that all call
                the same collectives.
            num_columns: The most backward passes that any part of any rank needs, likewise.
            like: Of the dtype and on the device that sums are made in.
            compiled: Compiles the passes; None if they run as they are.

        Yields:
            Each part's granule, its sums by layer, and its rows by layer and side held as columns.
        """
        self._num_columns = num_columns
        for each in passes:
            for index, part in enumerate(each.parts):
                num_parts -= 1
                sums = self._sums(each, index, layers, compiled)
                columns = {key: torch.cat(rows).to(like) for key, rows in sums.columns.items()}
                sums.columns.clear()
                yield part.granule, sums.vectors(like), columns
        for _ in range(num_parts):  # a rank with fewer parts keeps the others company
            self._sums(passes[-1], 0, [], compiled)

    def _sums(
        self,
        each: Pass,
        index: int,
        layers: Sequence[Layer],
        compiled: "CompiledStatistics | None",
    ) -> PartSums:
        """Make the sums of one part of a pass, compiled if that may be."""

        def run(is_compiled: bool) -> PartSums:
            return self._run_part(each, index, layers, compiled if is_compiled else None)

        return run(False) if compiled is None else compiled.sums(run)

    def _run_part(
        self,
        each: Pass,
        index: int,
        layers: Sequence[Layer],
        compiled: "CompiledStatistics | None",
    ) -> PartSums:
        part, inputs, rows = each.parts[index], each.inputs_of_parts[index], each.num_rows
        is_empty = rows == 0
        sums = taken = PartSums(layers, self._config, part.mask, part.token_mask, part.num_terms)
        if is_empty:  # a rank without rows runs one of zeros, and counts nothing of it
            rows, inputs = 1, _with_rows(inputs, 1)
            taken = PartSums([], self._config, None, None, 0)
        with (
            self._prepared(each, has_rows=not is_empty),
            nullcontext() if part.granule is None else of_granule(index),  # of the draws there
        ):
            capture = self._capture(rows, inputs, taken.record)
            with (
                capture.installed(),
                nullcontext() if compiled is None else compiled.running([capture]),
                torch.enable_grad(),
            ):
                flat = tree_flatten(_call(self._module, inputs))[0]
                with self._in_full_precision():
                    for number in range(self._num_columns):
                        is_there = number < len(part.gradients) and not is_empty
                        column = part.gradients[number if is_there else 0]
                        outputs = [flat[place] for place in column]
                        values = [
                            _gradient_of(flat[place], value if is_there else None, part.scale)
                            for place, value in column.items()
                        ]
                        is_kept = number + 1 < self._num_columns
                        torch.autograd.backward(outputs, values, retain_graph=is_kept)
                        taken.end_column()
            capture.release()
        return sums

    def _in_full_precision(self) -> AbstractContextManager[object]:
        """No autocast, which would round the sums that are made of records."""
        return torch.autocast(machine_of(self._adapter.device), enabled=False)

    @contextmanager
    def _prepared(self, each: Pass, *, has_rows: bool) -> Iterator[None]:
        """All as it was in the user's pass; buffers and generators are put back afterwards.

        Args:
            each: The pass.
            has_rows: Whether the rows are those of the pass, which have numbers of their own.
        """
        draws, state = each.draws if each.draws is not None and has_rows else (None, None)
        with each.surroundings.restored(), drawing_again(draws, state), _buffers_kept(self._module):
            yield

    def _capture(self, rows: int, inputs: Any, on_record: Any) -> Capture:
        if self._axes is None:
            example = _with_rows(inputs, max(rows, NUM_SURVEYED))
            with outside_draws():
                self._axes = learn_axes(self._module, _call, example)
        capture = Capture(self._module, rows, axes=self._axes, on_record=on_record)
        capture.factored = {each.name for each in self._adapter.params}
        return capture


def _gradient_of(output: Tensor, gradient: Gradient | None, scale: float) -> Tensor:
    """What to send back from an output; zeros for None."""
    if gradient is None:
        return torch.zeros_like(output)
    with phase("labels"):
        value = gradient if isinstance(gradient, Tensor) else gradient(output)
        if scale != 1.0:  # in float32: float16 may have no room for a sum's gradient before
            value = value.to(wide(value.dtype)) * scale
        return value.to(output.dtype)


def _call(module: nn.Module, inputs: Any) -> Any:
    return module(*inputs[0], **inputs[1])


def _with_rows(inputs: Any, num_rows: int) -> Any:
    """Inputs of another number of rows, the same ones again and again; zeros if there are none."""

    def filled(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[0]:
            return value
        return value.new_zeros(num_rows, *value.shape[1:])

    return resized(tree_map(filled, inputs), num_rows)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Undo what a pass writes to buffers: running statistics have seen the batch already."""
    kept = [(each, each.detach().clone(), each._version) for each in module.buffers()]
    try:
        yield
    finally:
        for each, value, version in kept:
            if each._version != version:
                with torch.no_grad():
                    each.copy_(value)


# --- compiled -------------------------------------------------------------------------------------


class CompiledStatistics(CapturedPasses):
    """Compiles a module's passes for statistics.

    Args:
        module: What runs under the capture.
        inner: The backend that compiles the user's passes.
        is_granular: Whether passes are cut into granules.
        agree: Whether something is so on any rank; a collective.
        keeps_graph: Whether several backward passes go through one graph.

    Attributes:
        settings: The backend, and whether passes are cut.
    """

    what = "passes for statistics"

    def __init__(
        self,
        module: nn.Module,
        inner: DynamoBackend,
        *,
        is_granular: bool,
        agree: Callable[[bool], bool],
        keeps_graph: bool,
    ) -> None:
        super().__init__(module, inner, is_granular=is_granular, agree=agree)
        self.settings = inner, is_granular
        self._keeps_graph = keeps_graph
        self._kinds: set[Hashable] = set()
        self._is_new = True  # a kind of some part of the update under way, on any rank

    @property
    def is_aside(self) -> bool:
        """Whether the module does not run for statistics; see `CapturedPasses`."""
        return self.is_trying or not self._captures

    @contextmanager
    def attached(self, passes: Sequence[Pass]) -> Iterator[None]:
        """Around an update; a collective.

        Args:
            passes: Those that this rank runs.
        """
        if self.refusal is None:
            kinds = [_kind(each, inputs) for each in passes for inputs in each.inputs_of_parts]
            self._is_new = self._agree(not self._kinds.issuperset(kinds))
            self._kinds.update(kinds)
        self.attach()
        try:
            is_new = self.refusal is None and self._is_new
            if is_new and self._agree(len(self._kinds) > MAX_KINDS):
                self._refuse(
                    f"batches come in more than {MAX_KINDS} shapes, and each would be compiled; "
                    "pad them to a few lengths"
                )
            yield
        finally:
            self.detach()

    @contextmanager
    def running(self, captures: Sequence[Capture]) -> Iterator[None]:
        """Around a pass that is compiled; see `CapturedPasses`."""
        config: Any = torch._functorch.config  # type: ignore[attr-defined]
        # A backward pass that may give the graph's buffers away may come only once.
        is_kept = config.patch(donated_buffer=False) if self._keeps_graph else nullcontext()
        with is_kept, super().running(captures):
            yield

    def forget_kinds(self) -> None:
        """Compare again what was compared: it was not finite."""
        self._kinds.clear()

    def sums(self, run: Callable[[bool], PartSums]) -> PartSums:
        """Make the sums of a part; the first ones of each kind are compared with eager ones.

        Args:
            run: Makes them, of a pass that is compiled (True) or runs as it is.
        """
        if self.refusal is not None or not self._is_new:
            return run(self.refusal is None)
        expected, backend = run(False), self._inner
        found: list[PartSums] = []

        def run_compiled() -> PartSums:
            sums = run(True)
            if self._inner is backend:  # the user's
                found.append(sums)
            return sums

        self._try_out(lambda: self._compare(run_compiled, lambda sums: _difference(sums, expected)))
        return expected if self.refusal is not None else found[-1]


def _kind(each: Pass, inputs: Any) -> Hashable:
    """What makes compiled code of parts another one: how many rows they have, and how long."""
    flat = tree_flatten(inputs)[0]
    return each.num_rows, *(tuple(value.shape) for value in flat if isinstance(value, Tensor))


def _difference(found: PartSums, expected: PartSums) -> str | None:
    """Why sums are not those that were expected; None if they are."""
    values, wanted = (
        {**each.sums, **{key: torch.cat(rows) for key, rows in each.columns.items()}}
        for each in (found, expected)
    )
    for name, side in sorted(values.keys() ^ wanted.keys()):
        return f"{side!r} of {name!r} comes out of one of a compiled and an eager pass alone"
    sizes = {key: each.abs().max() for key, each in wanted.items() if each.numel()}
    largest: dict[str, Tensor] = {}
    for (_, side), size in sizes.items():
        largest[side] = torch.maximum(size, largest.get(side, size))
    if not all(torch.isfinite(size) for size in largest.values()):
        return None  # nothing can be told; the step is left out, and the next one compares
    for (name, side), size in sizes.items():
        # Softmax does not see a bias of keys: its gradient is nothing but rounding.
        scale = torch.maximum(size, LEAST_SUM * largest[side]).clamp(min=1e-30)
        off = float((values[name, side] - wanted[name, side]).abs().max() / scale)
        if not off < TOLERANCE:
            return f"{side!r} of {name!r} differs by {off:.1%} from that of an eager pass"
    return None
