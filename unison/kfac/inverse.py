"""Inverses of damped curvature, as what is needed to multiply with them.

| held | damped | applied to Y [d_out, d_in] |
|---|---|---|
| eigenvectors | G + d_G I and A + d_A I, or G ⊗ A + λI | Q_G ((Q_G' Y Q_A) ∘ S) Q_A' |
| inverses | G + d_G I and A + d_A I | G⁻¹ Y A⁻¹ |
| diagonal | D + λ | Y / (D + λ) |
| columns W of a side, G say | U'U + d I = (I - W'W)⁻¹ d | (Y - W'WY) / d |
| columns B of both | G ⊗ A + λI | Y / λ - B_G ((B_G' Y B_A) ∘ C) B_A' |
| blocks of a side | G + d_G I, without what lies between blocks | block by block |
| a diagonal D less columns U | D - U'U = (D⁻¹ + V'V)⁻¹ | D⁻¹Y + V'VY |

where S = 1 / (s_G + d_G)(s_A + d_A) or 1 / (s_G s_A + λ), entry by entry. With `forward` there is
no G: the identity stands in its place, and A alone is damped with λ; a side that is the identity
likewise.

[Note: Woodbury] With S = U U' + d I = LL', which has a row per token, and W = L⁻¹ U, the inverse of
U'U + d I is (I - W'W) / d. Damped jointly: with the eigenvectors U U' = V s V' and B = U'V, the
inverse of BB' ⊗ B_A B_A' + λI is 1 / λ less B ⊗ B_A scaled by C = 1 / λ(λ + s s_A); a side that is
a matrix has B = Q√s. S and all that is made of it is float64: an error of S would be divided by d.
Columns that are averaged over updates are kept orthogonal (`join`), and their S is diagonal; as
orthogonal as their dtype has digits, which makes up to 8 times the rounding errors of a matrix.

[Note: the true head] The Fisher matrix of a softmax is the mean over tokens of diag(p) - pp', with
the damping D - U'U where D = diag(p̄) + d I and U has a row p / √T per token. With
S = I - UD⁻¹U' = LL' and V = L⁻¹UD⁻¹ its inverse is D⁻¹ + V'V. S is positive for every d > 0, since
U'U is never more than diag(p̄). That holds for any part of the tokens too, as long as U is divided
by the number of all of them; divided by their own number, D - U'U was indefinite 20 times of 20. S
is added up in float64, over blocks of classes where ranks share them ([Note: rows] in layers.py).

[Note: what may fail] A factor that is not finite, or not positive definite after damping. The first
is an overflow in the model. The second is rounding: Cholesky tries again in float64, then with a
growing jitter; what is left raises with the layer, the smallest eigenvalue and what to do.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.errors import Diverged
from unison.kfac.config import KFACConfig
from unison.kfac.linalg import (
    full_float32,
    inverse_of_positive,
    inverses_of_positive,
    is_gpu,
    joint_sizes,
    largest_elements,
    padding_of,
    side_by_side,
)
from unison.parallel.exchange import SharedBlocks

FIRST_JITTER, MOST_JITTERS = 1e-10, 6  # of the largest diagonal entry; each 10 times the last


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns that a side is made of, U [count, n], as blocks of its n that ranks share.

    Attributes:
        blocks: This rank's, each [count, rows of the block].
        starts: The first of n in each block.
        count: Columns.
        n: Rows of the side, of all ranks.
        like: Of the dtype and on the device of the blocks.
        shared: Which blocks are whose; None for one block that is all of the side.
    """

    blocks: list[Tensor]
    starts: list[int]
    count: int
    n: int
    like: Tensor
    shared: SharedBlocks | None = None

    @classmethod
    def whole(cls, u: Tensor) -> "Columns":
        """All columns of a side [count, n]."""
        return cls([u], [0], *u.shape, like=u[:0, :0])

    def of(self, blocks: list[Tensor], count: int) -> "Columns":
        """Other columns of the same side."""
        return replace(self, blocks=blocks, count=count)

    def add(self, values: Iterable[Tensor], *shape: int, is_wide: bool = False) -> Tensor:
        """The sum of one tensor per block over all blocks; a collective where ranks share them.

        Args:
            values: Of this rank's blocks, each made when it is added.
            shape: Of each.
            is_wide: Whether they are float64, and not of the blocks' dtype.
        """
        if self.shared is None:
            return next(iter(values))
        return self.shared.add(values, shape, self.like.double() if is_wide else self.like)

    def gram(self) -> Tensor:
        """UU' [count, count] in float64."""
        wide = (each.double() for each in self.blocks)
        return self.add((each @ each.T for each in wide), self.count, self.count, is_wide=True)

    def eigen(self, gram: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues [count] and vectors of a Gram matrix, the same on all ranks to the bit."""
        values, vectors = torch.linalg.eigh(gram)  # ascending
        if self.shared is None:
            return values, vectors
        # Each rank turns its blocks by them: those of another library would be other directions.
        found = self.shared.first(torch.cat([values[None], vectors]))
        return found[0], found[1:]

    def named(self, key: str, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """One tensor per block by key, as `Factors` and `Inverse` have them."""
        if self.shared is None:
            return {key: values[0]}
        numbers = self.shared.numbers
        return {f"{key}#{number}": each for number, each in zip(numbers, values, strict=True)}

    @property
    def number(self) -> "Inverse":
        """How many columns there are, where a rank may have none of their rows."""
        return {} if self.shared is None else {"k_g": torch.tensor(self.count)}


Factors = Mapping[str, Any]
"""A as `a` and G as `g`, or A alone where G is the identity; or a diagonal as `d`.

A side that is held as columns is `u_a` or `u_g` [columns, n], and `t_a` or `t_g` [] the multiple of
the identity that stands for columns which were left out; with `p_g` [n] they are taken from a
diagonal. Where ranks share its rows, `u_g#3` is the fourth block of them, and all of them are one
`Columns` where they are inverted. Blocks of a side's matrix are `blocks_a` or `blocks_g` [n, rows
of a block], one after the other.
"""

Inverse = dict[str, Tensor]
"""`a` (padded) and `g`, or eigenvectors `q_a` and `q_g` with `scale`, or the `scale` of a diagonal.

