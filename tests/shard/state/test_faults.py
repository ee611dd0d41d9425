"""What is wrong with a checkpoint is said on every rank, and costs no older one."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.harness import World, ranks, run_on_ranks
from tests.shard.common import shard
from tests.shard.state.common import adamw, groups_of, make_zoo, sharded_zoo, take_steps
from unison.errors import BadInput
from unison.shard import (
    CheckpointFailed,
    digest,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
)
from unison.shard.state import checkpoint, files
from unison.shard.state.checkpoint import Manifest


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, bytes]:
    """The files of a checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("written") / "a"
    model = sharded_zoo()
    optimizer = adamw(model)
    take_steps(model, optimizer, 1)
    save_checkpoint(folder, model, optimizer)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def put(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def change_json(files: dict[str, bytes], change) -> dict[str, bytes]:
    content = json.loads(files["checkpoint.json"])
    del content["sha256"]  # as one who forges it would write it anew
    change(content)
    return {**files, "checkpoint.json": json.dumps(content).encode()}


def truncate(files):
    return {**files, "rank-0-0.safetensors": files["rank-0-0.safetensors"][:-1]}


def lose(files):
    return {"checkpoint.json": files["checkpoint.json"]}


def stop_early(files):
    return {"rank-0-0.safetensors": files["rank-0-0.safetensors"]}


def flip(files):
    data = bytearray(files["rank-0-0.safetensors"])
    data[-1] ^= 1
    return {**files, "rank-0-0.safetensors": bytes(data)}


def garble(files):
    data = b"\xff" * len(files["rank-0-0.safetensors"])
    return {**files, "rank-0-0.safetensors": data}


def cut_json(files):
    return {**files, "checkpoint.json": files["checkpoint.json"][:-20]}


def newer(files):
    return change_json(files, lambda content: content.update(version=2))


def foreign(files):
    return change_json(files, lambda content: content.update(format="other"))


def half(files):
    return change_json(files, lambda content: content.pop("tensors"))


def escape(files):
    def change(content):
        content["files"]["../b"] = content["files"]["rank-0-0.safetensors"]
        content["tensors"]["model/scale"]["chunks"][0]["file"] = "../b"

    return change_json(files, change)


def unlisted(files):
    return change_json(files, lambda content: content["files"].clear())


def no_groups(files):
    return change_json(files, lambda content: content["optimizer"].pop("groups"))


def odd_shape(files):
    return change_json(
        files, lambda content: content["tensors"]["model/embed.weight"].update(shape=[None, 12])
    )


def gap(files):
    return change_json(
        files, lambda content: content["tensors"]["model/embed.weight"]["chunks"][0].update(start=1)
    )


def short(files):
    return change_json(
        files, lambda content: content["tensors"]["model/embed.weight"].update(chunks=[])
    )


def odd_dtype(files):
    return change_json(files, lambda content: content["tensors"]["model/scale"].update(dtype="nn"))


def other_step(files):
    content = files["checkpoint.json"].replace(b'"lr": 0.01', b'"lr": 0.07')
    assert content != files["checkpoint.json"]
    return {**files, "checkpoint.json": content}


DAMAGE = {
    "edited": (other_step, "checkpoint.json is not what was written: its hash differs"),
    "truncated": (truncate, r"rank-0-0.safetensors has \d+ bytes instead of"),
    "lost": (lose, "rank-0-0.safetensors is missing"),
    "no manifest": (stop_early, "is an incomplete checkpoint: it has no checkpoint.json"),
    "flipped": (flip, "its hash differs"),
    "cut": (cut_json, "is no whole JSON"),
    "newer": (newer, "has format version 2, this unison reads 1"),
    "foreign": (foreign, "is not the file of a unison checkpoint"),
    "half": (half, "checkpoint.json: tensors is missing"),
    "escape": (escape, r"names the files \['../b'\], which are not in its folder"),
    "unlisted": (unlisted, "which is not one of its files"),
    "no groups": (no_groups, "checkpoint.json: optimizer.groups must be a list, found None"),
    "odd shape": (odd_shape, r"shape\[0\] must be a whole number, found None"),
    "gap": (gap, "have a gap or overlap at 0"),
    "short": (short, "has 1164 elements, its chunks hold 0"),
    "dtype": (odd_dtype, "expected the name of a torch dtype, found 'nn'"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_before_anything_changes(case, written, tmp_path):
    damage, message = DAMAGE[case]
    folder = put(damage(written), tmp_path / "a")
    model = sharded_zoo(seed=1)
    before = digest(model)
    with pytest.raises(BadInput, match=message):
        load_checkpoint(folder, model, adamw(model), verify=True)
    assert digest(model) == before


def fail_to_load(world: World, folder: Path) -> str:
    model = sharded_zoo(seed=1)
    with pytest.raises(BadInput) as caught:
        load_checkpoint(folder, model, verify=True)
    return str(caught.value)


@pytest.mark.parametrize("damage", [stop_early, flip])
def test_damage_is_one_error_of_all_ranks(damage, written, tmp_path):
    first, *others = run_on_ranks(3, fail_to_load, put(damage(written), tmp_path / "a"))
    assert others == [first] * 2


def test_garbage_in_a_file_is_found_without_hashes(written, tmp_path):
    model = sharded_zoo()
    with pytest.raises(BadInput, match="is damaged"):
        load_checkpoint(put(garble(written), tmp_path / "a"), model)


def test_no_folder(tmp_path):
    with pytest.raises(BadInput, match=r"is no folder, so has no checkpoint.json"):
        read_manifest(tmp_path / "none")


class Other(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(2))
        self.more = torch.nn.Parameter(torch.zeros(2))


@ranks(2)
def test_another_model_is_refused(world, tmp_path):
    save_checkpoint(tmp_path / "a", sharded_zoo())
    other = shard(Other(), "root")
    with pytest.raises(BadInput) as caught:
        load_checkpoint(tmp_path / "a", other)
    for part in (
        r"it lacks ['more']",
        "the model lacks ['embed.weight',",
        "'scale' has the shape [] there, [2] here",
    ):
        assert part in str(caught.value)


@ranks(2)
def test_another_optimizer_is_refused(world, tmp_path):
    model = sharded_zoo()
    save_checkpoint(tmp_path / "a", model, adamw(model))
    before = digest(model)
    with pytest.raises(BadInput, match="one of AdamW, the optimizer is SGD"):
        load_checkpoint(tmp_path / "a", model, torch.optim.SGD(groups_of(model), lr=1))
    with pytest.raises(BadInput, match="only in the state"):
        load_checkpoint(tmp_path / "a", model, torch.optim.AdamW(groups_of(model)[:1]))
    assert digest(model) == before


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"rng": torch.zeros(1)}, r"extra\['rng'\] is of type Tensor"),
        ({"a": [{"b": {1: 2}}]}, r"extra\['a'\]\[0\]\['b'\] has the key 1"),
        ({"a": b"x"}, r"extra\['a'\] is of type bytes"),
    ],
)
def test_extra_is_json(extra, message, tmp_path):
    with pytest.raises(BadInput, match=message):
        save_checkpoint(tmp_path / "a", make_zoo(), extra=extra)
    assert not list(tmp_path.iterdir())


