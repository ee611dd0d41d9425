"""Nodes that come and go while a run is under way, by the command lines of docs/checkpoints.md."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos.runs import Kill, outcome_of, steps_begun, train_straight
from unison.train.run_folder import checkpoints_of

STEPS = 60
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:4", "--max-restarts", 9]
TORCHRUN += ["--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-id", "job"]
# A busy machine takes many seconds to start four agents, and a second to let one speak.
CONF = "last_call_timeout=20,keep_alive_interval=2,keep_alive_max_attempt=5"
TRAIN = ["-m", "tests.chaos.slow_rank", "train", "--reducer", "ordered", "--granule", 2]
TRAIN += ["--batch-size", 8, "--steps", STEPS, "--shard", "full", "--row-length", 32, "--lr", 0.01]
TRAIN += ["--warmup-steps", 2, "--num-layers", 1, "--eval-rows", 8, "--eval-every", 0]
TRAIN += ["--private", "--noise-multiplier", 0.7, "--delta", 1e-4, "--accountant", "rdp"]
TRAIN += ["--no-secure-noise", "--no-tensorboard", "--checkpoint-every", 5]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def is_open(endpoint: str) -> bool:
    host, _, port = endpoint.partition(":")
    with socket.socket() as found:
        return found.connect_ex((host, int(port))) == 0


class Nodes:
    """Some torchruns on one machine that share a run."""

    def __init__(self, folder: Path, text: Path, *, endpoint: str, conf: str) -> None:
        self.run, self.hold, self.folder = folder / "run", folder / "hold", folder
        self.hold.touch()
        command = [*TORCHRUN, "--rdzv-endpoint", endpoint, "--rdzv-conf", conf]
        command += ["--local-addr", "127.0.0.1", *TRAIN, "--data", text, "--out", self.run]
        self._command = [*map(str, command)]
        # torch's agents do not tell a node that comes later where the store of the first start is.
        self._env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._env |= {"OMP_NUM_THREADS": "1", "UNISON_TEST_HOLD": str(self.hold)}
        self.agents: list[subprocess.Popen] = []

    def add(self) -> None:
        with self._log(len(self.agents)).open("w") as log:
            agent = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._env)
        self.agents.append(agent)

    def kill(self, number: int) -> None:
        """End a node as a power cut does: its agent and its ranks at once."""
        agent = self.agents[number]
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
        for pid in [agent.pid, *(map(int, ranks.read_text().split()) if ranks.exists() else ())]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def num_ranks(self) -> list[int]:
        """How many ranks each session of the run had."""
        found = [self.run / "environment.json"] if steps_begun(self.run) else []
        worlds = [json.loads(path.read_text())["world_size"] for path in found]
        later = self.run / "resumptions.jsonl"
        lines = later.read_text().splitlines() if later.is_file() else []
        return worlds + [json.loads(line)["environment"]["world_size"] for line in lines]

    def num_commits(self) -> int:
        path = self.run / "ledger.jsonl"
        return path.read_bytes().count(b'"kind": "commit"') if path.is_file() else 0

    def wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert any(agent.poll() is None for agent in self.agents), self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(self._log(each).read_text()[-3000:] for each in range(len(self.agents)))

    def _log(self, number: int) -> Path:
        return self.folder / f"node-{number}.log"


@pytest.fixture
def nodes(tmp_path) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(text: Path, **settings) -> Nodes:
        (tmp_path / "elastic").mkdir()
        made.append(Nodes(tmp_path / "elastic", text, **settings))
        return made[-1]

    yield make
    for each in made:
        for number, agent in enumerate(each.agents):
            if agent.poll() is None:
                each.kill(number)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("store", ["tcp", "file"])
def test_four_ranks_lose_two_and_gain_one(tmp_path, nodes, store):
    """With a store in a file no node is special: the first two are lost, rank 0 among them."""
    straight = train_straight(tmp_path, steps=STEPS, overrides={"num_layers": 1})
    endpoint = str(tmp_path / "rendezvous") if store == "file" else f"127.0.0.1:{free_port()}"
    elastic = nodes(
        straight.parent / "text.txt", endpoint=endpoint, conf=f"store_type={store},{CONF}"
    )
    elastic.add()
    if (
        store == "tcp"
    ):  # it lives in the agent that is there first, which must not be one of the lost
        elastic.wait_for(lambda: is_open(endpoint))
    for _ in range(3):
        elastic.add()
    elastic.wait_for(lambda: elastic.num_commits() >= 12)
    assert elastic.num_ranks() == [4]

    covered = max(int(path.name[5:]) for path in checkpoints_of(elastic.run))
    num_begun = len(steps_begun(elastic.run))
    for number in (0, 1) if store == "file" else (2, 3):
        elastic.kill(number)
    elastic.wait_for(lambda: len(elastic.num_ranks()) == 2)
    num_done = elastic.num_commits()
    elastic.wait_for(lambda: elastic.num_commits() >= num_done + 4)
    elastic.add()
    elastic.wait_for(lambda: len(elastic.num_ranks()) == 3)
    elastic.hold.unlink()
    elastic.wait_for((elastic.run / "result.json").is_file)
    assert elastic.num_ranks() == [4, 2, 3]
    for agent in elastic.agents:
        agent.wait()

    found = outcome_of(elastic.run, straight, [Kill("SIGKILL", 2, covered, num_begun)])
    assert found.is_good, (found, elastic.logs())
