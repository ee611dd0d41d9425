"""Text for training: corpora, tokenizers, and rows of fixed length on disk."""

from unison.data.build import build_rows, document_split
from unison.data.corpora import CORPUS_NAMES, open_corpus
from unison.data.corpus import Corpus, InMemoryCorpus, Piece
from unison.data.files import Folder, JsonLinesFile, StandardLibrary, TextFile
from unison.data.records import Records, Secret
from unison.data.rows import IGNORE_INDEX, RowDataset, unigram_entropy
from unison.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, open_tokenizer

__all__ = [
    "CORPUS_NAMES",
    "IGNORE_INDEX",
    "ByteTokenizer",
    "Corpus",
    "FileTokenizer",
    "Folder",
    "InMemoryCorpus",
    "JsonLinesFile",
    "Piece",
    "Records",
    "RowDataset",
    "Secret",
    "StandardLibrary",
    "TextFile",
    "Tokenizer",
    "build_rows",
    "document_split",
    "open_corpus",
    "open_tokenizer",
    "unigram_entropy",
]
