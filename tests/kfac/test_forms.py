"""Sides that are blocks, the identity, or the head's true Fisher matrix; how they are stored."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import unison
from tests.harness import World, run_on_ranks
from tests.kfac.common import loss, relative, settings
from tests.kfac.sharded import difference, run
from tests.kfac.test_low_rank import check_bits, stepped
from unison.errors import BadInput
from unison.kfac import KFACConfig, NotInvertible, layers
from unison.kfac import kfac as kfac_module
from unison.kfac.inverse import apply, invert

# --- blocks and the identity ----------------------------------------------------------------------


def after_a_step(model: nn.Linear, x: Tensor, config: KFACConfig) -> tuple[unison.KFAC, Tensor]:
    """K-FAC after a step of a model of its own, and the gradient before it."""
    model = copy.deepcopy(model)
    kfac = unison.KFAC(model, config)
    logits = model(x)
    kfac.sample(logits).backward()
    loss(logits).backward()
    assert model.weight.grad is not None
    gradient = model.weight.grad.clone()
    kfac.step()
    return kfac, gradient


@pytest.mark.parametrize("n", [6, 7, 20])
@pytest.mark.parametrize("side", ["a", "g"])
def test_blocks_are_a_matrix_without_what_lies_between(monkeypatch, side, n, gen):
    monkeypatch.setattr(layers, "LONG_SIDE", 3)
    sizes = (n, 5) if side == "a" else (5, n)
    model = nn.Linear(*sizes, bias=False).double()
    x = torch.randn(9, sizes[0], generator=gen, dtype=torch.float64)
    config = settings(policy="blocked", graft="none", damping_form="factored")
    found, y = after_a_step(model, x, config)
    whole, _ = after_a_step(model, x, settings(policy="kronecker", damping_form="factored"))
    inverses = {}
    for each, matrix in whole.factors()["weight"].items():
        rows = found.factors()["weight"].get(f"blocks_{each}", matrix).shape[1]
        place = torch.arange(len(matrix)) // rows
        cut = torch.where(place[:, None] == place, matrix, 0.0)
        eye = torch.eye(len(cut), dtype=torch.float64)
        inverses[each] = torch.linalg.inv(cut + config.dampings[0] * eye)
    assert f"blocks_{side}" in found.factors()["weight"]
    other = unison.KFAC(model, config)
    other.load_state_dict(found.state_dict())
    applied = apply(other._states[0].inverse, y, [sizes[0], 0])[0]
    assert relative(applied, inverses["g"] @ y @ inverses["a"]) <= 1e-12
    assert relative(found._module.weight.grad, applied) <= 1e-12


def test_a_side_that_is_the_identity_leaves_the_other_alone():
    for sizes, side in (((4, 30), "a"), ((30, 4), "g")):
        model = nn.Linear(*sizes, bias=False).double()
        config = settings(policy="one_sided", graft="none", max_factor_size=8, damping=0.1)
        kfac, y = after_a_step(model, torch.randn(6, sizes[0]).double(), config)
        found = kfac.factors()["weight"]
        assert list(found) == [side]
        inverse = torch.linalg.inv(found[side] + 0.1 * torch.eye(4).double())
        expected = y @ inverse if side == "a" else inverse @ y
        assert relative(kfac._module.weight.grad, expected) <= 1e-12
        assert "as the identity (policy one_sided, longer than 8)" in repr(kfac)
        assert "taken as the identity: weight." in kfac.describe()


def test_blocks_on_ranks_have_the_bits_of_one():
    check_bits(3, "units", counts=(7, 3), policy="auto", max_factor_size=8)


@pytest.mark.full
def test_blocks_on_uneven_ranks_are_those_of_one():
    case = {"policy": "auto", "max_factor_size": 8, "counts": (6, 6)}
    alone = run_on_ranks(1, run, {"how": "none", **case})[0]
    assert sum(each["g_form"] == "blocks" for each in alone["layers"]) > 2
    for found in run_on_ranks(3, run, {"how": "units", "shares": [4, 0, 2], **case}):
        for name, value in alone["parameters"].items():
            assert relative(found["parameters"][name], value) <= 1e-12


# --- the true head --------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A head over a few features; `scale` stands between it and the logits."""

    def __init__(self, classes: int, scale: float = 1.0) -> None:
        super().__init__()
        self.body, self.head, self.scale = nn.Linear(6, 4), nn.Linear(4, classes), scale

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(torch.tanh(self.body(x)))
        return z if self.scale == 1.0 else z * self.scale


def observed_head(classes: int, x: Tensor, mask: Tensor | None = None, **changes: Any) -> Any:
    torch.manual_seed(2)
    model = Classifier(classes).to(x.dtype)
    with torch.no_grad():
        model.head.weight.mul_(8)
    kfac = unison.KFAC(model, settings(**{"head": "exact", "graft": "none", **changes}))
    logits = model(x)
    kfac.sample(logits, mask).backward()
    loss(logits, mask=mask).backward()
    of_head = [each.grad for each in model.head.parameters() if each.grad is not None]
    gradient = torch.cat([each.view(classes, -1) for each in of_head], dim=1)
    kfac.step()
    p = torch.softmax(logits.detach(), dim=-1).flatten(0, -2)
    return kfac, p if mask is None else p[mask.flatten()], gradient


