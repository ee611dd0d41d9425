"""From gradients to steps: to the owners of layers, multiplied with inverses there, and back.

A layer is preconditioned as a whole matrix by its owner, whatever cuts its parameters: a flat shard
may end in the middle of a row. So each owner is sent the parts of its layers that others hold, and
sends back what each of them holds of the step: as many bytes as a gradient's reduce-scatter and
gather. Where every rank has whole gradients the first half is nothing, and where every rank owns
every layer the second is.

[Note: who goes together] A GPU is mostly idle in the product of one layer, and busy in that of
twelve. But how many layers of a shape a rank has depends on the number of ranks, and a product's
bits may depend on how many are computed with it. So layers go together where one process has all of
them and nobody was promised the bits of several; elsewhere each is a stack of its own, and runs the
same code.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from unison.kernels import multi_tensor
from unison.kfac.inverse import stacked
from unison.kfac.layers import Assignment, Layer
from unison.kfac.phases import phase
from unison.kfac.state import Graft, LayerState, Values
from unison.parallel import ParallelAdapter, ShardedParam, write_gradients
from unison.parallel.exchange import swap


class Routes:
    """Who sends what to whom; arithmetic that every rank does alike.

    Args:
        adapter: Holds the parameters.
        layers: What is preconditioned.
        assignment: By whom.
    """

    def __init__(
        self, adapter: ParallelAdapter, layers: Sequence[Layer], assignment: Assignment
    ) -> None:
        self._ranks, self._num_places, self._assignment = (
            adapter.ranks,
            adapter.num_places,
            assignment,
        )
        dtype = torch.float32
        for each in adapter.params:
            dtype = torch.promote_types(dtype, each.parameter.dtype)
        self.like = torch.zeros(0, dtype=dtype, device=adapter.device)
        held = {each.name: each for each in adapter.params}
        self._params = [[held[name] for name in layer.parameters] for layer in layers]

    def _owned_by(self, rank: int) -> list[list[ShardedParam]]:
        """The parameters of the layers that a rank owns."""
        return [own for i, own in enumerate(self._params) if self._assignment.owns(rank, i)]

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradients of the layers that this rank owns; a collective if they are cut.

        Layers of which this rank has no gradient at all are left out: no rank has one.
        """
        mine = self._owned_by(self._ranks.rank)
        if self._num_places == 1:
            wholes = {each.name: each.gradient(each.shape) for own in mine for each in own}
        else:
            wholes = self._gathered([each for own in mine for each in own])
        return {
            each.name: wholes[each.name].to(self.like)
            for own in mine
            if any(each.parameter.grad is not None for each in own)
            for each in own
        }

    def _gathered(self, mine: Sequence[ShardedParam]) -> dict[str, Tensor]:
        """The gradients of some parameters, of the parts at every place of this copy."""
        ranks, size = self._ranks, self._num_places
        first = ranks.rank // size * size  # of the ranks that hold the same copy
        sent: list[list[Tensor]] = [[] for _ in range(ranks.size)]
        expected: list[list[int]] = [[] for _ in range(ranks.size)]
        for place in range(size):
            theirs = self._owned_by(first + place)
            sent[first + place] = [each.gradient() for own in theirs for each in own]
            expected[first + place] = [_length(each, place) for each in mine]
        received = swap(ranks, sent, expected, self.like)[first : first + size]
        pairs = zip(mine, zip(*received, strict=True), strict=True)
        return {
            each.name: torch.cat([part.to(self.like) for part in parts]).view(each.shape)
            for each, parts in pairs
        }

    def give(self, steps: Mapping[str, Tensor]) -> None:
        """Put steps where the gradients were; a collective unless every rank owns every layer.

        Args:
            steps: Of the parameters of the layers that this rank owns, in any shape; one that is
                missing had no gradient on any rank.
        """
        ranks, size = self._ranks, self._num_places
        me, place = ranks.rank, ranks.rank % size
        if self._assignment.is_replicated:
            mine = self._sent(me, me)
            write_gradients((each, self._part(steps, each, place)) for each in mine)
            return
        sent = [
            [self._part(steps, each, rank % size).reshape(-1) for each in self._sent(me, rank)]
            for rank in range(ranks.size)
        ]
        expected = [self._sent(rank, me) for rank in range(ranks.size)]
        sizes = [[_length(each, place) for each in of_rank] for of_rank in expected]
        received = swap(ranks, sent, sizes, self.like)
        for of_rank, values in zip(expected, received, strict=True):
            write_gradients(zip(of_rank, values, strict=True))

    def _sent(self, source: int, target: int) -> list[ShardedParam]:
        """The parameters whose steps one rank gets from another."""
        layers = enumerate(self._params)
        return [p for i, own in layers if self._assignment.source(target, i) == source for p in own]

    def _part(self, steps: Mapping[str, Tensor], each: ShardedParam, place: int) -> Tensor:
        start, stop = each.ranges[place]
        step = steps.get(each.name)
        if step is None:
            return self.like.new_zeros(stop - start)
        return step if stop - start == step.numel() else step.reshape(-1)[start:stop]


