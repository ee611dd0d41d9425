"""`unison account` as a person runs it."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from unison.privacy.accounting import ADJACENCY, epsilon_of
from unison.privacy.calibration import epsilon_for
from unison.privacy.ledger import Ledger
from unison.privacy.ledger_file import Session, read_ledger
from unison.privacy.mechanism import Mechanism, Stairs
from unison.privacy.sampling import Poisson, Shuffled, TruncatedPoisson

SECRET = Session(key_origin="operating system", sampling_source="unison", num_records=1000)
PLAN = ["--delta", "1e-6", "--sample-rate", "0.1"]  # with much noise, for which PLD is fast


@pytest.fixture
def account(unison, monkeypatch):
    """Run `unison account` in this process; returns exit code, standard output and error."""
    monkeypatch.setenv("COLUMNS", "100")
    return partial(unison, "account")


def write(folder: Path, session: Session = SECRET, sigma: Any = 8.0, steps: int = 10) -> Path:
    """The folder of a run, in whose ledger the last step has no commit."""
    mechanism = Mechanism(
        sampling=Poisson(rate=0.1),
        noise_multiplier=sigma,
        max_grad_norm=0.5,
        expected_batch_size=100,
    )
    with Ledger.open(folder / "ledger.jsonl", mechanism=mechanism, session=session) as ledger:
        for step in range(steps):
            ledger.intend(mechanism.release(step))
            if step < steps - 1:
                ledger.commit(step)
    return folder


@pytest.fixture
def run(tmp_path):
    """The folder of a run whose ledger has 10 steps, the last without a commit."""
    return write(tmp_path / "run", sigma=Stairs(start=8.0, factor=0.5, every=5))


def rows(out: str) -> dict[str, str]:
    """The two columns of the table."""
    pairs = (line.strip().split("   ", 1) for line in out.splitlines() if "   " in line.strip())
    return {name.strip(): value.strip() for name, value in pairs}


# ---- a run -----------------------------------------------------------------------------------


def test_a_ledger_is_checked_and_counted(account, run):
    code, out, err = account("--ledger", run, "--delta", "1e-6")
    assert (code, err) == (0, "")
    found = rows(out)
    assert "20 lines, 1 session, chain intact" in " ".join(out.split())
    assert found["steps committed"] == "9"
    assert found["intents without commit"] == "1, counted"
    assert found["sampling"] == "Poisson, q = 0.1"
    assert found["noise multiplier σ"] == "4 to 8"
    assert found["clip norm C"] == "0.5"
    assert found["adjacency"] == ADJACENCY
    assert (found["key from"], found["drawn by"]) == ("operating system", "unison")
    assert found["data"] == "1,000 records, no commitment"
    assert found["unit of privacy"] == "one row of the data set"
    result = json.loads(account("--ledger", run / "ledger.jsonl", "--delta", "1e-6", "--json")[1])
    for name in ("pld", "rdp"):
        assert found[f"ε at δ = 1e-06, {name.upper()}"] == f"{result['epsilon'][name]:.4f}"
    assert (result["counted"], result["committed"], result["uncommitted"]) == (10, 9, 1)
    assert result["noise_multiplier"] == [4.0, 8.0]
    assert result["problems"] == result["notes"] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:4], *lines[5:]], "line 5 is missing"),
        (lambda lines: lines[:-2], "the last 2 lines are missing"),
        (lambda lines: [lines[0].replace("8.0", "9.0"), *lines[1:]], "line 1 was changed"),
    ],
)
def test_tampering_is_said_and_the_exit_code_tells(account, run, change, message):
    ledger = run / "ledger.jsonl"
    ledger.write_text("".join(change(ledger.read_text().splitlines(keepends=True))))
    code, out, err = account("--ledger", run, "--delta", "1e-6")
    assert code == 1
    assert message in err
    assert "not as it was written" in err
    assert "covers only the lines that are left" in out
    code, out, _ = account("--ledger", run, "--delta", "1e-6", "--json")
    assert code == 1
    assert any(message in problem for problem in json.loads(out)["problems"])


def test_a_torn_line_is_noted(account, run):
    ledger = run / "ledger.jsonl"
    ledger.write_text(ledger.read_text() + '{"kind": "int')
    code, out, _ = account("--ledger", run, "--delta", "1e-6")
    assert code == 0
    assert rows(out)["lines cut short"] == "1, counted"
    assert "cut short by a crash" in out


def test_a_large_delta_is_one_sentence(account, run):
    code, _, err = account("--ledger", run, "--delta", "1e-3")
    assert code == 0
    assert err.count("\n") == 1
    assert err.startswith("unison: warning: delta = 0.001 is not below 1/N")


def test_a_seeded_run_is_infinite_and_says_why(account, tmp_path):
    secret = write(tmp_path / "secret")
    seeded = write(tmp_path / "seeded", replace(SECRET, key_origin="seed"))
    code, out, err = account(seeded, "--delta", "1e-6")
    assert (code, err) == (0, "")
    found = rows(out)
    assert found["key from"] == "seed"
    why = "the noise of 10 steps came from a seed, and whoever knows it can remove the noise"
    assert why in " ".join(out.split())
    result = json.loads(account(seeded, "--delta", "1e-6", "--json")[1])
    assert (result["key_origin"], result["seeded"], result["why_infinite"]) == (["seed"], 10, why)
    expected = json.loads(account(secret, "--delta", "1e-6", "--json")[1])
    assert expected["epsilon"] == expected["epsilon_if_secret"] == result["epsilon_if_secret"]
    assert expected["why_infinite"] is None
    for name in ("pld", "rdp"):
        assert found[f"ε at δ = 1e-06, {name.upper()}"] == "infinite"
        assert result["epsilon"][name] == "inf"
        if_secret = found[f"ε if it were secret, {name.upper()}"]
        assert if_secret == f"{expected['epsilon'][name]:.4f}"
    picture = tmp_path / "epsilon.png"
    assert account(seeded, "--delta", "1e-6", "--plot", picture)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_ledger_that_does_not_say_is_noted(account, tmp_path):
    code, out, _ = account(write(tmp_path / "run", Session()), "--delta", "1e-6")
    assert code == 0
    assert "not say where the key came from: if that was a seed, ε is infinite" in " ".join(
        out.split()
    )


# ---- several runs ----------------------------------------------------------------------------

ONE, OTHER = (
    replace(SECRET, commitment=each * 64, committed_to="number of records") for each in "12"
)


def test_runs_on_one_data_set_are_added_up(account, tmp_path):
    tuned = write(tmp_path / "tuned", ONE, sigma=6.0)
    final = write(tmp_path / "final", ONE, sigma=6.0)
    code, out, err = account(tuned, final, "--delta", "1e-6")
    assert (code, err) == (0, "")
    shown = " ".join(out.split())
    assert "on the same data" in shown
    assert "their commitments say so" in shown
    assert "not linked" not in shown
    result = json.loads(account(tuned, "--ledger", final, "--delta", "1e-6", "--json")[1])
    ledgers = [str(run / "ledger.jsonl") for run in (tuned, final)]
    assert (result["linked"], result["unlinked"]) == ([ledgers], [])
    assert [run["counted"] for run in result["runs"]] == [10, 10]
    # One account of all events, which is less than the sum of two.
    spent = epsilon_of(
        [*read_ledger(tuned / "ledger.jsonl").releases, *read_ledger(ledgers[1]).releases], 1e-6
    )
    alone = [json.loads(account(r, "--delta", "1e-6", "--json")[1]) for r in (tuned, final)]
    apart = [each["epsilon"]["pld"] for each in alone]
    assert max(apart) < result["epsilon"]["pld"] == spent < sum(apart)
    # Noise that was chosen after another run is no part of a plan: the odometer counts.
    other = write(tmp_path / "other", ONE, sigma=8.0)
    result = json.loads(account(other, final, "--delta", "1e-6", "--json")[1])
    assert result["epsilon"]["pld"] > spent
    # A run with a seed makes all of it public.
    seeded = write(tmp_path / "seeded", replace(ONE, key_origin="seed"), steps=1)
    result = json.loads(account(tuned, seeded, "--delta", "1e-6", "--json")[1])
    assert (result["epsilon"]["pld"], result["seeded"]) == ("inf", 1)
    assert apart[0] < result["epsilon_if_secret"]["pld"] < spent


def test_runs_that_nothing_links_are_added_up_and_named(account, tmp_path):
    runs = [write(tmp_path / "a", ONE), write(tmp_path / "b"), write(tmp_path / "c", ONE, steps=3)]
    code, out, _ = account(*runs, "--delta", "1e-6")
    assert code == 0
    assert "not linked" in out
    result = json.loads(account(*runs, "--delta", "1e-6", "--json")[1])
    a, b, c = (str(run / "ledger.jsonl") for run in runs)
    assert (result["linked"], result["unlinked"]) == ([[a, c]], [b])
    result = json.loads(account(*runs[:2], "--delta", "1e-6", "--json")[1])
    assert (result["linked"], result["unlinked"]) == ([], [b, a])


def test_runs_on_different_data_are_not_added_up_unless_told(account, tmp_path):
    runs = [write(tmp_path / "a", ONE), write(tmp_path / "b", OTHER)]
    code, out, err = account(*runs, "--delta", "1e-6")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "commit to different data" in err
    assert "--same-data" in err
    code, out, _ = account(*runs, "--delta", "1e-6", "--same-data", "--json")
    assert (code, json.loads(out)["linked"]) == (0, [])
    write(runs[0], OTHER, steps=2)  # the same ledger goes on with other data
    code, out, _ = account(runs[0], "--delta", "1e-6")
    assert code == 0
    assert "its sessions commit to different data" in out


def test_what_cannot_be_added_up(account, tmp_path, run):
    for again in (run, run / "ledger.jsonl"):
        code, out, err = account(run, again, "--delta", "1e-6")
        assert (code, out) == (2, "")
        assert "would count twice" in err
    code, _, err = account(run, tmp_path / "nowhere", "--delta", "1e-6")
    assert code == 2
    assert "cannot read the ledger" in err
    other = write(tmp_path / "other")
    code, _, err = account(run, other, "--delta", "1e-6", "--plot", tmp_path / "curve.png")
    assert (code, "--plot draws one run" in err) == (2, True)
    ledger = run / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    code, out, err = account(other, run, "--delta", "1e-6")
    assert code == 1
    assert f"{ledger} is not as it was written" in err
    assert "covers only the lines that are left" in out


# ---- a plan ----------------------------------------------------------------------------------


def test_noise_for_an_epsilon(account, tmp_path):
    picture = tmp_path / "epsilon.png"
    options = ["--epsilon", "0.5", "--steps", "40", *PLAN]
    code, out, err = account(*options, "--plot", picture, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["asked"] == "noise_multiplier"
    plan = {"sampling": Poisson(rate=0.1), "delta": 1e-6, "steps": 40}
    spent = epsilon_for(noise_multiplier=result["noise_multiplier"], **plan)
    assert 0.495 <= spent == result["epsilon"]["pld"] <= 0.5
    assert [point["steps"] for point in result["curve"]] == [1, 3, 6, 10, 16, 23, 31, 40]
    spendings = [point["pld"] for point in result["curve"]]
    assert spendings == sorted(spendings)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_epsilon_of_noise(account):
    code, out, _ = account("--noise-multiplier", "8", "--steps", "40", *PLAN)
    assert code == 0
    plan = {"sampling": Poisson(rate=0.1), "delta": 1e-6, "steps": 40, "noise_multiplier": 8.0}
    found = rows(out)
    assert found["ε at δ = 1e-06, PLD"] == f"{epsilon_for(**plan):.4f}"
    assert found["ε at δ = 1e-06, RDP"] == f"{epsilon_for(accountant='rdp', **plan):.4f}"
    last = out.splitlines()[-1].split()
    assert last[0] == "40"
    assert last[3] == "█" * 32


def test_steps_for_an_epsilon(account):
    options = ["--epsilon", "0.5", "--noise-multiplier", "8", "--accountant", "rdp", *PLAN]
    code, out, _ = account(*options, "--json")
    assert code == 0
    result = json.loads(out)
    assert result["asked"] == "steps"
    plan = {"sampling": Poisson(rate=0.1), "delta": 1e-6, "accountant": "rdp"}
    over = epsilon_for(noise_multiplier=8.0, steps=result["steps"] + 1, **plan)
    assert result["epsilon"]["rdp"] <= 0.5 < over


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        (
            ["--sampling", "shuffled", "--batch-size", "10", "--num-records", "100"],
            Shuffled(batch_size=10, num_records=100),
        ),
        (["--batch-size", "10", "--num-records", "100"], Poisson(rate=0.1)),
        (
            ["--sampling=truncated", "--sample-rate=0.1", "--capacity=20", "--num-records=100"],
            TruncatedPoisson(rate=0.1, capacity=20, num_records=100),
        ),
    ],
)
def test_ways_to_draw_records(account, options, sampling):
    plan = ["--delta", "1e-5", "--noise-multiplier", "20", "--steps", "15"]
    code, out, err = account(*plan, *options, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    expected = epsilon_for(noise_multiplier=20.0, delta=1e-5, sampling=sampling, steps=15)
    assert result["epsilon"]["pld"] == expected
    assert result["epsilon"]["rdp"] >= expected
    assert "Poisson" in (text := account(*plan, *options)[1]) or "shuffled" in text


def test_no_noise_is_said_in_words(account):
    options = ["--noise-multiplier", "0", "--steps", "5", *PLAN]
    assert "infinite" in account(*options)[1]
    assert json.loads(account(*options, "--json")[1])["epsilon"]["pld"] == "inf"


def test_a_plan_of_no_step_at_all(account):
    options = ["--epsilon", "0.01", "--noise-multiplier", "8", "--accountant", "rdp", *PLAN]
    code, out, _ = account(*options, "--json")
    assert (code, json.loads(out)["steps"]) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--delta", "1e-6"], "name a RUN"),
        ([*PLAN, "--steps", "5"], "exactly two of"),
        (
            [*PLAN, "--steps", "5", "--epsilon", "1", "--noise-multiplier", "1"],
            "exactly two of",
        ),
        ([*PLAN, "--ledger", "here", "--steps", "5"], "leave --steps, --sample-rate out"),
        (["--delta", "1e-6", "--ledger", "here", "--accountant", "rdp"], "leave --accountant out"),
        (["--delta", "1e-6", "--ledger", "nowhere.jsonl"], "cannot read the ledger"),
        ([*PLAN, "--batch-size", "5"], "say the same thing"),
        ([*PLAN, "--capacity", "5"], "--capacity needs --sampling truncated"),
        ([*PLAN, "--sampling", "truncated"], "needs --capacity and --num-records"),
        ([*PLAN, "--sampling", "shuffled"], "have a fixed size"),
        (["--delta", "1e-6", "--sampling", "shuffled"], "need --batch-size and --num-records"),
        ([*PLAN, "--steps", "0", "--noise-multiplier", "1"], "--steps must be above 0"),
        ([*PLAN, "--steps", str(10**9), "--noise-multiplier", "1"], "found 1,000,000,000: beyond"),
        ([*PLAN, "--steps", str(10**400), "--noise-multiplier", "1"], "a number of 401 digits"),
        ([*PLAN, "--steps", str(10**400), "--epsilon", "1"], "a number of 401 digits"),
        ([*PLAN, "--steps", "5", "--noise-multiplier", "-1"], "noise_multiplier must be 0 or more"),
        ([*PLAN, "--steps", "5", "--epsilon", "-1"], "target_epsilon must be above 0"),
        (["--delta", "2", "--sample-rate", "0.1", "--steps", "1", "--epsilon", "1"], "delta"),
        (["--delta", "1e-6", "--sample-rate", "3", "--steps", "1"], "rate must lie between"),
        ([*PLAN, "--steps", "5", "--plot", "curve.pdf"], "--plot must name a .png file"),
    ],
)
def test_options_that_contradict_are_one_sentence(account, options, message):
    code, out, err = account(*options)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("unison: ")
    assert err.count("\n") == 1


def test_delta_is_needed(account):
    code, _, err = account("--epsilon", "1")
    assert code == 2
    assert "--delta" in err


def test_a_picture_that_cannot_be_written(account, tmp_path):
    options = ["--noise-multiplier", "50", "--steps", "2", *PLAN]
    code, _, err = account(*options, "--plot", tmp_path / "missing" / "curve.png")
    assert code == 2
    assert "cannot write" in err


def test_the_help_names_both_uses(account):
    code, out, _ = account("--help")
    assert code == 0
    for text in ("--ledger", "--noise-multiplier", "--sample-rate", "exit code is 1"):
        assert text in out
