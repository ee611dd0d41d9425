"""The last step of a logical batch: noise on the clipped sum, once per element, and one division.

[Note: finalise] The sum is rounded to the noise's grid, the noise is added exactly, and only then
is the result rounded, divided and cast: what comes after the noise is post-processing. A parameter
that no sample used is a sum of zeros and gets its noise like any other; otherwise the noise would
tell which parameters were used.
"""

import torch
from torch import Tensor

from unison.kernels.random import Cipher
from unison.privacy.mechanism import Release
from unison.rng import Box, Key, Stream, add_noise_, noise_spacing, round_to_grid, secure_normal

PURPOSE = "noise"
_COUNT = "number of samples below the clip norm"  # the name of a stream that no parameter has


def finalise(
    total: Tensor,
    *,
    name: str,
    key: Key,
    release: Release,
    divisor: float,
    dtype: torch.dtype,
    box: Box | None = None,
) -> Tensor:
    """Turn a clipped sum into a private gradient; `total` is used up.

    Args:
        total: Σ_b c_b · gradient_b, float32 or float64; of the box, if there is one.
        name: The parameter's canonical name, on which its noise hangs.
        key: The key of this step's noise.
        release: What this step applies.
        divisor: A public constant.
        dtype: Of the gradient.
        box: Which part of the parameter `total` is; all of it unless given.
    """
    if release.noise_std > 0:
        stream = Stream(key, name, step=release.step, purpose=PURPOSE, cipher=Cipher.CHACHA20)
        where = Box.whole(total.shape) if box is None else box
        noise = secure_normal(stream, where, release.noise_std, device=total.device)
        add_noise_(total, noise.view_as(total), noise_spacing(release.noise_std))
    return total.div_(divisor).to(dtype)


def noisy_count(statistic: float, *, key: Key, release: Release) -> float:
    """The statistic of adaptive clipping with its own noise, in the same step.

    Args:
        statistic: Σ (b − ½) over the samples of the batch.
        key: The key of this step's noise.
        release: What this step applies.
    """
    std = release.count_noise_multiplier
    assert std is not None
    if std == 0:
        return statistic
    stream = Stream(key, _COUNT, step=release.step, purpose=PURPOSE, cipher=Cipher.CHACHA20)
    spacing = noise_spacing(std)
    noise = secure_normal(stream, (1,), std, spacing=spacing, dtype=torch.float64)
    on_grid = round_to_grid(torch.tensor([statistic], dtype=torch.float64), spacing)
    return float(on_grid + noise)
