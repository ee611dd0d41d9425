"""What does per-sample clipping cost a training step, beside Opacus, FastDP and no privacy?

    python -m bench.clipping_cpu             # writes bench/results/clipping-cpu.json

A 6-layer GPT of width 512 trains with AdamW on one thread. In each round every contender takes one
whole step (forward, backward, clipped sum, Gaussian noise, division, optimizer), in an order that
rotates; ratios are of the steps of one round. Each peer runs its own code for clipping and noise.

Nothing is timed before every contender's noiseless gradient agrees with a float64 loop over
samples. The peers hook torch's own layer classes and cannot broadcast position ids, so they get the
same model made of those classes, with ids for every sample; its head is not tied, for their sake.
"""

import argparse
import contextlib
import gc
import importlib
import io
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from bench.memory import Category, MemoryTracker
from bench.runner import ROOT, ratio_of, wall_seconds, write_result
from unison.models import LanguageModel, ModelConfig, build, per_sample_loss, preset
from unison.models.language_models import LanguageModelHead, LayerNorm

SHAPE = {"vocab_size": 4096, "d_model": 512, "num_layers": 6, "num_heads": 8, "d_ff": 2048}
CONFIG = preset("gpt2", context_length=256, tie_head=False, **SHAPE)
LIMIT = 1.35  # the upper 95 % bound of auto/non-private; that of auto/peer is 1
WARMUP_ROUNDS = 2
CHECKED_SAMPLES = 4
# The relative L2 error of any parameter's clipped mean gradient. The one exception takes its norms
# with float32 `Tensor.norm`, which on a CPU reads 3e-5 too low for 2 million elements.
TOLERANCE = 1e-5
TOLERANCES = {"opacus-hooks": 1e-4}
PEERS = {"opacus-hooks": "opacus", "opacus-ghost": "opacus", "fastdp-bk": "fastDP"}
FOLDERS = {"opacus": "bench/peers/site", "fastDP": "bench/peers/fastdp"}
INSTALL = {
    "opacus": "pip install --no-deps --target bench/peers/site opacus",
    "fastDP": "git clone https://github.com/awslabs/fast-differential-privacy bench/peers/fastdp",
}


@dataclass(frozen=True)
class Task:
    """What every contender does, and the optimizer it hands its gradients to."""

    batch_size: int
    tokens: int
    max_norm: float = 1.0
    noise_multiplier: float = 1.0
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = AdamW

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return replace(CONFIG, context_length=max(CONFIG.context_length, self.tokens))

    def rows(self, number: int) -> Tensor:  # [batch, tokens + 1]
        """The batch of a step; samples differ in how many ids they use, and so in norm."""
        generator = torch.Generator().manual_seed(number)
        shape = (self.batch_size, self.tokens + 1)
        ids = torch.randint(0, CONFIG.vocab_size, shape, generator=generator)
        num_ids = CONFIG.vocab_size // 4 ** (torch.arange(self.batch_size) % 4)
        return ids % num_ids[:, None]


Step = Callable[[Tensor], None]  # takes rows [batch, tokens + 1]
Built = tuple[Step, Optimizer]  # with torch's own optimizer, whatever wraps it
Contender = Callable[[Task], Built]
Seconds = dict[str, list[float]]  # of every round, by contender
Peaks = dict[str, int]


