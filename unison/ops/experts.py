"""Experts of a mixture, all in one product: `torch._grouped_mm`, and transformers' stand-in for it.

Tokens are sorted by expert; offsets say where the tokens of each one end. That a sample's tokens
lie anywhere among them is the layout's business: see [Note: rows with an index].
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from unison.ops.layout import Layout
from unison.ops.linear import as_computed, wide
from unison.ops.records import Dense
from unison.ops.registry import Tap, rule, rule_by_name


def of_experts(
    layout: Layout, g: Tensor, x: Tensor, offsets: Tensor, *, shape: tuple[int, ...]
) -> Dense:
    """Record of W [experts, d_in, d_out] in y_s = x_s W[expert of s]: the gradients themselves.

    Every sample is cut into its tokens of each expert, as if they were samples of their own.
    """
    num_experts = shape[0]
    rows = torch.arange(len(x), device=x.device)
    experts = torch.searchsorted(offsets.to(torch.int64), rows, right=True)
    experts = experts.clamp(max=num_experts - 1)  # rows after the last offset have no gradient
    by_expert = layout.with_index(g).grouped(experts, num_experts)
    a, b = (wide(by_expert.rows(each)) for each in (x, g))  # [batch * experts, tokens, features]
    return Dense(torch.bmm(a.mT, b).reshape(layout.batch, *shape))


def _grouped(tap: Tap, run: Any, x: Any, weight: Any, offsets: Any) -> Any:
    is_plain = tap.tracks(weight) and not tap.tracks(x)
    if offsets is None or not is_plain or x.ndim != 2 or tap.plain(weight).ndim != 3:
        return NotImplemented
    y = run(x, tap.plain(weight))
    return tap(y, saved=(as_computed(x, y), offsets), uses=[(weight, of_experts)])


def grouped_mm(
    tap: Tap,
    input: Any,  # noqa: A002
    mat2: Any,
    offs: Any = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Any:
    """`F.grouped_mm`."""
    if bias is not None:
        return NotImplemented
    run = partial(torch._grouped_mm, offs=offs, out_dtype=out_dtype)
    return _grouped(tap, run, input, mat2, offs)


if hasattr(torch, "_grouped_mm"):
    rule(torch._grouped_mm)(grouped_mm)


@rule_by_name("transformers::grouped_mm_fallback")
def grouped_mm_fallback(tap: Tap, input: Any, weight: Any, offs: Any) -> Any:  # noqa: A002
    """The same where the kernel does not run."""
    run = partial(torch.ops.transformers.grouped_mm_fallback, offs=offs)
    return _grouped(tap, run, input, weight, offs)
