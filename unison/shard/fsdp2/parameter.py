"""One parameter under FSDP2, seen granule by granule."""

from typing import Any

import torch
from torch import Tensor, nn

from unison.errors import UnsupportedOperation
from unison.shard.flat_group import Use
from unison.shard.tree import SubtreeSum, TreeSum


class OrderedParameter:
    """A parameter with one leaf per granule, and the subtree of the leaves' gradients.

    The leaves share the memory of FSDP2's own full parameter, so they are filled and emptied when
    that is. A gradient reaches them and never the full parameter itself.

    Args:
        fsdp: FSDP2's record of the parameter, an `FSDPParam`.
        name: Its name in the model.
    """

    def __init__(self, fsdp: Any, name: str) -> None:
        self.fsdp, self.name = fsdp, name
        info = fsdp._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        self.uses = [Use(info.module, info.param_name), *(Use(*place) for place in shared)]
        self._leaves: dict[int, Tensor] = {}
        self._mine = (0, 0)
        self._tree = SubtreeSum(0, 0)
        self._granules: set[int] = set()  # those whose gradients have come
        self._had_gradient = False  # before the last sum over ranks
        self.was_used = False  # by this rank, in what it sent to the last sum over ranks

    @property
    def full(self) -> Tensor:
        """FSDP2's own full parameter, which has memory during a pass."""
        return self.fsdp.unsharded_param

    @property
    def is_trainable(self) -> bool:
        """Whether gradients are wanted."""
        return self.fsdp.sharded_param.requires_grad

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for the sum over ranks."""
        return bool(self._granules)

    # --- leaves ----------------------------------------------------------------------------------

    def leaf(self, granule: int) -> Tensor:
        """What a granule computes with; the same tensor until `begin_pass`."""
        if granule not in self._leaves:
            self._leaves[granule] = self._make_leaf(granule)
        return self._leaves[granule]

    def _make_leaf(self, granule: int) -> Tensor:
        view = self.full.detach()
        if not self.is_trainable:
            return view
        leaf = nn.Parameter(view)
        leaf.register_post_accumulate_grad_hook(lambda leaf: self._take_gradient(granule, leaf))
        return leaf

    # --- gradients -------------------------------------------------------------------------------

    def begin_batch(self, low: int, high: int) -> None:
        """Be ready for a logical batch of which this rank has the granules [low, high)."""
        self._mine = low, high
        self._tree, self._granules = SubtreeSum(low, high), set()

    def begin_pass(self) -> None:
        """Be ready for other granules of the batch."""
        self._leaves.clear()

    def _take_gradient(self, granule: int, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is None or not self._mine[0] <= granule < self._mine[1]:
            return
        self._granules.add(granule)
        # In the dtype of the exchange from the first addition on: what a rank has summed before it
        # must not be rounded differently from what others send.
        self._tree.put(granule, gradient.to(self.fsdp.reduce_dtype or gradient.dtype))

    def check_no_other_gradient(self) -> None:
        """Refuse a gradient that came past the leaves.

        Raises:
            UnsupportedOperation: Naming the parameter.
        """
        full = getattr(self.fsdp, "_unsharded_param", None)  # None before the first pass
        if full is not None and full.grad is not None:
            full.grad = None
            raise UnsupportedOperation(
                f"{self.name!r} got a gradient that belongs to no granule: it was used under "
                "reentrant checkpointing (pass use_reentrant=False to torch.utils.checkpoint), "
                "through a method that register_fsdp_forward_method made, or outside of forward"
            )

    def hand_over(self) -> None:
        """Give FSDP2 this rank's subtree as the gradient to sum over ranks.

        A granule that did not use the parameter counts as zeros, and so does a rank: adding nothing
        instead would keep a -0.0 that adding 0.0 elsewhere does not.
        """
        self.was_used = self.has_gradients
        self._had_gradient = self.fsdp.sharded_param.grad is not None
        if not self.was_used:
            self.fsdp.unsharded_accumulated_grad = self._zeros()
            return
        for granule in set(range(*self._mine)) - self._granules:
            self._tree.put(granule, self._zeros())
        total = TreeSum()
        for level, node in self._tree.take():
            total.push(node, level)
        self.fsdp.unsharded_accumulated_grad = total.finish()
        self._granules = set()

    def _zeros(self) -> Tensor:
        return torch.zeros_like(self.full, dtype=self.fsdp.reduce_dtype or self.full.dtype)

    def forget_unused(self) -> None:
        """Have no gradient, where the one that FSDP2 made is the zeros of ranks that had none."""
        if not self._had_gradient:
            self.fsdp.sharded_param.grad = None
