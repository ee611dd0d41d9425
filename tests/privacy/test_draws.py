import itertools
import math
import random

import numpy as np
import pytest
import torch
from scipy import stats

from tests.privacy.loaders import drawn
from unison.errors import BadInput
from unison.kernels.random import using_backend
from unison.privacy import sampling
from unison.privacy.sampling import (
    Poisson,
    Shuffled,
    TruncatedPoisson,
    check_drawing,
    drawn_records,
    steps_per_epoch,
)
from unison.rng import Cipher, Key, Stream, bernoulli

KEY = Key.from_seed(7)
N = 101
SAMPLINGS = {
    "poisson": Poisson(rate=0.2),
    "truncated": TruncatedPoisson(rate=0.2, capacity=11, num_records=N),
    "shuffled": Shuffled(batch_size=10, num_records=N),
}
every_sampling = pytest.mark.parametrize("kind", SAMPLINGS)


def records_of(kind: str, step: int, seed: int = 7) -> torch.Tensor:
    return drawn(SAMPLINGS[kind], Key.from_seed(seed), N, step)


@pytest.mark.parametrize("at_once", [1, 25, 1000])
def test_records_do_not_depend_on_how_many_are_shuffled_at_once(monkeypatch, at_once):
    straight = [records_of("shuffled", step) for step in range(25)]
    monkeypatch.setattr(sampling, "_SHUFFLED_AT_ONCE", at_once)
    steps = [0, 0, 1, 1, 2, 9, 10, 24, 3]
    asked = drawn_records(SAMPLINGS["shuffled"], Key.from_seed(7), N, steps)
    for step, records in zip(steps, asked, strict=True):
        assert torch.equal(records, straight[step])
        records.zero_()  # what is handed out is the caller's


@every_sampling
def test_a_draw_does_not_depend_on_who_asks_or_when(kind):
    straight = [records_of(kind, step) for step in range(25)]
    steps = [24, 0, 13, 13, 7]
    asked = drawn_records(SAMPLINGS[kind], Key.from_seed(7), N, steps)
    for step, records in zip(steps, asked, strict=True):
        assert torch.equal(records, straight[step])
    with using_backend("reference"):
        reference = records_of(kind, 13)
    with using_backend("numba"):
        assert torch.equal(reference, records_of(kind, 13))


PINNED = {
    "poisson": [0, 2, 4, 7, 17, 34, 40, 46, 59, 61, 86, 88, 90, 91, 92, 97, 100],
    "truncated": [2, 4, 17, 34, 40, 46, 59, 61, 90, 92, 97],
    "shuffled": [3, 50, 95, 100, 29, 21, 70, 46, 43, 44],
}


@every_sampling
def test_a_draw_is_the_same_in_every_process_and_version(kind):
    assert records_of(kind, 13).tolist() == PINNED[kind]


@every_sampling
def test_keys_and_steps_draw_differently(kind):
    seen = {tuple(records_of(kind, step, seed).tolist()) for seed in (1, 2) for step in range(20)}
    assert len(seen) == 40


@every_sampling
def test_drawing_leaves_the_global_generators_and_the_default_device_alone(kind):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    with torch.device("meta"):
        records = records_of(kind, 3)
    assert records.device.type == "cpu"
    assert records.dtype == torch.int64
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002


def test_membership_shares_no_stream_with_the_noise():
    members = torch.zeros(N, dtype=torch.bool)
    members[records_of("poisson", 3)] = True
    for name, purpose in (("membership", "noise"), ("weight", "sampling"), ("weight", "noise")):
        other = bernoulli(Stream(KEY, name, 3, purpose, Cipher.CHACHA20), (N,), 0.2)
        assert not torch.equal(members, other)


def test_poisson_sizes_and_inclusion_have_the_distribution_of_the_accounting():
    num_records, rate, num_steps = 2000, 0.05, 400
    all_drawn = drawn_records(Poisson(rate=rate), KEY, num_records, range(num_steps))
    member = torch.zeros(num_steps, num_records, dtype=torch.float64)
    for step, records in enumerate(all_drawn):
        member[step, records] = 1.0
    variance = rate * (1 - rate)
    # Standardised, sizes of steps and inclusions of records are sums of squares of unit variance.
    for counts, trials in ((member.sum(1), num_records), (member.sum(0), num_steps)):
        scores = (counts - trials * rate) / math.sqrt(trials * variance)
        assert stats.chi2.sf(float((scores**2).sum()), len(scores)) > 1e-3
        assert stats.chi2.cdf(float((scores**2).sum()), len(scores)) > 1e-3
    # Pairs of steps, and pairs of records, are independent: their overlaps are rate² of all.
    centred = member - rate
    for table in (centred @ centred.T / num_records, centred.T @ centred / num_steps):
        off_diagonal = table[~torch.eye(len(table), dtype=torch.bool)]
        assert abs(float(off_diagonal.mean())) < 4 * variance / math.sqrt(num_steps * num_records)


