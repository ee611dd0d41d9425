"""A safetensors file as a mapping that reads a tensor when it is asked for one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from unison.errors import BadInput


class Weights(Mapping[str, Tensor]):
    """The tensors of an open file by name; nothing is kept in memory."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._names = dict.fromkeys(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def open_weights(path: str | Path) -> Iterator[Weights]:
    """Open a safetensors file for `load_full_state_dict`, for example a model's of a run.

    Raises:
        BadInput: If there is no such file, or it is not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise BadInput(f"expected a safetensors file at {path}, found none")
    try:
        file = safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise BadInput(f"{path} is not a whole file of safetensors: {error}") from None
    with file as opened:
        yield Weights(opened)
