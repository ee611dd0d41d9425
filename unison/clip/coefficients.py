"""From per-sample norms to clipping coefficients that bound what is computed, not what was meant.

A rule maps norms to c_b such that the contribution of sample b, as it is computed, has norm at most
C. It divides by an upper bound of the computed contribution instead of by the estimated norm; the
derivation is [Note: proved sensitivity] in bounds.py. On float32 records the two differ by 6e-8.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unison import check
from unison.clip.bounds import SampleNorms
from unison.errors import BadInput

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


@dataclass(frozen=True, eq=False)
class GroupCoefficients:
    """Coefficients per group of parameters.

    Attributes:
        values: {group: [batch]}; a sample that is not finite in one group is 0 in all.
        is_finite: Which samples are, in all groups [batch].
        sensitivity: √(Σ C_k²), rounded up: the norm that no sample exceeds over all groups.
    """

    values: dict[str, Tensor]
    is_finite: Tensor
    sensitivity: float

    @property
    def num_dropped(self) -> Tensor:
        """As in `Coefficients`."""
        return (~self.is_finite).sum()


Rule = Callable[[SampleNorms, float], Coefficients]


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
    _check_max_norm(max_norm)
    upper = norms.upper.sqrt() * _MARGIN  # [batch]
    return _without_the_infinite(norms, max_norm / upper.clamp(min=max_norm))


def automatic(norms: SampleNorms, max_norm: float, gamma: float = 0.01) -> Coefficients:
    """Return C / (N + γ): every sample is scaled to nearly C (AUTO-S, Bu et al. 2023).

    Guarantees:
        As `flat`: the computed contribution has norm below C. A gradient of 0 has c = C / γ.

    Args:
        norms: Bounded norms, summed over all parameters.
        max_norm: C, the bound.
        gamma: γ, which keeps small gradients apart from large ones.
    """
    _check_max_norm(max_norm)
    check.positive(gamma=gamma)
    upper = norms.upper.sqrt() * _MARGIN  # [batch]
    return _without_the_infinite(norms, max_norm / (upper + gamma))


RULES: dict[str, Rule] = {"flat": flat, "automatic": automatic}


def per_group(
    norms: Mapping[str, SampleNorms], max_norms: Mapping[str, float], rule: Rule = flat
) -> GroupCoefficients:
    """Clip every group of parameters to its own bound C_k.

    Guarantees:
        A sample adds at most √(Σ C_k²) over all groups: the returned `sensitivity`.

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
    is_finite = torch.stack([_is_finite(norms[group]) for group in norms]).all(0)  # [batch]
    values = {
        group: rule(norms[group], max_norms[group]).values.where(is_finite, 0.0) for group in norms
    }
    return GroupCoefficients(values, is_finite, total_sensitivity(max_norms))


def per_layer(
    norms: Mapping[str, SampleNorms],
    max_norm: float,
    rule: Rule = flat,
    num_parameters: int | None = None,
) -> GroupCoefficients:
    """Clip every parameter to C / √L, so that a sample adds at most C over all L of them.

    Args:
        norms: Bounded norms of each parameter that the batch used.
        max_norm: C, the bound over all.
        rule: How each is clipped.
        num_parameters: L, if there are others that the batch did not use.
    """
    _check_max_norm(max_norm)
    count = len(norms) if num_parameters is None else num_parameters
    bound = max_norm / math.sqrt(max(1, count)) * (1 - 2.0**-48)  # rounded down
    return per_group(norms, dict.fromkeys(norms, bound), rule)


def total_sensitivity(max_norms: Mapping[str, float]) -> float:
    """Return √(Σ C_k²), rounded up.

    >>> 5.0 <= total_sensitivity({"attention": 3.0, "mlp": 4.0}) < 5.000001
    True
    """
    return math.sqrt(math.fsum(bound**2 for bound in max_norms.values())) * (1 + 2.0**-51)


def _check_max_norm(max_norm: float) -> None:
    check.positive(max_norm=max_norm)
    if max_norm < SMALLEST_MAX_NORM:
        raise BadInput(f"max_norm must be at least {SMALLEST_MAX_NORM}, found {max_norm}")


def _is_finite(norms: SampleNorms) -> Tensor:  # [batch]
    # A maximum with NaN is NaN, and no NaN is below infinity: four launches, and not nine.
    return norms.squared.abs().maximum(norms.upper.abs()) < math.inf


def _without_the_infinite(norms: SampleNorms, values: Tensor) -> Coefficients:
    is_finite = _is_finite(norms)
    return Coefficients(values.where(is_finite, 0.0), is_finite)
