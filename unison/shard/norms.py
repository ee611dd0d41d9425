"""Norms over shards: right on every rank, and the same bits at every world size.

[Note: the canonical norm] Squares are taken in float64 and added in one fixed tree: inside blocks
of 256 elements, then over the blocks of a parameter, then over the parameters in the model's order.
A rank holds a run of a parameter's blocks, sums its aligned subtrees and tells the others (a few
numbers); every rank then finishes the same tree. A norm is a collective: all ranks call it or none.

Our own shards are cut between blocks. FSDP2 cuts between rows, so that a block may lie on two ranks
or more: such blocks are few, and their squares are put together on every rank.
"""

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor, nn

from unison.errors import BadInput
from unison.shard.flat_group import is_piece
from unison.shard.layout import ALIGNMENT, Placement
from unison.shard.ranks import buckets, meet
from unison.shard.reducers import aligned_levels, tree_sum
from unison.shard.sharded_tensor import (
    fsdp2_modules,
    local_part,
    mesh_of,
    one_mesh,
    placement_of,
    show_shards,
)
from unison.shard.unit import units_of
from unison.torch_internals import has_values, is_dtensor

Source = Callable[[nn.Parameter], Tensor | None]

Node = tuple[int, int, int | None]
"""A subtree of a parameter's blocks: its first block, its level, the rank that holds it."""


def grad_norm(module: nn.Module) -> Tensor:
    """The L2 norm of the whole model's gradient, on every rank; a collective.

    Of a module that is not sharded too, where nothing is sent.
    """
    return _norm(module, lambda piece: piece.grad, "the norm of the gradient")


def param_norm(module: nn.Module) -> Tensor:
    """The L2 norm of all of the model's parameters, on every rank; a collective."""
    return _norm(module, lambda piece: piece.detach(), "the norm of all parameters")


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float) -> Tensor:
    """Scale the model's gradient so that its norm is at most `max_norm`; a collective.

    Args:
        module: The sharded root module, under `unison.fully_shard` or torch's own.
        max_norm: The bound; infinity only measures.

    Returns:
        The norm before clipping, a float64 scalar, the same on every rank.
    """
    if not max_norm > 0:
        raise BadInput(f"max_norm must be above 0, found {max_norm!r}")
    if not (units_of(module) or fsdp2_modules(module)):
        raise BadInput(
            f"{type(module).__name__} is not sharded; use torch.nn.utils.clip_grad_norm_ for it"
        )
    norm = _norm(module, lambda piece: piece.grad)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    alike: dict[tuple, list[Tensor]] = {}
    for piece in module.parameters():
        if piece.grad is not None:
            gradient = local_part(piece.grad)
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for where, gradients in alike.items():
        torch._foreach_mul_(gradients, factor.to(*where))
    return norm


@torch.no_grad()
def _norm(module: nn.Module, source: Source, what: str | None = None) -> Tensor:
    parameters = _spread_parameters(module)
    if not parameters:
        return torch.zeros((), dtype=torch.float64)
    # Who shares them, and the device that they exchange on; offloaded parameters lie elsewhere.
    ranks, wire = parameters[0][1].ranks, parameters[0][1].device
    if what is not None and has_values():  # which some log under `if rank == 0`
        meet(ranks, what, may_be_late=True)
    # Which blocks and subtrees a rank holds is arithmetic, so all ranks agree on what they add.
    nodes = [_nodes(placement) for _, placement in parameters]
    held, shared = [], []  # and the squares of blocks that several ranks hold
    for (piece, placement), of_parameter in zip(parameters, nodes, strict=True):
        value = source(piece)
        part = None if value is None else local_part(value).detach().reshape(-1)
        held.append((part, placement, of_parameter))
        shared += [
            _block(part, placement, first) for first, _, rank in of_parameter if rank is None
        ]
    is_shared = [rank is None for of_parameter in nodes for _, _, rank in of_parameter]
    # Each number and each square has one owner, and all others add 0.0: exact.
    flat = ranks.sum_(torch.cat([_held_sums(held, wire), *shared]))
    flat, squares = flat.split([len(is_shared), len(shared) * ALIGNMENT])
    if shared:
        flat[torch.tensor(is_shared, device=wire)] = _pairwise_sum(squares.view(-1, ALIGNMENT))
    numbers = iter(flat.tolist() if has_values() else [0.0] * len(is_shared))
    totals = [tree_sum((level, next(numbers)) for _, level, _ in each) or 0.0 for each in nodes]
    result = tree_sum((0, each) for each in totals)
    return torch.tensor(result, dtype=torch.float64).sqrt().to(wire)


