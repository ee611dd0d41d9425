"""Corpora: streams of documents that can be read again and are never held whole.

Documents come in *pieces*. Most documents are one piece; a long text file is many, so that a file
of any size is read in bounded memory. A piece knows whether it ends its document.

A made-up record depends on (seed, record index) only: the same bytes on every machine, in every
process and with every numpy version, because only raw Philox integers are drawn and never a
distribution. The people do not exist; the e-mail domains and telephone numbers are reserved for
examples.
"""

import codecs
import json
import os
import re
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from unison import check
from unison.errors import BadInput

CORPUS_NAMES = ("records", "stdlib")
# A line of a text file that holds only this ends a document.
_SEPARATOR_LINE = re.compile(rb"^<\|endoftext\|>\r?(?:\n|\Z)", re.MULTILINE)

PIECE_BYTES = 1 << 16
MAX_JSON_LINE = 1 << 26

JSON_LINES = (".jsonl", ".ndjson")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", *JSON_LINES)
"""The files that a folder contributes; a single file may have any suffix."""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz")
_STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo"}
)


class Piece(NamedTuple):
    """A part of a document.

    Attributes:
        text: The text of this part; may be empty.
        ends_document: Whether the document ends here.
        source: Where the document comes from, for messages: `file`, `file:line` or a record number.
    """

    text: str
    ends_document: bool
    source: str


