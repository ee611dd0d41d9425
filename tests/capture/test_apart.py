"""Samples that mix are found, however they do; samples that do not are let through."""

import contextlib
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from unison.capture import check_samples_apart, examine, learn_axes, probe_rows, state_kept
from unison.capture.probes import NUM_PROBED, widened
from unison.errors import UnsupportedOperation

WIDTH = 6


def squares(model: nn.Module, x: Tensor) -> Tensor:  # [batch]
    return model(x).square().flatten(1).sum(1)


def rows(size: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, WIDTH, generator=generator).to(dtype)


class Net(nn.Module):
    """Two layers with something between them, or before them."""

    def __init__(self, between=lambda h: h, before=lambda x: x, *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 3)
        self.between, self.before = between, before
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        h = self.dropout(self.up(self.before(x)))
        return self.down(self.between(h))


class Stateful(nn.Module):
    """Keeps something of its batches."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.how = nn.Linear(WIDTH, 3), how
        self.center, self.past, self.calls = None, [], 0
        self.cache = Cache()

    def forward(self, x):
        h = self.up(x)
        self.calls += 1
        match self.how:
            case "moving mean":
                mean = h.detach().mean(0)
                self.center = mean if self.center is None else 0.9 * self.center + 0.1 * mean
                return h - self.center
            case "first batch":
                self.center = h.detach().mean(0) if self.center is None else self.center
                return h - self.center
            case "past activations":
                past = self.past[-1] if self.past else torch.zeros_like(h)
                self.past.append(h.detach())
                return h + past.mean()
            case "object":
                return self.cache.shifted(h)
            case "number":
                scale, self.center = self.center or 1.0, float(h.detach().abs().max())
                return h / scale
            case "counts calls":
                return h
            case "anneals":
                return h / self.calls
            case "keeps and does not use":
                self.center = h
                return h
        raise AssertionError


class Cache:
    def __init__(self) -> None:
        self.inner = {"last": []}

    def shifted(self, h: Tensor) -> Tensor:
        last = self.inner["last"]
        last.append(h.detach().mean(0))
        return h - sum(last) / len(last)


def no_grad(function):
    def run(h):
        with torch.no_grad():
            value = function(h)
        return h * 1.0 + value

    return run


def sometimes(h):
    return h - h.mean(0) if float(h.detach().max()) > 50 else h


def frozen_norm(*, dropout: float) -> nn.Module:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8)).requires_grad_(False)
    return nn.Sequential(backbone, nn.Dropout(dropout), nn.Linear(8, 3))


def _neighbours(h):
    near = torch.cdist(h, h).topk(2, largest=False).indices[:, 1]
    return h + 0.1 * h[near].detach()


def _quantised(h):
    scale = h.detach().abs().max() / 127
    return h + ((h / scale).round() * scale - h).detach()


def _quantised_by_row(h):
    scale = h.detach().abs().amax(1, keepdim=True) / 127
    return h + ((h / scale).round() * scale - h).detach()


def _only_many(h):
    return h - h.mean(0) if len(h) > 8 else h


def _experts_choose(h):
    taken = h[:, 0].topk(min(len(h), 4)).indices
    return h + torch.zeros_like(h).index_copy(0, taken, h[taken])


def _capacity(x):
    wants = x[:, 0] > 0.5
    fits = wants & (wants.cumsum(0) <= 5)
    return torch.where(fits[:, None], x, -x)


def _only_many_gradients(h):
    return h - h.mean(0) + h.mean(0).detach() if len(h) > 8 else h


MIXED = {
    "mean": lambda: Net(lambda h: h - h.mean(0)),
    "mean, detached": lambda: Net(lambda h: h - h.detach().mean(0)),
    "mean of the gradient alone": lambda: Net(lambda h: h - h.mean(0) + h.mean(0).detach()),
    "max": lambda: Net(before=lambda x: x / x.abs().max()),
    "max of the activations, without a gradient": lambda: Net(no_grad(lambda h: h.abs().max())),
    "small": lambda: Net(lambda h: h + 1e-4 * h.detach().mean()),
    "variance": lambda: Net(before=lambda x: x / x.var(0)),
    "median": lambda: Net(before=lambda x: x - x.median(0).values),
    "quantile": lambda: Net(before=lambda x: x.clamp(max=x.quantile(0.9))),
    "sorted": lambda: Net(lambda h: h.sort(0).values),
    "rank": lambda: Net(no_grad(lambda h: 0.1 * h.argsort(0).argsort(0))),
    "softmax over samples": lambda: Net(lambda h: h.softmax(0)),
    "attention over samples": lambda: Net(lambda h: (h @ h.T).softmax(1) @ h),
    "neighbours": lambda: Net(_neighbours),
    "rolled": lambda: Net(lambda h: h + h.roll(1, 0)),
    "rolled inside": lambda: Net(before=lambda x: x.roll(1, 0)),
    "cumulative": lambda: Net(lambda h: h.cumsum(0)),
    "through dropout": lambda: Net(lambda h: h - h.mean(0), dropout=0.3),
    "inputs, through dropout": lambda: Net(before=lambda x: x - x.mean(0), dropout=0.3),
    "max, through dropout": lambda: Net(before=lambda x: x / x.abs().max(), dropout=0.3),
    "scale of quantisation": lambda: Net(_quantised),
    "a branch": lambda: Net(sometimes),
    "a python number": lambda: Net(before=lambda x: x * (1 + float(x.mean()))),
    "numpy": lambda: Net(before=lambda x: x - torch.from_numpy(x.numpy().mean(0))),
    "duplicates": lambda: Net(before=lambda x: x * (torch.cdist(x, x) == 0).sum(1, keepdim=True)),
    "permuted": lambda: Net(lambda h: 0.5 * h + 0.5 * h[torch.randperm(len(h))]),
    "mixed at times": lambda: Net(lambda h: h if random.random() < 0.5 else h - h.mean(0)),
    "size of the batch": lambda: Net(before=lambda x: x / len(x)),
    "size of the batch, dropout": lambda: Net(before=lambda x: x / len(x), dropout=0.1),
    "size of the batch, gradient": lambda: Net(lambda h: h / len(h) + (h - h / len(h)).detach()),
    "more than many rows": lambda: Net(before=lambda x: x / 2 if len(x) > 4 else x),
    "many rows alone": lambda: Net(_only_many),
    "many rows alone, gradient": lambda: Net(_only_many_gradients),
    "many rows, of which experts choose": lambda: Net(_experts_choose),
    "many rows, experts with a capacity": lambda: Net(before=_capacity),
    "frozen batch norm": lambda: frozen_norm(dropout=0.0),
    "frozen batch norm, dropout": lambda: frozen_norm(dropout=0.1),
    "batch norm of inputs": lambda: nn.Sequential(
        nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False), nn.Linear(WIDTH, 3)
    ),
}


def checked(model: nn.Module, x: Tensor, run=squares, **settings):
    with state_kept(model, x) as state:
        axes = learn_axes(model, run, probe_rows(x), state=state)
        return check_samples_apart(model, run, x, axes, state=state, whole=True, **settings)


@pytest.mark.parametrize("size", [1, 5, 12])
@pytest.mark.parametrize("name", MIXED)
def test_samples_that_mix_are_refused(name, size):
    size = 12 if "many" in name else size
    with pytest.raises(
        UnsupportedOperation,
        match=r"samples mix|in another order|a sum or a mean over the batch|another path",
    ):
        checked(MIXED[name](), rows(size))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_batch_norm_has_its_remedy(dropout):
    with pytest.raises(UnsupportedOperation, match=r"\(here '0\.1'\): use GroupNorm instead, or"):
        checked(frozen_norm(dropout=dropout), rows())


@pytest.mark.parametrize("size", [12, 64])
@pytest.mark.parametrize("wanting", ["all", "some"])
def test_experts_with_a_capacity_are_refused_whoever_wants_them(wanting, size):
    """A row feels only rows before it; where all want an expert, rows of the batch tell nothing."""
    x = rows(size)
    if wanting == "all":
        x[:, 0] = 1 + x[:, 0].abs()
    with pytest.raises(UnsupportedOperation, match="samples mix: the module's outputs"):
        checked(Net(before=_capacity), x)


def test_later_checks_take_turns_at_the_size_of_the_batch():
    """Light ones: some of them find what the first one does."""
    model, x = Net(before=_capacity), rows(12)
    axes = learn_axes(model, squares, probe_rows(x))
    found = [
        examine(model, squares, x, axes, whole=True, is_light=True, seed=seed).mixing
        for seed in range(1, 5)
    ]
    assert any(found)


@pytest.mark.parametrize("is_light", [False, True])
def test_what_is_done_with_many_rows_only_is_found(is_light):
    model, x = MIXED["more than many rows"](), rows(12)
    axes = learn_axes(model, squares, probe_rows(x))
    report = examine(model, squares, x, axes, whole=True, is_light=is_light, seed=1)
    assert "changes with the number of samples beside it (12 or 3)" in str(report.mixing)


def test_gradients_that_only_many_rows_send_to_others_are_found():
    with pytest.raises(UnsupportedOperation, match="losses of others give it a gradient"):
        checked(MIXED["many rows alone, gradient"](), rows(12))


class Rounded(nn.Module):
    """Rounds by what stands beside a row, as kernels do that add up in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        last_place = torch.finfo(x.dtype).eps * (x[-1, 0] > x[0, 0])
        return self.linear(x) * (1 + last_place)


