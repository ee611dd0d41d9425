"""What K-FAC does with each parameter: its layer, how each side is held and why, who owns it.

Layers are found from one small pass under the capture, not from classes of modules: a matrix is
what was multiplied with. Every rank runs such a pass; what the first one finds counts for all.
Then `assign` says which ranks invert and apply which layer, and `Routes` brings them gradients.

[Note: columns] A side of a layer is a matrix [n, n], or what it is the product of: one row of n per
token, U with A = U'U / T. Where there are fewer tokens than about half of n, those are less to send
and, by Woodbury's identity, less to invert. Which of both is decided once, from sizes that every
rank knows: `forms_of`. Rows come to the owner in the order of granules. A side that fits as neither
is cut into blocks, or its layer is not factored.

[Note: rows] A head has more rows than any other layer, and its owner would hold their gradients,
moments and columns alone. So a low-rank G above `max_factor_size` is cut into blocks of rows that
all ranks share (`Layer.blocks`). A block is a unit of its own: its products have one shape wherever
it is, and what is added up over rows (UU', the products with gradients, lengths) is added block by
block in one tree: the same bits on any number of ranks. Grams of blocks of *rows* add up to that of
all rows; those of blocks of tokens, reference note 003's, do not.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from unison.errors import BadInput
from unison.kfac.config import KFACConfig
from unison.ops import Dense, Lookup, Product, Record
from unison.parallel import ParallelAdapter, ShardedParam, write_gradients
from unison.parallel.exchange import SharedBlocks, swap

LONG_SIDE = 1024  # rows from which on it matters how a side is held
BLOCK_ROWS = 1024  # of a block of a side that ranks share out
MOST_COLUMNS = 4096  # tokens of an update for which low rank is thought of
MOST_BLOCKED = 1 << 25  # elements of a side that is held as blocks

# --- layers ---------------------------------------------------------------------------------------


class Method(Enum):
    """How a layer's curvature is held."""

    KRONECKER = "kronecker"
    DIAGONAL = "diagonal"
    IDENTITY = "identity"  # none: the grafted optimizer's own step


Form = Literal["matrix", "exact", "blocks", "columns", "softmax", "identity"]
"""How a side of a layer, A or G, is held: as a matrix; as that of the true Fisher, of the head; as
blocks on the diagonal, without what lies between them; as columns of tokens, of low rank; as a
diagonal less columns, the true Fisher of the head; or as the identity."""

_STORED: dict[str, Form] = {  # in checkpoints
    **{form: form for form in get_args(Form)},
    "matrix of the true Fisher": "exact",
    "diagonal less columns": "softmax",
}


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
        a_form: How A is held.
        g_form: How G is held.
        block_rows: Rows of the blocks in which ranks share G's rows, with all that belongs to them:
            gradients, moments, columns; 0 if each owner has the whole layer.
    """

    name: str
    bias: str | None
    method: Method
    shape: tuple[int, ...]
    rows: int
    columns: int
    is_transposed: bool
    why: str = ""
    a_form: Form = "matrix"
    g_form: Form = "matrix"
    block_rows: int = 0

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Rows [low, high) of the blocks that ranks share; none of a layer that is whole."""
        size = self.block_rows
        return [(low, min(low + size, self.rows)) for low in range(0, self.rows, size or 1) if size]

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

    def form(self, which: str) -> Form:
        """How A (`"a"`) or G (`"g"`) is held."""
        return self.a_form if which == "a" else self.g_form

    @property
    def low_rank(self) -> tuple[str, ...]:
        """The sides that are held as columns: `"a"`, `"g"`, both or none."""
        return tuple(s for s in "ag" if self.form(s) in ("columns", "softmax"))

    @property
    def numel(self) -> int:
        """Elements of the layer's gradient."""
        return self.d_in * self.d_out

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        stored = {form: name for name, form in _STORED.items()}
        forms = {"a_form": stored[self.a_form], "g_form": stored[self.g_form]}
        return {**asdict(self), "method": self.method.value, "shape": list(self.shape), **forms}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Layer":
        """The inverse of `as_dict`."""
        forms = {key: _STORED[values[key]] for key in ("a_form", "g_form") if key in values}
        found = {"method": Method(values["method"]), "shape": tuple(values["shape"])}
        return cls(**{**values, **found, **forms})


def layers_of(
    uses: Mapping[str, Sequence[Record]],
    shapes: Mapping[str, tuple[int, ...]],
    config: KFACConfig,
    num_rows: int = 0,
    num_outputs: int = 0,
    machine: str = "cpu",
) -> list[Layer]:
    """Return every parameter's layer, in the order of `shapes`.

    Args:
        uses: The records of one pass, by parameter.
        shapes: Of all parameters.
        config: What to factor.
        num_rows: Rows of an update, of all ranks.
        num_outputs: Outputs of a label: the head is the layer that makes them.
        machine: What it is computed on, `"cpu"` or `"cuda"`.

    Raises:
        BadInput: If `head="exact"` and no matrix makes the outputs.
    """
    sides = {
        name: _sides_of(name, uses.get(name, ()), config, num_rows, num_outputs, machine)
        for name in shapes
    }
    known = {form for own in sides.values() if isinstance(own, dict) for form, _ in own.values()}
    if uses and config.head == "exact" and not known & {"exact", "softmax"}:
        raise BadInput(
            "head='exact' takes G of the matrix whose product is the module's output, and no "
            "parameter is used so: pass head='sampled', or return that product from the module"
        )
    biases = {
        name: bias
        for name, bias in bias_names(shapes).items()
        if not isinstance(sides[name], str) and _belongs(uses[name], uses.get(bias, ()))
    }
    found = []
    for name, shape in shapes.items():
        own = sides[name]
        if not isinstance(own, str):
            use = next(each for each in uses[name] if isinstance(each, Product))
            notes = [why for _, why in own.values()]
            if any(isinstance(each, Lookup) for each in uses[name]):
                notes.insert(0, "as a matrix; its use as a table is left out")
            of_use = use.g.shape[-1], use.a.shape[-1], use.is_transposed
            forms: dict[str, Any] = {f"{side}_form": form for side, (form, _) in own.items()}
            layer = Layer(name, biases.get(name), Method.KRONECKER, shape, *of_use, **forms)
            is_long = layer.rows > config.max_factor_size
            if "g" in layer.low_rank and is_long and not use.is_transposed:
                layer = replace(layer, block_rows=BLOCK_ROWS)
                notes.append(f"ranks share its rows in {len(layer.blocks)} blocks")
            found.append(replace(layer, why="; ".join(notes)))
        elif name not in biases.values():
            is_left = config.policy == "identity" or config.fisher == "forward" or own == "not used"
            method = Method.IDENTITY if is_left else Method.DIAGONAL
            found.append(Layer(name, None, method, shape, math.prod(shape), 1, False, own))
    return found


def _sides_of(
    name: str,
    uses: Sequence[Record],
    config: KFACConfig,
    num_rows: int,
    num_outputs: int,
    machine: str,
) -> dict[str, tuple[Form, str]] | str:
    """How the sides of a parameter are held, see `forms_of`; in words, why it is not factored."""
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
    is_exact_head = config.head == "exact" and _makes_outputs(products, num_outputs)
    if config.policy == "kronecker":
        exact: dict[str, tuple[Form, str]] = {
            "g": ("exact", "G as a matrix (its true Fisher matrix)")
        }
        return exact if is_exact_head else {}
    if rows * columns < config.min_layer_size and not is_exact_head:
        return f"fewer than {config.min_layer_size} elements"
    tokens = 1 if config.sharing == "reduce" else sum(use.g.shape[1] for use in products)
    head = {"is_head": rows == num_outputs, "is_exact_head": is_exact_head}
    return forms_of(rows, columns + 1, num_rows * tokens, config, machine=machine, **head)


def _makes_outputs(products: Sequence[Product], num_outputs: int) -> bool:
    """Whether a matrix's only product is the model's output, which ones were sent back from."""
    g = products[0].g
    return len(products) == 1 and g.shape[-1] == num_outputs and bool((g == 1).all())


def forms_of(
    rows: int,
    columns: int,
    num_tokens: int,
    config: KFACConfig,
    *,
    is_head: bool,
    is_exact_head: bool = False,
    machine: str = "cpu",
) -> dict[str, tuple[Form, str]] | str:
    """Decide how the two sides of a layer are held; arithmetic on what every rank knows.

    Args:
        rows: Side of G.
        columns: Side of A, with the bias.
        num_tokens: Of an update, of all ranks.
        config: Policy, schedule and sizes.
        is_head: Whether the layer makes as many outputs as the model has.
        is_exact_head: Whether G is the true Fisher matrix of the model's own outputs.
        machine: What it is computed on, `"cpu"` or `"cuda"`.

    Returns:
        The sides that are not held as a matrix, each with the reason; or why the layer is not
        factored.
    """
    found: dict[str, tuple[Form, str]] = {}
    for side, n, other in (("a", columns, rows), ("g", rows, columns)):
        if side == "g" and config.fisher == "forward":
            continue
        costs = side_costs(n, other, num_tokens, config, machine)
        # Of all labels there are as many columns as labels: more than n soon.
        if (side == "g" and config.fisher == "exact") or config.policy == "small_only":
            costs["columns"] = math.inf
        form, why = _form_of(side, n, num_tokens, costs, config, is_head=is_head)
        if side == "g" and is_exact_head:
            is_low = form != "matrix"
            if is_low and config.damping_form == "joint":
                raise BadInput(
                    f"head='exact' with {n} classes is a diagonal less few columns, which joint "
                    "damping has no inverse for: pass damping_form='pi' or 'factored', or "
                    "head='sampled'"
                )
            form, why = "softmax" if is_low else "exact", "its true Fisher matrix"
        match form:
            case None:
                return f"a side above {config.max_factor_size}"
            case "matrix":
                continue
            case "columns":
                kept = f", at most {config.max_rank} kept" if config.has_rank else ""
                text = f"by {num_tokens} columns{kept}"
            case "softmax":
                text = "by a diagonal less columns"
            case "exact":
                text = "as a matrix"
            case "blocks":
                text = "by {} blocks of {}".format(*block_shape(n, config))
            case "identity":
                text = "as the identity"
        found[side] = form, f"{side.upper()} {text} ({why})"
    num_sides = 1 if config.fisher == "forward" else 2
    if [form for form, _ in found.values()] == ["identity"] * num_sides:
        return f"every side above {config.max_factor_size}"
    return found


def _form_of(
    side: str,
    n: int,
    num_tokens: int,
    costs: Mapping[Form, float],
    config: KFACConfig,
    *,
    is_head: bool,
) -> tuple[Form | None, str]:
    """How a side is held by the policy, and why; None where the layer is not to be factored."""
    dense, low = costs["matrix"], costs["columns"]
    is_long = n >= LONG_SIDE and num_tokens <= MOST_COLUMNS
    if config.policy == "all" and side == "g" and low < math.inf:
        return "columns", "policy all"
    if config.policy == "hybrid" and low < math.inf:
        if is_long:
            return "columns", "policy hybrid, a long side"
        if side == "g" and is_head:
            return "columns", "policy hybrid, the head"
    if config.policy == "blocked" and n > LONG_SIDE and config.damping_form != "joint":
        return "blocks", "policy blocked"
    # Compressed columns and joint damping do not go together.
    is_joint = config.damping_form == "joint"
    if config.policy != "auto" or not is_long or (is_joint and config.decay > 0):
        low = math.inf
    if dense < math.inf:
        compared = f"{low / 1e9:.3g} Gflop an update instead of {dense / 1e9:.3g}"
        return ("matrix", "") if dense <= low else ("columns", compared)
    # Too long for a matrix. Blocks leave out what lies between them. Rows of such a side, classes
    # say, differ most in how often they are met: a diagonal sees that, the identity does not.
    why = f"longer than {config.max_factor_size}"
    if config.policy == "one_sided":
        return "identity", "policy one_sided, " + why
    blocked = math.inf if is_joint or config.policy == "small_only" else costs["blocks"]
    if min(low, blocked) == math.inf:
        return None, why
    return ("columns" if low <= blocked else "blocks"), why


# What an operation costs in flops of float32 products: n³ of an inverse, a row of it, n³ of
# eigenvectors, a row of them, and float64. Measured on one core of a CPU; of a GPU only the first
# two are, and rows are what it waits for.
INVERSE, INVERSE_ROW, EIGEN, EIGEN_ROW, WIDE = range(5)
COSTS = {"cpu": (3.0, 0.0, 15.0, 4e6, 3.0), "cuda": (3.0, 1e8, 100.0, 1.4e9, 1.0)}


def side_costs(
    n: int, other: int, num_tokens: int, config: KFACConfig, machine: str = "cpu"
) -> dict[Form, float]:
    """What a side costs from one update to the next, in flops, by how it is held.

    | | made | inverted | applied, at each step |
    |---|---|---|---|
    | matrix | T n² | c n³ | 2 n² m |
    | blocks of b | 2 T n b | c n b² | 2 n b m |
    | columns of one update | – | w (3 T² n + T³) | 4 T n m |
    | columns averaged | 2 (r + T) T n + e (r + T)³ + 2 (r + T) r n | – | 4 r n m |

    where m is the other side, r is `max_rank`, and c, e and w are in `COSTS`. Infinite for what
    does not fit.
    """
    every, t, cost = config.update_every, min(num_tokens, n), COSTS.get(machine, COSTS["cuda"])
    period = every(0) if callable(every) else every
    dense = 1.0 * num_tokens * n**2 + cost[INVERSE] * n**3 + cost[INVERSE_ROW] * n
    dense += 2.0 * period * n**2 * other
    count, b = block_shape(n, config)
    blocked = 2.0 * num_tokens * n * b + cost[INVERSE] * n * b**2 + cost[INVERSE_ROW] * b
    blocked += 2.0 * period * n * b * other
    if config.has_rank:
        rank = min(config.max_rank, n)
        joined = rank + t
        low = 2.0 * joined * t * n + cost[EIGEN] * joined**3 + cost[EIGEN_ROW] * joined
        low += 2.0 * joined * rank * n
    else:
        rank = t
        low = cost[WIDE] * (3.0 * t**2 * n + t**3) + cost[INVERSE_ROW] * t
    low += 4.0 * period * rank * n * other
    return {
        "matrix": dense if n <= config.max_factor_size else math.inf,
        "columns": low,
        "blocks": blocked if count * b * b <= MOST_BLOCKED else math.inf,
    }


def block_shape(n: int, config: KFACConfig) -> tuple[int, int]:
    """How many blocks a side of n rows has, and the rows of each; the last one may be shorter.

    >>> block_shape(9000, KFACConfig())
    (9, 1000)
    """
    count = -(-n // min(LONG_SIDE, config.max_factor_size))
    return count, -(-n // count)


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
_FORMS = {
    "blocks": "A long side was held as blocks on its diagonal, which is an approximation",
    "identity": "A side was too long, and taken as the identity",
    "exact": "G of the head is its true Fisher matrix",
    "softmax": "G of the head is its true Fisher matrix, a diagonal less columns of tokens",
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
        num = {method: sum(each.method is method for each in layers) for method in Method}
        text = (
            f"{num[Method.KRONECKER]} matrices were factored, {num[Method.DIAGONAL]} parameters "
            f"had an exact diagonal, {num[Method.IDENTITY]} none."
        )
        for form, words in _FORMS.items():
            if names := [each.name for each in layers if form in (each.a_form, each.g_form)]:
                text += f" {words}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}."
        if low := [each.name for each in layers if each.low_rank]:
            names = ", ".join(low[:3]) + (", …" if len(low) > 3 else "")
            kept = (
                f", compressed to the {config.max_rank} largest eigenvalues with the mean of the "
                "others in the damping, which is an approximation"
            )
            text += f" Of {len(low)} ({names}), a side was inverted by Woodbury's identity on "
            text += f"columns of tokens{kept if config.has_rank else ''}."
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
    if layer.block_rows:  # which all ranks do, a part each
        return 0.0
    if layer.method is Method.KRONECKER:
        m, n = layer.d_in, layer.d_out
        is_whole = {s: layer.form(s) in ("matrix", "exact") for s in "ag"}
        sizes = [layer.side(s) if is_whole[s] else min(layer.side(s), LONG_SIDE) for s in "ag"]
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


# --- gradients to owners, steps back --------------------------------------------------------------
#
# A layer is preconditioned as a whole matrix by its owner, whatever cuts its parameters: a flat
# shard may end in the middle of a row. So each owner is sent the parts of its layers, or of its
# blocks, that others hold, and sends back what each of them holds of the step: as many bytes as a
# gradient's reduce-scatter and gather. Where every rank has whole gradients the first half is
# nothing, and where every rank owns every layer the second is.


Piece = tuple[str, ShardedParam, int, int]
"""What an owner preconditions: the name of a parameter, or `name#number` of a block of its rows;
the parameter; and which of its elements [start, stop) these are."""


def _within(piece: Piece, place: int) -> tuple[int, int]:
    """A piece's elements [low, high) that are in the part of the parameter at a place."""
    _, param, first, last = piece
    start, stop = param.ranges[place]
    low = max(start, first)
    return low, max(low, min(stop, last))


def _elements(value: Tensor, start: int, low: int, high: int) -> Tensor:
    """Elements [low, high) of a parameter from a value that begins at `start`."""
    is_whole = high - low == value.numel()
    return value if is_whole else value.reshape(-1)[low - start : high - start]


class Routes:
    """Who sends what to whom; arithmetic that every rank does alike.

    Args:
        adapter: Holds the parameters.
        layers: What is preconditioned.
        owners: The ranks that own each layer.

    Attributes:
        like: Of the dtype and on the device that factors and steps are computed in.
    """

    def __init__(
        self, adapter: ParallelAdapter, layers: Sequence[Layer], owners: Sequence[tuple[int, ...]]
    ) -> None:
        self._ranks, self._num_places = adapter.ranks, adapter.num_places
        dtype = torch.float32
        for each in adapter.params:
            dtype = torch.promote_types(dtype, each.parameter.dtype)
        self.like = torch.zeros(0, dtype=dtype, device=adapter.device)
        self._held = {each.name: each for each in adapter.params}
        # Of one layer each, or of a block of it, and who owns them.
        self._pieces: list[tuple[tuple[int, ...], list[Piece]]] = []
        for layer, own in zip(layers, owners, strict=True):
            params = [self._held[name] for name in layer.parameters]
            if not layer.block_rows:
                self._pieces.append((own, [(each.name, each, 0, each.numel) for each in params]))
            shared = SharedBlocks(self._ranks, len(layer.blocks))
            widths = [(each, each.numel // layer.rows) for each in params]  # elements of a row
            for number, (low, high) in enumerate(layer.blocks):
                blocks = [(f"{p.name}#{number}", p, low * w, high * w) for p, w in widths]
                self._pieces.append(((shared.owner(number),), blocks))

    def _owned_by(self, rank: int) -> list[list[Piece]]:
        """What a rank owns."""
        return [pieces for owners, pieces in self._pieces if rank in owners]

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradients of the layers that this rank owns; a collective if they are cut.

        Layers of which this rank has no gradient at all are left out: no rank has one.
        """
        mine = self._owned_by(self._ranks.rank)
        with_some = [own for own in mine if any(p.parameter.grad is not None for _, p, *_ in own)]
        some = [each for own in with_some for each in own]
        if self._num_places == 1:
            wholes = {key: _elements(p.gradient(p.shape), 0, *run) for key, p, *run in some}
        else:
            wholes = self._gathered([each for own in mine for each in own])
        return {key: wholes[key].to(self.like) for key, *_ in some}

    def has_gradient(self, layer: Layer) -> bool:
        """Whether a layer has a gradient; the same on every rank, whatever it owns."""
        return any(self._held[name].parameter.grad is not None for name in layer.parameters)

    def _gathered(self, mine: Sequence[Piece]) -> dict[str, Tensor]:
        """The gradients of some pieces, of the parts at every place of this copy."""
        ranks, size = self._ranks, self._num_places
        first = ranks.rank // size * size  # of the ranks that hold the same copy
        sent: list[list[Tensor]] = [[] for _ in range(ranks.size)]
        expected: list[list[int]] = [[] for _ in range(ranks.size)]
        for place in range(size):
            theirs = [each for own in self._owned_by(first + place) for each in own]
            sent[first + place] = [
                _elements(each[1].gradient(), each[1].start, *_within(each, ranks.rank % size))
                for each in theirs
            ]
            expected[first + place] = _lengths(mine, place)
        received = swap(ranks, sent, expected, self.like)[first : first + size]
        found = {}
        for (key, param, *_), parts in zip(mine, zip(*received, strict=True), strict=True):
            value = torch.cat([part.to(self.like) for part in parts])
            found[key] = value.view(param.shape) if len(value) == param.numel else value
        return found

    def give(self, steps: Mapping[str, Tensor]) -> None:
        """Put steps where the gradients were; a collective unless every rank owns every layer.

        Args:
            steps: Of the parameters of the layers that this rank owns, in any shape; one that is
                missing had no gradient on any rank.
        """
        ranks, size = self._ranks, self._num_places
        me, place = ranks.rank, ranks.rank % size
        if all(len(owners) == ranks.size for owners, _ in self._pieces):
            _write((each, self._part(steps, each, place)) for each in self._sent(me, me))
            return
        sent = [
            [self._part(steps, each, rank % size).reshape(-1) for each in self._sent(me, rank)]
            for rank in range(ranks.size)
        ]
        expected = [self._sent(rank, me) for rank in range(ranks.size)]
        sizes = [_lengths(of_rank, place) for of_rank in expected]
        received = swap(ranks, sent, sizes, self.like)
        _write(
            pair
            for of_rank, values in zip(expected, received, strict=True)
            for pair in zip(of_rank, values, strict=True)
        )

    def _sent(self, source: int, target: int) -> list[Piece]:
        """The pieces whose steps one rank gets from another."""
        own = (pieces for owners, pieces in self._pieces if source_of(owners, target) == source)
        return [each for pieces in own for each in pieces]

    def _part(self, steps: Mapping[str, Tensor], piece: Piece, place: int) -> Tensor:
        key, _, start, _ = piece
        low, high = _within(piece, place)
        if key not in steps:
            return self.like.new_zeros(high - low)
        return _elements(steps[key], start, low, high)


def _lengths(pieces: Sequence[Piece], place: int) -> list[int]:
    """How many elements of each piece are at a place."""
    return [high - low for low, high in (_within(each, place) for each in pieces)]


def _write(pairs: Iterable[tuple[Piece, Tensor]]) -> None:
    """Put steps of pieces into this rank's parts of gradients; blocks come in their order."""
    found: dict[str, tuple[ShardedParam, list[Tensor]]] = {}
    for (_, param, *_), value in pairs:
        found.setdefault(param.name, (param, []))[1].append(value)
    write_gradients(
        (param, values[0] if len(values) == 1 else torch.cat([v.reshape(-1) for v in values]))
        for param, values in found.values()
    )
