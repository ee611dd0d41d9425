"""What goes wrong in libraries that hook modules, held here as far as capture is concerned.

Each test names the fault: parameters that are tied, a layer that a later forward does not use,
positions without a batch dimension, strided ids, checkpointing, padding, empty batches, bf16,
several forwards before a backward, one sample that is not finite, compiled modules.
"""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.capture.common import (
    BATCH,
    CASES,
    TOKENS,
    VOCAB,
    WIDTH,
    Checkpointed,
    Positions,
    Tied,
    captured,
    floats,
    ids,
    make,
    squares,
)
from tests.capture.layers import LAYERS
from tests.harness import assert_close
from tests.harness.oracle import per_sample_gradients
from unison.capture import AxisTable, Capture, learn_axes
from unison.errors import BadInput, UnsupportedOperation
from unison.ops import Dense, Lookup, Product, per_sample

quiet = pytest.mark.filterwarnings("ignore:no rule for", "ignore:There is a performance drop")


def records_of(model, loss, batch, axes):
    """All records by name, in the order in which they come."""
    found = {}
    capture = Capture(
        model, len(batch), axes=axes, on_record=lambda name, r: found.setdefault(name, []).append(r)
    )
    with capture.installed():
        loss(model, batch).sum().backward()
    return found


# ---- tied parameters -----------------------------------------------------------------------------


def test_uses_of_a_tied_parameter_join_under_one_name():
    model, batch, loss = make("tied")
    found = records_of(model, loss, batch, learn_axes(model, loss, batch))
    assert sorted(found) == ["middle.bias", "middle.weight", "table.weight"]
    assert {type(record) for record in found["table.weight"]} == {Product, Lookup}
    assert [type(record) for record in found["middle.weight"]] == [Product, Product]
    # The norm of the sum is not that of the parts: leaving out the cross term is the peers' fault.
    uses = [per_sample(record).flatten(1) for record in found["table.weight"]]
    cross = 2 * (uses[0] * uses[1]).sum(1)
    expected = per_sample_gradients(model, loss, batch)["table.weight"].flatten(1)
    assert_close(sum(u.square().sum(1) for u in uses) + cross, expected.square().sum(1))
    assert float(cross.abs().min()) > 1e-3 * float(expected.square().sum(1).max())


# ---- a layer that a later forward does not use ---------------------------------------------------


