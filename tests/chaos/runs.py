"""Private, sharded runs whose ranks are killed at random: the bits of a run that never stopped.

An elastic agent, which is what torchrun runs, starts the ranks and starts them again; what is left
when it gives up goes on with another number of ranks. `SEED` decides worlds, victims and moments;
how far a run has come at a moment depends on the machine. `python -m tests.chaos` writes what came
of all of them to bench/results/chaos.json.
"""

import json
import multiprocessing
import os
import random
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api

from tests.harness.pool import PRELOAD
from tests.train.private_runs import DELTA, SEEDED, config_of
from unison.config import TrainConfig
from unison.privacy import epsilon_if_secret, read_ledger
from unison.run_files import read_result
from unison.train import resumed_config, run_on_local_ranks, train
from unison.train.run_folder import checkpoints_of

SEED = 27
NUM_RUNS = 50
STEPS = 8
SMALL = {"reducer": "ordered", "granule": 2, "batch_size": 8, "steps": STEPS, "shard": "full"}
# Ranks begin in a moment where these are imported already.
PRELOADED = [*PRELOAD, "tests.train.private_runs"]


def one_rank(config: TrainConfig) -> None:
    """What torchrun would run: a rank that ends with an error is started again."""
    torch.set_num_threads(1)
    train(config)


def launch(
    config: TrainConfig,
    num_ranks: int,
    *args: object,
    max_restarts: int,
    rank: Callable[..., None] = one_rank,
) -> None:
    multiprocessing.set_forkserver_preload(PRELOADED)
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
        api.elastic_launch(settings, rank)(config, *args)


@dataclass(frozen=True)
class Kill:
    """What was done: of how many steps there was a complete checkpoint, and steps begun by then."""

    signal: str
    num_ranks: int
    covered: int
    num_begun: int


@dataclass
class Killer:
    """A thread that kills ranks of this process at random moments while a run goes on."""

    run: Path
    rng: random.Random
    num_kills: int
    only: signal.Signals | None = None
    steps: int = STEPS
    kills: list["Kill"] = field(default_factory=list)
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
                num_lines = self.rng.randrange(1, self.steps) + self._num_lines()
                self._wait_for(lambda most=num_lines: self._num_lines() >= most)
                time.sleep(self.rng.random() * 0.3)
            ranks = [each for each in multiprocessing.active_children() if each.is_alive()]
            if self.is_over or not ranks:
                return
            number = self.only or self.rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            victims = ranks if self.rng.random() < 0.3 else [self.rng.choice(ranks)]
            covered = max((int(path.name[5:]) for path in checkpoints_of(self.run)), default=0)
            kill = Kill(number.name, len(victims), covered, len(steps_begun(self.run)))
            for victim in victims:
                with suppress(ProcessLookupError):
                    os.kill(victim.pid or 0, number)
            self.kills.append(kill)
            self._wait_for(lambda gone=ranks: not any(each.is_alive() for each in gone))

    def _num_lines(self) -> int:
        path = self.run / "ledger.jsonl"
        with suppress(OSError):
            return path.read_bytes().count(b'"kind": "commit"')
        return 0

    def _wait_for(self, condition) -> None:
        while not self.is_over and not condition():
            time.sleep(0.002)


def steps_begun(run: Path) -> list[int]:
    """The steps of a run that its ledger says were begun, repeated ones too; none without one."""
    path = run / "ledger.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []  # the last may be cut
    return [line["step"] for line in map(json.loads, lines) if line["kind"] == "intent"]


@dataclass(frozen=True)
class Outcome:
    """What a run that was disturbed came to, beside one that was not.

    Attributes:
        digest: Of the parameters.
        is_equal: Whether it is that of the undisturbed run.
        epsilon: What the ledger counts, were the key secret.
        true_epsilon: That of the undisturbed run.
        begun: Steps that were begun, in their order.
        repeated: Those of them that a complete checkpoint had covered before a kill.
        problems: What the ledger's reader finds wrong, and steps that it lacks.
    """

    digest: str
    is_equal: bool
    epsilon: float
    true_epsilon: float
    begun: list[int]
    repeated: list[int]
    problems: list[str]

    @property
    def is_good(self) -> bool:
        """Whether all that is promised holds."""
        is_counted = self.epsilon >= self.true_epsilon and not self.problems
        return self.is_equal and is_counted and not self.repeated


def outcome_of(run: Path, straight: Path, kills: list[Kill]) -> Outcome:
    """Hold a complete run against the one that nobody disturbed."""
    results = read_result(run), read_result(straight)
    found, true = (read_ledger(each / "ledger.jsonl") for each in (run, straight))
    counted, expected = ({each.step for each in each.releases} for each in (found, true))
    begun = steps_begun(run)
    spent = [epsilon_if_secret(each.spending, DELTA, "rdp") for each in (found, true)]
    return Outcome(
        digest=results[0].digest,
        is_equal=results[0].digest == results[1].digest,
        epsilon=spent[0],
        true_epsilon=spent[1],
        begun=begun,
        repeated=[x for kill in kills for x in begun[kill.num_begun :] if x < kill.covered],
        problems=[*map(str, found.problems), *(f"no step {x}" for x in expected - counted)],
    )


def train_straight(folder: Path, **settings) -> Path:
    """A run that nobody disturbs, on one rank; beside it what it is trained on."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    settings = SMALL | {"shard": "none"} | settings
    train(config_of(folder / "run", folder / "text.txt", SEEDED, **settings))
    torch.set_num_threads(threads)
    return folder / "run"


def disturb(run: Path, text: Path, number: int) -> tuple[list[Kill], dict]:
    """Train while ranks are killed, and go on until the run is complete.

    Returns:
        What was done to its ranks, at least one kill; and how it was started and gone on with.
    """
    rng = random.Random(f"{SEED} {number}")
    config = config_of(run, text, SEEDED, **SMALL, checkpoint_every=rng.choice([1, 2]))
    how = {"num_ranks": rng.randrange(2, 5), "max_restarts": rng.choice([0, 1, 3]), "then": []}
    num_kills, kills = rng.randrange(1, 4), []
    while not kills:  # a run that was over before its first kill does not count
        shutil.rmtree(run, ignore_errors=True)
        with Killer(run, rng, num_kills) as killer:
            launch(config, how["num_ranks"], max_restarts=how["max_restarts"])
        kills = killer.kills
    while not (run / "result.json").is_file():
        num_ranks = rng.randrange(1, 4)
        how["then"].append(num_ranks)
        if not checkpoints_of(run):  # nothing to go on with: its ledger stays, and it begins anew
            run.rename(run.with_name(secrets.token_hex(4)))
            launch(config, num_ranks, max_restarts=0)
            continue
        again = resumed_config(run, config, given=set())
        run_on_local_ranks(train, again, num_ranks=num_ranks) if num_ranks > 1 else train(again)
    return kills, how
