"""Sound runs to damage, and how a command is run that must end well."""

import contextlib
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.train.private_runs import SEEDED, config_of
from unison.cli import main
from unison.errors import Diverged
from unison.train import loop, train

SECONDS = 60  # more than anything here takes, on a busy machine: an account took 10 on an idle one


@contextlib.contextmanager
def in_time(what: object) -> Iterator[None]:
    """Fail what hangs."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"hangs: {what}")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def sound(tmp_path_factory) -> Path:
    """Runs that nothing is wrong with: `a` and `b` have ended, `stopped` has three checkpoints."""
    root = tmp_path_factory.mktemp("sound")
    text = root / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    settings = {"reducer": "ordered", "steps": 4, "batch_size": 8, "checkpoint_every": 1}
    settings["record"] = True
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(config_of(root / "a", text, SEEDED, **settings))
    shutil.copytree(root / "a", root / "b")
    with pytest.MonkeyPatch.context() as patch:
        original = loop.train_step

        def train_step(*args, step, **kwargs):
            if step == 4:
                raise Diverged("stopped on purpose")
            return original(*args, step=step, **kwargs)

        patch.setattr(loop, "train_step", train_step)
        with pytest.raises(Diverged):
            train(config_of(root / "stopped", text, SEEDED, **settings, keep_checkpoints=3))
    torch.set_num_threads(threads)
    return root


@pytest.fixture
def ends_well(monkeypatch, capsys, tmp_path) -> Callable[..., tuple[int, str]]:
    """Run a command line in this process: no traceback, no hang, and no word from nowhere.

    Returns its exit code, and what it said on the error stream.
    """
    monkeypatch.chdir(tmp_path)

    def run(*args: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["unison", *map(str, args)])
        with in_time(args), pytest.raises(SystemExit) as left:
            main()
        err = capsys.readouterr().err
        code = left.value.code or 0
        assert code in (0, 1, 2), (code, err)
        assert "Traceback" not in err
        if code == 2:
            said = [line for line in err.splitlines() if line.strip()]
            assert err.startswith(("unison: ", "Usage: ")), err
            assert len(said) == 1 or "Usage" in err, err
        assert not (tmp_path / "hacked").exists()
        return code, err

    return run
