"""Parameters of a module that `torch.distributed.tensor.parallel.parallelize_module` has cut.

Ranks stand on two axes. Along the *tensor* axis they hold the parts of one copy of the module, get
the same rows, and run every operation together. Along the *data* axis they hold the same parts and
get other rows. A mesh of one axis has no data axis: one copy of the module, one group of ranks.

[Note: whose squares] Each rank records the uses of its parts (see [Note: records of parts] in
capture/parts.py). A sample's squared norm is the sum of squares over the parts of parameters that
are *cut* along the tensor axis; those that are *replicated* there, norm gains or the bias of a
row-parallel layer, are recorded on every rank and count once. Squares never cross the data axis,
where they belong to other samples. They are gathered and added in one order, so that all ranks of
a tensor group come to the same coefficients, to the bit.

[Note: replicas stay equal] The sum of a replicated parameter is the first tensor rank's on all of
them, and so is its norm: what is added is what was bounded, whatever other ranks have computed, and
kernels that round differently in two runs cannot drive copies apart. Noise depends on the element
alone.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unison.capture import Capture
from unison.capture.parts import local, span_of
from unison.errors import BadInput, UnsupportedOperation
from unison.parallel.adapter import (
    MakeSums,
    ParallelAdapter,
    ShardedParam,
    are_equal,
    capture_of,
    in_buckets,
    trained_params,
)
from unison.rng import Box
from unison.shard.deal import BatchPlan
from unison.shard.each_granule import call_each_granule
from unison.shard.flat_group import PLAIN, RECOMPUTE
from unison.shard.fsdp2 import set_attribute
from unison.shard.granules import num_granules_of
from unison.shard.ranks import Ranks
from unison.shard.sharded_tensor import one_mesh
from unison.torch_internals import is_dtensor, refuse_compiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

NUM_CHECKED = 8  # passes in which replicas are compared: whether they are some is the model's doing
# What people call axes along which ranks do not hold other samples.
NO_DATA_AXES = {"cp", "context", "sp", "sequence", "seq", "pp", "pipeline", "pipe", "ep", "expert"}
LARGEST_DIFFERENCE = 1e-3  # of a parameter's squares between replicas; kernels round by less
LARGEST_ROUNDING = 1e-9  # of all squares of a sample: what is left of gradients that cancel


T = TypeVar("T")


class TensorParallel(ParallelAdapter):
    """A module whose parameters are cut along a tensor axis.

    Args:
        module: The module; `parallelize_module` has made it what it is. The other axis of the
            mesh, if there is one, is the data axis.
        is_ordered: Whether sums must not depend on the number of ranks on the data axis. The number
            on the tensor axis is part of the mechanism: it decides the shapes that are computed
            with, and so the bits.

    Raises:
        BadInput: The mesh leaves ranks out.
        UnsupportedOperation: Parameters lie on the ranks in a way that is not known.
    """

    runs_together = True
    computes_with_dtensors = True
    why_uncompiled: str | None = (
        "what parallelize_module has cut computes with distributed tensors, whose parts no rule "
        "takes while a graph is traced"
    )

    def _find_params(self) -> None:
        module = self.module
        refuse_compiled(module.named_modules())
        self.everyone, self.ranks, self._tensor = _axes(_shared_mesh(module))
        self.params = [_part(name, each) for name, each in trained_params(module).items()]
        self.device = self.params[0].parameter.device
        self._is_cut = {each.name: each.is_part for each in self.params}
        cut = [each for each in self.params if each.is_part]
        self._whole = [each for each in self.params if not each.is_part]
        self._of_cut = in_buckets(cut, self.ranks)
        self._sums = self._of_cut + in_buckets(self._whole, self.ranks)
        self._num_checked = 0
        self._captures: Mapping[int, Capture] | None = None  # of the granules of a pass under way

    def attach(self) -> None:
        """See `ParallelAdapter`.

        Raises:
            BadInput: Ranks that should hold the same values do not.
        """
        # Parts along the data axis, and replicated parameters along the tensor axis.
        found = [not are_equal(self.ranks, self.params), not are_equal(self._tensor, self._whole)]
        flags = torch.tensor(found, device=self.device).long()
        self.everyone.sum_(flags)  # all ranks raise, or none
        for axis, num_ranks in zip(("data", "tensor"), flags.tolist(), strict=True):
            if num_ranks:
                raise BadInput(
                    f"ranks along the {axis} axis hold different values of the same parameters; "
                    "build the module from one seed on every rank before parallelize_module, or "
                    "broadcast it"
                )
        if self.is_ordered:
            set_attribute(self._undo, self.module, "forward", self._granule_by_granule())

    @contextmanager
    def installed(self, captures: Mapping[int, Capture]) -> Iterator[None]:
        """Put tracked parameters in place; see `ParallelAdapter`."""
        if list(captures) == [PLAIN]:
            with captures[PLAIN].installed():
                yield
            return
        self._captures = captures
        try:
            # Granules put their own in place; these are for what checkpointing computes again.
            with capture_of(captures, RECOMPUTE).installed():
                yield
        finally:
            self._captures = None

    def _granule_by_granule(self) -> Any:
        """The module's forward, run once per granule where there are some.

        Distributed tensors do not go through values that are one tensor per granule; the fallback
        that is always right does not need them to.
        """
        run = self.module.forward

        @functools.wraps(run)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if num_granules_of((args, kwargs)) == 0:
                return run(*args, **kwargs)
            captures = list((self._captures or {}).values())
            if not captures:
                raise BadInput(
                    "a batch of the private loader, cut into granules, outside of training; "
                    "evaluate with a loader of your own"
                )

            def call(index: int, own_args: tuple, own_kwargs: dict[str, Any]) -> Any:
                with captures[index].installed():
                    return run(*own_args, **own_kwargs)

            name = type(self.module).__name__
            return call_each_granule(name, self.module, call, len(captures), args, kwargs)

        return forward

    def agreed(self, value: T) -> T:
        """The first tensor rank's value: what is planned for its parts, which are the largest."""
        return self._tensor.broadcast_object(value)

    def whole_norms(self, norms: Mapping[str, T]) -> Mapping[str, T]:
        """The norms of samples over all parts, replicated ones once: see [Note: whose squares].

        Guarantees:
            The same bits on every rank of a tensor group. An upper bound stays one, up to the
            rounding of sums that coefficients pay for.
        """
        if not norms or self._tensor.size == 1:
            return norms
        own: Any = norms.values()
        mine = torch.stack([torch.stack([each.squared, each.upper]) for each in own])
        every = mine.new_empty(self._tensor.size * mine.numel())
        self._tensor.gather(every, mine.view(-1)).wait()
        every = every.view(self._tensor.size, *mine.shape)  # [ranks, parameters, 2, rows]
        self._check_replicas(list(norms), every)
        added = functools.reduce(torch.add, every)
        is_cut = torch.tensor([self._is_cut[name] for name in norms], device=mine.device)
        total = torch.where(is_cut[:, None, None], added, every[0])
        return {
            name: type(each)(*both) for (name, each), both in zip(norms.items(), total, strict=True)
        }

    def _check_replicas(self, names: list[str], every: Tensor) -> None:
        if self._num_checked == NUM_CHECKED:
            return
        self._num_checked += 1
        squares = every[:, :, 0]  # [ranks, parameters, rows]
        rounding = LARGEST_ROUNDING * squares.sum(dim=1).amax(dim=0)  # [rows]
        allowed = LARGEST_DIFFERENCE * squares.amax(dim=0) + rounding  # [parameters, rows]
        differs = (squares - squares[0]).abs() > allowed
        for name, is_other in zip(names, differs.any(dim=2).any(dim=0).tolist(), strict=True):
            if is_other and not self._is_cut[name]:
                raise UnsupportedOperation(
                    f"every rank of the tensor axis holds all of {name}, and yet its samples' "
                    "gradients differ between them: it is used on activations that are cut, by "
                    "heads, columns or tokens, and each rank sees a share of its gradient. Tell "
                    "torch so in the parallel plan, as SequenceParallel(sequence_dim=...) does, or "
                    "bring its module's inputs together with PrepareModuleInput"
                )

    def add(
        self, make_sums: MakeSums, plan: BatchPlan, granules: Sequence[int], dtype: torch.dtype
    ) -> None:
        """See `ParallelAdapter`."""
        if plan.closes_logical_batch:
            # One rank writes the ledger. Those beside it on the tensor axis wait for it here, and
            # all others for one of them in the exchange.
            self._tensor.sum_(torch.zeros(1, device=self.device))
        super().add(make_sums, plan, granules, dtype)

    def totals(self) -> Iterator[tuple[ShardedParam, Tensor]]:
        """Hand out the sums of this rank's parts: see [Note: replicas stay equal]."""
        for group in self._sums:
            found = list(group.take_totals())
            if self._tensor.size > 1 and group not in self._of_cut:
                flat = torch.cat([total for _, total in found])
                dist.broadcast(flat, group=self._tensor.group, group_src=0)
                parts = flat.split([len(total) for _, total in found])
                found = [(each, part) for (each, _), part in zip(found, parts, strict=True)]
            yield from found


