"""The script that was written for Opacus runs, and would still run with Opacus."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "opacus_script.py"
PEERS = ROOT / "bench" / "peers" / "site"
OURS = "from unison import PrivacyEngine  # was: from opacus import PrivacyEngine"


def opacus_text() -> str:
    """The script as it was: the comment on the import line in place of that line."""
    text = SCRIPT.read_text()
    assert text.count(OURS) == 1
    return text.replace(OURS, OURS.partition("# was: ")[2])


def epsilon_in(output: str) -> float:
    found = re.search(r"accuracy (\S+) at ε = (\S+), δ", output)
    assert found
    assert float(found[1]) > 0.4  # a guess is right one time in ten
    return float(found[2])


def test_the_script_runs():
    pytest.importorskip("dp_accounting")  # a run-time dependency; a GPU machine may lack it
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    losses = [
        float(loss) for loss in re.findall(r"loss of the last batch (\S+)", output.getvalue())
    ]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert 2 < epsilon_in(output.getvalue()) < 3


def test_only_the_import_differs_from_what_opacus_runs():
    before, after = opacus_text().splitlines(), SCRIPT.read_text().splitlines()
    differing = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert differing == [("from opacus import PrivacyEngine", OURS)]
    assert "unison" not in opacus_text()


@pytest.mark.full
@pytest.mark.skipif(not (PEERS / "opacus").is_dir(), reason="Opacus is not installed beside us")
def test_opacus_runs_it_and_counts_the_same_epsilon(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(opacus_text())
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env={**os.environ, "PYTHONPATH": str(PEERS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ours = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300, check=True
    )
    assert epsilon_in(done.stdout) == pytest.approx(epsilon_in(ours.stdout), rel=0.02)
