"""Which test is running, so that the ranks can share its seed and its warning filters."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class TestContext:
    """The running test: its node id, and the warning filters that pytest applies to it."""

    __test__ = False  # not a test class, whatever its name

    name: str = ""
    filters: tuple[str, ...] = ("error",)

    @property
    def seed(self) -> int:
        """One seed for all parametrisations, so world sizes 1, 2 and 4 draw the same numbers."""
        return seed_of(self.name.split("[", 1)[0])


_current = TestContext()


def seed_of(name: str) -> int:
    """Return a seed in [0, 2^63) that depends on `name` alone.

    Python's `hash` is salted per process, so it would differ between ranks and between runs.

    >>> seed_of("tests/test_a.py::test_b")
    8056254547315127777
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def current() -> TestContext:
    """Return the running test; outside of pytest an unnamed one with warnings as errors."""
    return _current


def enter(context: TestContext) -> TestContext:
    """Make `context` the running test and return the one before it."""
    global _current
    before, _current = _current, context
    return before
