"""Sums over the records of one part of a pass: what factors and diagonals are made of."""

from collections.abc import Sequence

import torch
from torch import Tensor

from unison.errors import BadInput
from unison.kfac.config import KFACConfig
from unison.kfac.factors import diagonal_sums, kronecker_sums, token_weights
from unison.kfac.layers import Layer, Method, plain_record
from unison.kfac.packing import FOLDED, Packing
from unison.kfac.passes import Part
from unison.kfac.phases import phase
from unison.ops import Product, Record


class PartSums:
    """Sums over one part of a pass, layer by layer; what the capture calls.

    Args:
        layers: All layers.
        config: For the form of weight sharing and the kind of Fisher matrix.
        part: The part; only its mask and number of labels are read.
        packing: How matrices are given away.

    Attributes:
        sums: By the layer's name and what is summed.
    """

    def __init__(
        self, layers: Sequence[Layer], config: KFACConfig, part: Part, packing: Packing = FOLDED
    ) -> None:
        self._layers, self._config, self._part = layers, config, part
        self._packing = packing
        self._by_parameter = {layer.name: layer for layer in layers}
        self._has_g = config.fisher != "forward"
        self._is_first = True  # of several columns: inputs are counted once
        self.sums: dict[tuple[str, str], Tensor] = {}
        self._uses: dict[str, list[Record]] = {}

    def record(self, name: str, record: Record) -> None:
        """Take a use of a parameter."""
        layer = self._by_parameter.get(name)
        if layer is None or layer.method is Method.IDENTITY:
            return  # a bias comes with its weight
        record = plain_record(record)
        if layer.method is Method.DIAGONAL:
            self._uses.setdefault(name, []).append(record)
        elif isinstance(record, Product):
            self._add_kronecker(layer, record)

    def _add_kronecker(self, layer: Layer, record: Product) -> None:
        if (record.g.shape[-1], record.a.shape[-1]) != (layer.rows, layer.columns):
            raise BadInput(
                f"{layer.name} was used as a matrix of {layer.rows} x {layer.columns}, and is now "
                f"used as one of {record.g.shape[-1]} x {record.a.shape[-1]}"
            )
        weights = token_weights(self._part.mask, record.g.shape[1], layer.name)
        with phase("products"):
            found = kronecker_sums(
                record,
                weights,
                sharing=self._config.sharing,
                has_bias=layer.bias is not None,
                wants_a=self._is_first,
                wants_g=self._has_g,
            )
        if found.a is not None:
            self._add(layer.name, "a", found.a)
            self._add(layer.name, "tokens", found.num_tokens)
        if found.g is not None:
            self._add(layer.name, "g", found.g)

    def end_column(self) -> None:
        """End a backward pass: all uses of every parameter are there."""
        is_counted = None if self._part.mask is None else self._part.mask.any(dim=1)
        with phase("products"):
            for name, records in self._uses.items():
                self._add(name, "d", diagonal_sums(records, is_counted))
        self._uses.clear()
        self._is_first = False

    def _add(self, name: str, side: str, value: Tensor) -> None:
        before = self.sums.get((name, side))
        self.sums[name, side] = value if before is None else before.add_(value)

    def vectors(self, like: Tensor) -> list[Tensor | None]:
        """What ranks add up, one vector per layer: sums, then what to divide them by.

        The sums are gone afterwards: the capture, which knows this object, is freed late.
        """
        return [self._vector(layer, like) for layer in self._layers]

    def _vector(self, layer: Layer, like: Tensor) -> Tensor | None:
        take, name = self.sums.pop, layer.name
        if (name, "d") in self.sums:
            values = [take((name, "d")).reshape(-1)]
        elif (name, "a") in self.sums:
            sides = ("a", "g") if self._has_g else ("a",)
            values = [self._packing.pack(take((name, side))) for side in sides]
            values.append(take((name, "tokens")).reshape(1))
        else:
            return None
        values.append(like.new_full((1,), float(self._part.num_terms)))
        return torch.cat([value.to(like) for value in values])
