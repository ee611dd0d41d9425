"""From gradients to steps, on the owners of layers."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from unison.kfac.graft import Graft, Values
from unison.kfac.layers import Layer
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
            matrices, views = _directions(plan, source)
            diagonals = [source[name] for name in plan.diagonals]
            if diagonals:
                diagonals = list(torch._foreach_mul(diagonals, plan.scales))
            if own is not None:
                _stretch(plan, matrices, diagonals, own)
            steps.update(views)
            steps.update(zip(plan.diagonals, diagonals, strict=True))
        return steps

    def _plan_of(self, gradients: Mapping[str, Tensor], *, is_together: bool) -> Plan:
        """The same one as long as inverses are; stacks are made once per update."""
        states = [each for each in self._states if each.layer.name in gradients]
        if not self._plan.is_of(states, is_together=is_together):
            self._plan = Plan([], is_together=False)  # let the old stacks go first
            self._plan = Plan(states, is_together=is_together)
        return self._plan


def _directions(plan: Plan, source: Values) -> tuple[list[Tensor], Values]:
    """Preconditioned matrices of each stack, and what of them is which parameter's."""
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
    for stack, whole in zip(plan.stacks, matrices, strict=True):
        stack.apply_(whole)
    return matrices, views


def _shaped(value: Tensor, like: Tensor) -> Tensor:
    return value if value.shape == like.shape else value.reshape(like.shape)


def _stretch(plan: Plan, matrices: list[Tensor], diagonals: list[Tensor], others: Values) -> None:
    """Make each layer's direction, in its place, as long as another step; zeros stay zeros.

    Norms are added up in float64. What is computed of one layer does not depend on the others:
    roots, products and sums of two numbers are rounded in one way only.

    Args:
        plan: Which layer is where.
        matrices: Directions of each stack [layers, d_out, width].
        diagonals: Directions of the other layers.
        others: Of each layer, what to be as long as, by parameter.
    """
    if not plan.weights:
        return
    own = [layer for each in matrices for layer in each.unbind()] + diagonals
    compared = own + [others[name] for name in plan.weights + plan.biases]
    # All in one call, which widens while it reads: a norm over dimensions makes a wide copy.
    norms = torch.stack(torch._foreach_norm(compared, 2, dtype=torch.float64))
    lengths, wanted, of_biases = norms.split([len(own), len(own), len(plan.biases)])
    # A layer has at most one bias, so that no order of sums is left open.
    wanted = wanted.square().index_add_(0, plan.owners_of_biases, of_biases.square()).sqrt_()
    scales = torch.where(lengths > 0, wanted / lengths.clamp(min=1e-300), 1.0)
    scales = scales.to(own[0].dtype)
    done = 0
    for each in matrices:
        each.mul_(scales[done : done + len(each)].view(-1, 1, 1))
        done += len(each)
    if diagonals:
        torch._foreach_mul_(diagonals, list(scales[done:].unbind()))


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
