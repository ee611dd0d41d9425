"""Rows of fixed length, written in bounded memory and memory-mapped by any process.

A folder of rows holds, written by `build_rows`:

    rows.json                 what the files hold: layout, lengths, types, where they come from
    train.bin, eval.bin       tokens, little-endian uint16 (or uint32 for a vocabulary above 65,536)
    train.lengths.bin, ...    layout "documents" only: how many tokens of each row are not padding

A row is `row_length + 1` tokens, from which inputs and targets are both cut. In the layout "packed"
consecutive rows share one token (the last target of a row is the first input of the next), so every
token of the stream but the first is a target exactly once and no token is stored twice.
"""

import copy
import hashlib
import itertools
import json
import os
import secrets
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from unison import check
from unison.config import LAYOUTS, LONG_DOCUMENTS
from unison.data.corpora import Corpus, Piece
from unison.data.tokenizer import Tokenizer
from unison.errors import BadInput

IGNORE_INDEX = -100
"""The label of a position that has no target."""

SPLITS = ("train", "eval")
SIDECAR = "rows.json"
LENGTH_DTYPE = np.dtype("<u4")
FORMAT = 1
_CHUNK_TOKENS = 1 << 17
_BATCH_CHARACTERS = 1 << 17
_BATCH_PIECES = 1024
_COPY_BYTES = 1 << 20

Indices = Sequence[int] | np.ndarray | Tensor


