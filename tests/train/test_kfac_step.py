"""One step with K-FAC over a global batch: that of the library's own loop, however rows lie."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD, AdamW

import unison
from tests.harness import World, assert_close, run_on_ranks
from tests.train.test_step import CONFIG, MECHANISM, batch_of, passes_of
from unison.config import FISHERS, Execution, Kfac, MechanismConfig, Output, TrainConfig
from unison.models import build
from unison.rng import Key
from unison.shard import full_parameters
from unison.shard.deal import take_mean_was_used
from unison.train.step import ADAM_BETAS, make_optimizer, make_schedule, settings_of, train_step
from unison.train.world import Parallel


def step_with_kfac(
    world: World,
    kfac: Kfac,
    batch: dict,
    shard: str = "none",
    reducer: str = "fast",
    micro_batch: int | None = None,
    owner_fraction: float = 0.0,
) -> dict:
    """Take one float64 step of length 1; returns its direction by parameter."""
    mechanism = replace(MECHANISM, kfac=kfac, reducer=reducer)
    execution = Execution(device="cpu", shard=shard, owner_fraction=owner_fraction)
    config = TrainConfig(mechanism=mechanism, execution=execution, output=Output(folder="unused"))
    model = build(CONFIG).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parallel = Parallel(model, shard, reducer=reducer, world_size=world.size)
    optimizer = make_optimizer(model, mechanism)
    preconditioner = unison.KFAC(parallel.module, settings_of(config), optimizer)
    granule = 1 if reducer == "ordered" else None
    train_step(
        parallel,
        optimizer,
        make_schedule(optimizer, mechanism),
        passes_of(batch, granule=granule, micro_batch=micro_batch),
        step=1,
        key=Key.from_seed(0),
        kfac=preconditioner,
    )
    preconditioner.detach()
    take_mean_was_used()  # FSDP2 does not ask; the next model in this process would
    after = dict(full_parameters(model))
    return {name: before[name] - after[name] for name in before}


def by_hand(kfac: Kfac, batch: dict) -> dict:
    """The loop of docs/kfac.md."""
    model = build(CONFIG).double()
    preconditioner = unison.KFAC(
        model,
        unison.KFACConfig(damping=kfac.damping, fisher=kfac.fisher, betas=ADAM_BETAS),
    )
    logits = model(batch["input_ids"])
    mask = batch["labels"] != -100
    preconditioner.sample(logits, mask).backward(retain_graph=True)
    F.cross_entropy(logits.mT, batch["labels"], ignore_index=-100).backward()
    preconditioner.step()
    preconditioner.detach()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("fisher", FISHERS)
def test_a_step_is_that_of_the_library(fisher):
    kfac, batch = Kfac(fisher=fisher), batch_of(5)
    (found,) = run_on_ranks(1, step_with_kfac, kfac, batch)
    assert_close(found, by_hand(kfac, batch))


@pytest.mark.parametrize(
    ("size", "shard", "reducer", "micro_batch", "fisher"),
    [
        (2, "full", "fast", 2, "mc"),
        (2, "ddp", "fast", None, "empirical"),
        (3, "ddp", "fast", 1, "empirical"),
        (2, "full", "ordered", 2, "empirical"),
        (2, "fsdp2", "fast", 2, "empirical"),
        (2, "zero2", "fast", None, "mc"),
        (2, "hybrid", "fast", None, "mc"),
    ],
)
def test_ranks_and_passes_take_the_step_of_one(size, shard, reducer, micro_batch, fisher):
    kfac, batch = Kfac(fisher=fisher), batch_of(5)  # uneven rows, uneven targets
    for found in run_on_ranks(size, step_with_kfac, kfac, batch, shard, reducer, micro_batch):
        assert_close(found, by_hand(kfac, batch))


@pytest.mark.parametrize("fisher", ["empirical", "forward"])
def test_ignored_targets_are_as_if_cut_off(fisher):
    """Nothing that comes after the last target reaches the step."""
    whole = batch_of(4)
    whole["labels"] = torch.cat([whole["input_ids"][:, 1:7], torch.full((4, 5), -100)], dim=1)
    whole["num_targets"] = 24
    short = {**whole, "input_ids": whole["input_ids"][:, :6], "labels": whole["labels"][:, :6]}
    steps = [run_on_ranks(1, step_with_kfac, Kfac(fisher=fisher), each) for each in (whole, short)]
    assert_close(steps[0][0], steps[1][0])


def test_who_owns_a_layer_changes_no_bits():
    batch = batch_of(4)
    few = run_on_ranks(2, step_with_kfac, Kfac(), batch, "full", "ordered", None, 0.0)[0]
    all_ = run_on_ranks(2, step_with_kfac, Kfac(), batch, "full", "ordered", None, 1.0)[0]
    assert all(torch.equal(few[name], all_[name]) for name in few)


def test_the_optimizer_that_follows():
    model = build(CONFIG)

    def of(**settings):
        return make_optimizer(model, MechanismConfig(**settings))

    assert isinstance(of(), AdamW)
    for graft, momentum in {"adam": 0.0, "sgd": 0.9, "none": 0.9}.items():
        optimizer = of(optimizer="sgd", kfac=Kfac(graft=graft))
        assert isinstance(optimizer, SGD)
        assert {group["momentum"] for group in optimizer.param_groups} == {momentum}
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}