Of a side that is held as columns, `w_a` or `w_g` with 1 / d as `s_a` or `s_g` [1, 1]; where both
are damped jointly, `b_a`, `b_g`, `c`, and 1 / λ as `s`. Of blocks, `blocks_a` or `blocks_g`
[blocks, rows, rows]; of a diagonal less columns, `v_g` and `d_g` [n, 1]. Without any of a side's
the identity is meant. Where ranks share rows, `w_g#3`, `v_g#3`, `d_g#3` and `b_g#3` are of the
fourth block, and `k_g` [] is how many columns there are.
"""


class NotInvertible(Diverged):
    """A layer's curvature has no inverse; the message names the layer and the remedy."""


# --- multiplying with inverses --------------------------------------------------------------------


def apply(inverse: Inverse, y: Tensor, columns: Sequence[int]) -> list[Tensor]:
    """Precondition a gradient, as some columns after others, contiguous where that costs nothing.

    Args:
        inverse: Of a layer, or of several, stacked.
        y: The gradient [..., d_out, d_in], or as wide as a padded `a`, with zeros after d_in.
        columns: How many each part has; others that are left at the end are left out.
    """
    ends = list(itertools.accumulate(columns, initial=0))
    if "a" in inverse and "g" not in inverse:
        # Each part by itself is in one piece afterwards.
        a = inverse["a"][..., : y.shape[-1]]
        parts = [y @ a[..., low:high, :].mT for low, high in itertools.pairwise(ends)]
        return _by_g(inverse, parts)
    if "a" in inverse:
        # As A⁻¹Y', transposed: both are symmetric, and so both products have the sum over the
        # contiguous dimension of both sides, the one layout that is fast in TF32.
        n = y.shape[-1]
        y = torch.matmul(inverse["a"][..., :n, :n], y.mT).mT
    elif "q_a" in inverse:
        y = y @ inverse["q_a"]
        if "q_g" in inverse:
            y = inverse["q_g"] @ ((inverse["q_g"].mT @ y) * inverse["scale"])
        else:
            y = y * inverse["scale"]
        y = y @ inverse["q_a"].mT
    elif "w_a" in inverse:
        y = (y - (y @ inverse["w_a"].mT) @ inverse["w_a"]) * inverse["s_a"]
    elif "blocks_a" in inverse:
        y = _by_blocks(inverse["blocks_a"], y.mT).mT
    elif "b_a" in inverse:
        middle = (inverse["b_g"].mT @ y @ inverse["b_a"]) * inverse["c"]
        y = y * inverse["s"] - inverse["b_g"] @ middle @ inverse["b_a"].mT
    elif "scale" in inverse:
        y = y * inverse["scale"]
    return _by_g(inverse, list(y[..., : ends[-1]].split(list(columns), dim=-1)))


