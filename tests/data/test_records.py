"""Records: the same bytes everywhere, each on its own, with secrets where the corpus says."""

import hashlib
import os
import re
import subprocess
import sys

import pytest

from unison.data import Records, open_corpus
from unison.data.corpora import MAX_RECORD_BYTES, NUM_NAMES, _owner
from unison.errors import BadInput

PINNED = "fc6a5a1dedc92f990be63c39c5ff9a3d721e2e4b13b22ea528a5134dddf567d5"
FIELDS = ["name", "id", "city", "email", "phone", "plan", "since", "due", "ticket"]
PROGRAM = """
import hashlib
from unison.data import Records
corpus = Records(seed=0, num_secrets=3, secret_repeats=2, num_records=100)
print(hashlib.sha256("".join(corpus).encode()).hexdigest())
"""


def digest(texts):
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def test_first_records_are_pinned():
    assert digest(Records(num_secrets=3, secret_repeats=2, num_records=100)) == PINNED


def test_another_process_gives_the_same_bytes():
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == PINNED


def test_a_record_depends_on_seed_and_index_only():
    small, large = Records(num_records=10), Records(num_records=1000)
    assert list(small) == [large.record(index) for index in range(10)]
    assert list(small) != list(Records(num_records=10, seed=1))
    assert len(set(large)) == 1000


def test_records_look_like_records_and_fit_a_row():
    corpus = open_corpus("records", num_records=500, num_secrets=50, seed=2**64 - 1)
    for text in corpus:
        assert len(text.encode()) <= MAX_RECORD_BYTES
        fields = [line.split(": ", 1)[0] for line in text.splitlines()]
        assert fields == FIELDS
        assert re.search(r"since: \d{4}-\d\d-\d\d\n", text)


@pytest.mark.parametrize(("num_secrets", "repeats"), [(0, 1), (1, 1), (5, 4), (20, 5)])
def test_secrets_are_where_the_corpus_says(num_secrets, repeats):
    corpus = Records(num_records=100, num_secrets=num_secrets, secret_repeats=repeats, seed=3)
    texts = list(corpus)
    places = [index for secret in corpus.secrets for index in secret.record_indices]
    assert len(places) == len(set(places)) == num_secrets * repeats
    for secret in corpus.secrets:
        found = [index for index, text in enumerate(texts) if secret.text in text]
        assert tuple(found) == secret.record_indices
        assert re.fullmatch(r"\d{4}-\d{4}-\d{4}", secret.code)
    assert len({secret.prefix for secret in corpus.secrets}) == num_secrets
    plain = Records(num_records=100, seed=3)
    untouched = set(range(100)) - set(places)
    assert all(plain.record(index) == texts[index] for index in untouched)


def test_every_secret_has_its_own_owner():
    assert len({_owner(5, number) for number in range(NUM_NAMES)}) == NUM_NAMES


def test_decoys_are_other_codes():
    corpus = Records(num_records=10, num_secrets=2)
    codes = corpus.decoy_codes(50)
    assert codes == corpus.decoy_codes(50)
    assert len(set(codes)) == 50
    assert not {secret.code for secret in corpus.secrets} & set(codes)
    secret = corpus.secrets[0]
    assert secret.with_code(codes[0]) == secret.text.replace(secret.code, codes[0])


@pytest.mark.parametrize("index", [-1, 10])
def test_no_such_record(index):
    with pytest.raises(IndexError, match="from 0 to 9"):
        Records(num_records=10).record(index)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_records": 0}, "num_records must be above 0"),
        ({"num_secrets": -1}, "num_secrets must be 0 or more"),
        ({"secret_repeats": 0}, "secret_repeats must be above 0"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"seed": 2**64}, r"below 2\*\*64"),
        ({"num_records": 5, "num_secrets": 3, "secret_repeats": 2}, "need 6 records, found num_r"),
        ({"num_secrets": NUM_NAMES + 1}, "at most 4096"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(BadInput, match=message):
        Records(**arguments)