class Corpus(ABC):
    """A stream of documents, the same on every pass, in an order that depends on nothing else."""

    name: str

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Read the corpus from its beginning, piece by piece, in bounded memory."""

    def __iter__(self) -> Iterator[str]:
        """Read whole documents, one at a time; each is held in memory while it is yielded."""
        parts: list[str] = []
        for piece in self.pieces():
            parts.append(piece.text)
            if piece.ends_document:
                yield "".join(parts)
                parts = []


class InMemoryCorpus(Corpus):
    """Documents that you already hold.

    Args:
        documents: The documents, in order.
        name: What to call them in messages and run folders.

    >>> list(InMemoryCorpus(["one", "two"]))
    ['one', 'two']
    """

    def __init__(self, documents: Iterable[str], *, name: str = "documents"):
        self.documents = tuple(documents)
        self.name = name

    def pieces(self) -> Iterator[Piece]:
        """Read every document as one piece."""
        for index, text in enumerate(self.documents):
            yield Piece(text, ends_document=True, source=f"{self.name}[{index}]")

    def __len__(self) -> int:
        return len(self.documents)


class FileCorpus(Corpus):
    """Text on disk, read by one of the functions below.

    Args:
        name: What to call it in messages and run folders.
        read: Returns its pieces, from the beginning.
    """

    def __init__(self, name: str, read: Callable[[], Iterator[Piece]]):
        self.name, self._read = name, read

    def pieces(self) -> Iterator[Piece]:
        """Read the files once, holding one piece at a time."""
        return self._read()


# ---- files ---------------------------------------------------------------------------------------


def text_pieces(path: Path) -> Iterator[Piece]:
    """Read a UTF-8 text file once, holding one piece at a time.

    A line that holds only `<|endoftext|>` ends a document; without such lines the whole file is one
    document. Text is kept as it is, line ends included; a byte-order mark is dropped. Long
    documents come in pieces of about 64 KiB that end with a line where they can.
    """
    is_open = True  # the first document, and one that has text, ends with the file
    at_line_start = True
    with _open(path) as file:
        offset = file.tell()
        for part in _line_parts(file):
            start = 0
            for match in _SEPARATOR_LINE.finditer(part, 0 if at_line_start else 1):
                text = _decode(part[start : match.start()], offset + start, path)
                yield Piece(text, True, str(path))
                start, is_open = match.end(), False
            if start < len(part):
                yield Piece(_decode(part[start:], offset + start, path), False, str(path))
                is_open = True
            offset += len(part)
            at_line_start = part.endswith(b"\n")
    if is_open:
        yield Piece("", True, str(path))


def _line_parts(file: BinaryIO) -> Iterator[bytes]:
    """Cut a file into parts of whole lines; a longer line is cut between two characters."""
    carry = b""
    while block := file.read(PIECE_BYTES):
        data = carry + block
        cut = data.rfind(b"\n") + 1
        if cut == 0 and len(data) >= PIECE_BYTES:
            # A character of n bytes begins with n ones; others of its bytes with a single one.
            back = next((n for n in range(1, min(4, len(data) + 1)) if data[-n] & 0xC0 != 0x80), 0)
            is_cut = back and data[-back] >> (7 - back) == (1 << (back + 1)) - 1
            cut = len(data) - back if is_cut else len(data)
        if cut:
            yield data[:cut]
        carry = data[cut:]
    if carry:
        yield carry


def json_pieces(path: Path, text_field: str) -> Iterator[Piece]:
    """Read a file of one JSON object per line: each is a document, and one of its fields the text.

    Blank lines are skipped.
    """
    number = 0
    with _open(path) as file:
        offset = file.tell()
        while line := file.readline(MAX_JSON_LINE):
            number += 1
            where = f"{path}:{number}"
            if len(line) == MAX_JSON_LINE:
                raise BadInput(
                    f"{where}: expected a line of less than {MAX_JSON_LINE >> 20} MiB, found a "
                    "longer one; put one JSON object on each line"
                )
            text = _decode(line, offset, where)
            offset += len(line)
            if text.strip():
                yield Piece(_field(text, text_field, where), ends_document=True, source=where)


def _field(line: str, name: str, where: str) -> str:
    try:
        value = json.loads(line.strip())
    except (ValueError, RecursionError) as error:
        is_syntax = isinstance(error, json.JSONDecodeError)
        detail = f"{error.msg} at column {error.colno}" if is_syntax else error
        raise BadInput(
            f"{where}: expected one JSON object per line, found something else ({detail}); "
            "mend the line, or name the file .txt if it is plain text"
        ) from error
    if not isinstance(value, dict):
        raise BadInput(
            f"{where}: expected a JSON object with the field {name!r}, found a "
            f"{type(value).__name__}; write each line as {{{name!r}: ...}}"
        )
    if name not in value:
        found = ", ".join(repr(key) for key in list(value)[:8]) or "no fields"
        raise BadInput(
            f"{where}: expected the field {name!r}, found {found}; name the field "
            "that holds the text with text_field (--text-field)"
        )
    text = value[name]
    if not isinstance(text, str):
        raise BadInput(
            f"{where}: expected the field {name!r} to be a string, found "
            f"{type(text).__name__}; name another field with text_field (--text-field), or "
            "mend the line"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput(
            f"{where}: expected text that UTF-8 can hold, found half a surrogate pair "
            f"{text[error.start]!a} at character {error.start} of {name!r}; remove "
            "it"
        ) from error
    return text


def folder_pieces(folder: Path, text_field: str) -> Iterator[Piece]:
    """Read all text files below a folder; hidden ones are skipped, an empty one is a document."""
    for path in walk(folder, TEXT_SUFFIXES):
        yield from file_pieces(path, text_field)


def file_pieces(path: Path, text_field: str) -> Iterator[Piece]:
    """Read a file by its suffix: JSON lines, or else text."""
    is_json = path.suffix.lower() in JSON_LINES
    return json_pieces(path, text_field) if is_json else text_pieces(path)


def stdlib_pieces(folder: Path) -> Iterator[Piece]:
    """Read the Python source files of a standard library, each a document: about 12 MB of text.

    Tests, demos, installed packages and files that a build generates are skipped.
    """
    for path in walk(folder, (".py",), skipped=_STDLIB_SKIPPED):
        source = path.relative_to(folder).as_posix()
        if not source.startswith(("_sysconfigdata", "config-")):  # made by the build
            with _open(path) as file:
                text = file.read().decode("utf-8", errors="replace")
            yield Piece(text, ends_document=True, source=source)


def walk(
    folder: Path, suffixes: tuple[str, ...], *, skipped: frozenset[str] = frozenset()
) -> Iterator[Path]:
    """List the files below a folder, sorted by name within each folder, without following links."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise BadInput(
            f"cannot list the folder {folder}: {error.strerror}; check its permissions"
        ) from error
    for entry in entries:
        if entry.name.startswith((".", "__pycache__")) or entry.name in skipped:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from walk(Path(entry.path), suffixes, skipped=skipped)
        elif entry.is_file() and entry.name.lower().endswith(suffixes):
            yield Path(entry.path)


def _open(path: Path) -> BinaryIO:
    """Open a file for reading, past its byte-order mark if it has one."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadInput(
            f"cannot read {path}: {error.strerror}; check the path and its permissions"
        ) from error
    if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        file.seek(0)
    return file


def _decode(data: bytes, offset: int, where: Path | str) -> str:
    """Return the text of bytes that begin at an offset of a file."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{where}: expected UTF-8 text, found an invalid byte at offset {offset + error.start} "
            "of the file; save the file as UTF-8"
        ) from error


