"""`fully_shard` and `auto_shard`: from a module to units."""

import functools
import itertools
import json
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from unison import check
from unison.errors import BadInput, UnsupportedOperation
from unison.shard.engine import compile_inside, context_of, install
from unison.shard.flat_group import (
    CPUOffload,
    MixedPrecision,
    NamedParameter,
    is_piece,
)
from unison.shard.ranks import DONE, Ranks, Work
from unison.shard.sharded_tensor import HeldGradient, ShardedTensor, shard_of, show_shards
from unison.shard.unit import TAKEN_BY, UNIT_ATTRIBUTE, Unit, unit_of, units_of
from unison.torch_internals import canonical_name, has_values, is_dtensor

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
    if not isinstance(reshard_after_forward, bool | int):
        raise BadInput(
            "reshard_after_forward must be True, False or a number, found "
            f"{reshard_after_forward!r}"
        )
    ranks = Ranks.of(mesh)
    if not isinstance(reshard_after_forward, bool):
        ranks.shard.neighbours(reshard_after_forward)  # refuses what does not divide the ranks
    divisor = ranks.size if gradient_divisor == "world_size" else gradient_divisor
    if isinstance(divisor, str):
        raise BadInput(f"gradient_divisor must be 'world_size' or a number, found {divisor!r}")
    check.positive(gradient_divisor=divisor)
    if reducer == "ordered" and gradient_divisor != 1:  # on one rank too: the loop must not differ
        raise BadInput(
            "the ordered reducer needs gradient_divisor=1 and a loss made by unison.batch_mean: a "
            "mean over one rank's samples has other bits at other world sizes"
        )
    precision, offload = as_precision(mp_policy), as_offload(offload_policy)
    parameters = collect_parameters(module)
    if not parameters and not any(unit_of(child) for child in module.modules()):
        raise BadInput(f"{type(module).__name__} has no parameters to shard")
    unit = Unit(
        module,
        parameters,
        ranks,
        _device_of(mesh, parameters),
        reshard_after_forward=reshard_after_forward,
        reducer=reducer,
        gradient_divisor=float(divisor),
        precision=precision,
        offload=offload,
    )
    _cast_buffers(module, precision)
    module.__dict__[UNIT_ATTRIBUTE] = unit
    install(unit)
    # FSDP2 gives a module another class to have its verbs; here the class stays, and the instance
    # has them. Copies of the module get their own.
    for verb in (unshard, reshard, set_requires_gradient_sync, set_reshard_after_forward):
        module.__dict__[verb.__name__] = partial(verb, module)
    module.__dict__["compile"] = partial(compile_module, module)
    module.__dict__["_apply"] = partial(apply_to_tensors, module)
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
    if policy is None:
        blocks = find_blocks(module)
    else:  # children before parents; the root itself comes last in any case
        blocks = [child for child in module.modules() if child is not module and policy(child)]
        blocks.reverse()
    for block in blocks:
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


def collect_parameters(module: nn.Module) -> list[NamedParameter]:
    """The parameters below a module that no unit owns yet, each once, with all its uses.

    Raises:
        BadInput: If one of them is tied to a parameter that a unit owns already, or lies on
            another device than the rest.
    """
    found: dict[int, NamedParameter] = {}
    for path, submodule in module.named_modules(remove_duplicate=True):
        for attribute, parameter in submodule._parameters.items():
            if parameter is None or is_piece(parameter):
                continue
            name = canonical_name(f"{path}.{attribute}" if path else attribute)
            owner = getattr(parameter, TAKEN_BY, None)
            if owner is not None:
                raise BadInput(
                    f"parameter {name!r} is tied to one that the unit {owner!r} owns already; "
                    "leave that unit out, so that the module that holds both takes the parameter"
                )
            uses = found.setdefault(id(parameter), (name, parameter, []))[2]
            uses.append((submodule, attribute))
    devices = {parameter.device for _, parameter, _ in found.values()}
    if len(devices) > 1:
        raise BadInput(f"expected all parameters on one device, found {sorted(map(str, devices))}")
    return list(found.values())


def _device_of(mesh: DeviceMesh | None, parameters: list[NamedParameter]) -> torch.device | None:
    """Where the parameters are to compute: where they are, unless the mesh is of another kind."""
    if mesh is None or not parameters:
        return None
    device = parameters[0][1].device
    is_there = device.type in ("meta", mesh.device_type)
    if is_there or mesh.device_type != "cuda":
        return device if is_there else torch.device(mesh.device_type)
    return torch.device("cuda", torch.cuda.current_device())


def _cast_buffers(module: nn.Module, precision: MixedPrecision) -> None:
    """Cast the floating-point buffers that no unit below the module has."""
    if precision.buffers is None:
        return
    units = [child for child in module.modules() if child is not module and unit_of(child)]
    below = {inner for child in units for inner in child.modules()}
    for child in module.modules():
        if child not in below:
            for name, buffer in child._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    child._buffers[name] = buffer.to(precision.buffers)


