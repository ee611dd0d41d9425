"""One step over a global batch: the same update however its rows are spread."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.harness import World, assert_close, mean_gradient, run_on_ranks
from unison.config import Mechanism
from unison.errors import Diverged
from unison.models import ModelConfig, build
from unison.rng import Key
from unison.train.batches import num_micro_batches, part_of_rank
from unison.train.optimization import make_optimizer, make_schedule
from unison.train.step import count_targets, mean_loss, train_step
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
MECHANISM = Mechanism(optimizer="sgd", schedule="constant", warmup_steps=0, weight_decay=0.0, lr=1)


def batch_of(num_rows: int) -> dict[str, torch.Tensor]:
    """Rows with unequal numbers of targets, as documents of unequal length have them."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, CONFIG.vocab_size, (num_rows, 12), generator=generator)
    labels = ids[:, 1:].clone()
    for row in range(num_rows):
        labels[row, 11 - row % 5 :] = -100
    return {"input_ids": ids[:, :-1], "labels": labels, "sample_ids": torch.arange(num_rows)}


def part(batch: dict[str, torch.Tensor], rows) -> dict[str, torch.Tensor]:
    return {name: tensor[torch.as_tensor(rows)] for name, tensor in batch.items()}


def world_of(world: World) -> TrainWorld:
    return TrainWorld(
        rank=world.rank,
        size=world.size,
        local_rank=world.rank,
        node=0,
        device=torch.device("cpu"),
    )


def step_on_ranks(world: World, num_rows: int, passes: int, dropout: float = 0.0):
    """Take one float64 SGD step with step length 1; the update is then the gradient itself."""
    model = build(replace(CONFIG, dropout=dropout)).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch = batch_of(num_rows)
    rows = part_of_rank(torch.arange(num_rows).numpy(), rank=world.rank, world_size=world.size)
    pieces = [part(batch, piece) for piece in torch.tensor_split(torch.from_numpy(rows), passes)]
    optimizer = make_optimizer(model, MECHANISM)
    result = train_step(
        DistributedDataParallel(model),
        optimizer,
        make_schedule(optimizer, MECHANISM),
        pieces,
        step=1,
        world=world_of(world),
        key=Key.from_seed(0),
    )
    gradient = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    return gradient, result.loss, result.num_targets


@pytest.mark.parametrize(
    ("world_size", "num_rows", "passes"), [(1, 6, 1), (1, 6, 3), (2, 6, 1), (2, 7, 3), (3, 7, 2)]
)
def test_update_is_the_gradient_of_the_global_mean(world_size, num_rows, passes):
    batch = batch_of(num_rows)
    num_targets = int(count_targets(batch))

    def share_of_loss(model, sample):
        logits = model(sample["input_ids"])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), sample["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        return loss * num_rows / num_targets

    expected = mean_gradient(build(CONFIG), share_of_loss, batch)
    results = run_on_ranks(world_size, step_on_ranks, num_rows, passes)
    for gradient, loss, counted in results:
        assert_close(gradient, expected)
        assert counted == num_targets
        # float32 holds the reported loss
        assert loss == pytest.approx(results[0][1], rel=1e-6)


def test_dropout_is_the_same_on_any_number_of_ranks():
    alone = run_on_ranks(1, step_on_ranks, 6, 1, 0.3)[0]
    without = run_on_ranks(1, step_on_ranks, 6, 1, 0.0)[0]
    assert abs(alone[1] - without[1]) > 1e-3
    for gradient, loss, _ in run_on_ranks(3, step_on_ranks, 6, 2, 0.3):
        assert_close(gradient, alone[0])
        assert loss == pytest.approx(alone[1], rel=1e-6)


def diverge(world: World) -> str:
    model = build(CONFIG)
    with torch.no_grad():
        if world.rank == world.size - 1:  # only one rank meets the NaN
            model.get_parameter("ln_final.weight").fill_(float("nan"))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make_optimizer(model, MECHANISM)
    ddp = DistributedDataParallel(model)
    if world.rank == world.size - 1:  # DDP copied rank 0's parameters
        model.get_parameter("ln_final.weight").data.fill_(float("nan"))
        before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(Diverged, match="the loss became nan at step 7; lower --lr"):
        train_step(
            ddp,
            optimizer,
            make_schedule(optimizer, MECHANISM),
            [batch_of(2)],
            step=7,
            world=world_of(world),
            key=Key.from_seed(0),
        )
    unchanged = zip(before, model.parameters(), strict=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in unchanged)
    return "raised"


def test_not_a_number_on_one_rank_stops_all_before_the_update():
    assert run_on_ranks(2, diverge) == ["raised", "raised"]


def evaluate(world: World, num_rows: int) -> float:
    batch = batch_of(num_rows)
    rows = part_of_rank(torch.arange(num_rows).numpy(), rank=world.rank, world_size=world.size)
    mine = [part(batch, [int(row)]) for row in rows]
    model = build(CONFIG).double()
    model.train()
    loss = mean_loss(model, mine, world=world_of(world))
    assert model.training
    assert dist.get_world_size() == world.size
    return loss


def test_evaluation_with_a_rank_that_has_no_rows():
    alone = run_on_ranks(1, evaluate, 2)[0]
    assert run_on_ranks(3, evaluate, 2) == pytest.approx([alone] * 3, rel=1e-12)


@pytest.mark.parametrize(
    ("batch_size", "world_size", "micro", "expected"),
    [(16, 2, None, 1), (16, 2, 8, 1), (16, 2, 3, 3), (7, 2, 2, 2), (5, 5, 1, 1)],
)
def test_same_number_of_passes_everywhere(batch_size, world_size, micro, expected):
    passes = num_micro_batches(batch_size, world_size=world_size, micro_batch_size=micro)
    assert passes == expected
