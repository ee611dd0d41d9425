"""Norms, gradients and clipped sums by compiled kernels: what clipping does on CUDA.

[Note: the measured tensor] Plain torch accumulates in float64, and bounds.py proves from that what
a sample adds. Tensor cores accumulate in float32, where such a proof would cost percents. So here
the clipped sum is Σ_b c_b X_b of tensors X_b that were *measured*: either they lie in memory since,
or the same kernel makes the same bits of them again (the same loads, the same order, in registers).
How far X_b is from the exact gradient is a matter of accuracy, not of privacy. What remains are the
roundings of ‖X_b‖² and of the sum over samples, a few hundred at most, none multiplied by the
number of tokens:

    n² ≤ n̂² (1 + γ_s) + numel · 2⁻¹²⁵       (float32 sums of squares in tiles, float64 over tiles)
    ‖share‖ ≤ c n (1 + γ_{B+4})             (c rounded to float32, one product, B sums)

Only Gram norms measure no tensor. They need the mass S of bounds.py: |n̂² − n²| ≤ γ_g S², and the
share, made by a product kernel, is off by ρS. The mass counts each token's norm a little above
`least_norm`, so that it pays for squares that underflow.

[Note: what a Gram errs by] Inner products X̂_ts = ⟨x_t, x_s⟩ are off by γ‖x_t‖‖x_s‖ at most, and
Ŷ_ts of the other side likewise, where 2γ = γ_g. So, to the first order,

    |n̂² − n²| ≤ γ Σ_ts (‖x_t‖‖x_s‖ |Ŷ_ts| + |X̂_ts| ‖y_t‖‖y_s‖)

which is at most γ_g S². By Cauchy and Schwarz it is also at most γ (tr X ‖Ŷ‖ + ‖X̂‖ tr Y), with
norms over all pairs of tokens. Tokens that have little to do with each other make ‖Ŷ‖ small: of T
that are orthogonal and of one length, that is √T times less. The smaller of the two is taken.

*Assumption on tensor cores:* the product of two bfloat16, float16 or TF32 numbers is exact, and one
instruction adds 16 (or fewer) of them to its accumulator with an error of at most 2⁻²² of the sum
of their absolute values: products aligned to the largest and cut, as measured by Fasi et al.
(2021).

[Note: factors that wait] A layer that is measured by inner products and added up from its records
keeps both factors of its per-sample gradients anyway. So nothing is done with them until the pass
is over: then one launch measures all such layers, and when the coefficients are known another adds
all of them up (`unison.kernels.factored`). Layer by layer, each would be two launches, and a GPU
that is not full.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from unison.capture.capture import refuse_changed
from unison.clip.bounds import Grid, SampleNorms, gamma, matrix_shape, tensors_of
from unison.clip.costs import WAITING, Choice
from unison.kernels import factored, multi_tensor
from unison.kernels.available import num_per_tile, spans, takes
from unison.ops import Dense, Lookup, Product, Record, Streamed, plain_record
from unison.ops.records import factors, shape_of, take

METHODS = ("tile", "gram", "materialize")  # norm methods that have kernels

_UNIT = 2.0**-24
SQUARE_ROUNDINGS = 256  # of a term of a sum of squares, in float32, in any of the kernels
_UNDERFLOW = 2.0**-125  # what a square that is too small for float32 may have lost
_TERMS_PER_STEP = 16  # of one instruction of a tensor core
_UNITS_PER_STEP = 4  # its error, in units of 2⁻²⁴
_ALIGNED = 8  # elements: cuBLAS is slow on rows that do not begin at 16 bytes


def form(record: Streamed) -> Tensor:
    """Multiply a record out that comes in pieces [batch, *shape]; no two of them exist at once."""
    dtype = torch.promote_types(record.a.dtype, torch.float32)
    if takes(record.a):
        dtype = kept_dtype([Product(record.a, record.a, record.is_transposed, record.shape)])
    out = record.a.new_empty(len(record.a), *record.shape, dtype=dtype)
    for samples, piece in record.first_chunks():
        left, right = factors(piece)
        if takes(left, right):
            _multiply_into(out[samples], left, right)
        else:
            torch.bmm(left.mT.to(dtype), right.to(dtype), out=out[samples])
        del piece, left, right
    return out


def kept_dtype(records: Sequence[Record | Streamed]) -> torch.dtype:
    """Return the dtype of per-sample gradients that are kept.

    Half the memory of float32, if records are bfloat16; float16 would overflow.
    """
    is_half = all(each.dtype == torch.bfloat16 for r in records for each in tensors_of(r))
    if is_half and not all(isinstance(record, Dense) for record in records):
        return torch.bfloat16
    return torch.float32


def materialize(records: Sequence[Record]) -> Tensor:
    """Form the per-sample gradients [batch, *shape] of one parameter, to be measured and kept."""
    only = records[0] if len(records) == 1 else None
    if isinstance(only, Dense):
        value = only.value
        is_dense = value.is_contiguous() or value[:1].is_contiguous()
        return value if is_dense else value.contiguous()
    dtype = kept_dtype(records)
    if isinstance(only, Product):
        left, right = factors(only)
        is_aligned = left.shape[2] % _ALIGNED == 0 and right.shape[2] % _ALIGNED == 0
        if left.dtype == right.dtype == dtype and is_aligned:
            made = torch.bmm(left.mT, right)
        else:
            made = left.new_empty(len(left), left.shape[2], right.shape[2], dtype=dtype)
            _multiply_into(made, left, right.to(left.dtype))
        return made.view(-1, *only.shape)
    return _sum_of(records, dtype).view(-1, *shape_of(records[0]))


def _multiply_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write leftᵀ right of every sample, whose rows need not be a multiple of what cuBLAS wants.

    The rows up to such a multiple are a product, and the few that are left are another: two thirds
    of the time that a kernel takes which bears any number of them. That needs tokens of `left` at
    aligned addresses, as [Note: rows of logits] of the head makes them.
    """
    whole = left.shape[2] // _ALIGNED * _ALIGNED
    is_aligned = (
        left.dtype == right.dtype == out.dtype
        and left.stride(2) == 1
        and left.stride(1) % _ALIGNED == right.shape[2] % _ALIGNED == 0
        and left.data_ptr() % 16 == 0
    )
    if whole == 0 or not is_aligned:
        _products().per_sample(left, right, out, _precision())
        return
    for rows in (slice(0, whole), slice(whole, left.shape[2])):
        if rows.start < rows.stop:
            torch.bmm(left[..., rows].mT, right, out=out[:, rows])


