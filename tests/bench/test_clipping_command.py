"""`python -m bench clipping` as a person runs it."""

import json
from functools import partial

import pytest

import bench.clipping_speed as clipping_speed

FAST = ["--preset", "tiny", "--num-layers", "1", "--batch-size", "2", "--rounds", "1"]
FAST += ["--steps", "1", "--device", "cpu"]


@pytest.fixture
def clipping(bench):
    """Run the benchmark in this process; returns exit code, standard output and error."""
    return partial(bench, "clipping", *FAST)


@pytest.fixture
def outcome(monkeypatch):
    """Let visits come to given figures without being made."""

    def plant(figures):
        def visit(experiment, planned, peak):
            found = figures.get(planned.case.name, {"eager_ms": 10.0, "peak_bytes": 2**20})
            fields = {"case": planned.case, "tokens": planned.tokens, "round": planned.round}
            return clipping_speed.Visit(**fields, **found)

        monkeypatch.setattr("bench.clipping_speed.visits.visit", visit)

    return plant


def test_all_of_it_on_a_cpu(clipping, tmp_path):
    file, picture = tmp_path / "results" / "clipping.json", tmp_path / "pictures" / "clipping.png"
    code, out, err = clipping(
        *("--lengths", "8", "--modes", "auto,ghost", "--json"),
        *("--out", file, "--plot", picture),
    )
    assert code == 0, err
    figures = json.loads(out)
    assert figures["is_finished"]
    assert list(figures["lengths"]) == ["8"]
    for each in figures["lengths"].values():
        assert list(each["rows"]) == ["no_dp", "auto", "ghost"]
        assert all(row["eager"]["ratio"] > 0 for row in each["rows"].values())
        assert all(row["peak_bytes"] > 0 for row in each["rows"].values())
        assert each["rows"]["ghost"]["passes"] == [2, 1]
        assert [verdict["how"] for verdict in each["auto"]] == ["eager"]
    assert len(figures["visits"]) == 4
    written = json.loads(file.read_text())
    assert written["figures"] == figures
    assert {"command", "commit", "hardware", "versions"} <= set(written)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tables_fit_a_terminal_and_name_the_fastest_mode(clipping, outcome):
    outcome({"ghost": {"eager_ms": 12.0, "peak_bytes": 2**20}, "auto": {"eager_ms": 12.1}})
    code, out, _ = clipping("--lengths", "64,128", "--without-noise", "--memory-budgets", "1.5")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    assert out.count("64 tokens") == 1
    assert "fastest is grad_materialize, 1.000×; auto is not within 2 % of it (+21.0%)" in out
    assert "eager without noise: fastest is grad_materialize" in out
    assert "1.200" in out
    assert "auto, within 1.5×" in out


def test_auto_that_is_as_fast_is_said_to_be(clipping, outcome):
    outcome({"ghost": {"eager_ms": 12.0}, "auto": {"eager_ms": 12.1}})
    _, out, _ = clipping("--lengths", "64", "--modes", "ghost,auto")
    assert "fastest is ghost, 1.200×; auto is within 2 % of it (+0.8%)" in out
    assert "1.200*" in out


def test_what_does_not_fit_or_cannot_be_done_is_a_row(clipping, outcome):
    outcome({"ghost": {"trouble": "out of memory"}, "ghost_bk": {"trouble": "no such method"}})
    code, out, _ = clipping("--lengths", "64")
    assert code == 0
    assert "out of memory" in out
    assert "ghost_bk: no such method" in out


def test_a_mode_that_fails_is_exit_code_1(clipping, outcome):
    outcome({"ghost": {"trouble": "RuntimeError: oh", "is_bug": True}})
    code, out, err = clipping("--lengths", "64")
    assert code == 1
    assert "unison: ghost at 64 tokens failed: RuntimeError: oh" in err
    assert "flash_fuse_bk" in out


def test_what_there_was_no_time_for_is_named(clipping, outcome):
    outcome({})
    code, out, err = clipping("--lengths", "64", "--time-limit", "1e-9", "--json")
    assert code == 0
    assert "the time is used up; left out: no_dp at 64 tokens, round 1" in err
    assert "no_dp at 64 tokens, round 1" in json.loads(out)["left_out"]


def test_a_picture_of_graphs_and_peers(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("bench.clipping_speed.peers.missing", dict)
    run = clipping_speed.Experiment(
        device="cuda", has_graphs=True, has_peers=True, memory_budgets=(1.4,), rounds=1
    )
    seen = [
        clipping_speed.Visit(
            case=each.case, tokens=each.tokens, round=0, eager_ms=10.0 + n, graph_ms=9.0 + n
        )
        for n, each in enumerate(clipping_speed.planned_visits(run))
    ]
    file = tmp_path / "clipping.png"
    clipping_speed.draw(run, clipping_speed.results_of(run, seen), file, "Steps")
    assert file.read_bytes().startswith(b"\x89PNG")


BAD_INPUT = {
    "mode": (["--modes", "gost"], "did you mean 'ghost'"),
    "lengths": (["--lengths", "64,long"], "--lengths takes numbers"),
    "graph": (["--graph"], "CUDA graphs"),
    "rounds": (["--rounds", "0"], "rounds must be above 0"),
    "out": (["--out", "{}"], "found the folder"),
    "plot": (["--plot", "{}"], "found the folder"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_what_a_user_can_mend_is_one_sentence_and_code_2(clipping, tmp_path, case):
    arguments, expected = BAD_INPUT[case]
    code, _, err = clipping(*(argument.format(tmp_path) for argument in arguments))
    assert code == 2
    assert expected in err
    assert err.startswith("unison: ")
    assert len(err.strip().splitlines()) == 1


def test_help_is_complete(clipping):
    code, out, _ = clipping("--help")
    assert code == 0
    for option in ("--lengths", "--modes", "--peers", "--memory-budgets", "--time-limit", "--plot"):
        assert option in out
