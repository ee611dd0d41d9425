"""What K-FAC does with each parameter, and the sums over tokens that its factors are made of.

Layers are found from one small pass under the capture, not from classes of modules: a matrix is
what was multiplied with. Every rank runs such a pass; what the first one finds counts for all.
Then `assign` says which ranks invert and apply which layer.

[Note: sums, not means] Everything here is a *sum* over this rank's tokens, with the number of them
beside it. A factor is the sum over all ranks divided by a number of all ranks, once, where it is
used: `A = Σ ãã' / T` by the tokens that a layer saw, `G = Σ gg' / N` by the labels that the loss is
made of, so that A ⊗ G is the mean curvature of a label. In a language model N = T, in a convolution
T is larger. Means of means would weigh a rank, or a micro-batch, with few tokens as much as one
with many.

[Note: expand and reduce] Tokens of one sample share a weight. `expand` counts each as a sample of
its own, which is exact for a loss per token behind linear layers; `reduce` averages a sample's
inputs and adds up its gradients first, which is exact where tokens are averaged before the loss.

[Note: columns] A side of a layer is a matrix [n, n], or what it is the product of: one row of n per
token, U with A = U'U / T. Where there are fewer tokens than about half of n, those are less to send
and, by Woodbury's identity, less to invert. Which of both is decided once, from sizes that every
rank knows: `forms_of`. Rows come to the owner in the order of granules.

[Note: folded triangles] Ranks send one another symmetric matrices as half of their elements. An
upper triangle is folded into a rectangle with slices alone, without a list of places, which would
be four times as large as what it packs. With k = n // 2, the columns from k on are kept as they
are, [n, n - k]; below their diagonal there is room for the other triangle [k, k], transposed, one
row further down.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from unison.errors import BadInput
from unison.kfac.config import KFACConfig
from unison.kfac.inverse import is_half, padding_of, wide_product
from unison.ops import Dense, Lookup, Product, Record, per_sample
from unison.ops.records import add_rows_

MOST_AT_ONCE = 1 << 24  # elements of per-sample gradients that are held
LONG_SIDE = 1024  # rows from which on it matters how a side is held
MOST_COLUMNS = 4096  # tokens of an update for which low rank is thought of
EIGH = 9.0  # flops of eigenvectors, in n³

# --- layers ---------------------------------------------------------------------------------------


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
        why: In words, why it is not factored; else what is left out, and why it is held so.
        low_rank: The sides that are held as columns: `"a"`, `"g"`, both or none.
    """

    name: str
    bias: str | None
    method: Method
    shape: tuple[int, ...]
    rows: int
    columns: int
    is_transposed: bool
    why: str = ""
    low_rank: tuple[str, ...] = ()

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

    def side(self, which: str) -> int:
        """Side of A (`"a"`) or of G (`"g"`)."""
        return self.d_in if which == "a" else self.d_out

    @property
    def numel(self) -> int:
        """Elements of the layer's gradient."""
        return self.d_in * self.d_out

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        lists = {"shape": list(self.shape), "low_rank": list(self.low_rank)}
        return {**asdict(self), "method": self.method.value, **lists}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Layer":
        """The inverse of `as_dict`."""
        tuples = {"shape": tuple(values["shape"]), "low_rank": tuple(values.get("low_rank", ()))}
        return cls(**{**values, "method": Method(values["method"]), **tuples})


