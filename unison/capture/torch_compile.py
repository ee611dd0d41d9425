"""torch.compile around a capture: modules that the user has compiled, and graphs of private passes.

What the user has compiled runs as it was written where a capture looks on, and is given back.

[Note: masks that are constants] When transformers is traced, it builds a mask of all pairs of
tokens, and none when it is not: then it says `is_causal`, for which kernels skip half of the pairs
and read no mask. Tracing cannot know that shapes stay as they are. A private graph does: it is made
for one shape. So masks that no input reaches are computed once, when a graph is compiled, and
attention whose mask comes out as the causal one is given `is_causal` in its place.

Many models of transformers may drop a layer: `if torch.rand([]) < self.layerdrop`. A compiler stops
there, since a value decides what comes next. Where `layerdrop` is 0, as it mostly is, it does not:
no number in [0, 1) is smaller. So a model that cannot be traced is traced once more, while
`torch.rand([])` is a number of which no more is known than that it lies in [0, 1); and it is that
while the graph runs, whose guards ask for what was there when it was traced. Where the number
decides something it is drawn, and the model is compiled in parts.
"""

import operator
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from unison.capture.expression import is_in_place, with_result
from unison.ops.elementwise import with_item
from unison.shard.unit import UNIT_ATTRIBUTE, unit_of
from unison.torch_internals import COMPILED_CALL, ORIGINAL, DynamoBackend, backend_in

# --- modules that the user has compiled -----------------------------------------------------------


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of what `torch.compile(module)` returned; other modules are themselves.

    So is what was sharded after it was compiled: it holds the unit.
    """
    if type(module).__name__ != "OptimizedModule":  # importing it takes a second
        return module
    if unit_of(module) is not None:
        return module
    return module._modules["_orig_mod"]  # type: ignore[return-value]


def uncompile(module: nn.Module, undo: ExitStack) -> DynamoBackend | None:
    """Let a module and its parts run as they were written, whatever has been compiled of them.

    Args:
        module: The user's module.
        undo: Gives it back as it was, when it is closed.

    Returns:
        The user's backend; None if nothing was compiled.
    """
    found: list[DynamoBackend] = []
    for child in module.modules():
        own = vars(child)
        if own.keys().isdisjoint((UNIT_ATTRIBUTE, COMPILED_CALL, "forward")):
            continue  # as most: neither sharded nor compiled
        unit, called = unit_of(child), own.pop(COMPILED_CALL, None)
        if called is not None:
            undo.callback(setattr, child, COMPILED_CALL, called)
            found.append(backend_in(called if unit is None else unit.compiled or called))
        forward: Any = own.get("forward") if unit is None else unit.forward
        written = getattr(forward, ORIGINAL, forward)
        if written is not forward:
            found.append(backend_in(forward))
        where, name = (child, "forward") if unit is None else (unit, "inner")
        if unit is not None or written is not forward:
            undo.callback(setattr, where, name, getattr(where, name))
            setattr(where, name, written)
    return found[0] if found else None


# --- what is written to a new tensor of a traced graph --------------------------------------------

_MAKES = {torch.zeros, torch.ones, torch.empty, torch.full, torch.eye, torch.clone}
_MAKES |= {torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.tensor}
_MAKES |= {"new_zeros", "new_ones", "new_empty", "new_full", "clone", "repeat"}


def without_writes(graph: GraphModule) -> None:
    """Replace what writes to a new tensor in Dynamo's graph, where no views were made of it.

    A traced tensor cannot become one that is made of parameters alone, as others do
    (`Capture.become`); what comes out of a function can be one.
    """
    places = {node: place for place, node in enumerate(graph.graph.nodes)}
    written: set[Node] = set()
    for node in list(filter(_is_write, places)):
        new = node.args[0]
        is_new = isinstance(new, Node) and (new in written or new.target in _MAKES)
        if not is_new or any(places[each] < places[node] for each in new.users):
            continue
        function: Any = with_item
        if node.op == "call_method":
            function = with_result(getattr(Tensor, str(node.target)))
        with graph.graph.inserting_before(node):
            after = graph.graph.call_function(function, node.args, node.kwargs)
        after.meta, places[after] = dict(new.meta), places[node]
        node.replace_all_uses_with(after)
        new.replace_all_uses_with(after, delete_user_cb=lambda user, own=after: user is not own)
        graph.graph.erase_node(node)
        written.add(after)
    if written:
        graph.recompile()


def _is_write(node: Node) -> bool:
    if node.op == "call_method":
        return is_in_place(getattr(Tensor, str(node.target), Tensor.size))
    return node.target is operator.setitem


# --- causal masks of a traced graph ---------------------------------------------------------------

_FIRST_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_RUN = ("call_function", "call_method", "get_attr")
_BRACKETS = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}
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
        num_queries, num_keys = (each.meta["example_value"].shape[-2] for each in (query, key))
        if mask in causal and num_queries == num_keys:
            node.args = (query, key, value)
            node.kwargs = {**found, "is_causal": True}
    if not causal:
        return
    # What the masks were made of is nothing to anybody. Other nodes without users may write.
    made_of = set[Node]().union(*(_ancestors(mask) or () for mask in causal))
    for node in reversed(graph.graph.nodes):
        if node in made_of and not node.users:
            graph.graph.erase_node(node)
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
            bracket = _BRACKETS.get(getattr(node.target, "__name__", ""), 0)
            if node in needed or bracket:
                interpreter.env[node] = interpreter.run_node(node)
            depth += bracket
            left.discard(node)
            if not left and not depth:
                break
    values = {node: interpreter.env[node] for node in found}
    return {node: value for node, value in values.items() if isinstance(value, Tensor)}


def _ancestors(node: Node) -> set[Node] | None:
    """All that a node is made of, itself included; None if that is an input, drawn, or written to.

    [Note: written to] What is written to a tensor or a view of it may stand in nodes that it is not
    made of: `mask[:, :3] = 0`. Tensors count what was written to them while the graph was traced;
    what returns no tensor may write too.
    """
    found: set[Node] = set()
    left = [node]
    while left:
        each = left.pop()
        if each in found:
            continue
        if each.op not in _RUN or _is_drawn(each) or getattr(_value(each), "_version", 0):
            return None
        found.add(each)
        left += each.all_input_nodes
    used = set[Node]().union(*(each.users for each in found)) - found
    is_written = any(not isinstance(_value(each), Tensor) for each in used if each.op != "output")
    return None if is_written else found


def _value(node: Node) -> Any:
    """What a node came to while the graph was traced."""
    return node.meta.get("example_value")


def _is_drawn(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return any(part in name for part in ("rand", "dropout", "bernoulli", "normal", "uniform"))


# --- numbers drawn to decide what to run ----------------------------------------------------------

_rand = torch.rand


class UnitDraw:
    """A number in [0, 1) that is drawn where it matters."""

    def __lt__(self, other: Any) -> bool | Tensor:
        if isinstance(other, int | float):
            if other <= 0:
                return False
            if other >= 1:
                return True
        return _rand([]) < other


def _rand_or_unit(*size: Any, **options: Any) -> Any:
    is_number = len(size) == 1 and isinstance(size[0], list | tuple) and len(size[0]) == 0
    return UnitDraw() if is_number and not options else _rand(*size, **options)


@contextmanager
def unit_draws_known() -> Iterator[None]:
    """Let `torch.rand([])` be a `UnitDraw` in this block."""
    torch.rand = _rand_or_unit
    try:
        yield
    finally:
        torch.rand = _rand
