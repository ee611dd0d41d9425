"""What K-FAC remembers: factors, their inverses, the grafted optimizer's averages; and storing it.

[Note: exact averages] Factors are averaged as F ← βF + (1 - β)F_new from zero, and divided by the
weight that was given out, w ← βw + (1 - β), where they are used: exactly the weighted mean of all
updates, with no trace of where it began.

Grafting takes the step length of an optimizer that is easy to tune, in the direction of another.
K-FAC's own step is as long as its curvature says, which is fragile where the curvature is rough. A
grafted step has the norm that Adam's (or SGD's) step of the same layer would have. Measured in the
reference notes: K-FAC with Adam's length needed fewer steps than tuned AdamW, K-FAC with its own
never did.

Stored are layers by name, gathered from their owners or written by them, taken over by others.
`gathered_state` is whole on every rank. `save_layers` is a checkpoint in the format of
`unison.save_checkpoint` (docs/checkpoints.md): torch.distributed.checkpoint plans, each owner
writes its own layers, and whoever owns a layer later reads that one.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unison.errors import BadInput
from unison.kfac import linalg
from unison.kfac.config import KFACConfig
from unison.kfac.factors import triangle_size, unpacked
from unison.kfac.inverse import Inverse, invert
from unison.kfac.layers import Layer, Method
from unison.parallel.exchange import broadcast_object, buckets
from unison.shard.ranks import Ranks
from unison.shard.state.checkpoint import Manifest, SavedTensor, read_manifest, settle
from unison.shard.state.entries import FlatPart, from_rank_0, gather_objects

BYTES_AT_ONCE = 2 << 30  # of factors that are being inverted

Values = dict[str, Tensor]  # by parameter


class LayerState:
    """One layer on one of its owners.

    Args:
        layer: The layer.
        config: For the decay of averages.
        graft: The optimizer that is grafted, with what it remembers of all layers.

    Attributes:
        layer: The layer.
        inverse: Of the damped curvature; None before the first, and for a layer without curvature.
    """

    def __init__(self, layer: Layer, config: KFACConfig, graft: "Graft") -> None:
        self.layer, self._decay, self._graft = layer, config.decay, graft
        self._averages: dict[str, Tensor] = {}  # "a", "g" or "d", not yet divided by the weight
        self._weight = 0.0
        self.inverse: Inverse | None = None

    def update(self, vector: Tensor, num_tokens: float, num_labels: float) -> None:
        """Average new factors in; nothing if there were no labels.

        Args:
            vector: The sums of all ranks, and after them the two numbers: see `counts_of`.
            num_tokens: Tokens that the layer saw; means nothing for a diagonal.
            num_labels: Labels that the loss was made of.
        """
        if num_labels == 0:
            return
        for side, value in self._sums(vector).items():
            # Divided once: inputs by the tokens that the layer saw, the rest by the labels.
            divisor = max(num_tokens, 1.0) if side == "a" else num_labels
            share = (1 - self._decay) / divisor
            before = self._averages.get(side)
            if before is None:
                self._averages[side] = value * share
            else:
                before.mul_(self._decay).add_(value, alpha=share)
        self._weight = self._decay * self._weight + (1 - self._decay)

    def _sums(self, vector: Tensor) -> dict[str, Tensor]:
        layer = self.layer
        if layer.method is Method.DIAGONAL:
            return {"d": vector[:-1]}
        a, g = vector[:-2].tensor_split([triangle_size(layer.d_in)])
        sums = {"a": unpacked(a, layer.d_in)}
        return {**sums, "g": unpacked(g, layer.d_out)} if len(g) else sums

    @property
    def factors(self) -> dict[str, Tensor]:
        """The factors as they are inverted: `a` and `g`, or `d`; nothing before the first."""
        return _factors_of([self])[0]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes that it holds, by what for."""
        return {
            "factors": sum(value.nbytes for value in self._averages.values()),
            "inverses": 0 if self.inverse is None else self.inverse.nbytes,
            "grafting": sum(each.nbytes for each in self._grafted().values()),
        }

    def _grafted(self) -> dict[str, Tensor]:
        return self._graft.tensors(self.layer.parameters)

    def tensors(self) -> dict[str, Tensor]:
        """Everything it remembers, by name."""
        found = {f"average.{side}": value for side, value in self._averages.items()}
        if self.inverse is not None:
            found.update({f"inverse.{key}": each for key, each in self.inverse.tensors.items()})
        found["weight"] = torch.tensor(self._weight, dtype=torch.float64)
        return found | {f"graft.{key}": each for key, each in self._grafted().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`; the values are taken over."""
        groups: dict[str, dict[str, Tensor]] = {"average": {}, "inverse": {}, "graft": {}}
        for key, value in tensors.items():
            kind, _, rest = key.partition(".")
            if rest:
                groups[kind][rest] = value
        self._weight = float(tensors["weight"])
        self._averages = groups["average"]
        self.inverse = Inverse(groups["inverse"]) if groups["inverse"] else None
        self._graft.load(groups["graft"])


def counts_of(vectors: Iterable[Tensor]) -> list[tuple[float, float]]:
    """Numbers of tokens and labels, the last two of each vector; a GPU is waited for once."""
    rows = [vector[-2:] for vector in vectors]
    return [(tokens, labels) for tokens, labels in torch.stack(rows).tolist()] if rows else []


def invert_layers(states: Iterable[LayerState], config: KFACConfig, *, is_together: bool) -> None:
    """Make the inverses of some layers anew, those of one size together or each by itself.

    Raises:
        NotInvertible: Naming the first layer that has none, and the remedy.
    """
    known = [state for state in states if state._averages]
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
    averages = [value for state in states for value in state._averages.values()]
    weights = [state._weight for state in states for _ in state._averages]
    divided = iter(torch._foreach_div(averages, weights) if averages else ())
    return [{side: next(divided) for side in state._averages} for state in states]


# --- the grafted optimizer ------------------------------------------------------------------------


class Graft:
    """The optimizer whose step length is taken: Adam, SGD, or none.

    Adam without its learning rate is m̂ / (√v̂ + ε); m̂, the averaged gradient, is preconditioned. So
    a layer without curvature takes exactly Adam's step, and one with curvature averages as Adam
    does. Momentum in the optimizer behind would average twice: set `betas=(0, ...)` for that. SGD's
    step is the gradient.
    """

    def __init__(self, config: KFACConfig) -> None:
        self._kind, self._eps = config.graft, config.eps
        self._beta1, self._beta2 = config.betas
        self._counts: dict[str, int] = {}
        self._m: Values = {}
        self._v: Values = {}

    def step(self, gradients: Mapping[str, Tensor]) -> tuple[Values | None, Values]:
        """Its own step (None for none), and what is to be preconditioned."""
        if self._kind != "adam":
            values = dict(gradients)
            return (values if self._kind == "sgd" else None), values
        by_count: dict[int, list[str]] = defaultdict(list)  # one, unless some had no gradient
        for name, gradient in gradients.items():
            if name not in self._m:
                self._m[name] = torch.zeros_like(gradient)
                self._v[name] = torch.zeros_like(gradient)
            self._counts[name] = self._counts.get(name, 0) + 1
            by_count[self._counts[name]].append(name)
        steps: Values = {}
        averages: Values = {}
        for count, names in by_count.items():
            own = [gradients[name] for name in names]
            m, v = [self._m[name] for name in names], [self._v[name] for name in names]
            adam = self._fused if linalg.is_gpu(own[0]) else self._foreach
            of_names, mean = adam(own, m, v, count)
            averages.update(zip(names, mean, strict=True))
            steps.update(zip(names, of_names, strict=True))
        return steps, averages

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
        self, own: list[Tensor], m: list[Tensor], v: list[Tensor], count: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The same in one pass over memory, by torch's own Adam: steps of rate -1 from zeros.

        Averages are not divided by 1 - β₁ᵗ there: what is preconditioned gets another length.
        """
        steps = [torch.empty_like(each) for each in own]
        torch._foreach_zero_(steps)
        number = torch.full((), float(count), dtype=torch.float32, device=own[0].device)
        torch._fused_adam_(
            steps,
            own,
            m,
            v,
            [],
            [number] * len(steps),
            lr=-1.0,
            beta1=self._beta1,
            beta2=self._beta2,
            weight_decay=0.0,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )
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
        if tensors and self._kind != "adam":
            raise BadInput(
                f"the state is of a run with another `graft`: it holds {sorted(tensors)[0]!r}"
            )
        for key, value in tensors.items():
            kind, _, name = key.partition(".")
            match kind:
                case "m":
                    self._m[name] = value
                case "v":
                    self._v[name] = value
                case "count":
                    self._counts[name] = int(value)
                case _:
                    raise BadInput(f"expected the state of Adam, found {key!r}")


# --- storage --------------------------------------------------------------------------------------


def gathered_state(
    layers: Sequence[Layer],
    owners: Sequence[tuple[int, ...]],
    states: Mapping[int, LayerState],
    ranks: Ranks,
) -> list[dict[str, Any]]:
    """Each layer's description and tensors, on the CPU of every rank; a collective.

    Args:
        layers: All layers.
        owners: The ranks that own each; the first one tells.
        states: Of those that this rank owns.
        ranks: Everyone.
    """
    found = []
    for index, layer in enumerate(layers):
        first = owners[index][0]
        tensors = {}
        if first == ranks.rank:
            tensors = {key: each.cpu().clone() for key, each in states[index].tensors().items()}
        tensors = broadcast_object(ranks, first, tensors)
        found.append({"layer": layer.as_dict(), "tensors": tensors})
    return found


def load_into(
    states: Mapping[int, LayerState], stored: Mapping[int, Mapping[str, Any]], like: Tensor
) -> None:
    """Give each layer that this rank owns what was stored of it."""
    for index, state in states.items():
        name = state.layer.name
        if stored[index]["layer"]["name"] != name:
            raise BadInput(f"expected the state of {name}, found {stored[index]['layer']['name']}")
        # Copies where layers compute; single numbers stay on the host.
        state.load(
            {
                key: each.to(like.device if each.ndim else "cpu", copy=True)
                for key, each in stored[index]["tensors"].items()
            }
        )


def save_layers(
    folder: Path, states: Iterable[LayerState], extra: dict[str, Any], ranks: Ranks
) -> None:
    """Write layers to a checkpoint's folder, each rank its own; a collective.

    Args:
        folder: Which every rank can reach; it appears when it is complete.
        states: Of the layers that this rank writes.
        extra: What else is written, as JSON can hold it; that of rank 0 is.
        ranks: Everyone.
    """
    from unison.shard.state.checkpoint import write_folder

    parts = {
        _key(state.layer, key): FlatPart(tuple(each.shape), 0, each.reshape(-1))
        for state in states
        for key, each in state.tensors().items()
    }
    mine = {key: SavedTensor(part.shape, part.values.dtype) for key, part in parts.items()}
    tensors = {
        key: each for of_rank in gather_objects(ranks, mine) for key, each in of_rank.items()
    }
    write_folder(folder, parts, tensors, ranks, optimizer=None, extra=extra)


def open_layers(folder: Path, ranks: Ranks) -> Manifest:
    """What a checkpoint holds; a collective.

    Raises:
        BadInput: On every rank, if it is not one of `save_layers`.
    """

    def read() -> Manifest:
        settle(folder)
        manifest = read_manifest(folder)
        if "layers" not in manifest.extra:
            raise BadInput(f"{folder} holds no curvature: it was not written by KFAC.save")
        return manifest

    return from_rank_0(ranks, read)


def read_layers(
    folder: Path,
    manifest: Manifest,
    states: Mapping[int, LayerState],
    like: Tensor,
    ranks: Ranks,
) -> dict[int, dict[str, Any]]:
    """What is stored of the layers that this rank owns, by their numbers; a collective.

    The result is what `load_into` takes. A rank reads the bytes of its own layers.
    """
    from unison.shard.state.files import read_parts

    found: dict[int, dict[str, Any]] = {}
    parts: dict[str, FlatPart] = {}
    for index, state in states.items():
        prefix = _key(state.layer, "")
        tensors = {}
        for key, saved in manifest.tensors.items():
            if key.startswith(prefix):
                device = like.device if saved.shape else "cpu"  # single numbers stay on the host
                value = torch.empty(saved.shape, dtype=saved.dtype, device=device)
                tensors[key.removeprefix(prefix)] = value
                parts[key] = FlatPart(saved.shape, 0, value.view(-1))
        found[index] = {"layer": state.layer.as_dict(), "tensors": tensors}
    read_parts(folder, parts, manifest, ranks)
    return found


def _key(layer: Layer, key: str) -> str:
    """What a tensor is called in a checkpoint."""
    return f"kfac/{layer.name}/{key}"
