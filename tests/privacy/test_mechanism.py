"""One object says what a step applies, and nothing moves it during the step."""

import json
import math
from dataclasses import FrozenInstanceError, replace

import pytest

from unison.clip.bounds import SUM_ERROR
from unison.errors import BadInput
from unison.privacy.mechanism import (
    FINER,
    AdaptiveClipping,
    Cosine,
    Exponential,
    Linear,
    Mechanism,
    Release,
    Stairs,
    noisy_fraction,
    sensitivity_factor,
)
from unison.privacy.sampling import Poisson, Shuffled, TruncatedPoisson, from_fields, to_fields
from unison.rng import grid_sensitivity, noise_spacing

RATE = Poisson(rate=0.1)


def make(**settings) -> Mechanism:
    given = {
        "sampling": RATE,
        "noise_multiplier": 1.0,
        "max_grad_norm": 2.0,
        "expected_batch_size": 10,
    }
    return Mechanism(**given | settings)


# ---- one release -----------------------------------------------------------------------------


def test_a_clip_norm_that_moves_takes_its_noise_along():
    # A clip scheduler elsewhere moved the noise and left the clipping: multiplier 0.1 for 1.0.
    mechanism = make(noise_multiplier=1.5, max_grad_norm=Exponential(start=1.0, factor=0.1))
    for step in range(4):
        release = mechanism.release(step)
        assert release.max_grad_norm == pytest.approx(0.1**step)
        assert release.noise_std / release.max_grad_norm == pytest.approx(1.5, rel=1e-15)
        assert release.effective_noise_multiplier == 1.5
    moved = replace(release, max_grad_norm=7.0)
    assert moved.noise_std == 1.5 * 7.0


def test_the_noise_is_no_setting_of_its_own():
    release = make().release(0)
    with pytest.raises(FrozenInstanceError):
        release.max_grad_norm = 3.0
    with pytest.raises(FrozenInstanceError):
        release.noise_std = 0.1
    with pytest.raises(TypeError, match="noise_std"):
        Release(**release.to_fields() | {"sampling": RATE, "noise_std": 0.1})
    with pytest.raises(AttributeError):
        make().sigma = 3.0  # a misspelt setting does not pass unnoticed


def test_effective_multiplier_of_both_releases():
    release = replace(make().release(0), noise_multiplier=1.2, count_noise_multiplier=4.0)
    z = release.effective_noise_multiplier
    assert z**-2 == pytest.approx(1.2**-2 + (2 * 4.0) ** -2, rel=1e-14)
    assert replace(release, count_noise_multiplier=0.0).effective_noise_multiplier == 0
    assert replace(release, noise_multiplier=0.0).effective_noise_multiplier == 0


@pytest.mark.parametrize("sigma", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("clip_norm", [0.7, 1.0, 1.001, 3.0])
def test_rounding_to_the_grid_is_counted(sigma, clip_norm):
    size = 12_345_678
    release = make(noise_multiplier=sigma, max_grad_norm=clip_norm, rounded_elements=size).release(
        0
    )
    exact = grid_sensitivity(clip_norm, noise_spacing(release.noise_std), size)
    counted = clip_norm * (release.sensitivity_factor - SUM_ERROR)
    assert exact <= counted + 1e-12
    assert counted <= 2 * (1 + FINER) * (exact - clip_norm) + clip_norm + 1e-12
    assert SUM_ERROR <= 1e-5
    assert release.effective_noise_multiplier <= release.noise_std / exact
    assert release.sensitivity_factor == sensitivity_factor(sigma, size)


@pytest.mark.parametrize(
    "sampling",
    [
        Poisson(rate=1 / 3),
        TruncatedPoisson(rate=0.1, capacity=9, num_records=50),
        Shuffled(batch_size=4, num_records=50),
    ],
)
def test_a_release_survives_json_exactly(sampling):
    release = Release(
        step=3,
        sampling=sampling,
        max_grad_norm=1 / 3,
        noise_multiplier=math.pi,
        expected_batch_size=10.1,
        count_noise_multiplier=2 / 7,
        sensitivity_factor=1 + 1e-9,
        rounded_elements=12,
        is_chosen=True,
    )
    assert Release.from_fields(json.loads(json.dumps(release.to_fields()))) == release
    assert from_fields(json.loads(json.dumps(to_fields(sampling)))) == sampling


@pytest.mark.parametrize(
    "fields",
    [
        {"step": -1},
        {"noise_multiplier": -0.1},
        {"noise_multiplier": math.nan},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": math.inf},
        {"expected_batch_size": 0},
        {"count_noise_multiplier": -1.0},
        {"sensitivity_factor": 0.99},
        {"rounded_elements": -1},
        {"is_chosen": 1},
        {"sampling": {"kind": "magic"}},
        {"sampling": {"kind": "poisson", "rate": 0.1, "extra": 1}},
        {"sampling": None},
        {"noise_multiplier": "one"},
        {"key": "00ff"},
    ],
)
def test_a_release_that_cannot_be_is_refused(fields):
    with pytest.raises(BadInput):
        Release.from_fields(make().release(0).to_fields() | fields)


# ---- schedules -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "ends"),
    [
        (Exponential(start=2.0, factor=0.5), (2.0, 0.125)),
        (Stairs(start=2.0, factor=0.5, every=3), (2.0, 1.0)),
        (Linear(start=2.0, end=1.0, steps=4), (2.0, 1.0)),
        (Cosine(start=2.0, end=1.0, steps=4), (2.0, 1.0)),
    ],
)
def test_schedules_reach_their_ends(schedule, ends):
    mechanism = make(noise_multiplier=schedule)
    values = [mechanism.release(step).noise_multiplier for step in range(5)]
    assert (values[0], values[4]) == pytest.approx(ends)
    assert values == sorted(values, reverse=True)
    described = json.loads(json.dumps(mechanism.describe()))["noise_multiplier"]
    assert described["schedule"] == type(schedule).__name__


