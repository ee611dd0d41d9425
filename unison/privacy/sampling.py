"""How a step chooses its records: what the loader does and what the accountant counts.

Adjacency is add/remove one record for `Poisson`. Where the size of the data set is public, a record
is replaced by one that is drawn like it and contributes nothing ("zero-out").
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from unison import check
from unison.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Every record takes part with probability `rate`, independently; batches may be empty.

    Attributes:
        rate: Probability of each record at each step.
    """

    rate: float

    def __post_init__(self) -> None:
        check.probability(rate=self.rate)


@dataclass(frozen=True, kw_only=True)
class TruncatedPoisson:
    """Poisson sampling, of which at most `capacity` records are kept, chosen at random.

    Attributes:
        rate: Probability of each record at each step, before truncation.
        capacity: Most records in a batch.
        num_records: Size of the data set, which this accounting treats as public.
    """

    rate: float
    capacity: int
    num_records: int

    def __post_init__(self) -> None:
        check.probability(rate=self.rate)
        check.positive(capacity=self.capacity, num_records=self.num_records)


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """Each epoch is a permutation of all records, cut into batches of a fixed size.

    No amplification is claimed: a record takes part once per epoch, and nobody is asked to believe
    that the order stays secret. What is left over at the end of an epoch is dropped.

    Guarantees:
        Accounting counts one pass over the data per `epoch_of(step)`. It is right if the batch of a
        step is a function of `epoch_of(step)` and `position_of(step)` alone: a loader that is left
        in the middle of an epoch goes on there, and does not begin a new permutation.

    Attributes:
        batch_size: Records in every batch.
        num_records: Size of the data set, which is public here.
    """

    batch_size: int
    num_records: int

    def __post_init__(self) -> None:
        check.positive(batch_size=self.batch_size, num_records=self.num_records)
        if self.batch_size > self.num_records:
            raise BadInput(
                f"expected batch_size <= num_records, found {self.batch_size=} {self.num_records=}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        return self.num_records // self.batch_size

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to; steps count from 0.

        >>> Shuffled(batch_size=4, num_records=11).epoch_of(5)
        2
        """
        return step // self.steps_per_epoch

    def position_of(self, step: int) -> int:
        """Which batch of its epoch a step takes."""
        return step % self.steps_per_epoch


Sampling = Poisson | TruncatedPoisson | Shuffled


def usual_batch_size(sampling: Sampling, num_records: int) -> int:
    """Records that hardly any step draws more than: four standard deviations above the mean.

    >>> usual_batch_size(Poisson(rate=0.01), 10_000), usual_batch_size(Poisson(rate=1.0), 50)
    (140, 50)
    """
    if isinstance(sampling, Shuffled):
        return sampling.batch_size
    mean = sampling.rate * num_records
    most = min(num_records, math.ceil(mean + 4 * math.sqrt(mean * (1 - sampling.rate))))
    return max(1, min(most, sampling.capacity) if isinstance(sampling, TruncatedPoisson) else most)


KINDS: dict[str, type[Sampling]] = {
    "poisson": Poisson,
    "truncated": TruncatedPoisson,
    "shuffled": Shuffled,
}


def to_fields(sampling: Sampling) -> dict[str, Any]:
    """A sampling as values that JSON can hold.

    >>> to_fields(Poisson(rate=0.25))
    {'kind': 'poisson', 'rate': 0.25}
    """
    kinds = {kind: name for name, kind in KINDS.items()}
    return {"kind": kinds[type(sampling)], **asdict(sampling)}


def from_fields(fields: Mapping[str, Any]) -> Sampling:
    """The sampling that `to_fields` described.

    Raises:
        BadInput: If the fields describe none.
    """
    values = dict(fields)
    kind = values.pop("kind", None)
    if kind not in KINDS:
        raise BadInput(f"expected a sampling of kind {', '.join(KINDS)}, found {fields!r}")
    try:
        return KINDS[kind](**values)
    except TypeError as error:
        raise BadInput(f"the fields do not describe a sampling ({error}): {fields!r}") from None