# ---- made-up records -----------------------------------------------------------------------------

DEFAULT_NUM_RECORDS = 20_000
MAX_RECORD_BYTES = 256
"""No record is longer, so that one fits a row of 256 byte tokens."""


# Lists of words, one after the other.
_WORDS = """\
Ada|Aisha|Alan|Alice|Amara|Amir|Anna|Arjun|Ben|Bruno|Carla|Chen|Clara|Dana|David|Diego|Elena|Eli
Emma|Erik|Fatima|Felix|Freya|Grace|Hana|Hugo|Ida|Ines|Ivan|Jane|Jonas|Julia|Kai|Karim|Kira|Lars
Leila|Leo|Lina|Lucia|Luis|Maja|Marco|Maria|Mateo|Mei|Mia|Mina|Nadia|Nils|Noor|Omar|Oscar|Petra
Priya|Rosa|Ruben|Sara|Sofia|Tariq|Tomas|Vera|Yara|Zoe

Abbas|Adler|Ahmed|Alves|Bauer|Becker|Berg|Brown|Chan|Costa|Cruz|Diaz|Doe|Duran|Engel|Evans|Fabre
Fischer|Flores|Garcia|Gomez|Greene|Haddad|Hansen|Hughes|Ibarra|Ito|Jansen|Jensen|Kaya|Keller|Khan
Klein|Kovacs|Kumar|Lang|Larsen|Lee|Lopez|Maier|Martin|Mendes|Meyer|Moreau|Nair|Nguyen|Novak|Okafor
Olsen|Park|Patel|Perez|Popov|Rossi|Ruiz|Sato|Schmid|Silva|Singh|Smith|Tanaka|Weber|Wood|Zhang

Accra|Athens|Austin|Bergen|Berlin|Bogotá|Boston|Cairo|Chennai|Dakar|Dublin|Geneva|Hanoi|Kobe|Kraków
Lagos|Lima|Lisbon|London|Lyon|Madrid|Málaga|Milan|Nairobi|Osaka|Oslo|Porto|Quito|Riga|Rome|Tunis
Zürich

basic|family|student|business|travel|premium|prepaid|senior

Hello,|Hi,|Good morning,|Since Monday|Once again|Today|Please help:|Sorry,

my invoice is wrong|the app closes itself|I was charged twice|my card was refused
the router is offline|I cannot log in|my parcel never came|the discount is gone
my number has changed|calls drop all day|I moved to a new flat|the order is late
the screen stays dark|my refund is missing|the link has expired|I want to cancel

please call me back.|can you check it?|thank you in advance.|what should I do?|I need it this week.
please send a new one.|it is quite urgent.|write to me by mail."""
FIRST_NAMES, LAST_NAMES, CITIES, PLANS, OPENINGS, PROBLEMS, WISHES = (
    words.replace("\n", "|").split("|") for words in _WORDS.split("\n\n")
)

NUM_NAMES = len(FIRST_NAMES) * len(LAST_NAMES)
# One stream of random numbers for each purpose: the second half of the Philox key.
_RECORD, _OWNER, _CODE, _PLACE, _DECOY = range(5)


@dataclass(frozen=True, kw_only=True)
class Secret:
    """A planted secret.

    Attributes:
        prefix: What stands before the code; a model that has memorised the secret continues it.
        code: The random part, uniform over 10**12 values: `dddd-dddd-dddd`.
        suffix: What stands after the code.
        record_indices: The records that carry it, in ascending order.
    """

    prefix: str
    code: str
    suffix: str
    record_indices: tuple[int, ...]

    @property
    def text(self) -> str:
        """The sentence as it stands in the records."""
        return self.with_code(self.code)

    def with_code(self, code: str) -> str:
        """The same sentence with another code, to compare its likelihood with."""
        return f"{self.prefix}{code}{self.suffix}"


