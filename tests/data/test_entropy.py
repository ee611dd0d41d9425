"""The entropy of the targets by hand, and a large file from disk to entropy in little memory."""

import math
import tracemalloc

import pytest

from unison.data import ByteTokenizer, InMemoryCorpus, build_rows, open_corpus, unigram_entropy


def build(corpus, directory, **kwargs):
    corpus = InMemoryCorpus(corpus) if isinstance(corpus, list) else corpus
    return build_rows(corpus, ByteTokenizer(), directory=directory, **kwargs)


@pytest.mark.parametrize("layout", ["packed", "documents"])
def test_unigram_entropy_by_hand(tmp_path, layout, monkeypatch):
    monkeypatch.setattr("unison.data.rows._CHUNK_TOKENS", 5)
    texts = ["xab", "xaa", "xbb", "q"]
    train, _ = build(texts, tmp_path, row_length=3, layout=layout, seed=1)
    assert train.summary()["split_by"] == "tail"
    if layout == "documents":  # targets: ab end, aa end, bb end
        expected = math.log(3)
    else:  # what is left of the stream is "xab end xaa end xb": its last 9 tokens are targets
        counts = [3, 2, 2, 2]  # a, b, end, x among "ab end xaa end xb"
        expected = -sum(n / 9 * math.log(n / 9) for n in counts)
    assert unigram_entropy(train) == pytest.approx(expected, abs=1e-12)


def test_entropy_of_one_token_is_zero(tmp_path):
    train, _ = build(["x" * 200], tmp_path, row_length=7)
    assert unigram_entropy(train) == 0.0


def test_bounded_memory(tmp_path):
    path = tmp_path / "big.txt"
    block = b"some words, and a line end\n" * 10_000
    with path.open("wb") as file:
        while file.tell() < 50_000_000:
            file.write(block)
    corpus = open_corpus(str(path))
    tracemalloc.start()
    train, evaluation = build(corpus, tmp_path / "rows", row_length=1024)
    entropy = unigram_entropy(evaluation)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert train.num_tokens + evaluation.num_tokens > 49_900_000
    assert 2 < entropy < 3
    assert peak < 8_000_000
