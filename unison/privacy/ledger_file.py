"""A ledger on disk: what its lines hold, and how one is read that may come from anybody.

Each line is one JSON object and holds its number and the SHA-256 of the line before, so an edited
or a removed line shows. Removed *last* lines do not, so a small file beside the ledger, the head,
knows how many there are. docs/privacy.md describes both files. What is no ledger is told apart from
a ledger that was edited, and nothing in a file is believed before its type and range are known.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from unison.errors import BadInput
from unison.privacy.accounting import (
    ADJACENCY,
    Spending,
)
from unison.privacy.mechanism import Release
from unison.privacy.sampling import KINDS
from unison.rng.streams import FROM_SEED, FROM_SYSTEM
from unison.schema import build, cut, is_a, open_regular, parse, short

LEDGER_FILE = "ledger.jsonl"  # in the folder of a run
FORMAT = "unison-ledger/2"
_FORMAT_1 = "unison-ledger/1"  # its sessions do not say where their key comes from
START = "0" * 64  # what stands for the hash of the line before the first
_INTENT = b'{"kind": "intent", '  # how every intent begins; a torn line may be cut in it
_OPEN = b'{"kind": "open", '
_COMMIT = b'{"kind": "commit", '
_MAX_PROBLEMS = 20  # a file that is no ledger has as many as lines
_MAX_LINE = 1 << 20  # bytes; ours have a few thousand
_LARGEST = 2.0**53  # of any number in it: beyond that, floats do not count


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a session says of itself, beside its mechanism; all of it is public.

    Attributes:
        key_origin: Where noise and sampling come from: `"operating system"`; `"seed"`, which
            whoever knows it can draw again; or `"unknown"`.
        key_commitment: Salted hash of a key that its owner keeps, sealed; None if nobody does.
        adjacency: Between which data sets ε holds.
        unit: What is protected.
        rows_per_sample: Rows of a batch that `collate_fn` makes of one such unit.
        sampling_source: Who draws the records: `"unison"`, or `"user"`, whom nobody has checked.
        num_records: Size of the data set, if known.
        commitment: Hash of what `committed_to` says, under a salt that lies with the data. Equal
            ones are of the same data; None is no commitment.
        committed_to: What the commitment covers.
        device: Where the parameters lie.
        fingerprint: What the bits depend on besides the settings; see `unison.fingerprint`.
    """

    key_origin: str = "unknown"
    key_commitment: str | None = None
    adjacency: str = ADJACENCY
    unit: str = "one row of the data set"
    rows_per_sample: int = 1
    sampling_source: str = "user"
    num_records: int | None = None
    commitment: str | None = None
    committed_to: str | None = None
    device: str = "unknown"
    fingerprint: dict[str, Any] = field(default_factory=dict)

    @property
    def is_seeded(self) -> bool:
        """Whether the session's key comes from a seed."""
        return self.key_origin == FROM_SEED

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Session":
        """The session that a line begins.

        Raises:
            BadInput: If it describes none.
        """
        if record.get("format") == _FORMAT_1:
            return cls()
        if record.get("format") != FORMAT:
            found = short(record.get("format"))
            raise BadInput(f"expected format {FORMAT} or {_FORMAT_1}, found {found}")
        names = {each.name for each in fields(cls)}
        _check_types(cls, {name: record[name] for name in names & record.keys()})
        # Sessions of earlier versions have kept no key, and say nothing of it.
        if missing := sorted(names - record.keys() - {"key_commitment"}):
            raise BadInput(f"it does not say its {missing[0]}")
        session = cls(**{name: record[name] for name in names & record.keys()})
        choices = {
            "key_origin": (FROM_SYSTEM, FROM_SEED, "unknown"),
            "adjacency": (ADJACENCY,),
            "sampling_source": ("unison", "user"),
        }
        for name, known in choices.items():
            if getattr(session, name) not in known:
                raise BadInput(f"its {name} is {short(getattr(session, name))}")
        for name in ("commitment", "key_commitment"):
            value = getattr(session, name)
            if value is not None and not _is_hash(value):
                raise BadInput(f"its {name} is no hash: {short(value)}")
        for name in ("unit", "committed_to", "device"):  # they are printed
            value = getattr(session, name)
            if value is not None and not (value.isprintable() and len(value) <= 200):
                raise BadInput(f"its {name} cannot be shown: {short(value)}")
        if session.rows_per_sample < 1 or (session.num_records or 0) < 0:
            raise BadInput("its numbers of rows are negative")
        return session


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


# ---- reading -------------------------------------------------------------------------------------


