"""The gate: all outputs of a module, and the moment when their gradients come back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from unison.privacy.dealing import packed, unpacked

# A view made inside of a Function must not be changed in place, and users change logits in place.
_as_no_view = torch.ops.aten._unsafe_view.default

OnBackward = Callable[[tuple[Tensor, ...], tuple[Tensor | None, ...]], None]


class _Gate(torch.autograd.Function):
    """Hands all outputs on at once, so that all their gradients come back at once."""

    @staticmethod
    def forward(ctx: Any, on_backward: OnBackward, anchor: Tensor, *outputs: Tensor) -> tuple:
        ctx.on_backward = on_backward
        ctx.save_for_backward(*outputs)
        ctx.set_materialize_grads(False)
        return tuple(_as_no_view(output, output.shape) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:  # type: ignore[override]
        ctx.on_backward(ctx.saved_tensors, gradients)
        return None, None, *gradients


def gate(output: Any, on_backward: OnBackward) -> Any:
    """Return the same output, of which `on_backward` learns before the module's backward pass.

    Args:
        output: Whatever a module returns; tensors in it that take gradients pass the gate.
        on_backward: Called with the tensors before the gate and their gradients, once per backward
            pass. It may run a backward pass of its own over the former.
    """
    leaves, spec = tree_flatten(output)
    places = [place for place, leaf in enumerate(leaves) if passes_gate(leaf)]
    if not places:
        return output
    tensors = [unpacked(leaves[place]) for place in places]  # one per granule, or one
    flat = [tensor for each in tensors for tensor in each]
    # A model whose outputs take no gradients: the user's loop calls backward all the same.
    anchor = torch.zeros((), device=flat[0].device, requires_grad=True)
    passed = iter(_Gate.apply(on_backward, anchor, *flat))  # type: ignore[arg-type]
    for place, each in zip(places, tensors, strict=True):
        leaves[place] = packed(leaves[place], [next(passed) for _ in each])
    return tree_unflatten(leaves, spec)


def passes_gate(leaf: Any) -> bool:
    """Whether a part of an output can have a gradient."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
