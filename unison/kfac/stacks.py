"""Layers of equal shape, preconditioned together: one product of many matrices.

[Note: who goes together] A GPU is mostly idle in the product of one layer, and busy in that of
twelve. But how many layers of a shape a rank has depends on the number of ranks, and a product's
bits may depend on how many are computed with it. So layers go together where one process has all of
them and nobody was promised the bits of several; elsewhere each is a stack of its own, and runs the
same code.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from unison.kfac.graft import Values
from unison.kfac.multiply import Inverse, stacked
from unison.kfac.state import LayerState


class Stack:
    """Factored layers of one shape, with inverses of one kind.

    Args:
        states: Of the layers; their inverses are views of the stack's afterwards.
    """

    def __init__(self, states: Sequence[LayerState]) -> None:
        self.layers = [state.layer for state in states]
        first = self.layers[0]
        self._inverse = stacked([_inverse_of(state) for state in states])
        self._shape = len(states), first.d_out, self._inverse.width or first.d_in

    def matrices(self, like: Tensor) -> tuple[Tensor, Values]:
        """Memory for the layers' gradients, and the views of it that parameters have.

        Returns:
            The matrices [layers, d_out, width], zeros after d_in, else not yet written; views of
            the parameters' elements: of weights as matrices, of biases flat.
        """
        first = self.layers[0]
        whole = like.new_empty(self._shape)
        if self._shape[2] > first.d_in:
            whole[:, :, first.d_in :].zero_()
        weights = whole[:, :, : first.columns]
        if first.is_transposed:
            weights = weights.mT
        views = {layer.name: each for layer, each in zip(self.layers, weights, strict=True)}
        if first.bias is not None:
            for layer, each in zip(self.layers, whole[:, :, first.columns], strict=True):
                assert layer.bias is not None
                views[layer.bias] = each
        return whole, views

    def apply(self, whole: Tensor) -> Values:
        """Precondition the matrices [layers, d_out, width]: the directions, by parameter.

        Weights come as matrices, as `matrices` has them, and biases flat.
        """
        first = self.layers[0]
        has_bias = first.bias is not None
        columns = [first.columns, 1] if has_bias else [first.columns]
        weights, *biases = self._inverse.apply_parts(whole, columns)
        if first.is_transposed:
            weights = weights.mT
        found = {layer.name: each for layer, each in zip(self.layers, weights, strict=True)}
        for of_stack in biases:
            for layer, each in zip(self.layers, of_stack[..., 0], strict=True):
                assert layer.bias is not None
                found[layer.bias] = each
        return found


class Plan:
    """Which of some layers go together; right as long as they have the same inverses.

    Args:
        states: Of the layers.
        is_together: Whether layers of equal shape share a stack; see the note above.

    Attributes:
        uncurved: Names of parameters of layers without an inverse.
        stacks: Of the factored layers.
        diagonals: Names of the parameters with a diagonal.
        scales: What to multiply them with, each of the parameter's shape.
        weights: Names of the parameters that layers with an inverse are called after, in order:
            those of the stacks, then `diagonals`.
        biases: Names of the biases that belong to some of them.
        owners_of_biases: The places in `weights` that the biases belong to.
    """

    def __init__(self, states: Sequence[LayerState], *, is_together: bool) -> None:
        self._inverses, self._is_together = [each.inverse for each in states], is_together
        self.uncurved: list[str] = []
        self.diagonals: list[str] = []
        self.scales: list[Tensor] = []
        groups: dict[object, list[LayerState]] = defaultdict(list)
        for state in states:
            layer, inverse = state.layer, state.inverse
            if inverse is None:
                self.uncurved += layer.parameters
            elif inverse.is_diagonal:
                self.diagonals.append(layer.name)
                self.scales.append(inverse.tensors["scale"].reshape(layer.shape))
            else:
                has_bias = layer.bias is not None
                sides = (layer.rows, layer.columns, has_bias, layer.is_transposed)
                groups[(inverse.shapes, sides) if is_together else layer.name].append(state)
        self.stacks = [Stack(group) for group in groups.values()]
        layers = [layer for stack in self.stacks for layer in stack.layers]
        self.weights = [layer.name for layer in layers] + self.diagonals
        self.biases = [layer.bias for layer in layers if layer.bias is not None]
        places = [place for place, layer in enumerate(layers) if layer.bias is not None]
        where = next((each.device for each in map(_held, states) if each is not None), None)
        self.owners_of_biases = torch.tensor(places, dtype=torch.int64, device=where)

    def is_of(self, states: Sequence[LayerState], *, is_together: bool) -> bool:
        """Whether it would be made of these states as it is."""
        return (
            self._is_together == is_together
            and len(self._inverses) == len(states)
            and all(a is b.inverse for a, b in zip(self._inverses, states, strict=True))
        )


def _held(state: LayerState) -> Tensor | None:
    """Any tensor of a state's inverse."""
    return None if state.inverse is None else next(iter(state.inverse.tensors.values()))


def _inverse_of(state: LayerState) -> Inverse:
    assert state.inverse is not None
    return state.inverse
