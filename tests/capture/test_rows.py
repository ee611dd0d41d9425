"""Rows that lie where values put them, against the loop over samples; what is not followed."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.common import CASES as ORDINARY
from tests.capture.common import make as make_ordinary
from tests.capture.routed import (
    CASES,
    TOKENS,
    WIDTH,
    Checkpointed,
    LayerDrop,
    floats,
    make,
    squares,
)
from tests.harness.oracle import clipped_sum, per_sample_norms
from unison.capture import learn_rows
from unison.capture.rows import RowTrace
from unison.clip import MODES
from unison.clip.functional import clipped_gradients, learn
from unison.errors import UnsupportedOperation
from unison.ops import Layout
from unison.ops.records import check_nobodys, rows_of, sum_to

ALL_MODES = [*MODES, "auto"]
ALWAYS = ("masked experts", "packed lstm")  # in every mode

pytestmark = pytest.mark.filterwarnings("ignore:no rule for", "ignore:There is a performance drop")


def check(model, batch, *, mode="auto", loss=squares, oracle=None, tolerance=1e-6):
    """Compare norms and clipped sums with the loop over samples."""
    oracle = model if oracle is None else oracle
    norms = per_sample_norms(oracle, loss, batch)
    max_norm = float(norms.median()) or 1.0  # some samples are clipped and some are not
    expected = clipped_sum(oracle, loss, batch, max_norm)
    found = clipped_gradients(model, loss, batch, max_norm=max_norm, mode=mode)
    torch.testing.assert_close(
        found.norms, norms, rtol=tolerance, atol=tolerance * float(norms.max())
    )
    total = sum(value.norm() ** 2 for value in expected.values()) ** 0.5
    for name, value in expected.items():
        assert (found.sums[name].double() - value).norm() <= tolerance * total, name


@pytest.mark.parametrize("name", CASES)
def test_samples_of_rows_are_followed(name):
    model, batch = make(name, 4)
    check(model, batch)
    assert learn(model, squares, batch).axes.is_traced
    for size in (5, 1):
        check(model, make(name, size)[1], mode="ghost")


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("name", ALWAYS)
def test_in_every_mode(name, mode):
    model, batch = make(name, 5)
    check(model, batch, mode=mode)


@pytest.mark.full
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("name", CASES)
def test_everywhere(name, mode):
    for size in (3, 5, 1, 2):
        model, batch = make(name, size)
        check(model, batch, mode=mode)


def test_an_even_first_batch_says_nothing_of_the_next():
    model = make("masked experts", 1)[0]
    even = floats(3, WIDTH)(4)
    even[:, :, 0] = torch.tensor([-1.0, 0.0, 1.0])  # each sample has one token for each expert
    uneven = floats(3, WIDTH)(4)
    uneven[:, :, 0] = torch.tensor([[-1.0] * 3, [0.0] * 3, [1.0] * 3, [-1.0, 0.0, 1.0]])
    for batch in (even, uneven):
        for mode in ALL_MODES:
            check(model, batch, mode=mode)


def test_an_expert_without_tokens_has_no_gradient():
    model, batch = make("masked experts", 3)
    batch[:, :, 0] = 1.0
    check(model, batch)
    found = clipped_gradients(model, squares, batch, max_norm=1.0)
    assert not found.sums["experts.0.weight"].any()
    assert found.sums["experts.2.weight"].any()


def test_layers_that_were_left_out_when_it_was_learned():
    model, batch = make("left out layers", 4)
    for seed in range(6):
        model.seed = seed
        check(model, batch, mode="flash_fuse")
    assert isinstance(model, LayerDrop)


# --- what is not followed ------------------------------------------------------------------------


class Between(nn.Module):
    """Something done to rows that were selected, between two layers."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        mask = torch.ones(len(x), dtype=torch.bool) & (x[:, 0, 0] < 10)  # all of them
        out[mask] = self.function(out[mask])
        return self.second(out)


