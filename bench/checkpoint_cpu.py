"""What do checkpoints in the background cost?

    python -m bench.checkpoint_cpu           # writes bench/results/checkpoint-cpu.json

Two gloo ranks train a sharded model of GPT-2's shape with AdamW. Blocks of five steps begin with a
checkpoint, which must be on the disk when the block ends, or have none. They are timed in pairs,
every other one in the opposite order: by the clock, and by what both ranks' threads took of the
processors, which others on the machine disturb less.
"""

import argparse
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import unison
from bench.runner import ratio_of, write_result
from unison.models import ModelConfig, build
from unison.train import run_on_local_ranks
from unison.train.world import join_world

CONFIG = ModelConfig(
    family="gpt2",
    vocab_size=4096,
    context_length=128,
    d_model=256,
    num_layers=6,
    num_heads=4,
    d_ff=1024,
    tie_head=True,
)
STEPS = 5  # from one checkpoint to the next
LIMIT = 1.10  # that the ratio to steps without checkpoints must stay under


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    rounds: int
    batch_size: int
    folder: str


def measure(settings: Settings) -> dict[bool, list[tuple[float, float]]]:
    """Run on every rank; by whether a block has a checkpoint: seconds, those of processors."""
    with join_world("cpu") as world:
        torch.set_num_threads(1)
        model = unison.auto_shard(build(CONFIG))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        folder = Path(settings.folder) / "checkpoint"
        shape = (settings.batch_size // world.size, CONFIG.context_length + 1)
        rows = torch.randint(0, CONFIG.vocab_size, shape)

        def block(*, has_checkpoint: bool) -> tuple[float, float]:
            dist.barrier()
            started, cpu, written = time.perf_counter(), time.process_time(), None
            if has_checkpoint:
                written = unison.save_checkpoint(folder, model, optimizer, background=group)
            for _ in range(STEPS):
                unison.per_sample_loss(model(rows[:, :-1]), rows[:, 1:]).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if written is not None:
                written.result()
            dist.barrier()
            took = time.perf_counter() - started
            return took, world.sum(torch.tensor(time.process_time() - cpu)).item()

        seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for number in range(-1, settings.rounds):
            for kind in (True, False) if number % 2 else (False, True):
                took = block(has_checkpoint=kind)
                if number >= 0:
                    seconds[kind].append(took)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        settings = Settings(folder=folder, **vars(arguments))
        seconds = run_on_local_ranks(measure, settings, num_ranks=2)
        checkpoint = Path(folder) / "checkpoint"
        num_bytes = sum(path.stat().st_size for path in checkpoint.iterdir())
    ratios = {}
    for index, name in enumerate(("clock", "processors")):
        pairs = ([each[index] for each in seconds[kind]] for kind in (True, False))
        ratios[name] = asdict(ratio_of(*pairs))
        ratios[name] |= {"limit": LIMIT, "is_within": ratios[name]["ratio"] <= LIMIT}
    figures = {
        "settings": vars(arguments) | {"steps_per_checkpoint": STEPS, "num_ranks": 2},
        "model": asdict(CONFIG),
        "checkpoint_bytes": num_bytes,
        "ratios": ratios,
        "blocks": {"with": seconds[True], "without": seconds[False]},
    }
    print(write_result("checkpoint-cpu", figures).read_text())


if __name__ == "__main__":
    main()
