"""Step times: the order of visits, ratios, what goes wrong, and peers."""

import importlib
import itertools
from pathlib import Path

import pytest
import torch

import bench.clipping_speed as speed
from bench.clipping_speed import peers, steps, visits
from bench.clipping_speed.experiment import BASELINE
from unison.clip import AUTO
from unison.errors import BadInput, UnsupportedOperation
from unison.models import preset

TINY = {"num_layers": 1, "lengths": (8,), "batch_size": 2, "rounds": 1, "steps": 1}


def experiment(**options):
    return speed.Experiment(**TINY | options)


def at(case, ms, **others):
    fields = {"tokens": 8, "round": 0, "eager_ms": ms} | others
    return speed.Visit(case=case, **fields)


# ---- the order -------------------------------------------------------------------------------


def test_every_case_lies_between_two_baselines_at_every_length_and_in_every_round():
    plan = list(speed.planned_visits(experiment(lengths=(8, 16), rounds=3)))
    for (number, tokens), group in itertools.groupby(plan, lambda v: (v.round, v.tokens)):
        cases = [each.case for each in group]
        assert cases[0] == cases[-1] == BASELINE, (number, tokens)
        assert set(cases) == {BASELINE, *experiment().cases}
        gaps = [len(list(run)) for is_base, run in itertools.groupby(cases, BASELINE.__eq__)]
        assert max(gaps) <= 4


def test_every_round_starts_with_another_case():
    plan = list(speed.planned_visits(experiment(rounds=3)))
    starts = [next(v.case for v in plan if v.round == n and v.case != BASELINE) for n in range(3)]
    assert tuple(starts) == experiment().cases[:3]


def test_cases_are_modes_by_noise_then_budgets():
    found = experiment(
        modes=("ghost", "auto"), noise_multipliers=(1.0, 0.0), memory_budgets=(1.4,)
    ).cases
    names = [case.name for case in found]
    assert names == [
        "ghost",
        "auto",
        "ghost, without noise",
        "auto, without noise",
        "auto, within 1.4×",
    ]


