"""The list of mutants fits the package, and the runner does with it what it says."""

import ast
import functools
from pathlib import Path

import pytest

from tests.mutants import __main__ as runner
from tests.mutants import places, touched
from tests.mutants.mutants import BY_PACKAGE, MUTANTS, SURVIVORS
from tests.mutants.places import ROOT, Mutant, MutantError, mutated, place_of

SOURCE = '''
class Counter:
    """Counts one + two."""

    def add(self, x):
        """Add one + two."""
        if x:
            return one + two
        elif one + x:
            return (
                x
                - one
            )


def add(x):
    return x + x
'''


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: f"{each.function}: {each.fragment}")
def test_every_mutant_is_found_once(mutant: Mutant):
    place = place_of(mutant)
    path = ROOT / place.path
    text = path.read_text()
    before = next(each for each in parsed(path).body if place.line < (each.end_lineno or 0))
    # The changed function or class alone is parsed: what stands behind it is as long as it was.
    num_behind = len(text.splitlines()) - (before.end_lineno or 0)
    lines = mutated(mutant, place, text).splitlines()
    decorators = getattr(before, "decorator_list", [])
    first = min(each.lineno for each in (before, *decorators))
    (after,) = ast.parse("\n".join(lines[first - 1 : len(lines) - num_behind])).body
    assert ast.dump(before) != ast.dump(after)


def test_the_list_is_long_enough_and_holds_nothing_twice():
    assert len(set(MUTANTS)) == len(MUTANTS) >= 80
    assert all(len(own) >= 10 for own in BY_PACKAGE.values())


def test_survivors_are_on_the_list():
    assert SURVIVORS.keys() <= {(each.function, each.fragment) for each in MUTANTS}
    assert len(SURVIVORS) <= 0.05 * len(MUTANTS)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "unison").mkdir()
    (tmp_path / "unison" / "counter.py").write_text(SOURCE)
    places._functions.cache_clear()
    return tmp_path


def test_a_place_is_found_past_docstrings(tree: Path):
    mutant = Mutant("Counter.add", "one + two", "one")
    place = place_of(mutant, tree)
    changed = mutated(mutant, place, SOURCE)
    assert changed == SOURCE.replace("return one + two", "return one")
    assert (place.path, place.indent) == (Path("unison/counter.py"), 12)


@pytest.mark.parametrize(
    ("fragment", "line"),
    [("one + two", "            return one"), ("- one", "            return (")],
)
def test_calls_go_before_the_whole_statement(tree: Path, fragment: str, line: str):
    place = place_of(Mutant("Counter.add", fragment, ""), tree)
    assert SOURCE.splitlines()[place.line].startswith(line)


def test_nothing_goes_between_if_and_elif(tree: Path):
    place = place_of(Mutant("Counter.add", "one + x", ""), tree)
    assert SOURCE.splitlines()[place.line] == "        if x:"


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (Mutant("subtract", "x", "y"), "no such function"),
        (Mutant("Counter.add", "three", "y"), "found it 0x"),
        (Mutant("add", "x", "y"), "found it 2x"),
    ],
)
def test_a_mutant_without_a_place_is_an_error(tree: Path, mutant: Mutant, message: str):
    with pytest.raises(MutantError, match=message):
        place_of(mutant, tree)


def test_marked_lines_tell_who_came_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    monkeypatch.setenv(touched.FOLDER, str(tmp_path))
    for _ in range(2):
        exec(touched.CALL.format("a key"))
    assert touched.read(tmp_path, "touched") == [["a key", request.node.nodeid]]


def test_tests_that_come_by_are_first_and_the_shortest_of_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "FEW_FILES", 1)
    mutant = next(each for each in MUTANTS if each.function == "flat")
    seconds = {
        "tests/clip/a.py::same_file": 0.1,
        "tests/clip/a.py::slow": 3.0,
        "tests/clip/a.py::quick": 1.0,
        "tests/cli/b.py::elsewhere": 0.5,
        "tests/clip/c.py::never": 0.1,
        "tests/clip/a.py::endless": 1000.0,
    }
    by = set(seconds) - {"tests/clip/a.py::same_file", "tests/clip/c.py::never"}
    batches = runner.batches_of(mutant, seconds, by)
    names = [[test.partition("::")[2] for test in batch] for batch in batches]
    assert names == [["quick", "slow"], ["elsewhere", "same_file"]]


def test_a_mutant_that_no_test_comes_by_is_not_run():
    assert runner.batches_of(MUTANTS[0], {"tests/ops/a.py::other": 1.0}, set()) == []
