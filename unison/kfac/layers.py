"""What K-FAC does with each parameter: which are factored, together with which bias, and how large.

Layers are found from one small pass under the capture, not from classes of modules: a matrix is
what was multiplied with. Every rank runs such a pass; what the first one finds counts for all.
Then `assign` says which ranks invert and apply which layer.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from unison.kfac.config import KFACConfig
from unison.ops import Dense, Lookup, Product, Record


class Method(Enum):
    """How a layer's curvature is held."""

    KRONECKER = "kronecker"
    DIAGONAL = "diagonal"
    IDENTITY = "identity"  # none: the grafted optimizer's own step


@dataclass(frozen=True)
class Layer:
    """A parameter, with the bias that is added to what it makes.

    Attributes:
        name: The parameter's canonical name, and the layer's.
        bias: The bias's; None without one.
        method: How its curvature is held.
        shape: The parameter's own shape.
        rows: d_out, or the number of elements where it is not factored.
        columns: d_in without the bias; 1 where it is not factored.
        is_transposed: Whether the parameter is laid out [d_in, d_out].
        why: In words, why it is not factored; else what is left out.
    """

    name: str
    bias: str | None
    method: Method
    shape: tuple[int, ...]
    rows: int
    columns: int
    is_transposed: bool
    why: str = ""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of its parameters."""
        return (self.name,) if self.bias is None else (self.name, self.bias)

    @property
    def d_in(self) -> int:
        """Side of A: inputs, and 1 for the bias."""
        return self.columns + (self.bias is not None)

    @property
    def d_out(self) -> int:
        """Side of G."""
        return self.rows

    @property
    def numel(self) -> int:
        """Elements of the layer's gradient."""
        return self.d_in * self.d_out

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {**asdict(self), "method": self.method.value, "shape": list(self.shape)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Layer":
        """The inverse of `as_dict`."""
        return cls(
            **{**values, "method": Method(values["method"]), "shape": tuple(values["shape"])}
        )


class Survey:
    """Notes the uses of parameters in one pass.

    Args:
        pairs: The bias that each weight may be used with, by name.
    """

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self._pairs = pairs
        self._uses: dict[str, list[Record]] = defaultdict(list)

    def record(self, name: str, record: Record) -> None:
        """Note a use; what the capture calls."""
        self._uses[name].append(plain_record(record))

    def layers(self, shapes: Mapping[str, tuple[int, ...]], config: KFACConfig) -> list[Layer]:
        """Every parameter's layer, in the order of `shapes`."""
        reasons = {name: self._reason(name, config) for name in shapes}
        weights = {name: self._pairs.get(name) for name in shapes if not reasons[name]}
        biases = {
            weight: bias for weight, bias in weights.items() if bias and self._belongs(weight, bias)
        }
        joined = set(biases.values())
        found = []
        for name, shape in shapes.items():
            if name in weights:
                found.append(self._kronecker(name, biases.get(name), shape))
            elif name not in joined:
                found.append(_unfactored(name, shape, reasons[name], config))
        return found

    def _reason(self, name: str, config: KFACConfig) -> str:
        """Why a parameter is not factored, in words; nothing if it is."""
        products = [use for use in self._uses[name] if isinstance(use, Product)]
        others = [use for use in self._uses[name] if not isinstance(use, Product | Lookup)]
        if config.policy in ("identity", "diagonal"):
            return f"policy {config.policy}"
        if not self._uses[name]:
            return "not used"
        if not products:
            kinds = {type(use).__name__ for use in self._uses[name]}
            return "a table" if kinds == {"Lookup"} else "not a matrix product"
        if others:
            return "used in other ways than as a matrix"
        sides = {(use.g.shape[-1], use.a.shape[-1], use.is_transposed) for use in products}
        if len(sides) > 1:
            return "used as matrices of different shapes"
        (rows, columns, _) = sides.pop()
        if config.policy == "kronecker":
            return ""
        if rows * columns < config.min_layer_size:
            return f"fewer than {config.min_layer_size} elements"
        if max(rows, columns + 1) > config.max_factor_size:
            return f"a side above {config.max_factor_size}"
        return ""

    def _belongs(self, weight: str, bias: str) -> bool:
        """Whether the bias was added to every product of the weight, and to nothing else."""
        products = [use for use in self._uses[weight] if isinstance(use, Product)]
        added = [use for use in self._uses[bias] if isinstance(use, Dense)]
        if not len(products) == len(added) == len(self._uses[bias]):
            return False
        return all(
            _is_sum(use.value, product.g) for product, use in zip(products, added, strict=True)
        )

    def _kronecker(self, name: str, bias: str | None, shape: tuple[int, ...]) -> Layer:
        uses = self._uses[name]
        use = next(each for each in uses if isinstance(each, Product))
        has_lookup = any(isinstance(each, Lookup) for each in uses)
        why = "as a matrix; its use as a table is left out" if has_lookup else ""
        rows, columns = use.g.shape[-1], use.a.shape[-1]
        return Layer(name, bias, Method.KRONECKER, shape, rows, columns, use.is_transposed, why)


def _unfactored(name: str, shape: tuple[int, ...], why: str, config: KFACConfig) -> Layer:
    is_left = config.policy == "identity" or config.fisher == "forward" or why == "not used"
    method = Method.IDENTITY if is_left else Method.DIAGONAL
    return Layer(name, None, method, shape, math.prod(shape), 1, False, why)


def without_curvature(shapes: Mapping[str, tuple[int, ...]], config: KFACConfig) -> list[Layer]:
    """One layer per parameter, under `policy="identity"`."""
    return [_unfactored(name, shape, "policy", config) for name, shape in shapes.items()]


def _is_sum(added: Tensor, g: Tensor) -> bool:
    """Whether a bias's gradients [batch, d_out] are the sums over tokens of g, but for rounding."""
    added, g = added.flatten(1).double(), g.double()
    if added.shape != (len(g), g.shape[-1]):
        return False
    rounding = 1e-2 * float(g.abs().sum(dim=1).max()) if g.numel() else 0.0
    return bool(((added - g.sum(dim=1)).abs() <= rounding).all())


def plain_record(record: Any) -> Record:
    """A record in one of the three forms; one that is made while it is read is made whole."""
    return record if isinstance(record, Product | Lookup | Dense) else record.as_product()


def bias_names(names: Iterable[str]) -> dict[str, str]:
    """The bias that may belong to each weight, by its name: `c_fc.weight` has `c_fc.bias`.

    >>> bias_names(["a.weight", "a.bias", "in_proj_weight", "in_proj_bias", "b.weight"])
    {'a.weight': 'a.bias', 'in_proj_weight': 'in_proj_bias'}
    """
    known = set(names)
    found = {}
    for name in names:
        path, _, own = name.rpartition(".")
        bias = f"{path}.{own.replace('weight', 'bias')}".lstrip(".")
        if "weight" in own and bias in known:
            found[name] = bias
    return found


def cost(layer: Layer) -> float:
    """What its owner computes for it, roughly: inverses and one step's products, in flops."""
    if layer.method is Method.KRONECKER:
        m, n = layer.d_in, layer.d_out
        return float(m**3 + n**3 + 2 * m * n * (m + n))
    return float(layer.numel)


# --- owners of layers -----------------------------------------------------------------------------
#
# One number goes from one owner per layer (least memory) to all ranks (least traffic). All of it is
# arithmetic on sizes that every rank knows, so that all come to the same answer.


@dataclass(frozen=True)
class Assignment:
    """The owners of each layer.

    Attributes:
        owners: For each layer, its ranks; the first one adds up what all ranks send.
        num_ranks: How many ranks there are.
    """

    owners: tuple[tuple[int, ...], ...]
    num_ranks: int

    @property
    def is_replicated(self) -> bool:
        """Whether every rank owns every layer."""
        return all(len(own) == self.num_ranks for own in self.owners)

    def owns(self, rank: int, layer: int) -> bool:
        """Whether a rank owns a layer."""
        return rank in self.owners[layer]

    def source(self, rank: int, layer: int) -> int:
        """From whom a rank gets a layer's step: itself where it can."""
        own = self.owners[layer]
        return rank if rank in own else own[rank % len(own)]


def assign(costs: Sequence[float], num_ranks: int, owner_fraction: float) -> Assignment:
    """Give each layer its owners, the dearest layers first, each to the ranks with least to do.

    Args:
        costs: Of each layer.
        num_ranks: How many ranks there are.
        owner_fraction: Share of them that own a layer: 0 for one, 1 for all.

    >>> assign([4.0, 1.0, 3.0], num_ranks=2, owner_fraction=0.0).owners
    ((0,), (1,), (1,))
    """
    num_owners = min(num_ranks, max(1, round(owner_fraction * num_ranks)))
    load = [(0.0, rank) for rank in range(num_ranks)]
    heapq.heapify(load)
    owners: list[tuple[int, ...]] = [()] * len(costs)
    for index in sorted(range(len(costs)), key=lambda each: (-costs[each], each)):
        chosen = [heapq.heappop(load) for _ in range(num_owners)]
        # The first owner adds up the factors; let it not always be the same rank.
        turn = index % num_owners
        ranks = sorted(rank for _, rank in chosen)
        owners[index] = (*ranks[turn:], *ranks[:turn])
        for busy, rank in chosen:
            heapq.heappush(load, (busy + costs[index], rank))
    return Assignment(tuple(owners), num_ranks)