def _by_g(inverse: Inverse, parts: list[Tensor]) -> list[Tensor]:
    """Multiply columns of gradients [..., d_out, any] with what stands for G."""
    if "w_g" in inverse:
        w = inverse["w_g"]
        return [(part - w.mT @ (w @ part)) * inverse["s_g"] for part in parts]
    if "v_g" in inverse:
        v = inverse["v_g"]
        return [part * inverse["d_g"] + v.mT @ (v @ part) for part in parts]
    if "blocks_g" in inverse:
        return [_by_blocks(inverse["blocks_g"], part) for part in parts]
    return [torch.matmul(inverse["g"], part) for part in parts] if "g" in inverse else parts


def apply_shared(
    inverse: Inverse, shared: SharedBlocks, ys: list[Tensor], width: int, like: Tensor
) -> list[Tensor]:
    """Precondition a gradient whose rows ranks share; a collective.

    Args:
        inverse: Of the layer.
        shared: Which blocks are whose.
        ys: This rank's blocks of the gradient [rows of the block, d_in].
        width: d_in.
        like: Of the dtype and on the device of the blocks.
    """
    is_joint = "c" in inverse
    key = "b_g" if is_joint else "w_g" if "s_g" in inverse else "v_g"
    lefts = [inverse[f"{key}#{number}"] for number in shared.numbers]
    if is_joint:
        lefts = [each.mT for each in lefts]  # [columns, rows of the block]
    else:
        of_a = {key: each for key, each in inverse.items() if key == "a" or key[-2:] == "_a"}
        ys = [apply(of_a, y, [width])[0] for y in ys]
    products = (left @ y for left, y in zip(lefts, ys, strict=True))
    z = shared.add(products, (int(inverse["k_g"]), width), like)
    if is_joint:
        z = ((z @ inverse["b_a"]) * inverse["c"]) @ inverse["b_a"].mT
        return [y * inverse["s"] - left.mT @ z for left, y in zip(lefts, ys, strict=True)]
    if "s_g" in inverse:
        return [(y - left.mT @ z) * inverse["s_g"] for left, y in zip(lefts, ys, strict=True)]
    scales = [inverse[f"d_g#{number}"] for number in shared.numbers]
    return [y * d + left.mT @ z for left, d, y in zip(lefts, scales, ys, strict=True)]


def _by_blocks(blocks: Tensor, y: Tensor) -> Tensor:  # [..., blocks, b, b], [..., n, m]
    """The product of blocks on a diagonal with y, of which the last one may have fewer rows."""
    count, size = blocks.shape[-3:-1]
    rows = F.pad(y, (0, 0, 0, count * size - y.shape[-2])).unflatten(-2, (count, size))
    return (blocks @ rows).flatten(-3, -2)[..., : y.shape[-2], :]


def align(matrix: Tensor) -> Tensor:
    """Pad with rows and columns of zeros where that is faster: the bias makes most sizes odd."""
    extra = padding_of(len(matrix), matrix)
    return F.pad(matrix, (0, extra, 0, extra)) if extra else matrix


def stack(inverses: Sequence[Inverse]) -> Inverse:
    """Make one inverse for as many gradients, of equal shapes; each is a view of it afterwards."""
    whole = {}
    for key in inverses[0]:
        values = [each[key] for each in inverses]
        joined = _joined(values)
        if joined is not None:
            whole[key] = joined
            continue
        # One side after the other: only one is there twice.
        whole[key] = torch.stack(values)
        for each, value in zip(inverses, whole[key], strict=True):
            each[key] = value
    return whole


