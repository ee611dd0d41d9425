"""How much memory each unit takes on a rank."""

from dataclasses import dataclass

from torch import nn

from unison.errors import BadInput
from unison.shard.unit import units_of


@dataclass(frozen=True, kw_only=True)
class UnitMemory:
    """Bytes of one unit on one rank.

    Attributes:
        name: The unit's module in the model.
        num_parameters: Elements of its parameters, over all ranks.
        shard: What the rank always holds of them.
        full: What it holds in addition while the unit computes.
        gradient: Its shard of the gradient, trainable parameters only.
    """

    name: str
    num_parameters: int
    shard: int
    full: int
    gradient: int


def unit_memory(module: nn.Module) -> list[UnitMemory]:
    """What each unit of a sharded model takes on this rank, the root first.

    Raises:
        BadInput: If the module is not sharded.
    """
    paths = {child: path for path, child in module.named_modules()}
    units = units_of(module)
    if not units:
        raise BadInput(f"{type(module).__name__} is not sharded; call unison.fully_shard first")
    return [
        UnitMemory(
            name=paths[unit.module] or "root",
            num_parameters=sum(slot.numel for group in unit.groups for slot in group.slots),
            shard=sum(group.shard.nbytes for group in unit.groups),
            full=sum(group.full_bytes for group in unit.groups),
            gradient=sum(group.shard.nbytes for group in unit.groups if group.requires_grad),
        )
        for unit in units
    ]


def memory_report(module: nn.Module) -> str:
    """A table of `unit_memory`, in MiB, with its sums."""
    rows = unit_memory(module)
    mib = 2**20
    lines = [f"{'unit':24s} {'parameters':>14s} {'shard':>9s} {'gradient':>9s} {'gathered':>9s}"]
    for row in rows:
        lines.append(
            f"{row.name:24s} {row.num_parameters:14,d} {row.shard / mib:9.2f} "
            f"{row.gradient / mib:9.2f} {row.full / mib:9.2f}"
        )
    # The root and one block are full at a time; prefetching makes it two blocks.
    largest = sorted((row.full for row in rows[1:]), reverse=True)[:2]
    lines.append(
        f"{'sum; gathered at a time':24s} {sum(row.num_parameters for row in rows):14,d} "
        f"{sum(row.shard for row in rows) / mib:9.2f} "
        f"{sum(row.gradient for row in rows) / mib:9.2f} {(rows[0].full + sum(largest)) / mib:9.2f}"
    )
    return "\n".join(lines)
