"""Parameters under torch's own FSDP2, `torch.distributed.fsdp.fully_shard`.

While statistics are collected, tracked tensors are put before FSDP2's full parameters wherever it
lets modules see those, and taken away where it lets them see shards. Autograd brings the full
parameters no gradients, so that FSDP2 sums none. Before and after, FSDP2 is as it was.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from unison.capture import Capture
from unison.capture.capture import PLACING
from unison.capture.names import places
from unison.capture.tracked import Source, Tracked
from unison.errors import BadInput, UnsupportedOperation
from unison.kfac.owners.base import Held
from unison.shard.flat_group import ParameterUse
from unison.shard.fsdp2 import (
    ordered_model_of,
    param_groups_of,
    set_attribute,
    stop_ordered_reduction,
    use_ordered_reduction,
)
from unison.shard.ranks import Axes
from unison.shard.sharded_tensor import fsdp2_modules, is_dtensor, row_ranges, show_shards
from unison.shard.unit import Attributes, Hidden


class FSDP2:
    """The parameters of a module under FSDP2; see `Owner`.

    Raises:
        BadInput: FSDP2 does not hold all trainable parameters, or not on one mesh.
        UnsupportedOperation: Parameters are cut in any other way than by rows.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        show_shards(module)
        self._names: dict[int, str] = {}
        trained: dict[str, Any] = {}
        for place in places(module):
            self._names[id(place.parameter)] = place.name
            if place.parameter.requires_grad:
                trained.setdefault(place.name, place.parameter)
        mesh = _shared_mesh(trained)
        axes = Axes.of(mesh)
        self.ranks, self.num_places = axes.all, axes.shard.size
        self.device = torch.device(mesh.device_type)
        self.held: Sequence[Held] = [
            Held(name, each, tuple(each.shape), _ranges(each, self.num_places))
            for name, each in trained.items()
        ]

    @contextmanager
    def observing(self) -> Iterator[None]:
        """See `Owner`."""
        ordered = [each for each in self.module.modules() if ordered_model_of(each) is not None]
        show_shards(self.module)
        try:
            for each in ordered:  # which would wait for gradients of granules
                stop_ordered_reduction(each)
            with ExitStack() as undo:
                self._groups = [
                    _Group(fsdp, self._names, undo)
                    for _, child in fsdp2_modules(self.module)
                    for fsdp in param_groups_of(child)
                ]
                self.module.__dict__[PLACING] = self._placing
                undo.callback(self.module.__dict__.pop, PLACING)
                yield
        finally:
            show_shards(self.module)
            for each in ordered:
                use_ordered_reduction(each)

    @contextmanager
    def _placing(self, capture: Capture) -> Iterator[None]:
        for group in self._groups:
            group.begin(capture)
        try:
            yield
        finally:
            for group in self._groups:
                group.begin(None)
            show_shards(self.module)  # a pass without a backward pass leaves the root's full


class _Group:
    """One of FSDP2's groups of parameters, followed until `undo` is closed."""

    def __init__(self, fsdp: Any, names: Mapping[int, str], undo: ExitStack) -> None:
        self._fsdp = fsdp
        infos = [each._module_info for each in fsdp.fsdp_params]
        self._params = [
            (each, names[id(info.module._parameters[info.param_name])])
            for each, info in zip(fsdp.fsdp_params, infos, strict=True)
            if info.module._parameters[info.param_name].requires_grad
        ]
        self._attributes = Attributes([[_uses(each._module_info) for each, _ in self._params]])
        self._capture: Capture | None = None
        self._tracked: list[Tracked] = []
        self._hidden: Hidden | None = None
        show_full = fsdp._to_unsharded

        def show_full_and_place() -> None:
            show_full()
            self._place()

        set_attribute(undo, fsdp, "_to_unsharded", show_full_and_place)
        for name in ("_to_sharded", "_to_sharded_post_forward"):
            set_attribute(undo, fsdp, name, _both(self._take_away, getattr(fsdp, name)))
        if hasattr(fsdp, "reduce_scatter_unused_params"):  # torch 2.13: it would sum zeros
            set_attribute(undo, fsdp, "reduce_scatter_unused_params", False)

    def begin(self, capture: Capture | None) -> None:
        """ParameterUse another capture, or none."""
        self._take_away()
        self._capture, self._tracked = capture, []
        self._place()

    def _place(self) -> None:
        capture = self._capture
        if capture is None or self._hidden is not None or not self._fsdp.is_unsharded:
            return
        if not self._tracked:
            # FSDP2 gives the memory of full parameters back and fills it again; the tensors stay.
            self._tracked = [
                Tracked.of(each.unsharded_param, (Source(name, tuple(each._orig_size)),), capture)
                for each, name in self._params
            ]
        self._hidden = self._attributes.shadow([self._tracked])

    def _take_away(self) -> None:
        if self._hidden is not None:
            self._attributes.restore(self._hidden)
            self._hidden = None


def _uses(info: Any) -> list[ParameterUse]:
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [ParameterUse(info.module, info.param_name), *(ParameterUse(*place) for place in shared)]


def _both(first: Callable[[], None], then: Callable[..., None]) -> Callable[..., None]:
    def both(*args: Any) -> None:
        first()
        then(*args)

    return both


def _ranges(parameter: Any, num_places: int) -> tuple[tuple[int, int], ...]:
    rows, *row = parameter.shape
    length = 1
    for size in row:
        length *= size
    return tuple(row_ranges(rows, length, num_places))


def _shared_mesh(trained: Mapping[str, Any]) -> Any:
    meshes: dict[Any, str] = {}
    for name, parameter in trained.items():
        if not is_dtensor(parameter):
            raise BadInput(
                f"parameter {name!r} is trained and not sharded, while others are under FSDP2; "
                "call torch.distributed.fsdp.fully_shard on the whole model too, without "
                "ignored_params"
            )
        mesh, placements = parameter.device_mesh, tuple(parameter.placements)
        is_hybrid = mesh.ndim == 2 and placements[0].is_replicate()
        if not placements[-1].is_shard(0) or not (mesh.ndim == 1 or is_hybrid):
            raise UnsupportedOperation(
                f"parameter {name!r} has the placements {placements} on a mesh of shape "
                f"{tuple(mesh.shape)}; K-FAC under FSDP2 takes parameters that are cut by rows, on "
                "a mesh of one dimension or with copies along a first one"
            )
        meshes.setdefault(mesh, name)
    if len(meshes) != 1:
        found = ", ".join(f"{name!r} on {mesh}" for mesh, name in meshes.items())
        raise BadInput(f"expected all trained parameters on one mesh, found {found}")
    return next(iter(meshes))
