"""Result files say where their figures come from, and nothing of who made them."""

import json
import os
import sys

import pytest

from bench.provenance import check_writable, commit, write_result
from unison.errors import BadInput


def test_a_result_holds_what_is_needed_to_judge_it(tmp_path, monkeypatch):
    command = ["/somewhere/bin/python", "-m", "bench", "parity", "--out", "/somewhere/a.json"]
    monkeypatch.setattr(sys, "orig_argv", command)
    path = tmp_path / "deep" / "result.json"
    check_writable(path)
    write_result(path, "parity", {"losses": [1.5]})
    text = path.read_text()
    result = json.loads(text)
    assert list(result) == [
        "name", "command", "date", "commit", "dirty", "hardware", "versions", "figures"
    ]  # fmt: skip
    assert result["command"] == "python -m bench parity --out a.json"
    assert result["figures"] == {"losses": [1.5]}
    assert result["versions"]["torch"]
    for word in (os.environ.get("HOME", "/root"), os.uname().nodename):
        assert word not in text


def test_a_tree_without_history_takes_its_commit_from_outside(monkeypatch):
    monkeypatch.setattr("bench.provenance._git", lambda *_: None)
    monkeypatch.setenv("UNISON_COMMIT", "abc")
    assert commit() == {"commit": "abc", "dirty": None}


def test_what_cannot_be_written_is_said_before_the_work(tmp_path):
    with pytest.raises(BadInput, match="found the folder"):
        check_writable(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="not a folder"):
        check_writable(tmp_path / "file" / "result.json")