def as_precision(policy: Any) -> MixedPrecision:
    """Accept None, our own policy, or the one of torch's FSDP2.

    Raises:
        BadInput: If it is something else.
    """
    if policy is None:
        return MixedPrecision()
    if isinstance(policy, MixedPrecision):
        return policy
    if type(policy).__name__ == "MixedPrecisionPolicy":  # torch.distributed.fsdp's, not imported
        return MixedPrecision(
            param=policy.param_dtype,
            # FSDP2 sums in the computing dtype unless told otherwise; its users rely on that.
            reduce=policy.reduce_dtype or policy.param_dtype,
            output=policy.output_dtype,
            cast_inputs=policy.cast_forward_inputs,
        )
    raise BadInput(
        "mp_policy must be a unison.MixedPrecision or torch.distributed.fsdp.MixedPrecisionPolicy, "
        f"found {policy!r}"
    )


def as_offload(policy: Any) -> CPUOffload | None:
    """Accept None, our own policy, or one of torch's FSDP2.

    Raises:
        BadInput: If it is something else.
    """
    if policy is None or type(policy).__name__ == "OffloadPolicy":  # FSDP2's word for none
        return None
    if isinstance(policy, CPUOffload):
        return policy
    if type(policy).__name__ == "CPUOffloadPolicy":
        return CPUOffload(pin_memory=policy.pin_memory)
    raise BadInput(
        "offload_policy must be a unison.CPUOffload or torch.distributed.fsdp.CPUOffloadPolicy, "
        f"found {policy!r}"
    )


# ------------------------------------------------------------------------------------------------
# FSDP2's verbs on a sharded module, such as `module.set_requires_gradient_sync(False)`.


