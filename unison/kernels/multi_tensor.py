"""Per-sample gradients: sums over tokens, squares, weighted sums, and their release with noise.

Of one parameter, plain torch and numba (numba_kernels.py) do it, in float64; on 2 cores numba is 20
times as fast as the reference for norms, and 10 times for sums. Sums over tokens, of biases and of
the gain and the offset of norms, have Triton kernels. Plain torch serves biases
where these do not; norms are then computed from records, as any operation is. The backend is chosen
by device, dtype and size alone, never by what ran before: the backends round differently, and a
step must not.

Of many parameters, on CUDA each is a launch or two, however many there are
(multi_tensor_triton.py): most of a model's hundreds of parameters are vectors, and a launch for
each would cost more than the arithmetic. A table on the device holds an address and a few numbers
per tensor, and a map says for every program which row of the table it serves. Elsewhere plain torch
goes from one to the next.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.kernels.available import has_triton, is_installed, is_on_gpu, num_per_tile, spans, takes
from unison.kernels.random import ROUND_MAGIC, Recipe, fill_rows

# --- one parameter --------------------------------------------------------------------------------

MAX_FEATURES = 1 << 14  # a row of a norm is held in registers

# numba compiles for a second (once: the result is cached on disk), and small work is not worth it.
LEAST_ELEMENTS = 1 << 16
_COMPILED_DTYPES = (torch.float32, torch.float64)


def takes_norm(x: Tensor, g: Tensor) -> bool:
    """Return whether `norm_sums` takes input and gradient [samples, tokens, features]."""
    return (
        takes(x, g)
        and x.stride(2) == g.stride(2) == 1
        and 0 < x.shape[2] <= MAX_FEATURES
        and x.shape[1] > 0
    )


def norm_sums(x: Tensor, g: Tensor, eps: float, *, is_centred: bool, has_offset: bool) -> Tensor:
    """Return Σ_t g_t x̂_t, and Σ_t g_t if asked: [1 or 2, samples, features], float32.

    Args:
        x: What was normalised [samples, tokens, features].
        g: The gradient of what came out, likewise.
        eps: Added to the variance.
        is_centred: Whether the mean is taken out (layer norm), or not (RMS norm).
        has_offset: Whether something is added after the gain.
    """
    return _kernels().norm_sums(x, g, eps, is_centred=is_centred, has_offset=has_offset)


def column_sums(g: Tensor) -> Tensor:
    """Return Σ_t g_t of g [samples, tokens, features]: [samples, features], float32 at least."""
    if g.stride(2) == 1 and takes(g):
        return _kernels().column_sums(g)
    return g.sum(1, dtype=torch.promote_types(g.dtype, torch.float32))


def _compiled_for(x: Tensor) -> Any:
    """Return the compiled functions where they take x, else None."""
    is_suited = x.device.type == "cpu" and x.dtype in _COMPILED_DTYPES
    if is_suited and x.numel() >= LEAST_ELEMENTS and is_installed("numba"):
        return import_module("unison.kernels.numba_kernels")
    return None


def squared_norms(x: Tensor) -> Tensor:
    """Return Σ_i x[b, i]² of x [batch, numel]: [batch], float64, added in float64."""
    x = x.detach()
    if (compiled := _compiled_for(x)) is not None:
        return compiled.squared_norms(x)
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for part in spans(x.shape[1], num_per_tile(8 * len(x), x.device)):
        total += x[:, part].double().square().sum(1)
    return total


def weighted_sum(x: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Write Σ_b weights[b] · x[b] to `out` [numel] and return it.

    Args:
        x: [batch, numel].
        weights: [batch], float64. A row of weight 0 is left out: it may hold NaN.
        out: [numel], float32 or float64. The sum is float64 and is rounded once, to its dtype.
    """
    assert weights.dtype == torch.float64, weights.dtype
    x = x.detach()
    if (compiled := _compiled_for(x)) is not None:
        compiled.weighted_sum(x, weights, out)
        return out
    is_out = (weights == 0).unsqueeze(1)
    for part in spans(x.shape[1], num_per_tile(8 * len(x), x.device)):
        tile = x[:, part].double().masked_fill(is_out, 0.0)  # [batch, elements of a tile]
        out[part] = weights @ tile
    return out


# --- many parameters ------------------------------------------------------------------------------

VALUE_DTYPES = (torch.bfloat16, torch.float32, torch.int32, torch.int64)


def is_fast(values: Sequence[Tensor]) -> bool:
    """Return whether the kernels take tensors: on CUDA, of VALUE_DTYPES, samples contiguous."""
    if not values or not all(map(is_on_gpu, values)) or not has_triton():
        return False
    return all(each.dtype in VALUE_DTYPES and is_dense(each) for each in values)


