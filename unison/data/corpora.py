"""Opens a corpus by name or by path."""

from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from unison.data.corpus import Corpus
from unison.data.files import TEXT_SUFFIXES, Folder, StandardLibrary, open_file, walk
from unison.data.records import DEFAULT_NUM_RECORDS, Records
from unison.errors import BadInput

CORPUS_NAMES = ("records", "stdlib")


def open_corpus(
    spec: str,
    *,
    text_field: str = "text",
    seed: int = 0,
    num_records: int | None = None,
    num_secrets: int = 0,
    secret_repeats: int = 1,
) -> Corpus:
    """Open a corpus by name or by path; a name wins over a path (write `./stdlib` for a folder).

    Args:
        spec: `"stdlib"` (Python's own source), `"records"` (made-up customer records), or the path
            of a text file, a `.jsonl` or `.ndjson` file, or a folder of such files.
        text_field: The field that holds the text in JSON-lines files.
        seed: The seed of `"records"`.
        num_records: How many records; 20,000 unless given. For `"records"` only.
        num_secrets: How many secrets to plant for an audit. For `"records"` only.
        secret_repeats: In how many records each secret is planted. For `"records"` only.

    Returns:
        The corpus.

    Raises:
        BadInput: There is no such corpus or path, it holds no text, or an argument does not fit it.

    >>> open_corpus("stlib")
    Traceback (most recent call last):
        ...
    unison.errors.BadInput: expected a corpus name ('records', 'stdlib') or the path of an \
existing text file or folder, found 'stlib', which is neither; did you mean 'stdlib'?
    """
    if spec == "records":
        return Records(
            num_records=DEFAULT_NUM_RECORDS if num_records is None else num_records,
            num_secrets=num_secrets,
            secret_repeats=secret_repeats,
            seed=seed,
        )
    if num_records is not None or num_secrets or secret_repeats != 1:
        raise BadInput(
            "num_records, num_secrets and secret_repeats belong to the corpus 'records', found "
            f"them with {spec!r}; leave them out, or use 'records'"
        )
    if spec == "stdlib":
        return StandardLibrary()
    return _open_path(spec, text_field)


def _open_path(spec: str, text_field: str) -> Corpus:
    path = Path(spec)
    if spec and path.is_dir():
        if not any(islice(walk(path, TEXT_SUFFIXES), 1)):
            raise BadInput(
                f"expected text files below the folder {path}, found none that ends in "
                f"{', '.join(TEXT_SUFFIXES)}; give a single file, or rename them"
            )
        return Folder(path, text_field=text_field)
    if not spec or not path.exists():
        names = ", ".join(repr(name) for name in CORPUS_NAMES)
        near = get_close_matches(spec, CORPUS_NAMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "check the spelling of the path"
        raise BadInput(
            f"expected a corpus name ({names}) or the path of an existing text file or folder, "
            f"found {spec!r}, which is neither; {hint}"
        )
    if not path.is_file():
        raise BadInput(
            f"expected a file that can be read more than once, found {path}, which is a pipe or "
            "device; save its content to a file first"
        )
    if path.stat().st_size == 0:
        raise BadInput(f"expected text in {path}, found an empty file; give a file that holds text")
    return open_file(path, text_field=text_field)
