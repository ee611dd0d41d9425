"""Factors and diagonals against loops over tokens and samples, for every way to use a parameter."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unison
from tests.harness import per_sample_gradients
from tests.kfac.common import CLASSES, Transformer, loss, observed, relative, settings
from unison.errors import BadInput
from unison.kfac import Method, factors
from unison.kfac.factors import _gram, packed, token_weights
from unison.rng import Key, draws_by_sample

EXACT = 1e-12


def by_loop(model: nn.Module, name: str, x, y, mask=None) -> tuple[Tensor, Tensor]:
    """(A, G) of a module's linear map, token after token, from hooks on the module itself."""
    model = copy.deepcopy(model)
    module = model.get_submodule(name)
    seen: list[Tensor] = []
    handles = [
        module.register_forward_hook(lambda m, args, out: seen.append(args[0].detach())),
        module.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].detach())),
    ]
    logits = model(x)
    each = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
    (each if mask is None else each * mask.flatten()).sum().backward()
    for handle in handles:
        handle.remove()
    a, g = (value.flatten(0, -2) for value in seen)
    keep = torch.ones(len(a)) if mask is None else mask.flatten()
    rows = [index for index in range(len(a)) if keep[index]]
    if getattr(module, "bias", None) is not None:
        a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], dim=1)
    of_a = torch.stack([torch.outer(a[i], a[i]) for i in rows]).mean(dim=0)
    of_g = torch.stack([torch.outer(g[i], g[i]) for i in rows]).mean(dim=0)
    return of_a, of_g


def data(batch=4, length=7):
    return torch.randint(0, 11, (batch, length)), torch.randint(0, CLASSES, (batch, length))


def check_kronecker(kfac, model, name, x, y, mask=None):
    found, (a, g) = kfac.factors()[f"{name}.weight"], by_loop(model, name, x, y, mask)
    assert relative(found["a"], a) <= EXACT
    assert relative(found["g"], g) <= EXACT


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("length", [1, 7])
def test_a_transformer_token_by_token(batch, length):
    model = Transformer().double()
    x, y = data(batch, length)
    kfac = observed(model, x, settings(fisher="empirical"), y=y)
    for name in ("q", "k", "f1", "head"):
        check_kronecker(kfac, model, name, x, y)


def test_masked_tokens_are_left_out_of_everything():
    model = Transformer().double()
    x, y = data()
    mask = torch.ones(4, 7)
    mask[0, 3:] = mask[2, 1:] = 0  # padding at the end, which a causal model does not look at
    config = settings(fisher="empirical", policy="auto")
    kfac = observed(model, x, config, mask=mask, y=y)
    for name in ("q", "f2", "head"):
        check_kronecker(kfac, model, name, x, y, mask)
    other = x.clone()
    other[mask == 0] = 1
    for found, again in zip(
        kfac.factors().values(),
        observed(model, other, config, mask=mask, y=y).factors().values(),
        strict=True,
    ):
        for side in found:
            assert relative(found[side], again[side]) <= EXACT


def test_a_mask_of_whole_samples():
    model = Transformer().double()
    x, _ = data(5)
    mask = torch.tensor([True, False, True, True, False])
    some = observed(model, x, settings(fisher="exact"), mask=mask[:, None].expand(5, 7))
    few = observed(model, x[mask], settings(fisher="exact"))
    for name, found in some.factors().items():
        for side, value in few.factors()[name].items():
            assert relative(found[side], value) <= EXACT, (name, side)


def test_a_mask_that_fits_no_tokens_is_refused():
    ragged = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    assert token_weights(ragged, 1, "w").tolist() == [[True], [True]]
    assert token_weights(None, 4, "w") is None
    with pytest.raises(BadInput, match=r"head\.weight is used for 4 tokens .* mask has 3"):
        token_weights(ragged, 4, "head.weight")
    whole = torch.tensor([[1, 1, 1], [0, 0, 0]]).bool()
    assert token_weights(whole, 4, "w").tolist() == [[True] * 4, [False] * 4]


def test_uneven_micro_batches_weigh_by_tokens():
    model = Transformer().double()
    x, y = data(6)
    whole = observed(model, x, settings(fisher="mc"), y=y).factors()
    kfac = unison.KFAC(model, settings(fisher="mc"))
    model.zero_grad()
    for rows in (slice(0, 1), slice(1, 2), slice(2, 6)):
        logits = model(x[rows])
        kfac.sample(logits).backward(retain_graph=True)
        (loss(logits, y[rows]) * len(x[rows]) / 6).backward()
    kfac.step()
    for name, found in kfac.factors().items():
        for side, value in whole[name].items():
            assert relative(found[side], value) <= EXACT, (name, side)


