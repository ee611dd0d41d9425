"""Inverses of damped curvature, as what is needed to multiply with them.

| held | damped | applied to Y [d_out, d_in] |
|---|---|---|
| eigenvectors | G + d_G I and A + d_A I, or G ⊗ A + λI | Q_G ((Q_G' Y Q_A) ∘ S) Q_A' |
| inverses | G + d_G I and A + d_A I | G⁻¹ Y A⁻¹ |
| diagonal | D + λ | Y / (D + λ) |

where S = 1 / (s_G + d_G)(s_A + d_A) or 1 / (s_G s_A + λ), entry by entry. With `forward` there is
no G: the identity stands in its place, and A alone is damped with λ.

[Note: what may fail] A factor that is not finite, or not positive definite after damping. The first
is an overflow in the model. The second is rounding: Cholesky tries again in float64, then with a
growing jitter; what is left raises with the layer, the smallest eigenvalue and what to do.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.errors import Diverged
from unison.kfac import linalg
from unison.kfac.config import KFACConfig

FIRST_JITTER, MOST_JITTERS = 1e-10, 6  # of the largest diagonal entry; each 10 times the last

Factors = Mapping[str, Tensor]
"""A as `a` and G as `g`, or A alone where G is the identity; or a diagonal as `d`."""


class NotInvertible(Diverged):
    """A layer's curvature has no inverse; the message names the layer and the remedy."""


class Inverse:
    """What to multiply a layer's gradient [d_out, d_in] with.

    Args:
        tensors: `a` and `g` (inverses), or `q_a`, `q_g` and `scale` (eigenvectors), or `scale`
            alone (diagonal). Without `g` or `q_g` the identity is meant.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._held = dict(tensors)
        self._d_in = 0
        if "a" in tensors:
            self._d_in = len(tensors["a"])
            self._held["a"] = _aligned(tensors["a"])

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What it was made of."""
        if "a" not in self._held:
            return dict(self._held)
        return {**self._held, "a": self._held["a"][..., : self._d_in, : self._d_in]}

    @property
    def width(self) -> int | None:
        """Columns that products like best, zeros in those after d_in; None for any."""
        return self._held["a"].shape[-1] if "a" in self._held else None

    @property
    def is_diagonal(self) -> bool:
        """Whether it multiplies entry by entry."""
        return self._held.keys() == {"scale"}

    @property
    def shapes(self) -> tuple[tuple[str, torch.Size], ...]:
        """Of what it holds: inverses of equal shapes can be `stacked`."""
        return tuple((key, value.shape) for key, value in self._held.items())

    def apply(self, y: Tensor) -> Tensor:
        """Precondition a gradient [..., d_out, d_in or `width`], or as many as are stacked."""
        return self.apply_parts(y, [y.shape[-1]])[0]

    def apply_parts(self, y: Tensor, columns: Sequence[int]) -> list[Tensor]:
        """The same, some columns after others, each part contiguous where that costs nothing.

        Args:
            y: The gradient, or as many as inverses are stacked.
            columns: How many each part has; others that are left at the end are left out.
        """
        held = self._held
        if "a" not in held:
            return _parts(self._by_eigen(y) if "q_a" in held else y * held["scale"], columns)
        # As A⁻¹Y', transposed: both are symmetric, and so both products have the sum over the
        # contiguous dimension of both sides, the one layout that is fast in TF32.
        n = y.shape[-1]
        parts = _parts(torch.matmul(held["a"][..., :n, :n], y.mT).mT, columns)
        return [torch.matmul(held["g"], part) for part in parts] if "g" in held else parts

    def _by_eigen(self, y: Tensor) -> Tensor:
        held = self._held
        y = y @ held["q_a"]
        if "q_g" in held:
            y = held["q_g"] @ ((held["q_g"].mT @ y) * held["scale"])
        else:
            y = y * held["scale"]
        return y @ held["q_a"].mT

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(iter(self._held.values())).device

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(value.nbytes for value in self._held.values())