def _sum_of(records: Sequence[Record], dtype: torch.dtype) -> Tensor:
    """Return X_b of several uses, by kernels alone: the same bits every time [batch, r, c]."""
    first = tensors_of(records[0])[0]
    batch, rows, columns = len(first), *matrix_shape(records)
    products = [record for record in records if isinstance(record, Product)]
    dense = [record for record in records if isinstance(record, Dense)]
    formed = next((each for each in dense if each.is_ours and each.value.dtype == dtype), None)
    if formed is not None and not products:
        total = formed.value.view(batch, rows, columns)
    else:
        formed, total = None, first.new_zeros(batch, rows, columns, dtype=dtype)
    if products:
        left, right = _joined(products)
        _products().per_sample(left, right, total, _precision())
    for record in dense:
        if record is not formed:
            total += record.value.reshape(total.shape)
    for record in records:
        if isinstance(record, Lookup):
            _lookups().add_rows(record.ids, _in_rows(record.g), total)
    return total


def _joined(products: Sequence[Product]) -> tuple[Tensor, Tensor]:
    """Return left and right of all products, joined on the token axis."""
    sides = [factors(product) for product in products]
    dtype = sides[0][0].dtype
    left = [left.to(dtype) for left, _ in sides]
    right = [right.to(dtype) for _, right in sides]
    if len(products) == 1:
        return left[0], right[0]
    return torch.cat(left, 1), torch.cat(right, 1)


