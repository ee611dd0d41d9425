"""Signals, and machines that run out of room: a clean end, and nothing lost."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.train.private_runs import SEEDED, config_of
from unison.config import TrainConfig
from unison.errors import OutOfRoom, Stopped
from unison.privacy import read_ledger
from unison.train import TrainResult, loop, resumed_config, run_on_local_ranks, train
from unison.train.run_folder import checkpoints_of

SMALL = {"reducer": "ordered", "granule": 2, "batch_size": 8, "steps": 4}


def train_and(config: TrainConfig, do, at: int, rank: int = 0) -> TrainResult:
    """Train, and do something at a step, on one rank."""
    original = loop.train_step

    def train_step(*args, step, **kwargs):
        if step == at and os.environ.get("RANK", "0") == str(rank):
            do()
        return original(*args, step=step, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        return train(config)


def kill(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def go_on(run: Path, text: Path) -> TrainResult:
    return train(resumed_config(run, config_of(run, text), given=set()))


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_a_signal_ends_a_run_after_its_step(text, tmp_path, number):
    before = signal.getsignal(number)
    straight = train(config_of(tmp_path / "straight", text, SEEDED, **SMALL))
    run = tmp_path / "run"
    config = config_of(run, text, SEEDED, **SMALL)  # it has no checkpoints otherwise
    with pytest.raises(Stopped) as caught:
        train_and(config, partial(kill, number), at=2)
    assert re.match(
        rf"stopped by {number.name} after step 2 of 4 \(unison train --resume {run} goes on",
        str(caught.value),
    )
    assert caught.value.number == number
    assert [path.name for path in checkpoints_of(run)] == ["step-000002"]
    assert go_on(run, text).digest == straight.digest
    ledger = read_ledger(run / "ledger.jsonl")
    assert (ledger.num_intents, ledger.num_commits) == (4, 4)  # no step twice
    assert signal.getsignal(number) is before


def test_a_second_signal_ends_it_at_once(text, tmp_path):
    config = config_of(tmp_path / "run", text, SEEDED, **SMALL)
    with pytest.raises(KeyboardInterrupt):
        train_and(config, partial(kill, signal.SIGINT, signal.SIGINT), at=2)
    assert not checkpoints_of(tmp_path / "run")


def test_a_signal_before_the_first_step_ends_it_at_once(text, tmp_path, monkeypatch):
    monkeypatch.setattr(loop.Run, "prepare", lambda run: kill(signal.SIGTERM))
    with pytest.raises(Stopped, match="stopped by SIGTERM before its next step"):
        train(config_of(tmp_path / "run", text, SEEDED, **SMALL))
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.usefixtures("forked_ranks")
def test_a_signal_to_one_rank_ends_all(text, tmp_path):
    straight = train(config_of(tmp_path / "straight", text, SEEDED, **SMALL))
    run = tmp_path / "run"
    config = config_of(run, text, SEEDED, **SMALL, shard="full")
    work = partial(train_and, do=partial(kill, signal.SIGTERM), at=2, rank=1)
    with pytest.raises(Stopped, match=r"after step 2 of 4 \(unison train --resume"):
        run_on_local_ranks(work, config, num_ranks=2)
    assert go_on(run, text).digest == straight.digest


def train_signalled_in(config: TrainConfig, place: str, rank: int) -> TrainResult:
    """Train, and send a rank a signal when it calls a function of the loop for the first time."""
    owner, _, name = place.rpartition(".")
    owner = getattr(loop, owner) if owner else loop
    original = getattr(owner, name)

    def signalled(*args, **kwargs):
        patch.undo()
        if os.environ["RANK"] == str(rank):
            kill(signal.SIGTERM)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, signalled)
        return train(config)


@pytest.mark.full
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("place", "rank"),
    [("plan_model", 1), ("build_rows", 0), ("Run.prepare", 0), ("mean_loss", 1)],
)
def test_a_signal_to_one_rank_before_the_first_step_ends_all(text, tmp_path, place, rank):
    run = tmp_path / "run"
    config = config_of(run, text, SEEDED, **SMALL, shard="full")
    work = partial(train_signalled_in, place=place, rank=rank)
    with pytest.raises(Stopped, match=r"stopped by SIGTERM before its next step$") as caught:
        run_on_local_ranks(work, config, num_ranks=2)
    assert caught.value.number == signal.SIGTERM
    assert not run.exists()


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), "could not be written: .*No space"),
        (MemoryError(), "rank 0 ran out of memory on cpu"),
        (torch.OutOfMemoryError("CUDA out of memory"), "rank 0 ran out of memory.*lower --micro"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), "ran out of memory"),
    ],
    ids=["disk", "memory", "cuda", "torch"],
)
def test_what_runs_out_is_said_in_a_sentence_and_the_checkpoint_stays(
    text, tmp_path, error, message
):
    run = tmp_path / "run"
    config = config_of(run, text, SEEDED, **SMALL, checkpoint_every=1)
    with pytest.raises(OutOfRoom, match=rf"(?s){message}.*\(unison train --resume"):
        train_and(config, partial(fail, error), at=3)
    assert [path.name for path in checkpoints_of(run)] == ["step-000001", "step-000002"]


def test_a_full_disk_while_figures_are_written(text, tmp_path, monkeypatch):
    original = loop.open_metrics

    class Full:
        def __init__(self, *args, **kwargs):
            self._opened = original(*args, **kwargs)

        def __enter__(self):
            write = self._opened.__enter__()

            def record(step, **values):
                if step == 2:
                    raise OSError(errno.ENOSPC, "No space left on device")
                write(step, **values)

            return record

        def __exit__(self, *error):
            return self._opened.__exit__(*error)

    monkeypatch.setattr(loop, "open_metrics", Full)
    with pytest.raises(OutOfRoom, match=r"No space left on device.*counts the 2 steps"):
        train(config_of(tmp_path / "run", text, SEEDED, **SMALL))


def test_seconds_between_checkpoints(text, tmp_path, monkeypatch):
    settings = SMALL | {"checkpoint_seconds": 1e-3, "keep_checkpoints": 9}
    train(config_of(tmp_path / "run", text, SEEDED, **settings))
    found = [path.name for path in checkpoints_of(tmp_path / "run")]
    assert found == ["step-000001", "step-000002", "step-000003"]


@pytest.mark.full
@pytest.mark.parametrize("nproc", [1, 2])
def test_sigterm_as_a_scheduler_sends_it(text, tmp_path, nproc):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "unison", "train", "--data", text, "--out", run]
    command += ["--nproc", nproc, "--steps", 100_000, "--batch-size", 4, "--row-length", 32]
    command += ["--num-layers", 1, "--eval-every", 0, "--log-every", 1, "--no-tensorboard"]
    started = subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = run / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_text().count("\n") > 3):
        assert started.poll() is None, started.communicate()
        time.sleep(0.05)
    started.terminate()
    _, err = started.communicate(timeout=60)
    assert started.returncode == 128 + signal.SIGTERM
    assert re.fullmatch(
        rf"unison: stopped by SIGTERM after step \d+ of 100000 \(unison train --resume {run} goes "
        r"on from its checkpoint\)\n",
        err,
    )
    assert len(checkpoints_of(run)) == 1
