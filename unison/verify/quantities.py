"""What a trace keeps of tensors: digests, a few values, a norm; and the file that holds them.

[Note: a trace] Of every quantity a trace keeps digests, a few values at fixed places and a norm,
never the tensor. It must not tell how many ranks computed it, so everything is numbered globally:
an element of a parameter by its row-major index in the whole parameter, a row of an activation by
the sample's number in the logical batch. A digest is a sum over elements of a hash of (index,
bits), modulo 2^64: each rank adds up what it holds, and the parts of all ranks add up to the digest
of the whole, whoever held what. The clipped sums of private training are integers; theirs is a
*linear* digest, Σ value · hash(index), which adds up over ranks even where every rank holds other
summands. So the sums before and after their way over ranks have one digest, in one run and in any
other.

Numbers are hashed with numpy, out of reach of whatever follows torch's functions in a pass. Files
are lines of JSON; values are hexadecimal floats.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unison.errors import BadInput
from unison.parallel import ShardedParam
from unison.schema import open_regular, parse, short

RUNGS = (
    "initial parameters",
    "settings",
    "inputs",
    "activations",
    "loss",
    "per-sample norms",
    "coefficients",
    "gradients before reduction",
    "gradients after reduction",
    "noise",
    "curvature",
    "gradients",
    "optimizer state",
    "updated parameters",
)
"""What is compared, in the order in which a step computes it. "gradients" are those that the
optimizer finds: with noise, clipped, preconditioned. "curvature" are the factors of K-FAC.
"settings" are the optimizer's and what a private step applies: they are known before it."""

NUM_BLOCKS = 32  # digests of a tensor: where it differs is known to a 32nd of it
NUM_VALUES = 64  # values that are kept of a tensor
DRAWN = ("initial parameters", "noise")  # of which no two parts should be alike
LENGTH_OF_HEAD = 16  # values by which they are found to be
MAX_ROWS = 64  # rows that have a digest each; of more, neighbours share one
FORMAT = 1
MAX_LINE = 1 << 26

_CHUNK = 1 << 20  # elements that are hashed at a time: they stay in cache
_MASK = (1 << 64) - 1


# ---- digests -------------------------------------------------------------------------------------


def _mixed(words: np.ndarray) -> np.ndarray:
    """Scramble 64-bit words in place, as SplitMix64 ends."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def hashed(index: np.ndarray, bits: np.ndarray, *, is_linear: bool) -> np.ndarray:
    """One word per element, to be added up: [elements] uint64 each."""
    salt = _mixed(index * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))
    return bits * (salt | np.uint64(1)) if is_linear else _mixed(salt ^ bits)


_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits_of(value: Tensor) -> np.ndarray:  # [elements]
    """The bits of a tensor's elements, flat and on the host; of complex ones, of their parts."""
    flat = value.detach()
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    flat = flat.cpu().contiguous().reshape(-1)
    size = flat.element_size()
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).numpy()


def words_of(bits: np.ndarray, *, is_linear: bool) -> np.ndarray:
    """Bits as 64-bit words; integers of a linear digest keep their sign."""
    if is_linear:
        return bits.astype(np.int64).view(np.uint64)
    return bits.view(_UNSIGNED[bits.itemsize]).astype(np.uint64)


