"""Clipping at a quantile of the norms, which is itself estimated with noise (Andrew et al. 2021).

Each step also releases how many of its records had a norm of at most C, with noise of its own, and
C follows that count. The count is a function of the private batch: its noise is part of the
mechanism, and the ledger counts both releases as one.
"""

import math
from dataclasses import dataclass

from unison import check
from unison.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping:
    """How C follows a quantile of the per-sample norms.

    With b = 1 for a record whose norm is at most C and 0 for any other, the statistic of a step is
    the sum over its records of b − ½. One record moves it by ½ at most. A record that is not there,
    padding included, adds nothing: neither ½ nor −½.

    Attributes:
        quantile: The part of the norms that C should lie above.
        learning_rate: How fast C follows, in log C per unit of the fraction.
        count_noise_multiplier: Standard deviation of the noise on the statistic.
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_multiplier: float

    def __post_init__(self) -> None:
        check.probability(quantile=self.quantile)
        check.positive(learning_rate=self.learning_rate)
        check.not_negative(count_noise_multiplier=self.count_noise_multiplier)

    def updated(self, max_grad_norm: float, noisy_fraction: float) -> float:
        """C for the next step.

        Args:
            max_grad_norm: C of this step.
            noisy_fraction: See `noisy_fraction`; noise may carry it outside [0, 1].

        Raises:
            BadInput: If the fraction is not finite or C would leave the range of floats.
        """
        if not math.isfinite(noisy_fraction):
            raise BadInput(f"expected a finite noisy_fraction, found {noisy_fraction!r}")
        exponent = -self.learning_rate * (noisy_fraction - self.quantile)
        updated = max_grad_norm * math.exp(exponent) if exponent < 700 else math.inf
        if not (math.isfinite(updated) and updated > 0):
            raise BadInput(
                f"adaptive clipping would set max_grad_norm to {updated!r} after a "
                f"{noisy_fraction=}; lower its learning_rate or its count_noise_multiplier"
            )
        return updated


def noisy_fraction(noisy_statistic: float, expected_batch_size: float) -> float:
    """The part of norms that are at most C, from the noisy sum of b − ½.

    The divisor is the public expected batch size, never the realised one.

    >>> noisy_fraction(2.0, 8)
    0.75
    """
    check.positive(expected_batch_size=expected_batch_size)
    return noisy_statistic / expected_batch_size + 0.5
