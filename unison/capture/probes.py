"""Probing runs of a module: the rows that go in, and the state that is put back around them.

Every probing run must begin as the others did, or their results cannot be compared; and the module
must be left as it was found: generators, buffers, attributes. Rows of a probe must be distinct, or
nothing could be told from them; what replaces other rows is of the same kind (integers that were
there, values that the place can have), so that any model that takes the batch takes it too.

[Note: fingerprints] A tensor is a matrix x[r, f] of 32-bit integers (its bits; 16-bit ones are
widened, 64-bit ones are two). With random 64-bit keys u, v, and all sums modulo 2⁶⁴,

    h_r = (Σ_f v_f · x[r, f]) >> 32,        fingerprint = Σ_r u_r · h_r.

*Two different tensors have the same one with a probability below 2⁻³⁰*, over the keys. Take a row
in which they differ, in one place by d_f = odd · 2ᵏ with k ≤ 31. v_f d_f is uniform on the
multiples of 2ᵏ, and h_r stays only if the difference of the sums is one of the less than 2³³⁻ᵏ in
(−2³², 2³²): probability below 2⁻³¹. Otherwise h_r differs by odd · 2ᵏ with k ≤ 31 again, and
Σ_r u_r h_r stays with probability 2ᵏ⁻⁶⁴ ≤ 2⁻³³. (Multilinear hashing: Carter and Wegman 1979.)

Sums of integers do not depend on their order: a fingerprint is the same whatever the threads do.
The keys are drawn once per process, from the operating system, so that no data can know them.
"""

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, TypeGuard, TypeVar
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from unison.capture.parts import local
from unison.torch_internals import FunctionMode, is_dtensor, kept_attributes

# --- fingerprints of bits -------------------------------------------------------------------------

_ELEMENTS_PER_TILE = {"cpu": 1 << 18}  # int64: it should stay in cache
_ELEMENTS_PER_TILE_ELSEWHERE = 1 << 23

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}

_keys: dict[tuple[str, torch.device], Tensor] = {}