def test_what_is_known_to_round_is_compared_in_float64_at_once():
    model, x = Rounded(), rows()
    axes = learn_axes(model, squares, x)
    counts = []
    for settings in ({}, {"is_light": True}, {"is_light": True, "is_rounded": True}):
        calls: list[int] = []
        handle = model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        report = examine(model, squares, x, axes, **settings)
        handle.remove()
        assert report.mixing is None
        assert report.is_rounded
        counts.append(len(calls))
    assert counts[2] < counts[1] < counts[0]


class OfItsNumber(nn.Module):
    """Multiplies by a number that is nearly the same for any number of rows."""

    def __init__(self, difference: float) -> None:
        super().__init__()
        self.linear, self.difference = nn.Linear(WIDTH, 3), difference

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 + self.difference * len(x))


@pytest.mark.parametrize("difference", [0.0, 1e-4])
def test_narrow_dtypes_are_compared_in_float32_without_gradients(difference):
    """With them, or in float64, a first step took three times the memory of all others."""
    model, x = OfItsNumber(difference).bfloat16(), rows().bfloat16()
    axes = learn_axes(model, squares, x)
    passes: list[tuple[torch.dtype, bool]] = []
    model.register_forward_hook(
        lambda *_: passes.append((model.linear.weight.dtype, torch.is_grad_enabled()))
    )
    mixing = examine(model, squares, x, axes, whole=True).mixing
    assert ("changes with the number of samples" in str(mixing)) == bool(difference)
    assert (torch.float32, False) in passes
    assert {dtype for dtype, has_gradients in passes if has_gradients} == {torch.bfloat16}


