"""From records to coefficients: an upper bound on what a sample adds, rounding included.

A clipping rule maps norms to c_b such that the contribution of sample b, as it is computed, has
norm at most C. It divides by an upper bound of the computed contribution instead of by the
estimated norm. On float32 records the two differ by 6e-8.

[Note: left and right] A parameter is a matrix [rows, columns], whatever form its records have. The
gradient of a sample is Σ_t left_t right_tᵀ reshaped to the parameter's shape. A `Product` has
left = g and right = a, or the other way round if it is transposed; a `Lookup` has the one-hot
vector of its id on the left. Seen like this, two uses of one parameter differ in nothing but their
number of tokens, and join on the token axis. Everything cuts tensors into tiles, so that a float64
copy of a whole record never exists.

[Note: proved sensitivity] Privacy needs ‖contribution of one sample‖ ≤ C of the numbers that are
*computed*. Let the gradient of a sample be G = Σ_k x_k over its K terms: x_k = g_t a_tᵀ for a token
of a `Product`, the row g_t for a token of a `Lookup`, the whole for a `Dense`; uses of one
parameter join their terms. Let n = ‖G‖, n̂² its estimated square, and S = Σ_k ‖x_k‖ the *mass*,
which is Σ_t ‖a_t‖‖g_t‖ and costs one pass over the records.

*Assumptions.* IEEE arithmetic: fl(x∘y) = (x∘y)(1+δ), |δ| ≤ u, with u = 2⁻⁵³ in float64. A matrix
product is a sum of products in any order, with or without fused multiply-add (true of BLAS and
cuBLAS, not of Strassen's method or of emulated float64). With γ_k = ku/(1−ku), a product of k
factors (1+δ) is 1+θ with |θ| ≤ γ_k. In float64, inputs of float32's exponent range or less neither
overflow nor underflow: no term is below 2⁻⁷⁰⁴ or above 2⁶⁰⁰. Of float64 inputs we assume
2⁻²⁵⁰ < |x| < 2²⁵⁰ or x = 0.

*1. The norm.* Every method computes n² = Σ_{k,l} Σ_{o,i} x_k[o,i] x_l[o,i], expanded, as a sum of
products in which no term meets more than k₁ roundings: inner products over features then sums over
tokens (gram), or sums over tokens then squares then sums over features (tile). The absolute values
of all terms sum to ‖Σ_k |x_k|‖² ≤ S². Hence

    |n̂² − n²| ≤ γ_{k₁} S²,        k₁ = 3K + 2(rows + columns) + tiles.

*2. The gradient.* c·g is rounded twice in the dtype of scaling (c itself, then the product), the
sum over at most B·K terms of the batch meets k₂ = B·K + uses + 8 roundings in the dtype of
accumulation, and the result is rounded once. In any order of summation the share of one sample is
Σ_k c·x_k (1+θ_k), so

    ‖share‖ ≤ (1+u_result) · c · (n + ρS),     ρ = (1+u_scale)² (1+γ_{k₂}) − 1.

*3. Together.* upper = (max(√(n̂² + γ_{k₁}S²) + ρS, τS)(1+u_result))² bounds the square of the share
at c = 1; τ is of 4. Squares add over parameters, so c = C / max(C, (1+2⁻³⁸)·√(Σ upper)) gives
‖share‖ ≤ C. The factor 1+2⁻³⁸ pays for the rounding of this formula itself, for up to 2¹² additions
over parameters, and for results so small that they are subnormal (C ≥ 1e-20 and at most 2⁴⁰
elements).

*4. The sum.* ε rests on what *emptying* one sample, its coefficient 0, changes in the sum of the
rows that are computed together. Its share goes, and the roundings of other samples' terms change.
Plain-torch methods bound that, too. They add in float64, and products of at most
m = MOST_TERMS_TOGETHER terms apart from the rest: results of a GEMM without the sample have the
same bits with and without it. Those of the one with it change by 2γ_m Σ_b c_b S_b at most, over its
samples, of which all parameters' GEMMs together have min(B, 2m). Lookups are added one by one to a
partial sum of norm at most BC + Σ c_b S_b over m terms, which changes the result by at most
2u(B·A·C + mB·max c_b S_b), for A additions. With

    τ = (2γ_m min(B, 2m) [products] + 2umB [lookups] + 2γ_B B [others beside them]) / 2⁻¹⁸,

c_b S_b ≤ C/τ, in the norm over parameters, so that both come to 2⁻¹⁸·C at most. All other additions
(GEMMs to their total, per-sample gradients to each other) change the sum by less than 4uB·A·C,
below 2⁻¹⁹·C as long as B·A ≤ 2³². Hence two sums differ by at most (1 + SUM_ERROR)·C, as long as
they stay float64 until they are rounded to the noise's grid. The account knows of it
(`unison.privacy.mechanism.sensitivity_factor`). τ binds nobody: at B = 64, S must be 10⁵·n.

*How tight.* S/n is √T for T unrelated tokens. With float64 sums γ·S is below 1e-10·n at T = 1000,
and what remains is u_result = 6e-8: who asks for sums in float32 is covered, too. A float32
accumulator would cost T^1.5·6e-8: 2.4e-4 at T = 256. Scaling in bfloat16 would cost 2⁻⁷·√T. That is
why plain-torch methods accumulate in float64, and why `materialize` keeps what it measured: then
the contribution *is* c times a known tensor (K = 1, S = n), and it does not matter in which
precision that tensor was made.

*The same records.* Norm and sum must be made of the same numbers: this is a theorem about rounding,
not about two runs of a model. `kept` and `records` hold the very tensors that were measured.
`second_backward` sends the same losses back through the graph of the first pass. Activation
checkpointing runs its part of the model again for either pass, and some GPU kernels add in an order
that changes from run to run: then the records of the two passes may differ in their last bits, and
the bound holds up to that difference, not exactly. Use the other methods where that matters.
`recomputed` holds the g that was measured and makes a again; its bits are compared with those that
were measured, and a difference raises before a sum is given out (capture/recompute.py). So its
bound is exact, but for a fingerprint that misses a difference with probability below 2⁻³⁰. To
compare is right here: no kernel library promises equal bits for equal calls, so that a bound
based on such a promise would be a hope.

*What this does not say.* 4. is of plain torch, and of per-sample gradients that were kept, on any
device. CUDA kernels that add samples inside of one product (`ghost`, `*_bk` modes) round each share
to a grid first and add integers, if they are given one (`Grid`), as private
training does: nothing of others changes. Without a grid they add float32 numbers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from unison import check
from unison.errors import BadInput
from unison.kernels.available import num_per_tile, plain_arithmetic, spans, takes
from unison.ops import Dense, Lookup, Product, Record, Streamed
from unison.ops.records import factors, shape_of

# --- records as matrices --------------------------------------------------------------------------

# Samples × tokens that one float64 GEMM adds up. Few, so that its rounding is small.
MOST_TERMS_TOGETHER = 4096
# Sizes of tiles. They bound memory, and a GEMM of a few hundred tokens runs at full speed.
TOKENS_PER_TILE = 256
ROWS_PER_TILE = 256


def is_taken(records: Sequence[Record | Streamed]) -> bool:
    """Whether the kernels take the records of a parameter."""
    if not all(takes(*tensors_of(record)) for record in records):
        return False
    return len({matrix_shape([r]) for r in records if not isinstance(r, Dense)}) <= 1


def tensors_of(record: Record | Streamed) -> tuple[Tensor, ...]:
    """Return the floating-point tensors of a record, each batched on dim 0.

    Of one that is made while it is read, those that it holds: what is made has their dtype.
    """
    match record:
        case Product():
            return record.a, record.g
        case Streamed():
            return (record.a,)
        case Lookup():
            return (record.g,)
        case Dense():
            return (record.value,)


def num_terms(record: Record | Streamed) -> int:
    """Return how many terms one sample's gradient is a sum of: its tokens, 1 for `Dense`."""
    return 1 if isinstance(record, Dense) else tensors_of(record)[0].shape[1]


