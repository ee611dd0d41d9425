"""Rows: layouts against a slow oracle, splits, files that any process can open."""

import json
import pickle
import stat
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from unison.data import (
    IGNORE_INDEX,
    ByteTokenizer,
    Corpus,
    InMemoryCorpus,
    Piece,
    Records,
    RowDataset,
    build_rows,
    document_split,
)
from unison.errors import BadInput

END, PAD = 256, 257
TEXTS = [f"{'é' * (n % 5)}{n}" for n in range(60)] + ["x"]


class WideTokenizer(ByteTokenizer):
    """Bytes whose ids need 32 bits."""

    vocab_size = 70_000
    end_id = 69_999
    shift = 69_000

    def encode(self, text):
        return super().encode(text) + self.shift


def build(texts, directory, *, row_length=7, tokenizer=None, **kwargs):
    corpus = texts if isinstance(texts, Corpus) else InMemoryCorpus(texts)
    return build_rows(
        corpus, tokenizer or ByteTokenizer(), row_length=row_length, directory=directory, **kwargs
    )


def all_rows(dataset):
    batch = dataset.rows(range(len(dataset)))
    return batch["input_ids"].tolist(), batch["labels"].tolist()


def split_texts(texts, *, seed=0, eval_fraction=0.05):
    sides = {"train": [], "eval": []}
    for index, text in enumerate(texts):
        sides[document_split(index, seed=seed, eval_fraction=eval_fraction)].append(text)
    return sides


@pytest.mark.parametrize("row_length", [1, 2, 7, 13])
@pytest.mark.parametrize("seed", [0, 5])
def test_packed_against_a_loop(tmp_path, row_length, seed):
    datasets = build(TEXTS, tmp_path, row_length=row_length, seed=seed, eval_fraction=0.3)
    sides = split_texts(TEXTS, seed=seed, eval_fraction=0.3)
    for dataset, texts in zip(datasets, (sides["train"], sides["eval"]), strict=True):
        stream = [token for text in texts for token in [*text.encode(), END]]
        inputs, labels = [], []
        for start in range(0, len(stream) - row_length, row_length):
            inputs.append(stream[start : start + row_length])
            labels.append(stream[start + 1 : start + row_length + 1])
        assert all_rows(dataset) == (inputs, labels)
        assert dataset.num_rows == len(dataset) == len(inputs)
        summary = dataset.summary()
        assert dataset.num_tokens + summary["num_dropped_tokens"] == len(stream)
        assert summary["num_targets"] == len(inputs) * row_length
        assert summary["split_by"] == "documents"


@pytest.mark.parametrize("row_length", [10, 12])
def test_documents_against_a_loop(tmp_path, row_length):
    datasets = build(TEXTS, tmp_path, row_length=row_length, layout="documents", eval_fraction=0.3)
    sides = split_texts(TEXTS, eval_fraction=0.3)
    for dataset, texts in zip(datasets, (sides["train"], sides["eval"]), strict=True):
        inputs, labels = all_rows(dataset)
        assert len(inputs) == len(texts) == dataset.num_rows
        targets = dataset.num_targets(range(len(dataset)))
        for text, row, label, count in zip(texts, inputs, labels, targets, strict=True):
            tokens = [*text.encode(), END]
            padding = row_length + 1 - len(tokens)
            assert row == (tokens + [PAD] * padding)[:-1]
            assert label == tokens[1:] + [IGNORE_INDEX] * padding
            assert count == len(tokens) - 1 == sum(x != IGNORE_INDEX for x in label)
        assert dataset.num_tokens == sum(len(text.encode()) + 1 for text in texts)
        assert dataset.summary()["num_targets"] == targets.sum()