REFUSED = {
    "a mean over rows": (lambda x: x - x.mean(0), "second.weight.*aten::mean"),
    "unique": (lambda x: x * torch.unique(x)[:1], "second.weight.*aten::_unique2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_of_unknown_samples_are_refused(name):
    function, message = REFUSED[name]
    with pytest.raises(UnsupportedOperation, match=message):
        clipped_gradients(Between(function), squares, floats(2, WIDTH)(4).float(), max_norm=1.0)


def test_rows_that_went_through_numpy_are_refused():
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 2).double()

        def forward(self, x):
            values = x.detach().numpy()
            order = np.argsort(values[:, 0, 0])
            made = self.layer(torch.from_numpy(values[order].copy()))
            return made[torch.from_numpy(np.argsort(order))]

    with pytest.raises(UnsupportedOperation, match=r"layer.weight.*Do not take values"):
        clipped_gradients(Read(), squares, floats(2, WIDTH)(4), max_norm=1.0)


def test_reentrant_checkpointing_is_refused():
    model = Checkpointed(is_reentrant=True).double()
    with pytest.raises(UnsupportedOperation, match="use_reentrant=False"):
        clipped_gradients(model, squares, floats(TOKENS, WIDTH)(4), max_norm=1.0)


def test_a_gradient_on_rows_of_nobody_is_refused():
    layout = Layout(2, 0, torch.tensor([[0], [-1], [1]]))
    check_nobodys(layout, torch.tensor([[1.0], [0.0], [1.0]]))
    with pytest.raises(UnsupportedOperation, match="zeros_like"):
        check_nobodys(layout, torch.ones(3, 1))


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_models_are_not_traced(name):
    model, batch, loss = make_ordinary(name, 4)
    assert not learn_rows(model, loss, batch).is_traced


def test_another_number_of_rows_than_was_learned_is_refused():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 2)

        def forward(self, x):
            if bool((x > 9).any()):  # read, and nothing else told of it
                x = torch.cat([x, x], dim=1)
            return self.layer(x.flatten(0, 1)).view(len(x), -1)

    model, batch = Branching(), floats(2, WIDTH)(4).float()
    with pytest.raises(UnsupportedOperation, match="samples mix"):
        clipped_gradients(model, squares, batch, max_norm=1.0)
    clipped_gradients(model, squares, batch, max_norm=1.0, is_checked=False)
    batch[0, 0, 0] = 10.0
    with pytest.raises(UnsupportedOperation, match=r"layer.weight.* rows for 4 samples"):
        clipped_gradients(model, squares, batch, max_norm=1.0, is_checked=False)


# --- layouts and traces --------------------------------------------------------------------------


def test_rows_with_an_index_are_gathered_by_sample():
    layout = Layout(3, 0, torch.tensor([[2], [0], [2], [-1], [0]]))
    value = torch.arange(10.0).view(5, 2)
    rows = rows_of(layout, value)
    assert rows.tolist() == [
        [[2.0, 3.0], [8.0, 9.0]],
        [[0.0, 0.0], [0.0, 0.0]],
        [[0.0, 1.0], [4.0, 5.0]],
    ]
    assert sum_to(layout, value, (2,)).tolist() == [[10.0, 12.0], [0.0, 0.0], [4.0, 6.0]]
    assert sum_to(layout, value, (1,)).tolist() == [[22.0], [0.0], [10.0]]


def _written(x: Tensor) -> Tensor:
    out = torch.zeros(3, 3, 2)
    out[:, 1:] = x
    return out


def _seen_later(x: Tensor) -> Tensor:
    out = torch.zeros(3, 2, 2)
    view = out[1:]
    out.copy_(x)
    return view.select(1, 0)