class Attention(nn.Module):
    """Long enough for flash kernels to add the gradients of queries up atomically."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.into(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)).mean(1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_attention_on_a_gpu_needs_no_float64():
    model = Attention().to("cuda", torch.bfloat16)
    x = torch.randn(4, 640, 128, device="cuda", dtype=torch.bfloat16)
    before = torch.get_deterministic_debug_mode(), torch.backends.cuda.cudnn_sdp_enabled()
    report = examine(model, squares, x, learn_axes(model, squares, x))
    assert report.mixing is None
    assert not report.is_rounded
    after = torch.get_deterministic_debug_mode(), torch.backends.cuda.cudnn_sdp_enabled()
    assert after == before


class MixedOnTheWayBack(torch.autograd.Function):
    """Gives each row the gradient of the one before it, too."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g + g.roll(1, 0)


@pytest.mark.parametrize("place", [0, 1])
def test_every_use_of_a_parameter_is_looked_at(place: int):
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            uses = [super(Twice, self).forward(each) for each in (x, x.flip(1))]
            uses[place] = MixedOnTheWayBack.apply(uses[place])
            return uses[0] + 2 * uses[1]

    with pytest.raises(UnsupportedOperation, match="samples mix before 'weight'"):
        checked(Twice(WIDTH, 3, bias=False), rows())


def test_mixing_that_another_number_would_bring_is_found():
    class Seldom(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0) if torch.rand(()) > 0.5 else x)

    model = Seldom(WIDTH, 3)
    torch.manual_seed(next(s for s in range(9) if torch.manual_seed(s) and torch.rand(()) < 0.5))
    with pytest.raises(UnsupportedOperation, match="samples mix"):
        checked(model, rows())


def test_repeated_rows_are_made_others():
    with pytest.raises(UnsupportedOperation, match="samples mix"):
        checked(MIXED["max"](), rows(1).expand(6, WIDTH))


def test_the_first_row_may_be_the_one_that_gets_something():
    def first(h):
        return torch.cat([h[:1] + h[1:].mean(0), h[1:]])

    def last(h):
        return torch.cat([h[:-1], h[-1:] + h[:1]])

    for between in (first, last):
        with pytest.raises(UnsupportedOperation, match="samples mix"):
            checked(Net(between), rows())


@pytest.mark.parametrize(
    "how", ["moving mean", "first batch", "past activations", "object", "number"]
)
def test_what_remembers_its_batch_is_refused(how):
    with pytest.raises(UnsupportedOperation, match=r"remembers the batch|samples mix"):
        checked(Stateful(how), rows())


