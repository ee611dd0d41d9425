"""A diagnosis, alone: what it makes of the states of ranks."""

from unison.shard.guard.diagnosis import Diagnosis, FaultKind, GroupState, RankState, Status


def state(last, status=Status.INSIDE, marks=None):
    group = GroupState([0, 1], last, marks or {}, "barrier()", ["a.py:1 in f"], 0.0)
    return RankState(
        1, status, "", ["a.py:2 in f"], None, ["", "1", ""], {"0": group} if last else {}
    )


def test_a_diagnosis_waits_for_a_slow_rank_and_not_for_one_that_left():
    diagnosis = Diagnosis(patience=5.0)
    assert diagnosis.examine({0: state(3), 1: state(2)}, 0.0) is None
    assert diagnosis.examine({0: state(4), 1: state(3)}, 4.0) is None  # it moved
    assert diagnosis.examine({0: state(4), 1: state(3)}, 8.0) is None
    late = diagnosis.examine({0: state(4), 1: state(3)}, 9.5)
    assert late is not None
    assert (late.kind, late.ranks, late.number) == (FaultKind.SKIPPED, (1,), 4)
    gone = Diagnosis(5.0).examine({0: state(1), 1: state(0, Status.LEFT)}, 0.0)
    assert gone is not None
    assert (gone.kind, gone.ranks, gone.number) == (FaultKind.SKIPPED, (1,), 1)


def test_a_diagnosis_compares_at_common_numbers():
    far = state(900, marks={64: "a", 899: "x", 900: "y"})
    assert Diagnosis(5.0).examine({0: far, 1: state(64, marks={63: "q", 64: "a"})}, 0.0) is None
    found = Diagnosis(5.0).examine({0: far, 1: state(64, marks={63: "q", 64: "b"})}, 0.0)
    assert found is not None
    assert (found.kind, found.number) == (FaultKind.MISMATCH, 64)
