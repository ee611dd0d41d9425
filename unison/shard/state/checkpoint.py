"""Checkpoints: every rank writes its part, and any number of ranks reads them back."""

import hashlib
import json
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from unison.errors import BadInput, NeedsWhole
from unison.schema import build, parse, read_bytes, short, version_of
from unison.shard.ranks import Ranks, from_rank_0, meet, together
from unison.shard.state.entries import Entry, entries_of, ranks_of, require_same
from unison.shard.state.files import (
    DataFile,
    FileChunk,
    FlatPart,
    SavedTensor,
    data_file,
    read_parts,
    sha256_of,
    sync,
    write_parts,
)
from unison.shard.state.optimizer import (
    ElementState,
    OptimizerState,
    collect,
    dtype_name,
    dtype_of,
    prepare,
)

# ------------------------------------------------------------------------------------------------
# What a checkpoint holds, as the readable JSON file that makes it one.
#
# [Note: the format] A checkpoint is a folder with `checkpoint.json` and safetensors files. Every
# tensor is stored flat, cut into chunks [start, stop) of its elements, because a rank's part of a
# matrix need not be a box of it; the JSON has its shape. A chunk lies in a file under the key
# `name[start:stop]`. Nothing anywhere is a pickle. The JSON file is written last: a folder without
# one is not a checkpoint.

MANIFEST_FILE = "checkpoint.json"
FORMAT = "unison checkpoint"
VERSION = 1
ALONE = ".alone-"  # in the name of a folder that one rank writes for itself
REPLACED = ".replaced"  # after that of one whose successor is complete


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but the values of its tensors.

    Attributes:
        written_by: Versions of the software.
        world_size: Ranks that wrote it.
        extra: The caller's own.
        optimizer: Class, groups and scalars of the optimizer, as JSON; None without one.
        files: By name.
        tensors: By `model/NAME` or `optimizer/NAME/KEY`.
    """

    written_by: dict[str, str]
    world_size: int
    extra: dict[str, Any]
    optimizer: dict[str, Any] | None
    files: dict[str, DataFile]
    tensors: dict[str, SavedTensor]

    def to_json(self) -> str:
        """The text of the file."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        content["sha256"] = _hash_of(content)
        return json.dumps(content, indent=1, default=dtype_name) + "\n"

    @classmethod
    def from_json(cls, text: bytes | str, *, source: object) -> "Manifest":
        """Read the text of the file.

        Raises:
            BadInput: If it is not a checkpoint's, or one of a newer format, or its chunks do not
                add up to its tensors.
        """
        content = parse(text, source)
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise BadInput(f"{source} is not the file of a unison checkpoint")
        written = content.pop("sha256", None)  # that of an older unison has none
        version = content.pop("version", None)
        found = _hash_of({"format": FORMAT, "version": version, **content})
        if version != VERSION:
            raise BadInput(
                f"{source} has format version {short(version)}, this unison reads {VERSION}; "
                f"install the unison that wrote it: {short(content.get('written_by'))}"
            )
        manifest = build(cls, content, source, made={torch.dtype: dtype_of})
        for name, tensor in manifest.tensors.items():
            _check_chunks(name, tensor, manifest.files, source)
        if written not in (None, found):
            raise BadInput(
                f"{source} is not what was written: its hash differs; use an earlier checkpoint"
            )
        outside = [name for name in manifest.files if Path(name).name != name]
        if outside:
            raise BadInput(f"{source} names the files {outside}, which are not in its folder")
        return manifest


def _hash_of(content: dict[str, Any]) -> str:
    """The hash of what a manifest says, however it is laid out."""
    text = json.dumps(content, sort_keys=True, default=dtype_name)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_chunks(name: str, tensor: SavedTensor, files: Mapping[str, Any], source: object) -> None:
    """Require the chunks to cover a tensor once, in files that are listed."""
    position = 0
    for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.start):
        if chunk.start != position or chunk.stop <= chunk.start:
            raise BadInput(f"{source}: the chunks of {name!r} have a gap or overlap at {position}")
        if chunk.file not in files:
            raise BadInput(
                f"{source}: {name!r} lies in {chunk.file!r}, which is not one of its files"
            )
        position = chunk.stop
    if position != tensor.numel:
        raise BadInput(
            f"{source}: {name!r} has {tensor.numel} elements, its chunks hold {position}"
        )


