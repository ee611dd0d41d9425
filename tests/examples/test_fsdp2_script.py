"""The script that was written for FSDP2 runs, and would still run with FSDP2."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "fsdp2_script.py"
OURS = "from unison import fully_shard  # was: from torch.distributed.fsdp import fully_shard"


def fsdp2_text() -> str:
    """The script as it was: the comment on the import line in place of that line."""
    text = SCRIPT.read_text()
    assert text.count(OURS) == 1
    return text.replace(OURS, OURS.partition("# was: ")[2])


def run(script: Path, out: Path, num_ranks: int, steps: int) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of the lines that it prints."""
    code = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    code += ["--nproc-per-node", str(num_ranks), str(script), "--out", str(out)]
    done = subprocess.run(
        [*code, "--steps", str(steps), "--backend", "eager"],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",  # two ranks want two GPUs, or none
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"step (\d+): loss (\S+), gradient norm (\S+)", done.stdout)
    return [(int(step), float(loss), float(norm)) for step, loss, norm in found]


def test_the_script_runs_and_goes_on_with_another_number_of_ranks(tmp_path):
    first = run(SCRIPT, tmp_path / "run", 2, 6)
    assert [step for step, _, _ in first] == [0, 5]
    assert first[1][1] < first[0][1] - 0.5
    again = run(SCRIPT, tmp_path / "run", 1, 2)
    assert [step for step, _, _ in again] == [6, 7]
    assert again[0][1] < first[0][1] - 0.5


def test_only_the_import_differs_from_what_fsdp2_runs():
    before, after = fsdp2_text().splitlines(), SCRIPT.read_text().splitlines()
    differing = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert differing == [("from torch.distributed.fsdp import fully_shard", OURS)]


@pytest.mark.full
def test_fsdp2_runs_it_with_the_same_losses(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(fsdp2_text())
    theirs = run(script, tmp_path / "theirs", 2, 6)
    ours = run(SCRIPT, tmp_path / "ours", 2, 6)
    for (_, loss, norm), (_, own_loss, own_norm) in zip(theirs, ours, strict=True):
        assert own_loss == pytest.approx(loss, abs=2e-2)
        assert own_norm == pytest.approx(norm, rel=2e-2)
