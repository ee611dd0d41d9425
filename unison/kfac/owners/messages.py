"""Small things that all ranks must know of one another."""

import torch
from torch import Tensor

from unison.shard.ranks import Ranks

LONGEST = 2048  # bytes of a message


def first_message(ranks: Ranks, message: str, device: torch.device) -> str:
    """The message of the first rank that has one, on every rank; nothing if none has. A collective.

    So what goes wrong on one rank raises on all of them, with the same words.
    """
    if ranks.size == 1:
        return message
    flags = torch.zeros(ranks.size, device=device)
    flags[ranks.rank] = bool(message)
    ranks.sum_(flags)
    speakers = flags.nonzero().flatten().tolist()
    if not speakers:
        return ""
    text = torch.zeros(LONGEST, dtype=torch.int32, device=device)
    if ranks.rank == speakers[0]:
        data = message.encode()[:LONGEST]
        text[: len(data)] = torch.tensor(list(data), dtype=torch.int32, device=device)
    ranks.sum_(text)
    return bytes(value for value in text.tolist() if value).decode(errors="replace")


def summed(ranks: Ranks, values: Tensor) -> Tensor:
    """Numbers of which each has one owner and is 0.0 elsewhere, on every rank; a collective."""
    return ranks.sum_(values)


def largest(ranks: Ranks, device: torch.device, *values: int) -> list[int]:
    """The largest of each number over ranks; a collective."""
    if ranks.size == 1:
        return list(values)
    return ranks.max_(torch.tensor(values, device=device)).tolist()
