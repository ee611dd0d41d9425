"""What deferred init cannot make right is refused, by name and with the remedy."""

import io

import pytest
import torch
from torch import nn

from tests.harness import assert_same_bits
from tests.shard.deferred.cases import SEED, draw
from tests.shard.deferred.common import built, refused
from unison.errors import BadInput, UnsupportedOperation
from unison.rng.inits import Normal
from unison.shard import materialize, meta_init


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


def test_torch_load_inside_is_refused():
    buffer = io.BytesIO()
    torch.save(torch.ones(3), buffer)
    buffer.seek(0)
    refused(UnsupportedOperation, "load outside", lambda: torch.load(buffer), at="build")
