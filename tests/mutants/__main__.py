"""Mutate central lines, one at a time, and see whether the tests that run them fail.

`python -m tests.mutants [--resume] [--only PATTERN] [--minutes 60]`; `make mutants`, and a part of
`make test-full`. First all tests of `make test` run once over a copy of the tree in which mutants'
lines tell who came by. Then each mutant runs, in a copy of its own, the tests that came by,
shortest first, and after them the others of the same files. It is killed by the first failure, or
by taking many times as long. The result is `bench/results/mutants.json`, written after each.
"""

import argparse
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from bench.runner import write_result
from tests.mutants import touched
from tests.mutants.mutants import BY_PACKAGE, MUTANTS, SURVIVORS
from tests.mutants.places import ROOT, Mutant, mutated, place_of

RESULT = ROOT / "bench" / "results" / "mutants.json"
COVERAGE = ROOT / "build" / "mutants"
"""Which tests come by which mutant: thrown away by a run without --resume."""
PYTEST = ("-q", "-m", "not full", "-p", "no:cacheprovider", "-p", "tests.mutants.touched")
MOST_SECONDS = 150.0
"""Of tests that one mutant is run against: the shortest of those that come by."""
TOO_LONG = "more than"
FEW_FILES = 6
FILE_SECONDS = 0.5
"""What it takes to collect a file."""
NUM_WORKERS = 2


@dataclass(frozen=True)
class Outcome:
    """What came of one mutant.

    Attributes:
        function: The mutant's, as are `fragment` and `replacement`.
        outcome: `killed`, `survived`, `uncovered` if no test comes to its line, or `unknown` if the
            machine was too slow to tell.
        by: The test that failed, or the time limit.
        num_tests: Tests that it was run against, at most.
        seconds: How long that took.
        reason: Of a survivor: why it may live.
    """

    function: str
    fragment: str
    replacement: str
    outcome: str
    by: str
    num_tests: int
    seconds: float
    reason: str


def main(arguments: list[str]) -> int:
    """Run the mutants; return 1 if fewer than 95 % of them were killed, and 2 if time ran out."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--resume", action="store_true", help="keep what is known already")
    parser.add_argument("--only", default="*", help="functions' names to run, also known ones")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no mutant after that")
    parser.add_argument("--workers", type=int, default=NUM_WORKERS, help="processes at a time")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    known = read_outcomes() if options.resume else {}
    if not options.resume:
        shutil.rmtree(COVERAGE, ignore_errors=True)
    chosen = [
        each
        for each in MUTANTS
        if fnmatch(each.function, options.only) and (options.only != "*" or each not in known)
    ]
    chosen.sort(key=place_in_package)  # packages take turns: time may run out
    cover(end - time.monotonic(), options.workers)
    tests, covering = read_coverage()
    with tempfile.TemporaryDirectory(prefix="unison-mutants-") as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(options.workers):
            trees.put(copy_tree(Path(folder) / str(number)))

        def run(mutant: Mutant) -> None:
            if time.monotonic() < end:
                tree = trees.get()
                known[mutant] = run_mutant(mutant, tree, tests, covering.get(key_of(mutant), set()))
                trees.put(tree)
                write(known)
                print(
                    f"{known[mutant].outcome:9} {known[mutant].seconds:6.1f} s  {mutant}",
                    flush=True,
                )

        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(run, chosen))
    write(known)
    counts = Counter(known[each].outcome if each in known else "not run" for each in MUTANTS)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if counts["not run"]:
        return 2
    return int(counts["killed"] < 0.95 * len(MUTANTS))


# ---- which tests come by -------------------------------------------------------------------------


def cover(seconds: float, num_workers: int) -> None:
    """Run all tests that have no time yet, where every mutant's line says that it was run."""
    COVERAGE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unison-mutants-") as folder:
        tree = copy_tree(Path(folder) / "tree")
        done, state = COVERAGE / "done", digest_of(tree)
        if done.exists() and done.read_text() == state:
            return
        mark(tree)
        command = [
            sys.executable,
            "-m",
            "pytest",
            *PYTEST,
            "--timeout",
            "300",
            "--ignore=tests/mutants",
        ]
        if num_workers > 1:
            command += ["-n", str(num_workers), "--dist", "loadfile"]
        code, _ = run_command(command, tree, seconds, {touched.FOLDER: str(COVERAGE)})
    if code is not None:
        done.write_text(state)


def digest_of(tree: Path) -> str:
    """Return a hash of all Python files of a tree."""
    digest = hashlib.sha256()
    for path in sorted(tree.rglob("*.py")):
        digest.update(f"{path.relative_to(tree)}\0{path.read_text()}\0".encode())
    return digest.hexdigest()


def mark(tree: Path) -> None:
    """Put a call of `touch` before the statement of every mutant."""
    lines_of: dict[Path, dict[tuple[int, int], list[str]]] = {}
    for mutant in MUTANTS:
        place = place_of(mutant)
        calls = lines_of.setdefault(place.path, {}).setdefault((place.line, place.indent), [])
        calls.append(" " * place.indent + touched.CALL.format(key_of(mutant)) + "\n")
    for path, places in lines_of.items():
        lines = (tree / path).read_text().splitlines(keepends=True)
        for (line, _), calls in sorted(places.items(), reverse=True):
            lines[line:line] = calls
        (tree / path).write_text("".join(lines))


def read_coverage() -> tuple[dict[str, float], dict[str, set[str]]]:
    """Return the seconds of every test that passed, and which of them come by which mutant."""
    tests = {test: took for test, took, passed in touched.read(COVERAGE, "tests") if passed}
    covering: dict[str, set[str]] = {}
    for key, test in touched.read(COVERAGE, "touched"):
        if test in tests:
            covering.setdefault(key, set()).add(test)
    return tests, covering


