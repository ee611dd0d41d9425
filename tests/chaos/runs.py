"""Private, sharded runs whose ranks are killed at random: the bits of a run that never stopped.

An elastic agent, which is what torchrun runs, starts the ranks and starts them again; what is left
when it gives up goes on with another number of ranks. `SEED` decides worlds, victims and moments;
how far a run has come at a moment depends on the machine.
"""

import json
import multiprocessing
import os
import random
import secrets
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api

from tests.harness.pool import PRELOAD
from tests.train.private_runs import DELTA, SEEDED, config_of
from tests.train.ranks import forked_ranks
from unison.config import TrainConfig
from unison.privacy import epsilon_if_secret, read_ledger
from unison.run_files import read_result
from unison.train import resumed_config, run_on_local_ranks, train
from unison.train.run_folder import checkpoints_of

__all__ = ["forked_ranks"]

SEED = 27
NUM_RUNS = 50
STEPS = 8
SMALL = {"reducer": "ordered", "granule": 2, "batch_size": 8, "steps": STEPS, "shard": "full"}


def one_rank(config: TrainConfig) -> None:
    """What torchrun would run: a rank that ends with an error is started again."""
    torch.set_num_threads(1)
    train(config)


def launch(config: TrainConfig, num_ranks: int, *, max_restarts: int) -> None:
    multiprocessing.set_forkserver_preload(PRELOAD)
    settings = api.LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    with suppress(ChildFailedError):  # more restarts than it had
        api.elastic_launch(settings, one_rank)(config)


@dataclass
class Killer:
    """A thread that kills ranks of this process at random moments while a run goes on."""

    run: Path
    rng: random.Random
    num_kills: int
    only: signal.Signals | None = None
    kills: list[str] = field(default_factory=list)
    covered: int = 0  # the last step of a checkpoint that was complete before a kill
    is_over: bool = False

    def __enter__(self) -> "Killer":
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over = True
        self._thread.join()

    def _work(self) -> None:
        for _ in range(self.num_kills):
            # In the middle of a checkpoint, or some time after a step.
            if self.rng.random() < 0.4:
                self._wait_for(lambda: any(self.run.glob("checkpoints/.step-*.partial/*")))
            else:
                num_lines = self.rng.randrange(1, STEPS) + self._num_lines()
                self._wait_for(lambda most=num_lines: self._num_lines() >= most)
                time.sleep(self.rng.random() * 0.3)
            ranks = [each for each in multiprocessing.active_children() if each.is_alive()]
            if self.is_over or not ranks:
                return
            number = self.only or self.rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            victims = ranks if self.rng.random() < 0.3 else [self.rng.choice(ranks)]
            done = [int(path.name[5:]) for path in checkpoints_of(self.run)]
            self.covered = max([self.covered, *done])
            for victim in victims:
                with suppress(ProcessLookupError):
                    os.kill(victim.pid or 0, number)
            self.kills.append(f"{number.name} of {len(victims)} after step {self.covered}")
            self._wait_for(lambda gone=ranks: not any(each.is_alive() for each in gone))

    def _num_lines(self) -> int:
        path = self.run / "ledger.jsonl"
        with suppress(OSError):
            return path.read_bytes().count(b'"kind": "commit"')
        return 0

    def _wait_for(self, condition) -> None:
        while not self.is_over and not condition():
            time.sleep(0.002)


def session_starts(run: Path) -> list[int]:
    lines = map(json.loads, (run / "ledger.jsonl").read_text().splitlines())
    return [line["next"]["step"] for line in lines if line["kind"] == "open"]


def check_run(run: Path, straight: Path, killer: Killer) -> None:
    told = f"{killer.kills}, sessions from {session_starts(run)}"
    assert read_result(run).digest == read_result(straight).digest, told
    true, found = (read_ledger(each / "ledger.jsonl") for each in (straight, run))
    assert not found.problems, told
    assert {each.step for each in found.releases} == set(range(STEPS))
    spent = [epsilon_if_secret(each.spending, DELTA, "rdp") for each in (true, found)]
    assert spent[1] >= spent[0], told
    if killer.covered:  # what a complete checkpoint covers does not come again
        assert max(session_starts(run)) >= killer.covered, told


def disturb(run: Path, text: Path, rng: random.Random, *, num_kills: int, **settings) -> Killer:
    """Train while ranks are killed, and go on until the run is complete."""
    every = rng.choice([1, 2])
    config = config_of(run, text, SEEDED, **SMALL, checkpoint_every=every, **settings)
    with Killer(run, rng, num_kills) as killer:
        launch(config, rng.randrange(2, 5), max_restarts=rng.choice([0, 1, 3]))
    while not (run / "result.json").is_file():
        num_ranks = rng.randrange(1, 4)
        if not checkpoints_of(run):  # nothing to go on with: its ledger stays, and it begins anew
            run.rename(run.with_name(secrets.token_hex(4)))
            launch(config, num_ranks, max_restarts=0)
            continue
        again = resumed_config(run, config, given=set())
        run_on_local_ranks(train, again, num_ranks=num_ranks) if num_ranks > 1 else train(again)
    return killer


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A run that nobody disturbs, on one rank; beside it what it is trained on."""
    folder = tmp_path_factory.mktemp("straight")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(config_of(folder / "run", folder / "text.txt", SEEDED, **SMALL | {"shard": "none"}))
    torch.set_num_threads(threads)
    return folder / "run"


def test_a_killed_rank_costs_no_bit(straight, tmp_path):
    text, run = straight.parent / "text.txt", tmp_path / "run"
    config = config_of(run, text, SEEDED, **SMALL, checkpoint_every=1)
    with Killer(run, random.Random(SEED), 1, only=signal.SIGKILL) as killer:
        launch(config, 2, max_restarts=1)
    check_run(run, straight, killer)
    assert len(session_starts(run)) >= 2, "nobody was killed"


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("number", range(NUM_RUNS))
def test_runs_that_are_disturbed(straight, tmp_path, number):
    rng = random.Random(f"{SEED} {number}")
    run = tmp_path / "run"
    num_kills = rng.randrange(1, 4)
    killer = disturb(run, straight.parent / "text.txt", rng, num_kills=num_kills)
    check_run(run, straight, killer)