def block_digests(
    value: Tensor, index: "Elements", *, is_linear: bool = False, salt: int = 0
) -> np.ndarray:  # [NUM_BLOCKS] uint64
    """The digests of a tensor's blocks, of the elements that are here; see [Note: a trace].

    Args:
        value: The elements, in the order of `index`.
        index: Which elements of the whole they are.
        is_linear: Of integers: whether digests of summands add up to that of the sum.
        salt: Tells several contributions to one digest apart.
    """
    found = np.zeros(NUM_BLOCKS, np.uint64)
    bits = bits_of(value)
    length = max(1, -(-index.numel // NUM_BLOCKS))
    offset = np.uint64(salt * 0xD1342543DE82EF95 & _MASK)
    for begin in range(0, len(bits), _CHUNK):
        chunk = bits[begin : begin + _CHUNK]
        where = index.numbers(begin, begin + len(chunk))
        words = hashed(where + offset, words_of(chunk, is_linear=is_linear), is_linear=is_linear)
        if index.runs is not None:
            np.add.at(found, where // np.uint64(length), words)
            continue
        first, last = int(where[0]), int(where[-1])
        blocks = np.arange(first // length, last // length + 1)
        found[blocks] += np.add.reduceat(words, np.maximum(blocks * length - first, 0))
    return found


@dataclass(frozen=True)
class Elements:
    """Which elements of a whole tensor are here.

    Attributes:
        numel: Elements of the whole.
        start: The first one that is here.
        stop: One past the last.
        runs: Where they are no single run: the numbers of all [elements].
    """

    numel: int
    start: int
    stop: int
    runs: np.ndarray | None = field(default=None, compare=False)

    @classmethod
    def of(cls, owned: ShardedParam, *, is_whole: bool = False) -> "Elements":
        """Those of a parameter that this rank holds, or all that it computes gradients of."""
        if owned.cut is not None:
            firsts, run = owned.cut.rows()
            every = (firsts[:, None] + torch.arange(run)).reshape(-1).numpy().astype(np.uint64)
            return cls(owned.numel, int(every[0]), int(every[-1]) + 1, every)
        return cls.all(owned.numel) if is_whole else cls(owned.numel, owned.start, owned.stop)

    @classmethod
    def all(cls, numel: int) -> "Elements":
        """All of a tensor."""
        return cls(numel, 0, numel)

    def numbers(self, begin: int, end: int) -> np.ndarray:
        """The numbers in the whole of the elements [begin, end) of what is here, uint64."""
        if self.runs is not None:
            return self.runs[begin:end]
        return np.arange(self.start + begin, self.start + end, dtype=np.uint64)

    def places(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of these elements are here, and where: (indices into `wanted`, places)."""
        if self.runs is not None:
            places = np.minimum(np.searchsorted(self.runs, wanted), len(self.runs) - 1)
            here = np.flatnonzero(self.runs[places] == wanted)
            return here, places[here]
        here = np.flatnonzero((self.start <= wanted) & (wanted < self.stop))
        return here, wanted[here] - self.start


def positions(numel: int, count: int) -> np.ndarray:
    """The elements whose values are kept: all of a small tensor, else evenly spaced ones.

    They divide the tensor as ranks divide it, so that equal parts show equal values.
    """
    if numel <= count:
        return np.arange(numel)
    return np.append(np.arange(count - 1) * numel // (count - 1), numel - 1)


# ---- what is kept of one quantity ----------------------------------------------------------------


@dataclass(kw_only=True)
class Quantity:
    """What a trace keeps of one quantity of one step.

    Attributes:
        step: Counted from 0.
        rung: One of `RUNGS`.
        name: The parameter's or module's canonical name.
        shape: Of the whole; rows come first where it has rows.
        dtype: Its name, without `torch.`.
        blocks: Digests of its blocks, or of its rows, as numbers below 2^64.
        values: Those at `positions(numel, ...)`.
        norm: Euclidean; depends on the order of additions, and is not compared bit by bit.
        disagree: Whether ranks that hold copies of it hold different bits.
        repeats: Whether a part of it begins with the same values as another part, of it or of
            another; of what is drawn at random.
    """

    step: int
    rung: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    blocks: tuple[int, ...]
    values: tuple[float, ...]
    norm: float
    disagree: bool = False
    repeats: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    @property
    def key(self) -> tuple[int, int, str]:
        """Step, place on the ladder, name."""
        return self.step, RUNGS.index(self.rung), self.name

    def as_json(self) -> dict[str, Any]:
        """The same as values that JSON can hold, exactly."""
        made = vars(self) | {
            "blocks": [f"{each:x}" for each in self.blocks],
            "values": [float(each).hex() for each in self.values],
            "norm": float(self.norm).hex(),
        }
        return {name: each for name, each in made.items() if each is not False}

    @classmethod
    def of_json(cls, found: Any, source: str) -> "Quantity":
        """Read one line of a file.

        Raises:
            BadInput: If it is none.
        """
        try:
            entry = cls(
                step=int(found["step"]),
                rung=str(found["rung"]),
                name=found["name"].encode().decode(),  # text that can be shown
                shape=tuple(map(int, found["shape"])),
                dtype=str(found["dtype"]),
                blocks=tuple(int(each, 16) for each in found["blocks"]),
                values=tuple(map(float.fromhex, found["values"])),
                norm=float.fromhex(found["norm"]),
                disagree=bool(found.get("disagree", False)),
                repeats=bool(found.get("repeats", False)),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"{source} is no line of a trace: {error!r}") from None
        is_right = (
            entry.rung in RUNGS and entry.step >= 0 and all(side >= 0 for side in entry.shape)
        )
        is_right &= entry.numel < 1 << 62 and len(entry.values) <= entry.numel
        if not is_right or not 0 < len(entry.blocks) <= max(NUM_BLOCKS, MAX_ROWS):
            raise BadInput(f"{source} is no line of a trace: {short(found)}")
        return entry


@dataclass
class Contribution:
    """What one rank knows of a quantity, by what it is of: a row's number, or elements.

    Elements are ("part", None, elements), of which ranks may hold copies, or ("summand", who adds
    up, elements).

    Attributes:
        shape: Of the whole, without rows where it has some.
        dtype: Its name.
        num_rows: Rows of the logical batch; None for what has none.
        blocks: Digests: one of a row, [NUM_BLOCKS] of elements.
        values: By place in the list of positions.
        squares: Sums of squares.
        heads: The first values of parts, wherever those lie in the whole.
    """

    shape: tuple[int, ...]
    dtype: str
    num_rows: int | None = None
    blocks: dict[Any, Any] = field(default_factory=dict)
    values: dict[Any, dict[int, float]] = field(default_factory=dict)
    squares: dict[Any, float] = field(default_factory=dict)
    heads: dict[Any, list[float]] = field(default_factory=dict)


def merged(step: int, rung: str, name: str, parts: Sequence[Contribution], count: int) -> Quantity:
    """Make one entry of what all ranks know of it."""
    first = parts[0]
    blocks: dict[Any, Any] = {}
    values: dict[Any, dict[int, float]] = {}
    squares: dict[Any, float] = {}
    disagree, known = False, defaultdict[Any, list[Any]](list)
    for part in parts:
        for key, each in part.blocks.items():
            if key not in blocks:
                blocks[key], values[key] = each, dict(part.values[key])
                squares[key] = part.squares.get(key, math.nan)
            elif first.num_rows is not None:  # along a tensor axis: copies of a row, or parts
                if each not in known[key]:
                    blocks[key] = (blocks[key] + each) & _MASK
                    squares[key] += part.squares[key]
            elif key[0] == "summand":
                blocks[key] = blocks[key] + each
                for place, value in part.values[key].items():
                    values[key][place] += value
            else:  # copies
                disagree |= not np.array_equal(blocks[key], each)
            known[key].append(each)
    if first.num_rows is None:
        # Ranks along a tensor axis add replicated parameters up each for itself: they count once.
        once = {key[2]: key for key in reversed(blocks)}
        disagree |= any(not np.array_equal(blocks[once[k[2]]], blocks[k]) for k in blocks)
        found = sum(
            (blocks[key] for key in once.values()), np.zeros(NUM_BLOCKS, np.uint64)
        ).tolist()
        flat = {place: each for key in once.values() for place, each in values[key].items()}
        norm = math.sqrt(sum(squares[key] for key in once.values()))
        shape = first.shape
    else:
        # A digest per row, or for runs of neighbours where there are many.
        found = [0] * min(MAX_ROWS, first.num_rows)
        for row, each in blocks.items():
            place = row * len(found) // first.num_rows
            own = each * (2 * row + 1) if first.num_rows > MAX_ROWS else each
            found[place] = (found[place] + own) & _MASK
        flat = {place: each for of_row in values.values() for place, each in of_row.items()}
        norm, shape = math.sqrt(sum(squares.values())), (first.num_rows, *first.shape)
    return Quantity(
        step=step,
        rung=rung,
        name=name,
        shape=shape,
        dtype=first.dtype,
        blocks=tuple(found),
        values=tuple(
            flat.get(place, math.nan) for place in range(len(positions(math.prod(shape), count)))
        ),
        norm=norm,
        disagree=disagree,
    )


def alike(rung: str, of_all: Sequence[Mapping[tuple[str, str], Contribution]]) -> set[str]:
    """Of what was drawn, the names of which two parts begin with the same values.

    Nearly the same: noise is known as what it has made of a sum, which was rounded.
    """
    heads = {
        (name, key): head
        for each in of_all
        for (own, name), part in each.items()
        if own == rung
        for key, head in part.heads.items()
    }
    ordered = sorted(heads, key=lambda each: heads[each])
    return {
        name
        for a, b in itertools.pairwise(ordered)
        if np.allclose(heads[a], heads[b], rtol=1e-4, atol=0)
        for name in (a[0], b[0])
    }


# ---- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """A trace that was written.

    Attributes:
        source: Its file.
        num_ranks: Ranks that computed it.
        is_private: Whether it is of private training, whose sums are integers.
        conditions: What the bits depend on besides the settings (`unison.fingerprint`).
        notes: What its maker said of it.
        entries: By `Quantity.key`, in the order in which they were computed.
    """

    source: str
    num_ranks: int
    is_private: bool
    conditions: Mapping[str, Any]
    notes: Mapping[str, Any]
    entries: Mapping[tuple[int, int, str], Quantity]

    @classmethod
    def open(cls, file: str | Path) -> "Trace":
        """Read a trace.

        Raises:
            BadInput: If the file holds none, or a damaged one.
        """
        entries: dict[tuple[int, int, str], Quantity] = {}
        try:
            with open_regular(Path(file)) as lines:
                header = _header(lines.readline(MAX_LINE), str(file))
                number = 1
                while line := lines.readline(MAX_LINE):
                    number += 1
                    source = f"{file}, line {number}"
                    if not line.endswith(b"\n"):
                        raise BadInput(f"{source} is cut off; the run that wrote it has not ended")
                    entry = Quantity.of_json(parse(line, source), source)
                    if entry.key in entries:
                        raise BadInput(f"{source} repeats {entry.rung} of {short(entry.name)}")
                    entries[entry.key] = entry
        except OSError as error:
            raise BadInput(f"{file} cannot be read: {error.strerror}") from None
        return cls(str(file), *header, entries)


def _header(line: bytes, file: str) -> tuple[int, bool, dict[str, Any], dict[str, Any]]:
    found = parse(line, file) if line.startswith(b"{") else None
    if not isinstance(found, dict) or found.get("unison_trace") != FORMAT:
        raise BadInput(
            f"{file} is no trace; unison.verify.trace(file, model, optimizer) writes one around a "
            "training loop, `unison replay --trace FILE` and `unison verify model --out FOLDER` do"
        )
    kinds = {"num_ranks": int, "is_private": bool, "conditions": dict, "notes": dict}
    wrong = [key for key, kind in kinds.items() if type(found.get(key)) is not kind]
    if wrong or not 0 < found["num_ranks"] < 1 << 31:
        raise BadInput(f"{file} is damaged: its first line has no {wrong or ['num_ranks']}")
    return found["num_ranks"], found["is_private"], found["conditions"], found["notes"]
