"""Runs that stop and go on: the same result, and no step twice."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from unison.config import Execution, MechanismConfig, Output, TrainConfig
from unison.errors import BadInput, Diverged
from unison.run_files import read_metrics
from unison.train import resumed_config, run_on_local_ranks, train
from unison.train.run_folder import check_free, checkpoints_of, locked, open_run_folder


def config_of(folder: Path, data: Path, **options) -> TrainConfig:
    mechanism = MechanismConfig(
        data=str(data),
        steps=6,
        batch_size=4,
        row_length=32,
        reducer="ordered",
        overrides={"num_layers": 2, "num_heads": 2, "d_model": 32, "d_ff": 48, "dropout": 0.1},
        warmup_steps=2,
    )
    output = Output(
        folder=str(folder),
        eval_rows=8,
        tensorboard=False,
        **{"eval_every": 2, "checkpoint_every": 1, **options},
    )
    return TrainConfig(mechanism=mechanism, execution=Execution(device="cpu"), output=output)


def steady(run: Path) -> list[dict]:
    """The records of a run but for its speed."""
    return [
        {name: value for name, value in record.items() if "per_second" not in name}
        for record in read_metrics(run)
    ]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_goes_on_as_if_it_had_not_stopped(text, tmp_path, stop_at, monkeypatch, num_ranks):
    straight = train(config_of(tmp_path / "straight", text, checkpoint_every=0))
    assert not (tmp_path / "straight" / "checkpoints").exists()
    run = tmp_path / "run"
    stop_at(4, Diverged("a NaN on purpose"))
    with pytest.raises(Diverged, match=rf"a NaN on purpose \(unison train --resume {run} goes on"):
        train(config_of(run, text))
    monkeypatch.undo()
    assert [path.name for path in checkpoints_of(run)] == ["step-000002", "step-000003"]
    # What a crash can leave: a record after the checkpoint, and half a line.
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 4, "train/loss": 9.0}\n{"step": 5, "tr')
    asked = config_of(run, text)
    config = resumed_config(run, asked, given=set())
    if num_ranks == 1:
        resumed = train(config)
    else:
        resumed = run_on_local_ranks(train, config, num_ranks=num_ranks)
    assert resumed.digest == straight.digest
    assert resumed.world_size == num_ranks
    assert resumed.eval_loss_after == pytest.approx(straight.eval_loss_after, rel=1e-6)
    assert resumed.train_loss_before == straight.train_loss_before
    found, expected = steady(run), steady(tmp_path / "straight")
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    for left, right in zip(found, expected, strict=True):
        assert left == pytest.approx(right, rel=1e-6)
    line = json.loads((run / "resumptions.jsonl").read_text())
    assert (line["step"], line["environment"]["world_size"]) == (3, num_ranks)
    with pytest.raises(BadInput, match="is complete"):
        resumed_config(run, asked, given=set())


@pytest.fixture
def stopped(text, tmp_path, stop_at, monkeypatch) -> Path:
    stop_at(3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(config_of(tmp_path / "run", text))
    monkeypatch.undo()
    return tmp_path / "run"


def test_settings_of_execution_may_differ_and_the_mechanism_not(stopped, text):
    asked = config_of(stopped, text, eval_every=5)
    asked = replace(asked, mechanism=replace(asked.mechanism, lr=1.0, overrides={"num_layers": 5}))
    asked = replace(asked, execution=Execution(shard="zero2", micro_batch_size=1, guard=True))
    unsaid = resumed_config(stopped, asked, given=set())
    assert unsaid.mechanism == config_of(stopped, text).mechanism
    assert unsaid.execution == Execution(device="cpu")
    assert unsaid.output.resume
    said = resumed_config(stopped, asked, given={"shard", "micro_batch_size", "eval_every", "seed"})
    assert said.execution == Execution(device="cpu", shard="zero2", micro_batch_size=1)
    assert said.output.eval_every == 5
    with pytest.raises(BadInput, match=r"lr from 0.003 to 1.0, num_layers from 2 to 5; leave"):
        resumed_config(stopped, asked, given={"lr", "num_layers", "seed"})
    fast = MechanismConfig()
    asked = replace(asked, mechanism=fast, execution=Execution(shard="ddp"))
    with pytest.raises(BadInput, match="ordered reducer needs shard"):
        resumed_config(stopped, asked, given={"shard"})


def test_what_cannot_be_resumed_is_refused(stopped, text, tmp_path):
    asked = config_of(stopped, text)
    with pytest.raises(BadInput, match="is not the folder of a run"):
        resumed_config(tmp_path / "none", asked, given=set())
    config = resumed_config(stopped, asked, given=set())
    content = json.loads((stopped / "config.json").read_text())
    content["mechanism"]["magic"] = 1
    (stopped / "config.json").write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"config.json: mechanism has a field 'magic', unknown"):
        resumed_config(stopped, asked, given=set())
    (stopped / "checkpoints" / "step-000001" / "checkpoint.json").unlink()
    (stopped / "checkpoints" / "step-000002" / "checkpoint.json").unlink()
    with pytest.raises(BadInput, match="has no complete checkpoint"):
        train(config)


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_used(
    stopped, text, capsys, tmp_path
):
    straight = train(config_of(tmp_path / "straight", text, checkpoint_every=0))
    (damaged,) = (stopped / "checkpoints/step-000002").glob("*.safetensors")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    capsys.readouterr()
    resumed = train(resumed_config(stopped, config_of(stopped, text), given=set()))
    said = capsys.readouterr().out
    assert f"refused a checkpoint: {damaged} is not what was written" in said
    assert "going on after step 1 of 6" in said
    assert resumed.digest == straight.digest


def test_two_runs_in_one_folder_are_refused(stopped, text, tmp_path):
    config = resumed_config(stopped, config_of(stopped, text), given=set())
    with locked(stopped), pytest.raises(BadInput, match="another run is writing to it"):
        train(config)
    with locked(stopped), pytest.raises(BadInput, match="another run is writing to it"):
        train(config_of(stopped, text, overwrite=True))
    with (
        open_run_folder(tmp_path / "new", overwrite=False),
        pytest.raises(BadInput, match="another run is writing to it"),
    ):
        check_free(tmp_path / "new", overwrite=True)


def test_changed_data_is_refused_and_the_run_kept(stopped, text):
    config = resumed_config(stopped, config_of(stopped, text), given=set())
    before = sorted(path for path in stopped.rglob("*"))
    text.write_text("another text\n" * 900)
    with pytest.raises(BadInput, match=r"the data of the run in .* has changed"):
        train(config)
    assert sorted(path for path in stopped.rglob("*")) == before


def test_one_changed_letter_is_refused(stopped, text):
    config = resumed_config(stopped, config_of(stopped, text), given=set())
    words = text.read_text()
    text.write_text(words[:500] + "#" + words[501:])
    with pytest.raises(BadInput, match=r"has changed \((train|eval) rows: .*sha256 was '\w+"):
        train(config)
    text.write_text(words)
    train(config)


def test_what_is_refused_is_not_said_to_go_on(stopped, text):
    config = resumed_config(stopped, config_of(stopped, text), given=set())
    (stopped / "metrics.jsonl").write_text("rubbish\n")
    with pytest.raises(BadInput, match=r"metrics.jsonl, line 1") as refused:
        train(config)
    assert "--resume" not in str(refused.value)


def fail_after_a_checkpoint(folder: Path) -> None:
    with open_run_folder(folder, overwrite=True) as run:
        (run / "config.json").write_text('"new"')
        (run / "checkpoints" / "step-000001").mkdir(parents=True)
        (run / "checkpoints" / "step-000001" / "checkpoint.json").write_text("{}")
        raise Diverged("nan")


def test_ranks_that_are_started_again_find_the_run_that_replaces_another(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text('"old"')
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(Diverged, match=r"to replace lies in .*/\.run\.replaced"):
        fail_after_a_checkpoint(folder)
    assert json.loads((folder / "config.json").read_text()) == "new"
    assert len(checkpoints_of(folder)) == 1
    with open_run_folder(folder, overwrite=False, resume=True):  # it goes on to its end
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    # Of the last start nobody goes on.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(Diverged, match=r"--resume .*run-unfinished-"):
        fail_after_a_checkpoint(folder)


def test_a_failed_run_with_checkpoints_costs_neither_run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text('"old"')
    with pytest.raises(Diverged, match=r"--resume .*run-unfinished-"):
        fail_after_a_checkpoint(folder)
    assert json.loads((folder / "config.json").read_text()) == "old"
    (kept,) = tmp_path.glob("run-unfinished-*")
    assert json.loads((kept / "config.json").read_text()) == "new"
    shutil.rmtree(folder)
    with pytest.raises(Diverged, match=rf"--resume {folder} goes on"):
        fail_after_a_checkpoint(folder)
    assert len(checkpoints_of(folder)) == 1
