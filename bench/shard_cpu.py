"""Is sharding as fast as FSDP2, and what does the ordered reducer cost?

    python -m bench.shard_cpu                # writes bench/results/shard-cpu.json

Two gloo ranks, a 6-layer GPT of width 512, AdamW. In each round every contender takes one whole
step (forward, backward, optimizer), in an order that rotates; ratios are of the steps of one round.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import unison
from bench.runner import ratio_of, write_result
from unison.models import ModelConfig, build
from unison.train import run_on_local_ranks
from unison.train.world import join_world

CONFIG = ModelConfig(
    family="gpt2",
    vocab_size=4096,
    context_length=128,
    d_model=512,
    num_layers=6,
    num_heads=8,
    d_ff=2048,
    tie_head=True,
)
# Upper 95 % bounds that the ratios to FSDP2 must stay under.
LIMITS = {"fast": 0.90, "ordered": 1.00, "guarded": 1.05}
STEPS_PER_BLOCK = 2  # of the guard: it is entered and left around a block, outside the timing


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    rounds: int
    batch_size: int
    granule: int
    num_ranks: int


def batch_of(settings: Settings, step: int) -> Tensor:  # [samples, tokens + 1]
    generator = torch.Generator().manual_seed(step)
    shape = (settings.batch_size, CONFIG.context_length + 1)
    return torch.randint(0, CONFIG.vocab_size, shape, generator=generator)


def losses_of(model: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return unison.per_sample_loss(model(rows[:, :-1]), rows[:, 1:])


def local_step(model: nn.Module, settings: Settings) -> Callable[[int], None]:
    """A step on the rank's own samples with a local mean, as DDP and FSDP2 users write it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(number: int) -> None:
        rows = batch_of(settings, number).chunk(settings.num_ranks)[dist.get_rank()]
        losses_of(model, rows).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def dealt_step(model: nn.Module, settings: Settings) -> Callable[[int], None]:
    """A step on a dealt batch with the mean over the global batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(number: int) -> None:
        for rows in unison.deal([batch_of(settings, number)], granule=settings.granule):
            unison.batch_mean(losses_of(model, rows)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def contenders(settings: Settings) -> dict[str, Callable[[int], None]]:
    fsdp2 = build(CONFIG)
    for layer in fsdp2.get_submodule("layers").children():
        torch_fully_shard(layer)
    torch_fully_shard(fsdp2)
    fast = unison.auto_shard(build(CONFIG))
    ordered = unison.auto_shard(build(CONFIG), reducer="ordered", gradient_divisor=1)
    return {
        "fsdp2": local_step(fsdp2, settings),
        "ddp": local_step(DistributedDataParallel(build(CONFIG)), settings),
        "fast": local_step(fast, settings),
        "ordered": dealt_step(ordered, settings),
    }


def measure(settings: Settings) -> dict[str, list[float]]:
    """Run on every rank; the seconds of each contender's steps, round by round."""
    with join_world("cpu"):
        torch.set_num_threads(1)
        steps = contenders(settings)
        names = list(steps)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(-3, settings.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                dist.barrier()
                started = time.perf_counter()
                steps[name](number + 3)
                dist.barrier()
                if number >= 0:
                    seconds[name].append(time.perf_counter() - started)
        return {**seconds, **guard_blocks(steps["fast"], settings.rounds // 2)}


def guard_blocks(step: Callable[[int], None], num_pairs: int) -> dict[str, list[float]]:
    """The seconds of the fast contender's steps under the guard and without it, in turn."""
    seconds: dict[str, list[float]] = {"guarded": [], "unguarded": []}
    for pair in range(num_pairs):
        names = ["guarded", "unguarded"] if pair % 2 else ["unguarded", "guarded"]
        for name in names:
            with unison.guard() if name == "guarded" else nullcontext():
                dist.barrier()
                started = time.perf_counter()
                for number in range(STEPS_PER_BLOCK):
                    step(number)
                dist.barrier()
                seconds[name].append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--granule", type=int, default=2)
    arguments = parser.parse_args()
    settings = Settings(num_ranks=2, **vars(arguments))
    seconds = run_on_local_ranks(measure, settings, num_ranks=settings.num_ranks)
    figures: dict = {"settings": asdict(settings), "model": asdict(CONFIG), "ratios": {}}
    for name in ("fast", "ordered"):
        for peer in ("fsdp2", "ddp"):
            ratio = asdict(ratio_of(seconds[name], seconds[peer]))
            if peer == "fsdp2":
                ratio |= {"limit": LIMITS[name], "is_within": ratio["high"] <= LIMITS[name]}
            figures["ratios"][f"{name}/{peer}"] = ratio
    guard = asdict(ratio_of(seconds["guarded"], seconds["unguarded"]))
    guard |= {"limit": LIMITS["guarded"], "is_within": guard["high"] <= LIMITS["guarded"]}
    figures["ratios"]["fast under the guard/fast"] = guard
    print(write_result("shard-cpu", figures).read_text())


if __name__ == "__main__":
    main()