def stacked(inverses: Sequence[Inverse]) -> Inverse:
    """One inverse for as many gradients, of equal shapes; each is a view of it afterwards."""
    whole = copy(inverses[0])
    whole._held = {}
    for key, first in inverses[0]._held.items():
        # One side after the other: only one is there twice.
        values = [each._held[key] for each in inverses]
        value = torch.stack(values) if len(values) > 1 else first.unsqueeze(0)
        for place, each in enumerate(inverses):
            each._held[key] = value[place]
        whole._held[key] = value
    return whole


def _parts(y: Tensor, columns: Sequence[int]) -> list[Tensor]:
    return list(y[..., : sum(columns)].split(list(columns), dim=-1))


def _aligned(matrix: Tensor) -> Tensor:
    """With rows and columns of zeros where that is faster: the bias's makes most sizes odd."""
    extra = linalg.padding_of(len(matrix), matrix)
    return F.pad(matrix, (0, extra, 0, extra)) if extra else matrix


# --- many layers ----------------------------------------------------------------------------------


class FactorStats(NamedTuple):
    """What must be known of a factor before it is inverted.

    Attributes:
        size: Of its largest element; finite only if all are.
        mean: Of its diagonal; of all elements of a diagonal.
        smallest: Element of a diagonal; 0 for a matrix.
        largest: Element of a diagonal; an upper bound of a matrix's eigenvalues, 0 where no
            condition number is bounded.
    """

    size: float
    mean: float
    smallest: float
    largest: float


def invert(
    curvatures: Mapping[str, Factors], config: KFACConfig, *, is_together: bool = False
) -> dict[str, Inverse]:
    """Invert the damped curvature of many layers; a GPU is waited for twice.

    Args:
        curvatures: The factors of layers, by the layer's name.
        config: Form and size of the damping, and the way to invert.
        is_together: Whether factors of one size may be inverted together; see
            [Note: who goes together] in precondition.py.

    Raises:
        NotInvertible: Naming a layer, the smallest eigenvalue and the remedy.
    """
    found: dict[str, Inverse] = {}
    jobs: list[_Job] = []
    for name, stats in _stats_of(curvatures, config).items():
        factors = curvatures[name]
        _refuse_not_finite(name, stats)
        if "d" in factors:
            found[name] = _of_diagonal(name, factors["d"], stats["d"], config)
            continue
        dampings = _dampings(stats, config)
        if config.uses_eigen:
            found[name] = _by_eigen(name, factors, dampings, config)
            continue
        for side, factor in factors.items():
            least = _least_damping(stats[side].largest, config)
            jobs.append(_Job(name, side, factor, max(dampings[side], least)))
    sides: dict[str, dict[str, Tensor]] = {}
    for job, inverse in zip(jobs, _by_cholesky(jobs, is_together=is_together), strict=True):
        sides.setdefault(job.name, {})[job.side] = inverse
    return found | {name: Inverse(tensors) for name, tensors in sides.items()}


def _stats_of(
    curvatures: Mapping[str, Factors], config: KFACConfig
) -> dict[str, dict[str, FactorStats]]:
    """What is known of all factors, by layer and side; a GPU is waited for once."""
    all_sides = [(side, each) for own in curvatures.values() for side, each in own.items()]
    if not all_sides:
        return {name: {} for name in curvatures}
    zero = all_sides[0][1].new_zeros(())
    columns = [
        linalg.largest_elements([factor for _, factor in all_sides]),
        [(factor if side == "d" else factor.diagonal()).mean() for side, factor in all_sides],
        [factor.min() if side == "d" and factor.numel() else zero for side, factor in all_sides],
        [_largest(side, factor, zero, config) for side, factor in all_sides],
    ]
    rows = iter(torch.stack([torch.stack(each) for each in columns], dim=1).tolist())
    return {
        name: {side: FactorStats(*next(rows)) for side in factors}
        for name, factors in curvatures.items()
    }


