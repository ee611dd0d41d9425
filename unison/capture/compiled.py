"""Capture under torch.compile: rules run while a graph is traced, and nothing is left to intercept.

[Note: slots] Dynamo's graph has the parameters as inputs. While AOTAutograd traces it, trainable
ones are marked as in an eager pass (see [Note: by operation]), so that every operation they enter
comes to its rule. What differs is where records go. Beside its inputs the graph gets *slots*:
tensors of zero strides that no kernel reads, whose gradient is what a record holds. Of a parameter
it is each sample's gradient [batch, *shape]; several uses add up there. Of a table it is that of
the rows which were looked up, and their ids are one more output of the graph. Where factors are to
be kept, it is the gradient of what came out of the operation, and what went in is an output. The
parameters themselves go in detached, so that gradients leave by slots alone, and the user's backend
sees plain ATen.

[Note: nothing is skipped] A graph is all of a module's forward pass (`fullgraph=True`): of the
model, or of one of its blocks, around which an eager capture goes on. An operation without a rule,
or one that was not seen when it was learned where samples lie, fails the compilation, and so does a
pass that Dynamo would leave to Python, now or after many recompilations.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.fx import Graph, GraphModule

from unison.capture.axes import layout_of
from unison.capture.capture import Capture, records_of, refuse_second
from unison.capture.torch_compile import tell_causal_masks, without_writes
from unison.capture.tracked import FACTS, Source, Tracked, all_plain
from unison.errors import UnsupportedOperation
from unison.ops import Builder, Dense, Lookup, Product, Record, Streamed, plain_record
from unison.ops.records import factors
from unison.rng.compiled_draws import compile_drawing
from unison.torch_internals import DynamoBackend


class GradientSlot(NamedTuple):
    """What takes the gradients of one parameter in a graph, or of one use of it.

    Attributes:
        name: The parameter.
        shape: [batch, *shape of the parameter], or of what came out of the use.
        dtype: Of its gradient.
        record: Makes a record of what went in and of the gradient; None where the latter is all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    record: Callable[[Tensor, Tensor], Record] | None


