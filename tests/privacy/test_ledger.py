"""The ledger never counts less than was released, and shows when it is not as it was written."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.privacy.ledgers import RATE, ROOT, lines_of, make, take
from unison.errors import BadInput
from unison.privacy.accounting import ADJACENCY, Event, epsilon_of
from unison.privacy.ledger import Ledger
from unison.privacy.ledger_file import Session, hash_of, head_file_of, read_ledger
from unison.privacy.mechanism import AdaptiveClipping
from unison.privacy.sampling import Shuffled
from unison.rng import Key

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
        "rounded_elements": 0,
        "is_chosen": False,
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
        "id",
        "unison",
        "accountant",
        "key_origin",
        "key_commitment",
        "adjacency",
        "unit",
        "rows_per_sample",
        "sampling_source",
        "num_records",
        "commitment",
        "committed_to",
        "device",
        "fingerprint",
        "mechanism",
        "next",
        "previous",
    }
    assert record["format"] == "unison-ledger/2"
    assert (record["key_origin"], record["adjacency"]) == ("unknown", ADJACENCY)
    assert record["unit"] == "one row of the data set"
    assert record["mechanism"] == {
        "sampling": {"kind": "poisson", "rate": 0.1},
        "noise_multiplier": 2.0,
        "max_grad_norm": 1 / 3,
        "expected_batch_size": 10,
        "adaptive": {"quantile": 0.5, "learning_rate": 0.2, "count_noise_multiplier": 3.0},
        "rounded_elements": 7,
        "is_chosen": False,
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


def test_the_key_that_an_owner_keeps_is_committed_to(path):
    told = "ab" * 32
    with Ledger.open(path, mechanism=make(), session=Session(key_commitment=told)):
        pass
    assert read_ledger(path).sessions[0].key_commitment == told
    # Sessions of earlier versions do not say it.
    record = json.loads(lines_of(path)[0])
    assert record.pop("key_commitment") == told
    assert Session.from_record(record).key_commitment is None
    with pytest.raises(BadInput, match="key_commitment is no hash"):
        Session.from_record(record | {"key_commitment": "none"})