def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Return one number per tensor [tensors], int64, on their device: equal for equal bits."""
    return torch.stack([_of(tensor.detach()) for tensor in tensors])


def _of(x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    if x.numel() == 0:
        return total
    x = x.reshape(1, -1) if x.ndim < 2 else x
    num_columns, row = x.shape[-1], 0
    most = _ELEMENTS_PER_TILE.get(x.device.type, _ELEMENTS_PER_TILE_ELSEWHERE)
    for some in x.split(max(1, most // x[0].numel())):
        # Rows are what all dimensions but the last one count. Where that is no view, `some` is
        # copied, and not all of x.
        for part in some.reshape(-1, num_columns).split(max(1, most // num_columns)):
            bits = part.contiguous().view(_INTEGERS[x.element_size()]).long()
            sums = bits.mul_(_key("columns", bits.shape[1], x.device)).sum(1) >> 32
            total += sums.mul_(_key("rows", row + len(part), x.device)[row:]).sum()
            row += len(part)
    return total


def _key(name: str, length: int, device: torch.device) -> Tensor:
    """Return the first numbers of a key, the same ones every time."""
    key = _keys.get((name, device))
    if key is None or len(key) < length:
        known = torch.empty(0, dtype=torch.int64) if key is None else key.cpu()
        num_new = max(1024, length, 2 * len(known)) - len(known)
        more = torch.frombuffer(bytearray(os.urandom(8 * num_new)), dtype=torch.int64)
        key = _keys[name, device] = torch.cat([known, more]).to(device)
    return key[:length]


# --- state of a module ----------------------------------------------------------------------------

_Key = TypeVar("_Key", str, int)
_LARGE = 1 << 24  # bytes of a buffer on a GPU whose copy waits in main memory


class ProbeState:
    """Puts generators, buffers and attributes of a module back to what they were.

    What lies deeper than `kept_attributes` looks is not put back; the check for state between calls
    sees it where outputs depend on it.

    Args:
        module: The model.
        batch: Its tensors' devices have generators, too.
    """

    def __init__(self, module: nn.Module, batch: Any = None) -> None:
        self._module = module
        self._generators = [(*each, each[0]()) for each in _generators(module, batch)]
        self._buffers = [
            (child._buffers, key, buffer)
            for child in module.modules()
            for key, buffer in child._buffers.items()
        ]
        tensors, self._put_attributes_back = kept_attributes(module)
        self._buffer_copies = _copies_of([buffer for _, _, buffer in self._buffers])
        self._tensor_copies = _copies_of(tensors)
        self._start = self.values()
        self._parameters = _bits(dict(module.named_parameters()))

    def restore_generators(self, seed: int | None = None) -> None:
        """Let the next pass draw the same random numbers.

        Args:
            seed: Draws others, the same ones for each seed.
        """
        for _, set_state, set_seed, start in self._generators:
            if seed is None:
                set_state(start)
            else:
                set_seed(seed)

    def has_drawn(self) -> bool:
        """Whether random numbers were drawn since generators were restored."""
        return any(not _is_equal(get(), start) for get, _, _, start in self._generators)

    def restore(self) -> None:
        """Restore generators, attributes and buffers."""
        self.restore_generators()
        self._put_attributes_back()
        _put_back(self._tensor_copies)
        self.restore_buffers()

    def restore_buffers(self) -> None:
        """Restore buffers."""
        known = {(id(where), key) for where, key, _ in self._buffers}
        for child in self._module.modules():
            if isinstance(child, torch.jit.ScriptModule):
                continue  # it has the buffers that it was compiled with
            for key in [k for k in child._buffers if (id(child._buffers), k) not in known]:
                del child._buffers[key]
        for where, key, buffer in self._buffers:
            where[key] = buffer
        _put_back(self._buffer_copies)

    def values(self) -> dict[str, int]:
        """Fingerprints of all buffers as they are now, by name."""
        return _bits(dict(self._module.named_buffers()))

    def versions(self) -> dict[str, tuple[int, int]]:
        """Which tensor each buffer is now, and how often it was written, by name."""
        return {
            name: (id(each), 0 if each.is_inference() else each._version)
            for name, each in self._module.named_buffers()
        }

    def written(self, values: dict[str, int]) -> set[str]:
        """Names of the buffers that had other values, or were not there, at the start."""
        return {name for name, value in values.items() if self._start.get(name) != value}

    def written_parameters(self) -> set[str]:
        """Names of the parameters that have other values than at the start."""
        now = _bits(dict(self._module.named_parameters()))
        return {name for name, value in now.items() if self._parameters.get(name) != value}


@contextmanager
def state_kept(module: nn.Module, batch: Any = None) -> Iterator[ProbeState]:
    """Leave a module's generators, buffers and attributes as they are found."""
    state = ProbeState(module, batch)
    try:
        yield state
    finally:
        state.restore()


def _generators(module: nn.Module, batch: Any) -> Iterator[tuple[Callable[..., Any], ...]]:
    """Yield how the state is read, set and seeded of each generator that a pass may draw from."""
    tensors = [*module.parameters(), *module.buffers(), *tree_leaves(batch)]
    devices = {each.device for each in tensors if isinstance(each, Tensor) and each.is_cuda}
    found = [torch.default_generator]
    found += [torch.cuda.default_generators[device.index] for device in devices]
    held = [value for child in module.modules() for value in vars(child).values()]
    found += [value for value in held if isinstance(value, torch.Generator)]
    for each in found:
        # Cloned: a CUDA generator's state is what it goes on from, if graphs are recorded.
        yield partial(_cloned_state, each), each.set_state, each.manual_seed
    for each in (random, *(value for value in held if isinstance(value, random.Random))):
        yield each.getstate, each.setstate, each.seed
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield numpy.random.get_state, numpy.random.set_state, numpy.random.seed
        for value in held:
            if isinstance(value, numpy.random.Generator):
                bits, attribute = value.bit_generator, "state"
                yield (
                    partial(getattr, bits, attribute),
                    partial(setattr, bits, attribute),
                    lambda seed, bits=bits: setattr(bits, "state", type(bits)(seed).state),
                )


