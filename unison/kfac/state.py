"""What K-FAC remembers of one layer: averaged factors, and their inverse.

[Note: exact averages] Factors are averaged as F ← βF + (1 - β)F_new from zero, and divided by the
weight that was given out, w ← βw + (1 - β), where they are used: exactly the weighted mean of all
updates, with no trace of where it began.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from unison.kfac.config import KFACConfig
from unison.kfac.graft import Values, norm
from unison.kfac.inverse import Inverse, invert_diagonal, invert_kronecker
from unison.kfac.layers import Layer, Method
from unison.kfac.packing import triangle_size, unpacked


class LayerState:
    """One layer on one of its owners."""

    def __init__(self, layer: Layer, config: KFACConfig) -> None:
        self.layer, self._config = layer, config
        self._averages: dict[str, Tensor] = {}  # "a", "g" or "d", not yet divided by the weight
        self._weight = 0.0
        self._inverse: Inverse | None = None

    # --- curvature -------------------------------------------------------------------------------

    def update(self, vector: Tensor) -> None:
        """Average new factors in, from the sums of all ranks; nothing if they saw no labels."""
        num_labels = float(vector[-1])
        if num_labels == 0:
            return
        new = self._means(vector[:-1], num_labels)
        beta = self._config.decay
        for side, value in new.items():
            before = self._averages.get(side)
            scaled = value.mul_(1 - beta)
            self._averages[side] = scaled if before is None else before.mul_(beta).add_(scaled)
        self._weight = beta * self._weight + (1 - beta)

    def _means(self, sums: Tensor, num_labels: float) -> dict[str, Tensor]:
        """Divide, once: inputs by the tokens that the layer saw, the rest by the labels."""
        layer = self.layer
        if layer.method is Method.DIAGONAL:
            return {"d": sums / num_labels}
        sums, num_tokens = sums[:-1], max(float(sums[-1]), 1.0)
        size = triangle_size(layer.d_in)
        found = {"a": unpacked(sums[:size] / num_tokens, layer.d_in)}
        if len(sums) > size:
            found["g"] = unpacked(sums[size:] / num_labels, layer.d_out)
        return found

    @property
    def factors(self) -> dict[str, Tensor]:
        """The factors as they are inverted: `a` and `g`, or `d`; nothing before the first."""
        return {side: value / self._weight for side, value in self._averages.items()}

    def invert(self) -> None:
        """Make the inverse anew.

        Raises:
            NotInvertible: Naming the layer and the remedy.
        """
        factors = self.factors
        if "d" in factors:
            diagonal = factors["d"].reshape(self.layer.d_out, self.layer.d_in)
            self._inverse = invert_diagonal(diagonal, self._config, self.layer.name)
        elif factors:
            self._inverse = invert_kronecker(
                factors["a"], factors.get("g"), self._config, self.layer.name
            )

    # --- the step --------------------------------------------------------------------------------

    def step(self, own: Values | None, source: Values) -> Values:
        """The layer's step, by parameter and flat.

        A layer without curvature takes the grafted optimizer's own step, to the bit.

        Args:
            own: The grafted optimizer's step; None where K-FAC keeps its own length.
            source: What is preconditioned; of all its parameters, whole.
        """
        if self._inverse is None:
            found = source if own is None else own
            return {name: value.reshape(-1) for name, value in found.items()}
        steps = self.layer.parts(self._inverse.apply(self.layer.matrix(source)))
        return steps if own is None else _with_norm_of(own, steps)

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


def _with_norm_of(own: Values, steps: Values) -> Values:
    """Steps as long as another's; a step of zeros stays one."""
    length = norm(steps.values())
    scale = torch.where(length > 0, norm(own.values()) / length.clamp(min=1e-300), 1.0)
    return {name: value * scale.to(value.dtype) for name, value in steps.items()}
