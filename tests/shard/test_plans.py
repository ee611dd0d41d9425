"""The plan rides with the batch: readers that look ahead, two loaders, loops left early."""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.harness import World, ranks, run_on_ranks
from tests.shard.common import GPT2, per_sample_loss, tokens
from unison.errors import BadInput
from unison.models import build
from unison.shard import auto_shard, batch_mean, current_plan, deal, digest
from unison.shard.granules import plan_of

SIZES = (4, 4, 3, 1)  # of the batches; padding differs


def ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """Read one batch before the last one is used, as prefetching readers do."""
    last: list[Any] = []
    for batch in batches:
        if last:
            yield last.pop()
        last.append(batch)
    yield from last


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "cloned": Tensor.clone,
    "cast": lambda rows: rows.int().long(),
    "stacked": lambda rows: torch.stack(list(rows)),
    "written": lambda rows: torch.empty(rows.shape, dtype=rows.dtype).copy_(rows),
    "copied deeply": copy.deepcopy,
}


def run(world: World, reader: str, granule: int | None) -> tuple[list[float], str]:
    reducer = "fast" if granule is None else "ordered"
    model = auto_shard(build(GPT2, seed=1), reducer=reducer, gradient_divisor=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = deal([tokens(size, GPT2, step) for step, size in enumerate(SIZES)], granule=granule)
    others = deal([tokens(2, GPT2, 50 + step) for step in range(9)], granule=granule)
    losses = []
    batches: Iterable[Any] = loader
    if reader == "ahead":
        batches = ahead(loader)
    elif reader == "two loaders":
        batches = (rows for rows, _ in zip(loader, others, strict=False))
    elif reader in COPIES:
        batches = ahead(COPIES[reader](rows) for rows in loader)
    other = iter(others)
    for rows in batches:
        with torch.no_grad():
            before = per_sample_loss(model, rows)
        losses_of_rows = per_sample_loss(model, rows)
        if reader == "between model and mean":
            next(other)
        loss = batch_mean(losses_of_rows)
        assert batch_mean(before).item() == loss.item()
        loss.backward()
        losses.append(loss.item())
        assert current_plan() is not None
        optimizer.step()
        optimizer.zero_grad()
    return losses, digest(model)


@cache
def plain(size: int, granule: int | None) -> list[tuple[list[float], str]]:
    return run_on_ranks(size, run, "plain", granule)


@pytest.mark.parametrize("granule", [2, None])
@pytest.mark.parametrize("reader", ["ahead", "two loaders", "between model and mean"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_is_told_from_those_handed_out_since(size, reader, granule):
    """S9: the second-last loss was 0.6113 instead of 0.6578."""
    assert run_on_ranks(size, run, reader, granule) == plain(size, granule)


@pytest.mark.parametrize("reader", COPIES)
def test_copies_know_their_batch(reader):
    """A batch copied to a device was taken for the one that was handed out after it."""
    assert run_on_ranks(2, run, reader, None) == plain(2, None)


def broken_off(world: World, is_broken: bool) -> str:
    model = auto_shard(build(GPT2, seed=1), reducer="ordered", gradient_divisor=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_broken:
        for rows in deal([tokens(8, GPT2, 9)], granule=1, micro_batch=1):
            batch_mean(per_sample_loss(model, rows)).backward()
            break
    for rows in deal([tokens(6, GPT2)], granule=1, micro_batch=2):
        batch_mean(per_sample_loss(model, rows)).backward()
    optimizer.step()
    return digest(model)


@pytest.mark.parametrize("size", [1, 2])
def test_a_logical_batch_that_is_left_early_is_forgotten(size):
    """S12."""
    assert run_on_ranks(size, broken_off, True) == run_on_ranks(size, broken_off, False)


@ranks(1, 2)
def test_lists_and_arrays_are_dealt(world):
    batch = {
        "ids": np.arange(6).reshape(3, 2),
        "names": ["a", "b", "c"],
        "mask": torch.ones(3),
        "temperature": 0.7,
    }
    for dealt in deal([batch]):
        plan = current_plan()
        rows = plan.sample_ids.clamp(min=0).tolist()
        assert dealt["names"] == [batch["names"][row] for row in rows]
        assert dealt["temperature"] == 0.7
        assert isinstance(dealt["ids"], Tensor)
        assert dealt["ids"].tolist() == batch["ids"][rows].tolist()


def test_a_list_of_another_length_is_refused():
    with pytest.raises(BadInput, match=r"one value per sample, found sizes \['2', '3'\]"):
        next(iter(deal([(torch.ones(3), ["a", "b"])])))


@ranks(2)
def test_padding_is_a_copy_of_a_real_row(world):
    (rows,) = deal([torch.tensor([[5.0], [6.0], [7.0]])], granule=2)
    assert all(bool((part > 0).all()) for part in rows.parts)
    (rows,) = deal([torch.tensor([[5.0]])])
    assert rows.tolist() == [[5.0]]  # a rank without a row, too
    assert current_plan() is None or current_plan().weights.sum() == (world.rank == 1)


def test_a_plain_module_takes_dealt_batches():
    model = nn.Linear(3, 1)
    batches = [torch.ones(size, 3) * size for size in (4, 3)]
    expected = [model(batch).mean().item() for batch in batches]
    found = [batch_mean(model(rows)[:, 0]).item() for rows in ahead(deal(batches, granule=2))]
    torch.testing.assert_close(found, expected)


def test_a_dealt_tensor_is_used_as_a_plain_one(tmp_path):
    """By whole models, compiled ones, files, numpy; its plan goes with it."""
    for rows in ahead(deal([torch.arange(6.0).view(3, 2), torch.ones(1, 2)])):
        plan = plan_of(rows)
        assert plan.num_samples == len(rows)
        values, places = rows.max(dim=1)
        assert [plan_of(each) for each in (values, places, rows[:, :1] * 2)] == [plan] * 3
        assert [plan_of(each) for each in rows.split(1)] == [plan] * len(rows)
        assert rows[:1]._base is None or not rows[:1]._base._is_view()
        torch.save(rows, tmp_path / "rows.pt")
        assert type(torch.load(tmp_path / "rows.pt")) is Tensor
        assert np.asarray(rows).sum() == rows.sum().item()
        model = nn.Linear(2, 1)
        assert type(model(rows)) is Tensor
        model.compile(backend="eager", fullgraph=True)
        torch.testing.assert_close(model(rows), model.forward(rows.as_subclass(Tensor)))
        inputs = rows.clone().requires_grad_()
        model.forward(inputs).sum().backward()
        assert inputs.grad.shape == rows.shape