# --- diagonals ------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A table that is used twice, a norm's gain, a lone bias and scale, a tiny matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4, padding_idx=3)
        self.norm = nn.LayerNorm(4)
        self.shift = nn.Parameter(torch.randn(4))
        self.scale = nn.Parameter(torch.randn(4))
        self.tiny = nn.Linear(4, 2)
        self.positions = nn.Parameter(torch.randn(7, 4))
        self.head = nn.Linear(2, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * self.table((ids + 1) % 11) + self.positions[: ids.shape[1]]
        return self.head(torch.tanh(self.tiny(self.norm(x) * self.scale + self.shift)))


def test_exact_diagonals():
    model = Mixed().double()
    x, y = data(5)
    kfac = observed(model, x, settings(fisher="empirical", min_layer_size=9, policy="auto"), y=y)
    kept = {layer.name: layer.method for layer in kfac.layers}
    assert kept.pop("head.weight") is Method.KRONECKER
    assert set(kept.values()) == {Method.DIAGONAL}

    def per_sample(model, batch):
        logits = model(batch[0])
        return F.cross_entropy(logits.mT, batch[1], reduction="none").sum(dim=1)

    gradients = per_sample_gradients(model, per_sample, (x, y))
    for name in kept:
        expected = gradients[name].square().sum(dim=0) / y.numel()
        assert relative(kfac.factors()[name]["d"].view_as(expected), expected) <= EXACT, name


def test_one_table_is_squared_after_its_tokens_are_added():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, CLASSES)).double()
    x, y = torch.randint(0, 4, (5, 9)), torch.randint(0, CLASSES, (5, 9))
    kfac = observed(model, x, settings(fisher="empirical"), y=y)

    def per_sample(model, batch):
        return F.cross_entropy(model(batch[0]).mT, batch[1], reduction="none").sum(dim=1)

    expected = per_sample_gradients(model, per_sample, (x, y))["0.weight"].square().sum(0) / 45
    assert relative(kfac.factors()["0.weight"]["d"].view(4, 3), expected) <= EXACT


# --- ways to use a matrix -------------------------------------------------------------------------


def layers_of(kfac) -> dict:
    return {layer.name: layer for layer in kfac.layers}


class OwnTransposed(nn.Module):
    """As transformers' Conv1D: weight [in, out], by addmm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))
        self.bias = nn.Parameter(torch.randn(8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.flatten(0, 1), self.weight)
        return self.head(torch.tanh(y).view(*x.shape[:2], -1))


def test_a_transposed_weight_with_its_bias():
    model = OwnTransposed().double()
    x, y = torch.randn(3, 4, 6).double(), torch.randint(0, CLASSES, (3, 4))
    kfac = observed(model, x, settings(fisher="empirical", graft="none"), y=y)
    layer = layers_of(kfac)["weight"]
    assert (layer.is_transposed, layer.bias, layer.d_in, layer.d_out) == (True, "bias", 7, 8)
    straight = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    with torch.no_grad():
        straight[0].weight.data = model.weight.data.T.contiguous()
        straight[0].bias.data = model.bias.data.clone()
        straight[2].load_state_dict(model.head.state_dict())
    other = observed(straight, x, settings(fisher="empirical", graft="none"), y=y)
    for side, value in other.factors()["0.weight"].items():
        assert relative(kfac.factors()["weight"][side], value) <= EXACT
    assert relative(model.weight.grad, straight[0].weight.grad.T) <= EXACT
    assert relative(model.bias.grad, straight[0].bias.grad) <= EXACT


def test_a_tied_head_is_factored_as_the_matrix_it_is():
    model = nn.Sequential(nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES, bias=False)).double()
    model[1].weight = model[0].weight
    x, y = torch.randint(0, CLASSES, (3, 4)), torch.randint(0, CLASSES, (3, 4))
    kfac = observed(model, x, settings(fisher="empirical"), y=y)
    (layer,) = kfac.layers
    assert (layer.d_out, layer.d_in, layer.why[:11]) == (CLASSES, 6, "as a matrix")
    a, g = by_loop(model, "1", x, y)
    assert relative(kfac.factors()["0.weight"]["a"], a) <= EXACT
    assert relative(kfac.factors()["0.weight"]["g"], g) <= EXACT


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize("has_mask", [False, True])
def test_a_tied_head_with_a_diagonal_counts_both_uses_of_its_rows(monkeypatch, at_once, has_mask):
    model = nn.Sequential(nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES, bias=False)).double()
    model[1].weight = model[0].weight
    monkeypatch.setattr(factors, "MOST_AT_ONCE", at_once * CLASSES * 6)
    x, y = torch.randint(0, CLASSES, (5, 4)), torch.randint(0, CLASSES, (5, 4))
    x[:, 1] = x[:, 0]  # the same row twice in a sample
    mask = torch.ones(5, 4)
    if has_mask:
        mask[1] = mask[2, 1:] = 0
    config = settings(fisher="empirical", policy="small_only", max_factor_size=CLASSES - 1)
    kfac = observed(model, x, config, y=y, mask=mask if has_mask else None)
    assert kfac.layers[0].method is Method.DIAGONAL
    expected: Tensor = torch.zeros(CLASSES, 6).double()
    for row, labels, keep in zip(x, y, mask, strict=True):
        model.zero_grad()
        each = F.cross_entropy(model(row[None])[0], labels, reduction="none")
        (each * keep).sum().backward()
        gradient = model.get_parameter("0.weight").grad
        assert gradient is not None
        expected = expected + gradient.square() / mask.sum()
    found = kfac.factors()["0.weight"]["d"].view(CLASSES, 6)
    assert relative(found, expected) <= EXACT


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def test_projections_of_attention_in_one_matrix():
    model = Attention().double()
    x, y = torch.randn(3, 4, 6).double(), torch.randint(0, CLASSES, (3, 4))
    kfac = observed(model, x, settings(fisher="empirical"), y=y)
    layer = layers_of(kfac)["attention.in_proj_weight"]
    assert (layer.bias, layer.d_in, layer.d_out) == ("attention.in_proj_bias", 7, 18)
    inputs = torch.cat([x.flatten(0, 1), torch.ones(12, 1).double()], dim=1)
    assert relative(kfac.factors()[layer.name]["a"], inputs.T @ inputs / 12) <= EXACT
    assert layers_of(kfac)["attention.out_proj.weight"].bias == "attention.out_proj.bias"


def test_the_gpt2_of_transformers_with_lora():
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    config = transformers.GPT2Config(
        vocab_size=CLASSES, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0
    )
    config.embd_pdrop = config.attn_pdrop = 0.0
    x, y = torch.randint(0, CLASSES, (3, 5)), torch.randint(0, CLASSES, (3, 5))
    model = transformers.GPT2LMHeadModel(config).double()
    kfac = unison.KFAC(model, settings(fisher="mc"))
    logits = model(x).logits
    kfac.sample(logits).backward(retain_graph=True)
    loss(logits, y).backward()
    kfac.step()
    found = layers_of(kfac)
    assert found["transformer.h.0.attn.c_attn.weight"].is_transposed
    assert found["transformer.h.0.attn.c_attn.weight"].bias is not None
    assert found["transformer.wte.weight"].method is Method.KRONECKER  # tied
    assert found["transformer.wpe.weight"].method is Method.DIAGONAL
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    model = peft.get_peft_model(model, lora).double()
    kfac.detach()
    kfac = unison.KFAC(model, settings(fisher="mc"))
    logits = model(input_ids=x).logits
    kfac.sample(logits).backward(retain_graph=True)
    loss(logits, y).backward()
    kfac.step()
    assert {layer.method for layer in kfac.layers} == {Method.KRONECKER}
    assert len(kfac.layers) == 2


class Counted(nn.Module):
    """Writes to a buffer in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.detach().sum(dim=0))
        return x


