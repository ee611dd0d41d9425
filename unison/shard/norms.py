"""Norms over shards: right on every rank, and the same bits at every world size.

[Note: the canonical norm] Squares are taken in float64 and added in one fixed tree: inside blocks
of 256 elements, then over the blocks of a parameter, then over the parameters in the model's order.
A rank holds a run of a parameter's blocks, sums its aligned subtrees and sends those (a few
numbers); every rank then finishes the same tree. A norm is a collective: all ranks call it or none.

Our own shards are cut between blocks. FSDP2 cuts between rows, so that a block may lie on two ranks
or more: such blocks are few, and their squares are put together on every rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unison.errors import BadInput
from unison.shard.layout import ALIGNMENT
from unison.shard.ranks import Ranks
from unison.shard.sharded_tensor import (
    element_ranges,
    fsdp2_modules,
    is_dtensor,
    local_part,
    mesh_of,
    show_shards,
)
from unison.shard.tree import TreeSum, aligned_levels
from unison.shard.unit import units_of

Source = Callable[[nn.Parameter], Tensor | None]


def grad_norm(module: nn.Module) -> Tensor:
    """The L2 norm of the whole model's gradient, on every rank; a collective.

    Of a module that is not sharded too, where nothing is sent.
    """
    return _norm(module, lambda piece: piece.grad)


def param_norm(module: nn.Module) -> Tensor:
    """The L2 norm of all of the model's parameters, on every rank; a collective."""
    return _norm(module, lambda piece: piece.detach())


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
    norm = grad_norm(module)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for piece in module.parameters():
        if piece.grad is not None:
            gradient = local_part(piece.grad)
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm


