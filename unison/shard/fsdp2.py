"""The ordered reducer on a model under torch's own FSDP2.

[Note: how FSDP2 is made to keep the order] FSDP2 gathers, frees and reduces as ever. What
changes:

* Each module's forward runs granule by granule, on leaves of its own for every granule that share
  the memory of FSDP2's full parameters (`OrderedModule`).
* Their gradients are added in the canonical tree. When FSDP2 asks for a module's gradients, it
  gets this rank's subtree as the gradient it would have accumulated itself.
* FSDP2 then calls `OrderedModel`, which finishes the tree over ranks.
* FSDP2's hooks see the parts of per-granule values (`Parts`).

A gradient under FSDP2 is *one* tensor per parameter and rank, so a rank's granules must form one
subtree. They do when the number of ranks is a power of two and each has as many granules, again a
power of two. Our own engine sends several subtrees and takes any number.

[Note: used flags] A parameter that no rank used must end with no gradient, as it would on one
process. A rank that did not use one sends zeros, so that all ranks exchange the same shapes, and
at the end of the backward pass the ranks add up one flag per parameter. A rank reads them only if
it sent zeros itself.
"""

import itertools
from collections import namedtuple
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from unison.errors import BadInput, UnsupportedOperation
from unison.shard.deal import BatchPlan, checked_plan, current_plan, take_mean_was_used
from unison.shard.each_granule import call_each_granule, granular_pass
from unison.shard.flat_group import Use, per_granule
from unison.shard.granules import (
    PerGranule,
    check_not_bypassed,
    is_in_backward,
    num_granules_of,
    plan_of,
    refuse_whole,
)
from unison.shard.ranks import Ranks, flags_of_all
from unison.shard.reducers import SubtreeSum, aligned_levels, tree_sum
from unison.shard.sharded_tensor import fsdp2_modules, mesh_of, one_mesh, show_shards
from unison.shard.unit import places_of, shadowed, units_of
from unison.torch_internals import canonical_name, is_dtensor

# ------------------------------------------------------------------------------------------------
# What the ordered reducer needs of a model under FSDP2, checked before anything is changed.


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
    mesh = one_mesh(meshes)
    if mesh.size() & (mesh.size() - 1):
        raise BadInput(
            f"the mesh has {mesh.size()} ranks; the ordered reducer on FSDP2 needs a power of two, "
            "since a rank sends one subtree of the sum. unison.fully_shard(reducer='ordered') "
            "takes any number"
        )
    return mesh


# ------------------------------------------------------------------------------------------------
# Per-granule values on their way through FSDP2's hooks.
#
# FSDP2's hooks pass a module's inputs through an `autograd.Function` and put hooks on its outputs.
# Both would meet the shell of a `PerGranule` and miss its parts. FSDP2 looks into tuples, and
# copies named ones element by element, so there the parts travel in one, and each is handled as the
# plain tensor it is.

Parts = namedtuple("Parts", ["tensors"])  # of a `PerGranule`


def _call_with_parts(hook: Callable, module: nn.Module, *values: Any) -> Any:
    """Call FSDP2's hook before or after a forward pass."""
    plan = plan_of(values)  # which says whose random numbers are drawn
    apart = tree_map_only(PerGranule, lambda item: Parts(tuple(item.parts)), values)
    return tree_map_only(
        Parts,
        lambda item: PerGranule.of(item.tensors, plan),
        hook(module, *apart),
        is_leaf=lambda item: isinstance(item, Parts),
    )


def set_granular_forward(undo: ExitStack, module: Any, forward: Callable) -> None:
    """Give an FSDP2 module a forward that takes values per granule, until `undo` is closed."""
    set_attribute(undo, module, "forward", forward)
    state = module._get_fsdp_state()
    for hooks, handle in (
        (module._forward_pre_hooks, state._pre_forward_hook_handle),
        (module._forward_hooks, state._post_forward_hook_handle),
    ):
        undo.callback(hooks.__setitem__, handle.id, hooks[handle.id])
        hooks[handle.id] = partial(_call_with_parts, hooks[handle.id])  # where it stands