def _cloned_state(generator: torch.Generator) -> Tensor:
    return generator.get_state().clone()


def _is_equal(first: Any, second: Any) -> bool:
    """Whether two states of a generator, of whatever they are made, are the same."""
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return all(_is_equal(first[key], second[key]) for key in first)
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(_is_equal, first, second))
    return bool((first == second).all()) if hasattr(first, "all") else first == second


_Copies = list[tuple[Tensor, Tensor, int]]  # tensors, copies, fingerprints


def _copies_of(tensors: Sequence[Tensor | None]) -> _Copies:
    """Copy tensors that may be written."""
    written = [each for each in tensors if _is_readable(each) and not each.is_inference()]
    bits, found = _bits(dict(enumerate(written))), []
    for key, each in enumerate(written):
        value = local(each.detach())
        is_large = value.is_cuda and value.numel() * value.element_size() > _LARGE
        found.append((each, value.cpu() if is_large else value.clone(), bits[key]))
    return found


@torch.no_grad()
def _put_back(copies: _Copies) -> None:
    """Restore the tensors whose bits have changed."""
    now = _bits({key: each for key, (each, _, _) in enumerate(copies)})
    for key, (each, copy, bits) in enumerate(copies):
        if now[key] != bits:
            local(each).copy_(copy)


def _is_readable(value: Any) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor) or value.is_meta or value.is_quantized:
        return False
    is_lazy = isinstance(value, UninitializedTensorMixin)
    return not is_lazy and (is_dtensor(value) or value.layout is torch.strided)


def _bits(tensors: dict[_Key, Any]) -> dict[_Key, int]:
    """A fingerprint of each tensor's bits, by key; read from each device at once."""
    by_device: dict[torch.device, list[tuple[_Key, Tensor]]] = {}
    for name, each in tensors.items():
        if _is_readable(each):
            value = local(each.detach())
            value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            by_device.setdefault(value.device, []).append((name, value))
    found: dict[_Key, int] = {}
    for pairs in by_device.values():
        numbers = fingerprint(value for _, value in pairs).tolist()
        found.update(zip((name for name, _ in pairs), numbers, strict=True))
    return found


# --- the rows of a probe --------------------------------------------------------------------------

NUM_PROBED = 4  # rows that go through the model: one kept, one replaced, and both again


class Replacement(Enum):
    """What replaces the rows that are not kept."""

    VALUES = "values far from theirs"
    ROWS = "other rows of the batch"
    COPIES = "copies of one row"
    OUTLIER = "one row of far values"
    ALIKE = "copies of one row of far values"
    OPPOSITE = "copies of one row of opposite values"


