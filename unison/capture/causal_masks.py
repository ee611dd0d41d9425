"""Causal masks of a traced graph: told to attention as such, where they are nothing else.

[Note: masks that are constants] When transformers is traced, it builds a mask of all pairs of
tokens, and none when it is not: then it says `is_causal`, for which kernels skip half of the pairs
and read no mask. Tracing cannot know that shapes stay as they are. A private graph does: it is made
for one shape. So masks that no input reaches are computed once, when a graph is compiled, and
attention whose mask comes out as the causal one is given `is_causal` in its place.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

_FIRST_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_RUN = ("call_function", "call_method", "get_attr")
_MOST_ELEMENTS = 1 << 28  # of a mask: it exists once while a graph is compiled


def tell_causal_masks(graph: GraphModule) -> None:
    """Replace constant causal masks of attention in Dynamo's graph, in place."""
    attending = [
        (node, found)
        for node in graph.graph.nodes
        if node.target is F.scaled_dot_product_attention and (found := _arguments(node)) is not None
    ]
    masks = _constants(graph, {found["attn_mask"] for _, found in attending})
    causal = {mask for mask, value in masks.items() if is_causal(value)}
    for node, found in attending:
        query, key, value, mask = (found.pop(name) for name in _FIRST_ARGUMENTS[:4])
        if mask in causal and _num_tokens(query) == _num_tokens(key):
            node.args = (query, key, value)
            node.kwargs = {**found, "is_causal": True}
    if causal:  # what the masks were made of is nothing to anybody
        graph.graph.eliminate_dead_code()
        graph.recompile()


def is_causal(mask: Tensor) -> bool:
    """Whether a mask [..., tokens, tokens] lets each token see itself and those before it."""
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] == 0:
        return False
    expected = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return bool((mask == expected).all())
    if not mask.is_floating_point():
        return False
    # What is added to scores: nothing, or so little that nothing is left after the exponential.
    least = torch.finfo(mask.dtype).min
    return bool(torch.where(expected, mask == 0, mask <= least).all())


def _arguments(node: Node) -> dict[str, Any] | None:
    """Attention's arguments by name; None if there is no mask to be replaced."""
    found = dict(zip(_FIRST_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    has_mask = isinstance(found.get("attn_mask"), Node) and not found.get("is_causal", False)
    return found if has_mask and len(node.args) <= len(_FIRST_ARGUMENTS) else None


def _num_tokens(node: Node) -> int:
    return node.meta["example_value"].shape[-2]


def _constants(graph: GraphModule, wanted: Iterable[Node]) -> dict[Node, Tensor]:
    """The values of those nodes that no input of the graph reaches."""
    needed: set[Node] = set()
    found = []
    for node in wanted:
        before = _ancestors(node)
        if before is not None and node.meta["example_value"].numel() <= _MOST_ELEMENTS:
            needed |= before
            found.append(node)
    if not found:
        return {}
    interpreter, depth, left = Interpreter(graph), 0, set(found)
    with torch.no_grad():
        for node in graph.graph.nodes:
            # vmap begins and ends by calls of which nothing else is made: all of them are run.
            bracket = _bracket(node)
            if node in needed or bracket:
                interpreter.env[node] = interpreter.run_node(node)
            depth += bracket
            left.discard(node)
            if not left and not depth:
                break
    values = {node: interpreter.env[node] for node in found}
    return {node: value for node, value in values.items() if isinstance(value, Tensor)}


def _ancestors(node: Node) -> set[Node] | None:
    """All that a node is made of, itself included; None if that is an input, or is drawn."""
    found: set[Node] = set()
    left = [node]
    while left:
        each = left.pop()
        if each in found:
            continue
        if each.op not in _RUN or _is_drawn(each):
            return None
        found.add(each)
        left += each.all_input_nodes
    return found


def _is_drawn(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return any(part in name for part in ("rand", "dropout", "bernoulli", "normal", "uniform"))


def _bracket(node: Node) -> int:
    """1 for a call that begins a vmap, -1 for one that ends it, 0 for any other."""
    name = getattr(node.target, "__name__", "")
    return {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}.get(name, 0)
