"""What a checkpoint holds, as the readable JSON file that makes it one.

[Note: the format] A checkpoint is a folder with `checkpoint.json` and safetensors files. Every
tensor is stored flat, cut into chunks [start, stop) of its elements, because a rank's part of a
matrix need not be a box of it; the JSON has its shape. A chunk lies in a file under the key
`name[start:stop]`. Nothing anywhere is a pickle. The JSON file is written last: a folder without
one is not a checkpoint.
"""

import json
import math
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from unison.errors import BadInput
from unison.shard.state.dtypes import dtype_name, dtype_of

MANIFEST_FILE = "checkpoint.json"
FORMAT = "unison checkpoint"
VERSION = 1


@dataclass(frozen=True)
class Chunk:
    """The elements [start, stop) of a tensor, in a file."""

    start: int
    stop: int
    file: str

    def key(self, name: str) -> str:
        """What the chunk is called in its file.

        >>> Chunk(0, 256, "rank-0.safetensors").key("model/bias")
        'model/bias[0:256]'
        """
        return f"{name}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint: its own shape, and where its elements lie."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class SavedFile:
    """Size and hash of a data file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but the values of its tensors.

    Attributes:
        world_size: Ranks that wrote it.
        tensors: By `model/NAME` or `optimizer/NAME/KEY`.
        files: The data files.
        optimizer: Class, groups and scalars of the optimizer, as JSON; None without one.
        extra: The caller's own.
        versions: Of the software that wrote it.
    """

    world_size: int
    tensors: dict[str, SavedTensor]
    files: dict[str, SavedFile]
    optimizer: dict[str, Any] | None
    extra: dict[str, Any]
    versions: dict[str, str]

    def to_json(self) -> str:
        """The text of the file."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "written_by": self.versions,
            "world_size": self.world_size,
            "extra": self.extra,
            "optimizer": self.optimizer,
            "files": {name: asdict(file) for name, file in self.files.items()},
            "tensors": {
                name: {
                    "shape": list(tensor.shape),
                    "dtype": dtype_name(tensor.dtype),
                    "chunks": [asdict(chunk) for chunk in tensor.chunks],
                }
                for name, tensor in self.tensors.items()
            },
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: object) -> "Manifest":
        """Read the text of the file.

        Raises:
            BadInput: If it is not a checkpoint's, or one of a newer format, or its chunks do not
                add up to its tensors.
        """
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadInput(f"{source} is not whole JSON ({error}); the file is damaged") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise BadInput(f"{source} is not the file of a unison checkpoint")
        if content.get("version") != VERSION:
            raise BadInput(
                f"{source} has format version {content.get('version')}, this unison reads "
                f"{VERSION}; install the unison that wrote it: {content.get('written_by')}"
            )
        try:
            manifest = cls._from_content(content)
            for name, tensor in manifest.tensors.items():
                _check_chunks(name, tensor, manifest.files, source)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{source} is damaged: {type(error).__name__} {error}") from None
        outside = [name for name in manifest.files if Path(name).name != name]
        if outside:
            raise BadInput(f"{source} names the files {outside}, which are not in its folder")
        return manifest

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> "Manifest":
        tensors = {
            name: SavedTensor(
                tuple(tensor["shape"]),
                dtype_of(tensor["dtype"]),
                tuple(Chunk(**chunk) for chunk in tensor["chunks"]),
            )
            for name, tensor in content["tensors"].items()
        }
        optimizer = content["optimizer"]
        if optimizer is not None:
            optimizer = {key: optimizer[key] for key in ("class", "groups", "scalars")}
        return cls(
            world_size=content["world_size"],
            tensors=tensors,
            files={name: SavedFile(**file) for name, file in content["files"].items()},
            optimizer=optimizer,
            extra=content["extra"],
            versions=content["written_by"],
        )


def _check_chunks(
    name: str, tensor: SavedTensor, files: dict[str, SavedFile], source: object
) -> None:
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
    manifest = Manifest.from_json(path.read_text(), source=path)
    for name, file in manifest.files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != file.bytes:
            state = "is missing" if found is None else f"has {found} bytes instead of {file.bytes}"
            raise BadInput(f"{folder} is damaged: {name} {state}; use an earlier checkpoint")
    return manifest


def versions() -> dict[str, str]:
    """Of the software that writes checkpoints."""
    try:
        own = metadata.version("unison")
    except metadata.PackageNotFoundError:
        own = "unknown"
    return {"unison": own, "torch": torch.__version__}


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