def _shared_mesh(module: nn.Module) -> "DeviceMesh":
    """The mesh of all distributed parameters, its one axis the tensor axis.

    Raises:
        BadInput: They lie on several.
        UnsupportedOperation: Naming the parameter.
    """
    if any(isinstance(child, DistributedDataParallel) for child in module.modules()):
        raise UnsupportedOperation(
            "DistributedDataParallel around a tensor-parallel module: give make_private the module "
            "itself; clipped sums are added over the data axis of its mesh"
        )
    meshes: dict[Any, str] = {}
    for name, parameter in module.named_parameters():
        if not is_dtensor(parameter):
            continue
        mesh, placements = parameter.device_mesh, tuple(parameter.placements)
        meshes.setdefault(mesh, name)
        if mesh.ndim != 1 or type(placements[0]).__name__ not in ("Shard", "Replicate"):
            raise UnsupportedOperation(
                f"{name} has the placements {placements} on a mesh of shape {tuple(mesh.shape)}; "
                "private training takes parameters that are cut along one dimension, or "
                "replicated, on a mesh of one axis: parallelize_module(module, mesh['tensor'], "
                "...), and no other way of sharding beside it"
            )
        if _has_empty_part(parameter):
            raise UnsupportedOperation(
                f"{name} of shape {tuple(parameter.shape)} is cut into {mesh.size()} parts, and "
                "one of them is empty; leave its module out of the parallel plan"
            )
    return one_mesh(meshes)


