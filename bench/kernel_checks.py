"""Every kernel against float64: how far off it is, and whether 20 runs give the same bits.

`bench.kernels_gpu` runs these and writes the result file. A check draws inputs, runs a kernel on
them several times, and compares with the same numbers in float64.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unison
from bench.kernel_checks_factors import gram, products
from bench.kernel_errors import (
    LIMITS,
    Outcome,
    Runs,
    Setting,
    largest_error,
    norm_error,
    relative_error,
    same_bits,
)
from unison.clip import clipped_gradients
from unison.kernels import multi_tensor
from unison.kernels.cross_entropy import statistics
from unison.kernels.random import Cipher, Distribution, Recipe, secure_floats, using_backend
from unison.rng import Key, Stream, noise_spacing

HEAD_LIMIT = 1e-6  # of the chunked head, in float32
IGNORED = -100


# ---- lookups, norms and biases -------------------------------------------------------------------


def lookup(setting: Setting, dtype: torch.dtype) -> list[Outcome]:
    """Check rows of tables that samples look up: squared, added to tables, and weighted."""
    from unison.kernels import lookup_triton as kernels

    runs, generator, num_rows = Runs(setting, dtype), setting.generator(), 37
    sizes = [(3, 77, 257), (3, 1, 257), (4, 1024, 1280)]
    if setting.is_small:
        sizes = [(3, 12, 20), (2, 1, 20)]
    for batch, tokens, features in sizes:
        shape = f"{batch}×{tokens} ids of {num_rows}, {features} features"
        place = {"generator": generator, "device": setting.device}
        ids = torch.randint(-1, num_rows, (batch, tokens), **place)
        g = torch.randn(batch, tokens, features, **place).to(dtype)
        weights = torch.linspace(0.3, 1.7, batch, device=g.device)
        one_hot = F.one_hot(ids.clamp(min=0), num_rows).double() * (ids >= 0).unsqueeze(2)
        tables = one_hot.mT @ g.double()  # [batch, num_rows, features]

        def run(ids: Tensor = ids, g: Tensor = g, weights: Tensor = weights):
            table = torch.zeros(len(g), num_rows, g.shape[2], device=g.device)
            kernels.add_rows(ids, g, table)
            total = torch.zeros(num_rows, g.shape[2], device=g.device)
            kernels.weighted_rows(ids, g, weights, total)
            return kernels.squared_rows(ids, g), table, total

        (squares, table, total), is_same = runs.repeat(run)
        expected = torch.einsum("b,bij->ij", weights.double(), tables)
        largest = "largest element"
        runs.add("lookup: added", shape, largest_error(table, tables), largest, is_same)
        runs.add("lookup: weighted", shape, largest_error(total, expected), largest, is_same)
        of_tables = tables.square().sum((1, 2))
        is_there = of_tables > 0  # a sample of padding alone has no norm to be relative to
        error = norm_error(squares.double().sum(1)[is_there], of_tables[is_there])
        runs.add("lookup: norm", shape, error, "norm", is_same)
    return runs.outcomes


def affine(setting: Setting, dtype: torch.dtype) -> list[Outcome]:
    """Check per-sample sums of layer norm, RMS norm and biases."""
    from unison.kernels import multi_tensor as kernels

    runs, generator = Runs(setting, dtype), setting.generator()
    sizes = [(3, 77, 257), (3, 1, 257), (4, 1024, 1280)]
    if setting.is_small:
        sizes = [(3, 17, 20), (2, 1, 20)]
    for size in sizes:
        shape = "×".join(map(str, size))
        draw = lambda: torch.randn(size, generator=generator, device=setting.device)  # noqa: B023, E731
        x, g = (3 * draw() + 1).to(dtype), draw().to(dtype)
        wide, slope = x.double(), g.double()
        for is_centred, name in ((True, "layer norm"), (False, "RMS norm")):
            normal = (F.layer_norm if is_centred else F.rms_norm)(wide, size[2:], eps=1e-5)
            sums = [(slope * normal).sum(1), slope.sum(1)]
            expected = torch.stack(sums if is_centred else sums[:1])
            (found,), is_same = runs.repeat(
                lambda x=x, g=g, is_centred=is_centred: (
                    kernels.norm_sums(x, g, 1e-5, is_centred=is_centred, has_offset=is_centred),
                )
            )
            error = largest_error(found, expected)
            runs.add(f"affine: {name}", shape, error, "largest element", is_same)
        (found,), is_same = runs.repeat(lambda g=g: (kernels.column_sums(g),))
        error = largest_error(found, slope.sum(1))
        runs.add("affine: column sums", shape, error, "largest element", is_same)
    return runs.outcomes


# ---- many tensors at once ------------------------------------------------------------------------


def of_many(setting: Setting, dtype: torch.dtype) -> list[Outcome]:
    """Check squares, weighted sums and the release, which must equal the reference to the bit."""
    runs, generator, batch = Runs(setting, dtype), setting.generator(), 3
    shapes = [(8, 16), (7,), (40,), (130, 257), (1280, 64)]
    if setting.is_small:
        shapes = [(8, 16), (7,), (40,)]
    place = {"generator": generator, "device": setting.device}
    values = [torch.randn(batch, *shape, **place).to(dtype) for shape in shapes]
    weights = torch.rand(len(values), batch, **place) + 0.1
    name = f"{batch} × {shapes}".replace(", ", ",").replace(",)", ")")
    exact = [x.double() for x in values]

    (found,), is_same = runs.repeat(lambda: (multi_tensor.squares(values),))
    expected = torch.stack([x.flatten(1).square().sum(1) for x in exact])
    limit = LIMITS[torch.float32]  # the numbers that lie there are squared, whatever their dtype
    runs.add("many: norms", name, norm_error(found, expected), "norm", is_same, limit)

    def outputs() -> list[Tensor]:
        return [torch.empty(x.shape[1:], device=x.device) for x in values]

    def combine() -> tuple[Tensor, ...]:
        outs = outputs()
        multi_tensor.combine(values, weights, outs)
        return tuple(outs)

    sums, is_same = runs.repeat(combine)
    errors = [
        largest_error(out, torch.einsum("b,b...->...", row.double(), x))
        for out, row, x in zip(sums, weights, exact, strict=True)
    ]
    runs.add("many: combined", name, max(errors), "largest element", is_same, limit)

    recipes = _recipes(len(values))
    for has_noise in (False, True):
        noise = None
        if has_noise:
            noise = (recipes.to(setting.device), [0] * len(values))

        def release(noise: multi_tensor.NoiseDraw | None = noise) -> tuple[Tensor, ...]:
            outs = outputs()
            multi_tensor.release(values, weights, noise, 8.0, outs)
            return tuple(outs)

        outs, is_same = runs.repeat(release)
        there = [torch.empty(x.shape[1:]) for x in values]
        with using_backend("reference"):
            plain = (recipes, [0] * len(values)) if has_noise else None
            multi_tensor.release([x.cpu() for x in values], weights.cpu(), plain, 8.0, there)
        num_other = sum(not same_bits(a.cpu(), b) for a, b in zip(outs, there, strict=True))
        what = "released with noise" if has_noise else "released"
        runs.add(f"many: {what}", name, float(num_other), "tensors with other bits", is_same, 0.0)
    return runs.outcomes


def _recipes(count: int, std: float = 0.7) -> Tensor:
    """Return packed recipes of secure noise: int64 [count, RECIPE_LENGTH]."""
    key = Key.from_seed(3)
    words = [
        Stream(key, str(i), purpose="noise", cipher=Cipher.CHACHA20).words for i in range(count)
    ]
    kind, numbers = Distribution.SECURE_NORMAL, secure_floats(std, noise_spacing(std))
    return torch.stack([Recipe(Cipher.CHACHA20, each, kind, numbers).pack() for each in words])


# ---- the head ------------------------------------------------------------------------------------


class _Head(nn.Module):
    def __init__(self, weight: Tensor, chunk: int | None) -> None:
        super().__init__()
        self.weight, self.chunk = nn.Parameter(weight), chunk

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:  # [batch]
        return unison.linear_cross_entropy(
            hidden, self.weight, labels, reduction="sample_mean", chunk=self.chunk
        )


def _losses(head: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:  # [batch]
    return head(*batch)


def cross_entropy(setting: Setting, dtype: torch.dtype) -> list[Outcome]:
    """Check rows of logits in any dtype, and in float32 the chunked head, norms included."""
    runs, generator = Runs(setting, dtype), setting.generator()
    place = {"generator": generator, "device": setting.device}
    for num_rows, vocab in [(5, 123), (3, 257)] if setting.is_small else [(77, 5003), (64, 50304)]:
        logits = (4 * torch.randn(num_rows, vocab, **place)).to(dtype)
        labels = torch.randint(0, vocab, (num_rows,), **place)
        (_, losses), is_same = runs.repeat(
            lambda logits=logits, labels=labels: statistics(logits, labels, IGNORED)
        )
        expected = F.cross_entropy(logits.double(), labels, reduction="none")
        error, shape = largest_error(losses, expected), f"{num_rows}×{vocab}"
        runs.add("cross_entropy: losses of logits", shape, error, "largest loss", is_same)
    if dtype == torch.float32:
        sizes = [(3, 77, 130, 5003, 40), (2, 128, 256, 8192, None)]
        for size in [(3, 7, 13, 57, 4)] if setting.is_small else sizes:
            _check_head(runs, size, place)
    return runs.outcomes


def _check_head(
    runs: Runs, size: tuple[int, int, int, int, int | None], place: dict[str, Any]
) -> None:
    batch, tokens, d, vocab, chunk = size
    hidden = torch.randn(batch, tokens, d, **place).requires_grad_()
    weight = (torch.randn(vocab, d, **place) / d**0.5).requires_grad_()
    labels = torch.randint(0, vocab, (batch, tokens), **place)
    labels[:, 1::3] = IGNORED
    shape = f"{batch}×{tokens}×{d}, {vocab} words, chunks of {chunk or 'any size'}"

    def chunked() -> tuple[Tensor, ...]:
        losses = unison.linear_cross_entropy(
            hidden, weight, labels, reduction="sample_mean", chunk=chunk
        )
        return losses.detach(), *torch.autograd.grad(losses.sum(), (hidden, weight))

    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    logits = F.linear(*wide)  # the whole of them
    expected = unison.per_sample_loss(logits, labels)
    slope = torch.autograd.grad(expected.sum(), (logits, *wide))
    found, is_same = runs.repeat(chunked)
    names = ("losses", "gradient of hidden states", "gradient of the weight")
    for name, a, e in zip(names, found, (expected.detach(), *slope[1:]), strict=True):
        # Of all elements together: a float32 GEMM over the words, chunked or not, adds thousands of
        # small terms to a large one, and single elements are off by more.
        runs.add(f"head: {name}", shape, relative_error(a, e), "length", is_same, HEAD_LIMIT)
    squares = (slope[0].mT @ wide[0].detach()).square().sum((1, 2))
    head = _Head(weight.detach(), chunk)

    def norms() -> tuple[Tensor, ...]:
        given = (hidden.detach(), labels)
        return (clipped_gradients(head, _losses, given, max_norm=1.0).norms,)

    (found_norms,), is_same = runs.repeat(norms)
    error = norm_error(found_norms.square(), squares)
    runs.add("head: norms of the weight", shape, error, "norm", is_same, HEAD_LIMIT)


FAMILIES: dict[str, Callable[[Setting, torch.dtype], list[Outcome]]] = {
    "products": products,
    "gram": gram,
    "lookup": lookup,
    "affine": affine,
    "many": of_many,
    "cross_entropy": cross_entropy,
}
NEED_TRITON: tuple[str, ...] = (
    "products",
    "gram",
    "lookup",
    "affine",
)  # have no plain-torch path of their own
