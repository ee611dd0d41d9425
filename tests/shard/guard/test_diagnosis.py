"""What is found in the states of ranks, without any ranks."""

from unison.shard.guard.records import examine


def state(last, status="inside", marks=None):
    group = {"ranks": [0, 1], "last": last, "marks": marks or {}}
    return {"status": status, "groups": {"0": group} if last else {}}


def test_a_slow_rank_is_waited_for_and_one_that_left_is_not():
    behind = {}

    def found(states, now):
        return examine(states, behind, patience=5.0, now=now)

    assert found({0: state(3), 1: state(2)}, 0.0) is None
    assert found({0: state(4), 1: state(3)}, 4.0) is None  # it moved
    assert found({0: state(4), 1: state(3)}, 8.0) is None
    late = found({0: state(4), 1: state(3)}, 9.5)
    assert late is not None
    assert late == ((1,), "0", 4, False, "")
    gone = examine({0: state(1), 1: state(0, "left")}, {}, patience=5.0, now=0.0)
    assert gone is not None
    assert gone == ((1,), "0", 1, False, "")


def test_calls_are_compared_at_common_numbers():
    far = state(900, marks={64: "a", 899: "x", 900: "y"})
    same, other = state(64, marks={63: "q", 64: "a"}), state(64, marks={63: "q", 64: "b"})
    assert examine({0: far, 1: same}, {}, patience=5.0, now=0.0) is None
    found = examine({0: far, 1: other}, {}, patience=5.0, now=0.0)
    assert found is not None
    assert found[1:] == ("0", 64, True, "")
