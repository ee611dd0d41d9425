"""How much memory does a rank take when a model is trained, by what the memory is for?

    python -m bench.memory_cpu               # gpt2 on 8 gloo ranks; bench/results/memory-cpu.json

One process with plain torch, torch's FSDP2, and unison with both reducers train the same model with
AdamW, one row per rank. What is counted is in `bench.memory.MemoryTracker`; figures are those of
the rank that took most. `bench.shard_gpu memory` asks the allocator of a GPU the same question.
"""

import argparse
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import unison
from bench.memory import MODEL_STATE, Bytes, Category, MemoryTracker
from bench.runner import write_result
from unison.models import ModelConfig, build, per_sample_loss, preset
from unison.shard import find_blocks
from unison.train import run_on_local_ranks
from unison.train.world import join_world

SAVING_LIMIT = 3.9  # one process against a rank of eight, in model state
MIB = 2**20
# Which categories are added up. FSDP2 gathers into a buffer and copies from there, we gather in
# place: a unit that is on its way counts for us in both of the first sums, and for it in one.
SUMS: dict[str, tuple[Category, ...]] = {
    "model state": MODEL_STATE,
    "model state without gather buffers": tuple(
        category for category in MODEL_STATE if category is not Category.GATHERING
    ),
    "all": tuple(Category),
}


@dataclass(frozen=True)
class Case:
    """One contender."""

    engine: str
    preset: str
    tokens: int
    batch_size: int
    steps: int

    @property
    def model(self) -> ModelConfig:
        """The model's shape."""
        return preset(self.preset)

    def rows(self, step: int) -> Tensor:  # [batch_size, tokens + 1]
        """A global batch, the same on every rank."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.batch_size, self.tokens + 1)
        return torch.randint(0, self.model.vocab_size, shape, generator=generator)


def sharded(case: Case) -> nn.Module:
    """The model as this contender holds it; no rank ever holds more than its part."""
    with unison.meta_init():
        model = build(case.model, device="meta")
    match case.engine:
        case "one process":
            pass
        case "fsdp2":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in find_blocks(model):
                torch_fully_shard(block, mesh=mesh)
            torch_fully_shard(model, mesh=mesh)
        case "fast" | "ordered":
            unison.auto_shard(model, reducer=case.engine, gradient_divisor=1)
        case other:
            raise AssertionError(f"no rule for {other!r}")
    return unison.materialize(model, seed=0)


def forward(model: nn.Module, case: Case, rows: Tensor) -> Tensor:
    """This rank's loss, as users of the contender write it."""
    if case.engine in ("fast", "ordered"):
        return unison.batch_mean(per_sample_loss(model(rows[:, :-1]), rows[:, 1:]))
    mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
    return per_sample_loss(model(mine[:, :-1]), mine[:, 1:]).mean()


def label_gathered_by_fsdp2(tracker: MemoryTracker, model: nn.Module) -> None:
    """Label the whole parameters of FSDP2's units, which it shows while a unit is gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            whole = [value for value in module.parameters() if not isinstance(value, DTensor)]
            tracker.label(Category.GATHERED, whole)
            module.reshard()


def measure(case: Case) -> dict[str, Bytes]:
    """Train on this rank; the peaks of the rank that took most, one per sum."""
    with join_world("cpu") as world:
        torch.set_num_threads(1)
        model = sharded(case)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        batches: Any = map(case.rows, range(case.steps))
        if case.engine in ("fast", "ordered"):
            batches = unison.deal(batches, granule=1 if case.engine == "ordered" else None)
        with MemoryTracker() as tracker:
            for rows in batches:
                with tracker.births_are(Category.ACTIVATIONS):
                    loss = forward(model, case, rows)
                loss.backward()
                tracker.label_training(model, optimizer)
                optimizer.step()
                tracker.label_training(model, optimizer)
                optimizer.zero_grad()
                label_gathered_by_fsdp2(tracker, model)
        mine = {name: tracker.peak(of) for name, of in SUMS.items()}
        every: list[dict[str, Bytes]] = [{} for _ in range(world.size)]
        dist.all_gather_object(every, mine)
        return {
            name: max((peaks[name] for peaks in every), key=lambda peak: added(peak, of))
            for name, of in SUMS.items()
        }


def added(peak: Bytes, of: Iterable[Category]) -> int:
    return sum(peak[category] for category in of)


def in_mib(peak: Bytes) -> dict[str, float]:
    return {str(category): round(count / MIB, 2) for category, count in peak.items()}


def figures_of(peaks: dict[str, dict[str, Bytes]]) -> dict[str, Any]:
    """All contenders' peaks, and how ours compare with FSDP2's and with one process."""
    figures: dict[str, Any] = {}
    for name, of_contender in peaks.items():
        figures[name] = {
            kind: {
                "peak_mib": round(added(peak, SUMS[kind]) / MIB, 2),
                "at_that_moment_mib": in_mib(peak),
            }
            for kind, peak in of_contender.items()
        }
    for name in ("fast", "ordered"):
        ratios = figures[name]["ratios"] = {}
        for kind in SUMS:
            ours, alone, peer = (
                figures[each][kind]["peak_mib"] for each in (name, "one process", "fsdp2")
            )
            ratios[kind] = {"to fsdp2": round(ours / peer, 4), "saving": round(alone / ours, 3)}
            if kind != "all":  # activations are not what sharding saves
                ratios[kind]["is_within"] = ours <= peer and alone / ours >= SAVING_LIMIT
        figures[name]["saving_limit"] = SAVING_LIMIT
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--num-ranks", type=int, default=8)
    arguments = parser.parse_args()
    num_ranks = arguments.num_ranks
    peaks = {}
    for engine in ("one process", "fsdp2", "fast", "ordered"):
        size = 1 if engine == "one process" else num_ranks
        case = Case(engine, arguments.preset, arguments.tokens, num_ranks, arguments.steps)
        peaks[engine] = run_on_local_ranks(measure, case, num_ranks=size)
        print(engine, {name: in_mib(peak) for name, peak in peaks[engine].items()}, flush=True)
    settings = asdict(case) | {"num_ranks": num_ranks}
    settings.pop("engine")
    print(write_result("memory-cpu", {"settings": settings, **figures_of(peaks)}).read_text())


if __name__ == "__main__":
    main()
