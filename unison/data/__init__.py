"""Text for training: corpora, tokenizers, and rows of fixed length on disk."""

from unison.data.corpora import (
    CORPUS_NAMES,
    Corpus,
    InMemoryCorpus,
    Piece,
    Records,
    Secret,
    open_corpus,
)
from unison.data.rows import (
    IGNORE_INDEX,
    RowDataset,
    build_rows,
    document_split,
    unigram_entropy,
)
from unison.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, open_tokenizer
