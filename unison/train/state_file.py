"""Nested state with tensors in one file: safetensors, with the rest as JSON beside them.

Tensors come back as they were, to the order of their elements in memory: a product with a matrix
that lies otherwise may have other bits.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unison.errors import BadInput
from unison.shard import CheckpointFailed

_TENSOR = "__tensor__"  # marks the place of one


def write_state(path: Path, state: Mapping[str, Any]) -> str:
    """Write a state of dictionaries, lists, plain values and tensors on the CPU.

    The file is on the disk, complete, when this returns.

    Returns:
        The file's hash.

    Raises:
        CheckpointFailed: If it could not be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    metadata = {"state": json.dumps(_taken_out(state, tensors))}
    part = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part, metadata)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
        return _hash(path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise CheckpointFailed(f"{path} could not be written: {error}") from error


def check_hash(path: Path, expected: str) -> None:
    """Refuse a file that is not what `write_state` wrote.

    Raises:
        BadInput: If it is missing, or its hash is another than expected.
    """
    if not path.is_file():
        raise BadInput(f"{path} is missing; the checkpoint beside it cannot be used without it")
    if _hash(path) != expected:
        raise BadInput(
            f"{path} is not what was written: its hash differs; use an earlier checkpoint"
        )


def read_state(path: Path) -> dict[str, Any]:
    """Read what `write_state` wrote."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _put_back(json.loads(file.metadata()["state"]), tensors)


def _taken_out(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value with a mark in the place of each tensor, which goes into `tensors`."""
    match value:
        case Tensor():
            name = str(len(tensors))
            tensors[name] = value.detach().contiguous()
            return {_TENSOR: name, "strides": list(value.stride())}
        case Mapping():
            return {key: _taken_out(each, tensors) for key, each in value.items()}
        case list():
            return [_taken_out(each, tensors) for each in value]
        case _:
            return value


def _put_back(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match value:
        case dict() if _TENSOR in value:
            found = tensors[value[_TENSOR]]
            placed = torch.empty_strided(found.shape, value["strides"], dtype=found.dtype)
            return placed.copy_(found)
        case dict():
            return {key: _put_back(each, tensors) for key, each in value.items()}
        case list():
            return [_put_back(each, tensors) for each in value]
        case _:
            return value


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
