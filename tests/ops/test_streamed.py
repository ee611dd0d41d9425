"""Records of a head that are made piece by piece: the same as the whole, made once, let go."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unison
from tests.harness import assert_close, assert_same_bits
from tests.harness.largest import Largest
from tests.harness.oracle import per_sample_gradients
from unison.capture import AxisTable, Capture, check_samples_apart, learn_axes
from unison.errors import UnsupportedOperation
from unison.kernels import cross_entropy as kernels
from unison.kernels.cross_entropy import ROW_MULTIPLE, ChunkedHead
from unison.ops import Dense, Streamed, per_sample

BATCH, TOKENS, WIDTH, VOCAB, CHUNK = 5, 6, 4, 37, 13  # chunks of two samples


class Model(nn.Module):
    """An embedding, something between, and a head that may be tied."""

    def __init__(self, *, has_bias: bool = True, is_tied: bool = False, chunk: int = CHUNK):
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=has_bias)
        if is_tied:
            self.head.weight = self.table.weight
        self.chunk, self.is_checkpointed = chunk, False

    def losses(self, h: Tensor, labels: Tensor) -> Tensor:
        return unison.linear_cross_entropy(
            *(h, self.head.weight, labels),
            bias=self.head.bias,
            reduction="sample_mean",
            chunk=self.chunk,
        )

    def forward(self, ids: Tensor) -> Tensor:
        h = self.middle(self.table(ids[:, :-1])).tanh()
        labels = ids[:, 1:].masked_fill(ids[:, 1:] % 5 == 0, -100)
        if self.is_checkpointed:
            return checkpoint(self.losses, h, labels, use_reentrant=False)
        return self.losses(h, labels)


def run(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids)


@pytest.fixture
def ids(gen) -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, TOKENS + 1), generator=gen)


@pytest.fixture
def gemms(monkeypatch) -> list[int]:
    """The numbers of rows whose logits were made in a backward pass, one by one."""
    made = []
    gradient_ = kernels.gradient_

    def counted(logits, *args):
        made.append(len(logits))
        return gradient_(logits, *args)

    monkeypatch.setattr(kernels, "gradient_", counted)
    return made


def captured(model, ids, on_record, *, axes: AxisTable | None = None) -> None:
    axes = axes or learn_axes(model, run, ids)
    with Capture(model, len(ids), axes=axes, on_record=on_record, streams=True).installed():
        model(ids).sum().backward()


def gradients_of(model, ids, take=lambda record: record) -> dict[str, Tensor]:
    """Per-sample gradients, with what is taken of a streamed record there and then."""
    found = {
        name: torch.zeros(len(ids), *each.shape, dtype=each.dtype)
        for name, each in model.named_parameters()
        if each.requires_grad
    }

    def add(name, record):
        if isinstance(record, Streamed):
            take(record)
            record = record.as_product()
        found[name] += per_sample(record)

    captured(model, ids, add)
    return found


# ---- the record ----------------------------------------------------------------------------------


def record_of(*, chunk: int | None = CHUNK, **options) -> Streamed:
    gen = torch.Generator().manual_seed(3)
    hidden = torch.randn(BATCH, TOKENS, WIDTH, generator=gen, dtype=torch.float64)
    weight = torch.randn(VOCAB, WIDTH, generator=gen, dtype=torch.float64)
    bias = torch.randn(VOCAB, generator=gen, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (BATCH, TOKENS), generator=gen)
    labels[1], labels[3, 2] = -100, -100
    parts = ChunkedHead(
        hidden=hidden, weight=weight, bias=bias, labels=labels, ignore_index=-100, chunk=chunk
    )
    g = torch.randn(BATCH, TOKENS, generator=gen, dtype=torch.float64)
    return Streamed(parts, parts.losses()[1], g, **options)


def slopes(record: Streamed) -> Tensor:
    """The gradient of all logits, by autograd."""
    parts = record._head
    logits = F.linear(parts.hidden, parts.weight, parts.bias).requires_grad_()
    losses = F.cross_entropy(logits.flatten(0, 1), parts.labels.flatten(), reduction="none")
    (found,) = torch.autograd.grad((losses.view_as(record.g) * record.g).sum(), logits)
    return found


@pytest.mark.parametrize(("chunk", "num_pieces"), [(13, 3), (1, 5), (6, 5), (100, 1), (None, 1)])
def test_pieces_are_the_product(chunk, num_pieces):
    record = record_of(chunk=chunk)
    assert (record.a.shape[:2], record.shape) == ((BATCH, TOKENS), (VOCAB, WIDTH))
    whole = record.as_product()
    assert_close(whole.g, slopes(record))
    for _ in range(2):  # as often as it is asked
        pieces = list(record.chunks())
        assert len(pieces) == num_pieces
        starts, stops = zip(*((each.start, each.stop) for each, _ in pieces), strict=True)
        assert (*starts, BATCH) == (0, *stops)
        assert all(piece.shape == record.shape for _, piece in pieces)
        assert_same_bits(torch.cat([piece.a for _, piece in pieces]), whole.a)
        assert_same_bits(torch.cat([piece.g for _, piece in pieces]), whole.g.contiguous())


@pytest.mark.parametrize("num_read", [0, 1, 2, 3])
def test_the_first_reading_leaves_the_rest_behind(num_read, gemms):
    record = record_of(of_hidden=True, of_bias=True)
    g = slopes(record)
    first = record.first_chunks()
    for _ in range(num_read):
        next(first)
    assert len(gemms) == num_read
    record.finish()
    assert len(gemms) == 3
    assert_close(record.hidden_gradient, g @ record._head.weight)
    assert_close(record.bias_sums, g.sum(1))
    list(record.first_chunks())  # a second time it is made anew, and leaves nothing
    assert len(gemms) == 6


def test_all_at_once_is_a_first_reading_too(gemms):
    record = record_of(of_hidden=True)
    whole = record.as_product()
    record.finish()
    assert len(gemms) == 3
    assert_close(record.hidden_gradient, whole.g @ record._head.weight)


def test_a_piece_that_is_written_to_harms_nobody():
    record = record_of(of_hidden=True)
    for _, piece in record.first_chunks():
        piece.g.zero_()
    assert_close(record.hidden_gradient, slopes(record) @ record._head.weight)


def test_inputs_that_change_are_noticed():
    record = record_of()
    list(record.chunks())
    record._head.weight.add_(1)
    with pytest.raises(UnsupportedOperation, match="were written to"):
        list(record.chunks())


def test_an_empty_batch():
    parts = ChunkedHead(
        hidden=torch.zeros(0, 3, 2),
        weight=torch.zeros(5, 2),
        bias=None,
        labels=torch.zeros(0, 3, dtype=torch.int64),
        ignore_index=-100,
    )
    record = Streamed(parts, torch.zeros(0, 3), torch.zeros(0, 3), of_hidden=True, of_bias=True)
    record.finish()
    assert list(record.chunks()) == []
    assert record.as_product().g.shape == (0, 3, 5)
    assert record.bias_sums.shape == (0, 5)


# ---- in a model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"has_bias": False}, {"is_tied": True}, {"chunk": 3}, {"chunk": 1000}], ids=str
)
def test_equals_one_sample_at_a_time(options, is_checkpointed, ids):
    model = Model(**options).double()
    model.is_checkpointed = is_checkpointed
    check_samples_apart(model, run, ids, learn_axes(model, run, ids))
    expected = per_sample_gradients(model, run, ids)
    readers = [
        lambda record: None,
        lambda record: list(record.first_chunks()),
        lambda record: next(record.first_chunks()),
        lambda record: list(record.chunks()),
    ]
    for take in readers:
        assert_close(gradients_of(model, ids, take), expected)


@pytest.mark.parametrize("frozen", ["head.weight", "head.bias", "table.weight middle"])
def test_frozen_parts(frozen, ids):
    model = Model().double()
    for name, each in model.named_parameters():
        each.requires_grad_(not any(name.startswith(part) for part in frozen.split()))
    expected = per_sample_gradients(model, run, ids)
    assert_close(gradients_of(model, ids), expected)


def test_kinds_of_records(ids):
    found = {}
    captured(Model().double(), ids, found.__setitem__)
    assert type(found["head.weight"]) is Streamed
    assert type(found["head.bias"]) is Dense
    assert found["head.bias"].value.shape == (BATCH, VOCAB)


def test_bias_sums_of_halves_are_float32(ids):
    found = {}
    captured(Model().bfloat16(), ids, found.__setitem__)
    assert found["head.bias"].value.dtype == torch.float32
    assert found["middle.weight"].g.dtype == torch.bfloat16


@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_are_made_once_for_records_and_backward(has_bias, ids, gemms):
    model = Model(has_bias=has_bias).double()
    axes = learn_axes(model, run, ids)

    def read(name, record):
        if isinstance(record, Streamed):
            for _ in record.first_chunks():
                pass

    captured(model, ids, read, axes=axes)
    assert gemms == [2 * TOKENS, 2 * TOKENS, TOKENS]
    gemms.clear()
    captured(model, ids, lambda name, record: None, axes=axes)  # nobody reads
    assert gemms == [2 * TOKENS, 2 * TOKENS, TOKENS]


def test_records_of_a_second_backward_pass(ids):
    model, found = Model().double(), []
    axes = learn_axes(model, run, ids)
    keep = lambda name, record: found.append((name, record))  # noqa: E731
    with Capture(model, BATCH, axes=axes, on_record=keep, streams=True).installed():
        total = model(ids).sum()
        total.backward(retain_graph=True)
        total.backward()
    heads = [record for name, record in found if name == "head.weight"]
    assert len(heads) == 2
    first, second = (each.as_product() for each in heads)
    assert_same_bits(first.g.contiguous(), second.g.contiguous())


def test_a_part_of_a_weight_is_multiplied_out(ids):
    class Sliced(Model):
        def losses(self, h, labels):
            weight = self.head.weight[:30].contiguous()
            return unison.linear_cross_entropy(
                h, weight, labels.clamp(max=29), reduction="sample_mean"
            )

    model = Sliced(has_bias=False).double()
    assert_close(gradients_of(model, ids), per_sample_gradients(model, run, ids))


# ---- memory --------------------------------------------------------------------------------------


def test_the_gradient_of_all_logits_never_exists(monkeypatch, gen):
    ids = torch.randint(0, VOCAB, (40, TOKENS + 1), generator=gen)
    model = Model(has_bias=False)
    axes = learn_axes(model, run, ids)
    squares = torch.zeros(40)

    def measure(name, record):
        if isinstance(record, Streamed):
            for samples, piece in record.first_chunks():
                squares[samples] += per_sample(piece).square().flatten(1).sum(1)

    with Largest() as largest:
        captured(model, ids, measure, axes=axes)
    assert float(squares.min()) > 0
    most_logits = 2 * TOKENS * (VOCAB + ROW_MULTIPLE)
    others = max(VOCAB * WIDTH * 2, 40 * TOKENS * WIDTH)
    assert largest.numel <= max(most_logits, others) < 40 * TOKENS * VOCAB


def test_only_one_piece_exists_at_a_time():
    record = record_of(of_hidden=True)
    alive = []
    for read in (record.first_chunks, record.chunks):
        for _, piece in read():
            alive.append(weakref.ref(piece.g.untyped_storage()))
            del piece
            assert sum(each() is not None for each in alive) <= 1


def test_a_record_goes_when_nobody_holds_it(ids):
    """Without the garbage collector, which comes too late for a GPU's memory."""
    model, alive = Model().double(), []
    axes = learn_axes(model, run, ids)
    gc.collect()
    gc.disable()
    try:
        captured(model, ids, lambda name, record: alive.append(weakref.ref(record)), axes=axes)
        assert [each() for each in alive if each() is not None] == []
    finally:
        gc.enable()


def test_a_record_that_stays_holds_no_gradients(monkeypatch, ids):
    found = {}
    captured(Model().double(), ids, found.__setitem__)
    assert found["head.weight"].hidden_gradient is None
    assert found["head.weight"].bias_sums is None
