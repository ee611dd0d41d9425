"""Attention whose weights are dropped by us is torch's own where nothing is dropped."""

import pytest
import torch
import torch.nn.functional as F

from unison.rng.draws import attend_whole

MASKS = {
    "nothing": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) < 0.7},
    "float": {"attn_mask": torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).double()},
    "grouped": {"enable_gqa": True, "scale": 0.3},
}


@pytest.mark.parametrize("name", MASKS)
def test_it_is_that_of_torch(name: str, gen: torch.Generator):
    heads = 2 if name == "grouped" else 4
    query = torch.randn(3, 4, 5, 6, generator=gen, dtype=torch.float64)
    key, value = torch.randn(2, 3, heads, 7, 6, generator=gen, dtype=torch.float64)
    found = attend_whole(lambda weights, _: weights, query, key, value, **MASKS[name])
    expected = F.scaled_dot_product_attention(query, key, value, **MASKS[name])
    torch.testing.assert_close(found, expected)