def layers_of(
    uses: Mapping[str, Sequence[Record]],
    shapes: Mapping[str, tuple[int, ...]],
    config: KFACConfig,
    num_rows: int = 0,
    num_outputs: int = 0,
) -> list[Layer]:
    """Return every parameter's layer, in the order of `shapes`.

    Args:
        uses: The records of one pass, by parameter.
        shapes: Of all parameters.
        config: What to factor.
        num_rows: Rows of an update, of all ranks.
        num_outputs: Outputs of a label: the head is the layer that makes them.
    """
    sides = {
        name: _sides_of(name, uses.get(name, ()), config, num_rows, num_outputs) for name in shapes
    }
    reasons = {name: own if isinstance(own, str) else "" for name, own in sides.items()}
    pairs = bias_names(shapes)
    biases = {
        name: pairs[name]
        for name, reason in reasons.items()
        if not reason and name in pairs and _belongs(uses[name], uses.get(pairs[name], ()))
    }
    joined = set(biases.values())
    found = []
    for name, shape in shapes.items():
        why, own = reasons[name], sides[name]
        if not isinstance(own, str):
            use = next(each for each in uses[name] if isinstance(each, Product))
            notes = list(own.values())
            if any(isinstance(each, Lookup) for each in uses[name]):
                notes.insert(0, "as a matrix; its use as a table is left out")
            of_use = use.g.shape[-1], use.a.shape[-1], use.is_transposed
            about = Method.KRONECKER, shape, *of_use, "; ".join(notes), tuple(own)
            found.append(Layer(name, biases.get(name), *about))
        elif name not in joined:
            is_left = config.policy == "identity" or config.fisher == "forward" or why == "not used"
            method = Method.IDENTITY if is_left else Method.DIAGONAL
            found.append(Layer(name, None, method, shape, math.prod(shape), 1, False, why))
    return found


def _sides_of(
    name: str, uses: Sequence[Record], config: KFACConfig, num_rows: int, num_outputs: int
) -> dict[str, str] | str:
    """Which sides of a parameter are held as columns, and why; in words, why it is not factored."""
    products = [use for use in uses if isinstance(use, Product)]
    if config.policy in ("identity", "diagonal"):
        return f"policy {config.policy}"
    if not uses:
        return "not used"
    if not products:
        is_table = all(isinstance(use, Lookup) for use in uses)
        return "a table" if is_table else "not a matrix product"
    if any(not isinstance(use, Product | Lookup) for use in uses):
        return "used in other ways than as a matrix"
    sides = {(use.g.shape[-1], use.a.shape[-1], use.is_transposed) for use in products}
    if len(sides) > 1:
        return "used as matrices of different shapes"
    (rows, columns, _) = sides.pop()
    if config.policy == "kronecker":
        return {}
    if rows * columns < config.min_layer_size:
        return f"fewer than {config.min_layer_size} elements"
    tokens = 1 if config.sharing == "reduce" else sum(use.g.shape[1] for use in products)
    return forms_of(rows, columns + 1, num_rows * tokens, config, is_head=rows == num_outputs)


def forms_of(
    rows: int, columns: int, num_tokens: int, config: KFACConfig, *, is_head: bool
) -> dict[str, str] | str:
    """Decide how the two sides of a layer are held; arithmetic that every rank does alike.

    Args:
        rows: Side of G.
        columns: Side of A, with the bias.
        num_tokens: Of an update, of all ranks.
        config: Policy, schedule and sizes.
        is_head: Whether the layer makes the model's outputs.

    Returns:
        The sides that are held as columns, each with the reason; or why the layer is not factored.
    """
    sides = {"a": (columns, rows), "g": (rows, columns)}
    found = {}
    for side, (n, other) in sides.items():
        if side == "g" and config.fisher == "forward":
            continue
        dense, low = side_costs(n, other, num_tokens, config)
        # Of all labels there are as many columns as labels: more than n soon.
        is_open = not (side == "g" and config.fisher == "exact") and config.policy != "small_only"
        is_long = n >= LONG_SIDE and num_tokens <= MOST_COLUMNS
        is_auto = low < dense or n > config.max_factor_size
        match config.policy:
            case "all":
                is_low, why = side == "g", "policy all"
            case "hybrid":
                is_low = is_long or (side == "g" and is_head)
                why = "policy hybrid, " + ("the head" if side == "g" and is_head else "a long side")
            case _:
                # Compressed columns and joint damping do not go together.
                is_joint = config.damping_form == "joint" and config.decay > 0
                is_low, why = is_long and is_auto and not is_joint, ""
                if is_low and dense < math.inf:
                    why = f"{low / 1e9:.3g} Gflop an update instead of {dense / 1e9:.3g}"
        if is_open and is_low:
            kept = f", at most {config.max_rank} kept" if config.has_rank else ""
            reason = why or f"longer than {config.max_factor_size}"
            found[side] = f"{side.upper()} by {num_tokens} columns{kept} ({reason})"
        elif n > config.max_factor_size:
            return f"a side above {config.max_factor_size}"
    return found