def probe_rows(batch: Any, *, seed: int = 0) -> Any:
    """Select rows of a batch, first and last among them; repeated ones are altered.

    Floating-point values are shuffled within the row and scaled a little, integers shuffled within
    the values that are there, so that they stay of their kind.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    size = len(tensors[0])
    chosen = torch.linspace(0, size - 1, min(size, NUM_PROBED)).round().long()
    if seed and size > NUM_PROBED:  # another time, others
        inner = 1 + torch.randperm(size - 2, generator=generator)[: NUM_PROBED - 2]
        chosen = torch.cat([torch.tensor([0]), inner.sort().values, torch.tensor([size - 1])])
    chosen = chosen[torch.arange(NUM_PROBED) % len(chosen)]
    keys = torch.cat([_as_key(leaf[chosen.to(leaf.device)]) for leaf in tensors], 1)
    repeated = torch.tensor(
        [any(torch.equal(key, before) for before in keys[:row]) for row, key in enumerate(keys)]
    )

    def rows(leaf: Tensor) -> Tensor:
        found = leaf[chosen.to(leaf.device)]
        if not repeated.any():
            return found
        return torch.where(_rowwise(repeated, found), _shuffled(found, generator), found)

    return tree_map_only(Tensor, rows, batch)


def _as_key(rows: Tensor) -> Tensor:
    """The values of rows, to be compared [rows, values]."""
    rows = torch.view_as_real(rows) if rows.is_complex() else rows
    return rows.detach().reshape(len(rows), -1).cpu().double().nan_to_num()


def _shuffled(x: Tensor, generator: torch.Generator) -> Tensor:
    """Shuffle the values within each row, and scale floating-point ones a little."""
    flat = x.reshape(len(x), -1)
    order = torch.rand(flat.shape, generator=generator).argsort(1).to(x.device)
    found = flat.gather(1, order) if flat.shape[1] else flat
    if x.dtype == torch.bool:
        return (torch.rand(x.shape, generator=generator) < 0.5).to(x.device)
    is_constant = x.numel() == 0 or bool((x == x.flatten()[0]).all())
    if x.is_floating_point():
        if is_constant:
            noise = torch.rand(x.shape, generator=generator).to(x.device, x.dtype)
            return x + noise * (1 + x.abs())
        factor = 0.5 + 0.5 * torch.rand(flat.shape, generator=generator)
        return (found * factor.to(x.device, x.dtype)).view_as(x)
    if is_constant and x.numel() and int(x.flatten()[0]) > 0:
        most = int(x.flatten()[0])  # from 1 on: it may be a length
        return torch.randint(1, most + 1, x.shape, generator=generator).to(x.device, x.dtype)
    return found.view_as(x)


def _rowwise(flags: Tensor, like: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (like.ndim - 1)).to(like.device)


def are_distinct(batch: Any) -> bool:
    """Whether no two rows of a batch are equal."""
    rows = torch.cat([_as_key(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)], 1)
    return len(torch.unique(rows, dim=0)) == len(rows)


def with_others(
    batch: Any,
    kept: Tensor,
    how: Replacement,
    largest_power: float,
    generator: torch.Generator,
    is_pinned: bool,
) -> Any:
    """Return the batch with the rows that are not kept replaced.

    Args:
        batch: The rows.
        kept: Which stay as they are [batch].
        how: What stands in the place of the others.
        largest_power: Far values are up to as many powers of ten away; below 1, not at all.
        generator: Draws.
        is_pinned: Whether negative integers stay where they are.
    """
    size = len(kept)
    # Random numbers that are the same for all tensors: rows stay together.
    source = torch.randint(1, size, (size,), generator=generator).add_(torch.arange(size)) % size
    first_kept = int(kept.nonzero()[0])
    powers = torch.rand(size, generator=generator) * largest_power
    powers = powers.round() if largest_power >= 1 else torch.zeros(size)
    if how is Replacement.OUTLIER:
        powers.fill_(largest_power if largest_power >= 1 else 0.0)

    def rows(leaf: Tensor) -> Tensor:
        if how is Replacement.COPIES:
            other = leaf[first_kept].expand_as(leaf)
        elif how in (Replacement.ALIKE, Replacement.OPPOSITE):
            # Far enough for any threshold; of what has no sign, another row's.
            sign = 1 if how is Replacement.ALIKE else -1
            is_signed = leaf.is_floating_point() or leaf.is_complex()
            row = leaf[first_kept - (not is_signed and sign < 0)]
            other = (sign * 10 ** (largest_power / 2) * row if is_signed else row).expand_as(leaf)
        elif how is Replacement.ROWS:
            other = leaf[source.to(leaf.device)]
        else:
            other = _far(leaf, powers, how, generator)
        if is_pinned and not leaf.is_floating_point() and leaf.dtype != torch.bool:
            valid = leaf[leaf >= 0]
            if valid.numel():
                drawn = torch.randint(valid.numel(), leaf.shape, generator=generator)
                other = torch.where(other < 0, valid[drawn.to(leaf.device)], other)
            other = torch.where(leaf < 0, leaf, other)
        return torch.where(_rowwise(kept, leaf), leaf, other)

    return tree_map_only(Tensor, rows, batch)


def _far(leaf: Tensor, powers: Tensor, how: Replacement, generator: torch.Generator) -> Tensor:
    """Draw each value from the same place of some row, and scale it."""
    if leaf.dtype == torch.bool:
        if powers.any():
            return (torch.rand(leaf.shape, generator=generator) < 0.5).to(leaf.device)
        return leaf.roll(1, 0)
    if how is Replacement.OUTLIER and not leaf.is_floating_point() and powers.any():
        return leaf.amax().expand_as(leaf) if leaf.numel() else leaf
    drawn = torch.randint(len(leaf), leaf.shape, generator=generator).to(leaf.device)
    other = leaf.gather(0, drawn) if leaf.numel() else leaf
    if leaf.is_floating_point() or leaf.is_complex():
        other = other * _rowwise(10.0**powers, leaf).to(leaf.dtype)
    return other


# --- another dtype, no dropout --------------------------------------------------------------------


@contextmanager
def widened(module: nn.Module, dtype: torch.dtype = torch.float64) -> Iterator[None]:
    """Let a module compute in a wide dtype for this block, with parameters of its own.

    Its parameters and buffers are exchanged for copies and put back; nobody who holds them sees
    anything of it. Code that asks for a smaller dtype gets the wide one.
    """
    held: list[tuple[dict[str, Any], str, Any]] = [
        (tensors, key, value)
        for child in module.modules()
        for tensors in (child._parameters, child._buffers)
        for key, value in tensors.items()
        if value is not None and _is_narrow(value.dtype, dtype)
    ]
    copies: dict[int, Tensor] = {}  # one of a tensor that is there twice
    for _, _, value in held:
        if id(value) not in copies:
            copy = value.detach().to(dtype)
            if isinstance(value, nn.Parameter):
                copy = nn.Parameter(copy, requires_grad=value.requires_grad)
            copies[id(value)] = copy
    default = torch.get_default_dtype()
    try:
        for tensors, key, value in held:
            tensors[key] = copies[id(value)]
        torch.set_default_dtype(max(default, dtype, key=lambda each: each.itemsize))
        mode = FunctionMode(partial(_in_dtype, dtype))
        with flat_weights_renewed(module.named_modules()), mode:
            yield
    finally:
        torch.set_default_dtype(default)
        for tensors, key, value in held:
            tensors[key] = value


@contextmanager
def flat_weights_renewed(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Let recurrent modules, which keep a second list of their parameters, see those of now.

    They notice that their parameters are others, and would flatten them for cuDNN.
    """
    found = [child for _, child in modules if isinstance(child, nn.RNNBase)]
    kept = [(child._flat_weights, child._flat_weight_refs) for child in found]
    for child in found:
        weights = [getattr(child, name, None) for name in child._flat_weights_names]
        child._flat_weights = weights
        child._flat_weight_refs = [each if each is None else ref(each) for each in weights]
    try:
        yield
    finally:
        for child, (weights, refs) in zip(found, kept, strict=True):
            child._flat_weights, child._flat_weight_refs = weights, refs


