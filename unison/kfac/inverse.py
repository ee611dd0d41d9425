"""Inverses of damped curvature, as what is needed to multiply with them (multiply.py).

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
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from unison.errors import Diverged
from unison.kfac import device
from unison.kfac.blocks import inverses_of_positive
from unison.kfac.cholesky import (
    full_float32,
    inverse_of_positive,
    largest_elements,
    side_by_side,
)
from unison.kfac.config import KFACConfig
from unison.kfac.multiply import Inverse

FIRST_JITTER, MOST_JITTERS = 1e-10, 6  # of the largest diagonal entry; each 10 times the last


class NotInvertible(Diverged):
    """A layer's curvature has no inverse; the message names the layer and the remedy."""


# --- many layers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curvature:
    """What is to be inverted.

    Attributes:
        name: The layer's, for errors.
        factors: A as `a` and G as `g`, or A alone where G is the identity; or a diagonal as `d`.
    """

    name: str
    factors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Facts:
    """What must be known of a factor before it is inverted.

    Attributes:
        is_finite: Whether all of its elements are.
        mean: Of its diagonal; of all elements of a diagonal.
        smallest: Element of a diagonal; 0 for a matrix.
        largest: Element of a diagonal; an upper bound of a matrix's eigenvalues, 0 where no
            condition number is bounded.
    """

    is_finite: bool
    mean: float
    smallest: float
    largest: float


def invert(
    curvatures: Sequence[Curvature], config: KFACConfig, *, is_together: bool = False
) -> list[Inverse]:
    """Invert the damped curvature of many layers; a GPU is waited for twice.

    Args:
        curvatures: Of layers.
        config: Form and size of the damping, and the way to invert.
        is_together: Whether factors of one size may be inverted together; see stacks.py.

    Raises:
        NotInvertible: Naming a layer, the smallest eigenvalue and the remedy.
    """
    facts = _facts_of(curvatures, config)
    found: dict[int, Inverse] = {}
    jobs: list[_Job] = []
    for place, (each, known) in enumerate(zip(curvatures, facts, strict=True)):
        _refuse_not_finite(each, known)
        if "d" in each.factors:
            found[place] = _of_diagonal(each, known["d"], config)
            continue
        dampings = _dampings(known, config)
        if config.uses_eigen:
            found[place] = _by_eigen(each, dampings, config)
            continue
        for side, factor in each.factors.items():
            least = _least_damping(known[side].largest, config)
            jobs.append(_Job(place, side, each.name, factor, max(dampings[side], least)))
    sides: dict[int, dict[str, Tensor]] = {}
    for job, inverse in zip(jobs, _by_cholesky(jobs, is_together=is_together), strict=True):
        sides.setdefault(job.place, {})[job.side] = inverse
    found |= {place: Inverse(tensors) for place, tensors in sides.items()}
    return [found[place] for place in range(len(curvatures))]


def invert_kronecker(a: Tensor, g: Tensor | None, config: KFACConfig, name: str) -> Inverse:
    """The inverse of one layer's G ⊗ A, damped; without G the identity stands in its place.

    Args:
        a: A [d_in, d_in].
        g: G [d_out, d_out]; None for the identity.
        config: Form and size of the damping, and the way to invert.
        name: The layer's, for errors.

    Raises:
        NotInvertible: Naming the layer, the smallest eigenvalue and the remedy.
    """
    return invert([Curvature(name, {"a": a} if g is None else {"a": a, "g": g})], config)[0]


def invert_diagonal(diagonal: Tensor, config: KFACConfig, name: str) -> Inverse:
    """The inverse of one layer's damped diagonal, of any shape.

    Raises:
        NotInvertible: Naming the layer.
    """
    return invert([Curvature(name, {"d": diagonal})], config)[0]


def _facts_of(curvatures: Sequence[Curvature], config: KFACConfig) -> list[dict[str, Facts]]:
    """Facts of all factors, by layer and side; a GPU is waited for once."""
    sides = [(side, factor) for each in curvatures for side, factor in each.factors.items()]
    if not sides:
        return [{} for _ in curvatures]
    factors = [factor for _, factor in sides]
    zero = factors[0].new_zeros(())
    bounds = [_bounds(side, factor, zero, config) for side, factor in sides]
    columns = (
        largest_elements(factors),
        [(factor if side == "d" else factor.diagonal()).mean() for side, factor in sides],
        [smallest for smallest, _ in bounds],
        [largest for _, largest in bounds],
    )
    rows = iter(torch.stack([torch.stack(list(each)) for each in columns], dim=1).tolist())
    found = []
    for each in curvatures:
        of_layer = {}
        for side in each.factors:
            largest_element, *others = next(rows)
            of_layer[side] = Facts(math.isfinite(largest_element), *others)
        found.append(of_layer)
    return found