def side_costs(
    n: int, other: int, num_tokens: int, config: KFACConfig
) -> tuple[float, float]:  # in flops
    """What a side costs from one update to the next, as a matrix and as columns of tokens.

    | | made | inverted | applied, at each step |
    |---|---|---|---|
    | matrix | 2 T n² | n³ | 2 n² m |
    | columns of one update | – | 4 T² n + T³ / 3 | 4 T n m |
    | columns averaged | 2 (r + T) T n + 9 (r + T)³ + 2 (r + T) r n | – | 4 r n m |

    where m is the other side, and r is `max_rank`.
    """
    every, t = config.update_every, min(num_tokens, n)
    period = every(0) if callable(every) else every
    dense = 2 * num_tokens * n**2 + n**3 + 2.0 * period * n**2 * other
    if config.has_rank:
        rank = min(config.max_rank, n)
        joined = rank + t
        low = 2 * joined * t * n + EIGH * joined**3 + 2 * joined * rank * n
    else:
        rank = t
        low = 4 * t**2 * n + t**3 / 3
    low += 4.0 * period * rank * n * other
    return (dense if n <= config.max_factor_size else math.inf), low


def _belongs(uses: Sequence[Record], of_bias: Sequence[Record]) -> bool:
    """Whether a bias was added to every product of a weight, and to nothing else."""
    products = [use for use in uses if isinstance(use, Product)]
    added = [use for use in of_bias if isinstance(use, Dense)]
    if not len(products) == len(added) == len(of_bias):
        return False
    return all(_is_sum(use.value, each.g) for each, use in zip(products, added, strict=True))


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


_FISHER = {
    "mc": "the Fisher matrix with one label drawn from the model for each output",
    "empirical": "the empirical Fisher matrix of the training labels",
    "exact": "the Fisher matrix in expectation over all labels",
    "forward": "inputs alone (G = I)",
}
_FORM = {
    "pi": "split over A and G by the ratio of their mean eigenvalues",
    "factored": "as its square root on A and on G",
    "joint": "added to A ⊗ G",
}
_GRAFT = {
    "adam": "each layer's step has the length of Adam's (betas {betas}, eps {eps:g}), whose "
    "averaged gradient is preconditioned",
    "sgd": "each layer's step has the length of its gradient",
    "none": "steps have their own length",
}


