"""Parameters under torch's own FSDP2, `torch.distributed.fsdp.fully_shard`.

[Note: FSDP2 without gradients] FSDP2 goes on gathering, prefetching and freeing parameters as in
ordinary training. Where it lets modules see a group's full parameters, tracked tensors are put
before them, and taken away where it lets them see shards again; so they are there in the backward
pass too, for what activation checkpointing computes again. Autograd brings the full parameters no
gradients, so that FSDP2 has none to sum. When the coefficients are known, the clipped sums of one
group after the other are made, and summed over ranks: one reduce-scatter per group, of as many
bytes as FSDP2's own.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from unison.capture import Capture
from unison.capture.capture import PLACING
from unison.capture.names import places
from unison.errors import BadInput, UnsupportedOperation
from unison.names import canonical_name
from unison.privacy.owners.base import MakeSums, Owned, RecordsWhole
from unison.privacy.owners.fsdp2_group import FSDP2Group, rows_of
from unison.privacy.owners.sums import GroupSums, exchange
from unison.shard.deal import BatchPlan
from unison.shard.each_granule import CALLED_BY_GRANULE, call_each_granule
from unison.shard.flat_group import PLAIN
from unison.shard.fsdp2 import (
    after_forward,
    before_forward,
    ordered_model_of,
    param_groups_of,
    set_attribute,
    stop_ordered_reduction,
    use_ordered_reduction,
    wrap_hook,
)
from unison.shard.granules import check_not_bypassed, num_granules_of
from unison.shard.ranks import Axes
from unison.shard.sharded_tensor import fsdp2_modules, is_dtensor, show_shards


class FSDP2(RecordsWhole):
    """The parameters of a module under FSDP2; see `Owner`.

    Args:
        module: The module; FSDP2 holds all its trainable parameters, itself or inside of it.
        is_ordered: Whether sums must not depend on the number of ranks.

    Raises:
        BadInput: FSDP2 does not hold all trainable parameters, or not on one mesh.
        UnsupportedOperation: Parameters are cut in any other way than by rows.
    """

    can_repeat = False
    runs_together = True

    def __init__(self, module: nn.Module, *, is_ordered: bool) -> None:
        if PLACING in module.__dict__:
            raise BadInput("the module is trained privately already; detach() the other engine")
        self.module = module
        show_shards(module)
        ordered = [each for each in module.modules() if ordered_model_of(each) is not None]
        self.is_ordered = is_ordered or bool(ordered)
        axes = Axes.of(_shared_mesh(module))
        self.ranks = axes.all
        self._groups: list[FSDP2Group] = []
        with ExitStack() as undo:  # an error halfway leaves nothing behind
            for each in ordered:  # which would wait for gradients
                stop_ordered_reduction(each)
                undo.callback(use_ordered_reduction, each)
            names = {id(place.parameter): place.name for place in places(module)}
            for path, child in fsdp2_modules(module):
                groups = self._take_groups(child, names, axes)
                self._groups += groups
                for group in groups:
                    group.attach(undo)
                if self.is_ordered:
                    _run_in_granules(canonical_name(path) or "root", child, groups, undo)
            module.__dict__[PLACING] = self._placing
            undo.callback(module.__dict__.pop, PLACING)
            self._undo = undo.pop_all()
        # The backward pass reaches the last modules first, and so did their gradients before.
        self._groups.reverse()
        self.owned: Sequence[Owned] = [row for group in self._groups for row in group.rows]

    def _take_groups(self, child: Any, names: Mapping[int, str], axes: Axes) -> list[FSDP2Group]:
        """The groups of one of FSDP2's modules that have trainable parameters."""
        has_children = _has_children(child)
        found = []
        for fsdp in param_groups_of(child):
            if any(group.fsdp is fsdp for group in self._groups):
                continue  # of several modules that were given to fully_shard at once
            rows = list(rows_of(fsdp, names, axes.shard))
            if rows:
                found.append(FSDP2Group(fsdp, rows, axes, has_children=has_children))
        return found

    @contextmanager
    def _placing(self, capture: Capture) -> Iterator[None]:
        try:
            with self.installed({PLAIN: capture}):
                yield
        except BaseException:
            _reset(self.module)
            raise
        show_shards(self.module)  # a pass without a backward pass leaves the root's full

    @contextmanager
    def installed(self, captures: Mapping[int, Capture]) -> Iterator[None]:
        """Let FSDP2's modules compute with tracked parameters; see `Owner`."""
        before = [group.begin(captures) for group in self._groups]
        try:
            yield
        finally:
            for group, others in zip(self._groups, before, strict=True):
                group.begin(others)

    def add(self, make_sums: MakeSums, plan: BatchPlan, granules: Sequence[int]) -> None:
        """Add the clipped sums of a pass; see `Owner`."""
        for group in self._groups:
            group.refuse_gradients()
        by_sums = {id(group.sums): group for group in self._groups}

        def take_all(group: GroupSums) -> None:
            ours = by_sums[id(group)]
            for granule in granules:
                lines = ours.lines(make_sums(granule, ours.names), make_sums.dtype)
                group.take(granule, [lines], make_sums.dtype)

        every = [group.sums for group in self._groups]
        exchange(every, take_all, is_last=plan.closes_logical_batch)

    def totals(self) -> Iterator[tuple[Owned, Tensor]]:
        """Hand out this rank's rows of the sums; see `Owner`."""
        for group in self._groups:
            yield from group.totals()

    def drop(self) -> None:
        """Forget the sums; see `Owner`."""
        for group in self._groups:
            group.sums.drop()

    def detach(self) -> None:
        """Leave the module as it was."""
        self._undo.close()


