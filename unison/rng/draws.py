"""Random numbers that belong to samples: dropout and every other draw of a model's pass.

[Note: draws] A number that a model draws depends on (key, step, which draw of the pass it is,
global sample, position in the sample), and so neither on the rank nor on what else the rank
computes. A torch function mode sees the draws. Dropout is computed here. All other functions run as
torch wrote them, for one sample after the other, while torch's generator is seeded by those
numbers; so does attention with dropout, whose fused kernels keep no matrix of weights.

Where are the samples? Along the first dimension, each with the same number of rows in it (hidden
states may be flattened); or along the one other dimension that is as long as there are samples.
What fits neither (a number, a mask over positions, a dropped weight) has nothing to do with
samples, and is the same for all of them.

[Note: draws run again] Activation checkpointing runs a part of the forward pass again, during the
backward pass, in another thread on CUDA. A draw notices which checkpoint it is in, and lets the
recompute begin with the numbers that its forward began with.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from unison import check
from unison.errors import BadInput, UnsupportedOperation
from unison.kernels.random import Cipher, Distribution, Recipe, fill_rows, fused_drop, fuses
from unison.modes import pushed_lowest
from unison.rng.keys import Key
from unison.rng.streams import MAX_ELEMENTS, Stream

Join = Callable[[list[Any]], Any]
"""Makes one value of one per granule."""


@dataclass(eq=False)
class Rows:
    """Samples that are computed together, and how many draws they have made."""

    ids: Tensor  # int64 [rows], CPU
    count: int = 0
    shared_count: int = 0  # of draws that are the same for all samples

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Rows whose samples follow one another: (how many, id of the first)."""
        found: list[tuple[int, int]] = []
        for sample in self.ids.tolist():
            if found and sample == sum(found[-1]):
                found[-1] = found[-1][0] + 1, found[-1][1]
            else:
                found.append((1, sample))
        return found


class Draws:
    """The draws of the passes over one batch.

    Args:
        key: Root key.
        step: Training step.
        sample_ids: Global index of the sample in each row.
        num_granules: In how many granules the rows are computed.
        join: Where operations map over granules: how their results become one.
    """

    def __init__(
        self,
        key: Key,
        step: int,
        sample_ids: Tensor | Sequence[int],
        num_granules: int = 1,
        join: Join | None = None,
    ) -> None:
        check.not_negative(step=step)
        ids = torch.as_tensor(sample_ids, dtype=torch.int64, device="cpu").reshape(-1)
        if len(ids) and int(ids.min()) < 0:
            raise BadInput(f"expected sample ids of 0 or more, found {int(ids.min())}")
        self.key, self.step, self.ids, self.join = key, step, ids, join
        self.granules = [Rows(each) for each in ids.view(num_granules, -1)]
        self._cuts: dict[int, Draws] = {}
        self._words = [Stream(key, name, step, "draw").words for name in ("rows", "shared")]
        self._tables: dict[tuple[torch.device, int], Tensor] = {}

    def cut(self, num_granules: int, join: Join | None) -> "Draws":
        """The draws of the same rows in granules; the same object each time."""
        if num_granules not in self._cuts:
            self._cuts[num_granules] = Draws(self.key, self.step, self.ids, num_granules, join)
        return self._cuts[num_granules]

    def state(self) -> list[tuple[int, int]]:
        """How many draws each granule has made."""
        return [(rows.count, rows.shared_count) for rows in self.granules]

    def set_state(self, state: list[tuple[int, int]]) -> None:
        """Go on from an earlier `state`."""
        for rows, (count, shared_count) in zip(self.granules, state, strict=True):
            rows.count, rows.shared_count = count, shared_count

    def words(self, number: int, *, is_shared: bool = False) -> tuple[int, ...]:
        """The stream of a draw: that of the step, at a counter of its own."""
        *others, last = self._words[is_shared]
        return *others, (last + number) & 0xFFFFFFFF

    def words_on(self, device: torch.device, number: int) -> Tensor:  # int64 [8]
        """The stream of a draw where a kernel can read it; many are brought at once."""
        place = device, number // _AT_ONCE
        if place not in self._tables:
            words = torch.tensor([0, 0, *self.words(place[1] * _AT_ONCE), 0, 0]).repeat(_AT_ONCE, 1)
            words[:, 5] += torch.arange(_AT_ONCE)
            words[:, 5] &= 0xFFFFFFFF
            self._tables[place] = words.to(device, non_blocking=True)
        return self._tables[place][number % _AT_ONCE]

    def seed(self, number: int, sample: int | None, *, is_shared: bool = False) -> int:
        """A seed for torch's generator, for a draw and a sample; None for all samples."""
        kind = "shared" if is_shared else "rows"
        sample = -1 if sample is None else sample
        secret = self.key.derive("draw", kind, number, self.step, sample, size=8)
        return int.from_bytes(secret, "little") >> 1


