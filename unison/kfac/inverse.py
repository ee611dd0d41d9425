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

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.errors import Diverged
from unison.kfac.config import KFACConfig

FIRST_JITTER, MOST_JITTERS = 1e-10, 6  # of the largest diagonal entry; each 10 times the last


class NotInvertible(Diverged):
    """A layer's curvature has no inverse; the message names the layer and the remedy."""


@dataclass(frozen=True, eq=False)
class Inverse:
    """What to multiply a layer's gradient [d_out, d_in] with.

    Attributes:
        tensors: `a` and `g` (inverses), or `q_a`, `q_g` and `scale` (eigenvectors), or `scale`
            alone (diagonal). Without `g` or `q_g` the identity is meant.
    """

    tensors: Mapping[str, Tensor]

    def apply(self, y: Tensor) -> Tensor:
        """Precondition a gradient."""
        held = self.tensors
        if "a" in held:
            y = y @ held["a"]
            return held["g"] @ y if "g" in held else y
        if "q_a" not in held:
            return y * held["scale"]
        y = y @ held["q_a"]
        if "q_g" not in held:
            return (y * held["scale"]) @ held["q_a"].T
        return held["q_g"] @ ((held["q_g"].T @ y) * held["scale"]) @ held["q_a"].T

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(value.nbytes for value in self.tensors.values())


def invert_kronecker(a: Tensor, g: Tensor | None, config: KFACConfig, name: str) -> Inverse:
    """The inverse of G ⊗ A, damped.

    Args:
        a: A [d_in, d_in].
        g: G [d_out, d_out]; None for the identity.
        config: Form and size of the damping, and the way to invert.
        name: The layer's, for errors.

    Raises:
        NotInvertible: Naming the layer, the smallest eigenvalue and the remedy.
    """
    factors = {"A": a} if g is None else {"A": a, "G": g}
    for side, factor in factors.items():
        if not bool(torch.isfinite(factor).all()):
            raise NotInvertible(
                f"{side} of {name!r} holds values that are not finite: the activations or the "
                "gradients of its last update overflowed. Lower the learning rate, or compute in a "
                "wider dtype"
            )
    on_a, on_g = damping_of(a, g, config)
    dampings: dict[str, float] = {"A": on_a, "G": on_g}
    if config.uses_eigen:
        return _by_eigen(factors, dampings, config, name)
    inverses = {}
    for side, factor in factors.items():
        least = _least_damping(_largest(factor), config)
        inverses[side.lower()] = _by_cholesky(factor, max(dampings[side], least), side, name)
    return Inverse(inverses)


def invert_diagonal(diagonal: Tensor, config: KFACConfig, name: str) -> Inverse:
    """The inverse of a damped diagonal.

    Args:
        diagonal: D, of any shape.
        config: For λ.
        name: The layer's, for errors.

    Raises:
        NotInvertible: Naming the layer.
    """
    if not bool(torch.isfinite(diagonal).all()):
        raise NotInvertible(
            f"the diagonal of {name!r} holds values that are not finite: gradients overflowed. "
            "Lower the learning rate, or compute in a wider dtype"
        )
    damped = diagonal + config.joint_damping
    if config.max_condition_number is not None:
        damped = damped.clamp(min=float(damped.max()) / config.max_condition_number)
    smallest = float(damped.min())
    if not smallest > 0:
        raise NotInvertible(_not_positive(f"the diagonal of {name!r}", smallest))
    return Inverse({"scale": damped.reciprocal()})


def damping_of(a: Tensor, g: Tensor | None, config: KFACConfig) -> tuple[float, float]:
    """What is added to the diagonals of A and of G.

    Without G, λ alone is added to A.
    """
    if g is None:
        return config.joint_damping, 0.0
    on_a, on_g = config.dampings
    if config.damping_form == "pi":
        mean_a, mean_g = float(a.diagonal().mean()), float(g.diagonal().mean())
        # A factor of zeros (a layer that no gradient reached) has no ratio to balance.
        pi = (mean_a / mean_g) ** 0.5 if mean_a > 0 and mean_g > 0 else 1.0
        return on_a * pi, on_g / pi
    return on_a, on_g


def _by_eigen(
    factors: Mapping[str, Tensor], dampings: Mapping[str, float], config: KFACConfig, name: str
) -> Inverse:
    values, vectors = {}, {}
    for side, factor in factors.items():
        values[side], vectors[side] = _eigen(factor, side, name)
    is_joint = config.damping_form == "joint"
    for side, each in values.items():
        smallest, largest = float(each[0]), float(each[-1])
        # Negative by rounding only: a sum of squares has no negative eigenvalues.
        each = each.clamp(min=0.0)
        if not is_joint or "G" not in factors:
            damping = max(dampings[side], _least_damping(largest, config))
            each = each + damping
            if not float(each[0]) > 0:
                raise NotInvertible(_not_positive(f"{side} of {name!r}", smallest))
        values[side] = each
    held = {"q_a": vectors["A"]}
    if "G" not in factors:
        return Inverse({**held, "scale": values["A"].reciprocal()[None, :]})
    products = values["G"][:, None] * values["A"][None, :]
    if is_joint:
        joint = max(config.joint_damping, _least_damping(float(products.max()), config))
        products = products + joint
        if not float(products.min()) > 0:
            raise NotInvertible(_not_positive(f"G ⊗ A of {name!r}", float(products.min())))
    return Inverse({**held, "q_g": vectors["G"], "scale": products.reciprocal()})


def _eigen(factor: Tensor, side: str, name: str) -> tuple[Tensor, Tensor]:
    for dtype in (factor.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(factor.to(dtype))
        except torch.linalg.LinAlgError:
            continue
        return values.to(factor.dtype), vectors.to(factor.dtype)
    raise NotInvertible(
        f"the eigenvalues of {side} of {name!r} were not found, in float64 neither; raise damping, "
        "or set inverse='cholesky'"
    )


def _by_cholesky(factor: Tensor, damping: float, side: str, name: str) -> Tensor:
    """(factor + damping I)⁻¹, with more digits and then more damping where that fails."""
    largest = float(factor.diagonal().max()) if len(factor) else 0.0
    jitters = [0.0, *(largest * FIRST_JITTER * 10.0**i for i in range(MOST_JITTERS))]
    for jitter in jitters:
        for dtype in {factor.dtype: None, torch.float64: None}:
            damped = factor.to(dtype, copy=True)
            damped.diagonal().add_(damping + jitter)
            lower, info = torch.linalg.cholesky_ex(damped)
            if int(info) == 0:
                inverse = torch.cholesky_inverse(lower)
                if bool(torch.isfinite(inverse).all()):
                    return inverse.to(factor.dtype)
        if damping == 0:
            break  # asked for no damping, so that jitter would be another curvature
    smallest = float(torch.linalg.eigvalsh(factor.double())[0])
    raise NotInvertible(_not_positive(f"{side} of {name!r}", smallest))


def _largest(factor: Tensor) -> float:
    """An upper bound of the largest eigenvalue."""
    return float(factor.abs().sum(dim=1).max()) if len(factor) else 0.0


def _least_damping(largest: float, config: KFACConfig) -> float:
    """The damping with which (largest + d) / d, the worst condition number, is within bounds."""
    most = config.max_condition_number
    return 0.0 if most is None else largest / (most - 1)


def _not_positive(what: str, smallest: float) -> str:
    return (
        f"{what} cannot be inverted: its smallest eigenvalue is {smallest:.3g}. Raise damping, set "
        "max_condition_number, or collect more tokens per update"
    )
