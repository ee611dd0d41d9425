"""`fully_shard` and `auto_shard`: from a module to units."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unison import check
from unison.errors import BadInput
from unison.names import canonical_name
from unison.shard.engine import install
from unison.shard.flat_group import ParameterInfo, Use
from unison.shard.optimizers import watch_optimizers
from unison.shard.policies import MixedPrecision, as_offload, as_precision
from unison.shard.ranks import Axes, Ranks
from unison.shard.unit import TAKEN_BY, UNIT_ATTRIBUTE, Unit, UnitOptions, unit_of
from unison.shard.verbs import add_verbs

M = TypeVar("M", bound=nn.Module)

REDUCERS = ("fast", "ordered")


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int = True,
    mp_policy: Any = None,
    offload_policy: Any = None,
    reducer: str = "fast",
    gradient_divisor: str | float = "world_size",
) -> M:
    """Split a module's parameters, gradients and optimizer state over ranks, in place.

    Call it on the parts that should be gathered together (usually the blocks), then on the root,
    which takes what is left. Make the optimizer afterwards. The module keeps its class and the
    names and shapes of its parameters; each becomes a sharded tensor, which holds this rank's part.

    Args:
        module: What to shard. A parameter belongs to the first call that reaches it.
        mesh: A device mesh of one dimension, or of two for copies of the sharded model (replicate,
            shard); all ranks of the default group by default. Without a process group the world
            has one rank. Parameters that lie on another kind of device than the mesh's are moved.
        reshard_after_forward: True frees the full parameters after the forward pass and gathers
            them again for the backward pass (ZeRO-3); False keeps them (ZeRO-2); a number n keeps
            them split over n neighbouring ranks in between. The root keeps them in any case, since
            its backward pass comes first.
        mp_policy: In which dtypes to compute and to sum: a `unison.MixedPrecision`, or FSDP2's
            `MixedPrecisionPolicy`. By default all happens in the parameters' own dtype, sums of
            shorter ones in float32.
        offload_policy: What lives in the host's memory: a `unison.CPUOffload`, or FSDP2's
            `CPUOffloadPolicy`.
        reducer: `"fast"`, the backend's own reduce-scatter, or `"ordered"`, the same bits at every
            world size; that one needs a loader from `unison.deal(loader, granule=...)` and
            `gradient_divisor=1`.
        gradient_divisor: What the sum of the ranks' gradients is divided by: `"world_size"`, which
            is right for a loss that is a mean over the rank's own samples (as DDP and FSDP2 do), or
            a number; 1 for losses already divided by the global count.

    Returns:
        The same module.

    Raises:
        BadInput: If the module cannot be sharded as asked; nothing is changed then.
    """
    check.one_of(REDUCERS, reducer=reducer)
    if not isinstance(module, nn.Module):
        raise BadInput(f"fully_shard takes a module, found {type(module).__name__}")
    if unit_of(module) is not None:
        raise BadInput(
            f"{type(module).__name__} is sharded already; call fully_shard once per module, "
            "children before their parents"
        )
    axes = Axes.of(mesh)
    divisor = _checked_divisor(gradient_divisor, axes.all)
    if reducer == "ordered" and gradient_divisor != 1:  # on one rank too: the loop must not differ
        raise BadInput(
            "the ordered reducer needs gradient_divisor=1 and a loss made by unison.batch_mean: a "
            "mean over one rank's samples has other bits at other world sizes"
        )
    options = UnitOptions(
        reshard_after_forward=_checked_reshard(reshard_after_forward, axes.shard),
        reducer=reducer,
        gradient_divisor=divisor,
        precision=as_precision(mp_policy),
        offload=as_offload(offload_policy),
    )
    parameters = collect_parameters(module)
    if not parameters and not any(unit_of(child) for child in module.modules()):
        raise BadInput(f"{type(module).__name__} has no parameters to shard")
    name = type(module).__name__
    unit = Unit(module, name, parameters, axes, options, _device_of(mesh, parameters))
    _cast_buffers(module, options.precision)
    module.__dict__[UNIT_ATTRIBUTE] = unit
    install(unit)
    add_verbs(module)
    watch_optimizers()
    return module


def auto_shard(
    module: M, policy: Callable[[nn.Module], bool] | None = None, **options: object
) -> M:
    """Call `fully_shard` on the repeated blocks of a model, then on the model itself.

    Args:
        module: The model.
        policy: Which submodules become units; by default the members of a `ModuleList` or
            `Sequential` of at least two modules of one class that hold parameters.
        options: Passed on to `fully_shard`. The output dtype of `mp_policy` is that of the model;
            blocks hand on what they compute in.

    Returns:
        The same module.
    """
    of_block = dict(options)
    if options.get("mp_policy") is not None:
        of_block["mp_policy"] = replace(as_precision(options["mp_policy"]), output=None)
    for block in find_blocks(module) if policy is None else _chosen(module, policy):
        fully_shard(block, **of_block)  # type: ignore[arg-type]
    return fully_shard(module, **options)  # type: ignore[arg-type]


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks of a model.

    >>> model = nn.ModuleDict(
    ...     {"in": nn.Linear(2, 2), "layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))}
    ... )
    >>> len(find_blocks(model))
    3
    """
    blocks: list[nn.Module] = []
    for child in module.children():
        members = list(child.children())
        # What `torch.compile(block)` returned is of another class than a block beside it.
        classes = Counter(type(each._modules.get("_orig_mod", each)) for each in members)
        is_list = isinstance(child, nn.ModuleList | nn.Sequential)
        if is_list and classes and classes.most_common(1)[0][1] >= 2:
            blocks += [member for member in members if any(True for _ in member.parameters())]
        else:
            blocks += find_blocks(child)
    return blocks