def key_of(mutant: Mutant) -> str:
    """Return what a mutant is called in files: the same for all mutants of one fragment."""
    return f"{mutant.function} {mutant.fragment}"


def place_in_package(mutant: Mutant) -> int:
    """Return how many mutants of the same package are listed before."""
    return BY_PACKAGE[package_of(mutant)].index(astuple(mutant))


def package_of(mutant: Mutant) -> str:
    """Return the package under which a mutant is listed."""
    return next(name for name, own in BY_PACKAGE.items() if astuple(mutant) in own)


# ---- one mutant ----------------------------------------------------------------------------------


def run_mutant(mutant: Mutant, tree: Path, tests: dict[str, float], by: set[str]) -> Outcome:
    """Mutate a copy of the tree, run the tests that come by, and mend the copy."""
    batches = batches_of(mutant, tests, by)
    place = place_of(mutant)
    path, start = tree / place.path, time.monotonic()
    outcome, killer = "survived" if batches else "uncovered", ""
    path.write_text(mutated(mutant, place, path.read_text()))
    # Python tells compiled files by seconds and sizes: no two mutants may have the same.
    os.utime(path, (MUTANTS.index(mutant), MUTANTS.index(mutant)))
    for batch in batches:
        limit = 60 + 4 * sum(tests[each] for each in batch)
        outcome, killer = run_tests(tree, batch, limit)
        if killer.startswith(TOO_LONG):
            # Only if the machine is not to blame: without the mutant half of the time must do.
            shutil.copy2(ROOT / place.path, path)
            if run_tests(tree, batch, limit / 2)[0] == "killed":
                outcome = "unknown"
        if outcome != "survived":
            break
    shutil.copy2(ROOT / place.path, path)
    return Outcome(
        **asdict(mutant),
        outcome=outcome,
        by=killer,
        num_tests=sum(map(len, batches)),
        seconds=round(time.monotonic() - start, 1),
        reason=SURVIVORS.get((mutant.function, mutant.fragment), "") if not killer else "",
    )


def batches_of(mutant: Mutant, tests: dict[str, float], by: set[str]) -> list[list[str]]:
    """Return the tests for a mutant in order, in two batches which pytest collects one by one.

    The first is of few files, the package's own before others: most mutants need no more. Then all
    that come by; and at last the others of their files, since a fixture that several tests share
    comes by in the first of them only.
    """
    folders = tuple(f"{folder}/{package_of(mutant)}/" for folder in ("tests", "unison"))
    seconds_of: dict[str, float] = defaultdict(float)
    for test in by:
        seconds_of[file_of(test)] += tests[test]
    files = sorted(seconds_of, key=lambda each: (not each.startswith(folders), seconds_of[each]))
    first = set(files[:FEW_FILES])
    own = [test for test in tests if file_of(test) in seconds_of]
    own.sort(key=lambda each: (each not in by, file_of(each) not in first, tests[each]))
    batches: list[list[str]] = [[], []]
    total, collected = 0.0, set()
    for test in own:
        cost = tests[test] + FILE_SECONDS * (file_of(test) not in collected)
        if not collected or total + cost <= MOST_SECONDS:
            batches[test not in by or file_of(test) not in first].append(test)
            collected.add(file_of(test))
            total += cost
    return [batch for batch in batches if batch]


def file_of(test: str) -> str:
    """Return the file of a test."""
    return test.partition("::")[0]


def run_tests(tree: Path, order: list[str], limit: float) -> tuple[str, str]:
    """Run tests in order until one fails; return the outcome, and by what it came."""
    (tree / "order.json").write_text(json.dumps(order))
    files = list(dict.fromkeys(map(file_of, order)))
    command = [sys.executable, "-m", "pytest", *PYTEST, "-x", "--timeout", "120", *files]
    code, output = run_command(command, tree, limit, {touched.ORDER: "order.json"})
    if code is None:
        return "killed", f"{TOO_LONG} {limit:.0f} s"
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return "survived", ""
    if code == pytest.ExitCode.USAGE_ERROR:
        raise RuntimeError(f"pytest cannot be run:\n{output[-2000:]}")
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return "killed", found[0] if found else f"exit code {code}"


def run_command(
    command: list[str], tree: Path, seconds: float, variables: dict[str, str]
) -> tuple[int | None, str]:
    """Run a command in a copy of the tree; return its exit code, None if it took too long."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", **variables}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # ranks are in the same session
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        return code, log.read()


def copy_tree(target: Path) -> Path:
    """Copy what git tracks, or would, without what it ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


# ---- the result ----------------------------------------------------------------------------------


def read_outcomes() -> dict[Mutant, Outcome]:
    """Return what an earlier run has found of mutants that are still on the list."""
    if not RESULT.exists():
        return {}
    found = [Outcome(**each) for each in json.loads(RESULT.read_text())["figures"]["mutants"]]
    known = {Mutant(each.function, each.fragment, each.replacement): each for each in found}
    return {mutant: known[mutant] for mutant in MUTANTS if mutant in known}


def write(known: dict[Mutant, Outcome]) -> None:
    """Write all that is known, in the order of the list."""
    outcomes = [known[mutant] for mutant in MUTANTS if mutant in known]
    counts = Counter(each.outcome for each in outcomes)
    figures: dict[str, Any] = {
        "listed": len(MUTANTS),
        **counts,
        "killed_share": round(counts["killed"] / max(1, len(outcomes)), 4),
        "seconds": round(sum(each.seconds for each in outcomes), 1),
        "mutants": [asdict(each) for each in outcomes],
    }
    write_result(RESULT.stem, figures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