def _joined(values: Sequence[Tensor]) -> Tensor | None:
    """Tensors of equal shape as one, where they lie equally far apart in one memory; else None.

    So do the inverses of layers of one kind that were made together.
    """
    first, *others = values
    if not others:
        return first.unsqueeze(0)
    places = [each.storage_offset() for each in values]
    apart = places[1] - places[0]
    if apart <= 0 or places != list(range(places[0], places[0] + len(places) * apart, apart)):
        return None
    memory, strides = first.untyped_storage().data_ptr(), first.stride()
    for each in others:
        if each.untyped_storage().data_ptr() != memory or each.stride() != strides:
            return None
    return first.as_strided((len(values), *first.shape), (apart, *strides))


# --- many layers ----------------------------------------------------------------------------------


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
    found: dict[str, Inverse] = {name: {} for name in curvatures}
    diagonals = {name: own["d"] for name, own in curvatures.items() if "d" in own}
    jobs: list[Job] = []  # of Cholesky; a block is one
    stats = _stats_of(curvatures, config, is_together=is_together)
    for name, own in curvatures.items():
        _refuse_not_finite(name, stats[name])
        if "d" in own:
            continue
        damping = _dampings({side: mean for side, (_, mean, *_) in stats[name].items()}, config)
        is_plain = "a" in own and own.keys() <= {"a", "g"}
        if not is_plain and config.damping_form == "joint" and len(stats[name]) == 2:
            found[name] = _joint_by_columns(name, own, stats[name], config)
            continue
        if (config.inverse == "eigen" or config.damping_form == "joint") and is_plain:
            found[name] = _by_eigen(name, own, damping, config)
            continue
        for side, (*_, largest) in stats[name].items():
            added = max(damping[side], _least_damping(largest, config))
            if side in own or f"blocks_{side}" in own:
                matrices = [own[side]] if side in own else blocks_of(own[f"blocks_{side}"])
                for each in matrices:
                    padding = padding_of(len(each), each) if side == "a" and side in own else 0
                    jobs.append((name, side, each, added, padding))
            elif f"p_{side}" in own:
                found[name] |= _by_softmax(name, own, added)
            else:
                is_orthogonal = config.has_rank
                found[name] |= _by_columns(name, side, own, added, is_orthogonal=is_orthogonal)
    found |= _of_diagonals(diagonals, {name: stats[name]["d"] for name in diagonals}, config)
    of_sides: dict[tuple[str, str], list[Tensor]] = {}
    inverses = _by_cholesky(jobs, is_together=is_together)
    for (name, side, *_), inverse in zip(jobs, inverses, strict=True):
        of_sides.setdefault((name, side), []).append(inverse)
    for (name, side), own in of_sides.items():
        if side in curvatures[name]:
            has_padding = len(own[0]) > len(curvatures[name][side])
            found[name][side] = align(own[0]) if side == "a" and not has_padding else own[0]
        else:
            last = len(own[0]) - len(own[-1])
            own[-1] = F.pad(own[-1], (0, last, 0, last))
            found[name][f"blocks_{side}"] = torch.stack(own)
    return found


def blocks_of(rows: Tensor) -> list[Tensor]:  # [n, b] -> [b, b] each, the last one smaller
    """The blocks on the diagonal of a side."""
    return [block[:, : len(block)] for block in rows.split(rows.shape[1])]


