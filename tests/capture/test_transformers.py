"""Models of transformers and peft, without a line about any of them in unison."""

import pytest
import torch

from tests.capture.common import captured
from tests.capture.zoo import EXPERTS, ZOO
from tests.harness import assert_close
from tests.harness.oracle import per_sample_gradients
from unison.capture import batch_size_of, check_samples_apart, learn_axes
from unison.errors import UnsupportedOperation

BATCH = 3
ALWAYS = {"gpt2", "llama tied", "llama+lora", "bert"}
COMPUTED_IN = {"mamba": torch.float32}  # its scan, whatever the model has


def settled(gradients, expected):
    """Nothing in the place of what is nothing but rounding.

    The bias of keys has no gradient: softmax does not see what is added to all scores.
    """
    largest = max(float(e.abs().max()) for e in expected.values())
    return {
        name: torch.where(g.abs() < 1e-14 * largest, 0.0, g)
        if float(expected[name].abs().max()) < 1e-14 * largest
        else g
        for name, g in gradients.items()
    }


# A warning is an error here: none of them may need the slow way of operations without a rule.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # deberta
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.full]) for name in ZOO]
)
def test_records_are_the_per_sample_gradients(name):
    case = ZOO[name]
    model, batch = case.make().double().train(), case.batch(BATCH)
    assert batch_size_of(batch) == BATCH
    axes = learn_axes(model, case.loss, batch)
    check_samples_apart(model, case.loss, batch, axes)
    for size in (BATCH, 1, 5):
        batch = case.batch(size)
        expected = per_sample_gradients(model, case.loss, batch)
        dtype = COMPUTED_IN.get(name, torch.float64)
        found = captured(model, case.loss, batch, axes)
        assert_close(settled(found, expected), settled(expected, expected), dtype=dtype)


@pytest.mark.full
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_refused(name):
    case = EXPERTS[name]
    model, batch = case.make().double(), case.batch(BATCH)
    with pytest.raises(UnsupportedOperation, match=r"samples mix|samples do not have as many each"):
        check_samples_apart(model, case.loss, batch, learn_axes(model, case.loss, batch))
