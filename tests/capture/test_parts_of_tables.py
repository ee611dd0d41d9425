"""Lookups in some of a table's rows."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.common import BATCH, WIDTH, captured, ids, squares
from tests.harness import assert_close
from tests.harness.oracle import per_sample_gradients

Lookup = Callable[[Tensor, Tensor], Tensor]

LOOKUPS: dict[str, Lookup] = {
    "a slice": lambda x, w: F.embedding(x, w[7:20]),
    "with padding": lambda x, w: F.embedding(x, w[7:20], padding_idx=4),
    "a part of a split": lambda x, w: F.embedding(x, w.split([10, 13])[1]),
    "a slice by ids": lambda x, w: w[7:20][x],
}


class Table(nn.Module):
    """A table of which a function looks rows up."""

    def __init__(self, lookup: Lookup) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(23, WIDTH, dtype=torch.float64))
        self.lookup = lookup

    def forward(self, x: Tensor) -> Tensor:
        return self.lookup(x, self.weight)


@pytest.mark.parametrize("name", LOOKUPS)
def test_they_are_rows_of_the_whole_table(name: str):
    model, batch = Table(LOOKUPS[name]), ids(BATCH)
    expected = per_sample_gradients(model, squares, batch)
    assert expected["weight"][:, 7:].any()
    assert_close(captured(model, squares, batch), expected, dtype=torch.float64)
