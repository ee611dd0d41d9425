"""What does recording add to a step of training?

    python -m bench.record_cpu       # 2 gloo ranks; writes bench/results/record-cpu.json

A run of preset `small` on two ranks, as `unison train --reducer ordered --record` takes it. In each
pair one step is recorded and one is not, in turn; both are steps of one run. Beside that ratio,
which needs a quiet machine, stands what a recorded step spends on digests, of its rows and of the
parameters, and on its line in the file, timed inside of it; the limit is held against that one.
"""

import argparse
import json
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import unison
from bench.runner import Ratio, ratio_of, write_result
from unison.config import Execution, MechanismConfig, Output, TrainConfig
from unison.models import build
from unison.replay import open_record
from unison.train import run_on_local_ranks
from unison.train.loop import Run, open_rows, plan_model
from unison.train.world import join_world

LIMIT = 1.02


def measure(options: argparse.Namespace) -> dict[str, Ratio]:
    """Time steps of one run in turn, with and without their digests, on every rank."""
    mechanism = MechanismConfig(
        preset="small",
        data="stdlib",
        reducer="ordered",
        granule=options.granule,
        batch_size=options.batch_size,
        steps=10_000,
        threads=1,
    )
    with join_world("cpu") as world, tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)
        config = TrainConfig(
            mechanism=mechanism,
            execution=Execution(device="cpu"),
            output=Output(folder=folder, record=True),
        )
        model_config, row_length = plan_model(mechanism)
        with (
            open_rows(mechanism, model_config, row_length, world) as rows,
            tempfile.TemporaryDirectory() as own,
        ):
            with unison.meta_init():
                model = build(model_config, device="meta")
            run = Run(config, model, *rows, world)
            recorder = run.recorder
            assert recorder is not None
            units, passes = recorder.units, run.regime.passes(range(mechanism.steps))
            seconds: dict[bool, list[float]] = {True: [], False: []}
            spent: list[float] = []
            with closing(passes), open_record(Path(own), units) as append:
                number = 0

                def take(record) -> None:
                    nonlocal number
                    append(type(record)(**vars(record) | {"step": number}))
                    number += 1

                see, in_rows = recorder.see, 0.0

                def timed_see(positions: Tensor, *columns: Tensor) -> None:
                    nonlocal in_rows
                    began = time.perf_counter()
                    see(positions, *columns)
                    in_rows += time.perf_counter() - began

                run.take_record, recorder.see = take, timed_see
                for step in range(1, 2 * options.repeats + 3):
                    is_recorded = (step + step // 2) % 2 == 0  # every other pair the other way
                    run.recorder = recorder if is_recorded else None
                    in_rows = 0.0
                    dist.barrier()
                    start = time.perf_counter()
                    figures, _ = run.advance(step, passes)
                    before = time.perf_counter()
                    run.record_step(step, figures)
                    end = time.perf_counter()
                    if step > 2:
                        seconds[is_recorded].append(end - start)
                        if is_recorded:
                            spent.append((end - start) / (before - start - in_rows))
            run.parallel.release()
            return {
                "recorded_over_not": ratio_of(seconds[True], seconds[False]),
                "step_with_digests_over_step": ratio_of(spent, [1.0] * len(spent)),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description="What does recording cost?")
    parser.add_argument("--repeats", type=int, default=20, help="pairs of steps")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--granule", type=int, default=8)
    options = parser.parse_args()
    found = run_on_local_ranks(measure, options, num_ranks=2)
    figures = {name: each.figures() for name, each in found.items()}
    digests = found["step_with_digests_over_step"]
    figures |= {"limit": LIMIT, "is_within": digests.high <= LIMIT, "num_ranks": 2}
    figures |= {"preset": "small", "batch_size": options.batch_size, "granule": options.granule}
    print(json.dumps(figures, indent=2))
    print(f"wrote {write_result('record-cpu', figures).name}")


if __name__ == "__main__":
    main()
