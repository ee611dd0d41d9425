"""Inverses of damped curvature, as what is needed to multiply with them.

| held | damped | applied to Y [d_out, d_in] |
|---|---|---|
| eigenvectors | G + d_G I and A + d_A I, or G ⊗ A + λI | Q_G ((Q_G' Y Q_A) ∘ S) Q_A' |
| inverses | G + d_G I and A + d_A I | G⁻¹ Y A⁻¹ |
| diagonal | D + λ | Y / (D + λ) |
| columns W of a side, G say | U'U + d I = (I - W'W)⁻¹ d | (Y - W'WY) / d |
| columns B of both | G ⊗ A + λI | Y / λ - B_G ((B_G' Y B_A) ∘ C) B_A' |

where S = 1 / (s_G + d_G)(s_A + d_A) or 1 / (s_G s_A + λ), entry by entry. With `forward` there is
no G: the identity stands in its place, and A alone is damped with λ.

[Note: Woodbury] With S = U U' + d I = LL', which has a row per token, and W = L⁻¹ U, the inverse of
U'U + d I is (I - W'W) / d. Damped jointly: with the eigenvectors U U' = V s V' and B = U'V, the
inverse of BB' ⊗ B_A B_A' + λI is 1 / λ less B ⊗ B_A scaled by C = 1 / λ(λ + s s_A); a side that is
a matrix has B = Q√s. S and all that is made of it is float64: an error of S would be divided by d.
Columns that are averaged over updates are kept orthogonal (`join`), and their S is diagonal.

[Note: what may fail] A factor that is not finite, or not positive definite after damping. The first
is an overflow in the model. The second is rounding: Cholesky tries again in float64, then with a
growing jitter; what is left raises with the layer, the smallest eigenvalue and what to do.

What is done otherwise on a GPU, and why:

* Sizes that are no multiple of 8 make products several times slower there: pad them.
* bfloat16 and float16 numbers have exact products in float32, which its matrix units add up in
  float32: as exact as products of wide copies, and ten times as fast.
* One factorisation leaves most of it idle: matrices go round several streams, or side by side.

Each matrix is inverted by itself and in the same way, whatever others a rank has: its bits do not
depend on who inverts it. On a GPU it is put together from products, which are faster than solves:

    M = LL',  L = [P 0; Q R],  X = L⁻¹ = [P⁻¹ 0; -R⁻¹ Q P⁻¹ R⁻¹],  M⁻¹ = X'X

with only the blocks of X that are not zero. All products are in full float32, also where torch may
round the factors of others (TF32): an error of 1e-3 of the largest eigenvalue of an inverse can be
more than all of its smallest one.

Where bits need not be those of several ranks, matrices of one size go side by side, block by block,
so that almost all is products of batches:

    M = [A B'; B C],  A = PP',  Q = BP'⁻¹,  C - QQ' = RR',  L = [P 0; Q R]

Only blocks of up to `BATCH_LEAF` rows are factorised and inverted as such, and Q is found with the
inverses of those alone: with the inverse of the whole P, rounding would grow with its condition.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.errors import Diverged
from unison.kfac.config import KFACConfig

FIRST_JITTER, MOST_JITTERS = 1e-10, 6  # of the largest diagonal entry; each 10 times the last
ALIGNED = 8  # elements that matrix units load at once
LEAF = 1024  # rows up to which a triangle is solved whole
BATCH_LEAF = 256  # rows up to which torch factorises a batch fast
NUM_STREAMS = 8

Factors = Mapping[str, Tensor]
"""A as `a` and G as `g`, or A alone where G is the identity; or a diagonal as `d`.

A side that is held as columns is `u_a` or `u_g` [columns, n], and `t_a` or `t_g` [] the multiple of
the identity that stands for columns which were left out.
"""

Inverse = dict[str, Tensor]
"""`a` (padded) and `g`, or eigenvectors `q_a` and `q_g` with `scale`, or the `scale` of a diagonal.