def matrix_shapes(records: Sequence[Record | Streamed]) -> set[tuple[int, int]]:
    """Return the [rows, columns] in which the uses see their parameter: one, unless they differ.

    `Dense` records are matrices of any shape, and count only if there is nothing else.
    """
    found = set()
    for record in records:
        if isinstance(record, Product):
            left, right = factors(record)
            found.add((left.shape[-1], right.shape[-1]))
        elif isinstance(record, Lookup | Streamed):
            found.add((record.shape[0], math.prod(record.shape[1:])))
    if found:
        return found
    shape = shape_of(records[0])
    return {(shape[0], math.prod(shape[1:])) if shape else (1, 1)}


def matrix_shape(records: Sequence[Record | Streamed]) -> tuple[int, int]:
    """Return the one [rows, columns] of all uses.

    Raises:
        BadInput: if two uses see the parameter as matrices of different shapes.
    """
    found = matrix_shapes(records)
    if len(found) > 1:
        raise BadInput(f"expected uses of one matrix [rows, columns], found {sorted(found)}")
    return next(iter(found))


def check_records(records: Sequence[Record | Streamed], coefficients: Tensor | None = None) -> int:
    """Require records to be uses of one parameter by one batch, and return the batch's size.

    Raises:
        BadInput: if there is no record, or if shapes, batches or devices differ; or if there are
            more or fewer coefficients than samples, where they are given.
    """
    if not records:
        raise BadInput("expected the records of a parameter, found none: it was not used")
    shapes = {shape_of(record) for record in records}
    if len(shapes) > 1:
        raise BadInput(f"expected records of one parameter, found shapes {sorted(shapes)}")
    tensors = [tensor for record in records for tensor in tensors_of(record)]
    batches = {len(tensor) for tensor in tensors}
    if len(batches) > 1:
        raise BadInput(f"expected records of one batch, found batches of {sorted(batches)} samples")
    # Without values a record lies nowhere: `unison.clip.costs` describes some so.
    devices = {str(tensor.device) for tensor in tensors if not tensor.is_meta}
    if len(devices) > 1:
        raise BadInput(f"expected records on one device, found {sorted(devices)}")
    for record in records:
        match record:
            case Product(a=a, g=g, shape=shape):
                if a.ndim != 3 or g.ndim != 3 or a.shape[:2] != g.shape[:2]:
                    raise BadInput(
                        "expected a [batch, tokens, d_in] and g [batch, tokens, d_out], "
                        f"found {list(a.shape)} and {list(g.shape)}"
                    )
                if a.shape[2] * g.shape[2] != math.prod(shape):
                    raise BadInput(
                        f"expected d_in * d_out elements of a parameter of shape {list(shape)}, "
                        f"found a {list(a.shape)} and g {list(g.shape)}"
                    )
            case Lookup(ids=ids, g=g, shape=shape):
                if g.ndim != 3 or ids.shape != g.shape[:2] or g.shape[2] != math.prod(shape[1:]):
                    raise BadInput(
                        f"expected ids [batch, tokens] and g [batch, tokens, features] of a table "
                        f"{list(shape)}, found {list(ids.shape)} and {list(g.shape)}"
                    )
            case _:
                pass  # any shape will do
    batch = batches.pop()
    if coefficients is not None and coefficients.shape != (batch,):
        raise BadInput(f"expected coefficients [{batch}], found {list(coefficients.shape)}")
    return batch


