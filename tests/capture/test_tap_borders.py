"""What a user's code may do with a layer's output, and with its graph."""

import pytest
import torch
from torch import nn

from tests.capture.common import BATCH, TOKENS, WIDTH, captured, floats, squares
from tests.capture.layers import Op
from tests.harness import assert_close
from tests.harness.oracle import per_sample_gradients
from unison.capture import Capture, learn_axes
from unison.errors import BadInput


def test_a_second_backward_pass_is_refused():
    """By hooks, which keep inputs themselves, and for one pass only."""
    model, batch = nn.Linear(WIDTH, WIDTH).double(), floats(TOKENS, WIDTH)(BATCH)
    axes = learn_axes(model, squares, batch)
    capture = Capture(model, BATCH, axes=axes, on_record=lambda name, record: None, is_light=True)
    batch.requires_grad_()
    with capture.installed():
        with capture.following(batch):
            loss = squares(model, batch).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(BadInput, match="second backward pass over one forward pass"):
            loss.backward()


@pytest.mark.filterwarnings("ignore:no rule for", "ignore:There is a performance drop")
def test_what_has_no_rule_may_be_changed_in_place():
    model = Op(lambda x, w: torch.addcmul(x, x, w, value=2).mul_(3).tanh(), WIDTH).double()
    batch = floats(TOKENS, WIDTH)(BATCH)
    expected = per_sample_gradients(model, squares, batch)
    assert_close(captured(model, squares, batch), expected, dtype=torch.float64)
