"""Private training under torch.compile, beside the same model compiled and not private.

    python -m bench.compiled_gpu gpt2-large llama-1.1b opt-1.3b llama-7b-lora

Models of transformers in bfloat16, random weights, T = 1024, AdamW. A logical batch of 64 rows
comes in 8 passes of 8, with secure noise; compiled private passes may have fewer rows, if the
planner picks fewer. In each round every contender takes one step (all passes and the optimizer),
in an order that rotates; ratios are paired by round. Rounds lie between two of the passes 64, 128,
256, …, at which private training checks again that samples do not mix: what that takes is in the
steps before (`warm_up_seconds`). Memory is the peak of one step of a contender less what was
allocated before it was built. `--passes 1 --rows 4 --tokens 512 --graphs` is one pass per step, in
which both sides are CUDA graphs, optimizer included; there a contender takes ten steps a round that
nothing waits for in between, as `python -m bench clipping` times them. Beside them is a step that
is waited for (`seconds_alone`: what the host does first is in it), and what each kernel takes.

The result is bench/results/compiled-gpu.json. Opacus takes part if its source is in an ignored
folder (`pip install --no-deps --target bench/peers/site opacus opt_einsum`).
"""

import argparse
import gc
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unison
from bench.runner import ROOT, ratio_of, write_result
from unison.privacy import PrivacyEngine

LIMITS = {"gpt2-large": 1.07, "llama-1.1b": 1.08, "opt-1.3b": 1.08, "llama-7b-lora": 1.08}
MEMORY_LIMIT = 1.15
WARM_UP_PASSES = 64
GIB = 2**30
REFERENCE = "compiled, not private"


@dataclass(frozen=True)
class Shape:
    """What one step is."""

    passes: int
    rows: int
    tokens: int

    @property
    def batch_size(self) -> int:
        """Rows of a step."""
        return self.passes * self.rows


def llama(hidden: int, layers: int, heads: int, kv_heads: int, inner: int) -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=inner,
            max_position_embeddings=4096,
            use_cache=False,
        )
    )


def gpt2_large() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_embd=1280,
            n_layer=36,
            n_head=20,
            n_positions=4096,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )


def opt() -> nn.Module:
    return hf.OPTForCausalLM(
        hf.OPTConfig(
            hidden_size=2048,
            num_hidden_layers=24,
            num_attention_heads=32,
            ffn_dim=8192,
            word_embed_proj_dim=2048,
            max_position_embeddings=4096,
            dropout=0.0,
            use_cache=False,
        )
    )


def with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    return get_peft_model(model, config)  # type: ignore[arg-type]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2-large": gpt2_large,
    "llama-1.1b": lambda: llama(2048, 22, 32, 4, 5632),
    "opt-1.3b": opt,
    "llama-7b-lora": lambda: with_lora(llama(4096, 32, 32, 32, 11008)),
    "tiny": lambda: llama(64, 2, 4, 2, 96),
    "tiny-lora": lambda: with_lora(llama(64, 2, 4, 2, 96)),
}


def build(name: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    # CPUs, which only try a benchmark out, may be a thousand times slower in bfloat16.
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            return MODELS[name]().train()
    finally:
        torch.set_default_dtype(torch.float32)


def loss_of(model: Callable[..., Any], ids: Tensor) -> Tensor:
    """The mean over tokens that models of transformers make of labels, inside of the graph."""
    return model(input_ids=ids, labels=ids).loss


@dataclass(eq=False)
class Step:
    """Takes a step when it is called.

    Attributes:
        run: Takes it, and returns how many passes it had.
        engine: Of private training.
        holds: What must stay alive.
        passes: Passes of the last step.
        total: Of all steps.
    """

    run: Callable[[], int]
    engine: PrivacyEngine | None = None
    holds: Any = None
    passes: int = 0
    total: int = 0

    def __call__(self) -> None:
        """Take a step."""
        self.passes = self.run()
        self.total += self.passes


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, fused=trained[0].is_cuda)


def not_private(name: str, shape: Shape, device: str, *, is_compiled: bool) -> Step:
    model = build(name, device)
    optimizer = optimizer_of(model)
    ids = torch.randint(3, 30000 if name != "tiny" else 200, (shape.batch_size, shape.tokens))
    rows = ids.to(device).split(shape.rows)
    run = torch.compile(model) if is_compiled else model

    def step() -> int:
        optimizer.zero_grad()
        for each in rows:
            (loss_of(run, each) / shape.passes).backward()
        optimizer.step()
        return shape.passes

    return Step(step)


