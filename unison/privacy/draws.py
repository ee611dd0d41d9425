"""Draws: which records take part in a step."""

import math

import torch
from torch import Tensor

from unison import check
from unison.errors import BadInput
from unison.kernels.random import Cipher, Distribution, Recipe, fill_rows
from unison.privacy.sampling import Poisson, Sampling, Shuffled, TruncatedPoisson
from unison.rng import Key, Permutation, Stream, poisson_sample

PURPOSE = "sampling"  # keeps membership apart from the noise under the same key
_PRIORITIES = 1 << 62  # two of a million records share a priority once in ten million steps
_DEALT_AHEAD = 4096  # records of an epoch that are permuted at once: as fast as a few
_ROUNDING = 1e-9  # 1 / rate may miss a whole number by this much, relative


class Draws:
    """The records of every step of a run, as a function of (key, sampling, step).

    Guarantees:
        The draw of a step is the same in whichever process and order it is asked for, and changes
        no state, no global random generator included. Membership of a Poisson draw is decided by
        ChaCha20 for each record by itself, so no two records, steps or ranks share a decision.
        Under a key from entropy, nobody without the key can tell a draw from a random one; the key
        dies with its process, so a resumed run draws anew.

    Args:
        sampling: How records are chosen.
        key: Root key of the run; on several ranks the same one (`Key.shared`).
        num_records: Size of the data set.

    Attributes:
        steps_per_epoch: Steps in which each record is expected once (Poisson, rounded up) or taken
            at most once (shuffled). A public number.
    """

    def __init__(self, sampling: Sampling, key: Key, num_records: int) -> None:
        check.positive(num_records=num_records)
        if not isinstance(key, Key):
            raise BadInput(
                f"expected a unison.rng.Key, found {type(key).__name__}. Remedy: "
                "Key.from_entropy(), or Key.from_seed(seed) for a run that can be repeated"
            )
        self.steps_per_epoch = steps_per_epoch(sampling)
        if not isinstance(sampling, Poisson) and sampling.num_records != num_records:
            raise BadInput(
                f"{sampling!r} was made for {sampling.num_records} records, found {num_records} "
                "in the data set; its accounting would not hold. Remedy: build it with num_records="
                "len(dataset)"
            )
        self.sampling, self.num_records = sampling, num_records
        self._key = key
        self._ahead: tuple[tuple[int, int], Tensor] | None = None  # of some steps of an epoch

    def records(self, step: int) -> Tensor:
        """Return the records of a step [batch], int64: ascending, or in shuffled order."""
        check.not_negative(step=step)
        with torch.device("cpu"):  # whatever the user's default device is
            match self.sampling:
                case Poisson():
                    return self._members(step, self.sampling.rate)
                case TruncatedPoisson():
                    members = self._members(step, self.sampling.rate)
                    return self._kept(members, step, self.sampling.capacity)
                case Shuffled():
                    return self._dealt(step, self.sampling.batch_size)
                case _:
                    raise AssertionError(self.sampling)

    def _members(self, step: int, rate: float) -> Tensor:
        stream = Stream(self._key, "membership", step, PURPOSE, Cipher.CHACHA20)
        return poisson_sample(stream, self.num_records, rate)

    def _kept(self, members: Tensor, step: int, capacity: int) -> Tensor:
        """The members of lowest priority, where a priority is a function of (key, step, record)."""
        if len(members) <= capacity:
            return members
        stream = Stream(self._key, "truncation", step, PURPOSE, Cipher.CHACHA20)
        recipe = Recipe(stream.cipher, stream.words, Distribution.INTEGERS, (), (0, _PRIORITIES))
        priorities = torch.empty_like(members)
        fill_rows(priorities, recipe, members, 1)
        return members[priorities.argsort(stable=True)[:capacity]].sort().values

    def _dealt(self, step: int, batch_size: int) -> Tensor:
        epoch, position = divmod(step, self.steps_per_epoch)
        num_steps = max(1, _DEALT_AHEAD // batch_size)
        block, place = divmod(position, num_steps)
        if self._ahead is None or self._ahead[0] != (epoch, block):
            order = Permutation(Stream(self._key, "shuffle", epoch, PURPOSE), self.num_records)
            first = block * num_steps
            end = min(first + num_steps, self.steps_per_epoch)
            dealt = order(torch.arange(first * batch_size, end * batch_size))
            self._ahead = (epoch, block), dealt.view(-1, batch_size)
        return self._ahead[1][place].clone()

    def __repr__(self) -> str:
        return f"Draws({self.sampling!r}, num_records={self.num_records})"


def steps_per_epoch(sampling: Sampling) -> int:
    """Steps in which each record is expected once (Poisson, rounded up) or taken at most once."""
    match sampling:
        case Poisson() | TruncatedPoisson():
            return _steps_of_rate(sampling.rate)
        case Shuffled():
            return sampling.steps_per_epoch
        case _:
            raise BadInput(
                f"expected Poisson, TruncatedPoisson or Shuffled sampling, found {sampling!r}"
            )


def _steps_of_rate(rate: float) -> int:
    """1 / rate, rounded up; a rate of 1/49 in floating point still makes 49 steps."""
    if rate == 0:
        raise BadInput(
            "a sampling rate of 0 draws no record at any step, so an epoch never ends; use "
            "expected_batch_size / num_records"
        )
    steps = 1 / rate
    nearest = round(steps)
    return nearest if math.isclose(steps, nearest, rel_tol=_ROUNDING) else math.ceil(steps)
