"""Writes a corpus into rows of fixed length, in bounded memory."""

import hashlib
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from unison import check
from unison.data.corpus import Corpus, Piece
from unison.data.rows import FORMAT, SPLITS, RowDataset
from unison.data.tokenizer import Tokenizer
from unison.data.writer import RowWriter, partial_folder, publish
from unison.errors import BadInput

LAYOUTS = ("packed", "documents")
_BATCH_CHARACTERS = 1 << 17
_BATCH_PIECES = 1024


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
    _check_arguments(row_length, layout, eval_fraction, seed, long_documents)
    directory = Path(directory).absolute()
    with partial_folder(directory) as partial:
        writer = RowWriter(
            partial,
            tokenizer,
            row_length=row_length,
            layout=layout,
            truncates=long_documents == "truncate",
        )
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
        publish(partial, directory, description)
    return RowDataset.open(directory, "train"), RowDataset.open(directory, "eval")


def _check_arguments(
    row_length: int, layout: str, eval_fraction: float, seed: int, long_documents: str
) -> None:
    check.positive(row_length=row_length)
    check.one_of(LAYOUTS, layout=layout)
    check.one_of(("error", "truncate"), long_documents=long_documents)
    if not 0 < eval_fraction < 1:
        raise BadInput(f"eval_fraction must lie strictly between 0 and 1, found {eval_fraction!r}")
    if not 0 <= seed < 1 << 64:
        raise BadInput(f"seed must lie between 0 and 2**64 - 1, found {seed}")


def _tokenised(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[tuple[int, Piece, np.ndarray]]:
    """Tokenise the corpus batch by batch, and number its documents."""
    index = 0
    for batch in _batches(corpus.pieces()):
        encoded = tokenizer.encode_batch([piece.text for piece in batch])
        for piece, tokens in zip(batch, encoded, strict=True):
            yield index, piece, tokens
            index += piece.ends_document


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    num_characters = 0
    for piece in pieces:
        batch.append(piece)
        num_characters += len(piece.text)
        if num_characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch
