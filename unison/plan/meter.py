"""Counts the memory, the traffic and the arithmetic of whatever runs in a block.

[Note: memory without values] A model on the meta device has shapes and no values. Everything that
unison does to it, gathering, clipping, summing, stepping, still happens, operation by operation,
and each tensor that would have had memory is seen when it is made and when it dies. `Meter` sees
the same of tensors that do have memory, which is how a plan is proved: one program, counted once on
the meta device for one rank of a world that is not there, and once on real ranks.

What decides by values gets an answer where there are none: see `Meter._answer`.
"""

import math
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from unison.errors import UnsupportedOperation
from unison.shard import ShardedTensor
from unison.torch_internals import machine_of

ALLOCATION = 512  # bytes: what CUDA's allocator rounds a tensor up to

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "records",
    "per-sample gradients",
    "factors",
    "communication",
    "temporaries",
)

HOST = "host"  # what a GPU's host holds in any case: the loader's rows, counts of steps
OFFLOADED = "offloaded"  # and what of the model was moved there

# Whose tensors are of which category, by the package of unison whose code makes them. What
# autograd or the user's own code makes is sorted by when it lives: see `Allocation.category`.
_MADE_BY = {
    "clip": "per-sample gradients",
    "kfac": "factors",
    "parallel": "communication",
}
_SHELLS = ("capture/tracked.py", "capture/parts.py", "capture/rows.py", "clip/costs.py")

c10d, aten = torch.ops.c10d, torch.ops.aten


@dataclass(eq=False, slots=True)
class Allocation:
    """The memory of one tensor, and its views.

    Attributes:
        num_bytes: What it takes now; 0 once it is freed.
        maker: The file of unison whose code made it; empty for others.
        phase: Of the step, when it was made.
        role: The category that is known for certain, if any.
        is_kept: Whether it outlived the phase it was made in.
        is_record: Whether the clipping or the curvature of a pass has read it.
        is_any: Whether it says if any of some elements is an exception; see `Meter._answer`.
    """

    num_bytes: int
    maker: str
    phase: str
    role: str = ""
    is_kept: bool = False
    is_record: bool = False
    is_any: bool = False

    @property
    def category(self) -> str:
        """Which of `CATEGORIES` it is."""
        if self.role or self.phase == HOST:
            return self.role or HOST
        package = self.maker.split("/")[0]
        if package in _MADE_BY:
            return _MADE_BY[package]
        if self.phase == "forward" and self.is_kept:
            return "activations"
        return "records" if self.is_record and self.is_kept else "temporaries"


@dataclass(frozen=True)
class Peak:
    """The most memory that a part of a step holds.

    Attributes:
        place: Where in the step: a phase, and the block it is in.
        by_category: Bytes of each category, at that moment.
    """

    place: str
    by_category: dict[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.by_category.values())


class PlannedCall(NamedTuple):
    """One operation, as the host calls it and the GPU runs it.

    Attributes:
        phase: Of the step.
        python_calls: Functions that Python called on the way to it.
        is_kernel: Whether the GPU has something to do for it, and is no mere view.
        is_triton: Whether the kernel is Triton's, whose launches are Python.
        waits: Whether the host goes on only when the GPU has come here.
        flops: Of matrix products, convolutions and attention.
        is_wide: Whether these are in float32 or wider.
        is_odd: Whether rows of a matrix do not begin at multiples of 16 bytes.
        moved_bytes: Of tensors that it reads or writes.
    """

    phase: str
    python_calls: int
    is_kernel: bool
    is_triton: bool = False
    waits: bool = False
    flops: int = 0
    is_wide: bool = False
    is_odd: bool = False
    moved_bytes: int = 0


@dataclass
class Usage:
    """What a step used.

    Attributes:
        peaks: The peak of every place of the step, in order; a place may come more than once.
        bytes_sent: What this rank sent, by collective and number of ranks in its group.
        calls: All operations, in order.
        passes: Where in `calls` each pass begins, and where the last one ends.
        repeats: How many passes there are beside those, each like the last.
        host_bytes: What the rank's share of the host holds, at most, of an offloaded model.
    """

    peaks: list[Peak] = field(default_factory=list)
    bytes_sent: Counter[tuple[str, int]] = field(default_factory=Counter)
    calls: list[PlannedCall] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    repeats: int = 0
    host_bytes: int = 0

    @property
    def flops(self) -> int:
        """Of matrix products, convolutions and attention."""
        again = self.calls[slice(*self.passes[-2:])] if self.repeats else []
        return sum(each.flops for each in self.calls) + self.repeats * sum(
            each.flops for each in again
        )

    @property
    def peak(self) -> Peak:
        """The largest one."""
        return max(self.peaks, key=lambda each: each.total)


class Meter(TorchDispatchMode):
    """Counts what the tensors of one device take while the mode is entered.

    Args:
        device: The kind of device; `"meta"` where there are no values.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._allocations: dict[int, tuple[Allocation, weakref.ref]] = {}  # by storage
        self._log: list[tuple[str, Allocation | None, int]] = []  # (place, whose, change)
        self._phase, self._place = "start", "start"
        self._python_calls = 0
        self._is_compiled, self._is_fused = False, False
        self.usage = Usage()

    # --- what the program tells -------------------------------------------------------------------

    def enter_place(self, phase: str, block: str = "") -> None:
        """From here on memory is that of another part of the step; `HOST` is the loader's."""
        if phase != self._phase:
            for allocation, _ in self._allocations.values():
                allocation.is_kept |= allocation.phase == self._phase
        self._phase, self._place = phase, f"{phase} {block}".strip()
        self._log.append((self._place, None, 0))

    def mark_pass(self) -> None:
        """A pass begins here, or the last one has ended."""
        self.usage.passes.append(len(self.usage.calls))

    @contextmanager
    def compiled(self, *, is_fused: bool) -> Iterator[None]:
        """Count what runs in the block as part of a compiled graph.

        Args:
            is_fused: Whether it is part of its readers' kernels, and its result of no memory.
        """
        before = self._is_compiled, self._is_fused
        self._is_compiled, self._is_fused = True, is_fused
        try:
            yield
        finally:
            self._is_compiled, self._is_fused = before

    def assign(self, role: str, tensors: Iterable[Tensor | None]) -> None:
        """Say of which category some tensors are, now and since they were made."""
        for tensor in tensors:
            if tensor is not None:
                self._allocation_of(_plain(tensor)).role = role

    def begin(self) -> None:
        """Forget what was counted; what lives goes on living."""
        self.usage = Usage()
        held = [allocation for allocation, _ in self._allocations.values()]
        for each in held:
            if each.maker == "privacy/loss_check.py" and each.phase != HOST:
                each.role = "records"  # a row's outputs and their gradients, as long as it trains
            elif not each.role and each.category not in ("per-sample gradients", "factors"):
                each.role = HOST  # the checks of a first step keep a few vectors per parameter
        self._log = [(self._place, each, each.num_bytes) for each in held]

    def finish(self) -> Usage:
        """Return what was used since `begin`."""
        live: Counter[str] = Counter()
        before: Counter[str] = Counter()
        place, total, most, hosted = "", 0, -1, 0
        for at, allocation, change in [*self._log, ("", None, 0)]:
            if allocation is None:
                if place not in ("", HOST):
                    self.usage.peaks.append(Peak(place, {k: v for k, v in before.items() if v}))
                place, most = at, -1
            elif allocation.role == OFFLOADED:
                hosted += change
                self.usage.host_bytes = max(self.usage.host_bytes, hosted)
            elif allocation.category != HOST:
                live[allocation.category] += change
                total += change
            if total > most:
                most, before = total, live.copy()
        return self.usage

    # --- what torch tells -------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the calls around each operation that would see to it are no cost of a step

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Count what compiled graphs run, and not how they are compiled."""
        return True

    @contextmanager
    def counting(self) -> Iterator["Meter"]:
        """Count what runs in the block."""
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            known = self._allocations.get(storage._cdata)
            if known is not None:
                self._change(known[0], _rounded(size))

        with ExitStack() as stack:
            # No operation of torch's: a mode does not see it.
            stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_and_count))
            if self._device == "meta":
                stack.enter_context(_ranks_alike())
                settings = import_module("torch.fx.experimental._config")
                stack.enter_context(settings.patch(meta_nonzero_assume_all_nonzero=True))
                kernels = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
                kernels.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
                if find_spec("triton") is not None:
                    stack.enter_context(self._launching_nothing())
            stack.callback(sys.setprofile, sys.getprofile())
            stack.enter_context(self)
            sys.setprofile(self._count_python)
            yield self

    def _count_python(self, frame: Any, event: str, argument: Any) -> None:
        self._python_calls += event in ("call", "c_call")

    @contextmanager
    def _launching_nothing(self) -> Iterator[None]:
        """Let Triton kernels take tensors without values: what is made for them counts, no more."""
        launcher = import_module("triton.runtime.jit").KernelInterface
        interpreted = import_module("triton.runtime.interpreter").InterpretedFunction

        def launch(kernel: Any, grid: Any) -> Any:
            given = sys._getframe(1).f_locals
            return lambda *args, **kwargs: self._count_launch(kernel, args, given)

        with (
            patch.object(launcher, "__getitem__", launch),
            patch.object(interpreted, "__getitem__", launch),
        ):
            yield

    def _count_launch(self, kernel: Any, args: tuple, given: dict[str, Any]) -> None:
        name = kernel.fn.__name__
        listed = [given.get(each) for each in _TABLES.get(name, ())]
        moved = {id(each): each for each in _tensors((args, listed))}
        flops = _TRITON_FLOPS[name](given) if name in _TRITON_FLOPS else 0
        self._count_call(
            True,
            is_triton=True,
            flops=flops,
            is_wide=flops > 0 and _factors(given)[0][0].dtype.itemsize > 2,
            moved_bytes=sum(each.nbytes for each in moved.values()),
        )

    def _count_call(self, is_kernel: bool, **what: Any) -> None:
        python_calls = 0 if self._is_compiled else self._python_calls  # compiled graphs have few
        self.usage.calls.append(PlannedCall(self._phase, python_calls, is_kernel, **what))
        self._python_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        sys.setprofile(None)  # what Python does for the meta device and for this meter is no cost
        self._python_calls -= 2  # this function and that one
        try:
            if any(issubclass(each, ShardedTensor) for each in types):
                return NotImplemented  # what it does to the rank's own part comes here again
            return self._run(func, args, kwargs or {})
        finally:
            sys.setprofile(self._count_python)

    def _run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        result = self._answer(func, args, kwargs) if self._device == "meta" else NotImplemented
        if result is NotImplemented:
            with torch._C.DisableTorchFunctionSubclass():  # below autograd there are none
                try:
                    result = func(*args, **kwargs)
                except NotImplementedError as error:
                    if self._device != "meta" or isinstance(error, UnsupportedOperation):
                        raise
                    raise UnsupportedOperation(
                        f"{func} gives shapes that only values tell (as of rows that are sent to "
                        "experts), so that this step cannot be planned without running it"
                    ) from error
        maker = _maker()
        given, made = list(_tensors((args, kwargs))), list(_tensors((result,)))
        if self._is_fused:
            for tensor in made:
                self._allocation_of(tensor, maker, has_memory=False)
            return result
        packet = func._overloadpacket
        if func.namespace == "c10d":
            self._count_collective(func, args)
            self._count_call(False)
        else:
            kind = "none" if self._phase == HOST else self._device
            own = {id(each): each for each in (*given, *made) if each.device.type == kind}
            is_kernel = bool(own) and not func.is_view and packet not in _NO_KERNELS
            flops = _FLOPS[packet](*args, **kwargs, out_val=result) if packet in _FLOPS else 0
            # A number that is read, or a copy between host and device that is to be done on return.
            is_read = packet in _READS and bool(own)
            is_copied = packet in _COPIES and len({each.device for each in (*given, *made)}) > 1
            is_async = kwargs.get("non_blocking") or (packet is aten.copy_ and args[2:3] == (True,))
            self._count_call(
                is_kernel,
                waits=is_read or (is_copied and kind != "none" and not is_async),
                flops=flops,
                is_wide=flops > 0 and given[0].dtype.itemsize > 2,
                is_odd=flops > 0 and any(_is_odd(each) for each in own.values()),
                moved_bytes=sum(each.nbytes for each in own.values()) if is_kernel else 0,
            )
        if maker.startswith(("clip/", "kfac/")):
            for tensor in _tensors(args):
                if tensor.device.type == self._device:
                    self._allocation_of(tensor).is_record = True
        is_hosted = self._is_hosted(func, args)
        for tensor in made:
            if tensor.device.type == self._device and maker not in _SHELLS:
                allocation = self._allocation_of(tensor, maker)
                allocation.is_any |= packet is aten.any
                allocation.phase = HOST if is_hosted else allocation.phase
        return result

    def _allocation_of(
        self, tensor: Tensor, maker: str = "", *, has_memory: bool = True
    ) -> Allocation:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._allocations:
            made = Allocation(0, maker, self._phase)
            self._allocations[key] = made, weakref.ref(storage, lambda _: self._free(key))
            self._change(made, _rounded(storage.nbytes()) if has_memory else 0)
        return self._allocations[key][0]

    def _is_hosted(self, func: Any, args: tuple) -> bool:
        """Whether a result stays on the host, where that is the device: it is made of such alone.

        Copies are how values get from one to the other.
        """
        if self._device != "cpu" or func in (aten._to_copy.default, aten.copy_.default):
            return False
        known = [self._allocations.get(each.untyped_storage()._cdata) for each in _tensors(args)]
        return bool(known) and all(each and each[0].phase == HOST for each in known)

    def _free(self, key: int) -> None:
        allocation, _ = self._allocations.pop(key)
        allocation.is_kept |= allocation.phase != self._phase
        self._change(allocation, 0)

    def _change(self, allocation: Allocation, num_bytes: int) -> None:
        if num_bytes != allocation.num_bytes:
            self._log.append((self._place, allocation, num_bytes - allocation.num_bytes))
            allocation.num_bytes = num_bytes

    def _count_collective(self, func: Any, args: tuple) -> None:
        kind, share = _COLLECTIVES.get(func._overloadpacket, (None, 0))
        tensors = list(_tensors(args))
        if kind is None:
            return
        group = next(each for each in args if isinstance(each, torch.ScriptObject))
        size = dist.ProcessGroup.unbox(group).size()
        most = max(each.nbytes for each in tensors)
        self.usage.bytes_sent[kind, size] += share * most * (size - 1) // size
        for each in tensors:
            if each.device.type == self._device:
                allocation = self._allocation_of(each)
                if not allocation.role and allocation.phase != HOST:
                    allocation.role = "communication"

    def _answer(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The answer to a question about values that are not there; NotImplemented for others.

        A plan is of a step that goes well: what is compared is equal, what is summed is finite.
        """
        first = args[0] if args else None
        if func is aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return first
        if not isinstance(first, Tensor) or not first.is_meta:
            return NotImplemented
        if func in (aten.equal.default, aten.allclose.default):
            return True
        if func is aten._grouped_mm.default:  # of experts; the meta device takes bfloat16 alone
            return first.new_empty(_grouped_sizes(*args[:3], **kwargs)[0])
        is_read = func in (aten._local_scalar_dense.default, aten.is_nonzero.default)
        if is_read and first.dtype == torch.bool:
            return not self._allocation_of(first).is_any
        if func is aten._unique2.default:  # as many as there can be
            return tuple(
                first.new_empty(size, dtype=dtype) for size, dtype in _unique(first, *args)
            )
        if is_read:
            return 1.0 if first.dtype.is_floating_point else 0  # an error's number is not 0
        device = torch.device(kwargs.get("device") or "meta")
        if func is aten._to_copy.default and device.type != "meta":
            made = torch.zeros if self._allocation_of(first).is_any else torch.ones
            return made(first.shape, dtype=kwargs.get("dtype") or first.dtype)
        return NotImplemented


