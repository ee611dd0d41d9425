"""`python -m bench parity` as a person runs it."""

import json

import pytest

from tests.bench.samples import parity

FAST = ["--preset", "tiny", "--num-layers", "1", "--steps", "2", "--tokens", "5"]


@pytest.fixture
def outcome(monkeypatch):
    """Let the comparison come to a given result without being run."""

    def plant(result):
        monkeypatch.setattr("bench.parity.compare", lambda experiment, **_: result)

    return plant


@pytest.mark.full
def test_real_ranks_agree_with_one_process_in_every_bit(bench, tmp_path):
    file = tmp_path / "results" / "parity.json"
    options = ["--nproc", "2", "--batch-size", "3", "--json", "--out", file]
    code, out, err = bench("parity", *FAST, *options)
    assert code == 0, err
    figures = json.loads(out)
    result = figures["tiny"]
    assert result["has_same_bits"]
    assert result["alone"]["losses"] == result["together"]["losses"]
    assert result["relative_differences"] == [0.0, 0.0]
    assert result["together"]["largest_difference"] == 0.0
    assert result["alone"]["parameter_sum"] == result["together"]["parameter_sum"]
    assert [result[side]["num_ranks"] for side in ("alone", "together")] == [1, 2]
    assert result["saving"] > 1
    assert json.loads(file.read_text())["figures"] == figures


def test_tables_fit_a_terminal_and_show_every_figure(bench, outcome):
    outcome(parity())
    code, out, _ = bench("parity", "--preset", "small")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    for word in ("7.1250000000", "2286.522772000", "aaaaaaaaaaaaaaaa", "8 ranks", "4.00x"):
        assert word in out
    assert "agree in every bit" in out


def test_both_tables_by_default(bench, outcome):
    outcome(parity())
    _, out, _ = bench("parity")
    assert out.count("agree in every bit") == 2


def test_a_bit_that_differs_is_exit_code_1(bench, outcome):
    outcome(parity(losses=[7.25, 7.1250001]))
    code, out, err = bench("parity", "--preset", "small")
    assert code == 1
    assert "1.0e-07" in out
    assert err.strip().splitlines()[-1].startswith("unison: small: one process and 8 ranks must")
    assert "from step 2 on" in err


def test_the_fast_reducer_may_differ(bench, outcome):
    outcome(parity(reducer="fast", losses=[7.25, 7.1250001]))
    code, out, err = bench("parity", "--preset", "small", "--reducer", "fast")
    assert (code, err) == (0, "")
    assert "promises no bits" in out


BAD_INPUT = {
    "preset": (["--preset", "smal"], "did you mean 'small'"),
    "tokens": (["--preset", "small", "--tokens", "500"], "at most 128"),
    "steps": (["--steps", "0"], "steps must be above 0"),
    "granule": (["--granule", "-1"], "granule must be above 0"),
    "out": (["--out", "{}"], "found the folder"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_what_a_user_can_mend_is_one_sentence_and_code_2(bench, tmp_path, case):
    arguments, expected = BAD_INPUT[case]
    code, _, err = bench("parity", *(argument.format(tmp_path) for argument in arguments))
    assert code == 2
    assert expected in err
    assert err.startswith("unison: ")
    assert len(err.strip().splitlines()) == 1


def test_ranks_cannot_be_started_by_a_rank(bench, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = bench("parity", *FAST)
    assert (code, "already a rank" in err) == (2, True)


def test_help_names_the_benchmarks(bench):
    code, out, _ = bench("--help")
    assert code == 0
    assert "parity" in out
