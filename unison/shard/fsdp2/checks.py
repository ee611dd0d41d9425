"""What the ordered reducer needs of a model under FSDP2, checked before anything is changed."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unison.errors import BadInput, UnsupportedOperation
from unison.names import canonical_name
from unison.shard.dtensors import fsdp2_modules, is_dtensor, mesh_of, show_shards
from unison.shard.unit import units_of


def param_groups_of(module: Any) -> list[Any]:
    """FSDP2's own parameter groups of a module: one, none if it holds no parameters, or several."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group  # before torch 2.13 there was at most one
    return [] if group is None else [group]


def check_root(model: nn.Module) -> None:
    """Refuse what is not the root of a model under FSDP2.

    Raises:
        BadInput: With what to call first.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(f"use_ordered_reduction takes a module, found {type(model).__name__}")
    name = type(model).__name__
    if units_of(model):
        raise BadInput(
            f"{name} is sharded by unison.fully_shard; pass reducer='ordered' there instead"
        )
    modules = fsdp2_modules(model)
    if not modules or modules[0][1] is not model:
        raise BadInput(
            f"{name} is not under FSDP2; call torch.distributed.fsdp.fully_shard on its blocks and "
            "then on the model itself, before use_ordered_reduction"
        )
    if modules[0][1]._get_fsdp_state()._is_root is False:
        raise BadInput(
            f"{name} is a part of a larger model under FSDP2; call use_ordered_reduction on the "
            "whole model"
        )


def check_modules(model: nn.Module) -> None:
    """Refuse FSDP2 modules with settings that the order of additions cannot survive.

    Raises:
        UnsupportedOperation: Naming the module and the setting.
    """
    for path, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise UnsupportedOperation(
                f"{canonical_name(path) or 'root'} is compiled: torch.compile hides the operations "
                "that have to run granule by granule; compile nothing under use_ordered_reduction"
            )
    for path, module in fsdp2_modules(model):
        name, groups = canonical_name(path) or "root", param_groups_of(module)
        if len(groups) > 1 or len(module._get_fsdp_state()._modules) > 1:
            raise UnsupportedOperation(
                f"{name} is one of several modules or meshes in one fully_shard call; call "
                "fully_shard once per module, with one mesh"
            )
        for group in groups:
            _check_group(name, group)


def _check_group(name: str, group: Any) -> None:
    if group.gradient_divide_factor not in (None, 1):
        raise UnsupportedOperation(
            f"gradient_divide_factor of {name} is {group.gradient_divide_factor}; the ordered "
            "reducer sums, and unison.batch_mean divides: leave the factor alone"
        )
    if type(group._reduce_scatter_comm).__name__ != "DefaultReduceScatter":
        raise UnsupportedOperation(
            f"{name} has a reduce-scatter of its own, {type(group._reduce_scatter_comm).__name__}; "
            "the ordered reducer has to be the only one"
        )
    if group._all_reduce_hook is not None:
        raise UnsupportedOperation(
            f"{name} has an all-reduce hook, which adds in an order of its own; remove it"
        )
    for parameter in group.fsdp_params:
        local = parameter.sharded_param._local_tensor
        if hasattr(local, "fsdp_pre_all_gather"):
            raise UnsupportedOperation(
                f"{name}: {parameter._module_info.param_name} gathers as a {type(local).__name__}; "
                "only plain tensors can be summed in order"
            )


def shared_mesh(model: nn.Module) -> DeviceMesh:
    """The one-dimensional mesh of all of the model's parameters.

    Raises:
        BadInput: If a parameter is outside, or the number of ranks is not a power of two.
        UnsupportedOperation: If a parameter is spread in any other way than by rows.
    """
    show_shards(model)
    meshes: dict[DeviceMesh, str] = {}
    for name, parameter in model.named_parameters():
        if not is_dtensor(parameter):
            raise BadInput(
                f"parameter {canonical_name(name)!r} is not sharded (ignored_params?); its "
                "gradient would not be summed at all. Let fully_shard take it"
            )
        meshes.setdefault(mesh_of(parameter, canonical_name(name)), canonical_name(name))
    if len(meshes) != 1:
        found = ", ".join(f"{name!r} on {mesh}" for mesh, name in meshes.items())
        raise BadInput(f"expected all parameters on one mesh, found {found or 'no parameters'}")
    (mesh,) = meshes
    if mesh.size() & (mesh.size() - 1):
        raise BadInput(
            f"the mesh has {mesh.size()} ranks; the ordered reducer on FSDP2 needs a power of two, "
            "since a rank sends one subtree of the sum. unison.fully_shard(reducer='ordered') "
            "takes any number"
        )
    return mesh