def _in_rows(g: Tensor) -> Tensor:
    return g if g.stride(2) == 1 else g.contiguous()


def squared_norms(records: Sequence[Record | Streamed], method: str) -> SampleNorms:
    """Return norms of one parameter whose per-sample gradients are not kept.

    Args:
        records: Its uses.
        method: `"tile"` or `"gram"`.
    """
    batch = len(tensors_of(records[0])[0])
    numel = math.prod(shape_of(records[0]))
    products = [record for record in records if isinstance(record, Product)]
    if len(products) == len(records):
        left, right = _joined(products)
        if method == "gram":
            squares, masses = _products().squared_norms(left, right, _precision())
            features, mass = left.shape[2] + right.shape[2], masses.sum(1) * (1 + 2.0**-16)
            error = _gram_slack(features, left.dtype) * mass.square()
            return _bounded_gram(squares.sum(1), error, mass, batch, left.shape[1], left.dtype)
        parts = _products().per_sample(left, right, None, _precision())
        return bound(parts.double().sum(1), batch, numel)
    if len(records) == 1 and isinstance(records[0], Lookup):
        parts = _lookups().squared_rows(records[0].ids, _in_rows(records[0].g))
        return bound(parts.double().sum(1), batch, numel)
    squared = torch.zeros(batch, dtype=torch.float64, device=tensors_of(records[0])[0].device)
    for samples, part in _in_pieces(records):
        squared[samples] = multi_tensor.squares([part])[0]
    return bound(squared, batch, numel)


def clipped_sum(
    records: Sequence[Record | Streamed],
    coefficients: Tensor,
    shape: tuple[int, ...],
    grid: Grid | None = None,
) -> Tensor:
    """Return Σ_b c_b X_b of what was measured: [*shape], float32; int32 on a grid, if it is given.

    Args:
        records: The uses of a parameter, or a `Dense` of what was kept.
        coefficients: [batch].
        shape: The parameter's shape.
        grid: To which each sample's share is rounded.
    """
    weights = (coefficients.float() if grid is None else grid.weights(coefficients)).contiguous()
    first = tensors_of(records[0])[0]
    dtype = torch.float32 if grid is None else torch.int32
    total = first.new_zeros(matrix_shape(records), dtype=dtype)
    products = [record for record in records if isinstance(record, Product)]
    if len(products) == len(records):
        left, right = _joined(products)
        _products().weighted(left, right, weights, total, _precision(), add=False)
        return total.view(shape)
    if len(records) == 1 and isinstance(records[0], Lookup):
        _lookups().weighted_rows(records[0].ids, _in_rows(records[0].g), weights, total)
        return total.view(shape)
    for samples, part in _in_pieces(records):
        row = weights[samples].unsqueeze(0).contiguous()
        multi_tensor.combine([part], row, [total.view(shape)], add=True)
    return total.view(shape)


def _in_pieces(records: Sequence[Record | Streamed]) -> Iterator[tuple[slice, Tensor]]:
    """Yield per-sample gradients of a few samples at a time, the same bits every time."""
    streamed = next((each for each in records if isinstance(each, Streamed)), None)
    if streamed is not None:
        # At most one comes in pieces: the others have to exist.
        others = [plain_record(each) for each in records if each is not streamed]
        for samples, piece in streamed.chunks():
            whole = [piece, *[take(each, samples) for each in others]]
            del piece  # only one may exist
            for some, part in _in_pieces(whole):
                yield slice(samples.start + some.start, samples.start + some.stop), part
            del whole
        return
    records = cast(Sequence[Record], records)
    if len(records) == 1 and isinstance(records[0], Dense):
        value = records[0].value.contiguous()
        yield slice(0, len(value)), value
        return
    first = tensors_of(records[0])[0]
    rows, columns = matrix_shape(records)
    dtype = kept_dtype(records)
    for samples in spans(len(first), num_per_tile(dtype.itemsize * rows * columns, first.device)):
        yield samples, _sum_of([take(record, samples) for record in records], dtype)