Of a side that is held as columns, `w_a` or `w_g` with 1 / d as `s_a` or `s_g` [1, 1]; where both
are damped jointly, `b_a`, `b_g`, `c`, and 1 / λ as `s`. Without any of G's the identity is meant.
"""

T = TypeVar("T")


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
    elif "b_a" in inverse:
        middle = (inverse["b_g"].mT @ y @ inverse["b_a"]) * inverse["c"]
        y = y * inverse["s"] - inverse["b_g"] @ middle @ inverse["b_a"].mT
    else:
        y = y * inverse["scale"]
    parts = list(y[..., : sum(columns)].split(list(columns), dim=-1))
    if "w_g" in inverse:
        w = inverse["w_g"]
        return [(part - w.mT @ (w @ part)) * inverse["s_g"] for part in parts]
    return [torch.matmul(inverse["g"], part) for part in parts] if "g" in inverse else parts


def align(matrix: Tensor) -> Tensor:
    """Pad with rows and columns of zeros where that is faster: the bias makes most sizes odd."""
    extra = padding_of(len(matrix), matrix)
    return F.pad(matrix, (0, extra, 0, extra)) if extra else matrix


def stack(inverses: Sequence[Inverse]) -> Inverse:
    """Make one inverse for as many gradients, of equal shapes; each is a view of it afterwards."""
    whole = {}
    for key, first in inverses[0].items():
        # One side after the other: only one is there twice.
        values = [each[key] for each in inverses]
        whole[key] = torch.stack(values) if len(values) > 1 else first.unsqueeze(0)
        for each, value in zip(inverses, whole[key], strict=True):
            each[key] = value
    return whole


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
    sides, factors, dampings = [], [], []  # of those that Cholesky inverts
    stats = _stats_of(curvatures, config)
    for name, own in curvatures.items():
        _refuse_not_finite(name, stats[name])
        if "d" in own:
            found[name] = _of_diagonal(name, own["d"], stats[name]["d"], config)
            continue
        damping = _dampings({side: mean for side, (_, mean, *_) in stats[name].items()}, config)
        has_columns = any(key.startswith("u_") for key in own)
        if has_columns and config.damping_form == "joint" and len(stats[name]) == 2:
            found[name] = _joint_by_columns(name, own, stats[name], config)
            continue
        if (config.inverse == "eigen" or config.damping_form == "joint") and not has_columns:
            found[name] = _by_eigen(name, own, damping, config)
            continue
        for side, (*_, largest) in stats[name].items():
            added = max(damping[side], _least_damping(largest, config))
            if side in own:
                sides.append((name, side))
                factors.append(own[side])
                dampings.append(added)
            else:
                is_orthogonal = config.has_rank
                found[name] |= _by_columns(name, side, own, added, is_orthogonal=is_orthogonal)
    inverses = _by_cholesky(sides, factors, dampings, is_together=is_together)
    for (name, side), inverse in zip(sides, inverses, strict=True):
        found[name][side] = align(inverse) if side == "a" else inverse
    return found


def _stats_of(
    curvatures: Mapping[str, Factors], config: KFACConfig
) -> dict[str, dict[str, list[float]]]:
    """What must be known of factors, by layer and side; a GPU is waited for once.

    Returns:
        The size of the largest element, finite only if all are; the mean of the diagonal, or of a
        diagonal's elements; the smallest element of a diagonal, 0 for a matrix; the largest one of
        a diagonal, an upper bound of a matrix's eigenvalues, or 0 where no condition number is
        bounded.
    """
    all_sides = [
        (side, each)
        for own in curvatures.values()
        for side, each in own.items()
        if not side.startswith("t_")
    ]
    if not all_sides:
        return {name: {} for name in curvatures}
    zero = all_sides[0][1].new_zeros(())
    is_bounded = config.max_condition_number is not None
    rows = []
    for (side, factor), size in zip(
        all_sides, largest_elements([factor for _, factor in all_sides]), strict=True
    ):
        smallest = largest = zero
        if side.startswith("u_"):
            mean = factor.square().sum() / factor.shape[1]
            if factor.numel() and is_bounded:
                largest = (factor @ factor.T).abs().sum(dim=1).max()
            rows.append(torch.stack([size, mean, smallest, largest]))
            continue
        diagonal = factor if side == "d" else factor.diagonal()
        if factor.numel() and side == "d":
            smallest, largest = factor.min(), factor.max()
        elif factor.numel() and is_bounded:
            largest = factor.abs().sum(dim=1).max()
        rows.append(torch.stack([size, diagonal.mean(), smallest, largest]))
    known = iter(torch.stack(rows).tolist())
    found: dict[str, dict[str, list[float]]] = {}
    for name, own in curvatures.items():
        stats = {side: next(known) for side in own if not side.startswith("t_")}
        for side in [side for side in stats if side.startswith("u_")]:
            size, mean, smallest, largest = stats.pop(side)
            tail = float(own[f"t_{side[2:]}"])  # of the host
            stats[side[2:]] = [size, mean + tail, smallest, largest + tail]
        found[name] = dict(sorted(stats.items()))
    return found


def _refuse_not_finite(name: str, stats: Mapping[str, Sequence[float]]) -> None:
    for side, (size, *_) in stats.items():
        if math.isfinite(size):
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


def _of_diagonal(
    name: str, diagonal: Tensor, stats: Sequence[float], config: KFACConfig
) -> Inverse:
    damped = diagonal + config.joint_damping
    smallest, largest = (value + config.joint_damping for value in stats[2:])
    if config.max_condition_number is not None:
        least = largest / config.max_condition_number
        damped, smallest = damped.clamp(min=least), max(smallest, least)
    if not smallest > 0:
        raise NotInvertible(_not_positive(f"the diagonal of {name!r}", smallest))
    return {"scale": damped.reciprocal()}


# --- damping --------------------------------------------------------------------------------------


def _dampings(means: Mapping[str, float], config: KFACConfig) -> dict[str, float]:
    """What is added to the diagonal of each side, from the means of their diagonals."""
    if "g" not in means:
        return {"a": config.joint_damping, "g": 0.0}
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
                raise NotInvertible(_not_positive(f"{side.upper()} of {name!r}", smallest))
    if "g" not in factors:
        return {"q_a": vectors["a"], "scale": values["a"].reciprocal()[None, :]}
    products = values["g"][:, None] * values["a"][None, :]
    if is_joint:
        joint = max(config.joint_damping, _least_damping(float(products.max()), config))
        products = products + joint
        if not float(products.min()) > 0:
            raise NotInvertible(_not_positive(f"G ⊗ A of {name!r}", float(products.min())))
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


def fold(rows: Tensor) -> Tensor:
    """At most n rows V with V'V the same as of U [rows, n], exactly."""
    return torch.linalg.qr(rows, mode="r").R if len(rows) > rows.shape[1] else rows


