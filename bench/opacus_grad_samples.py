"""Do Opacus's own tests of per-sample gradients pass on ours?

    pip install --no-deps --target bench/peers opacus==1.6.0 opt_einsum
    python -m bench.opacus_grad_samples [--examples 20]

Their tests call one helper, `compute_opacus_grad_sample`, and compare it with a loop over samples.
Here that helper is `clipped_gradients` with a bound that clips nothing, once per sample with the
losses of the others at 0; and `DPLSTM`, `DPMultiheadAttention` and the like are torch's own layers.
A packed sequence, and a bag with offsets, is given as padded rows and lengths, and packed inside of
the loss, since a batch has its samples along a dimension. Tests that never call the helper (of
Opacus's own arithmetic) say nothing of unison and are counted apart.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from bench.runner import ROOT, write_result
from unison.clip import clipped_gradients

PEERS = ROOT / "bench" / "peers"
NO_BOUND = 1e30
EXAMPLES, REACHED = "UNISON_EXAMPLES", "UNISON_REACHED"

# ---- in the place of their helper ----------------------------------------------------------------

_num_calls = 0


def grad_sample(
    x: Any,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",
) -> dict[str, Tensor]:
    """Per-sample gradients of the mean, or sum, of |output|; as Opacus's helper of tests."""
    global _num_calls
    _num_calls += 1
    batch, losses, size = _with_samples_first(x, batch_first, loss_reduction == "mean")
    found = {
        name: torch.zeros(size, *parameter.shape)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if size == 0:
            clipped_gradients(module, losses, batch, max_norm=1.0)
            return {}
        for sample in range(size):
            weights = (torch.arange(size) == sample).to(torch.get_default_dtype())
            sums = clipped_gradients(
                module, lambda m, b: losses(m, b[0]) * b[1], (batch, weights), max_norm=NO_BOUND
            ).sums
            for name, rows in found.items():
                rows[sample] = sums[name]
    if isinstance(x, PackedSequence) and x.sorted_indices is not None:
        return {name: rows[x.sorted_indices] for name, rows in found.items()}  # their order
    return found


Losses = Callable[[nn.Module, Any], Tensor]


def _with_samples_first(x: Any, batch_first: bool, is_mean: bool) -> tuple[Any, Losses, int]:
    """A batch with samples along dimension 0, its losses [samples] and their number."""

    def reduced(output: Tensor) -> Tensor:
        rows = output.abs().flatten(1)
        return rows.mean(1) if is_mean else rows.sum(1)

    if isinstance(x, PackedSequence):
        padded, lengths = pad_packed_sequence(x, batch_first=True)

        def of_packed(module: nn.Module, batch: Any) -> Tensor:
            rows, own = batch
            packed = pack_padded_sequence(rows, own.cpu(), batch_first=True, enforce_sorted=False)
            output, _ = pad_packed_sequence(
                module(packed), batch_first=True, total_length=rows.shape[1]
            )
            sums = output.abs().sum((1, 2))
            return sums / (own * output.shape[2]) if is_mean else sums

        return (padded, lengths), of_packed, len(lengths)
    if isinstance(x, tuple):
        ids, offsets = x
        lengths = torch.diff(offsets, append=torch.tensor([len(ids)]))
        padded = torch.zeros(len(offsets), int(lengths.max()), dtype=torch.long)
        padded[torch.arange(padded.shape[1]) < lengths[:, None]] = ids

        def of_bags(module: nn.Module, batch: Any) -> Tensor:
            rows, own = batch
            is_there = torch.arange(rows.shape[1]) < own[:, None]
            return reduced(module(rows[is_there], pad(own.cumsum(0)[:-1], (1, 0))))

        return (padded, lengths), of_bags, len(offsets)

    def of_rows(module: nn.Module, batch: Tensor) -> Tensor:
        output = module(batch if batch_first else batch.transpose(0, 1))
        return reduced(output if batch_first else output.transpose(0, 1))

    rows = x if batch_first else x.transpose(0, 1)
    return rows, of_rows, len(rows)


# ---- a plugin of pytest --------------------------------------------------------------------------


def pytest_configure() -> None:
    """Put ours in the place of theirs, before their tests are imported."""
    import hypothesis

    helper = "compute_opacus_grad_sample"
    ours = {
        "opacus.layers": {
            "DPRNN": nn.RNN,
            "DPGRU": nn.GRU,
            "DPLSTM": nn.LSTM,
            "DPMultiheadAttention": nn.MultiheadAttention,
        },
        "opacus.utils.per_sample_gradients_utils": {helper: grad_sample},
        "opacus.tests.grad_samples.common": {helper: grad_sample},
    }
    for module, names in ours.items():
        vars(import_module(module)).update(names)
    hypothesis.settings.register_profile(
        "peers",
        max_examples=int(os.environ[EXAMPLES]),
        derandomize=True,
        deadline=None,
        database=None,
    )
    hypothesis.settings.load_profile("peers")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Write down how often a test came to unison, and whether it passed."""
    before, outcome = _num_calls, "failed"
    try:
        yield
        outcome = "passed"
    finally:
        line = {"test": item.name, "outcome": outcome, "calls": _num_calls - before}
        with Path(os.environ[REACHED]).open("a") as file:
            file.write(json.dumps(line) + "\n")


# ---- the run -------------------------------------------------------------------------------------


def run(num_examples: int) -> list[dict[str, Any]]:
    """What became of each of their tests."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "reached.jsonl"
        code = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
        code += ["-p", "bench.opacus_grad_samples", "--rootdir", str(PEERS), "-c", os.devnull]
        subprocess.run(
            [*code, str(PEERS / "opacus" / "tests" / "grad_samples")],
            env=os.environ
            | {EXAMPLES: str(num_examples), REACHED: str(lines), "OMP_NUM_THREADS": "1"}
            | {"PYTHONPATH": os.pathsep.join([str(PEERS), str(ROOT)])},
            check=False,  # what failed is in the lines
        )
        return [json.loads(line) for line in lines.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=20, help="of hypothesis, for each test")
    options = parser.parse_args()
    if not (PEERS / "opacus").is_dir():
        parser.error(
            f"Opacus is not in {PEERS.relative_to(ROOT)}: pip install --no-deps --target "
            "bench/peers opacus==1.6.0 opt_einsum"
        )
    tests = run(options.examples)
    reached = [each for each in tests if each["calls"]]
    figures = {
        "examples_per_test": options.examples,
        "reach_unison": len(reached),
        "of_them_passed": sum(each["outcome"] == "passed" for each in reached),
        "never_call_it": len(tests) - len(reached),
        "calls": sum(each["calls"] for each in reached),
        "tests": tests,
    }
    print({name: value for name, value in figures.items() if name != "tests"})
    print(write_result("opacus-grad-samples", figures))


if __name__ == "__main__":
    main()
