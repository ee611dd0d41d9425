"""How many steps does K-FAC need to reach a loss, beside AdamW tuned on the same budget?

    python -m bench.kfac_steps                    # both tasks; writes bench/results/kfac-steps.json
    python -m bench.kfac_steps --task autoencoder

Two tasks: a 9-layer tanh autoencoder of drawn curves, and the `tiny` decoder on Python's own
source. What is fixed before anything runs:

* Both optimizers try the same number of settings, 8 (4 learning rates x 2 values of one more
  setting, beta2 or damping), on one seed, with the same warm-up and cosine; the lowest final loss
  wins. Everything else of K-FAC is its default, but for how often factors are updated and the
  betas of the grafted Adam, (0.9, 0.99).
* The target is the loss that the best AdamW run of that search ended with, times 1.01: what a tuned
  AdamW reaches in the given number of steps.
* Then both winners run on five fresh seeds, and the medians of the steps to the target are
  compared. Losses are those of held-out data; steps between two evaluations are interpolated. A
  run that never gets there counts as a whole run.
"""

import argparse
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unison
from bench.runner import write_result
from unison.data import RowDataset, build_rows, open_corpus, open_tokenizer
from unison.models import build, preset

RATES = (1e-3, 3e-3, 1e-2, 3e-2)
ADAMW = [{"lr": lr, "beta2": beta2} for lr, beta2 in itertools.product(RATES, (0.95, 0.99))]
KFAC = [{"lr": lr, "damping": damping} for lr, damping in itertools.product(RATES, (1e-3, 1e-4))]
assert len(ADAMW) == len(KFAC)
LIMITS = {"autoencoder": 0.75, "tiny": 0.92}  # the most of AdamW's steps
MARGIN = 1.01
TUNING_SEED = 0
SEEDS = (1, 2, 3, 4, 5)
WARMUP = 20


@dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
        name: Of the task.
        num_steps: Of a run.
        eval_every: Steps between two evaluations.
        update_every: Steps between two updates of the factors.
        likelihood: What the model's outputs mean.
        make: A model from a seed.
        draw: A batch (inputs, labels) from a generator.
        held_out: What losses are taken on.
        loss: Of outputs and labels.
    """

    name: str
    num_steps: int
    eval_every: int
    update_every: int
    likelihood: str
    make: Callable[[int], nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Run:
    """One run: held-out losses by step, and seconds per step without evaluations."""

    losses: list[tuple[int, float]]
    seconds: float

    @property
    def final(self) -> float:
        """The last loss."""
        return self.losses[-1][1]

    def steps_to(self, target: float) -> float | None:
        """The step at which the loss first is the target; None if it never is."""
        before = None
        for step, value in self.losses:
            if value <= target:
                if before is None:
                    return float(step)
                share = (before[1] - target) / (before[1] - value)
                return before[0] + share * (step - before[0])
            before = step, value
        return None


def train(task: Task, kind: str, seed: int, *, lr: float, **settings: Any) -> Run:
    model = task.make(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    kfac = None
    if kind == "adamw":
        betas = (0.9, settings["beta2"])
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, betas=betas, weight_decay=0.0
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        config = unison.KFACConfig(
            damping=settings["damping"],
            update_every=task.update_every,
            likelihood=task.likelihood,
            betas=(0.9, 0.99),
        )
        kfac = unison.KFAC(model, config)
    losses, seconds = [], 0.0
    for step in range(task.num_steps):
        rise = min(1.0, (step + 1) / WARMUP)
        for group in optimizer.param_groups:
            group["lr"] = lr * rise * 0.5 * (1 + math.cos(math.pi * step / task.num_steps))
        x, y = task.draw(generator)
        start = time.process_time()
        optimizer.zero_grad()
        outputs = model(x)
        if kfac is not None and kfac.wants_statistics:
            kfac.sample(outputs).backward(retain_graph=True)
        task.loss(outputs, y).backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()
        seconds += time.process_time() - start
        if (step + 1) % task.eval_every == 0:
            with torch.no_grad():
                value = task.loss(model(task.held_out[0]), task.held_out[1]).item()
            losses.append((step + 1, value if math.isfinite(value) else math.inf))
    if kfac is not None:
        kfac.detach()
    return Run(losses, seconds / task.num_steps)


# --- tasks ----------------------------------------------------------------------------------------

SIZES = (256, 160, 96, 64, 32, 12, 32, 64, 96, 256)  # nine matrices
SIDE = 16


def curves(num: int, seed: int) -> Tensor:  # [num, SIDE * SIDE]
    """Images of blurred quadratic curves through three random points."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.rand(num, 3, 2, generator=generator) * (SIDE - 1)
    t = torch.linspace(0, 1, 24)[None, :, None]
    points = (1 - t) ** 2 * ends[:, None, 0] + 2 * t * (1 - t) * ends[:, None, 1]
    points = points + t**2 * ends[:, None, 2]  # [num, 24, 2]
    pixels = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).float()
    images = [
        torch.exp(-(part[:, :, None] - pixels).square().sum(-1) / 2).amax(dim=1)
        for part in points.split(500)
    ]
    return torch.cat(images)


