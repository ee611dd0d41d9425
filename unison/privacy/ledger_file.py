"""A ledger on disk: its lines, and whether they are all there as they were written.

docs/privacy.md describes the format.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unison.errors import BadInput
from unison.privacy.mechanism import Release
from unison.privacy.spending import Spending

FORMAT = "unison-ledger/1"
START = "0" * 64  # what stands for the hash of the line before the first
_INTENT = b'{"kind": "intent", '  # how every intent begins; a torn line may be cut in it
_OPEN = b'{"kind": "open", '
_MAX_PROBLEMS = 20  # a file that is no ledger has as many as lines


@dataclass(frozen=True, slots=True)
class Head:
    """How far a ledger goes: enough to notice that its end was cut off.

    Attributes:
        num_lines: Number of its last line, from 1.
        sha256: Hash of that line, in hexadecimal.
    """

    num_lines: int
    sha256: str


def head_file_of(path: Path) -> Path:
    """The file that knows the head of a ledger: `ledger.head.json` for `ledger.jsonl`."""
    return path.with_suffix(".head.json")


def hash_of(line: bytes) -> str:
    """The hash of a line, which the next line holds."""
    return hashlib.sha256(line).hexdigest()


def hash_torn(previous: str, line: bytes) -> str:
    """The hash of a torn line, which does not hold the hash of the one before it itself."""
    return hash_of(previous.encode() + b"\n" + line)


@dataclass
class LedgerFile:
    """What a ledger on disk holds, and whether it is whole.

    Attributes:
        path: The file.
        sessions: The line that began each session.
        releases: What was intended, in order.
        num_commits: How many of them were committed.
        uncommitted: Steps of the intents without a commit; they count.
        num_torn: Lines that a crash cut short and that may have been intents; they count, each as
            the release with the least noise that the ledger knows of.
        spending: What all of it comes to.
        head: How far the file goes.
        problems: Why it cannot be trusted: lines edited or removed. Empty if it can.
        notes: What a reader should know besides.
        ends_with_newline: False after a crash in the middle of a write.
    """

    path: Path
    sessions: list[dict[str, Any]] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    num_commits: int = 0
    uncommitted: list[int] = field(default_factory=list)
    num_torn: int = 0
    spending: Spending = field(default_factory=Spending)
    head: Head = field(default_factory=lambda: Head(0, START))
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ends_with_newline: bool = True
    _hashes: dict[int, str] = field(default_factory=dict, repr=False)
    # None or what a session applies: a new session
    _counted: list[Release | Mapping[str, Any] | None] = field(default_factory=list, repr=False)

    @property
    def num_intents(self) -> int:
        """Intents that count, torn lines included."""
        return len(self.releases) + self.num_torn

    def spending_after(self, num_intents: int) -> Spending:
        """What the first intents come to."""
        spending, num_left = Spending(), num_intents
        for release in self._counted:
            if not isinstance(release, Release):
                spending.begin_session(release)
            elif num_left == 0:
                break
            else:
                spending.add(release)
                num_left -= 1
        return spending

    def missing(self, known: Head, witness: str) -> str | None:
        """What is wrong if a witness knows a head of this ledger; None if it fits."""
        lost = known.num_lines - self.head.num_lines
        if lost > 0:
            lines = "line is" if lost == 1 else f"{lost} lines are"
            return f"the last {lines} missing: {witness} knows {known.num_lines} lines"
        if known.num_lines and self._hashes.get(known.num_lines) != known.sha256:
            return f"line {known.num_lines} was changed: {witness} knows another one"
        return None


def read_ledger(path: str | os.PathLike[str]) -> LedgerFile:
    """Read a ledger, check its chain and its head file, and count what it holds.

    Lines that were edited or removed are reported in `problems`, not raised: what is left can still
    be looked at.

    Raises:
        BadInput: If there is no such file.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read the ledger {path}: {error.strerror}") from None
    reader = _Reader(path)
    lines = data.split(b"\n")
    reader.found.ends_with_newline = not lines[-1]
    if not lines[-1]:
        lines.pop()
    for line in lines:
        reader.take(line)
    return reader.end()