def _largest(side: str, factor: Tensor, zero: Tensor, config: KFACConfig) -> Tensor:  # []
    """`largest` of `FactorStats`, still on the device."""
    if factor.numel() == 0:
        return zero
    if side == "d":
        return factor.max()
    return zero if config.max_condition_number is None else factor.abs().sum(dim=1).max()


def _refuse_not_finite(name: str, stats: Mapping[str, FactorStats]) -> None:
    for side, known in stats.items():
        if math.isfinite(known.size):
            continue
        if side == "d":
            raise NotInvertible(
                f"the diagonal of {name!r} holds values that are not finite: gradients "
                "overflowed. Lower the learning rate, or compute in a wider dtype"
            )
        raise NotInvertible(
            f"{side.upper()} of {name!r} holds values that are not finite: the activations or the "
            "gradients of its last update overflowed. Lower the learning rate, or compute in a "
            "wider dtype"
        )


def _of_diagonal(name: str, diagonal: Tensor, known: FactorStats, config: KFACConfig) -> Inverse:
    damped = diagonal + config.joint_damping
    smallest = known.smallest + config.joint_damping
    if config.max_condition_number is not None:
        least = (known.largest + config.joint_damping) / config.max_condition_number
        damped, smallest = damped.clamp(min=least), max(smallest, least)
    if not smallest > 0:
        raise NotInvertible(_not_positive(f"the diagonal of {name!r}", smallest))
    return Inverse({"scale": damped.reciprocal()})


# --- damping --------------------------------------------------------------------------------------


def _dampings(known: Mapping[str, FactorStats], config: KFACConfig) -> dict[str, float]:
    if "g" not in known:
        return {"a": config.joint_damping, "g": 0.0}
    on_a, on_g = config.dampings
    if config.damping_form == "pi":
        mean_a, mean_g = known["a"].mean, known["g"].mean
        # A factor of zeros (a layer that no gradient reached) has no ratio to balance.
        pi = (mean_a / mean_g) ** 0.5 if mean_a > 0 and mean_g > 0 else 1.0
        return {"a": on_a * pi, "g": on_g / pi}
    return {"a": on_a, "g": on_g}


def _least_damping(largest: float, config: KFACConfig) -> float:
    """The damping with which (largest + d) / d, the worst condition number, is within bounds."""
    most = config.max_condition_number
    return 0.0 if most is None else largest / (most - 1)


# --- eigenvectors ---------------------------------------------------------------------------------


def _by_eigen(
    name: str, factors: Factors, dampings: Mapping[str, float], config: KFACConfig
) -> Inverse:
    values, vectors = {}, {}
    for side, factor in factors.items():
        values[side], vectors[side] = _eigen(factor, side, name)
    is_joint = config.damping_form == "joint"
    for side, of_side in values.items():
        smallest, largest = float(of_side[0]), float(of_side[-1])
        # Negative by rounding only: a sum of squares has no negative eigenvalues.
        of_side = of_side.clamp(min=0.0)
        if not is_joint or "g" not in factors:
            damping = max(dampings[side], _least_damping(largest, config))
            of_side = of_side + damping
            if not float(of_side[0]) > 0:
                raise NotInvertible(_not_positive(f"{side.upper()} of {name!r}", smallest))
        values[side] = of_side
    held = {"q_a": vectors["a"]}
    if "g" not in factors:
        return Inverse({**held, "scale": values["a"].reciprocal()[None, :]})
    products = values["g"][:, None] * values["a"][None, :]
    if is_joint:
        joint = max(config.joint_damping, _least_damping(float(products.max()), config))
        products = products + joint
        if not float(products.min()) > 0:
            raise NotInvertible(_not_positive(f"G ⊗ A of {name!r}", float(products.min())))
    return Inverse({**held, "q_g": vectors["g"], "scale": products.reciprocal()})


