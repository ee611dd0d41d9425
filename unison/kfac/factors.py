"""Sums over tokens that Kronecker factors and diagonals are made of: pure functions of records.

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
row further down.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.errors import BadInput
from unison.kfac import linalg
from unison.kfac.config import KFACConfig
from unison.kfac.layers import Layer, Method, plain_record
from unison.kfac.phases import phase
from unison.ops import Dense, Lookup, Product, Record, per_sample
from unison.ops.records import add_rows_

MOST_AT_ONCE = 1 << 24  # elements of per-sample gradients that are held


def token_weights(mask: Tensor | None, num_tokens: int, name: str) -> Tensor | None:
    """Which tokens of a use count [batch, num_tokens], from which tokens of the loss do.

    Args:
        mask: Of the tokens that the loss is made of [batch, tokens], bool; None if all count.
        num_tokens: How many the use has. As many as the loss has: the same ones. One, or another
            number while a sample's tokens all count or none does: the sample's.
        name: The parameter, for the error.

    Raises:
        BadInput: If it cannot be told which are which.
    """
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


def kronecker_sums(
    record: Product,
    weights: Tensor | None,
    *,
    sharing: str,
    has_bias: bool,
    wants_a: bool = True,
    wants_g: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Sums of ãã' and gg' over the tokens of one use.

    Args:
        record: The use.
        weights: Which tokens count [batch, tokens], bool; None if all do.
        sharing: `"expand"` or `"reduce"`.
        has_bias: Whether ã ends with a 1 for the bias.
        wants_a: Whether to make the sum of ãã'.
        wants_g: Whether to make the sum of gg'.

    Returns:
        Σ ãã' [d_in, d_in], with a row and column of the bias where there is one; Σ gg'
        [d_out, d_out]; None for one that is not wanted; the number of tokens [].
    """
    # Only what is asked for: the other side may be as large, and is not read.
    widened = _wide_or_half if sharing == "expand" else _wide
    a = _counted(widened(record.a), weights) if wants_a else None  # [batch, tokens, d_in]
    g = _counted(widened(record.g), weights) if wants_g else None  # [batch, tokens, d_out]
    batch, tokens = record.g.shape[:2]
    like = record.g.new_zeros((), dtype=torch.promote_types(record.g.dtype, torch.float32))
    ones = like.new_ones(batch, tokens) if weights is None else weights.to(like.dtype)
    if sharing == "reduce":
        lengths = ones.sum(dim=1)  # [batch]
        ones = (lengths > 0).to(like.dtype)[:, None]
        a = None if a is None else a.sum(dim=1, keepdim=True) / lengths.clamp(min=1)[:, None, None]
        g = None if g is None else g.sum(dim=1, keepdim=True)
    if a is not None and has_bias:
        a = torch.cat([a, ones.unsqueeze(-1).to(a.dtype)], dim=-1)
    return _gram(a), _gram(g), ones.sum()


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
    batch = _batch(first)
    total: Tensor | None = None
    numel = torch.Size(first.shape).numel()
    at_once = max(1, MOST_AT_ONCE // max(1, numel))
    for low in range(0, max(batch, 1), at_once):
        part = sum(_multiplied(_samples(each, low, low + at_once)) for each in records)
        assert isinstance(part, Tensor)
        if is_counted is not None:
            keep = is_counted[low : low + at_once].view(-1, *([1] * len(first.shape)))
            part = torch.where(keep, part, 0.0)
        squares = part.square().sum(dim=0)
        total = squares if total is None else total.add_(squares)
    assert total is not None
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


def _gram(value: Tensor | None) -> Tensor | None:  # [batch, tokens, d] -> [d, d]
    if value is None:
        return None
    rows = value.reshape(-1, value.shape[-1])
    if not linalg.is_half(rows):
        return rows.T @ rows
    n = rows.shape[1]  # odd for most layers with a bias
    rows = F.pad(rows, (0, linalg.padding_of(n, rows)))
    return linalg.wide_product(rows.T, rows)[:n, :n]


def _multiplied(record: Record) -> Tensor:
    """The per-sample gradients [batch, *shape] of a record, float32 at least."""
    if not isinstance(record, Product) or not linalg.is_half(record.a):
        return per_sample(record)
    left, right = (record.a, record.g) if record.is_transposed else (record.g, record.a)
    found = linalg.wide_product(left.mT, right.to(left.dtype))
    return found.reshape(len(found), *record.shape)


def _batch(record: Record) -> int:
    return len(record.value) if isinstance(record, Dense) else len(record.g)


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


def _wide_or_half(value: Tensor) -> Tensor:
    return value if linalg.is_half(value) else _wide(value)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


# --- sums of one part of a pass -------------------------------------------------------------------


class PartSums:
    """Sums over one part of a pass, layer by layer; what the capture calls.

    Args:
        layers: All layers.
        config: For the form of weight sharing and the kind of Fisher matrix.
        mask: Which tokens count [batch, tokens], bool; None if all do.
        num_terms: How many labels there are.

    Attributes:
        sums: By the layer's name and what is summed.
    """

    def __init__(
        self, layers: Sequence[Layer], config: KFACConfig, mask: Tensor | None, num_terms: int
    ) -> None:
        self._layers, self._config = layers, config
        self._mask, self._num_terms = mask, num_terms
        self._by_parameter = {layer.name: layer for layer in layers}
        self._has_g = config.fisher != "forward"
        self._is_first = True  # of several columns: inputs are counted once
        self.sums: dict[tuple[str, str], Tensor] = {}
        self._uses: dict[str, list[Record]] = {}

    def record(self, name: str, record: Record) -> None:
        """Take a use of a parameter."""
        layer = self._by_parameter.get(name)
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
        weights = token_weights(self._mask, record.g.shape[1], layer.name)
        with phase("products"):
            a, g, num_tokens = kronecker_sums(
                record,
                weights,
                sharing=self._config.sharing,
                has_bias=layer.bias is not None,
                wants_a=self._is_first,
                wants_g=self._has_g,
            )
        if a is not None:
            self._add(layer.name, "a", a)
            self._add(layer.name, "tokens", num_tokens)
        if g is not None:
            self._add(layer.name, "g", g)

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
        return [self._vector(layer, like) for layer in self._layers]

    def _vector(self, layer: Layer, like: Tensor) -> Tensor | None:
        take, name = self.sums.pop, layer.name
        if (name, "d") in self.sums:
            values = [take((name, "d")).reshape(-1)]
        elif (name, "a") in self.sums:
            sides = ("a", "g") if self._has_g else ("a",)
            values = [packed(take((name, side))) for side in sides]
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
            return triangle_size(layer.d_in) + has_g * triangle_size(layer.d_out) + 2
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
