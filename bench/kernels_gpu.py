"""Every kernel on one GPU: errors against float64, the same bits in 20 runs, and a long context.

    python -m bench.kernels_gpu        # bench/results/kernels-gpu.json

Checks run in several processes, because compiling takes most of the time; inputs are drawn anew in
every run, from a seed that the result file names. Then, alone on the GPU, one 4096×4096 linear
layer with a single sample of 131,072 tokens: what `auto` does for its norm, side by side with the
one GEMM that makes an ordinary weight gradient, and the memory that it takes beside inputs and
outputs. The exit code is 1 if a limit is not kept.

On a CPU (`--device cpu`) shapes are tiny and nothing is timed. Triton's kernels run there only with
TRITON_INTERPRET=1.
"""

import argparse
import multiprocessing
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor

from bench.kernel_checks import FAMILIES, NEED_TRITON
from bench.kernel_errors import LIMITS, Outcome, Setting
from bench.runner import interleaved_pairs, write_result
from unison.clip import choose, measured
from unison.kernels import multi_tensor
from unison.ops import Product

WIDTH, LONG, SHORT = 4096, 131_072, 32_768
RATIO_LIMIT = 1.15
GROWTH_LIMIT = 1 << 20  # bytes between the two lengths: what an allocator rounds up


# ---- accuracy ------------------------------------------------------------------------------------


def check_family(family: str, dtype: torch.dtype, setting: Setting) -> list[Outcome]:
    """Run the checks of one family of kernels."""
    torch.set_num_threads(1 if setting.device == "cuda" else torch.get_num_threads())
    return FAMILIES[family](setting, dtype)


def check_all(setting: Setting, num_processes: int) -> tuple[list[Outcome], list[str]]:
    """Run all checks, and return what they found and which kernels could not run here."""
    can_run = setting.device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    left_out: list[str] = [] if can_run else list(NEED_TRITON)
    jobs = [
        (family, dtype, setting)
        for family in FAMILIES
        if family not in left_out
        for dtype in LIMITS
        # Per-sample gradients are never kept in float16, which would overflow.
        if (family, dtype) != ("many", torch.float16)
    ]
    if num_processes == 1:
        return [each for job in jobs for each in check_family(*job)], left_out
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        found = [pool.submit(check_family, *job) for job in jobs]
        return [each for future in found for each in future.result()], left_out


# ---- long context --------------------------------------------------------------------------------