def _has_empty_part(parameter: "DTensor") -> bool:
    """Whether a cut leaves a rank with nothing; every rank comes to the same answer."""
    span = span_of(parameter)
    if span is None:
        return False
    size, num_parts = parameter.shape[span[0]], parameter.device_mesh.size()
    return -(-size // num_parts) * (num_parts - 1) >= size  # as torch.chunk cuts


def _axes(mesh: "DeviceMesh") -> tuple[Ranks, Ranks, Ranks]:
    """All ranks, those on the data axis with this one, those on the tensor axis with this one.

    Raises:
        UnsupportedOperation: The mesh that the tensor axis was taken of has other axes too.
        BadInput: It does not hold all ranks.
    """
    # torch takes equal parts of two meshes for one. Then this is the other's root: with the same
    # ranks, though it may call the axis beside the tensor axis by another name.
    root = mesh._get_root_mesh()
    if root.ndim > 2:
        raise UnsupportedOperation(
            f"the tensor axis is one of {root.ndim} of {root}; private training takes meshes of "
            "one axis (tensor) or two (data and tensor), without pipeline or context parallelism"
        )
    if root.size() != dist.get_world_size():
        raise BadInput(
            f"the mesh {root} holds {root.size()} of {dist.get_world_size()} ranks, and what the "
            "others do is not known; make one mesh of all, with a data axis beside the tensor axis"
        )
    tensor = Ranks(mesh.get_group())
    if root.ndim == 1:
        return tensor, Ranks(None), tensor
    own = mesh.mesh_dim_names or ()
    (other,) = (name for name in root.mesh_dim_names or () if name not in own)
    if other.lower() in NO_DATA_AXES:
        raise UnsupportedOperation(
            f"the axis {other!r} beside the tensor axis is not a data axis by its name: there, "
            "ranks hold parts of a sample or of the module, and their shares of a sample's "
            "gradient cannot be told apart from gradients of other samples. Private training takes "
            "a data axis beside the tensor axis"
        )
    return Ranks.of(None), Ranks(root.get_group(other)), tensor


def _part(name: str, parameter: nn.Parameter) -> ShardedParam:
    """What this rank holds of a parameter, distributed or not."""
    value = parameter.detach()
    if not is_dtensor(value):
        return ShardedParam.whole(name, parameter)
    shape = tuple(parameter.shape)
    start, stop = [0] * len(shape), list(shape)
    span = span_of(value)
    if span is not None:
        dim, first, size = span
        start[dim], stop[dim] = first, first + size
    cut = Box(shape, tuple(start), tuple(stop))
    assert cut.sides == tuple(local(value).shape), f"{name}: torch cuts otherwise than expected"
    return ShardedParam(name, parameter, shape, ((0, cut.numel()),), cut=cut)
