"""Checkpoints: every rank writes its part, and any number of ranks reads them back."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unison.errors import BadInput
from unison.shard.ranks import Ranks
from unison.shard.state.agree import from_rank_0, require_same, together
from unison.shard.state.dtypes import dtype_name
from unison.shard.state.entries import Entry, FlatPart, entries_of, ranks_of
from unison.shard.state.folder import settle, sha256_of
from unison.shard.state.installation import Installation, SavedState, prepare
from unison.shard.state.manifest import (
    Manifest,
    SavedTensor,
    check_json,
    read_manifest,
)
from unison.shard.state.optimizer_state import (
    ElementState,
    OptimizerState,
    collect,
    scalar_from_json,
    scalar_to_json,
)


def save_checkpoint(
    folder: str | Path,
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write the state of a model and its optimizer, each rank its part; a collective.

    The folder appears, or replaces an older checkpoint of the same name, when everything is on the
    disk; until then, and if anything fails on any rank, what was there stays.

    Args:
        folder: The checkpoint's folder, which every rank can reach by this name.
        module: The model, sharded or not.
        optimizer: Its elementwise optimizer, if its state is to be saved.
        extra: Whatever else a run needs to go on (step, position of the loader), as JSON can hold
            it; that of rank 0 is written.

    Raises:
        BadInput: On every rank, if something cannot be saved, or another thing has the name.
        CheckpointFailed: On every rank, if any could not write.
    """
    from unison.shard.state.transfer import write_folder

    folder, extra = Path(folder), extra or {}
    ranks = ranks_of(module)
    entries, held = together(ranks, lambda: _collected(module, optimizer, extra))
    parts = _model_parts(entries) | ({} if held is None else _state_parts(held.elements))
    tensors = {key: SavedTensor(part.shape, part.values.dtype) for key, part in parts.items()}
    described: dict[str, Any] = {} if held is None else held.describe()
    described |= {key: (each.shape, str(each.dtype)) for key, each in tensors.items()}
    require_same(ranks, described, what="what is to be saved")

    if ranks.rank > 0:  # buffers may differ between ranks; rank 0's count
        for key in _model_parts(entry for entry in entries if not entry.is_parameter):
            del parts[key]
    saved = None if held is None else _optimizer_to_json(held)
    write_folder(folder, parts, tensors, ranks, optimizer=saved, extra=extra)


def load_checkpoint(
    folder: str | Path,
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    cast: bool = False,
    verify: bool = False,
) -> dict[str, Any]:
    """Fill a model and its optimizer from a checkpoint; a collective.

    It does not matter how many ranks wrote it, how the model was cut into units, or whether it was
    sharded at all: parameters go by name. A rank reads the bytes that it keeps. The optimizer need
    not have stepped, and may group its parameters otherwise, as long as those of one group were
    saved with equal hyperparameters; its `foreach`, `fused` and `capturable` stay as they are.

    Args:
        folder: What `save_checkpoint` wrote.
        module: The model, sharded or not; its parameters have memory.
        optimizer: Its optimizer; None leaves the saved state of one alone.
        cast: Whether values of another dtype than the model's are cast instead of refused.
        verify: Whether to compare the files' hashes first, each read once by one of the ranks;
            without it only their sizes are.

    Returns:
        The `extra` that was saved.

    Raises:
        BadInput: On every rank, if the checkpoint is incomplete or damaged, or does not fit; the
            model is untouched then, unless the damage was inside a data file.
        CheckpointFailed: On every rank, if any could not read.
    """
    from unison.shard.state.transfer import read_parts

    folder = Path(folder)
    ranks = ranks_of(module)
    manifest = from_rank_0(ranks, lambda: _settled_manifest(folder))
    if verify:
        together(ranks, lambda: _verify(folder, manifest, ranks))
    entries, installation = together(
        ranks, lambda: _matched(module, optimizer, manifest, cast=cast, folder=folder)
    )
    parts = _model_parts(entries)
    of_state = {} if installation is None else _state_parts(installation.elements)
    read_parts(folder, parts | of_state, manifest, ranks)
    for entry, part in zip(entries, parts.values(), strict=True):
        entry.store(part.values)
    if installation is not None:
        installation.finish()
    return manifest.extra


