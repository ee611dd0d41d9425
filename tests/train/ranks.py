"""Local ranks that begin quickly."""

import multiprocessing
from collections.abc import Iterator
from functools import partial

import pytest
from torch.distributed.launcher import api

from tests.harness.pool import PRELOAD


@pytest.fixture
def forked_ranks() -> Iterator[None]:
    """Let `run_on_local_ranks` fork its ranks where torch is imported, not start interpreters.

    Each interpreter takes 4 seconds of a core to import what it needs. For tests that are not about
    how ranks start and end.
    """
    multiprocessing.set_forkserver_preload(PRELOAD)
    quick = partial(api.LaunchConfig, start_method="forkserver")
    with pytest.MonkeyPatch.context() as patch:  # not the test's, which it may undo
        patch.setattr(api, "LaunchConfig", quick)
        yield