def autoencoder() -> Task:
    images = curves(20_000, seed=0)

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for d_in, d_out in itertools.pairwise(SIZES):
            layers += [nn.Linear(d_in, d_out), nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = images[torch.randint(0, len(images), (512,), generator=generator)]
        return x, x

    test = curves(1000, seed=1)
    return Task("autoencoder", 1000, 10, 5, "gaussian", make, draw, (test, test), F.mse_loss)


def tiny(folder: Path) -> Task:
    tokens, batch = 128, 8
    train_rows, eval_rows = build_rows(
        open_corpus("stdlib"), open_tokenizer("bytes"), row_length=tokens, directory=folder
    )
    chosen = list(range(0, len(eval_rows), len(eval_rows) // 48))[:48]
    test = eval_rows.rows(chosen)

    def make(seed: int) -> nn.Module:
        return build(preset("tiny", context_length=tokens), seed=seed)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return pair(train_rows, generator)

    def pair(rows: RowDataset, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        found = rows.rows(torch.randint(0, len(rows), (batch,), generator=generator).tolist())
        return found["input_ids"], found["labels"]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    held_out = test["input_ids"], test["labels"]
    return Task("tiny", 250, 5, 10, "categorical", make, draw, held_out, loss)


# --- the comparison -------------------------------------------------------------------------------


def tuned(
    task: Task, kind: str, grid: list[dict[str, float]]
) -> tuple[dict[str, float], Run, list[dict[str, float | None]]]:
    """The setting with the lowest final loss on the tuning seed, its run, and the whole search."""
    found = []
    for settings in grid:
        run = train(task, kind, TUNING_SEED, **settings)
        found.append((run.final, len(found), run))
        print(f"  {kind} {settings}: {run.final:.4g}, {run.seconds * 1e3:.0f} ms", flush=True)
    _, best, run = min(found)
    # JSON knows no infinity.
    search: list[dict[str, float | None]] = [
        {**settings, "final_loss": final if math.isfinite(final) else None}
        for settings, (final, _, _) in zip(grid, found, strict=True)
    ]
    return grid[best], run, search


def compare(task: Task, seeds: tuple[int, ...], size: int) -> dict[str, Any]:
    print(task.name, flush=True)
    settings, first, searches = {}, {}, {}
    for kind, grid in (("adamw", ADAMW), ("kfac", KFAC)):
        settings[kind], first[kind], searches[kind] = tuned(task, kind, grid[:size])
    target = first["adamw"].final * MARGIN
    steps: dict[str, list[float]] = {"adamw": [], "kfac": []}
    seconds: dict[str, list[float]] = {"adamw": [], "kfac": []}
    finals: dict[str, list[float]] = {"adamw": [], "kfac": []}
    missed = {"adamw": 0, "kfac": 0}
    for seed in seeds:
        for kind in steps:
            run = train(task, kind, seed, **settings[kind])
            found = run.steps_to(target)
            missed[kind] += found is None
            steps[kind].append(float(task.num_steps) if found is None else found)
            seconds[kind].append(run.seconds)
            finals[kind].append(run.final)
        print(
            f"  seed {seed}: steps {steps['adamw'][-1]:.0f} and {steps['kfac'][-1]:.0f}", flush=True
        )
    ratio = statistics.median(steps["kfac"]) / statistics.median(steps["adamw"])
    per_step = statistics.median(seconds["kfac"]) / statistics.median(seconds["adamw"])
    print(
        f"  steps to {target:.4g}: {ratio:.2f}x AdamW's (at most {LIMITS[task.name]}); a step "
        f"takes {per_step:.2f}x as long, the whole {ratio * per_step:.2f}x",
        flush=True,
    )
    return {
        "settings": settings,
        "num_settings_each": size,
        "search": searches,
        "target": target,
        "target_is": f"the final loss of the best of AdamW's settings, times {MARGIN}",
        "num_steps_of_a_run": task.num_steps,
        "steps": steps,
        "final_losses": finals,
        "seeds_that_missed": missed,
        "steps_ratio": ratio,
        "limit": LIMITS[task.name],
        "step_time_ratio": per_step,
        "time_to_target_ratio": ratio * per_step,
        "update_every": task.update_every,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=[*LIMITS, "all"], default="all")
    parser.add_argument("--settings", type=int, default=len(ADAMW), help="tried of each optimizer")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--out", default="kfac-steps", help="name of the result file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in LIMITS if options.task == "all" else (options.task,):
            task = autoencoder() if name == "autoencoder" else tiny(Path(folder) / "rows")
            figures[name] = compare(task, SEEDS[: options.seeds], options.settings)
    print(write_result(options.out, figures))


if __name__ == "__main__":
    main()
