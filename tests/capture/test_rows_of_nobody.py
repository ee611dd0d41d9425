"""Rows that a model makes of nothing, among rows that were selected by values."""

import pytest
import torch
from torch import Tensor, nn

from tests.capture.routed import TOKENS, WIDTH, floats, squares
from tests.harness.oracle import per_sample_norms
from unison.clip.functional import clipped_gradients
from unison.errors import UnsupportedOperation


class WithOwnRow(nn.Module):
    """A layer of some tokens and of one row of ones, whose output may be used."""

    def __init__(self, *, is_used: bool) -> None:
        super().__init__()
        self.up, self.is_used = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), is_used

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        is_chosen = tokens[:, 0] > 0
        made = self.up(torch.cat([tokens[is_chosen], tokens.new_ones(1, WIDTH)]))
        out = torch.zeros_like(tokens)
        out[is_chosen] = made[:-1]
        return (out * made[-1] if self.is_used else out).view_as(x)


def test_they_may_be_there():
    model, batch = WithOwnRow(is_used=False), floats(TOKENS, WIDTH)(4)
    found = clipped_gradients(model, squares, batch, max_norm=1.0)
    torch.testing.assert_close(found.norms, per_sample_norms(model, squares, batch))


def test_a_gradient_that_comes_to_them_is_refused():
    model, batch = WithOwnRow(is_used=True), floats(TOKENS, WIDTH)(4)
    with pytest.raises(UnsupportedOperation, match="rows that were made without any sample"):
        clipped_gradients(model, squares, batch, max_norm=1.0)
