"""What a session says of itself, what a seed does to ε, and which data a run was on."""

import json
import math
import os
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.privacy.common import NUM_RECORDS, attach, data, loader, train
from tests.privacy.ledgers import SECRET, lines_of, make, take
from unison.errors import BadInput, UnisonError
from unison.privacy.accounting import ADJACENCY, epsilon_if_secret, epsilon_of
from unison.privacy.calibration import Budget, BudgetSpent
from unison.privacy.ledger import Ledger
from unison.privacy.ledger_file import Session, hash_of, head_file_of, read_ledger

# ---- what a session says of itself -----------------------------------------------------------


@pytest.mark.parametrize(("seed", "origin"), [(None, "operating system"), (7, "seed")])
def test_an_engine_says_all_of_it(path, seed, origin):
    engine, module, optimizer, private = attach(seed=seed, ledger=path)
    train(module, optimizer, private, 2)
    engine.detach()
    record = json.loads(lines_of(path)[0])
    assert record["key_origin"] == origin
    assert (record["adjacency"], record["unit"]) == (ADJACENCY, "one row of the data set")
    assert (record["rows_per_sample"], record["sampling_source"]) == (1, "unison")
    assert (record["num_records"], record["device"]) == (NUM_RECORDS, "cpu")
    assert (record["commitment"], record["committed_to"]) == (None, None)
    assert record["fingerprint"] == json.loads(json.dumps(unison.fingerprint()))
    (session,) = read_ledger(path).sessions
    assert session.is_seeded == (seed is not None)


def test_a_seeded_run_has_no_epsilon_but_one_if_it_were_secret(path):
    engine, module, optimizer, private = attach(seed=7, ledger=path)
    assert engine.get_epsilon(1e-3) == 0  # nothing was released
    train(module, optimizer, private, 3)
    with pytest.warns(UserWarning, match=r"infinite: the noise of 3 steps came from a seed"):
        assert engine.get_epsilon(1e-3) == math.inf
    if_secret = engine.epsilon_if_secret(1e-3)
    assert 0 < if_secret < 100
    engine.detach()
    found = read_ledger(path)
    assert (epsilon_of(found, 1e-3, "rdp"), epsilon_if_secret(found, 1e-3, "rdp")) == (
        math.inf,
        if_secret,
    )
    # A secret key later takes nothing of it back, and a checkpoint remembers it too.
    engine, module, optimizer, private = attach(seed=None, ledger=path)
    train(module, optimizer, private, 1)
    assert engine.ledger.epsilon(1e-3) == math.inf
    assert engine.epsilon_if_secret(1e-3) > if_secret
    resumed = Ledger.open(None, mechanism=make())
    resumed.load_state_dict({**engine.ledger.state_dict(), "is_in_memory": True})
    assert (resumed.spending.num_seeded, resumed.epsilon(1e-3)) == (3, math.inf)
    engine.detach()
    secret, module, optimizer, private = attach(seed=None)
    train(module, optimizer, private, 3)
    assert secret.get_epsilon(1e-3) == secret.epsilon_if_secret(1e-3) == if_secret


def test_a_budget_of_a_seeded_run_is_one_as_if_it_were_secret():
    budget = Budget(epsilon=2.0, delta=1e-3)
    engine, module, optimizer, private = attach(seed=7, budget=budget)
    with pytest.raises(BudgetSpent):
        train(module, optimizer, private, 100)
    assert 1.0 < engine.epsilon_if_secret(1e-3) <= 2.0


def test_a_step_that_comes_again_in_one_process_is_drawn_under_a_secret_key(path):
    engine, module, optimizer, private = attach(seed=7, ledger=path)
    state = engine.state_dict()
    train(module, optimizer, private, 1)
    engine.load_state_dict(state)
    train(module, optimizer, private, 1)
    engine.detach()
    found = read_ledger(path)
    assert [each.key_origin for each in found.sessions] == ["seed", "operating system"]
    assert (found.spending.num_seeded, found.num_intents) == (1, 2)


FORMAT_1 = """\
{"kind": "open", "line": 1, "format": "unison-ledger/1", "created": "2026-11-17T02:15:19+00:00", \
"unison": "0.1.0", "accountant": "pld", "mechanism": {"sampling": {"kind": "poisson", "rate": 0.1},\
 "noise_multiplier": 2.0, "max_grad_norm": 0.3333333333333333, "expected_batch_size": 10, \
"adaptive": null, "rounded_elements": 0}, "next": {"step": 0, "sampling": {"kind": "poisson", \
"rate": 0.1}, "noise_multiplier": 2.0, "max_grad_norm": 0.3333333333333333, "expected_batch_size": \
10, "count_noise_multiplier": null, "sensitivity_factor": 1.0}, "previous": \
"0000000000000000000000000000000000000000000000000000000000000000"}
{"kind": "intent", "line": 2, "step": 0, "sampling": {"kind": "poisson", "rate": 0.1}, \
"noise_multiplier": 2.0, "max_grad_norm": 0.3333333333333333, "expected_batch_size": 10, \
"count_noise_multiplier": null, "sensitivity_factor": 1.0, "previous": \
"1a4f46c74dcc229a902ab5ff4d85fcedf2f50e123a68b2e0876774165b231b3f"}
{"kind": "commit", "line": 3, "step": 0, "previous": \
"8daff4d1e0331a8217f66f3bcb4061505a50745b339d4f26b3826323319a4285"}
"""


