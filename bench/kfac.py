"""K-FAC: what each way to hold a side costs, what a vocabulary costs, and a step beside AdamW's.

    python -m bench.kfac                        # bench/results/kfac-cpu.json, or kfac-gpu.json
    python -m bench.kfac --only forms           # or vocabulary, or adamw

`forms`: one matrix of n x 256, updates of T tokens, periods of 10 steps. G is held as a matrix, by
blocks, or as the columns of tokens (Woodbury), or as `auto` chooses; only `kfac.step()` is timed,
over a whole period with its update. `auto` is compared with the faster of a matrix and columns:
blocks are cheaper than a matrix whatever the sizes are, since they leave out what lies between
them.

`vocabulary`: 512 tokens through a model of width 64 with 2,000, 6,000 and 9,000 classes: a whole
step with an update, whichever way `auto` takes for each.

`adamw`, on a GPU only: GPT-2 of 124 M parameters, 8 rows of 1024 tokens, float32 parameters under
bfloat16 autocast, the same logits and the same loss on both sides. AdamW is torch's fused one.
K-FAC has its default settings, with factors and inverses every 20 steps, and torch's fused SGD
behind it. Both run with `torch.set_float32_matmul_precision("high")`: products of the float32
gradients with the inverses may round their inputs to TF32, which has more digits than the bfloat16
that the gradients came from. Inverses are not made so: their errors are figures of the result. A
measurement is a whole period of 20 steps, with one update inside, from an idle GPU to an idle GPU;
periods of the two alternate. Phases are timed in a period of their own, by events on the GPU.
"""

import argparse
import gc
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import unison
from bench.runner import interleaved_pairs, wall_seconds, write_result
from unison.kfac import inverse, linalg
from unison.kfac.factors import observed
from unison.kfac.precondition import invert_layers
from unison.models import ModelConfig, build, preset

LIMITS = {"forms": 1.5, "vocabulary": 3.0, "adamw": 1.25}
FORMS = {  # by policy
    "dense": "kronecker",
    "blocked": "blocked",
    "woodbury": "all",
    "auto": "auto",
}
WIDTH = 256
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2)  # tokens of an update, by the rows of a side
SIZES = (1024, 2048, 4096)
ROUNDS = 2
if DEVICE == "cpu":  # a few minutes there as well
    SHARES, SIZES, ROUNDS = (1 / 8, 1 / 2, 1), SIZES[:2], 1
DECAYS = (0.0, 0.95)
VOCABULARIES = (2000, 6000, 9000)
UPDATE_EVERY = 20
RATE = 1e-4


# --- forms of a side ------------------------------------------------------------------------------


def make_period(policy: str, n: int, tokens: int, decay: float) -> tuple[Callable[[], float], Any]:
    """What takes the steps of a period and returns the seconds of `kfac.step()`; and the `KFAC`."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, n, bias=False, device=DEVICE)
    config = unison.KFACConfig(policy=policy, decay=decay, burn_in=0)
    kfac, x = unison.KFAC(model, config), torch.randn(tokens, WIDTH, device=DEVICE)
    labels = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)

    def period() -> float:
        seconds = 0.0
        for _ in range(10):
            model.zero_grad()
            logits = model(x)
            if kfac.wants_statistics:
                kfac.sample(logits).backward()
            nn.functional.cross_entropy(logits, labels).backward()
            seconds += wall_seconds(kfac.step)
        return seconds

    return period, kfac


def measure_forms(rounds: int) -> dict[str, Any]:
    """Seconds of periods by form, for sides and tokens; how far `auto` is from the best."""
    rows, worst = [], 0.0
    for decay, n, share in itertools.product(DECAYS, SIZES, SHARES):
        tokens = int(n * share)
        periods = {name: make_period(each, n, tokens, decay) for name, each in FORMS.items()}
        first = {name: period() for name, (period, _) in periods.items()}
        # What is far off is not repeated: eigenvectors of thousands of columns take seconds.
        close = [name for name in FORMS if first[name] <= 10 * min(first.values())]
        times = {name: [first[name]] for name in FORMS}
        for _ in range(rounds):
            for name in close:
                times[name].append(periods[name][0]())
        medians = {name: statistics.median(own) for name, own in times.items()}
        best = min(medians["dense"], medians["woodbury"])
        worst = max(worst, medians["auto"] / best)
        rows.append(
            {
                "decay": decay,
                "n": n,
                "tokens": tokens,
                "milliseconds": {name: own * 1e3 for name, own in medians.items()},
                "auto_takes": periods["auto"][1].layers[0].g_form.value,
                "auto / best": medians["auto"] / best,
            }
        )
        print(rows[-1], flush=True)
        for _, kfac in periods.values():
            kfac.detach()
    within = {"limit": LIMITS["forms"], "is_within": worst <= LIMITS["forms"]}
    return {"width": WIDTH, "sides": rows, "auto / best, the worst": {"ratio": worst, **within}}


# --- vocabularies ---------------------------------------------------------------------------------


def make_vocabulary(size: int) -> tuple[Callable[[], float], Any]:
    """What takes a period of steps and returns the seconds of that with an update."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(size, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, size, bias=False)
    ).to(DEVICE)
    kfac = unison.KFAC(model, unison.KFACConfig(burn_in=0))
    ids = torch.randint(0, size, (8, 64), device=DEVICE)

    def step() -> None:
        model.zero_grad()
        logits = model(ids)
        if kfac.wants_statistics:
            kfac.sample(logits).backward()
        unison.per_sample_loss(logits, ids).mean().backward()
        kfac.step()

    def period() -> float:
        assert kfac.wants_statistics
        seconds = wall_seconds(step)
        while not kfac.wants_statistics:
            step()
        return seconds

    return period, kfac


