"""Plans beside the steps that they are plans of, on one GPU: peaks, and times.

    python -m bench.plan_gpu                          # bench/results/plan-gpu.json
    python -m bench.plan_gpu --beside plan-gpu.json   # plan again, beside steps of earlier runs

Each case is planned on the host (`unison.plan.simulate`, in processes of their own) and then run on
the GPU by the same program (`unison.plan.stepper`). The peak is that of `max_memory_allocated`
during one step, less what was allocated before the model; the time is the median of a few steps.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.runner import write_result
from unison.models import build, preset
from unison.plan import GPUS, Meter, Scenario, estimate, simulate, stepper

GIB = 2**30
STEPS = 5
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
SMALL = {
    "tiny": case("tiny", 2, 64, precision="fp32"),
    "tiny, private": case("tiny", 2, 64, clipping="auto", precision="fp32"),
    "tiny, private LoRA": case("tiny", 2, 64, clipping="auto", lora=4, precision="fp32"),
}


def predict(name: str) -> dict[str, Any]:
    """Plan a case; this runs on the host alone."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, scenario = (CASES | SMALL)[name]
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
        "moved_bytes": usage.moved_bytes,
        "num_operations": usage.num_operations,
        "step_seconds": found.step_seconds,
    }


def run(name: str, device: torch.device) -> dict[str, Any]:
    """Run a case."""
    model, scenario = (CASES | SMALL)[name]
    is_gpu = device.type == "cuda"
    gc.collect()
    if is_gpu:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if is_gpu else 0
    found: dict[str, Any] = {}
    with stepper(MODELS[model][0], scenario, device, Meter(device.type), None, STEPS + 1) as step:
        step(False)
        times = []
        for number in range(STEPS):
            if is_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            step(number == 0)
            if is_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            if is_gpu and number == 0:
                found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
                found["reserved_bytes"] = torch.cuda.max_memory_reserved()
                free, total = torch.cuda.mem_get_info()
                found["outside_bytes"] = total - free - torch.cuda.memory_reserved()
        found["seconds"], found["median_seconds"] = times, statistics.median(times[1:])
    return found


def main() -> int:
    """Plan, run and compare; write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", help="all of them unless some are named")
    parser.add_argument("--small", action="store_true", help="cases that a CPU can run")
    parser.add_argument("--beside", nargs="+", default=[], help="result files; needs no GPU")
    parser.add_argument("--name", default="plan-gpu")
    parser.add_argument("--directory", default="bench/results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = options.cases or list(SMALL if options.small else CASES)
    torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    figures: dict[str, Any] = {"limit": LIMIT, "time_limit": TIME_LIMIT}
    earlier: dict[str, Any] = {}
    for each in (json.loads(Path(path).read_text()) for path in options.beside):
        of = {"commit": each["commit"], "date": each["date"]}
        earlier |= {
            name: each["figures"][name]["real"] | of for name in each["figures"] if name in names
        }
    names = list(earlier or names)
    workers = 1 if earlier else 8
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        plans = {name: pool.submit(predict, name) for name in names}
        for name in names:
            real: dict[str, Any]
            try:
                real = earlier.get(name) or run(name, device)
            except Exception as error:  # the other cases count all the same
                real = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            plan = plans[name].result()
            figures[name] = {"plan": plan, "real": real}
            if "peak_bytes" in real:
                figures[name]["peak_off"] = plan["peak_bytes"] / real["peak_bytes"] - 1
                figures[name]["time_off"] = plan["step_seconds"] / real["median_seconds"] - 1
                print(
                    f"{name}: {plan['peak_bytes'] / GIB:.3f} of {real['peak_bytes'] / GIB:.3f} GiB "
                    f"({figures[name]['peak_off']:+.1%}), {plan['step_seconds']:.3f} of "
                    f"{real['median_seconds']:.3f} s ({figures[name]['time_off']:+.1%}), "
                    f"{plan['place']}",
                    flush=True,
                )
            else:
                print(name, real, flush=True)
            write_result(options.name, figures, directory=options.directory)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