def _unique(
    values: Tensor, _: Tensor, is_sorted: bool = True, inverse: bool = False, counts: bool = False
) -> list[tuple[Any, torch.dtype]]:
    """Size and dtype of what `torch.unique` returns of distinct values."""
    size, dtype = values.numel(), torch.int64
    inverse_shape = values.shape if inverse else (0,)
    return [(size, values.dtype), (inverse_shape, dtype), (size if counts else 0, dtype)]


def _tensors(values: Any) -> Iterator[Tensor]:
    return (_plain(each) for each in tree_iter(values) if isinstance(each, Tensor))


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, ShardedTensor) else tensor


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALLOCATION) * ALLOCATION


def _maker() -> str:
    """The file of unison whose code runs, from the package on; empty for others."""
    frame = sys._getframe(2)
    while frame is not None:
        _, is_ours, path = frame.f_code.co_filename.replace("\\", "/").rpartition("/unison/")
        if is_ours and path != "plan/meter.py":
            return path
        frame = frame.f_back
    return ""


# How many times its largest tensor a collective sends, but for the rank's own part, in a ring.
_COLLECTIVES = {
    c10d._allgather_base_: ("all-gather", 1),
    c10d.allgather_: ("all-gather", 1),
    c10d._reduce_scatter_base_: ("reduce-scatter", 1),
    c10d.reduce_scatter_: ("reduce-scatter", 1),
    c10d.allreduce_: ("all-reduce", 2),
    c10d.alltoall_base_: ("all-to-all", 1),
    c10d.alltoall_: ("all-to-all", 1),
    c10d.broadcast_: ("broadcast", 1),
}


