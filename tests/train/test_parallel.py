"""The ways in which a model lies on ranks: one result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import World, assert_close, run_on_ranks
from tests.train.test_step import CONFIG, evaluate, expected_gradient, step_on_ranks
from unison.config import Execution, MechanismConfig, Output, TrainConfig
from unison.errors import BadInput
from unison.models import build, load
from unison.run_files import read_metrics
from unison.shard.deal import take_mean_was_used
from unison.train import train
from unison.train.world import Parallel


def step(world: World, *args):
    result = step_on_ranks(world, *args)
    take_mean_was_used()  # FSDP2 does not ask; the next model in this process would
    return result


@pytest.mark.parametrize(
    ("size", "num_rows", "shard", "reducer", "micro_batch"),
    [
        (3, 7, "fsdp2", "fast", 2),
        (4, 2, "fsdp2", "fast", None),
        (2, 8, "fsdp2", "ordered", 2),
        (2, 7, "hybrid", "fast", None),
        (4, 7, "hybrid", "ordered", 2),
    ],
)
def test_update_is_the_gradient_of_the_global_mean(size, num_rows, shard, reducer, micro_batch):
    expected, num_targets = expected_gradient(num_rows)
    results = run_on_ranks(size, step, num_rows, shard, reducer, micro_batch)
    for gradient, loss, counted in results:
        assert_close(gradient, expected)
        assert counted == num_targets
        assert loss == pytest.approx(results[0][1], rel=1e-12)


def test_evaluation_with_a_rank_that_has_no_rows():
    alone = run_on_ranks(1, evaluate, 2, "none")[0]
    assert run_on_ranks(3, evaluate, 2, "fsdp2") == pytest.approx([alone] * 3, rel=1e-12)


def wrong_replicas(world: World, replicas: int | None) -> str:
    options = {"reducer": "fast", "world_size": world.size, "replicas": replicas}
    with pytest.raises(BadInput) as refused:
        Parallel(build(CONFIG), "hybrid", **options)
    return str(refused.value)


def test_replicas_must_divide_the_ranks():
    assert (
        "replicas=2 must divide the number of ranks, 1" in run_on_ranks(1, wrong_replicas, None)[0]
    )
    assert "replicas=3 must divide the number of ranks, 2" in run_on_ranks(2, wrong_replicas, 3)[0]


def test_settings_that_do_not_go_together():
    with pytest.raises(BadInput, match="replicas=2 is for shard 'hybrid', found 'full'"):
        Execution(replicas=2)
    with pytest.raises(BadInput, match="replicas must be above 0"):
        Execution(shard="hybrid", replicas=0)
    for shard in ("ddp", "none"):
        with pytest.raises(BadInput, match="'zero2', 'hybrid' or 'fsdp2', found"):
            TrainConfig(
                mechanism=MechanismConfig(reducer="ordered"),
                execution=Execution(shard=shard),
                output=Output(folder="run"),
            )


def losses_and_norms(folder: Path) -> list[tuple[float, float]]:
    records = [record for record in read_metrics(folder) if "train/loss" in record]
    return [(record["train/loss"], record["train/grad_norm"]) for record in records]


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [["--shard", "fsdp2"], ["--shard", "hybrid", "--replicas", "2"]],
    ids=["fsdp2", "hybrid"],
)
def test_command_line_on_two_ranks_gives_the_bits_of_full_on_one(options, text, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    mechanism = MechanismConfig(
        data=str(text),
        overrides={"num_layers": 2},
        steps=2,
        batch_size=4,
        row_length=16,
        reducer="ordered",
    )
    output = Output(folder=str(one), eval_rows=4, tensorboard=False)
    config = TrainConfig(mechanism=mechanism, execution=Execution(), output=output)
    expected = train(config, on_stderr=True)
    command = ["-m", "unison", "train", "--nproc", "2", "--reducer", "ordered", *options]
    command += ["--data", text, "--out", two, "--num-layers", "2", "--steps", "2"]
    command += ["--batch-size", "4", "--row-length", "16", "--eval-rows", "4"]
    done = subprocess.run(
        [sys.executable, *map(str, command), "--no-tensorboard", "--json"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (expected.world_size, found["world_size"]) == (1, 2)
    assert found["digest"] == expected.digest
    assert losses_and_norms(two) == losses_and_norms(one)
    assert load(two).config.num_layers == 2
