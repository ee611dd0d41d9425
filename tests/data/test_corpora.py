"""Corpora from disk: what a document is, bounded memory, and errors that name file and line."""

import pickle
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unison.data import InMemoryCorpus, open_corpus
from unison.data import corpora as files_module
from unison.errors import BadInput


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def documents(spec, **kwargs):
    corpus = open_corpus(str(spec), **kwargs)
    first = list(corpus)
    assert list(pickle.loads(pickle.dumps(corpus))) == first
    assert list(corpus) == first
    return first


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a", ["a"]),
        ("a\n\nb\n", ["a\n\nb\n"]),
        ("a\r\n<|endoftext|>\r\nb", ["a\r\n", "b"]),
        ("a\n<|endoftext|>\nb\n<|endoftext|>\n", ["a\n", "b\n"]),
        ("a\n<|endoftext|>", ["a\n"]),
        ("<|endoftext|>\n<|endoftext|>\né", ["", "", "é"]),
        ("a <|endoftext|>\n<|endoftext|> b", ["a <|endoftext|>\n<|endoftext|> b"]),
        ("\ufeffa", ["a"]),
        ("\ufeff<|endoftext|>\na\ufeff", ["", "a\ufeff"]),
    ],
)
def test_text_documents(tmp_path, content, expected):
    assert documents(write(tmp_path / "a.txt", content)) == expected


@given(st.text(alphabet="ab\n é日🎉"), st.integers(1, 9))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_text_pieces_join_to_the_file(tmp_path_factory, text, piece_bytes):
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    write(path, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files_module, "PIECE_BYTES", piece_bytes)
        pieces = list(files_module.text_pieces(path))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_separator_inside_a_long_line_is_text(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "PIECE_BYTES", 20)
    text = "x" * 20 + "<|endoftext|>\nrest"
    assert documents(write(tmp_path / "a.txt", text)) == [text]


@pytest.mark.parametrize("line_length", [100, 10**9])
def test_text_is_read_in_bounded_memory(tmp_path, line_length):
    path = tmp_path / "big.txt"
    block = (b"x" * (min(line_length, 100_000) - 1)) + (b"\n" if line_length == 100 else b"x")
    block *= 1_000_000 // len(block)
    with path.open("wb") as file:
        for _ in range(20):
            file.write(block)
    num_characters = 0
    tracemalloc.start()
    for piece in open_corpus(str(path)).pieces():
        num_characters += len(piece.text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_characters == path.stat().st_size
    assert peak < 2_000_000


@pytest.mark.parametrize("name", ["a.txt", "a.dat", "a"])
@pytest.mark.parametrize(
    ("content", "offset"),
    [
        (b"\xff", 0),
        (b"ab\xffcd", 2),
        (b"caf\xc3", 3),
        (b"\xef\xbb\xbfab\xfe", 5),
        (b"a\n<|endoftext|>\nb\xff", 17),
    ],
)
def test_invalid_utf8_names_the_offset(tmp_path, name, content, offset):
    path = write(tmp_path / name, content)
    with pytest.raises(BadInput, match=rf"{name}: expected UTF-8 .* offset {offset} of the file"):
        list(open_corpus(path))


def test_invalid_utf8_offset_across_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "PIECE_BYTES", 4)
    path = write(tmp_path / "a.txt", "ééé".encode() + b"abc\xe6\x97" + b"zz")
    with pytest.raises(BadInput, match="offset 9 "):
        list(open_corpus(path))


