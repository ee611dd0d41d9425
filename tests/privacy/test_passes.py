import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unison.errors import BadInput
from unison.privacy.sampling import cut_passes, physical_batches


@given(
    num_samples=st.integers(0, 60),
    num_ranks=st.integers(1, 5),
    granule=st.integers(1, 4),
    granules_per_pass=st.one_of(st.none(), st.integers(1, 5)),
)
def test_passes_cut_a_batch_without_loss_in_lock_step(
    num_samples, num_ranks, granule, granules_per_pass
):
    most = granules_per_pass and granules_per_pass * granule
    runs = [
        cut_passes(
            num_samples,
            rank=rank,
            num_ranks=num_ranks,
            granule=granule,
            max_physical_batch_size=most,
        )
        for rank in range(num_ranks)
    ]
    assert len({len(each) for each in runs}) == 1
    assert len(runs[0]) >= 1
    assert [position for rank in runs for run in rank for position in run] == [*range(num_samples)]
    for run in (run for rank in runs for run in rank if run):
        assert most is None or len(run) <= most
        assert run.start % granule == 0
        assert run.stop % granule == 0 or run.stop == num_samples
    # As even as can be: ranks differ by at most one granule.
    sizes = [sum(-(-len(run) // granule) for run in rank) for rank in runs]
    assert max(sizes) - min(sizes) <= 1
    # No pass is run for nothing: some rank has samples in each but the first.
    assert all(any(rank[index] for rank in runs) for index in range(1, len(runs[0])))


def test_a_large_logical_batch_on_a_small_device():
    runs = cut_passes(4096, max_physical_batch_size=8)
    assert len(runs) == 512
    assert {len(run) for run in runs} == {8}
    assert [len(run) for run in cut_passes(19, max_physical_batch_size=8)] == [8, 8, 3]
    assert cut_passes(19) == [range(19)]
    assert cut_passes(0, max_physical_batch_size=8) == [range(0)]


def test_physical_batches_know_their_place():
    ids = torch.tensor([2, 3, 5, 7, 11, 13, 17])
    passes = list(physical_batches(ids, step=4, max_physical_batch_size=3))
    assert [each.record_ids.tolist() for each in passes] == [[2, 3, 5], [7, 11, 13], [17]]
    assert [each.first_position for each in passes] == [0, 3, 6]
    assert [each.num_samples for each in passes] == [3, 3, 1]
    assert [each.is_first for each in passes] == [True, False, False]
    assert [each.is_last for each in passes] == [False, False, True]
    assert {each.step for each in passes} == {4}
    (empty,) = physical_batches(ids[:0], step=5)
    assert (empty.num_samples, empty.is_first, empty.is_last) == (0, True, True)
    assert empty.record_ids.dtype == torch.int64


def test_a_physical_batch_does_not_show_its_records():
    first, _ = physical_batches(torch.tensor([1234, 5678]), step=4, max_physical_batch_size=1)
    assert repr(first) == ("PhysicalBatch(step=4, is_first=True, is_last=False; records withheld)")
    with pytest.raises(AttributeError):
        first.step = 3


def test_errors():
    with pytest.raises(BadInput, match=r"max_physical_batch_size=6 granule=4"):
        cut_passes(10, granule=4, max_physical_batch_size=6)
    with pytest.raises(BadInput, match=r"rank=2 num_ranks=2"):
        cut_passes(10, rank=2, num_ranks=2)
    with pytest.raises(BadInput, match="max_physical_batch_size must be above 0"):
        cut_passes(10, max_physical_batch_size=0)