class RowDataset(Dataset[dict[str, Tensor]]):
    """The rows of one split, as a map-style dataset.

    Item i is `{"input_ids": int64 [row_length], "labels": int64 [row_length]}`. Labels are already
    shifted: `labels[t]` is the token after `input_ids[t]`, or `IGNORE_INDEX` where there is none.
    A pickled dataset is its path and description only; every process maps the file itself.

    Open one with `RowDataset.open`.

    Attributes:
        directory: The folder of the rows.
        split: `"train"` or `"eval"`.
        num_rows: How many rows there are.
        num_tokens: How many tokens they hold, padding not counted and shared tokens counted once.
        row_length: How many inputs, and as many targets, a row has.
        vocab_size: One more than the largest token id.
        layout: `"packed"` or `"documents"`.
    """

    def __init__(self, directory: Path, split: str, description: dict[str, Any]):
        self.directory, self.split, self._description = directory, split, description
        self.num_rows: int = description["splits"][split]["num_rows"]
        self.num_tokens: int = description["splits"][split]["num_tokens"]
        self.row_length: int = description["row_length"]
        self.vocab_size: int = description["vocab_size"]
        self.layout: str = description["layout"]
        self._maps: tuple[np.ndarray, np.ndarray | None] | None = None
        self._emptied = np.zeros(0, dtype=np.int64)
        self._is_numbered = False

    def emptied(self, indices: Indices) -> "RowDataset":
        """The same rows, of which some hold nothing: padding, and no targets.

        Such a row has no gradient. It keeps its place, so that the others keep theirs.

        Raises:
            IndexError: A row number is negative or too large.
        """
        other = copy.copy(self)
        other._emptied = self._checked(indices)
        return other

    def numbered(self) -> "RowDataset":
        """The same rows, whose items have their numbers in the data set too, `sample_ids`."""
        other = copy.copy(self)
        other._is_numbered = True
        return other

    @classmethod
    def open(cls, directory: str | Path, split: str) -> "RowDataset":
        """Open a split of a folder that `build_rows` wrote.

        Args:
            directory: The folder.
            split: `"train"` or `"eval"`.

        Returns:
            The dataset.

        Raises:
            BadInput: There are no rows there, or the files do not belong together.
        """
        check.one_of(SPLITS, split=split)
        directory = Path(directory).absolute()
        dataset = cls(directory, split, _read_sidecar(directory))
        for path, num_bytes in dataset._expected_sizes().items():
            found = path.stat().st_size if path.is_file() else None
            if found != num_bytes:
                what = "no such file" if found is None else f"{found} bytes"
                raise BadInput(
                    f"expected {path} to hold {num_bytes} bytes, found {what}; write the rows "
                    "again with build_rows"
                )
        return dataset

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Indices) -> list[dict[str, Tensor]]:
        """Read several items at once; `DataLoader` calls this."""
        columns = self.rows(indices)
        if self._is_numbered:
            columns["sample_ids"] = torch.as_tensor(indices)
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def rows(self, indices: Indices) -> dict[str, Tensor]:
        """Read rows as one batch.

        Args:
            indices: Row numbers, in any order, with repeats if you like, or none.

        Returns:
            `{"input_ids": int64 [n, row_length], "labels": int64 [n, row_length]}`.

        Raises:
            IndexError: A row number is negative or too large.
        """
        chosen = self._checked(indices)
        block = self._mapped()[0][chosen]  # [n, row_length + 1]
        labels = block[:, 1:].astype(np.int64)
        labels[np.arange(self.row_length) >= self.num_targets(chosen)[:, None]] = IGNORE_INDEX
        inputs = block[:, :-1].astype(np.int64)
        inputs[np.isin(chosen, self._emptied)] = self._description["pad_id"]
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}

    def num_targets(self, indices: Indices) -> np.ndarray:
        """Count the targets of rows.

        Args:
            indices: Row numbers.

        Returns:
            For each, how many of its labels are not `IGNORE_INDEX`: int64 [n].

        Raises:
            IndexError: A row number is negative or too large.
        """
        chosen = self._checked(indices)
        _, lengths = self._mapped()
        found = np.full(len(chosen), self.row_length, dtype=np.int64)
        if lengths is not None:
            found = lengths[chosen].astype(np.int64) - 1
        found[np.isin(chosen, self._emptied)] = 0
        return found

    def digest(self) -> str:
        """Return the SHA-256 of all rows, read once from front to back.

        Whoever has it can tell whether a guess at all of the rows is right: publish it under a
        salt alone.
        """
        found = hashlib.sha256(f"{self.layout} {self.num_rows} {self.row_length}\n".encode())
        for path in self._expected_sizes():
            with path.open("rb") as file:
                while block := file.read(_COPY_BYTES):
                    found.update(block)
        return found.hexdigest()

    def summary(self) -> dict[str, Any]:
        """Describe the split in plain values, for a run folder.

        `num_documents`, `num_skipped_documents` (empty ones) and `num_truncated_documents` count
        the whole corpus, both splits together.
        """
        common = {
            k: v for k, v in self._description.items() if k not in ("format", "build", "splits")
        }
        return {"split": self.split, **common, **self._description["splits"][self.split]}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": None}

    def __repr__(self) -> str:
        return (
            f"RowDataset({self.split}, {self.layout}, num_rows={self.num_rows}, "
            f"row_length={self.row_length}, num_tokens={self.num_tokens})"
        )

    def _checked(self, indices: Indices) -> np.ndarray:
        chosen = np.asarray(indices)
        if chosen.size == 0:
            return np.zeros(0, dtype=np.int64)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise BadInput(
                "row indices must be a one-dimensional list of integers, found "
                f"{chosen.dtype} {list(chosen.shape)}"
            )
        if chosen.min() < 0 or chosen.max() >= self.num_rows:
            wrong = chosen[(chosen < 0) | (chosen >= self.num_rows)][0]
            raise IndexError(f"row indices run from 0 to {self.num_rows - 1}, found {wrong}")
        return chosen

    def _mapped(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Map the files: rows [num_rows, row_length + 1], and lengths [num_rows] if they vary."""
        if self._maps is None:
            if _read_sidecar(self.directory)["build"] != self._description["build"]:
                raise BadInput(
                    f"the rows in {self.directory} were written again after this dataset was "
                    "opened; open it again"
                )
            dtype = np.dtype(self._description["dtype"])
            tokens = np.asarray(np.memmap(self.directory / f"{self.split}.bin", dtype, mode="r"))
            length, lengths = self.row_length + 1, None
            if self.layout == "packed":
                windows = np.lib.stride_tricks.sliding_window_view(tokens, length)
                rows = windows[:: self.row_length]
            else:
                rows = tokens.reshape(-1, length)
                path = self.directory / f"{self.split}.lengths.bin"
                lengths = np.asarray(np.memmap(path, LENGTH_DTYPE, mode="r"))
            self._maps = rows, lengths
        return self._maps

    def _expected_sizes(self) -> dict[Path, int]:
        """Return how long each file must be, in bytes: the row view trusts it."""
        itemsize = np.dtype(self._description["dtype"]).itemsize
        tokens = self.directory / f"{self.split}.bin"
        if self.layout == "packed":
            return {tokens: (self.num_rows * self.row_length + 1) * itemsize}
        lengths = self.directory / f"{self.split}.lengths.bin"
        num_tokens = self.num_rows * (self.row_length + 1)
        return {tokens: num_tokens * itemsize, lengths: self.num_rows * LENGTH_DTYPE.itemsize}


def _read_sidecar(directory: Path) -> dict[str, Any]:
    sidecar = directory / SIDECAR
    try:
        description = json.loads(sidecar.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            f"expected rows in {directory}, but {SIDECAR} cannot be read ({error.strerror}); "
            "write them with build_rows"
        ) from error
    except ValueError as error:
        raise BadInput(f"{sidecar} is damaged ({error}); write the rows again") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise BadInput(
            f"expected rows of format {FORMAT} in {sidecar}, found another format; write the "
            "rows again with this version of unison"
        )
    return description


def unigram_entropy(dataset: RowDataset) -> float:
    """Compute the entropy of the targets' token frequencies, in nats.

    This is the loss of the best model that ignores context, so a model whose loss is above it has
    not learnt to look at the previous tokens. Memory does not grow with the dataset.

    Args:
        dataset: The rows; padding is left out.

    Returns:
        The entropy, between 0 and log(vocab_size).
    """
    counts = np.zeros(dataset.vocab_size, dtype=np.int64)
    num_rows = max(1, _CHUNK_TOKENS // dataset.row_length)
    for start in range(0, dataset.num_rows, num_rows):
        labels = dataset.rows(range(start, min(start + num_rows, dataset.num_rows)))["labels"]
        targets = labels.numpy()
        counts += np.bincount(targets[targets != IGNORE_INDEX], minlength=dataset.vocab_size)
    seen = counts[counts > 0].astype(np.float64)
    total = seen.sum()
    return max(0.0, float(np.log(total) - (seen * np.log(seen)).sum() / total))


# ---- writing -------------------------------------------------------------------------------------


def document_split(index: int, *, seed: int, eval_fraction: float) -> str:
    """Say on which side of the split a document falls: a function of (seed, index) only.

    Args:
        index: The document's number in the corpus, from 0, empty documents included.
        seed: The seed given to `build_rows`.
        eval_fraction: The expected fraction of documents on the eval side.

    Returns:
        `"train"` or `"eval"`.

    >>> [document_split(i, seed=0, eval_fraction=0.3) for i in range(4)]
    ['train', 'eval', 'eval', 'train']
    """
    packed = struct.pack("<QQ", seed, index)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"unison-split").digest()
    return "eval" if int.from_bytes(digest, "little") < int(eval_fraction * 2**64) else "train"


def build_rows(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    row_length: int,
    directory: str | Path,
    layout: str = "packed",
    eval_fraction: float = 0.05,
    seed: int = 0,
    long_documents: str = "error",
) -> tuple[RowDataset, RowDataset]:
    """Tokenise a corpus into rows on disk, and split them into train and eval.

    The files are written beside their final place and renamed at the end: a build that fails leaves
    what was there. They can be read by their owner only (mode 0600). Call this from one process;
    others open the result with `RowDataset.open`.

    Whole documents go to train or to eval (`document_split`). If that puts every document on one
    side, as it must with a single text file, the last `eval_fraction` of the tokens (layout
    `"packed"`) or rows (`"documents"`) becomes eval instead.

    Args:
        corpus: The documents.
        tokenizer: Turns them into tokens.
        row_length: How many inputs, and as many targets, a row has.
        directory: Where the files go; made if it is missing.
        layout: `"packed"` joins documents with the end token and cuts the stream into rows;
            `"documents"` gives each document a row of its own, ended and then padded.
        eval_fraction: The expected fraction that goes to eval, strictly between 0 and 1.
        seed: Chooses the split.
        long_documents: What to do with a document that does not fit its row (`"documents"` only):
            `"error"` or `"truncate"`.

    Returns:
        The train and the eval rows; each has at least one.

    Raises:
        BadInput: An argument is out of range, a document is too long, or there is too little text.
    """
    check.positive(row_length=row_length)
    check.one_of(LAYOUTS, layout=layout)
    check.one_of(LONG_DOCUMENTS, long_documents=long_documents)
    if not 0 < eval_fraction < 1:
        raise BadInput(f"eval_fraction must lie strictly between 0 and 1, found {eval_fraction!r}")
    if not 0 <= seed < 1 << 64:
        raise BadInput(f"seed must lie between 0 and 2**64 - 1, found {seed}")
    directory = Path(directory).absolute()
    with disk_errors(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=".partial-", dir=directory)
    with temporary as partial:  # it is gone afterwards, whatever happens
        truncates = long_documents == "truncate"
        writer = RowWriter(Path(partial), tokenizer, row_length, layout, truncates=truncates)
        with writer.writing():
            for index, piece, tokens in _tokenised(corpus, tokenizer):
                split = document_split(index, seed=seed, eval_fraction=eval_fraction)
                writer.add(split, index, piece, tokens)
        split_by = writer.balance(eval_fraction, corpus.name)
        description = {
            "format": FORMAT,
            "build": secrets.token_hex(8),  # lets a dataset notice that its files were replaced
            "corpus": corpus.name,
            "seed": seed,
            "eval_fraction": eval_fraction,
            "split_by": split_by,
            **writer.describe(),
            "splits": {split: writer.finish(split) for split in SPLITS},
        }
        publish(Path(partial), directory, description)
    return RowDataset.open(directory, "train"), RowDataset.open(directory, "eval")


def _tokenised(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[tuple[int, Piece, np.ndarray]]:
    """Tokenise the corpus batch by batch, and number its documents."""
    index, batch, num_characters = 0, list[Piece](), 0
    for piece in itertools.chain(corpus.pieces(), [None]):
        if piece is not None:
            batch.append(piece)
            num_characters += len(piece.text)
            if num_characters < _BATCH_CHARACTERS and len(batch) < _BATCH_PIECES:
                continue
        encoded = tokenizer.encode_batch([each.text for each in batch])
        for each, tokens in zip(batch, encoded, strict=True):
            yield index, each, tokens
            index += each.ends_document
        batch, num_characters = [], 0


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
        self, folder: Path, tokenizer: Tokenizer, row_length: int, layout: str, *, truncates: bool
    ):
        self.folder, self.tokenizer, self.row_length = folder, tokenizer, row_length
        self.is_packed, self.truncates = layout == "packed", truncates
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self.num_documents = self.num_skipped = self.num_truncated = 0
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
        num_units = num_tokens = num_rows = self._num_units(split)
        if self.is_packed:
            num_rows = max(0, num_units - 1) // self.row_length
            if num_rows == 0:
                raise BadInput(
                    f"expected at least one row in the {split} split, found {num_units} tokens "
                    f"where a row needs {self.row_length + 1}; give more text, shorter rows, "
                    "another eval_fraction (--eval-fraction) or another seed"
                )
            num_tokens = num_rows * self.row_length + 1
            os.truncate(self.folder / f"{split}.bin", num_tokens * self.dtype.itemsize)
            num_targets, num_dropped = num_tokens - 1, num_units - num_tokens
        else:
            lengths = np.memmap(self.folder / f"{split}.lengths.bin", dtype=LENGTH_DTYPE, mode="r")
            num_tokens, num_dropped = int(lengths.sum(dtype=np.int64)), 0
            num_targets = num_tokens - num_rows
        return {
            "num_rows": num_rows,
            "num_tokens": num_tokens,
            "num_targets": num_targets,
            "num_dropped_tokens": num_dropped,
        }

    def describe(self) -> dict[str, Any]:
        """Describe what the files hold, both splits together."""
        return {
            "tokenizer": {"name": self.tokenizer.name, "fingerprint": self.tokenizer.fingerprint},
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
            shutil.copyfileobj(reader, writer, _COPY_BYTES)
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