N, M = -1, -2  # nobody's, mixed
TRACED = {
    "flattened": (lambda x: x.view(-1, 2), [0, 0, 1, 1, 2, 2]),
    "time first": (lambda x: x.transpose(0, 1).reshape(-1, 2), [0, 1, 2, 0, 1, 2]),
    "flip": (lambda x: x.flip(0), [2, 1, 0]),
    "roll": (lambda x: x.roll(1, 0), [2, 0, 1]),
    "cat": (lambda x: torch.cat([x, -x]), [0, 1, 2, 0, 1, 2]),
    "cat with a constant": (lambda x: torch.cat([x, torch.ones(1, 2, 2)]), [0, 1, 2, N]),
    "cat after nothing": (lambda x: torch.cat([torch.tensor([]), x], -2), [0, 1, 2]),
    "stack": (lambda x: torch.stack([x[2], x[0]]), [2, 0]),
    "mask": (lambda x: x[torch.tensor([True, False, True])], [0, 2]),
    "index": (lambda x: x[torch.tensor([1, 1, 0])], [1, 1, 0]),
    "pad": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)), [N, 0, 1, 2, N]),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), [0, 0, 1, 1, 2, 2]),
    "repeat": (lambda x: x.repeat(2, 1, 1), [0, 1, 2, 0, 1, 2]),
    "linear": (lambda x: F.linear(x, torch.ones(5, 2), torch.ones(5)), [0, 1, 2]),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), [0, 1, 2]),
    "sorted": (lambda x: x[(-x[:, 0, 0]).sort().indices], None),
    "softmax": (lambda x: x.softmax(-1), [0, 1, 2]),
    "softmax over samples": (lambda x: x.softmax(0), [M]),
    "sum over samples": (lambda x: x.sum(0), [M]),
    "cumsum": (lambda x: x.cumsum(0), [M]),
    "two samples": (lambda x: x + x.flip(0), [M, 1, M]),
    "an integer of others": (lambda x: x * x[:, :1, :1].flip(0).long(), [0, 1, 2]),
    "index_add": (
        lambda x: torch.zeros(4, 2, 2).index_add(0, torch.tensor([3, 0, 1]), x),
        [1, 2, N, 0],
    ),
    "index_add of two": (
        lambda x: torch.zeros(2, 2, 2).index_add(0, torch.tensor([0, 0, 1]), x),
        [M],
    ),
    "written": (_written, [N, 0, 0, N, 1, 1, N, 2, 2]),
    "seen later": (_seen_later, [1, 2]),
    "embedding": (lambda x: F.embedding((x[:, :, 0] > 0).long(), torch.ones(2, 3)), [0, 1, 2]),
    "filled with a mean": (lambda x: x.index_fill(1, torch.tensor([0]), x.mean()), [M] * 3),
    "a norm's weight of all": (lambda x: F.layer_norm(x, (2,), x.mean((0, 1))), [M] * 3),
    "a batch norm's weight of all": (
        lambda x: F.batch_norm(x, torch.zeros(2), torch.ones(2), x.mean((0, 2))),
        [M] * 3,
    ),
    "unknown": (lambda x: torch.linalg.qr(x[:, 0])[0], [M]),
}


@pytest.mark.parametrize("name", TRACED)
def test_traces(name):
    function, expected = TRACED[name]
    x = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(1))
    trace = RowTrace(3)
    trace.begin(x, 0)
    with trace:
        rows = trace.find(function(x))
    assert rows is not None
    if expected is None:
        expected = (-x[:, 0, 0]).argsort().tolist()
        assert rows.is_by_value
    assert rows.ids.flatten().tolist() == expected


def _square(x: Tensor) -> Tensor:  # [..., n, n], that can be inverted
    return x @ x.mT + torch.eye(x.shape[-2])


