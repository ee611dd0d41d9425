"""Rows that stand where a pass has no record: zeros, or a public record of the user's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import unison
from tests.privacy.common import attach, loader
from unison.clip.costs import MODES
from unison.errors import BadInput, UnsupportedOperation
from unison.privacy.sampling import Poisson, Shuffled
from unison.shard.sharded_tensor import local_part

NUM_RECORDS, WIDTH = 3, 4


class Records(Dataset):
    """Numbers that have a logarithm, a label and a name."""

    def __len__(self) -> int:
        return NUM_RECORDS

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        x = torch.rand(WIDTH, generator=generator) + 0.5
        return {"x": x, "y": index % 2, "name": f"r{index}"}


PUBLIC = {"x": torch.ones(WIDTH), "y": 1, "name": "nobody"}


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.layer, self.kind = nn.Linear(WIDTH, 2), kind

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "log":
                return self.layer((x * self.scale).log())
            case "inverse":
                return self.layer(self.scale * (1 / x))
            case _:
                if not x.any(-1).all():
                    raise ZeroDivisionError("a row of zeros")
                return self.layer(x * self.scale)


def collate(records: list[dict[str, Any]]) -> dict[str, Any]:
    names = [record["name"] for record in records]
    tensors = {
        key: torch.stack([torch.as_tensor(record[key]) for record in records]) for key in ("x", "y")
    }
    return {**tensors, "name": names}


def gradients(kind: str, *, granule: int | None = None, **settings: Any) -> list[list[Tensor]]:
    """The clipped sums of each step, without noise."""
    model = Model(kind)
    if granule is not None:
        unison.fully_shard(model, reducer="ordered", gradient_divisor=1)
    loader = DataLoader(Records(), batch_size=NUM_RECORDS, shuffle=True, collate_fn=collate)
    engine, module, optimizer, private = attach(
        model,
        data_loader=loader,
        noise_multiplier=0.0,
        expected_batch_size=NUM_RECORDS,
        granule=granule,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        **{"sampling": Shuffled(batch_size=NUM_RECORDS, num_records=NUM_RECORDS), **settings},
    )
    found = []
    for batch in private:
        losses = cross_entropy(module(batch["x"]), batch["y"], reduction="none")
        unison.batch_mean(losses).backward()
        if private.current.is_last:
            found.append([local_part(each.grad).clone().flatten() for each in module.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    engine.detach()
    return found


@pytest.mark.parametrize("reduced", [torch.mean, lambda losses: losses.sum() / len(losses)])
def test_a_mean_of_granules_is_refused_by_the_name_of_the_remedy(reduced):
    engine, module, _, private = attach(
        granule=4, data_loader=loader(8, shuffle=True), poisson_sampling=False
    )
    x, y = next(iter(private))
    losses = cross_entropy(module(x), y, reduction="none")
    with pytest.raises(UnsupportedOperation, match=r"every granule.*unison\.batch_mean"):
        reduced(losses).backward()
    engine.detach()


def test_a_mean_of_a_batch_counts_no_padding():
    def norms(mean: Any) -> Tensor:
        engine, module, _, private = attach(
            data_loader=loader(5, shuffle=True), max_physical_batch_size=4, poisson_sampling=False
        )
        for x, y in private:  # 4 rows, and then 1 and 3 of padding
            mean(cross_entropy(module(x), y, reduction="none")).backward()
            if private.current.is_last:
                return engine.per_sample_norms()
        raise AssertionError

    torch.testing.assert_close(norms(unison.batch_mean), norms(torch.mean))


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


SHARDED_MODES = [mode for mode in MODES if mode != "recompute_bk"]  # refused where sharded


@pytest.mark.parametrize("padding_row", [None, PUBLIC], ids=["zeros", "public"])
@pytest.mark.parametrize("clipping", SHARDED_MODES)
@pytest.mark.parametrize("kind", ["log", "inverse"])
def test_padding_without_a_finite_gradient_is_left_out(kind, clipping, padding_row):
    """Zeros have an infinite gradient in each of them."""
    settings = {"clipping": clipping, "padding_row": padding_row}
    expected = gradients(kind, clipping=clipping)
    assert any(bool(each.any()) for each in expected[0])
    assert_same(gradients(kind, granule=2, **settings), expected)
    assert_same(gradients(kind, granule=2, max_physical_batch_size=2, **settings), expected)


def test_a_public_record_for_models_that_do_not_take_zeros():
    expected = gradients("picky")
    assert_same(gradients("picky", granule=2, padding_row=PUBLIC), expected)
    with pytest.raises(ZeroDivisionError):
        gradients("picky", granule=2)


def test_an_empty_draw_is_a_public_record():
    settings: dict[str, Any] = {"sampling": Poisson(rate=0.3), "padding_row": PUBLIC}
    for granule in (None, 2):
        found = gradients("picky", granule=granule, **settings)
        empty = [not any(bool(each.any()) for each in step) for step in found]
        assert any(empty)
        assert not all(empty)
        assert all(bool(each.isfinite().all()) for step in found for each in step)


def test_what_padding_looks_like():
    loader = DataLoader(Records(), batch_size=NUM_RECORDS, shuffle=True, collate_fn=collate)
    sampling = Poisson(rate=1e-6)
    _, _, _, private = attach(
        Model("log"),
        data_loader=loader,
        sampling=sampling,
        expected_batch_size=3,
        padding_row=PUBLIC,
    )
    batch = next(iter(private))
    assert batch["x"].tolist() == [PUBLIC["x"].tolist()]
    assert batch["y"].tolist() == [1]
    assert batch["name"] == ["nobody"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**PUBLIC, "x": torch.ones(2)}, r"padding_row has shape \[2\] where records .* \[4\]"),
        (PUBLIC | {"x": torch.ones(2, WIDTH)}, r"padding_row has shape \[2, 4\] where records"),
    ],
)
def test_a_row_of_another_shape_is_refused(row, message):
    with pytest.raises(BadInput, match=message):
        gradients("log", granule=2, padding_row=row)


def test_a_longer_row_is_cut_to_the_records():
    """As where `collate_fn` pads to the longest record of each batch."""
    row = {**PUBLIC, "x": torch.ones(9)}
    assert_same(gradients("log", granule=2, padding_row=row), gradients("log"))