class _Reader:
    """Takes the lines of a ledger one after the other."""

    def __init__(self, path: Path) -> None:
        self.found = LedgerFile(path)
        self._pending: int | None = None
        self._last_step = -1
        self._strictest: Release | None = None
        self._num_left_out = 0
        self._unreadable: int | None = None  # the first of the lines just before that are torn

    def take(self, line: bytes) -> None:
        record = _parse(line)
        if record is None:
            self._take_torn(line)
            return
        self._check_chain(record)
        self._advance(record["line"], hash_of(line))
        try:
            match record["kind"]:
                case "open":
                    self._take_open(record)
                case "intent":
                    self._take_intent(record)
                case "commit":
                    self._take_commit(record)
                case kind:
                    self._object(f"line {record['line']} is of an unknown kind, {kind!r}")
        except (BadInput, KeyError, TypeError) as error:
            self._object(f"line {record['line']} cannot be understood ({error})")

    def end(self) -> LedgerFile:
        found = self.found
        self._forget_pending()
        found.spending = found.spending_after(found.num_intents)
        if found.spending.is_chosen:
            found.notes.append(
                "the noise could be chosen from what came out, so an odometer counts it"
            )
        if not found.sessions and self._unreadable is None:
            self._object(f"it does not begin as a ledger of format {FORMAT}")
        head_file = head_file_of(found.path)
        try:
            known = Head(**json.loads(head_file.read_text()))
            problem = found.missing(known, head_file.name)
            if problem:
                self._object(problem)
        except FileNotFoundError:
            found.notes.append(
                f"there is no {head_file.name} beside it, so removed last lines would not show"
            )
        except (OSError, ValueError, TypeError):
            found.notes.append(
                f"{head_file.name} cannot be read, so removed last lines would not show"
            )
        if self._num_left_out:
            found.problems.append(f"and {self._num_left_out} problems more")
        return found

    def _object(self, problem: str) -> None:
        if len(self.found.problems) < _MAX_PROBLEMS:
            self.found.problems.append(problem)
        else:
            self._num_left_out += 1

    def _advance(self, number: int, digest: str) -> None:
        self.found.head = Head(number, digest)
        self.found._hashes[number] = digest

    def _check_chain(self, record: Mapping[str, Any]) -> None:
        number, expected = record["line"], self.found.head.num_lines + 1
        if self._unreadable is not None and record["kind"] != "open":
            self._object(f"line {self._unreadable} was changed after it was written: no record")
        self._unreadable = None
        if number > expected:
            lost = number - expected
            lines = f"line {expected} is" if lost == 1 else f"lines {expected} to {number - 1} are"
            self._object(f"{lines} missing")
        elif number < expected:
            self._object(f"line {number} stands where line {expected} should")
        elif record["previous"] != self.found.head.sha256:
            what = f"line {number - 1}" if number > 1 else "the beginning"
            self._object(f"{what} was changed after it was written")

    def _take_torn(self, line: bytes) -> None:
        """Take a line that is no record: the mark of a crash, if the end or a new session follows.

        A crash can also cut the first line of the session that would have followed it.
        """
        found, number = self.found, self.found.head.num_lines + 1
        self._advance(number, hash_torn(found.head.sha256, line))
        if not found.sessions and not (line.startswith(_OPEN) or _OPEN.startswith(line)):
            self._object(f"line {number} is no record")
            return
        if self._unreadable is None:
            self._unreadable = number
        found.notes.append(f"line {number} was cut short by a crash")
        if found.sessions and (line.startswith(_INTENT) or _INTENT.startswith(line)):
            assert self._strictest is not None  # every session begins with a release
            found.num_torn += 1
            found.notes[-1] += "; it may have been an intent and counts as one"
            # Its step is not known: a pass of its own.
            found._counted += [None, self._strictest, None]

    def _take_open(self, record: dict[str, Any]) -> None:
        if record["format"] != FORMAT:
            raise BadInput(f"expected format {FORMAT}, found {record['format']!r}")
        self._forget_pending()
        self._last_step = -1
        self.found.sessions.append(record)
        self.found._counted.append(dict(record["mechanism"]))
        self._remember(Release.from_fields(record["next"]))

    def _take_intent(self, record: dict[str, Any]) -> None:
        fields = {k: v for k, v in record.items() if k not in ("kind", "line", "previous")}
        release = Release.from_fields(fields)
        self._forget_pending()
        self._pending = release.step
        self.found.releases.append(release)
        self.found._counted.append(release)
        self._remember(release)
        if release.step <= self._last_step:
            raise BadInput(f"step {release.step} does not come after step {self._last_step}")
        self._last_step = release.step

    def _take_commit(self, record: dict[str, Any]) -> None:
        if record["step"] != self._pending:
            raise BadInput(f"it commits step {record['step']}, which was not intended before it")
        self._pending = None
        self.found.num_commits += 1

    def _forget_pending(self) -> None:
        if self._pending is not None:
            self.found.uncommitted.append(self._pending)
            self._pending = None

    def _remember(self, release: Release) -> None:
        """Keep the release with the least noise, which stands for an intent that was cut short."""
        known = self._strictest
        z = release.effective_noise_multiplier
        if (
            known is None
            or known.sampling != release.sampling
            or z < known.effective_noise_multiplier
        ):
            self._strictest = release


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if there is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("line"), int):
        return None
    return record if {"kind", "previous"} <= record.keys() else None