# Functions of samples [3, 4, 6] whose outputs are followed, although they have rules of their own.
FOLLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "logsigmoid": F.logsigmoid,
    "hardswish": F.hardswish,
    "hardswish in place": lambda x: F.hardswish(x.clone(), True),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.3])),
    "polar": lambda x: torch.polar(x.abs(), x).real,
    "complex": lambda x: torch.complex(x, x).abs(),
    "fft": lambda x: torch.fft.fft(x, dim=-1).real,
    "stft": lambda x: torch.stft(x.flatten(1), 4, return_complex=True, window=torch.ones(4)).abs(),
    "rotary": lambda x: torch.view_as_real(torch.view_as_complex(x.view(3, 4, 3, 2)) * 1j),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([0]), 0.0),
    "searchsorted": lambda x: torch.searchsorted(torch.arange(-2.0, 2.0), x),
    "fake quantization": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "instance norm": F.instance_norm,
    "mse": lambda x: F.mse_loss(x, x * 2, reduction="none"),
    "mse of each": lambda x: torch.stack([F.mse_loss(row, row * 2) for row in x]),
    "smooth l1": lambda x: F.smooth_l1_loss(x, x * 2, reduction="none"),
    "huber": lambda x: F.huber_loss(x, x * 2, reduction="none"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid(), reduction="none"),
    "soft margin": lambda x: F.soft_margin_loss(x, x.sign(), reduction="none"),
    "nll": lambda x: F.cross_entropy(x[:, 0], torch.zeros(3).long(), reduction="none"),
    "nll of tokens": lambda x: F.cross_entropy(x, (x[:, 0] > 0).long(), reduction="none"),
    "nll of one": lambda x: torch.stack([F.cross_entropy(row, row[:, 0].long() % 2) for row in x]),
    "multi margin": lambda x: F.multi_margin_loss(x[:, 0], torch.zeros(3).long(), reduction="none"),
    "ctc": lambda x: F.ctc_loss(
        x.log_softmax(-1).transpose(0, 1),
        torch.ones(3, 2).long(),
        torch.full((3,), 4),
        torch.full((3,), 2),
        reduction="none",
    ),
    "rot90": lambda x: torch.rot90(x, 1, [1, 2]),
    "rot90 over samples": lambda x: torch.rot90(x[:, :3], 1, [0, 1]),
    "diag_embed": torch.diag_embed,
    "trace": lambda x: torch.stack([row.trace() for row in x]),
    "histc": lambda x: torch.stack([row.histc(3) for row in x]),
    "bincount": lambda x: torch.stack(
        [torch.bincount((row[0] > 0).long(), row[1], minlength=2) for row in x]
    ),
    "pad by reflection": lambda x: F.pad(x.flatten(1), (2, 2), mode="reflect"),
    "pad by repeating": lambda x: F.pad(x, (2, 2), mode="replicate"),
    "bicubic": lambda x: F.interpolate(
        x[:, None], scale_factor=0.5, mode="bicubic", antialias=True
    ),
    "unpooled": lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2),
    "inverse": lambda x: torch.linalg.inv(_square(x)),
    "solved": lambda x: torch.linalg.solve(_square(x), x),
    "cholesky": lambda x: torch.linalg.cholesky(_square(x)),
    "determinant": lambda x: torch.linalg.slogdet(_square(x))[1],
    "eigenvalues": lambda x: torch.linalg.eigvalsh(_square(x)),
    "singular values": torch.linalg.svdvals,
    "exponential": lambda x: torch.matrix_exp(_square(x)),
    "qr": lambda x: torch.linalg.qr(x)[0],
    "triangular": lambda x: torch.linalg.solve_triangular(_square(x).tril(), x, upper=False),
    "cross": lambda x: torch.linalg.cross(x[..., :3], x[..., 3:]),
    "strided": lambda x: x.mT.contiguous().mT.as_strided((3, 2), (24, 1)),
}


@pytest.mark.parametrize("name", FOLLOWED)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_follows(name):
    """Each element is that sample's on which it depends, as is seen when one is changed."""
    function = FOLLOWED[name]
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
    trace = RowTrace(3)
    trace.begin(x, 0)
    with torch.no_grad(), trace:
        made = function(x)
    rows = trace.find(made)
    assert rows is not None
    assert rows.lost_by is None
    assert set(rows.ids.flatten().tolist()) - {N} == {0, 1, 2}
    whose = rows.ids.expand(made.shape)
    for sample in range(3):
        other = x.clone()
        other[sample] = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
        has_changed = ~torch.isclose(function(other), made, rtol=1e-3, atol=1e-5)
        assert bool(has_changed.any())
        assert bool((whose[has_changed] == sample).all())