def bound(squared: Tensor, batch: int, numel: int) -> SampleNorms:
    """Return norms of measured tensors with their bound, by [Note: the measured tensor].

    Args:
        squared: Sums of squares [..., batch], float64.
        batch: Samples that are added up.
        numel: Elements of one sample's tensors, at most.
    """
    slack = (1 + gamma(SQUARE_ROUNDINGS, _UNIT)) * (1 + gamma(batch + 4, _UNIT)) ** 2
    return SampleNorms(squared, squared * slack + numel * _UNDERFLOW)


def bound_grams(
    grams: Tensor | Sequence[Tensor], batch: int, tokens: int, features: int, dtype: torch.dtype
) -> SampleNorms:
    """Return norms that were found by inner products: see [Note: what a Gram errs by].

    Args:
        grams: Of many layers, as `factored.grams` returns them.
        batch: Samples that are added up.
        tokens: Of a sample.
        features: Rows and columns of one sample's gradient together, at most.
        dtype: Of what was multiplied.
    """
    above = 1 + 2.0**-14  # of roundings in the bounds themselves
    squares, *others, left_squares, right_squares = grams
    mass, left, right = (each * above for each in others)  # the latter are traces
    least = tokens * 2.0**-62  # of inner products whose squares underflow
    of_left = left_squares.sqrt() * above + least
    of_right = right_squares.sqrt() * above + least
    slack = _gram_slack(features, dtype)
    half = slack / 2
    error = half * (left * of_right + of_left * right) + half**2 * left * right
    error = torch.minimum(error, slack * mass.square())
    return _bounded_gram(squares, error, mass, batch, tokens, dtype)


