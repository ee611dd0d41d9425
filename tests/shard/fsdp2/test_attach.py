"""Ordered reduction on FSDP2 as one uses it: attaching, detaching, evaluating, hooks."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.harness import ranks
from tests.shard.common import DECODER, GPT2, per_sample_loss, tokens
from tests.shard.fsdp2.common import Collectives, fsdp2, lm
from unison.errors import BadInput
from unison.shard import batch_mean, current_plan, deal, digest, param_groups, param_norm
from unison.shard.fsdp2 import stop_ordered_reduction, use_ordered_reduction


def state_of(model: Any) -> list[Any]:
    """What attaching could leave behind."""
    found = []
    for module in model.modules():
        found += [sorted(module.__dict__), list(module._forward_pre_hooks.values())]
        found += [list(module._forward_hooks.values())]
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found.append(sorted(state.__dict__))
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            settings = ("gradient_divide_factor", "force_sum_reduction_for_comms")
            found += [(sorted(g.__dict__), [getattr(g, name) for name in settings]) for g in groups]
            found += [type(g._reduce_scatter_comm).__name__ for g in groups]
    return found


@ranks(2)
def test_detaching_gives_the_model_back(world):
    model = fsdp2(lm(), world)
    before = state_of(model)
    assert use_ordered_reduction(model) is model
    with pytest.raises(BadInput, match="uses ordered reduction already"):
        use_ordered_reduction(model)
    assert state_of(model) != before
    assert stop_ordered_reduction(model) is model
    assert state_of(model) == before
    with pytest.raises(BadInput, match="does not use ordered reduction"):
        stop_ordered_reduction(model)
    rows = tokens(2, GPT2)[world.rank :][:1]
    per_sample_loss(model, rows).mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    use_ordered_reduction(model)  # and again


@ranks(1, 2)
def test_evaluation_needs_no_granules(world):
    model = lm()
    rows = tokens(3, GPT2)
    with torch.no_grad():
        expected = per_sample_loss(model, rows)
        expected_alone = torch.cat([per_sample_loss(model, row[None]) for row in rows])
    plain = (
        digest(model),
        torch.linalg.vector_norm(
            torch.cat([p.detach().double().flatten() for p in model.parameters()])
        ),
    )
    use_ordered_reduction(fsdp2(model, world))
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(per_sample_loss(model, rows), expected)
        # The root's parameters are full now, which none of these may mind.
        assert digest(model) == plain[0]
        assert param_norm(model).item() == pytest.approx(plain[1].item(), rel=1e-12)
        assert len([p for g in param_groups(model, 0.1) for p in g["params"]]) == len(
            list(model.parameters())
        )
    for dealt in deal([rows], granule=1):  # three granules would be refused in training
        with torch.no_grad():
            per_granule = per_sample_loss(model, dealt)
        ids = current_plan().granule_ids
        assert torch.equal(torch.cat(per_granule.parts), expected_alone[list(ids)])
    with pytest.raises(BadInput, match="needs a batch cut into granules"):
        model(rows[:, :-1])


@ranks(2)
def test_granules_cost_no_more_collectives(world):
    model = use_ordered_reduction(fsdp2(lm(), world))
    num_modules = len(model.layers) + 1
    for rows in deal([tokens(8, GPT2)], granule=1):
        with Collectives() as seen:
            batch_mean(per_sample_loss(model, rows)).backward()
    assert seen.counts == {
        "_allgather_base_": 2 * num_modules - 1,  # the root keeps its own for the backward pass
        "alltoall_base_": num_modules,
        "allreduce_": 2,  # the loss, and the used flags
    }


@ranks(2)
def test_a_hook_of_the_user_sees_values_per_granule(world):
    model = lm(DECODER)
    seen = []
    model.layers[0].register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    fsdp2(model, world)
    model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    use_ordered_reduction(model)
    for rows in deal([tokens(4, DECODER)], granule=1):
        batch_mean(per_sample_loss(model, rows)).backward()
    before, (given, returned) = seen
    assert [len(value.parts) for value in (before, given, returned)] == [2, 2, 2]
