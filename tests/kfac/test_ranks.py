"""K-FAC on ranks: one rank's factors and steps, and with the ordered reducer the same bits."""

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import unison
from tests.harness import RanksFailed, World, ranks, run_on_ranks
from tests.kfac.sharded import CONFIG, difference, run, tokens
from unison.errors import BadInput
from unison.kfac import KFACConfig
from unison.models import build
from unison.shard import find_blocks

EXACT = 1e-12
FSDP2 = {"counts": (8, 8, 8)}  # its ordered reducer takes powers of two


@functools.cache
def alone(**case: Any) -> dict[str, Any]:
    return run_on_ranks(1, run, {"how": "none", **case})[0]


def check_close(size: int, how: str, **case: Any) -> None:
    expected = alone(**{key: value for key, value in case.items() if key != "shares"})
    case = {key: list(value) if key == "shares" else value for key, value in case.items()}
    every = run_on_ranks(size, run, {"how": how, **case})
    for found in every:
        assert found["calls"] == every[0]["calls"]  # or ranks would wait for one another
        assert difference(found, expected) <= EXACT
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12) or "shares" in case


@pytest.mark.parametrize(
    ("size", "how"),
    [(2, "none"), (3, "ddp"), (2, "units"), (3, "units"), (4, "hybrid"), (2, "fsdp2")],
)
def test_dealt_batches_are_those_of_one_rank(size, how):
    check_close(size, how)


@pytest.mark.parametrize(("size", "how"), [(3, "none"), (3, "units"), (2, "fsdp2")])
def test_uneven_ranks_and_an_empty_one(size, how):
    # Not dealt: ranks number their rows one after the other.
    shares = (4, 0, 2) if size == 3 else (0, 6)
    check_close(size, how, counts=(6, 6), shares=shares)


def test_dropout_in_granules():
    """The pass for statistics draws what the user's pass has drawn for each sample."""
    case = {"how": "units", "granule": 2, "config": replace(CONFIG, dropout=0.3)}
    expected = run_on_ranks(1, run, case)[0]
    for found in run_on_ranks(2, run, case):
        assert found["digest"] == expected["digest"]


def test_more_ranks_than_rows():
    check_close(4, "units", counts=(2, 3, 1))


@pytest.mark.parametrize(
    ("size", "how", "fraction"),
    [
        (4, "units", 0.5),
        pytest.param(2, "units", 1.0, marks=pytest.mark.full),
        pytest.param(3, "ddp", 1.0, marks=pytest.mark.full),
    ],
)
def test_several_owners_of_each_layer(size, how, fraction):
    check_close(size, how, owner_fraction=fraction)


def test_owners_hold_their_layers_only():
    one, many = alone(), run_on_ranks(3, run, {"how": "none"})
    held = [each["usage"]["total"] for each in many]
    assert sum(held) == one["usage"]["total"]
    assert max(held) < 0.6 * sum(held)
    assert "owner" in many[0]["shown"]


# --- ordered --------------------------------------------------------------------------------------


@functools.cache
def ordered_alone(**case: Any) -> dict[str, Any]:
    return run_on_ranks(1, run, {"how": "units", "granule": 2, "dtype": torch.float32, **case})[0]


def check_bits(size: int, how: str, **case: Any) -> None:
    expected = ordered_alone(**case)
    options = {"granule": 2, "dtype": torch.float32, **case}
    for found in run_on_ranks(size, run, {"how": how, **options}):
        assert found["losses"] == expected["losses"]
        for a, b in zip(found["kfac"]["layers"], expected["kfac"]["layers"], strict=True):
            for key, value in b["tensors"].items():
                assert torch.equal(a["tensors"][key], value), (b["layer"]["name"], key)
        assert found["digest"] == expected["digest"]


@pytest.mark.parametrize(("size", "how"), [(2, "units"), (3, "units"), (4, "units"), (4, "hybrid")])
def test_ordered_is_the_same_bits(size, how):
    check_bits(size, how)


@pytest.mark.parametrize("size", [2, 4])
def test_ordered_on_fsdp2(size):
    check_bits(size, "fsdp2", **FSDP2)


