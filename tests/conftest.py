"""Settings that hold for every test: fixed keys, no traces left behind, ranks that end.

What tests alone need is imported where it is used: the process that hands them out to workers
imports this file, too, and they wait for it.
"""

import atexit
import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

# One thread, here and in programs that tests start: several processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Plans must not depend on what a GPU took in some earlier run, nor tests write to its cache.
os.environ["UNISON_CALIBRATE"] = "0"

# Imports and collection make a million objects and no garbage; `_no_garbage` enables it again.
gc.disable()

# Before the harness is imported, so that its own asserts show values too.
pytest.register_assert_rewrite("tests.harness")


def pytest_collection() -> None:
    """The same examples in every run, no stop-watch (machines are shared), no files left behind."""
    import hypothesis

    hypothesis.settings.register_profile("unison", derandomize=True, deadline=None, database=None)
    hypothesis.settings.load_profile("unison")


@pytest.fixture
def gen(request: pytest.FixtureRequest) -> "torch.Generator":
    """A CPU generator whose seed is a hash of the test's node id."""
    import torch

    from tests.harness import context

    return torch.Generator().manual_seed(context.seed_of(request.node.nodeid))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text file that is long enough to train on for a few steps."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    return path


@pytest.fixture(autouse=True, scope="module")
def _groups_are_left() -> Iterator[None]:
    """A rank that cannot leave the group of a file's last call is an error of that file."""
    yield
    pools = sys.modules.get("tests.harness.pool")
    if pools is not None:
        pools.finish_leaving()


@pytest.fixture(autouse=True, scope="module")
def _no_garbage() -> None:
    """Free what the file before has left, and let collections pass over what is there by now.

    Modules and collected tests are a million objects, which each collection would look through for
    half a second, and every training ends with one.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _no_pictures() -> Iterator[None]:
    """Let trainings end without their picture: half a second each, and few tests look at it."""
    from unison.train import loop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "plot_losses", lambda records, path, **_: path.touch())
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_parser() -> Iterator[None]:
    """Build the command line's parser once: typer does so in every call, for 25 ms."""
    import typer.main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True)
def _told_to_the_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the ranks know which test runs, and which warnings it turns into errors."""
    from tests.harness import context

    config = request.config
    lines = [*config.getini("filterwarnings"), *(config.known_args_namespace.pythonwarnings or [])]
    for mark in reversed(list(request.node.iter_markers("filterwarnings"))):
        lines += mark.args
    before = context.enter(context.TestContext(request.node.nodeid, tuple(lines)))
    yield
    context.enter(before)


@pytest.fixture(autouse=True)
def _leaves_no_trace(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed a test from its node id, and undo what it changed in torch's global state."""
    from tests.harness import context
    from tests.harness.isolation import isolated

    with isolated(context.seed_of(request.node.nodeid)):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `full` tests in the junit file, where `bench/test_full.py` reads their outcomes.

    Those of `long_tests.txt` are `full`, too. Folders of few and long tests come first, so that
    workers, who take a file each, end together.
    """
    items.sort(key=lambda item: _LONG_FOLDERS.get(item.path.parent.name, len(_LONG_FOLDERS)))
    for item in _long_ones(items):
        item.add_marker("full")
    for item in items:
        if item.get_closest_marker("full"):
            item.user_properties.append(("full", True))


_LONG_FOLDERS = {
    name: place
    for place, name in enumerate(("chaos", "train", "fuzz", "verify", "hf", "cli", "kernels"))
}


def _long_ones(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Those of `long_tests.txt`: see there."""
    lines = (Path(__file__).parent / "long_tests.txt").read_text().splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    counts = {
        name: int(count)
        for name, _, count in (each.rpartition(" ") for each in lines)
        if name and count.isdigit()
    }
    prefixes = tuple(line for line in lines if line.rpartition(" ")[0] not in counts)
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.nodeid.startswith(prefixes):
            yield item
        elif name in counts and not item.get_closest_marker("full"):
            by_test.setdefault(name, []).append(item)
    for name, found in by_test.items():
        num_kept = min(counts[name], len(found))
        kept = {len(found) * number // num_kept for number in range(num_kept)}
        yield from (item for place, item in enumerate(found) if place not in kept)


def pytest_unconfigure() -> None:
    """End the ranks, after Ctrl-C too; at its very end the interpreter frees what it has.

    Not before: pytest collects garbage twice when it ends, three seconds each over all there is.
    """
    pools = sys.modules.get("tests.harness.pool")
    if pools is not None:
        pools.close_pools()
    atexit.register(gc.unfreeze)
