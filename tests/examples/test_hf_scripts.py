"""Scripts of Opacus's and TRL's that differ from what those run by three lines."""

import contextlib
import io
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def differing(path: Path) -> list[tuple[str, str]]:
    """Lines that were changed (`# was: ...`) or added (`# new`), and what they were."""
    marked = []
    for line in path.read_text().splitlines():
        ours, is_changed, theirs = line.partition("  # was: ")
        if is_changed or line.endswith("  # new"):
            marked.append((ours, theirs))
    return marked


def test_an_opacus_script_with_lora_runs_with_three_lines_changed():
    pytest.importorskip("peft")
    script = EXAMPLES / "lora_script.py"
    assert len(differing(script)) == 3
    assert all(
        "opacus" in theirs or "BatchMemoryManager" in theirs for _, theirs in differing(script)
    )
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(script), run_name="__main__")
    assert output.getvalue().startswith("ε = ")
    assert 7.9 < float(output.getvalue().split()[-1]) <= 8.0


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
def test_a_script_of_trl_runs_with_three_lines_changed(tmp_path):
    pytest.importorskip("trl")
    script = EXAMPLES / "sft_script.py"
    assert len(differing(script)) == 3
    runpy.run_path(str(script))["main"](str(tmp_path))
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert (tmp_path / "ledger.jsonl").read_text().count('"commit"') == 4