def test_ordered_with_micro_batches_and_ghosts():
    check_bits(3, "units", counts=(3, 7, 2))
    expected = ordered_alone(counts=(8, 7, 9))
    for found in run_on_ranks(
        2,
        run,
        {
            "how": "units",
            "granule": 2,
            "dtype": torch.float32,
            "counts": (8, 7, 9),
            "micro_batch": 2,
        },
    ):
        assert found["digest"] == expected["digest"]


@pytest.mark.parametrize(
    ("size", "how", "count"),
    [(2, "none", 7), (3, "none", 7), (2, "ddp", 7), (3, "ddp", 7), (2, "ddp", 2)],
)
def test_factors_of_whole_modules_are_ordered_too(size, how, count):
    # Their gradients are summed by whoever holds them; the factors of a first step are ours. Rows
    # count different numbers of tokens; of 2 rows, which are one granule, the second rank has none.
    case = {"granule": 2, "dtype": torch.float32, "counts": (count,)}
    expected = run_on_ranks(1, run, {"how": "none", **case})[0]["kfac"]["layers"]
    for found in run_on_ranks(size, run, {"how": how, **case}):
        for a, b in zip(found["kfac"]["layers"], expected, strict=True):
            for key, value in b["tensors"].items():
                if key.startswith(("average", "inverse")):
                    assert torch.equal(a["tensors"][key], value), (b["layer"]["name"], key)


def test_steps_under_ddp_are_those_of_one_process_to_the_bit():
    # DDP adds gradients in no order that we choose. Of two ranks there is only one: with a granule
    # each, or all on the first one, its sum is the ordered one.
    case = {"granule": 3, "dtype": torch.float32, "counts": (5, 6, 2, 4)}
    expected = run_on_ranks(1, run, {"how": "units", **case})[0]
    for found in run_on_ranks(2, run, {"how": "ddp", **case}):
        assert found["losses"] == expected["losses"]
        for a, b in zip(found["kfac"]["layers"], expected["kfac"]["layers"], strict=True):
            for key, value in b["tensors"].items():
                assert torch.equal(a["tensors"][key], value), (b["layer"]["name"], key)
        for name, value in expected["parameters"].items():
            assert torch.equal(found["parameters"][name], value), name


@ranks(1)
def test_statistics_run_the_module_inside_of_ddp(world):
    """DDP's own forward broadcasts buffers, and ranks have other numbers of parts."""
    model, calls = DistributedDataParallel(torch.nn.Linear(3, 4)), []
    model.register_forward_hook(lambda *_: calls.append(1))
    kfac = unison.KFAC(model, KFACConfig(damping=1e-3, update_every=1))
    logits = model(torch.randn(5, 3, generator=world.generator()))
    kfac.sample(logits).backward(retain_graph=True)
    F.cross_entropy(logits, torch.arange(5) % 4).backward()
    kfac.step()
    assert calls == [1]
    kfac.detach()


@pytest.mark.full
@pytest.mark.parametrize("fisher", ["mc", "exact", "forward"])
@pytest.mark.parametrize("inverse", ["eigen", "cholesky"])
@pytest.mark.parametrize("how", ["units", "root", "hybrid", "fsdp2"])
def test_every_way_keeps_its_bits(how, inverse, fisher):
    case: dict[str, Any] = {"inverse": inverse, "fisher": fisher, "kl_clip": 1e-3, **FSDP2}
    for size in {"hybrid": (2, 4), "fsdp2": (2, 4)}.get(how, (1, 2, 3, 4)):
        check_bits(size, how, **case)


@pytest.mark.full
@pytest.mark.parametrize("how", ["none", "ddp", "units", "root", "hybrid", "fsdp2", "hsdp"])
@pytest.mark.parametrize(
    "case",
    [
        {"fisher": "exact"},
        {"fisher": "forward"},
        {"sharing": "reduce", "policy": "kronecker"},
        {"damping_form": "joint", "graft": "none", "kl_clip": 1e-3},
        {"owner_fraction": 0.5, "graft": "sgd"},
        {"policy": "diagonal"},
    ],
)
def test_every_setting_on_every_sharding(how, case):
    for size in {"hybrid": (2, 4), "hsdp": (4,)}.get(how, (2, 3, 4)):
        check_close(size, how, **case)