def by_loop(p: Tensor) -> Tensor:
    """The mean of diag(p) - pp' over tokens, one at a time."""
    total = torch.zeros(p.shape[1], p.shape[1], dtype=p.dtype)
    for each in p:
        total += torch.diag(each) - torch.outer(each, each)
    return total / len(p)


@pytest.mark.parametrize("fisher", ["mc", "empirical", "exact"])
def test_the_head_is_the_true_fisher_matrix(fisher):
    x, mask = torch.randn(3, 4, 6).double(), torch.rand(3, 4) < 0.7
    mask[0, 0] = True
    kfac, p, _ = observed_head(7, x, mask, fisher=fisher)
    own = kfac.factors()["head.weight"]["g"]
    assert relative(own, by_loop(p)) <= 1e-12
    assert "G as a matrix (its true Fisher matrix)" in repr(kfac)
    assert "its true Fisher matrix: head.weight." in kfac.describe()


@pytest.mark.parametrize("form", ["pi", "factored"])
def test_a_diagonal_less_columns_is_the_dense_inverse(form):
    x = torch.randn(5, 8, 6).double()
    kfac, p, y = observed_head(512, x, policy="all", damping=1e-4, damping_form=form)
    state = next(each for each in kfac._states.values() if each.layer.name == "head.weight")
    assert state.layer.g_form == "softmax"
    own = state.factors
    assert relative(own["p_g"].diag() - own["u_g"].T @ own["u_g"], by_loop(p)) <= 1e-12
    expected = invert({"": {"a": own["a"], "g": by_loop(p)}}, kfac.config)[""]
    found = apply(state.inverse, y, [5, 0])[0]
    assert relative(found, apply(expected, y, [5, 0])[0]) <= 1e-10


def test_some_of_the_tokens_are_a_bound_and_never_indefinite(monkeypatch):
    monkeypatch.setattr(kfac_module, "MOST_HEAD_TOKENS", 12)
    x = torch.randn(8, 5, 6).double()
    kfac, p, _ = observed_head(30, x, policy="all", damping=1e-6)
    own = kfac.factors()["head.weight"]
    assert 3 < len(own["u_g"]) < 25
    left = own["p_g"].diag() - own["u_g"].T @ own["u_g"] - by_loop(p)
    assert float(torch.linalg.eigvalsh(left)[0]) > -1e-12
    again, *_ = observed_head(30, x, policy="all", damping=1e-6)
    assert torch.equal(again.factors()["head.weight"]["u_g"], own["u_g"])


def test_averaged_heads_are_near_and_stored(tmp_path):
    for rank, most in ((1000, 1e-12), (9, 0.5)):
        torch.manual_seed(3)
        model = Classifier(30).double()
        config = settings(head="exact", policy="all", decay=0.5, max_rank=rank)
        kfac = unison.KFAC(model, config)
        total, weight = torch.zeros(30, 30).double(), 0.0
        for _ in range(3):
            logits = model(torch.randn(4, 6).double())
            kfac.sample(logits).backward()
            loss(logits).backward()
            kfac.step()
            own = by_loop(torch.softmax(logits.detach(), dim=-1))
            total, weight = total / 2 + own / 2, weight / 2 + 0.5
        found = kfac.factors()["head.weight"]
        dense = found["p_g"].diag() - found["u_g"].T @ found["u_g"]
        assert relative(dense, total / weight) <= most
        assert float(torch.linalg.eigvalsh(dense)[0]) > -1e-12
        kfac.save(tmp_path / f"{rank}")
        other = unison.KFAC(model, config)
        other.load(tmp_path / f"{rank}")
        assert other.layers == kfac.layers


