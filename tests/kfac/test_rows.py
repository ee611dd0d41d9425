"""Heads whose rows ranks share in blocks: one rank's steps, to the bit, in a part of its memory."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import unison
from tests.harness import World, run_on_ranks
from tests.kfac.common import loss, relative, settings
from tests.kfac.sharded import difference, run
from unison.kfac import NotInvertible, layers
from unison.kfac.inverse import Columns, apply_shared, fold, invert, join
from unison.parallel.exchange import SharedBlocks
from unison.shard.ranks import Ranks

BITS: dict[str, Any] = {"granule": 2, "dtype": torch.float32, "counts": (7, 3)}
CASES: dict[str, dict[str, Any]] = {
    "averaged": {"policy": "all", "max_rank": 8, "kl_clip": 1e-4},
    "one update": {"policy": "all", "decay": 0.0, "damping_form": "factored", "graft": "sgd"},
    "joint": {"policy": "all", "damping_form": "joint", "max_factor_size": 13},
    "true head": {"head": "exact", "max_rank": 8, "policy": "small_only"},
    "bounded": {"head": "exact", "policy": "all", "max_condition_number": 50.0, "graft": "none"},
}


def run_in_blocks(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """A run in which all matrices above `max_factor_size` rows are cut into short blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "BLOCK_ROWS", case.get("block_rows", 4))
        own = {key: each for key, each in case.items() if key != "block_rows"}
        return run(world, {"max_factor_size": 18, **own})


def check_bits(size: int, how: str, **case: Any) -> None:
    case = {**BITS, **case}
    expected = run_on_ranks(1, run_in_blocks, {"how": "units", **case})[0]
    assert any(each["block_rows"] for each in expected["layers"])
    found = run_on_ranks(size, run_in_blocks, {"how": how, **case})
    for each in found:
        assert each["calls"] == found[0]["calls"]
        assert each["digest"] == expected["digest"]
        assert difference(each, expected) == 0.0


def check_close(size: int, how: str, shares: list[int] | None, **case: Any) -> None:
    """Blocks on ranks are what a whole layer on one rank is."""
    case = {"counts": (6, 6), **case}
    whole = run_on_ranks(1, run_in_blocks, {"how": "none", **case, "block_rows": 0})[0]
    cut = {} if shares is None else {"shares": shares}
    for found in run_on_ranks(size, run_in_blocks, {"how": how, **case, **cut}):
        assert any(each["block_rows"] for each in found["layers"])
        for name, value in whole["parameters"].items():
            assert relative(found["parameters"][name], value) <= 1e-12


def test_ordered_is_the_same_bits():
    check_bits(3, "units", **CASES["averaged"], micro_batch=2)


def test_a_rank_without_rows():
    check_bits(4, "units", **CASES["true head"], block_rows=8)  # 19 classes, 3 blocks


def test_uneven_ranks_and_an_empty_one():
    check_close(3, "units", [4, 0, 2], **CASES["true head"])


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("size", "how"), [(2, "units"), (3, "units"), (4, "units"), (4, "hybrid"), (2, "fsdp2")]
)
def test_every_way_has_the_bits_of_one_rank(size, how, case):
    check_bits(size, how, **CASES[case], counts=(8, 8, 8))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("size", "how", "shares"),
    [
        (1, "none", None),
        (2, "fsdp2", [0, 6]),
        (3, "fsdp2", [4, 0, 2]),
        (3, "none", [4, 0, 2]),
        (3, "ddp", None),
        (4, "units", [1, 0, 3, 2]),
        (4, "hybrid", None),
        (4, "hsdp", None),
    ],
)
def test_every_way_is_a_whole_layer_on_one_rank(size, how, shares, case):
    check_close(size, how, shares, **CASES[case])
    check_close(size, how, shares, **CASES[case], block_rows=16)  # ranks without rows


def test_each_rank_saves_its_blocks_and_others_read_them(tmp_path):
    case = {**BITS, **CASES["averaged"], "counts": (6, 7, 6, 8)}
    whole = run_on_ranks(1, run_in_blocks, {"how": "units", **case})[0]
    begun = {"how": "units", **case, "folder": str(tmp_path / "curvature"), "stop": 2}
    stored = run_on_ranks(2, run_in_blocks, begun)[0]["stored"]
    goes_on = {"how": "units", **case, "stored": stored}
    for size, folder in ((3, begun["folder"]), (1, None)):
        for found in run_on_ranks(size, run_in_blocks, {**goes_on, "folder": folder}):
            assert found["digest"] == whole["digest"]


# --- one process ----------------------------------------------------------------------------------


