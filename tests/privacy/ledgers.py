"""Ledgers of a few steps."""

from pathlib import Path

from unison.privacy.ledger import Ledger
from unison.privacy.ledger_file import Session
from unison.privacy.mechanism import Mechanism
from unison.privacy.sampling import Poisson

RATE = Poisson(rate=0.1)
SECRET = Session(key_origin="operating system", sampling_source="unison", num_records=100)
ROOT = Path(__file__).parents[2]


def make(sigma=2.0, sampling=RATE, **settings) -> Mechanism:
    given = {"max_grad_norm": 1 / 3, "expected_batch_size": 10}
    return Mechanism(sampling=sampling, noise_multiplier=sigma, **given | settings)


def take(ledger: Ledger, mechanism: Mechanism, *steps: int) -> None:
    for step in steps:
        ledger.intend(mechanism.release(step))
        ledger.commit(step)


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def rewrite(path: Path, lines: list[bytes]) -> None:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
