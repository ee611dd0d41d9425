"""A ledger that was edited or lost lines shows it, and is not continued."""

import json

import pytest

from tests.privacy.ledgers import RATE, lines_of, make, rewrite, take
from unison.errors import BadInput
from unison.privacy.accounting import Event
from unison.privacy.ledger import Ledger
from unison.privacy.ledger_file import Head, hash_of, head_file_of, read_ledger


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
    lines = [line.replace(b"unison-ledger/2", b"unison-ledger/3") for line in lines_of(written)]
    rewrite(written, lines)
    assert any("expected format unison-ledger/2" in each for each in read_ledger(written).problems)


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
