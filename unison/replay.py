"""The record of a run: a digest of every step and unit, in a tree by which two runs are compared.

A run with `record` keeps two files. RUN/record.jsonl has a line per step, from step 0, the initial
values, on: what the step applied, and a digest of each unit's parameters after it. All lines are
equally long, so that one is found without reading the others. RUN/record.tree is a Merkle tree over
the lines, as RFC 6962 has it: two runs that differ in any step differ in its upper nodes, and going
down where they differ finds the first such step in log N look-ups.

[Note: digests of bits] An element's bits, as an integer, count times an odd number that hangs on
its parameter's name and its index there; the sum over all elements is taken modulo 2^64. Sums of
shards add up to that of the whole, in any order, so that the digest knows nothing of ranks, and
nothing is gathered. One changed element always shows. Of two different parameters chosen without a
look at the factors, fewer than one in 2^27 pairs have equal sums, whatever the change is; there are
two independent sums, so that it is one in 2^54. The factors are public: somebody who wants to can
make another model with the same digest. They guard against accidents, and not against forgers.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from unison.errors import BadInput
from unison.schema import build, open_regular, parse, short
from unison.shard import find_blocks
from unison.shard.sharded_tensor import local_part, placement_of, show_shards
from unison.torch_internals import canonical_name

RECORD_FILE = "record.jsonl"
TREE_FILE = "record.tree"
FORMAT = "unison-record/1"
ROOT = "(root)"  # the unit of what is in no block

_NODE_BYTES = 32
_MAX_LINE = 1 << 24  # bytes of a line; a model of ten thousand blocks has half a million
_BLOCK = 1024  # elements that share a factor beside their own
_CHUNK = {"cpu": 1 << 18}  # elements at a time: of a CPU's cache; elsewhere of its memory

# ---- digests of parameters -----------------------------------------------------------------------


def _factors(name: str, count: int) -> Tensor:
    """Odd numbers that hang on a name, as int64 [2, count]."""
    data = hashlib.shake_256(f"{FORMAT} {name}".encode()).digest(16 * count)
    return torch.frombuffer(bytearray(data), dtype=torch.int64).view(2, count) | 1


def _factors_of_blocks(first: int, count: int, device: torch.device) -> Tensor:
    """Odd numbers of the blocks from `first` on [2, count]: SplitMix64 of their indices."""
    z = torch.arange(first + 1, first + count + 1, device=device)
    z = torch.stack([z, z + 0x5851F42D4C957F2D]) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return z | 1


def sum_bits(values: Tensor, start: int, tables: dict[Any, Tensor]) -> Tensor:
    """Sum elements' bits times their factors; see [Note: digests of bits].

    Args:
        values: The elements [start, start + n) of a tensor, [n].
        start: Where they begin.
        tables: Keeps factors for the next time.

    Returns:
        The two sums, int64 [2].
    """
    size, device = values.element_size(), values.device
    bits = values.view({1: torch.int8, 2: torch.int16}.get(size, torch.int32))
    start = start * size // bits.element_size()
    if device not in tables:
        tables[device] = _factors("element", _BLOCK).to(device)
    total = torch.zeros(2, dtype=torch.int64, device=device)
    # Whole blocks lie between those that are cut at the beginning and at the end.
    cut = min(len(bits), -start % _BLOCK)
    whole = max(cut, len(bits) - (start + len(bits)) % _BLOCK)
    step = _CHUNK.get(device.type, 1 << 26)
    for low, high in pairwise(sorted({0, *range(cut, whole, step), whole, len(bits)})):
        first, before = divmod(start + low, _BLOCK)
        after = -(start + high) % _BLOCK
        part = bits[low:high]
        if before or after:  # what is missing of a block counts as 0, which adds nothing
            part = nn.functional.pad(part, (before, after))
        words = part.view(-1, _BLOCK).long()
        place = first, len(words), device
        if place not in tables:
            tables[place] = _factors_of_blocks(*place)
        sums = torch.stack([(words * own).sum(dim=1) for own in tables[device]])  # [2, blocks]
        total += (sums * tables[place]).sum(dim=1)
    return total


class StepRecorder:
    """Makes the digests of a run's steps; every rank has one.

    Args:
        model: The model, as the ranks hold it.
        rank: This process's.
        num_ranks: How many there are.
        sum_ranks: Adds a tensor over ranks, in place.

    Attributes:
        units: The names of the blocks, in the model's order, and that of the rest.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        num_ranks: int,
        sum_ranks: Callable[[Tensor], Tensor],
    ) -> None:
        self._model, self._rank, self._num_ranks = model, rank, num_ranks
        self._sum_ranks = sum_ranks
        self._tables: dict[Any, Tensor] = {}
        blocks = set(map(id, find_blocks(model)))
        names = [canonical_name(p) for p, each in model.named_modules() if id(each) in blocks]
        self.units = (*names, ROOT)
        self._unit_of: dict[str, int] = {}
        headers = [hashlib.sha256(FORMAT.encode()) for _ in self.units]
        for path, value in model.named_parameters():
            name = canonical_name(path)
            inside = (i for i, unit in enumerate(names) if name.startswith(f"{unit}."))
            unit = self._unit_of[name] = next(inside, len(names))
            headers[unit].update(f"{name} {value.dtype} {list(value.shape)}\0".encode())
        self._headers = [each.digest() for each in headers]
        self._of_names = {name: _factors(name, 1)[:, 0] for name in self._unit_of}  # [2] each
        self._rows = torch.zeros(2, dtype=torch.int64)

    def see(self, positions: Tensor, *columns: Tensor) -> None:
        """Add the rows of a pass to the digest of the step's rows.

        Args:
            positions: Where they stand in the global batch [rows]; -1 for padding. Those that count
                are neighbours.
            columns: What they hold, whole numbers [rows] or [rows, n], on the CPU.
        """
        is_real = positions >= 0
        if not is_real.any():
            return
        held = [each[is_real].reshape(int(is_real.sum()), -1) for each in columns]
        table = torch.cat(held, dim=1).int()  # [real rows, all columns]
        first = int(positions[is_real][0])
        self._rows += sum_bits(table.reshape(-1), first * table.shape[1], self._tables)

    @torch.no_grad()
    def take(self) -> tuple[str, tuple[str, ...]]:
        """The digest of the rows seen since the last time, and one of each unit; a collective."""
        show_shards(self._model)
        device = next(self._model.parameters()).device
        sums = torch.zeros(len(self.units) + 1, 2, dtype=torch.int64, device=device)
        sums[-1], self._rows = self._rows, torch.zeros_like(self._rows)
        for path, value in self._model.named_parameters():
            name = canonical_name(path)
            place = placement_of(value, name)
            # What several ranks hold a copy of, each counts a part of.
            copies, copy = (each // place.ranks.size for each in (self._num_ranks, self._rank))
            flat = local_part(value).detach().reshape(-1)
            edges = [len(flat) * n // copies // _BLOCK * _BLOCK for n in range(copies)]
            low, high = [*edges, len(flat)][copy : copy + 2]
            if low < high:
                found = sum_bits(flat[low:high], place.start + low, self._tables).to(device)
                sums[self._unit_of[name]] += found * self._of_names[name].to(device)
        *units, rows = self._sum_ranks(sums).cpu().numpy()
        return _short_hash(b"rows" + rows.tobytes()), tuple(
            _short_hash(header + each.tobytes())
            for header, each in zip(self._headers, units, strict=True)
        )


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


# ---- what is recorded of a step ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One line: what a step applied and what came of it.

    Of a private run, loss and rows are covered by no ε. They are there as the outputs of a keyed
    hash under a key that whoever replays the run has, and nobody else; or not at all.

    Attributes:
        step: Its number; 0 is the initial values.
        lr: The learning rate.
        grad_norm: The norm of the gradient that the update was made of.
        noise_multiplier: σ; None without privacy.
        max_grad_norm: C; None without privacy.
        key: What noise and sampling came from: `"seed"`, the commitment to a kept key, or `"lost"`;
            None without privacy.
        rows: Digest of the rows in the step's batch.
        loss: The step's loss.
        units: Digest of each unit's parameters after the step.
    """

    step: int
    lr: float | None = None
    grad_norm: float | None = None
    noise_multiplier: float | None = None
    max_grad_norm: float | None = None
    key: str | None = None
    rows: str | None = None
    loss: float | str | None = None
    units: tuple[str, ...]

    def to_line(self) -> bytes:
        """The line, without what fills it up."""
        return json.dumps(asdict(self)).encode()


WORDS = {
    "lr": "the learning rate",
    "noise_multiplier": "the noise multiplier σ",
    "max_grad_norm": "the clip norm C",
    "key": "the key of noise and sampling",
    "rows": "the rows of the batch",
    "loss": "the loss",
    "grad_norm": "the gradient's norm",
}
"""What may differ between two records of a step, in the order in which one makes the other differ;
the units come after all of them."""


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first step at which two runs are not the same.

    Attributes:
        step: Its number.
        unit: The first unit that differs; None if only what was applied does.
        units: All that do.
        applied: What else differs, by its name in `StepRecord`: both values.
    """

    step: int
    unit: str | None
    units: tuple[str, ...]
    applied: dict[str, tuple[Any, Any]]

    @property
    def sentence(self) -> str:
        """The same in words."""
        digests = {"rows", "loss", "key"}
        found = [
            WORDS[name] + ("" if name in digests else f" ({a!r} and {b!r})")
            for name, (a, b) in self.applied.items()
        ]
        if self.unit is not None:
            others = len(self.units) - 1
            more = f" and {others} unit{'s' if others > 1 else ''} more" if others else ""
            found.append(f"the parameters of {self.unit}{more}")
        where = f"at step {self.step}" if self.step else "in the initial values"
        return f"the first difference is {where}: {', '.join(found)}"


def compare_steps(a: StepRecord, b: StepRecord, units: Sequence[str]) -> Parting | None:
    """What differs between two records of one step; None if nothing does.

    What one of them must not or cannot hold (rows and loss of a private run whose key is lost) is
    not compared.
    """
    applied = {}
    for name in WORDS:
        pair = getattr(a, name), getattr(b, name)
        if pair[0] != pair[1] and (None not in pair or name not in ("rows", "loss")):
            applied[name] = pair
    others = [unit for unit, x, y in zip(units, a.units, b.units, strict=True) if x != y]
    if not applied and not others:
        return None
    unit = others[0] if others else None
    return Parting(step=a.step, unit=unit, units=tuple(others), applied=applied)


# ---- the tree ------------------------------------------------------------------------------------


def leaf_hash(line: bytes) -> bytes:
    """The hash of a line, a leaf of the tree."""
    return hashlib.sha256(b"\0" + line).digest()


def num_nodes(num_leaves: int) -> int:
    """Nodes in the file of a tree: each leaf is followed by the nodes that it completes.

    >>> [num_nodes(n) for n in (0, 1, 2, 3, 4)]
    [0, 1, 3, 4, 7]
    """
    return 2 * num_leaves - num_leaves.bit_count()


def node_place(level: int, index: int) -> int:
    """Where in the file the node is that covers the leaves from index · 2^level on, 2^level many.

    >>> [node_place(0, 0), node_place(0, 1), node_place(1, 0), node_place(0, 2)]
    [0, 1, 2, 3]
    """
    return num_nodes(((index + 1) << level) - 1) + level


def whole_nodes(num_leaves: int) -> Iterator[tuple[int, int]]:
    """Yield (level, index) of the largest whole subtrees of a tree, from left to right.

    >>> list(whole_nodes(6))
    [(2, 0), (1, 2)]
    """
    first = 0
    for level in range(num_leaves.bit_length() - 1, -1, -1):
        if num_leaves >> level & 1:
            yield level, first >> level
            first += 1 << level


def first_difference(a: "Record", b: "Record") -> int | None:
    """The first step whose lines differ, found by log N look-ups; None if there is none.

    Steps that only one of them has are not compared.
    """
    for level, index in whole_nodes(min(a.num_lines, b.num_lines)):
        if a.node(level, index) == b.node(level, index):
            continue
        while level:
            level, index = level - 1, 2 * index
            index += a.node(level, index) == b.node(level, index)
        return index
    return None


# ---- files ---------------------------------------------------------------------------------------


class Record:
    """The record of a run, read line by line where it is asked for. Use as a context manager.

    Attributes:
        run: The folder.
        units: Names of the units.
        num_lines: Lines: one more than the steps.
        num_lookups: Nodes and lines that were read.
        close: Lets go of the files.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.num_lookups = run, 0
        if not (run / RECORD_FILE).exists():
            raise BadInput(
                f"{run} holds no {RECORD_FILE}: only a run of unison train --record can be replayed"
            )
        with ExitStack() as files:
            self._lines = files.enter_context(_open(run / RECORD_FILE))
            self._tree = files.enter_context(_open(run / TREE_FILE))
            self._read_header()
            self.close = files.pop_all().close

    def _read_header(self) -> None:
        path = self.run / RECORD_FILE
        header = self._lines.readline(_MAX_LINE)
        where = f"{path}, line 1"
        found = build(dict[str, Any], parse(header, where), where)
        if found.get("format") != FORMAT:
            raise BadInput(f"{where}: expected format {FORMAT}, found {short(found.get('format'))}")
        self.units = build(tuple[str, ...], found.get("units"), where, field="units")
        self.width = build(int, found.get("width"), where, field="width")
        if not 0 < self.width <= _MAX_LINE:
            raise BadInput(f"{where}: width must lie between 1 and {_MAX_LINE}, found {self.width}")
        self.start = len(header)
        num_written = (os.fstat(self._lines.fileno()).st_size - self.start) // self.width
        num_hashed = os.fstat(self._tree.fileno()).st_size // _NODE_BYTES
        # A crash may have come between the two files, or in the middle of a line.
        self.num_lines = min(num_written, num_hashed)
        while num_nodes(self.num_lines) > num_hashed:
            self.num_lines -= max(1, (num_nodes(self.num_lines) - num_hashed) // 2)
        if self.num_lines < 1:
            raise BadInput(f"{path} holds no step; the run was stopped before it recorded one")

    def node(self, level: int, index: int) -> bytes:
        """The hash of a node, read from the file."""
        self.num_lookups += 1
        return os.pread(self._tree.fileno(), _NODE_BYTES, node_place(level, index) * _NODE_BYTES)

    def step(self, step: int) -> StepRecord:
        """What is recorded of a step.

        Raises:
            BadInput: If the line is no record of that step, or not the one that was written.
        """
        assert 0 <= step < self.num_lines
        where = f"{self.run / RECORD_FILE}, line {step + 2}"
        self.num_lookups += 1
        line = os.pread(self._lines.fileno(), self.width, self.start + step * self.width).rstrip()
        found = build(StepRecord, parse(line, where), where)
        if found.step != step or len(found.units) != len(self.units):
            raise BadInput(f"{where}: expected step {step} and its units, found {short(found)}")
        if self.node(0, step) != leaf_hash(line):
            raise BadInput(f"{where} was changed after it was written: {TREE_FILE} knows another")
        return found

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def open_record(
    run: Path, units: Sequence[str], *, after_step: int | None = None
) -> Iterator[Callable[[StepRecord], None]]:
    """Yield what appends the record of a step; a line is on disk when it returns.

    Args:
        run: The folder.
        units: Names of the units.
        after_step: The step that a resumed run goes on from; None for a new run.

    Raises:
        BadInput: If the run that goes on was not recorded up to there.
    """
    if after_step is None:
        digest = "0" * 32
        longest: dict[str, Any] = dict.fromkeys(WORDS, -1.7976931348623157e308)
        longest |= {"key": 2 * digest, "rows": digest, "loss": digest}
        line = StepRecord(**longest, step=10**15, units=(digest,) * len(units)).to_line()
        width = len(line) + 1
        header = {"format": FORMAT, "units": list(units), "width": width}
        (run / TREE_FILE).write_bytes(b"")
        (run / RECORD_FILE).write_bytes(json.dumps(header).encode() + b"\n")
        peaks: list[bytes] = []
        num_lines = 0
    else:
        if not (run / RECORD_FILE).exists():
            raise BadInput(f"{run} was not recorded from its beginning; leave --record out")
        with Record(run) as found:
            num_lines, width = after_step + 1, found.width
            if found.units != tuple(units) or found.num_lines < num_lines:
                raise BadInput(
                    f"{run / RECORD_FILE} ends with step {found.num_lines - 1}, and the run goes "
                    f"on after step {after_step}; go on without it: --no-record"
                )
            peaks = [found.node(*each) for each in whole_nodes(num_lines)]
            size = found.start + num_lines * width
        os.truncate(run / RECORD_FILE, size)
        os.truncate(run / TREE_FILE, num_nodes(num_lines) * _NODE_BYTES)
    with (run / RECORD_FILE).open("ab") as lines, (run / TREE_FILE).open("ab") as tree:

        def append(record: StepRecord) -> None:
            nonlocal num_lines
            assert record.step == num_lines, (record.step, num_lines)
            line = record.to_line()
            lines.write(line.ljust(width - 1) + b"\n")
            lines.flush()
            nodes = [leaf_hash(line)]
            while num_lines >> (len(nodes) - 1) & 1:  # a subtree is whole with it
                nodes.append(hashlib.sha256(b"\1" + peaks.pop() + nodes[-1]).digest())
            tree.write(b"".join(nodes))
            tree.flush()
            peaks.append(nodes[-1])
            num_lines += 1

        yield append