def _shared_mesh(module: nn.Module) -> Any:
    """The mesh of all parameters that FSDP2 holds.

    Raises:
        BadInput: A trainable parameter is outside, or meshes differ.
        UnsupportedOperation: Parameters are cut in any other way than by rows.
    """
    held = {
        id(info.module._parameters[info.param_name]): each
        for _, child in fsdp2_modules(module)
        for fsdp in param_groups_of(child)
        for each in fsdp.fsdp_params
        if (info := each._module_info)
    }
    meshes: dict[Any, str] = {}
    for place in places(module):
        if not place.parameter.requires_grad:
            continue
        if id(place.parameter) not in held or not is_dtensor(place.parameter):
            raise BadInput(
                f"parameter {place.name!r} is trained and not sharded, while others are under "
                "FSDP2; call torch.distributed.fsdp.fully_shard on the whole model too, without "
                "ignored_params"
            )
        _check_rows(place.name, place.parameter, held[id(place.parameter)])
        meshes.setdefault(place.parameter.device_mesh, place.name)  # type: ignore[attr-defined]
    if len(meshes) != 1:
        found = ", ".join(f"{name!r} on {mesh}" for mesh, name in meshes.items())
        raise BadInput(f"expected all trained parameters on one mesh, found {found}")
    return next(iter(meshes))


def _check_rows(name: str, parameter: Any, fsdp: Any) -> None:
    mesh, placements = parameter.device_mesh, tuple(parameter.placements)
    is_by_rows = placements[-1].is_shard(0) and not fsdp.is_dtensor
    is_hybrid = mesh.ndim == 2 and placements[0].is_replicate()
    if not is_by_rows or not (mesh.ndim == 1 or is_hybrid):
        raise UnsupportedOperation(
            f"parameter {name!r} has the placements {placements} on a mesh of shape "
            f"{tuple(mesh.shape)}; private training under FSDP2 takes parameters that are cut by "
            "rows, on a mesh of one dimension or with copies along a first one, and not cut for "
            "tensor parallelism too"
        )
    if hasattr(parameter._local_tensor, "fsdp_pre_all_gather"):
        raise UnsupportedOperation(
            f"{name} gathers as a {type(parameter._local_tensor).__name__}; only plain tensors "
            "can be trained privately"
        )


def _has_children(module: Any) -> bool:
    """Whether there are other FSDP2 modules inside of one."""
    return len(fsdp2_modules(module)) > 1


def _run_in_granules(name: str, module: Any, groups: Sequence[FSDP2Group], undo: ExitStack) -> None:
    """Let a module take values per granule, and FSDP2's hooks see their parts.

    As in `unison.use_ordered_reduction`: a module with others inside runs each operation granule by
    granule, any other one its whole forward.
    """
    state = module._get_fsdp_state()
    if len(state._modules) > 1:
        raise UnsupportedOperation(
            f"{name} is one of several modules in one fully_shard call, which cannot be run in "
            "granules; call fully_shard once per module"
        )
    own, has_children = module.forward, _has_children(module)

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        num_granules, run = num_granules_of((args, kwargs)), getattr(forward, CALLED_BY_GRANULE)
        if num_granules == 0:
            return run(*args, **kwargs)
        if has_children:
            output = run(*args, **kwargs)
            check_not_bypassed(output, name)
            return output

        def call(index: int, own_args: tuple, own_kwargs: dict[str, Any]) -> Any:
            with ExitStack() as stack:
                for group in groups:
                    stack.enter_context(group.of_granule(index))
                return run(*own_args, **own_kwargs)

        return call_each_granule(name, module, call, num_granules, args, kwargs)

    setattr(forward, CALLED_BY_GRANULE, own)  # or what is compiled of it
    set_attribute(undo, module, "forward", forward)
    handle = state._pre_forward_hook_handle
    wrap_hook(undo, module._forward_pre_hooks, handle.id, wrapper=before_forward)
    wrap_hook(undo, module._forward_hooks, state._post_forward_hook_handle.id, after_forward)


def _reset(module: nn.Module) -> None:
    """Let FSDP2 forget a pass that an exception has ended."""
    for _, child in fsdp2_modules(module):
        if child._get_fsdp_state()._is_root and hasattr(child, "reset_iter_state"):
            child.reset_iter_state()
