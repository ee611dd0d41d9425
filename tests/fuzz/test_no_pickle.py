"""No pickle is loaded, whatever lies in a run's folder: unpickling can run any code."""

import ast
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import unison
from tests.fuzz.inputs import copy_of
from tests.train.private_runs import SEEDED, config_of
from unison.errors import BadInput
from unison.train import resumed_config, train
from unison.train.run_folder import checkpoints_of

PACKAGE = Path(unison.__file__).parent

# Modules that unpickle or run what they read, and functions of others that do.
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
LOADERS = {"torch.load", "torch.hub", "torch.jit.load", "np.load", "numpy.load", "pd.read_pickle"}
LOADERS |= {"dcp.FileSystemReader", "torch.package", "np.lib.format", "mmap_mode", "yaml.load"}
CALLS = {"eval", "exec", "compile", "__import__"}


def loaders_in(source: str) -> list[str]:
    """What of a module could load a pickle, or run what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [each.name for each in names if each.name.partition(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                found.append(module)
            case ast.ImportFrom(module="torch", names=names):
                found += [each.name for each in names if each.name in ("load", "hub", "package")]
            case ast.Attribute():
                name = ast.unparse(node)
                found += [name] if name in LOADERS or "FileSystemReader" in name else []
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                found.append(name)
            case ast.keyword(arg="allow_pickle" | "weights_only"):
                found.append(node.arg or "")
    return found


def test_no_module_of_the_package_has_a_loader():
    sources = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {str(path): each for path, text in sources.items() if (each := loaders_in(text))}
    assert len(sources) > 100
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch; torch.load(path)",
        "from torch import load",
        "import numpy as np; np.load(path)",
        "dcp.FileSystemReader(folder)",
        "exec(text)",
        "f(path, weights_only=False)",
    ],
)
def test_a_loader_would_be_found(source):
    assert loaders_in(source)


_unpickled: list[str] | None = None
NUMBA_CACHE = ("numba", "core", "caching.py")


def _hear(event: str, args: tuple) -> None:
    if event == "pickle.find_class" and _unpickled is not None:
        frame = sys._getframe()
        while frame is not None:
            # Ranks send each other objects by torch; that is no file.
            if frame.f_code.co_filename.endswith("distributed_c10d.py"):
                return
            # Compiled code, which an earlier run left beside the package's byte code.
            if Path(frame.f_code.co_filename).parts[-3:] == NUMBA_CACHE:
                folder = Path(frame.f_locals["self"]._cache_path)
                if folder.is_relative_to(PACKAGE):
                    return
            frame = frame.f_back
        _unpickled.append(f"{args[0]}.{args[1]}")


sys.addaudithook(_hear)


@contextmanager
def unpickled() -> Iterator[list[str]]:
    """Yield the names that pickles ask for meanwhile, of this process."""
    global _unpickled
    _unpickled = []
    try:
        yield _unpickled
    finally:
        _unpickled = None


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickles_in_a_checkpoint_are_not_loaded(sound, tmp_path):
    run = copy_of(sound / "stopped", tmp_path / "run")
    hacked = tmp_path / "hacked"
    evil = pickle.dumps(Evil(hacked))
    newest = checkpoints_of(run)[-1]
    for folder in (run, run / "checkpoints", newest):
        # Names under which torch and others look for pickles.
        for name in (".metadata", "data.pkl", "model.pt", "pytorch_model.bin", "optimizer.pt"):
            (folder / name).write_bytes(evil)
    torch.save({"a": Evil(hacked)}, newest / "rank-0.pt")
    with unpickled() as names:
        config = resumed_config(run, config_of(run, tmp_path, SEEDED), given=set())
        assert train(config).steps == 4
    assert names == []
    assert not hacked.exists()


@pytest.mark.parametrize(
    "target", ["checkpoint.json", pytest.param("rank-0-0.safetensors", marks=pytest.mark.full)]
)
def test_pickles_in_the_place_of_files_are_refused(sound, tmp_path, target):
    run, hacked = copy_of(sound / "stopped", tmp_path / "run"), tmp_path / "hacked"
    for folder in checkpoints_of(run):
        (folder / target).write_bytes(pickle.dumps(Evil(hacked)))
    config = resumed_config(run, config_of(run, tmp_path, SEEDED), given=set())
    with unpickled() as names, pytest.raises(BadInput, match=rf"step-000003.*{target}"):
        train(config)
    assert names == []
    assert not hacked.exists()


def test_a_pickle_would_be_heard(tmp_path):
    with unpickled() as names:
        pickle.loads(pickle.dumps(Evil(tmp_path / "hacked")))
    assert names
    assert (tmp_path / "hacked").exists()
