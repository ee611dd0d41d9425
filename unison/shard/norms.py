"""Norms over shards: right on every rank, and the same bits at every world size.

[Note: the canonical norm] Squares are taken in float64 and added in one fixed tree: inside blocks
of 256 elements, then over the blocks of a parameter, then over the parameters in the model's order.
A rank holds a run of a parameter's blocks, sums its aligned subtrees and sends those (a few
numbers); every rank then finishes the same tree. A norm is a collective: all ranks call it or none.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from unison.errors import BadInput
from unison.shard.layout import ALIGNMENT, Piece
from unison.shard.tree import TreeSum, aligned_levels
from unison.shard.unit import units_of

Source = Callable[[nn.Parameter], Tensor | None]


def grad_norm(module: nn.Module) -> Tensor:
    """The L2 norm of the whole model's gradient, on every rank; a collective."""
    return _norm(module, lambda piece: piece.grad)


def param_norm(module: nn.Module) -> Tensor:
    """The L2 norm of all of the model's parameters, on every rank; a collective."""
    return _norm(module, lambda piece: piece.detach())


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float) -> Tensor:
    """Scale the model's gradient so that its norm is at most `max_norm`; a collective.

    Args:
        module: The sharded root module.
        max_norm: The bound; infinity only measures.

    Returns:
        The norm before clipping, a float64 scalar, the same on every rank.
    """
    if not max_norm > 0:
        raise BadInput(f"max_norm must be above 0, found {max_norm!r}")
    norm = grad_norm(module)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for piece in _pieces(module):
        if piece.grad is not None:
            piece.grad.mul_(factor.to(piece.grad.dtype))
    return norm


def _pieces(module: nn.Module) -> Iterator[nn.Parameter]:
    for unit in units_of(module):
        for group in unit.groups:
            yield from group.pieces


@torch.no_grad()
def _norm(module: nn.Module, source: Source) -> Tensor:
    parameters = _sharded_parameters(module)
    ranks = units_of(module)[0].ranks
    # Which subtrees a rank holds is arithmetic, so all ranks agree on the shape of the exchange.
    levels = [
        [aligned_levels(*_blocks(places[rank])) for _, places in parameters]
        for rank in range(ranks.size)
    ]
    count = max(sum(len(each) for each in of_rank) for of_rank in levels)
    nodes = [
        node
        for (piece, _), of_piece in zip(parameters, levels[ranks.rank], strict=True)
        for node in _subtrees(source(piece), of_piece)
    ]
    device = parameters[0][0].device
    sent = torch.zeros(count, dtype=torch.float64, device=device)
    if nodes:
        sent[: len(nodes)] = torch.stack(nodes)
    received = torch.empty(ranks.size * count, dtype=torch.float64, device=device)
    ranks.gather(received, sent).wait()
    return _finish(received.view(ranks.size, count).cpu(), levels).sqrt().to(device)


def _sharded_parameters(module: nn.Module) -> list[tuple[nn.Parameter, list[Piece]]]:
    """The pieces in the order of `named_parameters()`, with every rank's place of each.

    That order is the model's own: it does not change with how the model is cut into units.
    """
    places: dict[int, list[Piece]] = {}
    for unit in units_of(module):
        for group in unit.groups:
            size = group.ranks.size
            of_ranks = [group.layout.pieces(rank, size) for rank in range(size)]
            for piece, *each in zip(group.pieces, *of_ranks, strict=True):
                places[id(piece)] = each
    if not places:
        raise BadInput(
            f"{type(module).__name__} is not sharded; use torch.nn.utils.clip_grad_norm_ for it"
        )
    outside = [name for name, value in module.named_parameters() if id(value) not in places]
    if outside:
        raise BadInput(f"parameters {outside} belong to no unit; call fully_shard on the root too")
    return [(piece, places[id(piece)]) for piece in module.parameters()]


def _blocks(piece: Piece) -> tuple[int, int]:
    """The blocks [low, high) of a parameter that a rank holds."""
    if piece.numel == 0:
        return 0, 0
    return piece.start // ALIGNMENT, -(-piece.stop // ALIGNMENT)


def _subtrees(values: Tensor | None, levels: list[int]) -> list[Tensor]:
    """Sums of squares of a piece over its aligned subtrees of blocks, in block order."""
    num_blocks = sum(1 << level for level in levels)
    if values is None:
        return [torch.zeros((), dtype=torch.float64) for _ in levels]
    if num_blocks == 0:
        return []
    squares = torch.zeros(num_blocks * ALIGNMENT, dtype=torch.float64, device=values.device)
    squares[: values.numel()] = values.detach().double().square()
    sums = squares.view(num_blocks, ALIGNMENT)
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    nodes, start = [], 0
    for level in levels:
        node = sums[start : start + (1 << level), 0]
        start += 1 << level
        while len(node) > 1:
            node = node[0::2] + node[1::2]
        nodes.append(node[0])
    return nodes


def _finish(received: Tensor, levels: list[list[list[int]]]) -> Tensor:
    """Finish every parameter's tree from all ranks' subtrees, then add the parameters up."""
    totals, cursor = TreeSum(), [0] * len(levels)
    for index in range(len(levels[0])):
        of_parameter = TreeSum()
        for rank, of_rank in enumerate(levels):
            for level in of_rank[index]:
                of_parameter.push(received[rank, cursor[rank]].clone(), level)
                cursor[rank] += 1
        total = of_parameter.finish()
        totals.push(received.new_zeros(()) if total is None else total)
    result = totals.finish()
    assert result is not None
    return result
