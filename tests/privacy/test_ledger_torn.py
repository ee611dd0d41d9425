"""Lines that a crash cut short count if they may have been an intent."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.privacy.ledgers import RATE, SECRET, lines_of, make, rewrite, take
from unison.errors import BadInput, OutOfRoom
from unison.privacy.accounting import Event
from unison.privacy.ledger import Ledger
from unison.privacy.ledger_file import Head, hash_of, head_file_of, read_ledger
from unison.privacy.mechanism import Exponential
from unison.privacy.sampling import Shuffled


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
    Ledger.open(written, mechanism=make(), step=3, session=SECRET).close()
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
        with pytest.raises(OutOfRoom, match=r"is the disk full|No space left"):
            ledger.intend(mechanism.release(1))
    with pytest.raises(BadInput, match="open it anew"):
        ledger.intend(mechanism.release(2))
    assert ledger.spending.events == {Event(RATE, 2.0): 2}  # rather once too often
    ledger.close()
    with Ledger.open(path, mechanism=mechanism, step=1) as ledger:
        take(ledger, mechanism, 1)
    assert read_ledger(path).problems == []
