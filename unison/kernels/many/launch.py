"""The launches: tables for the kernels of `triton.py`, and nothing that waits for the device."""

# Triton's own annotations do not describe what its compiler accepts.
# pyright: reportCallIssue=false

import itertools
import math
from collections.abc import Hashable, Sequence
from functools import partial
from operator import attrgetter

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from unison.kernels.launcher import Launcher
from unison.kernels.many import triton as kernels
from unison.kernels.many.asked import ADDRESS, Asked, addresses_of, facts_of
from unison.kernels.many.table import (
    FIRST,
    KIND,
    KINDS,
    NUMEL,
    OUT,
    SAMPLES,
    STRIDE,
    VALUES,
    WIDTH,
    Sent,
    tile_map,
    to_send,
)
from unison.kernels.random.tables import SECURE, kernel_table

_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}
_SQUARE_TILE, _COMBINE_TILE, _NOISY_TILE = 8192, 4096, 1024
_SAMPLES_AT_ONCE = 4
_MOST_KNOWN = 16  # sets of tensors


class _Group:
    """Tensors that one launch takes: outputs of one dtype, as aligned as its loads are wide.

    Args:
        which: Their indices; None if they are all.
        is_aligned: Whether every tensor begins, and every sample of it, where wide loads may.
        dtype: Of the outputs.
        numels: Elements of a sample, those skipped before its first tile included.
        table: All of the kernel's table but addresses: int64 [tensors, WIDTH].
    """

    def __init__(
        self,
        which: list[int] | None,
        is_aligned: bool,
        dtype: torch.dtype | None,
        numels: tuple[int, ...],
        table: np.ndarray,
    ) -> None:
        self._which = None if which is None else np.array(which, np.int64)
        self.is_aligned, self.dtype, self.numels = is_aligned, dtype, numels
        self._table = table
        self._tables, self._indices = Sent(), Sent()

    def index(self, device: torch.device) -> Tensor | None:
        """Which of all tensors they are, on a device; None if they are all."""
        which = self._which
        if which is None:
            return None
        return self._indices.table((), device, lambda _: torch.from_numpy(which))

    def table(self, values: bytes, outs: bytes | None, device: torch.device) -> Tensor:
        """The table with the addresses of all tensors and outputs, on a device."""
        return self._tables.table((values, outs), device, partial(self._filled, values, outs))

    def _filled(self, values: bytes, outs: bytes | None, device: torch.device) -> Tensor:
        made = to_send(self._table.shape, device)
        table = made.numpy()
        table[:] = self._table
        for column, addresses in ((VALUES, values), (OUT, outs)):
            if addresses is not None:
                every = np.frombuffer(addresses, ADDRESS)
                table[:, column] = every if self._which is None else every[self._which]
        return made


_known: dict[tuple, list[_Group]] = {}


def _groups(
    values: Sequence[Tensor],
    at: bytes,
    outs: Sequence[Tensor] | None = None,
    out_at: bytes | None = None,
    starts: Sequence[int] | None = None,
    size: int = 1,
) -> list[_Group]:
    """Return the launches that many tensors take: the same ones for tensors like those before.

    Args:
        values: X [samples, ...] of each.
        at: Their addresses, see `addresses_of`.
        outs: Where the results go, if anywhere.
        out_at: Addresses of those.
        starts: Each tensor's first element in its parameter; 0 unless given.
        size: Elements of a tile, before which elements are skipped that are not a tensor's own.
    """
    key = (
        size,
        facts_of(values),
        _alignments(at),
        None if outs is None else _facts_of_outs(outs),
        None if out_at is None else _alignments(out_at),
        None if starts is None else tuple(starts),
    )
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            del _known[next(iter(_known))]  # the oldest
        begins = [0] * len(values) if starts is None else starts
        found = _known[key] = _grouped(values, at, outs, out_at, begins, size)
    return found


def _facts_of_outs(outs: Sequence[Tensor]) -> Hashable:
    """Return what launches depend on, and more where that is known without asking."""
    if isinstance(outs, Asked):
        return outs.facts
    return tuple(map(Tensor.numel, outs)), tuple(map(_dtype_of, outs))


_dtype_of = attrgetter("dtype")


def _alignments(addresses: bytes) -> bytes:
    """Return how far each address is above a multiple of 16; nothing if all are multiples."""
    found = addresses[::8].translate(_ABOVE_16)
    return found if any(found) else b""


_ABOVE_16 = bytes(byte % 16 for byte in range(256))


