"""Uses that are met again: their gradients wait, their inputs are computed once more.

[Note: keep g, recompute a] A record of a product holds what went in (a) and the gradient of what
came out (g). To keep both until the end of the backward pass undoes activation checkpointing. Here
only g is kept: when the backward pass is over, the forward pass is run once more, each use is met
in the same order, and its record is made again, by the same builder, from the g that waited and the
inputs that are there again.

That is right only if the second forward pass is the first one, to the bit: norms were measured on
the records of the first. So nothing is taken on trust:

* It runs as the first one did, with torch's generators and autocast as they were,
  and with gradients enabled: code may ask for that, and kernels are chosen by it, and by whether
  what they are given requires a gradient. So the result of every use does, as it did at first; but
  no graph lies behind it, and what is computed with it saves nothing.
* Every use is compared with the one of the same number: operation, parameters, shapes, and at the
  end their number.
* The inputs' bits are compared, by a fingerprint that was taken where the record was measured.
* A buffer that the forward pass writes to would be written twice.

Any difference raises, before a sum is given out.

Reentrant activation checkpointing runs its part of the forward pass without gradients at first:
those uses are seen in the backward pass only, and are never met again. Their records must be kept.

`SavedBytes` counts what autograd holds for the backward pass, and how much of it was let go at a
moment: memory that ordinary training has freed by then is memory that clipping may use.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unison.capture.axes import Call
from unison.capture.probes import fingerprint
from unison.errors import UnsupportedOperation
from unison.rng.draw_mode import current_draws, drawing_again

REMEDY = "use a clipping mode that keeps records, such as 'flash_fuse_bk'"

Place = tuple[int, int]  # which parameter of an operation, which source of it
Waiting = tuple[Tensor, Sequence[Place], Tensor]


RngAutocastState = Callable[[], AbstractContextManager[None]]
"""Sets what held at some time, for a block; generators go on afterwards where they were before."""


def rng_autocast_state(module: nn.Module, batch: Any = None) -> RngAutocastState:
    """Return what sets that again on which a forward pass depends now beside model and batch.

    That is torch's generators, the random numbers of samples, and autocast, where a module and a
    batch lie.
    """
    values = [*module.parameters(), *module.buffers(), *tree_leaves(batch)]
    devices = {value.device for value in values if isinstance(value, Tensor) and value.is_cuda}
    generators = [torch.default_generator]
    generators += [torch.cuda.default_generators[device.index] for device in devices]
    states = [each.get_state() for each in generators]
    casts = {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in sorted({"cpu", *(device.type for device in devices)})
    }
    is_cached, draws = torch.is_autocast_cache_enabled(), current_draws()
    drawn = draws and draws.state()

    @contextmanager
    def restored() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices))
            for kind, (is_enabled, dtype) in casts.items():
                stack.enter_context(torch.autocast(kind, dtype, is_enabled, is_cached))
            if draws is not None:
                stack.enter_context(drawing_again(draws, drawn))
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state.clone())
            yield

    return restored


class RecomputeQueue:
    """The uses of a forward pass, in their order, and the gradients that wait for the next one."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        # By use: gradients, the records to be made of each, and fingerprints of what went in.
        self._waiting: dict[int, list[Waiting]] = defaultdict(list)
        self._num_met = 0
        self._compared: list[tuple[Call, Tensor, Tensor]] = []

    def number(self, call: Call) -> int:
        """Write a use of the first pass down."""
        self._calls.append(call)
        return len(self._calls) - 1

    def keep(self, number: int, g: Tensor, saved: Sequence[Tensor], places: list[Place]) -> None:
        """Let a gradient wait for its use; one use may have several."""
        assert saved, "a product is made of what went in"
        self._waiting[number].append((g, places, fingerprint(saved)))

    def meet(self, call: Call, saved: Sequence[Tensor]) -> list[Waiting]:
        """Take what waits for the next use of the second pass.

        Raises:
            UnsupportedOperation: If it is not the same as in the first.
        """
        number, self._num_met = self._num_met, self._num_met + 1
        expected = self._calls[number] if number < len(self._calls) else None
        if call != expected:
            self._refuse(f"use {number} of a parameter was {_text(expected)}, now {_text(call)}")
        found = self._waiting.pop(number, [])
        if found:
            now = fingerprint(saved)
            self._compared += [(call, then, now) for _, _, then in found]
        return found

    def check(self) -> None:
        """End the second pass.

        Raises:
            UnsupportedOperation: If it was not the same as the first.
        """
        if self._num_met < len(self._calls):
            missed = _text(self._calls[self._num_met])
            self._refuse(f"use {self._num_met} of a parameter was {missed}, now there is none")
        if not self._compared:
            return
        device = self._compared[0][1].device
        then = torch.cat([first.to(device) for _, first, _ in self._compared])
        now = torch.cat([second.to(device) for _, _, second in self._compared])
        if not torch.equal(then, now):  # the only time that a GPU is waited for
            for call, first, second in self._compared:
                if not torch.equal(first, second):
                    self._refuse(f"what went into {_text(call)} has other bits")

    def clear(self) -> None:
        """Forget the passes."""
        self._calls.clear()
        self._waiting.clear()
        self._compared.clear()
        self._num_met = 0

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedOperation(
            f"the forward pass cannot be repeated: {what}. It must depend on the model, the batch, "
            f"torch's generators and autocast alone; or {REMEDY}"
        )