def _nodes(placement: Placement) -> list[Node]:
    """The subtrees of a parameter's blocks, in order.

    A block that lies on several ranks is one of its own, and held by None.
    """
    nodes: set[Node] = set()
    for rank, (start, stop) in enumerate(placement.ranges):
        is_last = stop == placement.numel
        low = -(-start // ALIGNMENT)
        high = -(-stop // ALIGNMENT) if is_last else stop // ALIGNMENT
        for level in aligned_levels(low, max(low, high)):
            nodes.add((low, level, rank))
            low += 1 << level
        if not is_last and stop % ALIGNMENT:
            nodes.add((stop // ALIGNMENT, 0, None))
    return sorted(nodes, key=lambda node: node[0])


BLOCKS_AT_ONCE = 1 << 14  # in float64, 32 MiB


def _held_sums(
    held: list[tuple[Tensor | None, Placement, list[Node]]], device: torch.device
) -> Tensor:
    """Sums of squares over the subtrees that this rank holds, 0 for others [nodes].

    Parameters are taken together, up to some size, and subtrees by their level: launches for each
    would take longer than the sums.

    Args:
        held: Of each parameter its elements that this rank holds, if there are any, how it lies on
            ranks, and the subtrees of its blocks.
        device: Where the sums go.
    """
    parts: list[tuple[Tensor, int]] = []  # each with the number of its blocks
    # By level: which node a subtree is, and its first block among those held.
    subtrees: dict[int, list[tuple[int, int]]] = {}
    num_nodes = num_blocks = 0
    for part, placement, nodes in held:
        own = [index for index, node in enumerate(nodes) if node[2] == placement.ranks.rank]
        if part is not None and own:
            low, count = nodes[own[0]][0], sum(1 << nodes[index][1] for index in own)
            for index in own:
                first, level, _ = nodes[index]
                place = num_nodes + index, num_blocks + first - low
                subtrees.setdefault(level, []).append(place)
            values = part[low * ALIGNMENT - placement.start :][: count * ALIGNMENT]
            for first in range(0, count, BLOCKS_AT_ONCE):
                last = min(first + BLOCKS_AT_ONCE, count)
                parts.append((values[first * ALIGNMENT : last * ALIGNMENT], last - first))
            num_blocks += count
        num_nodes += len(nodes)
    sums = torch.zeros(num_nodes, dtype=torch.float64, device=device)
    if not parts:
        return sums
    groups = [
        group
        for _, alike in groupby(parts, lambda part: (part[0].dtype, part[0].device))
        for group in buckets(alike, lambda part: part[1], BLOCKS_AT_ONCE)
    ]
    blocks = torch.cat([_block_sums(group).to(device) for group in groups])
    for level, places in subtrees.items():
        which, first = torch.tensor(places, device=device).T
        inside = torch.arange(1 << level, device=device)
        sums[which] = _pairwise_sum(blocks[first.unsqueeze(1) + inside])
    return sums


def _block_sums(group: list[tuple[Tensor, int]]) -> Tensor:
    """Sums of squares of blocks [blocks], of parts one after the other, filled up with zeros."""
    whole, numel = group[0][0], sum(count for _, count in group) * ALIGNMENT
    if whole.numel() < numel:
        whole, places, first = whole.new_zeros(numel), [], 0
        for values, count in group:
            places.append(whole[first : first + values.numel()])
            first += count * ALIGNMENT
        torch._foreach_copy_(places, [values for values, _ in group])
    return _pairwise_sum(_squares(whole).view(-1, ALIGNMENT))


def _block(part: Tensor | None, placement: Placement, block: int) -> Tensor:
    """The squares of this rank's elements of one block, 0 for others [ALIGNMENT]."""
    row = torch.zeros(ALIGNMENT, dtype=torch.float64, device=placement.device)
    first = max(placement.start, block * ALIGNMENT)
    last = min(placement.stop, (block + 1) * ALIGNMENT)
    if part is not None and first < last:
        squares = _squares(part[first - placement.start : last - placement.start])
        row[first - block * ALIGNMENT : last - block * ALIGNMENT] = squares
    return row


def _squares(values: Tensor) -> Tensor:  # float64 [elements]
    if values.is_complex():
        return torch.view_as_real(values).double().square().sum(-1)
    return values.double().square()


def _pairwise_sum(values: Tensor) -> Tensor:  # [..., a power of two] -> [...]
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def _spread_parameters(module: nn.Module) -> list[tuple[nn.Parameter, Placement]]:
    """All parameters and how they lie on ranks, which are the same ones for all.

    Parameters come in the order of `named_parameters()`. That order is the model's own: it does not
    change with how the model is cut into units.
    """
    show_shards(module)
    is_fsdp2, named = bool(fsdp2_modules(module)), list(module.named_parameters())
    if is_fsdp2 or units_of(module):
        is_spread = is_dtensor if is_fsdp2 else is_piece
        outside = [name for name, value in named if not is_spread(value)]
        if outside:
            where = "torch.distributed.fsdp.fully_shard" if is_fsdp2 else "fully_shard"
            raise BadInput(f"parameters {outside} are not sharded; call {where} on the root too")
    if is_fsdp2 and named:
        one_mesh({mesh_of(value, name): name for name, value in named})
    return [(value, placement_of(value, name)) for name, value in named]