def measure_vocabularies(rounds: int) -> dict[str, Any]:
    """Seconds of a step with an update, by classes."""
    periods = {size: make_vocabulary(size) for size in VOCABULARIES}
    times: dict[int, list[float]] = {size: [] for size in VOCABULARIES}
    for number in range(rounds + 1):
        for size, (period, _) in periods.items():
            seconds = period()
            if number:  # the first one finds the layers
                times[size].append(seconds)
    medians = {size: statistics.median(own) for size, own in times.items()}
    ratio = max(medians.values()) / min(medians.values())
    heads = {size: kfac.layers[-1].why for size, (_, kfac) in periods.items()}
    within = {"limit": LIMITS["vocabulary"], "is_within": ratio <= LIMITS["vocabulary"]}
    return {
        "tokens": 512,
        "milliseconds": {size: own * 1e3 for size, own in medians.items()},
        "heads": heads,
        "largest / smallest": {"ratio": ratio, **within},
    }


# --- beside AdamW ---------------------------------------------------------------------------------


class Side:
    """One contender: a model of its own, and how it takes a step."""

    def __init__(self, config: ModelConfig, *, has_kfac: bool) -> None:
        self.model: nn.Module = build(config, seed=0, device=DEVICE)
        is_fused = DEVICE == "cuda"
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
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
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

    def __init__(self) -> None:
        self._is_cuda = DEVICE == "cuda"
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
    phases, host = Phases(), 0.0
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


def launches(side: Side, batches: list[Tensor]) -> dict[str, Any]:
    """What `kfac.step()` dispatches by phase, of a step with an update and of the next one.

    Returns:
        Torch's operations that no other one calls, launches, and milliseconds of the GPU in them.
    """
    assert side.kfac is not None
    found: dict[str, Any] = {}
    while not side.kfac.wants_statistics:
        side.step(batches[0])
    for what in ("with an update", "without"):
        side.backward(batches[0])
        with torch.profiler.profile() as profiler:
            wall_seconds(side.kfac.step)
        side.optimizer.zero_grad()
        events = profiler.events() or []
        ranges = [each for each in events if each.name.startswith("unison.kfac: ")]
        phases: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
        for each in events:
            start = each.time_range.start
            around = [own for own in ranges if own.time_range.start <= start < own.time_range.end]
            name = max(around, key=lambda own: own.time_range.start).name if around else "other"
            parent = each.cpu_parent
            is_called = parent is not None and parent.name.startswith("aten::")
            phase = phases[name.removeprefix("unison.kfac: ")]
            phase[0] += each.name.startswith("aten::") and not is_called
            phase[1] += len(each.kernels)
            phase[2] += sum(kernel.duration for kernel in each.kernels) / 1e3
        found[what] = {
            name: {"operations": own[0], "launches": own[1], "gpu_ms": own[2]}
            for name, own in phases.items()
            if own[0] or own[1]
        }
    return found