def set_attribute(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an object's own attribute until `undo` is closed."""
    if name in owner.__dict__:
        undo.callback(setattr, owner, name, owner.__dict__[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def in_turn(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls one, and then the other with its arguments."""

    def both(*args: Any) -> Any:
        first()
        return then(*args)

    return both


def uses_of(parameter: Any) -> list[Use]:
    """Where modules hold a parameter of FSDP2, by its `FSDPParam`."""
    info = parameter._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


# ------------------------------------------------------------------------------------------------
# One FSDP2 module, computing granule by granule.


class OrderedModule:
    """A module that FSDP2 gathers and reduces as one, its parameters, and their gradients.

    A parameter has one leaf per granule. The leaves share the memory of FSDP2's own full parameter,
    so they are filled and emptied when that is. Gradients reach them, and never the full parameter
    itself, and are added in this rank's subtree.

    Args:
        module: The module.
        paths: The names of modules in the model.
        model: What all modules of the model share.

    Attributes:
        sent: What was summed over ranks last: FSDP2's record of a parameter, whether this rank used
            it, and whether it had a gradient before.
    """

    def __init__(self, module: Any, paths: dict[nn.Module, str], model: "OrderedModel") -> None:
        self.group = next(iter(param_groups_of(module)), None)
        self._parameters: list[Any] = [] if self.group is None else list(self.group.fsdp_params)
        infos = [each._module_info for each in self._parameters]
        names = [f"{paths[info.module]}.{info.param_name}".lstrip(".") for info in infos]
        self._names = [canonical_name(name) for name in names]
        self._name = canonical_name(paths[module]) or "root"
        self._module, self._model = module, model
        self._has_children = len(fsdp2_modules(module)) > 1
        self._places = places_of([[uses_of(each) for each in self._parameters]])
        self._forward = module.forward  # the user's own
        self._reduce = self.group.post_backward if self.group is not None else None
        self._num_calls = 0  # forward passes whose backward pass has not come
        self._leaves: dict[int, list[Tensor]] = {}  # by granule
        self._trees: list[SubtreeSum] = []
        self.sent: list[tuple[Any, bool, bool]] = []

    # --- forward ---------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, granule by granule."""
        num_granules = num_granules_of((args, kwargs))
        is_training = torch.is_grad_enabled() and not is_in_backward()
        if num_granules == 0:
            if is_training:
                refuse_whole(self._name)
            return self._forward(*args, **kwargs)
        self._num_calls += is_training
        if torch.is_grad_enabled():
            tensors = [self._leaves_of(each) for each in self._model.granules(num_granules)]
        else:  # an evaluation; any batch will do
            tensors = [[each.unsharded_param for each in self._parameters]] * num_granules

        def call(index: int, own_args: tuple, own_kwargs: dict[str, Any]) -> Any:
            with shadowed(self._places, [tensors[index]]):
                return self._forward(*own_args, **own_kwargs)

        about = self._name, self._module
        with granular_pass(*about, (args, kwargs), looks_at_writes=False):
            if not self._has_children:
                return call_each_granule(*about, call, num_granules, args, kwargs)
            # One forward per granule would gather every module below once per granule: so it runs
            # once, each of its own operations granule by granule.
            with shadowed(self._places, per_granule([[each] for each in tensors])):
                output = self._forward(*args, **kwargs)
        check_not_bypassed(output, self._name)
        return output

    def _leaves_of(self, granule: int) -> list[Tensor]:
        """What a granule computes with; the same tensors until `begin_pass`."""
        if granule not in self._leaves:
            leaves = self._leaves[granule] = []
            for index, each in enumerate(self._parameters):
                is_trained = each.sharded_param.requires_grad
                leaves.append(nn.Parameter(each.unsharded_param.detach(), is_trained))
                if is_trained:
                    take = partial(self._take_gradient, granule, index)
                    leaves[-1].register_post_accumulate_grad_hook(take)
        return self._leaves[granule]

    # --- backward --------------------------------------------------------------------------------

    def begin_pass(self, batch: tuple[int, int] | None) -> None:
        """Be ready for other granules, and for this rank's granules of a new logical batch."""
        self._num_calls = 0
        self._leaves.clear()
        if batch is not None:
            self._trees = [SubtreeSum(*batch) for _ in self._parameters]

    def _take_gradient(self, granule: int, index: int, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        low, high = self._model.mine
        if gradient is not None and low <= granule < high:  # and not a ghost's
            # In the dtype of the exchange from the first addition on: what a rank has summed before
            # it must not be rounded differently from what others send.
            dtype = self._parameters[index].reduce_dtype or gradient.dtype
            self._trees[index].put(granule, gradient.to(dtype))

    def post_backward(self, *unused: Any) -> None:
        """What FSDP2 calls when a backward pass has left the module, in place of its own.

        Raises:
            UnsupportedOperation: A gradient came past the leaves; naming the parameter.
        """
        for name, parameter in zip(self._names, self._parameters, strict=True):
            full = getattr(parameter, "_unsharded_param", None)  # None before the first pass
            if full is not None and full.grad is not None:
                full.grad = None
                raise UnsupportedOperation(
                    f"{name!r} got a gradient that belongs to no granule: it was used under "
                    "reentrant checkpointing (pass use_reentrant=False to torch.utils.checkpoint), "
                    "through a method that register_fsdp_forward_method made, or outside of forward"
                )
        self._num_calls -= 1
        # A module that was called twice has all its gradients after the second backward pass only.
        if self._num_calls <= 0 and self._model.closes:
            self._hand_over()
        assert self._reduce is not None
        self._reduce()

    def finish_backward(self) -> None:
        """Sum what is left when the whole backward pass is over."""
        if self._model.closes and self._hand_over():
            self._reduce()  # type: ignore[misc]

    def _hand_over(self) -> bool:
        """Give FSDP2 this rank's subtrees as the gradients to sum over ranks, if there are any.

        A granule that did not use a parameter counts as zeros, and so does a rank.
        """
        if not any(tree.seen for tree in self._trees):
            return False
        assert self.group is not None
        if not self.group.reduce_grads:
            raise UnsupportedOperation(
                f"gradient sync of {self._name!r} is off; leave set_requires_gradient_sync(True), "
                "the ordered reducer itself waits for the pass that closes the logical batch"
            )
        if self.group.gradient_divide_factor != 1:
            raise UnsupportedOperation(
                f"gradient_divide_factor of {self._name!r} was set to "
                f"{self.group.gradient_divide_factor} after unison.use_ordered_reduction; the "
                "ordered reducer sums, and unison.batch_mean divides"
            )
        self.sent = []
        for index, (each, tree) in enumerate(zip(self._parameters, self._trees, strict=True)):
            if not each.sharded_param.requires_grad:
                continue
            self.sent.append((each, bool(tree.seen), each.sharded_param.grad is not None))
            full, dtype = each.unsharded_param, each.reduce_dtype
            make_zeros = partial(torch.zeros_like, full, dtype=dtype or full.dtype)
            if tree.seen:
                tree.fill(make_zeros)
            subtree = tree_sum(tree.take())
            each.unsharded_accumulated_grad = make_zeros() if subtree is None else subtree
            self._trees[index] = SubtreeSum(*self._model.mine)
        return True


class OrderedModel:
    """What the FSDP2 modules of one model share: the batch and the end of the backward pass.

    FSDP2 calls it in place of its reduce-scatter: all-to-all, then the canonical tree. The bytes on
    the wire are those of a reduce-scatter. FSDP2 does not call it on one rank, where the subtree is
    the whole tree.

    Attributes:
        modules: The model's FSDP2 modules, parents first; set by whoever attaches them.
        undo: Gives back the model as it was when closed.
        mine: This rank's granules [low, high) of the logical batch.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.modules: list[OrderedModule] = []
        self.undo = ExitStack()
        self.mine = (0, 0)
        self._levels: list[int] = []  # of each rank's subtree: it has 2**level granules
        self._plan: BatchPlan | None = None

    @property
    def closes(self) -> bool:
        """Whether the running pass is the last of the logical batch."""
        return self._plan is not None and self._plan.closes_logical_batch

    def granules(self, num_granules: int) -> Sequence[int]:
        """Global numbers of the granules of the running pass.

        Raises:
            BadInput: If there is no dealt batch of as many granules, or it does not suit FSDP2.
        """
        # A recompute in the backward pass belongs to the batch of the forward pass, whatever the
        # loader has handed out since.
        plan = checked_plan(self._plan if is_in_backward() else current_plan(), num_granules)
        if plan is not self._plan:
            self._levels = one_subtree_per_rank(plan, self._ranks)
            self._plan = plan
            low, high = self.mine = plan.edges[plan.rank], plan.edges[plan.rank + 1]
            is_first = low == high or plan.granule_ids[0] == low
            for module in self.modules:
                module.begin_pass(self.mine if is_first else None)
        return plan.granule_ids

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Make a buffer of its own for every call of FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,  # [n]
        input_tensor: Tensor,  # [ranks * n], one run per owner
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` with this rank's part of the sum."""
        if op != dist.ReduceOp.SUM:
            raise AssertionError(f"expected FSDP2 to ask for a plain sum, found {op}")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        total = tree_sum(zip(self._levels, received.view(group.size(), -1), strict=True))
        assert total is not None
        output_tensor.copy_(total)

    def finish_backward(self) -> None:
        """Sum what is left; FSDP2 calls this at the end of a backward pass, before its own end."""
        take_mean_was_used()  # the sum is never divided, so a batch_mean is always right
        for module in reversed(self.modules):
            module.finish_backward()
        if self.closes:
            self._forget_unused()

    @torch.no_grad()
    def _forget_unused(self) -> None:
        """Leave parameters that no rank used without a gradient; see [Note: used flags]."""
        sent = [each for module in self.modules for each in module.sent]
        for module in self.modules:
            module.sent = []
        if not sent:
            return
        own = [was_used for _, was_used, _ in sent]
        used = flags_of_all(self._ranks, own, sent[0][0].unsharded_param.device)
        for (parameter, _, had_gradient), is_used in zip(sent, used, strict=True):
            if not is_used and not had_gradient:
                parameter.sharded_param.grad = None


def one_subtree_per_rank(plan: BatchPlan, ranks: Ranks) -> list[int]:
    """The level of every rank's one subtree of a batch.

    Raises:
        BadInput: If the batch was dealt to other ranks, or some rank's granules are not one
            subtree.
    """
    size = len(plan.edges) - 1
    if (plan.rank, size) != (ranks.rank, ranks.size):
        raise BadInput(
            f"the batch was dealt to rank {plan.rank} of {size}, but the model lies on rank "
            f"{ranks.rank} of {ranks.size}; pass the model's mesh to unison.deal(loader, mesh=...)"
        )
    levels = [aligned_levels(low, high) for low, high in itertools.pairwise(plan.edges)]
    if size == 1 or plan.num_granules == 0:
        return [0] * size  # nothing to exchange
    if any(len(each) != 1 for each in levels):
        raise BadInput(
            f"a batch of {plan.num_samples} samples in granules of {plan.granule} makes "
            f"{plan.num_granules} granules, which {size} ranks under FSDP2 cannot sum in order: "
            f"each needs 1, 2, 4, 8, ... of them. Make the batch {size} * {plan.granule} * a power "
            "of two, or shard with unison.fully_shard(reducer='ordered'), which takes any batch"
        )
    return [level for (level,) in levels]


def ordered_model_of(module: nn.Module) -> OrderedModel | None:
    """What `use_ordered_reduction` attached to a model, if anything."""
    return module.__dict__.get(ATTRIBUTE)


ATTRIBUTE = "_unison_ordered_model"  # on the root module


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
    ordered = OrderedModule(module, paths, model)
    set_granular_forward(undo, module, ordered.forward)
    # Whichever module's gradient comes first queues the end of the backward pass.
    state = module._get_fsdp_state()
    finish_backward = in_turn(model.finish_backward, state._root_post_backward_final_callback)
    set_attribute(undo, state, "_root_post_backward_final_callback", finish_backward)
    if ordered.group is not None:
        set_attribute(undo, ordered.group, "post_backward", ordered.post_backward)
        set_attribute(undo, ordered.group, "_reduce_scatter_comm", model)
        set_attribute(undo, ordered.group, "gradient_divide_factor", 1.0)
        set_attribute(undo, ordered.group, "force_sum_reduction_for_comms", True)
    return ordered