def _eigen(factor: Tensor, side: str, name: str) -> tuple[Tensor, Tensor]:
    for dtype in (factor.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(factor.to(dtype))
        except torch.linalg.LinAlgError:
            continue
        return values.to(factor.dtype), vectors.to(factor.dtype)
    raise NotInvertible(
        f"the eigenvalues of {side.upper()} of {name!r} were not found, in float64 neither; raise "
        "damping, or set inverse='cholesky'"
    )


# --- Cholesky -------------------------------------------------------------------------------------


class _Job(NamedTuple):
    """One factor of a layer, and what is added to its diagonal."""

    name: str
    side: str
    factor: Tensor
    damping: float


def _by_cholesky(jobs: Sequence[_Job], *, is_together: bool) -> list[Tensor]:
    """(factor + damping I)⁻¹ of each, with more digits and then more damping where that fails."""
    if not jobs:
        return []
    groups: dict[object, list[int]] = {}
    for number, job in enumerate(jobs):
        goes_along = is_together and linalg.is_gpu(job.factor) and len(job.factor) > 0
        groups.setdefault(len(job.factor) if goes_along else (number,), []).append(number)
    # The largest first: small ones fill what is idle at the end.
    places = sorted(groups.values(), key=lambda own: -len(jobs[own[0]].factor))
    with linalg.full_float32():
        tries = [partial(_try_all, [jobs[number] for number in own]) for own in places]
        found = linalg.side_by_side(tries, jobs[0].factor.device)
        is_inverted = torch.cat([is_right for _, is_right in found]).tolist()
        order = [number for own in places for number in own]
        inverses = [each for of_group, _ in found for each in of_group]
        done = {
            number: inverse if is_right else _with_more(jobs[number])
            for number, inverse, is_right in zip(order, inverses, is_inverted, strict=True)
        }
    return [done[number] for number in range(len(jobs))]


def _try_all(jobs: Sequence[_Job]) -> tuple[Sequence[Tensor], Tensor]:
    """Inverses of factors of one size, and whether each is one."""
    if len(jobs) == 1:
        inverse, is_right = _try(jobs[0])
        return [inverse], is_right.reshape(1)
    inverses, is_right = linalg.inverses_of_positive(
        [job.factor for job in jobs], [job.damping for job in jobs]
    )
    # Copies, since layers keep them: one of them must not keep all the others.
    return [each.clone() for each in inverses], is_right


def _try(job: _Job, dtype: torch.dtype | None = None, jitter: float = 0.0) -> tuple[Tensor, Tensor]:
    """An inverse, and whether it is one."""
    damped = job.factor.to(dtype or job.factor.dtype, copy=True)
    damped.diagonal().add_(job.damping + jitter)
    inverse, is_right = linalg.inverse_of_positive(damped)
    return inverse.to(job.factor.dtype), is_right


def _with_more(job: _Job) -> Tensor:
    """The inverse of what was not inverted at once; the GPU is waited for at every try."""
    factor = job.factor
    largest = float(factor.diagonal().max()) if len(factor) else 0.0
    jitters = [0.0]
    if job.damping > 0:  # else none was asked for, and jitter would be another curvature
        jitters += [largest * FIRST_JITTER * 10.0**i for i in range(MOST_JITTERS)]
    for jitter in jitters:
        for dtype in {factor.dtype: None, torch.float64: None}:
            inverse, is_right = _try(job, dtype, jitter)
            if bool(is_right):
                return inverse
    smallest = float(torch.linalg.eigvalsh(factor.double())[0])
    raise NotInvertible(_not_positive(f"{job.side.upper()} of {job.name!r}", smallest))


def _not_positive(what: str, smallest: float) -> str:
    return (
        f"{what} cannot be inverted: its smallest eigenvalue is {smallest:.3g}. Raise damping, set "
        "max_condition_number, or collect more tokens per update"
    )