def _gram_slack(features: int, dtype: torch.dtype) -> float:
    """Return γ_g: twice the error of an inner product, as a part of the tokens' norms."""
    run = _products().run_of(dtype)
    steps = -(-run // _TERMS_PER_STEP) * _UNITS_PER_STEP if dtype.itemsize == 2 else run
    return gamma(2 * steps + 2 * (features // run + 2) + 4, _UNIT) + 4 * 2.0**-26


def _bounded_gram(
    squared: Tensor, error: Tensor, mass: Tensor, batch: int, tokens: int, dtype: torch.dtype
) -> SampleNorms:
    """Return norms that may be off by `error` in their squares, and by ρS where they are added."""
    is_half = dtype.itemsize == 2
    terms = -(-tokens // _TERMS_PER_STEP) * _UNITS_PER_STEP if is_half else tokens
    rho = gamma(terms + batch + 4, _UNIT)
    norm = (squared.clamp(min=0) + error).sqrt()
    return SampleNorms(squared, (norm + rho * mass).square())


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _products() -> Any:
    return import_module("unison.kernels.products_triton")


def _lookups() -> Any:
    return import_module("unison.kernels.lookup_triton")


class Factors(NamedTuple):
    """The one use of a parameter: X_b = left_bᵀ right_b.

    Attributes:
        left: [samples, tokens, rows].
        right: [samples, tokens, columns].
        shape: Of the parameter.
        held: The gradient as autograd has it, which adds to gradients in place, but only to those
            that nobody else holds.
        versions: Of left and right.
    """

    left: Tensor
    right: Tensor
    shape: tuple[int, ...]
    held: Tensor
    versions: tuple[int, int]

    @classmethod
    def of(cls, product: Product) -> "Factors":
        """Return the factors of a record."""
        left, right = (factored.aligned(each) for each in factors(product))
        versions = left._version, right._version
        return cls(left, right, product.shape, product.g, versions)

    def check(self) -> None:
        """Require that nobody has written to the factors, before or after they were measured."""
        if (self.left._version, self.right._version) != self.versions:
            refuse_changed()


def can_wait(records: Sequence[Record | Streamed], choice: Choice) -> bool:
    """Whether records are measured and added up with those of other parameters."""
    only = records[0] if len(records) == 1 else None
    return choice == WAITING and type(only) is Product and factored.are_taken(*factors(only))


def groups_of(found: Mapping[str, Factors]) -> list[list[str]]:
    """Return parameters that kernels take together: alike in samples, tokens and dtype.

    In an order that depends on names and shapes alone.
    """
    places: dict[tuple, list[str]] = {}
    for name in sorted(found):
        left = found[name].left
        places.setdefault((*left.shape[:2], left.dtype, left.device), []).append(name)
    return list(places.values())


def sides_of(
    names: Sequence[str], found: Mapping[str, Factors]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the factors of parameters, left and right, which nobody has written to."""
    mine = [found[name] for name in names]
    for each in mine:
        each.check()
    return [each.left for each in mine], [each.right for each in mine]


def measure_factors(names: Sequence[str], found: Mapping[str, Factors]) -> SampleNorms:
    """Return the norms of one group's samples [parameters, samples]."""
    lefts, rights = sides_of(names, found)
    batch, tokens, _ = lefts[0].shape
    features = max(a.shape[2] + b.shape[2] for a, b in zip(lefts, rights, strict=True))
    return bound_grams(factored.grams(lefts, rights), batch, tokens, features, lefts[0].dtype)


def factor_sums(
    names: Sequence[str],
    found: Mapping[str, Factors],
    weights: Tensor,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return the clipped sum of each of one group's parameters; all in one memory.

    Args:
        names: Of the parameters.
        found: Their factors.
        weights: [parameters, samples], from `stacked`.
        dtype: Of the sums: float32, or int32 on the grid that `weights` count.
    """
    lefts, rights = sides_of(names, found)
    shapes = [found[name].shape for name in names]
    sizes = [math.prod(shape) for shape in shapes]
    memory = torch.empty(sum(sizes), dtype=dtype, device=weights.device)
    pieces = torch.unsafe_split_with_sizes(memory, sizes)  # views, unknown to autograd
    made = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    factored.weighted_sums(lefts, rights, weights, made)
    return made


def sums_of(
    found: dict[str, Factors],
    coefficients: Mapping[str, Tensor],
    grid: Grid | None = None,
    *,
    is_bounded: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the clipped sum of each parameter, letting its factors go.

    Args:
        found: The factors by name; empty afterwards.
        coefficients: [samples] of every parameter.
        grid: To which each sample's share is rounded: sums are int32. None for float32.
        is_bounded: Whether memory is. Then no more sums are made at a time than fit into what the
            largest takes, and into what the factors before them have given back.
    """
    sizes = {name: 4 * math.prod(each.shape) for name, each in found.items()}
    least = max(sizes.values(), default=0) if is_bounded else sum(sizes.values())
    room, dtype = least, torch.float32 if grid is None else torch.int32
    for names in groups_of(found):
        while names:
            count = size = 0
            while count < len(names) and (count == 0 or size + sizes[names[count]] <= room):
                size += sizes[names[count]]
                count += 1
            some, names = names[:count], names[count:]
            weights = stacked([coefficients[name] for name in some], grid)
            made = factor_sums(some, found, weights, dtype)
            # With a factor goes the gradient of the output; its input may be another's too.
            given = sum(found.pop(name).held.nbytes for name in some)
            room = max(least, room + given - size)
            yield from zip(some, made, strict=True)


def stacked(coefficients: Sequence[Tensor], grid: Grid | None = None) -> Tensor:
    """Return coefficients of several parameters [parameters, samples], float32, in few launches.

    Args:
        coefficients: [samples] of each.
        grid: For shares that are counted in its spacings.
    """
    first = coefficients[0]
    is_one = all(each is first for each in coefficients)
    found = first if is_one else torch.stack(list(coefficients))
    weights = found.float() if grid is None else grid.weights(found)
    return weights.expand(len(coefficients), -1).contiguous() if is_one else weights
