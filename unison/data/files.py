"""Corpora read from disk: a text file, a JSON-lines file, a folder, the standard library."""

import codecs
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from unison.data.corpus import Corpus, Piece
from unison.errors import BadInput

SEPARATOR = b"<|endoftext|>"
"""A line of a text file that holds only this ends a document."""

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


class TextFile(Corpus):
    """A UTF-8 text file.

    A line that holds only `<|endoftext|>` ends a document; without such lines the whole file is one
    document. Text is kept as it is, line ends included; a byte-order mark is dropped. Long
    documents come in pieces of about 64 KiB that end with a line where they can.

    Args:
        path: The file.
        errors: `"strict"` refuses invalid UTF-8, `"replace"` reads it as U+FFFD.
    """

    def __init__(self, path: str | Path, *, errors: str = "strict"):
        self.path = Path(path)
        self.name = str(path)
        self.errors = errors

    def pieces(self) -> Iterator[Piece]:
        """Read the file once, holding one piece at a time."""
        has_begun = False  # the last document ends with the file, if anything of it was read
        num_documents = 0
        at_line_start = True
        with _open(self.path) as file:
            decoder = _Decoder(self.path, self.errors, offset=file.tell())
            for part in _line_parts(file):
                start = 0
                if SEPARATOR in part:
                    for match in _SEPARATOR_LINE.finditer(part, 0 if at_line_start else 1):
                        yield Piece(decoder.decode(part[start : match.start()]), True, self.name)
                        decoder.skip(match.group())
                        start, has_begun = match.end(), False
                        num_documents += 1
                if start < len(part):
                    yield Piece(decoder.decode(part[start:]), False, self.name)
                    has_begun = True
                at_line_start = part.endswith(b"\n")
        if has_begun or num_documents == 0:
            yield Piece(decoder.decode(b"", is_last=True), True, self.name)


def _line_parts(file: BinaryIO) -> Iterator[bytes]:
    """Cut a file into parts of whole lines; a line longer than a part is cut where it must be."""
    carry = b""
    while block := file.read(PIECE_BYTES):
        data = carry + block
        cut = data.rfind(b"\n") + 1
        if cut == 0 and len(data) >= PIECE_BYTES:
            cut = len(data)
        if cut:
            yield data[:cut]
        carry = data[cut:]
    if carry:
        yield carry


class _Decoder:
    """An incremental UTF-8 decoder that knows its place in the file."""

    def __init__(self, path: Path, errors: str, offset: int):
        self.path = path
        self.offset = (
            offset  # of the next byte to be decoded, bytes held back by the decoder included
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)

    def decode(self, data: bytes, *, is_last: bool = False) -> str:
        num_pending = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(data, is_last)
        except UnicodeDecodeError as error:
            raise _invalid_utf8(self.path, self.offset - num_pending + error.start) from error
        self.offset += len(data)
        return text

    def skip(self, data: bytes) -> None:
        self.offset += len(data)


