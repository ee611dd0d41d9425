"""A mutant's place: found by the name of its function, wherever that stands in the package."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "unison"

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class MutantError(ValueError):
    """The list of mutants does not fit the package."""


@dataclass(frozen=True)
class Mutant:
    """One fragment of one function, and what it is replaced by.

    Attributes:
        function: Qualified name, `function` or `Class.method`; in any module of the package.
        fragment: Source text that the function's body, without its docstring, holds exactly once.
        replacement: What stands there instead.
    """

    function: str
    fragment: str
    replacement: str

    def __str__(self) -> str:
        return f"{self.function}: {self.fragment} -> {self.replacement or 'nothing'}"


@dataclass(frozen=True)
class Place:
    """Where a fragment was found.

    Attributes:
        path: The file, relative to the root.
        start: Of the fragment, in characters of the file.
        line: Of the innermost statement around it that can have another one before it, from 0.
        indent: Of that statement.
    """

    path: Path
    start: int
    line: int
    indent: int


def place_of(mutant: Mutant, root: Path = ROOT) -> Place:
    """Return where a mutant's fragment is.

    Raises:
        MutantError: If it is not found exactly once.
    """
    package = root / PACKAGE.name
    functions = list(_functions(package).get(mutant.function, []))
    if not functions:
        raise MutantError(f"{mutant}: no such function or method in the package")
    found = [(path, node, at) for path, node in functions for at in _places(path, node, mutant)]
    if len(found) != 1:
        where = ", ".join(str(path.relative_to(root)) for path, _ in functions)
        raise MutantError(
            f"{mutant}: expected the fragment once in {where}, found it {len(found)}x"
        )
    path, node, start = found[0]
    statement = _statement(node, path.read_text(), start)
    return Place(path.relative_to(root), start, statement.lineno - 1, statement.col_offset)


def mutated(mutant: Mutant, place: Place, text: str) -> str:
    """Return a file's text with the mutation in it."""
    after = place.start + len(mutant.fragment)
    return text[: place.start] + mutant.replacement + text[after:]


@cache
def _functions(package: Path) -> dict[str, list[tuple[Path, ast.AST]]]:
    found: dict[str, list[tuple[Path, ast.AST]]] = {}
    for path in sorted(package.rglob("*.py")):
        for name, node in _named(ast.parse(path.read_text()), ""):
            found.setdefault(name, []).append((path, node))
    return found


def _named(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITIONS):
            name = f"{prefix}{child.name}"
            yield name, child
            if isinstance(child, ast.ClassDef):
                yield from _named(child, f"{name}.")
        elif isinstance(child, ast.stmt):
            yield from _named(child, prefix)


def _places(path: Path, node: ast.AST, mutant: Mutant) -> Iterator[int]:
    """Yield where the fragment begins in the body of a function, in characters of the file."""
    assert isinstance(node, DEFINITIONS)
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    lines = path.read_text().splitlines(keepends=True)
    at = sum(map(len, lines[: body[0].lineno - 1]))
    end = sum(map(len, lines[: node.end_lineno]))
    text = "".join(lines)
    while (at := text.find(mutant.fragment, at, end)) >= 0:
        yield at
        at += 1


def _statement(node: ast.AST, text: str, start: int) -> ast.stmt:
    """Return the innermost statement at a place before which another one may stand."""
    number, lines = text.count("\n", 0, start) + 1, text.splitlines()
    found = None
    for each in ast.walk(node):  # outer statements come before inner ones
        if not isinstance(each, ast.stmt) or each is node:
            continue
        is_around = each.lineno <= number <= (each.end_lineno or 0)
        # `elif` is an `if` of its own to the parser.
        if is_around and not lines[each.lineno - 1].lstrip().startswith("elif"):
            found = each
    assert isinstance(found, ast.stmt)
    return found