def test_buffers_generators_and_gradients_are_left_alone():
    model = nn.Sequential(nn.Linear(6, 8), Counted(), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    twin = copy.deepcopy(model)
    x, y = torch.randn(7, 6), torch.randint(0, CLASSES, (7,))
    torch.manual_seed(0)
    loss(twin(x), y).backward()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    kfac = unison.KFAC(model, settings(graft="sgd"))
    logits = model(x)
    kfac.sample(logits).backward()
    loss(logits, y).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    kfac.step()
    assert torch.equal(torch.get_rng_state(), after)
    assert all(torch.equal(a, b.grad) for a, b in zip(gradients, twin.parameters(), strict=True))
    assert torch.equal(model[1].total, twin[1].total)


@pytest.mark.parametrize("is_ours", [False, True])
def test_statistics_see_the_same_dropout(is_ours):
    layer = nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, CLASSES, bias=False)).double()
    seen = []
    handle = model[2].register_forward_hook(lambda m, args, out: seen.append(args[0].detach()))
    x, y = torch.randn(9, 6).double(), torch.randint(0, CLASSES, (9,))
    kfac = unison.KFAC(model, settings())
    with draws_by_sample(Key.from_seed(1), 0, range(9)) if is_ours else nullcontext():
        logits = model(x)
    handle.remove()
    kfac.sample(logits).backward()
    loss(logits, y).backward()
    kfac.step()
    (inputs,) = seen
    assert (inputs == 0).any()
    assert relative(kfac.factors()["2.weight"]["a"], inputs.T @ inputs / 9) <= EXACT


def test_detaching_leaves_nothing_behind():
    model = nn.Linear(6, CLASSES)
    kfac = observed(model, torch.randn(3, 6), settings())
    kfac.detach()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert set(model.__dict__) == set(nn.Linear(6, CLASSES).__dict__)
    torch.optim.Adam(model.parameters()).step()


def test_half_of_a_large_gram_matrix_is_made():
    x = torch.randn(2, 7, 1301).double()
    rows = x.flatten(0, 1)
    assert relative(packed(_gram(x)), packed(rows.T @ rows)) <= EXACT
    assert not _gram(x)[600:, :500].any()