# --- policies of units ----------------------------------------------------------------------------

POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {},
    "mixed": {"mp_policy": unison.MixedPrecision(param=torch.bfloat16)},
    "offloaded": {"offload_policy": unison.CPUOffload()},
}


def run_policy(world: World, policy: str) -> list[float]:
    """Losses of a few steps of units with a policy."""
    model = build(CONFIG, seed=1)
    if policy == "checkpointed":
        for block in find_blocks(model):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    unison.auto_shard(model, gradient_divisor=1, **POLICIES[policy])
    kfac = unison.KFAC(model, KFACConfig(update_every=2, min_layer_size=20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for rows in unison.deal([tokens(6, step) for step in range(4)]):
        optimizer.zero_grad()
        logits = model(rows[:, :-1])
        if kfac.wants_statistics:
            kfac.sample(logits).backward(retain_graph=True)
        each = F.cross_entropy(logits.float().mT, rows[:, 1:], reduction="none")
        loss = unison.batch_mean(each.mean(dim=1))
        loss.backward()
        kfac.step()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "policy",
    [
        "checkpointed",
        *(pytest.param(each, marks=pytest.mark.full) for each in ("mixed", "offloaded")),
    ],
)
def test_policies_of_units(policy):
    plain = run_on_ranks(1, run_policy, "plain")[0]
    tolerance = 2e-3 if policy == "mixed" else 1e-5
    assert run_on_ranks(2, run_policy, policy)[0] == pytest.approx(plain, rel=tolerance)


# --- storage and faults ---------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [((2, "units"), (3, "units"))])
def test_a_run_goes_on_with_other_ranks_to_the_bit(before, after):
    case: dict[str, Any] = {"granule": 2, "dtype": torch.float32, "counts": (6, 7, 6, 8)}
    whole = ordered_alone(counts=(6, 7, 6, 8))
    stored = run_on_ranks(before[0], run, {"how": before[1], "stop": 2, **case})[0]["stored"]
    for found in run_on_ranks(after[0], run, {"how": after[1], "stored": stored, **case}):
        assert found["digest"] == whole["digest"]


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, "units", 0.0), (3, "units", 1.0)), ((4, "hybrid", 0.5), (1, "units", 0.0))],
)
def test_each_owner_saves_its_layers_and_new_owners_read_them(tmp_path, before, after):
    case: dict[str, Any] = {"granule": 2, "dtype": torch.float32, "counts": (6, 7, 6, 8)}
    case["folder"] = str(tmp_path / "curvature")
    whole = ordered_alone(counts=(6, 7, 6, 8))
    (size, how, fraction), (new_size, new_how, new_fraction) = before, after
    stored = run_on_ranks(size, run, {"how": how, "owner_fraction": fraction, "stop": 2, **case})[0]
    written = [keys_of(path) for path in sorted((tmp_path / "curvature").glob("*.safetensors"))]
    assert len(written) == size
    layers = [{key.split("/")[1] for key in keys} for keys in written]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(layers, 2))
    assert set().union(*layers) == {each["name"] for each in stored["layers"]}
    options = {"how": new_how, "owner_fraction": new_fraction, "stored": stored["stored"], **case}
    for found in run_on_ranks(new_size, run, options):
        assert found["digest"] == whole["digest"]


def keys_of(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def test_what_fails_on_one_rank_raises_on_all():
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(2, run, {"how": "units", "damping": 0.0})
    text = str(failed.value)
    assert "smallest eigenvalue" in text
    assert "Raise damping" in text


@ranks(2)
def test_settings_that_differ_between_ranks_are_refused(world):
    """Each owner would damp its layers with settings of its own."""
    model = DistributedDataParallel(torch.nn.Linear(5, 3))
    kfac = unison.KFAC(model, KFACConfig(damping=0.01 * (1 + world.rank)))
    logits = model(torch.ones(4, 5))
    kfac.sample(logits).backward(retain_graph=True)
    F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)).backward()
    with pytest.raises(BadInput, match=r"damping: rank 0 has 0\.01; rank 1 has 0\.02"):
        kfac.step()
