"""`unison train --kfac` as a person runs it."""

import json

import pytest

FAST = ["--steps", "4", "--batch-size", "8", "--row-length", "32", "--eval-rows", "8"]
FAST += ["--num-layers", "1", "--no-tensorboard"]


def test_a_run_is_recorded_and_goes_on_with_its_settings(unison, text, tmp_path):
    run = tmp_path / "run"
    options = ["--kfac", "--damping", "1e-2", "--kfac-update-every", "2", "--fisher", "empirical"]
    options += ["--graft", "adam", "--factor-decay", "0.5", "--checkpoint-every", "3"]
    options += ["--max-condition-number", "1e6"]
    code, out, err = unison("train", "--data", text, "--out", run, *FAST, *options, "--json")
    assert code == 0, err
    assert "K-FAC: damping 0.01 (pi), empirical Fisher, factors every 2 steps" in err
    result = json.loads(out.splitlines()[-1])
    assert result["eval_loss_after"] < result["eval_loss_before"]
    saved = json.loads((run / "config.json").read_text())["mechanism"]
    assert saved["optimizer"] == "sgd"
    assert saved["kfac"] == {
        "damping": 0.01,
        "damping_form": "pi",
        "max_condition_number": 1e6,
        "update_every": 2,
        "invert_every": None,
        "decay": 0.5,
        "fisher": "empirical",
        "graft": "adam",
        "kl_clip": None,
        "max_factor_size": 8192,
    }
    (run / "result.json").unlink()  # as if it had stopped before the last step
    for said, message in (
        (["--damping", "0.1"], "damping from 0.01 to 0.1; leave these options out"),
        (["--kfac-update-every", "3"], "update_every from 2 to 3"),
        (["--optimizer", "adamw"], "optimizer from 'sgd' to 'adamw'"),
        (["--graft", "none", "--fisher", "mc"], "fisher from 'empirical' to 'mc', graft from"),
    ):
        code, _, err = unison("train", "--resume", run, *said)
        assert (code, message in err) == (2, True), err
    same = ["--kfac", "--fisher", "empirical", "--owner-fraction", "1"]
    code, out, err = unison("train", "--resume", run, *same, "--json")
    assert code == 0, err
    assert "going on after step 3 of 4" in err
    assert json.loads(out.splitlines()[-1])["digest"] == result["digest"]


# options and what the sentence must say
REFUSED = {
    "damping alone": (["--damping", "1"], "only runs with --kfac have --damping; add --kfac"),
    "several alone": (
        ["--kfac-update-every", "5", "--owner-fraction", "1", "--factor-decay", "0"],
        "only runs with --kfac have --factor-decay, --kfac-update-every, --owner-fraction; add",
    ),
    "private": (
        ["--kfac", "--private", "--epsilon", "8", "--delta", "1e-5"],
        "curvature of the private rows is not made of their noisy gradients",
    ),
    "adaptive": (["--kfac", "--optimizer", "adamw"], "leave --optimizer out: --graft adam decides"),
    "negative": (["--kfac", "--damping", "-1"], "damping must be 0 or more, found -1.0"),
    "ordered": (
        ["--kfac", "--shard", "ddp", "--reducer", "ordered"],
        "the ordered reducer needs shard",
    ),
    "exact": (["--kfac", "--fisher", "exact", "--vocab-size", "9999"], "use --fisher mc"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_one_sentence_and_code_2(unison, text, tmp_path, case):
    options, expected = REFUSED[case]
    code, _, err = unison("train", "--data", text, "--out", tmp_path / "run", *FAST, *options)
    assert code == 2
    assert expected in err
    assert err.startswith("unison: ")
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_and_one_leave_runs_that_agree(unison, text, tmp_path):
    train = ["train", "--data", text, *FAST, "--kfac", "--kfac-update-every", "2"]
    train += ["--reducer", "ordered", "--granule", "2"]
    runs = [tmp_path / "two", tmp_path / "one"]
    for run, ranks in zip(runs, (["--shard", "full", "--nproc", "2"], []), strict=True):
        code, _, err = unison(*train, "--out", run, *ranks)
        assert code == 0, err
    code, out, err = unison("verify", "runs", *runs, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["num_ranks"], found["has_same_bits"]) == ([2, 1], True)


def test_the_help_says_what_it_does(unison, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = unison("train", "--help")
    assert code == 0
    words = " ".join(out.replace("│", " ").split())
    assert "K-FAC: natural gradient" in words
    assert (
        "taken by SGD, with an --lr of AdamW's kind, to be tuned again. Not with --private" in words
    )
    for option in ("--damping", "--kfac-update-every", "--fisher", "--graft", "--owner-fraction"):
        assert option in words
