"""What a corpus is: a stream of documents that can be read again and is never held whole.

Documents come in *pieces*. Most documents are one piece; a long text file is many, so that a file
of any size is read in bounded memory. A piece knows whether it ends its document.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Piece(NamedTuple):
    """A part of a document.

    Attributes:
        text: The text of this part; may be empty.
        ends_document: Whether the document ends here.
        source: Where the document comes from, for messages: `file`, `file:line` or a record number.
    """

    text: str
    ends_document: bool
    source: str


class Corpus(ABC):
    """A stream of documents, the same on every pass, in an order that depends on nothing else."""

    name: str

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Read the corpus from its beginning, piece by piece, in bounded memory."""

    def __iter__(self) -> Iterator[str]:
        """Read whole documents, one at a time; each is held in memory while it is yielded."""
        parts: list[str] = []
        for piece in self.pieces():
            parts.append(piece.text)
            if piece.ends_document:
                yield "".join(parts)
                parts = []


class InMemoryCorpus(Corpus):
    """Documents that you already hold.

    Args:
        documents: The documents, in order.
        name: What to call them in messages and run folders.

    >>> list(InMemoryCorpus(["one", "two"]))
    ['one', 'two']
    """

    def __init__(self, documents: Iterable[str], *, name: str = "documents"):
        self.documents = tuple(documents)
        self.name = name

    def pieces(self) -> Iterator[Piece]:
        """Read every document as one piece."""
        for index, text in enumerate(self.documents):
            yield Piece(text, ends_document=True, source=f"{self.name}[{index}]")

    def __len__(self) -> int:
        return len(self.documents)
