"""What K-FAC remembers of one layer: averaged factors, and their inverse.

[Note: exact averages] Factors are averaged as F ← βF + (1 - β)F_new from zero, and divided by the
weight that was given out, w ← βw + (1 - β), where they are used: exactly the weighted mean of all
updates, with no trace of where it began.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from unison.kfac.config import KFACConfig
from unison.kfac.inverse import Curvature, Inverse, invert
from unison.kfac.layers import Layer, Method
from unison.kfac.packing import FOLDED, Packing

BYTES_AT_ONCE = 2 << 30  # of factors that are being inverted


class LayerState:
    """One layer on one of its owners."""

    def __init__(self, layer: Layer, config: KFACConfig) -> None:
        self.layer, self._config = layer, config
        self._averages: dict[str, Tensor] = {}  # "a", "g" or "d", not yet divided by the weight
        self._weight = 0.0
        self._inverse: Inverse | None = None

    # --- curvature -------------------------------------------------------------------------------

    def update(
        self, vector: Tensor, num_tokens: float, num_labels: float, packing: Packing = FOLDED
    ) -> None:
        """Average new factors in; nothing if there were no labels.

        Args:
            vector: The sums of all ranks, and after them the two numbers: see `counts_of`.
            num_tokens: Tokens that the layer saw; means nothing for a diagonal.
            num_labels: Labels that the loss was made of.
            packing: How matrices lie in the vector.
        """
        if num_labels == 0:
            return
        beta = self._config.decay
        sums = self._sums(vector[:-1], packing)
        for side, value in sums.items():
            # Divided once: inputs by the tokens that the layer saw, the rest by the labels.
            share = (1 - beta) / (max(num_tokens, 1.0) if side == "a" else num_labels)
            before = self._averages.get(side)
            if before is None:
                self._averages[side] = value * share
            else:
                before.mul_(beta).add_(value, alpha=share)
        self._weight = beta * self._weight + (1 - beta)

    def _sums(self, vector: Tensor, packing: Packing) -> dict[str, Tensor]:
        layer = self.layer
        if layer.method is Method.DIAGONAL:
            return {"d": vector}
        vector = vector[:-1]
        size = packing.size(layer.d_in)
        found = {"a": packing.unpack(vector[:size], layer.d_in)}
        if len(vector) > size:
            found["g"] = packing.unpack(vector[size:], layer.d_out)
        return found

    @property
    def factors(self) -> dict[str, Tensor]:
        """The factors as they are inverted: `a` and `g`, or `d`; nothing before the first."""
        return _factors_of([self])[0]

    # --- the step --------------------------------------------------------------------------------

    @property
    def inverse(self) -> Inverse | None:
        """Of the damped curvature; None before the first, and for a layer without curvature."""
        return self._inverse

    # --- storage ---------------------------------------------------------------------------------

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes that it holds, by what for."""
        return {
            "factors": sum(value.nbytes for value in self._averages.values()),
            "inverses": 0 if self._inverse is None else self._inverse.nbytes,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Everything it remembers, by name."""
        found = {f"average.{side}": value for side, value in self._averages.items()}
        if self._inverse is not None:
            found.update({f"inverse.{key}": each for key, each in self._inverse.tensors.items()})
        found["weight"] = torch.tensor(self._weight, dtype=torch.float64)
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`; the values are taken over."""
        groups: dict[str, dict[str, Tensor]] = {"average": {}, "inverse": {}}
        for key, value in tensors.items():
            kind, _, rest = key.partition(".")
            if rest:
                groups[kind][rest] = value
        self._weight = float(tensors["weight"])
        self._averages = groups["average"]
        self._inverse = Inverse(groups["inverse"]) if groups["inverse"] else None


def counts_of(vectors: Iterable[Tensor]) -> list[tuple[float, float]]:
    """Numbers of tokens and labels, the last two of each vector; a GPU is waited for once."""
    rows = [vector[-2:] for vector in vectors]
    return [(tokens, labels) for tokens, labels in torch.stack(rows).tolist()] if rows else []


def invert_layers(states: Iterable[LayerState], config: KFACConfig, *, is_together: bool) -> None:
    """Make the inverses of some layers anew, those of one size together or each by itself.

    Raises:
        NotInvertible: Naming the first layer that has none, and the remedy.
    """
    for group in _groups(states):
        known = [state for state in group if state._averages]
        curvatures = [
            Curvature(state.layer.name, _as_matrices(state.layer, factors))
            for state, factors in zip(known, _factors_of(known), strict=True)
        ]
        inverses = invert(curvatures, config, is_together=is_together)
        for state, inverse in zip(known, inverses, strict=True):
            state._inverse = inverse


def _factors_of(states: Sequence[LayerState]) -> list[dict[str, Tensor]]:
    """The factors of some layers; on a GPU few launches for all of them."""
    averages = [value for state in states for value in state._averages.values()]
    weights = [state._weight for state in states for _ in state._averages]
    divided = iter(torch._foreach_div(averages, weights) if averages else ())
    return [{side: next(divided) for side in state._averages} for state in states]


def _as_matrices(layer: Layer, factors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"d": factors["d"].reshape(layer.d_out, layer.d_in)} if "d" in factors else factors


def _groups(states: Iterable[LayerState]) -> Iterator[list[LayerState]]:
    """Layers that are inverted together: copies of their factors are held meanwhile."""
    group: list[LayerState] = []
    filled = 0
    for state in states:
        size = state.nbytes["factors"]
        if group and filled + size > BYTES_AT_ONCE:
            yield group
            group, filled = [], 0
        group.append(state)
        filled += size
    if group:
        yield group
