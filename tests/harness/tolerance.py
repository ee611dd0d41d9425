"""How close is close: one table for all tests, and equality to the bit."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """A bound on |actual - expected|: `relative` · |expected| + `of_largest` · max |expected|.

    The second part is a share of the largest element because rounding errors of a sum are of the
    size of its terms: an element that is small by cancellation cannot be better than that. If all
    of `expected` is 0, the share is one of 1.
    """

    relative: float
    of_largest: float


# A handful of units in the last place, over sums as long as tests have them. A kernel that needs
# more than this is wrong, or accumulates in a type that it should not.
TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-10, 1e-12),
    torch.float32: Tolerance(1e-5, 2e-6),
    torch.float16: Tolerance(2e-3, 1e-3),
    torch.bfloat16: Tolerance(1.6e-2, 8e-3),
}

Tensors = Tensor | Mapping[str, Tensor]


def assert_close(actual: Tensors, expected: Tensors, *, dtype: torch.dtype | None = None) -> None:
    """Require `actual` to be `expected` up to the rounding of one dtype.

    Args:
        actual: a tensor, or tensors by name.
        expected: the same, from the oracle or a reference, usually in float64.
        dtype: the dtype in which `actual` was computed; by default the one it has. Name it where
            a result was converted afterwards.

    Raises:
        AssertionError: if shapes or names differ or an element is out of bounds; NaN equals NaN.
    """
    for name, a, e in _pairs(actual, expected):
        tolerance = TOLERANCES.get(dtype or a.dtype)
        if tolerance is None:
            raise ValueError(
                f"no tolerance for {dtype or a.dtype}; compare integers with assert_same_bits, or "
                "add the dtype to TOLERANCES in tests/harness/tolerance.py"
            )
        a, e = a.detach().cpu().double(), e.detach().cpu().double()
        finite = e[e.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        torch.testing.assert_close(
            a,
            e,
            rtol=tolerance.relative,
            atol=tolerance.of_largest * (largest or 1.0),
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}" if name else text,
        )


def assert_same_bits(a: Tensors, b: Tensors) -> None:
    """Require two tensors, or two sets of named tensors, to be equal to the bit.

    NaN equals a NaN of the same bits, and 0.0 differs from -0.0.

    Raises:
        AssertionError: which says how many elements differ, and where the first one is.
    """
    for name, left, right in _pairs(a, b):
        prefix = f"{name}: " if name else ""
        if left.shape != right.shape or left.dtype != right.dtype:
            raise AssertionError(
                f"{prefix}expected one shape and dtype, found {list(left.shape)} {left.dtype} "
                f"and {list(right.shape)} {right.dtype}"
            )
        differs = (_bits(left) != _bits(right)).reshape(-1)
        count = int(differs.sum())
        if count == 0:
            continue
        first = int(differs.nonzero()[0])
        index = [int(i) for i in torch.unravel_index(torch.tensor(first), left.shape)]
        x, y = left.detach().cpu().reshape(-1)[first], right.detach().cpu().reshape(-1)[first]
        raise AssertionError(
            f"{prefix}{count} of {differs.numel()} elements differ in their bits, first at "
            f"{index}: {x.item()!r} ({_hex(x)}) and {y.item()!r} ({_hex(y)})"
        )


_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits as integers of the same width, in the tensor's own shape."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        raise TypeError(f"compare torch.view_as_real(...) of complex tensors, found {tensor.dtype}")
    return tensor.contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()])


def _hex(element: Tensor) -> str:
    width = element.element_size()
    return f"0x{int(_bits(element)) & (2 ** (8 * width) - 1):0{2 * width}x}"


def _pairs(a: Tensors, b: Tensors) -> list[tuple[str, Tensor, Tensor]]:
    """Pair up tensors by name, having checked that both sides have the same names."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return [("", a, b)]
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        raise TypeError(f"expected two tensors or two mappings, found {type(a)} and {type(b)}")
    if a.keys() != b.keys():
        left, right = sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys())
        raise AssertionError(f"names differ: only on the left {left}, only on the right {right}")
    return [(name, a[name], b[name]) for name in a]
