"""`unison train --resume` as a person runs it."""

import json

import pytest

FAST = ["--steps", "3", "--batch-size", "4", "--row-length", "32", "--eval-rows", "8", "--json"]


def test_resume_goes_on_with_the_saved_settings(unison, text, tmp_path, monkeypatch):
    run = tmp_path / "run"
    began = ["train", "--data", text, "--out", run, "--checkpoint-every", "2", "--seed", "3"]
    code, out, err = unison(*began, *FAST)
    assert code == 0, err
    result = json.loads(out)
    code, _, err = unison("train", "--resume", run)
    assert (code, "is complete" in err) == (2, True)

    (run / "result.json").unlink()  # as if it had stopped before the last step
    for options, message in (
        (["--lr", "0.5", "--seed", "3"], "lr from 0.003 to 0.5; leave these options out"),
        (["--num-layers", "1"], "num_layers from None to 1"),
        (["--out", tmp_path / "other"], "leave --out and --overwrite out"),
        (["--keep-checkpoints", "0"], "keep_checkpoints must be above 0"),
    ):
        code, _, err = unison("train", "--resume", run, *options)
        assert (code, message in err) == (2, True), err
    monkeypatch.chdir(run)  # as many people go on
    code, out, err = unison(
        "train", "--resume", ".", "--seed", "3", "--shard", "none", "--no-tensorboard", "--json"
    )
    assert code == 0, err
    assert "going on after step 2 of 3" in err
    resumed = json.loads(out)
    assert resumed["shard"] == "none"
    assert resumed["train_loss_after"] == pytest.approx(result["train_loss_after"], rel=1e-5)
    for folder in (tmp_path / "nothing", tmp_path / "nothing" / "..", "..", "/"):
        code, _, err = unison("train", "--resume", folder)
        assert (code, "is not the folder of a run" in err) == (2, True), err
