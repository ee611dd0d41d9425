"""What is captured is every sample's gradient, however a parameter is used."""

import pytest
import torch
from torch import nn

from tests.capture.common import BATCH, CASES, TOKENS, WIDTH, captured, floats, make, squares
from tests.harness import assert_close
from tests.harness.oracle import per_sample_gradients
from unison.capture import Capture, check_samples_apart, learn_axes
from unison.errors import BadInput, UnsupportedOperation


@pytest.mark.filterwarnings("ignore:no rule for", "ignore:There is a performance drop")
@pytest.mark.parametrize("size", [BATCH, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_records_are_the_per_sample_gradients(name, size):
    model, batch, loss = make(name, size)
    # The oracle asks autograd for gradients in a way that reentrant checkpointing refuses.
    plain = make("non-reentrant checkpoint", size)[0] if name.startswith("reentrant") else model
    expected = per_sample_gradients(plain, loss, batch)
    assert_close(captured(model, loss, batch), expected, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:no rule for", "ignore:There is a performance drop")
@pytest.mark.parametrize("name", CASES)
def test_samples_are_found_apart(name):
    model, batch, loss = make(name)
    check_samples_apart(model, loss, batch, learn_axes(model, loss, batch))


def test_axes_hold_for_other_sizes():
    model, batch, loss = make("time major")
    axes = learn_axes(model, loss, batch)
    other = floats(BATCH, WIDTH)(3)  # as many tokens as the first batch had samples
    expected = per_sample_gradients(model, loss, other)
    assert_close(captured(model, loss, other, axes), expected, dtype=torch.float64)


def test_the_module_is_as_before():
    model, batch, loss = make("tied")
    before = {name: dict(vars(child)) for name, child in model.named_modules()}
    state = torch.get_rng_state()
    captured(model, loss, batch)
    assert {name: dict(vars(child)) for name, child in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), state)


# ---- samples that mix --------------------------------------------------------------------------


class TimeMajorFlat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        flat = self.up(x.transpose(0, 1).reshape(-1, WIDTH))
        return flat.view(x.shape[1], x.shape[0], WIDTH).transpose(0, 1)


class Routed(nn.Module):
    """Rows permuted before a linear layer and put back after it, as experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        order = torch.argsort(flat.sum(1))
        back = torch.argsort(order)
        return self.up(flat[order])[back].view_as(x)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 4), nn.BatchNorm1d(4, affine=False)

    def forward(self, x):
        return self.norm(self.up(x))


@pytest.mark.parametrize(
    ("make_model", "shape"),
    [(TimeMajorFlat, (TOKENS, WIDTH)), (Routed, (TOKENS, WIDTH)), (Normed, (WIDTH,))],
)
def test_samples_that_mix_are_found(make_model, shape):
    torch.manual_seed(0)
    model, batch = make_model().double(), floats(*shape)(BATCH)
    axes = learn_axes(model, squares, batch)
    with pytest.raises(UnsupportedOperation, match=r"samples mix before 'up\.(weight|bias)'"):
        check_samples_apart(model, squares, batch, axes)


def test_batch_norm_is_refused_by_name():
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)).double()
    with pytest.raises(UnsupportedOperation, match=r"1\.weight, 1\.bias: batch norm"):
        learn_axes(model, squares, floats(WIDTH)(BATCH))


def test_a_batch_without_a_common_size_is_refused():
    with pytest.raises(BadInput, match="one sample per row"):
        learn_axes(nn.Linear(2, 2), squares, (torch.zeros(2, 2), torch.zeros(3)))


def test_operations_without_a_rule_are_told_once():
    model, batch, loss = make("transposed conv")
    from unison.capture import expression

    expression._told.clear()
    with pytest.warns(UserWarning, match=r"no rule for conv_transpose1d\(weight, bias\)"):
        captured(model, loss, batch)
    captured(model, loss, batch)  # a second warning would be an error


class MeanOfInputs(nn.Module):
    """Mixes samples before any parameter, where no gradient shows it."""

    def __init__(self, is_learned: bool) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.is_learned = is_learned

    def forward(self, x):
        h = self.up(x) if self.is_learned else x
        return self.up(x) * (self.gain * h.mean(0))


class NormedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(WIDTH, affine=False), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.up(self.norm(x))


@pytest.mark.parametrize("is_learned", [False, True])
def test_a_mean_over_the_batch_is_no_parameter(is_learned):
    model, batch = MeanOfInputs(is_learned).double(), floats(WIDTH)(BATCH)
    with pytest.raises(
        UnsupportedOperation, match=r"mul\(gain\) .* yet changes with them: a sum or"
    ):
        learn_axes(model, squares, batch)
    model.gain.requires_grad_(False)  # then only gradients show it
    axes = learn_axes(model, squares, batch)
    with pytest.raises(UnsupportedOperation, match="samples mix"):
        check_samples_apart(model, squares, batch, axes)


def test_something_of_the_whole_batch_is_not_taken_for_a_parameter():
    """Where one sample to learn from does not show it."""
    model, batch = MeanOfInputs(True).double(), floats(WIDTH)(1)
    axes = learn_axes(model, squares, batch)
    with pytest.raises(UnsupportedOperation, match="computed from all samples together"):
        check_samples_apart(model, squares, floats(WIDTH)(BATCH), axes)


@pytest.mark.parametrize("size", [2, 3, BATCH])
def test_inputs_that_mix_are_found(size):
    model, batch = NormedInputs().double(), floats(WIDTH)(size)
    axes = learn_axes(model, squares, batch)
    with pytest.raises(UnsupportedOperation, match=r"samples mix before .*: use GroupNorm"):
        check_samples_apart(model, squares, batch, axes)


def test_random_models_draw_the_same_numbers():
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.5)).double()
    batch = floats(WIDTH)(BATCH)
    check_samples_apart(model, squares, batch, learn_axes(model, squares, batch))


# ---- inputs that are changed after a layer has used them ----------------------------------------


class Changes(nn.Module):
    """Writes to a layer's input; autograd does not mind, for it needs the weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.is_changed = nn.Linear(WIDTH, 4), nn.Linear(4, 3), False

    def forward(self, x):
        h = self.up(x) + 1
        output = self.down(h)
        if self.is_changed:
            h.mul_(2)
        return output


def test_an_input_that_is_changed_in_place_is_refused():
    """By hooks, which keep it themselves: with autograd's own functions autograd refuses it."""
    model, batch = Changes().double(), floats(WIDTH)(BATCH)
    axes, found = learn_axes(model, squares, batch), []

    def run():
        capture = Capture(
            model,
            BATCH,
            axes=axes,
            on_record=lambda name, record: found.append(name),
            is_light=True,
        )
        with capture.installed():
            squares(model, batch).sum().backward()

    run()
    assert set(found) == {"up.weight", "up.bias", "down.weight", "down.bias"}
    model.is_changed = True
    with pytest.raises(UnsupportedOperation, match="was changed in place after the layer had used"):
        run()