BAD = {
    "mode": ({"modes": ("gost",)}, "did you mean 'ghost'"),
    "length": ({"lengths": (0,)}, "length must be above 0"),
    "lengths": ({"lengths": (8, 8)}, "different"),
    "budget": ({"memory_budgets": (0.9,)}, "1 or more"),
    "graphs": ({"has_graphs": True}, "CUDA graphs"),
    "noise": ({"noise_multipliers": (-1.0,)}, "noise_multiplier"),
    "preset": ({"preset": "tinny"}, "did you mean 'tiny'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_measured_raises_at_once(case):
    options, message = BAD[case]
    with pytest.raises(BadInput, match=message):
        experiment(**options)


# ---- ratios ----------------------------------------------------------------------------------


def test_a_ratio_is_to_the_mean_of_the_baselines_around_it():
    ghost, auto = speed.Case(mode="ghost"), speed.Case(mode=AUTO)
    seen = [
        at(BASELINE, 10.0, peak_bytes=100),
        at(ghost, 30.0, peak_bytes=150),
        at(BASELINE, 20.0),
        at(auto, 30.0),
        at(BASELINE, 40.0),
    ]
    (result,) = speed.results_of(
        experiment(modes=("ghost", "auto"), noise_multipliers=(0.0,)), seen
    )
    baseline, first, second = result.rows
    assert (baseline.eager.ratio, baseline.eager.ms) == (1.0, 20.0)
    assert baseline.eager.low == pytest.approx(10 / (70 / 3))
    assert first.eager.ratio == pytest.approx(2.0)
    assert first.peak_ratio == 1.5
    assert second.eager.ratio == pytest.approx(1.0)
    (verdict,) = result.verdicts
    assert (verdict.fastest, verdict.excess, verdict.is_within) == (AUTO, 0.0, True)


def test_rounds_are_compared_within_themselves_and_the_median_counts():
    auto = speed.Case(mode=AUTO, noise_multiplier=1.0)
    seen = []
    for number, factor in enumerate((1.0, 3.0, 1.2)):
        slow = 10.0 ** (number + 1)
        seen += [
            at(case, ms, round=number) for case, ms in ((BASELINE, slow), (auto, factor * slow))
        ]
    (result,) = speed.results_of(experiment(modes=(AUTO,)), seen)
    timing = result.rows[1].eager
    assert (timing.low, timing.ratio, timing.high) == pytest.approx((1.0, 1.2, 3.0))


def test_auto_that_is_slower_is_not_within_the_tolerance():
    ghost, auto = (speed.Case(mode=mode, noise_multiplier=1.0) for mode in ("ghost", AUTO))
    seen = [at(BASELINE, 10.0), at(ghost, 10.0), at(auto, 10.3), at(BASELINE, 10.0)]
    (result,) = speed.results_of(experiment(modes=("ghost", AUTO)), seen)
    (verdict,) = result.verdicts
    assert verdict.excess == pytest.approx(0.03)
    assert verdict.is_within is False


# ---- what goes wrong -------------------------------------------------------------------------


class Fails:
    """A contender that fails in its second step."""

    def __init__(self, error):
        self.error, self.steps, self.is_closed = error, 0, False

    def step(self):
        self.steps += 1
        if self.steps > 1:
            raise self.error

    def close(self):
        self.is_closed = True


ERRORS = {
    "memory": (torch.OutOfMemoryError("CUDA out of memory. Tried ..."), "out of memory", False),
    "cpu": (RuntimeError("[enforce fail] DefaultCPUAllocator: can't"), "out of memory", False),
    "known": (UnsupportedOperation("cannot be used\nfor x"), "cannot be used", False),
    "bug": (RuntimeError("shapes differ"), "RuntimeError: shapes differ", True),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_part_of_the_result(case, monkeypatch):
    error, trouble, is_bug = ERRORS[case]
    contender = Fails(error)
    monkeypatch.setattr(speed.Case, "build", lambda *_: contender)
    found, left_out = speed.measure(experiment(modes=("ghost",)))
    assert [(v.trouble, v.is_bug, v.eager_ms) for v in found] == [(trouble, is_bug, None)] * 3
    assert (left_out, contender.is_closed) == ([], True)


def test_memory_that_ran_out_is_named_though_tidying_up_failed_too():
    error = RuntimeError("cannot detach")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert visits._reason(error) == ("out of memory", False)


def test_a_device_that_is_lost_ends_no_session(monkeypatch):
    monkeypatch.setattr(speed.Case, "build", lambda *_: Fails(RuntimeError("illegal access")))

    def lost(_):
        raise RuntimeError("illegal access, again")

    monkeypatch.setattr(visits, "_free_memory", lost)
    found, _ = speed.measure(experiment(modes=("ghost",)))
    assert [each.trouble for each in found] == ["RuntimeError: illegal access"] * 3


def test_nothing_is_begun_when_the_time_is_used_up(monkeypatch):
    monkeypatch.setattr(visits, "visit", lambda _, planned, __: at(planned.case, 1.0))
    clock = itertools.count()
    monkeypatch.setattr(visits.time, "monotonic", lambda: float(next(clock)))
    found, left_out = speed.measure(experiment(modes=("ghost", "auto"), time_limit=2.5))
    assert [each.case.name for each in found] == ["no_dp", "ghost"]
    assert [str(each) for each in left_out] == [
        "auto at 8 tokens, round 1",
        "no_dp at 8 tokens, round 1",
    ]


# ---- real steps ------------------------------------------------------------------------------


@pytest.mark.full
def test_budgets_reach_the_plan_and_one_too_small_is_a_row():
    torch.set_num_threads(1)
    run = experiment(modes=("grad_materialize",), memory_budgets=(1.001, 3.0))
    found, _ = speed.measure(run)
    by_name = {each.case.name: each for each in found}
    assert "memory_budget" in (by_name["auto, within 1.001×"].trouble or "")
    assert by_name["auto, within 3×"].passes == (1, 1)
    baseline, kept = by_name["no_dp"], by_name["grad_materialize"]
    assert (baseline.methods, list(kept.methods or {})) == (None, ["materialize+kept"])
    assert (baseline.eager_ms or 0) > 0
    assert (kept.peak_bytes or 0) > (baseline.peak_bytes or 0) > 0


def small_gpt2(**overrides):
    shape = {"vocab_size": 31, "d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 12}
    return steps.Workload(
        config=preset("gpt2", context_length=6, **shape, **overrides),
        batch_size=3,
        tokens=6,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_the_model_for_peers_computes_what_ours_does():
    work = small_gpt2(tie_head=False)
    ours, theirs = work.model(), peers._model_for_peers(work)
    assert all(
        type(each).__module__.startswith("torch.")
        for each in theirs.modules()
        if next(each.parameters(recurse=False), None) is not None
    )
    ids, _ = next(iter(work.loader()))
    torch.testing.assert_close(theirs(ids), ours(ids))


@pytest.mark.parametrize("name", [peers.NO_DP, *peers.PACKAGES])
@pytest.mark.filterwarnings("ignore")
def test_peers_train_every_parameter(name, monkeypatch):
    root = Path(__file__).parents[2] / "bench" / "peers"
    for folder in ("site", "fastdp"):
        monkeypatch.syspath_prepend(root / folder)
    if name in peers.missing():
        pytest.skip(f"{peers.PACKAGES[name]} is not installed")
    importlib.invalidate_caches()
    peer = peers.Peer(small_gpt2(), name=name, noise_multiplier=1.0)
    before = [each.detach().clone() for each in peer._model.parameters()]
    peer.step()
    after = list(peer._model.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_peers_take_one_family_only():
    run = experiment()
    with pytest.raises(UnsupportedOperation, match="gpt2 family"):
        peers.Peer(run.workload(8), name=peers.NO_DP, noise_multiplier=1.0)


# ---- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_of_the_baseline_and_of_one_pass():
    run = experiment(
        lengths=(64,), modes=("auto", "ghost"), device="cuda", dtype="bf16", has_graphs=True
    )
    found, _ = speed.measure(run)
    by_mode = {each.case.mode: each for each in found}
    assert all(each.trouble is None for each in found)
    assert all(by_mode[mode].graph_ms for mode in ("no_dp", "auto"))
    assert by_mode["ghost"].graph_trouble == "two passes are not recorded"
    assert all(each.peak_bytes for each in found)