@dataclass(frozen=True)
class Spread:
    """A parameter spread over ranks.

    Attributes:
        piece: What this rank holds of it.
        numel: Elements of the whole parameter.
        ranges: Rank r holds the elements [start, stop) of `ranges[r]`, of the flattened whole.
    """

    piece: nn.Parameter
    numel: int
    ranges: list[tuple[int, int]]

    @property
    def device(self) -> torch.device:
        """Where this rank holds its part."""
        return local_part(self.piece).device

    def runs(self) -> list[tuple[int, int]]:
        """Which blocks [low, high) each rank holds whole."""
        runs = []
        for start, stop in self.ranges:
            low = -(-start // ALIGNMENT)
            high = -(-stop // ALIGNMENT) if stop == self.numel else stop // ALIGNMENT
            runs.append((low, max(low, high)))
        return runs

    def shared_blocks(self) -> list[int]:
        """The blocks that no rank holds whole, in order."""
        cuts = {stop for _, stop in self.ranges if 0 < stop < self.numel}
        return sorted({cut // ALIGNMENT for cut in cuts if cut % ALIGNMENT})


@torch.no_grad()
def _norm(module: nn.Module, source: Source) -> Tensor:
    spreads, ranks, wire = _spread_parameters(module)
    values = []
    for spread in spreads:
        value = source(spread.piece)
        values.append(None if value is None else local_part(value).detach().reshape(-1))
    # Which blocks and subtrees a rank holds is arithmetic, so all ranks agree on what they send.
    levels = [
        [aligned_levels(*spread.runs()[rank]) for spread in spreads] for rank in range(ranks.size)
    ]
    count = max(sum(len(each) for each in of_rank) for of_rank in levels)
    nodes = [
        node
        for spread, value, of_piece in zip(spreads, values, levels[ranks.rank], strict=True)
        for node in _subtrees(_whole_blocks(spread, value, ranks.rank), of_piece, spread.device)
    ]
    sent = torch.zeros(count, dtype=torch.float64, device=wire)
    if nodes:
        sent[: len(nodes)] = torch.stack(nodes)
    received = torch.empty(ranks.size * count, dtype=torch.float64, device=wire)
    ranks.gather(received, sent).wait()
    shared = _shared_sums(spreads, values, ranks, wire)
    nodes_of_ranks = received.view(ranks.size, count).cpu()
    return _finish(spreads, nodes_of_ranks, levels, shared.cpu()).sqrt().to(wire)


def _spread_parameters(module: nn.Module) -> tuple[list[Spread], Ranks, torch.device]:
    """All parameters, the ranks they are spread over, and the device on which ranks exchange.

    Parameters come in the order of `named_parameters()`. That order is the model's own: it does not
    change with how the model is cut into units. Offloaded ones lie on another device than ranks
    exchange on.
    """
    if fsdp2_modules(module):
        return _of_fsdp2(module)
    found: dict[int, Spread] = {}
    for unit in units_of(module):
        for group in unit.groups:
            size = group.ranks.size
            of_ranks = [group.layout.pieces(rank, size) for rank in range(size)]
            for piece, *places in zip(group.pieces, *of_ranks, strict=True):
                ranges = [(place.start, place.stop) for place in places]
                found[id(piece)] = Spread(piece, places[0].slot.numel, ranges)
    if not found:  # a plain module, which every rank holds whole
        whole = {
            id(piece): Spread(piece, piece.numel(), [(0, piece.numel())])
            for piece in module.parameters()
        }
        device = next((spread.device for spread in whole.values()), torch.device("cpu"))
        return list(whole.values()), Ranks(None), device
    outside = [name for name, value in module.named_parameters() if id(value) not in found]
    if outside:
        raise BadInput(f"parameters {outside} belong to no unit; call fully_shard on the root too")
    first = units_of(module)[0]
    wire = next(group.device for unit in units_of(module) for group in unit.groups)
    return [found[id(piece)] for piece in module.parameters()], first.ranks, wire


def _of_fsdp2(module: nn.Module) -> tuple[list[Spread], Ranks, torch.device]:
    show_shards(module)
    outside = [name for name, value in module.named_parameters() if not is_dtensor(value)]
    if outside:
        raise BadInput(
            f"parameters {outside} are not sharded; call torch.distributed.fsdp.fully_shard on the "
            "root too"
        )
    meshes = {mesh_of(value, name) for name, value in module.named_parameters()}
    if len(meshes) != 1:
        raise BadInput(f"expected all parameters on one mesh, found {len(meshes)}")
    mesh = meshes.pop()
    spreads = [
        Spread(value, value.numel(), element_ranges(value, mesh.size()))
        for value in module.parameters()
    ]
    return spreads, Ranks.of(mesh), torch.device(mesh.device_type)


def _whole_blocks(spread: Spread, values: Tensor | None, rank: int) -> Tensor | None:
    """The elements of the blocks that a rank holds whole [elements]."""
    if values is None:
        return None
    start, (low, high) = spread.ranges[rank][0], spread.runs()[rank]
    return values[low * ALIGNMENT - start : high * ALIGNMENT - start] if high > low else values[:0]


def _subtrees(values: Tensor | None, levels: list[int], device: torch.device) -> list[Tensor]:
    """Sums of squares of a run of blocks over its aligned subtrees, in block order."""
    num_blocks = sum(1 << level for level in levels)
    if values is None:
        return [torch.zeros((), dtype=torch.float64, device=device) for _ in levels]
    if num_blocks == 0:
        return []
    squares = torch.zeros(num_blocks * ALIGNMENT, dtype=torch.float64, device=device)
    squares[: values.numel()] = _squares(values)
    sums = _block_sums(squares.view(num_blocks, ALIGNMENT))
    nodes, start = [], 0
    for level in levels:
        node = sums[start : start + (1 << level)]
        start += 1 << level
        while len(node) > 1:
            node = node[0::2] + node[1::2]
        nodes.append(node[0])
    return nodes


def _squares(values: Tensor) -> Tensor:  # float64 [elements]
    if values.is_complex():
        return torch.view_as_real(values).double().square().sum(-1)
    return values.double().square()


def _block_sums(squares: Tensor) -> Tensor:  # [blocks, ALIGNMENT] -> [blocks]
    while squares.shape[1] > 1:
        squares = squares[:, 0::2] + squares[:, 1::2]
    return squares[:, 0]


def _shared_sums(
    spreads: list[Spread], values: list[Tensor | None], ranks: Ranks, wire: torch.device
) -> Tensor:
    """Sums of squares of the blocks that several ranks hold, parameter by parameter [blocks]."""
    blocks = [(index, block) for index, s in enumerate(spreads) for block in s.shared_blocks()]
    squares = torch.zeros(len(blocks), ALIGNMENT, dtype=torch.float64, device=wire)
    if not blocks:
        return squares[:, 0]
    for row, (index, block) in zip(squares, blocks, strict=True):
        value, (start, stop) = values[index], spreads[index].ranges[ranks.rank]
        first, last = max(start, block * ALIGNMENT), min(stop, (block + 1) * ALIGNMENT)
        if value is not None and first < last:
            part = _squares(value[first - start : last - start])
            row[first - block * ALIGNMENT : last - block * ALIGNMENT] = part
    ranks.sum_(squares)  # each element has one owner, all others add 0.0: exact
    return _block_sums(squares)


def _finish(
    spreads: list[Spread], received: Tensor, levels: list[list[list[int]]], shared: Tensor
) -> Tensor:
    """Finish every parameter's tree from all ranks' subtrees, then add the parameters up."""
    totals, cursor = TreeSum(), [0] * len(levels)
    shared_sums = iter(shared)
    for index, spread in enumerate(spreads):
        nodes = [(block, 0, next(shared_sums)) for block in spread.shared_blocks()]
        for rank, (low, _) in enumerate(spread.runs()):
            for level in levels[rank][index]:
                nodes.append((low, level, received[rank, cursor[rank]]))
                low += 1 << level
                cursor[rank] += 1
        of_parameter = TreeSum()
        for _, level, node in sorted(nodes, key=lambda each: each[0]):
            of_parameter.push(node.clone(), level)
        total = of_parameter.finish()
        totals.push(received.new_zeros(()) if total is None else total)
    result = totals.finish()
    assert result is not None
    return result
