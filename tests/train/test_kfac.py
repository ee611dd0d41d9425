"""Runs with K-FAC: they learn, do not depend on the ranks, and go on where they stopped."""

import json
import threading
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch

from tests.train.private_runs import SMALL, TARGET, config_of
from unison.config import Kfac, MechanismConfig, TrainConfig
from unison.errors import BadInput, Diverged
from unison.kfac import KFACConfig
from unison.kfac.labels import MOST_EXACT as KNOWN_MOST_EXACT
from unison.run_files import read_metrics, read_state, write_state
from unison.train import TrainResult, checkpoint, resumed_config, run_on_local_ranks, train
from unison.train.loop import MOST_EXACT, check_before_launch
from unison.train.step import ADAM_BETAS, settings_of

pytestmark = pytest.mark.usefixtures("forked_ranks")

KFAC = Kfac(update_every=2)
ORDERED = {"shard": "full", "reducer": "ordered", "granule": 2, "eval_every": 3}
ORDERED |= {"overrides": SMALL | {"dropout": 0.1}}


def config_with(folder: Path, data: Path, kfac: Kfac | None = KFAC, **settings) -> TrainConfig:
    settings = {"batch_size": 8, "optimizer": "sgd"} | settings
    return config_of(folder, data, None, kfac=kfac, **settings)


def train_on(num_ranks: int, config: TrainConfig) -> TrainResult:
    return run_on_local_ranks(train, config, num_ranks=num_ranks)


def figures(result: TrainResult) -> list:
    """What must not depend on the ranks: all that was recorded but speed, and the parameters."""
    records = [
        {name: value for name, value in record.items() if "per_second" not in name}
        for record in read_metrics(Path(result.folder))
    ]
    return [records, result.digest, result.eval_loss_after, result.train_loss_after]


def test_a_run_learns_faster_than_with_adamw(text, tmp_path, capsys):
    plain = train(config_with(tmp_path / "plain", text, None, optimizer="adamw", steps=12))
    capsys.readouterr()
    found = train(config_with(tmp_path / "kfac", text, steps=12))
    assert found.eval_loss_before == plain.eval_loss_before
    assert found.eval_loss_after < plain.eval_loss_after < plain.eval_loss_before - 1
    assert "K-FAC: damping 0.001 (pi), mc Fisher, factors every 2 steps" in capsys.readouterr().out
    recorded = [read_metrics(tmp_path / run) for run in ("plain", "kfac")]
    assert list(map(sorted, recorded[0])) == list(map(sorted, recorded[1]))  # by name
    saved = json.loads((tmp_path / "kfac/config.json").read_text())["mechanism"]
    assert (saved["optimizer"], saved["kfac"]) == ("sgd", asdict(KFAC))


@pytest.mark.full
def test_two_ranks_give_the_bits_of_one(text, tmp_path):
    alone = train(config_with(tmp_path / "alone", text, **ORDERED))
    together = train_on(2, config_with(tmp_path / "together", text, **ORDERED, micro_batch_size=2))
    assert (alone.world_size, together.world_size) == (1, 2)
    assert figures(together) == figures(alone)


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (2, {"shard": "fsdp2"}),
        (2, {"shard": "hybrid"}),
        (3, {"shard": "zero2", "micro_batch_size": 2}),
        (3, {"owner_fraction": 1.0, "guard": True}),
        (4, {"shard": "hybrid"}),
        (2, {"kfac": replace(KFAC, fisher="empirical", graft="none", kl_clip=1e-3)}),
        (2, {"kfac": replace(KFAC, fisher="forward", graft="sgd", damping_form="joint")}),
        (2, {"precision": "bf16"}),
        (2, {"layout": "documents"}),  # padded rows
    ],
    ids=str,
)
def test_bits_depend_on_no_sharding(text, tmp_path, num_ranks, settings):
    settings = ORDERED | settings
    if "layout" in settings:
        words = text.read_text().split()[:400]
        lines = [json.dumps({"text": word * (1 + i % 5)}) for i, word in enumerate(words)]
        text = tmp_path / "text.jsonl"
        text.write_text("\n".join(lines))
    one = {name: settings[name] for name in settings if name not in ("owner_fraction", "guard")}
    one |= {"shard": "full", "micro_batch_size": None}
    alone = train(config_with(tmp_path / "alone", text, **one))
    together = train_on(num_ranks, config_with(tmp_path / "together", text, **settings))
    assert figures(together) == figures(alone)


@pytest.mark.full
@pytest.mark.parametrize("shard", ["ddp", "full", "fsdp2"])
def test_the_fast_reducer_differs_by_rounding(text, tmp_path, shard):
    alone = train(config_with(tmp_path / "alone", text, steps=4))
    config = config_with(tmp_path / "together", text, steps=4, shard=shard, micro_batch_size=3)
    together = train_on(2, config)
    for expected, found in zip(figures(alone)[0], figures(together)[0], strict=True):
        assert found == pytest.approx(expected, rel=1e-3)


@pytest.fixture
def stopped(text, tmp_path, stop_at, monkeypatch):
    """Train until the fourth step, which fails; returns the settings."""

    def stop(kfac: Kfac = KFAC, **settings) -> TrainConfig:
        asked = config_with(tmp_path / "run", text, kfac, checkpoint_every=1, **settings)
        stop_at(4, Diverged("a NaN on purpose"))
        with pytest.raises(Diverged, match=r"a NaN on purpose \(unison train --resume"):
            train(asked)
        monkeypatch.undo()
        return asked

    return stop