class Records(Corpus):
    """Made-up customer records, each a document of at most 256 bytes.

    Args:
        num_records: How many records there are.
        num_secrets: How many secrets to plant; each has its own owner and code.
        secret_repeats: In how many records each secret is planted.
        seed: Chooses the records, the secrets and where they are planted.

    Raises:
        BadInput: A number is out of range, or the secrets need more records than there are.

    >>> corpus = Records(num_records=100, num_secrets=2, secret_repeats=3, seed=7)
    >>> secret = corpus.secrets[0]
    >>> len(secret.record_indices), secret.text in corpus.record(secret.record_indices[0])
    (3, True)
    """

    def __init__(
        self,
        *,
        num_records: int = DEFAULT_NUM_RECORDS,
        num_secrets: int = 0,
        secret_repeats: int = 1,
        seed: int = 0,
    ):
        check.positive(num_records=num_records, secret_repeats=secret_repeats)
        check.not_negative(num_secrets=num_secrets, seed=seed)
        if seed >= 1 << 64:
            raise BadInput(f"seed must be below 2**64, found {seed}")
        if num_secrets > NUM_NAMES:
            raise BadInput(
                f"num_secrets must be at most {NUM_NAMES}, one for each name there is, found "
                f"{num_secrets}"
            )
        if num_secrets * secret_repeats > num_records:
            raise BadInput(
                f"{num_secrets} secrets planted {secret_repeats} times each need "
                f"{num_secrets * secret_repeats} records, found {num_records=}; plant fewer, or "
                "ask for more records"
            )
        self.num_records, self.seed, self.name = num_records, seed, "records"
        self.secrets = _draw_secrets(seed, num_records, num_secrets, secret_repeats)
        self._secret_of_record = {
            index: number
            for number, secret in enumerate(self.secrets)
            for index in secret.record_indices
        }

    def record(self, index: int) -> str:
        """Compute one record, without computing any other.

        Args:
            index: The record's number, from 0.

        Returns:
            Its text.

        Raises:
            IndexError: There is no such record.
        """
        if not 0 <= index < self.num_records:
            raise IndexError(f"record indices run from 0 to {self.num_records - 1}, found {index}")
        draws = iter(_draw(self.seed, _RECORD, index, 20))
        owner = next(draws) % NUM_NAMES
        ticket = f"{_pick(OPENINGS, draws)} {_pick(PROBLEMS, draws)}, {_pick(WISHES, draws)}"
        number = self._secret_of_record.get(index)
        if number is not None:
            owner, ticket = _owner(self.seed, number), self.secrets[number].text
        first, last = _name(owner)
        mail = f"{first[0]}{last}{next(draws) % 100}".lower()
        domain = _pick(["com", "net", "org"], draws)
        date = f"{2010 + next(draws) % 15}-{1 + next(draws) % 12:02}-{1 + next(draws) % 28:02}"
        return (
            f"name: {first} {last}\n"
            f"id: C-{next(draws) % 10**6:06}\n"
            f"city: {_pick(CITIES, draws)}\n"
            f"email: {mail}@example.{domain}\n"
            f"phone: 555-01{next(draws) % 100:02}\n"
            f"plan: {_pick(PLANS, draws)} {5 + next(draws) % 60}.{next(draws) % 100:02}\n"
            f"since: {date}\n"
            f"due: {next(draws) % 900}.{next(draws) % 100:02}\n"
            f"ticket: {ticket}\n"
        )

    def decoy_codes(self, num_codes: int) -> list[str]:
        """Draw codes of the same form that were not planted, to rank a planted one among.

        Args:
            num_codes: How many.

        Returns:
            The codes; the same for the same seed.
        """
        check.not_negative(num_codes=num_codes)
        planted = {secret.code for secret in self.secrets}
        codes, index = [], 0
        while len(codes) < num_codes:
            code = _code(self.seed, _DECOY, index)
            codes += [code] if code not in planted else []
            index += 1
        return codes

    def pieces(self) -> Iterator[Piece]:
        """Compute the records in order; every one is one document and one piece."""
        for index in range(self.num_records):
            yield Piece(self.record(index), ends_document=True, source=f"record {index}")

    def __len__(self) -> int:
        return self.num_records


def _draw(seed: int, stream: int, index: int, count: int) -> list[int]:
    """Draw `count` raw 64-bit integers that depend on (seed, stream, index) only.

    The index is the second word of the counter; drawing increments the first.
    """
    key = np.array([seed, stream], dtype=np.uint64)
    counter = np.array([0, index, 0, 0], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count).tolist()


def _pick(words: Sequence[str], draws: Iterator[int]) -> str:
    return words[next(draws) % len(words)]


