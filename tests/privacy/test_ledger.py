"""The ledger never counts less than was released, and shows when it is not as it was written."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from unison.errors import BadInput
from unison.privacy.accounting import epsilon_of
from unison.privacy.adaptive import AdaptiveClipping
from unison.privacy.ledger import Ledger
from unison.privacy.ledger_file import Head, hash_of, head_file_of, read_ledger
from unison.privacy.mechanism import Mechanism
from unison.privacy.sampling import Poisson, Shuffled
from unison.privacy.schedules import Exponential
from unison.privacy.spending import Event
from unison.rng import Key

RATE = Poisson(rate=0.1)
ROOT = Path(__file__).parents[2]


def make(sigma=2.0, sampling=RATE, **settings) -> Mechanism:
    given = {"max_grad_norm": 1 / 3, "expected_batch_size": 10}
    return Mechanism(sampling=sampling, noise_multiplier=sigma, **given | settings)


def take(ledger: Ledger, mechanism: Mechanism, *steps: int) -> None:
    for step in steps:
        ledger.intend(mechanism.release(step))
        ledger.commit(step)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "run" / "ledger.jsonl"


@pytest.fixture
def written(path) -> Path:
    """A ledger of three steps; the last was not committed."""
    mechanism = make()
    with Ledger.open(path, mechanism=mechanism) as ledger:
        take(ledger, mechanism, 0, 1)
        ledger.intend(mechanism.release(2))
    return path


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def rewrite(path: Path, lines: list[bytes]) -> None:
    path.write_bytes(b"".join(line + b"\n" for line in lines))


# ---- what is written -------------------------------------------------------------------------


def test_lines_hold_what_was_applied_and_chain(written):
    lines = lines_of(written)
    records = [json.loads(line) for line in lines]
    assert [record["kind"] for record in records] == [
        "open",
        *("intent", "commit") * 2,
        "intent",
    ]
    assert [record["line"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[0]["previous"] == "0" * 64
    for before, record in zip(lines, records[1:], strict=False):
        assert record["previous"] == hash_of(before)
    assert records[1] | {"previous": None} == {
        "kind": "intent",
        "line": 2,
        "step": 0,
        "sampling": {"kind": "poisson", "rate": 0.1},
        "noise_multiplier": 2.0,
        "max_grad_norm": 1 / 3,  # exactly
        "expected_batch_size": 10,
        "count_noise_multiplier": None,
        "sensitivity_factor": 1.0,
        "previous": None,
    }
    assert json.loads(head_file_of(written).read_text()) == {
        "num_lines": 6,
        "sha256": hash_of(lines[-1]),
    }


def test_a_session_says_what_it_is_and_holds_no_secret(path):
    # Everything that a session writes is listed here: a new field must be thought about.
    adaptive = AdaptiveClipping(count_noise_multiplier=3.0)
    with Ledger.open(path, mechanism=make(adaptive=adaptive, rounded_elements=7)):
        pass
    (line,) = lines_of(path)
    record = json.loads(line)
    assert record.keys() == {
        "kind",
        "line",
        "format",
        "created",
        "unison",
        "accountant",
        "mechanism",
        "next",
        "previous",
    }
    assert record["format"] == "unison-ledger/1"
    assert record["mechanism"] == {
        "sampling": {"kind": "poisson", "rate": 0.1},
        "noise_multiplier": 2.0,
        "max_grad_norm": 1 / 3,
        "expected_batch_size": 10,
        "adaptive": {"quantile": 0.5, "learning_rate": 0.2, "count_noise_multiplier": 3.0},
        "rounded_elements": 7,
    }


def test_nothing_of_a_user_schedule_but_its_name_is_written(path):
    class Hidden:
        def __init__(self) -> None:
            self.key = Key.from_seed(0)

        def __call__(self, step: int) -> float:
            return 2.0

        def __repr__(self) -> str:
            return "the secret"

    with Ledger.open(path, mechanism=make(Hidden())):
        pass
    assert b"secret" not in path.read_bytes()
    assert b"Hidden" in path.read_bytes()


def test_a_line_is_on_the_disk_when_intend_returns(path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), real(fd)))
    mechanism = make()
    with Ledger.open(path, mechanism=mechanism) as ledger:
        assert len(synced) == 2  # the folder that got a new file, and the first line
        ledger.intend(mechanism.release(0))
        assert len(synced) == 3
        ledger.commit(0)
        assert len(synced) == 4


def test_a_ledger_in_memory_counts_the_same(path):
    mechanism = make()
    with Ledger.open(path, mechanism=mechanism) as on_disk:
        in_memory = Ledger.open(None, mechanism=mechanism)
        for ledger in (on_disk, in_memory):
            take(ledger, mechanism, 0, 1, 2)
        assert on_disk.spending.events == in_memory.spending.events
        assert on_disk.head.num_lines == in_memory.head.num_lines == 7
        assert in_memory.num_intents == in_memory.num_commits == 3


# ---- order -----------------------------------------------------------------------------------


def test_steps_of_a_session_only_go_up(path):
    mechanism = make()
    with Ledger.open(path, mechanism=mechanism) as ledger:
        take(ledger, mechanism, 0, 1)
        with pytest.raises(BadInput, match=r"expected a step after 1.*found step 1; renew"):
            ledger.intend(mechanism.release(1))
        ledger.renew(mechanism, step=1)
        take(ledger, mechanism, 1)
        assert ledger.num_intents == 3
    found = read_ledger(path)
    assert [release.step for release in found.releases] == [0, 1, 1]
    assert (found.problems, len(found.sessions)) == ([], 2)


def test_only_what_was_intended_is_committed(path):
    mechanism = make()
    with Ledger.open(path, mechanism=mechanism) as ledger:
        with pytest.raises(BadInput, match="step None, found 0"):
            ledger.commit(0)
        ledger.intend(mechanism.release(0))
        with pytest.raises(BadInput, match="step 0, found 1"):
            ledger.commit(1)
    with pytest.raises(BadInput, match="closed"):
        ledger.commit(0)


def test_an_intent_without_commit_counts(written):
    found = read_ledger(written)
    assert (found.num_intents, found.num_commits, found.uncommitted) == (3, 2, [2])
    assert found.spending.events == {Event(RATE, 2.0): 3}
    assert found.problems == found.notes == []


# ---- going on --------------------------------------------------------------------------------


def test_a_reopened_ledger_goes_on_with_its_chain(written):
    before = written.read_bytes()
    mechanism = make()
    with Ledger.open(written, mechanism=mechanism, step=2) as ledger:
        assert (ledger.num_intents, ledger.num_commits) == (3, 2)
        take(ledger, mechanism, 2, 3)
        spent = ledger.epsilon(1e-5, "rdp")
    assert written.read_bytes().startswith(before)
    found = read_ledger(written)
    assert found.problems == []
    assert [release.step for release in found.releases] == [0, 1, 2, 2, 3]  # step 2 counts twice
    assert epsilon_of(found, 1e-5, "rdp") == spent == epsilon_of(found.releases, 1e-5, "rdp")


def test_an_epoch_of_shuffled_data_counts_again_after_a_resume(path):
    mechanism = make(sampling=Shuffled(batch_size=10, num_records=50))
    with Ledger.open(path, mechanism=mechanism) as ledger:
        take(ledger, mechanism, 0, 1, 2)
    with Ledger.open(path, mechanism=mechanism, step=3) as ledger:
        assert ledger.spending.events == {Event(None, 2.0): 1}
        take(ledger, mechanism, 3, 4)
        assert ledger.spending.events == {Event(None, 2.0): 2}
    found = read_ledger(path)
    assert found.spending.events == {Event(None, 2.0): 2}
    assert [sum(found.spending_after(n).events.values()) for n in range(6)] == [0, 1, 1, 1, 2, 2]


CHILD = """
import os, signal, sys
from unison.privacy.ledger import Ledger
from unison.privacy.mechanism import Mechanism
from unison.privacy.sampling import Poisson

