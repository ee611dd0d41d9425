"""The clipped sum Σ_b c_b · gradient_b: from records, or from per-sample gradients that were kept.

Sums are float64, and stay it until they meet the noise: [Note: proved sensitivity] in bounds.py
says why. Products go through GEMMs over few samples at a time, (c·left)ᵀ right: no per-sample
gradient is formed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.clip.matrix import (
    MOST_TERMS_TOGETHER,
    check_records,
    factors,
    matrix_shape,
    num_per_tile,
    plain_arithmetic,
    spans,
    tensors_of,
)
from unison.errors import BadInput
from unison.kernels.per_sample import weighted_sum
from unison.ops import Dense, Lookup, Product, Record
from unison.ops.records import add_rows_

# Samples × tokens of one GEMM. It reads and writes the whole result, so it should be long.
_TOKENS_PER_GEMM = MOST_TERMS_TOGETHER
_LEAST_TOKENS_PER_GEMM = 1024
_ROWS_PER_GEMM = 1024


@dataclass(frozen=True)
class GradientMethod:
    """Where the clipped sum comes from.

    Attributes:
        name: As in `GRADIENT_METHODS`.
        needs_kept: Whether it takes the per-sample gradients that the norm method has formed.
        num_backwards: Backward passes of the whole model: a second one makes the records anew
            instead of keeping them.
        clipped_sum: (records, coefficients [batch], shape) to Σ_b c_b · gradient_b [*shape].
        num_forwards: Forward passes of the whole model: a second one makes anew what went into the
            products, instead of keeping it.
    """

    name: str
    needs_kept: bool
    num_backwards: int
    clipped_sum: Callable[[Sequence[Record], Tensor, tuple[int, ...]], Tensor]
    num_forwards: int = 1


def from_records(records: Sequence[Record], coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return Σ_b c_b · gradient_b over all uses of one parameter: [*shape], float64.

    Guarantees:
        With coefficients from `unison.clip.coefficients`, the share of every sample has norm at
        most C. A sample with coefficient 0 is selected out, not multiplied: its values may be NaN.

    Args:
        records: The uses of the parameter.
        coefficients: One per sample [batch], at least 0; float64, or they were rounded already.
        shape: The parameter's shape.
    """
    check_records(records)
    if len(records) == 1 and isinstance(records[0], Dense):
        return _of_dense(records[0], coefficients).view(shape)
    total = torch.zeros(shape, dtype=torch.float64, device=tensors_of(records[0])[0].device)
    for record in records:
        add_clipped(total, record, coefficients)
    return total


def add_clipped(total: Tensor, record: Record, coefficients: Tensor) -> None:
    """Add Σ_b c_b · gradient_b of one use to `total` [*shape], which is float64.

    For uses that come one by one.
    """
    batch = check_records([record])
    if tuple(total.shape) != record.shape or total.dtype != torch.float64:
        raise BadInput(
            f"expected a float64 total of shape {list(record.shape)}, found {total.dtype} "
            f"{list(total.shape)}"
        )
    if coefficients.shape != (batch,):
        raise BadInput(f"expected coefficients [{batch}], found {list(coefficients.shape)}")
    coefficients = coefficients.to(device=total.device, dtype=torch.float64)
    with plain_arithmetic(total.device):
        match record:
            case Product():
                _add_product(total, record, coefficients)
            case Lookup():
                _add_lookup(total, record, coefficients)
            case Dense():
                _add_dense(total, record, coefficients)
            case _:
                raise TypeError(f"expected a Product, Lookup or Dense, found {type(record)}")


def from_kept(per_sample: Tensor, coefficients: Tensor) -> Tensor:
    """Return Σ_b c_b · per_sample_b for per-sample gradients [batch, *shape]: [*shape].

    The same as `from_records` of a `Dense` record, with the same guarantees.
    """
    kept = Dense(per_sample)
    return from_records([kept], coefficients, kept.shape)


def _add_product(total: Tensor, product: Product, coefficients: Tensor) -> None:
    left, right = factors(product)  # [batch, tokens, rows], [batch, tokens, columns]
    batch, tokens, _ = left.shape
    num_rows, num_columns = matrix_shape([product])
    matrix = total.view(num_rows, num_columns)
    wanted = num_per_tile(8 * num_columns, total.device)
    length = min(_TOKENS_PER_GEMM, max(_LEAST_TOKENS_PER_GEMM, wanted))
    for samples in spans(batch, max(1, length // max(1, tokens))):
        c = coefficients[samples]
        for part in spans(tokens, length):
            inputs = _selected(right[samples, part], c).flatten(0, 1)  # [tokens, columns]
            for rows in spans(num_rows, _ROWS_PER_GEMM):
                scaled = _selected(left[samples, part, rows], c).mul_(c.view(-1, 1, 1))
                # Apart from the total: then no other GEMM's rounding knows of these samples.
                matrix[rows] += scaled.flatten(0, 1).mT @ inputs


def _add_lookup(total: Tensor, lookup: Lookup, coefficients: Tensor) -> None:
    table = total.view(matrix_shape([lookup]))
    batch, tokens = lookup.ids.shape
    for samples in spans(batch, max(1, _TOKENS_PER_GEMM // max(1, tokens))):
        c = coefficients[samples]
        ids = lookup.ids[samples]  # [samples, tokens]
        g = _selected(lookup.g[samples], c).mul_(c.view(-1, 1, 1))
        g = g.masked_fill_((ids < 0).unsqueeze(-1), 0.0)
        add_rows_(table, ids.clamp(min=0).flatten(), g.flatten(0, 1))


def _add_dense(total: Tensor, dense: Dense, coefficients: Tensor) -> None:
    total.view(-1).add_(_of_dense(dense, coefficients))


def _of_dense(dense: Dense, coefficients: Tensor) -> Tensor:  # [numel], float64
    batch, numel = len(dense.value), math.prod(dense.shape)
    if coefficients.shape != (batch,):
        raise BadInput(f"expected coefficients [{batch}], found {list(coefficients.shape)}")
    values = dense.value.reshape(batch, numel)
    coefficients = coefficients.to(device=values.device, dtype=torch.float64)
    return weighted_sum(values, coefficients, values.new_empty(numel, dtype=torch.float64))


def _selected(x: Tensor, coefficients: Tensor) -> Tensor:
    """Return a float64 copy of x [batch, ...], with zeros for samples whose coefficient is 0."""
    wide = x.to(torch.float64, copy=True)
    is_out = coefficients == 0
    # On a CPU it costs nothing to look whether there is one; a GPU would have to be waited for.
    if x.device.type == "cpu" and not is_out.any():
        return wide
    return wide.masked_fill_(is_out.view(-1, *[1] * (x.ndim - 1)), 0.0)


GRADIENT_METHODS: dict[str, GradientMethod] = {
    method.name: method
    for method in (
        GradientMethod("kept", needs_kept=True, num_backwards=1, clipped_sum=from_records),
        GradientMethod("records", needs_kept=False, num_backwards=1, clipped_sum=from_records),
        # The records of the second pass, forward or backward, are used as they come and dropped,
        # layer after layer.
        GradientMethod(
            "recomputed",
            needs_kept=False,
            num_backwards=1,
            clipped_sum=from_records,
            num_forwards=2,
        ),
        GradientMethod(
            "second_backward", needs_kept=False, num_backwards=2, clipped_sum=from_records
        ),
    )
}