@pytest.mark.parametrize(
    ("kfac", "num_ranks"),
    [
        (Kfac(update_every=3), 1),  # the next step updates the factors
        pytest.param(  # the next one does not
            replace(KFAC, graft="none", damping_form="joint"), 2, marks=pytest.mark.full
        ),
    ],
    ids=["adam", "joint"],
)
@pytest.mark.full
def test_a_run_goes_on_as_if_it_had_not_stopped(text, tmp_path, stopped, kfac, num_ranks):
    straight = train(config_with(tmp_path / "straight", text, kfac, **ORDERED))
    run, asked = tmp_path / "run", stopped(kfac, **ORDERED)
    files = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert files == ["step-000002", "step-000003"]
    config = resumed_config(run, asked, given=set())
    assert config.mechanism.kfac == kfac
    resumed = train(config) if num_ranks == 1 else train_on(num_ranks, config)
    assert figures(resumed) == figures(straight)


def test_what_does_not_go_on_with_its_own_curvature_is_refused(stopped, monkeypatch):
    threads = []

    def write(path: Path, state) -> None:
        threads.append(threading.current_thread().name)
        write_state(path, state)

    monkeypatch.setattr(checkpoint.run_files, "write_state", write)
    asked = stopped()
    assert threads == ["checkpoint"] * 3  # no step waits for the file
    run = Path(asked.output.folder)
    with pytest.raises(BadInput, match=r"damping from 0.001 to 0.1, kfac from True to False; "):
        resumed_config(run, asked, set(), {"damping": 0.1, "kfac": False})
    assert resumed_config(run, asked, {"owner_fraction"}, {"kfac": True, "damping": 1e-3})
    files = [*run.glob("checkpoints/step-*/curvature.safetensors")]
    assert run / "checkpoints/step-000003/curvature.safetensors" in files
    for file in files:
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    config = resumed_config(run, asked, given=set())
    with pytest.raises(BadInput, match=r"step-000003/curvature.* its hash differs"):
        train(config)
    for file in files:
        file.unlink()
    with pytest.raises(BadInput, match=r"step-000003 .*curvature.safetensors is missing"):
        train(config)


def test_a_state_comes_back_as_it_was(tmp_path):
    matrix = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    state = {
        "step": 3,
        "last": None,
        "layers": [{"of": {"shape": [2, 3]}, "tensors": {"a": matrix.t(), "b": matrix}}],
        "count": torch.tensor(7),
    }
    path = tmp_path / "state.safetensors"
    write_state(path, state)
    found = read_state(path)
    tensors = found["layers"][0]["tensors"]
    assert torch.equal(tensors["a"], matrix.t())
    assert (tensors["a"].stride(), tensors["b"].stride()) == ((1, 3), (3, 1))
    assert (found["step"], found["last"], int(found["count"])) == (3, None, 7)
    assert found["layers"][0]["of"] == {"shape": [2, 3]}


REFUSED = {
    "negative damping": ({"damping": -1e-3}, "damping must be 0 or more, found -0.001"),
    "never": ({"update_every": 0}, "update_every must be above 0"),
    "never inverted": ({"invert_every": 0}, "invert_every must be above 0"),
    "condition": ({"max_condition_number": 1.0}, "max_condition_number must be above 1, found 1.0"),
    "decay": ({"decay": 1.0}, "decay must be at least 0 and below 1, found 1.0"),
    "fisher": ({"fisher": "empiric"}, "did you mean 'empirical'?"),
    "graft": ({"graft": "adamw"}, "did you mean 'adam'?"),
    "form": ({"damping_form": "join"}, "did you mean 'joint'?"),
    "clip": ({"kl_clip": 0.0}, "kl_clip must be above 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_settings_are_refused_here_as_in_the_library(case):
    settings, message = REFUSED[case]
    with pytest.raises(BadInput) as found:
        Kfac(**settings)
    assert message in str(found.value)
    with pytest.raises(BadInput):
        KFACConfig(**settings)


def test_settings_that_do_not_go_together(text, tmp_path):
    with pytest.raises(BadInput, match=r"no ε covers a step that it preconditions. Leave --kfac"):
        MechanismConfig(kfac=KFAC, optimizer="sgd", privacy=TARGET)
    with pytest.raises(BadInput, match="the optimizer is 'sgd', found 'adamw', which would scale"):
        MechanismConfig(kfac=KFAC)
    config = config_with(tmp_path / "run", text, None, owner_fraction=0.5)
    with pytest.raises(BadInput, match=r"only runs with --kfac have --owner-fraction, found 0.5"):
        train(config)
    wide = {"overrides": {"vocab_size": 5000}, "kfac": replace(KFAC, fisher="exact")}
    for refuse in (train, check_before_launch):
        with pytest.raises(BadInput, match="each of 5,000 tokens of the vocabulary, at most 1,024"):
            refuse(config_with(tmp_path / "run", text, **wide))
    assert not (tmp_path / "run").exists()


def test_the_names_of_choices_are_those_of_the_library():
    assert MOST_EXACT == KNOWN_MOST_EXACT
    ours, library = Kfac(), KFACConfig()
    for field in fields(Kfac):
        assert getattr(ours, field.name) == getattr(library, field.name)


def test_every_setting_reaches_the_library(text, tmp_path):
    changed = {"damping": 0.5, "damping_form": "joint", "update_every": 3, "invert_every": 4}
    changed |= {"decay": 0.25, "fisher": "forward", "graft": "sgd", "kl_clip": 0.125}
    changed |= {"max_factor_size": 99, "max_condition_number": 1e6}
    assert changed.keys() == {field.name for field in fields(Kfac)}
    config = config_with(tmp_path, text, Kfac(**changed), seed=7, owner_fraction=0.75)
    expected = KFACConfig(**changed, betas=ADAM_BETAS, seed=7, owner_fraction=0.75)
    assert settings_of(config) == expected
