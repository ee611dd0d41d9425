"""How much memory does it take to make a large model's initial values on many ranks?

    python -m bench.materialize              # gpt2-large, 8 ranks; bench/results/materialize.json

Eight gloo ranks build the model without memory, shard it and fill their own parts. Two measures,
which must both stay within 1.15 of the rank's shards plus one whole unit, the largest:

* the process's own: by how much its resident memory, at its highest, exceeds what it was before the
  model was built (Linux: `VmHWM`, reset before);
* the tensors' own: the highest sum of the storages that are alive (`bench.memory.MemoryTracker`).
"""

import argparse
import gc
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unison
from bench.memory import MemoryTracker
from bench.runner import write_result
from unison.kernels.random import using_backend
from unison.models import ModelConfig, build, count_parameters, preset
from unison.shard import unit_memory
from unison.train import run_on_local_ranks
from unison.train.world import join_world

LIMIT = 1.15  # of the shards, beside one whole unit
MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    preset: str
    num_ranks: int
    num_layers: int | None


def reset_peak() -> int:
    """Let the kernel count this process's peak anew; returns the resident bytes of the moment."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    """Resident bytes of this process: `VmRSS` now, `VmHWM` at the highest since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024  # the kernel writes kB and means KiB


def warm_up(config: ModelConfig) -> None:
    """Load and compile, on a narrow model of the same kind, what the process keeps in any case."""
    # The compiled generator comes in only once much has been drawn, and takes 100 MiB of code.
    narrow = replace(config, num_layers=2, d_model=64, num_heads=2, d_ff=64, vocab_size=64)
    with unison.meta_init():
        model = build(narrow, device="meta")
    with using_backend("numba"):
        unison.materialize(unison.auto_shard(model), seed=0)


def measure(settings: Settings) -> list[dict[str, Any]]:
    """Make the model on this rank; the figures of all ranks."""
    overrides = {} if settings.num_layers is None else {"num_layers": settings.num_layers}
    config = preset(settings.preset, **overrides)
    with join_world("cpu") as world:
        torch.set_num_threads(1)
        warm_up(config)
        dist.barrier()
        before = reset_peak()
        started = time.perf_counter()
        with MemoryTracker() as tracker:
            with unison.meta_init():
                model = build(config, device="meta")
            built = time.perf_counter()
            unison.auto_shard(model)
            unison.materialize(model, seed=0)
        seconds = time.perf_counter() - started
        units = unit_memory(model)
        figures = {
            "num_parameters": count_parameters(build(config, device="meta")),
            "shards": sum(unit.shard for unit in units),
            "largest_unit": max(unit.full for unit in units),
            "resident_peak": resident("VmHWM") - before,
            "resident_after": resident("VmRSS") - before,
            "tensor_peak": sum(tracker.peak().values()),
            "seconds_to_build": built - started,
            "seconds": seconds,
        }
        every: list[dict[str, Any]] = [{} for _ in range(world.size)]
        dist.all_gather_object(every, figures)
        return every


def figures_of(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst rank's figures in MiB, and whether they are within the limit."""
    shards, unit = ranks[0]["shards"], ranks[0]["largest_unit"]
    limit = LIMIT * shards + unit
    worst = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    sizes = ("shards", "largest_unit", "resident_peak", "resident_after", "tensor_peak")
    return {
        "num_parameters": ranks[0]["num_parameters"],
        "whole_model_mib": round(ranks[0]["num_parameters"] * 4 / MIB, 1),
        **{f"{name}_mib": round(worst[name] / MIB, 1) for name in sizes},
        "limit_mib": round(limit / MIB, 1),
        "resident_peak / shards": round(worst["resident_peak"] / shards, 3),
        "is_within": worst["resident_peak"] <= limit and worst["tensor_peak"] <= limit,
        "seconds_to_build": round(worst["seconds_to_build"], 2),
        "seconds": round(worst["seconds"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt2-large")
    parser.add_argument("--num-ranks", type=int, default=8)
    parser.add_argument("--num-layers", type=int)
    settings = Settings(**vars(parser.parse_args()))
    ranks = run_on_local_ranks(measure, settings, num_ranks=settings.num_ranks)
    figures = {"settings": asdict(settings), "limit": LIMIT, **figures_of(ranks)}
    print(write_result("materialize", figures).read_text())


if __name__ == "__main__":
    main()
