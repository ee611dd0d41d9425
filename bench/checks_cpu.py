"""What do the checks of module and loss cost? `python -m bench.checks_cpu [--before COMMIT]`.

Two ratios, each measured side by side in one run: a thousand private steps of `tiny` with all
checks against the same without rechecks, and the first step beside that of an earlier commit, each
in a process of its own.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from bench.runner import ROOT, ratio_of, write_result

BEFORE = "f8a98ac"
ROWS, TOKENS, RECORDS = 16, 64, 1600
CHUNK = 50  # steps that are timed together

FIRST_STEP = """
import time, warnings, torch, unison
from unison.models import build
from torch.utils.data import DataLoader, TensorDataset
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
ids = torch.randint(0, 256, ({records}, {tokens} + 1), generator=torch.Generator().manual_seed(0))
module = build("tiny", seed=0)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
engine = unison.PrivacyEngine(secure_noise=False)
module, optimizer, loader = engine.make_private(
    module=module, optimizer=optimizer, data_loader=DataLoader(TensorDataset(ids), {rows}),
    noise_multiplier=1.0, max_grad_norm=1.0, seed=0)
batches = iter(loader)
(rows,) = next(batches)
begin = time.perf_counter()
unison.per_sample_loss(module(rows[:, :-1]), rows[:, 1:]).mean().backward()
optimizer.step()
print(time.perf_counter() - begin)
"""


class Run:
    """A private run that can be advanced in chunks."""

    def __init__(self, *, recheck: bool) -> None:
        from torch.utils.data import DataLoader, TensorDataset

        import unison
        from unison.models import build

        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 256, (RECORDS, TOKENS + 1), generator=generator)
        model = build("tiny", seed=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.engine = unison.PrivacyEngine(secure_noise=False)
            self.module, self.optimizer, self.loader = self.engine.make_private(
                module=model,
                optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
                data_loader=DataLoader(TensorDataset(ids), ROWS),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                recheck=recheck,
                seed=0,
            )
        self._batches: Any = iter(self.loader)
        self._loss = unison.per_sample_loss

    def advance(self, steps: int) -> float:
        """Take some steps, and return how long they took."""
        begin = time.perf_counter()
        for _ in range(steps):
            try:
                (rows,) = next(self._batches)
            except StopIteration:
                self._batches = iter(self.loader)
                (rows,) = next(self._batches)
            self.optimizer.zero_grad()
            self._loss(self.module(rows[:, :-1]), rows[:, 1:]).mean().backward()
            self.optimizer.step()
        return time.perf_counter() - begin


def first_step(folder: Path) -> float:
    """Time the first private step of the package in a folder, in a process of its own."""
    code = FIRST_STEP.format(records=RECORDS, tokens=TOKENS, rows=ROWS)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def compare_first_steps(before: str, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        git = ["git", "-C", str(ROOT)]
        subprocess.run([*git, "worktree", "add", "--detach", str(tree), before], check=True)
        try:
            pairs = [(first_step(ROOT), first_step(tree)) for _ in range(repeats + 1)][1:]
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)
    return ratio_of([a for a, _ in pairs], [b for _, b in pairs]).figures()


def compare_steps(num_steps: int) -> dict[str, Any]:
    """All checks against none after the first step; the sums over all steps, and their ratio."""
    with_checks, without = Run(recheck=True), Run(recheck=False)
    times: dict[str, list[float]] = {"with": [], "without": []}
    for chunk in range(num_steps // CHUNK):
        order = [("with", with_checks), ("without", without)]
        for name, run in order if chunk % 2 == 0 else reversed(order):
            times[name].append(run.advance(CHUNK))
    totals = {name: sum(each) for name, each in times.items()}
    return {
        "steps": num_steps,
        "ratio": totals["with"] / totals["without"],
        "seconds_with": totals["with"],
        "seconds_without": totals["without"],
        "chunks_with": times["with"],
        "chunks_without": times["without"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default=BEFORE, help="commit whose first step to compare with")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = compare_steps(options.steps)
    print(f"{options.steps} steps, all checks / without rechecks: {steps['ratio']:.4f}")
    first = compare_first_steps(options.before, options.repeats)
    print(f"first step / that of {options.before}: {first['ratio']:.3f}")
    figures = {"steps": steps, "first_step": first | {"before": options.before}}
    print(write_result("checks-cpu", figures))


if __name__ == "__main__":
    main()
