"""The files of rows while they are written: one class that knows both layouts and both splits."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from unison.data.corpus import Piece
from unison.data.rows import LENGTH_DTYPE, SIDECAR, SPLITS
from unison.data.tokenizer import Tokenizer
from unison.errors import BadInput

_COPY_BYTES = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type on disk that holds every id.

    >>> token_dtype(65_536).str, token_dtype(65_537).str
    ('<u2', '<u4')
    """
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class RowWriter:
    """Takes tokenised pieces in order and leaves the files of two splits in a folder.

    Use it in this order: `add` inside `writing`, then `balance`, then `finish` for each split.

    Args:
        folder: Where the files go.
        tokenizer: Gives the end and padding tokens, and the width of a token on disk.
        row_length: The inputs of a row; a row has one token more.
        layout: `"packed"` or `"documents"`.
        truncates: Whether a document that does not fit its row is cut (layout `"documents"`).
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, *, row_length: int, layout: str, truncates: bool
    ):
        self.folder = folder
        self.tokenizer = tokenizer
        self.row_length = row_length
        self.is_packed = layout == "packed"
        self.truncates = truncates
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.num_documents = 0
        self.num_skipped = 0
        self.num_truncated = 0
        self._files: dict[str, BinaryIO] = {}
        self._num_seen = 0  # tokens of the document under way
        self._kept: list[np.ndarray] = []  # those of them that fit its row

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the files open."""
        kinds = [".bin"] if self.is_packed else [".bin", ".lengths.bin"]
        try:
            for name in (f"{split}{kind}" for split in SPLITS for kind in kinds):
                self._files[name] = open_private(self.folder / name)
            yield
            with disk_errors(self.folder):
                for file in self._files.values():
                    file.flush()
        finally:
            for file in self._files.values():
                file.close()

    def add(self, split: str, index: int, piece: Piece, tokens: np.ndarray) -> None:
        """Add the next piece of document `index`; all its pieces name the same split."""
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.tokenizer.vocab_size:
            raise BadInput(
                f"expected token ids below vocab_size={self.tokenizer.vocab_size}, found "
                f"{tokens.min()} to {tokens.max()} in document {index} ({piece.source}); the "
                f"tokenizer {self.tokenizer.name} contradicts itself"
            )
        self._num_seen += tokens.size
        if self.is_packed:
            self._write(f"{split}.bin", tokens)
        else:
            self._keep(index, piece, tokens)
        if piece.ends_document:
            if self._num_seen == 0:
                self.num_skipped += 1
            elif self.is_packed:
                self._write(f"{split}.bin", np.array([self.tokenizer.end_id]))
            else:
                self._write_row(split)
            self.num_documents += 1
            self._num_seen, self._kept = 0, []

    def balance(self, eval_fraction: float, corpus_name: str) -> str:
        """Give both splits something, and say how: by `"documents"`, or by cutting the `"tail"`.

        Where every document fell on one side, all of them are in one file in their own order; its
        last tokens (or rows, in the layout "documents") then become the eval split.
        """
        if self._num_seen:
            raise BadInput(
                f"the corpus {corpus_name} stopped in the middle of document {self.num_documents}; "
                "its last piece must have ends_document=True"
            )
        found = {split: self._num_units(split) for split in SPLITS}
        total = sum(found.values())
        if total == 0:
            raise BadInput(
                f"expected text in {corpus_name}, found {self.num_documents} documents that are "
                "all empty; give a corpus that holds text"
            )
        if all(found.values()):
            return "documents"
        if not found["train"]:
            for path in list(self.folder.glob("eval.*")):
                path.replace(path.with_name(path.name.replace("eval", "train", 1)))
        smallest = self.row_length + 1 if self.is_packed else 1
        if total < 2 * smallest:
            what = f"tokens, found {total} tokens" if self.is_packed else "documents, found one"
            raise BadInput(
                f"a row for train and one for eval need at least {2 * smallest} {what} in "
                f"{corpus_name}; give more text, or shorter rows"
            )
        num_tail = min(max(smallest, int(eval_fraction * total)), total - smallest)
        self._move_tail(".bin", num_tail * self._unit_bytes())
        if not self.is_packed:
            self._move_tail(".lengths.bin", num_tail * LENGTH_DTYPE.itemsize)
        return "tail"

    def finish(self, split: str) -> dict[str, int]:
        """Cut the last incomplete row off a split, and count what is left."""
        num_units = self._num_units(split)
        if not self.is_packed:
            lengths = np.memmap(self.folder / f"{split}.lengths.bin", dtype=LENGTH_DTYPE, mode="r")
            num_tokens = int(lengths.sum(dtype=np.int64))
            return _counts(num_units, num_tokens, num_tokens - num_units, 0)
        num_rows = max(0, num_units - 1) // self.row_length
        if num_rows == 0:
            raise BadInput(
                f"expected at least one row in the {split} split, found {num_units} tokens where a "
                f"row needs {self.row_length + 1}; give more text, shorter rows, another "
                "eval_fraction (--eval-fraction) or another seed"
            )
        num_tokens = num_rows * self.row_length + 1
        os.truncate(self.folder / f"{split}.bin", num_tokens * self.dtype.itemsize)
        return _counts(num_rows, num_tokens, num_tokens - 1, num_units - num_tokens)

    def describe(self) -> dict[str, Any]:
        """Describe what the files hold, both splits together."""
        return {
            "tokenizer": {
                "name": self.tokenizer.name,
                "fingerprint": self.tokenizer.fingerprint,
            },
            "vocab_size": self.tokenizer.vocab_size,
            "end_id": self.tokenizer.end_id,
            "pad_id": self.tokenizer.pad_id,
            "layout": "packed" if self.is_packed else "documents",
            "row_length": self.row_length,
            "dtype": self.dtype.str,
            "num_documents": self.num_documents,
            "num_skipped_documents": self.num_skipped,
            "num_truncated_documents": self.num_truncated,
        }

    def _keep(self, index: int, piece: Piece, tokens: np.ndarray) -> None:
        """Keep what fits a row; a document of `row_length` tokens just fits with its end token."""
        is_longer = self._num_seen > self.row_length
        if is_longer and not self.truncates:
            length = f"{self._num_seen}" if piece.ends_document else f"more than {self.row_length}"
            raise BadInput(
                f"document {index} (counted from 0; {piece.source}) has {length} tokens and a row "
                f"holds {self.row_length}; cut such documents with long_documents='truncate' "
                "(--long-documents truncate), use longer rows, or the packed layout"
            )
        room = self.row_length + 1 - sum(len(part) for part in self._kept)
        if room > 0:
            self._kept.append(tokens[:room].astype(self.dtype))
        self.num_truncated += is_longer and piece.ends_document

    def _write_row(self, split: str) -> None:
        row = np.full(self.row_length + 1, self.tokenizer.pad_id, dtype=self.dtype)
        kept = np.concatenate(self._kept)
        row[: len(kept)] = kept
        length = len(kept)
        if length <= self.row_length:  # a document that was cut has no end
            row[length] = self.tokenizer.end_id
            length += 1
        self._write(f"{split}.bin", row)
        self._write(f"{split}.lengths.bin", np.array([length]), LENGTH_DTYPE)

    def _write(self, name: str, values: np.ndarray, dtype: np.dtype | None = None) -> None:
        with disk_errors(self.folder):
            self._files[name].write(values.astype(dtype or self.dtype, copy=False).tobytes())

    def _unit_bytes(self) -> int:
        """The bytes of what a split is counted in: tokens when packed, rows otherwise."""
        return self.dtype.itemsize * (1 if self.is_packed else self.row_length + 1)

    def _num_units(self, split: str) -> int:
        path = self.folder / f"{split}.bin"
        return path.stat().st_size // self._unit_bytes() if path.exists() else 0

    def _move_tail(self, kind: str, num_bytes: int) -> None:
        source = self.folder / f"train{kind}"
        keep = source.stat().st_size - num_bytes
        target = self.folder / f"eval{kind}"
        target.unlink(missing_ok=True)
        with disk_errors(target), source.open("rb") as reader, open_private(target) as writer:
            reader.seek(keep)
            while block := reader.read(_COPY_BYTES):
                writer.write(block)
        os.truncate(source, keep)


