"""One step over a global batch: the same update however its rows are spread."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

import unison
from tests.harness import World, assert_close, mean_gradient, run_on_ranks
from unison.config import MechanismConfig
from unison.errors import BadInput, Diverged
from unison.models import ModelConfig, build
from unison.rng import Key
from unison.shard import full_parameters
from unison.shard.sharded_tensor import local_part
from unison.train.step import make_optimizer, make_schedule, mean_loss, to_device, train_step
from unison.train.world import Parallel
from unison.train.world import World as TrainWorld

CONFIG = ModelConfig(
    family="decoder",
    vocab_size=37,
    context_length=11,
    d_model=16,
    num_layers=2,
    num_heads=2,
    d_ff=24,
)
MECHANISM = MechanismConfig(
    optimizer="sgd", schedule="constant", warmup_steps=0, weight_decay=0.0, lr=1
)
CPU = torch.device("cpu")


def batch_of(num_rows: int) -> dict:
    """Rows with unequal numbers of targets, as documents of unequal length have them."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, CONFIG.vocab_size, (num_rows, 12), generator=generator)
    labels = ids[:, 1:].clone()
    for row in range(num_rows):
        labels[row, 11 - row % 5 :] = -100
    return {
        "input_ids": ids[:, :-1],
        "labels": labels,
        "sample_ids": torch.arange(num_rows),
        "num_targets": int((labels != -100).sum()),
    }


def passes_of(batch: dict, **options) -> Iterator[dict]:
    for dealt in unison.deal([batch], **options):
        yield to_device(dealt, CPU)


def step_on_ranks(
    world: World,
    num_rows: int,
    shard: str,
    reducer: str = "fast",
    micro_batch: int | None = None,
    dropout: float = 0.0,
):
    """Take one float64 SGD step with step length 1; the update is then the gradient itself."""
    model = build(replace(CONFIG, dropout=dropout)).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parallel = Parallel(model, shard, reducer=reducer, world_size=world.size)
    optimizer = make_optimizer(model, MECHANISM)
    granule = 1 if reducer == "ordered" else None
    figures, num_targets = train_step(
        parallel,
        optimizer,
        make_schedule(optimizer, MECHANISM),
        passes_of(batch_of(num_rows), granule=granule, micro_batch=micro_batch),
        step=1,
        key=Key.from_seed(0),
    )
    after = dict(full_parameters(model))
    gradient = {name: before[name] - after[name] for name in before}
    return gradient, figures["train/loss"], num_targets


def expected_gradient(num_rows: int) -> tuple[dict, int]:
    batch = batch_of(num_rows)
    num_targets = batch.pop("num_targets")

    def share_of_loss(model, sample):
        logits = model(sample["input_ids"])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), sample["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        return loss * num_rows / num_targets

    return mean_gradient(build(CONFIG), share_of_loss, batch), num_targets


@pytest.mark.parametrize("micro_batch", [None, 1, 2])
@pytest.mark.parametrize(
    ("size", "num_rows", "shard", "reducer"),
    [
        (1, 6, "none", "fast"),
        (1, 6, "ddp", "fast"),
        (2, 7, "ddp", "fast"),
        (3, 7, "full", "fast"),
        (3, 7, "zero2", "fast"),
        (3, 7, "full", "ordered"),
        (3, 2, "full", "fast"),
    ],
)
def test_update_is_the_gradient_of_the_global_mean(size, num_rows, shard, reducer, micro_batch):
    expected, num_targets = expected_gradient(num_rows)
    results = run_on_ranks(size, step_on_ranks, num_rows, shard, reducer, micro_batch)
    for gradient, loss, counted in results:
        assert_close(gradient, expected)
        assert counted == num_targets
        assert loss == pytest.approx(results[0][1], rel=1e-12)


@pytest.mark.parametrize(
    ("shard", "reducer"), [("full", "fast"), ("full", "ordered"), ("ddp", "fast")]
)
def test_dropout_is_the_same_on_any_number_of_ranks(shard, reducer):
    run = partial(step_on_ranks, num_rows=6, dropout=0.3)
    alone = run_on_ranks(1, partial(run, shard="none"))[0]
    without = run_on_ranks(1, partial(step_on_ranks, num_rows=6, shard="none"))[0]
    assert abs(alone[1] - without[1]) > 1e-3
    for gradient, loss, _ in run_on_ranks(3, partial(run, shard=shard, reducer=reducer)):
        assert_close(gradient, alone[0])
        assert loss == pytest.approx(alone[1], rel=1e-9)


def diverge(world: World, shard: str) -> str:
    model = build(CONFIG)
    parallel = Parallel(model, shard, reducer="fast", world_size=world.size)
    optimizer = make_optimizer(model, MECHANISM)
    if world.rank == world.size - 1:  # only one rank meets the NaN
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
    before = [local_part(p).detach().clone() for p in model.parameters()]
    with pytest.raises(Diverged, match="the loss became nan at step 7; lower --lr"):
        train_step(
            parallel,
            optimizer,
            make_schedule(optimizer, MECHANISM),
            passes_of(batch_of(4)),
            step=7,
            key=Key.from_seed(0),
        )
    unchanged = zip(before, map(local_part, model.parameters()), strict=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in unchanged)
    return "raised"


@pytest.mark.parametrize("shard", ["ddp", "full"])
def test_not_a_number_on_one_rank_stops_all_before_the_update(shard):
    assert run_on_ranks(2, diverge, shard) == ["raised", "raised"]


def evaluate(world: World, num_rows: int, shard: str) -> float:
    batch = batch_of(num_rows)
    rows = torch.arange(num_rows).tensor_split(world.size)[world.rank]
    most = -(-num_rows // world.size)
    mine = [
        {name: batch[name][rows[i : i + 1]] for name in ("input_ids", "labels", "sample_ids")}
        for i in range(most)
    ]
    model = build(CONFIG).double()
    Parallel(model, shard, reducer="fast", world_size=world.size)
    train_world = TrainWorld(
        rank=world.rank, size=world.size, local_rank=world.rank, node=0, device=CPU
    )
    return mean_loss(model, mine, num_rows=num_rows, world=train_world)


@pytest.mark.parametrize("shard", ["ddp", "full"])
def test_evaluation_with_a_rank_that_has_no_rows(shard):
    alone = run_on_ranks(1, evaluate, 2, "none")[0]
    assert run_on_ranks(3, evaluate, 2, shard) == pytest.approx([alone] * 3, rel=1e-12)


def test_none_is_for_one_rank():
    with pytest.raises(BadInput, match="shard 'none' is for one rank, found 2"):
        Parallel(build(CONFIG), "none", reducer="fast", world_size=2)