class _Handed(nn.Module):
    """Rows picked by values, and one value for every sample in several spellings."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.places, self.layer = nn.Parameter(torch.randn(1, 3, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.spelling = spelling

    def forward(self, x: Tensor) -> Tensor:
        is_large = x.abs().sum(-1) > 3
        picked = torch.zeros_like(x)
        picked[is_large] = self.layer(x[is_large])
        x = x + picked
        match self.spelling:
            case "expand":
                return x + self.places.expand(len(x), -1, -1)
            case "expand_as":
                return x * self.places.expand_as(x)
            case "broadcast_to":
                return x - torch.broadcast_to(self.places, x.shape).contiguous()
            case "repeat":
                return x + self.places.repeat(len(x), 1, 1)
            case "cat":
                return torch.cat([self.places[:, :1].expand(len(x), -1, -1), x], 1)
            case "nobody's":
                return x + (torch.rand(x.shape) < 2).float() * self.places.expand(len(x), -1, -1)
            case _:
                queries = self.places.expand(len(x), -1, -1)
                return F.scaled_dot_product_attention(queries, x, x)


@pytest.mark.parametrize(
    "spelling", ["expand", "expand_as", "broadcast_to", "repeat", "cat", "attention", "nobody's"]
)
def test_one_value_for_every_sample_that_is_followed(spelling):
    torch.manual_seed(0)
    model, batch = _Handed(spelling), floats(3, WIDTH)(4).float()
    assert learn_rows(model, squares, batch).is_traced
    check(model, batch)


# --- transformers' default experts ---------------------------------------------------------------

_SIZES = {
    **{"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32},
    **{"num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_LATENT = {
    **{"n_routed_experts": 4, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4},
    **{"v_head_dim": 8, "qk_nope_head_dim": 8},
}
EXPERTS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
    },
    "Olmoe": {"num_experts": 4},
    "DeepseekV3": _LATENT,
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
}


def token_losses(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]  # with transformers' default cache
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1).mean(1)


def mixture(name: str, implementation: str | None = None) -> tuple[nn.Module, nn.Module]:
    """Return a model, and one in float64 whose experts are computed one by one."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_SIZES, **EXPERTS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.1 * torch.randn_like(each))
    oracle = copy.deepcopy(model).double()  # torch's grouped product has no float64
    oracle.set_experts_implementation("eager")
    if implementation is not None:
        model.set_experts_implementation(implementation)
    return model.train(), oracle.train()


@pytest.mark.filterwarnings("ignore:.*RoPE")
@pytest.mark.parametrize(
    "mode", ["auto", "ghost", pytest.param("recompute_bk", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[] if each == "Mixtral" else [pytest.mark.full]) for each in EXPERTS],
)
def test_default_experts_of_transformers(name, mode):
    model, oracle = mixture(name)
    for size in (3, 1):
        ids = torch.randint(0, 32, (size, 7), generator=torch.Generator().manual_seed(size))
        check(model, ids, mode=mode, loss=token_losses, oracle=oracle)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[] if each == "Mixtral" else [pytest.mark.full])
        for each in ("Mixtral", "GptOss")
    ],
)
def test_experts_one_by_one(name):
    model, oracle = mixture(name, "eager")
    ids = torch.randint(0, 32, (3, 7), generator=torch.Generator().manual_seed(1))
    check(model, ids, loss=token_losses, oracle=oracle)


@pytest.mark.full
def test_default_experts_with_checkpointing():
    model, oracle = mixture("Mixtral")
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    ids = torch.randint(0, 32, (3, 7), generator=torch.Generator().manual_seed(1))
    check(model, ids, loss=token_losses, oracle=oracle)
