"""Random numbers by sample: the same however a batch is cut, and when a part runs again."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from tests.kernels.interpreted import interpreted
from unison.errors import BadInput, UnsupportedOperation
from unison.kernels.random import using_backend
from unison.rng import Key, Stream, draws_by_sample
from unison.rng.draws import BatchDraws, are_equal_states, drop_rows

KEY = Key.from_seed(4)
ROWS, TOKENS, WIDTH = 6, 5, 8


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "attention": nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True),
        "encoder": nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True),
        "lstm": nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True),
    }


M = modules()
Draw = Callable[[Tensor], Tensor]

FUNCTIONS: dict[str, Draw] = {
    "F.dropout": lambda x: F.dropout(x, 0.3),
    "nn.Dropout": nn.Dropout(0.3),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "flattened": lambda x: F.dropout(x.reshape(-1, WIDTH), 0.3).view(x.shape),
    "sequence first": lambda x: F.dropout(x.transpose(0, 1), 0.3).transpose(0, 1),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "rand": lambda x: torch.rand(x.shape[0], 3),
    "randn of a tuple": lambda x: torch.randn((x.shape[0], 3, 2)),
    "randint": lambda x: torch.randint(0, 10, (x.shape[0], 5)),
    "rand_like": torch.rand_like,
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_ of probabilities": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "normal_": lambda x: x.new_empty(x.shape).normal_(),
    "normal": lambda x: torch.normal(x, 1.0),
    "poisson": lambda x: torch.poisson(x.exp()),
    "multinomial": lambda x: torch.multinomial(x[:, 0].softmax(-1), 2),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x[:, None], 2, output_size=(3, 5)),
    "drop path": lambda x: x * (torch.rand((x.shape[0], 1, 1)) < 0.5),
    "drop path of timm": lambda x: x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.5),
    "a generator of the user's": lambda x: torch.rand(x.shape[0], 2, generator=torch.Generator()),
    "attention weights": lambda x: M["attention"](x, x, x)[0],
    "attention": lambda x: M["attention"](x, x, x, need_weights=False)[0],
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], dropout_p=0.4, is_causal=True
    ),
    "encoder layer": M["encoder"],
    "lstm": lambda x: M["lstm"](x)[0],
    "a number": lambda x: torch.rand([]) + 0 * x,
    "one number": lambda x: torch.rand(1) + 0 * x,
}


def rows() -> Tensor:
    return torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_draw_belongs_to_its_sample(name):
    draw, x = FUNCTIONS[name], rows()
    before = torch.get_rng_state()

    def drawn(ids: range) -> Tensor:
        with draws_by_sample(KEY, 2, ids):
            first = draw(x[list(ids)])
            return torch.stack([first, draw(x[list(ids)])], dim=1)

    whole = drawn(range(ROWS))
    assert not torch.equal(whole[:, 0], whole[:, 1]), "a second draw is another one"
    for size in (1, 2, 3):
        parts = [drawn(range(i, i + size)) for i in range(0, ROWS, size)]
        # Attention's products are rounded otherwise at another number of rows; draws are the same.
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.get_rng_state(), before)


def dropped(ids, *, step=0, key=KEY, before=0):
    with draws_by_sample(key, step, ids):
        for _ in range(before):
            F.dropout(torch.ones(len(ids), 3, 5))
        return F.dropout(torch.ones(len(ids), 3, 5), 0.5)


def test_mask_follows_the_sample_not_the_row():
    whole = dropped(range(12))
    for ids in ([3, 11, 0], [5], list(range(6, 12)), []):
        assert torch.equal(dropped(ids), whole[ids])


def test_mask_depends_on_everything_it_should():
    base = dropped(range(8))
    assert torch.equal(base, dropped(range(8)))
    assert not torch.equal(base, dropped(range(8), step=1))
    assert not torch.equal(base, dropped(range(8), key=Key.from_seed(9)))
    assert not torch.equal(base, dropped(range(8), before=1))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_as_many_are_dropped_as_torch_drops(p):
    x = torch.ones(100, 200)
    with draws_by_sample(KEY, 0, range(100)):
        y = F.dropout(x, p)
    assert torch.equal(y.unique(), F.dropout(x, p).unique())
    assert float((y == 0).float().mean()) == pytest.approx(p, abs=4 * 0.5 / 141)
    if 0 < p < 1:  # no row has the draws of the one before it, moved by an element
        assert not torch.equal(y[1:, :-1], y[:-1, 1:])


def test_in_evaluation_nothing_is_drawn():
    x = rows()
    with draws_by_sample(KEY, 0, range(ROWS)) as draws:
        assert nn.Dropout(0.5).eval()(x) is x
        F.scaled_dot_product_attention(x, x, x)
    assert draws.state() == [(0, 0)]


def test_in_place_writes_into_the_input():
    x = torch.ones(50, 50)
    with draws_by_sample(KEY, 0, range(50)):
        y = F.dropout(x, 0.5, inplace=True)
    assert y is x
    assert (x == 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradient_has_the_mask_of_the_forward(dtype):
    x = torch.randn(6, 9, dtype=dtype, requires_grad=True)
    with draws_by_sample(KEY, 0, range(6)):
        y = F.dropout(x, 0.3)
    y.sum().backward()
    assert y.dtype == dtype
    assert x.grad is not None
    assert torch.equal(x.grad == 0, y == 0)
    torch.testing.assert_close(x.grad[y != 0], torch.full_like(x.grad[y != 0], 1 / 0.7))


def test_double_backward():
    words, ids = torch.tensor(Stream(KEY, "d").words), torch.arange(3)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: drop_rows(x, words, ids, 0, 0, 0.5).pow(3), (x,))


# ---- activation checkpointing ------------------------------------------------------------------


class Net(nn.Module):
    """Blocks that draw before, in and after what is run again; one checkpoint in another."""

    def __init__(self, checkpointed: str):
        super().__init__()
        self.linear, self.checkpointed = nn.Linear(WIDTH, WIDTH), checkpointed

    def run(self, part, x):
        if self.checkpointed == "no":
            return part(x)
        return checkpoint(part, x, use_reentrant=False, preserve_rng_state=False)

    def part(self, x):
        x = F.dropout(torch.tanh(self.linear(F.dropout(x, 0.3))), 0.4)
        with save_on_cpu() if self.checkpointed == "among other hooks" else torch.enable_grad():
            return x * torch.rand_like(x)

    def nested(self, x):
        return self.run(self.part, F.dropout(x, 0.1)) * torch.rand([])

    def attention(self, x):
        value = self.linear(x)[:, None]
        return F.scaled_dot_product_attention(value, value, value, dropout_p=0.4)[:, 0]

    def forward(self, x):
        x = F.dropout(x, 0.2)
        for part in (self.part, self.nested, self.attention, self.part):
            x = F.dropout(self.run(part, x), 0.1)
        return x


def gradients(checkpointed: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = Net(checkpointed)
    xs = [rows().requires_grad_(), rows().requires_grad_()]
    losses = []
    for step, x in enumerate(xs):  # two forwards before either backward, as in a pipeline
        with draws_by_sample(KEY, step, range(ROWS)):
            losses.append(net(x).square().sum())
    for loss in losses:
        loss.backward()
    return [each.grad for each in (*xs, *net.parameters()) if each.grad is not None]


@pytest.mark.parametrize("checkpointed", ["yes", "among other hooks"])
def test_what_runs_again_draws_the_same(checkpointed):
    expected = gradients("no")
    assert len(expected) == 4
    for a, b in zip(expected, gradients(checkpointed), strict=True):
        assert torch.equal(a, b)


def test_reentrant_checkpointing_is_refused():
    x = rows().requires_grad_()
    with draws_by_sample(KEY, 0, range(ROWS)):
        with pytest.raises(UnsupportedOperation, match="use_reentrant=False"):
            checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=True)
        with torch.no_grad():  # draws of a mask, say
            torch.rand(ROWS)


def test_errors():
    with pytest.raises(BadInput, match="0 or more"), draws_by_sample(KEY, 0, [-1]):
        pass
    with draws_by_sample(KEY, 0, [0]), pytest.raises(BadInput, match="between 0 and 1"):
        F.dropout(torch.ones(1, 2), 1.5)


def test_after_the_context_draws_are_torchs():
    with pytest.raises(RuntimeError, match="inside"), draws_by_sample(KEY, 0, [0]):
        raise RuntimeError("inside")
    torch.manual_seed(3)
    first = F.dropout(torch.ones(4, 4))
    torch.manual_seed(3)
    assert torch.equal(first, F.dropout(torch.ones(4, 4)))


# ---- fused kernels -----------------------------------------------------------------------------


def check_one_kernel(device: str, dtype: torch.dtype, p: float) -> None:
    x = torch.randn(3, 500, device=device).to(dtype)
    words, ids = torch.tensor(BatchDraws(KEY, 2, [4, 5, 6]).words(70)), torch.tensor([4, 5, 6])
    with using_backend("triton"):
        found = drop_rows(x, words, ids, 0, 0, p)
    with using_backend("reference"):
        assert torch.equal(found, drop_rows(x, words, ids, 0, 0, p))


@pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
@interpreted
def test_one_kernel_has_the_bits_of_two(p):
    check_one_kernel("cpu", torch.float32, p)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_kernel_has_the_bits_of_two_on_a_gpu(dtype):
    check_one_kernel("cuda", dtype, 0.1)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_on_a_gpu(dtype, is_masked):
    """Fused kernels, forward and backward: as one sample at a time, at any ids."""
    torch.manual_seed(0)
    x = torch.randn(6, 4, 64, 32, device="cuda", dtype=dtype)
    mask = torch.randn(6, 1, 64, 64, device="cuda", dtype=dtype) if is_masked else None
    ids = [3, 4, 5, 11, 12, 40]

    def run(rows: list[int]) -> tuple[Tensor, Tensor]:
        own = x[rows].clone().requires_grad_()
        with draws_by_sample(KEY, 0, [ids[row] for row in rows]):
            y = F.scaled_dot_product_attention(
                own, own, own, None if mask is None else mask[rows], dropout_p=0.3
            )
        y.square().sum().backward()
        assert own.grad is not None
        return y.detach(), own.grad

    whole = run(list(range(6)))
    for rows in ([0], [1, 2], [5], [2, 3]):
        for found, expected in zip(run(rows), whole, strict=True):
            torch.testing.assert_close(found, expected[rows], rtol=2e-2, atol=2e-2)
    plain = F.scaled_dot_product_attention(x, x, x, mask)
    assert (whole[0] - plain).abs().max() > 0.1


@needs_cuda
def test_attention_keeps_no_weights_on_a_gpu():
    x = torch.randn(4, 8, 4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with draws_by_sample(KEY, 0, range(4)):
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.1, is_causal=True).sum().backward()
    weights = 4 * 8 * 4096**2 * 2
    assert torch.cuda.max_memory_allocated() - before < weights / 4


# The others are modules, or have a generator, that are made on the CPU.
ON_GPU = [
    name
    for name in FUNCTIONS
    if not M.get(name)
    and name not in ("lstm", "attention weights", "encoder layer")
    and "generator" not in name
]


@needs_cuda
@pytest.mark.parametrize("name", ON_GPU)
def test_draws_on_a_gpu(name):
    x = rows().cuda()

    def drawn(ids: range) -> Tensor:
        with torch.device("cuda"), draws_by_sample(KEY, 1, ids):
            return FUNCTIONS[name](x[list(ids)])

    whole = drawn(range(ROWS))
    parts = [drawn(range(i, i + 2)) for i in range(0, ROWS, 2)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)


def test_generators_of_a_device_that_was_not_there_before():
    """CUDA begins when it is first used, by a compiler for one, in the middle of a pass."""
    host = torch.default_generator.get_state()
    assert are_equal_states([host], [host, (7, 0)])
    assert not are_equal_states([host], [host, (7, 4)])
    assert not are_equal_states([host, (7, 0)], [host, (7, 4)])
    assert not are_equal_states([host, (7, 0)], [host, (8, 0)])