@given(st.lists(st.text(max_size=12), min_size=2, max_size=12), st.integers(1, 30))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_documents_round_trip(tmp_path_factory, texts, seed):
    directory = tmp_path_factory.getbasetemp() / "round-trip"
    kept = [text for text in texts if text]
    if len(kept) < 2:
        return
    datasets = build(texts, directory, row_length=48, layout="documents", seed=seed)
    found = []
    for dataset in datasets:
        inputs, labels = all_rows(dataset)
        found += [
            ByteTokenizer().decode([row[0], *(x for x in label if x != IGNORE_INDEX)])
            for row, label in zip(inputs, labels, strict=True)
        ]
    assert sorted(found) == sorted(kept)
    assert datasets[0].summary()["num_skipped_documents"] == len(texts) - len(kept)


def test_one_token_documents(tmp_path):
    texts = ["a", "b", "c"]
    train, evaluation = build(texts, tmp_path, row_length=1, layout="documents", seed=1)
    assert all_rows(train) == ([[97], [98]], [[END], [END]])
    assert all_rows(evaluation) == ([[99]], [[END]])
    assert evaluation.summary()["split_by"] == "tail"


def test_document_that_just_fits_and_one_too_long(tmp_path):
    train, _ = build(["1234567", "b"], tmp_path, layout="documents")
    assert all_rows(train)[1] == [[*b"234567", END]]
    with pytest.raises(BadInput, match=r"document 1 \(.*; documents\[1\]\) has 8 tokens"):
        build(["a", "12345678"], tmp_path, layout="documents")
    # the rows that were there before the failed build are still there
    assert all_rows(RowDataset.open(tmp_path, "train")) == all_rows(train)
    assert not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize("length", [8, 9, 500])
def test_truncated_documents_have_no_end(tmp_path, length):
    train, _ = build(["x" * length, "b"], tmp_path, layout="documents", long_documents="truncate")
    assert all_rows(train) == ([[120] * 7], [[120] * 7])
    assert train.summary()["num_truncated_documents"] == 1


class Pieces(Corpus):
    name = "pieces"

    def __init__(self, *documents):
        self.documents = documents

    def pieces(self):
        for parts in self.documents:
            for index, part in enumerate(parts):
                yield Piece(part, ends_document=index == len(parts) - 1, source="here")


def test_pieces_belong_to_one_document(tmp_path):
    corpus = Pieces(["ab", "", "cd", ""], ["", ""], ["e", "f"])
    train, evaluation = build(corpus, tmp_path, layout="documents")
    assert ByteTokenizer().decode(all_rows(train)[0][0]) == "abcd"
    assert ByteTokenizer().decode(all_rows(evaluation)[0][0]) == "ef"
    assert train.summary()["num_documents"] == 3
    assert train.summary()["num_skipped_documents"] == 1
    with pytest.raises(BadInput, match=r"document 0 .* has more than 7 tokens"):
        build(Pieces(["12345678", "9"], ["a"]), tmp_path, layout="documents")


