"""The launches: tables for the kernels of `triton.py`, and nothing that waits for the device."""

import struct
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from unison.kernels.factored import triton as kernels
from unison.kernels.factored.table import (
    FEATURES,
    LEAST,
    LEFT,
    OUT,
    RIGHT,
    RUN,
    SAMPLE,
    TOKEN,
    WIDTH,
)
from unison.kernels.gram.triton import least_norm, run_of
from unison.kernels.launcher import Launcher
from unison.kernels.many.asked import ADDRESS, addresses_of, facts_of
from unison.kernels.many.table import Sent, tile_map, to_send
from unison.kernels.scratch import scratch

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_TOTALS = {torch.float32: tl.float32, torch.int32: tl.int32}
_ROWS, _COLUMNS, _TOKENS = 128, 256, 64  # of a tile of a sum
_STEP = 64  # features that are multiplied at a time, for Gram matrices
_MOST_KNOWN = 16  # sets of layers


class _Layers:
    """Layers of which all but addresses is known.

    Args:
        lefts: Of every layer [batch, tokens, rows], alike but for the rows.
        rights: Likewise, columns.
    """

    def __init__(self, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> None:
        self.batch, self.tokens = lefts[0].shape[:2]
        self.dtype = lefts[0].dtype
        self.num_tiles = tuple(
            -(-left.shape[2] // _ROWS) * -(-right.shape[2] // _COLUMNS)
            for left, right in zip(lefts, rights, strict=True)
        )
        self._table = np.zeros((len(lefts), WIDTH), np.int64)
        for first, sides in ((LEFT, lefts), (RIGHT, rights)):
            for row, side in zip(self._table, sides, strict=True):
                row[first + SAMPLE], row[first + TOKEN] = side.stride()[:2]
                row[first + FEATURES] = side.shape[2]
                row[first + RUN] = _steps_of_run(side.shape[2], side.dtype)
                row[first + LEAST] = _bits(least_norm(side.shape[2]))
        self._tables = Sent()

    def table(
        self, lefts: bytes, rights: bytes, outs: bytes | None, device: torch.device
    ) -> Tensor:
        """The table with these addresses, on a device."""
        key = lefts, rights, outs
        return self._tables.table(key, device, partial(self._filled, key))

    def _filled(self, at: tuple[bytes, bytes, bytes | None], device: torch.device) -> Tensor:
        made = to_send(self._table.shape, device)
        table = made.numpy()
        table[:] = self._table
        for column, addresses in zip((LEFT, RIGHT, OUT), at, strict=True):
            if addresses is not None:
                table[:, column] = np.frombuffer(addresses, ADDRESS)
        return made


def _steps_of_run(features: int, dtype: torch.dtype) -> int:
    """Return how many steps of features to add before the sum is added to others.

    As many as `run_of` allows, and fewer where then the last run is as long as the others.
    """
    steps = -(-features // _STEP)
    runs = -(-steps // (run_of(dtype) // _STEP))
    return -(-steps // runs)


def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", number))[0]


_known: dict[tuple, _Layers] = {}


def _layers(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> _Layers:
    key = facts_of(lefts), facts_of(rights)
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[key] = _Layers(lefts, rights)
    return found


_launch_gram, _launch_weighted = (
    Launcher(kernels.gram_kernel),
    Launcher(kernels.weighted_kernel),
)


def grams(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """Return the fields of `unison.kernels.factored.Grams`, one after the other."""
    layers, device = _layers(lefts, rights), lefts[0].device
    size, warps = (128, 8) if layers.tokens > 64 else (64, 4)
    count = -(-layers.tokens // size)
    num_tiles = count * (count + 1) // 2
    parts = torch.empty(6, len(lefts), layers.batch, num_tiles, dtype=torch.float64, device=device)
    table = layers.table(addresses_of(lefts), addresses_of(rights), None, device)
    with scratch():
        _launch_gram(
            (parts[0].numel(), 1),
            (table, parts),
            (layers.batch, layers.tokens, num_tiles),
            DTYPE=_DTYPES[layers.dtype], BT=size, BK=_STEP,
            num_warps=warps, num_stages=4, enable_fp_fusion=True,
        )  # fmt: skip
    return parts.sum(3)


def weighted_sums(
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    weights: Tensor,
    outs: Sequence[Tensor],
    *,
    add: bool,
) -> None:
    """See `unison.kernels.factored.weighted_sums`."""
    layers, device = _layers(lefts, rights), lefts[0].device
    table = layers.table(addresses_of(lefts), addresses_of(rights), addresses_of(outs), device)
    which, first = tile_map(layers.num_tiles, 1, device)
    with scratch():
        _launch_weighted(
            (len(which), 1),
            (table, which, first, weights),
            (layers.batch, layers.tokens),
            DTYPE=_DTYPES[layers.dtype], TOTAL=_TOTALS[outs[0].dtype], ADD=add,
            BM=_ROWS, BN=_COLUMNS, BK=_TOKENS,
            num_warps=8, num_stages=3, enable_fp_fusion=True,
        )  # fmt: skip
