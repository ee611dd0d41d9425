"""Odd values of every option end in exit code 2 and a sentence; so does any JSON that is read."""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.conftest import in_time
from tests.fuzz.inputs import CORPUS, NUMBERS, WORDS
from unison.cli import main
from unison.cli.app import app
from unison.config import TrainConfig
from unison.errors import BadInput, Diverged
from unison.run_files import SavedConfig, TrainResult
from unison.schema import build, parse
from unison.shard import Manifest
from unison.train.checkpoint import Extra

# Paths that are there, but are nothing that a run can use.
PATHS = [
    "/dev/null",
    "/dev/zero",
    "/proc/self/mem",
    "/",
    ".",
    "..",
    "no/such",
    "~",
    "a\0b",
    "é" * 300,
]
odd_values = st.one_of(
    st.sampled_from([str(each) for each in [*NUMBERS, *PATHS] if each != 10**400]),
    st.sampled_from([each for each in WORDS if "\ud800" not in each]),
    st.integers().map(str),
    st.floats().map(str),
    st.text(st.characters(codec="utf-8"), max_size=20),
)


RDP = {"accountant": "rdp"}


def options_of(*names: str) -> list[Any]:
    command: Any = typer.main.get_command(app)
    for name in names:
        command = command.commands[name]
    return [each for each in command.params if each.param_type_name == "option"]


@st.composite
def command_lines(draw, *command: str, always: tuple[str, ...] = ()) -> list[str]:
    found = [*command, *always]
    for option in draw(st.lists(st.sampled_from(options_of(*command)), min_size=1, max_size=4)):
        found.append(draw(st.sampled_from([*option.opts, *option.secondary_opts])))
        if not option.is_flag:
            found.append(draw(odd_values))
    return found


# What it takes to be a private run, or one with K-FAC, so that their options count.
TRAIN = st.one_of(
    command_lines("train"),
    command_lines("train", always=("--private", "--delta", "1e-5", "--epsilon", "8")),
    command_lines("train", always=("--kfac",)),
)
PLAN = ("--delta", "1e-5", "--sample-rate", "0.01", "--noise-multiplier", "1", "--steps", "10")
LINES = st.one_of(
    TRAIN,
    TRAIN,
    command_lines("account", always=PLAN),
    command_lines("account", always=("--delta", "1e-5")),
    st.lists(odd_values, max_size=3).map(lambda each: ["verify", "runs", *each]),
    st.lists(odd_values, max_size=3).map(lambda each: ["account", "--delta", "1e-5", *each]),
    st.lists(odd_values, max_size=3),
)


def ends_well(args: list[str], folder: Path, *, quick: bool = False) -> None:
    """Run a command line up to where training would begin; RDP counts for PLD if it is quick."""
    out, err = io.StringIO(), io.StringIO()

    def stop(config: TrainConfig, on_stderr: bool = False) -> None:
        raise Diverged("as far as this test goes")

    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["unison", *args])
        patch.setattr(sys.modules["unison.cli.train"], "run", stop)
        patch.setattr(
            sys.modules["unison.cli.train"],
            "run_on_local_ranks",
            lambda work, config, num_ranks: stop(config),
        )
        if quick:
            privacy = sys.modules["unison.cli.account"].privacy
            for name in ("epsilon_for", "noise_multiplier_for", "steps_for"):
                counted = getattr(privacy, name)
                patch.setattr(privacy, name, lambda f=counted, **given: f(**given | RDP))
        with in_time(args), pytest.raises(SystemExit) as left:
            main()
    said = err.getvalue()
    assert left.value.code in (None, 0, 2), (args, left.value.code, said)
    is_help = not said and out.getvalue().lstrip().startswith("Usage: ")
    assert left.value.code != 2 or is_help or said.startswith(("unison: ", "Usage: ")), said
    assert not any(path.name == "hacked" for path in folder.rglob("*"))


@pytest.mark.parametrize("args", json.loads((CORPUS / "options.json").read_text()), ids=str)
def test_options_that_once_failed(args, tmp_path):
    ends_well(args, tmp_path, quick=True)


def tried(number: int):
    """Try so many examples, the same ones in every run."""
    slow = [hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow]
    return hypothesis.settings(max_examples=number, suppress_health_check=slow)


@tried(60)
@given(args=LINES)
def test_options(args, tmp_path):
    ends_well(args, tmp_path, quick=True)


@pytest.mark.full
@tried(1500)
@given(args=LINES)
def test_many_options(args, tmp_path):
    ends_well(args, tmp_path)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["mechanism", "step", "progress", "tensors", "x"]), inner)
    ),
    max_leaves=8,
)


@tried(80)
@given(kind=st.sampled_from([SavedConfig, TrainResult, Manifest, Extra]), value=anything)
def test_any_value_where_a_dataclass_is_expected(kind, value):
    with pytest.raises(BadInput, match=r"^x\.json: "):
        build(kind, value, "x.json")


@tried(80)
@given(data=st.binary(max_size=60))
def test_any_bytes_where_json_is_expected(data):
    with contextlib.suppress(BadInput):
        parse(data, "x.json")
