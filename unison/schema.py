"""JSON files read as the dataclasses that describe them: what is wrong is named by file and field.

A file may come from anybody, and half of it from a crash. Nothing in it is believed before its type
is known: `parse` bounds its size and depth, and `build` holds every value against a type hint. Then
the dataclass itself checks ranges, as it does for values from the command line.
"""

import dataclasses
import json
import math
import os
import reprlib
import stat
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from unison.errors import BadInput

T = TypeVar("T")

MAX_BYTES = 1 << 28  # of a JSON file; the largest of ours, a checkpoint's, has a few megabytes
_LARGEST_INT = 2**63  # integers of a file are below it: torch and numpy hold no larger ones
_MAX_DEPTH = 50  # of a value; what goes over it later may go by calls


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it, if it is one: a pipe would wait, and a device never end.

    Raises:
        OSError: If it cannot be opened.
        BadInput: If it is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadInput(f"{path} is no ordinary file; name the file itself")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return what a file holds.

    Raises:
        BadInput: If it cannot be read, is no file or has more bytes than any of ours.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read() if size <= most else b""
    except (OSError, ValueError) as error:  # the latter of a name with a NUL in it
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"{path} cannot be read: {reason}") from None
    if max(size, len(data)) > most:
        raise BadInput(f"{path} has more than {most:,} bytes, which no file of unison has")
    return data


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        BadInput: If there is none.
    """
    return parse(read_bytes(path), path)


def parse(data: bytes | str, source: object, *, constants: bool = True) -> Any:
    """Return the value that JSON text holds.

    Args:
        data: The text.
        source: Where it comes from, in words.
        constants: Whether NaN and Infinity are numbers.

    Raises:
        BadInput: If it is no JSON, nested too deeply, or names a field twice.
    """
    try:
        found = json.loads(
            data if isinstance(data, str) else data.decode(),
            object_pairs_hook=_without_repeats,
            parse_constant=None if constants else _refuse_constant,
        )
        level = [found]
        for _ in range(_MAX_DEPTH):
            level = [
                inner
                for each in level
                if isinstance(each, dict | list)
                for inner in (each.values() if isinstance(each, dict) else each)
            ]
        if level:
            raise RecursionError
        return found
    except BadInput as error:
        raise BadInput(f"{source} is damaged: {error}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{source} is damaged: it is no text") from None
    except RecursionError:
        raise BadInput(f"{source} is damaged: it is nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits, too
        raise BadInput(f"{source} is damaged: it is no whole JSON ({cut(str(error))})") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadInput("it holds a name twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise BadInput(f"{name} is no number")


def build(
    kind: Any,
    found: Any,
    source: object,
    *,
    field: str = "",
    made: Mapping[type, Callable[[Any], Any]] | None = None,
) -> Any:
    """Return a value of JSON as what a type hint says.

    >>> build(dict[str, int | None], {"a": 1, "b": None}, "it")
    {'a': 1, 'b': None}
    >>> build(tuple[int, ...], [1, True], "some.json", field="sizes")
    Traceback (most recent call last):
        ...
    unison.errors.BadInput: some.json: sizes[1] must be a whole number, found True

    Args:
        kind: A dataclass, a plain type, or a union, list, tuple or dictionary of such.
        found: The value.
        source: The file, for the message.
        field: Which part of the file it is; empty for all of it.
        made: For types that JSON does not have: how one is made of a value.

    Raises:
        BadInput: Naming the file and the field that has another type, is missing or not known, or
            that the dataclass refuses.
    """

    def inner(kind: Any, value: Any, name: str) -> Any:
        return build(kind, value, source, field=name, made=made)

    where = field or "it"
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if len(kinds) > 1:
        if found is None and NoneType in kinds:
            return None
        kinds = [each for each in kinds if each is not NoneType]
        fitting = [each for each in kinds if is_a(found, get_origin(each) or each)]
        return inner((fitting or kinds)[0], found, field)
    if made is not None and kind in made:
        try:
            return made[kind](found)  # type: ignore[index]
        except BadInput as error:
            raise BadInput(f"{source}: {where}: {error}") from None
    if dataclasses.is_dataclass(kind):
        _require(is_a(found, dict), where, "an object", found, source)
        hints = get_type_hints(kind)
        known = {each.name: each for each in dataclasses.fields(kind) if each.init}
        prefix = f"{field}." if field else ""
        for name in found:
            if name not in known:
                raise BadInput(
                    f"{source}: {where} has a field {short(name)}, unknown to this unison"
                )
        for name, each in known.items():
            defaults = (each.default, each.default_factory)
            if name not in found and all(d is dataclasses.MISSING for d in defaults):
                raise BadInput(f"{source}: {prefix}{name} is missing")
        values = {name: inner(hints[name], value, prefix + name) for name, value in found.items()}
        try:
            return kind(**values)  # type: ignore[operator]
        except BadInput as error:
            raise BadInput(f"{source}: {prefix and prefix[:-1] + ': '}{cut(str(error))}") from None
    origin, inside = get_origin(kind) or kind, get_args(kind)
    if origin is dict:
        _require(is_a(found, dict), where, "an object", found, source)
        value_kind = inside[1] if inside else Any
        return {
            name: inner(value_kind, each, f"{field}[{short(name)}]") for name, each in found.items()
        }
    if origin in (list, tuple):
        _require(is_a(found, list), where, "a list", found, source)
        each_kind = inside[0] if inside else Any
        return origin(inner(each_kind, each, f"{field}[{i}]") for i, each in enumerate(found))
    if kind is Any:
        return found
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    _require(is_a(found, kind), where, words.get(kind, str(kind)), found, source)
    return float(found) if kind is float else found


def _require(holds: bool, where: str, what: str, found: Any, source: object) -> None:
    if not holds:
        raise BadInput(f"{source}: {where} must be {what}, found {short(found)}")


def is_a(value: Any, kind: Any, *, largest: float = math.inf) -> bool:
    """Whether a value of JSON is of a type; numbers are no booleans, and of a size that counts."""
    if kind is int or kind is float:
        is_number = type(value) is int or (kind is float and type(value) is float)
        # NaN is not above any bound, nor below one.
        return (
            is_number
            and (largest == math.inf or abs(value) <= largest)
            and (type(value) is float or abs(value) < _LARGEST_INT)
        )
    return kind is Any or type(value) is kind


def short(value: Any) -> str:
    """A value in an error message, which a hostile one must not fill."""
    return cut(reprlib.repr(value))


def cut(text: str) -> str:
    """A text that comes from a file, on one line of bounded length."""
    text = " ".join(text.split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= 300 else f"{text[:300]}…"


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The names whose values are not the same in both."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def version_of(package: str) -> str | None:
    """Return the version of an installed package, for files to say; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
