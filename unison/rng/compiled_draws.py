"""Draws of compiled code: the dropout of a graph, with the numbers of the samples it is given.

[Note: draws in graphs] Compiled code asks no function mode. So a graph of Dynamo's is changed
before a backend sees it: each dropout in it becomes an operation of ours, which is given the stream
of its draw. A graph serves many passes, granules and blocks. So the number that its draws are
counted from, and which samples there are, are inputs of it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import TracingContext
from torch.fx import Graph, GraphModule, Node

from unison.errors import UnsupportedOperation
from unison.rng.draw_mode import DRAWING, DROPOUTS, count_draws, draws_now, draws_of_granule
from unison.rng.draws import SHARED, attend_whole, drop_rows, dropout_arguments, samples_dim
from unison.torch_internals import DynamoBackend


def compile_drawing(
    inner: DynamoBackend, graph: GraphModule, inputs: list[Any]
) -> Callable[..., Any]:
    """Compile a graph so that it draws for the samples of the running granule.

    Args:
        inner: The backend that compiles it; `partial(compile_drawing, inner)` is one too.
        graph: The graph.
        inputs: Examples of its inputs.

    Raises:
        UnsupportedOperation: If it draws in a way that cannot be given to samples.
    """
    running = draws_of_granule()
    nodes = _drawing_nodes(graph)
    if running is None or not nodes:
        return inner(graph, inputs)
    graph, counts = _rewritten(graph, nodes, len(running.ids))
    fake = TracingContext.get().fake_mode
    assert fake is not None
    examples = [fake.from_tensor(each, static_shapes=True) for each in _streams()]
    compiled = inner(graph, [*inputs, *examples])

    def call(*args: Any) -> Any:
        streams = _streams()
        count_draws(*counts)
        return compiled(*args, *streams)

    return call


def _streams() -> list[Tensor]:
    """Return the streams and sample ids of a graph's draws, as far as its granule has come."""
    draws = draws_of_granule()
    if draws is None:
        raise UnsupportedOperation(
            "compiled code that draws numbers of samples was called where there are none"
        )
    words = [draws.words(draws.counts[kind], is_shared=kind) for kind in (False, True)]
    return [*map(torch.tensor, words), draws.ids]


def _drawing_nodes(graph: GraphModule) -> list[Node]:
    """Return the nodes of a graph that draw.

    Raises:
        UnsupportedOperation: If one lies in a graph below, such as that of a checkpoint.
    """
    found = []
    for each in graph.modules():
        for node in each.graph.nodes if isinstance(each, GraphModule) else ():
            if _draws(node):
                if each is not graph:
                    raise _refused(node, "inside of a checkpoint, or of another function of torch")
                found.append(node)
    return found


def _draws(node: Node) -> bool:
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), None) in DRAWING
    if node.op != "call_function" or node.target not in DRAWING:
        return False
    return draws_now(node.target, node.args, node.kwargs)  # type: ignore[arg-type]


def _rewritten(
    graph: GraphModule, nodes: list[Node], num_rows: int
) -> tuple[GraphModule, tuple[int, int]]:
    """A graph whose nodes that draw do so from three more inputs; Dynamo goes on with its own.

    Returns:
        The graph; how many of them draw for rows of samples, and how many for all together.
    """
    own, copies = Graph(), {}
    own.output(own.graph_copy(graph.graph, copies))
    for node in graph.graph.find_nodes(op="placeholder"):
        copies[node]._dynamo_source = getattr(node, "_dynamo_source", None)
    nodes = [copies[node] for node in nodes]
    last = own.find_nodes(op="placeholder")[-1]
    streams: list[Node] = []
    for name in ("row_words", "shared_words", "sample_ids"):
        with own.inserting_after(streams[-1] if streams else last):
            streams.append(own.placeholder(name))
        streams[-1]._dynamo_source = None  # type: ignore[attr-defined]
        streams[-1].meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    counts = {False: 0, True: 0}
    for node in nodes:
        weights = _shape_of_dropped(node)
        dim = samples_dim(weights, num_rows)
        is_shared = dim is None
        where = SHARED if dim is None else dim
        stream = streams[1 if is_shared else 0], streams[2], counts[is_shared], where
        counts[is_shared] += 1
        with own.inserting_before(node):
            if node.target is F.scaled_dot_product_attention:
                made = own.call_function(_attend, (*stream, *node.args), dict(node.kwargs))
            else:
                x, p, *_ = dropout_arguments(*node.args, **node.kwargs)  # type: ignore[arg-type]
                made = own.call_function(_drop, (*stream, x, p))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        own.erase_node(node)
    made = GraphModule(graph, own)
    made.meta = graph.meta
    made._param_name_to_source = getattr(graph, "_param_name_to_source", {})  # type: ignore[assignment]
    return made, (counts[False], counts[True])


def _shape_of_dropped(node: Node) -> tuple[int, ...]:
    """Return the shape of what a node drops elements of.

    Raises:
        UnsupportedOperation: If it draws otherwise.
    """
    if node.target is F.scaled_dot_product_attention:
        given: dict[str, Any] = {
            **dict(zip(("query", "key"), node.args, strict=False)),
            **node.kwargs,
        }
        query, key = (given[name].meta["example_value"] for name in ("query", "key"))
        if query.is_cuda:
            raise _refused(node, "in torch's own kernels; set the attention's dropout to 0")
        return *query.shape[:-1], key.shape[-2]
    if node.target not in DROPOUTS:
        raise _refused(node, "otherwise than dropout does")
    x, _, _, is_in_place = dropout_arguments(*node.args, **node.kwargs)  # type: ignore[arg-type]
    if is_in_place:
        raise _refused(node, "in place")
    return tuple(x.meta["example_value"].shape)  # type: ignore[attr-defined]


def _refused(node: Node, how: str) -> UnsupportedOperation:
    name = getattr(node.target, "__name__", node.target)
    return UnsupportedOperation(
        f"{name} in compiled code draws random numbers {how}, which cannot be given to samples"
    )


def _drop(words: Tensor, ids: Tensor, number: int, dim: int, x: Tensor, p: float) -> Tensor:
    return drop_rows(x, words, ids, number, dim, p)


def _attend(words: Tensor, ids: Tensor, number: int, dim: int, *args: Any, **options: Any) -> Any:
    return attend_whole(partial(_drop, words, ids, number, dim), *args, **options)
