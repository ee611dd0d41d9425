"""What is kept to the end of a pass: gradients, of which small ones wait to be made together.

[Note: sums that wait] The gradients of biases and norms are sums over tokens, which a GPU has made
before the host has launched the next ones. So the tensors that they are sums of wait, until there
are as many as one launch takes, or until they hold more memory than waiting is worth: then the
host has time anyway, because such tensors take the GPU longer. Within a memory budget nothing
waits. What is made does not depend on who waited together, not in its bits and not in its strides.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from unison.capture.tap import refuse_changed
from unison.clip.factored import Factors
from unison.kernels import affine

_MOST_BYTES = 256 << 20  # held by all that wait


class Kind(Protocol):
    """What those that are made together have in common; one object for all of them."""

    def make(self, waiting: Sequence[tuple[Tensor, ...]]) -> Sequence[Tensor]:
        """Return the gradients of all that wait, one parameter after the other."""
        ...


# Names, tensors, their versions, what is held, bytes: a plain tuple, one is made for every use.
_Waiting = tuple[Sequence[str], tuple[Tensor, ...], tuple[int, int], Tensor, int]


class Kept:
    """Per-sample gradients by name, or factors of those that are not formed.

    Args:
        is_bounded: Whether memory is: then nothing waits.

    Attributes:
        found: The gradients in the order in which they came, None for those that wait.
        factors: Of other parameters, likewise; see [Note: factors that wait].
    """

    __slots__ = ("_most_bytes", "_num_bytes", "_waiting", "factors", "found")

    def __init__(self, *, is_bounded: bool = False) -> None:
        self.found: dict[str, Tensor | None] = {}
        self.factors: dict[str, Factors] = {}
        self._waiting: dict[Kind, list[_Waiting]] = {}
        self._num_bytes, self._most_bytes = 0, 0 if is_bounded else _MOST_BYTES

    def __contains__(self, name: str) -> bool:
        return name in self.found or name in self.factors

    def __iter__(self) -> Iterator[str]:
        yield from self.found
        yield from self.factors

    def __len__(self) -> int:
        return len(self.found) + len(self.factors)

    def has_none_of(self, names: Collection[str]) -> bool:
        """Whether no parameter of these has a gradient or factors here."""
        return self.found.keys().isdisjoint(names) and self.factors.keys().isdisjoint(names)

    def wait(
        self,
        kind: Kind,
        names: Sequence[str],
        tensors: tuple[Tensor, ...],
        held: Tensor,
        num_bytes: int,
    ) -> None:
        """Keep the gradients of a use, to be made with others.

        Args:
            kind: How they are made.
            names: Whose they are.
            tensors: What they are made of, one or two.
            held: The gradient as autograd has it, which adds to gradients in place, but only to
                those that nobody else holds.
            num_bytes: Of the tensors.
        """
        for name in names:
            self.found[name] = None  # its place in the order
        waiting = self._waiting.get(kind)
        if waiting is None:
            waiting = self._waiting[kind] = []
        waiting.append((names, tensors, _versions(tensors), held, num_bytes))
        self._num_bytes += num_bytes
        if len(waiting) == affine.MOST_AT_ONCE:
            self._make(kind)
        elif self._num_bytes > self._most_bytes:
            self.made()

    def made(self) -> dict[str, Tensor]:
        """Make what waits, and return all gradients: the dictionary itself."""
        for kind in list(self._waiting):
            self._make(kind)
        return self.found  # type: ignore[return-value]  # nothing waits

    def _make(self, kind: Kind) -> None:
        waiting = self._waiting.pop(kind)
        names, tensors, versions, _, num_bytes = zip(*waiting, strict=True)
        if tuple(map(_versions, tensors)) != versions:
            refuse_changed()
        gradients = kind.make(tensors)
        self.found.update(zip(itertools.chain.from_iterable(names), gradients, strict=True))
        self._num_bytes -= sum(num_bytes)


def _versions(tensors: tuple[Tensor, ...]) -> tuple[int, int]:
    """Return the versions of one tensor, or of two."""
    return tensors[0]._version, tensors[-1]._version


class _Columns:
    """Gradients of biases: each is made of g [samples, tokens, features]."""

    def make(self, waiting: Sequence[tuple[Tensor, ...]]) -> Sequence[Tensor]:
        return affine.column_sums_of_many([g for (g,) in waiting])


class _Norms:
    """Gradients of the gain of a norm, and of its offset: made of its input and g.

    Args:
        eps: Of the norm.
        is_centred: Whether it takes the mean out.
        has_offset: Whether it has an offset.
    """

    def __init__(self, eps: float, is_centred: bool, has_offset: bool) -> None:
        self._eps, self._is_centred, self._has_offset = eps, is_centred, has_offset

    def make(self, waiting: Sequence[tuple[Tensor, ...]]) -> Sequence[Tensor]:
        return affine.sums_of_many(
            [x for x, _ in waiting],
            [g for _, g in waiting],
            self._eps,
            is_centred=self._is_centred,
            has_offset=self._has_offset,
        )


def biases_like(g: Tensor) -> Kind:
    """Return the kind of a bias whose output has such a gradient, contiguous."""
    return _columns_of(g.shape[:2], g.dtype, g.device)


@lru_cache(maxsize=256)
def _columns_of(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _Columns:
    return _Columns()


def norms_like(x: Tensor, g: Tensor, eps: float, *, is_centred: bool, has_offset: bool) -> Kind:
    """Return the kind of a norm with such an input and gradient, both contiguous."""
    return _norms_of(x.shape, (x.dtype, g.dtype), x.device, float(eps), is_centred, has_offset)


@lru_cache(maxsize=256)
def _norms_of(
    shape: torch.Size,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    eps: float,
    is_centred: bool,
    has_offset: bool,
) -> _Norms:
    return _Norms(eps, is_centred, has_offset)