def run_with_few_tokens(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """A run whose head takes columns of some tokens only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kfac_module, "MOST_HEAD_TOKENS", 12)
        return run(world, case)


def test_ranks_choose_the_same_tokens_for_the_head():
    case = {"head": "exact", "policy": "all", "counts": (7, 3), "granule": 2, "decay": 0.5}
    case |= {"max_rank": 8, "dtype": torch.float32}
    expected = run_on_ranks(1, run_with_few_tokens, {"how": "units", **case})[0]
    assert [each["g_form"] for each in expected["layers"]].count("diagonal less columns") == 1
    for found in run_on_ranks(3, run_with_few_tokens, {"how": "units", **case}):
        assert found["digest"] == expected["digest"]
        assert difference(found, expected) == 0.0


@pytest.mark.full
@pytest.mark.parametrize("policy", ["all", "auto"])
@pytest.mark.parametrize(("size", "how"), [(2, "fsdp2"), (3, "none"), (4, "units")])
def test_the_head_on_uneven_ranks_is_that_of_one(size, how, policy):
    case = {"head": "exact", "policy": policy, "counts": (6, 6)}
    alone = run_on_ranks(1, run, {"how": "none", **case})[0]
    shares = {2: [0, 6], 3: [4, 0, 2], 4: [1, 0, 3, 2]}[size]
    for found in run_on_ranks(size, run, {"how": how, "shares": shares, **case}):
        for name, value in alone["parameters"].items():
            assert relative(found["parameters"][name], value) <= 1e-11


def test_heads_that_are_not_known_are_refused():
    x = torch.randn(3, 6)
    for model, match in (
        (Classifier(5, scale=2.0), r"no parameter is used so: pass head='sampled'"),
        (nn.Sequential(nn.Linear(6, 5), nn.Tanh()), r"no parameter is used so"),
    ):
        kfac = unison.KFAC(model, settings(head="exact"))
        logits = model(x)
        kfac.sample(logits).backward()
        loss(logits).backward()
        with pytest.raises(BadInput, match=match):
            kfac.step()
    kfac = unison.KFAC(Classifier(5), settings(head="exact"))
    with pytest.raises(BadInput, match="these are not what the module returned"):
        kfac.sample(kfac._module(x) * 2).backward()
    for changes in ({"likelihood": "gaussian"}, {"sharing": "reduce"}, {"fisher": "forward"}):
        with pytest.raises(BadInput, match=f"pass {next(iter(changes))}="):
            KFACConfig(head="exact", **changes)
    with pytest.raises(BadInput, match="policy='diagonal' makes none"):
        KFACConfig(head="exact", policy="diagonal")
    with pytest.raises(BadInput, match="pass damping_form='pi' or 'factored', or"):
        observed_head(30, x, policy="all", damping_form="joint")
    own = {"u_g": torch.ones(1, 4) / 2, "p_g": torch.zeros(4), "t_g": torch.tensor(0.0)}
    with pytest.raises(NotInvertible, match="G of the head 'layer'"):
        invert(
            {"layer": own | {"a": torch.eye(2)}},
            settings(damping=(1.0, 0.0), damping_form="factored"),
        )


@pytest.mark.parametrize(
    ("classes", "tokens", "most"),
    [(9000, 64, 2**25), pytest.param(50_257, 512, 2**30, marks=pytest.mark.full)],
)
def test_a_large_head_takes_little_memory(classes, tokens, most):
    config = settings(damping=(1.0, 1e-4), damping_form="factored")
    p = torch.softmax(torch.randn(tokens, classes), dim=-1) / tokens**0.5
    own = {"a": torch.eye(1), "u_g": p, "t_g": torch.tensor(0.0), "p_g": p.sum(0) / tokens**0.5}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        inverse = invert({"head": own}, config)["head"]
        y = torch.randn(classes, 1)
        found = apply(inverse, y, [1, 0])[0]
    held = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert 0 < peak + sum(each.nbytes for each in own.values()) < most
    damped = own["p_g"][:, None].double() + 1e-4
    back = damped * found.double() - p.double().T @ (p.double() @ found.double())
    assert relative(back / 0.5, y.double()) <= 1e-4  # A + 1 is 2


# --- storage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "most"), [("float32", 1e-6), ("float16", 5e-3), ("bfloat16", 5e-2)]
)
def test_factors_are_stored_in_a_narrow_dtype(dtype, most, tmp_path):
    """Divided by their largest first: means of losses over many tokens are nothing in float16."""
    changes: dict[str, Any] = {"num_steps": 3, "decay": 0.5, "max_rank": 1000}
    for policy in ("all", "small_only"):
        wide, expected = stepped(policy, 6, **changes)
        kfac, found = stepped(policy, 6, **changes, storage_dtype=dtype, storage_device="cpu")
        assert relative(found, expected) <= 50 * most  # inverses magnify it
        assert relative(found, expected) > 0
        for name, own in wide.factors().items():
            for key, value in own.items():
                assert relative(kfac.factors()[name][key], value) <= most or key[0] in "ut"
        width = getattr(torch, dtype).itemsize
        assert kfac.memory_usage()["factors"] <= wide.memory_usage()["factors"] * width / 8 + 200
        kfac.save(tmp_path / policy)
        other = unison.KFAC(kfac._module, kfac.config)
        other.load(tmp_path / policy)
        for name, own in kfac.factors().items():
            assert all(torch.equal(other.factors()[name][key], each) for key, each in own.items())


def test_small_values_do_not_vanish_in_float16():
    model = nn.Linear(4, 3, bias=False)
    kfac = unison.KFAC(model, settings(storage_dtype="float16"))
    logits = model(torch.randn(5, 4) * 1e-6)
    kfac.sample(logits).backward()
    loss(logits).backward()
    kfac.step()
    assert (kfac.factors()["weight"]["a"].diagonal() > 0).all()
    assert kfac._states[0]._averages["a"].dtype == torch.float16


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(BadInput, match="pass storage_device='auto'"):
        unison.KFAC(nn.Linear(2, 2), settings(storage_device="cuda"))
