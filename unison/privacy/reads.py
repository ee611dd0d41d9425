"""Values that leave torch for Python: can the code between there and `backward` branch on them?

`float(loss)` returns a plain number that nobody can follow. Printing it is harmless; `if` it is
compared, other rows decide which loss is sent back, and the program that was written down looks as
if nothing had happened. So the bytecode that runs between the read and `backward` is looked at: if
it has no conditional jump, no truth of the value can matter.
"""

import dis
import itertools
from functools import lru_cache
from types import CodeType, FrameType
from typing import NamedTuple


class Position(NamedTuple):
    """Where a frame is.

    Attributes:
        frame: The identity of the frame, which is not kept.
        code: Its code.
        offset: Of the instruction that runs.
        line: Its line, for messages.
    """

    frame: int
    code: CodeType
    offset: int
    line: str


def positions(frame: FrameType | None, skipped: tuple[str, ...]) -> list[Position]:
    """Where the user's code is, outermost frame first.

    Args:
        frame: The innermost frame.
        skipped: Folders whose code is not the user's.
    """
    found = []
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(skipped):
            line = f"{code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
            found.append(Position(id(frame), code, frame.f_lasti, line))
        frame = frame.f_back
    return found[::-1]


def may_branch(read: list[Position], backward: list[Position]) -> bool:
    """Whether code between a read and `backward` may depend on the truth of what was read.

    Args:
        read: Where the user's code was when a value left torch.
        backward: Where it is when gradients are to flow.
    """
    common = 0
    for a, b in zip(read, backward, strict=False):
        if a.frame != b.frame or a.code is not b.code:
            break
        common += 1
    # Functions that have returned since: to their ends.
    if any(_has_jump(each.code, each.offset, None) for each in read[common:]):
        return True
    if not common:
        return True
    here = read[common - 1]
    return _has_jump(here.code, here.offset, backward[common - 1].offset)


@lru_cache(maxsize=256)
def _instructions(code: CodeType) -> dict[int, dis.Instruction]:
    return {each.offset: each for each in dis.get_instructions(code)}


@lru_cache(maxsize=256)
def _has_jump(code: CodeType, start: int, stop: int | None) -> bool:
    """Whether a conditional jump can be reached from an offset without passing another."""
    instructions = _instructions(code)
    order = sorted(instructions)
    following = dict(itertools.pairwise(order))
    waiting, seen = [following.get(start)], set()
    while waiting:
        offset = waiting.pop()
        if offset is None or offset == stop or offset in seen:
            continue
        seen.add(offset)
        name, target = instructions[offset].opname, instructions[offset].argval
        if "JUMP" in name and "IF" in name:
            ways = [way for way in (target, following.get(offset)) if not _raises(code, way)]
            if len(ways) > 1:
                return True
            waiting.extend(ways)  # an assertion: whoever does not go on sends nothing back
            continue
        if name.startswith(("RETURN", "RERAISE", "RAISE")):
            continue
        if "JUMP" in name or name in ("FOR_ITER", "SEND"):
            waiting.append(target)
        if "JUMP" not in name:
            waiting.append(following.get(offset))
    return False


@lru_cache(maxsize=256)
def _raises(code: CodeType, start: int | None) -> bool:
    """Whether code ends in an exception from here on, whatever happens."""
    instructions = _instructions(code)
    for offset in sorted(instructions):
        if start is None or offset < start:
            continue
        name = instructions[offset].opname
        if name.startswith(("RAISE", "RERAISE")):
            return True
        if "JUMP" in name or name.startswith("RETURN") or name in ("FOR_ITER", "SEND"):
            return False
    return False