def head_of(classes: int, block_rows: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """K-FAC after three steps of a classifier, and its parameters."""
    monkeypatch.setattr(layers, "BLOCK_ROWS", block_rows)
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, classes)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kfac = unison.KFAC(model, settings(**{"max_factor_size": 8, **changes}), optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        logits = model(torch.randn(4, 6).double())
        kfac.sample(logits).backward()
        loss(logits).backward()
        kfac.step()
        optimizer.step()
    return kfac, torch.cat([each.detach().reshape(-1) for each in model.parameters()])


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_a_whole_layer(case, monkeypatch):
    changes = {**CASES[case], "max_factor_size": 13, "decay": 0.5, "max_rank": 7}
    cut, found = head_of(31, 4, monkeypatch, **changes)
    whole, expected = head_of(31, 0, monkeypatch, **changes)
    assert [each.block_rows for each in cut.layers] == [0, 4]
    assert relative(found, expected) <= 1e-12
    assert "ranks share its rows in 8 blocks" in repr(cut)
    usages = [each.memory_usage()["grafting"] for each in (cut, whole)]
    assert usages[0] - usages[1] in (0, 2 * 7 * 8)  # Adam counts each block's steps
    assert not any(each.block_rows for each in whole.layers)


def test_a_head_that_is_laid_out_by_inputs_stays_whole(monkeypatch):
    monkeypatch.setattr(layers, "BLOCK_ROWS", 4)

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 20, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    model = Transposed()
    kfac = unison.KFAC(model, settings(max_factor_size=8, head="exact"))
    logits = model(torch.randn(3, 5).double())
    kfac.sample(logits).backward()
    loss(logits).backward()
    kfac.step()
    assert [(each.g_form, each.block_rows) for each in kfac.layers] == [("softmax", 0)]


def test_many_columns_are_folded_by_blocks(gen):
    u = torch.randn(20, 9, generator=gen, dtype=torch.float64)
    shared = SharedBlocks(Ranks(None), 3)
    blocks = [each.contiguous() for each in u.split(4, dim=1)]
    rows = Columns(blocks, [0, 4, 8], 20, 9, u[:0, :0], shared)
    folded = fold(rows)
    assert folded.count == 9
    found = torch.cat(folded.blocks, dim=1)
    assert relative(found.T @ found, u.T @ u) <= 1e-12
    kept, tail = join(None, rows, 4)
    whole, expected = join(None, Columns.whole(u), 4)
    found = torch.cat(kept.blocks, dim=1)
    assert tail == pytest.approx(expected, rel=1e-12)
    assert relative(found.T @ found, whole.blocks[0].T @ whole.blocks[0]) <= 1e-12


def share_of_a_head(world: World, sizes: tuple[int, int, int]) -> tuple[int, int, float]:
    """Bytes held of a head's columns and inverse, at its peak too, and how far off a product is."""
    classes, tokens, rows = sizes
    shared = SharedBlocks(Ranks.of(None), -(-classes // rows))
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(tokens, classes, generator=generator), dim=-1) / tokens**0.5
    y = torch.randn(classes, 1, generator=generator)
    starts = [rows * number for number in shared.numbers]
    blocks = [p[:, low : low + rows].clone() for low in starts]
    own: dict[str, Any] = {
        "a": torch.eye(1),
        "u_g": Columns(blocks, starts, tokens, classes, p[:0, :0], shared),
        "t_g": torch.tensor(0.0),
        "p_g": p.sum(0) / tokens**0.5,
    }
    config = settings(damping=(1.0, 1e-4), damping_form="factored")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        inverse = invert({"head": own}, config)["head"]
        ys = [y[low : low + rows] for low in starts]
        found = apply_shared(inverse, shared, ys, 1, y)
    allocated = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    held = sum(each.nbytes for each in (*blocks, *inverse.values()))
    parts = [found] if world.size == 1 else world.gather(found)
    whole = torch.cat([each for part in parts for each in part]).double()
    back = (own["p_g"][:, None].double() + 1e-4) * whole - p.double().T @ (p.double() @ whole)
    return held, peak + sum(each.nbytes for each in blocks), relative(back / 0.5, y.double())


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((9000, 64, 1024), 2**24), pytest.param((50_257, 512, 1024), 2**30, marks=pytest.mark.full)],
)
def test_a_rank_holds_its_share_of_a_large_head(sizes, most):
    ((alone, peak, off),) = run_on_ranks(1, share_of_a_head, sizes)
    assert off <= 1e-4
    assert peak < most
    found = run_on_ranks(3, share_of_a_head, sizes)
    assert sum(held for held, *_ in found) <= alone * 1.001
    assert max(held for held, *_ in found) <= alone * (1 / 3 + 0.08)
    assert max(each for _, each, _ in found) <= 0.6 * peak
    assert max(off for *_, off in found) <= 1e-4


def test_a_head_without_an_inverse_is_refused():
    shared = SharedBlocks(Ranks(None), 2)
    u = Columns([torch.ones(1, 2) / 2] * 2, [0, 2], 1, 4, torch.zeros(0), shared)
    own = {"a": torch.eye(2), "u_g": u, "p_g": torch.zeros(4), "t_g": torch.tensor(0.0)}
    with pytest.raises(NotInvertible, match="G of the head 'layer'"):
        invert({"layer": own}, settings(damping=(1.0, 0.0), damping_form="factored"))