def _grouped_sizes(
    a: Tensor, b: Tensor, offs: Tensor | None = None, **_: Any
) -> tuple[tuple[int, ...], int]:
    """Shape of the products of groups of rows or columns, and their FLOPs."""
    shape = (a.shape[-2], b.shape[-1])
    if a.ndim == b.ndim:  # 3: one product a group; 2: groups are runs of what is summed over
        assert a.ndim == 3 or offs is not None
        shape = (len(a) if offs is None else len(offs), *shape)
    return shape, 2 * (a.shape[1] * b.numel() if a.ndim > b.ndim else a.numel() * b.shape[-1])


def _of_heads(shared: Tensor, query: Tensor) -> tuple[int, ...]:
    """The shape of keys or values that several heads share, once for each of them."""
    return (*query.shape[:2], *shared.shape[2:])


_FLOPS = {
    **flop_registry,
    aten._grouped_mm: lambda *args, out_val=None, **named: _grouped_sizes(*args[:3], **named)[1],
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, _of_heads(k, q), _of_heads(v, q)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(
            grad.shape, q.shape, _of_heads(k, q), _of_heads(v, q)
        )
    ),
}


# Operations that give memory and write nothing, that copy, and that read a number.
_NO_KERNELS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.detach}
_NO_KERNELS |= {aten.new_empty_strided, aten.resize_, aten._local_scalar_dense, aten.is_nonzero}
_COPIES = {aten._to_copy, aten.copy_}
_READS = {aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.allclose}


