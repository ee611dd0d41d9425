"""Poisson sampling: which records take part in a step."""

import torch

from unison import check
from unison.errors import BadInput
from unison.rng.distributions import bernoulli
from unison.rng.streams import Box, Stream

_CHUNK = 1 << 22


def poisson_sample(
    stream: Stream, num_records: int, q: float, *, start: int = 0, stop: int | None = None
) -> torch.Tensor:
    """Return the indices of the records that take part, each with probability q, ascending.

    Guarantees:
        Membership of a record is a function of (stream, record), exact to 2^-63. The set over
        [0, num_records) is the union of the sets over any partition of it; memory beyond the
        result is a few megabytes for any number of records.

    Args:
        stream: CHACHA20 for private training: amplification by sampling needs secret membership.
        num_records: Size of the data set.
        q: Probability of each record.
        start: First record to decide.
        stop: End of the range to decide, excluded; `num_records` unless given.
    """
    check.probability(q=q)
    stop = num_records if stop is None else stop
    if not 0 <= start <= stop <= num_records:
        raise BadInput(f"expected 0 <= start <= stop <= {num_records}, found {start=} {stop=}")
    chunks = [torch.empty(0, dtype=torch.int64)]
    for at in range(start, stop, _CHUNK):
        end = min(stop, at + _CHUNK)
        chunks.append(bernoulli(stream, Box.flat(at, end, num_records), q).nonzero().view(-1) + at)
    return torch.cat(chunks)
