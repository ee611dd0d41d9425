"""Dropout, alone and in attention, with numbers that belong to samples; see [Note: draws]."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unison import check
from unison.errors import BadInput
from unison.kernels.random import Cipher, Distribution, Recipe, fill_rows, fused_drop, fuses
from unison.rng.draws import BatchDraws, GranuleDraws, samples_dim
from unison.rng.generators import call_per_sample, seeded
from unison.rng.streams import MAX_ELEMENTS


def dropout_arguments(
    input: Tensor,  # noqa: A002 - as torch names it
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool | None = None,
) -> tuple[Tensor, float, bool, bool]:
    """The arguments of `F.dropout` or `torch.dropout`: input, p, whether training, in place."""
    return input, p, training if train is None else train, inplace


def drop(x: Tensor, p: float, *, draws: BatchDraws, rows: GranuleDraws) -> Tensor:
    """Dropout with the numbers of the samples; the draw is counted in `rows`."""
    if not 0.0 <= p <= 1.0:
        check.probability(p=p)
    dim = samples_dim(x.shape, len(rows.ids))
    number = rows.next_number(is_shared=dim is None)
    if dim == 0 and x.is_cuda and len(rows.runs) == 1:
        first = rows.runs[0][1] * (x.numel() // len(rows.ids))
        if fuses(x, first):
            return _FusedDrop.apply(x, draws.words_on(x.device, number), first, p)  # type: ignore[return-value]
    ids = _NOBODY if dim is None else rows.ids
    words = draws.words(number, is_shared=dim is None)
    source = MaskSource(words, ids, x.numel() // max(len(ids), 1))
    moved = x.movedim(dim, 0) if dim else x  # the mask is laid out sample by sample
    result: Tensor = Drop.apply(moved, source, p)  # type: ignore[assignment]
    return result.movedim(0, dim) if dim else result


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
        limit, _ = limit_and_scale(p)
        recipe = Recipe(Cipher.PHILOX, self.words, Distribution.BERNOULLI, (), (limit,))
        fill_rows(mask, recipe, self.ids * self.positions, self.positions)
        return mask.logical_not_()


class Drop(torch.autograd.Function):
    """Multiply by the mask and 1 / (1 - p); backward does the same to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: MaskSource, p: float) -> Tensor:
        """Drop elements of x."""
        ctx.source, ctx.p = source, p
        return torch.where(source.keep(x, p), x * limit_and_scale(p)[1], 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, None, None]:
        """Drop the same elements of the gradient."""
        return Drop.apply(grads[0], ctx.source, ctx.p), None, None


class _FusedDrop(torch.autograd.Function):
    """As `Drop`, with the same bits, in one kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, words: Tensor, first: int, p: float) -> Tensor:
        ctx.words, ctx.first, ctx.p = words, first, p
        return fused_drop(x, words, first, *limit_and_scale(p))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, None, None, None]:
        if torch.is_grad_enabled():  # this is to be differentiated once more
            return _FusedDrop.apply(grads[0], ctx.words, ctx.first, ctx.p), None, None, None
        limit, scale = limit_and_scale(ctx.p)
        return fused_drop(grads[0], ctx.words, ctx.first, limit, scale), None, None, None


def limit_and_scale(p: float) -> tuple[int, float]:
    """The greatest 63-bit draw that is dropped, and what the others are multiplied by.

    An element that is dropped at p is dropped at any greater one.
    """
    return (int(p * 2.0**63) - 1, 1.0 / (1.0 - p)) if p < 1 else ((1 << 63) - 1, 0.0)


# --- attention ------------------------------------------------------------------------------------


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    draws: BatchDraws,
    rows: GranuleDraws,
) -> Tensor:
    """Attention with dropout.

    On CUDA, sample by sample in torch's fused kernels, which keep no matrix of weights. On the CPU
    torch keeps one as well, and a mask that learns is wanted whole.
    """
    if query.is_cuda and not (attn_mask is not None and attn_mask.requires_grad):
        options = {
            "attn_mask": attn_mask,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        return _attend_fused((query, key, value), options, draws, rows)
    dropped = partial(drop, draws=draws, rows=rows)
    return attend_whole(
        dropped, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )


def attend_whole(
    dropped: Callable[[Tensor, float], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with a matrix of weights, some of which `dropped(weights, p)` drops."""
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
    return dropped(weights, dropout_p) @ value


def _attend_fused(
    given: tuple[Tensor, Tensor, Tensor],
    options: dict[str, Any],
    draws: BatchDraws,
    rows: GranuleDraws,
) -> Tensor:
    """Attention in torch's fused kernels, for all samples at once where they can be told apart."""
    query, key, value = given
    stride = _stride_of_samples(given, options) if len(query) == len(rows.ids) else None
    if stride is None:
        attention = F.scaled_dot_product_attention
        return call_per_sample(attention, given, options, draws=draws, rows=rows)
    seed = draws.seed(rows.next_number(is_shared=False), None)
    if len(rows.runs) == 1:
        with seeded(seed, query.device, rows.runs[0][1] * stride):
            return F.scaled_dot_product_attention(query, key, value, **options)
    sizes, mask = [size for size, _ in rows.runs], options["attn_mask"]
    masks: Sequence[Tensor | None] = [mask] * len(sizes)
    if isinstance(mask, Tensor) and mask.dim() == query.dim() and len(mask) == len(query) > 1:
        masks = mask.split(sizes)
    parts = zip(*(each.split(sizes) for each in given), strict=True)
    pieces = []
    for each, own, (_, first) in zip(parts, masks, rows.runs, strict=True):
        with seeded(seed, query.device, first * stride):
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
    with seeded(1, device):
        both = F.scaled_dot_product_attention(*two, **options)
    for stride in candidates:
        if stride % 4:
            continue  # torch's offsets are multiples of 4
        with seeded(1, device, stride):
            alone = F.scaled_dot_product_attention(*(x[1:] for x in two), **options)
        if torch.equal(both[1:], alone):
            return stride
    return None
