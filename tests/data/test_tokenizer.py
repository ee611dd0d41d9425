"""Tokenizers: lossless bytes, and files built with the `tokenizers` package."""

import builtins
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unison.data import ByteTokenizer, FileTokenizer, open_tokenizer
from unison.errors import BadInput

tokenizers = pytest.importorskip("tokenizers")


def save_tokenizer(path, *, special=("<|endoftext|>", "<pad>"), mark=True):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["hello hello world world"], trainer)
    backend.add_tokens([AddedToken(token, special=mark) for token in special])
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(path))
    return path


@given(st.text())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert ids.size == len(text.encode())
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["", "a", "<|end|>", "naïve 日本語 🎉", "\x00\r\n", "<|pad|>" * 3])
def test_bytes_never_gives_special_tokens(text):
    ids = ByteTokenizer().encode(text)
    assert ids.size == 0 or ids.max() < 256


def test_bytes_decodes_lists_arrays_tensors_and_broken_text():
    tokenizer = ByteTokenizer()
    for ids in ([104, 105, 256, 257], np.array([104, 105]), torch.tensor([104, 105, 256])):
        assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode([0xE6, 0x97]) == "�"
    assert tokenizer.decode([]) == ""
    assert [ids.tolist() for ids in tokenizer.encode_batch(["a", "", "b"])] == [[97], [], [98]]


@pytest.mark.parametrize("ids", [[258], [-1], [97, 1000]])
def test_bytes_refuses_other_ids(ids):
    with pytest.raises(BadInput, match="between 0 and 257, found"):
        ByteTokenizer().decode(ids)


def test_bytes_refuses_a_lone_surrogate():
    with pytest.raises(BadInput, match=r"lone surrogate '.ud800' at character 1"):
        ByteTokenizer().encode("a\ud800")


def test_bytes_fingerprint_is_pinned():
    assert ByteTokenizer().fingerprint == "3cef7380bf561090a5865a7f69a176cf"


@given(st.text(max_size=40))
@settings(derandomize=True, deadline=None, max_examples=30)
def test_file_round_trip(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "round-trip.json"
    tokenizer = FileTokenizer(path if path.exists() else save_tokenizer(path))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_file_knows_its_special_tokens(tmp_path):
    tokenizer = FileTokenizer(save_tokenizer(tmp_path / "tokenizer.json"))
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    by_name = {token["content"]: token["id"] for token in vocabulary}
    assert (tokenizer.end_id, tokenizer.pad_id) == (by_name["<|endoftext|>"], by_name["<pad>"])
    assert tokenizer.vocab_size == max(by_name.values()) + 1
    assert tokenizer.decode([tokenizer.end_id, tokenizer.pad_id]) == ""
    assert open_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("mark", [True, False])
def test_file_reads_special_tokens_in_text_as_text(tmp_path, mark):
    tokenizer = FileTokenizer(save_tokenizer(tmp_path / "t.json", mark=mark))
    text = "hello<|endoftext|>world<pad>"
    for copy in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        ids = copy.encode(text)
        assert copy.end_id not in ids
        assert copy.pad_id not in ids
        assert copy.decode(ids) == text


def test_file_ignores_truncation_and_padding(tmp_path):
    tokenizer = FileTokenizer(save_tokenizer(tmp_path / "t.json"))
    long, short = tokenizer.encode_batch(["hello world " * 20, ""])
    assert len(long) > 9
    assert len(short) == 0


def test_file_without_padding_token_pads_with_the_end(tmp_path):
    tokenizer = FileTokenizer(save_tokenizer(tmp_path / "t.json", special=["</s>"]))
    assert tokenizer.pad_id == tokenizer.end_id


def test_file_without_end_token(tmp_path):
    path = save_tokenizer(tmp_path / "t.json", special=["<pad>"])
    with pytest.raises(BadInput, match=r"end-of-document token in .*t\.json, found none of"):
        FileTokenizer(path)


def test_file_errors(tmp_path):
    with pytest.raises(BadInput, match="cannot be read"):
        FileTokenizer(tmp_path / "missing.json")
    with pytest.raises(BadInput, match="cannot be read"):
        FileTokenizer(tmp_path)
    for content in ("not json", "[1]", "{}"):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(BadInput, match="cannot be parsed"):
            FileTokenizer(tmp_path / "bad.json")
    with pytest.raises(BadInput, match=r"'bytes' or the path .* found 'byte'"):
        open_tokenizer("byte")


def test_file_without_the_package(tmp_path, monkeypatch):
    path = save_tokenizer(tmp_path / "t.json")
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadInput, match=r"pip install 'unison\[hf\]'"):
        FileTokenizer(path)
