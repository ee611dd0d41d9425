"""Which operations of a graph never reach memory where pointwise ones are fused."""

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from unison.plan.program import is_pointwise, is_read_from_memory


def fused(function, *inputs) -> list[str]:
    """Names of the operations that are part of their readers' kernels."""
    graph = make_fx(function)(*inputs).graph
    return [
        node.target._opname
        for node in graph.nodes
        if is_pointwise(node) and not is_read_from_memory(node)
    ]


def test_what_a_product_reads_is_in_memory():
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    assert fused(lambda x, y: (x * 2 + 1).relu() @ y, a, b) == ["mul", "add"]
    assert fused(lambda x, y: (x * 2).t().t() @ y, a, b) == []  # through views, too


def test_what_is_returned_is_in_memory():
    assert fused(lambda x: (x.exp(), x.exp() + 1), torch.ones(3)) == ["exp"]


def test_reductions_read_what_is_fused_into_them():
    assert fused(lambda x: (x * x).sum(-1) @ x.new_ones(3), torch.ones(3, 5)) == ["mul"]
    norm = nn.LayerNorm(5, elementwise_affine=False)
    assert "native_layer_norm" not in fused(norm, torch.ones(3, 5))
