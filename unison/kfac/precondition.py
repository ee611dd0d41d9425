"""From gradients to steps, on the owners of layers."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from unison.kfac.graft import Graft, Values
from unison.kfac.layers import Layer
from unison.kfac.multiply import multiply_all_
from unison.kfac.phases import phase
from unison.kfac.stacks import Plan
from unison.kfac.state import LayerState


class Preconditioner:
    """Makes the steps of some layers, with few and large operations.

    Args:
        states: Of the layers.
        graft: The optimizer whose step length is taken.
    """

    def __init__(self, states: Iterable[LayerState], graft: Graft) -> None:
        self._states, self._graft = list(states), graft
        self._plan = Plan([], is_together=False)

    def steps(self, gradients: Mapping[str, Tensor], *, is_together: bool) -> Values:
        """The steps, by parameter: of its shape, or flat, or as its layer's matrix.

        A layer without curvature takes the grafted optimizer's own step, to the bit.

        Args:
            gradients: Of the layers' parameters, whole; a layer that is missing has none on any
                rank.
            is_together: Whether layers of equal shape share a product; see `stacks`.
        """
        with phase("graft"):
            own, source = self._graft.step(gradients)
        with phase("apply"):
            plan = self._plan_of(gradients, is_together=is_together)
            values = source if own is None else own
            steps = {name: values[name] for name in plan.uncurved}
            directions = _directions(plan, source)
            if own is not None:
                _stretch_(plan, directions, own)
            steps.update(directions)
        return steps

    def _plan_of(self, gradients: Mapping[str, Tensor], *, is_together: bool) -> Plan:
        """The same one as long as inverses are; stacks are made once per update."""
        states = [each for each in self._states if each.layer.name in gradients]
        if not self._plan.is_of(states, is_together=is_together):
            self._plan = Plan([], is_together=False)  # let the old stacks go first
            self._plan = Plan(states, is_together=is_together)
        return self._plan


def _directions(plan: Plan, source: Values) -> Values:
    """What is preconditioned, by parameter: new memory."""
    matrices: list[Tensor] = []
    views: Values = {}
    for stack in plan.stacks:
        whole, of_stack = stack.matrices(source[stack.layers[0].name])
        matrices.append(whole)
        views.update(of_stack)
    if views:
        torch._foreach_copy_(
            list(views.values()), [_shaped(source[name], view) for name, view in views.items()]
        )
    found: Values = {}
    for stack, whole in zip(plan.stacks, matrices, strict=True):
        found.update(stack.apply(whole))
    if plan.diagonals:
        diagonals = torch._foreach_mul([source[name] for name in plan.diagonals], plan.scales)
        found.update(zip(plan.diagonals, diagonals, strict=True))
    return found


def _shaped(value: Tensor, like: Tensor) -> Tensor:
    return value if value.shape == like.shape else value.reshape(like.shape)


def _stretch_(plan: Plan, directions: Values, others: Values) -> None:
    """Make each layer's direction, in its place, as long as another step; zeros stay zeros.

    Norms are added up in float64. What is computed of one layer does not depend on the others:
    roots, products and sums of two numbers are rounded in one way only.

    Args:
        plan: Which layer is where.
        directions: Of the layers with an inverse, by parameter.
        others: Of each, what to be as long as.
    """
    names = plan.weights + plan.biases
    if not names:
        return
    own = [directions[name] for name in names]
    # All in one call, which widens while it reads: a norm over dimensions makes a wide copy.
    compared = own + [others[name] for name in names]
    norms = torch.stack(torch._foreach_norm(compared, 2, dtype=torch.float64)).view(2, -1)
    # A layer has at most one bias, so that no order of sums is left open.
    squares, of_biases = norms.square().split([len(plan.weights), len(plan.biases)], dim=1)
    lengths, wanted = squares.index_add(1, plan.owners_of_biases, of_biases).sqrt()
    scales = torch.where(lengths > 0, wanted / lengths.clamp(min=1e-300), 1.0)
    scales = torch.cat([scales, scales[plan.owners_of_biases]])
    multiply_all_(own, scales.to(own[0].dtype))


def products_of(
    layers: Mapping[int, Layer],
    num_layers: int,
    steps: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    device: torch.device,
) -> Tensor:  # [num_layers], float64
    """⟨step, gradient⟩ of some layers, by their numbers; 0 for all others."""
    products = torch.zeros(num_layers, dtype=torch.float64, device=device)
    for index, layer in layers.items():
        for name in layer.parameters:
            if name in steps:
                step, gradient = steps[name].reshape(-1), gradients[name].reshape(-1)
                products[index] += step.double() @ gradient.double()
    return products