def describe(config: KFACConfig, layers: Sequence[Layer], num_steps: int, skipped: int) -> str:
    """Describe in a paragraph what was used, for a paper."""
    every = config.update_every
    when = "by a schedule" if callable(every) else f"every {every} steps"
    early = f" (more often in the first {config.burn_in})" if config.burn_in else ""
    damping = config.damping if isinstance(config.damping, tuple) else f"{config.damping:g}"
    sentences = [
        "Gradients were preconditioned with K-FAC: A ⊗ G for each matrix, of "
        f"{_FISHER[config.fisher]} under a {config.likelihood} likelihood (weight sharing: "
        f"{config.sharing}), summed over the tokens of all ranks and divided once by their number.",
        f"Factors were updated {when}{early} and averaged with decay {config.decay:g}; damping "
        f"{damping}, {_FORM[config.damping_form]}.",
    ]
    if layers:
        by_method = {each: [x for x in layers if x.method is each] for each in Method}
        low = [each for each in by_method[Method.KRONECKER] if each.low_rank]
        text = (
            f"{len(by_method[Method.KRONECKER])} matrices were factored, "
            f"{len(by_method[Method.DIAGONAL])} parameters had an exact diagonal, "
            f"{len(by_method[Method.IDENTITY])} none."
        )
        if low:
            names = ", ".join(each.name for each in low[:3]) + (", …" if len(low) > 3 else "")
            text += f" Of {len(low)} ({names}), a side was inverted by Woodbury's identity on "
            text += "columns of tokens"
            if config.has_rank:
                text += (
                    f", compressed to the {config.max_rank} largest eigenvalues with the mean of "
                    "the others in the damping, which is an approximation"
                )
            text += "."
        sentences.append(text)
    graft = _GRAFT[config.graft].format(betas=config.betas, eps=config.eps)
    clip = "" if config.kl_clip is None else f", with a KL clip of {config.kl_clip:g}"
    sentences.append(f"{graft[0].upper()}{graft[1:]}{clip}.")
    left_out = f"; {skipped} were left out for values that were not finite" if skipped else ""
    return " ".join([*sentences, f"{num_steps} steps were taken{left_out}."])


# --- owners of layers -----------------------------------------------------------------------------
#
# One number goes from one owner per layer (least memory) to all ranks (least traffic). All of it is
# arithmetic on sizes that every rank knows, so that all come to the same answer.


def cost(layer: Layer) -> float:
    """What its owner computes for it, roughly: inverses and one step's products, in flops."""
    if layer.method is Method.KRONECKER:
        m, n = layer.d_in, layer.d_out
        sizes = [
            min(layer.side(s), LONG_SIDE) if s in layer.low_rank else layer.side(s) for s in "ag"
        ]
        inverses = sum(layer.side(s) * r**2 for s, r in zip("ag", sizes, strict=True))
        return float(inverses + 2 * m * n * sum(sizes))
    return float(layer.numel)


def assign(costs: Sequence[float], num_ranks: int, owner_fraction: float) -> list[tuple[int, ...]]:
    """Give each layer its owners, the dearest layers first, each to the ranks with least to do.

    Args:
        costs: Of each layer.
        num_ranks: How many ranks there are.
        owner_fraction: Share of them that own a layer: 0 for one, 1 for all.

    Returns:
        For each layer, its ranks; the first one adds up what all ranks send.

    >>> assign([4.0, 1.0, 3.0], num_ranks=2, owner_fraction=0.0)
    [(0,), (1,), (1,)]
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
    return owners


def source_of(owners: Sequence[int], rank: int) -> int:
    """From whom a rank gets a layer's step: itself where it owns it."""
    return rank if rank in owners else owners[rank % len(owners)]


# --- sums over tokens -----------------------------------------------------------------------------


def token_weights(
    mask: Tensor | None, num_tokens: int, name: str, token_mask: Tensor | None = None
) -> Tensor | None:
    """Which tokens of a use count [batch, num_tokens], from which tokens of the loss do.

    Args:
        mask: Of the tokens that the loss is made of [batch, tokens], bool; None if all count.
        num_tokens: How many the use has. As many as the loss has: the same ones. One, or another
            number while a sample's tokens all count or none does: the sample's.
        name: The parameter, for the error.
        token_mask: Of the tokens inside of the module [batch, tokens], bool: those of a use that
            has as many.

    Raises:
        BadInput: If it cannot be told which are which.
    """
    if token_mask is not None:
        if token_mask.shape[1] == num_tokens:
            return token_mask
        if num_tokens != 1 and (mask is None or mask.shape[1] != num_tokens):
            raise BadInput(
                f"{name} is used for {num_tokens} tokens per sample, and token_mask has "
                f"{token_mask.shape[1]}: it cannot be told which of them are real"
            )
    if mask is None or mask.shape[1] == num_tokens:
        return mask
    any_of, all_of = mask.any(dim=1), mask.all(dim=1)
    if num_tokens != 1 and mask.shape[1] != 1 and not torch.equal(any_of, all_of):
        raise BadInput(
            f"{name} is used for {num_tokens} tokens per sample, and the mask has "
            f"{mask.shape[1]}: it cannot be told which of them count. Pass kfac.sample the logits "
            "of all tokens, with mask 0 where there is no label, rather than a part of them"
        )
    return any_of[:, None].expand(-1, num_tokens)


