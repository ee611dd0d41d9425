"""What a module's passes read and write beside parameters: generators, buffers, attributes.

Probing runs a user's module several times. Every such pass must begin as the others did, or their
results cannot be compared; and the module must be left as it was found.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils._pytree import tree_leaves

from unison.capture.fingerprint import fingerprint
from unison.capture.parts import is_in_parts, local

_INTERNAL = frozenset(vars(nn.Module()))  # hooks, children, tensors: not a model's own attributes
_MUTABLE = (list, dict, set, deque)
_LARGE = 1 << 24  # bytes of a buffer on a GPU whose copy waits in main memory


class ProbeState:
    """Puts generators, buffers and attributes of a module back to what they were.

    Attributes are bindings: those of the modules themselves and of plain objects that they hold,
    with the contents of lists, dictionaries and sets among them. What lies deeper is not put back;
    the check for state between calls sees it where outputs depend on it.

    Args:
        module: The model.
        batch: Its tensors' devices have generators, too.
    """

    def __init__(self, module: nn.Module, batch: Any = None) -> None:
        self._module = module
        self._generators = list(_generators(module, batch))
        self._buffers: list[tuple[dict[str, Any], str, Any, Tensor | None]] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: list[Tensor] = []
        known: set[int] = set()
        for child in module.modules():
            for key, buffer in child._buffers.items():
                self._buffers.append((child._buffers, key, buffer, _copy_of(buffer)))
            if not type(child).__module__.startswith(("torch.nn.parallel", "torch.distributed")):
                self._keep_attributes(vars(child), known)
        self._kept_buffers = _copies([(buffer, copy) for _, _, buffer, copy in self._buffers], "b")
        self._kept_tensors = _copies([(each, _copy_of(each)) for each in self._tensors], "t")
        kept = {**self._kept_buffers, **self._kept_tensors}
        self._start_bits = _bits({key: value for key, (value, _) in kept.items()})
        self._start = self.values()
        self._parameters = _bits(dict(module.named_parameters()))

    def _keep_attributes(self, attributes: dict[str, Any], known: set[int]) -> None:
        own = {key: value for key, value in attributes.items() if _is_own(key)}
        self._attributes.append((attributes, own))
        for value in own.values():
            if id(value) in known:
                continue
            known.add(id(value))
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self._tensors.append(value)  # may be written in place, as a buffer may
            elif isinstance(value, _MUTABLE):
                self._contents.append((value, _contents_of(value)))
            elif _is_plain_object(value):
                self._attributes.append((vars(value), dict(vars(value))))
                for inner in vars(value).values():
                    if isinstance(inner, _MUTABLE) and id(inner) not in known:
                        known.add(id(inner))
                        self._contents.append((inner, _contents_of(inner)))

    def restore_generators(self, seed: int | None = None) -> None:
        """Let the next pass draw the same random numbers.

        Args:
            seed: Draws others, the same ones for each seed.
        """
        for each in self._generators:
            if seed is None:
                each.set_state(each.start)
            else:
                each.seed(seed)

    def has_drawn(self) -> bool:
        """Whether random numbers were drawn since generators were restored."""
        return any(not _is_equal(each.get_state(), each.start) for each in self._generators)

    def restore(self) -> None:
        """Put everything back."""
        self.restore_generators()
        for attributes, own in self._attributes:
            for key in [key for key in attributes if _is_own(key) and key not in own]:
                del attributes[key]
            for key, value in own.items():
                if attributes.get(key) is not value or key not in attributes:
                    attributes[key] = value
        for value, before in self._contents:
            _refill(value, before)
        self._put_back(self._kept_tensors)
        self.restore_buffers()

    def restore_buffers(self) -> None:
        """Put buffers back."""
        self._drop_new_buffers()
        for where, key, buffer, _ in self._buffers:
            where[key] = buffer
        self._put_back(self._kept_buffers)

    @torch.no_grad()
    def _put_back(self, kept: "_Copies") -> None:
        now = _bits({key: value for key, (value, _) in kept.items()})
        for key, (value, copy) in kept.items():
            if now[key] != self._start_bits[key]:
                local(value).copy_(copy)

    def _drop_new_buffers(self) -> None:
        known = {(id(where), key) for where, key, _, _ in self._buffers}
        for child in self._module.modules():
            for key in [k for k in child._buffers if (id(child._buffers), k) not in known]:
                del child._buffers[key]

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


class _Generator(NamedTuple):
    """A generator that a pass may draw from."""

    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]
    seed: Callable[[int], Any]
    start: Any


def _generators(module: nn.Module, batch: Any) -> Iterator[_Generator]:
    tensors = [*module.parameters(), *module.buffers(), *tree_leaves(batch)]
    devices = {each.device for each in tensors if isinstance(each, Tensor) and each.is_cuda}
    found = [torch.default_generator]
    found += [torch.cuda.default_generators[device.index] for device in devices]
    held = [value for child in module.modules() for value in vars(child).values()]
    found += [value for value in held if isinstance(value, torch.Generator)]
    for each in found:
        # Cloned: a CUDA generator's state is what it goes on from, if graphs are recorded.
        yield _Generator(each.get_state, each.set_state, each.manual_seed, each.get_state().clone())
    yield _Generator(random.getstate, random.setstate, random.seed, random.getstate())
    for each in held:
        if isinstance(each, random.Random):
            yield _Generator(each.getstate, each.setstate, each.seed, each.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return
    legacy = numpy.random
    yield _Generator(legacy.get_state, legacy.set_state, legacy.seed, legacy.get_state())
    for each in held:
        if isinstance(each, numpy.random.Generator):
            yield _of_numpy(each.bit_generator)


def _of_numpy(bits: Any) -> _Generator:
    def set_state(state: Any) -> None:
        bits.state = state

    def seed(number: int) -> None:
        bits.state = type(bits)(number).state

    return _Generator(lambda: bits.state, set_state, seed, bits.state)


def _is_equal(first: Any, second: Any) -> bool:
    """Whether two states of a generator, of whatever they are made, are the same."""
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return all(_is_equal(first[key], second[key]) for key in first)
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(_is_equal, first, second))
    return bool((first == second).all()) if hasattr(first, "all") else first == second


def _is_own(name: str) -> bool:
    return name not in _INTERNAL and not name.startswith("_unison")


def _is_plain_object(value: Any) -> bool:
    """Whether an attribute is an object of the model's author, whose attributes are state."""
    if isinstance(value, type | nn.Module | Tensor) or not hasattr(value, "__dict__"):
        return False
    if callable(value) and hasattr(value, "__code__"):
        return False
    return type(value).__module__.split(".")[0] not in {"torch", "unison", "builtins", "types"}


