"""What one rank remembers of its collectives: each call, where it was made, and a digest of all.

The training thread makes a `CollectiveCall`, which is cheap: shapes, options and code positions as
they are. Text, line numbers and digests are made of it later, by the watching thread.
"""

import functools
import hashlib
import os
import time
from collections import deque
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one tensor."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_SHARD = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_RNG = os.path.join(os.path.dirname(os.path.dirname(_SHARD)), "rng") + os.sep
_INTERNAL = (_TORCH, _SHARD, _RNG)
_C10D = os.path.join(_TORCH, "distributed", "distributed_c10d.py")
_FUNCTIONAL = os.path.join(_TORCH, "distributed", "_functional_collectives.py")
_DEPTH = 4

# Ranks may pass tensors of other shapes than their peers to these; their dtypes must still agree.
UNEVEN = frozenset({"all_to_all", "all_to_all_single", "gather", "scatter"})
# Of these, only the list that has one entry per rank must agree: (which argument, kind).
_LISTED = {"all_gather": 0, "reduce_scatter": 1}

RECENT = 1024
"""Calls per group that are kept with their call sites."""
_DENSE = 64
_SPARSE = 4096


@dataclass(slots=True)
class CollectiveCall:
    """One collective as it was issued; nothing in it keeps a tensor alive."""

    group: str
    number: int
    kind: str
    specs: tuple[tuple[Spec, ...], ...]  # one entry per argument that holds tensors
    options: Any
    api: str | None
    stack: tuple[tuple[CodeType, int], ...]
    waits_on_host: bool

    @property
    def text(self) -> str:
        """The call as a reader would write it: `all_reduce(float32[3, 4], op=SUM)`."""
        parts = [_tensors(argument) for argument in self.specs]
        op, root = reduction(self.options), root_of(self.options)
        parts += [f"op={op}"] if op is not None else []
        parts += [f"root={root}"] if root is not None else []
        return f"{self.api or self.kind}({', '.join(parts)})"

    @property
    def signature(self) -> bytes:
        """What must be equal on all ranks."""
        return _signature(self.kind, self.specs, reduction(self.options), root_of(self.options))


@functools.lru_cache(maxsize=4096)
def _signature(kind: str, specs: tuple, op: str | None, root: int | None) -> bytes:
    dtypes = sorted({str(dtype) for argument in specs for _, dtype in argument})
    if kind in UNEVEN:
        compared: Any = None
    elif kind in _LISTED:
        compared = specs[_LISTED[kind]]
    else:
        compared = specs
    return repr((kind, dtypes, compared, op, root)).encode()


def specs_of(arguments: tuple[Any, ...]) -> tuple[tuple[tuple[Spec, ...], ...], str]:
    """Return the shapes and dtypes in a collective's arguments, and the type of their device.

    The device is an empty string where there is no tensor.
    """
    found, device = [], ""
    for argument in arguments:
        if isinstance(argument, Tensor):
            tensors = (argument,)
        elif isinstance(argument, list | tuple) and argument:
            # [tensor, ...], or [[tensor, ...]] with one list per device; lists of sizes have none.
            tensors = argument[0] if isinstance(argument[0], list | tuple) else argument
        else:
            continue
        if tensors and isinstance(tensors[0], Tensor):
            found.append(tuple([(t.shape, t.dtype) for t in tensors]))
            device = tensors[0].device.type
    return tuple(found), device


def _tensors(specs: tuple[Spec, ...]) -> str:
    shown = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in specs]
    if len(set(shown)) == 1 and len(shown) > 1:
        return f"{len(shown)} × {shown[0]}"
    return ", ".join(shown[:4]) + (f", … {len(shown)} tensors" if len(shown) > 4 else "")


def reduction(options: Any) -> str | None:
    """Return the name of the reduce operation in a collective's options, if it has one."""
    op = getattr(options, "reduceOp", None)
    if op is None:
        return None
    return getattr(op, "op", op).name


def root_of(options: Any) -> int | None:
    """Return the source or destination in a collective's options, if it has one."""
    root = options.get("root_rank") if isinstance(options, dict) else None
    return getattr(options, "rootRank", root)


# ---- where ------------------------------------------------------------------------------------


def caller(frame: FrameType | None) -> tuple[str | None, tuple[tuple[CodeType, int], ...]]:
    """Return the torch function a user called, and the user's own frames, innermost first.

    Frames of torch and of `unison.shard` are skipped; positions are left unresolved, because a
    line number costs more than a training step can spare.
    """
    api = None
    outermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        if frame.f_code.co_filename in (_C10D, _FUNCTIONAL):
            api = frame.f_code.co_name
        outermost, frame = frame, frame.f_back
    frame = frame or outermost
    stack = []
    while frame is not None and len(stack) < _DEPTH:
        stack.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return api, tuple(stack)


def lines_of(stack: tuple[tuple[CodeType, int], ...]) -> list[str]:
    """Return `file:line in function` for each position."""
    return [
        f"{_shown(code.co_filename)}:{_line(code, at)} in {code.co_qualname}" for code, at in stack
    ]


def _line(code: CodeType, at: int) -> int:
    for start, end, line in code.co_lines():
        if start <= at < end and line is not None:
            return line
    return code.co_firstlineno


def _shown(path: str) -> str:
    try:
        return path.removeprefix(os.getcwd() + os.sep)
    except FileNotFoundError:  # the folder was removed under us
        return path


# ---- the digest of all calls ------------------------------------------------------------------


@dataclass
class Journal:
    """The calls of one group: a chained digest, and the last calls in full.

    `marks` holds the chain's value after recent calls, densely for the last ones and sparsely
    before. Two ranks whose chains agree at one number have agreed on every call up to it.
    """

    ranks: list[int]
    last: int = 0
    chain: str = ""
    marks: dict[int, str] = field(default_factory=dict)
    recent: deque[CollectiveCall] = field(default_factory=lambda: deque(maxlen=RECENT))
    at: float = 0.0

    def add(self, call: CollectiveCall) -> None:
        """Append a call."""
        digest = hashlib.blake2b(self.chain.encode() + call.signature, digest_size=8)
        self.chain = digest.hexdigest()
        self.last = call.number
        self.marks[call.number] = self.chain
        self.recent.append(call)
        self.at = time.monotonic()
        if (call.number - _DENSE) % _DENSE:
            self.marks.pop(call.number - _DENSE, None)
        self.marks.pop(call.number - _SPARSE, None)

    def summary(self) -> dict[str, Any]:
        """Return what every heartbeat says of this group."""
        call = self.recent[-1]
        return {
            "ranks": self.ranks,
            "last": self.last,
            "marks": {str(number): chain for number, chain in self.marks.items()},
            "call": call.text,
            "stack": lines_of(call.stack),
            "age": time.monotonic() - self.at,
        }

    def detail(self) -> dict[str, tuple[str, list[str], str]]:
        """Return text, call sites and signature of the recent calls, by number."""
        return {
            str(call.number): (call.text, lines_of(call.stack), call.signature.decode())
            for call in self.recent
        }
