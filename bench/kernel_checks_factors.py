"""Checks of per-sample gradients that are given by factors: made, measured, and added up.

A part of `bench.kernel_checks`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.kernel_errors import LIMITS, Outcome, Runs, Setting, largest_error, norm_error
from unison.clip import bounds, measured
from unison.kernels import factored, multi_tensor
from unison.ops import Product


def _shapes(setting: Setting) -> list[tuple[int, int, int, int]]:
    """Samples, tokens, rows, columns: odd, one token, aligned and large."""
    if setting.is_small:
        return [(3, 19, 33, 20), (3, 1, 33, 20), (2, 32, 64, 64)]
    return [(3, 77, 130, 257), (3, 1, 130, 257), (4, 1024, 1280, 1280)]


def _draw_factors(
    setting: Setting, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor, Tensor, bool]]:
    """Yield shape, left [batch, tokens, rows], right [batch, tokens, columns], and if they cancel.

    Tokens that cancel are pairs of the same left and nearly the opposite right.
    """
    generator = setting.generator()
    draw = lambda *size: torch.randn(size, generator=generator, device=setting.device)  # noqa: E731
    for batch, tokens, rows, columns in _shapes(setting):
        left, right = draw(batch, tokens, rows).to(dtype), draw(batch, tokens, columns).to(dtype)
        yield f"{batch}×{tokens}×{rows}×{columns}", left, right, False
    batch, tokens, rows, columns = _shapes(setting)[0]
    left, right = draw(batch, tokens, rows).to(dtype), draw(batch, tokens, columns)
    opposite = -right + 0.01 * draw(batch, tokens, columns)
    right = torch.cat([right, opposite], 1).to(dtype)
    shape = f"{batch}×{2 * tokens}×{rows}×{columns}, cancelling"
    yield shape, left.repeat(1, 2, 1), right, True


def _mass(left: Tensor, right: Tensor) -> Tensor:
    """Return Σ_t ‖left_t‖‖right_t‖ [batch], float64."""
    return (left.double().norm(dim=2) * right.double().norm(dim=2)).sum(1)


def products(setting: Setting, dtype: torch.dtype) -> list[Outcome]:
    """Check per-sample products: stored, squared, and added up with weights."""
    from unison.kernels import products_triton as kernels

    runs = Runs(setting, dtype)
    for shape, left, right, cancels in _draw_factors(setting, dtype):
        x = left.double().mT @ right.double()  # [batch, rows, columns]
        squares, mass = x.square().sum((1, 2)), _mass(left, right)
        scale, relative_to = (mass, "mass") if cancels else (None, "norm")

        def stored(left: Tensor = left, right: Tensor = right, x: Tensor = x):
            out = torch.empty_like(x, dtype=torch.float32)
            return out, kernels.per_sample(left, right, out, "ieee")

        (out, parts), is_same = runs.repeat(stored)
        largest = "largest element"
        if not cancels:
            runs.add("products: stored", shape, largest_error(out, x), largest, is_same)
        error = norm_error(parts.double().sum(1), squares, scale)
        runs.add("products: norm beside the stored", shape, error, relative_to, is_same)

        (parts,), is_same = runs.repeat(
            lambda left=left, right=right: (kernels.per_sample(left, right, None, "ieee"),)
        )
        error = norm_error(parts.double().sum(1), squares, scale)
        runs.add("products: norm alone (tile)", shape, error, relative_to, is_same)

        weights = torch.linspace(0.3, 1.7, len(left), device=left.device)

        def added(left: Tensor = left, right: Tensor = right, weights: Tensor = weights):
            total = left.new_empty(left.shape[2], right.shape[2], dtype=torch.float32)
            kernels.weighted(left, right, weights, total, "ieee", add=False)
            return (total,)

        (total,), is_same = runs.repeat(added)
        if not cancels:
            expected = torch.einsum("b,bij->ij", weights.double(), x)
            runs.add("products: weighted", shape, largest_error(total, expected), largest, is_same)
            if dtype.itemsize == 2:
                _check_many_sums(runs, shape, *_layers(left, right))
        _check_kept(runs, shape, left, right, squares)
    return runs.outcomes


def _check_kept(runs: Runs, shape: str, left: Tensor, right: Tensor, squares: Tensor) -> None:
    """Check what `grad_materialize` does: per-sample gradients are kept, and squared as kept."""
    product = Product(right, left, False, (left.shape[2], right.shape[2]))

    def kept() -> tuple[Tensor, Tensor]:
        x = measured.materialize([product])
        return x, multi_tensor.squares([x])

    if not bounds.is_taken([product]):  # on the CPU
        return
    (x, found), is_same = runs.repeat(kept)
    of_kept = x.double().square().sum((1, 2))
    name, limit = "clip: norm of what is kept", LIMITS[torch.float32]
    runs.add(name, shape, norm_error(found[0], of_kept), "norm of what is kept", is_same, limit)
    if left.shape[1] > 512:  # in few elements the rounding to bfloat16 does not average out
        runs.add(
            "clip: norm of what is kept", shape, norm_error(found[0], squares), "norm", is_same
        )


def gram(setting: Setting, dtype: torch.dtype) -> list[Outcome]:
    """Check squared norms from inner products of tokens, and the mass."""
    from unison.kernels import products_triton as kernels

    runs = Runs(setting, dtype)
    for shape, left, right, cancels in _draw_factors(setting, dtype):
        squares = (left.double().mT @ right.double()).square().sum((1, 2))
        mass = _mass(left, right)
        (found, masses), is_same = runs.repeat(
            lambda left=left, right=right: kernels.squared_norms(left, right, "ieee")
        )
        if cancels:
            error = float(((found.sum(1) - squares).abs() / mass.square()).max())
            runs.add("gram: squared norm", shape, error, "mass²", is_same)
        else:
            runs.add("gram: norm", shape, norm_error(found.sum(1), squares), "norm", is_same)
        runs.add("gram: mass", shape, largest_error(masses.sum(1), mass), "mass", is_same)
        if dtype.itemsize == 2:
            _check_many_norms(runs, shape, *_layers(left, right), cancels=cancels)
    return runs.outcomes


# ---- many layers at once -------------------------------------------------------------------------


def _layers(left: Tensor, right: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return lefts and rights of three layers of different widths, as aligned as kernels ask."""
    left, right = (x[..., : x.shape[2] // 8 * 8].contiguous() for x in (left, right))
    narrow = left[..., : left.shape[2] // 16 * 8]  # its tokens do not follow one another
    return [left, right, narrow], [right, left, right]


def _check_many_norms(
    runs: Runs, shape: str, lefts: list[Tensor], rights: list[Tensor], *, cancels: bool
) -> None:
    """Check norms and masses of several layers, measured by one launch."""
    (found, masses, *_), is_same = runs.repeat(lambda: tuple(factored.grams(lefts, rights)))
    pairs = list(zip(lefts, rights, strict=True))
    squares = torch.stack([(x.double().mT @ y.double()).square().sum((1, 2)) for x, y in pairs])
    mass = torch.stack([_mass(x, y) for x, y in pairs])
    if cancels:
        error = float(((found - squares).abs() / mass.square()).max())
        runs.add("factored: squared norms", shape, error, "mass²", is_same)
    else:
        runs.add("factored: norms", shape, norm_error(found, squares), "norm", is_same)
    error = max(map(largest_error, masses, mass))
    runs.add("factored: masses", shape, error, "mass", is_same)


def _check_many_sums(runs: Runs, shape: str, lefts: list[Tensor], rights: list[Tensor]) -> None:
    """Check weighted sums of several layers, each with weights of its own, made by one launch."""
    pairs, batch = list(zip(lefts, rights, strict=True)), len(lefts[0])
    weights = torch.linspace(0.3, 1.7, len(pairs) * batch, device=lefts[0].device)
    weights = weights.view(len(pairs), batch)

    def added() -> tuple[Tensor, ...]:
        outs = [x.new_empty(x.shape[2], y.shape[2], dtype=torch.float32) for x, y in pairs]
        factored.weighted_sums(lefts, rights, weights, outs)
        return tuple(outs)

    sums, is_same = runs.repeat(added)
    expected = [
        torch.einsum("b,bij->ij", row.double(), x.double().mT @ y.double())
        for row, (x, y) in zip(weights, pairs, strict=True)
    ]
    error = max(map(largest_error, sums, expected))
    runs.add("factored: weighted", shape, error, "largest element", is_same)