def test_a_schedule_that_leaves_its_range_is_named_with_the_step():
    def falling(step: int) -> float:
        return 1.0 - step / 10

    mechanism = make(noise_multiplier=falling)
    mechanism.release(9)
    with pytest.raises(BadInput, match=r"noise_multiplier.*falling.*found 0.0 at step 10"):
        mechanism.release(10)
    with pytest.raises(BadInput, match="at step 0"):
        make(max_grad_norm=lambda step: math.nan)


# ---- adaptive clipping -----------------------------------------------------------------------


def test_adaptive_clipping_follows_the_noisy_fraction():
    adaptive = AdaptiveClipping(quantile=0.5, learning_rate=0.2, count_noise_multiplier=3.0)
    mechanism = make(adaptive=adaptive)
    release = mechanism.begin(0)
    assert release.count_noise_multiplier == 3.0
    mechanism.finish(0, noisy_fraction=0.9)
    assert mechanism.max_grad_norm == pytest.approx(2.0 * math.exp(-0.2 * 0.4))
    after = mechanism.release(1)
    assert after.noise_std == after.noise_multiplier * after.max_grad_norm
    assert after.effective_noise_multiplier == release.effective_noise_multiplier


def test_the_fraction_has_a_public_divisor_and_finds_the_quantile():
    # Of 8 expected records 6 came, 5 of them at most C: the sum of b - 1/2 is 2.
    assert noisy_fraction(5 * 0.5 - 1 * 0.5, 8) == 0.75
    norms = [0.1 * k for k in range(1, 101)]
    mechanism = make(adaptive=AdaptiveClipping(quantile=0.3, count_noise_multiplier=1.0))
    for step in range(300):
        clip_norm = mechanism.begin(step).max_grad_norm
        below = sum(0.5 if norm <= clip_norm else -0.5 for norm in norms)
        mechanism.finish(step, noisy_fraction=noisy_fraction(below, len(norms)))
    assert mechanism.max_grad_norm == pytest.approx(3.0, abs=0.15)


def test_adaptive_clipping_asks_for_what_it_needs():
    mechanism = make(adaptive=AdaptiveClipping(count_noise_multiplier=1.0))
    mechanism.begin(0)
    with pytest.raises(BadInput, match="needs noisy_fraction"):
        mechanism.finish(0)
    for fraction in (math.nan, -1e9):
        with pytest.raises(BadInput, match="noisy_fraction"):
            mechanism.finish(0, noisy_fraction=fraction)
    assert mechanism.current is not None  # a refused finish changes nothing
    mechanism.finish(0, noisy_fraction=-0.3)  # noise may carry it below 0
    with pytest.raises(BadInput, match="cannot be set"):
        mechanism.max_grad_norm = 1.0
    with pytest.raises(BadInput, match="at once"):
        make(
            max_grad_norm=lambda step: 1.0,
            adaptive=AdaptiveClipping(count_noise_multiplier=1.0),
        )
    plain = make()
    plain.begin(0)
    with pytest.raises(BadInput, match="no fraction"):
        plain.finish(0, noisy_fraction=0.5)