# Kernels for many tensors take a table of addresses. What it tells is in the function that launches
# them, by these names.
_TABLES = {
    "squares_kernel": ("values",),
    "release_kernel": ("values", "outs"),
    "noisy_kernel": ("values", "outs"),
    "_gram_kernel": ("lefts", "rights"),
    "_weighted_kernel": ("lefts", "rights", "outs"),
}


def _factors(given: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Factors of per-sample gradients, [samples, tokens, features] each, of one layer or more."""
    if "lefts" in given:
        return list(zip(given["lefts"], given["rights"], strict=True))
    return [(given["left"], given["right"])]


def _gram_flops(given: dict[str, Any]) -> int:
    """Inner products of tokens, of both factors; half of them, as they are symmetric."""
    return sum(each.numel() * each.shape[1] for factors in _factors(given) for each in factors)


def _weighted_flops(given: dict[str, Any]) -> int:
    return sum(2 * left.numel() * right.shape[2] for left, right in _factors(given))


_TRITON_FLOPS = {
    "_gram_kernel": _gram_flops,
    "_weighted_kernel": _weighted_flops,
    "_per_sample_kernel": _weighted_flops,
}


def _is_odd(matrix: Tensor) -> bool:
    rows = max(matrix.stride()[-2:]) if matrix.ndim > 1 else 0
    return rows * matrix.dtype.itemsize % 16 != 0


def _attention(
    query: Tensor,  # [batch, heads, tokens, features]
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run attention as the kernel that its device has for it; the meta device would write it out.

    No kernel keeps scores: what they keep is their output, a number a token, and a mask.
    """
    given = query, key, value, attn_mask, dropout_p, is_causal
    is_cuda = machine_of(query.device) == "cuda"
    if not (_is_fused_by_cuda(*given[:4]) if is_cuda else _is_fused_by_cpu(given, enable_gqa)):
        written_out = aten._scaled_dot_product_attention_math
        return written_out(*given, scale=scale, enable_gqa=enable_gqa)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # each layer has its own numbers
        lowest = torch.scalar_tensor(-math.inf, dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, 0.0, lowest)
    is_trained = attn_mask is not None and attn_mask.requires_grad
    if is_trained or query.shape[-1] != value.shape[-1]:
        if attn_mask is not None:
            extra = -attn_mask.shape[-1] % _ALIGNED_MASK
            aligned = F.pad(attn_mask, (0, extra))[..., :-extra] if extra else attn_mask
            attn_mask = aligned.expand(*query.shape[:3], key.shape[2])
        run = aten._scaled_dot_product_efficient_attention
        return run(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    extra = -query.shape[-1] % _ALIGNED_HEAD if is_cuda and query.dtype.itemsize == 2 else 0
    if extra:
        query, key, value = (F.pad(each, (0, extra)) for each in (query, key, value))
    run = aten._scaled_dot_product_flash_attention_for_cpu  # the meta device has none of CUDA's
    found = run(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return found[..., :-extra] if extra else found


# What CUDA's kernels want the sizes of heads and the rows of masks to be multiples of; the most
# features of a head that they take.
_ALIGNED_HEAD, _ALIGNED_MASK = 8, 8
_MOST_OF_CUDNN, _MOST_OF_FLASH = 128, 256
# Torch's own kernel for float32 takes keys that heads share since then.
_IS_SHARED_WIDE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


def _is_fused_by_cuda(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether a GPU since 2022 has one kernel for it, of cuDNN's, FlashAttention's or torch's."""
    if query.ndim != 4 or query.dtype == torch.float64:
        return False
    sizes = {query.shape[-1], value.shape[-1]}
    is_half, is_shared = query.dtype.itemsize == 2, key.shape[1] != query.shape[1]
    is_aligned = not any(size % (_ALIGNED_HEAD if is_half else 4) for size in sizes)
    if is_aligned and (not is_shared or _IS_SHARED_WIDE):
        return True  # torch's own takes any mask
    if not is_half or (mask is not None and mask.requires_grad):
        return False
    if is_aligned and max(sizes) <= _MOST_OF_CUDNN:
        return True
    return mask is None and len(sizes) == 1 and max(sizes) <= _MOST_OF_FLASH


def _is_fused_by_cpu(given: tuple[Any, ...], is_shared: bool) -> bool:
    """Whether torch has one kernel for it on this CPU: it is asked about tensors that lie there."""

    def on_cpu(each: Tensor) -> Tensor:
        return torch.empty_strided(
            each.shape, each.stride(), dtype=each.dtype, requires_grad=each.requires_grad
        )

    with _disable_current_modes():
        own: Any = tree_map_only(Tensor, on_cpu, given)
        choice = torch._fused_sdp_choice(*own, enable_gqa=is_shared)
    return choice == SDPBackend.FLASH_ATTENTION.value


@contextmanager
def _ranks_alike() -> Iterator[None]:
    """Let every other rank of a world that is not there say what this one says."""
    import_module("torch.distributed._tools.fake_collectives")  # for the meta device

    def gather(objects: list[Any], value: Any, group: Any = None) -> None:
        objects[:] = [value] * len(objects)

    def keep(objects: list[Any], *args: Any, **kwargs: Any) -> None:
        pass

    of_meta = dist.all_reduce

    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if not tensor.is_meta and op == dist.ReduceOp.SUM:
            tensor.mul_(dist.get_world_size(group))
        return of_meta(tensor, op, group, async_op)

    with (
        patch.object(dist, "all_reduce", all_reduce),
        patch.object(dist, "all_gather_object", gather),
        patch.object(dist, "broadcast_object_list", keep),
    ):
        yield
