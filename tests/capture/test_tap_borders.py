"""What a user's code may do with a layer's output, and with its graph."""

import pytest
import torch

from tests.capture.common import BATCH, TOKENS, WIDTH, captured, floats, squares
from tests.capture.layers import Op
from tests.harness import assert_close
from tests.harness.oracle import per_sample_gradients


@pytest.mark.filterwarnings("ignore:no rule for", "ignore:There is a performance drop")
def test_what_has_no_rule_may_be_changed_in_place():
    model = Op(lambda x, w: torch.addcmul(x, x, w, value=2).mul_(3).tanh(), WIDTH).double()
    batch = floats(TOKENS, WIDTH)(BATCH)
    expected = per_sample_gradients(model, squares, batch)
    assert_close(captured(model, squares, batch), expected, dtype=torch.float64)
