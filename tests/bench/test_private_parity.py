"""`python -m bench parity --private` as a person runs it."""

import json

import pytest

from bench.private_parity import PrivateExperiment, PrivatelyTrained

FAST = ["parity", "--private", "--preset", "tiny", "--steps", "2", "--batch-size", "4"]
FAST += ["--tokens", "8"]


@pytest.mark.full
@pytest.mark.usefixtures("forked_ranks")
def test_real_ranks_have_the_bits_of_one_process(bench, tmp_path):
    out = tmp_path / "parity.json"
    code, shown, err = bench(*FAST, "--nproc", "2", "--out", out, "--json")
    assert code == 0, err
    figures = json.loads(shown)
    assert json.loads(out.read_text())["figures"] == figures
    for ranks in figures["ordered"]["ranks"].values():
        assert ranks["has_same_bits"]
        assert set(ranks["differences"].values()) == {0.0}
    # From equal parameters; then AdamW makes much of little.
    fast = figures["fast"]["ranks"]
    assert list(fast) == ["1", "2"]
    assert max(ranks["differences"]["gradient of step 1"] for ranks in fast.values()) <= 1e-6
    assert max(ranks["differences"]["loss"] for ranks in fast.values()) <= 1e-5


@pytest.fixture
def outcome(monkeypatch):
    """Let ranks come to what a test says, instead of starting them."""

    def pretend(difference: float) -> None:
        def launch(_, side, *, num_ranks):
            changed = difference if num_ranks > 2 else 0.0
            return PrivatelyTrained(
                num_ranks=num_ranks,
                is_sharded=side.is_sharded,
                gradient_difference=changed,
                losses=[7.25, 7.125 * (1 + changed)],
                grad_norms=[3.0, 2.5],
                param_norms=[97.0, 97.5],
                sample_norms=[[1.0, 2.0], []],
                digest_after="ab" * 32,
                fingerprint={},
            )

        monkeypatch.setattr("bench.private_parity.run_on_local_ranks", launch)

    return pretend


def run(command, *options):
    return command("parity", "--private", *options)


def test_the_tables_fit_a_terminal(bench, outcome, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    outcome(0.0)
    code, out, _ = run(bench)
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert out.count("8 ranks") == 2
    for title in ("loss", "gradient of step 1", "per-sample norm", "the same bits"):
        assert sum(line.startswith(title) for line in lines) == 2, title  # none is wrapped


def test_a_bit_that_differs_is_exit_code_1(bench, outcome):
    outcome(1e-12)
    code, out, err = run(bench, "--nproc", "4")
    assert code == 1
    assert "1.0e-12" in out
    assert "the ordered reducer must agree in every bit" in err


def test_one_preset_and_no_blocks(bench):
    code, _, err = run(bench, "--num-layers", "2")
    assert (code, "takes one --preset and no --num-layers" in err) == (2, True)


def test_rows_that_do_not_fit_are_refused(bench):
    code, _, err = run(bench, "--tokens", "5000")
    assert (code, "tokens must be at most" in err) == (2, True)


def test_the_settings_are_those_of_the_note():
    experiment = PrivateExperiment()
    assert (experiment.batch_size, experiment.num_records, experiment.tokens) == (8, 24, 32)
