"""Plans beside the steps that they are plans of, on one GPU: peaks, and times.

    python -m bench.plan_gpu --name measured          # on a GPU: run the cases
    python -m bench.plan_gpu --beside measured.json   # on any machine: plan them, and compare

Each case is run on the GPU by the program that plans run (`unison.plan.stepper`), with nothing else
on the host: its time is the median of steps that come after the first few. The peak is that of
`max_memory_allocated` during one step, less what was allocated before the model. Beside both stand
those of each phase of the step, and what the GPU's profiler says of a further one.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bench.runner import write_result
from unison.models import build, preset
from unison.plan import GPUS, Meter, Scenario, estimate, simulate, stepper

GIB = 2**30
WARM_UP, STEPS = 4, 6
LIMIT = 0.03  # of the peak
TIME_LIMIT = 0.15  # of the time, from 1,024 tokens on


def gpt2_large() -> nn.Module:
    return build(preset("gpt2-large", context_length=4096), device="meta")


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=5632,
        max_position_embeddings=4096,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def tiny() -> nn.Module:
    return build(preset("tiny"), device="meta")


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gpt2-large": (gpt2_large, 50_257),
    "llama-1.1b": (llama, 32_000),
    "tiny": (tiny, 256),
}


def case(model: str, rows: int, tokens: int, **how: Any) -> tuple[str, Scenario]:
    size = {"rows": rows, "row_length": tokens, "vocab_size": MODELS[model][1]}
    return model, Scenario(**size, **{"precision": "bf16", **how})


CASES = {
    "gpt2-large, 512": case("gpt2-large", 8, 512),
    "gpt2-large, 1024": case("gpt2-large", 8, 1024),
    "gpt2-large, 2048, computed again": case("gpt2-large", 4, 2048, checkpoint_activations=True),
    "gpt2-large, private, 512": case("gpt2-large", 8, 512, clipping="auto"),
    "gpt2-large, private, 1024": case("gpt2-large", 4, 1024, clipping="auto"),
    "gpt2-large, ghost_bk, 1024": case("gpt2-large", 4, 1024, clipping="ghost_bk"),
    "gpt2-large, LoRA, 1024": case("gpt2-large", 8, 1024, lora=16),
    "llama-1.1b, 1024": case("llama-1.1b", 8, 1024),
    "llama-1.1b, 4096": case("llama-1.1b", 2, 4096),
    "llama-1.1b, private, 1024": case("llama-1.1b", 4, 1024, clipping="auto"),
    "llama-1.1b, private, 4096": case("llama-1.1b", 1, 4096, clipping="auto"),
    "llama-1.1b, private, two passes": case("llama-1.1b", 2, 1024, clipping="auto", passes=2),
    "llama-1.1b, LoRA, 2048": case("llama-1.1b", 4, 2048, lora=16),
    "llama-1.1b, private LoRA, 2048": case("llama-1.1b", 4, 2048, lora=16, clipping="auto"),
}
# Steps that compute next to nothing: what the host takes. Times are fitted to these.
HOST = {
    "gpt2-large, 64": case("gpt2-large", 1, 64),
    "gpt2-large, 64, computed again": case("gpt2-large", 1, 64, checkpoint_activations=True),
    "gpt2-large, private, 64": case("gpt2-large", 1, 64, clipping="auto"),
    "llama-1.1b, 64": case("llama-1.1b", 1, 64),
    "llama-1.1b, LoRA, 64": case("llama-1.1b", 1, 64, lora=16),
    "llama-1.1b, private, 64": case("llama-1.1b", 1, 64, clipping="auto"),
    "llama-1.1b, private LoRA, 64": case("llama-1.1b", 1, 64, lora=16, clipping="auto"),
}
COMPILED = {
    f"{name}, compiled": (CASES[name][0], replace(CASES[name][1], compiled=True))
    for name in (
        "gpt2-large, 1024",
        "llama-1.1b, 1024",
        "gpt2-large, private, 1024",
        "llama-1.1b, private, 1024",
    )
}
SMALL = {
    "tiny": case("tiny", 2, 64, precision="fp32"),
    "tiny, private": case("tiny", 2, 64, clipping="auto", precision="fp32"),
    "tiny, compiled": case("tiny", 2, 64, precision="fp32", compiled=True),
    "tiny, private, compiled": case(
        "tiny", 2, 64, clipping="auto", precision="fp32", compiled=True
    ),
    "tiny, private LoRA": case("tiny", 2, 64, clipping="auto", lora=4, precision="fp32"),
}


def predict(name: str) -> dict[str, Any]:
    """Plan a case; this runs on the host alone."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, scenario = (CASES | HOST | COMPILED | SMALL)[name]
    began = time.perf_counter()
    usage = simulate(MODELS[model][0], scenario)
    with torch.device("meta"):
        count = sum(each.numel() for each in MODELS[model][0]().parameters())
    found = estimate(usage, scenario, GPUS["h200"], count)
    return {
        "plan_took_seconds": time.perf_counter() - began,
        "peak_bytes": usage.peak.total,
        "place": usage.peak.place,
        "by_category": usage.peak.by_category,
        "flops": usage.flops,
        "num_calls": len(usage.calls),
        "num_python_calls": sum(each.python_calls for each in usage.calls),
        "num_kernels": sum(each.is_kernel for each in usage.calls),
        "compute_seconds": found.compute_seconds,
        "host_seconds": found.host_seconds,
        "step_seconds": found.step_seconds,
    }


