"""Private runs: what they spend is counted, and what no ε covers stays out of files."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.train.private_runs import DELTA, GIVEN, SEEDED, SMALL, TARGET, config_of
from unison.clip import AUTO, MODES
from unison.config import (
    ACCOUNTANTS,
    CLIP_RULES,
    CLIPPINGS,
    SAMPLINGS,
    Privacy,
    TrainConfig,
)
from unison.errors import BadInput, Diverged
from unison.models import load
from unison.privacy import epsilon_of, read_ledger, sampling_for
from unison.privacy.accounting import ACCOUNTANTS as KNOWN_ACCOUNTANTS
from unison.privacy.mechanism import CLIP_RULES as KNOWN_CLIP_RULES
from unison.run_files import read_metrics
from unison.train import resumed_config, train
from unison.train.checkpoint import check_resumable
from unison.train.report import ProgressView


def test_a_private_run_learns_within_its_budget(text, tmp_path):
    run = tmp_path / "run"
    result = train(config_of(run, text, TARGET, steps=12, batch_size=64, eval_every=4))
    assert result.eval_loss_after < result.eval_loss_before - 0.5
    privacy = result.privacy
    assert privacy is not None
    assert 0.99 * 8 <= privacy.epsilon <= 8
    assert (privacy.num_counted, privacy.batch_size, privacy.is_secure) == (12, 64, True)
    ledger = read_ledger(run / "ledger.jsonl")
    assert (ledger.num_intents, ledger.num_commits, ledger.problems) == (12, 12, [])
    assert epsilon_of(ledger, DELTA, "rdp") == privacy.epsilon
    assert [each.step for each in ledger.releases] == list(range(12))
    assert load(run).config.d_model == 32
    assert json.loads((run / "result.json").read_text())["privacy"] == asdict(privacy)
    # ε is written where it was computed, and never falls.
    recorded = [r["privacy/epsilon"] for r in read_metrics(run) if "privacy/epsilon" in r]
    assert len(recorded) == 3
    assert recorded == sorted(recorded)
    assert recorded[-1] == privacy.epsilon


# What depends on the training rows otherwise than through noisy gradients, by the names it has.
NOT_COVERED = ["train/loss", "eval/train_loss", "train/tokens_per_second"]
NOT_COVERED += ["privacy/median_norm", "privacy/clipped_fraction", "privacy/num_dropped"]


@pytest.mark.parametrize("is_unsafe", [False, True])
def test_files_hold_what_no_epsilon_covers_only_if_asked(text, tmp_path, is_unsafe, capsys):
    run = tmp_path / "run"
    settings = {"unsafe_diagnostics": is_unsafe, "tensorboard": True, "checkpoint_every": 2}
    result = train(config_of(run, text, **settings))
    kinds = {"metrics": ["metrics.jsonl"], "events": sorted((run / "tensorboard").iterdir())}
    for names in kinds.values():
        content = b"".join((run / name).read_bytes() for name in names)
        assert [name for name in NOT_COVERED if name.encode() in content] == (
            NOT_COVERED if is_unsafe else []
        )
        assert b"privacy/epsilon" in content
        assert b"eval/loss" in content
    saved = json.loads((run / "result.json").read_text())
    checkpoint = json.loads((run / "checkpoints/step-000004/checkpoint.json").read_text())
    found = [saved["train_loss_before"], saved["train_loss_after"], result.train_loss_after]
    found.append(checkpoint["extra"]["progress"]["train_before"])
    assert [value is not None for value in found] == [is_unsafe] * 4
    shown = capsys.readouterr().out
    assert ("median norm" in shown) == ("train loss" in shown) == is_unsafe
    assert ("not covered by ε: a terminal shows them" in shown) == (not is_unsafe)
    # The rows' own counts, and the draws, stay out in any case.
    everything = b"".join(path.read_bytes() for path in run.rglob("*.json*"))
    for word in (b"num_tokens", b"record_ids", b"num_samples"):
        assert word not in everything


FACTS = {
    "privacy/median_norm": 2.25,
    "privacy/clipped_fraction": 0.5,
    "privacy/num_dropped": 0,
}
LOSS = 4.125
MARKED = "not covered by ε: loss 4.125, clipped 50%, median norm 2.25"


@pytest.mark.parametrize(
    ("is_terminal", "tells_all"), [(True, False), (False, False), (False, True)]
)
def test_a_terminal_shows_what_is_not_covered_and_says_so(is_terminal, tells_all):
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=80)
    config = config_of(Path("run"), Path("text"), steps=3, unsafe_diagnostics=tells_all)
    with ProgressView(console, config) as view:
        view.show_step(1, LOSS, 100.0, FACTS, "ε ≤ 1.500")
    shown = output.getvalue()
    assert "ε ≤ 1.500" in shown
    assert (MARKED in shown) == (is_terminal or tells_all)
    assert ("4.125" in shown) == (is_terminal or tells_all)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_time_that_compiling_took_is_shown(is_terminal):
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=80)
    with ProgressView(console, config_of(Path("run"), Path("text"), steps=3)) as view:
        view.note("compiling")
        view.show_step(1, LOSS, 100.0, FACTS, "ε ≤ 1.500")
        view.note("the first step, with compiling, took 42 s")
    assert "the first step, with compiling, took 42 s" in output.getvalue()


def test_physical_batches_change_nothing_but_rounding(text, tmp_path):
    whole = train(config_of(tmp_path / "whole", text, SEEDED, overrides={**SMALL, "dropout": 0.1}))
    cut = train(
        config_of(
            tmp_path / "cut",
            text,
            SEEDED,
            micro_batch_size=5,
            clipping="ghost",
            overrides={**SMALL, "dropout": 0.1},
        )
    )
    assert whole.eval_loss_after == pytest.approx(cut.eval_loss_after, rel=1e-5)
    assert whole.eval_loss_after != whole.eval_loss_before


WAYS = {
    "shuffled": ({"sampling": "shuffled"}, "shuffled, no amplification"),
    "automatic": ({"clip_rule": "automatic"}, "Poisson, q ="),
    "per layer": ({"clip_rule": "per_layer"}, "Poisson, q ="),
}


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_draw_and_to_clip(text, tmp_path, way):
    changes, words = WAYS[way]
    privacy = replace(GIVEN, **changes)
    result = train(config_of(tmp_path / "run", text, privacy, steps=2, precision="bf16"))
    assert result.privacy is not None
    assert words in result.privacy.sampling
    assert epsilon_of(read_ledger(tmp_path / "run/ledger.jsonl"), DELTA, privacy.accountant) == (
        result.privacy.epsilon
    )


@pytest.mark.full  # an ε of truncated sampling takes many seconds
def test_truncated_sampling(text, tmp_path):
    privacy = replace(GIVEN, sampling="truncated", capacity=40, accountant="pld")
    result = train(config_of(tmp_path / "run", text, privacy, steps=2))
    assert "at most 40 rows" in result.privacy.sampling
    ledger = read_ledger(tmp_path / "run/ledger.jsonl")
    assert ledger.releases[0].sampling.capacity == 40
    assert 0 < result.privacy.epsilon < 50


def test_a_resumed_run_goes_on_in_its_ledger(text, tmp_path, stop_at, monkeypatch):
    straight = train(config_of(tmp_path / "straight", text, SEEDED))
    run = tmp_path / "run"
    asked = config_of(run, text, SEEDED, checkpoint_every=2)
    stop_at(6, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(asked)
    monkeypatch.undo()
    assert read_ledger(run / "ledger.jsonl").num_intents == 5
    with pytest.raises(BadInput, match=r"delta from 0.0001 to 0.01, private from True to False"):
        resumed_config(run, asked, given=set(), parts={"private": False, "delta": 0.01})
    config = resumed_config(run, asked, given=set(), parts={"private": True})
    assert config.mechanism == asked.mechanism
    result = train(config)
    ledger = read_ledger(run / "ledger.jsonl")
    assert [each.step for each in ledger.releases] == [0, 1, 2, 3, 4, 4, 5]
    assert (ledger.num_commits, ledger.problems) == (7, [])
    assert (result.steps, result.privacy.num_counted) == (6, 7)
    # With a seed the run is the one that never stopped; what it spent is not.
    assert result.digest == straight.digest
    assert result.privacy.epsilon_if_secret > straight.privacy.epsilon_if_secret


def test_a_budget_ends_the_run_before_the_step_that_would_exceed_it(
    text, tmp_path, stop_at, monkeypatch, capsys
):
    run = tmp_path / "run"
    asked = config_of(run, text, TARGET, checkpoint_every=2)
    stop_at(6, Diverged("a NaN on purpose"))
    with pytest.raises(
        Diverged,
        match=r"--resume .* goes on .*; .*ledger.jsonl stays, and counts the 5 steps it spent",
    ):
        train(asked)
    monkeypatch.undo()
    result = train(resumed_config(run, asked, given=set()))
    assert (result.steps, result.privacy.num_counted) == (5, 6)
    assert 0.99 * 8 <= result.privacy.epsilon <= 8
    assert "step 6 would have spent ε = 8." in str(result.privacy.budget_sentence)
    assert result.eval_loss_after < result.eval_loss_before
    assert load(run).config.d_model == 32
    shown = capsys.readouterr().out
    assert "the budget ended the run: step 6 would have spent" in shown
    assert "5 of 6; 6 counted, with those a crash repeated" in shown


def test_a_ledger_that_lost_lines_is_not_continued(text, tmp_path, stop_at, monkeypatch):
    run = tmp_path / "run"
    asked = config_of(run, text, checkpoint_every=2)
    stop_at(4, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(asked)
    monkeypatch.undo()
    ledger = run / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(BadInput, match="cannot be continued") as refused:
        train(resumed_config(run, asked, given=set()))
    assert "--resume" not in str(refused.value)
    assert not (run / "resumptions.jsonl").exists()


def test_edited_rows_are_refused_where_the_ledger_commits_to_them(
    text, tmp_path, stop_at, monkeypatch, capsys
):
    run, salt = tmp_path / "run", tmp_path / "salt"
    asked = config_of(run, text, checkpoint_every=2, data_salt=str(salt), steps=4)
    stop_at(4, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(asked)
    monkeypatch.undo()
    config, words, secret = (
        resumed_config(run, asked, given=set()),
        text.read_text(),
        salt.read_bytes(),
    )
    before = (run / "ledger.jsonl").read_bytes()
    # As many rows, of as many tokens.
    text.write_text(words.translate(str.maketrans("abc", "bca")))
    with pytest.raises(BadInput, match=r"the rows of this run, or the salt .*, have changed"):
        train(config)
    text.write_text(words)
    salt.unlink()
    with pytest.raises(BadInput, match=r"or the salt .*, have changed"):
        train(config)
    assert not salt.exists()
    assert (run / "ledger.jsonl").read_bytes() == before
    # Without the salt nothing is compared but numbers, and that is said.
    without = replace(config, output=replace(config.output, data_salt=None))
    salt.write_bytes(secret)
    train(config)
    assert "of its rows only the number was compared" not in capsys.readouterr().out
    (run / "result.json").unlink()
    train(without)
    assert "of its rows only the number was compared" in capsys.readouterr().out


def test_divergence_keeps_the_ledger_and_says_where(text, tmp_path):
    run = tmp_path / "run"
    settings = {"lr": 1e30, "optimizer": "sgd", "clip_norm": None, "warmup_steps": 0}
    with pytest.raises(Diverged, match=rf"lower --lr.* \({run}/ledger.jsonl stays, and counts the"):
        train(config_of(run, text, **settings))
    assert read_ledger(run / "ledger.jsonl").num_intents > 0
    with pytest.raises(BadInput, match=r"with another --out, since ledger.jsonl there counts"):
        check_resumable(run)


def test_what_fails_before_the_first_step_leaves_nothing(text, tmp_path):
    privacy = replace(GIVEN, sampling="shuffled", noise_multiplier=None, epsilon=1e-9)
    with pytest.raises(BadInput, match="choose another target"):
        train(config_of(tmp_path / "run", text, privacy))
    assert not (tmp_path / "run").exists()


REFUSED = {
    "neither": ({}, "one of epsilon.* found neither"),
    "both": ({"epsilon": 1.0, "noise_multiplier": 1.0}, "found both"),
    "no noise": ({"noise_multiplier": 0.0}, "leave --private out"),
    "epsilon": ({"epsilon": -1.0}, "epsilon must be above 0"),
    "delta": ({"epsilon": 1.0, "delta": 1.0}, "delta must lie above 0 and below 1"),
    "norm": ({"epsilon": 1.0, "max_grad_norm": 0.0}, "max_grad_norm must be above 0"),
    "capacity": ({"epsilon": 1.0, "capacity": 3}, "--capacity and --sampling truncated"),
    "no capacity": ({"epsilon": 1.0, "sampling": "truncated"}, "--capacity and --sampling"),
    "rule": ({"epsilon": 1.0, "clip_rule": "flta"}, "did you mean 'flat'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_contradict_each_other_are_refused(case):
    settings, message = REFUSED[case]
    with pytest.raises(BadInput, match=message):
        Privacy(**{"delta": 1e-5, **settings})


def test_settings_that_the_rows_contradict_are_refused():
    with pytest.raises(BadInput, match=r"must lie below 1 / number of rows, found 0.01 with 100"):
        sampling_for(Privacy(epsilon=1.0, delta=0.01), 10, 100)
    with pytest.raises(BadInput, match="found batches of 101 and 100 rows; lower"):
        sampling_for(Privacy(epsilon=1.0, delta=1e-5), 101, 100)


def test_settings_that_need_others_are_refused(text, tmp_path):
    def config(**settings) -> TrainConfig:
        return config_of(tmp_path / "run", text, **settings)

    for settings in ({"unsafe_diagnostics": True}, {"clipping": "ghost"}):
        with pytest.raises(BadInput, match="only private runs have"):
            config_of(tmp_path / "run", text, None, **settings).check_parts()
    for shard in ("none", "ddp"):
        config(clipping="recompute_bk", shard=shard).check_parts()
    with pytest.raises(BadInput, match="--shard ddp or none, found 'zero2'; or use --clipping"):
        config(clipping="recompute_bk", shard="zero2").check_parts()
    with pytest.raises(BadInput, match="must be a multiple of --granule, found 6 and 4"):
        config(reducer="ordered", granule=4, micro_batch_size=6)
    with pytest.raises(BadInput, match="needs shard 'full', 'zero2', 'hybrid' or 'fsdp2', found"):
        config_of(tmp_path / "run", text, None, reducer="ordered")


def test_the_names_of_choices_are_those_of_the_library():
    assert set(CLIPPINGS) == {AUTO, *MODES}
    assert tuple(CLIP_RULES) == tuple(KNOWN_CLIP_RULES)
    assert tuple(ACCOUNTANTS) == tuple(KNOWN_ACCOUNTANTS)
    for sampling in SAMPLINGS:
        capacity = 8 if sampling == "truncated" else None
        privacy = Privacy(epsilon=1.0, delta=1e-5, sampling=sampling, capacity=capacity)
        assert sampling_for(privacy, 10, 100)
