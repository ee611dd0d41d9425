"""What torch.compile makes of a block, on tensors without values.

Dynamo and AOTAutograd trace a block as ever, and the partitioner that Inductor uses decides what is
kept for the backward pass. Inductor itself writes kernels for a GPU, and there is none: the two
graphs are run operation by operation instead. Of operations that it would fuse into their readers
nothing is counted, as their results never reach memory.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch._prims import rng_prims
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from unison.plan import meter as meter_module
from unison.plan.meter import Meter


def backend(meter: Meter) -> Callable[..., Any]:
    """Return a backend for `torch.compile` whose graphs a meter counts as Inductor's."""
    # Where a graph breaks, what runs in between is Python's, with the meter's own functions.
    skip = import_module("torch._dynamo.decorators").skip
    for function in [*vars(meter_module).values(), *vars(Meter).values()]:
        if isinstance(function, FunctionType) and function.__module__ == meter_module.__name__:
            skip(function)

    def compile_graph(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        common = import_module("torch._dynamo.backends.common")
        partition = import_module("torch._functorch.partitioners")
        decompositions = import_module("torch._inductor.compile_fx").select_decomp_table()

        def run(part: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            fused = {
                node
                for node in part.graph.nodes
                if is_pointwise(node) and not is_read_from_memory(node)
            }
            # An interpreter holds what it has run with.
            call = functools.partial(_run_once, part, fused, meter)
            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        return common.aot_autograd(
            fw_compiler=run,
            bw_compiler=run,
            decompositions=decompositions,
            partition_fn=functools.partial(
                partition.min_cut_rematerialization_partition, compiler="inductor"
            ),
        )(graph, inputs)

    return compile_graph


class FusedGraph(Interpreter):
    """Runs a graph, and lets a meter count what is left of it when pointwise operations are fused.

    Args:
        graph: What is run.
        fused: Its operations that are part of their readers' kernels.
        meter: Counts it.
    """

    def __init__(self, graph: GraphModule, fused: set[Node], meter: Meter) -> None:
        super().__init__(graph)
        self._fused, self._meter = fused, meter

    def run_node(self, n: Node) -> Any:
        """Run one operation."""
        with self._meter.compiled(is_fused=n in self._fused):
            return super().run_node(n)

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function; one that is computed again draws no numbers, and keeps no state."""
        if target is rng_prims.run_and_save_rng_state:
            return torch.get_rng_state(), args[0](*args[1:], **kwargs)
        if target is rng_prims.run_with_rng_state:
            return args[1](*args[2:], **kwargs)
        return super().call_function(target, args, kwargs)


def _run_once(graph: GraphModule, fused: set[Node], meter: Meter, args: list[Any]) -> Any:
    # Compiled frames run without the mode that they were compiled under, and backward with it.
    is_on = any(each is meter for each in _get_current_dispatch_mode_stack())
    with nullcontext() if is_on else meter:
        return FusedGraph(graph, fused, meter).boxed_run(args)


def is_pointwise(node: Node) -> bool:
    """Whether an operation makes each element of one element of each of its inputs."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_read_from_memory(node: Node) -> bool:
    """Whether a reader of a result cannot have it fused into its own kernel."""
    return any(
        is_read_from_memory(user)
        if getattr(user.target, "is_view", False)
        else not (is_pointwise(user) or torch.Tag.reduction in getattr(user.target, "tags", ()))
        for user in node.users
    )