def _bounds(
    side: str, factor: Tensor, zero: Tensor, config: KFACConfig
) -> tuple[Tensor, Tensor]:  # [], []
    """`smallest` and `largest` of `Facts`, still on the device."""
    if side == "d" and factor.numel():
        smallest, largest = torch.aminmax(factor)
        return smallest, largest
    if config.max_condition_number is not None and factor.numel():
        return zero, factor.abs().sum(dim=1).max()
    return zero, zero


def _refuse_not_finite(each: Curvature, known: Mapping[str, Facts]) -> None:
    for side, facts in known.items():
        if facts.is_finite:
            continue
        if side == "d":
            raise NotInvertible(
                f"the diagonal of {each.name!r} holds values that are not finite: gradients "
                "overflowed. Lower the learning rate, or compute in a wider dtype"
            )
        raise NotInvertible(
            f"{side.upper()} of {each.name!r} holds values that are not finite: the activations or "
            "the gradients of its last update overflowed. Lower the learning rate, or compute in a "
            "wider dtype"
        )


def _of_diagonal(each: Curvature, known: Facts, config: KFACConfig) -> Inverse:
    damped = each.factors["d"] + config.joint_damping
    smallest = known.smallest + config.joint_damping
    if config.max_condition_number is not None:
        least = (known.largest + config.joint_damping) / config.max_condition_number
        damped, smallest = damped.clamp(min=least), max(smallest, least)
    if not smallest > 0:
        raise NotInvertible(_not_positive(f"the diagonal of {each.name!r}", smallest))
    return Inverse({"scale": damped.reciprocal()})


# --- damping --------------------------------------------------------------------------------------


def damping_of(a: Tensor, g: Tensor | None, config: KFACConfig) -> tuple[float, float]:
    """What is added to the diagonals of A and of G.

    Without G, λ alone is added to A.
    """
    curvature = Curvature("", {"a": a} if g is None else {"a": a, "g": g})
    found = _dampings(_facts_of([curvature], config)[0], config)
    return found["a"], found["g"]


def _dampings(known: Mapping[str, Facts], config: KFACConfig) -> dict[str, float]:
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


def _by_eigen(each: Curvature, dampings: Mapping[str, float], config: KFACConfig) -> Inverse:
    factors, name = each.factors, each.name
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


@dataclass(frozen=True)
class _Job:
    """One factor of a layer, and what is added to its diagonal."""

    place: int
    side: str
    name: str
    factor: Tensor
    damping: float


def _by_cholesky(jobs: Sequence[_Job], *, is_together: bool) -> list[Tensor]:
    """(factor + damping I)⁻¹ of each, with more digits and then more damping where that fails."""
    if not jobs:
        return []
    groups: dict[object, list[int]] = {}
    for number, job in enumerate(jobs):
        goes_along = is_together and device.is_gpu(job.factor) and len(job.factor) > 0
        groups.setdefault(len(job.factor) if goes_along else (number,), []).append(number)
    # The largest first: small ones fill what is idle at the end.
    places = sorted(groups.values(), key=lambda own: -len(jobs[own[0]].factor))
    with full_float32():
        tries = [partial(_try_all, [jobs[number] for number in own]) for own in places]
        found = side_by_side(tries, jobs[0].factor.device)
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
    inverses, is_right = inverses_of_positive(
        [job.factor for job in jobs], [job.damping for job in jobs]
    )
    # Copies, since layers keep them: one of them must not keep all the others.
    return [each.clone() for each in inverses], is_right


def _try(job: _Job, dtype: torch.dtype | None = None, jitter: float = 0.0) -> tuple[Tensor, Tensor]:
    """An inverse, and whether it is one."""
    damped = job.factor.to(dtype or job.factor.dtype, copy=True)
    damped.diagonal().add_(job.damping + jitter)
    inverse, is_right = inverse_of_positive(damped)
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
