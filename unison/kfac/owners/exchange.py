"""Lists of tensors, each rank sending others what they need: one all-to-all."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unison.shard.ranks import Ranks

Lists = list[list[Tensor]]


def swap(
    ranks: Ranks,
    sent: Sequence[Sequence[Tensor]],
    expected: Sequence[Sequence[int]],
    like: Tensor,
) -> Lists:
    """Send a list of flat tensors to every rank, and receive one from each; a collective.

    What a rank sends to itself is not copied.

    Args:
        ranks: Everyone.
        sent: For each rank, the tensors it gets.
        expected: For each rank, the sizes of the tensors that come from it.
        like: Of the dtype and on the device in which they travel.
    """
    me = ranks.rank
    if ranks.size == 1:
        return [list(sent[0])]
    outgoing = [
        [] if rank == me else [each.reshape(-1).to(like) for each in of_rank]
        for rank, of_rank in enumerate(sent)
    ]
    sizes_out = [sum(len(each) for each in of_rank) for of_rank in outgoing]
    sizes_in = [0 if rank == me else sum(sizes) for rank, sizes in enumerate(expected)]
    flat = [each for of_rank in outgoing for each in of_rank]
    buffer = torch.cat(flat) if flat else like.new_zeros(0)
    received = like.new_empty(sum(sizes_in))
    dist.all_to_all_single(received, buffer, sizes_in, sizes_out, group=ranks.group)
    ranks.num_calls["exchange"] += 1
    ranks.bytes_sent["exchange"] += buffer.nbytes
    found: Lists = []
    for rank, part in enumerate(received.split(sizes_in)):
        found.append(list(sent[me]) if rank == me else list(part.split(list(expected[rank]))))
    return found
