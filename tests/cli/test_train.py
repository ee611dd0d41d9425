"""`unison train` as a person runs it."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest
import torch

from unison.cli import app
from unison.models import load
from unison.run_files import read_metrics
from unison.train import loop
from unison.train.run_folder import plot_losses

FAST = ["--steps", "3", "--batch-size", "4", "--row-length", "32", "--eval-rows", "8"]
FAST += ["--num-layers", "1"]


def test_run_folder_holds_what_the_readme_says(unison, text, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "plot_losses", plot_losses)
    run = tmp_path / "runs" / "first"
    code, out, err = unison("train", "--data", text, "--out", run, *FAST, "--json")
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["world_size"] == 1
    assert result["eval_loss_after"] < result["eval_loss_before"]
    names = {path.name for path in run.iterdir()} - {"tensorboard"}
    assert names == {
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "model.json",
        "model.safetensors",
        "loss.png",
        "result.json",
    }
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((run / "config.json").read_text())
    assert config["mechanism"]["steps"] == 3
    assert config["model"]["d_model"] == 128
    losses = [record["train/loss"] for record in read_metrics(run) if "train/loss" in record]
    assert len(losses) == 3
    assert load(run).config.d_model == 128
    for word in (os.environ.get("HOME", "/root"), os.uname().nodename):
        assert word not in (run / "environment.json").read_text()


def test_plain_lines_say_both_losses_and_the_entropy(unison, text, tmp_path):
    """Of a run and data whose names look like rich's marks, too."""
    run, data = tmp_path / "[red]run[/b]", tmp_path / "[/b]"
    data.mkdir(parents=True)
    text = text.rename(data / "text.txt")
    code, out, _ = unison("train", "--data", text, "--out", run, *FAST)
    assert code == 0
    assert f"run folder {run}:" in out
    assert "unigram entropy" in out
    assert "train loss" in out
    assert "eval loss" in out
    assert "step 3/3" in out


# arguments ({} is a folder with the files below) and what the sentence must say
BAD_INPUT = {
    "missing": (["--data", "{}/missing.txt"], "missing.txt"),
    "empty": (["--data", "{}/empty.txt"], "empty file"),
    "short": (["--data", "{}/short.txt"], "tokens"),
    "long": (["--data", "{}/long.jsonl", "--layout", "documents"], "500 tokens"),
    "broken": (["--data", "{}/broken.jsonl"], "broken.jsonl:2"),
    "context": (["--row-length", "300"], "longer than the context"),
    "vocabulary": (["--vocab-size", "100"], "--vocab-size 258"),
    "preset": (["--preset", "tinny"], "did you mean 'tiny'"),
    "corpus": (["--data", "stdlb"], "did you mean 'stdlib'"),
    "lr": (["--lr", "-1"], "lr must be above 0"),
    "ordered ddp": (["--shard", "ddp", "--reducer", "ordered"], "needs shard 'full', 'zero2'"),
    "tokenizer": (["--tokenizer", "{}/none.json"], "none.json"),
}


@pytest.fixture
def bad_files(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("hello")
    (tmp_path / "long.jsonl").write_text('{"text": "' + "x" * 500 + '"}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    return tmp_path


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_code_2(unison, bad_files, case):
    arguments, expected = BAD_INPUT[case]
    before = sorted(bad_files.iterdir())
    arguments = [argument.format(bad_files) for argument in arguments]
    code, _, err = unison("train", "--out", bad_files / "run", *arguments)
    assert code == 2
    assert expected in err
    assert err.startswith("unison: ")
    assert len(err.strip().splitlines()) == 1
    assert sorted(bad_files.iterdir()) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_cuda_is_said(unison, tmp_path):
    code, _, err = unison("train", "--out", tmp_path / "run", "--device", "cuda")
    assert (code, "no CUDA device" in err) == (2, True)


def test_divergence_is_one_sentence_and_leaves_nothing(unison, text, tmp_path):
    arguments = ["--lr", "1e30", "--optimizer", "sgd", "--clip-norm", "0", "--warmup-steps", "0"]
    code, _, err = unison("train", "--data", text, "--out", tmp_path / "run", *FAST, *arguments)
    assert code == 2
    assert "lower --lr" in err
    assert not (tmp_path / "run").exists()


def test_existing_run_is_kept_without_overwrite(unison, text, tmp_path):
    train = ["train", "--data", text, "--out", tmp_path / "run", "--no-tensorboard", *FAST]
    assert unison(*train)[0] == 0
    first = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    code, _, err = unison(*train)
    assert (code, "--overwrite" in err) == (2, True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == first
    assert unison(*train, "--overwrite")[0] == 0


def test_misspelt_option_is_refused(unison):
    code, _, err = unison("train", "--step", "3")
    assert code == 2
    assert "--steps" in err


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN += ["-m", "unison"]


@pytest.fixture
def trained(unison, text, tmp_path):
    """Train through the command line, in this process or by a command of `python`.

    Returns the result that was printed, and the loss of every step.
    """

    def run(name, *arguments, python=None):
        options = ["--data", text, "--out", tmp_path / name, *FAST, "--json", "--no-tensorboard"]
        command = ["train", *arguments, *options]
        if python is None:
            code, out, err = unison(*command)
        else:
            command = [sys.executable, *python, *map(str, command)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
            code, out, err = done.returncode, done.stdout, done.stderr
        assert code == 0, err
        losses = [r["train/loss"] for r in read_metrics(tmp_path / name) if "train/loss" in r]
        return json.loads(out.splitlines()[-1]), losses

    return run


ORDERED = ["--reducer", "ordered"]


@pytest.mark.full
@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_train_as_one_does(trained):
    one, losses_of_one = trained("one", *ORDERED)
    two, losses_of_two = trained("two", *ORDERED, "--nproc", "2")
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert losses_of_one == losses_of_two
    assert one["digest"] == two["digest"]


@pytest.mark.full
@pytest.mark.usefixtures("forked_ranks")
def test_other_ways_to_two_ranks_train_as_one_does(trained):
    one, losses_of_one = trained("one", *ORDERED)
    joined, losses_of_joined = trained("joined", *ORDERED, python=TORCHRUN)
    assert joined["world_size"] == 2
    assert losses_of_joined == losses_of_one
    assert joined["digest"] == one["digest"]
    ddp, losses_of_ddp = trained("ddp", "--nproc", "2", "--shard", "ddp")
    assert ddp["world_size"] == 2
    assert losses_of_ddp == pytest.approx(losses_of_one, rel=1e-5)


def test_presets_are_listed_with_their_sizes(unison, monkeypatch):
    monkeypatch.setattr(app, "build", cache(app.build))  # of a trillion parameters, in seconds
    code, out, _ = unison("presets", "--json")
    assert code == 0
    assert json.loads(out)["parameters"]["1t"] == 1_008_014_617_600
    assert "1,008,014,617,600" in unison("presets")[1].replace("\n", "")