def _model_key(entry: Entry) -> str:
    return f"model/{entry.name}"


def _model_parts(entries: Iterable[Entry]) -> dict[str, FlatPart]:
    return {
        _model_key(entry): FlatPart(entry.shape, entry.start, entry.flat()) for entry in entries
    }


def _state_parts(elements: list[ElementState]) -> dict[str, FlatPart]:
    return {
        f"optimizer/{state.entry.name}/{state.key}": FlatPart(
            state.entry.shape, state.entry.start, state.value.detach().reshape(-1)
        )
        for state in elements
    }


def _collected(
    module: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any]
) -> tuple[list[Entry], OptimizerState | None]:
    check_json(extra, "extra")
    return entries_of(module), None if optimizer is None else collect(module, optimizer)


def _optimizer_to_json(held: OptimizerState) -> dict[str, Any]:
    return {
        "class": held.class_name,
        "groups": held.groups,
        "scalars": {
            name: {key: scalar_to_json(value) for key, value in values.items()}
            for name, values in held.scalars.items()
        },
    }


def _settled_manifest(folder: Path) -> Manifest:
    settle(folder)
    return read_manifest(folder)


def _verify(folder: Path, manifest: Manifest, ranks: Ranks) -> None:
    for name in sorted(manifest.files)[ranks.rank :: ranks.size]:
        if sha256_of(folder / name) != manifest.files[name].sha256:
            raise BadInput(
                f"{folder / name} is not what was written: its hash differs; use an earlier "
                "checkpoint"
            )


def _matched(
    module: nn.Module,
    optimizer: Optimizer | None,
    manifest: Manifest,
    *,
    cast: bool,
    folder: Path,
) -> tuple[list[Entry], Installation | None]:
    """Match names, shapes and dtypes, and make memory for the optimizer's state."""
    entries = entries_of(module)
    expected = {_model_key(entry): entry for entry in entries}
    given = {key for key in manifest.tensors if key.startswith("model/")}
    faults = []
    if missing := [entry.name for key, entry in expected.items() if key not in given]:
        faults.append(f"it lacks {missing}")
    if unexpected := sorted(key.removeprefix("model/") for key in given - expected.keys()):
        faults.append(f"the model lacks {unexpected}")
    for key, entry in expected.items():
        saved = manifest.tensors.get(key)
        if saved is not None and saved.shape != entry.shape:
            faults.append(
                f"{entry.name!r} has the shape {list(saved.shape)} there, {list(entry.shape)} here"
            )
        if saved is not None and saved.dtype != entry.value.dtype and not cast:
            faults.append(
                f"{entry.name!r} is {dtype_name(saved.dtype)} there, "
                f"{dtype_name(entry.value.dtype)} here (cast=True converts)"
            )
    if faults:
        raise BadInput(f"the checkpoint {folder} does not fit the model: {'; '.join(faults)}")
    if optimizer is None:
        return entries, None
    if manifest.optimizer is None:
        raise BadInput(f"the checkpoint {folder} was written without an optimizer's state")
    return entries, prepare(module, optimizer, _saved_state(manifest, expected))


def _saved_state(manifest: Manifest, entries: dict[str, Entry]) -> SavedState:
    """The optimizer's part of a manifest."""
    assert manifest.optimizer is not None
    dtypes: dict[str, dict[str, Any]] = {}
    for key, tensor in manifest.tensors.items():
        if key.startswith("optimizer/"):
            name, _, state_key = key.removeprefix("optimizer/").rpartition("/")
            saved, entry = manifest.tensors.get(f"model/{name}"), entries.get(f"model/{name}")
            # State in the parameter's own dtype follows it, where a cast was asked for.
            follows = saved is not None and entry is not None and saved.dtype == tensor.dtype
            dtype = entry.value.dtype if follows else tensor.dtype  # type: ignore[union-attr]
            dtypes.setdefault(name, {})[state_key] = dtype
    return SavedState(
        class_name=manifest.optimizer["class"],
        groups=manifest.optimizer["groups"],
        scalars={
            name: {key: scalar_from_json(value) for key, value in values.items()}
            for name, values in manifest.optimizer["scalars"].items()
        },
        dtypes=dtypes,
    )
