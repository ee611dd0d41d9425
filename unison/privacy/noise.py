"""The last step of a logical batch: noise on the clipped sum, once per element, and one division.

[Note: finalise] The sum is rounded to the noise's grid, the noise is added exactly, and only then
is the result rounded, divided and cast: what comes after the noise is post-processing. A parameter
that no sample used is a sum of zeros and gets its noise like any other; otherwise the noise would
tell which parameters were used.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unison.kernels import multi_tensor
from unison.kernels.multi_tensor import DeviceTableCache, empty_table, to_device
from unison.kernels.random import KEY_AT, RECIPE_LENGTH, Cipher, Distribution, Recipe, secure_floats
from unison.privacy.cut import Gradients, empty_gradients
from unison.privacy.grid import Grid
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
_COUNT_PURPOSE = "count noise"  # of its own: any name may be a parameter's
_HOST = torch.device("cpu")


def finalise(
    integers: Tensor,
    *,
    grid: Grid,
    name: str,
    key: Key,
    release: Release,
    divisor: float,
    dtype: torch.dtype,
    box: Box | None = None,
) -> Tensor:
    """Turn a clipped sum into a private gradient.

    Args:
        integers: Σ_b c_b · gradient_b on a grid; of the box, if there is one.
        grid: The grid.
        name: The parameter's canonical name, on which its noise hangs.
        key: The key of this step's noise.
        release: What this step applies.
        divisor: A public constant.
        dtype: Of the gradient.
        box: Which part of the parameter `total` is; all of it unless given.
    """
    total = grid.values(integers)
    if release.noise_std > 0:
        stream = Stream(key, name, step=release.step, purpose=PURPOSE, cipher=Cipher.CHACHA20)
        where = Box.whole(total.shape) if box is None else box
        noise = secure_normal(stream, where, release.noise_std, device=total.device)
        add_noise_(total, noise.view_as(total), noise_spacing(release.noise_std))
    return total.to(torch.promote_types(dtype, torch.float32)).div_(divisor).to(dtype)


class Shares(NamedTuple):
    """What the clipped sums of many parameters, or of parts of them, are made of.

    Lists of as many entries each: an object per parameter would take longer than the arithmetic.

    Attributes:
        names: The parameters' canonical names.
        values: [n, ...] each: per-sample gradients, or the one sum of them, perhaps on a grid.
        weights: [n] each: coefficients, or the number 1, or the grid's spacing.
        like: Parameters, of whose shapes and dtypes the gradients are.
        starts: First of the parameter's elements that this is.
    """

    names: Sequence[str]
    values: Sequence[Tensor]
    weights: Sequence[Tensor]
    like: Sequence[Tensor]
    starts: Sequence[int]

    @classmethod
    def of(
        cls, owned: Sequence[Owned], values: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> "Shares":
        """Return the shares of what a rank owns, given values and weights of each."""
        names, starts = tuple(each.name for each in owned), tuple(each.start for each in owned)
        return cls(names, values, weights, [each.parameter for each in owned], starts)


def can_release(shares: Shares) -> bool:
    """Whether compiled kernels take all of these."""
    return multi_tensor.is_fast(shares.values)


def release_all(
    shares: Shares,
    *,
    key: Key,
    release: Release,
    divisor: float,
    num_samples: int,
) -> Gradients:
    """Turn many clipped sums into private gradients at once: see [Note: finalise].

    Args:
        shares: All of them, on one device.
        key: The key of this step's noise.
        release: What this step applies.
        divisor: A public constant.
        num_samples: Samples in the logical batch: they bound the sum.

    Returns:
        Gradients in the order given; those of vectors, or of matrices as wide, in one memory.
    """
    device = shares.values[0].device
    recipes = recipes_for(shares.names, key, release, num_samples, device)
    if recipes is None:
        return release_by(shares, None, divisor)
    on_device = to_device(recipes, device)
    made = release_by(shares, on_device, divisor)
    erase(recipes, on_device)
    return made


def erase(recipes: Tensor, on_device: Tensor) -> None:
    """Overwrite the host's copy of recipes, without waiting for the device.

    The device may have yet to read it, so the zeros come from there: in stream order, after the
    copy to the device and after `release_by`, which leaves zeros in what it used.

    Args:
        recipes: On the host, in pinned memory if the device is another one.
        on_device: What was made of them, zeros by now.
    """
    if on_device is not recipes:
        recipes.copy_(on_device, non_blocking=True)


def release_by(shares: Shares, recipes: Tensor | None, divisor: float) -> Gradients:
    """The part of `release_all` that the device does.

    Args:
        shares: As there.
        recipes: See `recipes_of`, on the device; zeros afterwards. None for no noise.
        divisor: A public constant.
    """
    noise = None if recipes is None else multi_tensor.NoiseDraw(recipes, shares.starts)
    outs = empty_gradients(shares.like, shares.values[0].device)
    multi_tensor.release(shares.values, _weights(shares), noise, divisor, outs)
    if recipes is not None:
        recipes.zero_()  # in stream order: the key does not stay behind in device memory
    return outs


def recipes_for(
    names: Sequence[str],
    key: Key,
    release: Release,
    num_samples: int,
    device: torch.device = _HOST,
) -> Tensor | None:
    """See `recipes_of`; None where a step has no noise.

    Raises:
        BadInput: If so many samples are too much for the noise's grid.
    """
    if release.noise_std == 0:
        return None
    Grid.of(release, num_samples)
    return recipes_of(names, key, release, device)


def recipes_of(
    names: Sequence[str], key: Key, release: Release, device: torch.device = _HOST
) -> Tensor:
    """Return what each parameter's noise is drawn by: int64 [parameters, RECIPE_LENGTH], CPU.

    Args:
        names: Of the parameters.
        key: The key of this step's noise.
        release: What this step applies.
        device: Where it is going to be sent.
    """
    cipher = Cipher.CHACHA20
    words = words_of_streams(key, names, step=release.step, purpose=PURPOSE, cipher=cipher)
    made = empty_table((len(names), RECIPE_LENGTH), device)
    table = made.numpy()
    table[:] = _blank_recipe(release.noise_std, cipher)
    table[:, KEY_AT : KEY_AT + cipher.num_key_words] = words.numpy()
    words.zero_()
    return made


@lru_cache(maxsize=16)
def _blank_recipe(std: float, cipher: Cipher) -> np.ndarray:
    """Return a recipe with nothing in the place of the key: int64 [RECIPE_LENGTH]."""
    floats = secure_floats(std, noise_spacing(std))
    blank = Recipe(cipher, (0,) * cipher.num_key_words, Distribution.SECURE_NORMAL, floats)
    return np.array(blank.numbers(), np.int64)


def _weights(shares: Shares) -> Tensor:
    """Return the weights of all shares [shares, most], float32, in few launches."""
    first = shares.weights[0]
    if all(map(is_, shares.weights, repeat(first))):
        every = first.expand(len(shares.weights), -1)
        # One launch for both; `contiguous` is for weights that are float32 already.
        return every.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
    most = max([values.shape[0] for values in shares.values])
    each = {id(weights): weights for weights in shares.weights}
    rows = {key: i for i, key in enumerate(each)}
    table = torch.stack(
        [F.pad(w, (0, most - w.shape[0])) if w.shape[0] < most else w for w in each.values()]
    ).float()
    which = tuple([rows[id(weights)] for weights in shares.weights])
    return table[_indices.table(which, table.device, lambda _: torch.tensor(which))]


_indices = DeviceTableCache()  # of rows of weights: the same ones in every step


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
    stream = Stream(
        key, "below the clip norm", release.step, purpose=_COUNT_PURPOSE, cipher=Cipher.CHACHA20
    )
    spacing = noise_spacing(std)
    noise = secure_normal(stream, (1,), std, spacing=spacing, dtype=torch.float64)
    on_grid = round_to_grid(torch.tensor([statistic], dtype=torch.float64), spacing)
    return float(on_grid + noise)
