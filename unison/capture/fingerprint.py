"""Whether two tensors have the same bits, when they do not exist at the same time.

[Note: fingerprints] A tensor is a matrix x[r, f] of 32-bit integers (its bits; 16-bit ones are
widened, 64-bit ones are two). With random 64-bit keys u, v, and all sums modulo 2⁶⁴,

    h_r = (Σ_f v_f · x[r, f]) >> 32,        fingerprint = Σ_r u_r · h_r.

*Two different tensors have the same one with a probability below 2⁻³⁰*, over the keys. Take a row
in which they differ, in one place by d_f = odd · 2ᵏ with k ≤ 31. v_f d_f is uniform on the
multiples of 2ᵏ, and h_r stays only if the difference of the sums is one of the less than 2³³⁻ᵏ in
(−2³², 2³²): probability below 2⁻³¹. Otherwise h_r differs by odd · 2ᵏ with k ≤ 31 again, and
Σ_r u_r h_r stays with probability 2ᵏ⁻⁶⁴ ≤ 2⁻³³. (Multilinear hashing: Carter and Wegman 1979.)

Sums of integers do not depend on their order: a fingerprint is the same whatever the threads do.
The keys are drawn once per process, from the operating system, so that no data can know them.
"""

import os
from collections.abc import Iterable

import torch
from torch import Tensor

_ELEMENTS_PER_TILE = {"cpu": 1 << 18}  # int64: it should stay in cache
_ELEMENTS_PER_TILE_ELSEWHERE = 1 << 23

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}

_keys: dict[tuple[str, torch.device], Tensor] = {}


def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Return one number per tensor [tensors], int64, on their device: equal for equal bits."""
    return torch.stack([_of(tensor.detach()) for tensor in tensors])


def _of(x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    if x.numel() == 0:
        return total
    x = x.reshape(1, -1) if x.ndim < 2 else x
    num_columns, row = x.shape[-1], 0
    most = _ELEMENTS_PER_TILE.get(x.device.type, _ELEMENTS_PER_TILE_ELSEWHERE)
    for some in x.split(max(1, most // x[0].numel())):
        # Rows are what all dimensions but the last one count. Where that is no view, `some` is
        # copied, and not all of x.
        for part in some.reshape(-1, num_columns).split(max(1, most // num_columns)):
            bits = part.contiguous().view(_INTEGERS[x.element_size()]).long()
            sums = bits.mul_(_key("columns", bits.shape[1], x.device)).sum(1) >> 32
            total += sums.mul_(_key("rows", row + len(part), x.device)[row:]).sum()
            row += len(part)
    return total


def _key(name: str, length: int, device: torch.device) -> Tensor:
    """Return the first numbers of a key, the same ones every time."""
    key = _keys.get((name, device))
    if key is None or len(key) < length:
        known = torch.empty(0, dtype=torch.int64) if key is None else key.cpu()
        num_new = max(1024, length, 2 * len(known)) - len(known)
        more = torch.frombuffer(bytearray(os.urandom(8 * num_new)), dtype=torch.int64)
        key = _keys[name, device] = torch.cat([known, more]).to(device)
    return key[:length]