class Clock(Meter):
    """Notes when each phase of a step begins, on the host and on the GPU, and its peak."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type)
        self._is_gpu = device.type == "cuda"
        self._marks: list[tuple[str, float, Any, int]] = []

    def enter_place(self, phase: str, block: str = "") -> None:
        """Note the beginning of a phase; blocks are not told apart."""
        if self._marks and self._marks[-1][0] == phase:
            return
        event, peak = None, 0
        if self._is_gpu:
            event, peak = torch.cuda.Event(enable_timing=True), torch.cuda.max_memory_allocated()
            event.record()
            torch.cuda.reset_peak_memory_stats()
        self._marks.append((phase, time.perf_counter(), event, peak))

    def phases(self) -> list[dict[str, Any]]:
        """What the phases since the last call took; the GPU must have come to their end."""
        self.enter_place("end")
        marks, self._marks = self._marks, []
        return [
            {
                "phase": phase,
                "host_seconds": after - before,
                "gpu_seconds": first.elapsed_time(second) / 1e3 if first else 0.0,
                "peak_bytes": peak,
            }
            for (phase, before, first, _), (_, after, second, peak) in itertools.pairwise(marks)
        ]


def run(name: str, device: torch.device) -> dict[str, Any]:
    """Run a case."""
    model, scenario = (CASES | HOST | COMPILED | SMALL)[name]
    is_gpu = device.type == "cuda"

    def wait() -> None:
        if is_gpu:
            torch.cuda.synchronize()

    gc.collect()
    if is_gpu:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if is_gpu else 0
    clock = Clock(device)
    with stepper(MODELS[model][0], scenario, device, clock, None, WARM_UP + STEPS + 2) as step:
        for _ in range(WARM_UP):
            step(True)
        found: dict[str, Any] = {"seconds": []}
        for _ in range(STEPS):
            wait()
            began = time.perf_counter()
            step(True)
            wait()
            found["seconds"].append(time.perf_counter() - began)
        wait()
        clock.phases()
        step(True)
        wait()
        found["phases"] = clock.phases()
        if is_gpu:
            found["peak_bytes"] = max(each["peak_bytes"] for each in found["phases"]) - before
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
            free, total = torch.cuda.mem_get_info()
            found["outside_bytes"] = total - free - torch.cuda.memory_reserved()
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                step(True)
                wait()
            found["kernels"] = kernels(trace)
    found["median_seconds"] = statistics.median(found["seconds"])
    return found


def kernels(trace: profile) -> dict[str, Any]:
    """How many kernels a step launches, how long they run, and which take longest."""
    found = [each for each in trace.key_averages() if each.self_device_time_total]
    found.sort(key=lambda each: -each.self_device_time_total)
    return {
        "number": sum(each.count for each in found),
        "seconds": sum(each.self_device_time_total for each in found) / 1e6,
        "longest": [
            [each.key[:90], each.count, each.self_device_time_total / 1e6] for each in found[:25]
        ],
    }


def main() -> int:
    """Run, or plan and compare; write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", help="all of them unless some are named")
    parser.add_argument("--small", action="store_true", help="cases that a CPU can run")
    parser.add_argument("--compiled", action="store_true", help="cases with compiled blocks")
    parser.add_argument("--beside", nargs="+", default=[], help="result files; needs no GPU")
    parser.add_argument("--name", default="plan-gpu")
    parser.add_argument("--directory", default="bench/results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    names = options.cases or list(
        SMALL if options.small else COMPILED if options.compiled else CASES | HOST
    )
    figures: dict[str, Any] = {"limit": LIMIT, "time_limit": TIME_LIMIT}
    if options.beside:
        compare(options.beside, options.cases, figures)
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
        for name in names:
            try:
                real = run(name, device)
            except Exception as error:  # the other cases count all the same
                real = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            figures[name] = {"real": real}
            told = {key: real.get(key) for key in ("error", "median_seconds", "peak_bytes")}
            print(name, told, flush=True)
            write_result(options.name, figures, directory=options.directory)
        dist.destroy_process_group()
    write_result(options.name, figures, directory=options.directory)
    return 0


def compare(paths: list[str], names: list[str], figures: dict[str, Any]) -> None:
    """Plan the cases of result files, beside what was measured; of a case, the last file's.

    Times are compared with those of the last file alone: the commits of files before it ran other
    code. Their peaks count.
    """
    measured: dict[str, Any] = {}
    timed: set[str] = set()
    for each in (json.loads(Path(path).read_text()) for path in paths):
        of, timed = {"commit": each["commit"], "date": each["date"]}, set()
        for name, told in each["figures"].items():
            if isinstance(told, dict) and "peak_bytes" in told.get("real", {}):
                measured[name] = of | told["real"]
                timed.add(name)
    for name in names or measured:
        real, plan = measured[name], predict(name)
        found = figures[name] = {"plan": plan, "real": real}
        found["peak_off"] = plan["peak_bytes"] / real["peak_bytes"] - 1
        told = f"{plan['peak_bytes'] / GIB:.3f} of {real['peak_bytes'] / GIB:.3f} GiB"
        told += f" ({found['peak_off']:+.1%}), {plan['place']}"
        if name in timed:
            found["time_off"] = plan["step_seconds"] / real["median_seconds"] - 1
            told += f", {plan['step_seconds']:.3f} of {real['median_seconds']:.3f} s"
            told += f" ({found['time_off']:+.1%})"
            of_kernels = plan["compute_seconds"] / real["kernels"]["seconds"] - 1
            told += f", kernels {of_kernels:+.1%}"
        print(f"{name}: {told}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