def join(before: Tensor | None, rows: Tensor, max_rank: int) -> tuple[Tensor, float]:
    """At most `max_rank` rows V for the sum of products U'U of two sets of rows, orthogonal.

    The largest eigenvalues are kept, and the mean of the others over the directions that are left,
    t, stands for these: V'V + t I has the kept ones as they were, and the same trace.

    Args:
        before: What this returned the last time [rows, n]; None at first.
        rows: Further rows [rows, n].
        max_rank: Most rows to return.

    Returns:
        V, and t; 0.0 if nothing was left out.
    """
    rows = fold(rows)
    old = rows[:0] if before is None else before
    joined, k = torch.cat([old, rows]), len(old)
    gram = rows.new_zeros(len(joined), len(joined), dtype=torch.float64)
    gram[k:] = rows @ joined.T  # the old ones are orthogonal: a third of the products is known
    gram[:k, k:] = gram[k:, :k].T
    gram.diagonal()[:k] = old.square().sum(dim=1)
    values, vectors = torch.linalg.eigh(gram)  # ascending
    values = values.clamp(min=0.0)
    n = rows.shape[1]
    num_kept = min(max_rank, len(joined), n)
    left_out, kept = values.split([len(joined) - num_kept, num_kept])
    tail = float(left_out.sum()) / (n - num_kept) if len(joined) > num_kept < n else 0.0
    # A kept eigenvalue is not below the mean of the others, but for rounding.
    scale = ((kept - tail).clamp(min=0.0) / kept.clamp(min=1e-300)).sqrt()
    turned = (scale * vectors[:, len(joined) - num_kept :]).to(rows.dtype)
    return turned.T @ joined, tail


def _by_columns(
    name: str, side: str, own: Factors, damping: float, *, is_orthogonal: bool
) -> Inverse:
    """The inverse of U'U + d I; rows that are orthogonal need no S."""
    u, added = own[f"u_{side}"], damping + float(own[f"t_{side}"])
    if not added > 0:
        raise NotInvertible(_not_positive(f"{side.upper()} of {name!r}, of low rank,", 0.0))
    scale = u.new_full((1, 1), 1 / added)
    if is_orthogonal:
        lengths = u.double().square().sum(dim=1, keepdim=True)
        return {f"w_{side}": u * (lengths + added).rsqrt().to(u.dtype), f"s_{side}": scale}
    wide = u.double()
    matrix = wide @ wide.T
    matrix.diagonal().add_(added)
    lower, info = torch.linalg.cholesky_ex(matrix)
    if int(info):
        raise NotInvertible(_not_positive(f"{side.upper()} of {name!r}", added))
    w = torch.linalg.solve_triangular(lower, wide, upper=False).to(u.dtype)
    return {f"w_{side}": w, f"s_{side}": scale}