def _length(each: ShardedParam, place: int) -> int:
    start, stop = each.ranges[place]
    return stop - start


# --- on the owner ---------------------------------------------------------------------------------


class Stack:
    """Factored layers of one shape, with inverses of one kind.

    Args:
        states: Of the layers; their inverses are views of the stack's afterwards.
    """

    def __init__(self, states: Sequence[LayerState]) -> None:
        self.layers = [state.layer for state in states]
        first = self.layers[0]
        self._inverse = stacked([state.inverse for state in states if state.inverse is not None])
        self._shape = len(states), first.d_out, self._inverse.width or first.d_in

    def matrices(self, like: Tensor) -> tuple[Tensor, Values]:
        """Memory for the layers' gradients, and the views of it that parameters have.

        Returns:
            The matrices [layers, d_out, width], zeros after d_in, else not yet written; views of
            the parameters' elements: of weights as matrices, of biases flat.
        """
        d_in, columns = self.layers[0].d_in, self.layers[0].columns
        whole = like.new_empty(self._shape)
        if self._shape[2] > d_in:
            whole[:, :, d_in:].zero_()
        return whole, self._by_name([whole[:, :, :columns], whole[:, :, columns:d_in]])

    def apply(self, whole: Tensor) -> Values:
        """Precondition the matrices [layers, d_out, width]: the directions, by parameter.

        Weights come as matrices, as `matrices` has them, and biases flat.
        """
        d_in, columns = self.layers[0].d_in, self.layers[0].columns
        return self._by_name(self._inverse.apply_parts(whole, [columns, d_in - columns]))

    def _by_name(self, parts: Sequence[Tensor]) -> Values:
        """By parameter: the columns of weights, and of biases where there are some."""
        weights, biases = parts
        if self.layers[0].is_transposed:
            weights = weights.mT
        found = {layer.name: each for layer, each in zip(self.layers, weights, strict=True)}
        for layer, each in zip(self.layers, biases, strict=True):
            if layer.bias is not None:
                found[layer.bias] = each[:, 0]
        return found


class StackPlan:
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
        where = next((each.device for each in self._inverses if each is not None), None)
        self.owners_of_biases = torch.tensor(places, dtype=torch.int64, device=where)

    def is_of(self, states: Sequence[LayerState], *, is_together: bool) -> bool:
        """Whether it would be made of these states as it is."""
        return (
            self._is_together == is_together
            and len(self._inverses) == len(states)
            and all(a is b.inverse for a, b in zip(self._inverses, states, strict=True))
        )


class StackedPreconditioner:
    """Makes the steps of some layers, with few and large operations.

    Args:
        states: Of the layers.
        graft: The optimizer whose step length is taken.
    """

    def __init__(self, states: Iterable[LayerState], graft: Graft) -> None:
        self._states, self._graft = list(states), graft
        self._plan = StackPlan([], is_together=False)

    def steps(self, gradients: Mapping[str, Tensor], *, is_together: bool) -> Values:
        """The steps, by parameter: of its shape, or flat, or as its layer's matrix.

        A layer without curvature takes the grafted optimizer's own step, to the bit.

        Args:
            gradients: Of the layers' parameters, whole; a layer that is missing has none on any
                rank.
            is_together: Whether layers of equal shape share a product; see the note above.
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

    def _plan_of(self, gradients: Mapping[str, Tensor], *, is_together: bool) -> StackPlan:
        """The same one as long as inverses are; stacks are made once per update."""
        states = [each for each in self._states if each.layer.name in gradients]
        if not self._plan.is_of(states, is_together=is_together):
            self._plan = StackPlan([], is_together=False)  # let the old stacks go first
            self._plan = StackPlan(states, is_together=is_together)
        return self._plan


def _directions(plan: StackPlan, source: Values) -> Values:
    """What is preconditioned, by parameter: new memory."""
    matrices: list[Tensor] = []
    views: Values = {}
    for stack in plan.stacks:
        whole, of_stack = stack.matrices(source[stack.layers[0].name])
        matrices.append(whole)
        views.update(of_stack)
    if views:
        values = [source[name].reshape(view.shape) for name, view in views.items()]
        torch._foreach_copy_(list(views.values()), values)
    found: Values = {}
    for stack, whole in zip(plan.stacks, matrices, strict=True):
        found.update(stack.apply(whole))
    if plan.diagonals:
        diagonals = torch._foreach_mul([source[name] for name in plan.diagonals], plan.scales)
        found.update(zip(plan.diagonals, diagonals, strict=True))
    return found


def _stretch_(plan: StackPlan, directions: Values, others: Values) -> None:
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


def multiply_all_(values: Sequence[Tensor], scales: Tensor) -> None:
    """Multiply each tensor, in its place, with its number of `scales` [tensors]."""
    flat = [value.view(1, -1) for value in values if value.is_contiguous()]
    if len(flat) == len(values) and scales.dtype == torch.float32 and multi_tensor.is_fast(flat):
        multi_tensor.combine(flat, scales[:, None], flat)  # one launch for all
    else:
        torch._foreach_mul_(list(values), list(scales.unbind()))