def token_rows(
    record: Product,
    weights: Tensor | None,
    *,
    sharing: str,
    has_bias: bool,
    wants_a: bool,
    wants_g: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The vectors of one use whose products are added up.

    Args:
        record: The use.
        weights: Which tokens count [batch, tokens], bool; None if all do.
        sharing: `"expand"` or `"reduce"`, which makes one token of a sample's.
        has_bias: Whether ã ends with a 1 for the bias.
        wants_a: Whether to make ã.
        wants_g: Whether to make g.

    Returns:
        ã [batch, tokens, d_in]; g [batch, tokens, d_out]; None for one that is not wanted; 1.0 for
        every token that counts [batch, tokens]. What does not count is zero.
    """
    # Only what is asked for: the other side may be as large, and is not read.
    keeps_half = sharing == "expand"
    a = _counted(_wide(record.a, keeps_half), weights) if wants_a else None  # [batch, tokens, d_in]
    g = _counted(_wide(record.g, keeps_half), weights) if wants_g else None  # [..., d_out]
    dtype = torch.promote_types(record.g.dtype, torch.float32)
    ones = record.g.new_ones(record.g.shape[:2]) if weights is None else weights
    ones = ones.to(dtype)  # [batch, tokens]
    if sharing == "reduce":
        lengths = ones.sum(dim=1)  # [batch]
        ones = (lengths > 0).to(dtype)[:, None]
        a = None if a is None else a.sum(dim=1, keepdim=True) / lengths.clamp(min=1)[:, None, None]
        g = None if g is None else g.sum(dim=1, keepdim=True)
    if a is not None and has_bias:
        a = torch.cat([a, ones.unsqueeze(-1).to(a.dtype)], dim=-1)
    return a, g, ones


def diagonal_sums(records: Sequence[Record], is_counted: Tensor | None) -> Tensor:
    """Σ_b gradient_b², over samples: what a diagonal is made of [*shape of the parameter].

    Exact: a sample's gradient is the sum over all uses of the parameter, squared after that.

    Args:
        records: All uses of one parameter in a pass.
        is_counted: Which samples count [batch], bool; None if all do.
    """
    first = records[0]
    if len(records) == 1 and isinstance(first, Lookup):
        return _squared_rows(first, is_counted)
    batch = len(first.value) if isinstance(first, Dense) else len(first.g)
    total: Any = 0.0
    at_once = max(1, MOST_AT_ONCE // max(1, torch.Size(first.shape).numel()))
    for low in range(0, max(batch, 1), at_once):
        part: Any = sum(_multiplied(_samples(each, low, low + at_once)) for each in records)
        if is_counted is not None:
            keep = is_counted[low : low + at_once].view(-1, *([1] * len(first.shape)))
            part = torch.where(keep, part, 0.0)
        squares = part.square().sum(dim=0)
        total = total.add_(squares) if low else squares
    return total


def _squared_rows(record: Lookup, is_counted: Tensor | None) -> Tensor:
    """The same for one lookup, without a gradient of the whole table per sample."""
    batch, tokens, features = record.g.shape
    rows = record.shape[0]
    ids = record.ids if is_counted is None else torch.where(is_counted[:, None], record.ids, -1)
    sample = torch.arange(batch, device=ids.device)[:, None].expand(-1, tokens)
    keep = ids >= 0
    # Tokens of one sample with one id are one row of the sample's gradient.
    keys, place = torch.unique((sample * rows + ids)[keep], return_inverse=True)
    g = _wide(record.g)[keep]  # [kept, features]
    of_key = add_rows_(g.new_zeros(len(keys), features), place, g)
    table = g.new_zeros(rows, features)
    return add_rows_(table, keys % rows, of_key.square()).view(record.shape)


def _counted(value: Tensor, weights: Tensor | None) -> Tensor:
    """Zeros for tokens that do not count; selected, since 0 · NaN is NaN."""
    return value if weights is None else torch.where(weights.unsqueeze(-1), value, 0.0)


def _gram(value: Tensor) -> Tensor:  # [batch, tokens, d] -> [d, d]
    rows = value.reshape(-1, value.shape[-1])
    if not is_half(rows):
        return rows.T @ rows
    n = rows.shape[1]  # odd for most layers with a bias
    rows = F.pad(rows, (0, padding_of(n, rows)))
    return wide_product(rows.T, rows)[:n, :n]


def _multiplied(record: Record) -> Tensor:
    """The per-sample gradients [batch, *shape] of a record, float32 at least."""
    if not isinstance(record, Product) or not is_half(record.a):
        return per_sample(record)
    left, right = (record.a, record.g) if record.is_transposed else (record.g, record.a)
    found = wide_product(left.mT, right.to(left.dtype))
    return found.reshape(len(found), *record.shape)


def _samples(record: Record, low: int, high: int) -> Record:
    match record:
        case Dense():
            return Dense(record.value[low:high])
        case Lookup():
            return Lookup(record.ids[low:high], record.g[low:high], record.shape)
        case Product():
            a, g = record.a[low:high], record.g[low:high]
            return Product(a, g, record.is_transposed, record.shape)
    raise AssertionError(f"no rule for {record!r}")


def _wide(value: Tensor, keeps_half: bool = False) -> Tensor:
    """Float32 at least, unless products widen halves themselves."""
    if keeps_half and is_half(value):
        return value
    return value.to(torch.promote_types(value.dtype, torch.float32))


class PartSums:
    """Sums over one part of a pass, layer by layer; what the capture calls.

    Args:
        layers: All layers.
        config: For the form of weight sharing and the kind of Fisher matrix.
        mask: Which labels count [batch, tokens], bool; None if all do.
        token_mask: Which tokens inside of the module do; None if those of the labels.
        num_terms: How many labels there are.

    Attributes:
        sums: By the layer's name and what is summed.
        columns: By the layer's name and side, the rows [tokens, d] of every use, where a side is
            held so.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        config: KFACConfig,
        mask: Tensor | None,
        token_mask: Tensor | None,
        num_terms: int,
    ) -> None:
        self._config, self._mask, self._num_terms = config, mask, num_terms
        self._token_mask = token_mask
        self._layers = {layer.name: layer for layer in layers}
        self._has_g = config.fisher != "forward"
        self._is_first = True  # of several columns: inputs are counted once
        self.sums: dict[tuple[str, str], Tensor] = {}
        self.columns: dict[tuple[str, str], list[Tensor]] = {}
        self._uses: dict[str, list[Record]] = {}

    def record(self, name: str, record: Record) -> None:
        """Take a use of a parameter."""
        layer = self._layers.get(name)
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
        num_tokens = record.g.shape[1]
        weights = token_weights(self._mask, num_tokens, layer.name, self._token_mask)
        with phase("products"):
            a, g, ones = token_rows(
                record,
                weights,
                sharing=self._config.sharing,
                has_bias=layer.bias is not None,
                wants_a=self._is_first,
                wants_g=self._has_g,
            )
            for side, rows in (("a", a), ("g", g)):
                if rows is None:
                    continue
                if side in layer.low_rank:
                    counted = rows[ones.bool()].to(ones.dtype)  # [counted, d]
                    self.columns.setdefault((layer.name, side), []).append(counted)
                else:
                    self._add(layer.name, side, _gram(rows))
        if a is not None:
            self._add(layer.name, "tokens", ones.sum())

    def end_column(self) -> None:
        """End a backward pass: all uses of every parameter are there."""
        is_counted = None if self._mask is None else self._mask.any(dim=1)
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
        return [self._vector(name, like) for name in self._layers]

    def _vector(self, name: str, like: Tensor) -> Tensor | None:
        take = self.sums.pop
        if (name, "d") in self.sums:
            values = [take((name, "d")).reshape(-1)]
        elif (name, "tokens") in self.sums:
            values = [packed(take((name, s))) for s in ("a", "g") if (name, s) in self.sums]
            values.append(take((name, "tokens")).reshape(1))
        else:
            return None
        values.append(like.new_full((1,), float(self._num_terms)))
        return torch.cat([value.to(like) for value in values])