@dataclass
class LedgerFile:
    """What a ledger on disk holds, and whether it is whole.

    Attributes:
        path: The file.
        sessions: What each session says of itself.
        releases: What was intended, in order.
        num_commits: How many of them were committed.
        uncommitted: Steps of the intents without a commit; they count.
        num_torn: Lines that a crash cut short and that may have been intents; they count, each as
            the release with the least noise that the ledger knows of.
        spending: What all of it comes to.
        head: How far the file goes.
        problems: Why it cannot be trusted: lines edited or removed. Empty if it can.
        malformed: The first problem that no edit of a line explains: this is no ledger. None if
            it is one.
        notes: What a reader should know besides.
        ends_with_newline: False after a crash in the middle of a write.
    """

    path: Path
    sessions: list[Session] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    num_commits: int = 0
    uncommitted: list[int] = field(default_factory=list)
    num_torn: int = 0
    spending: Spending = field(default_factory=Spending)
    head: Head = field(default_factory=lambda: Head(0, START))
    problems: list[str] = field(default_factory=list)
    malformed: str | None = None
    notes: list[str] = field(default_factory=list)
    ends_with_newline: bool = True
    _hashes: dict[int, str] = field(default_factory=dict, repr=False)
    # In order; a session, with what it applies, begins a new pass over shuffled data, as None does.
    _counted: list[Release | tuple[Session, Mapping[str, Any]] | None] = field(
        default_factory=list, repr=False
    )
    _pending: int | None = field(default=None, repr=False)
    _last_step: int = field(default=-1, repr=False)
    _strictest: Release | None = field(default=None, repr=False)
    _num_left_out: int = field(default=0, repr=False)
    # The first of the lines just before that are torn.
    _unreadable: int | None = field(default=None, repr=False)

    @property
    def num_intents(self) -> int:
        """Intents that count, torn lines included."""
        return len(self.releases) + self.num_torn

    def spending_after(self, num_intents: int) -> Spending:
        """What the first intents come to."""
        spending, num_left = Spending(), num_intents
        for each in self._counted:
            if each is None:
                spending.begin_session()
            elif not isinstance(each, Release):
                session, plan = each
                spending.begin_session(plan, is_seeded=session.is_seeded)
            elif num_left == 0:
                break
            else:
                spending.add(each)
                num_left -= 1
        return spending

    @property
    def whole_head(self) -> Head:
        """How far it goes without a last line that has no end, or none yet."""
        number = self.head.num_lines - (not self.ends_with_newline)
        return Head(number, self._hashes.get(number, START))

    def missing(self, known: Head, witness: str) -> str | None:
        """What is wrong if a witness knows a head of this ledger; None if it fits."""
        lost = known.num_lines - self.head.num_lines
        if lost > 0:
            lines = "line is" if lost == 1 else f"{lost} lines are"
            return f"the last {lines} missing: {witness} knows {known.num_lines} lines"
        if known.num_lines and self._hashes.get(known.num_lines) != known.sha256:
            return f"line {known.num_lines} was changed: {witness} knows another one"
        return None

    # Reading: the lines one after the other.

    def _take(self, ended: bytes) -> None:
        """Take a line with its end, which the last one may lack."""
        line = ended.removesuffix(b"\n")
        self.ends_with_newline = line is not ended
        try:
            record = _parse(line)
        except BadInput as error:
            self._take_rubbish(line, str(error))
            return
        if record is None:
            self._take_torn(line)
            return
        self._check_chain(record)
        self._advance(record["line"], hash_of(line))
        kind = record.get("kind")
        if not self.sessions and kind != "open":
            what = f"line {record['line']} belongs to no session"
            self._object(what, is_malformed=record["line"] == 1)  # or lines before it are missing
        try:
            match kind:
                case "open":
                    self._take_open(record)
                case "intent":
                    self._take_intent(record)
                case "commit":
                    self._take_commit(record)
                case _:
                    raise BadInput(f"its kind is {short(kind)}")
        except BadInput as error:
            self._object(f"line {record['line']} cannot be understood: {error}", is_malformed=True)

    def _end(self) -> None:
        """Count what the lines come to, and look whether all are there."""
        self._forget_pending()
        self.spending = self.spending_after(self.num_intents)
        if self.spending.is_chosen:
            self.notes.append(
                "the noise could be chosen from what came out, so an odometer counts it"
            )
        head_file = head_file_of(self.path)
        try:
            problem = self.missing(_read_head(head_file), head_file.name)
            if problem:
                self._object(problem)
        except FileNotFoundError:
            self.notes.append(
                f"there is no {head_file.name} beside it, so removed last lines would not show"
            )
        except (OSError, BadInput):
            self.notes.append(
                f"{head_file.name} cannot be read, so removed last lines would not show"
            )
        if not self.sessions and self._unreadable is None:
            # Unless lines are missing, in which case it may have been one.
            is_malformed = not self.problems
            self._object(f"it does not begin as a ledger of format {FORMAT}", is_malformed)
        num_unknown = sum(each.key_origin == "unknown" for each in self.sessions)
        if num_unknown:
            sessions = "a session does" if num_unknown == 1 else f"{num_unknown} sessions do"
            self.notes.append(
                f"{sessions} not say where the key came from: if that was a seed, ε is infinite"
            )
        if len({each.commitment for each in self.sessions} - {None}) > 1:
            self.notes.append("its sessions commit to different data")
        if self._num_left_out:
            self.problems.append(f"and {self._num_left_out} problems more")

    def _object(self, problem: str, is_malformed: bool = False) -> None:
        if is_malformed and self.malformed is None:
            self.malformed = problem
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)
        else:
            self._num_left_out += 1

    def _advance(self, number: int, digest: str) -> None:
        self.head = Head(number, digest)
        self._hashes[number] = digest

    def _check_chain(self, record: Mapping[str, Any]) -> None:
        number, expected = record["line"], self.head.num_lines + 1
        if self._unreadable is not None and record.get("kind") != "open":
            self._object(f"line {self._unreadable} was changed after it was written: no record")
        self._unreadable = None
        if number > expected:
            lost = number - expected
            lines = f"line {expected} is" if lost == 1 else f"lines {expected} to {number - 1} are"
            self._object(f"{lines} missing")
        elif number < expected:
            self._object(f"line {number} stands where line {expected} should")
        elif record["previous"] != self.head.sha256:
            what = f"line {number - 1}" if number > 1 else "the beginning"
            self._object(f"{what} was changed after it was written")

    def _take_torn(self, line: bytes) -> None:
        """Take a line that is no record: the mark of a crash, if the end or a new session follows.

        A crash can also cut the first line of the session that would have followed it.
        """
        number = self.head.num_lines + 1
        if not self.sessions and not _begins(line, _OPEN):
            self._take_rubbish(line, "it is no record")
            return
        self._advance(number, hash_torn(self.head.sha256, line))
        if self._unreadable is None:
            self._unreadable = number
        self.notes.append(f"line {number} was cut short by a crash")
        if self.sessions and _begins(line, _INTENT):
            assert self._strictest is not None  # every session begins with a release
            self.num_torn += 1
            self.notes[-1] += "; it may have been an intent and counts as one"
            # Its step is not known: a pass of its own.
            self._counted += [None, self._strictest, None]

    def _take_rubbish(self, line: bytes, why: str) -> None:
        """Take a line that neither we nor a crash can have written."""
        number = self.head.num_lines + 1
        self._advance(number, hash_torn(self.head.sha256, line))
        if self._unreadable is None and self.sessions:
            self._unreadable = number
        self._object(f"line {number} cannot be understood: {why}", is_malformed=True)

    def _take_open(self, record: dict[str, Any]) -> None:
        session, announced = Session.from_record(record), _release_of(record.get("next"))
        self._forget_pending()
        self._last_step = -1
        self.sessions.append(session)
        self._counted.append((session, _plan_of(record.get("mechanism"))))
        self._remember(announced)

    def _take_intent(self, record: dict[str, Any]) -> None:
        release = _release_of(
            {k: v for k, v in record.items() if k not in ("kind", "line", "previous")}
        )
        self._forget_pending()
        self._pending = release.step
        self.releases.append(release)
        self._counted.append(release)
        self._remember(release)
        if release.step <= self._last_step:
            self._object(
                f"line {record['line']} has step {release.step}, which does not come after step "
                f"{self._last_step}"
            )
        self._last_step = release.step

    def _take_commit(self, record: dict[str, Any]) -> None:
        step = record.get("step")
        if record.keys() - {"kind", "line", "previous"} != {"step"} or not _is_a(step, int):
            raise BadInput(f"a commit has one step, found {short(record)}")
        if step != self._pending:
            self._object(
                f"line {record['line']} commits step {step}, which was not intended before it"
            )
            return
        self._pending = None
        self.num_commits += 1

    def _forget_pending(self) -> None:
        if self._pending is not None:
            self.uncommitted.append(self._pending)
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


