"""Random numbers: are all backends equal, how fast are they, and can the noise hide?

    python -m bench.rng                      # CPU: writes bench/results/rng-cpu.json
    python -m bench.rng --device cuda        # GPU: writes bench/results/rng-cuda.json
    python -m bench.rng --device cuda --tune # also times other tile sizes (not written)

On a GPU: 10^8 draws of each distribution on both processors, bit for bit; 850 M values beside
`torch.randn` in the same run; and 850 M secure normals on a side stream during a backward pass.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.runner import interleaved_pairs, write_result
from unison.kernels.random import using_backend
from unison.rng import (
    Box,
    Cipher,
    Key,
    Stream,
    bernoulli,
    integers,
    normal,
    poisson_sample,
    secure_normal,
    truncated_normal,
    uniform,
    words,
)

Draw = Callable[..., torch.Tensor]
KEY = Key.from_seed(2024)
PHILOX = Stream(KEY, "bench")
CHACHA = Stream(KEY, "bench", cipher=Cipher.CHACHA20)
SLEEP_CYCLES = 4_000_000  # about 2 ms


@dataclass(frozen=True)
class Case:
    """One distribution: how to draw a box of it into a tensor, and the tensor's dtype."""

    name: str
    draw: Draw
    dtype: torch.dtype


CASES = [
    Case("philox_words", lambda box, device: words(PHILOX, box, device=device), torch.int64),
    Case("chacha20_words", lambda box, device: words(CHACHA, box, device=device), torch.int64),
    Case("uniform_float32", lambda box, out: uniform(PHILOX, box, -1, 3, out=out), torch.float32),
    Case("uniform_float64", lambda box, out: uniform(PHILOX, box, -1, 3, out=out), torch.float64),
    Case("normal_float32", lambda box, out: normal(PHILOX, box, 0.5, 2, out=out), torch.float32),
    Case("normal_bfloat16", lambda box, out: normal(PHILOX, box, 0.5, 2, out=out), torch.bfloat16),
    Case("normal_float64", lambda box, out: normal(PHILOX, box, 0.5, 2, out=out), torch.float64),
    Case(
        "truncated_normal", lambda box, out: truncated_normal(PHILOX, box, out=out), torch.float32
    ),
    Case("secure_normal", lambda box, out: secure_normal(CHACHA, box, 1.3, out=out), torch.float32),
    Case("bernoulli", lambda box, out: bernoulli(CHACHA, box, 1e-3, out=out), torch.bool),
    Case("integers", lambda box, out: integers(PHILOX, box, -7, 10**12, out=out), torch.int64),
]


def drawn(case: Case, box: Box, device: str) -> torch.Tensor:
    if case.name.endswith("_words"):
        return case.draw(box, device=device)
    return case.draw(box, out=torch.empty(box.sides, dtype=case.dtype, device=device))


def count_differences(case: Case, total: int, device: str, chunk: int = 1 << 24) -> int:
    """Draw `total` values with the fast backend of `device` and of the CPU; count unequal bits."""
    differing = 0
    for start in range(0, total, chunk):
        box = Box.flat(start, min(total, start + chunk))
        found, expected = drawn(case, box, device).cpu(), drawn(case, box, "cpu")
        if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
            differing += int((found != expected).sum())
    return differing


def against_reference(total: int) -> dict[str, int]:
    """Count differences between the compiled CPU backend and the plain-torch reference."""
    result = {}
    for case in CASES:
        box = Box.flat((1 << 34) + 3, (1 << 34) + 3 + total)
        with using_backend("numba"):
            found = drawn(case, box, "cpu")
        with using_backend("reference"):
            result[case.name] = int((found != drawn(case, box, "cpu")).sum())
    return result


def thread_differences(total: int) -> dict[str, int]:
    """Count differences between one thread and two."""
    before, result = torch.get_num_threads(), {}
    for case in CASES:
        values = []
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            values.append(drawn(case, Box.flat(5, 5 + total), "cpu"))
        result[case.name] = int((values[0] != values[1]).sum())
    torch.set_num_threads(before)
    return result


def best_seconds(fn: Callable[[], Any], repeats: int) -> float:
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        best = min(best, time.perf_counter() - start)
    return best


