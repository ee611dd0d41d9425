"""Parameters under torch's own FSDP2, `torch.distributed.fsdp.fully_shard`.

[Note: FSDP2 without gradients] FSDP2 goes on gathering, prefetching and freeing parameters as in
ordinary training. Where it lets modules see a group's full parameters, tracked tensors are put
before them, and taken away where it lets them see shards again; so they are there in the backward
pass too, for what activation checkpointing computes again. Autograd brings the full parameters no
gradients, so that FSDP2 has none to sum. When the coefficients are known, the clipped sums of one
group after the other are made, and summed over ranks: one reduce-scatter per group, of as many
bytes as FSDP2's own.

[Note: lines] FSDP2 cuts every parameter into runs of rows (of dimension 0), one per rank, of equal
length but for the last ones, which may be short or empty. Rows of a contiguous tensor are a run of
its elements. The sums of a group are laid out as FSDP2 lays gradients out: one line per rank, with
its rows of each parameter, padded to the length of the first rank's. `GroupSums` makes them.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from unison.capture import Capture
from unison.capture.capture import PLACING
from unison.capture.tracked import Tracked
from unison.errors import BadInput, UnsupportedOperation
from unison.parallel.adapter import (
    GroupSums,
    MakeSums,
    ParallelAdapter,
    ShardedParam,
    capture_of,
    tracked,
    trained_params,
)
from unison.shard.deal import BatchPlan
from unison.shard.each_granule import CALLED_BY_GRANULE, call_each_granule
from unison.shard.flat_group import PLAIN, RECOMPUTE
from unison.shard.fsdp2 import (
    in_turn,
    ordered_model_of,
    param_groups_of,
    set_attribute,
    set_granular_forward,
    stop_ordered_reduction,
    use_ordered_reduction,
    uses_of,
)
from unison.shard.granules import PerGranule, check_not_bypassed, num_granules_of
from unison.shard.ranks import Ranks, compare_ways
from unison.shard.sharded_tensor import element_ranges, fsdp2_modules, one_mesh, show_shards
from unison.shard.unit import Hidden, places_of, restore, shadow, shadowed
from unison.torch_internals import canonical_name, is_dtensor


class FSDP2(ParallelAdapter):
    """The parameters of a module under FSDP2, which holds all that are trained.

    Where values decide where rows lie, ranks compare where they are before FSDP2 gathers.

    Raises:
        BadInput: FSDP2 does not hold all trainable parameters, or not on one mesh.
        UnsupportedOperation: Parameters are cut in any other way than by rows.
    """

    can_repeat = False
    runs_together = True

    def _find_params(self) -> None:
        module = self.module
        show_shards(module)
        self._ordered = [each for each in module.modules() if ordered_model_of(each) is not None]
        self.is_ordered |= bool(self._ordered)
        trained = trained_params(module)
        mesh = _shared_mesh(trained, [child for _, child in fsdp2_modules(module)])
        ranks = self.ranks = self.everyone = Ranks.of(mesh)
        self.num_places = ranks.shard.size
        self.device = torch.device(mesh.device_type)
        self.params = []
        for name, each in trained.items():
            ranges = element_ranges(each.shape, ranks.shard.size)
            own = ShardedParam(name, each, tuple(each.shape), ranges, ranks.shard.rank)
            self.params.append(own)
        by_id = {id(each.parameter): each for each in self.params}
        # Of several modules that were given to fully_shard at once, all have the same group.
        self._of_module: list[tuple[str, Any, list[FSDP2Group]]] = []
        self._gathered: list[tuple[str, Any]] = []  # what is not trained, too
        seen: list[Any] = []
        for path, child in fsdp2_modules(module):
            new = [each for each in param_groups_of(child) if each not in seen]
            seen += new
            has_children = len(fsdp2_modules(child)) > 1
            groups = [FSDP2Group(each, by_id, ranks, has_children=has_children) for each in new]
            named = canonical_name(path) or "root", child
            self._gathered += [(named[0], each) for each in new]
            self._of_module.append((*named, [each for each in groups if each.rows]))
        # The backward pass reaches the last modules first, and so did their gradients before.
        self._groups = [each for _, _, groups in self._of_module for each in groups][::-1]
        self._sums = [each.sums for each in self._groups]
        self._compares_ways = False  # whether values may lead ranks through other groups

    def attach(self) -> None:
        """See `ParallelAdapter`.

        Raises:
            BadInput: Somebody else has.
            UnsupportedOperation: A module cannot be run in granules.
        """
        if PLACING in self.module.__dict__:
            raise BadInput("the module is trained privately already; detach() the other engine")
        self._stop_ordered(self._undo)
        for name, child, groups in self._of_module:
            for group in groups:
                end = in_turn(functools.partial(self._end_group, group), group.fsdp.post_backward)
                set_attribute(self._undo, group.fsdp, "post_backward", end)
            if self.is_ordered:
                _run_in_granules(name, child, groups, self._undo)
        self._follow(self._undo)

    def _end_group(self, group: "FSDP2Group") -> None:
        group.refuse_gradients()
        self._add_complete(group.sums)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """See `ParallelAdapter`; before and after, FSDP2 is as it was."""
        with ExitStack() as undo:
            self._stop_ordered(undo)
            show_shards(self.module)
            undo.callback(show_shards, self.module)
            self._follow(undo)
            yield

    def _follow(self, undo: ExitStack) -> None:
        """Follow where FSDP2 is, and let captures be installed, until `undo` is closed."""
        for group in self._groups:
            group.follow(undo)
        for name, fsdp in self._gathered:
            for method, what in (
                ("pre_forward", "forward pass"),
                ("pre_backward", "backward pass"),
            ):
                before = functools.partial(self._compare_ways, what, name, fsdp)
                set_attribute(undo, fsdp, method, in_turn(before, getattr(fsdp, method)))
        end = functools.partial(self._compare_ways, "backward end")
        for _, child in fsdp2_modules(self.module):
            state, name = child._get_fsdp_state(), "_root_post_backward_final_callback"
            set_attribute(undo, state, name, in_turn(end, getattr(state, name)))
        hook = self.module.register_forward_hook(lambda *_: self._compare_ways("forward end"))
        undo.callback(hook.remove)
        self._let_captures_place(undo)

    def _compare_ways(self, what: str, name: str | None = None, fsdp: Any = None) -> None:
        """See `compare_ways`; where values may lead ranks through other groups."""
        # FSDP2 comes by for each output, and gathers for the first.
        is_under_way = what == "backward pass" and fsdp._training_state.name == "PRE_BACKWARD"
        if self._compares_ways and not is_under_way:
            names = [each for each, _ in self._gathered]
            compare_ways(self.everyone, what, names, name, self.device)

    def _stop_ordered(self, undo: ExitStack) -> None:
        for each in self._ordered:  # which would wait for gradients
            stop_ordered_reduction(each)
            undo.callback(use_ordered_reduction, each)

    @contextmanager
    def _placing(self, capture: Capture) -> Iterator[None]:
        try:
            with self.installed({PLAIN: capture}):
                yield
        except BaseException:
            for _, child in fsdp2_modules(self.module):  # let FSDP2 forget the pass
                if child._get_fsdp_state()._is_root and hasattr(child, "reset_iter_state"):
                    child.reset_iter_state()
            raise
        show_shards(self.module)  # a pass without a backward pass leaves the root's full

    @contextmanager
    def installed(self, captures: Mapping[int, Capture]) -> Iterator[None]:
        """Let FSDP2's modules compute with tracked parameters; see `ParallelAdapter`."""
        self._compares_ways = any(
            each.axes.is_traced or each.is_learning for each in captures.values()
        )
        before = [group.begin(captures) for group in self._groups]
        try:
            yield
        finally:
            for group, others in zip(self._groups, before, strict=True):
                group.begin(others)

    def add(
        self, make_sums: MakeSums, plan: BatchPlan, granules: Sequence[int], dtype: torch.dtype
    ) -> None:
        """See `ParallelAdapter`."""
        for group in self._groups:
            group.refuse_gradients()
        super().add(make_sums, plan, granules, dtype)