def read_manifest(folder: str | Path) -> Manifest:
    """Read what a checkpoint holds, and see that its files are there and whole in length.

    Raises:
        BadInput: If the folder is not a complete checkpoint, with what is missing.
    """
    folder = Path(folder)
    path = folder / MANIFEST_FILE
    if not path.is_file():
        what = "is an incomplete checkpoint: it has" if folder.is_dir() else "is no folder, so has"
        raise BadInput(f"{folder} {what} no {MANIFEST_FILE}, which is written last")
    manifest = Manifest.from_json(read_bytes(path), source=path)
    for name, file in manifest.files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        expected = file.bytes
        if found != expected:
            state = "is missing" if found is None else f"has {found} bytes instead of {expected}"
            raise BadInput(f"{folder} is damaged: {name} {state}; use an earlier checkpoint")
    return manifest


def check_json(value: Any, path: str) -> None:
    """Require what JSON gives back as it was, lists for tuples aside.

    Raises:
        BadInput: Naming the place.
    """
    match value:
        case None | bool() | int() | float() | str():
            return
        case list() | tuple():
            for index, each in enumerate(value):
                check_json(each, f"{path}[{index}]")
        case dict():
            for key, each in value.items():
                if not isinstance(key, str):
                    raise BadInput(f"{path} has the key {key!r}; JSON keeps only keys that are str")
                check_json(each, f"{path}[{key!r}]")
        case other:
            raise BadInput(
                f"{path} is of type {type(other).__name__}, which JSON does not hold; give "
                "numbers, words, lists and dictionaries"
            )


# ------------------------------------------------------------------------------------------------
# The folder of a checkpoint: it appears when it is complete, and replaces another only then.
#
# [Note: crash safety] Ranks write into `.NAME.partial` beside the folder. When every file and then
# the manifest are on the disk, the old folder, if any, is renamed to `.NAME.replaced`, the new one
# takes its name, and the old one is removed. A process that dies leaves either the old checkpoint,
# the new one, or (between two renames) the old one under its second name, which `settle` gives its
# first name back.