# --- vectors that ranks add up --------------------------------------------------------------------


def vector_size(layer: Layer, *, has_g: bool) -> int:
    """Elements that ranks add up for a layer: packed sums, then numbers of tokens and labels."""
    match layer.method:
        case Method.KRONECKER:
            sides = [side for side in ("a", "g") if has_g or side == "a"]
            dense = [triangle_size(layer.side(s)) for s in sides if s not in layer.low_rank]
            return sum(dense) + 2
        case Method.DIAGONAL:
            return layer.numel + 1
        case Method.IDENTITY:
            return 0
    raise AssertionError(layer.method)


def triangle_size(n: int) -> int:
    """Elements of the upper triangle of an n x n matrix.

    >>> triangle_size(3)
    6
    """
    return n * (n + 1) // 2


def packed(matrix: Tensor) -> Tensor:  # [n, n] -> [n (n + 1) / 2]
    """The upper triangle, folded; the lower one is taken to be equal."""
    n = matrix.shape[0]
    k = n // 2
    folded = matrix.new_zeros(_rows(n), n - k)
    folded[:n] = matrix[:, k:].triu(diagonal=-k)
    folded[k + 1 : 2 * k + 1, :k] += matrix[:k, :k].T.tril()
    return folded.view(-1)


def unpacked(triangle: Tensor, n: int) -> Tensor:  # -> [n, n]
    """The symmetric matrix of a folded triangle.

    >>> import torch
    >>> unpacked(packed(torch.tensor([[1.0, 2.0], [2.0, 3.0]])), 2)
    tensor([[1., 2.],
            [2., 3.]])
    """
    k = n // 2
    folded = triangle.view(_rows(n), n - k)
    upper = triangle.new_zeros(n, n)
    upper[:, k:] = folded[:n].triu(diagonal=-k)
    upper[:k, :k] = folded[k + 1 : 2 * k + 1, :k].tril().T
    return upper + upper.triu(diagonal=1).T


def _rows(n: int) -> int:
    """Rows of the rectangle: one more where n is even."""
    return n + (n % 2 == 0)


# --- phases ---------------------------------------------------------------------------------------

_observers: list[Callable[[str], AbstractContextManager[object]]] = []


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Be in a phase of a step, for profilers and for benchmarks that time them.

    | phase | what |
    |---|---|
    | statistics | the pass under the capture: forward, backward, and inside of it |
    | labels | labels drawn from the model, and their gradient |
    | products | sums of ãã' and gg' over tokens, and diagonals |
    | factors | sums over ranks, averages |
    | inverses | of this rank's layers |
    | gradients | to the owners of layers |
    | graft | the other optimizer's step |
    | apply | products with the inverses, lengths |
    | write | steps to where the gradients are |
    """
    observed_by = _observers[-1](name) if _observers else nullcontext()
    with record_function(f"unison.kfac: {name}"), observed_by:
        yield


@contextmanager
def observed(observer: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter a context for every phase inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
