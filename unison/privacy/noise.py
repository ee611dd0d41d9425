"""The last step of a logical batch: noise on the clipped sum, once per element, and one division.

[Note: finalise] The sum is rounded to the noise's grid, the noise is added exactly, and only then
is the result rounded, divided and cast: what comes after the noise is post-processing. A parameter
that no sample used is a sum of zeros and gets its noise like any other; otherwise the noise would
tell which parameters were used.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.errors import BadInput
from unison.kernels import many
from unison.kernels.many.table import places_of, sent
from unison.kernels.random import Cipher, Distribution, Recipe
from unison.kernels.random.recipe import KEY_AT
from unison.privacy.mechanism import Release
from unison.privacy.owners.base import Owned
from unison.rng import (
    Box,
    Key,
    Stream,
    add_noise_,
    noise_spacing,
    round_to_grid,
    secure_normal,
    words_of_streams,
)

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


@dataclass(frozen=True, eq=False)
class Share:
    """What the clipped sum of one parameter, or of a part of it, is made of.

    Attributes:
        name: The parameter's canonical name.
        values: [n, ...]: per-sample gradients, or the one sum of them.
        weights: [n]: coefficients, or the number 1.
        dtype: Of the gradient.
        start: First of the parameter's elements that this is.
    """

    name: str
    values: Tensor
    weights: Tensor
    dtype: torch.dtype
    start: int = 0

    @classmethod
    def of(cls, owned: Owned, values: Tensor, weights: Tensor) -> "Share":
        """Return the share of what a rank owns."""
        return cls(owned.name, values, weights, owned.parameter.dtype, owned.start)

    @property
    def numel(self) -> int:
        """Elements of the sum."""
        return self.values.numel() // self.values.shape[0]


def can_release(shares: Sequence[Share]) -> bool:
    """Whether compiled kernels take all of these."""
    return many.is_fast([share.values for share in shares])


def release_all(
    shares: Sequence[Share],
    *,
    key: Key,
    release: Release,
    divisor: float,
    num_samples: int,
) -> list[Tensor]:
    """Turn many clipped sums into private gradients at once: see [Note: finalise].

    Args:
        shares: All of them, on one device.
        key: The key of this step's noise.
        release: What this step applies.
        divisor: A public constant.
        num_samples: Samples in the logical batch: they bound the sum.

    Returns:
        Gradients in the order given, each flat, in the memory of one tensor per dtype.
    """
    device = shares[0].values.device
    noise = None
    if release.noise_std > 0:
        _check_on_grid(release, num_samples)
        names = [share.name for share in shares]
        recipes = sent(recipes_of(names, key, release), device)
        noise = many.NoiseDraw(recipes, [share.start for share in shares])
    outs = _empty_gradients(shares, device)
    most = max(len(share.values) for share in shares)
    many.release([share.values for share in shares], _weights(shares, most), noise, divisor, outs)
    if noise is not None:
        noise.recipes.zero_()  # in stream order: the key does not stay behind in device memory
    return outs


def recipes_of(names: Sequence[str], key: Key, release: Release) -> Tensor:
    """Return what each parameter's noise is drawn by: int64 [parameters, RECIPE_LENGTH], CPU."""
    spacing = noise_spacing(release.noise_std)
    floats = (release.noise_std / spacing, spacing)
    cipher = Cipher.CHACHA20
    blank = Recipe(cipher, (0,) * cipher.num_key_words, Distribution.SECURE_NORMAL, floats)
    table = blank.pack().expand(len(names), -1).contiguous()
    table[:, KEY_AT : KEY_AT + cipher.num_key_words] = words_of_streams(
        key, names, step=release.step, purpose=PURPOSE, cipher=cipher
    )
    return table


def _check_on_grid(release: Release, num_samples: int) -> None:
    """Require the sum to lie on the grid that float64 can add exactly; no sample exceeds C."""
    largest = max(1, num_samples) * release.max_grad_norm
    if largest >= 2.0**50 * noise_spacing(release.noise_std):
        raise BadInput(
            f"{num_samples} samples of norm {release.max_grad_norm} are too much for the grid of a "
            f"noise of standard deviation {release.noise_std}: use a larger noise_multiplier"
        )


def _empty_gradients(shares: Sequence[Share], device: torch.device) -> list[Tensor]:
    """Return flat tensors of the gradients' sizes, those of one dtype in one memory."""
    outs: list[Tensor] = [shares[0].values] * len(shares)
    for dtype in {share.dtype for share in shares}:
        which = [i for i, share in enumerate(shares) if share.dtype == dtype]
        places, size = places_of([shares[i].numel for i in which])
        memory = torch.empty(size, dtype=dtype, device=device)
        for i, place in zip(which, places, strict=True):
            outs[i] = memory[place : place + shares[i].numel]
    return outs


def _weights(shares: Sequence[Share], most: int) -> Tensor:
    """Return the weights of all shares [shares, most], float32, in few launches."""
    each = {id(share.weights): share.weights for share in shares}
    rows = {key: i for i, key in enumerate(each)}
    table = torch.stack(
        [F.pad(w, (0, most - len(w))) if len(w) < most else w for w in each.values()]
    ).float()
    if len(each) == 1:
        return table.expand(len(shares), -1).contiguous()
    index = torch.tensor([rows[id(share.weights)] for share in shares])
    return table[sent(index, table.device)]


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
