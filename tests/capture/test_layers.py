"""Attention, recurrent networks and single operations, and that no rule is without a case."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.capture.common import BATCH, CASES, WIDTH, captured, floats, squares
from tests.capture.layers import LAYERS, Op
from tests.harness import assert_close
from tests.harness.oracle import per_sample_gradients
from unison.capture import AxisTable, Capture, check_samples_apart, learn_axes
from unison.errors import UnsupportedOperation
from unison.ops import RULES

quiet = pytest.mark.filterwarnings("ignore:no rule for", "ignore:There is a performance drop")


@quiet
@pytest.mark.parametrize("name", LAYERS)
def test_records_are_the_per_sample_gradients(name):
    case = LAYERS[name]
    model, batch = case.make().double(), case.batch(BATCH)
    axes = learn_axes(model, case.loss, batch)
    check_samples_apart(model, case.loss, batch, axes)
    for size in (BATCH, 1, 2):
        part = batch[:size]
        expected = per_sample_gradients(model, case.loss, part)
        assert_close(captured(model, case.loss, part, axes), expected, dtype=torch.float64)


# ---- what is refused, with its reason ------------------------------------------------------------


class Joined(nn.Module):
    """One row that belongs to no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.up = nn.Parameter(torch.randn(1, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.up(torch.cat([self.row.detach(), x]))[1:]


REFUSED = {
    "batch norm": (lambda: nn.BatchNorm1d(WIDTH), (WIDTH,), "weight, bias: batch norm"),
    "batch norm function": (
        lambda: Op(lambda x, w: torch.batch_norm(x, w, None, None, None, True, 0, 0, False), WIDTH),
        (WIDTH,),
        "weight: batch norm",
    ),
    "a row of no sample": (Joined, (WIDTH,), r"linear\(up\.weight, up\.bias\): dimension 0 has 6"),
    "unbatched attention": (
        lambda: Op(_unbatched, WIDTH),
        (WIDTH,),
        "multi-head attention without a batch dimension",
    ),
    "embedding with max_norm": (
        lambda: Op(lambda x, w: F.embedding((x > 0).long(), w, max_norm=1.0), 2, WIDTH),
        (WIDTH,),
        "weight: F.embedding with max_norm",
    ),
    "running statistics": (
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        (4, 9),
        "instance norm with running statistics",
    ),
}


def _unbatched(x, w):
    eye = torch.eye(WIDTH, dtype=x.dtype)
    return F.multi_head_attention_forward(
        *(x, x, x, WIDTH, 2, torch.cat([eye] * 3), None, None, None, False, 0.0, eye, w)
    )[0]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_it_is_learned(name):
    make, shape, message = REFUSED[name]
    with pytest.raises(UnsupportedOperation, match=message):
        learn_axes(make().double(), squares, floats(*shape)(BATCH))


class _Product(torch.autograd.Function):
    """A product that torch functions do not see."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0, keepdim=True)


class _Scaled(torch.autograd.Function):
    """A parameter times a number, whose way back vmap cannot go: it reads values."""

    @staticmethod
    def forward(ctx, w, scale, reads_values=False):
        ctx.save_for_backward(scale)
        ctx.reads_values = reads_values
        return w.clone() * scale

    @staticmethod
    def backward(ctx, g):
        (scale,) = ctx.saved_tensors
        return (
            g * (scale.item() * g.sum().item() / g.sum() if ctx.reads_values else scale),
            None,
            None,
        )


TWO = torch.tensor(2.0, dtype=torch.float64)
ROWS, COLUMNS = torch.triu_indices(WIDTH, WIDTH, 1)


def _scattered(x, w):
    y = x.sin()
    y[torch.arange(len(x)), 0] = w[0, 0]
    return y


def _skew(x, w):
    """As PEFT's OFT makes a rotation."""
    matrix = torch.zeros(WIDTH, WIDTH, dtype=x.dtype)
    matrix[ROWS, COLUMNS] = w[0].repeat(WIDTH)[: len(ROWS)]
    return x @ torch.matrix_exp(matrix - matrix.T) * x


def _several(x, w):
    matrix = torch.zeros(WIDTH, WIDTH, dtype=x.dtype)
    matrix[0] = w[0]
    matrix[1:3] = w.sin()
    matrix[matrix > 2] = 0.5
    matrix[torch.eye(WIDTH).bool()] = w[0]
    matrix.mul_(w).add_(1).sub_(w.cos(), alpha=2)
    matrix.index_add_(1, torch.tensor([0, 2]), w[0].expand(2, WIDTH).T)
    return x @ matrix


def _overwritten(x, w):
    scaled = 2 * w
    scaled[0, 1] = 3
    scaled.clamp_(min=0.1)
    return x * scaled


def _seen_by_a_view(x, w, *, is_of_zeros=False, writes_view=False):
    made = torch.zeros(1, WIDTH, dtype=x.dtype) if is_of_zeros else 2 * w
    view = made.view(WIDTH) if writes_view else made[:, 1:]
    (view if writes_view else made)[..., 1] = w[0, 0] if is_of_zeros else 1
    return x * made + view.sum()


def _rectified(x, w):
    made = w.sin()
    F.relu(made, inplace=True)  # of which nobody uses what it returns
    return x * made


def _erased(x, w):
    made = 2 * w
    made.zero_()
    return x * made + x.sin() * w


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_Product.apply, "a gradient reached 'weight'"),
        (lambda x, w: x * _Scaled.apply(w, TWO), None),
        (lambda x, w: x * _Scaled.apply(1 + w, TWO, True).sin(), None),
        (lambda x, w: x * _Scaled.apply(w, x.mean(), True), "samples mix"),
        (lambda x, w: x * _Scaled.apply(w, x[:1]), "a gradient reached 'weight'"),
        (lambda x, w: _Product.apply(x, 1 + w.float().double()), "a gradient reached 'weight'"),
        (lambda x, w: w.repeat_interleave(len(x), 0) * x, "from parameters alone; use `expand`"),
        (lambda x, w: torch.frexp(x * w).mantissa + torch.max(w, dim=0)[0], None),
        (lambda x, w: torch.max(x, w.expand_as(x)), None),
        (torch.maximum, None),
        (lambda x, w: torch.topk(x * w, 2)[0], None),
        (lambda x, w: torch.special.xlog1py(x, w.abs()), None),
        (lambda x, w: torch.cdist(x, torch.cat([w, 2 * w])), None),
        (lambda x, w: F.cosine_similarity(x, w)[:, None], None),
        (lambda x, w: F.bilinear(x, x, w.expand(2, WIDTH, WIDTH)), None),
        (lambda x, w: F.embedding_bag((x > 0).long(), torch.cat([w, w.cos()])), None),
        (lambda x, w: torch.outer(x[:, 0], w[0]), None),
        (lambda x, w: torch.lerp(x, w, 0.3), None),
        (torch.kron, None),
        (lambda x, w: x.index_add(1, torch.tensor([0, 2]), w[:, :2].expand(len(x), 2)), None),
        (lambda x, w: torch.vmap(lambda row: (row * w).sin())(x), "inside of torch.func or vmap"),
        (torch.ops.aten.mul, None),
        (lambda x, w: x.sin().pow_(w), None),
        (lambda x, w: x + torch.zeros(WIDTH).double().add_(w[0]), None),
        (lambda x, w: x + torch.zeros(WIDTH).double().copy_(w[0]), None),
        (_skew, None),
        (_several, None),
        (_overwritten, None),
        (_scattered, "written to rows found by tensors of indices"),
        (_seen_by_a_view, "share memory"),
        (partial(_seen_by_a_view, writes_view=True), "share memory"),
        (partial(_seen_by_a_view, is_of_zeros=True), "share memory"),
        (partial(_seen_by_a_view, is_of_zeros=True, writes_view=True), "share memory"),
        (lambda x, w: x * w.mul_(2), "in-place operation on a parameter"),
        (_erased, None),
        (lambda x, w: x * F.elu(2 * w, inplace=True), None),
        (lambda x, w: x * F.leaky_relu(w, 0.1, True), "in-place operation on a parameter"),
        (_rectified, None),
    ],
)
@quiet
def test_right_or_refused(function, message):
    model, batch = Op(function, 1, WIDTH).double(), floats(WIDTH)(BATCH)
    if message is not None:
        with pytest.raises(UnsupportedOperation, match=message):
            check_samples_apart(model, squares, batch, learn_axes(model, squares, batch))
        return
    axes = learn_axes(model, squares, batch)
    check_samples_apart(model, squares, batch, axes)
    expected = per_sample_gradients(model, squares, batch)
    assert_close(captured(model, squares, batch, axes), expected, dtype=torch.float64)


