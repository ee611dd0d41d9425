"""Linear maps with an odd number of outputs, whose rows are padded on a GPU: what they were."""

import pytest
import torch
from torch import nn

from tests.capture.common import captured, squares
from tests.harness import assert_close
from tests.harness.oracle import per_sample_gradients
from unison.ops import linear


class Plain:
    """Stands for a capture: nothing is recorded."""

    def tracks(self, value):
        return False

    def plain(self, value):
        return value

    def __call__(self, output, **_):
        return output


@pytest.mark.parametrize("has_bias", [True, False])
def test_padded_rows_change_nothing(monkeypatch, has_bias):
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 11, bias=has_bias)).double()
    batch = torch.randn(4, 3, 5).double()
    expected, y = per_sample_gradients(model, squares, batch), model(batch)
    padded = []
    monkeypatch.setattr(linear, "LEAST_PADDED", 0)
    monkeypatch.setattr(linear, "takes", lambda *values: padded.append(values) or True)
    assert_close(captured(model, squares, batch), expected, dtype=torch.float64)
    assert padded
    found = linear.linear(Plain(), model[:2](batch), model[2].weight, model[2].bias)
    assert found.is_contiguous()
    assert_close(found, y, dtype=torch.float64)
