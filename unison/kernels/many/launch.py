"""The launches: tables for the kernels of `triton.py`, and nothing that waits for the device."""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportCallIssue=false

import math
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from unison.kernels.many import triton as kernels
from unison.kernels.many.table import KINDS, on_device, tile_map
from unison.kernels.random.tables import SECURE, table

_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}
_SQUARE_TILE, _COMBINE_TILE, _NOISY_TILE = 8192, 4096, 1024
_BY_ALIGNMENT = (True, False)


def _is_aligned(x: Tensor, out: Tensor | None, start: int) -> bool:
    return (
        _numel(x) % 8 == 0
        and (x.shape[0] == 1 or x.stride(0) % 8 == 0)
        and start == 0
        and x.data_ptr() % 16 == 0
        and (out is None or out.data_ptr() % 16 == 0)
    )


def _groups(values: Sequence[Tensor], outs: Sequence[Tensor] | None, starts: Sequence[int]):
    """Yield indices of tensors that one launch takes: as aligned as its loads are wide."""
    aligned = [
        _is_aligned(x, None if outs is None else outs[i], starts[i]) for i, x in enumerate(values)
    ]
    for wanted in _BY_ALIGNMENT:
        found = [i for i, each in enumerate(aligned) if each is wanted]
        if found:
            yield wanted, found


def _numel(x: Tensor) -> int:
    """Return the elements of one sample, though there may be none."""
    return math.prod(x.shape[1:])


def _stride(x: Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else 0


def squares(values: Sequence[Tensor]) -> Tensor:
    """See `unison.kernels.many.squares`."""
    device, batch = values[0].device, len(values[0])
    out = torch.empty(len(values), batch, dtype=torch.float64, device=device)
    if batch == 0:
        return out
    for is_aligned, which in _groups(values, None, [0] * len(values)):
        some = [values[i] for i in which]
        numels = tuple(map(_numel, some))
        tensors, first = tile_map(numels, _SQUARE_TILE, device)
        rows = [
            [x.data_ptr(), _stride(x), numel, 0, 0, KINDS[x.dtype], 0, 0]
            for x, numel in zip(some, numels, strict=True)
        ]
        parts = torch.empty(batch, len(tensors), device=device)
        totals = torch.empty(len(some), batch, dtype=torch.float64, device=device)
        with torch.cuda.device(device):
            kernels.squares_kernel[(len(tensors), batch)](
                on_device(rows, device), tensors, first, parts, len(tensors),
                ALIGNED=is_aligned, TILE=_SQUARE_TILE, num_warps=8, enable_fp_fusion=True,
            )  # fmt: skip
            kernels.total_kernel[(len(some), batch)](
                parts,
                first,
                totals,
                len(some),
                len(tensors),
                BLOCK=256,
                num_warps=4,
                enable_fp_fusion=True,
            )
        if len(some) == len(values):
            return totals
        out.index_copy_(0, on_device(which, device), totals)
    return out


def release(
    values: Sequence[Tensor],
    weights: Tensor,
    noise,
    divisor: float,
    outs: Sequence[Tensor],
    *,
    add: bool = False,
) -> None:
    """See `unison.kernels.many.release` and `combine`."""
    # Sums and per-sample gradients may come together: a row of weights is as long as the longest.
    device, batch = values[0].device, weights.shape[1]
    starts = [0] * len(values) if noise is None else noise.starts
    is_noisy = noise is not None
    size = _NOISY_TILE if is_noisy else _COMBINE_TILE
    for dtype in dict.fromkeys(out.dtype for out in outs):
        chosen = [i for i, out in enumerate(outs) if out.dtype == dtype]
        for is_aligned, found in _groups(
            [values[i] for i in chosen], [outs[i] for i in chosen], [starts[i] for i in chosen]
        ):
            which = [chosen[i] for i in found]
            is_all = len(which) == len(values)
            index = None if is_all else on_device(which, device)
            rows = [
                [
                    values[i].data_ptr(), _stride(values[i]), outs[i].numel(), outs[i].data_ptr(),
                    starts[i], KINDS[values[i].dtype], 0, 0,
                ]
                for i in which
            ]  # fmt: skip
            begin = [starts[i] % size if is_noisy else 0 for i in which]
            sizes = tuple(outs[i].numel() + b for i, b in zip(which, begin, strict=True))
            tensors, first = tile_map(sizes, size, device)
            recipes = weights if noise is None else noise.recipes
            if noise is not None and index is not None:
                recipes = recipes[index]
            with torch.cuda.device(device):
                kernels.release_kernel[(len(tensors),)](
                    on_device(rows, device),
                    recipes, tensors, first,
                    weights if index is None else weights[index],
                    table(SECURE, device), batch, 1.0 / divisor,
                    SEGMENTS=SECURE.num_segments, DEGREE=SECURE.num_coefficients - 1,
                    NOISY=is_noisy, DTYPE=_DTYPES[dtype], ADD=add, ALIGNED=is_aligned, TILE=size,
                    num_warps=4 if is_noisy else 8, enable_fp_fusion=False,
                )  # fmt: skip
            if noise is not None and index is not None:
                recipes.zero_()  # a copy: the key does not stay behind in device memory
