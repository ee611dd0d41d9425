"""Sides held as the columns of tokens: as exact as matrices, and chosen by what they cost."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unison
from tests.harness import World, assert_close, run_on_ranks
from tests.kfac.common import CLASSES, Transformer, flat_gradient, loss, relative, settings
from tests.kfac.sharded import difference, run
from unison.errors import BadInput
from unison.kfac import KFACConfig, Method, NotInvertible, layers
from unison.kfac.inverse import Columns, apply, fold, invert, join
from unison.kfac.layers import forms_of, side_costs
from unison.kfac.linalg import ring_apply, ring_factor
from unison.shard.ranks import Ranks

FORMS = ("pi", "factored", "joint")


def stepped(policy: str, num_rows: int, num_steps: int = 1, **changes: Any) -> Any:
    """K-FAC after some steps of a small model, and the last of them."""
    torch.manual_seed(1)
    model = Transformer(d=8, d_ff=40).double()
    kfac = unison.KFAC(model, settings(policy=policy, graft="none", **changes))
    for _ in range(num_steps):
        x, y = torch.randint(0, 11, (num_rows, 5)), torch.randint(0, CLASSES, (num_rows, 5))
        mask = torch.rand(num_rows, 5) < 0.7
        mask[0, 0] = True
        model.zero_grad()
        logits = model(x)
        kfac.sample(logits, mask).backward()
        loss(logits, y, mask).backward()
        kfac.step()
    return kfac, flat_gradient(model)


@pytest.mark.parametrize("num_rows", [2, 30])  # fewer tokens than the longest side, and more
@pytest.mark.parametrize("form", FORMS)
def test_low_rank_is_dense(form, num_rows):
    for changes in (
        {},
        {"sharing": "reduce"},
        {"num_steps": 4, "decay": 0.9, "max_rank": 1000},
        {"fisher": "empirical", "inverse": "eigen"},
    ):
        kfac, found = stepped("all", num_rows, damping_form=form, **changes)
        dense, expected = stepped("small_only", num_rows, damping_form=form, **changes)
        assert relative(found, expected) <= 1e-12, changes
        factored = [layer for layer in kfac.layers if layer.method is Method.KRONECKER]
        assert [layer.low_rank for layer in factored] == [("g",)] * 7
        for name, wanted in dense.factors().items():
            own = kfac.factors()[name]
            if "g" in wanted:
                assert relative(own["u_g"].T @ own["u_g"], wanted["g"]) <= 1e-12
                assert float(own["t_g"]) == 0.0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sides", [("a",), ("g",), ("a", "g")])
def test_either_side_is_inverted(sides, form, gen):
    m, n = 9, 7
    rows = {
        "a": torch.randn(4, m, generator=gen, dtype=torch.float64),
        "g": torch.randn(5, n, generator=gen, dtype=torch.float64),
    }
    dense = {side: u.T @ u for side, u in rows.items()}
    own: dict[str, Tensor] = {}
    for side, u in rows.items():
        own |= {f"u_{side}": u, f"t_{side}": torch.tensor(0.0)} if side in sides else {}
        own |= {} if side in sides else {side: dense[side]}
    config = settings(damping=1e-2, damping_form=form)
    y = torch.randn(n, m, generator=gen, dtype=torch.float64)
    found, expected = (
        apply(invert({"layer": each}, config)["layer"], y, [m, 0])[0] for each in (own, dense)
    )
    assert relative(found, expected) <= 1e-12


def test_the_seeds_ways_are_caught(gen):
    """Grams of ranks added up, and one rank's inverse after the other's, are not the inverse."""
    parts = [torch.randn(t, 64, generator=gen, dtype=torch.float64) / 3 for t in (32, 32)]
    u, damping = torch.cat(parts), 1.0
    y = torch.randn(64, 3, generator=gen, dtype=torch.float64)
    eye = torch.eye(64).double()
    expected = torch.linalg.solve(u.T @ u + damping * eye, y)
    config = settings(damping=(1.0, damping), damping_form="factored")
    own = {"a": torch.zeros(3, 3).double(), "u_g": u, "t_g": torch.tensor(0.0)}
    inverse = invert({"layer": own}, config)["layer"]
    assert relative(apply(inverse, y, [3, 0])[0], expected) <= 1e-12
    gram = torch.eye(32) + sum(part @ part.T for part in parts) / damping
    first = parts[0]
    of_grams = y / damping - first.T @ torch.linalg.solve(gram, first @ y) / damping**2
    assert (of_grams - expected).norm() / expected.norm() >= 0.5
    in_turn = y
    for part in parts:
        in_turn = torch.linalg.solve(part.T @ part / damping + eye, in_turn)
    assert (in_turn / damping - expected).norm() / expected.norm() >= 0.15


def test_columns_are_compressed_to_the_largest_and_a_mean(gen):
    spectrum = torch.arange(1, 13).double() ** -1.0
    q, _ = torch.linalg.qr(torch.randn(20, 12, generator=gen, dtype=torch.float64))
    rows = spectrum.sqrt()[:, None] * q.T  # [12, 20]
    mixed = torch.linalg.qr(torch.randn(12, 12, generator=gen, dtype=torch.float64))[0] @ rows
    columns, tail = join(None, Columns.whole(mixed), 5)
    (kept,) = columns.blocks
    assert kept.shape == (5, 20)
    assert tail == pytest.approx(float(spectrum[5:].sum()) / 15)
    found = kept.T @ kept + tail * torch.eye(20).double()
    assert float(found.trace()) == pytest.approx(float(spectrum.sum()))
    values = torch.linalg.eigvalsh(found).flip(0)
    assert_close(values[:5], spectrum[:5], dtype=torch.float64)
    joined, more = join(columns, Columns.whole(rows[:2]), 7)
    (again,) = joined.blocks
    assert more == 0.0
    assert relative(again.T @ again, kept.T @ kept + rows[:2].T @ rows[:2]) <= 1e-12
    products = again @ again.T
    assert relative(products, torch.diag(products.diagonal())) <= 1e-12
    (folded,) = fold(Columns.whole(torch.cat([rows, rows, rows]))).blocks
    assert folded.shape == (20, 20)
    assert relative(folded.T @ folded, 3 * rows.T @ rows) <= 1e-12


def test_a_bounded_rank_is_near_and_says_so():
    kfac, found = stepped("all", 30, num_steps=4, decay=0.9, max_rank=6)
    _, expected = stepped("small_only", 30, num_steps=4, decay=0.9)
    cosine = float(found @ expected / found.norm() / expected.norm())
    assert 0.9 < cosine < 1 - 1e-9
    assert "G by 150 columns, at most 6 kept (policy all)" in repr(kfac)
    own = {"a": torch.eye(3), "u_g": torch.ones(2, 5), "t_g": torch.tensor(0.0)}
    with pytest.raises(NotInvertible, match=r"G of 'layer', of low rank, cannot be inverted"):
        invert({"layer": own}, settings(damping=0.0))


def test_a_state_with_columns_is_stored(tmp_path):
    kfac, _ = stepped("all", 3, num_steps=2, decay=0.9, max_rank=6)
    kfac.save(tmp_path / "curvature")
    other = unison.KFAC(kfac._module, kfac.config)
    other.load(tmp_path / "curvature")
    assert other.layers == kfac.layers
    found, expected = other.state_dict()["layers"], kfac.state_dict()["layers"]
    for a, b in zip(found, expected, strict=True):
        assert all(torch.equal(a["tensors"][key], each) for key, each in b["tensors"].items())


def test_it_describes_itself():
    fresh = unison.KFAC(nn.Linear(3, CLASSES), KFACConfig(update_every=lambda step: 4)).describe()
    assert "by a schedule (more often in the first 40)" in fresh
    assert fresh.endswith("0 steps were taken.")
    kfac, _ = stepped("all", 3, decay=0.9, max_rank=6, fisher="empirical", damping_form="factored")
    text = kfac.describe()
    for part in (
        "empirical Fisher matrix of the training labels under a categorical likelihood",
        "every 1 steps and averaged with decay 0.9; damping 0.001, as its square root on A and",
        "7 matrices were factored, 3 parameters had an exact diagonal, 0 none.",
        "Of 7 (q.weight, k.weight, v.weight, …), a side was inverted by Woodbury's identity",
        "compressed to the 6 largest eigenvalues",
        "Steps have their own length. 1 steps were taken.",
    ):
        assert part in text, text


# --- by cost --------------------------------------------------------------------------------------


def test_policies_say_which_sides():
    def forms(policy: str, rows: int, columns: int, tokens: int, **changes: Any) -> Any:
        config = KFACConfig(policy=policy, **changes)
        found = forms_of(rows, columns, tokens, config, is_head=rows == 50)
        if isinstance(found, str):
            return found
        assert {form for form, _ in found.values()} <= {"columns"}
        return tuple(found)

    assert forms("auto", 6000, 65, 512) == ("g",)
    assert forms("auto", 65, 6000, 512) == ("a",)
    assert forms("auto", 9000, 65, 512) == ("g",)
    assert forms("auto", 3072, 769, 8192) == forms("auto", 64, 65, 8) == ()
    assert forms("auto", 9000, 65, 100_000, damping_form="joint") == "a side above 8192"
    assert forms("auto", 6000, 65, 512, fisher="exact") == ()
    assert forms("auto", 6000, 65, 512, damping_form="joint") == ()
    assert forms("auto", 6000, 65, 512, damping_form="joint", decay=0.0) == ("g",)
    assert forms("all", 64, 65, 8000) == ("g",)
    assert forms("hybrid", 64, 65, 8) == ()
    assert forms("hybrid", 50, 65, 8) == ("g",)
    assert forms("hybrid", 2000, 3000, 512) == ("a", "g")
    assert forms("small_only", 6000, 65, 512) == ()
    assert forms("small_only", 9000, 65, 512) == "a side above 8192"
    few, many = (side_costs(1280, 1280, t, KFACConfig(decay=0.0)) for t in (128, 1024))
    assert few["columns"] < few["matrix"]
    assert many["matrix"] < many["columns"]


def test_sides_that_are_too_long():
    def forms(rows: int, tokens: int, machine: str = "cpu", **changes: Any) -> Any:
        config = KFACConfig(**changes)
        return forms_of(rows, 65, tokens, config, is_head=True, machine=machine)

    assert forms(9000, 100_000)["g"] == ("blocks", "G by 9 blocks of 1000 (longer than 8192)")
    assert forms(9000, 512, "cuda")["g"][0] == "blocks"  # eigenvectors are slow there
    assert forms(4096, 2048, "cuda") == {}
    assert forms(50257, 8192) == "a side above 8192"
    left_out = "G as the identity (policy one_sided, longer than 8192)"
    assert forms(50257, 8192, policy="one_sided")["g"] == ("identity", left_out)
    assert forms(2049, 100, policy="blocked")["g"][1] == "G by 3 blocks of 683 (policy blocked)"
    config = KFACConfig(policy="one_sided")
    assert forms_of(50_000, 50_000, 8192, config, is_head=False) == "every side above 8192"
    config = KFACConfig(policy="one_sided", fisher="forward")
    assert forms_of(65, 50_000, 8192, config, is_head=False) == "every side above 8192"


def test_a_long_side_is_chosen_by_itself(monkeypatch):
    monkeypatch.setattr(layers, "LONG_SIDE", 16)
    model = nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, CLASSES)).double()
    kfac = unison.KFAC(model, settings(policy="auto"))
    logits = model(torch.randn(6, 5).double())
    kfac.sample(logits).backward()
    loss(logits).backward()
    kfac.step()
    sides = {layer.name: layer.low_rank for layer in kfac.layers}
    assert sides == {"0.weight": ("g",), "2.weight": ("a",)}
    assert "G by 6 columns (" in repr(kfac)
    assert "Gflop an update instead of" in repr(kfac)
    assert kfac.factors()["2.weight"]["u_a"].shape == (6, 301)


# --- on ranks -------------------------------------------------------------------------------------


def check_ranks(size: int, how: str, **case: Any) -> None:
    shares = case.pop("shares", None)
    case = {"policy": "all", "counts": (6, 6), **case}
    alone = run_on_ranks(1, run, {"how": "none", **case})[0]
    dense = run_on_ranks(1, run, {"how": "none", **case, "policy": "small_only"})[0]
    cut = {"shares": shares} if shares else {}
    for found in run_on_ranks(size, run, {"how": how, **case, **cut}):
        assert [each["g_form"] for each in found["layers"]].count("columns") > 5
        for name, value in dense["parameters"].items():
            assert relative(found["parameters"][name], value) <= 1e-12
        assert found["layers"] == alone["layers"]


def test_uneven_ranks_and_an_empty_one():
    check_ranks(3, "units", shares=[4, 0, 2], decay=0.0)


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("size", "how", "shares"),
    [(2, "fsdp2", [0, 6]), (3, "none", [4, 0, 2]), (4, "units", [1, 0, 3, 2]), (4, "hybrid", None)],
)
def test_every_way_of_lying_on_ranks(size, how, shares, form):
    check_ranks(size, how, shares=shares, decay=0.0, damping_form=form)


def check_bits(size: int, how: str, **case: Any) -> None:
    case = {"granule": 2, "dtype": torch.float32, "policy": "all", **case}
    expected = run_on_ranks(1, run, {"how": "units", **case})[0]
    for found in run_on_ranks(size, run, {"how": how, **case}):
        assert found["digest"] == expected["digest"]
        assert difference(found, expected) == 0.0


def test_ordered_is_the_same_bits():
    check_bits(3, "units", counts=(7, 3), max_rank=8, micro_batch=2)


@pytest.mark.full
@pytest.mark.parametrize(("size", "how"), [(2, "units"), (4, "units"), (4, "hybrid"), (2, "fsdp2")])
def test_ordered_is_the_same_bits_everywhere(size, how):
    for form in FORMS:
        check_bits(size, how, counts=(8, 8), max_rank=8, damping_form=form)


# --- the ring -------------------------------------------------------------------------------------


def check_ring(world: World, counts: list[int]) -> None:
    """The corrected ring is the inverse on every rank; the note's own is a product of inverses."""
    n, damping = 12, 0.1
    gen = world.generator()
    parts = [torch.randn(t, n, generator=gen, dtype=torch.float64) / 3 for t in counts]
    y = torch.randn(n, 3, generator=gen, dtype=torch.float64)
    ranks, own = Ranks.of(None), parts[world.rank]
    u, eye = torch.cat(parts), torch.eye(n, dtype=torch.float64)
    expected = torch.linalg.solve(u.T @ u + damping * eye, y)
    factor = ring_factor(ranks, own, damping)
    assert factor.shape == own.shape
    assert relative(ring_apply(ranks, factor, y, damping), expected) <= 1e-12
    in_turn = y
    for part in parts:
        in_turn = torch.linalg.solve(part.T @ part / damping + eye, in_turn)
    is_caught = bool((in_turn / damping - expected).norm() / expected.norm() >= 0.15)
    assert is_caught == (sum(map(bool, counts)) > 1)
    with pytest.raises(BadInput, match="damping"):
        ring_factor(ranks, own, 0.0)


@pytest.mark.parametrize(
    "counts",
    [
        [4, 0, 7],
        *(pytest.param(each, marks=pytest.mark.full) for each in ([5], [3, 20], [0, 6, 1, 30])),
    ],
)
def test_the_corrected_ring_is_the_inverse(counts):
    run_on_ranks(len(counts), check_ring, counts)