@pytest.mark.parametrize("how", ["counts calls", "anneals", "keeps and does not use"])
def test_what_does_not_depend_on_the_batch_may_be_kept(how):
    model = Stateful(how)
    checked(model, rows())
    assert (model.center, model.calls) == (None, 0)  # as it was found


def test_a_gradient_of_the_others_is_found_where_losses_are_linear():
    """It is a constant, whatever the others are."""
    model = nn.Linear(WIDTH, 1)

    def run(model, x):
        h = model(x)[:, 0]
        return h - h.mean() + h.mean().detach()

    with pytest.raises(UnsupportedOperation, match="samples mix before"):
        checked(model, rows(), run)


# ---- what is right -------------------------------------------------------------------------------


class RandomNumbers(nn.Module):
    """Draws from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3)
        self.generators = torch.Generator(), random.Random(3), np.random.default_rng(3)
        self.torch_own, self.own, self.numpy_own = self.generators

    def forward(self, x):
        h = self.up(x) + torch.rand(len(x), 3) * random.random() * np.random.rand()  # noqa: NPY002
        h = h + torch.rand(len(x), 1, generator=self.torch_own)
        return h * self.own.random() * float(self.numpy_own.random())


class Checkpointed(nn.Module):
    """With dropout inside, which must be the same when it runs again."""

    def __init__(self, is_reentrant: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 8), nn.Linear(8, 3), nn.Dropout(0.2)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.LayerNorm(8))
        self.is_reentrant = is_reentrant

    def forward(self, x):
        h = checkpoint(self.block, self.up(x), use_reentrant=self.is_reentrant)
        return self.down(self.dropout(h))


def eval_backbone() -> nn.Module:
    model = frozen_norm(dropout=0.1)
    next(model.children()).eval()
    return model


class Experts(nn.Module):
    """Rows in groups whose sizes depend on the batch: kernels round differently."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        chosen = (x[:, 0] > 0).long()
        h = torch.zeros_like(x)
        for number, expert in enumerate(self.frozen):
            h[chosen == number] = expert(x[chosen == number])
        return self.head(h)


RIGHT = {
    "plain": Net,
    "dropout": lambda: Net(dropout=0.5),
    "layer norm": lambda: Net(nn.LayerNorm(8)),
    "group norm": lambda: Net(nn.GroupNorm(2, 8)),
    "batch norm in evaluation": eval_backbone,
    "scale of quantisation by row": lambda: Net(_quantised_by_row),
    "random numbers": RandomNumbers,
    "checkpointing": Checkpointed,
    "reentrant checkpointing": lambda: Checkpointed(True),
    "logarithm": lambda: Net(before=lambda x: x.abs().log()),
    "overflow": lambda: Net(lambda h: h.exp()),
    "square root": lambda: Net(lambda h: h.abs().sqrt()),
    "experts": Experts,
    "a path of its own": lambda: Net(lambda h: torch.where(h.sum(1, keepdim=True) > 0, h, -h)),
    "spectral norm of a frozen layer": lambda: nn.Sequential(
        spectral_norm(nn.Linear(WIDTH, 4)).requires_grad_(False), nn.Linear(4, 3)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 5, 12])
@pytest.mark.parametrize("name", RIGHT)
def test_samples_that_are_apart_pass(name, size, dtype):
    model = RIGHT[name]().to(dtype)
    parameters = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = {name: dict(vars(each)) for name, each in model.named_modules()}
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    checked(model, rows(size, dtype))
    for key, value in model.state_dict().items():
        assert torch.equal(value, parameters[key]), key
    assert {name: dict(vars(each)) for name, each in model.named_modules()} == attributes
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert np.random.get_state()[1].tolist() == drawn[2]  # noqa: NPY002
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.filterwarnings("ignore:.*mkldnn_matmul")
@pytest.mark.parametrize("name", ["plain", "dropout", "layer norm", "checkpointing"])
@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_half_precision_passes(name, how):
    model, x = RIGHT[name](), rows()
    if how == "bfloat16":
        checked(model.bfloat16(), x.bfloat16())
    else:
        with torch.autocast("cpu", torch.bfloat16):
            checked(model, x)


@pytest.mark.filterwarnings("ignore:.*mkldnn_matmul")
@pytest.mark.parametrize("name", ["mean", "small", "max, through dropout"])
def test_half_precision_hides_nothing(name):
    with pytest.raises(UnsupportedOperation, match="samples mix"):
        checked(MIXED[name]().bfloat16(), rows(dtype=torch.bfloat16))