class _ToSlots(torch.autograd.Function):
    """Hands the gradient of an operation's output on, and each sample's of parameters to slots."""

    @staticmethod
    def forward(
        ctx: Any,
        gradients: Callable[[Tensor, tuple[Tensor, ...]], list[Tensor]],
        num_slots: int,
        output: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.gradients, ctx.num_saved = gradients, len(tensors) - num_slots
        ctx.save_for_backward(*tensors[num_slots:])
        # No copy, and no view either: what comes out may be written in place later.
        return torch.ops.aten._unsafe_view.default(output, output.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        (g,) = gradients
        values = ctx.gradients(g, ctx.saved_tensors)
        return None, None, g, *values, *(None,) * ctx.num_saved


def _kept(name: str, record: Record, factored: Collection[str]) -> Lookup | Product | None:
    """The record itself, if its parts are kept and not multiplied out."""
    if isinstance(record, Lookup) or (isinstance(record, Product) and name in factored):
        return record
    return None


def _multiplied_out(record: Record) -> Tensor:
    """The per-sample gradients [batch, *shape], in the dtype that they are computed in.

    Norms and sums are made of the same rounded values, so that the bound holds for them.
    """
    if isinstance(record, Dense):
        return record.value
    assert isinstance(record, Product)
    dtype = torch.promote_types(record.a.dtype, record.g.dtype)
    left, right = (each.to(dtype) for each in factors(record))
    return torch.bmm(left.mT, right).reshape(len(left), *record.shape)


class _Traced(Capture):
    """A capture of one run of a graph: the uses are noted, or lead to slots.

    Args:
        of: The capture of the pass.
        slots: The number of each record's slot, by use; None to note the uses instead.
        values: The slots themselves, by number.

    Attributes:
        noted: The records of each use, with their parameters.
        kept: What went into uses whose parts are kept, by the numbers of their slots.
    """

    def __init__(
        self,
        of: Capture,
        slots: Sequence[Sequence[int]] | None = None,
        values: Sequence[Tensor] = (),
    ) -> None:
        axes = replace(of.axes, is_of_graph=True)
        super().__init__(nn.Module(), of.batch, axes=axes, on_record=_refuse_record)
        self.factored = of.factored
        self._slots, self._values = slots, values
        self.noted: list[list[tuple[str, Record]]] = []
        self.kept: dict[int, Tensor] = {}

    def call(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a torch function that has a tracked tensor among its arguments."""
        if func in FACTS:  # the mark itself has no device of its own here
            return func(*all_plain(args), **all_plain(kwargs))
        return super().call(func, args, kwargs)

    def __call__(
        self,
        output: Tensor,
        *,
        saved: Sequence[Tensor],
        uses: Sequence[tuple[Any, Builder]],
        is_fresh: bool = True,
    ) -> Tensor:
        """Let the gradients of the parameters that made `output` lead to slots."""
        assert self._current is not None
        layout = layout_of(self.axes, *self._current, output)
        tracked = [(value, builder) for value, builder in uses if type(value) is Tracked]

        def records(g: Tensor, saved: tuple[Tensor, ...]) -> list[tuple[str, Record]]:
            found = records_of(layout, tracked, g, saved)
            return [(name, plain_record(record)) for _, name, record in found]

        # Of the gradient nothing but the shape is known yet; what is made of it here is not kept.
        noted = records(output.detach(), tuple(each.detach() for each in saved))
        self.noted.append(noted)
        if self._slots is None:
            return output
        places = self._slots[len(self.noted) - 1]
        for place, (name, record) in zip(places, noted, strict=True):
            kept = _kept(name, record, self.factored)
            if kept is not None:
                self.kept[place] = kept.ids if isinstance(kept, Lookup) else kept.a

        def gradients(g: Tensor, saved: tuple[Tensor, ...]) -> list[Tensor]:
            """Return those of the slots that the records lead to, each slot once."""
            found: dict[int, Tensor] = {}
            for place, (name, record) in zip(places, records(g, saved), strict=True):
                kept = _kept(name, record, self.factored)
                value = _multiplied_out(record) if kept is None else kept.g
                found[place] = found[place] + value if place in found else value
            return list(found.values())

        slots = [self._values[each] for each in dict.fromkeys(places)]
        return _ToSlots.apply(gradients, len(slots), output, *slots, *saved)  # type: ignore[return-value]


def _refuse_record(name: str, record: Record | Streamed) -> None:
    raise AssertionError(f"a record of {name} was made while a graph was traced")


class CompiledCapture:
    """A Dynamo backend whose graphs hand the records of their uses to the capture of the pass.

    Args:
        inner: The backend that compiles the graphs.

    Attributes:
        graphs: Those that it has compiled and that have slots.
        num_runs: How often one of them has run.
    """

    def __init__(self, inner: DynamoBackend) -> None:
        self._inner = inner
        self._running: tuple[Capture, Mapping[int, str]] | None = None
        self.graphs: list[_CompiledGraph] = []
        self.num_runs = 0

    @contextmanager
    def running(self, capture: Capture, names: Mapping[int, str]) -> Iterator[None]:
        """Around a call of compiled code.

        Args:
            capture: What takes the records, in the backward pass.
            names: The trainable parameters that the code may use, by the ids of the tensors that
                it finds in their places.
        """
        before, self._running = self._running, (capture, names)
        try:
            yield
        finally:
            self._running = before

    def __call__(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph of Dynamo's."""
        return compile_drawing(self._compile, graph, inputs)

    def _compile(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if self._running is None:
            raise UnsupportedOperation("a private module is compiled outside of its own passes")
        capture, names = self._running
        used = {place: names[id(each)] for place, each in enumerate(inputs) if id(each) in names}
        made: Callable[..., Any] | _CompiledGraph
        if not used or not torch.is_grad_enabled():
            made = self._inner(graph, inputs)
        else:
            if not all(isinstance(each, Tensor) for each in inputs):
                raise UnsupportedOperation(
                    "sizes are symbols in this graph (mark_dynamic): private graphs are made for "
                    "each size of a batch"
                )
            without_writes(graph)
            tell_causal_masks(graph)
            made = _CompiledGraph(graph, inputs, used, capture, self._inner)
            self.graphs.append(made)

        def call(*args: Any) -> Any:
            self.num_runs += 1
            if not isinstance(made, _CompiledGraph):
                return made(*args)
            assert self._running is not None
            return made(args, *self._running)

        return call


class _CompiledGraph:
    """A graph with slots, compiled.

    Args:
        graph: As Dynamo made it.
        inputs: Examples of its inputs.
        names: Which of them are trainable parameters.
        capture: Knows the number of samples, where they lie, and whose factors to keep.
        inner: What compiles it.
    """

    def __init__(
        self,
        graph: GraphModule,
        inputs: Sequence[Tensor],
        names: Mapping[int, str],
        capture: Capture,
        inner: DynamoBackend,
    ) -> None:
        self.places = {name: place for place, name in names.items()}
        self.free: list[_SlotSet] = []  # sets of slots that no pass holds
        self._num_inputs = len(inputs)
        self._num_outputs = len(graph.graph.find_nodes(op="output")[0].args[0])
        context = TracingContext.get()
        fake = context.fake_mode
        assert fake is not None

        def run(capture: _Traced, args: Sequence[Tensor]) -> tuple:
            given = list(args)
            for place, name in names.items():
                given[place] = Tracked.of(given[place], (Source(name),), capture)
            outputs = graph(*given)
            for each in outputs:
                if type(each) is Tracked:
                    raise UnsupportedOperation(
                        f"what is made of {each.of_parameters[0]!r} alone is handed on by the "
                        "compiled module, and others use it"
                    )
            return outputs

        noting = _Traced(capture)
        examples = [fake.from_tensor(each.detach(), static_shapes=True) for each in inputs]
        with fake, torch.enable_grad():
            run(noting, examples)
        self.slots, numbers = _slots_of(noting)
        self._kept = [number for number, slot in enumerate(self.slots) if slot.record is not None]

        def traced(*args: Tensor) -> tuple:
            given, values = args[: self._num_inputs], args[self._num_inputs :]
            tracing = _Traced(noting, numbers, values)
            outputs = run(tracing, given)
            return *outputs, *(tracing.kept[number] for number in self._kept)

        num_outputs = self._num_outputs + len(self._kept)
        private = _calling(traced, graph, len(self.slots), num_outputs)
        given = self._given(inputs, self._zeros(inputs))
        # As real tensors slots would be guarded by their strides, and parameters by their graph.
        for place in (*names, *range(len(inputs), len(given))):
            given[place] = fake.from_tensor(given[place], static_shapes=True)
        self._compiled = inner(private, given)

    def _zeros(self, args: Sequence[Tensor]) -> list[Tensor]:
        """What slots are: no memory, and gradients of their shape."""
        return [
            args[self.places[slot.name]]
            .new_zeros((), dtype=slot.dtype)
            .expand(slot.shape)
            .requires_grad_()
            for slot in self.slots
        ]

    def _given(self, args: Sequence[Tensor], slots: Sequence[Tensor]) -> list[Tensor]:
        given = [*args, *slots]
        for place in self.places.values():
            given[place] = args[place].detach()
        return given

    def __call__(
        self, args: Sequence[Tensor], capture: Capture, names: Mapping[int, str]
    ) -> tuple[Any, ...]:
        """Run it.

        Args:
            args: Its inputs.
            capture: What takes the records.
            names: Of the trainable parameters among the inputs, by their ids: a graph may be of one
                block, and serve others with parameters of their own.
        """
        own = {name: names.get(id(args[place])) for name, place in self.places.items()}
        num_trained = sum(id(each) in names for each in args)
        if None in own.values() or num_trained != len(own):
            raise UnsupportedOperation(
                "a compiled graph came to parameters of which others are trained than those that "
                "it was made for; train the module uncompiled"
            )
        if not torch.is_grad_enabled():
            return self._compiled(*self._given(args, self._zeros(args)))[: self._num_outputs]
        slots = self.free.pop() if self.free else _SlotSet(self, self._zeros(args))
        outputs = self._compiled(*self._given(args, slots.tensors))
        kept = dict(zip(self._kept, outputs[self._num_outputs :], strict=True))
        slots.begin(capture, [str(own[slot.name]) for slot in self.slots], kept)
        return outputs[: self._num_outputs]


class _SlotSet:
    """The slots of one run of a graph, which hand records over as their gradients come.

    When the pass is over, a later one may have them; unless no gradient came: the graph of a pass
    that was given up may still be held, and lead to them.

    Args:
        graph: The graph.
        tensors: Its slots.
    """

    def __init__(self, graph: _CompiledGraph, tensors: list[Tensor]) -> None:
        self._graph, self.tensors = graph, tensors
        self._capture: Capture | None = None
        self._names: list[str] = []
        self._kept: dict[int, Tensor] = {}
        self._is_used = False
        for number, each in enumerate(tensors):
            each.register_post_accumulate_grad_hook(partial(_SlotSet.take, ref(self), number))

    def begin(self, capture: Capture, names: list[str], kept: dict[int, Tensor]) -> None:
        """Be the slots of a pass.

        Args:
            capture: What takes the records.
            names: The parameters of the slots.
            kept: What went in, by the number of the slot, where it is kept.
        """
        self._capture, self._names, self._kept, self._is_used = capture, names, kept, False
        capture.used.update(names)
        capture.on_release.append(self._end)

    @staticmethod
    def take(slots: "ref[_SlotSet]", number: int, tensor: Tensor) -> None:
        """Hand the gradient of a slot over; a hook of the slot, which must not keep its set."""
        gradient, tensor.grad = tensor.grad, None
        self = slots()
        if self is None or self._capture is None:
            refuse_second()
        if gradient is None:
            return
        self._is_used = True
        make, kept = self._graph.slots[number].record, self._kept
        if make is None:
            record: Record = Dense(gradient, is_ours=True)
        else:  # other backward passes may come, unless this one is all there is
            went_in = kept.pop(number) if self._capture.has_one_backward else kept[number]
            record = make(went_in, gradient)
        self._capture.on_record(self._names[number], record)

    def _end(self) -> None:
        self._capture, self._names, self._kept = None, [], {}
        if self._is_used:
            self._graph.free.append(self)


def _slots_of(noting: _Traced) -> tuple[list[GradientSlot], list[list[int]]]:
    """Decide the slots: one per parameter, and one per use whose parts are kept.

    Args:
        noting: Has noted the uses.

    Returns:
        The slots, and for each record of each use the number of its slot.
    """
    slots: list[GradientSlot] = []
    whole: dict[str, int] = {}
    numbers: list[list[int]] = []
    for records in noting.noted:
        numbers.append([])
        for name, record in records:
            kept = _kept(name, record, noting.factored)
            if kept is not None:
                make = partial(Lookup, shape=kept.shape)
                if isinstance(kept, Product):
                    make = partial(Product, is_transposed=kept.is_transposed, shape=kept.shape)
                slots.append(GradientSlot(name, tuple(kept.g.shape), kept.g.dtype, make))
                numbers[-1].append(len(slots) - 1)
                continue
            value = _multiplied_out(record)
            if name not in whole:
                whole[name] = len(slots)
                slots.append(GradientSlot(name, tuple(value.shape), value.dtype, None))
            slot = slots[whole[name]]
            dtype = torch.promote_types(slot.dtype, value.dtype)
            slots[whole[name]] = slot._replace(dtype=dtype)
            numbers[-1].append(whole[name])
    return slots, numbers


def _calling(
    function: Callable[..., tuple], like: GraphModule, num_slots: int, num_outputs: int
) -> GraphModule:
    """A graph that calls a function, with the inputs of another one and slots.

    Backends trace what it does; to do so they call it.
    """
    graph = Graph()
    places = []
    for node in like.graph.find_nodes(op="placeholder"):
        place = graph.placeholder(node.name)
        place.meta = dict(node.meta)
        place._dynamo_source = getattr(node, "_dynamo_source", None)  # type: ignore[attr-defined]
        places.append(place)
    for number in range(num_slots):
        place = graph.placeholder(f"slot_{number}")
        place._dynamo_source = None  # type: ignore[attr-defined]
        place.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        places.append(place)
    result = graph.call_function(function, tuple(places))
    graph.output(
        tuple(graph.call_function(operator.getitem, (result, i)) for i in range(num_outputs))
    )
    made = GraphModule(like, graph)
    made.meta = like.meta
    made._param_name_to_source = getattr(like, "_param_name_to_source", {})  # type: ignore[assignment]
    return made