def test_ranks_cannot_select_the_same_local_positions():
    # A peer's ranks, seeded alike, select the same positions of their parts of the data set.
    num_records, rate, num_steps = 2000, 0.1, 100
    shared = 0
    for records in drawn_records(Poisson(rate=rate), KEY, num_records, range(num_steps)):
        first, second = records[records < 1000], records[records >= 1000] - 1000
        shared += int(torch.isin(first, second).sum())
    expected = 1000 * num_steps * rate**2
    assert abs(shared - expected) < 4 * math.sqrt(expected)  # 10,000 if they were the same


def test_truncation_keeps_a_uniform_part_of_the_poisson_draw():
    num_records, capacity, num_steps = 60, 5, 1500
    truncated = TruncatedPoisson(rate=0.5, capacity=capacity, num_records=num_records)
    kept, all_drawn = (
        drawn_records(each, KEY, num_records, range(num_steps))
        for each in (truncated, Poisson(rate=0.5))
    )
    counts = torch.zeros(num_records, dtype=torch.float64)
    places = torch.zeros(3, dtype=torch.float64)
    for records, members in zip(kept, all_drawn, strict=True):
        assert len(records) == capacity
        assert torch.equal(records, records.unique())
        assert bool(torch.isin(records, members).all())
        counts[records] += 1
        position = torch.searchsorted(members, records).double() / len(members)
        places += torch.histc(position, 3, 0, 1)
    # Counts of draws without replacement; they add up to a constant, hence one degree less.
    p = capacity / num_records
    scores = (counts - num_steps * p) ** 2 / (num_steps * p * (1 - p))
    total = float(scores.sum()) * (num_records - 1) / num_records
    assert 1e-3 < stats.chi2.sf(total, num_records - 1) < 1 - 1e-3
    # Neither low nor high records are preferred among those drawn.
    assert stats.chisquare(places.numpy()).pvalue > 1e-3


def test_truncation_hangs_on_each_record_alone():
    sets = []
    for capacity in (3, 5, 9, 60):
        sampling = TruncatedPoisson(rate=0.5, capacity=capacity, num_records=60)
        sets.append(set(drawn(sampling, KEY, 60, 4).tolist()))
    assert all(small < large for small, large in itertools.pairwise(sets))
    assert sets[-1] == set(drawn(Poisson(rate=0.5), KEY, 60, 4).tolist())


def test_an_epoch_of_shuffled_batches_takes_each_record_once_and_drops_the_rest():
    assert steps_per_epoch(SAMPLINGS["shuffled"]) == 10
    epochs = [
        torch.cat([records_of("shuffled", 10 * epoch + position) for position in range(10)])
        for epoch in range(3)
    ]
    for epoch in epochs:
        assert len(epoch) == len(epoch.unique()) == 100
    assert not torch.equal(epochs[0], epochs[1])
    dropped = {(set(range(N)) - set(epoch.tolist())).pop() for epoch in epochs}
    assert len(dropped) > 1


@pytest.mark.parametrize(
    ("rate", "steps"),
    [(1.0, 1), (0.5, 2), (0.3, 4), (32 / 1000, 32), (1e-4, 10_000), (0.9999, 2)]
    + [(1 / n, n) for n in (3, 49, 98, 103, 107, 161, 187, 196, 12_345)],
)
def test_steps_of_an_epoch(rate, steps):
    assert steps_per_epoch(Poisson(rate=rate)) == steps


def test_ten_million_records_are_drawn_in_pieces():
    records = drawn(Poisson(rate=1e-5), KEY, 10**7, 0)
    assert abs(len(records) - 100) < 50
    shuffled = drawn(Shuffled(batch_size=64, num_records=10**7), KEY, 10**7, 10**6)
    assert len(shuffled.unique()) == 64


def test_ends():
    assert drawn(Poisson(rate=1.0), KEY, 9, 0).tolist() == list(range(9))
    assert drawn(Poisson(rate=1e-12), KEY, 9, 0).shape == (0,)
    assert drawn(Shuffled(batch_size=1, num_records=1), KEY, 1, 5).tolist() == [0]


def test_errors():
    with pytest.raises(BadInput, match="rate of 0"):
        check_drawing(Poisson(rate=0.0), KEY, 10)
    with pytest.raises(BadInput, match=r"11 records, found 10"):
        check_drawing(Shuffled(batch_size=2, num_records=11), KEY, 10)
    with pytest.raises(BadInput, match="num_records must be above 0"):
        check_drawing(Poisson(rate=0.5), KEY, 0)
    with pytest.raises(BadInput, match=r"found int.*from_seed"):
        check_drawing(Poisson(rate=0.5), 17, 10)
    with pytest.raises(BadInput, match="expected Poisson"):
        check_drawing("poisson", KEY, 10)
    with pytest.raises(BadInput, match="step must be 0 or more"):
        records_of("poisson", -1)