def _joint_by_columns(
    name: str, own: Factors, stats: Mapping[str, Sequence[float]], config: KFACConfig
) -> Inverse:
    """The inverse of A ⊗ G + λI; nothing was left out of the columns."""
    found, values = {}, {}
    for side in ("a", "g"):
        if side in own:
            values[side], vectors = _eigen(own[side].double(), side, name)
            values[side] = values[side].clamp(min=0.0)
            found[f"b_{side}"] = vectors * values[side].sqrt()
        else:
            u = own[f"u_{side}"].double()
            values[side], vectors = torch.linalg.eigh(u @ u.T)
            values[side] = values[side].clamp(min=0.0)
            found[f"b_{side}"] = u.T @ vectors
    largest = math.prod(each[-1] for each in stats.values())
    damping = max(config.joint_damping, _least_damping(largest, config))
    if not damping > 0:
        raise NotInvertible(_not_positive(f"G ⊗ A of {name!r}, of low rank,", 0.0))
    products = values["g"][:, None] * values["a"][None, :]
    found["c"] = (damping * (damping + products)).reciprocal()
    like = next(iter(own.values()))
    found["s"] = products.new_full((1, 1), 1 / damping)
    return {key: each.to(like.dtype) for key, each in found.items()}


# --- Cholesky -------------------------------------------------------------------------------------


def _by_cholesky(
    sides: Sequence[tuple[str, str]],
    factors: Sequence[Tensor],
    dampings: Sequence[float],
    *,
    is_together: bool,
) -> list[Tensor]:
    """(factor + damping I)⁻¹ of each, with more digits and then more damping where that fails."""
    if not factors:
        return []
    groups: dict[object, list[int]] = {}
    for number, factor in enumerate(factors):
        goes_along = is_together and is_gpu(factor) and len(factor) > 0
        groups.setdefault(len(factor) if goes_along else (number,), []).append(number)
    # The largest first: small ones fill what is idle at the end.
    places = sorted(groups.values(), key=lambda own: -len(factors[own[0]]))

    def invert_group(own: list[int]) -> tuple[Sequence[Tensor], Tensor]:
        if len(own) == 1:
            inverse, is_right = _try(factors[own[0]], dampings[own[0]])
            return [inverse], is_right.reshape(1)
        matrices = [factors[number] for number in own]
        inverses, is_right = inverses_of_positive(matrices, [dampings[number] for number in own])
        # Copies, since layers keep them: one of them must not keep all the others.
        return [each.clone() for each in inverses], is_right

    with full_float32():
        jobs = [functools.partial(invert_group, own) for own in places]
        found = side_by_side(jobs, factors[0].device)
        is_inverted = iter(torch.cat([is_right for _, is_right in found]).tolist())
        done = {}
        for own, (inverses, _) in zip(places, found, strict=True):
            for number, inverse in zip(own, inverses, strict=True):
                if not next(is_inverted):
                    inverse = _with_more(factors[number], dampings[number], *sides[number])
                done[number] = inverse
    return [done[number] for number in range(len(factors))]


def _try(
    factor: Tensor, damping: float, dtype: torch.dtype | None = None, jitter: float = 0.0
) -> tuple[Tensor, Tensor]:
    """An inverse, and whether it is one."""
    damped = factor.to(dtype or factor.dtype, copy=True)
    damped.diagonal().add_(damping + jitter)
    inverse, is_right = inverse_of_positive(damped)
    return inverse.to(factor.dtype), is_right


def _with_more(factor: Tensor, damping: float, name: str, side: str) -> Tensor:
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
    raise NotInvertible(_not_positive(f"{side.upper()} of {name!r}", smallest))


def _not_positive(what: str, smallest: float) -> str:
    return (
        f"{what} cannot be inverted: its smallest eigenvalue is {smallest:.3g}. Raise damping, set "
        "max_condition_number, or collect more tokens per update"
    )


# --- on a GPU -------------------------------------------------------------------------------------


def is_gpu(value: Tensor) -> bool:
    """Whether a tensor is on a GPU."""
    return value.is_cuda


def padding_of(size: int, like: Tensor) -> int:
    """Rows or columns of zeros with which products of this size are fast; none on a CPU."""
    return -size % ALIGNED if is_gpu(like) else 0


