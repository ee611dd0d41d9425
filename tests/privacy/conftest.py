"""What the tests of privacy share."""

from pathlib import Path

import pytest

from tests.privacy.ledgers import SECRET, make, take
from unison.privacy.ledger import Ledger


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "run" / "ledger.jsonl"


@pytest.fixture
def written(path) -> Path:
    """A ledger of three steps; the last was not committed."""
    mechanism = make()
    with Ledger.open(path, mechanism=mechanism, session=SECRET) as ledger:
        take(ledger, mechanism, 0, 1)
        ledger.intend(mechanism.release(2))
    return path