class Hoarder(nn.Module):
    """Keeps its parameters in a list besides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.kept = [self.up.weight]

    def forward(self, x):
        return F.linear(x, self.kept[0], self.up.bias)


def test_a_parameter_kept_elsewhere_is_found():
    model, batch = Hoarder().double(), floats(WIDTH)(BATCH)
    axes = learn_axes(model, squares, batch)
    with pytest.raises(UnsupportedOperation, match=r"a gradient reached 'up\.weight'"):
        check_samples_apart(model, squares, batch, axes)
    assert not model.up.weight._backward_hooks  # nothing stays behind


# ---- every rule has a case -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def exercised():
    """The functions with a rule that the cases call."""
    found, call = set(), Capture.call

    def listen(self, func, args, kwargs):
        found.add(func)
        return call(self, func, args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Capture, "call", listen)
        for case in (*CASES.values(), *LAYERS.values()):
            model, batch = case.make().double(), case.batch(BATCH)
            with Capture(model, BATCH, axes=AxisTable(), on_record=print).learning():
                case.loss(model, batch)
        for make, shape, _ in REFUSED.values():
            with pytest.raises(UnsupportedOperation):
                learn_axes(make().double(), squares, floats(*shape)(BATCH))
    found.add(torch._grouped_mm)  # of no float64: see test_rows.py
    return found


@quiet
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("function", RULES, ids=lambda f: getattr(f, "__qualname__", str(f)))
def test_every_rule_has_a_case(function, exercised):
    assert function in exercised
