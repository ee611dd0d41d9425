"""FSDP2 as it is: its results beside our fast reducer's, and our norms of its shards."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import unison
from tests.harness import World, assert_close, ranks, run_on_ranks
from tests.shard.common import GPT2, ODD, tokens
from tests.shard.fsdp2.common import Collectives, fsdp2, lm, train
from unison.models import ModelConfig
from unison.shard import auto_shard, clip_grad_norm_, digest, full_parameters, grad_norm, param_norm
from unison.shard.deal import take_mean_was_used


def fast_run(world: World, kind: str, config: ModelConfig) -> tuple[dict, dict]:
    model = lm(config)
    if kind == "fsdp2":
        fsdp2(model, world)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    else:
        auto_shard(model, gradient_divisor=1)
    result = train(model, [tokens(7, config, step) for step in range(2)], granule=None)
    take_mean_was_used()  # FSDP2 does not ask; the next model in this process would
    return result, dict(full_parameters(model))


@pytest.mark.parametrize("config", [GPT2, ODD], ids=["tied", "odd"])
def test_plain_fsdp2_and_our_fast_reducer(config):
    ours, expected = run_on_ranks(2, fast_run, "engine", config)[0]
    theirs, found = run_on_ranks(2, fast_run, "fsdp2", config)[0]
    for name in ("losses", "norms"):
        assert theirs[name] == pytest.approx(ours[name], rel=1e-5)
    assert_close(found, expected)


@ranks(1, 2, 3, 4)
def test_norms_on_rows_cut_anywhere(world):
    """The same bits as on our own shards, where each is cut between blocks of 256."""
    torch.manual_seed(0)
    sizes = [(1, 3), (5, 7), (3, 333), (257, 2), (16, 16), (1025, 1)]

    def make() -> nn.Module:
        model = nn.Module()
        for index, (rows, columns) in enumerate(sizes):
            values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(index))
            setattr(model, f"weight{index}", nn.Parameter(values))
        return model

    ours, theirs = unison.fully_shard(make()), make()
    fully_shard(theirs, mesh=init_device_mesh("cpu", (world.size,)))
    with Collectives() as seen:  # DTensor is quick to gather without being asked
        param_norm(theirs)
    assert seen.counts == ({"allreduce_": 1} if world.size > 1 else {})
    for model in (ours, theirs):
        for name, value in list(model.named_parameters())[:-1]:  # the last one has no gradient
            value.grad = value.detach() * (1 + len(name))
    assert torch.equal(param_norm(ours), param_norm(theirs))
    assert torch.equal(grad_norm(ours), grad_norm(theirs))
    assert torch.equal(clip_grad_norm_(ours, 0.5), clip_grad_norm_(theirs, 0.5))
    assert torch.equal(grad_norm(ours), grad_norm(theirs))
    assert grad_norm(theirs).item() == pytest.approx(0.5, rel=1e-5)
    assert digest(ours) == digest(theirs)
