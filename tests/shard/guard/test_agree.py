"""`compare_across_ranks`: which rank has what, and what is missing where."""

import pytest
import torch

from tests.harness import ranks
from unison.errors import BadInput
from unison.shard.guard import compare_across_ranks


@ranks(1, 3)
def test_compare_across_ranks(world):
    items = {f"layers.{i}.weight": ((3, i), torch.float32) for i in range(9)}
    compare_across_ranks("parameters", items)
    if world.size == 1:
        return
    own = {
        **items,
        "layers.4.weight": ((3, 4), torch.float16 if world.rank == 1 else torch.float32),
    }
    with pytest.raises(
        BadInput, match=r"layers\.4\.weight: ranks 0, 2 have .*float32.; rank 1 has"
    ):
        compare_across_ranks("parameters", own)
    missing = dict(items)
    if world.rank == 2:
        del missing["layers.0.weight"]
    with pytest.raises(BadInput, match=r"layers\.0\.weight: .*; rank 2 has absent"):
        compare_across_ranks("parameters", missing)
    turned = dict(reversed(items.items())) if world.rank == 0 else items
    with pytest.raises(BadInput, match=r"item 0: rank 0 has layers\.8\.weight; ranks 1, 2 have"):
        compare_across_ranks("parameters", turned)
