"""Woodbury's identity around a ring of ranks, for columns whose T x T matrix fits nowhere.

[Note: ring] Each rank r has some rows U_r of U [tokens, n], and all want to multiply with
P = (U'U + d I)⁻¹. Ranks come in turn. With P_q the inverse of d I and the rows of ranks 0 to q,

    Z_r = U_r P_(r-1),    I + U_r Z_r' = LL',    W_r = L⁻¹Z_r,    P_r = P_(r-1) - W_r'W_r

which is one block of a Cholesky factor after the other. All that is needed of the ranks before is
their W: Z_r begins as U_r / d, and loses (U_r W_q') W_q for each of them. At the end

    P Y = Y / d - Σ_r W_r'(W_r Y)

is a sum over ranks, so that each keeps its own W_r and one all-reduce applies all of them. No rank
ever holds more than its own T_r x T_r matrix. What reference note 003 wrote instead, each rank's
whole inverse applied to what the last one left, is the product of the ranks' inverses.

`KFAC` does not use it: T x T is small there (docs/kfac.md), and columns go to their owner.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from unison import check
from unison.shard.ranks import Ranks, gather_objects


def ring_factor(ranks: Ranks, rows: Tensor, damping: float) -> Tensor:  # [own, n] -> [own, n]
    """Return this rank's W of the inverse of U'U + d I; a collective.

    Args:
        ranks: Everyone.
        rows: This rank's rows of U [own, n], divided by the root of the number of all; any number
            of them, also none.
        damping: d, above 0.

    Raises:
        BadInput: If the damping is not above 0.
    """
    check.positive(damping=damping)
    wide = rows.double()
    z = wide / damping
    own = torch.empty_like(wide)
    for turn, count in enumerate(gather_objects(ranks, len(rows))):
        if turn == ranks.rank:
            matrix = wide @ z.T
            matrix.diagonal().add_(1.0)
            lower = torch.linalg.cholesky(matrix)
            own = torch.linalg.solve_triangular(lower, z, upper=False)
        if ranks.size == 1 or not count:
            continue
        sent = own.contiguous() if turn == ranks.rank else wide.new_empty(count, rows.shape[1])
        dist.broadcast(sent, group=ranks.group, group_src=turn)
        if ranks.rank > turn:
            z -= (wide @ sent.T) @ sent
    return own.to(rows.dtype)


def ring_apply(ranks: Ranks, factor: Tensor, y: Tensor, damping: float) -> Tensor:
    """Return (U'U + d I)⁻¹ Y of what `ring_factor` returned; a collective.

    Args:
        ranks: Everyone.
        factor: This rank's W [own, n].
        y: The same on every rank [n, any].
        damping: d, as it was.
    """
    return y / damping - ranks.sum_(factor.T @ (factor @ y))