def is_dense(x: Tensor) -> bool:
    """Return whether each sample of x [samples, ...] lies in one piece of memory."""
    return x.is_contiguous() or (x.ndim == 2 and x.stride(1) == 1) or x[:1].is_contiguous()


# --- the operations: where kernels take the tensors, theirs; else the reference, in plain torch ---


NoiseDraw = tuple[Tensor, Sequence[int]]
"""The noise of one step for many tensors: what each is drawn by, and each tensor's first element.

The former are packed recipes, int64 [tensors, RECIPE_LENGTH], on the tensors' device; the latter
says where a tensor begins in its parameter.
"""


class AdamWStep(NamedTuple):
    """What a step of AdamW takes besides gradients: lists of a tensor for each.

    Attributes:
        params: Parameters.
        means: Averages of gradients; of the parameters' dtypes, like the next.
        squares: Averages of their squares.
        rates: Learning rate, β1, β2, ε, weight decay; the learning rate over 1 - β1^t, √(1 - β2^t)
            and its inverse: float32 [tensors, 8].
    """

    params: Sequence[Tensor]
    means: Sequence[Tensor]
    squares: Sequence[Tensor]
    rates: Tensor


def adamw_rates(numbers: Tensor, steps: Tensor) -> Tensor:
    """Return the rates of an `AdamWStep`, each number rounded as torch's fused AdamW does.

    Args:
        numbers: Learning rate, β1, β2, ε, weight decay: float32 [tensors, 5].
        steps: t of each tensor, the step that is taken included: float32 [tensors].
    """
    lr, beta1, beta2 = numbers[:, 0], numbers[:, 1], numbers[:, 2]
    root = (1 - torch.pow(beta2, steps)).sqrt()
    made = [lr / (1 - torch.pow(beta1, steps)), root, 1 / root]
    return torch.cat([numbers, torch.stack(made, 1)], 1)


def squares(values: Sequence[Tensor]) -> Tensor:
    """Return Σ x² of every tensor [samples, ...] and sample: [tensors, samples], float64.

    On CUDA a tile is added in float32 (its roundings: `SQUARE_ROUNDINGS`), tiles in float64.
    """
    if is_fast(values):
        return _kernels().squares(values)
    rows = [each.reshape(len(each), math.prod(each.shape[1:])) for each in values]
    return torch.stack([each.double().square().sum(1) for each in rows])


def combine(
    values: Sequence[Tensor],
    weights: Tensor,
    outs: Sequence[Tensor],
    *,
    add: bool = False,
    spacing: float = 1.0,
) -> None:
    """Write Σ_b w_b X_b of every tensor to its output, or add it: one sample after the other.

    Args:
        values: X [samples, ...] of each.
        weights: [tensors, samples], float32. A sample of weight 0 is left out: it may hold NaN.
        outs: Contiguous, as many elements as one sample's X. The sum is made in float64 and rounded
            once, to their dtype: float32, float64, or int32 and int64, which count spacings.
        add: Whether to add to what is there.
        spacing: A power of two.
    """
    if is_fast(values):
        _kernels().release(values, weights, None, spacing, outs, add=add)
        return
    for each, row, out in zip(values, weights, outs, strict=True):
        total = torch.zeros_like(out, dtype=torch.float64)
        for x, weight in zip(each, row.double(), strict=False):  # the row may be longer: zeros
            total += weight * x.double().reshape(out.shape).masked_fill(weight == 0, 0.0)
        total /= spacing
        if not out.is_floating_point():
            total.round_()
        out.copy_(out + total if add else total)


def release(
    values: Sequence[Tensor],
    weights: Tensor,
    noise: NoiseDraw | None,
    divisor: float,
    outs: Sequence[Tensor],
    step: AdamWStep | None = None,
) -> None:
    """Combine in float64, round to the noise's grid, add the noise exactly, divide, and cast.

    Args:
        values: X [samples, ...] of each tensor; clipped sums are one sample of weight 1, or
            integers of which each is worth the weight.
        weights: [tensors, samples], float32.
        noise: What to add; nothing, if it is not given.
        divisor: A public constant.
        outs: Contiguous; their dtype is that of the result.
        step: Of AdamW, taken with the results in the same kernels. Only where there is noise, and
            kernels take the tensors.
    """
    if is_fast(values):
        _kernels().release(values, weights, noise, divisor, outs, step=step)
        return
    assert step is None
    totals = [torch.empty_like(out, dtype=torch.float64) for out in outs]
    combine(values, weights, totals)
    if noise is not None:
        recipes, starts = noise
        for total, row, start in zip(totals, recipes.cpu(), starts, strict=True):
            drawn, recipe = torch.empty_like(total, dtype=torch.float32), Recipe.unpack(row)
            fill_rows(drawn, recipe, torch.tensor([start]), drawn.numel())
            spacing = recipe.floats[1]
            on_grid = (total / spacing + ROUND_MAGIC - ROUND_MAGIC) * spacing
            total.copy_(on_grid + drawn.double())
    for total, out in zip(totals, outs, strict=True):
        made = total if out.dtype == torch.float64 else total.float()
        out.copy_(made * torch.tensor(1.0 / divisor, dtype=torch.float32))


