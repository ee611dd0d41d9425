"""Convolutions that pad one side more than the other."""

import pytest
import torch
from torch import nn

from tests.capture.common import BATCH, captured, image, squares
from tests.harness import assert_close
from tests.harness.oracle import per_sample_gradients


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(("kernel", "dilation"), [((4, 3), 1), ((2, 4), (1, 3))])
def test_even_kernels_of_the_same_size(kernel: tuple[int, int], dilation):
    model = nn.Conv2d(2, 3, kernel, dilation=dilation, padding="same").double()
    batch = image(2, 6, 7)(BATCH)
    expected = per_sample_gradients(model, squares, batch)
    assert_close(captured(model, squares, batch), expected, dtype=torch.float64)