def _text(call: Call | None) -> str:
    return "none" if call is None else f"{call} of shapes {[list(each) for each in call.shapes]}"


@contextmanager
def buffers_unchanged(module: nn.Module) -> Iterator[None]:
    """Make sure that no buffer is written to.

    Raises:
        UnsupportedOperation: Naming the buffer.
    """
    found = [(name, each) for name, each in module.named_buffers() if not each.is_inference()]
    before = [each._version for _, each in found]
    yield
    for (name, each), version in zip(found, before, strict=True):
        if each._version != version:
            raise UnsupportedOperation(
                f"the forward pass writes to the buffer {name!r}, and running it once more has "
                f"changed it twice: {REMEDY}"
            )


def refuse_gradients(*_: Any) -> NoReturn:
    """Raise for a backward pass inside of the second forward pass: the model takes gradients."""
    raise UnsupportedOperation(
        f"the forward pass takes gradients itself, and cannot be repeated: {REMEDY}"
    )


@contextmanager
def checkpointing_quiet() -> Iterator[None]:
    """Reentrant checkpointing wonders why nothing requires a gradient in a pass without them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        yield


class SavedBytes:
    """Counts bytes of saved tensors, those that share memory once.

    Args:
        but: Tensors that live on anyway: parameters and buffers.

    Attributes:
        held: Bytes that are saved now.
        freed: Bytes that were saved and are not any more.
    """

    def __init__(self, but: Iterable[Tensor]) -> None:
        self.held = self.freed = 0
        self._holds: Counter[int] = Counter()
        self._others = {key for key, _ in map(_memory, but) if key}

    @contextmanager
    def counted(self) -> Iterator["SavedBytes"]:
        """Count what operations in this block save, until it is freed, here or later."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed):
            yield self

    def _pack(self, tensor: Tensor) -> Tensor:
        key, num_bytes = _memory(tensor)
        if not key or key in self._others:
            return tensor
        self._holds[key] += 1
        if self._holds[key] == 1:
            self.held += num_bytes
        # Without its graph: some operations save their own output (log_softmax), whose graph holds
        # what is packed. Nobody could free such a circle, nor the module that the graph leads to.
        packed = tensor.detach()
        finalize(packed, self._let_go, key, num_bytes).atexit = False
        return packed

    def _let_go(self, key: int, num_bytes: int) -> None:
        self._holds[key] -= 1
        if self._holds[key] == 0:
            self.held -= num_bytes
            self.freed += num_bytes


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return what tells a tensor's memory from others', and its length; 0 if it has none."""
    try:
        storage = tensor.untyped_storage()
        return storage._cdata, storage.nbytes()  # its address is 0 where a plan runs
    except (NotImplementedError, RuntimeError):  # a wrapper around other tensors
        return 0, 0