def test_a_ledger_of_format_1_is_read_and_continued(path):
    path.parent.mkdir()
    path.write_text(FORMAT_1)
    head = {"num_lines": 3, "sha256": hash_of(FORMAT_1.splitlines()[2].encode())}
    head_file_of(path).write_text(json.dumps(head))
    found = read_ledger(path)
    assert (found.problems, found.num_intents, found.num_commits) == ([], 1, 1)
    assert [each.key_origin for each in found.sessions] == ["unknown"]
    assert found.notes == [
        "a session does not say where the key came from: if that was a seed, ε is infinite"
    ]
    mechanism = make()
    with Ledger.open(path, mechanism=mechanism, step=1, session=SECRET) as ledger:
        take(ledger, mechanism, 1)
    found = read_ledger(path)
    assert (found.problems, found.num_intents) == ([], 2)
    assert [each.key_origin for each in found.sessions] == ["unknown", "operating system"]
    assert json.loads(lines_of(path)[3])["format"] == "unison-ledger/2"


@pytest.mark.parametrize("name", [".ledger.head.json.partial", "ledger.head.json"])
def test_a_link_in_place_of_the_head_leads_nowhere(path, name, monkeypatch):
    # Also where somebody foresees the name of the partial file.
    monkeypatch.setattr("unison.privacy.ledger.secrets.token_hex", lambda size: "0" * 2 * size)
    foreign = path.parent / "foreign"
    foreign.parent.mkdir()
    foreign.write_text("a file of somebody else's")
    links = [path.parent / name, path.parent / f".ledger.head.json.{'0' * 16}.partial"]
    links[0].symlink_to(foreign)
    with pytest.raises(BadInput, match="cannot be continued") if name[0] != "." else nullcontext():
        Ledger.open(path, mechanism=make()).close()
    assert foreign.read_text() == "a file of somebody else's"
    links[1].symlink_to(foreign)
    with pytest.raises(
        UnisonError, match=r"could not be written: .*File exists|cannot be continued"
    ):
        Ledger.open(path, mechanism=make())
    assert foreign.read_text() == "a file of somebody else's"


@pytest.mark.parametrize("make_it", [os.mkfifo, os.mkdir])
def test_a_ledger_is_written_to_a_file_alone(path, make_it):
    path.parent.mkdir()
    make_it(path)
    with pytest.raises(BadInput, match=r"no ordinary file|Is a directory"):
        Ledger.open(path, mechanism=make())


# ---- which data ------------------------------------------------------------------------------


def commitment_of(path, **settings) -> Session:
    engine, *_ = attach(seed=None, ledger=path, **settings)
    engine.detach()
    return read_ledger(path).sessions[-1]


def test_runs_on_one_data_set_have_one_commitment(tmp_path):
    salt = tmp_path / "data" / "salt"
    salt.parent.mkdir()
    first = commitment_of(tmp_path / "a/ledger.jsonl", data_salt=salt)
    assert first.committed_to == "number of records"
    assert salt.stat().st_mode & 0o777 == 0o600
    assert list(salt.parent.iterdir()) == [salt]
    assert len(salt.read_bytes()) > 32
    secret = salt.read_bytes().strip()
    # The salt is the file's content, wherever it comes from.
    assert commitment_of(tmp_path / "b/ledger.jsonl", data_salt=str(salt)) == first
    assert commitment_of(tmp_path / "c/ledger.jsonl", data_salt=secret) == first
    others = [
        {"data_salt": b"another salt of 24 bytes"},
        {"data_salt": salt, "data_id": "a hash of the files"},
        {"data_salt": salt, "data_id": "another"},
        {"data_salt": salt, "data_id": ""},
        {
            "data_salt": salt,
            "data_loader": DataLoader(TensorDataset(*(each[1:] for each in data())), 12),
        },
    ]
    found = [
        commitment_of(tmp_path / f"{number}/ledger.jsonl", **settings)
        for number, settings in enumerate(others)
    ]
    assert len({first.commitment, *(each.commitment for each in found)}) == 6
    assert found[1].committed_to == "number of records and data_id"
    for name in ("a", "1"):
        written = (tmp_path / name / "ledger.jsonl").read_bytes()
        assert secret not in written
        assert b"hash of the files" not in written


def test_a_salt_does_not_lie_with_the_run(path):
    for salt in (path.parent / "salt", path.parent / "deeper" / "salt"):
        with pytest.raises(BadInput, match="lies in the run's folder"):
            attach(ledger=path, data_salt=salt)
    assert not path.exists()
    with pytest.raises(BadInput, match="16 bytes or more, found 5"):
        attach(ledger=path, data_salt=b"short")
    with pytest.raises(BadInput, match="cannot read or make the salt"):
        attach(ledger=path, data_salt=path.parents[1] / "nowhere" / "salt")
    with pytest.raises(BadInput, match="give data_salt= too"):
        attach(ledger=path, data_id="mine")


def test_a_ledger_in_memory_counts_on_when_its_engine_is_attached_again():
    """As after a layer was frozen or thawed: the refusal of that says to attach again."""
    engine, module, optimizer, private = attach(accountant="pld")
    train(module, optimizer, private, 3)
    first = engine.epsilon_if_secret(1e-3)
    engine.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, optimizer, private = engine.make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=loader(),
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            seed=3,
        )
    assert engine.epsilon_if_secret(1e-3) == first
    train(module, optimizer, private, 3)
    assert engine.ledger.num_intents == engine.ledger.num_commits == 6
    both = engine.epsilon_if_secret(1e-3)
    engine.detach()
    engine, module, optimizer, private = attach(accountant="pld")
    train(module, optimizer, private, 6)
    assert both == engine.epsilon_if_secret(1e-3) > first
    engine.detach()