def compile_module(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """As `nn.Module.compile`: what the module computes is compiled, gathering goes around it."""
    nn.Module.compile(module, *args, **kwargs)
    compile_inside(_unit(module))


def apply_to_tensors(module: M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> M:
    """As `nn.Module._apply`, by which `to`, `cpu` and `float` go; parameters stay in their unit.

    What was really moved or cast is refused by the next forward pass.
    """
    type(module)._apply(module, fn, recurse)
    for unit in units_of(module):
        unit.take_back(was_applied=True)
    return module


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
    reducer's own way, a sum after each pass, do not. Meanwhile `.grad` may be cleared, as
    `zero_grad()` does, which drops what is held; whatever reads it, `optimizer.step()` too, raises.

    Args:
        module: A sharded module.
        requires_gradient_sync: Whether to sum.
        recurse: Whether this is for the units below it, too.

    Raises:
        UnsupportedOperation: With the ordered reducer, which sums a logical batch once.
    """
    units = units_of(module) if recurse else [_unit(module)]
    for unit in units:
        if unit.reducer == "ordered":
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
        unit.reshard_after_forward = bool(reshard_after_forward)


def _unit(module: nn.Module) -> Unit:
    unit = unit_of(module)
    assert unit is not None
    return unit


# ------------------------------------------------------------------------------------------------
# Optimizers of sharded parameters: groups by name and shape, and what a first step looks at.


def param_groups(
    module: nn.Module, weight_decay: float, no_decay: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Optimizer groups with and without weight decay, by name and number of dimensions.

    Args:
        module: The model, sharded (by unison or by torch's own FSDP2) or not.
        weight_decay: Decay of parameters with two or more dimensions.
        no_decay: Patterns of names (`"*embeddings*"`) that are not decayed either.

    Returns:
        Two groups for a torch optimizer: decayed, and not.
    """
    check.not_negative(weight_decay=weight_decay)
    show_shards(module)
    patterns = list(no_decay)
    decayed, others = [], []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        is_exempt = any(fnmatch(canonical_name(name), pattern) for pattern in patterns)
        (decayed if parameter.ndim >= 2 and not is_exempt else others).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
# Optimizers of sharded tensors by ranks, which come to their first steps in one order. Not by
# group: one that is made anew may have the store of the one before.
_num_watched: Counter[str] = Counter()


@functools.cache
def watch_optimizers() -> None:
    """Look at every optimizer before its first step: it may hold what is trained no longer."""
    register_optimizer_step_pre_hook(_look_once)
    register_optimizer_step_pre_hook(_refuse_held)


def _look_once(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _seen:
        return
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for parameter in parameters:
        owner = getattr(parameter, TAKEN_BY, None)
        if owner is not None:
            raise BadInput(
                f"{type(optimizer).__name__} was made before fully_shard: it holds a parameter "
                f"of shape {list(parameter.shape)} that {owner} has taken and that is trained "
                "no longer; make the optimizer after sharding, from module.parameters()"
            )
    group = next((e.placement.ranks.group for e in parameters if type(e) is ShardedTensor), None)
    if group is not None:
        members = "-".join(map(str, dist.get_process_group_ranks(group)))
        _num_watched[members] += 1
        of_optimizer = f"unison/optimizer/{members}/{_num_watched[members]}"
        compare = partial(_compare_settings, itertools.count(1), of_optimizer)
        optimizer.register_step_pre_hook(compare)
        compare(optimizer)
    if any(map(is_piece, parameters)):
        _warn_of_outside(optimizer, parameters)
        _adopt_flat_state(optimizer)
        optimizer.register_load_state_dict_post_hook(_adopt_flat_state)
    _seen.add(optimizer)


def _refuse_held(optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse a step without gradients that are still to be summed over ranks."""
    # A closure may make the last backward pass; then `HeldGradient` itself refuses.
    if any(map(callable, (*args[1:], *kwargs.values()))) or torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter.grad) is HeldGradient:
                parameter.grad.refuse()


def _compare_settings(steps: Iterator[int], key: str, optimizer: Optimizer, *_: Any) -> None:
    """Refuse settings that another rank has not, in steps 1, 2, 4, 8, …; nobody waits for it.

    Raises:
        BadInput: Naming what differs.
    """
    step = next(steps)
    if step & (step - 1) or not has_values() or torch.compiler.is_compiling():
        return

    def shown(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(shown, value))
        if isinstance(value, ShardedTensor):
            return value.placement.name
        return repr(value) if isinstance(value, int | float | str | tuple) else None

    own = [{name: shown(each) for name, each in g.items()} for g in optimizer.param_groups]
    store = dist.distributed_c10d._get_default_store()
    first = store.compare_set(f"{key}/{step}", "", json.dumps(own))
    for there, here in itertools.zip_longest(json.loads(first), own, fillvalue={}):
        for name in {**there, **here}:
            if there.get(name) != here.get(name):
                others, mine = (str(each.get(name))[:200] for each in (there, here))
                what = f"{name} of {type(optimizer).__name__}"
                raise BadInput(
                    f"{what} differs between ranks, which hold parts of the same parameters: "
                    f"{others} and, on rank {dist.get_rank()}, {mine}. Give all the same, and "
                    "schedulers numbers that are the same on all ranks (a loss after all_reduce, "
                    "not a rank's own)"
                )


def _warn_of_outside(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """Tell of parameters without a unit beside those of units, on several ranks."""
    sizes = [each.placement.ranks.size for each in parameters if isinstance(each, ShardedTensor)]
    outside = [
        each
        for each in parameters
        if each.grad is not None and not is_piece(each) and not is_dtensor(each)
    ]
    if outside and max(sizes, default=1) > 1:
        warnings.warn(
            f"{type(optimizer).__name__} trains {len(outside)} parameters that no unit has, the "
            f"first of shape {list(outside[0].shape)}, beside those of units: each of the "
            f"{max(sizes)} ranks has its own gradient of them, unless you add these up yourself. "
            "Call fully_shard on the root too, after its blocks",
            stacklevel=2,
        )


def _adopt_flat_state(optimizer: Optimizer) -> None:
    """Take over state of whole parameters, or of one dimension, as it was while pieces had one."""
    # A single number of a parameter that is one, too, may be a moment or a count of steps.
    moments = {
        key
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.ndim and value.shape == parameter.shape
    }
    for parameter, state in optimizer.state.items():
        if not is_piece(parameter):
            continue
        for key, value in state.items():
            if type(value) is not Tensor or not (value.ndim or key in moments):
                continue
            if isinstance(parameter, ShardedTensor) and value.shape == parameter.shape:
                state[key] = shard_of(value, parameter.placement)  # another's state_dict()
            elif value.ndim != 1:
                continue
            elif isinstance(parameter, ShardedTensor) and value.shape == parameter.local.shape:
                state[key] = ShardedTensor(value, parameter.placement)
            elif value.shape != parameter.shape and value.numel() == parameter.numel():
                state[key] = value.view(parameter.shape)


# ------------------------------------------------------------------------------------------------
# How much memory each unit takes on a rank.


def unit_memory(module: nn.Module) -> list[SimpleNamespace]:
    """What each unit of a sharded model takes on this rank in bytes, the root first.

    Returns:
        The `name` of each unit's module in the model; `num_parameters`, the elements of its
        parameters over all ranks; `shard`, what the rank always holds of them; `full`, what it
        holds in addition while the unit computes; and `gradient`, its shard of the gradient,
        trainable parameters only.

    Raises:
        BadInput: If the module is not sharded.
    """
    paths = {child: path for path, child in module.named_modules()}
    units = units_of(module)
    if not units:
        raise BadInput(f"{type(module).__name__} is not sharded; call unison.fully_shard first")
    return [
        SimpleNamespace(
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


# ------------------------------------------------------------------------------------------------
# Loss scaling for float16, decided by all ranks together.


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` on the device of a sharded model; torch's own is right for it, too.

    An infinity lies in one rank's part of a gradient, and all ranks learn of it, since parts are
    looked at together (see sharded_tensor.py). `step`, `update` and `unscale_` are collectives:
    every rank calls them.

    Args:
        module: The sharded model.
        device: The kind of device that computes the loss; by default the model's own.
        options: Passed on to `torch.amp.GradScaler`.

    Raises:
        BadInput: If the module is not sharded.
    """

    def __init__(self, module: nn.Module, device: str | None = None, **options: Any) -> None:
        units = units_of(module)
        if not units:
            raise BadInput(
                f"{type(module).__name__} is not sharded; torch.amp.GradScaler is right for it"
            )
        own = next(group.device.type for unit in units for group in unit.groups)
        super().__init__(device or own, **options)
