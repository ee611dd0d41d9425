"""Fill tensors with random numbers: one operation, three backends, one set of bits.

`fill_rows` is the entrance. It calls the `unison::random_fill` operation, which picks a backend by
device: Triton on CUDA, numba on the CPU, and the plain-torch reference where neither is there.
Which backend ran cannot be told from the values.
"""

import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from unison import check
from unison.errors import BadInput
from unison.kernels.random import reference
from unison.kernels.random.recipe import Cipher, Distribution, Recipe

__all__ = [
    "Cipher",
    "Distribution",
    "Recipe",
    "fill_rows",
    "fused_drop",
    "fuses",
    "using_backend",
]

Fill = Callable[[torch.Tensor, Recipe, torch.Tensor, int], None]

# numba compiles for seconds (once: the result is cached on disk), torch operations start at once.
# Until this many elements have been asked for, the reference serves the CPU.
PATIENCE = 1 << 18

_num_served = 0
_forced: str | None = None


@cache
def _is_installed(package: str) -> bool:
    if find_spec(package) is not None:
        return True
    warnings.warn(
        f"{package} is not installed: unison draws random numbers with plain torch operations, "
        f"which give the same bits about ten times slower. Remedy: pip install {package}",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


@cache
def _backend(name: str) -> Fill:
    return import_module(f"unison.kernels.random.{name}").fill


@contextmanager
def using_backend(name: str):
    """Force one backend ("reference", "numba" or "triton") inside the context, for comparisons."""
    global _forced
    check.one_of(["reference", "numba", "triton"], backend=name)
    previous, _forced = _forced, name
    try:
        yield
    finally:
        _forced = previous


def is_numba_chosen(num_elements: int) -> bool:
    """Say whether numba serves a request of this size on the CPU."""
    global _num_served
    if _forced is not None:
        return _forced == "numba"
    _num_served += num_elements
    return _num_served > PATIENCE and _is_installed("numba")


def _choose(out: torch.Tensor) -> Fill:
    if _forced is not None:
        return _backend(_forced)
    if out.device.type == "cuda" and _is_installed("triton"):
        return _backend("triton")
    if out.device.type == "cpu" and is_numba_chosen(out.numel()):
        return _backend("numba")
    return reference.fill


@torch.library.custom_op("unison::random_fill", mutates_args={"out"})
def _random_fill(out: torch.Tensor, recipe: torch.Tensor, starts: torch.Tensor, run: int) -> None:
    if out.numel():
        _choose(out)(out, Recipe.unpack(recipe), starts, run)


@_random_fill.register_fake
def _(out: torch.Tensor, recipe: torch.Tensor, starts: torch.Tensor, run: int) -> None:
    return None


def fill_rows(out: torch.Tensor, recipe: Recipe, starts: torch.Tensor, run: int) -> None:
    """Fill `out` in place, row after row, from one stream.

    Guarantees:
        The value of an element depends on the recipe and on the element's index alone: not on the
        device, the backend, the number of threads, or which other elements are asked for.

    Args:
        out: Contiguous, with `len(starts) * run` elements; any shape.
        recipe: What to draw.
        starts: int64 [num_rows] on the CPU: the index of each row's first element.
        run: Number of elements in a row, with consecutive indices.
    """
    recipe.check_output(out)
    if starts.dtype != torch.int64 or starts.device.type != "cpu" or starts.dim() != 1:
        raise BadInput(f"expected starts as int64 [num_rows] on the CPU, found {starts!r}")
    if out.numel() != len(starts) * run:
        raise BadInput(
            f"expected {len(starts)} rows of {run} elements, found an output of {out.numel()}"
        )
    if out.numel() == 0 or out.device.type == "meta":
        return
    packed = recipe.pack()
    _random_fill(out.detach(), packed, starts.contiguous(), run)
    packed.zero_()  # it holds the key


def fuses(x: torch.Tensor, first: int) -> bool:
    """Whether `fused_drop` takes a tensor whose first element has this index."""
    is_chosen = _forced in (None, "triton") and _is_installed("triton")
    return is_chosen and first % 2 == 0 and x.dtype in _DROPPED and x.numel() > 0


_DROPPED = (torch.float32, torch.bfloat16, torch.float16)


def fused_drop(
    x: torch.Tensor, words: torch.Tensor, first: int, limit: int, scale: float
) -> torch.Tensor:
    """Dropout in one kernel; see `dropping.drop`."""
    return _dropping().drop(x.contiguous(), words, first, limit, scale)


@cache
def _dropping() -> Any:
    return import_module("unison.kernels.random.dropping")