def alternatives(side: Side, rows: Tensor) -> dict[str, Any]:
    """What the chosen ways save: streams, TF32 for products with inverses, layers together."""
    kfac = side.kfac
    assert kfac is not None

    def invert() -> None:
        invert_layers(kfac._states.values(), kfac.config, is_together=kfac._is_together)

    inverses = {}
    chosen = linalg._streams
    for count in (1, 2, 4, 8):
        streams = tuple(torch.cuda.Stream() for _ in range(count))
        linalg._streams = lambda where, streams=streams: streams  # pyright: ignore
        wall_seconds(invert)
        inverses[count] = min(wall_seconds(invert) for _ in range(2)) * 1e3
    linalg._streams = chosen
    side.backward(rows)
    gradients = kfac._routes.gradients()
    steps = {}

    def take_steps() -> None:
        kfac._preconditioner.steps(gradients, is_together=kfac._is_together)

    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        steps[precision] = _best(take_steps)
    kfac._is_ordered = True  # as with ranks, or the ordered reducer
    one_by_one = {"inverses": _best(invert), "graft and apply": _best(take_steps)}
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


def inverse_errors(side: Side) -> dict[str, float]:
    """How far inverses of the first block are from those of the same factors in float64."""
    kfac, found = side.kfac, {}
    assert kfac is not None
    for state in list(kfac._states.values())[:14]:
        own = state.factors
        if "a" not in own or "g" not in own or state.inverse is None:
            continue
        exact = inverse.invert({"": {key: each.double() for key, each in own.items()}}, kfac.config)
        for which, wanted in exact[""].items():
            n = len(own[which])
            error = (state.inverse[which][:n, :n] - wanted[:n, :n]).abs().max()
            found[f"{state.layer.name}, {which.upper()}"] = float(error / wanted.abs().max())
    return found


def peak_gib(side: Side, batches: list[Tensor]) -> float:
    torch.cuda.reset_peak_memory_stats()
    side.period(batches)
    return torch.cuda.max_memory_allocated() / 2**30


def measure(name: str, batch_size: int, tokens: int, rounds: int) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    config = preset(name, context_length=tokens)
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, tokens + 1)
    batches = [
        torch.randint(0, config.vocab_size, shape, generator=generator).to(DEVICE) for _ in range(4)
    ]
    adamw, kfac = (Side(config, has_kfac=each) for each in (False, True))
    ratio = interleaved_pairs(
        lambda: kfac.period(batches), lambda: adamw.period(batches), rounds, warmup=3
    )
    print(ratio, flush=True)
    gc.collect()
    within = {"limit": LIMITS["adamw"], "is_within": ratio.ratio <= LIMITS["adamw"]}
    figures: dict[str, Any] = {
        "model": name,
        "batch_size": batch_size,
        "tokens": tokens,
        "update_every": UPDATE_EVERY,
        "mean_step_ms": {
            "kfac": ratio.median_seconds_a / UPDATE_EVERY * 1e3,
            "adamw": ratio.median_seconds_b / UPDATE_EVERY * 1e3,
        },
        "kfac / adamw": ratio.figures() | within,
        "breakdown": {
            "kfac": breakdown(kfac, batches),
            "adamw": breakdown(adamw, batches),
            "nested": "labels and products are parts of statistics",
        },
        "inverse_errors": inverse_errors(kfac),
        "launches": launches(kfac, batches),
        "settings": "defaults of KFACConfig but update_every, and no burn-in",
    }
    if DEVICE == "cuda":
        figures["alternatives"] = alternatives(kfac, batches[0])
        figures["peak_gib, both models loaded"] = {
            "kfac": peak_gib(kfac, batches),
            "adamw": peak_gib(adamw, batches),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(LIMITS), help="one of the three questions")
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--name", default="kfac-gpu" if DEVICE == "cuda" else "kfac-cpu")
    parser.add_argument("--directory", default="bench/results")
    options = parser.parse_args()
    asked = [options.only] if options.only else list(LIMITS)
    figures: dict[str, Any] = {}
    if "forms" in asked:
        figures["forms"] = measure_forms(ROUNDS)
    if "vocabulary" in asked:
        figures["vocabulary"] = measure_vocabularies(rounds=4)
        print(figures["vocabulary"], flush=True)
    if "adamw" in asked and (DEVICE == "cuda" or options.only):
        figures["adamw"] = measure(
            options.preset, options.batch_size, options.tokens, options.rounds
        )
    print(write_result(options.name, figures, directory=options.directory).read_text())


if __name__ == "__main__":
    main()
