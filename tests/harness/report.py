"""What came of a call on the ranks, and the failure message made of it."""

import enum
import re
from dataclasses import dataclass, replace
from pathlib import Path

OUTPUT_SHOWN = 6_000
"""Characters of a rank's output in a failure message: the last ones, where the trouble is."""

# How gloo and the stores word the loss of a peer. Such a failure is an echo of another rank's.
_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|gloo.*(transport|pair)|Socket (closed|Timeout)"
    r"|failed to (send|recv)|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)


class Outcome(enum.Enum):
    """How a rank's call ended."""

    RETURNED = enum.auto()
    SKIPPED = enum.auto()
    RAISED = enum.auto()
    DIED = enum.auto()
    HUNG = enum.auto()


@dataclass(frozen=True)
class Answer:
    """One rank's answer: sent by the rank, or written by the parent for a rank that is silent."""

    rank: int
    outcome: Outcome
    at: float
    """Seconds on the machine's monotonic clock, which all its processes share."""
    value: bytes = b""
    """The pickled result of a rank that returned."""
    headline: str = ""
    """One line: what happened, to read after the word "rank 3"."""
    detail: str = ""
    """A traceback, or the stacks of a rank that hung."""
    output: str = ""

    @property
    def failed(self) -> bool:
        """Whether the call did not end as the test wished."""
        return self.outcome not in (Outcome.RETURNED, Outcome.SKIPPED)

    @property
    def lost_peer(self) -> bool:
        """Whether this rank seems to have failed only because another one went away."""
        last_line = self.detail.rstrip().rsplit("\n", 1)[-1]
        return self.outcome is Outcome.RAISED and bool(
            _LOST_PEER.search(self.headline) or _LOST_PEER.search(last_line)
        )

    def with_output(self, log: Path) -> "Answer":
        """Return this answer with the end of the rank's output file."""
        try:
            text = log.read_text(errors="replace")
        except FileNotFoundError:
            text = ""
        cut = f"[... {len(text) - OUTPUT_SHOWN} characters before this]\n"
        return replace(
            self, output=cut + text[-OUTPUT_SHOWN:] if len(text) > OUTPUT_SHOWN else text
        )


class RanksFailed(AssertionError):
    """Some ranks did not end as the test wished.

    Attributes:
        failures: the answers of the ranks that failed, root cause first.
        world_size: the number of ranks that were called.
    """

    def __init__(self, world_size: int, answers: list[Answer]) -> None:
        self.world_size = world_size
        self.failures = root_cause_first([answer for answer in answers if answer.failed])
        super().__init__(_message(world_size, self.failures))


def root_cause_first(failures: list[Answer]) -> list[Answer]:
    """Sort failures: causes by time, then ranks that lost a peer, then ranks that hung.

    A rank that hangs while another failed is most likely waiting for it.
    """

    def key(answer: Answer) -> tuple[int, float]:
        if answer.outcome is Outcome.HUNG:
            return 2, answer.at
        return (1 if answer.lost_peer else 0), answer.at

    return sorted(failures, key=key)


def _message(world_size: int, failures: list[Answer]) -> str:
    listed = ", ".join(str(rank) for rank in sorted(answer.rank for answer in failures))
    plural = "s" if len(failures) > 1 else ""
    parts = [f"rank{plural} {listed} of a world of {world_size} failed"]
    for answer in failures:
        echo = " (it lost a peer: see the ranks above)" if answer.lost_peer else ""
        if answer is failures[0]:
            echo = ""
        parts.append(f"{f' rank {answer.rank} ':-^79}")
        parts.append(f"rank {answer.rank} {answer.headline}{echo}")
        if answer.detail:
            parts.append(answer.detail.rstrip())
        if answer.output.strip():
            parts.append(f"{f' output of rank {answer.rank} ':.^79}")
            parts.append(answer.output.rstrip())
    return "\n".join(parts)