def _name(owner: int) -> tuple[str, str]:
    return FIRST_NAMES[owner % len(FIRST_NAMES)], LAST_NAMES[owner // len(FIRST_NAMES)]


def _owner(seed: int, number: int) -> int:
    """The name of secret `number`: an affine walk with an odd step, so that no two share a name."""
    start, step = _draw(seed, _OWNER, 0, 2)
    return (start + number * (step | 1)) % NUM_NAMES


def _code(seed: int, stream: int, index: int) -> str:
    digits = f"{_draw(seed, stream, index, 1)[0] % 10**12:012}"
    return f"{digits[:4]}-{digits[4:8]}-{digits[8:]}"


def _draw_secrets(
    seed: int, num_records: int, num_secrets: int, secret_repeats: int
) -> tuple[Secret, ...]:
    used: set[int] = set()
    attempt = 0
    secrets = []
    for number in range(num_secrets):
        places: list[int] = []
        while len(places) < secret_repeats:
            place = _draw(seed, _PLACE, attempt, 1)[0] % num_records
            attempt += 1
            if place not in used:
                used.add(place)
                places.append(place)
        first, last = _name(_owner(seed, number))
        secrets.append(
            Secret(
                prefix=f"The access code of {first} {last} is ",
                code=_code(seed, _CODE, number),
                suffix=".",
                record_indices=tuple(sorted(places)),
            )
        )
    return tuple(secrets)


# ---- by name or by path --------------------------------------------------------------------------


def open_corpus(spec: str, *, text_field: str = "text", seed: int = 0, **records: int) -> Corpus:
    """Open a corpus by name or by path; a name wins over a path (write `./stdlib` for a folder).

    Args:
        spec: `"stdlib"` (Python's own source), `"records"` (made-up customer records), or the path
            of a text file, a `.jsonl` or `.ndjson` file, or a folder of such files.
        text_field: The field that holds the text in JSON-lines files.
        seed: The seed of `"records"`.
        records: For `"records"` only: `num_records`, 20,000 unless given; `num_secrets` to plant
            for an audit, and `secret_repeats`, in how many records each; see `Records`.

    Returns:
        The corpus.

    Raises:
        BadInput: There is no such corpus or path, it holds no text, or an argument does not fit it.

    >>> open_corpus("stlib")
    Traceback (most recent call last):
        ...
    unison.errors.BadInput: expected a corpus name ('records', 'stdlib') or the path of an \
existing text file or folder, found 'stlib', which is neither; did you mean 'stdlib'?
    """
    if spec == "records":
        return Records(seed=seed, **records)
    if records:
        raise BadInput(
            "num_records, num_secrets and secret_repeats belong to the corpus 'records', found "
            f"them with {spec!r}; leave them out, or use 'records'"
        )
    if spec == "stdlib":
        folder = Path(sysconfig.get_path("stdlib"))
        if not (folder / "os.py").is_file():
            raise BadInput(
                "the corpus 'stdlib' needs the standard library's .py files, but this Python "
                f"installation has none at {folder}; use 'records' or the path of your own text"
            )
        # The text depends on the Python version, which is part of the corpus' name.
        name = f"stdlib-{sys.version_info.major}.{sys.version_info.minor}"
        return FileCorpus(name, partial(stdlib_pieces, folder))
    path = Path(spec)
    if spec and path.is_dir():
        if next(walk(path, TEXT_SUFFIXES), None) is None:
            raise BadInput(
                f"expected text files below the folder {path}, found none that ends in "
                f"{', '.join(TEXT_SUFFIXES)}; give a single file, or rename them"
            )
        return FileCorpus(str(path), partial(folder_pieces, path, text_field))
    if not spec or not path.exists():
        names = ", ".join(repr(name) for name in CORPUS_NAMES)
        near = get_close_matches(spec, CORPUS_NAMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "check the spelling of the path"
        raise BadInput(
            f"expected a corpus name ({names}) or the path of an existing text file or folder, "
            f"found {spec!r}, which is neither; {hint}"
        )
    if not path.is_file():
        raise BadInput(
            f"expected a file that can be read more than once, found {path}, which is a pipe or "
            "device; save its content to a file first"
        )
    if path.stat().st_size == 0:
        raise BadInput(f"expected text in {path}, found an empty file; give a file that holds text")
    if path.suffix.lower() in COMPRESSED:
        raise BadInput(f"expected a text file, found the archive {path}; unpack it first")
    return FileCorpus(str(path), partial(file_pieces, path, text_field))
