"""Who writes and who reads which elements: torch's own planners, on flat tensors.

torch.distributed.checkpoint plans with boxes. A rank's part of a parameter is a run of its elements
in memory order, so each tensor is planned as one of one dimension, of which a part is a box again.
The planners give each part that several ranks hold to one writer, and find out which parts of which
chunks a rank must read when the world has another size than the one that wrote.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from unison.shard.state.entries import FlatPart


class FlatSavePlanner(DefaultSavePlanner):
    """Plans to write flat parts; what several ranks hold is written by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """One item per part that is not empty."""
        items = [
            _write_item(name, part) for name, part in self.state_dict.items() if len(part.values)
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The elements to write."""
        return self.state_dict[index.fqn].values


def _box(part: FlatPart) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([part.start]), torch.Size([len(part.values)]))


def _write_item(name: str, part: FlatPart) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, _box(part).offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_box(part),
            properties=TensorProperties(dtype=part.values.dtype),
            size=torch.Size([part.numel]),
        ),
    )


class FlatLoadPlanner(DefaultLoadPlanner):
    """Plans to read, for each part, what overlaps it in the files."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator=False
    ) -> None:
        """Take the parts as they are; they have memory."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """One item per overlap of a part and a chunk."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, part in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            if len(part.values):
                items += create_read_items_for_chunk_list(name, saved, [_box(part)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The elements to write into."""
        return self.state_dict[index.fqn].values