def cpu_throughput(total: int, repeats: int) -> dict[str, Any]:
    """Return millions of values a second on one core: the best of `repeats`, beside torch.randn."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for case in CASES:
        box = Box.flat(0, total)
        out = torch.empty(total, dtype=case.dtype)
        if case.name.endswith("_words"):
            seconds = best_seconds(lambda c=case, b=box: c.draw(b, device="cpu"), repeats)
        else:
            seconds = best_seconds(lambda c=case, b=box, o=out: c.draw(b, out=o), repeats)
        figures[case.name] = round(total / seconds / 1e6, 1)
    buffer = torch.empty(total)
    figures["torch.randn"] = round(total / best_seconds(buffer.normal_, repeats) / 1e6, 1)
    for name, fn in (
        ("normal", lambda: normal(PHILOX, (total,), out=buffer)),
        ("secure_normal", lambda: secure_normal(CHACHA, (total,), 1.0, out=buffer)),
    ):
        ratio = interleaved_pairs(fn, buffer.normal_, max(5, repeats))
        figures[f"{name}_over_torch_randn"] = ratio.figures()
    torch.set_num_threads(before)
    return figures


def poisson_partitions(num_records: int = 10**6, q: float = 1e-3) -> dict[str, Any]:
    """Compare the sample of all records with the union over ranks, for several world sizes."""
    stream = Stream(KEY, "records", 7, "sampling", Cipher.CHACHA20)
    whole = poisson_sample(stream, num_records, q)
    is_same = {}
    for world_size in (2, 3, 4, 7, 8, 64):
        cuts = [num_records * rank // world_size for rank in range(world_size + 1)]
        parts = [
            poisson_sample(stream, num_records, q, start=a, stop=b)
            for a, b in itertools.pairwise(cuts)
        ]
        is_same[str(world_size)] = torch.equal(torch.cat(parts), whole)
    seconds = best_seconds(lambda: poisson_sample(stream, num_records, q), 5)
    return {"num_chosen": len(whole), "same_at_world_size": is_same, "milliseconds": seconds * 1e3}


def cuda_seconds(fn: Callable[[], object]) -> float:
    """Return the GPU's own time for a call, without the host's time to launch it."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP_CYCLES)  # the host queues the call meanwhile
    start.record()
    fn()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e-3


def gpu_throughput(total: int, repeats: int) -> dict[str, Any]:
    """Time `total` values beside torch.randn of the same dtype."""
    figures: dict[str, Any] = {"num_values": total}
    for name, dtype, limit in (
        ("philox_normal", torch.bfloat16, 2.0),
        ("philox_normal", torch.float32, 2.0),
        ("secure_normal", torch.float32, 4.0),
    ):
        out = torch.empty(total, dtype=dtype, device="cuda")
        if name == "secure_normal":
            fn = lambda out=out: secure_normal(CHACHA, (total,), 1.0, out=out)  # noqa: E731
        else:
            fn = lambda out=out: normal(PHILOX, (total,), out=out)  # noqa: E731
        ratio = interleaved_pairs(fn, out.normal_, repeats, warmup=3, measure=cuda_seconds)
        label = f"{name}_{str(dtype).removeprefix('torch.')}"
        figures[label] = {**ratio.figures(), "limit": limit, "is_within": ratio.ratio <= limit}
        del out
    return figures