def test_json_lines(tmp_path):
    content = '\ufeff{"text": "a\\n日"}\n\n  \n{"text": "", "n": 1}\r\n{"n": {}, "text": "c"}'
    for suffix in ("jsonl", "ndjson", "JSONL"):
        path = write(tmp_path / f"a.{suffix}", content)
        assert documents(path) == ["a\n日", "", "c"]
    assert documents(write(tmp_path / "b.jsonl", '{"body": "x"}\n'), text_field="body") == ["x"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"body": "b"}\n', ":2: expected the field 'text', found 'body'; name"),
        (b'{"text": "a"}\n\n{"text": 3}\n', ":3: .* to be a string, found int"),
        (b'{"text": null}', ":1: .* to be a string, found NoneType"),
        (b'{"text": "a"\n', ":1: expected one JSON object per line, .*at column 13"),
        (b'["a"]\n', ":1: expected a JSON object .* found a list"),
        (b"{}\n", ":1: .*found no fields"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', ":2: expected UTF-8 .* offset 24 "),
        (b'\xef\xbb\xbf{"text": "\xff"}\n', ":1: expected UTF-8 .* offset 13 "),
        (b'{"text": "ab\\ud800"}\n', ":1: .*surrogate pair '.ud800' at character 2"),
        (b"[" * 100_000, ":1: expected one JSON object per line"),
    ],
)
def test_json_lines_errors_name_the_line(tmp_path, content, message):
    path = write(tmp_path / "a.jsonl", content)
    with pytest.raises(BadInput, match="a.jsonl" + message):
        list(open_corpus(path))


def test_json_line_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "MAX_JSON_LINE", 1 << 20)
    path = write(tmp_path / "a.jsonl", b'{"text": "' + b"x" * (1 << 20))
    with pytest.raises(BadInput, match=":1: expected a line of less than 1 MiB"):
        list(open_corpus(path))


def test_folder_is_sorted_and_skips_other_files(tmp_path):
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "a" / "z.md", "z")
    write(tmp_path / "a" / "y.jsonl", '{"text": "1"}\n{"text": "2"}')
    write(tmp_path / "c.py", "")
    write(tmp_path / "config-notes.rst", "n")
    write(tmp_path / "image.png", b"\xff")
    write(tmp_path / ".git" / "x.txt", "hidden")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert documents(tmp_path) == ["1", "2", "z", "b", "", "n"]


def test_missing_and_empty(tmp_path):
    with pytest.raises(BadInput, match=r"'records', 'stdlib'.*existing .*'stlib'.*mean 'stdlib'\?"):
        open_corpus("stlib")
    for spec in (str(tmp_path / "missing.txt"), ""):
        with pytest.raises(BadInput, match="which is neither; check the spelling"):
            open_corpus(spec)
    with pytest.raises(BadInput, match="found an empty file"):
        open_corpus(write(tmp_path / "empty.txt", ""))
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    with pytest.raises(BadInput, match=r"text files below .*folder, found none"):
        open_corpus(str(tmp_path / "folder"))
    with pytest.raises(BadInput, match=r"archive .*a\.jsonl\.gz; unpack"):
        open_corpus(write(tmp_path / "a.jsonl.gz", b"\x1f\x8b"))
    with pytest.raises(BadInput, match="pipe or device"):
        open_corpus("/dev/null")


def test_file_that_vanishes(tmp_path):
    path = write(tmp_path / "a.txt", "a")
    corpus = open_corpus(path)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(BadInput, match=r"cannot read .*a\.txt: No such file"):
        list(corpus)


@pytest.mark.parametrize("extra", [{"num_records": 3}, {"num_secrets": 1}, {"secret_repeats": 2}])
def test_arguments_of_records_are_refused_elsewhere(extra):
    with pytest.raises(BadInput, match="belong to the corpus 'records'"):
        open_corpus("stdlib", **extra)


def test_stdlib():
    corpus = open_corpus("stdlib")
    sources = [piece.source for piece in corpus.pieces()]
    assert "json/decoder.py" in sources
    assert len(set(sources)) == len(sources)
    assert not any("site-packages" in s or s.startswith(("test/", "idlelib/")) for s in sources)
    assert sum(len(text) for text in corpus) > 5_000_000


def test_in_memory_corpus():
    corpus = InMemoryCorpus(iter(["a", ""]))
    assert list(corpus) == list(corpus) == ["a", ""]
    assert len(corpus) == 2