class JsonLinesFile(Corpus):
    """A file with one JSON object per line, whose text is one of its fields.

    Blank lines are skipped.

    Args:
        path: The file.
        text_field: The field that holds the text.
    """

    def __init__(self, path: str | Path, *, text_field: str = "text"):
        self.path = Path(path)
        self.name = str(path)
        self.text_field = text_field

    def pieces(self) -> Iterator[Piece]:
        """Read the file line by line; every line is one document and one piece."""
        number = 0
        with _open(self.path) as file:
            offset = file.tell()
            while line := file.readline(MAX_JSON_LINE):
                number += 1
                where = f"{self.path}:{number}"
                if len(line) == MAX_JSON_LINE:
                    raise BadInput(
                        f"{where}: expected a line of less than {MAX_JSON_LINE >> 20} MiB, found a "
                        "longer one; put one JSON object on each line"
                    )
                try:
                    text = line.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise _invalid_utf8(self.path, offset + error.start, line=number) from error
                offset += len(line)
                if text.strip():
                    yield Piece(self._field(text, where), ends_document=True, source=where)

    def _field(self, line: str, where: str) -> str:
        try:
            value = json.loads(line.strip())
        except (ValueError, RecursionError) as error:
            detail = (
                f"{error.msg} at column {error.colno}"
                if isinstance(error, json.JSONDecodeError)
                else f"{error}"
            )
            raise BadInput(
                f"{where}: expected one JSON object per line, found something else ({detail}); "
                "mend the line, or name the file .txt if it is plain text"
            ) from error
        if not isinstance(value, dict):
            raise BadInput(
                f"{where}: expected a JSON object with the field {self.text_field!r}, found a "
                f"{type(value).__name__}; write each line as {{{self.text_field!r}: ...}}"
            )
        if self.text_field not in value:
            found = ", ".join(repr(key) for key in list(value)[:8]) or "no fields"
            raise BadInput(
                f"{where}: expected the field {self.text_field!r}, found {found}; name the field "
                "that holds the text with text_field (--text-field)"
            )
        text = value[self.text_field]
        if not isinstance(text, str):
            raise BadInput(
                f"{where}: expected the field {self.text_field!r} to be a string, found "
                f"{type(text).__name__}; name another field with text_field (--text-field), or "
                "mend the line"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadInput(
                f"{where}: expected text that UTF-8 can hold, found half a surrogate pair "
                f"{text[error.start]!a} at character {error.start} of {self.text_field!r}; remove "
                "it"
            ) from error
        return text


class Folder(Corpus):
    """All text files below a folder, in sorted order; hidden files and folders are skipped.

    Args:
        path: The folder.
        text_field: The field that holds the text in its JSON-lines files.
    """

    def __init__(self, path: str | Path, *, text_field: str = "text"):
        self.path = Path(path)
        self.name = str(path)
        self.text_field = text_field

    def pieces(self) -> Iterator[Piece]:
        """Read file after file; an empty file is an empty document."""
        for path in walk(self.path, TEXT_SUFFIXES):
            yield from open_file(path, text_field=self.text_field).pieces()


class StandardLibrary(Corpus):
    """The Python source files of the running installation's standard library: about 12 MB of text.

    One file is one document. Tests, demos, installed packages and files that a build generates are
    skipped. The text depends on the Python version, which is part of the corpus' name.
    """

    def __init__(self) -> None:
        self.path = Path(sysconfig.get_path("stdlib"))
        self.name = f"stdlib-{sys.version_info.major}.{sys.version_info.minor}"
        if not (self.path / "os.py").is_file():
            raise BadInput(
                "the corpus 'stdlib' needs the standard library's .py files, but this Python "
                f"installation has none at {self.path}; use 'records' or the path of your own text"
            )

    def pieces(self) -> Iterator[Piece]:
        """Read the files in sorted order."""
        for path in walk(self.path, (".py",), skipped=_STDLIB_SKIPPED):
            source = path.relative_to(self.path).as_posix()
            if not source.startswith(("_sysconfigdata", "config-")):  # made by the build
                with _open(path) as file:
                    text = file.read().decode("utf-8", errors="replace")
                yield Piece(text, ends_document=True, source=source)


def open_file(path: Path, *, text_field: str = "text") -> Corpus:
    """Open a file by its suffix: JSON lines, or else text."""
    if path.suffix.lower() in COMPRESSED:
        raise BadInput(f"expected a text file, found the archive {path}; unpack it first")
    if path.suffix.lower() in JSON_LINES:
        return JsonLinesFile(path, text_field=text_field)
    return TextFile(path)


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


def _invalid_utf8(path: Path, offset: int, line: int | None = None) -> BadInput:
    where = f"{path}:{line}" if line else str(path)
    return BadInput(
        f"{where}: expected UTF-8 text, found an invalid byte at offset {offset} of the file; save "
        "the file as UTF-8"
    )
