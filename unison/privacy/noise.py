"""The last step of a logical batch: noise on the clipped sum, once per element, and one division.

[Note: finalise] The sum is rounded to the noise's grid, the noise is added exactly, and only then
is the result rounded, divided and cast: what comes after the noise is post-processing. A parameter
that no sample used is a sum of zeros and gets its noise like any other; otherwise the noise would
tell which parameters were used.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unison.clip.bounds import Grid
from unison.errors import BadInput
from unison.kernels import multi_tensor
from unison.kernels.multi_tensor import AdamWStep, empty_table, to_device
from unison.kernels.random import KEY_AT, RECIPE_LENGTH, Cipher, Distribution, Recipe, secure_floats
from unison.parallel import ParallelAdapter, ShardedParam
from unison.privacy.mechanism import Release, grid_of
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


class ReleaseTerms(NamedTuple):
    """On which terms a logical batch is released.

    Attributes:
        key: The key of this step's noise.
        release: What this step applies.
        divisor: A public constant.
        num_samples: Samples in the logical batch.
    """

    key: Key
    release: Release
    divisor: float
    num_samples: int


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
    total = integers.double() * grid.spacing  # exact: the spacing is a power of two
    if release.noise_std > 0:
        stream = Stream(key, name, step=release.step, purpose=PURPOSE, cipher=Cipher.CHACHA20)
        where = Box.whole(total.shape) if box is None else box
        noise = secure_normal(stream, where, release.noise_std, device=total.device)
        add_noise_(total, noise.view_as(total), noise_spacing(release.noise_std))
    return total.to(torch.promote_types(dtype, torch.float32)).div_(divisor).to(dtype)


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


# ---- many parameters at once ---------------------------------------------------------------------


class Shares(NamedTuple):
    """What the clipped sums of many parameters, or of parts of them, are made of.

    Lists of as many entries each: an object per parameter would take longer than the arithmetic.

    Attributes:
        names: The parameters' canonical names.
        values: [n, ...] each: per-sample gradients, or the one sum of them, perhaps on a grid.
        weights: [n] each: coefficients, or the number 1, or the grid's spacing.
        like: This rank's parts of parameters, of whose shapes and dtypes the gradients are.
        starts: First of the parameter's elements that this is.
    """

    names: Sequence[str]
    values: Sequence[Tensor]
    weights: Sequence[Tensor]
    like: Sequence[Tensor]
    starts: Sequence[int]


def release_all(shares: Shares, terms: ReleaseTerms) -> list[Tensor]:
    """Turn many clipped sums into private gradients at once: see [Note: finalise].

    Args:
        shares: All of them, on one device.
        terms: Noise and division.

    Returns:
        Gradients in the order given.
    """
    device = shares.values[0].device
    recipes = recipes_for(shares.names, terms, device)
    if recipes is None:
        return release_by(shares, None, terms.divisor)
    on_device = to_device(recipes, device)
    made = release_by(shares, on_device, terms.divisor)
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


def release_by(
    shares: Shares,
    recipes: Tensor | None,
    divisor: float,
    step_with: Callable[[list[Tensor]], AdamWStep] | None = None,
) -> list[Tensor]:
    """The part of `release_all` that the device does.

    Args:
        shares: As there.
        recipes: See `recipes_for`, on the device; zeros afterwards. None for no noise.
        divisor: A public constant.
        step_with: Makes, of the tensors for the gradients, a step of AdamW that the same kernels
            take; see `multi_tensor.release`.
    """
    noise = None if recipes is None else (recipes, shares.starts)
    device = shares.values[0].device
    outs = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in shares.like]
    step = None if step_with is None else step_with(outs)
    multi_tensor.release(shares.values, _weights(shares), noise, divisor, outs, step)
    if recipes is not None:
        recipes.zero_()  # in stream order: the key does not stay behind in device memory
    return outs


def recipes_for(
    names: Sequence[str], terms: ReleaseTerms, device: torch.device = _HOST
) -> Tensor | None:
    """Return what each parameter's noise is drawn by: int64 [parameters, RECIPE_LENGTH], CPU.

    Args:
        names: Of the parameters.
        terms: Their key and noise; None is returned where there is no noise.
        device: Where it is going to be sent.

    Raises:
        BadInput: If so many samples are too much for the noise's grid.
    """
    release, std, cipher = terms.release, terms.release.noise_std, Cipher.CHACHA20
    if std == 0:
        return None
    grid_of(release, terms.num_samples)
    words = words_of_streams(terms.key, names, step=release.step, purpose=PURPOSE, cipher=cipher)
    floats = secure_floats(std, noise_spacing(std))
    blank = Recipe(cipher, (0,) * cipher.num_key_words, Distribution.SECURE_NORMAL, floats)
    made = empty_table((len(names), RECIPE_LENGTH), device)
    table = made.numpy()
    table[:] = blank.pack().numpy()
    table[:, KEY_AT : KEY_AT + cipher.num_key_words] = words.numpy()
    words.zero_()
    return made


def _weights(shares: Shares) -> Tensor:
    """Return the weights of all shares [shares, most], float32, in few launches."""
    most = max(len(weights) for weights in shares.weights)
    # Parameters that are clipped together share one tensor: it is padded once.
    own = {id(each): each for each in shares.weights}
    padded = {key: F.pad(each, (0, most - len(each))) for key, each in own.items()}
    return torch.stack([padded[id(each)] for each in shares.weights]).float()


# ---- everything that a rank owns -----------------------------------------------------------------

Own = Mapping[str, tuple[Tensor, Tensor]]
"""What the sum of each used parameter is made of, see `Clipping.shares`."""


def private_gradients(
    owner: ParallelAdapter, own: Own | None, terms: ReleaseTerms, observer: Any = None
) -> Iterator[tuple[ShardedParam, Tensor]]:
    """Make the gradients of everything that a rank owns, as they are asked for.

    Args:
        owner: Who holds the parameters.
        own: Where this rank has all of the sums; else the owner has them.
        terms: Noise and division.
        observer: Is shown the owner's sums before they get noise.
    """
    if own is not None:  # per-sample gradients, which are yet to be clipped
        made = release_all(shares_of(owner, own), terms)
        for owned, gradient in zip(owner.params, made, strict=True):
            yield owned, owned.as_gradient(gradient)
        return
    # The sums over passes and ranks, as integers of which each weighs a spacing.
    grid, found = grid_of(terms.release, terms.num_samples), list(owner.totals())
    if observer is not None:
        observer.see_totals(found, grid, terms)
    totals = [total.view(1, -1) for _, total in found]
    # Parts that are cut in other ways than flat ones draw their noise one by one.
    if multi_tensor.is_fast(totals) and not any(owned.is_dtensor for owned, _ in found):
        weight = grid.weight(totals[0].device)
        shares = _shares([owned for owned, _ in found], totals, [weight] * len(found))
        for (owned, _), gradient in zip(found, release_all(shares, terms), strict=True):
            yield owned, owned.as_gradient(gradient)
        return
    for owned, total in found:
        gradient = finalise(
            total.view(-1),
            grid=grid,
            name=owned.name,
            key=terms.key,
            release=terms.release,
            divisor=terms.divisor,
            dtype=owned.parameter.dtype,
            box=owned.box,
        )
        yield owned, owned.as_gradient(gradient)


def shares_of(owner: ParallelAdapter, own: Own) -> Shares:
    """Return what the sums of all that a rank owns are made of, where it has them itself."""
    made = [own.get(each.name) or _unused(each) for each in owner.params]
    return _shares(owner.params, *zip(*made, strict=True))


def _shares(
    owned: Sequence[ShardedParam], values: Sequence[Tensor], weights: Sequence[Tensor]
) -> Shares:
    names, starts = tuple(each.name for each in owned), tuple(each.start for each in owned)
    return Shares(names, values, weights, [each.local for each in owned], starts)


def _unused(owned: ShardedParam) -> tuple[Tensor, Tensor]:
    """No sample used it, and its noise must not tell."""
    device = owned.parameter.device
    weights = torch.zeros(1, dtype=torch.float64, device=device)
    return torch.zeros(1, owned.numel, device=device), weights


# ---- in the optimizer's hands --------------------------------------------------------------------

Given = dict[str, ref[Tensor]]
"""The gradients that were put where the optimizer finds them. They are not held: a user who sets
gradients to None between steps gets their memory back. (Torch's own weak references are for those
who keep what they get; here it is compared.)"""


def give(gradients: Iterable[tuple[ShardedParam, Tensor]], given: Given) -> None:
    """Put gradients where the optimizer finds them.

    As torch does: added to what is there, whose own noise was drawn and counted.

    Args:
        gradients: As `ShardedParam.as_gradient` returns them.
        given: Those that were put there; changed.
    """
    for owned, gradient in gradients:
        before = owned.parameter.grad
        if before is None:
            owned.parameter.grad = gradient
            given[owned.name] = ref(gradient)
        else:
            require_given({owned.name: owned.parameter}, given)
            before.add_(gradient)


def require_given(parameters: Mapping[str, nn.Parameter], given: Given) -> None:
    """Require every gradient to be one that was given.

    Raises:
        BadInput: Naming the parameter whose gradient is another.
    """
    for name, parameter in parameters.items():
        gradient, own = parameter.grad, given.get(name)
        if gradient is not None and (own is None or gradient is not own()):
            raise BadInput(
                f"{name}.grad is not what the privacy engine put there; a gradient that was not "
                "clipped and noised must not be trained on. Change gradients in place only, and "
                "after the last physical batch"
            )