_Copies = dict[str, tuple[Tensor, Tensor]]  # each tensor that can be written, and its copy


def _copies(pairs: list[tuple[Any, Tensor | None]], kind: str) -> _Copies:
    return {f"{kind}{i}": (each, copy) for i, (each, copy) in enumerate(pairs) if copy is not None}


def _contents_of(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value)


def _refill(value: Any, before: Any) -> None:
    """Put the contents of a list, dictionary or set back; the object stays."""
    if isinstance(value, dict):
        is_same = list(value) == list(before) and all(map(is_, value.values(), before.values()))
    else:
        is_same = len(value) == len(before) and all(map(is_, value, before))
    if is_same:
        return
    value.clear()
    value.update(before) if isinstance(value, dict | set) else value.extend(before)


def _copy_of(buffer: Tensor | None) -> Tensor | None:
    """A copy to put a buffer back from; None where nothing can be written."""
    if buffer is None or not _is_readable(buffer) or buffer.is_inference():
        return None
    value = local(buffer.detach())
    is_large = value.is_cuda and value.numel() * value.element_size() > _LARGE
    return value.cpu() if is_large else value.clone()


def _is_readable(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.is_meta or value.is_quantized:
        return False
    is_lazy = isinstance(value, UninitializedTensorMixin)
    return not is_lazy and (is_in_parts(value) or value.layout is torch.strided)


def _bits(tensors: dict[str, Any]) -> dict[str, int]:
    """A fingerprint of each tensor's bits, by name; read from each device at once."""
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, each in tensors.items():
        if _is_readable(each):
            value = local(each.detach())
            value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            by_device.setdefault(value.device, []).append((name, value))
    found: dict[str, int] = {}
    for pairs in by_device.values():
        numbers = fingerprint(value for _, value in pairs).tolist()
        found.update(zip((name for name, _ in pairs), numbers, strict=True))
    return found
