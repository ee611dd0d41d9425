"""Inputs that nobody would write: odd values, and sound files of which something was changed.

`SEED` and the files of `corpus` decide all of them. A corpus file is one that once ended in a
traceback; it is tried in every run.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEED = 27
CORPUS = Path(__file__).parent / "corpus"

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]

NUMBERS = [0, -1, 1, 2**31, 2**53, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e-320, 1e308]
NUMBERS += [float("nan"), float("inf"), float("-inf")]
WORDS = ["", " ", "x", "inf", "1", "0x10", "ε", "\0", "\n", "a" * 5000, "../../etc/passwd", "/"]
WORDS += ["%s%n{0}", "$(touch hacked)", "__import__('os')", "c:\\", "-", "--help", "\ud800"]
VALUES = [*NUMBERS, *WORDS, None, True, False, [], {}, [1], {"a": 1}, [[]], DEEP]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Every place in a value of JSON, the value itself first."""
    found = [path]
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            found += places(each, (*path, key))
    return found


def with_other_value(value: Any, rng: random.Random) -> Any:
    """The value with something odd in one place, or without that place, or with one more."""
    value = json.loads(json.dumps(value))
    path = rng.choice(places(value))
    if not path:
        return rng.choice(VALUES)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    match rng.randrange(4):
        case 0:
            del inner[path[-1]]
        case 1 if isinstance(inner, dict):
            inner[rng.choice(["", "extra", "__class__", "../x", "\ud800"])] = rng.choice(VALUES)
        case _:
            inner[path[-1]] = rng.choice(VALUES)
    return value


def changed_json(data: bytes, rng: random.Random) -> bytes:
    """A JSON file, or one of the lines of one, with another value."""
    lines = data.split(b"\n")
    try:
        json.loads(data)
        where = slice(None)
    except ValueError:
        number = rng.randrange(max(len(lines) - 1, 1))
        where = slice(number, number + 1)
    found = with_other_value(json.loads(b"\n".join(lines[where])), rng)
    lines[where] = [json.dumps(found).encode(errors="surrogatepass")]
    return b"\n".join(lines) + b"\n"


def flipped(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        if found:
            found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def spliced(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    stop = min(len(data), start + rng.choice([0, 1, 7, 100]))
    inserted = rng.choice(
        [b"", b"\0", b"\xff\xfe", b"{", b"]", b'"', b"\n", b"9" * 6000, b"[" * 100_000]
    )
    return data[:start] + inserted + data[stop:]


def alien(data: bytes, rng: random.Random) -> bytes:
    # A pickle that would leave a file behind, if anybody loaded it.
    pickled = b"cos\nsystem\n(S'touch hacked'\ntR."
    length = (2**63).to_bytes(8, "little")
    return rng.choice([b"", b"\0" * 64, b"{}", b"[]", b"null", b"1", pickled, length + data[8:]])


def damage_file(path: Path, rng: random.Random) -> None:
    """Change one file of a folder, or put something else in its place."""
    kinds: list[Callable] = [flipped, truncated, spliced, alien]
    if path.suffix in (".json", ".jsonl"):
        kinds += [changed_json] * 6
    data = path.read_bytes()
    if rng.random() < 0.06:
        path.unlink()
        match rng.randrange(5):
            case 0:
                path.mkdir()
            case 1:
                path.symlink_to(path.name)  # to itself
            case 2:
                path.symlink_to("/dev/zero")
            case 3:
                os.mkfifo(path)
            case _:
                pass
        return
    path.write_bytes(rng.choice(kinds)(data, rng))


def copy_of(folder: Path, to: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(folder, to, symlinks=True))