def private(name: str, shape: Shape, device: str, **settings: Any) -> Step:
    model = build(name, device)
    generator = torch.Generator().manual_seed(0)
    size = (64 * shape.batch_size, shape.tokens)
    ids = torch.randint(3, 30000 if name != "tiny" else 200, size, generator=generator)
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer_of(model),
        data_loader=DataLoader(
            TensorDataset(ids.to(device)), batch_size=shape.batch_size, shuffle=True
        ),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        max_physical_batch_size=shape.rows,
        **settings,
    )

    def step() -> int:
        # The loop is left after a step: while a batch is in the user's hands, all code that others
        # have compiled runs as it was written, so that a loss can be followed.
        for (rows,) in loader:
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            optimizer.step()
            assert loader.current is not None
            if loader.current.is_last:
                return loader.current.num_passes
        raise AssertionError("the data set has hundreds of batches")

    return Step(step, engine)


def graph_optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, fused=True, capturable=True)


def not_private_graph(name: str, shape: Shape, device: str) -> Step:
    """One pass and the optimizer, compiled and recorded."""
    model = build(name, device)
    optimizer = graph_optimizer_of(model)
    ids = torch.randint(3, 30000 if name != "tiny" else 200, (shape.rows, shape.tokens)).to(device)
    run = torch.compile(model)

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(run, ids).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()

    def step() -> int:
        graph.replay()
        return 1

    return Step(step, holds=train)  # the graph has addresses, and no tensors


def private_graph(name: str, shape: Shape, device: str) -> Step:
    """The same, private: `capture_graph` of compiled passes."""
    model = build(name, device)
    generator = torch.Generator().manual_seed(0)
    size = (256 * shape.rows, shape.tokens)
    ids = torch.randint(3, 30000 if name != "tiny" else 200, size, generator=generator)
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=graph_optimizer_of(model),
        data_loader=DataLoader(TensorDataset(ids.to(device)), batch_size=shape.rows, shuffle=True),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        compile=True,
    )

    def losses_of(ids: Tensor) -> Tensor:
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)  # as transformers' loss does: no copy
        return unison.per_sample_loss(model(input_ids=ids).logits, labels)

    def batches() -> Iterator[Tensor]:
        while True:
            for (rows,) in loader:
                yield rows

    endless = batches()
    for _ in range(2):  # compiled, checked, and the optimizer's state made
        optimizer.zero_grad()
        losses_of(next(endless)).mean().backward()
        optimizer.step()
    example = next(endless)
    optimizer.zero_grad(set_to_none=True)
    run = engine.capture_graph(losses_of, example.clone(), with_optimizer=True)
    given = chain([example], endless)

    def step() -> int:
        run(next(given))
        return 1

    return Step(step, engine)


def opacus(name: str, shape: Shape, device: str) -> Step:
    """As its users run it: per-sample gradients in `grad_sample`, several passes a step."""
    modules, optimizers = map(import_module, ("opacus.grad_sample", "opacus.optimizers"))
    model: Any = modules.GradSampleModule(build(name, device), strict=False)
    optimizer = optimizers.DPOptimizer(
        optimizer_of(model),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=shape.batch_size,
    )
    ids = torch.randint(3, 30000 if name != "tiny" else 200, (shape.batch_size, shape.tokens))
    rows = ids.to(device).split(shape.rows)

    def step() -> int:
        for number, each in enumerate(rows):
            optimizer.zero_grad()
            loss_of(model, each).backward()
            optimizer.signal_skip_step(do_skip=number < len(rows) - 1)
            optimizer.step()
        return shape.passes

    return Step(step)


CONTENDERS: dict[str, Callable[[str, Shape, str], Step]] = {
    REFERENCE: lambda *where: not_private(*where, is_compiled=True),
    "compiled, private": lambda *where: private(*where, compile=True),
    "eager, not private": lambda *where: not_private(*where, is_compiled=False),
    "eager, private": private,
    "opacus": opacus,
}


GRAPHS: dict[str, Callable[[str, Shape, str], Step]] = {
    REFERENCE: not_private_graph,
    "compiled, private": private_graph,
}