class FSDP2Group:
    """One of FSDP2's groups of parameters: what its modules see of them.

    Args:
        fsdp: The `FSDPParamGroup`.
        params: What is trained, by the parameter's id.
        ranks: Everyone.
        has_children: Whether there are FSDP2 modules inside of the group's module.

    Attributes:
        rows: Its trainable parameters, with FSDP2's record of each (an `FSDPParam`).
    """

    def __init__(
        self, fsdp: Any, params: Mapping[int, ShardedParam], ranks: Ranks, *, has_children: bool
    ) -> None:
        self.fsdp = fsdp
        infos = [(each, each._module_info) for each in fsdp.fsdp_params]
        held = [(info.module._parameters[info.param_name], each) for each, info in infos]
        self.rows = [(params[id(own)], each) for own, each in held if id(own) in params]
        self.sums = GroupSums([each for each, _ in self.rows], ranks, None, fsdp.device)
        self._has_children = has_children
        self._places = places_of([[uses_of(each) for _, each in self.rows]])
        self._captures: Mapping[int, Capture] = {}  # of the pass under way
        self._tracked: dict[int, list[Tracked]] = {}  # by granule
        self._hidden: Hidden | None = None  # while tracked tensors are in place

    def follow(self, undo: ExitStack) -> None:
        """Follow what FSDP2 lets its modules see, until `undo` is closed."""
        fsdp = self.fsdp
        set_attribute(undo, fsdp, "_to_unsharded", in_turn(fsdp._to_unsharded, self._place))
        for name in ("_to_sharded", "_to_sharded_post_forward"):
            set_attribute(undo, fsdp, name, in_turn(self._take_away, getattr(fsdp, name)))
        if hasattr(fsdp, "reduce_scatter_unused_params"):  # torch 2.13: it would sum zeros
            set_attribute(undo, fsdp, "reduce_scatter_unused_params", False)

    def begin(self, captures: Mapping[int, Capture]) -> Mapping[int, Capture]:
        """Use other captures; returns those before."""
        self._take_away()
        before, self._captures, self._tracked = self._captures, captures, {}
        self._place()
        return before

    def _place(self) -> None:
        """Let modules see tracked parameters, if there are full ones and a capture."""
        if self._captures and self._hidden is None and self.fsdp.is_unsharded:
            self._hidden = shadow(self._places, [self._seen()])

    def _take_away(self) -> None:
        """Let modules see what FSDP2 shows them."""
        if self._hidden is not None:
            restore(self._hidden)
            self._hidden = None

    def _seen(self) -> Sequence[Tensor]:
        if PLAIN in self._captures:
            return self._of(PLAIN)
        if self._has_children:
            granules = [self._of(granule) for granule in self._captures]
            return [PerGranule.of(each) for each in zip(*granules, strict=True)]
        # Modules without others inside run granule by granule and see `of_granule`; this is for
        # what checkpointing computes again inside of them.
        return self._of(RECOMPUTE)

    def of_granule(self, index: int) -> AbstractContextManager[None]:
        """Let modules see what one granule of the batch computes with."""
        if not self._captures or PLAIN in self._captures:
            return nullcontext()
        return shadowed(self._places, [self._of(list(self._captures)[index])])

    def _of(self, granule: int) -> list[Tracked]:
        if granule not in self._tracked:
            capture = capture_of(self._captures, granule)
            # FSDP2 gives the memory of full parameters back and fills it again; the tensors stay.
            self._tracked[granule] = [
                tracked(each.name, fsdp.unsharded_param, capture) for each, fsdp in self.rows
            ]
        return self._tracked[granule]

    def refuse_gradients(self) -> None:
        """Refuse gradients that autograd brought.

        Raises:
            UnsupportedOperation: Naming the parameter.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for index, (each, fsdp) in enumerate(self.rows):
                full = getattr(fsdp, "_unsharded_param", None)  # None before the first pass
                seen = [full, *(each[index] for each in self._tracked.values())]
                reached = [tensor for tensor in seen if tensor is not None]
                if any(tensor.grad is not None for tensor in reached):
                    for tensor in reached:
                        tensor.grad = None
                    raise UnsupportedOperation(
                        f"a gradient reached {each.name!r} itself, where it would be neither "
                        "clipped nor noised. It came from a pass in evaluation mode, from a custom "
                        "autograd.Function, or from code that took the parameter from "
                        "parameters(), state_dict() or a list of its own. Train in training mode, "
                        "and use torch functions on the module's attribute (self.layer.weight)"
                    )


# --- what is taken --------------------------------------------------------------------------------


def _shared_mesh(trained: Mapping[str, Any], modules: Sequence[Any]) -> Any:
    """The mesh of all parameters that FSDP2 holds.

    Raises:
        BadInput: A trainable parameter is outside, or meshes differ.
        UnsupportedOperation: Parameters are cut in any other way than by rows.
    """
    groups = [group for module in modules for group in param_groups_of(module)]
    infos = [(each, each._module_info) for group in groups for each in group.fsdp_params]
    held = {id(info.module._parameters[info.param_name]): each for each, info in infos}
    meshes: dict[Any, str] = {}
    for name, parameter in trained.items():
        if id(parameter) not in held or not is_dtensor(parameter):
            raise BadInput(
                f"parameter {name!r} is trained and not sharded, while others are under FSDP2; "
                "call torch.distributed.fsdp.fully_shard on the whole model too, without "
                "ignored_params"
            )
        _check_rows(name, parameter, held[id(parameter)])
        meshes.setdefault(parameter.device_mesh, name)
    return one_mesh(meshes)


def _check_rows(name: str, parameter: Any, fsdp: Any) -> None:
    mesh, placements = parameter.device_mesh, tuple(parameter.placements)
    is_by_rows = placements[-1].is_shard(0) and not fsdp.is_dtensor
    is_hybrid = mesh.ndim == 2 and placements[0].is_replicate()
    if not is_by_rows or not (mesh.ndim == 1 or is_hybrid):
        raise UnsupportedOperation(
            f"parameter {name!r} has the placements {placements} on a mesh of shape "
            f"{tuple(mesh.shape)}; private training and K-FAC under FSDP2 take parameters that are "
            "cut by rows, on a mesh of one dimension or with copies along a first one, and not cut "
            "for tensor parallelism too"
        )
    if hasattr(parameter._local_tensor, "fsdp_pre_all_gather"):
        raise UnsupportedOperation(
            f"{name} gathers as a {type(parameter._local_tensor).__name__}; only plain tensors "
            "can be trained privately or with K-FAC"
        )


# --- granules -------------------------------------------------------------------------------------


def _run_in_granules(name: str, module: Any, groups: Sequence[FSDP2Group], undo: ExitStack) -> None:
    """Let a module take values per granule, and FSDP2's hooks see their parts.

    As in `unison.use_ordered_reduction`: a module with others inside runs each operation granule by
    granule, any other one its whole forward.
    """
    if len(module._get_fsdp_state()._modules) > 1:
        raise UnsupportedOperation(
            f"{name} is one of several modules in one fully_shard call, which cannot be run in "
            "granules; call fully_shard once per module"
        )
    own, has_children = module.forward, len(fsdp2_modules(module)) > 1

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
    set_granular_forward(undo, module, forward)