def _stats_of(
    curvatures: Mapping[str, Factors], config: KFACConfig, *, is_together: bool = False
) -> dict[str, dict[str, list[float]]]:
    """What must be known of factors, by layer and side; a GPU is waited for once.

    Returns:
        The size of the largest element, finite only if all are; the mean of the diagonal, or of a
        diagonal's elements; the smallest element of a diagonal, 0 for a matrix; the largest one of
        a diagonal, an upper bound of a matrix's eigenvalues, or 0 where no condition number is
        bounded.
    """
    keys = [
        (name, side)
        for name, own in curvatures.items()
        for side, each in own.items()
        if side[:2] != "t_" and isinstance(each, Tensor)
    ]
    factors = [curvatures[name][side] for name, side in keys]
    groups: dict[object, list[int]] = {}
    for number, ((_, side), factor) in enumerate(zip(keys, factors, strict=True)):
        alike = side in ("d", "p_g"), side[:-1], factor.shape
        groups.setdefault(alike if is_together else number, []).append(number)
    is_bounded = config.max_condition_number is not None
    rows = [
        _stats_of_side(keys[own[0]][1], [factors[number] for number in own], is_bounded)
        for own in groups.values()
    ]
    order = list(itertools.chain(*groups.values()))
    values: list[list[float]] = []
    if order:
        sizes = torch.stack(largest_elements([factors[number] for number in order]))
        values = torch.cat([sizes[None], torch.cat(rows, dim=1)]).T.tolist()  # [sides, 4]
    known = {keys[number]: own for number, own in zip(order, values, strict=True)}
    for name, own in curvatures.items():
        for side, each in own.items():
            if isinstance(each, Columns):
                known[name, side] = _stats_of_columns(each, is_bounded)
    found: dict[str, dict[str, list[float]]] = {}
    for name, own in curvatures.items():
        stats = {side: known[name, side] for side in own if side[:2] != "t_"}
        for side in [side for side in stats if side.startswith("u_")]:
            size, mean, smallest, largest = stats.pop(side)
            tail = float(own[f"t_{side[2:]}"])  # of the host
            stats[side[2:]] = [size, mean + tail, smallest, largest + tail]
        if "p_g" in stats:
            columns, of_diagonal = stats.pop("g"), stats.pop("p_g")
            size, mean = columns[0] + of_diagonal[0], of_diagonal[1] - columns[1]
            stats["g"] = [size, mean, 0.0, of_diagonal[3]]
        stats = {side.removeprefix("blocks_"): each for side, each in stats.items()}
        found[name] = dict(sorted(stats.items()))
    return found


def _stats_of_side(side: str, factors: list[Tensor], is_bounded: bool) -> Tensor:
    """Mean, smallest, largest, see `_stats_of`, of factors of one kind and shape [3, factors]."""
    if side in ("d", "p_g"):
        whole = torch.stack(factors) if len(factors) > 1 else factors[0][None]
        whole = whole.flatten(1)  # [factors, elements]; of one, the same memory
        if not whole.numel():
            return whole.new_zeros(3, len(factors))
        return torch.stack([whole.mean(dim=1), *whole.aminmax(dim=1)])
    if side.startswith("u_"):
        means = torch.stack([each.square().sum() / each.shape[1] for each in factors])
    elif side.startswith("blocks_"):
        own = [[block.diagonal() for block in blocks_of(each)] for each in factors]
        means = torch.stack([torch.cat(each).mean() for each in own])
    else:
        means = torch.stack([each.diagonal() for each in factors]).mean(dim=1)
    largest = torch.zeros_like(means)
    if is_bounded and factors[0].numel():
        grams = [each @ each.T if side.startswith("u_") else each for each in factors]
        largest = torch.stack([each.abs().sum(dim=1).max() for each in grams])
    return torch.stack([means, torch.zeros_like(means), largest])


def _stats_of_columns(u: Columns, is_bounded: bool) -> list[float]:
    """See `_stats_of`, of columns whose rows ranks share; a collective."""
    squares = (each.double().square().sum().view(1) for each in u.blocks)
    trace = float(u.add(squares, 1, is_wide=True))
    largest = float(u.gram().abs().sum(dim=1).max()) if is_bounded and u.count else 0.0
    return [trace, trace / u.n, 0.0, largest]


def _refuse_not_finite(name: str, stats: Mapping[str, Sequence[float]]) -> None:
    for side, (size, *_) in stats.items():
        if not math.isfinite(size):
            what = "the diagonal" if side == "d" else side.upper()
            raise NotInvertible(
                f"{what} of {name!r} holds values that are not finite: the activations or the "
                "gradients of its last update overflowed. Lower the learning rate, or compute in a "
                "wider dtype"
            )