def test_corpus_that_stops_too_early(tmp_path):
    class Unfinished(Corpus):
        name = "unfinished"

        def pieces(self):
            yield Piece("abc" * 50, ends_document=False, source="here")

    with pytest.raises(BadInput, match="stopped in the middle of document 0"):
        build(Unfinished(), tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_single_document_is_cut_at_its_tail(tmp_path, seed):
    text = "".join(chr(97 + n % 26) for n in range(1000))
    train, evaluation = build([text], tmp_path, seed=seed, eval_fraction=0.1)
    stream = [*text.encode(), END]
    assert train.summary()["split_by"] == "tail"
    assert all_rows(train)[0][0] == stream[:7]
    assert all_rows(evaluation)[0][0] == stream[901:908]
    assert train.num_tokens <= 901
    assert evaluation.num_tokens <= 100


@pytest.mark.parametrize("layout", ["packed", "documents"])
def test_every_document_on_the_eval_side(tmp_path, layout):
    assert all(document_split(i, seed=0, eval_fraction=0.999) == "eval" for i in range(61))
    train, evaluation = build(
        TEXTS, tmp_path, row_length=10, layout=layout, eval_fraction=0.999, seed=0
    )
    assert train.summary()["split_by"] == "tail"
    assert train.num_rows == 1 if layout == "documents" else train.num_rows >= 1
    assert all_rows(train)[0][0][:2] == [48, END]  # the first document, "0"
    assert evaluation.num_rows > 20


def test_smallest_packed_corpus(tmp_path):
    train, evaluation = build(["x" * 15], tmp_path)
    assert (train.num_rows, evaluation.num_rows) == (1, 1)
    with pytest.raises(BadInput, match="need at least 16 tokens, found 15 tokens"):
        build(["x" * 14], tmp_path)


@pytest.mark.parametrize("layout", ["packed", "documents"])
def test_no_text_at_all(tmp_path, layout):
    for texts in ([], ["", ""]):
        with pytest.raises(BadInput, match=f"found {len(texts)} documents that are all empty"):
            build(texts, tmp_path, layout=layout)


def test_split_without_a_row(tmp_path):
    texts = ["x" * 50 if side == "train" else "y" for side in sides_of(30)]
    with pytest.raises(BadInput, match=r"in the eval split, found .* tokens where a row needs 8"):
        build(texts[:20], tmp_path)
    with pytest.raises(BadInput, match="at least 2 documents, found one"):
        build(["", "one"], tmp_path, layout="documents")


def sides_of(count):
    return [document_split(index, seed=0, eval_fraction=0.05) for index in range(count)]


def test_split_is_disjoint_complete_and_near_its_fraction(tmp_path):
    corpus = Records(num_records=1000)
    datasets = build(corpus, tmp_path, row_length=256, layout="documents", eval_fraction=0.2)
    rows = [{tuple(row) for row in all_rows(dataset)[0]} for dataset in datasets]
    assert not rows[0] & rows[1]
    assert len(rows[0] | rows[1]) == 1000
    assert 150 < len(rows[1]) < 250


def test_split_does_not_move_when_documents_are_added():
    assert sides_of(10) == sides_of(20)[:10]
    assert sides_of(500) != [document_split(i, seed=1, eval_fraction=0.05) for i in range(500)]


@pytest.mark.parametrize("layout", ["packed", "documents"])
def test_same_bytes_on_every_build(tmp_path, layout):
    summaries = [
        build(TEXTS, tmp_path / folder, row_length=12, layout=layout, eval_fraction=0.3)[
            0
        ].summary()
        for folder in ("a", "b")
    ]
    assert summaries[0] == summaries[1]
    for name in ("train.bin", "eval.bin"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_items_batches_and_loader(tmp_path):
    train, _ = build(TEXTS, tmp_path, row_length=10, layout="documents")
    item = train[3]
    assert {name: (value.dtype, list(value.shape)) for name, value in item.items()} == {
        "input_ids": (torch.int64, [10]),
        "labels": (torch.int64, [10]),
    }
    for indices in ([4, 3, 3], np.array([4, 3, 3]), torch.tensor([4, 3, 3])):
        batch = train.rows(indices)
        for name, values in batch.items():
            assert values.is_contiguous()
            assert torch.equal(values[1], item[name])
            assert torch.equal(values[0], train[4][name])
    loader = DataLoader(train, batch_size=5)
    joined = torch.cat([batch["labels"] for batch in loader])
    assert torch.equal(joined, train.rows(range(len(train)))["labels"])


def test_no_indices(tmp_path):
    for layout in ("packed", "documents"):
        train, _ = build(TEXTS, tmp_path, row_length=10, layout=layout, eval_fraction=0.3)
        assert {k: list(v.shape) for k, v in train.rows([]).items()} == {
            "input_ids": [0, 10],
            "labels": [0, 10],
        }
        assert train.num_targets([]).shape == (0,)
        assert train.__getitems__([]) == []


def test_index_out_of_range(tmp_path):
    train, _ = build(TEXTS, tmp_path)
    for index in (-1, len(train)):
        with pytest.raises(IndexError, match=f"from 0 to {len(train) - 1}, found {index}"):
            train[index]
        with pytest.raises(IndexError):
            train.num_targets([0, index])
    wrong: list[Any] = [[0.5], [True], [[1]]]
    for indices in wrong:
        with pytest.raises(BadInput, match="one-dimensional list of integers"):
            train.rows(indices)


def test_pickled_dataset_is_small_and_equal(tmp_path):
    train, _ = build(Records(num_records=300), tmp_path, row_length=256, layout="documents")
    before = all_rows(train)
    data = pickle.dumps(train)
    assert len(data) < 4000
    assert all_rows(pickle.loads(data)) == before


def test_rows_written_again(tmp_path):
    mapped, _ = build(TEXTS, tmp_path, layout="documents", row_length=10)
    before = all_rows(mapped)
    unmapped = pickle.loads(pickle.dumps(mapped))
    build(TEXTS[::-1], tmp_path, layout="documents", row_length=10)
    assert all_rows(mapped) == before
    with pytest.raises(BadInput, match="were written again after this dataset was opened"):
        unmapped.rows([0])


def test_relative_directory_survives_a_change_of_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build(TEXTS, "rows")
    dataset = RowDataset.open("rows", "eval")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert len(all_rows(dataset)[0]) == dataset.num_rows


def test_files_are_private(tmp_path):
    build(TEXTS, tmp_path / "new", row_length=10, layout="documents")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    lengths = ["eval.lengths.bin", "train.lengths.bin"]
    assert names == sorted(["eval.bin", "train.bin", "rows.json", *lengths])
    for path in (tmp_path / "new").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    build(TEXTS, tmp_path / "new")
    assert not any((tmp_path / "new" / name).exists() for name in lengths)


def test_wide_vocabulary(tmp_path):
    train, _ = build(TEXTS, tmp_path, tokenizer=WideTokenizer())
    assert train.summary()["dtype"] == "<u4"
    assert train.vocab_size == 70_000
    narrow, _ = build(TEXTS, tmp_path / "narrow")
    wide = [[t + 69_000 if t < 256 else 69_999 for t in row] for row in all_rows(narrow)[0]]
    assert all_rows(train)[0] == wide


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_tokens_are_as_narrow_as_the_vocabulary_allows(tmp_path, vocab_size, dtype):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = vocab_size
    train, _ = build(TEXTS, tmp_path, tokenizer=tokenizer)
    assert train.summary()["dtype"] == dtype


def test_tokenizer_that_contradicts_itself(tmp_path):
    tokenizer = WideTokenizer()
    tokenizer.shift = 70_000
    with pytest.raises(BadInput, match="expected token ids below vocab_size=70000"):
        build(TEXTS, tmp_path, tokenizer=tokenizer)


def test_bad_arguments(tmp_path):
    for arguments, message in [
        ({"row_length": 0}, "row_length must be above 0"),
        ({"layout": "pack"}, "did you mean 'packed'"),
        ({"long_documents": "cut"}, "one of 'error', 'truncate'"),
        ({"eval_fraction": 0.0}, "strictly between 0 and 1"),
        ({"eval_fraction": 1.0}, "strictly between 0 and 1"),
        ({"seed": -1}, "seed must lie"),
    ]:
        with pytest.raises(BadInput, match=message):
            build(TEXTS, tmp_path, **arguments)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match=r"cannot write rows to .*file"):
        build(TEXTS, tmp_path / "file")


def test_open_errors(tmp_path):
    with pytest.raises(BadInput, match=r"rows\.json cannot be read .*build_rows"):
        RowDataset.open(tmp_path, "train")
    build(TEXTS, tmp_path)
    with pytest.raises(BadInput, match="split must be one of 'train', 'eval', found 'test'"):
        RowDataset.open(tmp_path, "test")
    with (tmp_path / "train.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(BadInput, match=r"train\.bin to hold \d+ bytes, found \d+ bytes"):
        RowDataset.open(tmp_path, "train")
    (tmp_path / "eval.bin").unlink()
    with pytest.raises(BadInput, match="found no such file"):
        RowDataset.open(tmp_path, "eval")
    for content, message in [("{", "is damaged"), (json.dumps({"format": 0}), "another format")]:
        (tmp_path / "rows.json").write_text(content)
        with pytest.raises(BadInput, match=message):
            RowDataset.open(tmp_path, "train")
