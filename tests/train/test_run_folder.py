"""Run folders: nothing half-written, nothing lost."""

import json
import os
from pathlib import Path

import pytest

from unison.errors import BadInput, Diverged
from unison.run_files import read_metrics
from unison.train.checkpoint import check_resumable
from unison.train.run_folder import (
    MANIFEST_FILE,
    check_free,
    checkpoints_of,
    open_metrics,
    open_run_folder,
    plot_losses,
)


def make_run(folder, word):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(word))


def run_until(error, folder, *, overwrite):
    """Begin a run that writes its config and then fails."""
    with open_run_folder(folder, overwrite=overwrite) as run:
        (run / "config.json").write_text('"new"')
        raise error


def test_failed_run_leaves_nothing(tmp_path):
    with pytest.raises(Diverged):
        run_until(Diverged("nan"), tmp_path / "a" / "run", overwrite=False)
    assert not (tmp_path / "a" / "run").exists()


def test_finished_run_replaces_the_old_one(tmp_path):
    make_run(tmp_path / "run", "old")
    with open_run_folder(tmp_path / "run", overwrite=True) as run:
        (run / "config.json").write_text('"new"')
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == "new"


@pytest.mark.parametrize("error", [Diverged("nan"), KeyboardInterrupt(), OSError("disk full")])
def test_failed_run_puts_the_old_one_back(tmp_path, error):
    make_run(tmp_path / "run", "old")
    with pytest.raises(type(error)):
        run_until(error, tmp_path / "run", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == "old"


def kill_while_replacing(folder, *, then):
    """Leave what a process leaves that is killed in a run that replaces another."""
    folder.rename(folder.with_name(f".{folder.name}.replaced"))
    then(folder)


def begun(folder):
    make_run(folder, "new")


def with_a_checkpoint(folder):
    make_run(folder, "new")
    (folder / "checkpoints/step-000001").mkdir(parents=True)
    (folder / "checkpoints/step-000001" / MANIFEST_FILE).touch()


def with_a_result(folder):
    make_run(folder, "new")
    (folder / "result.json").touch()


@pytest.mark.parametrize(
    ("then", "word"),
    [(lambda folder: None, "old"), (begun, "old"), (with_a_result, "new")],
    ids=["before it began", "before a step", "after the last"],
)
def test_what_a_killed_run_was_to_replace_comes_back(tmp_path, then, word):
    make_run(tmp_path / "run", "old")
    kill_while_replacing(tmp_path / "run", then=then)
    with pytest.raises(BadInput, match="add --overwrite"):
        check_free(tmp_path / "run", overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == word


def test_a_killed_run_with_checkpoints_costs_neither(tmp_path):
    make_run(tmp_path / "run", "old")
    kill_while_replacing(tmp_path / "run", then=with_a_checkpoint)
    with pytest.raises(Diverged):
        run_until(Diverged("nan"), tmp_path / "run", overwrite=True)
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == "old"
    (kept,) = tmp_path.glob("run-unfinished-*")
    assert json.loads((kept / "config.json").read_text()) == "new"


def test_a_checkpoint_that_was_being_replaced_is_found(tmp_path):
    """By one of the same step; the process was killed between two renames, or after both."""
    make_run(run := tmp_path / "run", "old")
    for name in (".step-000001.replaced", ".step-000002.replaced", "step-000002"):
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / MANIFEST_FILE).write_text(name)
    check_resumable(run)
    assert [path.name for path in checkpoints_of(run)] == ["step-000001", "step-000002"]
    assert len(list((run / "checkpoints").iterdir())) == 2
    newest = run / "checkpoints/step-000002" / MANIFEST_FILE
    assert newest.read_text() == "step-000002"


def test_interrupted_run_keeps_what_it_wrote(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_until(KeyboardInterrupt(), tmp_path / "run", overwrite=False)
    assert (tmp_path / "run" / "config.json").exists()


def test_a_copy_of_a_checkpoint_is_none_of_the_run(tmp_path):
    for name in ("step-000002", "step-000010", "step-000010-copy", "step-"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / MANIFEST_FILE).touch()
    assert [path.name for path in checkpoints_of(tmp_path)] == ["step-000002", "step-000010"]


def test_existing_run_is_refused(tmp_path):
    make_run(tmp_path / "run", "old")
    with pytest.raises(BadInput, match="add --overwrite"):
        check_free(tmp_path / "run", overwrite=False)


def test_folder_that_is_not_a_run_is_never_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(BadInput, match="is not the folder of a run"):
        check_free(tmp_path / "thesis", overwrite=True)


def test_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(BadInput, match="is not the folder of a run"):
        check_free(tmp_path / "run", overwrite=True)


def test_empty_folder_is_taken(tmp_path):
    with open_run_folder(tmp_path, overwrite=False) as run:
        (run / "config.json").write_text("{}")
    assert (tmp_path / "config.json").exists()


@pytest.mark.parametrize("tensorboard", [True, False])
def test_metrics_come_back_and_are_drawn(tmp_path, tensorboard):
    if tensorboard:
        pytest.importorskip("tensorboard")
    with open_metrics(tmp_path, tensorboard=tensorboard) as record:
        record(0, **{"eval/loss": 5.0})
        record(1, **{"train/loss": 4.5})
        record(2, **{"train/loss": 4.0, "eval/loss": 4.2})
    records = read_metrics(tmp_path)
    assert records[2] == {"step": 2, "train/loss": 4.0, "eval/loss": 4.2}
    assert (tmp_path / "tensorboard").exists() == tensorboard
    plot_losses(records, tmp_path / "loss.png", unigram_entropy=3.0)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_link_to_a_folder_stays_one(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    with open_run_folder(link, overwrite=False):
        (link / "config.json").write_text('"first"')
    with open_run_folder(link, overwrite=True):
        (link / "config.json").write_text('"second"')
    with pytest.raises(Diverged):
        run_until(Diverged("nan"), link, overwrite=True)
    assert link.readlink().name == "real"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
    assert json.loads((tmp_path / "real" / "config.json").read_text()) == "second"


@pytest.mark.parametrize("target", ["link", "nowhere"])
def test_a_link_to_nothing_is_refused_or_followed(tmp_path, target):
    link = tmp_path / "link"
    link.symlink_to(target)
    if target == "link":
        with pytest.raises(BadInput, match="cannot use"):
            check_free(link, overwrite=False)
        return
    check_free(link, overwrite=False)
    with open_run_folder(link, overwrite=False):
        (link / "config.json").write_text("{}")
    assert (tmp_path / "nowhere" / "config.json").exists()


def test_a_folder_that_cannot_be_removed_is_used_and_left_empty(tmp_path, monkeypatch):
    """A volume that is mounted there."""
    monkeypatch.setattr(Path, "rmdir", lambda path: os.rmdir("/proc"))
    (tmp_path / "run").mkdir()
    number = (tmp_path / "run").stat().st_ino
    with pytest.raises(Diverged):
        run_until(Diverged("nan"), tmp_path / "run", overwrite=False)
    assert [*(tmp_path / "run").iterdir()] == []
    assert (tmp_path / "run").stat().st_ino == number


def test_a_link_to_itself_is_no_run(tmp_path):
    (tmp_path / "run").symlink_to("run")
    with pytest.raises(BadInput, match="as the folder of a run"):
        check_resumable(tmp_path / "run")
