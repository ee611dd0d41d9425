"""Tokenizers: text to token ids and back.

`ByteTokenizer` needs no file; `FileTokenizer` reads a Hugging Face `tokenizer.json`. Neither reads
special tokens out of user text: a document that contains the characters `<|endoftext|>` cannot end
itself.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from unison.errors import BadInput
from unison.schema import open_regular

END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|im_end|>",
    "[EOS]",
    "[SEP]",
)
"""Names an end-of-document token usually has, most specific first."""

PAD_TOKENS = ("<|pad|>", "<pad>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>")
"""Names a padding token usually has."""


def vocabulary_fingerprint(vocabulary: dict[str, int]) -> str:
    """Hash a vocabulary; the order of the dictionary does not matter.

    >>> vocabulary_fingerprint({"a": 0, "b": 1}) == vocabulary_fingerprint({"b": 1, "a": 0})
    True
    """
    pairs = sorted((index, token) for token, index in vocabulary.items())
    return hashlib.blake2b(json.dumps(pairs).encode(), digest_size=16).hexdigest()


def _id_array(ids: Iterable[int] | Tensor, vocab_size: int) -> np.ndarray:
    """Bring ids of any kind (list, array, tensor) to int64 and check their range."""
    array = np.asarray(ids if hasattr(ids, "__array__") else list(ids))
    array = array.astype(np.int64).reshape(-1)
    if array.size and not (array.min() >= 0 and array.max() < vocab_size):
        wrong = array[(array < 0) | (array >= vocab_size)][0]
        raise BadInput(f"token ids must lie between 0 and {vocab_size - 1}, found {wrong}")
    return array


class ByteTokenizer:
    """One token per UTF-8 byte, and two more: `<|end|>` (256) and `<|pad|>` (257).

    It needs no file, knows every text and loses nothing.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né").tolist()
    [110, 195, 169]
    >>> tokenizer.decode([110, 195, 169, 256])
    'né'
    """

    name = "bytes"
    vocab_size = 258
    end_id = 256
    pad_id = 257
    fingerprint = vocabulary_fingerprint(
        {**{f"<{byte:#04x}>": byte for byte in range(256)}, "<|end|>": 256, "<|pad|>": 257}
    )

    def encode(self, text: str) -> np.ndarray:
        """Turn text into its UTF-8 bytes.

        Args:
            text: Any text. `<|end|>` in it is seven bytes, not a special token.

        Returns:
            The ids, int64 [tokens].

        Raises:
            BadInput: The text holds half a surrogate pair, which has no UTF-8 form.
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadInput(
                f"expected text that UTF-8 can hold, found a lone surrogate "
                f"{error.object[error.start]!a} at character {error.start}; remove it from the text"
            ) from error
        return np.frombuffer(data, dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode several texts, each on its own."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """Turn ids into text; special tokens are left out, broken UTF-8 becomes U+FFFD.

        Args:
            ids: A list, array or CPU tensor of ids.

        Returns:
            The text.

        Raises:
            BadInput: An id lies outside the vocabulary.
        """
        array = _id_array(ids, self.vocab_size)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def __repr__(self) -> str:
        return "ByteTokenizer()"


class FileTokenizer:
    """A tokenizer from a Hugging Face `tokenizer.json` file.

    The file's own truncation and padding are switched off, and so is its template of special
    tokens: unison adds the end token itself. Special tokens that occur in user text are read as
    plain text. (One case is left: a file that lists the end token among its ordinary words only.)
    Where the file has no padding token the end token pads; padding is never a target.

    Args:
        path: The file, or a folder that holds a `tokenizer.json`.

    Raises:
        BadInput: The `tokenizers` package is missing, the file is missing or is no tokenizer, or no
            end token was found in it.
    """

    def __init__(self, path: str | Path):
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            with open_regular(path) as file:
                content = file.read().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(
                f"expected a Hugging Face tokenizer.json at {path}, but it cannot be read "
                f"({error}); give the path of the file or of the folder that holds it"
            ) from error
        self._load(path, content)

    def _load(self, path: Path, content: str) -> None:
        self.path = path
        self._content = content
        self._backend = _parse_tokenizer(path, content)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        end = next((token for token in END_TOKENS if token in vocabulary), None)
        if end is None:
            raise BadInput(
                f"expected an end-of-document token in {path}, found none of "
                f"{', '.join(END_TOKENS)}; add one of them to the tokenizer as a special token"
            )
        pad = next((token for token in PAD_TOKENS if token in vocabulary), end)
        self.name = path.name
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_id = vocabulary[end]
        self.pad_id = vocabulary[pad]
        self.fingerprint = vocabulary_fingerprint(vocabulary)

    def encode(self, text: str) -> np.ndarray:
        """Turn text into ids, without an end token: int64 [tokens]."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode several texts, each on its own, in parallel."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            raise BadInput(
                f"expected texts that UTF-8 can hold, but {self.name} refused one ({error}); "
                "look for a lone surrogate in it"
            ) from error
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """Turn ids into text, leaving special tokens out."""
        array = _id_array(ids, self.vocab_size)
        array = array[(array != self.end_id) & (array != self.pad_id)]
        return self._backend.decode(array.tolist(), skip_special_tokens=True)

    # The backend's own pickle forgets `encode_special_tokens`, so we rebuild it from the content.
    def __getstate__(self) -> tuple[Path, str]:
        return self.path, self._content

    def __setstate__(self, state: tuple[Path, str]) -> None:
        self._load(*state)

    def __repr__(self) -> str:
        return f"FileTokenizer({str(self.path)!r}, vocab_size={self.vocab_size})"


def _parse_tokenizer(path: Path, content: str) -> Any:
    """Build the backend so that no text can produce an end or padding token."""
    try:
        import tokenizers
    except ImportError as error:
        raise BadInput(
            f"reading {path} needs the `tokenizers` package; run pip install 'unison[hf]', "
            "or use the byte tokenizer"
        ) from error
    try:
        description = json.loads(content)
        for token in description.get("added_tokens", []):
            if token["content"] in END_TOKENS + PAD_TOKENS:
                token["special"] = True
        backend = tokenizers.Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the package raises bare Exception
        raise BadInput(
            f"expected a Hugging Face tokenizer.json at {path}, but it cannot be parsed ({error}); "
            "save the tokenizer again with `tokenizer.save(path)`"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


Tokenizer = ByteTokenizer | FileTokenizer
"""What unison asks of either:

    name: A short name for messages and run folders.
    vocab_size: One more than the largest id.
    end_id: The id that ends a document.
    pad_id: The id that fills the rest of a row; never a target.
    fingerprint: A hash of the vocabulary, so that a run can record what its ids mean.
    encode, encode_batch, decode: Text to ids, without an end token, and back without special ones.
"""


def open_tokenizer(spec: str) -> Tokenizer:
    """Open a tokenizer by name or path.

    Args:
        spec: `"bytes"`, or the path of a `tokenizer.json` or of the folder that holds it.

    Returns:
        The tokenizer.

    Raises:
        BadInput: It is neither.

    >>> open_tokenizer("bytes").vocab_size
    258
    """
    if spec == "bytes":
        return ByteTokenizer()
    if not Path(spec).exists():
        raise BadInput(
            f"tokenizer must be 'bytes' or the path of a tokenizer.json, found {spec!r}, "
            "which does not exist"
        )
    return FileTokenizer(spec)
