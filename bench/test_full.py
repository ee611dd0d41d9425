"""Run the whole test suite, `full` tests included, and write what came of it.

`make test-full`, or `python -m bench.test_full [arguments of pytest]`. The result is
`bench/results/test-full-<commit>.json`; the exit code is pytest's.
"""

import collections
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from bench.runner import ROOT, short_commit, write_result

SLOWEST = 20


def main(arguments: list[str]) -> int:
    """Run pytest with these further arguments, write the result, return pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={junit}", *arguments]
        start = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        seconds = time.monotonic() - start
        # Absent when pytest was stopped before it could report: the exit code tells the rest.
        cases = read_cases(junit) if junit.exists() else []
    figures = {"exit_code": code, "seconds": round(seconds, 1), **summary(cases)}
    path = write_result(f"test-full-{short_commit()}", figures)
    print(f"wrote {path.relative_to(ROOT)}")
    return code


def read_cases(junit: Path) -> list[dict[str, Any]]:
    """Return name, outcome, seconds and `is_full` of every test in a junit file."""
    cases = []
    for case in ElementTree.parse(junit).iter("testcase"):
        tags = [child.tag for child in case]
        outcome = next((t for t in ("error", "failure", "skipped") if t in tags), "passed")
        properties = {p.get("name"): p.get("value") for p in case.iter("property")}
        cases.append(
            {
                "name": f"{case.get('classname')}::{case.get('name')}",
                "outcome": {"failure": "failed"}.get(outcome, outcome),
                "seconds": float(case.get("time") or 0),
                "is_full": properties.get("full") == "True",
            }
        )
    return cases


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return counts by outcome, the slowest tests, and the outcome of every `full` test."""
    slowest = sorted(cases, key=lambda case: -case["seconds"])[:SLOWEST]
    return {
        "counts": dict(collections.Counter(case["outcome"] for case in cases)),
        "slowest": {case["name"]: round(case["seconds"], 2) for case in slowest},
        "full": {case["name"]: case["outcome"] for case in cases if case["is_full"]},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
