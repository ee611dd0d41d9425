"""An upper bound on what a sample really adds to a gradient, rounding included.

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
to a grid first and add integers, if they are given one (`unison.clip.measured.SumGrid`), as private
training does: nothing of others changes. Without a grid they add float32 numbers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unison.clip.matrix import (
    MOST_TERMS_TOGETHER,
    TOKENS_PER_TILE,
    check_records,
    matrix_shapes,
    num_per_tile,
    num_terms,
    plain_arithmetic,
    spans,
    take,
)
from unison.errors import BadInput
from unison.ops import Dense, Lookup, Product, Record

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


class NormTable(Mapping[str, SampleNorms]):
    """The norms of many parameters: by name, or all in one tensor.

    Hundreds of parameters, each with two small tensors of its own, would cost a GPU a launch for
    every operation on every one of them.

    Args:
        names: Of the parameters, in an order that is the same in every run.
        squared: [parameters, batch], float64; see `SampleNorms`.
        upper: Likewise.
    """

    def __init__(self, names: Sequence[str], squared: Tensor, upper: Tensor) -> None:
        self._names = names
        self.squared, self.upper = squared, upper

    @cached_property
    def _index(self) -> dict[str, int]:
        """Where each name is: made for who asks for one of them, which most never do."""
        return {name: i for i, name in enumerate(self._names)}

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
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def scaled(self, factor: float) -> "NormTable":
        """Return the norms of gradients that are `factor` times as long."""
        if factor == 1:
            return self
        return NormTable(self._names, self.squared * factor**2, self.upper * factor**2)

    def total(self) -> SampleNorms:
        """Return the norms over all parameters together."""
        return SampleNorms(self.squared.sum(0), self.upper.sum(0))


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
    batch = check_records(records)
    first = records[0].value if isinstance(records[0], Dense) else records[0].g
    total = torch.zeros(batch, dtype=torch.float64, device=first.device)
    with plain_arithmetic(first.device):
        for record in records:
            size = num_per_tile(_bytes_per_sample(record), first.device)
            for samples in spans(batch, size):
                total[samples] += _mass_of(take(record, samples))
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
    batch = check_records(records)
    terms = sum(num_terms(record) for record in records)
    unit = UNIT_ROUNDOFF[arithmetic.scale]
    k2 = batch * terms + len(records) + 8
    # (1+u)²(1+γ) − 1 without the subtraction, which would lose u.
    rho = 2 * unit + unit**2 + (1 + unit) ** 2 * gamma(k2, UNIT_ROUNDOFF[arithmetic.accumulate])
    slack = gamma(num_roundings(records), UNIT_ROUNDOFF[arithmetic.norm])
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


def num_roundings(records: Sequence[Record]) -> int:
    """Return k₁: at least the roundings that a term of any norm method meets."""
    rows, columns = (sum(sizes) for sizes in zip(*matrix_shapes(records), strict=True))
    terms = sum(num_terms(record) for record in records)
    num_tiles = sum(-(-num_terms(record) // TOKENS_PER_TILE) for record in records)
    return 3 * terms + 2 * (rows + columns) + 2 * TOKENS_PER_TILE + (num_tiles + 1) ** 2 + 16


def _mass_of(record: Record) -> Tensor:  # [batch]
    match record:
        case Product(a=a, g=g):
            return (_token_norms(a) * _token_norms(g)).sum(1)
        case Lookup(ids=ids, g=g):
            return _token_norms(g).masked_fill(ids < 0, 0.0).sum(1)
        case Dense(value=value):
            return _token_norms(value.reshape(len(value), 1, math.prod(record.shape))).squeeze(1)
        case _:
            raise TypeError(f"expected a Product, Lookup or Dense, found {type(record)}")


def _token_norms(x: Tensor) -> Tensor:
    """Return the norm of every token of x [batch, tokens, features]: [batch, tokens], float64."""
    pieces = [
        torch.linalg.vector_norm(x[:, tokens].double(), dim=-1)
        for tokens in spans(x.shape[1], TOKENS_PER_TILE)
    ]
    return torch.cat(pieces, 1) if pieces else x.new_zeros(x.shape[:2], dtype=torch.float64)


def _bytes_per_sample(record: Record) -> int:
    match record:
        case Product(a=a, g=g):
            features = a.shape[2] + g.shape[2]
        case Lookup(g=g):
            features = g.shape[2]
        case Dense(shape=shape):
            return 8 * math.prod(shape)
        case _:
            raise TypeError(f"expected a Product, Lookup or Dense, found {type(record)}")
    return 8 * features * min(TOKENS_PER_TILE, num_terms(record))