_AT_ONCE = 64


@dataclass(frozen=True)
class _Place:
    """Where the running code draws: of which granule, or at the root of all."""

    draws: Draws
    granule: int | None = None  # None: of all, and values are joined
    is_training: bool = True


# One per process and not per thread: on CUDA the recompute runs in a thread of the autograd engine.
_place: _Place | None = None


@contextmanager
def _at(place: _Place | None) -> Iterator[None]:
    global _place
    before, _place = _place, place
    try:
        yield
    finally:
        _place = before


def current_draws() -> Draws | None:
    """The draws of the running pass; None if they are torch's own."""
    return None if _place is None else _place.draws


@contextmanager
def draws_by_sample(key: Key, step: int, sample_ids: Tensor | Sequence[int]) -> Iterator[Draws]:
    """Say which step this is and which samples the rows of the batch are.

    Enter it once for each micro-batch, around the forward pass; the backward pass may run inside or
    after it. Sharded models that are fed from `unison.deal(loader, granule=...)` need none: the
    batch knows.

    Args:
        key: Root key.
        step: Training step.
        sample_ids: Global index of the sample in each row of the batch.
    """
    draws = Draws(key, step, sample_ids)
    with following(draws):
        yield draws


@contextmanager
def drawing_again(draws: Draws | None, state: list[tuple[int, int]] | None) -> Iterator[None]:
    """Let a block draw what was drawn from an earlier `state` on; None leaves it to torch."""
    if draws is None or state is None:
        with outside_draws():
            yield
        return
    now = draws.state()
    draws.set_state(state)
    try:
        with following(draws):
            yield
    finally:
        draws.set_state(now)


def outside_draws() -> AbstractContextManager[None]:
    """Let passes in this block be nobody's batch: a module is tried out with other rows."""
    return _at(None)


@contextmanager
def following(draws: Draws | None) -> Iterator[None]:
    """Let the draws of this block be these; None leaves them to torch."""
    if draws is None:
        with _at(None):
            yield
        return
    granule = None if draws.join is not None else 0
    with _at(_Place(draws, granule, torch.is_grad_enabled())), pushed_lowest(_MODE):
        yield


def of_granule(index: int, draws: Draws | None = None) -> AbstractContextManager[None]:
    """Let the draws of this block be one granule's, of the running pass or of these."""
    if _place is None:
        if draws is None:
            return nullcontext()
        return _at(_Place(draws, index, torch.is_grad_enabled()))
    return _at(_Place(draws or _place.draws, index, _place.is_training))


@contextmanager
def paused() -> Iterator[None]:
    """Leave draws to torch for a block that must make none.

    Raises:
        UnsupportedOperation: If it makes one.
    """
    if _place is None:
        yield
        return
    before = _generators()
    with outside_draws():
        yield
    if not _are_equal(before, _generators()):
        raise UnsupportedOperation(
            "compiled code draws random numbers (dropout?), which cannot be given to samples: "
            "leave the block uncompiled, or set its dropout to 0"
        )


class _Mode(TorchFunctionMode):
    """Sees every torch function of a pass and takes over those that draw."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in DRAWING or _place is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return draw(func, args, kwargs or {})


_MODE = _Mode()


def draw(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function that may draw, with the numbers of the running pass."""
    place = _place
    if place is None or not _draws_now(func, args, kwargs):
        return func(*args, **kwargs)
    for each in (*args, *kwargs.values()):
        if type(each) is Tensor or not isinstance(each, Tensor):
            continue
        if hasattr(each, "parts"):  # a value per granule maps itself
            return func(*args, **kwargs)
        if hasattr(each, "listener"):  # private training follows it, and calls what it is made of
            with _MODE:
                return type(each).__torch_function__(func, (type(each),), args, kwargs)
    if place.granule is None:
        return _draw_at_root(place.draws, func, args, kwargs)
    if func in _DROPOUTS:
        return _drop(place, *_dropout_of(*args, **kwargs))
    if func is F.scaled_dot_product_attention:
        return _attend(place, *args, **kwargs)
    if isinstance(func, FunctionType) and func.__closure__ is None:
        with _MODE:  # it is written in Python, of functions that are seen here
            return _opened(func)(*args, **kwargs)
    # What torch does inside is seen one level lower, where each draw is an operation of its own.
    is_time_first = func in _RECURRENT and args[0].dim() == 3
    with _Below(place, 1 if is_time_first else None):
        return func(*args, **kwargs)


