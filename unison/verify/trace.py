"""What a training run computed, step by step and rung by rung, small enough to send to somebody.

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

import functools
import itertools
import json
import math
import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from unison import check
from unison.errors import BadInput
from unison.parallel import MakeSums, ShardedParam, adapter_of, curvatures, private_trainings
from unison.schema import open_regular, parse, short
from unison.shard import PerGranule, current_plan, fingerprint, running_granule, units_of
from unison.torch_internals import canonical_name

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


def _hashed(index: np.ndarray, bits: np.ndarray, *, is_linear: bool) -> np.ndarray:
    """One word per element, to be added up: [elements] uint64 each."""
    salt = _mixed(index * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))
    return bits * (salt | np.uint64(1)) if is_linear else _mixed(salt ^ bits)


_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _bits(value: Tensor) -> np.ndarray:  # [elements]
    """The bits of a tensor's elements, flat and on the host; of complex ones, of their parts."""
    flat = value.detach()
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    flat = flat.cpu().contiguous().reshape(-1)
    size = flat.element_size()
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).numpy()


def _words(bits: np.ndarray, *, is_linear: bool) -> np.ndarray:
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
    bits = _bits(value)
    length = max(1, -(-index.numel // NUM_BLOCKS))
    offset = np.uint64(salt * 0xD1342543DE82EF95 & _MASK)
    for begin in range(0, len(bits), _CHUNK):
        chunk = bits[begin : begin + _CHUNK]
        where = index.numbers(begin, begin + len(chunk))
        words = _hashed(where + offset, _words(chunk, is_linear=is_linear), is_linear=is_linear)
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
class Entry:
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
        made: dict[str, Any] = {
            "step": self.step,
            "rung": self.rung,
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "blocks": [f"{each:x}" for each in self.blocks],
            "values": [float(each).hex() for each in self.values],
            "norm": float(self.norm).hex(),
        }
        return made | {flag: True for flag in ("disagree", "repeats") if getattr(self, flag)}

    @classmethod
    def of_json(cls, found: Any, source: str) -> "Entry":
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
class _Part:
    """What one rank knows of an entry, by what it is of: a row's number, or elements.

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


def _merged(step: int, rung: str, name: str, parts: Sequence[_Part], count: int) -> Entry:
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
        found = _rows_in_blocks(blocks, first.num_rows)
        flat = {place: each for of_row in values.values() for place, each in of_row.items()}
        norm, shape = math.sqrt(sum(squares.values())), (first.num_rows, *first.shape)
    return Entry(
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


def _alike(rung: str, of_all: Sequence[Mapping[tuple[str, str], _Part]]) -> set[str]:
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


def _rows_in_blocks(digests: Mapping[int, int], num_rows: int) -> list[int]:
    """A digest per row, or for runs of neighbours where there are many."""
    found = [0] * min(MAX_ROWS, num_rows)
    for row, each in digests.items():
        place = row * len(found) // num_rows
        found[place] = (
            found[place] + (each * (2 * row + 1) if num_rows > MAX_ROWS else each)
        ) & _MASK
    return found


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
        entries: By `Entry.key`, in the order in which they were computed.
    """

    source: str
    num_ranks: int
    is_private: bool
    conditions: Mapping[str, Any]
    notes: Mapping[str, Any]
    entries: Mapping[tuple[int, int, str], Entry]

    @classmethod
    def open(cls, file: str | Path) -> "Trace":
        """Read a trace.

        Raises:
            BadInput: If the file holds none, or a damaged one.
        """
        entries: dict[tuple[int, int, str], Entry] = {}
        try:
            with open_regular(Path(file)) as lines:
                header = _header(lines.readline(MAX_LINE), str(file))
                number = 1
                while line := lines.readline(MAX_LINE):
                    number += 1
                    source = f"{file}, line {number}"
                    if not line.endswith(b"\n"):
                        raise BadInput(f"{source} is cut off; the run that wrote it has not ended")
                    entry = Entry.of_json(parse(line, source), source)
                    if entry.key in entries:
                        raise BadInput(f"{source} repeats {entry.rung} of {short(entry.name)}")
                    entries[entry.key] = entry
        except OSError as error:
            raise BadInput(f"{file} cannot be read: {error.strerror}") from None
        return cls(str(file), *header, entries)

    @property
    def num_steps(self) -> int:
        """Steps that it holds."""
        return 1 + max((step for step, _, _ in self.entries), default=-1)


def _header(line: bytes, file: str) -> tuple[int, bool, dict[str, Any], dict[str, Any]]:
    found = parse(line, file) if line.startswith(b"{") else None
    if not isinstance(found, dict) or found.get("unison_trace") != FORMAT:
        raise BadInput(
            f"{file} is no trace; unison.verify.trace(file, model, optimizer) writes one around a "
            "training loop, and `unison verify model --out FOLDER` leaves some"
        )
    kinds = {"num_ranks": int, "is_private": bool, "conditions": dict, "notes": dict}
    wrong = [key for key, kind in kinds.items() if type(found.get(key)) is not kind]
    if wrong or not 0 < found["num_ranks"] < 1 << 31:
        raise BadInput(f"{file} is damaged: its first line has no {wrong or ['num_ranks']}")
    return found["num_ranks"], found["is_private"], found["conditions"], found["notes"]


# ---- recording -----------------------------------------------------------------------------------


@contextmanager
def trace(
    file: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    num_values: int = NUM_VALUES,
    keep: Sequence[tuple[str, str]] = (),
    activations: bool = True,
    notes: Mapping[str, Any] | None = None,
) -> Iterator["Tracer"]:
    """Write down what a training loop computes; see [Note: a trace]. Every rank must enter it.

    ```
    with unison.verify.trace("run.trace", model, optimizer) as tracer:
        for x, y in loader:
            optimizer.zero_grad()
            loss = tracer.loss(criterion(model(x), y))
            loss.backward()
            optimizer.step()
    ```

    The loop, the model and the optimizer are the user's: plain, sharded by unison or by torch,
    private (enter it after `make_private`) or with `unison.KFAC`. Gradients before their reduction
    are those of private training and of `unison.fully_shard`. A trace of private training holds
    per-sample norms and sums without noise: no ε covers it.

    Args:
        file: Where to write; the first rank does.
        model: What is trained.
        optimizer: Its steps are the trace's steps.
        num_values: Values that are kept of each tensor, at fixed places.
        keep: (rung, name) of quantities of which all values are kept.
        activations: Whether modules' outputs are looked at; inside compiled code they cannot be.
        notes: What to say of the run; values that JSON can hold.

    Raises:
        BadInput: If the file cannot be written, or the model is traced already.
    """
    check.positive(num_values=num_values)
    if model in _traced:
        raise BadInput("the model is traced already; leave one of the two `trace` blocks out")
    tracer = Tracer(model, optimizer, num_values=num_values, keep=keep)
    _traced.add(model)
    try:
        tracer._begin(Path(file), notes or {}, activations=activations)
        yield tracer
    finally:
        _traced.discard(model)
        tracer._end()


_traced: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Tracer:
    """Looks at a training loop from hooks of its model and its optimizer; see `trace`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        num_values: int,
        keep: Sequence[tuple[str, str]],
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._num_values, self._keep = num_values, set(keep)
        trained = {id(each) for each in model.parameters() if each.requires_grad}
        self._private = _who_trains(trained, private_trainings)
        self._kfac = _who_trains(trained, curvatures)
        self._adapter = self._private.owner if self._private else adapter_of(model)
        self._params = list(self._adapter.params)
        self._by_piece = {id(each.parameter): each for each in self._params}
        self._by_name = {each.name: each for each in self._params}
        self._parts: dict[tuple[str, str], _Part] = {}
        self._calls: Counter[tuple[str, int]] = Counter()
        self._loss: float | None = None
        self._step, self._handles = 0, []
        self._totals: dict[str, Tensor] = {}
        self._divisor = 1.0
        self._file: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tracer":
        """Copies of the module, which are run to try it out, are seen by the same one."""
        return self

    def loss(self, loss: Tensor) -> Tensor:
        """Note the loss of a pass; returns it. Passes of one step are added up.

        Args:
            loss: A single number: the mean over the global batch, or this pass's share of it.
        """
        with _unseen():
            self._loss = (self._loss or 0.0) + float(loss.detach())
        return loss

    # --- begin and end ---------------------------------------------------------------------------

    def _begin(self, file: Path, notes: Mapping[str, Any], *, activations: bool) -> None:
        ranks = self._adapter.everyone
        error = None
        if ranks.rank == 0:
            try:
                self._file = file.open("w")
            except OSError as failed:
                error = f"{file} cannot be written: {failed.strerror}"
        if error := _of_first(error, ranks):
            raise BadInput(error)
        self._write(
            {
                "unison_trace": FORMAT,
                "num_ranks": ranks.size,
                "is_private": self._private is not None,
                "conditions": fingerprint(device=self._adapter.device),
                "notes": dict(notes),
            }
        )
        root = self._adapter.module
        self._sees_activations = activations
        for name, module in root.named_modules() if activations else [("", root)]:
            hook = functools.partial(self._see_module, canonical_name(name))
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        self._handles += [
            root.register_forward_pre_hook(self._see_call, prepend=True),
            self._optimizer.register_step_pre_hook(self._see_gradients),
            self._optimizer.register_step_post_hook(self._see_step),
        ]
        for unit in units_of(root):
            unit.observer = self
        if self._private is not None:
            self._private.observer = self
        self._see_parameters("initial parameters", others=True)
        self._flush()

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        for unit in units_of(self._adapter.module):
            unit.observer = None
        if self._private is not None:
            self._private.observer = None
        if self._file is not None:
            self._file.close()

    def _write(self, made: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(made) + "\n")

    # --- hooks -----------------------------------------------------------------------------------

    def _is_looking(self, module: nn.Module) -> bool:
        """Whether a forward pass is one of training, and neither a trial nor a recompute."""
        if torch.compiler.is_compiling():
            return False
        is_aside = any(each is not None and each.is_aside for each in (self._private, self._kfac))
        is_recompute = torch._C._current_graph_task_id() != -1
        return not is_aside and not is_recompute and module.training and torch.is_grad_enabled()

    def _see_call(self, module: nn.Module, args: tuple) -> None:
        if self._is_looking(module):
            self._calls.clear()

    def _see_module(
        self, name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
    ) -> None:
        if not self._is_looking(module):
            return
        if module is self._adapter.module:
            for number, leaf in enumerate(tree_leaves((args, kwargs))):
                if isinstance(leaf, Tensor):
                    self._see_rows("inputs", f"input {number}", leaf)
        if not self._sees_activations:
            return
        granule = running_granule()
        count = self._calls[name, granule or 0]
        self._calls[name, granule or 0] += 1
        title = (name or "model") + (f" (call {count + 1})" if count else "")
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for number, leaf in enumerate(tensors):
            self._see_rows("activations", title + (f"[{number}]" if number else ""), leaf, granule)

    def _see_gradients(self, *_: Any) -> None:
        """The optimizer is about to step: see what it finds."""
        with _unseen():
            for number, group in enumerate(self._optimizer.param_groups):
                for key in ("lr", "betas", "eps", "momentum", "weight_decay"):
                    if key in group:
                        name = f"{key} of group {number}"
                        self._see_whole("settings", name, _number(group[key]))
            for owned in self._params:
                if owned.parameter.grad is None:
                    continue
                self._see_part("gradients", owned, owned.gradient())

    def _see_step(self, *_: Any) -> None:
        """The optimizer has stepped, if there was a gradient: the logical batch was complete."""
        has_gradients = any(owned.parameter.grad is not None for owned in self._params)
        if not has_gradients:
            return
        with _unseen():
            if self._loss is not None:
                value = torch.tensor(self._loss, dtype=torch.float32)
                self._see_whole("loss", "loss", value)
            if self._private is not None:
                self._see_values("per-sample norms", "norm", self._private.norms())
            if self._kfac is not None:
                for layer in self._kfac.state_dict()["layers"]:
                    for key, each in layer["tensors"].items():
                        if isinstance(each, Tensor) and each.is_floating_point():
                            name = f"{layer['layer']['name']}: {key}"
                            is_factor = not key.startswith("graft")
                            rung = "curvature" if is_factor else "optimizer state"
                            self._see_whole(rung, name, each)
            for owned in self._params:
                for key, value in self._optimizer.state.get(owned.parameter, {}).items():
                    if isinstance(value, Tensor) and value.dim():
                        part = value.to_local() if hasattr(value, "to_local") else value
                        self._see_part("optimizer state", owned, part, f"{owned.name}: {key}")
            self._see_parameters("updated parameters")
        self._flush()
        self._step, self._loss = self._step + 1, None

    # --- `GradientObserver` of units -------------------------------------------------------------

    def see_gradient(self, piece: nn.Parameter, granule: int, gradient: Tensor) -> None:
        """See this rank's gradient of a whole parameter, of one granule or of its rows."""
        owned = self._by_piece[id(piece)]
        with _unseen():
            index = Elements.all(owned.numel)
            # Granules are leaves of one tree, whoever computes them: their digests add up.
            digests = block_digests(gradient, index, salt=granule + 1)
            self._add_summand(owned, index, gradient, digests)

    def see_sum(self, piece: nn.Parameter, part: Tensor) -> None:
        """See this rank's part of the sum over ranks, divided [elements]."""
        with _unseen():
            self._see_part("gradients after reduction", self._by_piece[id(piece)], part)

    # --- `StepObserver` of private training ------------------------------------------------------

    def see_pass(self, sums: Any) -> MakeSums:
        """See a pass whose coefficients are known; returns what makes its sums."""
        with _unseen():
            for part in sums.parts.values():
                ids = torch.full((part.rows.num_rows,), -1)
                ids[part.rows.is_real] = part.rows.positions
                alike: dict[int, str] = {}
                for name, coefficients in part.coefficients.items():
                    alike.setdefault(id(coefficients), name)
                for name, values in part.coefficients.items():
                    if alike[id(values)] == name:
                        title = name if len(alike) > 1 else "coefficient"
                        self._add_rows("coefficients", title, values, ids, sums.batch.logical_size)
        return _SeenSums(self, sums)

    def see_totals(
        self, totals: Sequence[tuple[ShardedParam, Tensor]], grid: Any, terms: Any
    ) -> None:
        """See the sums over all ranks, before they get noise; integers on the grid."""
        self._divisor = terms.divisor
        release = terms.release
        applied = {
            "noise multiplier σ": release.noise_std / release.max_grad_norm,
            "clip norm C": release.max_grad_norm,
            "divisor": terms.divisor,
        }
        with _unseen():
            for name, value in applied.items():
                self._see_whole("settings", name, _number(value))
            for owned, total in totals:
                values = self._totals[owned.name] = grid.values(total).reshape(-1)
                digests = block_digests(total, Elements.of(owned), is_linear=True)
                self._see_part("gradients after reduction", owned, values, digests=digests)

    def see_noisy(
        self, gradients: Iterable[tuple[ShardedParam, Tensor]]
    ) -> Iterator[tuple[ShardedParam, Tensor]]:
        """See private gradients as they are made; what was added to the sums is noise."""
        for owned, gradient in gradients:
            with _unseen():
                total = self._totals.pop(owned.name, None)
                if total is not None:
                    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                    noise = local.detach().reshape(-1).double() * self._divisor - total
                    self._see_part("noise", owned, noise)
            yield owned, gradient

    # --- what is kept ----------------------------------------------------------------------------

    def _part(self, rung: str, name: str, shape: Sequence[int], like: Tensor) -> _Part:
        if (rung, name) not in self._parts:
            dtype = str(like.dtype).removeprefix("torch.")
            self._parts[rung, name] = _Part(tuple(shape), dtype)
        return self._parts[rung, name]

    def _count(self, rung: str, name: str) -> int:
        return 1 << 40 if (rung, name) in self._keep else self._num_values

    def _add_values(
        self, rung: str, name: str, part: _Part, key: Any, index: Elements, value: Tensor
    ) -> None:
        """Add the values at the places that are kept to those that are there."""
        wanted = positions(index.numel, self._count(rung, name))
        here, places = index.places(wanted)
        chosen = value.detach().reshape(-1)[torch.from_numpy(places.astype(np.int64))]
        values = part.values.setdefault(key, {})
        for place, each in zip(here.tolist(), chosen.double().tolist(), strict=True):
            values[place] = values.get(place, 0.0) + each

    def _add_summand(
        self, owned: ShardedParam, index: Elements, value: Tensor, digests: np.ndarray
    ) -> None:
        """Add what this rank adds to a sum over ranks."""
        rung, name = "gradients before reduction", owned.name
        part = self._part(rung, name, owned.shape, value)
        # Ranks that add up: one group for each place on other axes.
        group = self._adapter.ranks.group
        key = ("summand", group and min(dist.get_process_group_ranks(group)), index)
        part.blocks[key] = part.blocks.get(key, 0) + digests
        self._add_values(rung, name, part, key, index, value)

    def _see_part(
        self,
        rung: str,
        owned: ShardedParam,
        value: Tensor,
        name: str | None = None,
        digests: np.ndarray | None = None,
    ) -> None:
        """See this rank's part of something that lies as a parameter does."""
        index = Elements.of(owned)
        self._see_elements(rung, name or owned.name, owned.shape, index, value, digests)

    def _see_whole(self, rung: str, name: str, value: Tensor) -> None:
        self._see_elements(rung, name, tuple(value.shape), Elements.all(value.numel()), value)

    def _see_elements(
        self,
        rung: str,
        name: str,
        shape: Sequence[int],
        index: Elements,
        value: Tensor,
        digests: np.ndarray | None = None,
    ) -> None:
        part, key = self._part(rung, name, shape, value), ("part", None, index)
        part.blocks[key] = block_digests(value, index) if digests is None else digests
        part.squares[key] = float(value.detach().double().square().sum())
        self._add_values(rung, name, part, key, index, value)
        head = value.detach().reshape(-1)[:LENGTH_OF_HEAD].double().tolist()
        if rung in DRAWN and len(set(head)) == LENGTH_OF_HEAD:
            part.heads[key] = head

    def _see_parameters(self, rung: str, *, others: bool = False) -> None:
        with _unseen():
            for owned in self._params:
                self._see_part(rung, owned, owned.local.detach())
            if not others:
                return
            root = self._adapter.module
            for path, value in root.named_parameters():
                if not value.requires_grad:
                    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                    self._see_whole(rung, canonical_name(path), whole)
            for path, value in root.named_buffers():
                if self._adapter.everyone.rank == 0 and value.numel():
                    self._see_whole(rung, canonical_name(path), value)

    def _see_values(self, rung: str, name: str, values: Tensor) -> None:
        """See one value per sample of the logical batch, which every rank has."""
        if self._adapter.everyone.rank == 0:
            self._add_rows(rung, name, values, torch.arange(len(values)), len(values))

    def _see_rows(self, rung: str, name: str, value: Tensor, granule: int | None = None) -> None:
        """See a tensor of which each row is a sample's, if it is one."""
        plan = current_plan()
        with _unseen():
            if isinstance(value, PerGranule):
                pieces = list(enumerate(value.parts))
            else:
                own = value.to_local() if hasattr(value, "to_local") else value
                pieces = [(granule, own.as_subclass(Tensor))]
            for index, piece in pieces:
                if plan is None:
                    ranks = self._adapter.ranks
                    count = len(piece) if piece.dim() else 1
                    ids, total = torch.arange(count) + ranks.rank * count, count * ranks.size
                else:
                    ids, total = plan.sample_ids, plan.num_samples
                    if plan.is_granular:
                        if index is None:  # made of no sample: a table of positions
                            continue
                        ids = ids.split(plan.granule)[index]
                self._add_rows(rung, name, piece, ids, total)

    def _add_rows(self, rung: str, name: str, value: Tensor, ids: Tensor, num_rows: int) -> None:
        """Add rows, each a sample's [len(ids), ...]; other shapes are of no sample and left out."""
        if value.dim() == 0 or not len(ids) or value.shape[0] % len(ids) or not num_rows:
            return
        rows = value.detach().reshape(len(ids), -1)
        width = rows.shape[1]
        shape = tuple(value.shape[1:])
        shape = shape if value.shape[0] == len(ids) else (value.shape[0] // len(ids), *shape)
        part = self._part(rung, name, shape, value)
        part.num_rows = num_rows
        wanted = positions(num_rows * width, self._count(rung, name))
        bits = _bits(rows).reshape(len(ids), -1)
        inside = np.arange(bits.shape[1], dtype=np.uint64)
        for place, row in enumerate(ids.tolist()):
            if row < 0:  # padding
                continue
            words = _hashed(inside, _words(bits[place], is_linear=False), is_linear=False)
            part.blocks[row] = int(words.sum(dtype=np.uint64))
            kept = np.flatnonzero((row * width <= wanted) & (wanted < (row + 1) * width))
            chosen = rows[place][torch.from_numpy(wanted[kept] - row * width)]
            part.values[row] = dict(zip(kept.tolist(), chosen.double().tolist(), strict=True))
            part.squares[row] = float(rows[place].double().square().sum())

    def _flush(self) -> None:
        """Bring the parts of all ranks together, and write the step; a collective."""
        ranks = self._adapter.everyone
        parts, self._parts = self._parts, {}
        of_all: list[Any] | None = [parts]
        if ranks.size > 1:
            of_all = [None] * ranks.size if ranks.rank == 0 else None
            dist.gather_object(parts, of_all, group=ranks.group, group_dst=0)
        if ranks.rank != 0:
            return
        assert of_all is not None
        names = dict.fromkeys(name for each in of_all for name in each)
        alike = {rung: _alike(rung, of_all) for rung in DRAWN}
        for rung, name in sorted(names, key=lambda each: RUNGS.index(each[0])):
            found = [each[rung, name] for each in of_all if (rung, name) in each]
            entry = _merged(self._step, rung, name, found, self._count(rung, name))
            entry.repeats = name in alike.get(rung, ())
            self._write(entry.as_json())
        self._file.flush()
        os.fsync(self._file.fileno())


class _SeenSums:
    """Makes clipped sums, and lets a tracer see this rank's summands."""

    def __init__(self, tracer: Tracer, sums: Any) -> None:
        self._tracer, self._sums = tracer, sums

    @property
    def dtype(self) -> torch.dtype:
        """Of the sums."""
        return self._sums.dtype

    def __call__(
        self, granule: int, names: Sequence[str], before: Sequence[Tensor | None] | None = None
    ) -> list[Tensor | None]:
        """See `MakeSums`."""
        old = [None if each is None else each.clone() for each in before or [None] * len(names)]
        made = self._sums(granule, names, before)
        spacing = self._sums.grid.spacing
        tracer = self._tracer
        with _unseen():
            for name, total, earlier in zip(names, made, old, strict=True):
                if total is None:
                    continue
                own = total if earlier is None else total - earlier.view_as(total)
                owned = tracer._by_name[name]
                index = Elements.of(owned, is_whole=True)
                digests = block_digests(own, index, is_linear=True)
                tracer._add_summand(owned, index, own.double() * spacing, digests)
        return made


def _who_trains(trained: set[int], trainers: Any) -> Any:
    """Return who among these trains any of the parameters; None if nobody does."""
    for each in trainers:
        if any(id(parameter) in trained for parameter in each.trained):
            return each
    return None


def _number(value: Any) -> Tensor:
    """A setting as a tensor: a number, or a pair of them."""
    return torch.as_tensor(value, dtype=torch.float64).detach().cpu()


def _of_first(value: Any, ranks: Any) -> Any:
    """The first rank's value, on every rank; a collective."""
    if ranks.size == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, group=ranks.group, group_src=0)
    return held[0]


@contextmanager
def _unseen() -> Iterator[None]:
    """Let nobody who follows torch's functions see what is done here."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield
