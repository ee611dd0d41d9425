"""The sums over tokens that factors are made of.

[Note: sums, not means] Everything here is a *sum* over this rank's tokens, with the number of them
beside it. A factor is the sum over all ranks divided by a number of all ranks, once, where it is
used: `A = Σ ãã' / T` by the tokens that a layer saw, `G = Σ gg' / N` by the labels that the loss is
made of, so that A ⊗ G is the mean curvature of a label. In a language model N = T, in a convolution
T is larger. Means of means would weigh a rank, or a micro-batch, with few tokens as much as one
with many.

[Note: expand and reduce] Tokens of one sample share a weight. `expand` counts each as a sample of
its own, which is exact for a loss per token behind linear layers; `reduce` averages a sample's
inputs and adds up its gradients first, which is exact where tokens are averaged before the loss.

[Note: folded triangles] Ranks send one another symmetric matrices as half of their elements. An
upper triangle is folded into a rectangle with slices alone, without a list of places, which would
be four times as large as what it packs. With k = n // 2, the columns from k on are kept as they
are, [n, n - k]; below their diagonal there is room for the other triangle [k, k], transposed, one
row further down. A process alone, without granules, sends nothing and keeps one sum: it folds none.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from unison.errors import BadInput
from unison.kernels.available import wide_dtype
from unison.kfac.config import KFACConfig
from unison.kfac.layers import Layer, Method, block_shape
from unison.kfac.linalg import is_gpu, is_half, padding_of, wide_product
from unison.ops import Dense, Lookup, Product, Record, per_sample, plain_record
from unison.ops.records import add_rows_, factors, shape_of, take, wide

MOST_AT_ONCE = 1 << 24  # elements of per-sample gradients that are held
MOST_ALIKE = 1 << 18  # of those of a parameter that is squared together with others
GRAM_ROWS = 512  # of a Gram matrix that are made at once; what lies below them is left out
MATRICES = ("matrix", "exact")
EXACT_HEADS = ("exact", "softmax")

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
    record: Product, weights: Tensor | None, *, sharing: str, wants_a: bool, wants_g: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The vectors of one use whose products are added up, without a bias.

    Args:
        record: The use.
        weights: Which tokens count [batch, tokens], bool; None if all do.
        sharing: `"expand"` or `"reduce"`, which makes one token of a sample's.
        wants_a: Whether to make a.
        wants_g: Whether to make g.

    Returns:
        a [batch, tokens, d_in]; g [batch, tokens, d_out]; None for one that is not wanted. What
        does not count is zero.
    """
    # Only what is asked for: the other side may be as large, and is not read.
    keeps_half = sharing == "expand"
    a = _counted(_wide(record.a, keeps_half), weights) if wants_a else None  # [batch, tokens, d_in]
    g = _counted(_wide(record.g, keeps_half), weights) if wants_g else None  # [..., d_out]
    if sharing == "reduce":
        some = record.g.new_ones(record.g.shape[:2]) if weights is None else weights
        lengths = some.sum(dim=1)[:, None, None]
        a = None if a is None else a.sum(dim=1, keepdim=True) / lengths.clamp(min=1)
        g = None if g is None else g.sum(dim=1, keepdim=True)
    return a, g


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
    at_once = max(1, MOST_AT_ONCE // max(1, torch.Size(shape_of(first)).numel()))
    # Of a table that is the head too, what was looked up is added to the product, row by row.
    is_head = any(isinstance(each, Product) for each in records)
    lookups = [each for each in records if is_head and isinstance(each, Lookup)]
    others = [each for each in records if not (is_head and isinstance(each, Lookup))]
    # The rows that were looked up [batch, tokens], and their gradients, zeros where none was.
    looked_up = [
        (each.ids.clamp(min=0), _counted(_wide(each.g), each.ids >= 0)) for each in lookups
    ]
    for low in range(0, max(batch, 1), at_once):
        some = slice(low, low + at_once)
        parts = [_multiplied(take(each, some)) for each in others]
        summed = functools.reduce(torch.add, parts)
        for ids, g in looked_up:
            summed = _add_looked_up(summed, ids[some], g[some])
        keep = None if is_counted is None else is_counted[some]
        gradients = _kept(summed[None], keep)[0]
        if low and len(gradients) == 1:  # of a large table, which is read only once so
            total.addcmul_(gradients[0], gradients[0])
        else:
            squares = gradients.square().sum(dim=0)
            total = total.add_(squares) if low else squares
    return total


def _add_looked_up(gradients: Tensor, ids: Tensor, g: Tensor) -> Tensor:
    """Add rows to per-sample gradients [batch, rows, features] that nobody else holds."""
    gradients = gradients.contiguous()
    batch, rows, features = gradients.shape
    if batch > 1:
        ids = ids + torch.arange(batch, device=ids.device)[:, None] * rows
    add_rows_(gradients.view(-1, features), ids.reshape(-1), g.reshape(-1, features))
    return gradients


def _kept(gradients: Tensor, is_counted: Tensor | None) -> Tensor:  # [parameters, batch, *shape]
    """Per-sample gradients with zeros for samples that do not count."""
    if is_counted is None:
        return gradients
    return torch.where(is_counted.view(-1, *([1] * (gradients.ndim - 2))), gradients, 0.0)


def _squared_rows(record: Lookup, is_counted: Tensor | None) -> Tensor:
    """The same for one lookup, without a gradient of the whole table per sample."""
    batch, tokens, features = record.g.shape
    rows = record.shape[0]
    is_kept = record.ids >= 0
    if is_counted is not None:
        is_kept = is_kept & is_counted[:, None]
    sample = torch.arange(batch, device=is_kept.device)[:, None]
    keys = torch.where(is_kept, sample * rows + record.ids, -1).reshape(batch * tokens)
    # Tokens of one sample with one id are one row of the sample's gradient, and follow one another
    # here. As many rows as tokens, whatever they are: a GPU is not waited for.
    keys, order = keys.sort(stable=True)
    is_next = torch.ones_like(keys)
    is_next[1:] = keys[1:] != keys[:-1]
    place = is_next.cumsum(0) - 1
    g = _counted(_wide(record.g), is_kept).reshape(-1, features)[order]
    of_key = add_rows_(torch.zeros_like(g), place, g)
    row = torch.zeros_like(keys).scatter_(0, place, keys.clamp(min=0) % rows)
    return add_rows_(g.new_zeros(rows, features), row, of_key.square()).view(record.shape)


def _counted(value: Tensor, weights: Tensor | None) -> Tensor:
    """Zeros for tokens that do not count; selected, since 0 · NaN is NaN."""
    return value if weights is None else torch.where(weights.unsqueeze(-1), value, 0.0)


def _gram(value: Tensor, n: int | None = None) -> Tensor:  # [batch, tokens, d] -> [n, n]
    """Sums of products of the first n columns, or of all; a half may be left out, see `whole`."""
    rows = value.reshape(-1, value.shape[-1])
    n = rows.shape[1] if n is None else n
    if is_half(rows) and (extra := padding_of(rows.shape[1], rows)):
        rows = F.pad(rows, (0, extra))
    product = wide_product if is_half(rows) else torch.matmul
    if n < 2 * GRAM_ROWS or is_gpu(rows):  # which would be half idle
        found = product(rows.T, rows)
        # In one piece: one tensor that is not would make many launches of each for all layers.
        return found if len(found) == n else found[:n, :n].contiguous()
    found = rows.new_zeros(n, n, dtype=wide_dtype(rows.dtype))
    for low in range(0, n, GRAM_ROWS):
        found[low : low + GRAM_ROWS, low:] = product(
            rows[:, low : low + GRAM_ROWS].T, rows[:, low:]
        )[: n - low, : n - low]
    return found


def _block_gram(value: Tensor, config: KFACConfig) -> Tensor:  # [batch, tokens, d] -> [d, rows]
    """Sums of products of features in the same block, the rows of blocks one after the other."""
    n = value.shape[-1]
    count, size = block_shape(n, config)
    rows = F.pad(value.reshape(-1, n), (0, count * size - n)).unflatten(-1, (count, size))
    blocks = rows.transpose(0, 1)  # [blocks, tokens, rows]
    product = wide_product if is_half(rows) else torch.matmul
    return product(blocks.mT, blocks).flatten(0, 1)[:n]


def _multiplied(record: Record) -> Tensor:
    """The per-sample gradients [batch, *shape] of a record, float32 at least."""
    if not isinstance(record, Product) or not is_half(record.a):
        return per_sample(record)
    left, right = factors(record)
    rows, columns = left.shape[-1], right.shape[-1]
    if extra := padding_of(rows, left):  # of a vocabulary: four times as fast, copies included
        left = F.pad(left, (0, extra))
    if extra := padding_of(columns, left):
        right = F.pad(right, (0, extra))
    found = wide_product(left.mT, right.to(left.dtype))[:, :rows, :columns]
    return found.reshape(len(found), *record.shape)


def _wide(value: Tensor, keeps_half: bool = False) -> Tensor:
    """Float32 at least, unless products widen halves themselves."""
    return value if keeps_half and is_half(value) else wide(value)


@dataclass(eq=False, repr=False)
class PartSums:
    """Sums over one part of a pass, layer by layer; what the capture calls.

    Attributes:
        layers: All layers, by name.
        config: For the form of weight sharing and the kind of Fisher matrix.
        mask: Which labels count [batch, tokens], bool; None if all do.
        token_mask: Which tokens inside of the module do; None if those of the labels.
        num_terms: How many labels there are.
        sums: By the layer's name and what is summed, see `sum_shapes`.
        columns: By the layer's name and side, the rows [tokens, d] of every use, where a side is
            held so.
        num_tokens: Of each layer that was used, how many went through it.
    """

    layers: Mapping[str, Layer]
    config: KFACConfig
    mask: Tensor | None
    token_mask: Tensor | None
    num_terms: int
    sums: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    columns: dict[tuple[str, str], list[Tensor]] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._is_first = True  # of several columns: inputs are counted once
        self._uses: dict[str, list[Record]] = {}
        self._tokens: dict[tuple[int, torch.dtype], tuple[Tensor | None, Tensor, int]] = {}
        self._biases: dict[tuple[int, torch.dtype, int], Tensor] = {}

    def record(self, name: str, record: Record) -> None:
        """Take a use of a parameter."""
        layer = self.layers.get(name)
        if layer is None or layer.method is Method.IDENTITY:
            return  # a bias comes with its weight
        record = plain_record(record)
        if layer.method is Method.DIAGONAL:
            self._uses.setdefault(name, []).append(record)
        elif isinstance(record, Product):
            self._add_kronecker(layer, record)

    def take_head(self, logits: Tensor, is_chosen: Tensor | None) -> None:
        """Take what the true Fisher matrix of the outputs is made of: Σ diag(p) - pp' over tokens.

        Args:
            logits: The model's outputs [batch, ..., classes].
            is_chosen: The tokens of which columns are kept where those are few [batch, tokens],
                bool; None for all.
        """
        heads = [each for each in self.layers.values() if each.g_form in EXACT_HEADS]
        tokens, classes = logits.shape[1:-1].numel(), logits.shape[-1]
        for row, z in enumerate(logits.reshape(-1, tokens, classes) if heads else ()):
            p = torch.softmax(z, dim=-1, dtype=wide_dtype(z.dtype))
            keep = None if self.mask is None else self.mask[row]
            if keep is not None:
                p = p[keep]
            chosen = None if is_chosen is None else is_chosen[row]
            if chosen is not None and keep is not None:
                chosen = chosen[keep]
            for layer in heads:
                if layer.g_form == "exact":
                    self._add(layer.name, "g", p.sum(dim=0).diag() - _gram(p))
                else:
                    own = p if chosen is None else p[chosen]
                    self._add(layer.name, "p_g", p.sum(dim=0))
                    self.columns.setdefault((layer.name, "g"), []).append(own)

    def _add_kronecker(self, layer: Layer, record: Product) -> None:
        if (record.g.shape[-1], record.a.shape[-1]) != (layer.rows, layer.columns):
            raise BadInput(
                f"{layer.name} was used as a matrix of {layer.rows} x {layer.columns}, and is now "
                f"used as one of {record.g.shape[-1]} x {record.a.shape[-1]}"
            )
        weights, ones, count = self._tokens_of(layer.name, record.g)
        with phase("products"):
            a, g = token_rows(
                record,
                weights,
                sharing=self.config.sharing,
                wants_a=self._is_first and layer.a_form != "identity",
                wants_g=self.config.fisher != "forward"
                and layer.g_form not in ("identity", *EXACT_HEADS),
            )
            if a is not None and layer.bias is not None:
                a = torch.cat([a, self._ones_of_bias(a, ones, layer)], dim=-1)
            for side, rows in (("a", a), ("g", g)):
                if rows is None:
                    continue
                if layer.form(side) == "columns":
                    counted = rows[ones.bool()].to(ones.dtype)  # [counted, d]
                    self.columns.setdefault((layer.name, side), []).append(counted)
                elif layer.form(side) == "blocks":
                    self._add(layer.name, f"blocks_{side}", _block_gram(rows, self.config))
                else:
                    self._add(layer.name, side, _gram(rows, layer.side(side)))
        if self._is_first:
            self.num_tokens[layer.name] = self.num_tokens.get(layer.name, 0) + count

    def _tokens_of(self, name: str, g: Tensor) -> tuple[Tensor | None, Tensor, int]:
        """Which tokens of a use count; 1.0 for each row that is made of them; how many those are.

        The same for all layers with as many tokens.
        """
        key = g.shape[1], wide_dtype(g.dtype)
        if key not in self._tokens:
            weights = token_weights(self.mask, key[0], name, self.token_mask)
            counted = weights
            shape = g.shape[:2]
            if self.config.sharing == "reduce":
                counted = None if weights is None else weights.any(dim=1, keepdim=True)
                shape = torch.Size([len(g), min(1, key[0])])
            ones = g.new_ones(shape, dtype=key[1]) if counted is None else counted.to(key[1])
            count = shape.numel() if counted is None else int(counted.sum())
            self._tokens[key] = weights, ones, count
        return self._tokens[key]

    def _ones_of_bias(self, a: Tensor, ones: Tensor, layer: Layer) -> Tensor:
        """The columns for a bias [batch, tokens, columns]: a 1, and zeros that make products fast.

        The same for all layers that need as many.
        """
        is_padded = layer.a_form in MATRICES and is_half(a)
        key = ones.shape[1], a.dtype, padding_of(layer.d_in, a) if is_padded else 0
        if key not in self._biases:
            self._biases[key] = F.pad(ones.unsqueeze(-1).to(a.dtype), (0, key[2]))
        return self._biases[key]

    def end_column(self) -> None:
        """End a backward pass: all uses of every parameter are there."""
        is_counted = None if self.mask is None else self.mask.any(dim=1)
        alike: dict[object, dict[str, Tensor]] = {}  # few launches for all gains and offsets
        with phase("products"):
            for name, (first, *others) in self._uses.items():
                if others or not isinstance(first, Dense) or first.value.numel() > MOST_ALIKE:
                    self._add(name, "d", diagonal_sums([first, *others], is_counted))
                else:
                    kind = first.value.shape, first.value.dtype
                    alike.setdefault(kind, {})[name] = first.value
            for own in alike.values():
                squares = _kept(_wide(torch.stack(list(own.values()))), is_counted).square()
                for name, each in zip(own, squares.sum(dim=1), strict=True):
                    self._add(name, "d", each)
        self._uses.clear()
        self._is_first = False

    def _add(self, name: str, side: str, value: Tensor) -> None:
        before = self.sums.get((name, side))
        self.sums[name, side] = value if before is None else before.add_(value)

    def vectors(
        self, entries: Iterable[tuple[str, str]], like: Tensor, *, is_folded: bool
    ) -> list[Tensor | None]:
        """What ranks add up: sums by layer and factor, None for what was not used.

        They are gone afterwards: the capture, which knows this object, is freed late.

        Args:
            entries: Names of layers, and what is summed.
            like: Of the dtype and on the device in which they are added.
            is_folded: Whether matrices are; see [Note: folded triangles].
        """
        values: list[Tensor | None] = []
        for name, key in entries:
            value = self.sums.pop((name, key), None)
            if value is not None and key in "ag":
                value = packed(value) if is_folded else whole(value)
            values.append(None if value is None else value.reshape(-1).to(like))
        return values

    def take_columns(self, like: Tensor) -> dict[tuple[str, str], Tensor]:
        """The rows [tokens, d] of layers and sides that are held so; gone afterwards."""
        found = {key: torch.cat(rows).to(like) for key, rows in self.columns.items()}
        self.columns.clear()
        return found


# --- vectors that ranks add up --------------------------------------------------------------------


def sum_shapes(
    layer: Layer, config: KFACConfig, is_folded: bool = False
) -> dict[str, tuple[int, ...]]:
    """Of what ranks add up for a layer, by the names of `Factors`; matrices may be folded."""
    if layer.method is not Method.KRONECKER:
        return {"d": (layer.numel,)} if layer.method is Method.DIAGONAL else {}
    found: dict[str, tuple[int, ...]] = {}
    for side in "ag" if config.fisher != "forward" else "a":
        n = layer.side(side)
        match layer.form(side):
            case "matrix" | "exact":
                found[side] = (triangle_size(n),) if is_folded else (n, n)
            case "blocks":
                found[f"blocks_{side}"] = (n, block_shape(n, config)[1])
            case "softmax":
                found[f"p_{side}"] = (n,)
    return found


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


def whole(matrix: Tensor) -> Tensor:  # [n, n] -> [n, n]
    """The symmetric matrix of what `_gram` made; its memory may be used again."""
    if len(matrix) < 2 * GRAM_ROWS or is_gpu(matrix):
        return matrix
    return matrix.triu_().add_(matrix.triu(diagonal=1).T)


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
    # Two operations of torch's, which a pass with a phase per layer would wait for.
    is_profiled = torch.autograd._profiler_enabled()
    with record_function(f"unison.kfac: {name}") if is_profiled else nullcontext(), observed_by:
        yield


@contextmanager
def observed(observer: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter a context for every phase inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