def widest_dtype(records: Sequence[Record]) -> torch.dtype:
    """Return the dtype of results: the widest of the records', and at least float32."""
    dtype = torch.float32
    for record in records:
        for tensor in tensors_of(record):
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


# --- norms with their bounds ----------------------------------------------------------------------

UNIT_ROUNDOFF: dict[torch.dtype, float] = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The dtypes of one way to clip, as far as its rounding goes.

    A kernel whose accumulator truncates instead of rounding has twice the unit roundoff: it has to
    name a narrower dtype. One narrower than float64 must keep its products from underflowing.

    Attributes:
        norm: In which the sums of squared norms accumulate.
        scale: In which gradients are multiplied by coefficients.
        accumulate: In which the clipped sum accumulates.
        result: In which it is returned, if not in a wider one.
    """

    norm: torch.dtype
    scale: torch.dtype
    accumulate: torch.dtype
    result: torch.dtype


DOUBLE = Arithmetic(
    norm=torch.float64, scale=torch.float64, accumulate=torch.float64, result=torch.float32
)

_CHANGE = 2.0**-18  # of the sum, in units of C: by products, and by lookups
SUM_ERROR = 2 * _CHANGE + 2.0**-19
"""What roundings add to the change of a sum when one sample is emptied, in units of C."""
_MOST_ADDITIONS = 2**32  # times rows


class Grid(NamedTuple):
    """Multiples of a spacing, counted by integers: each sample's share, or a sum, is rounded to it.

    Integers add without rounding: what one sample adds to a sum does not depend on the others.

    Attributes:
        spacing: A power of two, a function of public numbers alone; or a tensor of one, for passes
            that are recorded once for many.
        dtype: Of the integers that hold a sum. Kernels count in int32.
    """

    spacing: float | Tensor
    dtype: torch.dtype = torch.int32

    def weights(self, coefficients: Tensor) -> Tensor:
        """Return coefficients of shares counted in spacings, float32: a shift of exponents."""
        return (coefficients / self.spacing).float()

    def weight(self, device: torch.device) -> Tensor:
        """Return what a count weighs [1], float64."""
        if isinstance(self.spacing, Tensor):
            return self.spacing
        return torch.full((1,), self.spacing, dtype=torch.float64, device=device)


@dataclass(frozen=True, eq=False)
class SampleNorms:
    """Per-sample squared norms, with a bound on what is really added. They add over parameters.

    Attributes:
        squared: ‖gradient of sample b‖², as estimated [batch], float64.
        upper: At least the square of the computed contribution at coefficient 1 [batch], float64.
    """

    squared: Tensor
    upper: Tensor

    def __add__(self, other: "SampleNorms") -> "SampleNorms":
        return SampleNorms(self.squared + other.squared, self.upper + other.upper)


@dataclass(frozen=True, eq=False)
class NormTable(Mapping[str, SampleNorms]):
    """The norms of many parameters: by name, or all in one tensor.

    Hundreds of parameters, each with two small tensors of its own, would cost a GPU a launch for
    every operation on every one of them.

    Attributes:
        names: Of the parameters, in an order that is the same in every run.
        squared: [parameters, batch], float64; see `SampleNorms`.
        upper: Likewise.
    """

    names: Sequence[str]
    squared: Tensor
    upper: Tensor

    @cached_property
    def _index(self) -> dict[str, int]:
        """Where each name is: made for who asks for one of them, which most never do."""
        return {name: i for i, name in enumerate(self.names)}

    @classmethod
    def of(cls, norms: Mapping[str, SampleNorms], batch: int) -> "NormTable":
        """Return norms that are given one by one as a table."""
        if isinstance(norms, NormTable):
            return norms
        if not norms:
            nothing = torch.zeros(0, batch, dtype=torch.float64)
            return cls([], nothing, nothing)
        squared = torch.stack([each.squared for each in norms.values()])
        return cls(list(norms), squared, torch.stack([each.upper for each in norms.values()]))

    def __getitem__(self, name: str) -> SampleNorms:
        i = self._index[name]
        return SampleNorms(self.squared[i], self.upper[i])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def scaled(self, factor: float) -> "NormTable":
        """Return the norms of gradients that are `factor` times as long."""
        if factor == 1:
            return self
        return NormTable(self.names, self.squared * factor**2, self.upper * factor**2)

    def total(self) -> SampleNorms:
        """Return the norms over all parameters together."""
        return SampleNorms(self.squared.sum(0), self.upper.sum(0))


@lru_cache(maxsize=1024)
def gamma(num_roundings: int, unit: float) -> float:
    """Return γ_k = ku/(1−ku), the largest relative error of k roundings, rounded up.

    >>> gamma(3, 2.0**-24) > 3 * 2.0**-24
    True
    """
    product = num_roundings * unit
    if product > 0.25:
        raise BadInput(
            f"{num_roundings} roundings of {unit=} prove nothing: accumulate in a wider dtype, or "
            "in fewer tokens"
        )
    return math.nextafter(product / (1 - product), math.inf) * (1 + 2.0**-50)


def mass(records: Sequence[Record]) -> Tensor:
    """Return S = Σ_t ‖a_t‖‖g_t‖ over all uses, per sample: [batch], float64.

    No rounding error of a sample's norm or gradient can be larger than a small multiple of it.
    """
    first = tensors_of(records[0])[0]
    batch, device = len(first), first.device
    total = torch.zeros(batch, dtype=torch.float64, device=device)
    with plain_arithmetic(device):
        for record in records:
            sides = tensors_of(record)
            is_dense = isinstance(record, Dense)  # one token
            width = (
                math.prod(shape_of(record)) if is_dense else sum(each.shape[2] for each in sides)
            )
            per_sample = 8 * width * min(TOKENS_PER_TILE, num_terms(record))
            for samples in spans(batch, num_per_tile(per_sample, device)):
                parts = [each[samples] for each in sides]
                if is_dense:
                    parts = [parts[0].reshape(len(parts[0]), 1, width)]
                norms = reduce(torch.mul, map(_token_norms, parts))  # [samples, tokens]
                if isinstance(record, Lookup):
                    norms = norms.masked_fill(record.ids[samples] < 0, 0.0)
                total[samples] += norms.sum(1)
    return total


def bounded(
    records: Sequence[Record], squared: Tensor, arithmetic: Arithmetic = DOUBLE
) -> SampleNorms:
    """Return squared norms together with their upper bound, by [Note: proved sensitivity].

    Guarantees:
        If `squared` [batch] was computed from `records` in the dtypes of `arithmetic`, and the
        gradient with coefficients c is computed from the same `records` likewise, then sample b
        adds a vector of norm at most c_b·√upper_b. A sample that is not finite has an upper bound
        that is not finite.
    """
    batch, tokens = len(squared), [num_terms(record) for record in records]
    terms = sum(tokens)
    unit = UNIT_ROUNDOFF[arithmetic.scale]
    k2 = batch * terms + len(records) + 8
    # (1+u)²(1+γ) − 1 without the subtraction, which would lose u.
    rho = 2 * unit + unit**2 + (1 + unit) ** 2 * gamma(k2, UNIT_ROUNDOFF[arithmetic.accumulate])
    # k₁: at least the roundings that a term of any norm method meets.
    num_tiles = sum(-(-each // TOKENS_PER_TILE) for each in tokens)
    sizes = 2 * sum(map(sum, matrix_shapes(records)))
    k1 = 3 * terms + sizes + 2 * TOKENS_PER_TILE + (num_tiles + 1) ** 2 + 16
    slack = gamma(k1, UNIT_ROUNDOFF[arithmetic.norm])
    squared = squared.double()
    is_own_norm = len(records) == 1 and isinstance(records[0], Dense)
    # The mass is itself rounded, by far less than this factor.
    total_mass = (1 + 2.0**-20) * (squared.sqrt() if is_own_norm else mass(records))  # [batch]
    norm = (squared.clamp(min=0) + slack * total_mass.square()).sqrt()  # [batch]
    tau = mass_factor(records, batch)
    upper = norm + rho * total_mass
    if not is_own_norm:
        upper = torch.maximum(upper, tau * total_mass)
    return SampleNorms(squared, (upper * (1 + UNIT_ROUNDOFF[arithmetic.result])).square())


def mass_factor(records: Sequence[Record], batch: int) -> float:
    """Return τ: how much of a sample's mass counts as its norm, so that sums are proved.

    Raises:
        BadInput: If there are too many additions for that.
    """
    unit, most = UNIT_ROUNDOFF[torch.float64], MOST_TERMS_TOGETHER
    factor, additions = 0.0, 0
    for record in records:
        match record:
            case Lookup():
                factor += 2 * unit * most * batch
                additions += batch * num_terms(record)
            case Dense():
                factor += 2 * gamma(batch, unit) * batch
                additions += batch
            case _:
                factor += 2 * gamma(most, unit) * min(batch, 2 * most)
                additions += 2 * batch * num_terms(record) // most + batch + 1
    if batch * additions > _MOST_ADDITIONS:
        raise BadInput(
            f"{batch} samples are too many to prove anything of the rounding of their sum in one "
            "pass; give make_private a max_physical_batch_size"
        )
    return factor / _CHANGE


def _token_norms(x: Tensor) -> Tensor:
    """Return the norm of every token of x [batch, tokens, features]: [batch, tokens], float64."""
    pieces = [
        torch.linalg.vector_norm(x[:, tokens].double(), dim=-1)
        for tokens in spans(x.shape[1], TOKENS_PER_TILE)
    ]
    return torch.cat(pieces, 1) if pieces else x.new_zeros(x.shape[:2], dtype=torch.float64)


# --- coefficients ---------------------------------------------------------------------------------

# Pays for the rounding of the coefficient's own formula, of sums over up to 2¹² parameters, and
# for subnormal results.
_MARGIN = 1 + 2.0**-38

SMALLEST_MAX_NORM = 1e-20


@dataclass(frozen=True, eq=False)
class Coefficients:
    """One coefficient per sample, and how many samples were left out.

    Attributes:
        values: [batch], float64, in [0, 1] for `flat`; 0 for a sample that is not finite.
        is_finite: Which samples are [batch].
    """

    values: Tensor
    is_finite: Tensor

    @property
    def num_dropped(self) -> Tensor:
        """How many samples were not finite: an integer tensor without dims, without waiting.

        It is a function of private data. Counted when it is asked for, which most never do.
        """
        return (~self.is_finite).sum()


Rule = Callable[[SampleNorms, float], Coefficients]


def _upper(norms: SampleNorms, max_norm: float) -> tuple[Tensor, Tensor]:
    """Return upper bounds of what samples add, and which samples are finite [batch]."""
    check.positive(max_norm=max_norm)
    if max_norm < SMALLEST_MAX_NORM:
        raise BadInput(f"max_norm must be at least {SMALLEST_MAX_NORM}, found {max_norm}")
    # A maximum with NaN is NaN, and no NaN is below infinity: four launches, and not nine.
    is_finite = norms.squared.abs().maximum(norms.upper.abs()) < math.inf
    return norms.upper.sqrt() * _MARGIN, is_finite


def flat(norms: SampleNorms, max_norm: float) -> Coefficients:
    """Return C / max(C, N), with N an upper bound of the computed contribution (Abadi et al. 2016).

    Guarantees:
        ‖c_b · gradient_b‖ ≤ C for the numbers that are computed, in every dtype, with nothing
        added for rounding. Samples with N ≤ C have c = 1 exactly.

    Args:
        norms: Bounded norms, summed over all parameters.
        max_norm: C, the bound.

    | sample                            | coefficient |
    |-----------------------------------|-------------|
    | gradient 0                        | 1           |
    | N ≤ C                             | 1           |
    | N > C                             | C / N       |
    | NaN or infinity in any record     | 0, counted  |
    """
    upper, is_finite = _upper(norms, max_norm)
    return Coefficients((max_norm / upper.clamp(min=max_norm)).where(is_finite, 0.0), is_finite)


def automatic(norms: SampleNorms, max_norm: float, gamma: float = 0.01) -> Coefficients:
    """Return C / (N + γ): every sample is scaled to nearly C (AUTO-S, Bu et al. 2023).

    Guarantees:
        As `flat`: the computed contribution has norm below C. A gradient of 0 has c = C / γ.

    Args:
        norms: Bounded norms, summed over all parameters.
        max_norm: C, the bound.
        gamma: γ, which keeps small gradients apart from large ones.
    """
    check.positive(gamma=gamma)
    upper, is_finite = _upper(norms, max_norm)
    return Coefficients((max_norm / (upper + gamma)).where(is_finite, 0.0), is_finite)


RULES: dict[str, Rule] = {"flat": flat, "automatic": automatic}


def per_group(
    norms: Mapping[str, SampleNorms], max_norms: Mapping[str, float], rule: Rule = flat
) -> dict[str, Coefficients]:
    """Clip every group of parameters to its own bound C_k.

    Guarantees:
        A sample adds at most √(Σ C_k²) over all groups: `total_sensitivity`. One that is not finite
        in one group is 0 in all.

    Args:
        norms: Bounded norms per group, each summed over the group's parameters.
        max_norms: C_k per group, for the same groups.
        rule: How each group is clipped.
    """
    if not norms or norms.keys() != max_norms.keys():
        raise BadInput(
            f"expected one bound per group, found groups {sorted(norms)} and bounds for "
            f"{sorted(max_norms)}"
        )
    found = {group: rule(norms[group], max_norms[group]) for group in norms}
    is_finite = torch.stack([each.is_finite for each in found.values()]).all(0)  # [batch]
    return {
        group: Coefficients(each.values.where(is_finite, 0.0), is_finite)
        for group, each in found.items()
    }


def per_layer(
    norms: Mapping[str, SampleNorms],
    max_norm: float,
    rule: Rule = flat,
    num_parameters: int | None = None,
) -> dict[str, Coefficients]:
    """Clip every parameter to C / √L, so that a sample adds at most C over all L of them.

    Args:
        norms: Bounded norms of each parameter that the batch used.
        max_norm: C, the bound over all.
        rule: How each is clipped.
        num_parameters: L, if there are others that the batch did not use.
    """
    check.positive(max_norm=max_norm)
    count = len(norms) if num_parameters is None else num_parameters
    bound = max_norm / math.sqrt(max(1, count)) * (1 - 2.0**-48)  # rounded down
    return per_group(norms, dict.fromkeys(norms, bound), rule)


def total_sensitivity(max_norms: Mapping[str, float]) -> float:
    """Return √(Σ C_k²), rounded up.

    >>> 5.0 <= total_sensitivity({"attention": 3.0, "mlp": 4.0}) < 5.000001
    True
    """
    return math.sqrt(math.fsum(bound**2 for bound in max_norms.values())) * (1 + 2.0**-51)