def open_private(path: Path) -> BinaryIO:
    """Make a new file that only its owner can read or write."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    return os.fdopen(descriptor, "wb", buffering=_COPY_BYTES)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk or a folder without permission into a sentence."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"cannot write rows to {path}: {error.strerror}; choose a directory that you may write "
            "to and that has room"
        ) from error


@contextmanager
def partial_folder(directory: Path) -> Iterator[Path]:
    """Make a private folder inside `directory` that is gone afterwards, whatever happens."""
    with disk_errors(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = tempfile.TemporaryDirectory(prefix=".partial-", dir=directory)
    with partial as name:
        yield Path(name)


def publish(partial: Path, directory: Path, description: dict[str, Any]) -> None:
    """Move finished files to their place; the sidecar goes first and comes last.

    A reader so finds either no sidecar or one that fits the files. Processes that mapped the files
    which are replaced keep reading the old ones; those that did not yet notice by the build number.
    """
    with open_private(partial / SIDECAR) as file:
        file.write(json.dumps(description, indent=2).encode() + b"\n")
    (directory / SIDECAR).unlink(missing_ok=True)
    for split in SPLITS:
        (directory / f"{split}.lengths.bin").unlink(missing_ok=True)
    for path in sorted(partial.iterdir(), key=lambda path: path.name == SIDECAR):
        path.replace(directory / path.name)


def _counts(num_rows: int, num_tokens: int, num_targets: int, num_dropped: int) -> dict[str, int]:
    return {
        "num_rows": num_rows,
        "num_tokens": num_tokens,
        "num_targets": num_targets,
        "num_dropped_tokens": num_dropped,
    }