def is_half(value: Tensor) -> bool:
    """Whether `wide_product` takes a tensor as it is."""
    return is_gpu(value) and value.dtype in (torch.bfloat16, torch.float16)


def wide_product(left: Tensor, right: Tensor) -> Tensor:  # [..., n, k], [..., k, m] -> [..., n, m]
    """The float32 product of matrices of halves, or of batches of them."""
    if not left.is_cuda:
        return left.float() @ right.float()
    product = torch.mm if left.ndim == 2 else torch.bmm
    return product(left, right, out_dtype=torch.float32)


def side_by_side(jobs: Sequence[Callable[[], T]], where: torch.device) -> list[T]:
    """Do independent jobs, on a GPU in several streams; what they made can be used afterwards.

    Both ends wait for each other, so that memory of one end that the other has used is free when it
    is used again.
    """
    if where.type != "cuda":
        return [job() for job in jobs]
    main = torch.cuda.current_stream(where)
    streams = _streams(where)[: max(1, len(jobs))]
    for stream in streams:
        stream.wait_stream(main)
    found = []
    for number, job in enumerate(jobs):
        with torch.cuda.stream(streams[number % len(streams)]):
            found.append(job())
    for stream in streams:
        main.wait_stream(stream)
    return found


@functools.cache
def _streams(where: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """The same ones every time: each keeps memory of its own."""
    return tuple(torch.cuda.Stream(where) for _ in range(NUM_STREAMS))


@contextmanager
def full_float32() -> Iterator[None]:
    """No TF32 inside, whoever allowed it."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if before != "tf32":
        yield
        return
    try:
        matmul.fp32_precision = "ieee"
        yield
    finally:
        matmul.fp32_precision = before


# --- one matrix -----------------------------------------------------------------------------------


def inverse_of_positive(matrix: Tensor) -> tuple[Tensor, Tensor]:  # [n, n] -> [n, n], []
    """The inverse, and whether there is one, without waiting for the answer.

    Args:
        matrix: Symmetric; not needed afterwards.
    """
    lower, info = torch.linalg.cholesky_ex(matrix)
    if is_gpu(matrix):
        inverse = gram_of_lower(invert_lower_(lower))
    elif int(info) == 0:
        inverse = torch.cholesky_inverse(lower)
    else:
        return matrix, torch.tensor(data=False)
    return inverse, (info == 0) & torch.isfinite(largest_elements([inverse])[0])


def largest_elements(values: Sequence[Tensor]) -> list[Tensor]:  # -> [] each
    """Of each tensor, the size of its largest element; finite only if all are; 0 for none.

    One pass over all of them: `isfinite(...).all()` is five, for each by itself.
    """
    some = [value if value.numel() else value.new_zeros(1) for value in values]
    return list(torch._foreach_norm(some, torch.inf))


def all_finite(values: Iterable[Tensor]) -> bool:
    """Whether all elements of some tensors are, and their squares; a GPU is waited for."""
    return all(math.isfinite(float(each.square())) for each in largest_elements(list(values)))


def invert_lower_(lower: Tensor) -> Tensor:  # [n, n]
    """The inverse of a lower triangle, in its place; what is above the diagonal is zero."""
    n = len(lower)
    if n <= LEAF:
        return lower.copy_(_inverse_of_lower(lower))
    k = _half(n)
    invert_lower_(lower[:k, :k])
    invert_lower_(lower[k:, k:])
    _join_(lower, k)
    return lower


def _inverse_of_lower(lower: Tensor) -> Tensor:  # [..., n, n] -> [..., n, n]
    """The inverse of a small lower triangle."""
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower, eye, upper=False)


def _join_(lower: Tensor, k: int) -> None:  # [..., n, n]
    """From [P⁻¹ 0; Q R⁻¹] to the inverse of [P 0; Q R], where P has k rows."""
    first, last, between = lower[..., :k, :k], lower[..., k:, k:], lower[..., k:, :k]
    _multiply_into(between, last, between @ first, alpha=-1)


def gram_of_lower(
    x: Tensor, leaf: int | None = None, out: Tensor | None = None
) -> Tensor:  # [..., n, n] -> [..., n, n]
    """X'X of a lower triangle, in `out` or new memory; up to `leaf` rows at once."""
    n = x.shape[-1]
    found = torch.empty_like(x) if out is None else out
    if n <= (leaf or LEAF):
        return _multiply_into(found, x.mT, x)
    k = _half(n)
    first, last, between = x[..., :k, :k], x[..., k:, k:], x[..., k:, :k]
    gram_of_lower(first, leaf, found[..., :k, :k])
    _multiply_into(found[..., :k, :k], between.mT, between, beta=1)
    _multiply_into(found[..., k:, :k], last.mT, between)
    found[..., :k, k:] = found[..., k:, :k].mT
    gram_of_lower(last, leaf, found[..., k:, k:])
    return found


def _multiply_into(
    out: Tensor, left: Tensor, right: Tensor, alpha: float = 1, beta: float = 0
) -> Tensor:
    """Put alpha left·right + beta out in the place of `out`, a block of one matrix or of many.

    `out[...] = left @ right` would make the product elsewhere and copy it.
    """
    add = out.addmm_ if out.ndim == 2 else out.baddbmm_
    return add(left, right, alpha=alpha, beta=beta)


def _half(n: int) -> int:
    """About half of n, such that blocks begin where a GPU likes to load."""
    return n // 2 // 64 * 64


# --- many matrices of one size --------------------------------------------------------------------

Leaves = dict[int, tuple[Tensor, Tensor]]
"""By the first row of a block on the diagonal: the inverses of its factors, and which failed."""


def inverses_of_positive(matrices: list[Tensor], dampings: list[float]) -> tuple[Tensor, Tensor]:
    """(matrix + damping I)⁻¹ of each, and whether there is one, without waiting for the answer.

    Args:
        matrices: Symmetric, of one size n.
        dampings: Of each matrix.

    Returns:
        The inverses [batch, n, n]; whether each is right [batch].
    """
    n = len(matrices[0])
    size = n + padding_of(n, matrices[0])
    whole = matrices[0].new_zeros(len(matrices), size, size)
    for place, matrix, damping in zip(whole, matrices, dampings, strict=True):
        place[:n, :n].copy_(matrix)
        place.diagonal()[:n].add_(damping)
    whole.diagonal(dim1=1, dim2=2)[:, n:].fill_(1.0)
    leaves: Leaves = {}
    _factorise_(whole, 0, size, leaves)
    whole.tril_()
    _invert_factors_(whole, 0, size, leaves)
    found = gram_of_lower(whole, BATCH_LEAF)[:, :n, :n]
    is_right = torch.stack([info for _, info in leaves.values()]).eq(0).all(dim=0)
    largest = torch.linalg.vector_norm(found, torch.inf, dim=(1, 2))
    return found, is_right & torch.isfinite(largest)


def _factorise_(whole: Tensor, low: int, high: int, leaves: Leaves) -> None:
    """Put the factors of the rows and columns [low, high) of [batch, n, n] in their place."""
    block = whole[:, low:high, low:high]
    if high - low <= BATCH_LEAF:
        lower, info = torch.linalg.cholesky_ex(block)
        leaves[low] = _inverse_of_lower(lower), info
        block.copy_(lower)
        return
    middle = low + _half(high - low)
    between = whole[:, middle:high, low:middle]
    _factorise_(whole, low, middle, leaves)
    _divide_(between, whole, low, middle, leaves)
    whole[:, middle:high, middle:high].baddbmm_(between, between.mT, alpha=-1)
    _factorise_(whole, middle, high, leaves)


def _divide_(rows: Tensor, whole: Tensor, low: int, high: int, leaves: Leaves) -> None:
    """Multiply rows [batch, any, high - low] with the inverse of the factors there, transposed."""
    if high - low <= BATCH_LEAF:
        rows.copy_(rows @ leaves[low][0].mT)
        return
    middle = low + _half(high - low)
    first, last = rows[:, :, : middle - low], rows[:, :, middle - low :]
    _divide_(first, whole, low, middle, leaves)
    last.baddbmm_(first, whole[:, middle:high, low:middle].mT, alpha=-1)
    _divide_(last, whole, middle, high, leaves)


def _invert_factors_(whole: Tensor, low: int, high: int, leaves: Leaves) -> None:
    """Put the inverse of the factors' rows and columns [low, high) in their place."""
    if high - low <= BATCH_LEAF:
        whole[:, low:high, low:high].copy_(leaves[low][0])
        return
    middle = low + _half(high - low)
    _invert_factors_(whole, low, middle, leaves)
    _invert_factors_(whole, middle, high, leaves)
    _join_(whole[:, low:high, low:high], middle - low)