class Sometimes(nn.Module):
    """Uses its middle layer where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.uses_middle = True

    def forward(self, x):
        h = self.first(x)
        return self.middle(h) if self.uses_middle else h


def test_nothing_stale_of_an_unused_layer():
    model, batch = Sometimes().double(), floats(TOKENS, WIDTH)(BATCH)
    axes = learn_axes(model, squares, batch)
    captured(model, squares, batch, axes)
    model.uses_middle = False
    found = records_of(model, squares, batch, axes)
    assert sorted(found) == ["first.bias", "first.weight"]
    expected = per_sample_gradients(model, squares, batch)
    assert_close(captured(model, squares, batch, axes), expected, dtype=torch.float64)


def test_a_path_that_was_not_learned_is_refused():
    model, batch = Sometimes().double(), floats(TOKENS, WIDTH)(BATCH)
    model.uses_middle = False
    axes = learn_axes(model, squares, batch)
    model.uses_middle = True
    with pytest.raises(
        UnsupportedOperation, match=r"linear\(middle\.weight, middle\.bias\) was not"
    ):
        captured(model, squares, batch, axes)


def test_what_was_used_is_known():
    model, batch, loss = make("frozen")
    capture = Capture(
        model, BATCH, axes=learn_axes(model, loss, batch), on_record=lambda name, record: None
    )
    with capture.installed():
        loss(model, batch)
    assert capture.used == {"first.bias", "second.weight"}


# ---- positions and ids ---------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["[T]", "[1, T]", "[B, T]", "slice"])
def test_positions_keep_their_samples_where_there_are_as_many_tokens(spelling):
    model, batch = Positions(spelling).double(), ids(TOKENS, TOKENS)  # one token per sample
    axes = learn_axes(model, squares, batch)
    found = records_of(model, squares, batch, axes)["positions.weight"]
    assert [type(record) for record in found] == [Lookup]  # not [batch, rows, features]
    expected = per_sample_gradients(model, squares, batch)
    assert_close(captured(model, squares, batch, axes), expected, dtype=torch.float64)


@pytest.mark.parametrize(
    "spell",
    [
        lambda x: x[:, ::2],
        lambda x: x.t().contiguous().t(),
        lambda x: x[:, :1].expand(-1, TOKENS),
        lambda x: x.unfold(1, 3, 2),
    ],
    ids=["strided", "transposed", "expanded", "overlapping"],
)
def test_ids_may_lie_in_memory_as_they_like(spell):
    model, batch = nn.Embedding(VOCAB, WIDTH).double(), spell(ids(BATCH, 14))
    expected = per_sample_gradients(model, squares, batch)
    assert_close(captured(model, squares, batch), expected, dtype=torch.float64)


def test_rows_of_padding_get_nothing():
    model, batch, loss = make("embedding with padding")
    batch = batch.clone()
    batch[0], batch[1, 2:] = 3, 3  # a sample of padding alone, and one padded
    (record,) = records_of(model, loss, batch, learn_axes(model, loss, batch))["weight"]
    assert bool((record.ids[0] < 0).all())
    assert bool((record.ids[1, 2:] < 0).all())
    found = captured(model, loss, batch)["weight"]
    assert bool((found[:, 3] == 0).all())
    assert bool((found[0] == 0).all())
    assert_close(found, per_sample_gradients(model, loss, batch)["weight"], dtype=torch.float64)


# ---- several passes ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointed_layers_are_recorded_once(is_reentrant):
    model, batch = Checkpointed(is_reentrant).double(), ids(BATCH)
    axes = learn_axes(model, squares, batch)
    found = records_of(model, squares, batch, axes)
    assert {name: len(records) for name, records in found.items()} == {
        "table.weight": 1,
        **dict.fromkeys(("block.0.weight", "block.0.bias", "block.1.weight", "block.1.bias"), 2),
        **dict.fromkeys(("head.weight", "head.bias"), 1),
    }


def test_several_forwards_before_a_backward():
    model, batch, loss = make("tied")
    axes = learn_axes(model, loss, batch)
    other = batch.roll(1, 0).flip(1)
    expected = {
        name: gradient + per_sample_gradients(model, loss, other)[name]
        for name, gradient in per_sample_gradients(model, loss, batch).items()
    }
    found = captured(model, lambda m, b: loss(m, b) + loss(m, other), batch, axes)
    assert_close(found, expected, dtype=torch.float64)


def test_several_backwards_in_one_context():
    model, batch, loss = make("tied")
    counts = Counter()
    capture = Capture(
        model,
        BATCH,
        axes=learn_axes(model, loss, batch),
        on_record=lambda name, record: counts.update([name]),
    )
    with capture.installed():
        loss(model, batch).sum().backward()
        first = counts.copy()
        loss(model, batch).sum().backward()
    assert counts == Counter({name: 2 * count for name, count in first.items()})


def test_evaluation_leaves_no_records():
    model, batch, loss = make("tied")
    capture = Capture(model, BATCH, axes=learn_axes(model, loss, batch), on_record=pytest.fail)
    with capture.installed(), torch.no_grad():
        loss(model, batch)
        loss(model, ids(2 * BATCH, 4))  # of any size
    assert capture.used == set()


# ---- batches of any size -------------------------------------------------------------------------


# torch itself, or the model's own code, does not run on an empty batch.
NEEDS_SAMPLES = ("instance norm", "attention padded and causal", "einsum flattened")
MAY_NEED_SAMPLES = ("attention bias",)  # torch 2.11 runs it, torch 2.13 does not


@quiet
@pytest.mark.parametrize("name", NEEDS_SAMPLES)
def test_what_does_not_run_on_an_empty_batch(name):
    case = (CASES | LAYERS)[name]
    model, batch = case.make().double(), case.batch(2)
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        case.loss(model, batch[:0]).sum().backward()


@quiet
@pytest.mark.parametrize("name", sorted(set(CASES | LAYERS) - {*NEEDS_SAMPLES, *MAY_NEED_SAMPLES}))
def test_an_empty_batch_leaves_empty_records(name):
    case = (CASES | LAYERS)[name]
    model, batch = case.make().double(), case.batch(2)
    axes = learn_axes(model, case.loss, batch)
    for name, gradient in captured(model, case.loss, batch[:0], axes).items():
        assert gradient.shape == (0, *model.get_parameter(name).shape)


def test_axes_cannot_be_learned_from_an_empty_batch():
    with pytest.raises(BadInput, match="found a batch of 0"):
        learn_axes(nn.Linear(WIDTH, 2), squares, torch.zeros(0, WIDTH))


def test_axes_learned_once_hold_for_every_size():
    """Where one matrix meets the batch in two layouts, sizes alone do not tell them apart."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.up(x) + self.up(x.transpose(0, 1).sin()).transpose(0, 1)

    model = Both().double()
    axes = learn_axes(model, squares, floats(TOKENS, WIDTH)(3))
    for size in (1, 2, 5, 9):
        batch = floats(TOKENS, WIDTH)(size)
        expected = per_sample_gradients(model, squares, batch)
        assert_close(captured(model, squares, batch, axes), expected, dtype=torch.float64)
    with pytest.raises(UnsupportedOperation, match=r"was not seen|in different dimensions"):
        captured(model, squares, floats(TOKENS, WIDTH)(TOKENS), axes)
    with pytest.raises(UnsupportedOperation, match="samples in different dimensions"):
        learn_axes(model, squares, floats(TOKENS, WIDTH)(TOKENS))