class Block(nn.Module):
    """A transformer block: enough of a model for its backward pass to be a real one."""

    def __init__(self, d: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, tokens, d]
        """Attention, then a two-layer network, each added to its input."""
        batch, tokens, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, tokens, d / heads]
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, tokens, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def overlap(
    total: int, repeats: int, batch: int, *, is_queued: bool, tokens: int = 1024
) -> dict[str, Any]:
    """Time a backward pass alone, with noise after it, and with noise on a side stream.

    Args:
        total: Number of noise values.
        repeats: How often each is timed.
        batch: Rows of the batch.
        is_queued: Whether the host queues the whole pass before it starts, so that the GPU is never
            idle (as with CUDA graphs); otherwise it launches kernel by kernel, as eager code does.
        tokens: Tokens per row.
    """
    d, num_layers = 1280, 36  # GPT-2 large: 0.71 G parameters in its blocks
    with torch.device("cuda"):
        blocks = nn.ModuleList(Block(d, 20) for _ in range(num_layers)).to(torch.bfloat16)
        x = torch.randn(batch, tokens, d, dtype=torch.bfloat16)
        noise = torch.empty(total)
    compute = torch.cuda.Stream(priority=-1)
    side = torch.cuda.Stream(priority=0)  # yields to the backward pass

    def draw() -> None:
        secure_normal(CHACHA, (total,), 1.0, out=noise)

    def run(*, is_noise_beside: bool, is_noise_after: bool) -> float:
        for parameter in blocks.parameters():
            parameter.grad = None
        with torch.cuda.stream(compute):
            y = x
            for block in blocks:
                y = block(y)
            loss = y.float().square().mean()
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(compute):
            if is_queued:
                torch.cuda._sleep(10 * SLEEP_CYCLES)  # the host queues the passes meanwhile
            start.record()
            side.wait_stream(compute)
            if is_noise_beside:
                with torch.cuda.stream(side):
                    draw()
            loss.backward()
            if is_noise_after:
                draw()
            compute.wait_stream(side)
            stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)

    settings = {
        "backward": {"is_noise_beside": False, "is_noise_after": False},
        "backward_then_noise": {"is_noise_beside": False, "is_noise_after": True},
        "backward_beside_noise": {"is_noise_beside": True, "is_noise_after": False},
    }
    times: dict[str, list[float]] = {name: [] for name in settings}
    for repeat in range(repeats + 2):
        for name, setting in settings.items():
            milliseconds = run(**setting)
            if repeat >= 2:
                times[name].append(milliseconds)
    medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    alone = medians["backward_then_noise"] - medians["backward"]
    beside = medians["backward_beside_noise"] - medians["backward"]
    return {
        "milliseconds": medians,
        "num_noise_values": total,
        "num_parameters": sum(p.numel() for p in blocks.parameters()),
        "tokens": batch * tokens,
        "is_queued": is_queued,
        "ratio_beside_over_backward_alone": medians["backward_beside_noise"] / medians["backward"],
        "ratio_after_over_backward_alone": medians["backward_then_noise"] / medians["backward"],
        "fraction_of_noise_hidden": 1 - beside / alone,
    }


def tune(total: int) -> None:
    """Print the time of other tile sizes of normal values; secure ones have one size."""
    from unison.kernels.random_triton import LAUNCH

    out = torch.empty(total, device="cuda")
    options = LAUNCH[Cipher.PHILOX]
    kept = dict(options)
    for tile, num_warps in itertools.product((64, 128, 256, 512, 1024), (2, 4, 8)):
        if not 1 <= tile // (32 * num_warps) <= 8:
            continue
        options.update(TILE=tile, num_warps=num_warps)
        for _ in range(2):
            normal(PHILOX, (total,), out=out)
        seconds = min(cuda_seconds(lambda: normal(PHILOX, (total,), out=out)) for _ in range(5))
        print(f"TILE={tile:5d} num_warps={num_warps}: {seconds * 1e3:.3f} ms")
    options.update(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--draws", type=int, default=10**8, help="values compared on the GPU")
    parser.add_argument("--values", type=int, default=850_000_000, help="values timed on the GPU")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tune", action="store_true", help="only time tile sizes, on the GPU")
    arguments = parser.parse_args()
    if arguments.tune:
        tune(arguments.values)
        return
    drawn(CASES[0], Box.flat(0, 1 << 19), "cpu")  # compile the CPU backend before any timing
    figures: dict[str, Any] = {
        "cpu_differs_from_reference": against_reference(10**6),
        "one_thread_differs_from_two": thread_differences(10**6),
        "poisson": poisson_partitions(),
        "cpu_millions_per_second_on_one_core": cpu_throughput(1 << 23, arguments.repeats),
    }
    if arguments.device == "cuda":
        figures["gpu_differs_from_cpu"] = {
            "draws_of_each": arguments.draws,
            **{c.name: count_differences(c, arguments.draws, "cuda") for c in CASES},
        }
        figures["gpu_throughput"] = gpu_throughput(arguments.values, arguments.repeats)
        torch.cuda.empty_cache()
        figures["gpu_overlap"] = [
            overlap(arguments.values, min(arguments.repeats, 7), batch, is_queued=is_queued)
            for batch, is_queued in ((8, True), (2, True), (2, False))
        ]
    path = write_result(f"rng-{arguments.device}", figures)
    print(path.read_text())


if __name__ == "__main__":
    main()