def losses_of(model: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:  # [batch]
    return per_sample_loss(model(rows[:, :-1].contiguous()), rows[:, 1:])  # as Opacus needs it


def step_as_usual(model: Any, optimizer: Any, reduce: Callable[..., Any] = torch.mean) -> Step:
    """The loop that users write, whatever model, optimizer and loss were wrapped in."""

    def step(rows: Tensor) -> None:
        reduce(losses_of(model, rows)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def non_private(task: Task) -> Built:
    model = build(task.config)
    optimizer = task.make_optimizer(model.parameters())
    return step_as_usual(model, optimizer), optimizer


def ours(task: Task, *, mode: str) -> Built:
    clipped_gradients = find_clipped_gradients()
    model = build(task.config)
    optimizer = task.make_optimizer(model.parameters())
    std = task.noise_multiplier * task.max_norm

    def step(rows: Tensor) -> None:
        clipped = clipped_gradients(model, losses_of, rows, max_norm=task.max_norm, mode=mode)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.grad = clipped.sums[name].add_(noise, alpha=std).div_(task.batch_size)
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def find_clipped_gradients() -> Any:
    """`unison.clip.clipped_gradients`, or None where there is none."""
    try:
        return getattr(importlib.import_module("unison.clip"), "clipped_gradients", None)
    except ModuleNotFoundError as error:
        if error.name != "unison.clip":
            raise
        return None


def build_for_peers(task: Task) -> LanguageModel:
    """The built-in model, made of torch's layer classes, with position ids [batch, tokens]."""
    model = build(task.config)
    for name, module in list(model.named_modules()):
        with torch.device("meta"):
            match module:
                case LanguageModelHead():
                    other = nn.Linear(module.in_features, module.out_features, bias=False)
                case LayerNorm():
                    other = nn.LayerNorm(list(module.normalized_shape), eps=module.eps)
                case _:
                    continue
        other.load_state_dict(module.state_dict(), assign=True)
        model.set_submodule(name, other)

    def repeat_for_each_sample(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        return inputs[0].repeat(task.batch_size, 1)  # a copy: Opacus needs contiguous ids

    model.get_submodule("position_embeddings").register_forward_pre_hook(repeat_for_each_sample)
    return model


def opacus(task: Task, *, is_ghost: bool) -> Built:
    """Opacus: clip the kept per-sample gradients, or (ghost) take norms and a second backward."""
    grad_sample = importlib.import_module("opacus.grad_sample")
    optimizers = importlib.import_module("opacus.optimizers")
    model = build_for_peers(task)
    optimizer = task.make_optimizer(model.parameters())
    make = optimizers.DPOptimizerFastGradientClipping if is_ghost else optimizers.DPOptimizer
    private = make(
        optimizer,
        noise_multiplier=task.noise_multiplier,
        max_grad_norm=task.max_norm,
        expected_batch_size=task.batch_size,
    )
    if not is_ghost:
        return step_as_usual(grad_sample.GradSampleModule(model), private), optimizer
    utils = importlib.import_module("opacus.utils.fast_gradient_clipping_utils")
    wrapped = grad_sample.GradSampleModuleFastGradientClipping(model, max_grad_norm=task.max_norm)
    reduce = partial(utils.DPTensorFastGradientClipping, wrapped, private)
    return step_as_usual(wrapped, private, reduce), optimizer


def fastdp(task: Task) -> Built:
    """FastDP's book-keeping in its default mode, MixOpt, with the usual min(1, C / norm).

    With origin parameters, autograd is spared the non-private gradients of the others.
    """
    model = build_for_peers(task)
    optimizer = task.make_optimizer(model.parameters())
    with contextlib.redirect_stdout(io.StringIO()):
        engine = importlib.import_module("fastDP").PrivacyEngine(
            model,
            batch_size=task.batch_size,
            sample_size=10**6,
            epochs=1,
            max_grad_norm=task.max_norm,
            noise_multiplier=task.noise_multiplier,
            clipping_mode="MixOpt",
            clipping_fn="Abadi",
            origin_params=["token_embeddings", "position_embeddings"],
        )
    engine.attach(optimizer)
    return step_as_usual(model, optimizer), optimizer


OURS: dict[str, Contender] = {
    f"unison-{mode}": partial(ours, mode=mode)
    for mode in ("auto", "grad_materialize", "ghost_bk", "flash_fuse_bk", "ghost", "flash_fuse")
}
CONTENDERS: dict[str, Contender] = {
    "non-private": non_private,
    "opacus-hooks": partial(opacus, is_ghost=False),
    "opacus-ghost": partial(opacus, is_ghost=True),
    "fastdp-bk": fastdp,
    **OURS,
}


def load_peer(package: str) -> str:
    """Import a peer and return its version; end with exit code 2 if it is missing."""
    sys.path.append(str(ROOT / FOLDERS[package]))  # last: it must hide nothing of ours
    try:
        with warnings.catch_warnings(action="ignore"):
            return importlib.import_module(package).__version__
    except ModuleNotFoundError as error:
        remedy = f"in the repository's root, run `{INSTALL[package]}`"
        print(f"The peer {package} is missing ({error}): {remedy}.", file=sys.stderr)
        raise SystemExit(2) from None


class Recorder(Optimizer):
    """An optimizer that keeps the gradients it is given and changes nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.gradients: list[Tensor | None] = []

    def step(self, closure: Any = None) -> Any:
        """Keep the gradients; those of contenders are set to None afterwards, not to zero."""
        self.gradients = [value.grad for value in self.param_groups[0]["params"]]


def expected_gradients(task: Task, rows: Tensor) -> tuple[float, list[Tensor]]:
    """A clip norm amid the samples' norms, and the clipped mean: in float64, one by one."""
    model = build(task.config).double()
    values = list(model.parameters())
    samples = [torch.autograd.grad(losses_of(model, row[None]).sum(), values) for row in rows]
    squares = [sum(float(g.square().sum()) for g in sample) for sample in samples]
    norms = torch.tensor(squares, dtype=torch.float64).sqrt()  # [batch]
    max_norm = statistics.median(norms.tolist())
    weights = (max_norm / norms).clamp(max=1) / len(rows)
    means = [torch.tensordot(weights, torch.stack(g), dims=1) for g in zip(*samples, strict=True)]
    return max_norm, means


def check_agreement(task: Task, contenders: dict[str, Contender]) -> tuple[float, dict[str, float]]:
    """Compare every private contender with the loop; the clip norm to use, and the errors."""
    task = replace(task, batch_size=min(task.batch_size, CHECKED_SAMPLES), noise_multiplier=0.0)
    rows = task.rows(0)
    max_norm, expected = expected_gradients(task, rows)
    task = replace(task, max_norm=max_norm, make_optimizer=Recorder)
    errors: dict[str, float] = {}
    for name in [name for name in contenders if name != "non-private"]:
        step, recorder = contenders[name](task)
        step(rows)
        assert isinstance(recorder, Recorder)
        errors[name] = max(
            math.inf if found is None else float((found - truth).norm() / truth.norm())
            for found, truth in zip(recorder.gradients, expected, strict=True)
        )
        if not errors[name] <= TOLERANCES.get(name, TOLERANCE):
            raise SystemExit(f"{name} is not timed: its gradient is off by {errors[name]:.1e}")
    return max_norm, errors


def peak_bytes(step: Step, optimizer: Optimizer, rows: Tensor) -> int:
    """What a step's tensors take at most, parameters and optimizer state not counted."""
    with MemoryTracker() as tracker:
        state = [value for values in optimizer.state.values() for value in values.values()]
        tracker.label(Category.PARAMETERS, optimizer.param_groups[0]["params"])
        tracker.label(Category.OPTIMIZER_STATE, state)
        step(rows)
    counted = set(Category) - {Category.PARAMETERS, Category.OPTIMIZER_STATE}
    peak = tracker.peak(counted)
    return sum(peak[category] for category in counted)


def measure(task: Task, contenders: dict[str, Contender], rounds: int) -> tuple[Seconds, Peaks]:
    """The seconds of each contender's steps, round by round, and the peak bytes of one step."""
    built = {name: make(task) for name, make in contenders.items()}
    names, seconds = list(built), Seconds((name, []) for name in built)
    for number in range(-WARMUP_ROUNDS, rounds):
        rows = task.rows(number + WARMUP_ROUNDS)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            gc.collect()
            gc.disable()
            elapsed = wall_seconds(partial(built[name][0], rows))
            gc.enable()
            if number >= 0:
                seconds[name].append(elapsed)
    return seconds, {name: peak_bytes(*built[name], task.rows(0)) for name in names}


def ratios_of(seconds: Seconds) -> dict[str, dict[str, Any]]:
    pairs = [(name, "non-private") for name in seconds if name != "non-private"]
    pairs += [(name, peer) for name in OURS for peer in PEERS if {name, peer} <= seconds.keys()]
    ratios: dict[str, dict[str, Any]] = {}
    for name, other in pairs:
        ratio = ratios[f"{name}/{other}"] = ratio_of(seconds[name], seconds[other]).figures()
        if name == "unison-auto":
            limit = LIMIT if other == "non-private" else 1.0
            ratio |= {"limit": limit, "is_within": ratio["high"] <= limit}
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", nargs="+", choices=[*PEERS, *OURS], default=[*PEERS, *OURS])
    parser.add_argument("--directory", default="bench/results", help="where the result goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for peers_habit in ("Full backward hook is firing", "Using a non-full backward hook"):
        warnings.filterwarnings("ignore", message=peers_habit)

    versions = {PEERS[name]: load_peer(PEERS[name]) for name in options.only if name in PEERS}
    names = ["non-private", *options.only]
    if find_clipped_gradients() is None:
        print("ours are left out: there is no unison.clip.clipped_gradients", file=sys.stderr)
        names = [name for name in names if name not in OURS]
    contenders = {name: CONTENDERS[name] for name in names}

    task = Task(batch_size=options.batch_size, tokens=options.tokens)
    max_norm, errors = check_agreement(task, contenders)
    task = replace(task, max_norm=max_norm)
    seconds, peaks = measure(task, contenders, options.rounds)
    figures = {
        "settings": {**vars(options), "max_norm": max_norm, "noise": task.noise_multiplier},
        "model": asdict(task.config),
        "peers": versions,
        "gradient_errors": errors,
        "gradient_tolerances": {name: TOLERANCES.get(name, TOLERANCE) for name in errors},
        "peak_mib_of_a_step": {name: peak / 2**20 for name, peak in peaks.items()},
        "ratios": ratios_of(seconds),
    }
    print(write_result("clipping-cpu", figures, directory=options.directory).read_text())


if __name__ == "__main__":
    main()