def _grouped(
    values: Sequence[Tensor],
    values_at: bytes,
    outs: Sequence[Tensor] | None,
    outs_at: bytes | None,
    starts: Sequence[int],
    size: int,
) -> list[_Group]:
    at = np.frombuffer(values_at, ADDRESS).tolist()
    out_at = None if outs_at is None else np.frombuffer(outs_at, ADDRESS).tolist()
    places: dict[tuple, list[int]] = {}
    for i, x in enumerate(values):
        is_aligned = (
            _numel(x) % 8 == 0
            and (x.shape[0] == 1 or x.stride(0) % 8 == 0)
            and starts[i] == 0
            and at[i] % 16 == 0
            and (out_at is None or out_at[i] % 16 == 0)
        )
        places.setdefault((None if outs is None else outs[i].dtype, is_aligned), []).append(i)
    dtypes = dict.fromkeys(dtype for dtype, _ in places)
    groups = []
    for dtype, is_aligned in itertools.product(dtypes, (True, False)):
        which = places.get((dtype, is_aligned))
        if which is None:
            continue
        numels = [_numel(values[i]) if outs is None else outs[i].numel() for i in which]
        table = np.zeros((len(which), WIDTH), np.int64)
        table[:, STRIDE] = [_stride(values[i]) for i in which]
        table[:, NUMEL] = numels
        table[:, FIRST] = [starts[i] for i in which]
        table[:, KIND] = [KINDS[values[i].dtype] for i in which]
        table[:, SAMPLES] = [values[i].shape[0] for i in which]
        skipped = [starts[i] % size for i in which]
        sizes = tuple(numel + begin for numel, begin in zip(numels, skipped, strict=True))
        is_all = len(which) == len(values)
        groups.append(_Group(None if is_all else which, is_aligned, dtype, sizes, table))
    return groups


def _numel(x: Tensor) -> int:
    """Return the elements of one sample, though there may be none."""
    return math.prod(x.shape[1:])


def _stride(x: Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else 0


_launch_squares, _launch_total = Launcher(kernels.squares_kernel), Launcher(kernels.total_kernel)
_launch_release = Launcher(kernels.release_kernel)


def squares(values: Sequence[Tensor]) -> Tensor:
    """See `unison.kernels.many.squares`."""
    device, batch = values[0].device, values[0].shape[0]
    out = None
    addresses = addresses_of(values)
    for group in _groups(values, addresses) if batch else ():
        num = len(group.numels)
        tensors, first = tile_map(group.numels, _SQUARE_TILE, device)
        num_tiles = len(tensors)
        parts = torch.empty(batch, num_tiles, device=device)
        totals = torch.empty(num, batch, dtype=torch.float64, device=device)
        _launch_squares(
            (num_tiles, batch),
            (group.table(addresses, None, device), tensors, first, parts),
            (num_tiles,),
            ALIGNED=group.is_aligned, TILE=_SQUARE_TILE, num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip
        _launch_total(
            (num, batch), (parts, first, totals), (num, num_tiles),
            BLOCK=256, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        index = group.index(device)
        if index is None:
            return totals
        if out is None:
            out = torch.empty(len(values), batch, dtype=torch.float64, device=device)
        out.index_copy_(0, index, totals)
    return values[0].new_empty(len(values), batch, dtype=torch.float64) if out is None else out


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
    is_noisy = noise is not None
    size = _NOISY_TILE if is_noisy else _COMBINE_TILE
    at, out_at = addresses_of(values), addresses_of(outs)
    for group in _groups(values, at, outs, out_at, noise.starts if is_noisy else None, size):
        index = group.index(device)
        tensors, first = tile_map(group.numels, size, device)
        recipes = weights if noise is None else noise.recipes
        if noise is not None and index is not None:
            recipes = recipes[index]
        assert group.dtype is not None
        _launch_release(
            (len(tensors), 1),
            (
                group.table(at, out_at, device), recipes, tensors, first,
                weights if index is None else weights[index], kernel_table(SECURE, device),
            ),
            (batch, 1.0 / divisor),
            NOISY=is_noisy, DTYPE=_DTYPES[group.dtype], ADD=add, ALIGNED=group.is_aligned,
            TILE=size, AT_ONCE=max(1, min(batch, _SAMPLES_AT_ONCE)),
            num_warps=4 if is_noisy else 8, enable_fp_fusion=False,
        )  # fmt: skip
        if noise is not None and index is not None:
            recipes.zero_()  # a copy: the key does not stay behind in device memory