def read_ledger(path: str | os.PathLike[str]) -> LedgerFile:
    """Read a ledger, check its chain and its head file, and count what it holds.

    Lines that were edited or removed are reported in `problems`, not raised: what is left can still
    be looked at. What is no ledger at all is told in `malformed` as well.

    Raises:
        BadInput: If there is no such file.
    """
    path = Path(path)
    found = LedgerFile(path)
    try:
        with open_regular(path) as file:
            # Each line with its end, cut where it is longer than any that we write.
            while line := file.readline(_MAX_LINE + 1):
                found._take(line)
                if len(line) > _MAX_LINE:
                    break
    except OSError as error:
        raise BadInput(f"cannot read the ledger {path}: {error.strerror}") from None
    found._end()
    return found


# ---- what a line may hold ------------------------------------------------------------------------


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if a crash has cut the line short.

    Raises:
        BadInput: If it is neither.
    """
    if len(line) > _MAX_LINE:
        raise BadInput(f"it is longer than {_MAX_LINE:,} bytes")
    if _is_cut_short(line):
        return None
    if not line.isascii():  # as we write it
        raise BadInput("it is no ASCII text")
    record = parse(line, "it", constants=False)
    if not isinstance(record, dict):
        raise BadInput(f"expected a JSON object, found {short(record)}")
    number, previous = record.get("line"), record.get("previous")
    if not (isinstance(number, int) and _is_a(number, int) and number >= 1):
        raise BadInput(f"expected the number of a line, found {short(number)}")
    if not (isinstance(previous, str) and _is_hash(previous)):
        raise BadInput(f"expected the hash of the line before, found {short(previous)}")
    return record


def _begins(line: bytes, kind: bytes) -> bool:
    """Whether a line that was cut short may have been of a kind."""
    line = line.rstrip(b"\0")  # what some file systems leave where a write had no time to end
    return line.startswith(kind) or kind.startswith(line)


def _is_cut_short(line: bytes) -> bool:
    """Whether a line may be the beginning of one of ours: an object that does not end."""
    line = line.rstrip(b"\0")
    if not any(_begins(line, kind) for kind in (_OPEN, _INTENT, _COMMIT)):
        return False
    outside = re.sub(rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', b"", line, flags=re.DOTALL)  # of strings
    return not line or len(re.findall(rb"[{[]", outside)) > len(re.findall(rb"[}\]]", outside))


def _read_head(path: Path) -> Head:
    """The head in a file.

    Raises:
        OSError: If it cannot be read.
        BadInput: If it holds none.
    """
    with open_regular(path) as file:
        return build(Head, parse(file.read(4096), path), path)


def _release_of(found: Any) -> Release:
    """The release that fields describe.

    Raises:
        BadInput: If a name is missing or unknown, or a value has another type or is out of range.
    """
    if not isinstance(found, dict):
        raise BadInput(f"expected a release, found {short(found)}")
    sampling = found.get("sampling")
    kind = sampling.get("kind") if isinstance(sampling, dict) else None
    if not (isinstance(sampling, dict) and isinstance(kind, str) and kind in KINDS):
        raise BadInput(f"expected a sampling of kind {', '.join(KINDS)}, found {short(sampling)}")
    _check_types(KINDS[kind], {k: v for k, v in sampling.items() if k != "kind"})
    _check_types(Release, {k: v for k, v in found.items() if k != "sampling"})
    try:
        return Release.from_fields(found)
    except BadInput as error:
        raise BadInput(cut(str(error))) from None


def _plan_of(found: Any) -> Mapping[str, Any]:
    """What a session was going to apply, of which σ, sampling and a number of elements are read.

    Raises:
        BadInput: If it is none.
    """
    if not isinstance(found, dict):
        raise BadInput(f"expected the settings of a mechanism, found {short(found)}")
    elements = found.get("rounded_elements", 0)
    if not _is_a(elements, int) or not 0 <= elements <= 2**53:
        raise BadInput(f"its rounded_elements are {short(elements)}")
    return found


def _check_types(cls: type, values: Mapping[str, Any]) -> None:
    """Require values read from JSON to be of the types that a dataclass declares.

    Raises:
        BadInput: Naming the first that is not, or that the class does not have.
    """
    hints = get_type_hints(cls)
    for name, value in values.items():
        if name not in hints:
            raise BadInput(f"there is no {short(name)} in it")
        hint = hints[name]
        kinds = get_args(hint) if isinstance(hint, UnionType) else (get_origin(hint) or hint,)
        if not any(_is_a(value, kind) for kind in kinds):
            raise BadInput(f"{name} is {short(value)}")


def _is_a(value: Any, kind: Any) -> bool:
    return is_a(value, kind, largest=_LARGEST)


def _is_hash(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None