_NARROWING = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}


def _is_narrow(found: Any, dtype: torch.dtype) -> bool:
    """Whether it is a floating-point dtype of fewer bytes than another."""
    is_dtype = type(found) is torch.dtype
    return is_dtype and found.is_floating_point and 1 < found.itemsize < dtype.itemsize


def _in_dtype(dtype: torch.dtype, func: Callable[..., Any], args: tuple, kwargs: Any) -> Any:
    """Call a torch function with a wide dtype in the place of smaller ones."""
    if _is_narrow(_NARROWING.get(func), dtype):
        return args[0].to(dtype)
    # Dtypes are arguments themselves, and lie no deeper.
    wide = [dtype if _is_narrow(each, dtype) else each for each in args]
    named = {key: dtype if _is_narrow(each, dtype) else each for key, each in kwargs.items()}
    call: Any = _attention if func is F.scaled_dot_product_attention else func
    return call(*wide, **named)


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Attention that does not store its weights, as torch's kernels for float64 would."""
    named = {**dict(zip(_OPTIONS, rest, strict=False)), **named}
    mask = named.pop("attn_mask", None)
    is_plain = all(type(each) is Tensor and each.ndim == 4 for each in (q, k, v))
    has_gradient = mask is not None and mask.requires_grad
    if not is_plain or has_gradient or named.get("dropout_p", 0.0):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **named)

    def of_sample(i: int, *parts: Tensor) -> Tensor:
        own = mask
        if mask is not None and mask.ndim == 4 and len(mask) == len(q):
            own = mask[i : i + 1]
        with torch._C.DisableTorchFunction():
            return F.scaled_dot_product_attention(*parts, attn_mask=own, **named)

    # One sample after the other, which is run again in the backward pass.
    again = partial(checkpoint, of_sample, use_reentrant=False, preserve_rng_state=False)
    samples = zip(q.split(1), k.split(1), v.split(1), strict=True)
    return torch.cat([again(i, *parts) for i, parts in enumerate(samples)])


