"""Files that are no ledger end in one sentence and exit code 2: no traceback, and no ε."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.privacy.ledgers import SECRET, make
from unison.privacy.ledger import Ledger
from unison.privacy.ledger_file import START, hash_of, head_file_of

Records = list[dict[str, Any]]


@pytest.fixture
def records(tmp_path) -> Records:
    """The lines of a sound ledger: a session, then two steps."""
    mechanism, path = make(), tmp_path / "sound" / "ledger.jsonl"
    with Ledger.open(path, mechanism=mechanism, session=SECRET) as ledger:
        for step in range(2):
            ledger.intend(mechanism.release(step))
            ledger.commit(step)
    return [json.loads(line) for line in path.read_text().splitlines()]


def chained(records: Records) -> bytes:
    """The records as lines whose numbers and hashes are right, whatever else they hold."""
    lines: list[bytes] = []
    for number, record in enumerate(records, 1):
        before = hash_of(lines[-1]) if lines else START
        # Whoever forges a ledger can compute hashes too; numbers and hashes may be forged as well.
        kind = {"kind": record["kind"]} if "kind" in record else {}  # first, as we write it
        lines.append(json.dumps({**kind, "line": number, "previous": before} | record).encode())
    return b"".join(line + b"\n" for line in lines)


def put(number: int, **values: Any):
    """Change values of a line, and write what follows as if they had always been there."""

    def change(records: Records) -> bytes:
        for record in records:
            del record["line"], record["previous"]
        records[number - 1] |= values
        return chained(records)

    return change


def sampled(**sampling: Any):
    return put(2, sampling=sampling)


def text(old: str, new: str, number: int = 2):
    """Replace text of a line that JSON cannot be made to write."""

    def change(records: Records) -> bytes:
        lines = put(number)(records).decode().splitlines()[:number]
        assert old in lines[-1]
        lines[-1] = lines[-1].replace(old, new)
        return "".join(f"{line}\n" for line in lines).encode()

    return change


def without(number: int, name: str):
    def change(records: Records) -> bytes:
        del records[number - 1][name]
        return put(number)(records)

    return change


def lines(*those: bytes):
    """A sound session, and after it lines of bytes."""
    return lambda records: b"\n".join([chained(records[:1]).rstrip(b"\n"), *those])


def alone(data: bytes):
    return lambda records: data


DEEP = b"[" * 100_000
HUGE = "9" * 5_000  # more digits than Python turns into an integer
TORN = b'{"kind": "intent", "line": 2, "st'

HOSTILE = {
    # numbers
    "sigma of 10^400": put(2, noise_multiplier=10**400),
    "sigma of 10^400 in the session": put(1, next={"noise_multiplier": 10**400}),
    "sigma of 1e308": put(2, noise_multiplier=1e308),
    "sigma of 1e999": text('"noise_multiplier": 2.0', '"noise_multiplier": 1e999'),
    "sigma of 5000 digits": text('"noise_multiplier": 2.0', f'"noise_multiplier": {HUGE}'),
    "sigma not a number": text('"noise_multiplier": 2.0', '"noise_multiplier": NaN'),
    "sigma infinite": text('"noise_multiplier": 2.0', '"noise_multiplier": Infinity'),
    "sigma minus infinity": text('"noise_multiplier": 2.0', '"noise_multiplier": -Infinity'),
    "sigma negative": put(2, noise_multiplier=-1.0),
    "sigma true": put(2, noise_multiplier=True),
    "sigma a string": put(2, noise_multiplier="2.0"),
    "sigma a list": put(2, noise_multiplier=[2.0]),
    "sigma null": put(2, noise_multiplier=None),
    "clip norm 0": put(2, max_grad_norm=0.0),
    "clip norm true": put(2, max_grad_norm=True),
    "count noise true": put(2, count_noise_multiplier=True),
    "batch size a string": put(2, expected_batch_size="10"),
    "sensitivity below 1": put(2, sensitivity_factor=0.5),
    "sensitivity of 10^400": put(2, sensitivity_factor=10**400),
    "step negative": put(2, step=-1),
    "step true": put(2, step=True),
    "step a float": put(2, step=0.0),
    "step of 10^30": put(2, step=10**30),
    "committed step true": put(3, step=False),
    "line number true": put(1, line=True),
    "line number of 10^400": put(2, line=10**400),
    "line number negative": put(2, line=-2),
    "line number a string": put(2, line="2"),
    # sampling
    "sampling a list": put(2, sampling=["poisson", 0.1]),
    "sampling null": put(2, sampling=None),
    "sampling unknown": sampled(kind="uniform", rate=0.1),
    "sampling of an unhashable kind": sampled(kind=["poisson"], rate=0.1),
    "rate above 1": sampled(kind="poisson", rate=1.5),
    "rate true": sampled(kind="poisson", rate=True),
    "rate missing": sampled(kind="poisson"),
    "rate and something else": sampled(kind="poisson", rate=0.1, capacity=3),
    "no records": sampled(kind="shuffled", batch_size=0, num_records=0),
    "records of 10^400": sampled(kind="truncated", rate=0.1, capacity=9, num_records=10**400),
    "records true": sampled(kind="shuffled", batch_size=True, num_records=True),
    # fields
    "unknown kind": put(2, kind="extent"),
    "kind a list": put(2, kind=["intent"]),
    "kind missing": without(2, "kind"),
    "sigma missing": without(2, "noise_multiplier"),
    "an extra field": put(2, epsilon=0.0),
    "an extra field of a commit": put(3, epsilon=0.0),
    "a commit without a step": without(3, "step"),
    "a name twice": text('"step": 0', '"step": 0, "noise_multiplier": 9.0'),
    "previous a number": put(2, previous=0),
    "previous not a hash": put(2, previous="x" * 64),
    # the session
    "format unknown": put(1, format="unison-ledger/9"),
    "format a list": put(1, format=["unison-ledger/2"]),
    "format missing": without(1, "format"),
    "release missing": without(1, "next"),
    "release a list": put(1, next=[1, 2]),
    "origin missing": without(1, "key_origin"),
    "origin unknown": put(1, key_origin="a dice"),
    "origin a list": put(1, key_origin=["seed"]),
    "adjacency of another kind": put(1, adjacency="add or remove one record"),
    "rows per sample 0": put(1, rows_per_sample=0),
    "commitment not a hash": put(1, commitment="mine"),
    "commitment a number": put(1, commitment=7),
    "device that draws on a screen": put(1, device="\x1b[2Jcpu"),
    "device of a book's length": put(1, device="x" * 1000),
    "fingerprint a list": put(1, fingerprint=[]),
    "a torn intent after a bad session": lambda records: (
        put(1, format="unison-ledger/9")(records[:1]) + TORN
    ),
    # JSON, text, files
    "deep": alone(DEEP),
    "deep in a line": lines(DEEP + b"]" * 100_000),
    "deep in a field": text('"step": 0', f'"step": {"[" * 50_000}{"]" * 50_000}'),
    "a list": alone(b"[1, 2, 3]\n"),
    "a list after a session": lines(b"[1, 2, 3]\n"),
    "a number": lines(b"7\n"),
    "a string": lines(b'"intent"\n'),
    "words": alone(b"hello\nworld\n"),
    "words at the end": lines(b"hello"),
    "not UTF-8": alone(b"\xff\xfe\x00\x01\n"),
    "not UTF-8 at the end": lines(b'{"kind": "intent", "line": 2, "step": "\xff"}'),
    "UTF-16": lambda records: chained(records).decode().encode("utf-16"),
    "an end of CRLF in the middle of a field": text('"step": 0', '"step": 0\r0'),
    "empty": alone(b""),
    "an empty line": alone(b"\n"),
    "zeros": alone(b"\0" * 4096),
    "nothing but the beginning of a line": alone(b'{"kind": "op'),
    "an intent without a session": lambda records: chained(
        [{k: v for k, v in records[1].items() if k not in ("line", "previous")}]
    ),
    "JSON with a comma too many": text('"step": 0,', '"step": 0,,'),
    "a whole object and more": text('"step": 0,', '"step": 0,}}'),
}
assert len(HOSTILE) >= 40


def refused(result: tuple[int, str, str]) -> str:
    """The one sentence that a refusal is."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("unison: ")
    assert err.count("\n") == 1
    assert len(err) < 1000  # a hostile value does not fill the screen
    assert err.isascii() or "…" in err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_ledger_is_one_sentence(unison, records, tmp_path, case):
    path = tmp_path / "run" / "ledger.jsonl"
    path.parent.mkdir()
    path.write_bytes(HOSTILE[case](records))
    assert "is no ledger" in refused(unison("account", path.parent, "--delta", "1e-6"))
    assert "is no ledger" in refused(unison("account", path, "--delta", "1e-6", "--json"))


