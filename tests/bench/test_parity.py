"""One process and many ranks: equal to the bit, right, and different when something differs."""

import numpy as np
import pytest
import torch

import unison
from bench.memory import MODEL_STATE
from bench.parity import Experiment, Side, _inspect_parameters, _sharded, train
from tests.bench.samples import parity
from tests.harness import ranks, run_on_ranks
from unison.errors import BadInput, Diverged
from unison.models import build, per_sample_loss


@pytest.fixture(autouse=True)
def one_thread():
    """As ranks have it; `isolated` puts the number back."""
    torch.set_num_threads(1)


SMALL = Experiment(preset="tiny", num_layers=2, steps=3, batch_size=5, tokens=7, granule=2)


def train_on_ranks(world, side):
    model = _sharded(side)
    before = unison.digest(model)
    losses, tracker = train(model, side.experiment)
    peak = tracker.peak(MODEL_STATE)
    return before, losses, unison.digest(model), sum(peak[each] for each in MODEL_STATE)


def test_ranks_that_fill_their_own_parts_agree_with_one_process(tmp_path):
    alone = Side(experiment=SMALL, is_deferred=False, folder=tmp_path)
    together = Side(experiment=SMALL, is_deferred=True, folder=tmp_path)
    (*expected, bytes_alone), *_ = run_on_ranks(1, train_on_ranks, alone)
    assert expected[0] == unison.digest(build(SMALL.model, seed=SMALL.seed))
    for *found, bytes_together in run_on_ranks(4, train_on_ranks, together):
        assert found == expected
        assert bytes_together < bytes_alone


@pytest.mark.parametrize("reducer", ["ordered", "fast"])
def test_one_process_trains_as_plain_torch_does(reducer):
    experiment = Experiment(preset="tiny", num_layers=2, steps=3, tokens=7, reducer=reducer)
    model = unison.auto_shard(build(experiment.model, seed=0), reducer=reducer, gradient_divisor=1)
    losses, _ = train(model, experiment)
    plain = build(experiment.model, seed=0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=experiment.lr)
    expected = []
    for rows in experiment.batches():
        loss = per_sample_loss(plain(rows[:, :-1]), rows[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-6)


@ranks(2)
def test_the_largest_difference_is_found(world, tmp_path):
    side = Side(experiment=SMALL, is_deferred=True, folder=tmp_path)
    model = _sharded(side)
    if world.rank == 0:
        for name, value in build(SMALL.model, seed=SMALL.seed).named_parameters():
            other = value.detach().numpy().copy()
            if name == "layers.1.ln1.weight":
                other[3] += 0.5
            np.save(tmp_path / f"{name}.npy", other)
    total, largest = _inspect_parameters(model, side)
    if world.rank == 0:
        plain = build(SMALL.model, seed=SMALL.seed)
        sums = {name: value.double().sum().item() for name, value in plain.named_parameters()}
        assert largest == 0.5
        assert total == pytest.approx(sum(sums.values()), rel=1e-12)


def test_batches_are_the_same_wherever_they_are_drawn():
    torch.manual_seed(1)
    first = list(SMALL.batches())
    torch.manual_seed(2)
    for a, b in zip(first, SMALL.batches(), strict=True):
        assert a.shape == (5, 8)
        assert torch.equal(a, b)
    assert not torch.equal(first[0], first[1])


# what the ranks end with, and what must be said of it
DIFFERENCES = {
    "start": ({"digest_before": "cc" * 32}, "the initial parameters differ"),
    "loss": ({"losses": [7.25, 7.1250001]}, "from step 2 on"),
    "end": ({"digest_after": "cc" * 32, "largest_difference": 1e-9}, "differ by up to 1e-09"),
    "threads": ({"fingerprint": {"threads": 2, "torch": "2.13.0"}}, "conditions: threads"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_difference_is_found_and_named(case):
    changes, expected = DIFFERENCES[case]
    assert expected in parity(**changes).first_difference()


def test_equal_sides_have_no_difference():
    same = parity()
    assert same.first_difference() is None
    assert same.loss_differences == same.relative_differences == [0.0, 0.0]
    assert same.saving == 4.0


def test_differences_of_losses_are_relative_to_one_process():
    apart = parity(losses=[7.25, 7.0])
    assert apart.loss_differences == [0.0, 0.125]
    assert apart.relative_differences == [0.0, 0.125 / 7.125]


def test_a_loss_that_is_not_finite_is_said():
    experiment = Experiment(preset="tiny", num_layers=1, steps=9, tokens=3, lr=1e30)
    model = unison.auto_shard(build(experiment.model), reducer="ordered", gradient_divisor=1)
    with pytest.raises(Diverged, match="lower lr"):
        train(model, experiment)


BAD = {
    "reducer": {"reducer": "orderly"},
    "steps": {"steps": 0},
    "tokens": {"tokens": 129},
    "granule": {"granule": 0},
    "preset": {"preset": "smal"},
    "num_layers": {"num_layers": 0},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_refused_by_name(name):
    with pytest.raises(BadInput, match=name):
        Experiment(**({"preset": "small"} | BAD[name]))
