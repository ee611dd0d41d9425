"""Rows of fixed length, memory-mapped from flat files that any process can open by path.

A folder of rows holds, written by `build_rows`:

    rows.json                 what the files hold: layout, lengths, types, where they come from
    train.bin, eval.bin       tokens, little-endian uint16 (or uint32 for a vocabulary above 65,536)
    train.lengths.bin, ...    layout "documents" only: how many tokens of each row are not padding

A row is `row_length + 1` tokens, from which inputs and targets are both cut. In the layout "packed"
consecutive rows share one token (the last target of a row is the first input of the next), so every
token of the stream but the first is a target exactly once and no token is stored twice.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from unison import check
from unison.errors import BadInput

IGNORE_INDEX = -100
"""The label of a position that has no target."""

SPLITS = ("train", "eval")
SIDECAR = "rows.json"
LENGTH_DTYPE = np.dtype("<u4")
FORMAT = 1
_CHUNK_TOKENS = 1 << 17

Indices = Sequence[int] | np.ndarray | Tensor


class RowDataset(Dataset[dict[str, Tensor]]):
    """The rows of one split, as a map-style dataset.

    Item i is `{"input_ids": int64 [row_length], "labels": int64 [row_length]}`. Labels are already
    shifted: `labels[t]` is the token after `input_ids[t]`, or `IGNORE_INDEX` where there is none.
    A pickled dataset is its path and description only; every process maps the file itself.

    Open one with `RowDataset.open`.
    """

    def __init__(self, directory: Path, split: str, description: dict[str, Any]):
        self.directory = directory
        self.split = split
        self._description = description
        self._maps: tuple[np.ndarray, np.ndarray | None] | None = None

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
        dataset._check_files()
        return dataset

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return self._description["splits"][self.split]["num_rows"]

    @property
    def num_tokens(self) -> int:
        """How many tokens the rows hold, padding not counted and shared tokens counted once."""
        return self._description["splits"][self.split]["num_tokens"]

    @property
    def row_length(self) -> int:
        """How many inputs, and as many targets, a row has."""
        return self._description["row_length"]

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self._description["vocab_size"]

    @property
    def layout(self) -> str:
        """`"packed"` or `"documents"`."""
        return self._description["layout"]

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = self.rows([index])
        return {name: values[0] for name, values in batch.items()}

    def __getitems__(self, indices: Indices) -> list[dict[str, Tensor]]:
        """Read several items at once; `DataLoader` calls this."""
        batch = self.rows(indices)
        names = list(batch)
        return [
            dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True)
        ]

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
        labels[~self._is_target(chosen)] = IGNORE_INDEX
        return {
            "input_ids": torch.from_numpy(block[:, :-1].astype(np.int64)),
            "labels": torch.from_numpy(labels),
        }

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
        if lengths is None:
            return np.full(len(chosen), self.row_length, dtype=np.int64)
        return lengths[chosen].astype(np.int64) - 1

    def digest(self) -> str:
        """Return the SHA-256 of all rows, read once from front to back.

        Whoever has it can tell whether a guess at all of the rows is right: publish it under a
        salt alone.
        """
        found = hashlib.sha256(f"{self.layout} {self.num_rows} {self.row_length}\n".encode())
        for kind in (".bin", ".lengths.bin") if self.layout == "documents" else (".bin",):
            with self._file(kind).open("rb") as file:
                while block := file.read(1 << 20):
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

    def _is_target(self, chosen: np.ndarray) -> np.ndarray:  # bool [n, row_length]
        return np.arange(self.row_length) < self.num_targets(chosen)[:, None]

    def _file(self, kind: str) -> Path:
        return self.directory / f"{self.split}{kind}"

    def _mapped(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Map the files: rows [num_rows, row_length + 1], and lengths [num_rows] if they vary."""
        if self._maps is None:
            if _read_sidecar(self.directory)["build"] != self._description["build"]:
                raise BadInput(
                    f"the rows in {self.directory} were written again after this dataset was "
                    "opened; open it again"
                )
            dtype = np.dtype(self._description["dtype"])
            tokens = np.asarray(np.memmap(self._file(".bin"), dtype, mode="r"))
            stride = self.row_length if self.layout == "packed" else self.row_length + 1
            rows = np.lib.stride_tricks.as_strided(
                tokens,
                shape=(self.num_rows, self.row_length + 1),
                strides=(stride * dtype.itemsize, dtype.itemsize),
                writeable=False,
            )
            lengths = None
            if self.layout == "documents":
                lengths = np.asarray(np.memmap(self._file(".lengths.bin"), LENGTH_DTYPE, mode="r"))
            self._maps = rows, lengths
        return self._maps

    def _check_files(self) -> None:
        """Check that the files are as long as the sidecar says: the row view trusts it."""
        itemsize = np.dtype(self._description["dtype"]).itemsize
        if self.layout == "packed":
            expected = {".bin": (self.num_rows * self.row_length + 1) * itemsize}
        else:
            num_tokens = self.num_rows * (self.row_length + 1)
            expected = {
                ".bin": num_tokens * itemsize,
                ".lengths.bin": self.num_rows * LENGTH_DTYPE.itemsize,
            }
        for kind, num_bytes in expected.items():
            path = self._file(kind)
            found = path.stat().st_size if path.is_file() else None
            if found != num_bytes:
                what = "no such file" if found is None else f"{found} bytes"
                raise BadInput(
                    f"expected {path} to hold {num_bytes} bytes, found {what}; write the rows "
                    "again with build_rows"
                )


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