def _of_diagonals(
    diagonals: Mapping[str, Tensor], stats: Mapping[str, Sequence[float]], config: KFACConfig
) -> dict[str, Inverse]:
    """The inverses of all diagonals, with few launches."""
    if not diagonals:
        return {}
    added, most = config.joint_damping, config.max_condition_number
    for name, (*_, smallest, largest) in stats.items():
        least = 0.0 if most is None else (largest + added) / most
        if not max(smallest + added, least) > 0:
            raise _not_positive(f"the diagonal of {name!r}", smallest + added)
    damped = torch._foreach_add(list(diagonals.values()), added)
    if most is not None:
        torch._foreach_clamp_min_(
            damped, [(largest + added) / most for *_, largest in stats.values()]
        )
    torch._foreach_reciprocal_(damped)
    return {name: {"scale": each} for name, each in zip(diagonals, damped, strict=True)}


# --- damping --------------------------------------------------------------------------------------


def _dampings(means: Mapping[str, float], config: KFACConfig) -> dict[str, float]:
    """What is added to the diagonal of each side, from the means of their diagonals."""
    if len(means) == 1:  # the other one is the identity
        return {"a": 0.0, "g": 0.0, next(iter(means)): config.joint_damping}
    on_a, on_g = config.dampings
    if config.damping_form == "pi":
        mean_a, mean_g = means["a"], means["g"]
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
    is_joint = config.damping_form == "joint" and "g" in factors
    for side, factor in factors.items():
        of_side, vectors[side] = _eigen(factor, side, name)
        smallest, largest = float(of_side[0]), float(of_side[-1])
        # Negative by rounding only: a sum of squares has no negative eigenvalues.
        values[side] = of_side.clamp(min=0.0)
        if not is_joint:
            values[side] += max(dampings[side], _least_damping(largest, config))
            if not float(values[side][0]) > 0:
                raise _not_positive(f"{side.upper()} of {name!r}", smallest)
    if "g" not in factors:
        return {"q_a": vectors["a"], "scale": values["a"].reciprocal()[None, :]}
    products = values["g"][:, None] * values["a"][None, :]
    if is_joint:
        joint = max(config.joint_damping, _least_damping(float(products.max()), config))
        products = products + joint
        if not float(products.min()) > 0:
            raise _not_positive(f"G ⊗ A of {name!r}", float(products.min()))
    return {"q_a": vectors["a"], "q_g": vectors["g"], "scale": products.reciprocal()}


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


# --- columns: see [Note: Woodbury] ----------------------------------------------------------------


def fold(rows: Columns) -> Columns:
    """At most n columns V with V'V the same as of U, exactly."""
    if rows.count <= rows.n:
        return rows
    if rows.shared is not None:  # no rank has whole rows: turned by all eigenvectors
        return join(None, rows, rows.n)[0]
    return Columns.whole(torch.linalg.qr(rows.blocks[0], mode="r").R)


def join(
    before: Columns | None, rows: Columns, max_rank: int, *, has_tail: bool = True
) -> tuple[Columns, float]:
    """At most `max_rank` columns V for the sum of products U'U of two sets of them, orthogonal.

    The largest eigenvalues are kept, and the mean of the others over the directions that are left,
    t, stands for these: V'V + t I has the kept ones as they were, and the same trace.

    Args:
        before: What this returned the last time; None at first.
        rows: Further columns of the side.
        max_rank: Most columns to return.
        has_tail: Whether there is a t; else what is left out is left out.

    Returns:
        V, and t; 0.0 if nothing was left out.
    """
    rows = fold(rows) if rows.shared is None else rows
    old = rows.of([each[:0] for each in rows.blocks], 0) if before is None else before
    k, count, n = old.count, old.count + rows.count, rows.n
    joined = [torch.cat(pair) for pair in zip(old.blocks, rows.blocks, strict=True)]
    products = (each @ both.T for each, both in zip(rows.blocks, joined, strict=True))
    of_rows = rows.add(products, rows.count, count)
    gram = of_rows.new_zeros(count, count)
    gram[k:] = of_rows  # the old ones are orthogonal: a third of the products is known
    gram[:k, k:] = gram[k:, :k].T
    gram.diagonal()[:k] = rows.add((each.square().sum(dim=1) for each in old.blocks), k)
    values, vectors = rows.eigen(gram)
    values = values.double().clamp(min=0.0)
    num_kept = min(max_rank, count, n)
    left_out, kept = values.split([count - num_kept, num_kept])
    is_cut = has_tail and count > num_kept < n
    tail = float(left_out.sum()) / (n - num_kept) if is_cut else 0.0
    # A kept eigenvalue is not below the mean of the others, but for rounding.
    scale = ((kept - tail).clamp(min=0.0) / kept.clamp(min=1e-300)).sqrt()
    turned = (scale * vectors[:, count - num_kept :]).to(gram.dtype)
    return rows.of([turned.T @ both for both in joined], num_kept), tail


