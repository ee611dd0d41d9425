"""Torch's own generators, seeded for one sample after the other; see [Note: draws] in draws.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from unison.errors import UnsupportedOperation
from unison.rng.draws import BatchDraws, GranuleDraws, samples_dim


def is_draw(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether an operation of torch's dispatcher draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [each.name for each in func._schema.arguments]
    if "dropout_p" in names:  # attention carries the tag with and without dropout
        at = names.index("dropout_p")
        return bool(kwargs.get("dropout_p", args[at] if at < len(args) else 0.0))
    return True


class SeedOperations(TorchDispatchMode):
    """Sees the operations that a torch function is made of, and seeds those that draw.

    Args:
        draws: The draws of the batch.
        rows: The granule's samples.
        dim: The dimension of samples, where it is known.
    """

    def __init__(self, draws: BatchDraws, rows: GranuleDraws, dim: int | None = None) -> None:
        super().__init__()
        self._draws, self._rows, self._dim = draws, rows, dim

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_draw(func, args, kwargs):
            return func(*args, **kwargs)
        if "generator" in kwargs:  # the default one is seeded
            kwargs = {**kwargs, "generator": None}
        return call_per_sample(
            func, args, kwargs, draws=self._draws, rows=self._rows, dim=self._dim
        )


def call_per_sample(
    func: Any,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    draws: BatchDraws,
    rows: GranuleDraws,
    dim: int | None = None,
) -> Any:
    """Call a function that draws from torch's generator, once for each sample.

    Args:
        func: A function of torch's, or an operation of its dispatcher.
        args: Its arguments.
        kwargs: Its arguments by name.
        draws: The draws of the batch.
        rows: The granule's samples; the draw is counted there.
        dim: The dimension of samples, where it is known.
    """
    shape, device = _shape_drawn(args, kwargs), _device_drawn(args, kwargs)
    if dim is None or len(shape) <= dim or shape[dim] != len(rows.ids):
        dim = samples_dim(shape, len(rows.ids))
    number = rows.next_number(is_shared=dim is None)
    if dim is None:
        with seeded(draws.seed(number, None, is_shared=True), device):
            return func(*args, **kwargs)
    size = shape[dim] // len(rows.ids)
    pieces = []
    for index, sample in enumerate(rows.ids.tolist()):
        cut = _Cut(dim, shape[dim], index * size, size)
        with seeded(draws.seed(number, sample), device):
            pieces.append(func(*cut.of(args), **cut.of(kwargs)))
    return args[0] if _is_in_place(func) else _joined(pieces, dim)


def _is_in_place(func: Any) -> bool:
    """Whether an operation of torch's dispatcher returns what it was given."""
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return any(each.alias_info is not None and each.alias_info.is_write for each in returns)


def _joined(pieces: list[Any], dim: int) -> Any:
    if isinstance(pieces[0], Tensor):
        return torch.cat(pieces, dim)
    if isinstance(pieces[0], tuple | list):
        return type(pieces[0])(_joined(list(each), dim) for each in zip(*pieces, strict=True))
    return pieces[0]


@dataclass(frozen=True)
class _Cut:
    """One sample's part of whatever is as long as all samples."""

    dim: int
    whole: int
    start: int
    size: int

    def of(self, value: Any) -> Any:
        """That part of a function's arguments."""
        if isinstance(value, Tensor):
            has_samples = value.dim() > self.dim and value.shape[self.dim] == self.whole
            return value.narrow(self.dim, self.start, self.size) if has_samples else value
        if isinstance(value, torch.Size | list) and all(type(each) is int for each in value):
            if len(value) > self.dim and value[self.dim] == self.whole:
                return [*value[: self.dim], self.size, *value[self.dim + 1 :]]
            return value
        if isinstance(value, tuple):
            return tuple(map(self.of, value))
        if isinstance(value, dict):
            return {key: self.of(each) for key, each in value.items()}
        return value


def _shape_drawn(args: tuple, kwargs: dict[str, Any]) -> Sequence[int]:
    """The shape of what a function draws: of its first tensor, or the one it is given."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape
        if isinstance(value, torch.Size | list | tuple) and all(type(x) is int for x in value):
            return tuple(value)
    return ()


def _device_drawn(args: tuple, kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device
    return torch.device(kwargs.get("device") or "cpu")


# --- a generator's state -------------------------------------------------------------------------

_num_seeding = 0


def is_seeding() -> bool:
    """Whether torch's generator is seeded for a sample right now."""
    return _num_seeding > 0


class seeded:  # noqa: N801 - a context, written out because every draw enters one
    """Let torch's generator of a device be seeded for a block, and then be as it was.

    Args:
        seed: The seed.
        device: Whose generator.
        offset: Where in its stream to begin, on CUDA.
    """

    def __init__(self, seed: int, device: torch.device, offset: int = 0) -> None:
        self._seed, self._offset, self._is_cuda = seed, offset, device.type == "cuda"
        self._generator = torch.default_generator
        if self._is_cuda:
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generator = torch.cuda.default_generators[index]

    def __enter__(self) -> None:
        global _num_seeding
        generator = self._generator
        if not self._is_cuda:
            self._before: Any = generator.get_state()
            generator.manual_seed(self._seed)
        else:
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedOperation(
                    "a CUDA graph would repeat the random numbers it was recorded with, and these "
                    "belong to samples: record without dropout"
                )
            self._before = generator.initial_seed(), generator.get_offset()
            generator.manual_seed(self._seed)
            generator.set_offset(self._offset)
        _num_seeding += 1

    def __exit__(self, *_: object) -> None:
        global _num_seeding
        _num_seeding -= 1
        if not self._is_cuda:
            self._generator.set_state(self._before)
        else:
            seed, offset = self._before
            self._generator.manual_seed(seed)
            self._generator.set_offset(offset)


def generator_states() -> list[Any]:
    """The states of torch's generators."""
    states: list[Any] = [torch.default_generator.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += [
            (each.initial_seed(), each.get_offset()) for each in torch.cuda.default_generators
        ]
    return states


def are_equal_states(before: list[Any], after: list[Any]) -> bool:
    """Whether no generator has moved between two `generator_states`.

    CUDA may have begun in between: its generators stand at the beginning, if nothing was drawn.
    """
    known = len(before)
    is_begun = all(offset == 0 for _, offset in after[known:])
    return torch.equal(before[0], after[0]) and before[1:] == after[1:known] and is_begun