def seconds(step: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def warmed_up(step: Step, device: str, rounds: int) -> list[float]:
    """Take steps until no pass of the rounds is one that private training checks again."""
    warm_up = [seconds(step, device) for _ in range(2)]
    while step.engine is not None:
        needed = (rounds + 1) * step.passes  # and one step whose memory is measured
        is_past = step.total >= WARM_UP_PASSES
        if is_past and step.total.bit_length() == (step.total + needed).bit_length():
            break
        warm_up.append(seconds(step, device))
    return warm_up


def block_seconds(step: Step, num_steps: int = 10) -> float:
    """Of one step among many that are not waited for, as recorded steps are taken."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / num_steps


def kernel_ms(step: Step, num_steps: int = 3, most: int = 16) -> dict[str, float]:
    """Milliseconds of a step by kernel, the longest first, and those of all."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for each in profile.key_averages():
        found[each.key[:100]] += each.self_device_time_total / 1e3 / num_steps
    return {"all": sum(found.values()), **dict(found.most_common(most))}


def measure(
    name: str, shape: Shape, device: str, rounds: int, wanted: Mapping[str, Callable[..., Step]]
) -> dict[str, Any]:
    """Times, ratios and peaks of one model."""
    figures: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    for kind, make in wanted.items():
        gc.collect()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        try:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            step = make(name, shape, device)
            first = seconds(step, device)
            first_peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
            warm_up = warmed_up(step, device, rounds)
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            seconds(step, device)
        except Exception as error:  # a peer that does not take the model is a result too
            figures[kind] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            print(kind, figures[kind], flush=True)
            continue
        peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
        figures[kind] = {
            "passes": step.passes,
            "first_step_seconds": first,
            "first_step_peak_gib": first_peak / GIB,
            "warm_up_seconds": warm_up,
            "peak_gib": peak / GIB,
        }
        if step.engine is not None:  # whose plan depends on what methods took on this GPU
            layers = step.engine.plan().layers
            figures[kind]["plan"] = dict(Counter(str(each.chosen.choice) for each in layers))
            kept = sum(each.chosen.cost.kept_bytes for each in layers)
            figures[kind]["planned_gib"] = kept / GIB
        print(kind, figures[kind], flush=True)
        steps[kind] = step
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    gc.collect()
    gc.freeze()  # compilers leave millions of objects behind, which take a second to look through
    is_graph = wanted.items() <= GRAPHS.items()
    for number in range(rounds):
        order = list(steps)[number % len(steps) :] + list(steps)[: number % len(steps)]
        for kind in order:
            step = steps[kind]
            times[kind].append(block_seconds(step) if is_graph else seconds(step, device))
    for kind, each in times.items():
        figures[kind] |= {"median_seconds": statistics.median(each), "seconds": each}
        if kind != REFERENCE and REFERENCE in times:
            figures[kind]["ratio"] = ratio_of(each, times[REFERENCE]).figures()
            least = figures[REFERENCE]["peak_gib"]
            figures[kind]["memory_ratio"] = figures[kind]["peak_gib"] / least if least else None
    if is_graph:
        for _ in range(rounds):
            for kind, step in steps.items():
                figures[kind].setdefault("seconds_alone", []).append(seconds(step, device))
        for kind, step in steps.items():
            alone = statistics.median(figures[kind]["seconds_alone"])
            figures[kind] |= {"median_seconds_alone": alone, "kernel_ms": kernel_ms(step)}
            print(kind, times[kind], alone, figures[kind]["kernel_ms"]["all"])
    gc.unfreeze()
    for step in steps.values():
        if step.engine is not None:
            step.engine.detach()
    return figures


def main() -> int:
    """Measure, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+", choices=list(MODELS))
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--graphs", action="store_true", help="one pass per step, recorded")
    parser.add_argument("--name", default="compiled-gpu")
    parser.add_argument("--directory", default="bench/results")
    options = parser.parse_args()
    sys.path.extend(str(ROOT / "bench" / "peers" / each) for each in ("site", "."))
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", message=".*compiled")
    hf.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = Shape(options.passes, options.rows, options.tokens)
    figures: dict[str, Any] = {"shape": vars(shape), "limits": LIMITS, "memory": MEMORY_LIMIT}
    contenders = GRAPHS if options.graphs else CONTENDERS
    wanted = {kind: make for kind, make in contenders.items() if kind in options.only}
    for name in options.models:
        torch.compiler.reset()
        print(name, flush=True)
        figures[name] = measure(name, shape, device, options.rounds, wanted)
        ours = figures[name].get("compiled, private", {})
        print(name, ours.get("ratio"), ours.get("memory_ratio"), flush=True)
        write_result(options.name, figures, directory=options.directory)
    print(unison.__version__, os.environ.get("UNISON_COMMIT", ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
