"""Every way to give a parameter its first value comes out as it would have, or is refused."""

import copy
import io
import math
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.harness import assert_same_bits
from tests.shard.common import DECODER, GPT2
from tests.shard.deferred.cases import CASES, ODD, SEED, Constants, OneDraw, Overwritten, draw
from unison.errors import BadInput, UnsupportedOperation
from unison.models import GPT2LM, DecoderLM, build
from unison.rng.fill import kaiming_uniform
from unison.rng.inits import Normal, Uniform
from unison.shard import digest
from unison.shard.deferred import materialize, meta_init, register_init
from unison.shard.deferred.recipe import recipe_of
from unison.shard.deferred.tape import ops_behind


def built(make, seed: int = SEED) -> Any:
    with meta_init():
        module = make()
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    return materialize(module, seed=seed)


def linear_init(fan_in: int) -> Uniform:
    """What nn.Linear gives its weight."""
    return kaiming_uniform((1, fan_in), a=math.sqrt(5))


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


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
    family = {"gpt2": GPT2LM, "decoder": DecoderLM}[config.family]
    model, expected = built(lambda: family(config), seed=5), build(config, seed=5)
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
    ops = [op for p in module.parameters() for op in ops_behind(recipe_of(p).operand.version)]
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


# --- deepcopy ------------------------------------------------------------------------------------


def test_copies_draw_under_their_own_names():
    layers = built(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    ).layers
    first, second = layers[0].linear1.weight, layers[1].linear1.weight
    bound = linear_init(8)
    assert_same_bits(first.detach(), draw(bound, "layers.0.linear1.weight", (16, 8)))
    assert_same_bits(second.detach(), draw(bound, "layers.1.linear1.weight", (16, 8)))


def test_copies_after_building_have_recipes_too():
    with meta_init():
        block = nn.Sequential(nn.Linear(11, 37), nn.BatchNorm1d(37))
        block[0].twice = nn.Parameter(block[0].get_parameter("weight").detach() * 2)
    blocks = nn.ModuleList([block, copy.deepcopy(block), copy.deepcopy(block).bfloat16()])
    assert all(p.is_meta for p in blocks.parameters())
    materialize(blocks, seed=SEED)
    bound = linear_init(11)
    children: list[Any] = list(blocks)
    for index, child in enumerate(children):
        expected = draw(bound, f"{index}.0.weight")
        dtype = torch.float32 if index < 2 else torch.bfloat16
        assert_same_bits(child[0].weight.detach(), expected.to(dtype))
        # What a block's parameters have in common they have in common in the copy.
        assert_same_bits(child[0].twice.detach(), (expected * 2).to(dtype))
        assert child[1].num_batches_tracked == 0
        assert (child[1].running_var == 1).all()


def test_a_copy_can_be_made_equal():
    """A teacher that starts as its student."""

    def make():
        student = nn.Linear(3, 4)
        teacher = copy.deepcopy(student)
        teacher.load_state_dict(student.state_dict())
        return nn.ModuleDict({"student": student, "teacher": teacher})

    module = built(make)
    assert torch.equal(module.student.weight, module.teacher.weight)


# --- the context ---------------------------------------------------------------------------------


def test_contexts_nest_and_continue():
    with meta_init():
        with meta_init():
            inner = nn.Linear(11, 37)
        assert inner.weight.device.type == "cpu"  # still recording
        nn.init.normal_(inner.weight)
    with meta_init(), torch.no_grad():
        outer = nn.Sequential(inner)
        inner.weight.mul_(2)
    materialize(outer, seed=SEED)
    assert_same_bits(inner.weight.detach(), draw(Normal(std=1.0), "0.weight") * 2)