def moments(
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    count: int,
    betas: tuple[float, float],
    eps: float,
    is_held: Tensor | None = None,
) -> Tensor:
    """Take gradients into Adam's averages, and return Σ s² of each step s = m̂ / (√v̂ + ε).

    The steps are not written: one pass over memory, where Adam and a norm are two and a half.

    Args:
        gradients: Of each tensor, in one piece, as are the averages.
        means: m of each, float32.
        variances: v of each, float32.
        count: How many gradients are in the averages afterwards.
        betas: The shares of averages that stay.
        eps: ε.
        is_held: Averages stay as they are if this is not 0 [].

    Returns:
        [tensors], float64.
    """
    if takes(*gradients) and all(each.dtype == torch.float32 for each in gradients):
        kernel = import_module("unison.kernels.kfac_triton").moments  # of means in rows, too
        return kernel(gradients, means, variances, count, betas, eps, is_held)
    found = []
    for g, mean, variance in zip(gradients, means, variances, strict=True):
        m = torch.lerp(mean, g, 1 - betas[0])
        v = betas[1] * variance + (1 - betas[1]) * g.square()
        step = m / (1 - betas[0] ** count) / ((v / (1 - betas[1] ** count)).sqrt() + eps)
        found.append(step.double().square().sum())
        if is_held is None or float(is_held) == 0:
            mean.copy_(m)
            variance.copy_(v)
    return torch.stack(found)


def _kernels() -> Any:
    return import_module("unison.kernels.multi_tensor_triton")


# --- tables on the device -------------------------------------------------------------------------


def tile_map(numels: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tensor of every tile (int32 [tiles]) and every tensor's first tile (int64 [n]).

    Args:
        numels: Elements of each tensor, those skipped before its first one included.
        size: Elements of a tile.
        device: Where the result lives.
    """
    found = cached_tile_map(numels, size, device)
    if _recording:  # the cache may forget it, and the graph has its address
        _recording[-1].hold(found)
    return found


@lru_cache(maxsize=64)
def cached_tile_map(
    numels: tuple[int, ...], size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return what `tile_map` does, made once."""
    counts = torch.tensor([-(-numel // size) for numel in numels], dtype=torch.int64)
    first = counts.cumsum(0) - counts
    tensors = torch.repeat_interleave(torch.arange(len(numels), dtype=torch.int32), counts)
    return tensors.to(device), first.to(device)


class Tables:
    """Tables of a CUDA graph: made while it is recorded, filled once when it is complete.

    A copy from the host would be recorded with the host's address, which is soon another's. Nor may
    they lie in the graph's own memory, to which other parts of the graph write before and after.

    Args:
        device: Where the graph runs.
        capacity: Integers of all tables together.
    """

    def __init__(self, device: torch.device, capacity: int = 1 << 19) -> None:
        self._memory = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._made: list[tuple[Tensor, Tensor]] = []
        self._held: list[tuple[Tensor, ...]] = []
        self._end = 0

    def make(self, table: Tensor) -> Tensor:
        """Return the place of a table that is filled later."""
        begin, self._end = self._end, self._end + -(-table.numel() // 16) * 16
        if self._end > len(self._memory):
            raise UnsupportedOperation(
                f"the tables of a CUDA graph take more than {len(self._memory):,} numbers: too "
                "many parameters for one graph"
            )
        place = self._memory[begin : begin + table.numel()].view(table.shape)
        self._made.append((place, table))
        return place

    def hold(self, tensors: tuple[Tensor, ...]) -> None:
        """Keep tensors that the graph reads alive as long as its tables."""
        self._held.append(tensors)

    def fill(self) -> None:
        """Fill all tables."""
        for place, table in self._made:
            place.copy_(table)


_recording: list[Tables] = []


@contextmanager
def tables_kept(tables: Tables) -> Iterator[None]:
    """Let tables be made for a CUDA graph that is recorded in this block."""
    _recording.append(tables)
    try:
        yield
    finally:
        _recording.pop()


def on_device(rows: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """Return a table of integers on a device, without waiting for it."""
    table = rows if isinstance(rows, Tensor) else torch.tensor(rows, dtype=torch.int64)
    return _recording[-1].make(table) if _recording else to_device(table, device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host's tensor on a device, without waiting for it."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def empty_table(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return a host's table of integers with nothing in it, which `to_device` copies at once."""
    return torch.empty(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