# ---- between begin and finish ----------------------------------------------------------------


def test_nothing_changes_during_a_step():
    mechanism = make(is_chosen=True)
    release = mechanism.begin(4)
    for change in (
        lambda: setattr(mechanism, "noise_multiplier", 5.0),
        lambda: setattr(mechanism, "max_grad_norm", 5.0),
        lambda: mechanism.load_state_dict(mechanism.state_dict()),
        lambda: mechanism.begin(5),
    ):
        with pytest.raises(BadInput, match="step 4"):
            change()
    for name in ("sampling", "expected_batch_size", "adaptive"):
        with pytest.raises(AttributeError):
            setattr(mechanism, name, None)
    assert mechanism.release(4) is release
    assert mechanism.current is release
    mechanism.finish(4)
    mechanism.noise_multiplier = 5.0
    assert mechanism.release(5).noise_std == 10.0


def test_a_schedule_is_asked_once_in_a_step():
    values = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    mechanism = make(noise_multiplier=lambda step: next(values))
    release = mechanism.begin(0)
    assert mechanism.release(0) is mechanism.release(0) is release


def test_steps_end_as_they_began():
    mechanism = make()
    with pytest.raises(BadInput, match="none"):
        mechanism.finish(0)
    mechanism.begin(0)
    with pytest.raises(BadInput, match="step 0, found step 1"):
        mechanism.finish(1)
    mechanism.abandon()
    mechanism.begin(0)
    mechanism.finish(0)


def test_sigma_is_fixed_unless_it_is_said_to_be_chosen():
    mechanism = make()
    with pytest.raises(BadInput, match=r"fixed: PLD and RDP hold for plans.*'odometer'"):
        mechanism.noise_multiplier = 5.0
    assert mechanism.release(0).noise_multiplier == 1.0
    assert not mechanism.release(0).is_chosen
    mechanism.max_grad_norm = 7.0  # the noise follows it, and the cost stays
    assert mechanism.release(0).effective_noise_multiplier == 1.0
    chosen = make(is_chosen=True)
    assert chosen.release(0).is_chosen  # before anything was set: it could have been
    with pytest.raises(BadInput, match="is_chosen True, and make_private was given False"):
        make().load_state_dict(chosen.state_dict())
    state = make().state_dict()
    del state["made_with"]["is_chosen"]  # of an older version
    make().load_state_dict(state)


def test_a_setting_that_cannot_be_used_changes_nothing():
    mechanism = make(is_chosen=True)
    for name, value in (("noise_multiplier", -1.0), ("max_grad_norm", 0.0)):
        with pytest.raises(BadInput, match=name):
            setattr(mechanism, name, value)
    assert (mechanism.noise_multiplier, mechanism.max_grad_norm) == (1.0, 2.0)
    with pytest.raises(BadInput, match="follows a schedule"):
        make(noise_multiplier=lambda step: 1.0).noise_multiplier = 2.0
    with pytest.raises(BadInput, match="max_grad_norm"):
        make(max_grad_norm=-1.0)


# ---- state -----------------------------------------------------------------------------------


def test_state_goes_on_where_it_was():
    adaptive = AdaptiveClipping(count_noise_multiplier=1.0)
    mechanism = make(adaptive=adaptive)
    for step in range(3):
        mechanism.begin(step)
        mechanism.finish(step, noisy_fraction=0.8)
    state = json.loads(json.dumps(mechanism.state_dict()))
    resumed = make(adaptive=adaptive)
    resumed.load_state_dict(state)
    assert resumed.release(3) == mechanism.release(3)
    assert repr(resumed) == repr(mechanism)
    with pytest.raises(BadInput, match="adaptive"):
        make().load_state_dict(state)


def test_state_of_another_schedule_is_refused():
    state = make(noise_multiplier=Stairs(start=2.0, factor=0.5, every=3)).state_dict()
    make(noise_multiplier=Stairs(start=2.0, factor=0.5, every=3)).load_state_dict(state)
    for other in (1.0, Stairs(start=2.0, factor=0.5, every=4)):
        with pytest.raises(BadInput, match="goes on with what it began with"):
            make(noise_multiplier=other).load_state_dict(state)


def test_shuffled_steps_have_a_place_in_their_epoch():
    shuffled = Shuffled(batch_size=4, num_records=11)
    places = [(shuffled.epoch_of(step), shuffled.position_of(step)) for step in range(5)]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
