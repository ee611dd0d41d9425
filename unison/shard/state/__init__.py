"""The state of sharded models: as one plain dictionary, or as a checkpoint of all ranks' parts."""

from unison.shard.state.agree import CheckpointFailed
from unison.shard.state.checkpoint import load_checkpoint, save_checkpoint
from unison.shard.state.full import KeyReport, full_state_dict, load_full_state_dict
from unison.shard.state.full_optimizer import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
)
from unison.shard.state.manifest import MANIFEST_FILE, Manifest, read_manifest
from unison.shard.state.weights import open_weights

__all__ = [
    "MANIFEST_FILE",
    "CheckpointFailed",
    "KeyReport",
    "Manifest",
    "full_optimizer_state_dict",
    "full_state_dict",
    "load_checkpoint",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "open_weights",
    "read_manifest",
    "save_checkpoint",
]
