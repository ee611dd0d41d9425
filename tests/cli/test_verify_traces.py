"""`unison verify`, `verify diff` and `verify model` as a person runs them."""

import json

import pytest
import torch
from torch import nn

from unison.verify import trace

SUBJECTS = "tests.verify.subjects"


def loop(file, scale=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.ones(3, 5)
    with trace(file, model, optimizer) as tracer:
        (tracer.loss(model(rows).sum()) * scale).backward()
        optimizer.step()
    return str(file)


def test_traces_that_agree_and_that_do_not(unison, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    one, same, other = (
        loop(tmp_path / "a"),
        loop(tmp_path / "b"),
        loop(tmp_path / "c", scale=2.0),
    )
    code, out, err = unison("verify", "diff", one, same)
    assert code == 0, err
    assert "They agree in every bit" in out
    html = tmp_path / "page.html"
    code, out, _ = unison("verify", "diff", one, other, "--html", str(html))
    assert code == 1
    assert "step 0, gradients: 0.weight, element" in " ".join(out.split())
    assert "every value is 2 times" in " ".join(out.lower().split())
    assert max(map(len, out.splitlines())) <= 80
    assert "differs" in html.read_text()
    code, out, _ = unison("verify", "diff", one, other, "--json")
    found = json.loads(out)
    assert (code, found["is_equal"], found["first"]["rung"]) == (1, False, "gradients")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("diff", "pyproject.toml", "pyproject.toml"), "is no trace"),
        (("diff", "nowhere", "nowhere"), "cannot be read"),
        (("--quick", "--full"), "exclude each other"),
        (("--quick", "diff", "a", "b"), "put options after 'diff'"),
        (("model", "no.such:thing", "--data", f"{SUBJECTS}:rows"), "cannot be imported"),
        (("model", f"{SUBJECTS}:mlp", "--data", "rows.csv"), "expected module:function"),
        (("model", f"{SUBJECTS}:mlp", "--data", "rows.json"), "cannot be read"),
        (("model", f"{SUBJECTS}:rows", "--data", f"{SUBJECTS}:rows"), "torch.nn.Module"),
        (("model", f"{SUBJECTS}:unfinished", "--data", f"{SUBJECTS}:rows"), "weights are missing"),
        (("model", f"{SUBJECTS}:mlp", "--data", f"{SUBJECTS}:rows", "--ranks", "2"), "1,2,4"),
        (("model", f"{SUBJECTS}:mlp", "--data", f"{SUBJECTS}:rows", "--shard", "x"), "shard"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(unison, arguments, words):
    code, _, err = unison("verify", *arguments)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.full
def test_a_transformers_model_does_not_depend_on_ranks(unison):
    code, out, err = unison(
        *("verify", "model", f"{SUBJECTS}:llama", "--data", f"{SUBJECTS}:tokens"),
        *("--private", "--json"),
    )
    assert code == 0, err
    found = json.loads(out)["claims"]
    assert [(each["holds"], each["largest"], each["num_ranks"]) for each in found] == [
        (True, 0, [2, 4])
    ] * 2


@pytest.mark.full
def test_a_module_that_divides_by_the_number_of_ranks_is_named(unison, tmp_path):
    code, out, _ = unison(
        *("verify", "model", f"{SUBJECTS}:divided_llama", "--data", f"{SUBJECTS}:tokens"),
        *("--json", "--ranks", "1,2", "--html", str(tmp_path / "page.html")),
    )
    (claim,) = json.loads(out)["claims"]
    assert code == 1
    (fault,) = claim["faults"]
    assert "activations: model.layers.1.mlp, element" in fault
    assert "scaled by 1/world size" in fault
    assert "model.layers.1.mlp" in (tmp_path / "page.html").read_text()


@pytest.mark.full
def test_the_main_claims_hold(unison, tmp_path):
    code, out, err = unison("verify", "--quick", "--html", str(tmp_path / "page.html"))
    assert code == 0, out + err
    assert "claims hold" in out
    assert "fails" not in (tmp_path / "page.html").read_text()