mechanism = Mechanism(
    sampling=Poisson(rate=0.1), noise_multiplier=2.0, max_grad_norm=1.0, expected_batch_size=10
)
ledger = Ledger.open(sys.argv[1], mechanism=mechanism)
ledger.intend(mechanism.release(0))
ledger.commit(0)
ledger.intend(mechanism.release(1))
print("noise is drawn now", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_killed_between_intent_and_commit(path):
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as child:
        assert child.stdout.readline() == "noise is drawn now\n"
        with pytest.raises(BadInput, match=r"another process.*writes"):
            Ledger.open(path, mechanism=make())
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.wait(timeout=60) == -signal.SIGKILL
    with Ledger.open(path, mechanism=make(), step=1) as ledger:
        assert (ledger.num_intents, ledger.num_commits) == (2, 1)
        take(ledger, make(), 1)
        assert ledger.spending.events == {Event(RATE, 2.0): 3}
    assert read_ledger(path).uncommitted == [1]


def test_two_ledgers_of_one_process_are_refused_too(path):
    with Ledger.open(path, mechanism=make()):
        before = path.read_bytes()
        with pytest.raises(BadInput, match="another ledger of this one"):
            Ledger.open(path, mechanism=make())
        assert path.read_bytes() == before
    Ledger.open(path, mechanism=make()).close()


# ---- torn lines ------------------------------------------------------------------------------


def tear(path: Path, num_bytes: int) -> None:
    """Leave so many bytes of the last line, as a crash in the middle of its write does."""
    *whole, last = lines_of(path)
    path.write_bytes(b"".join(line + b"\n" for line in whole) + last[:num_bytes])
    # The head that was known before: that of the last line that was written whole.
    number = max(n for n, line in enumerate(whole, 1) if line.endswith(b"}"))
    head = Head(number, hash_of(whole[number - 1]))
    head_file_of(path).write_text(json.dumps(asdict(head)))


@pytest.mark.parametrize("num_bytes", [1, 9, 12, 18, 19, 60, 200])
def test_a_torn_intent_counts(written, num_bytes):
    tear(written, num_bytes)
    found = read_ledger(written)
    assert found.problems == []
    assert (found.num_intents, found.num_torn, len(found.releases)) == (3, 1, 2)
    assert found.spending.events == {Event(RATE, 2.0): 3}
    assert found.notes == [
        "line 6 was cut short by a crash; it may have been an intent and counts as one"
    ]


@pytest.mark.parametrize("num_bytes", [11, 18, 60])
def test_a_torn_commit_is_no_intent(written, num_bytes):
    rewrite(written, lines_of(written)[:-1])
    tear(written, num_bytes)
    found = read_ledger(written)
    assert (found.problems, found.num_torn, found.num_intents) == ([], 0, 2)
    assert found.uncommitted == [1]
    assert "line 5 was cut short" in found.notes[0]


def test_a_line_that_lacks_only_its_end_is_whole(written):
    written.write_bytes(written.read_bytes()[:-1])
    assert read_ledger(written).num_intents == 3
    Ledger.open(written, mechanism=make(), step=3).close()
    found = read_ledger(written)
    assert (found.problems, found.notes, found.head.num_lines) == ([], [], 7)


@pytest.mark.parametrize("num_bytes", [0, 5, 100])
def test_a_torn_ledger_is_reopened_and_torn_again(written, num_bytes):
    tear(written, 60)
    with Ledger.open(written, mechanism=make(), step=2) as ledger:
        assert ledger.num_intents == 3
    # The session line that follows is cut short as well.
    tear(written, num_bytes)
    mechanism = make()
    with Ledger.open(written, mechanism=mechanism, step=2) as ledger:
        take(ledger, mechanism, 2)
    found = read_ledger(written)
    assert found.problems == []
    assert found.num_intents == (5 if num_bytes == 5 else 4)  # five bytes may have been an intent
    # Nobody can turn the torn line into something else later.
    rewrite(written, [line.replace(b"intent", b"tnetni") for line in lines_of(written)[:6]])
    assert read_ledger(written).problems


def test_a_torn_intent_counts_with_the_least_noise_that_is_known(path):
    mechanism = make(Exponential(start=8.0, factor=0.5))
    with Ledger.open(path, mechanism=mechanism) as ledger:
        take(ledger, mechanism, 0, 1)
        ledger.intend(mechanism.release(2))
    tear(path, 50)
    assert read_ledger(path).spending.events == {Event(RATE, 8.0): 1, Event(RATE, 4.0): 2}
    # Before the first intent it is the release that the session announced.
    rewrite(path, lines_of(path)[:2])
    tear(path, 50)
    assert read_ledger(path).spending.events == {Event(RATE, 8.0): 1}


def test_a_torn_intent_over_shuffled_data_is_a_pass_of_its_own(path):
    mechanism = make(sampling=Shuffled(batch_size=10, num_records=50))
    with Ledger.open(path, mechanism=mechanism) as ledger:
        take(ledger, mechanism, 0)
        ledger.intend(mechanism.release(1))
    tear(path, 50)
    assert read_ledger(path).spending.events == {Event(None, 2.0): 2}


def test_a_ledger_that_was_cut_in_its_first_line_can_be_begun(path):
    Ledger.open(path, mechanism=make()).close()
    path.write_bytes(path.read_bytes()[:40])
    head_file_of(path).unlink()
    with Ledger.open(path, mechanism=make()) as ledger:
        take(ledger, make(), 0)
    found = read_ledger(path)
    assert (found.problems, found.num_intents) == ([], 1)


@pytest.mark.parametrize("failing", ["short", "error"])
def test_a_full_disk_stops_the_step(path, monkeypatch, failing):
    mechanism = make()
    ledger = Ledger.open(path, mechanism=mechanism)
    take(ledger, mechanism, 0)
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if failing == "error":
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:30])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises((BadInput, OSError), match=r"is the disk full|No space left"):
            ledger.intend(mechanism.release(1))
    with pytest.raises(BadInput, match="open it anew"):
        ledger.intend(mechanism.release(2))
    assert ledger.spending.events == {Event(RATE, 2.0): 2}  # rather once too often
    ledger.close()
    with Ledger.open(path, mechanism=mechanism, step=1) as ledger:
        take(ledger, mechanism, 1)
    assert read_ledger(path).problems == []