def _draws_now(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a function draws with these arguments."""
    if func in _DROPOUTS:
        _, p, is_training, _ = _dropout_of(*args, **kwargs)
        return is_training and p > 0.0
    if func is F.scaled_dot_product_attention:
        return (kwargs.get("dropout_p") or (args[4] if len(args) > 4 else 0.0)) > 0.0
    if func in _RECURRENT:
        flags = [each for each in args if isinstance(each, float | bool)]
        place = next(index for index, each in enumerate(flags) if type(each) is float)
        is_drawing = flags[place] > 0.0 and bool(flags[place + 1])
        if is_drawing and args[0].is_cuda:
            raise UnsupportedOperation(
                f"{func.__name__}: cuDNN draws the dropout between layers itself, and its numbers "
                "cannot be given to samples; stack single layers with nn.Dropout between them"
            )
        return is_drawing
    return True


def _draw_at_root(draws: Draws, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Draw where one line of code stands for all granules: a value each, or one for all."""
    first, *others = draws.granules
    count, shared_count = first.count, first.shared_count
    with of_granule(0):
        result = draw(func, args, kwargs)
    if first.count == count:
        if any(rows.shared_count != shared_count for rows in others):
            raise UnsupportedOperation(
                f"{func.__name__}: granules have drawn different numbers of values that all "
                "samples share (torch.rand([]) and the like), so that this one would not be the "
                "same on every rank; draw them outside of branches that depend on data"
            )
        for rows in others:
            rows.shared_count = first.shared_count
        return result
    if any(result is each for each in args):
        raise UnsupportedOperation(
            f"{func.__name__} draws into a tensor that all granules share, of shape "
            f"{list(result.shape)}: make a new one with torch.rand, torch.bernoulli or the like, "
            "or draw inside of a block"
        )
    results = [result]
    for index in range(1, len(draws.granules)):
        with of_granule(index):
            results.append(draw(func, args, kwargs))
    assert draws.join is not None
    return draws.join(results)


@cache
def _opened(func: FunctionType) -> FunctionType:
    """A Python function of torch's that goes on by itself where modes would be asked first.

    It is asked for once, and what it calls is to be seen.
    """
    unasked = {name: _no for name in func.__globals__ if name.startswith("has_torch_function")}
    made = FunctionType(func.__code__, {**func.__globals__, **unasked}, func.__name__)
    made.__defaults__, made.__kwdefaults__ = func.__defaults__, func.__kwdefaults__
    return made


def _no(*_: Any) -> bool:
    return False


# --- where the samples are -----------------------------------------------------------------------


def _samples_at(shape: Sequence[int], num_rows: int) -> int | None:
    """The dimension of samples in a tensor of this shape; None if it has none."""
    if len(shape) == 0 or (len(shape) == 1 and shape[0] == 1) or num_rows == 0:
        return None  # one number is no row
    if shape[0] % num_rows == 0:
        return 0
    fitting = [dim for dim, size in enumerate(shape) if size == num_rows]
    return fitting[0] if len(fitting) == 1 else None


def _count(place: _Place, *, is_shared: bool) -> int:
    """Count a draw of a granule; returns its number."""
    _note_checkpoint(place)
    assert place.granule is not None
    rows = place.draws.granules[place.granule]
    if is_shared:
        rows.shared_count += 1
        return rows.shared_count - 1
    rows.count += 1
    return rows.count - 1


# --- dropout -------------------------------------------------------------------------------------


def _dropout_of(
    input: Tensor,  # noqa: A002 - as torch names it
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool | None = None,
) -> tuple[Tensor, float, bool, bool]:
    """The arguments of `F.dropout` or `torch.dropout`: input, p, whether training, in place."""
    return input, p, training if train is None else train, inplace


def _drop(
    place: _Place, x: Tensor, p: float, is_training: bool = True, is_in_place: bool = False
) -> Tensor:
    if not 0.0 <= p <= 1.0:
        check.probability(p=p)
    rows = place.draws.granules[place.granule or 0]
    dim = _samples_at(x.shape, len(rows.ids))
    number = _count(place, is_shared=dim is None)
    if dim == 0 and x.is_cuda and len(rows.runs) == 1:
        first = rows.runs[0][1] * (x.numel() // len(rows.ids))
        if fuses(x, first):
            words = place.draws.words_on(x.device, number)
            result = _FusedDrop.apply(x, words, first, p)
            return x.copy_(result) if is_in_place else result  # type: ignore[union-attr]
    ids = _NOBODY if dim is None else rows.ids
    words = place.draws.words(number, is_shared=dim is None)
    source = MaskSource(words, ids, x.numel() // max(len(ids), 1))
    moved = x.movedim(dim, 0) if dim else x  # the mask is laid out sample by sample
    result = _Drop.apply(moved, source, p)
    result = result.movedim(0, dim) if dim else result
    return x.copy_(result) if is_in_place else result  # type: ignore[union-attr]


_NOBODY = torch.zeros(1, dtype=torch.int64)  # the samples of a draw that has nothing to do with any


@dataclass(frozen=True, eq=False)
class MaskSource:
    """Where a mask comes from, instead of the mask: backward draws it again."""

    words: tuple[int, ...]
    ids: Tensor  # int64 [samples], CPU
    positions: int  # elements in a sample

    def keep(self, x: Tensor, p: float) -> Tensor:  # bool, shape of x
        """Which elements stay."""
        if len(self.ids) and (int(self.ids.max()) + 1) * self.positions >= MAX_ELEMENTS:
            raise BadInput(f"sample id {int(self.ids.max())} is too large for dropout")
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        limit, _ = _limit_and_scale(p)
        recipe = Recipe(Cipher.PHILOX, self.words, Distribution.BERNOULLI, (), (limit,))
        fill_rows(mask, recipe, self.ids * self.positions, self.positions)
        return mask.logical_not_()


class _Drop(torch.autograd.Function):
    """Multiply by the mask and 1 / (1 - p); backward does the same to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: MaskSource, p: float) -> Tensor:
        ctx.source, ctx.p = source, p
        return torch.where(source.keep(x, p), x * _limit_and_scale(p)[1], 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, None, None]:
        return _Drop.apply(grads[0], ctx.source, ctx.p), None, None


class _FusedDrop(torch.autograd.Function):
    """As `_Drop`, with the same bits, in one kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, words: Tensor, first: int, p: float) -> Tensor:
        ctx.words, ctx.first, ctx.p = words, first, p
        return fused_drop(x, words, first, *_limit_and_scale(p))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, None, None, None]:
        if torch.is_grad_enabled():  # this is to be differentiated once more
            return _FusedDrop.apply(grads[0], ctx.words, ctx.first, ctx.p), None, None, None
        limit, scale = _limit_and_scale(ctx.p)
        return fused_drop(grads[0], ctx.words, ctx.first, limit, scale), None, None, None


def _limit_and_scale(p: float) -> tuple[int, float]:
    """The greatest 63-bit draw that is dropped, and what the others are multiplied by.

    An element that is dropped at p is dropped at any greater one.
    """
    return (int(p * 2.0**63) - 1, 1.0 / (1.0 - p)) if p < 1 else ((1 << 63) - 1, 0.0)


def _attend(
    place: _Place,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with dropout.

    On CUDA, sample by sample in torch's fused kernels, which keep no matrix of weights. On the CPU
    torch keeps one as well, and a mask that learns is wanted whole.
    """
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if query.is_cuda and not (attn_mask is not None and attn_mask.requires_grad):
        options |= {"attn_mask": attn_mask, "dropout_p": dropout_p}
        return _attend_fused(place, (query, key, value), options)
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(repeats, -3) for each in (key, value))
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query * root) @ (key * root).transpose(-2, -1)  # as torch does: both stay small
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch._safe_softmax(scores, -1)  # zeros where everything is masked
    return _drop(place, weights, dropout_p) @ value


def _attend_fused(
    place: _Place, given: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]
) -> Tensor:
    """Attention in torch's fused kernels, for all samples at once where they can be told apart."""
    rows = place.draws.granules[place.granule or 0]
    query, key, value = given
    stride = _stride_of_samples(given, options) if len(query) == len(rows.ids) else None
    if stride is None:
        return _per_sample(place, F.scaled_dot_product_attention, given, options)
    seed = place.draws.seed(_count(place, is_shared=False), None)
    if len(rows.runs) == 1:
        with _seeded(seed, query.device, rows.runs[0][1] * stride):
            return F.scaled_dot_product_attention(query, key, value, **options)
    sizes, mask = [size for size, _ in rows.runs], options["attn_mask"]
    masks: Sequence[Tensor | None] = [mask] * len(sizes)
    if isinstance(mask, Tensor) and mask.dim() == query.dim() and len(mask) == len(query) > 1:
        masks = mask.split(sizes)
    parts = zip(*(each.split(sizes) for each in given), strict=True)
    pieces = []
    for each, own, (_, first) in zip(parts, masks, rows.runs, strict=True):
        with _seeded(seed, query.device, first * stride):
            pieces.append(F.scaled_dot_product_attention(*each, **{**options, "attn_mask": own}))
    return torch.cat(pieces)


_strides: dict[Any, int | None] = {}


def _stride_of_samples(given: tuple[Tensor, ...], options: dict[str, Any]) -> int | None:
    """How far on in torch's stream the numbers of the next sample are, in a fused kernel.

    Kernels draw by place, and the sample is part of it. Which part differs from kernel to kernel,
    and which kernel runs depends on much, so it is tried out, once for each kind of call: the
    second of two samples must get what it gets alone, further on by the stride. None if nothing
    fits.
    """
    query, key, _ = given
    mask = options["attn_mask"]
    kind = (
        query.shape[1:],
        key.shape[1:],
        query.dtype,
        query.device,
        query.requires_grad,
        None if mask is None else (mask.shape[-3:], mask.dtype),
        *(each for name, each in options.items() if name != "attn_mask"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )
    if kind not in _strides:
        _strides[kind] = None
        if query.dim() == 4 and query.shape[1:].numel():
            heads = query.shape[1]
            candidates = (heads * 32, heads * query.shape[2] * key.shape[2])
            _strides[kind] = _fitting_stride(given, options, candidates)
    return _strides[kind]


def _fitting_stride(
    given: tuple[Tensor, ...], options: dict[str, Any], candidates: Sequence[int]
) -> int | None:
    device, mask = given[0].device, options["attn_mask"]
    generator = torch.Generator(device).manual_seed(0)
    two = []
    for each in given:
        x = torch.randn((2, *each.shape[1:]), generator=generator, device=device)
        two.append(x.to(each.dtype).requires_grad_(each.requires_grad))
    if mask is not None and mask.dim() == 4:
        options = {**options, "attn_mask": mask[:1]}
    with _seeded(1, device):
        both = F.scaled_dot_product_attention(*two, **options)
    for stride in candidates:
        if stride % 4:
            continue  # torch's offsets are multiples of 4
        with _seeded(1, device, stride):
            alone = F.scaled_dot_product_attention(*(x[1:] for x in two), **options)
        if torch.equal(both[1:], alone):
            return stride
    return None


# --- all other draws: torch's own, sample by sample ----------------------------------------------


class _Below(TorchDispatchMode):
    """Sees the operations that a torch function is made of, and seeds those that draw."""

    def __init__(self, place: _Place, dim: int | None) -> None:
        super().__init__()
        self._place, self._dim = place, dim  # the dimension of samples, where it is known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_draw(func, args, kwargs):
            return func(*args, **kwargs)
        return _per_sample(self._place, func, args, {**kwargs, **_no_generator(kwargs)}, self._dim)


def _no_generator(kwargs: dict[str, Any]) -> dict[str, None]:
    return {"generator": None} if "generator" in kwargs else {}


def is_draw(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether an operation of torch's dispatcher draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [each.name for each in func._schema.arguments]
    if "dropout_p" in names:  # attention carries the tag with and without dropout
        at = names.index("dropout_p")
        return bool(kwargs.get("dropout_p", args[at] if at < len(args) else 0.0))
    return True


def _per_sample(
    place: _Place, func: Any, args: tuple, kwargs: dict[str, Any], dim: int | None = None
) -> Any:
    """Call a function that draws from torch's generator, once for each sample."""
    assert place.granule is not None
    draws, rows = place.draws, place.draws.granules[place.granule]
    shape, device = _shape_drawn(args, kwargs), _device_drawn(args, kwargs)
    if dim is None or len(shape) <= dim or shape[dim] != len(rows.ids):
        dim = _samples_at(shape, len(rows.ids))
    number = _count(place, is_shared=dim is None)
    if dim is None:
        with _seeded(draws.seed(number, None, is_shared=True), device):
            return func(*args, **kwargs)
    size = shape[dim] // len(rows.ids)
    pieces = []
    for index, sample in enumerate(rows.ids.tolist()):
        cut = _Cut(dim, shape[dim], index * size, size)
        with _seeded(draws.seed(number, sample), device):
            pieces.append(func(*cut.of(args), **cut.of(kwargs)))
    return args[0] if _is_in_place(func) else _joined(pieces, dim)


def _is_in_place(func: Any) -> bool:
    """Whether an operation of torch's dispatcher returns what it was given."""
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return any(each.alias_info is not None and each.alias_info.is_write for each in returns)


def _joined(pieces: list[Any], dim: int) -> Any:
    if isinstance(pieces[0], Tensor):
        return torch.cat(pieces, dim)
    if isinstance(pieces[0], tuple | list):
        return type(pieces[0])(_joined(list(each), dim) for each in zip(*pieces, strict=True))
    return pieces[0]


@dataclass(frozen=True)
class _Cut:
    """One sample's part of whatever is as long as all samples."""

    dim: int
    whole: int
    start: int
    size: int

    def of(self, value: Any) -> Any:
        """That part of a function's arguments."""
        if isinstance(value, Tensor):
            has_samples = value.dim() > self.dim and value.shape[self.dim] == self.whole
            return value.narrow(self.dim, self.start, self.size) if has_samples else value
        if isinstance(value, torch.Size | list) and all(type(each) is int for each in value):
            if len(value) > self.dim and value[self.dim] == self.whole:
                return [*value[: self.dim], self.size, *value[self.dim + 1 :]]
            return value
        if isinstance(value, tuple):
            return tuple(map(self.of, value))
        if isinstance(value, dict):
            return {key: self.of(each) for key, each in value.items()}
        return value


def _shape_drawn(args: tuple, kwargs: dict[str, Any]) -> Sequence[int]:
    """The shape of what a function draws: of its first tensor, or the one it is given."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape
        if isinstance(value, torch.Size | list | tuple) and all(type(x) is int for x in value):
            return tuple(value)
    return ()


def _device_drawn(args: tuple, kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device
    return torch.device(kwargs.get("device") or "cpu")


_num_seeding = 0


def is_seeding() -> bool:
    """Whether torch's generator is seeded for a sample right now."""
    return _num_seeding > 0


class _seeded:  # noqa: N801 - a context, written out because every draw enters one
    """Let torch's generator of a device be seeded for a block, and then be as it was.

    Args:
        seed: The seed.
        device: Whose generator.
        offset: Where in its stream to begin, on CUDA.
    """

    def __init__(self, seed: int, device: torch.device, offset: int = 0) -> None:
        self._seed, self._offset, self._is_cuda = seed, offset, device.type == "cuda"
        self._generator = torch.default_generator
        if self._is_cuda:
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generator = torch.cuda.default_generators[index]

    def __enter__(self) -> None:
        global _num_seeding
        generator = self._generator
        if not self._is_cuda:
            self._before: Any = generator.get_state()
            generator.manual_seed(self._seed)
        else:
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedOperation(
                    "a CUDA graph would repeat the random numbers it was recorded with, and these "
                    "belong to samples: record without dropout"
                )
            self._before = generator.initial_seed(), generator.get_offset()
            generator.manual_seed(self._seed)
            generator.set_offset(self._offset)
        _num_seeding += 1

    def __exit__(self, *_: object) -> None:
        global _num_seeding
        _num_seeding -= 1
        if not self._is_cuda:
            self._generator.set_state(self._before)
        else:
            seed, offset = self._before
            self._generator.manual_seed(seed)
            self._generator.set_offset(offset)


def _generators() -> list[Any]:
    """The states of torch's generators."""
    states: list[Any] = [torch.default_generator.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += [
            (each.initial_seed(), each.get_offset()) for each in torch.cuda.default_generators
        ]
    return states


def _are_equal(before: list[Any], after: list[Any]) -> bool:
    return torch.equal(before[0], after[0]) and before[1:] == after[1:]


@contextmanager
def nothing_else_drawn(name: str) -> Iterator[None]:
    """Make sure that a pass leaves torch's generators alone: its draws are counted here.

    Raises:
        UnsupportedOperation: If it does not.
    """
    before = _generators()
    yield
    if _place is not None and not _are_equal(before, _generators()):
        raise UnsupportedOperation(
            f"{name} drew random numbers in a way that cannot be given to samples, so that they "
            "would be others at another number of ranks; draw with torch.rand, torch.bernoulli, "
            "F.dropout and the like"
        )


# --- activation checkpointing --------------------------------------------------------------------


def _note_checkpoint(place: _Place) -> None:
    """Let the checkpoint around a draw begin its recompute with the numbers of its forward."""
    if place.is_training and not torch.is_grad_enabled():
        _refuse_reentrant()
        return
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
    if hooks is None:
        return
    for frame in _frames_of(hooks[0]):
        _let_resume(frame, place)


def _let_resume(frame: Any, place: _Place) -> None:
    if getattr(frame, "_unison_resumes", False):
        return
    frame._unison_resumes = True
    state, run = place.draws.state(), frame.recompute_fn

    def resume(*args: Any) -> None:
        with drawing_again(place.draws, state), _at(place):
            run(*args)

    frame.recompute_fn = resume


def _frames_of(pack: Any) -> Iterator[Any]:
    """The checkpoints that the running code is in, by torch's own notes of them."""
    found = _frame_in(pack)
    if found is not None:
        yield found
        return
    # Another hook is on top (activations offloaded to the host, say): look among the callers.
    caller = sys._getframe(1)
    while caller is not None:
        frame = caller.f_locals.get("new_frame") if caller.f_code in _CHECKPOINTS else None
        generator = caller.f_locals.get("gen") if caller.f_code in _CHECKPOINTS else None
        if frame is None and generator is not None and generator.gi_frame is not None:
            frame = generator.gi_frame.f_locals.get("new_frame")
        if frame is not None:
            yield frame
            return
        caller = caller.f_back


def _frame_in(pack: Any) -> Any:
    for cell in getattr(pack, "__closure__", None) or ():
        if isinstance(cell.cell_contents, _CheckpointFrame):
            return cell.cell_contents
    return None


def _refuse_reentrant() -> None:
    caller: Any = sys._getframe(1)
    while caller is not None:
        if caller.f_code is _REENTRANT:
            raise UnsupportedOperation(
                "random numbers are drawn under reentrant checkpointing, whose second run could "
                "not be given the same ones; pass use_reentrant=False to torch.utils.checkpoint"
            )
        caller = caller.f_back


_CheckpointFrame = torch.utils.checkpoint._CheckpointFrame
_CHECKPOINTS = {unwrap(torch.utils.checkpoint.checkpoint).__code__}
_REENTRANT = torch.utils.checkpoint.CheckpointFunction.forward.__code__

# --- which functions draw ------------------------------------------------------------------------

_DROPOUTS = {F.dropout, torch.dropout, torch.dropout_}
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_IN_TORCH = """rand rand_like randn randn_like randint randint_like randperm bernoulli binomial
normal multinomial poisson native_dropout alpha_dropout alpha_dropout_ feature_dropout
feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_ pca_lowrank svd_lowrank
_standard_gamma _sample_dirichlet"""
_IN_FUNCTIONAL = """scaled_dot_product_attention multi_head_attention_forward gumbel_softmax rrelu
dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout
fractional_max_pool2d fractional_max_pool3d"""
_IN_TENSOR = """bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_
random_ uniform_"""
DRAWING: set[Callable] = {
    *_DROPOUTS,
    *_RECURRENT,
    *(getattr(torch, name) for name in _IN_TORCH.split()),
    *(getattr(F, name) for name in _IN_FUNCTIONAL.split()),
    *(getattr(torch.Tensor, name) for name in _IN_TENSOR.split()),
}
"""Torch functions that may draw random numbers."""
