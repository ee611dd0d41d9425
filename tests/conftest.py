"""Settings that hold for every test: fixed keys, no traces left behind, ranks that end."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# Before the harness is imported, so that its own asserts show values too.
pytest.register_assert_rewrite("tests.harness")

from tests.harness import context  # noqa: E402
from tests.harness.isolation import isolated  # noqa: E402
from tests.harness.pool import close_pools  # noqa: E402

# Plans must not depend on what a GPU took in some earlier run, nor tests write to its cache.
os.environ["UNISON_CALIBRATE"] = "0"

# The same examples in every run, no stop-watch (machines are shared), no files left behind.
hypothesis.settings.register_profile("unison", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("unison")


@pytest.fixture
def gen(request: pytest.FixtureRequest) -> torch.Generator:
    """A CPU generator whose seed is a hash of the test's node id."""
    return torch.Generator().manual_seed(context.seed_of(request.node.nodeid))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text file that is long enough to train on for a few steps."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    return path


@pytest.fixture(autouse=True)
def _told_to_the_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the ranks know which test runs, and which warnings it turns into errors."""
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
    with isolated(context.seed_of(request.node.nodeid)):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `full` tests in the junit file, where `bench/test_full.py` reads their outcomes.

    Those of `long_tests.txt` are `full`, too.
    """
    lines = (Path(__file__).parent / "long_tests.txt").read_text().splitlines()
    long = tuple(line for line in lines if not line.startswith("#"))
    for item in items:
        if item.nodeid.startswith(long):
            item.add_marker("full")
        if item.get_closest_marker("full"):
            item.user_properties.append(("full", True))


def pytest_unconfigure() -> None:
    """End the ranks, after Ctrl-C too."""
    close_pools()