# ---- edited and removed lines ----------------------------------------------------------------


def edit(lines: list[bytes], number: int, old: bytes, new: bytes) -> list[bytes]:
    assert old in lines[number - 1]
    changed = lines.copy()
    changed[number - 1] = changed[number - 1].replace(old, new)
    return changed


TAMPERED = {
    "edited": (lambda lines: edit(lines, 2, b"2.0", b"9.0"), "line 2 was changed"),
    "edited session": (lambda lines: edit(lines, 1, b"2.0", b"9.0"), "line 1 was changed"),
    "edited last": (lambda lines: edit(lines, 6, b"2.0", b"9.0"), "line 6 was changed"),
    "one removed": (lambda lines: lines[:3] + lines[4:], "line 4 is missing"),
    "two removed": (lambda lines: lines[:2] + lines[4:], "lines 3 to 4 are missing"),
    "first removed": (lambda lines: lines[1:], "line 1 is missing"),
    "last removed": (lambda lines: lines[:-1], "the last line is missing"),
    "tail removed": (lambda lines: lines[:-3], "the last 3 lines are missing"),
    "all removed": (lambda lines: [], "the last 6 lines are missing"),
    "swapped": (lambda lines: [*lines[:3], lines[4], lines[3], lines[5]], "line 4 is missing"),
    "repeated": (lambda lines: [*lines[:3], *lines[2:]], "line 3 stands where line 4 should"),
    "rubbish": (lambda lines: [*lines[:3], b"rubbish", *lines[4:]], "line 4 was changed"),
    "rubbish at the end": (lambda lines: [*lines[:5], b"rubbish"], "line 6 was changed"),
    "blank": (lambda lines: [*lines[:3], b"", *lines[3:]], "line 4 was changed"),
    "numbered anew": (
        lambda lines: [*lines[:1], *(edit(lines, n, b"2.0", b"3.0")[n - 1] for n in (2, 4, 6))],
        "line 3 is missing",
    ),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_tampering_shows_and_cannot_be_continued(written, case):
    change, message = TAMPERED[case]
    rewrite(written, change(lines_of(written)))
    assert any(message in problem for problem in read_ledger(written).problems)
    before = written.read_bytes()
    with pytest.raises(BadInput, match="cannot be continued"):
        Ledger.open(written, mechanism=make())
    assert written.read_bytes() == before


def test_a_removed_tail_needs_a_witness(written):
    head = Head(**json.loads(head_file_of(written).read_text()))
    rewrite(written, lines_of(written)[:-3])
    head_file_of(written).unlink()
    found = read_ledger(written)
    assert found.problems == []
    assert "no ledger.head.json beside it" in found.notes[0]
    assert found.missing(head, "the checkpoint") == (
        "the last 3 lines are missing: the checkpoint knows 6 lines"
    )
    head_file_of(written).write_text("half a fi")
    assert "cannot be read" in read_ledger(written).notes[0]


def test_a_ledger_that_vanished_is_not_begun_anew(written):
    written.unlink()
    with pytest.raises(BadInput, match="the last 6 lines are missing"):
        Ledger.open(written, mechanism=make())


def test_a_lagging_head_file_is_no_problem(written):
    lines = lines_of(written)
    head = {"num_lines": 4, "sha256": hash_of(lines[3])}
    head_file_of(written).write_text(json.dumps(head))
    assert read_ledger(written).problems == []


@pytest.mark.parametrize(
    "text", ["", "hello\nworld\n", '{"step": 3}\n', '{"kind": "open", "line": 1, "previous": 0}\n']
)
def test_what_is_no_ledger_is_not_taken_for_one(path, text):
    path.parent.mkdir()
    path.write_text(text)
    assert any("does not begin as a ledger" in found for found in read_ledger(path).problems)
    with pytest.raises(BadInput, match="cannot read the ledger"):
        read_ledger(path.with_name("nothing.jsonl"))


def test_another_format_is_refused(written):
    lines = [line.replace(b"unison-ledger/1", b"unison-ledger/2") for line in lines_of(written)]
    rewrite(written, lines)
    assert any("expected format unison-ledger/1" in each for each in read_ledger(written).problems)


# ---- checkpoints -----------------------------------------------------------------------------


def test_a_checkpoint_knows_how_far_the_ledger_was(path):
    mechanism = make()
    with Ledger.open(path, mechanism=mechanism) as ledger:
        take(ledger, mechanism, 0, 1)
        state = json.loads(json.dumps(ledger.state_dict()))
        take(ledger, mechanism, 2)
    with Ledger.open(path, mechanism=mechanism, step=2) as ledger:
        ledger.load_state_dict(state)
        take(ledger, mechanism, 2)
        assert ledger.spending.events == {Event(RATE, 2.0): 4}
    for left in (path, head_file_of(path)):
        left.unlink()
    with (
        Ledger.open(path, mechanism=mechanism, step=2) as ledger,
        pytest.raises(BadInput, match="the checkpoint knows 5 lines; put the ledger"),
    ):
        ledger.load_state_dict(state)


def test_a_ledger_in_memory_takes_up_a_checkpoint():
    mechanism = make()
    ledger = Ledger.open(None, mechanism=mechanism)
    take(ledger, mechanism, 0, 1)
    state = json.loads(json.dumps(ledger.state_dict()))
    take(ledger, mechanism, 2)
    ledger.load_state_dict(state)  # going back in one process forgets nothing
    ledger.renew(mechanism, step=2)
    take(ledger, mechanism, 2)
    assert ledger.spending.events == {Event(RATE, 2.0): 4}

    resumed = Ledger.open(None, mechanism=mechanism, step=2)
    resumed.load_state_dict(state)
    assert resumed.spending.events == {Event(RATE, 2.0): 2}
    other = Ledger.open(None, mechanism=mechanism)
    take(other, mechanism, 0)
    with pytest.raises(BadInput, match="another run"):
        other.load_state_dict(state)


def test_a_checkpoint_without_a_file_does_not_pass_for_one_with(path):
    state = Ledger.open(None, mechanism=make()).state_dict()
    with (
        Ledger.open(path, mechanism=make()) as ledger,
        pytest.raises(BadInput, match="kept in memory"),
    ):
        ledger.load_state_dict(state)
