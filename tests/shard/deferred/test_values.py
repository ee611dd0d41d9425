"""Every way to give a parameter its first value comes out as it would have."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import assert_same_bits
from tests.shard.common import DECODER, GPT2
from tests.shard.deferred.cases import CASES, ODD, SEED, draw
from tests.shard.deferred.common import built, linear_init, tensors
from unison.models import LanguageModel, build
from unison.rng.inits import Normal
from unison.shard import digest, materialize, meta_init
from unison.shard.deferred.recorder import recipe_of
from unison.shard.deferred.tape import ops_behind


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_recorded_operations(case):
    module = built(case)
    expected = module.expected()
    found = tensors(module)
    assert_same_bits({name: found[name] for name in expected}, expected)
    eager = tensors(case())
    assert found.keys() == eager.keys()
    for name, value in eager.items():
        assert type(found[name]) is type(value)
        assert found[name].dtype == value.dtype
        assert found[name].requires_grad == value.requires_grad
        assert found[name].stride() == value.stride()


@pytest.mark.parametrize("config", [GPT2, DECODER, replace(DECODER, tie_head=True)])
def test_our_models_start_as_build_makes_them(config):
    model, expected = built(lambda: LanguageModel(config), seed=5), build(config, seed=5)
    assert digest(model) == digest(expected)
    assert (model.lm_head.weight is model.token_embeddings.weight) == config.tie_head
    assert_same_bits(dict(model.named_buffers()), dict(expected.named_buffers()))


def test_our_models_built_on_the_meta_device_inside():
    model = built(lambda: build(GPT2, device="meta"), seed=5)
    assert digest(model) == digest(build(GPT2, seed=5))


MODULES = {
    "linear": lambda: nn.Linear(50, 70),
    "embedding": lambda: nn.Embedding(90, 40, padding_idx=2),
    "layer_norm": lambda: nn.LayerNorm(50),
    "conv1d": lambda: nn.Conv1d(13, 24, 5),
    "conv2d": lambda: nn.Conv2d(8, 14, 3),
    "lstm": lambda: nn.LSTM(14, 16, 2),
    "attention": lambda: nn.MultiheadAttention(48, 2),
    "encoder_layer": lambda: nn.TransformerEncoderLayer(48, 2, 66),
    "batch_norm": lambda: nn.BatchNorm2d(14),
    "bilinear": lambda: nn.Bilinear(12, 13, 14),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(40, 50)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(40, 50)),
}


@pytest.mark.parametrize("name", MODULES)
def test_torch_modules_have_torchs_distributions(name):
    module, eager = built(MODULES[name]), MODULES[name]()
    found = tensors(module)
    assert list(found) == list(tensors(eager))
    for key, value in tensors(eager).items():
        assert found[key].shape == value.shape
        assert found[key].dtype == value.dtype
        if value.numel() == 1 or value.std() == 0:
            assert torch.equal(found[key], value), key
        else:
            tolerance = 5 / math.sqrt(value.numel())
            assert abs(found[key].std() / value.std() - 1) < tolerance, key
            assert abs(found[key].mean() - value.mean()) < tolerance * value.std(), key


def test_recurrent_modules_compute_with_their_new_parameters():
    module = built(lambda: nn.LSTM(4, 6))
    x = torch.randn(3, 2, 4)
    fresh = nn.LSTM(4, 6)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(module(x)[0], fresh(x)[0])


def test_embedding_keeps_its_padding_row_at_zero():
    weight = built(lambda: nn.Embedding(9, 4, padding_idx=2)).weight
    expected = draw(Normal(std=1.0), "weight", (9, 4))
    expected[2] = 0
    assert_same_bits(weight.detach(), expected)


def transformers_models():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 600, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    gpt2 = transformers.GPT2Config(n_layer=3, n_embd=48, n_head=4, n_positions=64, **sizes)
    llama = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=48, intermediate_size=80, num_attention_heads=4,
        num_key_value_heads=2, **sizes,
    )  # fmt: skip
    return {
        "gpt2": lambda: transformers.GPT2LMHeadModel(gpt2),
        "llama": lambda: transformers.LlamaForCausalLM(llama),
    }


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_transformers_models_have_transformers_distributions(name):
    make = transformers_models()[name]
    model, eager = built(make), make()
    found = tensors(model)
    assert list(found) == list(tensors(eager))
    for key, value in eager.named_parameters():
        if value.std() == 0:
            assert torch.equal(found[key], value), key
        else:
            tolerance = 6 / math.sqrt(value.numel())
            assert abs(found[key].std() / value.std() - 1) < tolerance, key
    assert_same_bits(dict(model.named_buffers()), dict(eager.named_buffers()))
    ids = torch.arange(8)[None]
    assert model(ids).logits.isfinite().all()


def test_gpt2_of_transformers_scales_its_residual_projections():
    model = built(transformers_models()["gpt2"])
    name = "transformer.h.1.attn.c_proj.weight"
    expected = draw(Normal(std=0.02 / math.sqrt(6)), name, (48, 48))
    assert_same_bits(model.get_parameter(name).detach(), expected)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_generators_are_neither_used_nor_changed():
    before = torch.get_rng_state()
    module = built(lambda: nn.TransformerEncoderLayer(8, 2, 16))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert digest(built(lambda: nn.TransformerEncoderLayer(8, 2, 16))) == digest(module)


def test_what_is_overwritten_is_forgotten():
    with meta_init():
        module = nn.Linear(11, 37)  # two draws
        for _ in range(50):
            nn.init.normal_(module.weight)
            nn.init.orthogonal_(module.weight)
            nn.init.zeros_(module.bias)
        module.weight.data = torch.zeros(37, 11)
        nn.init.ones_(module.weight)
    ops = [op for p in module.parameters() for op in ops_behind(recipe_of(p).operand)]
    assert [str(op.call) for op in ops] == ["Constant(value=1.0)", "Constant(value=0)"]


class BFloat16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(11, 37, dtype=torch.float64)
        self.b = nn.Linear(11, 37)
        self.c = nn.Linear(11, 37).half()


def test_dtypes_are_kept():
    try:
        torch.set_default_dtype(torch.bfloat16)
        with meta_init():
            module = BFloat16()
            module.thirds = nn.Parameter(torch.arange(4) / 3)
    finally:
        torch.set_default_dtype(torch.float32)
    materialize(module, seed=SEED)
    bound = linear_init(11)
    for name, dtype in (("a", torch.float64), ("b", torch.bfloat16)):
        weight = module.get_parameter(f"{name}.weight")
        assert_same_bits(weight.detach(), draw(bound, f"{name}.weight", dtype=dtype))
    half = draw(bound, "c.weight", dtype=torch.bfloat16).half()
    assert_same_bits(module.c.weight.detach(), half)
    assert_same_bits(module.thirds.detach(), (torch.arange(4) / torch.tensor(3.0)).bfloat16())


def test_a_cast_after_building_rounds_what_was_built():
    with meta_init():
        module = nn.Linear(11, 37)
    materialize(module.bfloat16(), seed=SEED)
    assert_same_bits(module.weight, built(lambda: nn.Linear(11, 37)).weight.bfloat16())


def test_frozen_and_tied_parameters_stay_so():
    def make():
        module = nn.ModuleDict({"a": nn.Linear(5, 5), "b": nn.Linear(5, 5), "c": nn.Linear(5, 5)})
        module.b.weight = module.a.weight
        module.a.bias.requires_grad_(False)
        return module

    module = built(make)
    assert module.b.weight is module.a.weight
    assert [p.requires_grad for p in module.parameters()] == [True, False, True, True, True]
    bound = linear_init(5)
    assert_same_bits(module.a.weight.detach(), draw(bound, "a.weight", (5, 5)))


def test_memory_formats_are_kept():
    def make():
        module: Any = nn.Conv2d(4, 6, 3)
        return module.to(memory_format=torch.channels_last)

    module = built(make)
    assert module.weight.is_contiguous(memory_format=torch.channels_last)
    assert_same_bits(module.weight.detach().contiguous(), built(lambda: nn.Conv2d(4, 6, 3)).weight)


def test_linear_algebra_is_evaluated_on_the_whole_tensor():
    def make():
        module = nn.Linear(7, 7, bias=False)
        nn.init.orthogonal_(module.weight, gain=2)
        return module

    weight = built(make).weight.double()
    assert torch.allclose(weight @ weight.T, 4 * torch.eye(7).double(), atol=1e-5)


def test_sparse_init_has_its_zeros():
    def make():
        module = nn.Linear(5, 20, bias=False)
        nn.init.sparse_(module.weight, sparsity=0.25)
        return module

    assert (built(make).weight == 0).sum(dim=0).tolist() == [5] * 5


def test_odd_views_of_one_storage():
    """Written through before all of it was ever used, grown, and through overlapping windows."""

    def make():
        module = nn.Module()
        x = torch.empty(12)
        x[:3].copy_(torch.arange(3.0))
        x[3:6].copy_(x[:3] + x[8:11])
        module.register_buffer("x", x)
        y = torch.ones(9)
        y.as_strided((3, 3), (2, 2)).fill_(5)  # every other element
        module.register_buffer("y", y)
        z = torch.ones(2)
        z.resize_(4)[2:].fill_(3)
        module.register_buffer("z", z)
        w = torch.zeros(4)
        w.view(torch.int32)[1] = 1 << 23
        module.register_buffer("w", w)
        return module

    module = built(make)
    assert module.x.tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 0, 0, 0, 0]
    assert module.y.tolist() == [5, 1, 5, 1, 5, 1, 5, 1, 5]
    assert module.z.tolist() == [1, 1, 3, 3]
    assert module.w.tolist() == [0, 2.0**-126, 0, 0]


# --- tensors that are neither parameters nor buffers ---------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((3,), 0.5)
        self.tables = {"sin": [torch.arange(4.0).sin()], "pair": (torch.ones(2), "text")}
        self.weight = nn.Parameter(torch.ones(3))
        self.same = self.weight
        self.noise = torch.randn(ODD)


def test_plain_tensors_are_filled_where_they_are():
    module = built(Plain)
    assert module.scale.tolist() == [0.5] * 3
    assert torch.equal(module.tables["sin"][0], torch.arange(4.0).sin())
    assert module.tables["pair"][0].tolist() == [1, 1]
    assert module.same is module.weight
    assert_same_bits(module.noise, draw(Normal(std=1.0), "noise"))


def test_buffers_that_share_memory_go_on_sharing():
    def make():
        module = nn.Module()
        module.register_buffer("whole", torch.arange(12.0))
        module.register_buffer("rows", module.get_buffer("whole").view(3, 4)[1:])
        module.register_buffer("again", module.whole)
        return module

    module = built(make)
    module.whole[5] = -1
    assert module.rows[0, 1] == -1
    assert module.again is module.whole
