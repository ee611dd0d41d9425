"""Steps of `PrivateTrainer` beside those of transformers' own `Trainer`, and Opacus.

    python -m bench.trainer_gpu --pairs eager
    python -m bench.trainer_gpu --pairs compiled

LoRA (rank 16, q_proj and v_proj) on a Llama of 7B shape: random weights in bfloat16, which all
contenders share, B = 8, T = 1024, what `TrainingArguments` says unless it is given here. A pair is
both trainers with the same arguments, eager or with `torch_compile=True`; Opacus stands beside the
eager one. What is timed is a step of `trainer.train()`, from the end of one to the end of the next:
batch, passes, clipping by `max_grad_norm`, optimizer, schedule. Each trainer runs in a thread and
waits for its turn at `on_step_end`, so that in each round every contender takes one step, in an
order that rotates; ratios are paired by round. Private batches are shuffled ones: eight rows each,
as the other side has (Poisson draws as many on average, in passes of eight and a smaller one).

Rounds lie between steps 32 and 64, at which private training checks again that samples do not mix:
what that takes is in the steps before (`warm_up_seconds`). The results are
bench/results/trainer-gpu-eager.json and -compiled.json; compilers take minutes.

Packages that are missing are looked for in an ignored folder
(`pip install --no-deps --target bench/peers/site accelerate opacus opt_einsum`).
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import unison
from bench.compiled_gpu import GIB, Shape, build, opacus, seconds
from bench.runner import ROOT, ratio_of, write_result

LIMIT = 1.05
WARM_UP_STEPS = 32
PLAIN, PRIVATE, OPACUS = "Trainer", "PrivateTrainer", "opacus"
PAIRS = ("eager", "compiled")
VOCAB = 200  # tokens that rows are drawn from; all models have more


class Turns(hf.TrainerCallback):
    """Runs a trainer in a thread, one step of it at a time.

    Args:
        trainer: What to run.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self._error = trainer, None
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = False
        trainer.add_callback(self)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.trainer.train()
        except BaseException as error:
            self._error: BaseException | None = error
        self._done.release()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the next turn."""
        self._done.release()
        self._go.acquire()
        control.should_training_stop = self._is_over

    def __call__(self) -> None:
        """Let the trainer take one step."""
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        if not self._thread.is_alive():
            raise RuntimeError("the trainer ended before it was told to")

    def end(self) -> None:
        """End the run."""
        self._is_over = True
        self._go.release()
        self._thread.join()


def rows_of(shape: Shape) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (64 * shape.rows, shape.tokens), generator=generator)
    return [{"input_ids": each, "labels": each} for each in ids]


def model_of(name: str, device: str, base: nn.Module) -> nn.Module:
    """A model with an adapter of its own, on the frozen weights of another."""
    model = build(name, device)
    frozen = {name: each for name, each in base.named_parameters() if not each.requires_grad}
    model.load_state_dict(frozen, strict=False, assign=True)
    return model


def trainer_of(
    model: nn.Module, shape: Shape, folder: str, *, is_private: bool, **settings: Any
) -> Turns:
    args = hf.TrainingArguments(
        folder,
        per_device_train_batch_size=shape.rows,
        max_steps=10_000,  # it is ended before
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    given: dict[str, Any] = {
        "model": model,
        "args": args,
        "train_dataset": rows_of(shape),
        "data_collator": hf.default_data_collator,
    }
    if not is_private:
        return Turns(hf.Trainer(**given))
    from unison.hf import PrivateTrainer

    class Timed(PrivateTrainer):
        def _spent(self) -> dict[str, float]:
            return {}  # ε is for after the run; a machine to measure on may not be able to count it

    privacy = unison.Privacy(noise_multiplier=1.0, delta=1e-5, sampling="shuffled")
    return Turns(Timed(**given, privacy=privacy))


def forget_accelerate() -> None:
    """Let the next trainers have other settings: accelerate keeps the first ones."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def measure(pair: str, name: str, shape: Shape, options: Any) -> dict[str, Any]:
    """Times, ratios and peaks of one pair."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {"torch_compile": pair == "compiled", "bf16": options.autocast}
    base = build(name, device)
    figures: dict[str, Any] = {}
    steps: dict[str, Callable[[], Any]] = {}
    folder = tempfile.TemporaryDirectory()

    def trainer(is_private: bool) -> Turns:
        model = model_of(name, device, base)
        where = f"{folder.name}/{is_private}"
        return trainer_of(model, shape, where, is_private=is_private, **settings)

    contenders: dict[str, Callable[[], Callable[[], Any]]] = {
        PRIVATE: lambda: trainer(True),
        PLAIN: lambda: trainer(False),
    }
    if pair == "eager":
        contenders[OPACUS] = lambda: opacus(name, shape, device)
    for kind, make in contenders.items():
        gc.collect()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        try:
            step = make()
            first = seconds(step, device)
            num_steps = WARM_UP_STEPS if kind == PRIVATE else 3
            warm_up = [seconds(step, device) for _ in range(num_steps - 1)]
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            seconds(step, device)
        except Exception as error:  # a contender that does not take the model is a result too
            figures[kind] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            print(pair, kind, figures[kind], flush=True)
            continue
        peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
        figures[kind] = {
            "first_step_seconds": first,
            "warm_up_seconds": warm_up,
            "peak_gib_beside_weights": peak / GIB,
        }
        print(pair, kind, figures[kind], flush=True)
        steps[kind] = step
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    gc.collect()
    gc.freeze()  # compilers leave millions of objects behind, which take a second to look through
    for number in range(options.rounds):
        order = list(steps)[number % len(steps) :] + list(steps)[: number % len(steps)]
        for kind in order:
            times[kind].append(seconds(steps[kind], device))
    gc.unfreeze()
    for kind, each in times.items():
        figures[kind] |= {"median_seconds": statistics.median(each), "seconds": each}
        if kind != PLAIN and PLAIN in times:
            figures[kind]["ratio"] = ratio_of(each, times[PLAIN]).figures()
            print(pair, kind, figures[kind]["ratio"], flush=True)
    for step in steps.values():
        if isinstance(step, Turns):
            step.end()
    folder.cleanup()
    return figures


def main() -> int:
    """Measure, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=["llama-7b", "tiny"], default="llama-7b")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=PAIRS)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--autocast", action="store_true", help="bf16=True, on top of bf16 weights")
    parser.add_argument("--name", default="trainer-gpu")
    parser.add_argument("--directory", default="bench/results")
    options = parser.parse_args()
    if not 2 <= options.rounds < WARM_UP_STEPS:
        parser.error(f"--rounds lie between two checks: 2 to {WARM_UP_STEPS - 1}")
    sys.path.extend(str(ROOT / "bench" / "peers" / each) for each in ("site", "."))
    try:
        import accelerate
    except ModuleNotFoundError:
        print("transformers' Trainer needs accelerate, which is not installed", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", message=".*compiled")
    hf.logging.set_verbosity_error()
    shape = Shape(1, options.rows, options.tokens)
    given = {
        "model": options.model,
        "shape": vars(shape),
        "limit": LIMIT,
        "autocast": options.autocast,
        "versions": {each.__name__: each.__version__ for each in (hf, accelerate)},
    }
    for pair in options.pairs:
        start = time.perf_counter()
        found = measure(pair, f"{options.model}-lora", shape, options)
        found["all_seconds"] = time.perf_counter() - start
        write_result(f"{options.name}-{pair}", given | found, directory=options.directory)
        torch.compiler.reset()
        forget_accelerate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
