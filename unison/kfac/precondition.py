"""What the owner of a layer remembers of it, and the steps it makes of gradients with that.

[Note: exact averages] Factors are averaged as F ← βF + (1 - β)F_new from zero, and divided by the
weight that was given out, w ← βw + (1 - β), where they are used: exactly the weighted mean of all
updates, with no trace of where it began.

Grafting takes the step length of an optimizer that is easy to tune, in the direction of another.
K-FAC's own step is as long as its curvature says, which is fragile where the curvature is rough. A
grafted step has the norm that Adam's (or SGD's) step of the same layer would have. Measured in the
reference notes: K-FAC with Adam's length needed fewer steps than tuned AdamW, K-FAC with its own
never did.

[Note: who goes together] A GPU is mostly idle in the product of one layer, and busy in that of
twelve. But how many layers of a shape a rank has depends on the number of ranks, and a product's
bits may depend on how many are computed with it. So layers go together where one process has all of
them and nobody was promised the bits of several; elsewhere each is a stack of its own, and runs the
same code.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from unison.errors import BadInput
from unison.kernels import multi_tensor
from unison.kfac.config import KFACConfig
from unison.kfac.factors import phase, unpacked
from unison.kfac.inverse import (
    Columns,
    Inverse,
    align,
    apply,
    apply_shared,
    fold,
    invert,
    join,
    stack,
)
from unison.kfac.layers import Layer
from unison.kfac.linalg import is_gpu, largest_elements
from unison.parallel.exchange import SharedBlocks, buckets

BYTES_AT_ONCE = 2 << 30  # of factors that are being inverted

Values = dict[str, Tensor]  # by parameter

# --- what an owner remembers of a layer -----------------------------------------------------------


class LayerState:
    """One layer on one of its owners: averaged factors, and their inverse.

    Args:
        layer: The layer.
        config: For the decay of averages.
        graft: The optimizer that is grafted, with what it remembers of all layers.
        like: Of the dtype and on the device that factors are computed in.
        shared: Which blocks of its rows are whose, see [Note: rows] in layers.py; None for a layer
            that is whole.

    Attributes:
        layer: The layer.
        shared: As given.
        keys_of_blocks: What is held here of its parameters, by blocks: `name#3`; one that is whole
            is one block, by names.
        inverse: Of the damped curvature; None before the first, and for a layer without curvature.
    """

    def __init__(
        self,
        layer: Layer,
        config: KFACConfig,
        graft: "Graft",
        like: Tensor,
        shared: SharedBlocks | None = None,
    ) -> None:
        self.layer, self._decay, self._graft = layer, config.decay, graft
        self.shared = shared
        numbers = [""] if shared is None else [f"#{number}" for number in shared.numbers]
        self.keys_of_blocks = [tuple(x + number for x in layer.parameters) for number in numbers]
        self._num_columns = 0  # of blocks, which this rank may have none of
        self._config, self._like = config, like
        self._max_rank = config.max_rank if config.has_rank else None
        self._averages: dict[str, Tensor] = {}  # as `Factors`, not yet divided by the weight
        self._scales: dict[str, float] = {}  # of those that are stored in a narrow dtype
        self._weight = 0.0
        self.inverse: Inverse | None = None

    def columns(self, side: str, values: Mapping[str, Tensor], count: int) -> Columns:
        """The columns of a side from what is held here of them.

        Args:
            side: `"a"` or `"g"`.
            values: By `u_g`, or `u_g#3` for a block.
            count: How many there are, where ranks share their rows.
        """
        key, shared = f"u_{side}", self.shared if side == "g" else None
        if shared is None:
            return Columns.whole(values[key])
        blocks = [values[f"{key}#{number}"] for number in shared.numbers]
        starts = [self.layer.blocks[number][0] for number in shared.numbers]
        return Columns(blocks, starts, count, self.layer.rows, self._like, shared)

    def _add_columns(self, side: str, rows: Columns) -> None:
        """Average columns in: a sum of products is the product of all of them, side by side."""
        before = None
        if self._decay and f"t_{side}" in self._averages:
            known = [key for key in self._averages if key.startswith(f"u_{side}")]
            decayed = {key: self._read(key) * self._decay**0.5 for key in known}
            before = self.columns(side, decayed, self._num_columns)
        tail = self._decay * float(self._averages.get(f"t_{side}", 0.0))
        if self._max_rank is not None:
            # A diagonal less fewer columns is the larger one, and positive without any tail.
            has_tail = self.layer.form(side) != "softmax"
            rows, more = join(before, rows, self._max_rank, has_tail=has_tail)
            tail += more
        else:
            if before is not None:
                pairs = zip(before.blocks, rows.blocks, strict=True)
                rows = rows.of([torch.cat(pair) for pair in pairs], before.count + rows.count)
            rows = fold(rows)
        for key, value in rows.named(f"u_{side}", rows.blocks).items():
            self._write(key, value)
        if rows.shared is not None:
            self._num_columns = rows.count
        self._averages[f"t_{side}"] = torch.tensor(tail, dtype=torch.float64)

    def _read(self, key: str) -> Tensor:
        """An average as it is computed with."""
        value = self._averages[key]
        if key.startswith("t_"):  # of the host
            return value
        value = value.to(self._like, non_blocking=True)
        return value * self._scales[key] if key in self._scales else value

    def _write(self, key: str, value: Tensor) -> None:
        """Keep an average as it is stored."""
        dtype, device = self._config.storage_dtype, self._config.storage_device
        if dtype != "auto":
            # A power of two, so that nothing else is rounded; see `largest_elements` for none.
            scale = 2.0 ** math.frexp(float(largest_elements([value])[0]))[1]
            self._scales[key] = scale
            value = (value / scale).to(getattr(torch, dtype))
        if device == "cpu" and is_gpu(value):
            value = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value)
        self._averages[key] = value

    @property
    def factors(self) -> dict[str, Tensor]:
        """The factors as they are inverted, see `Factors`; nothing before the first."""
        return _factors_of([self])[0]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes that it holds, by what for."""
        held = {
            "factors": self._averages,
            "inverses": self.inverse or {},
            "grafting": self._graft.tensors(itertools.chain(*self.keys_of_blocks)),
        }
        return {what: sum(each.nbytes for each in own.values()) for what, own in held.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything it remembers, by name; without padding."""
        found = {f"average.{side}": value for side, value in self._averages.items()}
        for key, scale in self._scales.items():
            found[f"scale.{key}"] = torch.tensor(scale, dtype=torch.float64)
        for key, value in (self.inverse or {}).items():
            d_in = self.layer.d_in
            found[f"inverse.{key}"] = value[:d_in, :d_in] if key == "a" else value
        found["weight"] = torch.tensor(self._weight, dtype=torch.float64)
        if self.shared is not None:
            found["columns"] = torch.tensor(self._num_columns)
        grafted = self._graft.tensors(itertools.chain(*self.keys_of_blocks))
        return found | {f"graft.{key}": each for key, each in grafted.items()}

    def holds(self, key: str) -> bool:
        """Whether a key of `tensors` is of this rank: not of another rank's block."""
        number = key.partition("#")[2]
        return not number or (self.shared is not None and int(number) in self.shared.numbers)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`; the values are taken over."""
        kinds = ("average", "inverse", "graft", "scale")
        groups: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
        for key, value in tensors.items():
            kind, _, rest = key.partition(".")
            if rest:
                groups[kind][rest] = align(value) if key == "inverse.a" else value
        self._weight = float(tensors["weight"])
        self._num_columns = int(tensors.get("columns", 0))
        self._averages = groups["average"]
        self._scales = {key: float(value) for key, value in groups["scale"].items()}
        if self._config.storage_device == "cpu":
            for key, value in self._averages.items():
                if is_gpu(value):
                    self._averages[key] = value.cpu().pin_memory()
        self.inverse = groups["inverse"] or None
        self._graft.load(groups["graft"])


def update_layers(
    updates: Iterable[tuple[LayerState, Values, Mapping[str, Columns], int, int]],
) -> None:
    """Average new factors of layers in, each with few launches for all of them.

    A collective where ranks share rows of layers, of which every rank has a state.

    Args:
        updates: Of each layer its state; the sums of all ranks, where matrices may be folded, which
            are given away; the columns of all ranks, of sides that are held so;
            tokens that the layer saw, which mean nothing for a diagonal; and labels that the loss
            was made of: nothing changes without any.
    """
    items: list[tuple[LayerState, str, Tensor, float]] = []
    for state, sums, columns, num_tokens, num_labels in updates:
        if num_labels == 0:
            continue
        decay = state._decay
        # Divided once: inputs by the tokens that the layer saw, the rest by the labels.
        shares = dict.fromkeys("gd", (1 - decay) / num_labels)
        shares["a"] = (1 - decay) / max(num_tokens, 1)
        items += [(state, key, value, shares[key[-1]]) for key, value in sums.items()]
        for side, rows in columns.items():
            scaled = [each * shares[side] ** 0.5 for each in rows.blocks]
            state._add_columns(side, rows.of(scaled, rows.count))
        state._weight = decay * state._weight + (1 - decay)
    for group in buckets(items, lambda item: 2 * item[2].nbytes, BYTES_AT_ONCE):
        values = [
            unpacked(value, state.layer.side(key)) if key in "ag" and value.ndim == 1 else value
            for state, key, value, _ in group
        ]
        first: list[int] = []
        by_share: dict[float, list[int]] = defaultdict(list)  # of those that have an average
        for n, (state, key, _, share) in enumerate(group):
            (by_share[share] if key in state._averages else first).append(n)
        if first:
            torch._foreach_mul_([values[n] for n in first], [group[n][3] for n in first])
        for share, known in by_share.items():  # one where there is a label for every token
            before = [group[n][0]._read(group[n][1]) for n in known]
            torch._foreach_mul_(before, group[0][0]._decay)
            torch._foreach_add_(before, [values[n] for n in known], alpha=share)
            for n, value in zip(known, before, strict=True):
                values[n] = value
        for (state, key, *_), value in zip(group, values, strict=True):
            state._write(key, value)


def invert_layers(states: Iterable[LayerState], config: KFACConfig, *, is_together: bool) -> None:
    """Make the inverses of some layers anew, those of one size together or each by itself.

    A collective where ranks share rows of layers, of which every rank has a state.

    Raises:
        NotInvertible: Naming the first layer that has none, and the remedy.
    """
    states = [state for state in states if state._averages]
    for state in (each for each in states if each.shared is not None):
        factors: dict[str, Any] = {**state.factors}
        blocks = {key: factors.pop(key) for key in list(factors) if "#" in key}
        factors["u_g"] = state.columns("g", blocks, state._num_columns)
        state.inverse = invert({state.layer.name: factors}, config)[state.layer.name]
    known = [state for state in states if state.shared is None]
    # Copies of the factors of a group are held meanwhile.
    for group in buckets(known, lambda state: state.nbytes["factors"], BYTES_AT_ONCE):
        curvatures = {}
        for state, factors in zip(group, _factors_of(group), strict=True):
            layer = state.layer
            if "d" in factors:
                factors = {"d": factors["d"].reshape(layer.d_out, layer.d_in)}
            curvatures[layer.name] = factors
        inverses = invert(curvatures, config, is_together=is_together)
        for state in group:
            state.inverse = inverses[state.layer.name]


def _factors_of(states: Sequence[LayerState]) -> list[dict[str, Tensor]]:
    """The factors of some layers; on a GPU few launches for all of them."""
    averages = [state._read(key) for state in states for key in state._averages]
    weights = [
        state._weight ** (0.5 if key.startswith("u_") else 1.0)
        for state in states
        for key in state._averages
    ]
    divided = iter(torch._foreach_div(averages, weights) if averages else ())
    return [{side: next(divided) for side in state._averages} for state in states]


# --- the grafted optimizer ------------------------------------------------------------------------


class Graft:
    """The optimizer whose step length is taken: Adam, SGD, or none.

    Adam without its learning rate is m̂ / (√v̂ + ε); m̂, the averaged gradient, is preconditioned. So
    a layer without curvature takes exactly Adam's step, and one with curvature averages as Adam
    does. Momentum in the optimizer behind would average twice: set `betas=(0, ...)` for that. SGD's
    step is the gradient.

    Attributes:
        kind: `"adam"`, whose averaged gradients are preconditioned, `"sgd"` or `"none"`.
    """

    def __init__(self, config: KFACConfig) -> None:
        self.kind, self._eps = config.graft, config.eps
        self._beta1, self._beta2 = config.betas
        self._counts: dict[str, int] = {}
        self._m: Values = {}
        self._v: Values = {}
        self._places: Values = {}  # where means lie, of those that a product reads
        self._last: list[str] = []  # the parameters of the last step

    def place(self, places: Values) -> None:
        """Let the means of some parameters lie in given places, with what they are already.

        Args:
            places: By parameter, of its shape, or of as many elements.
        """
        for name, place in places.items():
            mean = self._m.get(name)
            if mean is not None and mean is not place:
                place.copy_(mean.view(place.shape))
                self._m[name] = place
        self._places.update(places)

    def step(
        self,
        gradients: Mapping[str, Tensor],
        is_overflow: Tensor | None = None,
        measured: Sequence[str] = (),
    ) -> tuple[Values | None, Values, Tensor | None]:
        """Its own step (None for none), what is to be preconditioned, and squares of some steps.

        Args:
            gradients: By parameter.
            is_overflow: 1.0 on a GPU [] if moments are to stay as they are, whatever is returned;
                `uncount` is to be called then.
            measured: Parameters of whose steps the length is all that is needed. Where the last
                that is returned is not None, it is Σ s² of each of these [measured], float64, and
                the steps themselves are left out.
        """
        self._last = list(gradients)
        if self.kind != "adam":
            values = dict(gradients)
            return (values if self.kind == "sgd" else None), values, None
        by_count: dict[int, list[str]] = defaultdict(list)  # one, unless some had no gradient
        for name, gradient in gradients.items():
            if name not in self._m:
                place = self._places.get(name)
                self._m[name] = torch.zeros_like(gradient) if place is None else place.zero_()
                self._v[name] = torch.zeros_like(gradient)
            self._counts[name] = self._counts.get(name, 0) + 1
            by_count[self._counts[name]].append(name)
        steps: Values = {}
        averages: Values = {}
        squares = self._measure([gradients[name] for name in measured], measured, is_overflow)
        if squares is not None:
            averages.update((name, self._m[name]) for name in measured)
        for count, names in by_count.items():
            names = [name for name in names if name not in averages]
            if not names:
                continue
            own = [gradients[name] for name in names]
            m, v = [self._m[name] for name in names], [self._v[name] for name in names]
            if is_gpu(own[0]):
                of_names, mean = self._fused(own, m, v, count, is_overflow)
            else:
                assert is_overflow is None
                of_names, mean = self._foreach(own, m, v, count)
            averages.update(zip(names, mean, strict=True))
            steps.update(zip(names, of_names, strict=True))
        return steps, averages, squares

    def _measure(
        self, gradients: Sequence[Tensor], names: Sequence[str], is_overflow: Tensor | None
    ) -> Tensor | None:
        """Average gradients, and square the steps that they would make; None if that must be two.

        As in `_fused`, averages are not divided.
        """
        counts = {self._counts[name] for name in names}
        if len(counts) != 1 or not all(is_gpu(g) and g.is_contiguous() for g in gradients):
            return None
        m, v = [self._m[name] for name in names], [self._v[name] for name in names]
        count, betas = counts.pop(), (self._beta1, self._beta2)
        return multi_tensor.moments(gradients, m, v, count, betas, self._eps, is_overflow)

    def uncount(self) -> None:
        """Count the last step as none: its gradients were not finite."""
        for name in self._last if self.kind == "adam" else ():
            self._counts[name] -= 1
            if self._counts[name] == 0:
                del self._counts[name], self._m[name], self._v[name]

    def _foreach(
        self, own: list[Tensor], m: list[Tensor], v: list[Tensor], count: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Adam's steps, and what is preconditioned."""
        torch._foreach_lerp_(m, own, 1 - self._beta1)
        torch._foreach_mul_(v, self._beta2)
        torch._foreach_addcmul_(v, own, own, value=1 - self._beta2)
        mean = torch._foreach_div(m, 1 - self._beta1**count)
        scale = torch._foreach_div(v, 1 - self._beta2**count)
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, self._eps)
        return torch._foreach_div(mean, scale), mean

    def _fused(
        self,
        own: list[Tensor],
        m: list[Tensor],
        v: list[Tensor],
        count: int,
        is_overflow: Tensor | None,
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The same in one pass over memory, by torch's own Adam: steps of rate -1 from zeros.

        Averages are not divided by 1 - β₁ᵗ there: what is preconditioned gets another length.
        """
        zeros = own[0].new_zeros(sum(each.numel() for each in own))
        steps = _unflatten_dense_tensors(zeros, own)  # one call for views of all of them
        number = torch.full((), float(count), dtype=torch.float32, device=own[0].device)
        betas = {"beta1": self._beta1, "beta2": self._beta2, "eps": self._eps}
        others = {"weight_decay": 0.0, "amsgrad": False, "maximize": False}
        others |= {"found_inf": is_overflow}
        counts = [number] * len(steps)
        whole = [each.contiguous() for each in m]  # those that a product reads lie in rows
        torch._fused_adam_(steps, own, whole, v, [], counts, lr=-1.0, **betas, **others)
        for each, place in zip(whole, m, strict=True):
            if each is not place:
                place.copy_(each)
        return steps, m

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """What it remembers of some parameters, for a checkpoint."""
        found = {}
        for name in names:
            if name in self._m:
                found[f"m.{name}"], found[f"v.{name}"] = self._m[name], self._v[name]
                found[f"count.{name}"] = torch.tensor(self._counts[name])
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave."""
        if tensors and self.kind != "adam":
            raise BadInput(
                f"the state is of a run with another `graft`: it holds {sorted(tensors)[0]!r}"
            )
        for key, value in tensors.items():
            kind, _, name = key.partition(".")
            if kind == "count":
                self._counts[name] = int(value)
            elif kind in ("m", "v"):
                (self._m if kind == "m" else self._v)[name] = value
            else:
                raise BadInput(f"expected the state of Adam, found {key!r}")


# --- steps, on the owner --------------------------------------------------------------------------


class Preconditioner:
    """Makes the steps of some layers, with few and large operations.

    Layers are sorted into stacks once per update of the inverses: `_plan` has a stack per kind of
    factored layer, the layers with a diagonal, and those without curvature.

    Args:
        states: Of the layers.
        graft: The optimizer whose step length is taken.

    Attributes:
        stacks: The factored layers that share a product, each with its inverse for all of them.
    """

    def __init__(self, states: Iterable[LayerState], graft: Graft) -> None:
        self._states, self._graft = list(states), graft
        self._planned_for: list[Any] = []
        self.stacks: list[tuple[list[Layer], Inverse]] = []
        self._means: dict[object, tuple[Tensor, Values]] = {}  # of stacks, see `_lay_out_means`

    def steps(
        self,
        gradients: Mapping[str, Tensor],
        *,
        is_together: bool,
        is_overflow: Tensor | None = None,
        shared: Sequence[LayerState] = (),
        is_spent: bool = False,
    ) -> Values:
        """The steps, by parameter: of its shape, or flat, or as its layer's matrix.

        A layer without curvature takes the grafted optimizer's own step, to the bit.

        Args:
            gradients: Of the layers' parameters, whole; a layer that is missing has none on any
                rank.
            is_together: Whether layers of equal shape share a product; see the note above.
            is_overflow: See `Graft.step`.
            shared: The layers with gradients whose rows ranks share: a collective.
            is_spent: Whether steps may be written over the gradients.
        """
        states = [each for each in self._states if each.layer.name in gradients]
        stacks = self.stacks
        self.plan(states, is_together=is_together)
        if self.stacks is not stacks:
            self._lay_out_means(gradients)
        with phase("graft"):
            curved = self._weights + self._biases
            own, source, squares = self._graft.step(gradients, is_overflow, curved)
        with phase("apply"):
            values = source if own is None else own
            steps = {name: values[name] for name in self._uncurved}
            directions = self._directions(source)
            if own is not None and curved:
                if squares is None:
                    squares = _squares([own[name] for name in curved])
                self._stretch(directions, squares, gradients if is_spent else directions)
            for state in shared:
                directions |= _shared_steps(state, source, own)
        return steps | directions

    def plan(self, states: Sequence[LayerState], *, is_together: bool) -> None:
        """Sort layers into stacks; nothing if these inverses are in stacks already.

        Args:
            states: Of the layers; their inverses are views of their stack's afterwards.
            is_together: Whether layers of equal shape share a stack.
        """
        made_of = [is_together, *(state.inverse for state in states)]
        if len(made_of) == len(self._planned_for) and all(
            a is b for a, b in zip(made_of, self._planned_for, strict=True)
        ):
            return
        self.stacks, self._planned_for = [], made_of  # the old stacks go first
        self._uncurved: list[str] = []  # parameters of layers without an inverse
        self._diagonals: Values = {}  # what to multiply parameters with, of their shape
        groups: dict[object, list[LayerState]] = defaultdict(list)
        for state in states:
            layer, inverse = state.layer, state.inverse
            if inverse is None:
                self._uncurved += layer.parameters
            elif inverse.keys() == {"scale"}:
                self._diagonals[layer.name] = inverse["scale"].reshape(layer.shape)
            else:
                shapes = tuple((key, value.shape) for key, value in inverse.items())
                sides = (layer.rows, layer.columns, layer.bias is None, layer.is_transposed)
                groups[(shapes, sides) if is_together else layer.name].append(state)
        for group in groups.values():
            inverses = [state.inverse for state in group if state.inverse is not None]
            self.stacks.append(([state.layer for state in group], stack(inverses)))
        layers = [layer for of_stack, _ in self.stacks for layer in of_stack]
        self._weights = [layer.name for layer in layers] + list(self._diagonals)
        self._biases = [layer.bias for layer in layers if layer.bias is not None]
        places = [place for place, layer in enumerate(layers) if layer.bias is not None]
        tensors = (each for state in states for each in (state.inverse or {}).values())
        where = next((each.device for each in tensors), None)
        # Where in `_weights` those are that the biases belong to.
        self._places_of_biases = torch.tensor(places, dtype=torch.int64, device=where)

    def _lay_out_means(self, gradients: Mapping[str, Tensor]) -> None:
        """Let the averaged gradients of a stack lie as its product reads them, if one launch can.

        That is [layers, d_out, width], each layer's bias the column after its weight, and zeros up
        to the width: nothing is copied together in a step.
        """
        known, self._means = self._means, {}
        for layers, inverse in self.stacks:
            key, first = _key_of(layers, inverse), layers[0]
            own = [gradients[name] for layer in layers for name in layer.parameters]
            is_in_rows = all(len(each) == first.rows for each in own if each.ndim)
            if not (self._graft.kind == "adam" and is_gpu(own[0]) and is_in_rows):
                continue
            if first.is_transposed or any(each.ndim == 0 for each in own):
                continue
            if key not in known:
                whole, places = own[0].new_zeros(len(layers), first.d_out, key[1]), {}
                for layer, each in zip(layers, whole, strict=True):
                    widths = [layer.columns, layer.d_in - layer.columns]
                    parts = each[:, : layer.d_in].split(widths[: len(layer.parameters)], dim=1)
                    for name, part in zip(layer.parameters, parts, strict=True):
                        places[name] = part.view(gradients[name].shape)
                known[key] = whole, places
            self._means[key] = known[key]
            self._graft.place(known[key][1])

    def _side_by_side(self, layers: Sequence[Layer], width: int, source: Values) -> Tensor:
        """What is preconditioned of a stack [layers, d_out, width], with zeros at the end."""
        first = layers[0]
        padding = source[first.name].new_zeros(first.d_out, width - first.d_in)
        pieces: list[Tensor] = []  # side by side, which is one launch
        sides = first.rows, first.columns
        for layer in layers:
            weight = source[layer.name]
            if layer.is_transposed:
                weight = weight.reshape(layer.columns, layer.rows).T
            pieces.append(weight if weight.shape == sides else weight.reshape(sides))
            if layer.bias is not None:
                pieces.append(source[layer.bias].view(-1, 1))
            if padding.shape[1]:
                pieces.append(padding)
        return torch.cat(pieces, dim=1).unflatten(1, (len(layers), width)).transpose(0, 1)

    def _directions(self, source: Values) -> Values:
        """What is preconditioned, by parameter: new memory."""
        found: Values = {}
        for layers, inverse in self.stacks:
            key, first = _key_of(layers, inverse), layers[0]
            whole, places = self._means.get(key, (None, {}))
            if whole is None or any(source[name] is not each for name, each in places.items()):
                whole = self._side_by_side(layers, key[1], source)
            columns = [first.columns, first.d_in - first.columns]
            found.update(_by_parameter(layers, apply(inverse, whole, columns)))
        if self._diagonals:
            own = [source[name] for name in self._diagonals]
            scaled = torch._foreach_mul(own, list(self._diagonals.values()))
            found.update(zip(self._diagonals, scaled, strict=True))
        return found

    def _stretch(self, directions: Values, squares: Tensor, places: Mapping[str, Tensor]) -> None:
        """Make each layer's direction as long as another step; zeros stay zeros.

        Norms are added up in float64. What is computed of one layer does not depend on the others:
        roots, products and sums of two numbers are rounded in one way only.

        Args:
            directions: Of the layers with an inverse, by parameter; stretched ones afterwards.
            squares: Of the other step's elements, their sum: of weights, then of biases.
            places: By parameter, where stretched ones may lie.
        """
        names = self._weights + self._biases
        own = [directions[name] for name in names]
        # A layer has at most one bias, so that no order of sums is left open.
        sums, of_biases = torch.stack([_squares(own), squares]).split(
            [len(self._weights), len(self._biases)], dim=1
        )
        lengths, wanted = sums.index_add(1, self._places_of_biases, of_biases).sqrt()
        scales = torch.where(lengths > 0, wanted / lengths.clamp(min=1e-300), 1.0)
        scales = torch.cat([scales, scales[self._places_of_biases]]).to(own[0].dtype)
        stretched = multiply_all(own, scales, [places[name] for name in names])
        directions.update(zip(names, stretched, strict=True))


def _key_of(layers: Sequence[Layer], inverse: Inverse) -> tuple[tuple[str, ...], int]:
    """The layers of a stack, and how wide the matrices are that it multiplies."""
    width = inverse["a"].shape[-1] if "a" in inverse else layers[0].d_in
    return tuple(layer.name for layer in layers), width


def _squares(values: list[Tensor]) -> Tensor:
    """Of each tensor the sum of its elements' squares [values], in float64.

    All in one call, which widens while it reads: a norm over dimensions makes a wide copy.
    """
    return torch.stack(torch._foreach_norm(values, 2, dtype=torch.float64)).square()


def _by_parameter(layers: Sequence[Layer], parts: Sequence[Tensor]) -> Values:
    """By parameter, the columns of weights as matrices, and of biases flat.

    Args:
        layers: Of one stack.
        parts: The columns of weights, and of biases if there are some [layers, d_out, columns].
    """
    weights, biases = parts
    if layers[0].is_transposed:
        weights = weights.mT
    found = dict(zip((layer.name for layer in layers), weights.unbind(), strict=True))
    if layers[0].bias is not None:  # all of a stack have one, or none has
        names = [layer.bias for layer in layers if layer.bias is not None]
        found.update(zip(names, biases[:, :, 0].unbind(), strict=True))
    return found


def multiply_all(
    values: Sequence[Tensor], scales: Tensor, places: Sequence[Tensor]
) -> list[Tensor]:
    """Multiply each tensor with its number of `scales` [tensors]; returns the products.

    They are in `places` where both are in one piece and that is one launch for all of them; else
    they are where the values were.
    """
    found, flat, outs, apart = list(values), [], [], []
    for n, (value, place) in enumerate(zip(values, places, strict=True)):
        # Of a matrix that lies turned, every element is where it was.
        lying = value if value.is_contiguous() or value.ndim != 2 else value.T
        if not (is_gpu(value) and value.dtype == torch.float32 and lying.is_contiguous()):
            apart.append(n)
            continue
        if lying is value and place.is_contiguous() and place.dtype == value.dtype:
            found[n] = place
        flat.append(lying.view(1, -1))
        outs.append((place if found[n] is place else lying).view(-1))
    each_scale = scales.unbind()
    if flat:
        kept = [each for n, each in enumerate(each_scale) if n not in apart]
        multi_tensor.combine(flat, (torch.stack(kept) if apart else scales)[:, None], outs)
    if apart:
        torch._foreach_mul_([values[n] for n in apart], [each_scale[n] for n in apart])
    return found


def _shared_steps(state: LayerState, source: Values, lengths: Values | None) -> Values:
    """The steps of this rank's blocks of a layer whose rows ranks share; a collective.

    Args:
        state: Of the layer.
        source: What is preconditioned, by `LayerState.keys_of_blocks`.
        lengths: What each layer's step is to be as long as; None for as long as it is.
    """
    layer, shared, like = state.layer, state.shared, state._like
    assert shared is not None
    keys = state.keys_of_blocks
    if state.inverse is None:
        return {key: (source if lengths is None else lengths)[key] for own in keys for key in own}

    def matrix(own: Sequence[str]) -> Tensor:  # weights and bias [rows, d_in]
        weight = source[own[0]].reshape(-1, layer.columns)
        bias = [source[key].reshape(-1, 1) for key in own[1:]]
        return torch.cat([weight, *bias], dim=1) if bias else weight

    found = apply_shared(state.inverse, shared, [matrix(own) for own in keys], layer.d_in, like)
    widths = [layer.columns, layer.d_in - layer.columns]
    parts = [block.split(widths[: len(own)], dim=1) for block, own in zip(found, keys, strict=True)]
    steps = {
        key: part
        for own, of_block in zip(keys, parts, strict=True)
        for key, part in zip(own, of_block, strict=True)
    }
    if lengths is not None:

        def squares(own: Sequence[str]) -> Tensor:  # [2]: of the step, and of the other one
            compared = [values[key] for values in (steps, lengths) for key in own]
            norms = torch.stack(torch._foreach_norm(compared, 2, dtype=torch.float64))
            return norms.square().view(2, -1).sum(dim=1)

        length, wanted = shared.add((squares(own) for own in keys), (2,), like.double()).sqrt()
        scale = torch.where(length > 0, wanted / length.clamp(min=1e-300), 1.0).to(like.dtype)
        for block in found:
            block.mul_(scale)
    return steps