def _columns_of(own: Factors, side: str) -> Columns:
    u = own[f"u_{side}"]
    return u if isinstance(u, Columns) else Columns.whole(u)


def _by_columns(
    name: str, side: str, own: Factors, damping: float, *, is_orthogonal: bool
) -> Inverse:
    """The inverse of U'U + d I; rows that are orthogonal need no S."""
    u, added = _columns_of(own, side), damping + float(own[f"t_{side}"])
    if not added > 0:
        raise _not_positive(f"{side.upper()} of {name!r}, of low rank,", 0.0)
    scale = u.like.new_full((1, 1), 1 / added)
    if is_orthogonal:
        squares = (each.double().square().sum(dim=1, keepdim=True) for each in u.blocks)
        lengths = u.add(squares, u.count, 1, is_wide=True)
        ws = [each * (lengths + added).rsqrt().to(each.dtype) for each in u.blocks]
    else:
        matrix = u.gram()
        matrix.diagonal().add_(added)
        lower, info = torch.linalg.cholesky_ex(matrix)
        if int(info):
            raise _not_positive(f"{side.upper()} of {name!r}", added)
        wide = (each.double() for each in u.blocks)
        found = (torch.linalg.solve_triangular(lower, each, upper=False) for each in wide)
        ws = [each.to(u.like.dtype) for each in found]
    return u.named(f"w_{side}", ws) | {f"s_{side}": scale} | u.number


def _by_softmax(name: str, own: Factors, damping: float) -> Inverse:
    """The inverse of diag(p) + d I - U'U; see [Note: the true head]."""
    u, diagonal = _columns_of(own, "g"), own["p_g"].double() + damping
    places = zip(u.starts, u.blocks, strict=True)
    of_blocks = [diagonal[low : low + each.shape[1]] for low, each in places]
    wide = ((part.double(), d) for part, d in zip(u.blocks, of_blocks, strict=True))
    products = ((part / d) @ part.T for part, d in wide)
    s = torch.eye(u.count, dtype=torch.float64, device=diagonal.device)
    s -= u.add(products, u.count, u.count, is_wide=True)
    lower, info = torch.linalg.cholesky_ex(s)
    if int(info) or not float(diagonal.min()) > 0:
        raise _not_positive(f"G of the head {name!r}", float(diagonal.min()))
    vs = []
    for part, d in zip(u.blocks, of_blocks, strict=True):
        v = torch.linalg.solve_triangular(lower, part.double() / d, upper=False)
        vs.append(v.to(part.dtype))
    ds = [d.reciprocal().to(u.like.dtype)[:, None] for d in of_blocks]
    return u.named("v_g", vs) | u.named("d_g", ds) | u.number