def partial_of(folder: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return folder.with_name(f".{folder.name}.partial")


def _replaced_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{REPLACED}")


def settle(folder: Path) -> None:
    """Undo, or end, a replacement that a crash cut short."""
    replaced = _replaced_of(folder)
    if not replaced.is_dir():
        return
    if folder.exists():
        shutil.rmtree(replaced)
    else:
        replaced.rename(folder)


def settle_checkpoints(folder: Path) -> None:
    """Do so for every checkpoint in a folder."""
    for left in folder.glob(f".*{REPLACED}"):
        settle(left.with_name(left.name[1 : -len(REPLACED)]))


def begin(folder: Path) -> Path:
    """Make the folder to write into; one that a crash left is removed.

    Raises:
        BadInput: If something that is not a checkpoint has the name.
    """
    if not folder.name:
        raise BadInput(f"expected the name of a folder to write, found {str(folder)!r}")
    settle(folder)
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty and not (folder / MANIFEST_FILE).is_file():
        raise BadInput(f"{folder} exists and is not a checkpoint; choose another folder")
    partial = partial_of(folder)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def commit(folder: Path) -> None:
    """Give the complete folder its name."""
    partial, replaced = partial_of(folder), _replaced_of(folder)
    sync(partial)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    sync(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def write_folder(
    folder: Path,
    parts: dict[str, FlatPart],
    tensors: dict[str, SavedTensor],
    ranks: Ranks,
    *,
    optimizer: dict[str, Any] | None,
    extra: dict[str, Any],
    files: Mapping[str, Callable[[Path], None]] | None = None,
) -> None:
    """Write a checkpoint's folder, which appears when everything is on the disk; a collective.

    Args:
        folder: The checkpoint's, which every rank can reach by this name.
        parts: What this rank holds. What several ranks hold is written by one.
        tensors: All tensors of all ranks, without chunks.
        ranks: Who takes part.
        optimizer: The manifest's.
        extra: The manifest's, as JSON can hold it.
        files: Further ones by name, and what writes them; called on rank 0.
    """

    def on_written(chunks: dict[str, list[FileChunk]], written: dict[str, DataFile]) -> None:
        for name, write in (files or {}).items():
            write(partial_of(folder) / name)
            written[name] = data_file(partial_of(folder) / name)
        version = version_of("unison") or "unknown"  # of a source tree
        manifest = Manifest(
            world_size=ranks.size,
            tensors={
                key: replace(each, chunks=tuple(chunks.get(key, ())))
                for key, each in tensors.items()
            },
            files=written,
            optimizer=optimizer,
            extra=extra,
            written_by={"unison": version, "torch": torch.__version__},
        )
        path = partial_of(folder) / MANIFEST_FILE
        path.write_text(manifest.to_json())
        sync(path)
        commit(folder)

    from_rank_0(ranks, lambda: begin(folder))
    try:
        write_parts(partial_of(folder), parts, ranks, on_written)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(partial_of(folder), ignore_errors=True)
        raise


# ---- save and load -------------------------------------------------------------------------------


def save_checkpoint(
    folder: str | Path,
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    files: Mapping[str, Callable[[Path], None]] | None = None,
    background: dist.ProcessGroup | None = None,
    alone: bool = False,
) -> "Future[None]":
    """Write the state of a model and its optimizer, each rank its part; a collective.

    The folder appears, or replaces an older checkpoint of the same name, when everything is on the
    disk; until then, and if anything fails on any rank, what was there stays.

    Args:
        folder: The checkpoint's folder, which every rank can reach by this name.
        module: The model, sharded or not.
        optimizer: Its elementwise optimizer, if its state is to be saved.
        extra: Whatever else a run needs to go on (step, position of the loader), as JSON can hold
            it; that of rank 0 is written.
        files: Further files of the folder by name, and what writes them to a path; those of rank 0
            are written, where and when all others are. What they read must not change meanwhile.
        background: A group of the same ranks that nobody else uses, on the CPU (`dist.new_group(
            backend="gloo")`): the state is copied, and written by a thread while training goes on.
        alone: Whether this rank, which holds the whole model, writes without any collective: what
            is left to do when another rank is lost. Several may: the first that is done gives its
            folder the name, and a checkpoint that has it stays.

    Returns:
        What ends when all is on the disk. Without `background` it has; with it, `result()` waits,
        and raises what went wrong.

    Raises:
        BadInput: On every rank, if something cannot be saved, or another thing has the name.
        CheckpointFailed: On every rank, if any could not write.
        NeedsWhole: If this rank is to write alone, and holds a part.
    """
    folder, extra = Path(folder), extra or {}
    ranks = Ranks(None) if alone else ranks_of(module)
    meet(ranks, "save_checkpoint", may_be_late=True)

    def collected() -> tuple[list[Entry], OptimizerState | None]:
        check_json(extra, "extra")
        return entries_of(module), None if optimizer is None else collect(module, optimizer)

    entries, held = together(ranks, collected)
    parted = [each.name for each in entries if each.value.numel() < each.placement.numel]
    if alone and parted:
        raise NeedsWhole(
            f"{parted[0]!r} lies on several ranks, so that none can write it alone: save it with "
            "all of them"
        )
    parts, described, saved = _model_parts(entries), {}, None
    if held is not None:
        parts |= _state_parts(held.elements)
        described, saved = held.describe(), held.to_json()
    tensors = {key: SavedTensor(shape, held.dtype) for key, (shape, _, held) in parts.items()}
    described |= {key: (each.shape, str(each.dtype)) for key, each in tensors.items()}
    require_same(ranks, described, what="what is to be saved")
    if ranks.rank > 0:  # buffers may differ between ranks; rank 0's count
        for key in _model_parts(entry for entry in entries if not entry.is_parameter):
            del parts[key]
    settings: dict[str, Any] = {"optimizer": saved, "extra": extra, "files": files}
    written: Future[None] = Future()
    if alone:
        own = folder.with_name(f".{folder.name}{ALONE}{secrets.token_hex(4)}")
        try:
            write_folder(own, parts, tensors, ranks, **settings)
            if not (folder / MANIFEST_FILE).is_file():
                own.rename(folder)
                sync(folder.parent)
        except OSError:
            if not (folder / MANIFEST_FILE).is_file():  # else another one was faster
                raise
        finally:
            shutil.rmtree(own, ignore_errors=True)
    elif background is None:
        write_folder(folder, parts, tensors, ranks, **settings)
    if background is None or alone:
        written.set_result(None)
        return written
    if dist.get_world_size(background) != ranks.size:
        raise BadInput(
            f"background= must hold the model's {ranks.size} ranks, found "
            f"{dist.get_world_size(background)}"
        )
    # The next step changes parameters and state in place.
    parts = {
        key: (shape, start, values.to("cpu", copy=True))
        for key, (shape, start, values) in parts.items()
    }

    def write() -> None:
        try:
            write_folder(folder, parts, tensors, Ranks(background), **settings)
            written.set_result(None)
        except BaseException as error:  # it is raised where somebody waits
            written.set_exception(error)

    # Of a rank that breaks, the others' threads wait in vain: they must not keep a process alive.
    threading.Thread(target=write, name="checkpoint", daemon=True).start()
    return written


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
    folder = Path(folder)
    ranks = ranks_of(module)
    meet(ranks, "load_checkpoint", may_be_late=True)

    def settled() -> Manifest:
        settle(folder)
        return read_manifest(folder)

    manifest = from_rank_0(ranks, settled)
    if verify:
        together(ranks, lambda: _verify(folder, manifest, ranks))
    entries, elements, install = together(
        ranks, lambda: _matched(module, optimizer, manifest, cast, folder)
    )
    parts = _model_parts(entries)
    read_parts(folder, parts | _state_parts(elements), manifest.tensors, ranks)
    for entry, (_, _, values) in zip(entries, parts.values(), strict=True):
        entry.store(values)
    install()
    return manifest.extra


def _model_parts(entries: Iterable[Entry]) -> dict[str, FlatPart]:
    return {f"model/{entry.name}": entry.flat_part(entry.tensor) for entry in entries}


def _state_parts(elements: list[ElementState]) -> dict[str, FlatPart]:
    return {f"optimizer/{entry.name}/{key}": entry.flat_part(held) for entry, key, held in elements}


def _verify(folder: Path, manifest: Manifest, ranks: Ranks) -> None:
    for name in sorted(manifest.files)[ranks.rank :: ranks.size]:
        if sha256_of(folder / name) != manifest.files[name].sha256:
            raise BadInput(
                f"{folder / name} is not what was written: its hash differs; use an earlier "
                "checkpoint"
            )


def _matched(
    module: nn.Module, optimizer: Optimizer | None, manifest: Manifest, cast: bool, folder: Path
) -> tuple[list[Entry], list[ElementState], Callable[[], None]]:
    """Match names, shapes and dtypes, and make memory for the optimizer's state."""
    entries = entries_of(module)
    expected = {f"model/{entry.name}": entry for entry in entries}
    given = {key for key in manifest.tensors if key.startswith("model/")}
    faults = []
    if missing := [entry.name for key, entry in expected.items() if key not in given]:
        faults.append(f"it lacks {missing}")
    if unexpected := sorted(key.removeprefix("model/") for key in given - expected.keys()):
        faults.append(f"the model lacks {unexpected}")
    for key, entry in expected.items():
        saved = manifest.tensors.get(key)
        if saved is None:
            continue
        if saved.shape != entry.tensor.shape:
            faults.append(
                f"{entry.name!r} has the shape {list(saved.shape)} there, "
                f"{list(entry.tensor.shape)} here"
            )
        if saved.dtype != entry.value.dtype and not cast:
            faults.append(
                f"{entry.name!r} is {dtype_name(saved.dtype)} there, "
                f"{dtype_name(entry.value.dtype)} here (cast=True converts)"
            )
    if faults:
        raise BadInput(f"the checkpoint {folder} does not fit the model: {'; '.join(faults)}")
    if optimizer is None:
        return entries, [], lambda: None
    if manifest.optimizer is None:
        raise BadInput(f"the checkpoint {folder} was written without an optimizer's state")
    dtypes: dict[str, dict[str, Any]] = {}
    for key, tensor in manifest.tensors.items():
        if key.startswith("optimizer/"):
            name, _, state_key = key.removeprefix("optimizer/").rpartition("/")
            saved, entry = manifest.tensors.get(f"model/{name}"), expected.get(f"model/{name}")
            # State in the parameter's own dtype follows it, where a cast was asked for.
            follows = saved is not None and entry is not None and saved.dtype == tensor.dtype
            dtype = entry.value.dtype if follows else tensor.dtype  # type: ignore[union-attr]
            dtypes.setdefault(name, {})[state_key] = dtype
    source = folder / MANIFEST_FILE
    held = OptimizerState.from_json(manifest.optimizer, dtypes, source=source)
    try:
        return entries, *prepare(module, optimizer, held)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from None