# ---- bf16, and what is not finite ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied", "layer norm", "own rms norm", "frozen", "conv2d"])
def test_autocast_keeps_to_the_rounding_of_bfloat16(name):
    model, batch, loss = make(name)
    expected = per_sample_gradients(model, loss, batch)
    model = model.float()
    batch = batch.float() if batch.is_floating_point() else batch

    def rounded(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch).float()

    found = captured(model, rounded, batch)
    for name, gradient in found.items():
        error = (gradient - expected[name]).flatten(1).norm(dim=1)
        # Operations that follow one another round one after the other.
        assert bool((error <= 4e-2 * expected[name].flatten(1).norm(dim=1).clamp(min=1e-6)).all())


@pytest.mark.parametrize("name", ["tied", "layer norm", "conv1d", "embedding"])
def test_bfloat16_models_add_up_in_float32(name):
    model, batch, loss = make(name)
    model = model.bfloat16()
    batch = batch.bfloat16() if batch.is_floating_point() else batch
    for records in records_of(model, loss, batch, learn_axes(model, loss, batch)).values():
        for record in records:
            assert per_sample(record).dtype == torch.float32
            if isinstance(record, Dense):
                assert record.value.dtype == torch.float32
            elif isinstance(record, Product):
                assert not record.a.requires_grad  # nor does it hold on to the graph
                assert record.a.dtype == record.g.dtype == torch.bfloat16


def test_a_sample_that_is_not_finite_spoils_no_other():
    model, batch, loss = make("bare parameters")
    expected = per_sample_gradients(model, loss, batch)
    batch = batch.clone()
    axes = learn_axes(model, loss, batch)
    batch[2, 0] = torch.nan
    found = captured(model, loss, batch, axes)
    others = torch.arange(BATCH) != 2
    assert_close(
        {name: gradient[others] for name, gradient in found.items()},
        {name: gradient[others] for name, gradient in expected.items()},
        dtype=torch.float64,
    )
    assert bool(found["mix"][2].isnan().any())


# ---- compiled modules ----------------------------------------------------------------------------


def _compiled_call(model):
    model.middle.compile(backend="eager")
    return model


def _compiled_forward(model):
    model.middle.forward = torch.compile(model.middle.forward, backend="eager")
    return model


@pytest.mark.parametrize(
    ("compiled", "part"),
    [
        (lambda model: torch.compile(model, backend="eager"), "OptimizedModule"),
        (_compiled_call, "middle"),
        (_compiled_forward, "middle"),
    ],
    ids=["module", "call", "forward"],
)
def test_compiled_modules_are_refused(compiled, part):
    model, batch = compiled(Tied().double()), ids(BATCH)
    with pytest.raises(UnsupportedOperation, match=f"{part}.* is compiled.*before torch.compile"):
        learn_axes(model, squares, batch)
    assert "weight" not in vars(model.get_submodule("middle") if part == "middle" else model)


# ---- and what is asked of the records' form ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("attention", "attention.in_proj_weight"),
        ("attention to another", "attention.in_proj_weight"),
        ("attention to two others", "attention.in_proj_weight"),
        ("lstm deep", "weight_hh_l1_reverse"),
        ("einsum to heads", "weight"),
        ("einsum from heads", "weight"),
        ("rows of a matrix", "weight"),
        ("left matmul", "weight"),
    ],
)
def test_matrices_are_not_multiplied_out(name, parameter):
    case = LAYERS[name]
    model, batch = case.make().double(), case.batch(BATCH)
    found = records_of(model, case.loss, batch, learn_axes(model, case.loss, batch))[parameter]
    assert {type(record) for record in found} == {Product}


def test_dropout_of_attention_is_that_of_the_model():
    """The rule draws the numbers that torch's own attention draws."""
    model = nn.TransformerEncoderLayer(WIDTH, 2, 9, dropout=0.4, batch_first=True).double()
    batch = floats(TOKENS, WIDTH)(BATCH)
    axes = learn_axes(model, squares, batch)
    torch.manual_seed(5)
    expected = model(batch)
    torch.manual_seed(5)
    with Capture(model, BATCH, axes=axes, on_record=lambda name, record: None).installed():
        assert_close(model(batch), expected)
    assert F.dropout(batch, 0.4).eq(0).any()


@pytest.mark.parametrize("name", ["lstm deep", "weight norm", "latents", "attention"])
def test_the_module_is_as_before(name):
    case = LAYERS[name]
    model, batch = case.make().double(), case.batch(BATCH)
    before = {path: dict(vars(child)) for path, child in model.named_modules()}
    captured(model, case.loss, batch)
    assert {path: dict(vars(child)) for path, child in model.named_modules()} == before
    with pytest.raises(RuntimeError, match="in the middle"):
        fail_in_the_middle(model)
    assert {path: dict(vars(child)) for path, child in model.named_modules()} == before


def fail_in_the_middle(model):
    with Capture(model, BATCH, axes=AxisTable(), on_record=print).installed():
        raise RuntimeError("in the middle")
