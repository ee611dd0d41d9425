"""FSDP2's verbs on a sharded module, such as `module.set_requires_gradient_sync(False)`.

FSDP2 gives a module another class to have them; here the class stays, and the instance has them.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from unison.errors import UnsupportedOperation
from unison.shard.context import context_of
from unison.shard.engine import compile_inside
from unison.shard.ranks import DONE, Work
from unison.shard.unit import Unit, unit_of, units_of


def add_verbs(module: nn.Module) -> None:
    """Let a sharded module have FSDP2's verbs; copies of the module get their own."""
    verbs = {
        "unshard": unshard,
        "reshard": reshard,
        "set_requires_gradient_sync": set_requires_gradient_sync,
        "set_reshard_after_forward": set_reshard_after_forward,
        "compile": compile_module,
    }
    for name, verb in verbs.items():
        module.__dict__[name] = partial(verb, module)


def compile_module(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """As `nn.Module.compile`: what the module computes is compiled, gathering goes around it."""
    nn.Module.compile(module, *args, **kwargs)
    compile_inside(_unit(module))


def unshard(module: nn.Module, async_op: bool = False) -> Work:
    """Have the module's own parameters whole until `reshard`, or until its next pass ends.

    For what uses parameters outside of `forward`: other methods, a look at a weight. Gradients are
    right, whether it is sharded again before the backward pass or not. A collective.

    Args:
        module: A sharded module; units below it stay as they are.
        async_op: For FSDP2's sake: what is returned can be waited for in any case.
    """
    unit = _unit(module)
    context_of(unit)
    unit.show_full()
    return DONE


def reshard(module: nn.Module) -> None:
    """Give the memory back that `unshard` took.

    Raises:
        UnsupportedOperation: If the full parameters were written, which would be lost.
    """
    _unit(module).reshard()


def set_requires_gradient_sync(
    module: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True
) -> None:
    """Sum gradients over ranks after a backward pass, or let them add up on each rank until later.

    Without sums a rank holds the whole gradient of each unit; `deal(micro_batch=...)` and the fast
    reducer's own way, a sum after each pass, do not.

    Args:
        module: A sharded module.
        requires_gradient_sync: Whether to sum.
        recurse: Whether this is for the units below it, too.

    Raises:
        UnsupportedOperation: With the ordered reducer, which sums a logical batch once.
    """
    units = units_of(module) if recurse else [_unit(module)]
    for unit in units:
        if unit.options.reducer == "ordered":
            raise UnsupportedOperation(
                f"{unit.name or 'the module'} sums a logical batch once, in one order; let "
                "unison.deal(loader, granule=..., micro_batch=...) cut the batch into passes"
            )
    for unit in units:
        unit.requires_sync = requires_gradient_sync


def set_reshard_after_forward(
    module: nn.Module, reshard_after_forward: bool, recurse: bool = True
) -> None:
    """Free full parameters after the forward pass, or keep them for the backward pass."""
    for unit in units_of(module) if recurse else [_unit(module)]:
        unit.options = replace(unit.options, reshard_after_forward=bool(reshard_after_forward))


def _unit(module: nn.Module) -> Unit:
    unit = unit_of(module)
    assert unit is not None
    return unit
