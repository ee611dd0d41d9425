"""Forward passes that write to parameters: a gathered copy would take the write with it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.harness import World, run_on_ranks
from unison.errors import UnsupportedOperation
from unison.shard import batch_mean, deal, fully_shard
from unison.shard.api import reshard, unshard


class Follow(nn.Module):
    """A model that writes to a parameter of its own."""

    def __init__(self, write: Callable[[nn.Parameter, Tensor], object], *, is_trained: bool):
        super().__init__()
        self.table = nn.Embedding(11, 6, max_norm=0.5 if write is renormed else None)
        self.mean = nn.Parameter(torch.zeros(6), requires_grad=is_trained)
        self.head = nn.Linear(6, 3)
        self.write = write

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).mean(1)
        self.write(self.mean, x.detach().mean(0))
        return self.head(x + self.mean)


def renormed(mean: nn.Parameter, x: Tensor) -> None:
    """Leave the mean alone: the table is written by torch."""


def in_place(mean: nn.Parameter, x: Tensor) -> None:
    with torch.no_grad():
        mean.lerp_(x, 0.1)


def through_data(mean: nn.Parameter, x: Tensor) -> None:
    mean.data.copy_(x)


WRITES = {each.__name__: each for each in (renormed, in_place, through_data)}


def one_pass(world: World, write: str, is_trained: bool, granule: int | None) -> list[float]:
    torch.manual_seed(0)
    model = Follow(WRITES[write], is_trained=is_trained)
    options = {} if granule is None else {"reducer": "ordered", "gradient_divisor": 1}
    fully_shard(model, **options)
    ids = torch.arange(24).view(8, 3) % 11
    for batch in deal([ids], granule=granule):
        batch_mean(model(batch).square().sum(-1)).backward()
    return [each.norm().item() for each in (model.mean, model.table.weight)]


def refused(world: World, write: str, is_trained: bool, granule: int | None) -> None:
    name = "table.weight" if write == "renormed" else "mean"
    with pytest.raises(UnsupportedOperation, match=rf"'{name}' was written in forward.*lost"):
        one_pass(world, write, is_trained, granule)


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_would_be_lost_is_refused(write, is_trained):
    run_on_ranks(2, refused, write, is_trained, None)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("write", ["renormed", "through_data"])
def test_granules_may_not_see_what_others_wrote(size, write):
    run_on_ranks(size, refused, write, True, 2)


def test_where_the_parameter_is_whole_a_write_stays():
    found = run_on_ranks(1, one_pass, "in_place", True, None)[0]
    assert found[0] > 0


def write_unsharded(world: World, how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3))
    fully_shard(model)
    unshard(model)
    with torch.no_grad():
        nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedOperation, match=r"'0.weight' was written .*after unshard.*lost"):
        reshard(model) if how == "reshard" else model(torch.ones(2, 6) + world.rank)


@pytest.mark.parametrize("how", ["reshard", "forward"])
def test_what_unshard_shows_may_be_read_only(how):
    run_on_ranks(2, write_unsharded, how)


class Look(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.weight.detach().numpy().sum())


def seen_by_numpy(world: World) -> None:
    model = nn.Sequential(Look(6, 3), nn.Linear(3, 3))
    fully_shard(model[0])
    fully_shard(model)
    with pytest.raises(UnsupportedOperation, match=r"numpy.* 'weight' .*clone\(\).numpy\(\)"):
        model(torch.ones(2, 6) + world.rank)


def test_numpy_may_not_share_memory_that_is_freed():
    run_on_ranks(2, seen_by_numpy)
