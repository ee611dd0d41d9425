"""Inside `meta_init`: what code may do there, and what it leaves behind."""

import numpy
import pytest
import torch
from torch import nn

from tests.harness import assert_same_bits
from tests.shard.deferred.cases import SEED, Overwritten, draw
from unison.errors import BadInput
from unison.rng.inits import Normal
from unison.shard import materialize, meta_init
from unison.shard.deferred.recorder import active_recorder


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


def test_a_recorder_that_lives_on_keeps_no_tensor_from_its_memory():
    """A weak reference would: torch 2.11 kept the mode in a cycle until garbage was collected."""
    with meta_init():
        module, kept = nn.Linear(3, 4), active_recorder()
    assert kept is not None
    materialize(module, seed=SEED)
    assert not module.weight.is_meta


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


def test_the_default_device_does_not_matter():
    with torch.device("meta"):  # stands for any other: nothing would work if it were used
        with meta_init():
            module = Overwritten()
        materialize(module, seed=SEED, device="cpu")
        with pytest.raises(BadInput, match="pass another device="):
            materialize(module, seed=SEED)
    assert_same_bits(dict(module.named_parameters()), module.expected())
