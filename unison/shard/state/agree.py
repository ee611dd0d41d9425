"""Ranks that agree before they act: an error on one is raised on all, and nobody waits in vain."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from unison.errors import BadInput, UnisonError
from unison.shard.guard import compare_across_ranks
from unison.shard.ranks import Ranks

T = TypeVar("T")


class CheckpointFailed(UnisonError, OSError):
    """A file of a checkpoint could not be written or read."""


def gather_objects(ranks: Ranks, value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank; a collective."""
    values: list[Any] = [value] * ranks.size
    if ranks.size > 1:
        dist.all_gather_object(values, value, group=ranks.group)
    return values


def agree(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and share what came of it; a collective.

    Returns:
        Every rank's result, in rank order.

    Raises:
        UnisonError: The first one that any rank met, on every rank.
        CheckpointFailed: On every rank, where the first error was one of a file.
        RuntimeError: Where the first error was another one: on the ranks that did not meet it.
    """
    result: Any = None
    met: Exception | None = None
    try:
        result = work()
    except Exception as error:
        met = error
    outcomes = gather_objects(ranks, (result, _as_message(met)))
    for rank, (_, message) in enumerate(outcomes):
        if message is not None:
            _raise(rank, message, met if rank == ranks.rank else None)
    return [outcome for outcome, _ in outcomes]


def together(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on every rank; each gets its own result, or all raise as `agree` does."""
    results: list[T] = []
    agree(ranks, lambda: results.append(work()))
    return results[0]


def from_rank_0(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and give every rank its result, or raise as `agree` does."""
    outcome: list[Any] = [None, None]
    met: Exception | None = None
    if ranks.rank == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            met = error
            outcome[1] = _as_message(error)
    if ranks.size > 1:
        dist.broadcast_object_list(outcome, group=ranks.group, group_src=0)
    result, message = outcome
    if message is not None:
        _raise(0, message, met)
    return result


Message = tuple[type[UnisonError] | None, str]


def _as_message(error: BaseException | None) -> Message | None:
    """What of an error can be sent: not every exception can be pickled."""
    if error is None:
        return None
    if isinstance(error, UnisonError):
        return type(error), str(error)
    kind = CheckpointFailed if isinstance(error, OSError) else None
    return kind, f"{type(error).__name__}: {error}"


def _raise(rank: int, message: Message, met: Exception | None) -> NoReturn:
    """Raise what a rank sent; `met` is the error itself, on the rank that met it."""
    kind, text = message
    if kind is not None:
        raise kind(text) from met
    if met is not None:
        raise met
    raise RuntimeError(f"rank {rank} failed with {text}")


def require_same(ranks: Ranks, description: Mapping[str, Any], *, what: str) -> None:
    """Refuse a description that differs between ranks; a collective.

    Raises:
        BadInput: On every rank, naming what differs.
    """
    if ranks.size > 1:
        compare_across_ranks(what, dict(sorted(description.items())), ranks.group)


class Delivery:
    """Hands whole tensors to ranks that keep a part of each.

    Either every rank reads for itself, or rank 0 reads and broadcasts, one tensor at a time. An
    error in reading is kept until `finish`, since the other ranks are already on their way into the
    next broadcast.
    """

    def __init__(self, ranks: Ranks, *, is_from_rank_0: bool) -> None:
        self._ranks = ranks
        self._broadcasts = is_from_rank_0 and ranks.size > 1
        self._error: Exception | None = None

    @classmethod
    def of(cls, ranks: Ranks, *, has_state: bool, what: str) -> "Delivery":
        """Find out who has the state; a collective.

        Raises:
            BadInput: On every rank, if it is neither rank 0 alone nor all ranks.
        """
        holders = gather_objects(ranks, has_state)
        if not holders[0] or (any(holders[1:]) and not all(holders)):
            given = [rank for rank, holds in enumerate(holders) if holds]
            raise BadInput(f"{what} must be given on rank 0 or on every rank, found it on {given}")
        return cls(ranks, is_from_rank_0=not all(holders))

    @property
    def is_reader(self) -> bool:
        """Whether this rank reads."""
        return not self._broadcasts or self._ranks.rank == 0

    def take(
        self,
        read: Callable[[], Tensor],
        *,
        name: str,
        shape: tuple[int, ...],
        start: int,
        stop: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor | None:
        """This rank's part [stop - start] of a tensor; a collective where rank 0 alone reads.

        Args:
            read: Gives the whole tensor; called on the ranks that read, and need it.
            name: For the error.
            shape: Of the whole.
            start: First element that the rank keeps.
            stop: One past the last one.
            dtype: Of the result.
            device: Where the ranks communicate, and the result lies.

        Returns:
            The part; None where nothing was read, because the part is empty or an error was met.
        """
        numel = torch.Size(shape).numel()
        whole: Tensor | None = None
        if self._error is None and self.is_reader and (self._broadcasts or start < stop):
            try:
                value = read()
                if tuple(value.shape) != shape:
                    raise BadInput(
                        f"{name!r} must have the shape {list(shape)}, found {list(value.shape)}"
                    )
                flat = value.detach().reshape(-1).contiguous()
                whole = flat.to(device=device, dtype=dtype)
            except Exception as error:
                self._error = error
        if not self._broadcasts or numel == 0:
            return None if whole is None else whole[start:stop]
        if whole is None:
            whole = torch.zeros(numel, dtype=dtype, device=device)
        dist.broadcast(whole, group=self._ranks.group, group_src=0)
        return whole[start:stop]

    def finish(self) -> None:
        """Raise on every rank what any of them met; a collective."""

        def tell() -> None:
            if self._error is not None:
                raise self._error

        agree(self._ranks, tell)