# ---- writing ---------------------------------------------------------------------------------


def refuse(*_args, **_kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["data", "manifest"])
@ranks(2)
def test_a_full_disk_costs_no_older_checkpoint(world, tmp_path, where):
    folder = tmp_path / "a"
    old = sharded_zoo(seed=1)
    save_checkpoint(folder, old, extra={"step": 1})
    with pytest.MonkeyPatch.context() as patch:
        if where == "data" and world.rank == 1:
            patch.setattr("unison.shard.state.files._write", refuse)
        if where == "manifest":
            patch.setattr(Manifest, "to_json", refuse)
        with pytest.raises(CheckpointFailed, match="No space left on device"):
            save_checkpoint(folder, sharded_zoo(seed=2), extra={"step": 2})
    world.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    model = sharded_zoo()
    assert load_checkpoint(folder, model, verify=True) == {"step": 1}
    assert digest(model) == digest(old)


@ranks(2)
def test_a_bug_on_one_rank_is_told_to_all(world, tmp_path):
    def broken(*_):
        raise ZeroDivisionError("a bug on purpose")

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr("unison.shard.state.files._on_host", broken)
        with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed.*a bug on purpose"):
            save_checkpoint(tmp_path / "a", sharded_zoo())


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("dies_at", ["rename of the old", "rename of the new", "removal"])
def test_a_crash_while_replacing_leaves_one_complete_checkpoint(dies_at, tmp_path, monkeypatch):
    folder = tmp_path / "a"
    models = [make_zoo(seed=seed) for seed in (1, 2)]
    save_checkpoint(folder, models[0], extra={"step": 1})
    calls = []
    rename, rmtree = Path.rename, checkpoint.shutil.rmtree

    def renames(path, target):
        calls.append(path)
        if dies_at == ("rename of the old", "rename of the new")[len(calls) - 1 : len(calls)][0]:
            raise Killed
        return rename(path, target)

    def removes(path, *args, **kwargs):
        if dies_at == "removal" and str(path).endswith("replaced"):
            raise Killed
        return rmtree(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", renames)
        patch.setattr(checkpoint.shutil, "rmtree", removes)
        with pytest.raises((Killed, RuntimeError)):
            save_checkpoint(folder, models[1], extra={"step": 2})
    model = make_zoo()
    extra = load_checkpoint(folder, model, verify=True)
    assert extra == {"step": 2 if dies_at == "removal" else 1}
    assert digest(model) == digest(models[extra["step"] - 1])
    save_checkpoint(folder, models[1])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_leftovers_of_a_crash_are_removed(tmp_path):
    (tmp_path / ".a.partial").mkdir()
    (tmp_path / ".a.partial" / "rank-9-0.safetensors").write_text("half")
    save_checkpoint(tmp_path / "a", make_zoo())
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert "rank-9-0.safetensors" not in os.listdir(tmp_path / "a")


@ranks(2)
def test_another_thing_of_the_name_is_never_replaced(world, tmp_path):
    thesis = tmp_path / "thesis"
    thesis.mkdir(exist_ok=True)
    (thesis / "chapter.txt").write_text("years of work")
    world.barrier()
    with pytest.raises(BadInput, match="is not a checkpoint"):
        save_checkpoint(thesis, sharded_zoo())
    assert (thesis / "chapter.txt").read_text() == "years of work"


@ranks(2)
def test_a_folder_that_one_rank_cannot_reach(world, tmp_path):
    def elsewhere(folder, *args):
        return write(folder / "gone" if world.rank == 1 else folder, *args)

    write = files._write_own
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_write_own", elsewhere)
        with pytest.raises(CheckpointFailed, match=r"rank-1-0\.safetensors"):
            save_checkpoint(tmp_path / "a", sharded_zoo())
    assert not (tmp_path / "a").exists()


@ranks(2)
def test_state_that_differs_between_ranks_is_not_written(world, tmp_path):
    model = sharded_zoo()
    optimizer = adamw(model)
    optimizer.param_groups[0]["lr"] = 0.1 * world.rank
    with pytest.raises(BadInput, match="group 0: rank 0 has"):
        save_checkpoint(tmp_path / "a", model, optimizer)
    assert not list(tmp_path.iterdir())
