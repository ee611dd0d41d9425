"""What K-FAC remembers of one layer: averaged factors, and their inverse.

[Note: exact averages] Factors are averaged as F ← βF + (1 - β)F_new from zero, and divided by the
weight that was given out, w ← βw + (1 - β), where they are used: exactly the weighted mean of all
updates, with no trace of where it began.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from unison.kfac.config import KFACConfig
from unison.kfac.inverse import Curvature, Inverse, invert
from unison.kfac.layers import Layer, Method
from unison.kfac.packing import triangle_size, unpacked

BYTES_AT_ONCE = 2 << 30  # of factors that are being inverted


class LayerState:
    """One layer on one of its owners."""

    def __init__(self, layer: Layer, config: KFACConfig) -> None:
        self.layer, self._config = layer, config
        self._averages: dict[str, Tensor] = {}  # "a", "g" or "d", not yet divided by the weight
        self._weight = 0.0
        self._inverse: Inverse | None = None

    # --- curvature -------------------------------------------------------------------------------

    def update(self, vector: Tensor, num_tokens: float, num_labels: float) -> None:
        """Average new factors in; nothing if there were no labels.

        Args:
            vector: The sums of all ranks, and after them the two numbers: see `counts_of`.
            num_tokens: Tokens that the layer saw; means nothing for a diagonal.
            num_labels: Labels that the loss was made of.
        """
        if num_labels == 0:
            return
        new = self._means(vector[:-1], max(num_tokens, 1.0), num_labels)
        beta = self._config.decay
        for side, value in new.items():
            before = self._averages.get(side)
            if before is None:
                self._averages[side] = value.mul_(1 - beta)
            else:
                before.mul_(beta).add_(value, alpha=1 - beta)
        self._weight = beta * self._weight + (1 - beta)

    def _means(self, sums: Tensor, num_tokens: float, num_labels: float) -> dict[str, Tensor]:
        """Divide, once: inputs by the tokens that the layer saw, the rest by the labels."""
        layer = self.layer
        if layer.method is Method.DIAGONAL:
            return {"d": sums / num_labels}
        sums = sums[:-1]
        size = triangle_size(layer.d_in)
        found = {"a": unpacked(sums[:size] / num_tokens, layer.d_in)}
        if len(sums) > size:
            found["g"] = unpacked(sums[size:] / num_labels, layer.d_out)
        return found

    @property
    def factors(self) -> dict[str, Tensor]:
        """The factors as they are inverted: `a` and `g`, or `d`; nothing before the first."""
        return {side: value / self._weight for side, value in self._averages.items()}

    @property
    def curvature(self) -> Curvature | None:
        """What is to be inverted; None for a layer without curvature."""
        factors = self.factors
        if not factors:
            return None
        if "d" in factors:
            factors = {"d": factors["d"].reshape(self.layer.d_out, self.layer.d_in)}
        return Curvature(self.layer.name, factors)

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
        found = [(state, state.curvature) for state in group]
        wanted = [(state, each) for state, each in found if each is not None]
        inverses = invert([each for _, each in wanted], config, is_together=is_together)
        for (state, _), inverse in zip(wanted, inverses, strict=True):
            state._inverse = inverse


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
