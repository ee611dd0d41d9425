"""Checkpoints in the background: what do they cost training, one every five steps?

    python -m bench.checkpoints      # 2 gloo ranks; writes bench/results/checkpoints.json

A model of GPT-2's shape, sharded over two ranks, takes five steps with AdamW: in turn with a
checkpoint that is begun after the first of them and must be complete after the last, and without.
The same for one that training waits for.
"""

import argparse
import json
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import unison
from bench.runner import Ratio, interleaved_pairs, wall_seconds, write_result
from unison.models import build
from unison.shard import save_checkpoint

LIMIT = 1.10
STEPS = 5


def run_rank(rank: int, options: argparse.Namespace, port: int, results: Any) -> None:
    """The life of one rank; rank 0 hands back the figures."""
    torch.set_num_threads(1)
    init = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2)
    background = dist.new_group(backend="gloo")
    model = build("gpt2", num_layers=options.layers, context_length=options.tokens)
    unison.auto_shard(model, gradient_divisor=1)
    optimizer = torch.optim.AdamW(unison.param_groups(model, 0.1), lr=1e-4)
    rows = torch.randint(0, 50_257, (2 * options.rows, options.tokens + 1))
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    assert folder[0] is not None
    place = Path(folder[0]) / "step"

    def steps(group: dist.ProcessGroup | None = None, *, saves: bool = False) -> None:
        written = None
        for number in range(STEPS):
            for batch in unison.deal([{"rows": rows}]):
                logits = model(batch["rows"][:, :-1])
                losses = torch.nn.functional.cross_entropy(
                    logits.transpose(1, 2), batch["rows"][:, 1:], reduction="none"
                ).mean(dim=1)
                unison.batch_mean(losses).backward()
            optimizer.step()
            optimizer.zero_grad()
            if saves and number == 0:
                written = save_checkpoint(place, model, optimizer, background=group)
        if written is not None:
            written.result()
        dist.barrier()

    def in_background() -> None:
        steps(background, saves=True)

    def waited_for() -> None:
        steps(saves=True)

    found: dict[str, Ratio] = {}
    for name, saving in {"background": in_background, "waited_for": waited_for}.items():
        found[name] = interleaved_pairs(saving, steps, options.repeats, measure=wall_seconds)
    if rank == 0:
        num_bytes = sum(path.stat().st_size for path in place.iterdir())
        results.put((found, num_bytes))
        shutil.rmtree(folder[0])
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="What do checkpoints cost?")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4, help="rows per rank and step")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of measurements")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run_rank, args=(options, port, results), nprocs=2)
    found, num_bytes = results.get()
    seconds = found["background"].median_seconds_b / STEPS
    figures = {
        "num_ranks": 2,
        "model": vars(options),
        "megabytes": round(num_bytes / 1e6),
        "seconds_per_step": round(seconds, 3),
        "steps_with_over_without": {name: ratio.figures() for name, ratio in found.items()},
        "limit": LIMIT,
        "is_within": found["background"].ratio <= LIMIT,
    }
    print(json.dumps(figures, indent=2))
    print(f"wrote {write_result('checkpoints', figures).name}")


if __name__ == "__main__":
    main()
