"""`use_ordered_reduction` and its inverse."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from torch import nn

from unison.errors import BadInput
from unison.names import canonical_name
from unison.shard.dtensors import fsdp2_modules
from unison.shard.fsdp2.checks import check_modules, check_root, param_groups_of, shared_mesh
from unison.shard.fsdp2.exchange import OrderedReduceScatter
from unison.shard.fsdp2.model import ATTRIBUTE, OrderedModel, ordered_model_of
from unison.shard.fsdp2.module import OrderedModule
from unison.shard.fsdp2.parameter import OrderedParameter
from unison.shard.fsdp2.parts import after_forward, before_forward
from unison.shard.ranks import Ranks

M = TypeVar("M", bound=nn.Module)


def use_ordered_reduction(model: M) -> M:
    """Make a model under torch's own FSDP2 train with the same bits on any number of ranks.

    Call it once on the root, after `torch.distributed.fsdp.fully_shard` on the blocks and the root,
    and train on batches from `unison.deal(loader, granule=...)` with a loss from
    `unison.batch_mean`. Gradients are summed over ranks and not divided. The bits are those of
    `unison.fully_shard(reducer="ordered", gradient_divisor=1)`.

    Args:
        model: The root module, on a one-dimensional mesh of 1, 2, 4, 8, ... ranks.

    Returns:
        The same module. `stop_ordered_reduction` undoes it.

    Guarantees:
        Losses, gradients, `unison.clip_grad_norm_` and the parameters after an elementwise
        optimizer's step have the same bits at 1, 2, 4, 8, ... ranks, with equal granules, threads
        and fingerprints. `fused=True` is an exception: FSDP2 cuts parameters where vectors do not
        end, and fused kernels round their tails differently.

    Raises:
        BadInput: If the model is not under FSDP2, is attached already, or its mesh does not suit.
        UnsupportedOperation: If a setting of FSDP2 would break the order; nothing is changed then.
    """
    check_root(model)
    if ordered_model_of(model) is not None:
        raise BadInput(
            f"{type(model).__name__} uses ordered reduction already; call use_ordered_reduction "
            "once"
        )
    check_modules(model)
    ordered = OrderedModel(Ranks.of(shared_mesh(model)))
    paths = {module: path for path, module in model.named_modules()}
    with ExitStack() as undo:  # an error halfway leaves nothing behind
        for _, module in fsdp2_modules(model):
            ordered.modules.append(_attach(module, paths, ordered, undo))
        model.__dict__[ATTRIBUTE] = ordered
        undo.callback(model.__dict__.pop, ATTRIBUTE)
        ordered.undo = undo.pop_all()
    return model


def stop_ordered_reduction(model: M) -> M:
    """Give back a model as it was before `use_ordered_reduction`.

    Raises:
        BadInput: If the model does not use ordered reduction.
    """
    ordered = ordered_model_of(model)
    if ordered is None:
        raise BadInput(f"{type(model).__name__} does not use ordered reduction")
    ordered.undo.close()
    return model


def _attach(
    module: Any, paths: dict[nn.Module, str], model: OrderedModel, undo: ExitStack
) -> OrderedModule:
    """Let one FSDP2 module compute granule by granule and sum in order."""
    state, group = module._get_fsdp_state(), next(iter(param_groups_of(module)), None)
    parameters = []
    for each in [] if group is None else group.fsdp_params:
        place = each._module_info
        name = canonical_name(f"{paths[place.module]}.{place.param_name}".lstrip("."))
        parameters.append(OrderedParameter(each, name))
    ordered = OrderedModule(
        module,
        canonical_name(paths[module]) or "root",
        parameters=parameters,
        group=group,
        has_children=len(fsdp2_modules(module)) > 1,
        batch=model,
    )
    set_attribute(undo, module, "forward", ordered.forward)
    wrap_hook(
        undo, module._forward_pre_hooks, state._pre_forward_hook_handle.id, wrapper=before_forward
    )
    wrap_hook(
        undo, module._forward_hooks, state._post_forward_hook_handle.id, wrapper=after_forward
    )
    # Whichever module's gradient comes first queues the end of the backward pass.
    end_backward = state._root_post_backward_final_callback

    def finish_backward() -> None:
        model.finish_backward()
        end_backward()

    set_attribute(undo, state, "_root_post_backward_final_callback", finish_backward)
    if group is not None:
        set_attribute(undo, group, "post_backward", ordered.post_backward)
        set_attribute(undo, group, "_reduce_scatter_comm", OrderedReduceScatter(model.levels))
        set_attribute(undo, group, "gradient_divide_factor", 1.0)
        set_attribute(undo, group, "force_sum_reduction_for_comms", True)
    return ordered


def set_attribute(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an object's own attribute until `undo` is closed."""
    if name in owner.__dict__:
        undo.callback(setattr, owner, name, owner.__dict__[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def wrap_hook(undo: ExitStack, hooks: dict, key: int, wrapper: Callable) -> None:
    """Wrap a module's hook where it stands among others, until `undo` is closed."""
    undo.callback(hooks.__setitem__, key, hooks[key])
    hooks[key] = wrapper(hooks[key])
