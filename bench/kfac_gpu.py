"""K-FAC on one GPU: what a step costs beside AdamW's, and where the time goes.

    python -m bench.kfac_gpu                    # bench/results/kfac-gpu.json

GPT-2 of 124 M parameters, 8 rows of 1024 tokens, float32 parameters under bfloat16 autocast, the
same logits and the same loss on both sides. AdamW is torch's fused one. K-FAC has its default
settings, with factors and inverses every 20 steps, and torch's fused SGD behind it. Both run with
`torch.set_float32_matmul_precision("high")`: products of the float32 gradients with the inverses
may round their inputs to TF32, which has more digits than the bfloat16 that the gradients came
from. Inverses are made in full float32 all the same.

A measurement is a whole period of 20 steps, with one update inside, from an idle GPU to an idle
GPU; periods of the two alternate. Phases are timed in a period of their own, by events on the GPU.
"""

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import unison
from bench.runner import interleaved_pairs, wall_seconds, write_result
from unison.kfac import inverse
from unison.kfac.factors import observed
from unison.models import ModelConfig, build, preset

LIMIT = 1.35
UPDATE_EVERY = 20
RATE = 1e-4


class Side:
    """One contender: a model of its own, and how it takes a step."""

    def __init__(self, config: ModelConfig, device: str, *, has_kfac: bool) -> None:
        self.model: nn.Module = build(config, seed=0, device=device)
        self.device = device
        is_fused = device == "cuda"
        self.kfac: unison.KFAC | None = None
        if has_kfac:
            config_of_kfac = unison.KFACConfig(update_every=UPDATE_EVERY, burn_in=0)
            self.kfac = unison.KFAC(self.model, config_of_kfac)
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                self.model.parameters(), lr=RATE, fused=is_fused
            )
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=is_fused)

    def backward(self, rows: Tensor) -> None:  # [batch, tokens + 1]
        """Both passes; gradients are there afterwards."""
        with torch.autocast(self.device, dtype=torch.bfloat16):
            logits = self.model(rows[:, :-1])
        if self.kfac is not None and self.kfac.wants_statistics:
            self.kfac.sample(logits).backward(retain_graph=True)
        unison.per_sample_loss(logits, rows[:, 1:]).mean().backward()

    def step(self, rows: Tensor) -> None:
        """A whole step."""
        self.backward(rows)
        if self.kfac is not None:
            self.kfac.step()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def period(self, batches: list[Tensor]) -> None:
        """As many steps as lie between two updates."""
        for number in range(UPDATE_EVERY):
            self.step(batches[number % len(batches)])


class Phases:
    """How long each phase takes on the GPU, by events; on a CPU by the clock."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase."""
        start = self._now()
        try:
            yield
        finally:
            self._spans[name].append((start, self._now()))

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self) -> dict[str, float]:
        """Of each phase, all its times together."""
        if self._is_cuda:
            torch.cuda.synchronize()
            return {
                name: sum(start.elapsed_time(end) for start, end in spans)
                for name, spans in self._spans.items()
            }
        return {
            name: sum(end - start for start, end in spans) * 1e3
            for name, spans in self._spans.items()
        }


def breakdown(side: Side, batches: list[Tensor]) -> dict[str, Any]:
    """One period of a side, phase by phase."""
    phases, host = Phases(side.device), 0.0
    with observed(phases):
        for number in range(UPDATE_EVERY):
            rows = batches[number % len(batches)]
            with phases("whole step"):
                with phases("forward and backward"):
                    side.backward(rows)
                started = time.perf_counter()
                if side.kfac is not None:
                    side.kfac.step()
                host += time.perf_counter() - started
                with phases("optimizer"):
                    side.optimizer.step()
                    side.optimizer.zero_grad()
    found: dict[str, Any] = {"milliseconds_of_a_period": phases.milliseconds()}
    if side.kfac is not None:
        found["host_milliseconds_in_kfac_step"] = host * 1e3
    return found


def alternatives(side: Side, rows: Tensor) -> dict[str, Any]:
    """What the chosen ways save: streams, TF32 for products with inverses, layers together."""
    kfac = side.kfac
    assert kfac is not None
    inverses = {}
    chosen = inverse._streams
    for count in (1, 2, 4, 8):
        streams = tuple(torch.cuda.Stream() for _ in range(count))
        inverse._streams = lambda where, streams=streams: streams  # pyright: ignore
        wall_seconds(kfac._invert)
        inverses[count] = min(wall_seconds(kfac._invert) for _ in range(2)) * 1e3
    inverse._streams = chosen
    side.backward(rows)
    gradients = kfac._routes.gradients()
    steps = {}

    def take_steps() -> None:
        kfac._preconditioner.steps(gradients, is_together=kfac._is_together)

    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        steps[precision] = _best(take_steps)
    kfac._is_ordered = True  # as with ranks, or the ordered reducer
    one_by_one = {"inverses": _best(kfac._invert), "graft and apply": _best(take_steps)}
    kfac._is_ordered = False
    side.optimizer.zero_grad()
    return {
        "inverses_ms_by_streams": inverses,
        "graft_and_apply_ms_by_matmul_precision": steps,
        "ms_with_layers_one_by_one": one_by_one,
    }


def _best(fn: Callable[[], object]) -> float:
    wall_seconds(fn)
    return min(wall_seconds(fn) for _ in range(3)) * 1e3


def peak_gib(side: Side, batches: list[Tensor]) -> float:
    torch.cuda.reset_peak_memory_stats()
    side.period(batches)
    return torch.cuda.max_memory_allocated() / 2**30


def measure(name: str, batch_size: int, tokens: int, rounds: int, device: str) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    config = preset(name, context_length=tokens)
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, tokens + 1)
    batches = [
        torch.randint(0, config.vocab_size, shape, generator=generator).to(device) for _ in range(4)
    ]
    adamw, kfac = (Side(config, device, has_kfac=each) for each in (False, True))
    ratio = interleaved_pairs(
        lambda: kfac.period(batches), lambda: adamw.period(batches), rounds, warmup=1
    )
    print(ratio, flush=True)
    gc.collect()
    figures: dict[str, Any] = {
        "model": name,
        "batch_size": batch_size,
        "tokens": tokens,
        "update_every": UPDATE_EVERY,
        "mean_step_ms": {
            "kfac": ratio.median_seconds_a / UPDATE_EVERY * 1e3,
            "adamw": ratio.median_seconds_b / UPDATE_EVERY * 1e3,
        },
        "kfac / adamw": ratio.figures() | {"limit": LIMIT, "is_within": ratio.ratio <= LIMIT},
        "breakdown": {
            "kfac": breakdown(kfac, batches),
            "adamw": breakdown(adamw, batches),
            "nested": "labels and products are parts of statistics",
        },
        "settings": "defaults of KFACConfig but update_every, and no burn-in",
    }
    if device == "cuda":
        figures["alternatives"] = alternatives(kfac, batches[0])
        figures["peak_gib, both models loaded"] = {
            "kfac": peak_gib(kfac, batches),
            "adamw": peak_gib(adamw, batches),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", default="kfac-gpu", help="name of the result file")
    options = parser.parse_args()
    figures = measure(
        options.preset, options.batch_size, options.tokens, options.rounds, options.device
    )
    print(write_result(options.out, figures).read_text())


if __name__ == "__main__":
    main()