def event_seconds(fn: Callable[[], object]) -> float:
    """Return how long the GPU is at work for a call, by events around it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def draw_layer(tokens: int) -> Product:
    """Return the record of one sample in bfloat16: 2 GiB of it at 131,072 tokens."""
    a, g = (torch.randn(1, tokens, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return Product(a, g, False, (WIDTH, WIDTH))


def kept_norm(product: Product) -> tuple[Tensor, Tensor]:
    """Return the per-sample gradient, which is kept, and its squared norm: what `auto` does."""
    x = measured.materialize([product])
    return x, multi_tensor.squares([x])


def tile_norm(product: Product) -> tuple[Tensor, ...]:
    """Return the squared norm of a per-sample gradient that is not stored."""
    return (measured.squared_norms([product], "tile").squared,)


def num_extra_bytes(run: Callable[[Product], tuple[Tensor, ...]], product: Product) -> int:
    """Return the most memory that a call takes beside its inputs and outputs."""
    run(product)  # kernels are compiled, cuBLAS has its workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = run(product)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    del outputs
    return peak - held


def long_context(repeats: int) -> dict[str, Any]:
    """Time and weigh the norm of one long sample."""
    paths = {"kept": kept_norm, "tile": tile_norm}
    extra: dict[str, dict[str, int]] = {name: {} for name in paths}
    product = draw_layer(SHORT)
    for name, run in paths.items():
        extra[name][str(SHORT)] = num_extra_bytes(run, product)
    del product
    product = draw_layer(LONG)
    for name, run in paths.items():
        extra[name][str(LONG)] = num_extra_bytes(run, product)
    a, g = product.a[0], product.g[0]
    ratios = {
        name: interleaved_pairs(
            lambda run=run: run(product),
            lambda: g.t() @ a,
            repeats,
            warmup=3,
            measure=event_seconds,
        )
        for name, run in paths.items()
    }
    choice = choose([product], machine="cuda")
    auto = "kept" if choice.gradient == "kept" else choice.norm
    growth = {name: sizes[str(LONG)] - sizes[str(SHORT)] for name, sizes in extra.items()}
    return {
        "layer": f"{WIDTH}x{WIDTH}, 1 sample, bfloat16",
        "auto": str(choice),
        "ratio_to_weight_gradient": {name: each.figures() for name, each in ratios.items()},
        "ratio_limit": RATIO_LIMIT,
        "extra_bytes_by_tokens": extra,
        "norm_error": norm_errors(product),
        "is_kept": ratios[auto].ratio <= RATIO_LIMIT and growth[auto] <= GROWTH_LIMIT,
    }


def norm_errors(product: Product) -> dict[str, float]:
    """Return how far norms of the long sample are from float64, as parts of it and of its mass."""
    a, g = product.a[0], product.g[0]
    exact = torch.zeros(WIDTH, WIDTH, dtype=torch.float64, device="cuda")
    mass = 0.0
    for tokens in range(0, len(a), 16_384):  # all of it in float64 would be 8 GiB
        left, right = g[tokens : tokens + 16_384].double(), a[tokens : tokens + 16_384].double()
        exact.addmm_(left.t(), right)
        mass += float((left.norm(dim=1) * right.norm(dim=1)).sum())
    norm = float(exact.norm())
    kept, tile = float(kept_norm(product)[1].sqrt()), float(tile_norm(product)[0].sqrt())
    return {
        "kept, of the norm": abs(kept - norm) / norm,
        "kept, of the mass": abs(kept - norm) / mass,
        "tile, of the norm": abs(tile - norm) / norm,
        "tile, of the mass": abs(tile - norm) / mass,
    }


# ---- the report ----------------------------------------------------------------------------------


def summary(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return the worst of every kernel and dtype, in the order of the checks."""
    worst: dict[tuple[str, str, str], dict[str, Any]] = {}
    for each in outcomes:
        row = worst.setdefault(
            (each.kernel, each.dtype, each.relative_to),
            {
                "kernel": each.kernel,
                "dtype": each.dtype,
                "relative_to": each.relative_to,
                "largest_error": 0.0,
                "limit": each.limit,
                "is_same_in_all_runs": True,
                "num_checks": 0,
            },
        )
        row["largest_error"] = max(each.figures()["error"], row["largest_error"], key=_as_number)
        row["is_same_in_all_runs"] &= each.is_same
        row["num_checks"] += 1
    return list(worst.values())


def _as_number(error: float | str) -> float:
    number = float(error)
    return number if number == number else float("inf")  # what is not a number is the worst


def print_summary(rows: Sequence[dict[str, Any]], repeats: int) -> None:
    """Print one line per kernel and dtype."""
    header = ("kernel", "dtype", "largest error", "limit", "relative to", f"same in {repeats} runs")
    lines = [header] + [
        (
            row["kernel"],
            row["dtype"],
            f"{_as_number(row['largest_error']):.1e}",
            f"{row['limit']:.0e}",
            row["relative_to"],
            "yes" if row["is_same_in_all_runs"] else "NO",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip())


def main() -> int:
    """Measure, write the result file, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    is_cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if is_cuda else "cpu")
    parser.add_argument("--repeats", type=int, default=20, help="runs that must agree to the bit")
    parser.add_argument("--seed", type=int, default=None, help="of the inputs; drawn unless given")
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--out", default="bench/results", help="folder of the result file")
    options = parser.parse_args()
    seed = secrets.randbits(31) if options.seed is None else options.seed
    setting = Setting(options.device, seed, options.repeats)
    on_gpu = options.device == "cuda"
    outcomes, left_out = check_all(setting, options.processes or (12 if on_gpu else 1))
    rows = summary(outcomes)
    print_summary(rows, options.repeats)
    figures: dict[str, Any] = {
        "seed": seed,
        "repeats": options.repeats,
        "left_out": left_out,
        "kernels": rows,
        "checks": [each.figures() for each in outcomes],
    }
    is_kept = all(each.is_kept for each in outcomes)
    if on_gpu:
        torch.manual_seed(seed)
        figures["long_context"] = long_context(options.repeats)
        is_kept &= figures["long_context"]["is_kept"]
        print(figures["long_context"])
    figures["is_kept"] = is_kept
    name = "kernels-gpu" if on_gpu else "kernels-cpu"
    print(write_result(name, figures, directory=options.out))
    for each in outcomes:
        if not each.is_kept:
            print(f"not kept: {each}", file=sys.stderr)
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
