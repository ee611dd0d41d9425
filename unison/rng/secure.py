"""Normal noise for privacy: ChaCha20, as many random bits as a value needs, on a fixed grid.

Floating-point noise added to a floating-point sum leaks through the low-order bits (Mironov 2012):
which sums are reachable depends on the data. Here noise and sum are both multiples of one public
spacing, so they add without rounding and the result's low-order bits say nothing. docs/rng.md
("Secure normals") has the argument and the bounds.
"""

import math

import torch

from unison import check
from unison.errors import BadInput
from unison.kernels.random import ROUND_MAGIC, Cipher, Distribution, secure_floats
from unison.rng.streams import Stream, Where, fill

GRID_BITS = 20
MAX_MAGNITUDE = 10.25  # no |z| exceeds the quantile of 2^-80, 10.22
# Total variation between one value and a normal one rounded to the grid, for spacings of 2^-20
# standard deviations or more (`draw_distance` in bench/make_normal_table.py computes the bound, and
# docs/rng.md proves it). Finer ones have proportionally more, and so an end.
DRAW_DISTANCE = 2.0**-75
_MAX_SCALE = 2.0**31
_MAX_INTEGER = {torch.float32: 2.0**24, torch.float64: 2.0**51}
_CHUNK = 1 << 22


def noise_spacing(std: float) -> float:
    """Return the spacing of the noise grid: a power of two in [2^-20, 2^-19) · std.

    A function of the public `std` alone. At this spacing every noise value is exact in float32.

    >>> noise_spacing(1.0) == 2.0**-20, noise_spacing(1.5) == 2.0**-19
    (True, True)
    """
    check.positive(std=std)
    mantissa, exponent = math.frexp(std)  # std = mantissa · 2^exponent, mantissa in [1/2, 1)
    return math.ldexp(1.0, exponent - (mantissa == 0.5) - GRID_BITS)


def grid_sensitivity(clip_norm: float, spacing: float, num_elements: int) -> float:
    """Return the L2 sensitivity of a clipped sum after it is rounded to the grid.

    Rounding moves each coordinate of either neighbour's sum by at most spacing / 2, so their
    difference grows by at most spacing · sqrt(num_elements).
    """
    check.positive(clip_norm=clip_norm, spacing=spacing)
    return clip_norm + spacing * math.sqrt(num_elements)


def secure_normal(
    stream: Stream,
    where: Where,
    std: float,
    *,
    spacing: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return normal noise of mean 0 on the grid of multiples of `spacing`.

    Guarantees:
        A value differs from a normal one that is rounded to the nearest multiple of `spacing` with
        probability `DRAW_DISTANCE` at most, times how often the spacing goes into 2^-20 · std if
        that is more than once; ChaCha20 is taken for random. Every value is an exact multiple of
        `spacing`; float32 and float64 hold the same values. The noise does not depend on any data,
        so it may be drawn at any time, on any CUDA stream.

    Args:
        stream: Must use `Cipher.CHACHA20`.
        where: Box or shape.
        std: Standard deviation of the noise.
        spacing: A power of two, at least 2^-31 · std; `noise_spacing(std)` unless given. Finer
            grids than that need float64.
        dtype: float32 or float64; bfloat16 and float16 cannot hold the grid.
        device: Where to put the result.
        out: Tensor to fill instead.
    """
    if stream.cipher is not Cipher.CHACHA20:
        raise BadInput(f"secure noise needs a stream of Cipher.CHACHA20, found {stream!r}")
    spacing = noise_spacing(std) if spacing is None else spacing
    dtype = out.dtype if out is not None else dtype
    check.positive(std=std, spacing=spacing)
    if math.frexp(spacing)[0] != 0.5:
        raise BadInput(f"spacing must be a power of two, found {spacing!r}")
    if dtype not in _MAX_INTEGER:
        raise BadInput(f"secure noise needs float32 or float64 to hold its grid, found {dtype}")
    if std / spacing * MAX_MAGNITUDE >= _MAX_INTEGER[dtype]:
        raise BadInput(
            f"{dtype} cannot hold noise of {std=} on a grid of {spacing=}: use a wider spacing "
            "or float64"
        )
    if std / spacing > _MAX_SCALE:
        raise BadInput(
            f"noise of {std=} is not known well enough on a grid of {spacing=}: use a spacing of "
            f"at least {std / _MAX_SCALE:.3g}"
        )
    floats = secure_floats(std, spacing)
    return fill(stream, where, Distribution.SECURE_NORMAL, dtype, device, out, floats)


def round_to_grid(tensor: torch.Tensor, spacing: float) -> torch.Tensor:
    """Return float64 multiples of `spacing`, the nearest to each element (ties to even).

    Raises:
        BadInput: An element is not finite or exceeds 2^51 · spacing, where rounding would fail.
    """
    check.positive(spacing=spacing)
    if math.frexp(spacing)[0] != 0.5:
        raise BadInput(f"spacing must be a power of two, found {spacing!r}")
    scaled = tensor.double() * (1.0 / spacing)
    if not bool((scaled.abs() < 2.0**51).all()):
        raise BadInput(
            f"expected finite values below {2.0**51 * spacing:.3g} to round to multiples of "
            f"{spacing!r}: the clipped sum is too large or not finite"
        )
    return (scaled + ROUND_MAGIC - ROUND_MAGIC) * spacing


def add_noise_(total: torch.Tensor, noise: torch.Tensor, spacing: float) -> torch.Tensor:
    """Round `total` to the grid, add noise of the same grid exactly, and round once, in place.

    Guarantees:
        The sum is exact in float64 (multiples of one power of two below 2^52 of them), so the
        result is a function of (rounded total + noise) alone; its rounding to the dtype of `total`
        is post-processing.
    """
    check.same_shape(total=total, noise=noise)
    if noise.dtype not in _MAX_INTEGER:
        raise BadInput(f"expected noise from secure_normal, found {noise.dtype=}")
    flat_noise = noise.reshape(-1)
    flat = total.view(-1) if total.is_contiguous() else total.reshape(-1)
    with torch.no_grad():
        for at in range(0, flat.numel(), _CHUNK):  # bounds the float64 copies
            part = flat[at : at + _CHUNK]
            part.copy_(round_to_grid(part, spacing) + flat_noise[at : at + _CHUNK].double())
        if not total.is_contiguous():
            total.copy_(flat.view_as(total))
    return total
