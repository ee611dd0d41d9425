"""A plugin of pytest that tells which tests run which mutant's line, and one that chooses tests.

In a copy of the tree every mutant's statement has a call of `touch` before it. Ranks and programs
that tests start write as well: each process has a file of its own.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = "UNISON_MUTANTS_FOLDER"
"""Where processes write what they touched, and tests how long they took; unset in other runs."""
ORDER = "UNISON_MUTANTS_ORDER"
"""A JSON file of the tests to run, in order; unset where all are run that have no time yet."""
CALL = '__import__("tests.mutants.touched", fromlist=["touch"]).touch({!r})'

_seen: set[tuple[str, str]] = set()
_failed: set[str] = set()


def touch(key: str) -> None:
    """Write down that the running test came to a mutant's line."""
    test = _running_test()
    if (key, test) not in _seen:
        _seen.add((key, test))
        _write("touched", [key, test])


def _running_test() -> str:
    # Ranks are told by the harness: their environment is that of the first test with ranks.
    context: Any = sys.modules.get("tests.harness.context")
    name = context.current().name if context else ""
    return name or os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]


def _write(kind: str, entry: list[Any]) -> None:
    folder = os.environ.get(FOLDER)
    if folder is not None:
        with (Path(folder) / f"{kind}-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")


def read(folder: Path, kind: str) -> list[list[Any]]:
    """Return all entries of a kind, of all processes."""
    files = sorted(folder.glob(f"{kind}-*.jsonl"))
    lines = [line for path in files for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose tests, after conftest.py has marked the long ones by what whole files hold."""
    order, folder = os.environ.get(ORDER), os.environ.get(FOLDER)
    if order is not None:
        places = {test: i for i, test in enumerate(json.loads(Path(order).read_text()))}
        chosen = sorted(
            (item for item in items if item.nodeid in places),
            key=lambda item: places[item.nodeid],
        )
    else:
        known = {test for test, *_ in read(Path(folder), "tests")} if folder else set()
        chosen = [item for item in items if item.nodeid not in known]
    left_out = set(map(id, items)) - set(map(id, chosen))
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write down how long a test took, and whether it passed."""
    start = time.monotonic()
    found = yield
    seconds = round(time.monotonic() - start, 3)
    _write("tests", [item.nodeid, seconds, item.nodeid not in _failed])
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Remember which tests did not pass: skipped ones kill nothing, failing ones everything."""
    report: Any = yield
    if not report.passed:
        _failed.add(item.nodeid)
    return report
