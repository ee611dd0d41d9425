"""What a checkpoint of a private Trainer holds beside the model: safetensors and JSON, no pickle.

The Trainer's own are `optimizer.pt`, `scheduler.pt` and `rng_state.pth`, which torch reads as
pickles. Here the same states are tensors, plain values, and marks for what JSON would not give back
as it was.
"""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainingArguments

from unison.errors import BadInput
from unison.run_files import read_state, write_state
from unison.schema import cut

TRAINING_FILE = "training_state.safetensors"  # of the optimizer and the schedule
_WEIGHTS = {  # what a checkpoint may hold a model as: a pickle -> what is read in its place
    "pytorch_model.bin": "model.safetensors",
    "pytorch_model.bin.index.json": "model.safetensors.index.json",
    "adapter_model.bin": "adapter_model.safetensors",
}


def random_file(args: TrainingArguments) -> str:
    """The file with the state of a process's generators."""
    rank = f"_{args.process_index}" if args.world_size > 1 else ""
    return f"rng_state{rank}.safetensors"


def random_state() -> dict[str, Any]:
    """The state of every generator that a user's model or collator may draw from."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the one that users share
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Give generators back what `random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def save_states(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state of tensors, arrays, and what is made of plain values.

    Raises:
        BadInput: Naming what only a pickle could hold.
    """
    write_state(path, _marked(state, ""))


def load_states(path: Path, use: Callable[[dict[str, Any]], None]) -> None:
    """Read what `save_states` wrote, and use it.

    Raises:
        BadInput: If it is no such file, or does not fit.
    """
    state = _unmarked(read_state(path))
    try:
        use(state)
    except BadInput:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise BadInput(
            f"{path} does not fit this run: {cut(repr(error))}; go on with the model, the "
            "optimizer and the schedule that it was begun with"
        ) from error


def refuse_pickled_model(folder: Path) -> None:
    """Refuse a checkpoint whose model, or whose adapter, would be read from a pickle.

    Raises:
        BadInput: Naming the file.
    """
    for root in (folder, *(each for each in folder.glob("*") if each.is_dir())):  # an adapter each
        for pickled, read in _WEIGHTS.items():
            if (root / pickled).is_file() and not (root / read).is_file():
                raise BadInput(
                    f"{root / pickled} is a pickle, which could run code of others and is never "
                    "loaded: load the model yourself where you trust it, and save it again with "
                    "save_pretrained, which writes safetensors"
                )


def _marked(value: Any, path: str) -> Any:
    """The value with marks for what JSON would change; tensors are on the CPU."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.generic():
            return value.item()
        case Tensor():
            return value.detach().cpu()
        case np.ndarray():
            return {"__array__": torch.from_numpy(value)}
        case list():
            return [_marked(each, f"{path}[{index}]") for index, each in enumerate(value)]
        case tuple():
            return {"__tuple__": _marked(list(value), path)}
        case Mapping() if all(isinstance(key, str) for key in value):
            return {key: _marked(each, f"{path}[{key!r}]") for key, each in value.items()}
        case Mapping():
            return {"__pairs__": _marked([list(pair) for pair in value.items()], path)}
        case _:
            raise BadInput(f"{path} is of type {type(value).__name__}, which only a pickle holds")


def _unmarked(value: Any) -> Any:
    match value:
        case list():
            return [_unmarked(each) for each in value]
        case {"__tuple__": list(each)} if len(value) == 1:
            return tuple(map(_unmarked, each))
        case {"__array__": Tensor() as tensor} if len(value) == 1:
            return tensor.numpy()
        case {"__pairs__": list(pairs)} if len(value) == 1:
            return {_unmarked(key): _unmarked(each) for key, each in pairs}
        case dict():
            return {key: _unmarked(each) for key, each in value.items()}
        case _:
            return value