def test_an_error_inside_leaves_nothing_behind():
    original = nn.init._no_grad_trunc_normal_
    with pytest.raises(ZeroDivisionError), meta_init():
        nn.Linear(1, 1 // 0)
    assert nn.init._no_grad_trunc_normal_ is original
    module = nn.Linear(3, 4)
    assert not module.weight.is_meta
    assert vars(module.weight) == {}
    assert torch.zeros(3).device.type == "cpu"


def test_tensors_pretend_to_be_on_the_cpu_inside():
    with meta_init():
        x = torch.zeros(3, requires_grad=True)
        assert x.device == torch.device("cpu")
        assert (x.is_cpu, x.is_meta, x.get_device()) == (True, False, -1)
        assert x.to("cpu") is x
        assert x.cpu() is x
        assert x.to(torch.device("cpu"), torch.float64).dtype == torch.float64
        assert "Tensor object" in repr(x)
        assert x.new_tensor([1, 2]).tolist() == [1.0, 2.0]
    assert x.is_meta


def test_values_that_are_not_random_can_be_read():
    with meta_init():
        table = torch.arange(6.0).view(2, 3)
        table[1] += torch.tensor([1.0, 2.0, 3.0])
        assert table.tolist() == [[0, 1, 2], [4, 6, 8]]
        assert numpy.asarray(table).sum() == table.numpy().sum() == 21
        assert int(table[1, 1]) == 6
        assert torch.equal(table, table.clone())
        assert torch.allclose(table, table + 1e-9)
        assert table[table > 3].tolist() == [4, 6, 8]
        assert [float(x) for x in table[0]] == [0, 1, 2]
        assert torch.tensor([], device="meta").tolist() == []


def test_operations_without_tensors_are_left_alone():
    library = torch.library.Library("unison_test_deferred", "DEF")
    library.define("answer() -> int")
    library.impl("answer", lambda: 42, "CompositeExplicitAutograd")
    with meta_init():
        assert torch.ops.unison_test_deferred.answer() == 42
    library._destroy()


def test_tensors_from_outside_keep_their_memory():
    outside, scale = nn.Linear(3, 4), torch.arange(12.0).view(4, 3)
    before = outside.weight.detach().clone()
    with meta_init():
        module = nn.Module()
        module.outside = outside
        module.scaled = nn.Parameter(torch.ones(4, 3) * scale)
        doubled = scale * 2
    scale.zero_()  # too late to matter
    assert doubled.tolist() == (torch.arange(12.0).view(4, 3) * 2).tolist()
    materialize(module, seed=SEED)
    assert torch.equal(outside.weight, before)
    assert torch.equal(module.scaled, torch.arange(12.0).view(4, 3))


# --- filling again, saving -----------------------------------------------------------------------


def test_another_seed_fills_anew_in_the_same_memory():
    module = built(OneDraw)
    parameter, address = module.w, module.w.data_ptr()
    materialize(module, seed=SEED + 1)
    assert module.w is parameter
    assert module.w.data_ptr() == address
    assert not torch.equal(module.w, draw(Normal(std=0.02), "w"))
    materialize(module, seed=SEED)
    assert_same_bits(module.w.detach(), draw(Normal(std=0.02), "w"))


def test_an_optimizer_made_before_holds_the_parameters():
    with meta_init():
        module = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    materialize(module, seed=SEED)
    before = module.weight.detach().clone()
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(module.weight, before)


def test_a_filled_module_is_saved_as_any_other():
    module, buffer = built(Constants), io.BytesIO()
    torch.save(dict(module.named_parameters()), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert torch.equal(loaded["eye"], module.eye)
    assert recipe_of(loaded["eye"]) is None


def test_a_copy_of_a_filled_module_keeps_its_values():
    module = copy.deepcopy(built(Constants))
    with pytest.raises(BadInput, match="nothing to fill"):
        materialize(module, seed=0)


def test_torch_load_inside_is_refused():
    buffer = io.BytesIO()
    torch.save(torch.ones(3), buffer)
    buffer.seek(0)
    refused(UnsupportedOperation, "load outside", lambda: torch.load(buffer), at="build")


def test_the_default_device_does_not_matter():
    with torch.device("meta"):  # stands for any other: nothing would work if it were used
        with meta_init():
            module = Overwritten()
        materialize(module, seed=SEED, device="cpu")
        with pytest.raises(BadInput, match="pass another device="):
            materialize(module, seed=SEED)
    assert_same_bits(dict(module.named_parameters()), module.expected())


def test_a_module_without_values_is_not_saved():
    with meta_init():
        module = nn.Linear(3, 4)
    with pytest.raises(TypeError, match="no values to save yet"):
        torch.save(module, io.BytesIO())


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


# --- what is refused -----------------------------------------------------------------------------


def refused(error, match: str, make, *, at: str) -> None:
    if at == "build":
        with pytest.raises(error, match=match), meta_init():
            make()
    else:
        with meta_init():
            module = make()
        with pytest.raises(error, match=match):
            materialize(module, seed=SEED)


def test_reading_a_random_value_is_refused():
    match = r"_local_scalar_dense.* random draw \(Normal\(mean=0.0, std=1.0\)\)"
    refused(UnsupportedOperation, match, lambda: float(torch.randn(3)[0]), at="build")
    refused(UnsupportedOperation, "Tensor.tolist", lambda: torch.rand(3).tolist(), at="build")
    refused(UnsupportedOperation, "nonzero", lambda: torch.randn(3).nonzero(), at="build")


def test_a_refusal_that_is_swallowed_comes_back():
    """torch catches NotImplementedError here, and would leave the weight as it was."""
    refused(
        UnsupportedOperation,
        "allclose",
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        at="build",
    )


def test_a_generator_is_refused():
    generator = torch.Generator()
    for draws in (
        lambda: torch.randn(3, generator=generator),
        lambda: nn.init.normal_(torch.empty(3), generator=generator),
        lambda: nn.init.trunc_normal_(torch.empty(3), generator=generator),
    ):
        refused(UnsupportedOperation, "Leave generator= out", draws, at="build")


def test_a_draw_without_a_rule_is_named_with_its_parameter():
    def make():
        module = nn.Linear(3, 4)
        module.weight.data.cauchy_()
        return nn.Sequential(module)

    refused(UnsupportedOperation, r"'0.weight'.*aten.cauchy_.*register_init", make, at="fill")

    def overwritten():
        module = make()
        nn.init.ones_(module[0].weight)
        return module

    assert (built(overwritten)[0].weight == 1).all()


def test_memory_never_written_is_refused_for_parameters():
    def make(kind):
        module = nn.Module()
        if kind == "parameter":
            module.w = nn.Parameter(torch.empty(3))
        else:
            module.register_buffer("w", torch.empty(3))
        return module

    refused(BadInput, "'w': it was made with torch.empty", lambda: make("parameter"), at="fill")
    assert built(lambda: make("buffer")).w.tolist() == [0, 0, 0]


def test_two_parameters_on_one_memory_are_refused():
    def make(cut):
        module = nn.Module()
        both = torch.randn(2, 6)
        module.a = nn.Parameter(both[:, :3])
        module.b = nn.Parameter(both[:, cut:])
        return module

    refused(BadInput, "'a' and 'b' share memory", lambda: make(2), at="fill")
    module = built(lambda: make(3))
    assert_same_bits(module.a.detach(), draw(Normal(std=1.0), "a", (2, 6))[:, :3])


def test_a_tensor_with_a_graph_is_refused():
    def make():
        module = nn.Linear(2, 2)
        module.cached = module.weight * 2
        return module

    refused(UnsupportedOperation, "'cached': it was computed from parameters", make, at="fill")


def test_a_lazy_module_is_refused():
    refused(BadInput, "'weight' belongs to a lazy module", lambda: nn.LazyLinear(3), at="fill")


def test_modules_built_elsewhere_are_refused():
    with torch.device("meta"):
        meta = nn.Linear(3, 4)
    with pytest.raises(BadInput, match=r"'weight': it has no memory.*unison.meta_init"):
        materialize(meta, seed=0)
    with pytest.raises(BadInput, match="no tensor of this Linear was built under"):
        materialize(nn.Linear(3, 4), seed=0)
    with pytest.raises(BadInput, match="takes a module, found dict"):
        materialize({}, seed=0)
    with meta_init():
        module = nn.Linear(3, 4)
        with pytest.raises(BadInput, match=r"after the `with unison.meta_init"):
            materialize(module, seed=0)
    with pytest.raises(BadInput, match="expected an integer seed"):
        materialize(module, seed=0.5)
    with pytest.raises(BadInput, match="a device with memory"):
        materialize(module, seed=0, device="meta")


def test_values_of_unknown_origin_are_refused():
    with torch.device("meta"):
        elsewhere = torch.randn(3)
    outside = torch.zeros(3)
    refused(
        UnsupportedOperation,
        "'0.w'.*outside unison.meta_init",
        lambda: nn.Sequential(nn.ParameterDict({"w": nn.Parameter(elsewhere * 2)})),
        at="fill",
    )
    refused(
        UnsupportedOperation,
        "made outside",
        lambda: outside.copy_(torch.ones(3)),
        at="build",
    )


def test_a_module_on_the_meta_device_can_be_given_values_inside():
    with torch.device("meta"):
        module = nn.Linear(11, 37)
    with meta_init():
        nn.init.normal_(module.weight)
        nn.init.zeros_(module.bias)
    materialize(module, seed=SEED)
    assert_same_bits(module.weight.detach(), draw(Normal(std=1.0), "weight"))


def test_what_changes_after_building_is_refused():
    with meta_init():
        written, replaced = nn.Linear(3, 4), nn.Linear(3, 4)
    nn.init.normal_(written.weight)
    replaced.weight = nn.Parameter(torch.empty(5, 3, device="meta"))
    with pytest.raises(BadInput, match="'weight': it was written after"):
        materialize(written, seed=0)
    with pytest.raises(BadInput, match="'weight': it has no memory, and nobody recorded"):
        materialize(replaced, seed=0)


def test_a_parameter_still_in_use_is_named():
    with meta_init():
        module = nn.Linear(3, 4)
    row = module.weight[0]
    with pytest.raises(BadInput, match=r"'weight': something refers to it"):
        materialize(module, seed=0)
    del row
    assert materialize(module, seed=0).weight.std() > 0


# --- register_init -------------------------------------------------------------------------------


@register_init
def sign_fixed_orthogonal_(tensor: Tensor, gain: float = 1.0, *, shift: Tensor) -> Tensor:
    """Looks at random values to decide what to do."""
    with torch.no_grad():
        q, r = torch.linalg.qr(torch.randn(tensor.shape[::-1]))
        if r[0, 0].item() < 0:
            q = -q
        tensor.copy_(q.T * gain + shift + 0 * torch.rand_like(q.T).exponential_())
    return tensor


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(5, 7))
        self.b = nn.Parameter(torch.empty(5, 7))
        for parameter in (self.a, self.b):
            sign_fixed_orthogonal_(parameter, 2.0, shift=torch.zeros(1))


def test_a_registered_init_draws_from_unisons_streams():
    before = torch.get_rng_state()
    module = built(Custom)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.allclose(module.a @ module.a.T, 4 * torch.eye(5), atol=1e-5)
    assert not torch.equal(module.a, module.b)
    torch.manual_seed(3)
    assert digest(built(Custom)) == digest(module)
    assert digest(built(Custom, seed=1)) != digest(module)
    assert "looks at random" in sign_fixed_orthogonal_.__doc__.lower()


def test_a_registered_init_runs_as_it_is_outside():
    torch.manual_seed(0)
    first = sign_fixed_orthogonal_(torch.empty(3, 3), shift=torch.zeros(1))
    torch.manual_seed(0)
    assert torch.equal(sign_fixed_orthogonal_(torch.empty(3, 3), shift=torch.zeros(1)), first)


def test_a_registered_init_is_refused_by_name():
    @register_init
    def bad_(tensor):
        tensor.copy_(torch.poisson(torch.ones(3)))

    def make():
        module = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3))})
        bad_(module["w"])
        return module

    refused(UnsupportedOperation, r"'w'.*registered init calls aten.poisson", make, at="fill")
    with pytest.raises(BadInput, match="is registered already"):
        register_init(bad_)
    with pytest.raises(BadInput, match="takes a function"):
        register_init(3)