def _joint_by_columns(
    name: str, own: Factors, stats: Mapping[str, Sequence[float]], config: KFACConfig
) -> Inverse:
    """The inverse of A ⊗ G + λI; nothing was left out of the columns."""
    found: Inverse = {}
    values = {}
    for side in ("a", "g"):
        if side in own:
            values[side], vectors = _eigen(own[side].double(), side, name)
            values[side] = values[side].clamp(min=0.0)
            found[f"b_{side}"] = vectors * values[side].sqrt()
        else:
            u = _columns_of(own, side)
            values[side], vectors = u.eigen(u.gram())
            values[side] = values[side].clamp(min=0.0)
            found |= u.named(f"b_{side}", [each.double().T @ vectors for each in u.blocks])
            found |= u.number
    largest = math.prod(each[-1] for each in stats.values())
    damping = max(config.joint_damping, _least_damping(largest, config))
    if not damping > 0:
        raise _not_positive(f"G ⊗ A of {name!r}, of low rank,", 0.0)
    products = values["g"][:, None] * values["a"][None, :]
    found["c"] = (damping * (damping + products)).reciprocal()
    found["s"] = products.new_full((1, 1), 1 / damping)
    dtype = next(_columns_of(own, side).like.dtype for side in "ag" if f"u_{side}" in own)
    return {
        key: each.to(dtype) if each.is_floating_point() else each for key, each in found.items()
    }


# --- Cholesky -------------------------------------------------------------------------------------


Job = tuple[str, str, Tensor, float, int]
"""A layer and its side, the matrix to invert, what is added to its diagonal, and rows of padding
that the inverse may end with."""


def _by_cholesky(jobs: Sequence[Job], *, is_together: bool) -> list[Tensor]:
    """(matrix + damping I)⁻¹ of each, with more digits and then more damping where that fails.

    Those that were made together are views of one memory, with some rows and columns of padding.
    """
    if not jobs:
        return []
    groups: dict[object, list[int]] = {}
    matrices = [matrix for _, _, matrix, _, _ in jobs]
    sizes = joint_sizes([len(each) + padding_of(len(each), each) for each in matrices])
    for number, matrix in enumerate(matrices):
        goes_along = is_together and is_gpu(matrix) and len(matrix) > 0
        groups.setdefault(sizes[number] if goes_along else (number,), []).append(number)
    # The largest first: small ones fill what is idle at the end.
    places = sorted(groups.values(), key=lambda own: -len(matrices[own[0]]))

    def invert_group(own: list[int]) -> tuple[Sequence[Tensor], Tensor]:
        _, _, alike, dampings, paddings = zip(*(jobs[number] for number in own), strict=True)
        if len(own) == 1:
            inverse, is_right = _try(alike[0], dampings[0])
            return [inverse], is_right.reshape(1)
        return inverses_of_positive(alike, dampings, sizes[own[0]], paddings)

    with full_float32():
        works = [functools.partial(invert_group, own) for own in places]
        found = side_by_side(works, matrices[0].device)
        is_inverted = iter(torch.cat([is_right for _, is_right in found]).tolist())
        done = {}
        for own, (inverses, _) in zip(places, found, strict=True):
            for number, inverse in zip(own, inverses, strict=True):
                done[number] = inverse if next(is_inverted) else _with_more(*jobs[number])
    return [done[number] for number in range(len(jobs))]


def _try(
    factor: Tensor, damping: float, dtype: torch.dtype | None = None, jitter: float = 0.0
) -> tuple[Tensor, Tensor]:
    """An inverse, and whether it is one."""
    damped = factor.to(dtype or factor.dtype, copy=True)
    damped.diagonal().add_(damping + jitter)
    inverse, is_right = inverse_of_positive(damped)
    return inverse.to(factor.dtype), is_right


def _with_more(name: str, side: str, factor: Tensor, damping: float, _: int) -> Tensor:
    """The inverse of what was not inverted at once; the GPU is waited for at every try."""
    largest = float(factor.diagonal().max()) if len(factor) else 0.0
    jitters = [0.0]
    if damping > 0:  # else none was asked for, and jitter would be another curvature
        jitters += [largest * FIRST_JITTER * 10.0**i for i in range(MOST_JITTERS)]
    for jitter in jitters:
        for dtype in {factor.dtype: None, torch.float64: None}:
            inverse, is_right = _try(factor, damping, dtype, jitter)
            if bool(is_right):
                return inverse
    smallest = float(torch.linalg.eigvalsh(factor.double())[0])
    raise _not_positive(f"{side.upper()} of {name!r}", smallest)


def _not_positive(what: str, smallest: float) -> NotInvertible:
    return NotInvertible(
        f"{what} cannot be inverted: its smallest eigenvalue is {smallest:.3g}. Raise damping, set "
        "max_condition_number, or collect more tokens per update"
    )