class Picky(nn.Module):
    """Takes values of one kind only."""

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.up, self.largest = nn.Linear(WIDTH, 3), largest

    def forward(self, x):
        if float(x.abs().max()) > self.largest:
            raise ValueError("such values are not allowed")
        return self.up(x)


def test_values_that_are_not_taken_are_made_milder():
    checked(Picky(3.5), rows(5))


def test_what_takes_no_other_rows_is_refused():
    class Pickier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, 3)

        def forward(self, x):
            if not torch.equal(x, probe_rows(rows())[: len(x)]):
                raise ValueError("other rows")
            return self.up(x)

    with pytest.raises(UnsupportedOperation, match=r"in another order \(ValueError: other rows\)"):
        checked(Pickier(), rows())


def test_rows_that_cannot_be_told_apart_are_not_conclusive():
    model = nn.Sequential(nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 3))
    assert not checked(model, torch.zeros(4, 3, dtype=torch.long)).is_conclusive
    assert not checked(model, torch.ones(4, 3, dtype=torch.long)).is_conclusive  # may be a length
    assert checked(model, torch.full((4, 3), 4)).is_conclusive


def test_probe_rows_are_the_first_the_last_and_distinct():
    x = torch.arange(20.0)[:, None].expand(20, WIDTH)
    found = probe_rows(x)
    assert len(found) == NUM_PROBED
    assert torch.equal(found[0], x[0])
    assert torch.equal(found[-1], x[-1])
    few = probe_rows({"ids": torch.tensor([[3, 1, 2]]), "mask": torch.ones(1, 3)})
    assert len(torch.unique(torch.cat([few["ids"], few["mask"]], 1), dim=0)) == NUM_PROBED
    assert few["ids"].min() >= 1
    assert few["ids"].max() <= 3


def test_a_loss_of_the_whole_batch_is_looked_at_as_such():
    model, x = Net(), rows()

    def total(model, x):
        return model(x).square().mean()

    def uneven(model, x):
        return model(x).square().sum() / (1 + x.detach().abs().max())

    axes = learn_axes(model, squares, x)
    assert examine(model, total, x, axes, is_scalar=True, is_pinned=True).mixing is None
    assert "no sample's own" in str(
        examine(model, uneven, x, axes, is_scalar=True, is_pinned=True).mixing
    )


def test_float64_for_a_while():
    model = nn.Sequential(nn.Embedding(5, WIDTH), nn.LSTM(WIDTH, 3, batch_first=True))
    held = dict(model.named_parameters())
    with widened(model):
        assert model(torch.zeros(2, 4, dtype=torch.long))[0].dtype == torch.float64
        assert torch.zeros(1).float().dtype == torch.float64
        assert torch.zeros(1).to(torch.float32).dtype == torch.float64
        assert F.softmax(torch.zeros(3), 0, dtype=torch.float32).dtype == torch.float64
    assert all(each is held[name] for name, each in model.named_parameters())
    assert model(torch.zeros(2, 4, dtype=torch.long))[0].dtype == torch.float32


def test_tensors_that_are_no_buffers_are_put_back():
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.total, self.seen = nn.Linear(WIDTH, 3), torch.zeros(WIDTH), {"rows": []}

        def forward(self, x):
            self.total.add_(x.detach().sum(0))
            self.seen["rows"].append(len(x))
            return self.up(x)

    model = Sums()
    checked(model, rows())
    assert not model.total.any()


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointing_in_float64(is_reentrant):
    model, x = Checkpointed(is_reentrant), rows()
    axes = learn_axes(model, squares, x)
    with widened(model):
        check_samples_apart(model, squares, x.double(), axes)


@pytest.mark.parametrize("has_mask", [False, True])
def test_attention_in_float64_keeps_no_weights(has_mask):
    """All heads of all samples by all tokens, twice, were most of what a check needed."""
    sizes, gen = (3, 4, 16, 8), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*sizes, generator=gen).double().requires_grad_() for _ in range(3))
    mask = torch.randn(3, 1, 16, 16, generator=gen).double() if has_mask else None
    settings = {"attn_mask": mask, "is_causal": not has_mask}
    results, kept = [], 0

    def pack(each: Tensor) -> Tensor:
        nonlocal kept
        kept = max(kept, each.numel())
        return each

    for context in (contextlib.nullcontext(), widened(nn.Module())):
        kept = 0
        with context, torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
            output = F.scaled_dot_product_attention(q, k, v, **settings)
            results.append([output, *torch.autograd.grad(output.square().sum(), (q, k, v))])
    assert kept <= math.prod(sizes)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