_DROPOUTS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
}


@contextmanager
def additions_in_order() -> Iterator[None]:
    """Use deterministic GPU kernels where torch has them: bits can be compared.

    Without atomic additions a module rarely has to be run in float64, which takes many times the
    time and the memory of bfloat16. What has no such kernel runs as it is: torch is told to warn,
    since as an error it would be one for every product. Attention takes that for leave to add
    atomically on its way back, so it is told apart; cuDNN's has no other way.
    """
    if not torch.cuda.is_available():
        yield
        return
    mode, settings = torch.get_deterministic_debug_mode(), torch.utils.deterministic
    fills = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    attention = torch.backends.cuda
    has_cudnn = attention.cudnn_sdp_enabled()
    others = attention.flash_sdp_enabled, attention.mem_efficient_sdp_enabled
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        torch.set_deterministic_debug_mode("warn")
        settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        attention.enable_cudnn_sdp(has_cudnn and not any(each() for each in others))
        try:
            with FunctionMode(_attention_in_order):
                yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            settings.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
            attention.enable_cudnn_sdp(has_cudnn)


def _attention_in_order(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    output = func(*args, **kwargs)
    if func is F.scaled_dot_product_attention and isinstance(output, Tensor) and output.is_cuda:
        for node in _attention_nodes(output):
            node.register_prehook(lambda *_: torch.set_deterministic_debug_mode("error"))
            node.register_hook(lambda *_: torch.set_deterministic_debug_mode("warn"))
    return output


def _attention_nodes(output: Tensor) -> list[Any]:
    """Return the fused kernel's node, behind those that cut padded features off; or none."""
    nodes = [output.grad_fn]
    for _ in range(4):
        found = [node for node in nodes if node is not None and "Attention" in node.name()]
        if found:
            return found
        nodes = [each for node in nodes if node is not None for each, _ in node.next_functions]
    return []


def without_dropout(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a torch function with dropout turned off."""
    if func in _DROPOUTS:
        return (args[0] if args else kwargs["input"]).clone()
    if func is F.scaled_dot_product_attention:
        args, kwargs = args[:4], {**dict(zip(_OPTIONS[1:], args[4:], strict=False)), **kwargs}
        kwargs["dropout_p"] = 0.0
    return func(*args, **kwargs)


_OPTIONS = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def as_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point tensors in a wide dtype."""
    return tree_map_only(
        Tensor, lambda each: each.to(dtype) if _is_narrow(each.dtype, dtype) else each, batch
    )
