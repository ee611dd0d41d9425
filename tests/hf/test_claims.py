"""What private training promises, in every place where users train."""

from functools import partial

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("trl")

from dp_accounting import rdp

import unison
from tests.harness.ranks import ranks
from tests.hf.common import CLIP_NORM, DELTA, ledger_counts, privacy, silent
from tests.hf.places import (
    Order,
    with_accelerate,
    with_lightning,
    with_sft,
    with_trainer,
)
from tests.privacy.accounts import sampled, times
from unison.privacy.mechanism import sensitivity_factor

PLACES = {
    "Trainer": with_trainer,
    "SFTTrainer": with_sft,
    "SFTTrainer, completions": partial(with_sft, form="completion"),
    "accelerate": with_accelerate,
    "Lightning": with_lightning,
    "Lightning, calls itself": partial(with_lightning, calls_itself=True),
}
TOGETHER = {  # on several processes
    "Trainer": with_trainer,
    "Trainer, sharded": partial(with_trainer, shard=unison.auto_shard),
    "accelerate": with_accelerate,
    "Lightning": with_lightning,
    "Lightning, calls itself": partial(with_lightning, calls_itself=True),
}


def places(*quick):
    """All of them, most in the long suite."""
    marks = {place: () if place in quick else pytest.mark.full for place in PLACES}
    return pytest.mark.parametrize(
        "place", [pytest.param(place, marks=mark) for place, mark in marks.items()]
    )


def check_epsilon(run, num_steps):
    """Compare what was logged with dp-accounting, by hand: every row is in every step."""
    num_elements = sum(each.numel() for each in run.parameters.values())
    z = run.noise_multiplier / sensitivity_factor(run.noise_multiplier, num_elements)
    event = times(sampled(1.0, z), num_steps)
    expected = rdp.RdpAccountant().compose(event).get_epsilon(DELTA)
    assert run.epsilon == pytest.approx(expected, rel=1e-5)


@places("accelerate", "SFTTrainer")
def test_commits_steps_and_logs_agree_and_epsilon_is_the_accountants(place, tmp_path):
    run = PLACES[place](Order(tmp_path, privacy(epsilon=2.0, secure_noise=False)))
    assert run.num_steps == 2
    assert run.logged == [1, 2]
    assert ledger_counts(tmp_path) == (2, 2)
    check_epsilon(run, 2)
    assert 1.97 < run.epsilon <= 2.0


@places("Trainer")
def test_the_first_sum_is_that_of_single_rows_and_a_row_moves_it_by_the_clip_norm(place, tmp_path):
    whole = PLACES[place](Order(tmp_path / "whole", silent(), steps=1))
    expected = whole.expected()
    assert float((whole.found - expected).norm() / expected.norm()) < 1e-6
    less = PLACES[place](Order(tmp_path / "less", silent(), without=5, steps=1))
    assert 0.1 * CLIP_NORM < float((whole.found - less.found).norm()) <= CLIP_NORM * (1 + 1e-5)


@places("Lightning", "Trainer")
def test_a_resumed_run_is_the_uninterrupted_one(place, tmp_path):
    spends = privacy(secure_noise=False)
    whole = PLACES[place](Order(tmp_path / "whole", spends, steps=3))
    PLACES[place](Order(tmp_path / "parts", spends, steps=3, stop_at=1))
    assert ledger_counts(tmp_path / "parts") == (1, 1)
    rest = PLACES[place](Order(tmp_path / "parts", spends, steps=3, resumes=True))
    assert rest.num_steps == 3
    assert ledger_counts(tmp_path / "parts") == (3, 3)
    assert rest.epsilon == whole.epsilon
    for name, each in whole.parameters.items():
        assert torch.equal(each, rest.parameters[name]), name


@pytest.mark.full
@pytest.mark.parametrize("place", TOGETHER)
@ranks(2)
def test_two_processes_keep_the_same_promises(world, place, tmp_path):
    run, here = TOGETHER[place], {"rank": world.rank, "size": world.size}

    whole = run(Order(tmp_path / "whole", silent(), steps=1, **here))
    expected = whole.expected()
    assert float((whole.found - expected).norm() / expected.norm()) < 1e-6
    other = run(Order(tmp_path / "other", silent(), without=5, steps=1, **here))
    moved = float((whole.found - other.found).norm())  # one row goes, one comes
    assert 0.1 * CLIP_NORM < moved <= 2 * CLIP_NORM * (1 + 1e-5)

    spends = privacy(secure_noise=False)
    whole = run(Order(tmp_path / "once", spends, steps=3, **here))
    assert whole.num_steps == 3
    check_epsilon(whole, 3)
    run(Order(tmp_path / "parts", spends, steps=3, stop_at=1, **here))
    rest = run(Order(tmp_path / "parts", spends, steps=3, resumes=True, **here))
    world.barrier()
    assert ledger_counts(tmp_path / "once") == ledger_counts(tmp_path / "parts") == (3, 3)
    for name, each in whole.parameters.items():
        assert torch.equal(each, rest.parameters[name]), name