def test_the_same_lines_unforged_are_a_ledger(unison, records, tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(put(1)(records))
    code, _, err = unison("account", path, "--delta", "1e-6")
    assert (code, err) == (0, "")


def test_numbers_that_no_accountant_takes_are_one_sentence(unison, records, tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(sampled(kind="poisson", rate=5e-324)(records))
    assert "cannot count such numbers" in refused(unison("account", path, "--delta", "1e-6"))


def test_a_line_of_100_megabytes_is_not_read(unison, records, tmp_path):
    path = tmp_path / "ledger.jsonl"
    for beginning in (b"", b'{"kind": "intent", "line": 2, "step": "'):
        path.write_bytes(chained(records[:1]) + beginning + b"x" * (2 << 20))
        os.truncate(path, 100 << 20)  # the rest is zeros, which take no room on the disk
        tracemalloc.start()
        assert "longer than 1,048,576 bytes" in refused(unison("account", path, "--delta", "1e-6"))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20 << 20


def make_directory(path: Path) -> None:
    path.mkdir()


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make_it", [make_directory, os.mkfifo, link_to_itself, link_to_a_device])
def test_what_is_no_file_is_one_sentence(unison, tmp_path, make_it):
    path = tmp_path / "run" / "ledger.jsonl"
    path.parent.mkdir()
    make_it(path)
    refused(unison("account", path.parent, "--delta", "1e-6"))


HEADS = {
    "deep": DEEP,
    "a list": b"[]",
    "true": b'{"num_lines": true, "sha256": "0"}',
    "10^400": b'{"num_lines": 1' + b"0" * 400 + b', "sha256": "0"}',
    "not UTF-8": b"\xff\xfe",
    "endless": b" " * 10_000_000,
}


@pytest.mark.parametrize("case", [*HEADS, "a pipe", "a folder"])
def test_a_head_file_that_is_none_is_noted(unison, records, tmp_path, case):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(put(1)(records))
    head = head_file_of(path)
    if case == "a pipe":
        os.mkfifo(head)
    elif case == "a folder":
        head.mkdir()
    else:
        head.write_bytes(HEADS[case])
    code, out, err = unison("account", path, "--delta", "1e-6")
    assert (code, err) == (0, "")
    assert "cannot be read, so removed last lines would not show" in " ".join(out.split())
