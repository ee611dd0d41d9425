"""The last step of a logical batch: noise on the clipped sum, once per element, and one division.

[Note: finalise] The sum is rounded to the noise's grid, the noise is added exactly, and only then
is the result rounded, divided and cast: what comes after the noise is post-processing. A parameter
that no sample used is a sum of zeros and gets its noise like any other; otherwise the noise would
tell which parameters were used.
"""

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, eq, is_
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.errors import BadInput
from unison.kernels import many
from unison.kernels.many.table import on_device, sent
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


class Shares(NamedTuple):
    """What the clipped sums of many parameters, or of parts of them, are made of.

    Lists of as many entries each: an object per parameter would take longer than the arithmetic.

    Attributes:
        names: The parameters' canonical names.
        values: [n, ...] each: per-sample gradients, or the one sum of them.
        weights: [n] each: coefficients, or the number 1.
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
        names, starts = [each.name for each in owned], [each.start for each in owned]
        return cls(names, values, weights, [each.parameter for each in owned], starts)


def can_release(shares: Shares) -> bool:
    """Whether compiled kernels take all of these."""
    return many.is_fast(shares.values)


def release_all(
    shares: Shares,
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
        Gradients in the order given; those of vectors, or of matrices as wide, in one memory.
    """
    recipes = recipes_for(shares.names, key, release, num_samples)
    if recipes is not None:
        recipes = sent(recipes, shares.values[0].device)
    return release_by(shares, recipes, divisor)


def release_by(shares: Shares, recipes: Tensor | None, divisor: float) -> list[Tensor]:
    """The part of `release_all` that the device does.

    Args:
        shares: As there.
        recipes: See `recipes_of`, on the device; zeros afterwards. None for no noise.
        divisor: A public constant.
    """
    noise = None if recipes is None else many.NoiseDraw(recipes, shares.starts)
    outs = _empty_gradients(shares.like, shares.values[0].device)
    many.release(shares.values, _weights(shares), noise, divisor, outs)
    if recipes is not None:
        recipes.zero_()  # in stream order: the key does not stay behind in device memory
    return outs


def recipes_for(
    names: Sequence[str], key: Key, release: Release, num_samples: int
) -> Tensor | None:
    """See `recipes_of`; None where a step has no noise.

    Raises:
        BadInput: If so many samples are too much for the noise's grid.
    """
    if release.noise_std == 0:
        return None
    _check_on_grid(release, num_samples)
    return recipes_of(names, key, release)


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


def _empty_gradients(like: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of the same shapes and dtypes as these."""
    known = next((each for each in _known if each.is_for(like)), None)
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = Cut(like)
        _known.append(known)
    return known.empty(device)


class Cut:
    """How memories are cut into gradients.

    Tensors that are alike in all dimensions but the first are pieces of one memory, which are made
    at once, in their shapes. A vector is followed by a piece for nobody, where the next would begin
    at no multiple of 64; a matrix whose next would is made as a vector.

    Args:
        like: Tensors of the gradients' shapes and dtypes.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._shapes, self._dtypes = [each.shape for each in like], [each.dtype for each in like]
        groups: dict[tuple, list[int]] = {}
        for i, (shape, dtype) in enumerate(zip(self._shapes, self._dtypes, strict=True)):
            is_whole = len(shape) > 1 and shape.numel() > 0 and shape.numel() % _ALIGNED == 0
            groups.setdefault((dtype, tuple(shape[1:]) if is_whole else ()), []).append(i)
        # Of each memory: dtype, shape, lengths of its pieces along the first dimension.
        self._memories: list[tuple[torch.dtype, tuple[int, ...], list[int]]] = []
        # Of each gradient: which of all pieces it is, and its shape if that is not the piece's.
        self._places: list[tuple[int, torch.Size | None]] = [(0, None)] * len(like)
        num_pieces = 0
        for (dtype, rest), which in groups.items():
            sizes: list[int] = []
            for i in which:
                shape = self._shapes[i]
                is_made_flat = not rest and len(shape) != 1
                self._places[i] = num_pieces + len(sizes), shape if is_made_flat else None
                sizes.append(shape[0] if rest else shape.numel())
                if not rest and shape.numel() % _ALIGNED:
                    sizes.append(-shape.numel() % _ALIGNED)
            self._memories.append((dtype, (sum(sizes), *rest), sizes))
            num_pieces += len(sizes)

    def is_for(self, like: Sequence[Tensor]) -> bool:
        """Whether gradients of these shapes and dtypes are cut so."""
        return (
            len(like) == len(self._shapes)
            and all(map(is_, map(_dtype_of, like), self._dtypes))
            and all(map(eq, map(_shape_of, like), self._shapes))
        )

    def empty(self, device: torch.device) -> list[Tensor]:
        """Return the gradients, with nothing in them."""
        pieces: list[Tensor] = []
        for dtype, shape, sizes in self._memories:
            memory = torch.empty(shape, dtype=dtype, device=device)
            pieces += torch.unsafe_split_with_sizes(memory, sizes)  # views, unknown to autograd
        return [pieces[i] if shape is None else pieces[i].view(shape) for i, shape in self._places]


_ALIGNED = 64  # elements: where a gradient begins
_MOST_KNOWN = 16
_known: list[Cut] = []
_dtype_of, _shape_of = attrgetter("dtype"), attrgetter("shape")


def _weights(shares: Shares) -> Tensor:
    """Return the weights of all shares [shares, most], float32, in few launches."""
    first = shares.weights[0]
    if all(map(is_, shares.weights, repeat(first))):
        return first.float().expand(len(shares.weights), -1).contiguous()
    most = max([values.shape[0] for values in shares.values])
    each = {id(weights): weights for weights in shares.weights}
    rows = {key: i for i, key in enumerate(each)}
    table = torch.stack(
        [F.pad(w, (0, most - w.shape[0])) if w.shape[0] < most else w for w in each.values()]
    ).float()
    index = torch.tensor([rows[id(weights)] for weights in shares.weights])
    return table[on_device(index, table.device)]


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
