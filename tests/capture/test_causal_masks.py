"""Constant causal masks of traced graphs, which attention is told of in another way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from tests.harness import assert_close
from unison.capture.torch_compile import is_causal, tell_causal_masks

TOKENS = 6
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
LEAST = torch.finfo(torch.float32).min


def added(blocked: float) -> Tensor:
    return torch.zeros(TOKENS, TOKENS).masked_fill(~CAUSAL, blocked)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (CAUSAL, True),
        (CAUSAL.expand(3, 1, TOKENS, TOKENS), True),
        (added(-torch.inf), True),
        (added(LEAST), True),
        (added(-1e4), False),
        (added(LEAST) + 0.5, False),
        (CAUSAL.T, False),
        (CAUSAL & CAUSAL.T, False),
        (CAUSAL & ~CAUSAL.tril(-3), False),  # a sliding window
        (torch.ones_like(CAUSAL), False),
        (CAUSAL[:, :-1], False),
        (CAUSAL.int(), False),
        (CAUSAL[0], False),
    ],
)
def test_is_causal(mask, expected):
    assert is_causal(mask) is expected


def by_position(x: Tensor, _: Tensor) -> Tensor:
    at = torch.arange(x.shape[-2], device=x.device)
    return at[:, None] >= at[None, :]


def by_vmap(x: Tensor, _: Tensor) -> Tensor:
    at = torch.arange(x.shape[-2], device=x.device)
    see = lambda q, k: q >= k  # noqa: E731
    return torch.vmap(torch.vmap(see, in_dims=(None, 0)), in_dims=(0, None))(at, at)


def with_a_window(x: Tensor, _: Tensor) -> Tensor:
    at = torch.arange(x.shape[-2], device=x.device)
    return by_position(x, x) & (at[:, None] - at[None, :] < 3)


def of_an_input(x: Tensor, counted: Tensor) -> Tensor:
    return by_position(x, x) & counted[:, None, None, :]


def drawn(x: Tensor, _: Tensor) -> Tensor:
    return by_position(x, x) & (torch.rand(x.shape[-2], device=x.device) >= 0)


def full(x: Tensor, _: Tensor) -> Tensor:
    return torch.full((x.shape[-2],) * 2, -torch.inf, dtype=x.dtype, device=x.device).triu(1)


def rows(mask: Tensor, _: Tensor) -> None:
    mask[:, :3] = 0


def view(mask: Tensor, _: Tensor) -> None:
    part = mask[:, :3]
    part.fill_(0)


def given_out(mask: Tensor, _: Tensor) -> None:
    torch.clamp(mask, min=-1.0, out=mask)


WRITES: list[Callable[[Tensor, Tensor], Any]] = [
    rows,
    view,
    given_out,
    lambda mask, _: mask.clamp_(min=-1.0),
    lambda mask, _: torch._foreach_zero_([mask]),
    lambda mask, _: F.relu(mask, True),
    lambda mask, x: mask.masked_fill_(x[0, 0, :, 0] > 0, 0),
]


def written(write: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """A mask that would be causal, if nothing had been written to it."""

    def make(x: Tensor, _: Tensor) -> Tensor:
        mask = full(x, x)
        write(mask, x)
        return mask

    return make


@pytest.mark.parametrize(
    ("mask_of", "is_told"),
    [(by_position, True), (by_vmap, True), (with_a_window, False), (of_an_input, False),
     (drawn, False), (full, True), *((written(each), False) for each in WRITES)],
)  # fmt: skip
def test_a_mask_that_no_input_reaches(mask_of, is_told):
    def attend(x: Tensor, counted: Tensor) -> Tensor:
        x = x * 2
        x.add_(1)  # of which nobody uses what it returns
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask_of(x, counted), scale=0.3)

    seen: list[dict[str, Any]] = []

    def backend(graph: GraphModule, _: list[Any]) -> Any:
        tell_causal_masks(graph)
        nodes = graph.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        seen.extend(dict(node.kwargs) for node in nodes)
        return graph

    torch._dynamo.reset()
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, TOKENS, 4, generator=gen, dtype=torch.float64)
    counted = torch.ones(2, TOKENS, dtype=torch.bool)
    before = torch.get_rng_state()
    found = torch.compile(attend, backend=backend, dynamic=False, fullgraph=True)(x, counted)
    (kwargs,) = seen
    assert kwargs.get("is_causal", False) is is_told
    assert ("attn_mask" in kwargs) is not is_told
    assert kwargs["scale"] == 0.3
    if mask_of is not drawn:
        assert torch.equal(torch.get_rng_state(), before)
    assert_close(found, attend(x, counted))
    torch._dynamo.reset()
