"""The guard: what does it cost a training step, and what one collective?

    python -m bench.guard            # 2 gloo ranks; writes bench/results/guard.json

A small model trains by hand-made data parallelism, with one collective per parameter and about 50
per step. Each pair times the same steps with the guard on and off, in one process and in turn.
Entering and leaving are outside of the times; what the watching thread does is inside.
"""

import argparse
import contextlib
import json
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from bench.runner import interleaved_pairs, ratio_of, write_result
from unison.shard.guard import guard

LIMIT = 1.05


class Trainer:
    """A stack of linear layers whose gradients are added rank by rank, parameter by parameter."""

    def __init__(self, num_layers: int, width: int, batch: int) -> None:
        torch.manual_seed(0)
        layers = [m for _ in range(num_layers) for m in (nn.Linear(width, width), nn.Tanh())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(batch, width)  # [batch, width]

    def step(self) -> None:
        """One training step: forward, backward, one async all-reduce per parameter, update."""
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        works = [dist.all_reduce(p.grad, async_op=True) for p in self.model.parameters()]
        for work in works:
            assert work is not None
            work.wait()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        dist.barrier()
        self.optimizer.step()


def run_rank(rank: int, size: int, options: argparse.Namespace, port: int, results: Any) -> None:
    """The life of one rank; rank 0 hands back the figures."""
    torch.set_num_threads(1)
    init = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size)
    trainer = Trainer(options.layers, options.width, options.batch)

    def guarded() -> None:
        for _ in range(options.steps):
            trainer.step()

    def plain() -> None:
        for _ in range(options.steps):
            trainer.step()

    cpu: dict[Any, list[float]] = {guarded: [], plain: []}

    def measure(fn: Any) -> float:
        with guard(timeout=60) if fn is guarded else contextlib.nullcontext():
            dist.barrier()
            cpu_start, start = time.process_time(), time.perf_counter()
            fn()
            seconds = time.perf_counter() - start
            cpu[fn].append(time.process_time() - cpu_start)
            return seconds

    ratio = interleaved_pairs(guarded, plain, options.repeats, warmup=2, measure=measure)
    # Of all threads: what the guard adds, whoever else uses the machine.
    cpu_ratio = ratio_of(cpu[guarded][2:], cpu[plain][2:])
    alone = [dist.new_group([r]) for r in range(size)][rank]
    issue = issue_microseconds(alone, options.issues)
    if rank == 0:
        results.put((ratio, cpu_ratio, issue))
    dist.barrier()
    dist.destroy_process_group()


def issue_microseconds(alone: Any, num_calls: int) -> dict[str, float]:
    """Return the CPU time of the main thread for one all-reduce of a group of one, off and on."""

    def seconds() -> float:
        x = torch.ones(1000)
        best = float("inf")
        for _ in range(5):
            start = time.thread_time()
            for _ in range(num_calls):
                dist.all_reduce(x, group=alone)
            best = min(best, (time.thread_time() - start) / num_calls)
        return best

    off = seconds()
    with guard(timeout=60):
        on = seconds()
    return {"off": round(off * 1e6, 1), "on": round(on * 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="What does the guard cost?")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5, help="training steps per measurement")
    parser.add_argument("--repeats", type=int, default=100, help="pairs of measurements")
    parser.add_argument("--issues", type=int, default=2000, help="collectives per measurement")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run_rank, args=(2, options, port, results), nprocs=2)
    ratio, cpu_ratio, issue = results.get()
    figures = {
        "num_ranks": 2,
        "collectives_per_step": 2 * options.layers + 2,
        "guard_on_over_off": {
            **ratio.figures(),
            "limit": LIMIT,
            "is_within": ratio.ratio <= LIMIT,
            "is_within_by_upper_bound": ratio.high <= LIMIT,
        },
        "cpu_time_on_over_off": cpu_ratio.figures(),
        "milliseconds_per_step_off": round(ratio.median_seconds_b / options.steps * 1e3, 3),
        "microseconds_per_collective": issue,
    }
    print(json.dumps(figures, indent=2))
    print(f"wrote {write_result('guard', figures).name}")


if __name__ == "__main__":
    main()
