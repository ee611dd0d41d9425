"""Checkpoints: written by some ranks, read by others, the same to the bit."""

import json
import pickletools
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.harness import World, ranks, run_on_ranks
from tests.shard.common import DECODER, per_sample_loss, shard, tokens
from tests.shard.state.common import adamw, make_zoo, same_state, sharded_zoo, take_steps
from unison.errors import BadInput, NeedsWhole
from unison.models import build
from unison.shard import (
    CheckpointFailed,
    digest,
    full_optimizer_state_dict,
    full_parameters,
    full_state_dict,
    load_checkpoint,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    read_manifest,
    save_checkpoint,
)
from unison.shard.sharded_tensor import local_part
from unison.shard.state import files

EXTRA = {"step": 3, "loader": {"position": [1, 2], "epoch": None}, "loss": 0.1 + 0.2}


def write(world: World, folder: Path, how: str, options: dict | None = None) -> tuple:
    """Train, write, and return everything that was written."""
    if how == "plain":
        model = make_zoo()
    elif how == "hybrid":
        model = sharded_zoo(mesh=init_device_mesh("cpu", (2, world.size // 2)))
    else:
        model = sharded_zoo(how=how)
    optimizer = adamw(model, **(options or {}))
    take_steps(model, optimizer, 3)
    save_checkpoint(folder, model, optimizer, extra=EXTRA)
    return digest(model), full_state_dict(model), full_optimizer_state_dict(model, optimizer)


def read(world: World, folder: Path, how: str, steps_before: int = 0) -> tuple:
    if how == "plain":
        model = make_zoo(seed=5)
    elif how == "hybrid":
        model = sharded_zoo(seed=5, mesh=init_device_mesh("cpu", (2, world.size // 2)))
    else:
        model = sharded_zoo(seed=5, how=how)
    optimizer = adamw(model)
    take_steps(model, optimizer, steps_before, first=50)
    extra = load_checkpoint(folder, model, optimizer, verify=True)
    assert extra == EXTRA
    return digest(model), full_state_dict(model), full_optimizer_state_dict(model, optimizer)


def assert_same(left: tuple, right: tuple) -> None:
    assert left[0] == right[0]
    assert list(left[1]) == list(right[1])
    assert all(torch.equal(left[1][name], right[1][name]) for name in left[1])
    assert same_state(left[2], right[2])


def save_and_change(world: World, folder: Path) -> str:
    """Write in the background, and change everything meanwhile."""
    model = sharded_zoo()
    optimizer = adamw(model)
    take_steps(model, optimizer, 2)
    before = digest(model)
    group = dist.new_group(backend="gloo")
    written = save_checkpoint(folder, model, optimizer, extra=EXTRA, background=group)
    take_steps(model, optimizer, 3, first=2)
    written.result(timeout=60)
    assert digest(model) != before
    assert load_checkpoint(folder, model, optimizer, verify=True) == EXTRA
    assert digest(model) == before
    take_steps(model, optimizer, 1, first=2)
    return digest(model)


@ranks(1, 2)
def test_what_is_written_in_the_background_is_of_one_moment(world, tmp_path):
    found = save_and_change(world, tmp_path / "a")
    model = sharded_zoo()
    optimizer = adamw(model)
    take_steps(model, optimizer, 3)
    assert found == digest(model)


@ranks(2)
def test_what_goes_wrong_in_the_background_is_raised_on_all_ranks(world, tmp_path):
    (tmp_path / "file").touch()
    group = dist.new_group(backend="gloo")
    written = save_checkpoint(tmp_path / "file" / "a", sharded_zoo(), background=group)
    with pytest.raises(CheckpointFailed):
        written.result(timeout=60)


@ranks(2)
def test_copies_write_alone_and_none_harms_another(world, tmp_path):
    folder, model = tmp_path / "a", make_zoo()
    optimizer = adamw(model)

    def step() -> None:  # the same on both ranks
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    step()
    for last in range(2):  # one alone, then both at once
        if world.rank <= last:
            save_checkpoint(folder, model, optimizer, extra=EXTRA, alone=True)
        dist.barrier()
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
        dist.barrier()
    before, number = digest(model), folder.stat().st_ino
    step()
    save_checkpoint(folder, model, optimizer, alone=True)
    assert folder.stat().st_ino == number  # the first one stays
    dist.barrier()
    assert load_checkpoint(folder, model, optimizer, verify=True) == EXTRA
    assert digest(model) == before
    with pytest.raises(NeedsWhole, match="lies on several ranks"):
        save_checkpoint(tmp_path / "b", sharded_zoo(), alone=True)
    assert not (tmp_path / "b").exists()


# how many ranks, and how they hold the model: writers, then readers
MOVES = [
    ((1, "auto"), (1, "auto")),
    ((2, "auto"), (2, "auto")),
    ((2, "auto"), (3, "root")),
    ((3, "root"), (1, "auto")),
    ((1, "plain"), (3, "auto")),
    ((3, "auto"), (1, "plain")),
    ((4, "hybrid"), (3, "auto")),
    ((2, "auto"), (4, "hybrid")),
]


@pytest.mark.parametrize(("writers", "readers"), MOVES)
def test_state_moves_to_any_number_of_ranks(tmp_path, writers, readers):
    folder = tmp_path / "checkpoint"
    written = run_on_ranks(writers[0], write, folder, writers[1])[0]
    found = run_on_ranks(readers[0], read, folder, readers[1])
    for of_rank in found:
        assert_same(of_rank, written)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_what_an_optimizer_held_is_replaced(tmp_path):
    written = run_on_ranks(2, write, tmp_path / "a", "auto", {"fused": True})[0]
    assert_same(run_on_ranks(2, read, tmp_path / "a", "auto", 2)[1], written)


def test_replicas_are_written_once(tmp_path):
    run_on_ranks(4, write, tmp_path / "hybrid", "hybrid")
    run_on_ranks(2, write, tmp_path / "once", "auto")
    hybrid, once = (read_manifest(tmp_path / name) for name in ("hybrid", "once"))
    total = [
        sum(chunk.stop - chunk.start for tensor in each.tensors.values() for chunk in tensor.chunks)
        for each in (hybrid, once)
    ]
    assert total[0] == total[1]
    assert len(hybrid.files) == 4  # both replicas write, each a part


@ranks(2)
def test_ddp_writes_as_a_plain_model_does(world, tmp_path):
    model = DistributedDataParallel(make_zoo(), find_unused_parameters=True)
    optimizer = adamw(model.module)
    take_steps(model, optimizer, 1)
    save_checkpoint(tmp_path / "a", model, optimizer)
    other = sharded_zoo(seed=1)
    load_checkpoint(tmp_path / "a", other, adamw(other))
    digests = [""] * world.size  # DDP's ranks have statistics of their own; the first one's count
    dist.all_gather_object(digests, digest(model.module))
    assert digest(other) == digests[0]
    manifest = read_manifest(tmp_path / "a")
    assert len(manifest.files) == 2
    assert "model/embed.weight" in manifest.tensors


def decoder(how: str, world: World, seed: int = 1) -> Any:
    model = build(DECODER, seed=seed)
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world.size,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return shard(model, how)


def train_decoder(world: World, folder: Path, how: str) -> tuple:
    model = decoder(how, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    per_sample_loss(model, tokens(2, DECODER, world.rank)).mean().backward()
    optimizer.step()
    save_checkpoint(folder, model, optimizer)
    state = full_optimizer_state_dict(model, optimizer)
    other = decoder(how, world, seed=2)
    load_full_state_dict(other, full_state_dict(model, rank0_only=True) or None)
    again = torch.optim.AdamW(other.parameters(), lr=1e-2)
    load_full_optimizer_state_dict(other, again, state if world.rank == 0 else None)
    assert same_state(full_optimizer_state_dict(other, again), state)
    assert digest(other) == digest(model)
    return digest(model), state


def load_decoder(world: World, folder: Path, how: str) -> tuple:
    model = decoder(how, world, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    load_checkpoint(folder, model, optimizer)
    return digest(model), full_optimizer_state_dict(model, optimizer)


@pytest.mark.parametrize(("first", "second"), [("fsdp2", "auto"), ("auto", "fsdp2")])
def test_fsdp2_goes_both_ways(first, second, tmp_path):
    expected, state = run_on_ranks(3, train_decoder, tmp_path / "a", first)[0]
    found, other = run_on_ranks(2, load_decoder, tmp_path / "a", second)[0]
    assert found == expected
    assert same_state(other, state)


@ranks(2)
def test_buffers_of_rank_0_count(world, tmp_path):
    model = sharded_zoo()
    kept = model.get_buffer("kept")
    kept.fill_(world.rank + 7)
    save_checkpoint(tmp_path / "a", model)
    load_checkpoint(tmp_path / "a", model)
    assert kept.tolist() == [7] * 4


def test_manifest_is_readable_and_files_are_safetensors(tmp_path):
    folder = tmp_path / "a"
    run_on_ranks(2, write, folder, "auto")
    content = json.loads((folder / "checkpoint.json").read_text())
    assert content["version"] == 1
    assert content["world_size"] == 2
    assert content["written_by"]["torch"] == torch.__version__
    assert content["optimizer"]["class"] == "AdamW"
    assert content["optimizer"]["groups"][0]["weight_decay"] == 0.1
    assert "layers.0.up.weight" in content["optimizer"]["groups"][0]["params"]
    assert content["optimizer"]["scalars"]["scale"]["step"] == {"dtype": "float32", "value": 3.0}
    assert content["extra"] == EXTRA
    assert content["tensors"]["model/low.weight"]["dtype"] == "bfloat16"
    assert content["tensors"]["model/scale"]["shape"] == []
    assert content["tensors"]["model/empty"]["chunks"] == []
    assert "model/head.weight" not in content["tensors"]  # tied: written once
    assert not any("derived" in name for name in content["tensors"])
    assert "optimizer/unused/exp_avg" not in content["tensors"]
    weight = content["tensors"]["model/embed.weight"]
    assert weight["shape"] == [97, 12]
    assert [(c["start"], c["stop"]) for c in weight["chunks"]] == [(0, 768), (768, 1164)]
    for path in folder.glob("*.safetensors"):
        with pytest.raises((ValueError, StopIteration)):
            list(pickletools.genops(path.read_bytes()))


def write_small_files(world: World, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "FILE_BYTES", 4096)
        return write(world, folder, "auto")[0]


def test_large_states_are_cut_into_files(tmp_path):
    written = run_on_ranks(2, write_small_files, tmp_path / "a")[0]
    assert len(list((tmp_path / "a").glob("rank-0-*.safetensors"))) > 3
    assert run_on_ranks(3, read, tmp_path / "a", "auto")[0][0] == written


class Slices:
    """Counts the elements that a process takes out of safetensors files."""

    def __init__(self, monkeypatch):
        self.elements = 0
        original = safetensors.safe_open

        @contextmanager
        def counting(*args, **kwargs):
            with original(*args, **kwargs) as file:
                yield SimpleNamespace(get_slice=lambda key: Counted(file.get_slice(key), self))

        monkeypatch.setattr(safetensors, "safe_open", counting)


class Counted:
    """A slice of a file that counts what is taken."""

    def __init__(self, stored, counter: Slices):
        self._stored, self._counter = stored, counter

    def __getitem__(self, wanted):
        taken = self._stored[wanted]
        self._counter.elements += taken.numel()
        return taken


@ranks(3)
def test_a_rank_reads_only_what_it_keeps(world, tmp_path):
    model = sharded_zoo()
    save_checkpoint(tmp_path / "a", model)
    with pytest.MonkeyPatch.context() as patch:
        slices = Slices(patch)
        load_checkpoint(tmp_path / "a", model)
    buffers = sum(b.numel() for name, b in model.named_buffers() if name != "derived")
    pieces = sum(local_part(piece).numel() for piece in model.parameters())
    assert slices.elements == pieces + buffers


@ranks(1, 2)
def test_model_alone(world, tmp_path):
    model = sharded_zoo(seed=2)
    optimizer = adamw(model)
    save_checkpoint(tmp_path / "with", model, optimizer)
    save_checkpoint(tmp_path / "without", model)
    other = sharded_zoo(seed=3)
    assert load_checkpoint(tmp_path / "with", other) == {}
    assert digest(other) == digest(model)
    with pytest.raises(BadInput, match="without an optimizer's state"):
        load_checkpoint(tmp_path / "without", other, adamw(other))


@ranks(2)
def test_a_cast_is_asked_for(world, tmp_path):
    model = sharded_zoo()
    optimizer = adamw(model)
    take_steps(model, optimizer, 1)
    save_checkpoint(tmp_path / "a", model, optimizer)
    wide = make_zoo(seed=1).double()
    shard(wide, "auto")
    other = adamw(wide)
    with pytest.raises(BadInput, match=r"'scale' is float32 there, float64 here \(cast=True"):
        load_checkpoint(tmp_path / "a", wide, other)
    load_checkpoint(tmp_path / "a", wide, other, cast=True)
    parameters = dict(full_parameters(wide))
    for name, value in full_parameters(model):
        assert torch.equal(parameters[name], value.double()), name
    assert {v["exp_avg"].dtype for v in other.state.values()} == {torch.float64}


def test_one_process_without_a_group(tmp_path):
    model = sharded_zoo()
    optimizer = adamw(model)
    take_steps(model, optimizer, 1)
    save_checkpoint(tmp_path / "a", model, optimizer, extra={"step": 1})
    plain = make_zoo(seed=1)
    assert load_checkpoint(str(tmp_path / "a"), plain, adamw(plain)) == {"step": 1}
    assert digest(plain) == digest(model)