def collect_parameters(module: nn.Module) -> list[ParameterInfo]:
    """The parameters below a module that no unit owns yet, each once, with all its uses.

    Raises:
        BadInput: If one of them is tied to a parameter that a unit owns already, or lies on
            another device than the rest.
    """
    found: dict[int, ParameterInfo] = {}
    owned = {
        id(piece)
        for child in module.modules()
        if (unit := unit_of(child)) is not None
        for group in unit.groups
        for piece in group.pieces
    }
    for path, submodule in module.named_modules(remove_duplicate=True):
        for attribute, parameter in submodule._parameters.items():
            if parameter is None or id(parameter) in owned:
                continue
            name = canonical_name(f"{path}.{attribute}" if path else attribute)
            owner = getattr(parameter, TAKEN_BY, None)
            if owner is not None:
                raise BadInput(
                    f"parameter {name!r} is tied to one that the unit {owner!r} owns already; "
                    "leave that unit out, so that the module that holds both takes the parameter"
                )
            info = found.setdefault(id(parameter), ParameterInfo(name, parameter))
            info.uses.append(Use(submodule, attribute))
    devices = {info.value.device for info in found.values()}
    if len(devices) > 1:
        raise BadInput(f"expected all parameters on one device, found {sorted(map(str, devices))}")
    return list(found.values())


def _chosen(module: nn.Module, policy: Callable[[nn.Module], bool]) -> list[nn.Module]:
    # Children before parents; the root itself comes last in any case.
    chosen = [child for child in module.modules() if child is not module and policy(child)]
    return list(reversed(chosen))


def _device_of(mesh: DeviceMesh | None, parameters: list[ParameterInfo]) -> torch.device | None:
    """Where the parameters are to compute: where they are, unless the mesh is of another kind."""
    if mesh is None or not parameters:
        return None
    device = parameters[0].value.device
    if device.type in ("meta", mesh.device_type):
        return device
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _cast_buffers(module: nn.Module, precision: MixedPrecision) -> None:
    """Cast the floating-point buffers that no unit below the module has."""
    if precision.buffers is None:
        return
    below = {
        id(inner)
        for child in module.modules()
        if child is not module and unit_of(child) is not None
        for inner in child.modules()
    }
    for child in module.modules():
        if id(child) not in below:
            for name, buffer in child._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    child._buffers[name] = buffer.to(precision.buffers)


def _checked_reshard(value: bool | int, ranks: Ranks) -> bool | int:
    if not isinstance(value, bool | int):
        raise BadInput(f"reshard_after_forward must be True, False or a number, found {value!r}")
    if not isinstance(value, bool) and (value < 1 or ranks.size % value):
        raise BadInput(
            f"reshard_after_forward={value} must divide the number of ranks, {ranks.size}"
        )
    return value


def _checked_divisor(value: str | float, ranks: Ranks) -> float:
    if value == "world_size":
        return float(ranks.size)
    if isinstance(value, str):
        raise BadInput(f"gradient_divisor must be 'world_size' or a number, found {value!r}")
    check.positive(gradient_divisor=value)
    return float(value)
