"""Capture: every use of every parameter in a forward pass, recorded in its backward pass.

The only code that intercepts a pass. It leaves records, as data, by parameter name.
A tap on the output of each operation that uses parameters makes records of its gradient.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from unison.capture.axes import (
    NO_AXIS,
    Axes,
    AxisTable,
    Call,
    Seen,
    axes_of,
    layout_of,
    refuse_unseen,
    see,
)
from unison.capture.expression import (
    ALWAYS,
    derive,
    is_in_place,
    not_in_place,
    per_sample_fallback,
    with_result,
)
from unison.capture.parts import local, record_of, refuse_use
from unison.capture.probes import flat_weights_renewed
from unison.capture.recompute import (
    Place,
    RecomputeQueue,
    RngAutocastState,
    buffers_unchanged,
    checkpointing_quiet,
    refuse_gradients,
)
from unison.capture.row_rules import RowSamples, is_mixed
from unison.capture.rows import RowTrace, check_constant
from unison.capture.tracked import (
    FACTS,
    UNFOLLOWED,
    ParamRegistry,
    Tracked,
    all_plain,
    find_params,
    mapped,
    mark_in_place,
    marked,
    plain,
    unmark,
)
from unison.errors import BadInput, UnsupportedOperation
from unison.ops import RULES, Builder, Layout, Product, Record, plain_record, rule_of
from unison.ops.elementwise import put, with_item
from unison.ops.linear import of_bias
from unison.ops.records import check_nobodys
from unison.torch_internals import (
    is_dtensor,
    is_recording,
    refuse_compiled,
    tell_no_more,
    tell_of_apply,
)

# On a module whose parameters somebody else puts in place during a pass: a function from a capture
# to a context in which it puts tracked ones there.
PLACING = "_unison_placing"
# On the leaves that records hang on, so that who looks at a graph can tell them from the user's.
ANCHOR = "_unison_anchor"


OnRecord = Callable[[str, Record], None]
Uses = list[tuple[Tracked, Builder]]  # of parameters by one operation
Use = tuple[Layout | None, Uses, int | None, bool]
"""Where samples lie (None if it was made in a backward pass, and is not known there), the uses of
parameters, the number of the operation in the forward pass (None if it cannot be met again), and
whether it was made in a backward pass."""
OnProduct = Callable[[str, Product], bool]
Gradients = tuple[Tensor | None, ...]
OnGradients = Callable[[Any, Gradients], Iterable[Tensor | None]]

_NO_MODULE = nn.Module()


class _Expression(Exception):
    """An output does not depend on the batch."""


Met = tuple[Call, RowSamples | None, Layout | None]
"""An operation with parameters in a pass in which samples are followed: the call, whose the rows of
what came out are (None if it was made without the batch), and where samples lie in it (None if that
is not known)."""


class Capture:
    """Records the uses of a module's trainable parameters, for one number of samples.

    Args:
        module: The model.
        batch: Number of samples.
        axes: Where samples lie, as learned; an empty table only learns.
        on_record: Called with a parameter's name and a record, once per use, in the backward pass.
        on_product: Called in its place for products that can be met again, if it is given. It
            returns whether this one should be: then the gradient is kept, and `on_record` gets an
            equal record in `recompute`.
        known: The module's parameters, if somebody else has looked at them just now.
        streams: Whether `on_record` takes `Streamed` records, to be read there and then; else it
            gets products of them.
        has_one_backward: Whether one backward pass is all there is: what compiled graphs keep for
            records goes as it is used.

    Attributes:
        is_learning: Whether it is only found out what the model does.
        met: What parameters meet, where it is only written down; else None.
        used: Names of the parameters that were used.
        used_late: Names of those that were used in the backward pass: activation checkpointing.
        recorded_late: Names of those whose records are of such uses, which `recompute` does not
            meet: reentrant activation checkpointing.
        is_outside: Whether the module has returned, so that a use of one of its parameters belongs
            to the user's own code: it is the parameter itself then, and nothing is recorded.
        factored: Names of those whose records compiled code leaves as products, and does not
            multiply out.
        ignored: Names of those of which no records are made in eager code.
        on_release: Called by `release`, when the pass is over.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: int,
        *,
        axes: AxisTable,
        on_record: OnRecord,
        on_product: OnProduct | None = None,
        known: ParamRegistry | None = None,
        streams: bool = False,
        has_one_backward: bool = False,
    ) -> None:
        self.module, self.batch, self.axes = module, batch, axes
        self._known = known
        self.streams, self.has_one_backward = streams, has_one_backward
        self.on_record, self.on_product = on_record, on_product
        self.is_learning = False
        self.seen: list[Seen] | None = None  # while learning
        self.used: set[str] = set()
        self.used_late: set[str] = set()
        self.recorded_late: set[str] = set()
        self.is_outside = False
        self.factored: Collection[str] = ()
        self.ignored: Collection[str] = ()
        self.repeats = None if on_product is None else RecomputeQueue()
        self._is_again = False
        self._outer = -1  # number of the backward pass in which all of this happens, if any
        self.anchors: dict[torch.device, Tensor] = {}  # all records hang on one of them
        self._current: tuple[Call, Axes | None] | None = None  # what a rule runs for
        # While samples are followed; and what was made of parameters alone in the last such pass.
        self.trace: RowTrace | None = None
        self.met: list[Met] | None = None  # while it is looked at where samples go
        self._written: list[ref[Tensor]] = []  # what has become something made of parameters
        self._resolved: dict[Call, bool] = {}  # whether a call has made an expression
        # Uses that wait in the graph: only for who will `release` them, or all would be a cycle.
        self._uses: list[Uses] | None = None if known is None else []
        self.on_release: list[Callable[[], None]] = []

    @contextmanager
    def installed(self, *, is_guarded: bool = False) -> Iterator["Capture"]:
        """Put tracked tensors in the place of the parameters; they must stay for the backward pass.

        Code that activation checkpointing runs again needs them too.

        Args:
            is_guarded: Whether gradients that reach a parameter itself raise too: it was kept
                elsewhere than in its module. It costs microseconds per parameter, so that it is
                asked for once, where the samples are checked.

        Raises:
            UnsupportedOperation: If the module is compiled, or a gradient went past the capture.
        """
        params = self._known or ParamRegistry(*find_params(self.module))
        refuse_compiled(params.modules)
        if self.repeats is not None and not self._is_again:  # else it is what waits
            self.repeats.clear()
        self._outer = torch._C._current_graph_task_id()
        placing = self.module.__dict__.get(PLACING)
        with ExitStack() as stack:
            if placing is not None:
                stack.enter_context(placing(self))
            else:
                tell_of_apply(_followed_apply)
                stack.callback(tell_no_more, _followed_apply)
                stack.enter_context(marked(params, self, is_guarded=is_guarded))
                recurrent = [each for each in params.modules if isinstance(each[1], nn.RNNBase)]
                if recurrent:
                    stack.enter_context(flat_weights_renewed(recurrent))
            try:
                yield self
            finally:  # a buffer that a parameter is written to is one again
                for each in self._written:
                    if (target := each()) is not None and type(target) is Tracked:
                        unmark(target)
                self._written.clear()

    @contextmanager
    def learning(self) -> Iterator[list[Seen]]:
        """Only write down what is called and what comes out."""
        self.seen, self.is_learning = [], True
        with self.installed(), torch.no_grad():
            yield self.seen

    @contextmanager
    def following(self, batch: Any, dim: int = 0, per_sample: int = 1) -> Iterator[None]:
        """Follow samples through the forward pass in this block, where the model needs it.

        Args:
            batch: The tensors that hold the samples, in lists, tuples and dictionaries; one that
                has no such dimension, or another size, holds none.
            dim: Their dimension of samples.
            per_sample: Rows of it that belong to one sample, one after the other.

        Raises:
            UnsupportedOperation: If a CUDA graph is recorded, which cannot wait for values.
        """
        if not self.axes.is_traced:
            yield
            return
        if is_recording():
            raise UnsupportedOperation(
                "rows are selected by values, and whose they are is read in every pass, which a "
                "CUDA graph cannot repeat; train without capture_graph"
            )
        with self._traced(batch, dim, per_sample):
            yield

    @contextmanager
    def _traced(self, batch: Any, dim: int, per_sample: int = 1) -> Iterator[None]:
        before, trace = self.trace, RowTrace(self.batch)
        num_rows = self.batch * per_sample
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor) and leaf.ndim > dim and leaf.shape[dim] == num_rows:
                trace.begin(leaf, dim, per_sample)
        self.trace = trace
        try:
            with trace:
                yield
        finally:
            self.trace = before

    @contextmanager
    def meeting(self, batch: Any) -> Iterator[list[Met]]:
        """Only write down which operations parameters meet, and whose rows come out of them.

        Args:
            batch: Tensors with samples along dimension 0.
        """
        self.met, self.is_learning = [], True
        with self.installed(), torch.no_grad(), self._traced(batch, 0):
            yield self.met

    @contextmanager
    def recompute(self, surroundings: RngAutocastState) -> Iterator[None]:
        """Run the forward pass once more in this block: see [Note: keep g, recompute a].

        `on_record` gets the records of the products that `on_product` wanted again.

        Guarantees:
            If the block is left without an exception, each of them had the same bits as the first
            time, but for a probability below 2⁻³⁰ ([Note: fingerprints]).

        Args:
            surroundings: What held when the first forward pass began.

        Raises:
            UnsupportedOperation: If the two passes are not the same.
        """
        assert self.repeats is not None
        self._is_again = True
        try:
            with (
                buffers_unchanged(self.module),
                surroundings(),
                torch.enable_grad(),
                saved_tensors_hooks(lambda _: None, refuse_gradients),  # graphs hold nothing
                checkpointing_quiet(),
            ):
                yield
            self.repeats.check()
        finally:
            self._is_again = False
            self.repeats.clear()

    def release(self) -> None:
        """Let go of the module and its parameters, when no more gradients of the pass can come.

        The graph of a loss that somebody still holds leads to this object.
        """
        for use in self._uses or ():
            use.clear()
        self._uses = None
        for call in self.on_release:
            call()
        self.on_release = []
        self.repeats = None
        self.anchors.clear()
        self.on_product = None
        self.on_record = refuse_second
        self.module, self._known = _NO_MODULE, None

    # --- what tracked tensors call ---------------------------------------------------------------

    def call(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a torch function that has a tracked tensor among its arguments."""
        if self.is_outside:
            return func(*mapped(self._unmarked, args), **mapped(self._unmarked, kwargs))
        if func in FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # Who learns runs all of it without gradients; what writes into `out` can have none.
        is_unseen = self.is_learning and kwargs.get("out") is not None
        if func in UNFOLLOWED or is_unseen or not (self.is_learning or torch.is_grad_enabled()):
            return func(*all_plain(args), **all_plain(kwargs))
        if func in ALWAYS and type(args[0]) is Tracked:
            return derive(func, args, kwargs)
        rule = RULES.get(func) or rule_of(func)
        if rule is None and is_in_place(func) and "out" not in kwargs:
            target, *others = args
            before = target if type(target) is Tracked else target.clone()  # it may be kept
            return put(self, target, self.call(with_result(func), (before, *others), kwargs))
        if args and type(args[0]) is Tracked and (elsewhere := not_in_place(func, args, kwargs)):
            return put(self, args[0], self.call(func, *elsewhere))
        if self.trace is not None:
            args, kwargs = self._for_samples(args, kwargs)
        call, is_complex = self._call_of(func, args, kwargs)
        if is_complex:
            rule = None  # rules are of real numbers; autograd knows what to conjugate
        if torch._C._are_functorch_transforms_active():
            raise UnsupportedOperation(
                f"{call} inside of torch.func or vmap, where the samples are not seen; write the "
                "model for a batch"
            )
        is_traced = self.axes.is_traced or self.met is not None
        axes = None if is_traced else axes_of(self.axes, call)
        if rule is None:
            return self._without_rule(call, axes, args, kwargs)
        is_alone = axes is not None and axes[0] is NO_AXIS
        if is_alone and not self.is_learning and not is_in_place(func):
            return derive(func, args, kwargs)
        before, self._current = self._current, (call, axes)
        try:
            output = rule(self, *args, **kwargs)
        except _Expression:
            return self._derived(call, args, kwargs)
        except UnsupportedOperation as error:
            names, message = ", ".join(call.names), str(error)
            if not message.startswith(names):
                message = f"{names}: {message}"
            raise UnsupportedOperation(message) from None
        finally:
            self._current = before
        if output is NotImplemented:
            return self._without_rule(call, axes, args, kwargs)
        return output

    def _for_samples(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Let what was expanded be of the samples that it meets: one value for each of them."""
        assert self.trace is not None
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not any(type(each) is Tracked and each.expanded_from is not None for each in given):
            return args, kwargs
        followed = [x for x in given if type(x) is not Tracked and self.trace.find(x) is not None]

        def placed(value: Any) -> Any:
            if type(value) is Tracked and (before := value.expanded_from) is not None:
                for like in followed:
                    if like.ndim == value.value.ndim:
                        try:
                            return self.expand(before, value.value.shape, like)
                        except _Expression:  # it met what is nobody's, such as noise
                            continue
            return value

        return mapped(placed, args), mapped(placed, kwargs)

    def call_alone(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a custom `autograd.Function` of parameters alone."""
        if self.is_outside or not (self.is_learning or torch.is_grad_enabled()):
            return func(*args, **kwargs)
        call, _ = self._call_of(func, args, kwargs)
        return self._derived(call, args, kwargs)

    def _unmarked(self, value: Any) -> Any:
        """A parameter itself in the place of its mark; anything else as it is."""
        if type(value) is not Tracked:
            return value
        name = value.of_parameters[0]
        if not value.is_parameter:
            raise UnsupportedOperation(
                f"something that was made of {name!r} inside of the module is used outside of it, "
                "where its gradient would be neither clipped nor noised. Compute it inside of the "
                "module's forward, or detach it"
            )
        assert self._known is not None  # by who sees the module return
        return next(each.parameter for each in self._known.places if each.name == name)

    def _call_of(
        self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Call, bool]:
        """Return what is known of a call before it runs, and whether complex numbers go in."""
        names: tuple[str, ...] = ()
        shapes: list[tuple[int, ...]] = []
        is_complex = False
        items: Sequence[Any] = (*args, *kwargs.values()) if kwargs else args
        for value in items:
            for item in value if isinstance(value, list | tuple) else (value,):
                if type(item) is Tracked:
                    is_complex |= item.value.is_complex()
                    shapes.append(item.value.shape)
                    own = item.of_parameters
                    names = tuple(dict.fromkeys(names + own)) if names else own
                elif isinstance(item, Tensor):
                    if item.is_nested:
                        name = getattr(func, "__name__", func)
                        raise UnsupportedOperation(
                            f"{name} of a NestedTensor and a parameter, where samples have no "
                            "dimension of their own; pad the samples, or loop over them"
                        )
                    is_complex |= item.is_complex()
                    shapes.append(item.shape)
        ndims = tuple(map(len, shapes))
        return Call(func, names, ndims, tuple(shapes), self.batch), is_complex

    def _without_rule(
        self, call: Call, axes: Axes | None, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        is_traced = self.axes.is_traced or self.met is not None
        if not is_traced and self.seen is None and axes is not None:
            if axes[0] is NO_AXIS:
                return self._derived(call, args, kwargs)
            if any(is_dtensor(plain(each)) for each in (*args, *kwargs.values())):
                refuse_use(call.names, f"there is no rule for {call}")
            return self._sample_by_sample(call, axes, args, kwargs)
        if kwargs.get("out") is not None:
            raise UnsupportedOperation(
                f"{call} writes in place and has no rule; write it as an operation with a result"
            )
        if is_traced and self.trace is None and call in self._resolved:
            assert self._resolved[call], f"{call} has no rule, and was recorded"
            return self._derived(call, args, kwargs)
        output = call.func(*all_plain(args), **all_plain(kwargs))
        if not _has_float_tensor(output):
            return output  # a size, a device, a mask: nothing to record
        if is_traced:
            return self._followed(call, output, args, kwargs)
        if self.seen is None:
            refuse_unseen(call)
        self.seen.append(see(call, output, (*args, *kwargs.values())))
        if axes is not None and axes[0] is NO_AXIS:
            return self._derived(call, args, kwargs)
        return output

    def _sample_by_sample(
        self, call: Call, axes: Axes, args: tuple, kwargs: dict[str, Any]
    ) -> Tensor:
        if call.func is with_item:  # an index of samples would be one into a single sample
            raise UnsupportedOperation(
                f"{', '.join(call.names)}: a parameter written to rows found by tensors of "
                "indices; use torch.where"
            )
        before, self._current = self._current, (call, axes)
        try:
            return per_sample_fallback(self, call, axes, args, kwargs)
        finally:
            self._current = before

    def _derived(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Follow what is made of parameters alone, whose rows are nobody's."""
        output = derive(call.func, args, kwargs)
        self._resolved[call] = True
        if self.trace is not None:
            for item in output if isinstance(output, list | tuple) else (output,):
                if type(item) is Tracked:
                    self.trace.forget(item.value)
        return output

    # --- where samples are followed --------------------------------------------------------------

    def _followed(self, call: Call, output: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Record a call without a rule, by the samples of what came out."""
        trace = self.trace
        if trace is None:
            self._refuse_late(call)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        rows = [trace.find(each) if type(each) is not Tracked else None for each in given]
        is_chosen_for_all = not any(
            found is not None and (each.is_floating_point() or each.ndim)
            for each, found in zip(given, rows, strict=True)
        )
        first = next(item for item in tree_leaves(output) if isinstance(item, Tensor))
        layout = None if is_chosen_for_all else self._layout_for(call, first)
        if self.met is not None:
            met = trace.find(first)
            self.met.append((call, met, layout))
            # Rows that were lost on the way are samples' all the same.
            is_expression = layout is None and (met is None or not is_mixed(met))
            return self._derived(call, args, kwargs) if is_expression else output
        if layout is None:
            return self._derived(call, args, kwargs)
        inputs = [None if type(each) is Tracked else trace.layout_of(each) for each in given]
        if any(each is not None and each.index is not None for each in (layout, *inputs)):
            raise UnsupportedOperation(
                f"{call} has no rule, and rows of what goes in or comes out lie where values have "
                "put them; write it with operations that have one, such as F.linear"
            )
        dims = tuple(None if each is None else each.axis for each in inputs)
        return self._sample_by_sample(call, (layout.axis, dims), args, kwargs)

    def _layout_for(self, call: Call, output: Tensor) -> Layout | None:
        """Where samples lie in what came out of a call; None if parameters are all of it."""
        assert self.trace is not None
        try:
            layout = self.trace.layout_of(output)
        except UnsupportedOperation as error:
            if self.met is not None:
                return None
            raise UnsupportedOperation(f"{', '.join(call.names)}: {call}: {error}") from None
        if layout is not None:
            return layout
        known = axes_of(self.axes, call)  # one row for every sample, made without them
        dim = NO_AXIS if known is None else known[0]
        if dim is None or output.shape[dim] % self.batch:
            return None
        self.trace.begin(output, dim, output.shape[dim] // self.batch)
        return Layout(self.batch, dim)

    def _traced_layout(self, call: Call, output: Tensor, saved: Sequence[Tensor]) -> Layout | None:
        """As `_layout_for`, of a call that has a rule; None in a backward pass.

        Raises:
            _Expression: If what came out does not depend on the batch.
        """
        if self.trace is None:
            if self._resolved.get(call) is None:
                self._refuse_late(call)
            if self._resolved[call]:
                raise _Expression
            return None
        # Rows of a table that were chosen for all samples together are all samples'.
        is_lookup = not any(each.is_floating_point() for each in saved)
        rows = self.trace.find(output)
        if is_lookup and saved and rows is not None and rows.lost_by and is_mixed(rows):
            raise _Expression
        layout = self._layout_for(call, output)
        if layout is not None and rows is None:
            check_constant(call, saved, layout.axis, output)
        if self.met is not None:
            self.met.append((call, rows, layout))
        if layout is None and (rows is None or self.met is None or not is_mixed(rows)):
            raise _Expression
        self._resolved[call] = False
        return layout

    def _refuse_late(self, call: Call) -> NoReturn:
        raise UnsupportedOperation(
            f"{', '.join(call.names)}: {call} was first seen in a backward pass, where samples are "
            "not followed, and rows of this model lie where values have put them. Use activation "
            "checkpointing with use_reentrant=False"
        )

    # --- what rules call -------------------------------------------------------------------------

    plain = staticmethod(plain)

    def tracks(self, value: Any) -> bool:
        """Whether a value is a parameter whose uses are recorded."""
        return type(value) is Tracked

    def align(self, value: Tensor, like: Tensor) -> Tensor:
        """Let rows made without the batch be the samples' of a tensor that they will meet.

        As those of a recurrent network's first state, which are zeros.
        """
        return value if self.trace is None else self.trace.aligned(value, like)

    def become(self, target: Tensor, made: Any) -> Tensor:
        """Let a tensor that was written in place be made of parameters alone, as `made` is.

        Raises:
            UnsupportedOperation: A parameter itself is written, or views of the tensor were made,
                which would not be followed.
        """
        # Of what is not known yet, values are enough.
        if type(made) is not Tracked and self.is_learning:
            made = Tracked.of(made, target.sources, self)  # type: ignore[attr-defined]
        was_plain = type(target) is not Tracked
        if (
            type(made) is not Tracked
            or made.value.shape != target.shape
            or not mark_in_place(target, made)
        ):
            raise UnsupportedOperation(
                "an in-place operation on a parameter, or on something made of parameters alone "
                "that other tensors share memory with; write `y = x + w` in place of `x += w`"
            )
        if was_plain:
            self._written.append(ref(target))
        return target

    def expand(self, value: Tracked, shape: Sequence[int], like: Tensor) -> Any:
        """`value.expand(shape)` of a parameter, to meet a tensor whose samples its rows are."""
        if self.trace is None:
            return value.expand(shape)
        made = value.value.expand(shape)
        output = self.trace.aligned(made, like)
        if output is made:
            return value.expand(shape)
        call, _ = self._call_of(Tensor.expand, (value, tuple(shape)), {})
        before, self._current = self._current, (call, None)
        try:
            return self(output, saved=(), uses=[(value, of_bias)], is_fresh=False)
        finally:
            self._current = before

    def __call__(
        self,
        output: Tensor,
        *,
        saved: Sequence[Tensor],
        uses: Sequence[tuple[Any, Builder]],
        is_fresh: bool = True,
    ) -> Tensor:
        """Record the uses of parameters that made `output`, when its gradient comes.

        Args:
            output: What the operation returned.
            saved: What the builders need of its inputs.
            uses: The parameters, each with the builder of its record.
            is_fresh: Whether the output is the operation's alone: it shares no memory with an
                input, and its backward does not read it.
        """
        assert self._current is not None
        call, axes = self._current
        if self.seen is not None:
            self.seen.append(see(call, output, saved))
            if axes is not None and axes[0] is NO_AXIS:
                raise _Expression
            return output
        if self.axes.is_traced or self.met is not None:
            layout = self._traced_layout(call, output, saved)
            if self.met is not None:
                return output
        else:
            layout = layout_of(self.axes, call, axes, output)
        anchor = self.anchors.get(output.device)
        if anchor is None:
            anchor = self.anchors[output.device] = torch.zeros(
                (), device=output.device, requires_grad=True
            )
            setattr(anchor, ANCHOR, True)
        tracked = [(value, builder) for value, builder in uses if type(value) is Tracked]
        for value, _ in tracked:
            self.used.update(value.of_parameters)
        if self.ignored:
            names = self.ignored
            tracked = [use for use in tracked if any(n not in names for n in use[0].of_parameters)]
        if self._is_again:
            self._record_again(call, layout, tracked, saved)
            # In the same place in memory, with no graph behind it. It requires a gradient as it did
            # the first time: kernels are chosen by that.
            use, output, saved = None, output.detach(), ()
        else:
            is_late = torch._C._current_graph_task_id() != self._outer
            if is_late:
                self.used_late.update(name for value, _ in tracked for name in value.of_parameters)
            number = None if self.repeats is None or is_late else self.repeats.number(call)
            use = layout, tracked, number, is_late
            if self._uses is not None:
                self._uses.append(tracked)
        # A linear map makes a view, where it reshapes what it made: nobody else sees the original.
        if is_fresh and output._base is not None:
            output = _as_no_view(output, output.shape)
        pass_on = None if is_fresh else torch.clone
        on_gradient = partial(self._on_gradient, use)
        (tapped,) = Handover.apply(on_gradient, pass_on, 1, anchor, output, *saved)  # type: ignore[misc]
        return tapped

    def _on_gradient(self, use: Use | None, node: Any, gradients: Gradients) -> Gradients:
        """Record the uses of parameters by an operation whose gradient has come.

        Args:
            use: What is to be recorded; None in a second pass, which is not gone backward.
            node: Has the tensors that records are made of.
            gradients: Of what came out.
        """
        (g,) = gradients
        if g is None:
            return gradients
        if use is None:
            refuse_gradients()
        layout, uses, number, is_late = use
        try:
            saved = node.saved_tensors  # asked for once: checkpointing makes them again for it
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                refuse_changed()
            raise
        saved = tuple(value.detach() for value in saved)
        places = []
        for place, name, record in records_of(layout, uses, g, saved):
            if is_late:
                self.recorded_late.add(name)
            if not self.streams:
                record = plain_record(record)
            if number is None or self.on_product is None or type(record) is not Product:
                self.on_record(name, record)
            elif self.on_product(name, record):
                places.append(place)
        if places:
            assert self.repeats is not None
            assert number is not None
            self.repeats.keep(number, g, tuple(map(local, saved)), places)
        return gradients

    def _record_again(
        self, call: Call, layout: Layout | None, uses: Uses, saved: Sequence[Tensor]
    ) -> None:
        """Make the records that wait for a use that is met again; see `recompute`."""
        inputs = tuple(each.detach() for each in saved)
        assert self.repeats is not None
        for g, places, _ in self.repeats.meet(call, tuple(map(local, inputs))):
            for _, name, record in records_of(layout, uses, g, inputs, places):
                self.on_record(name, plain_record(record))


def _has_float_tensor(value: Any) -> bool:
    items = value if isinstance(value, list | tuple) else [value]
    found = [item for item in items if isinstance(item, Tensor)]
    return any(item.is_floating_point() or item.is_complex() for item in found)


_as_no_view = torch.ops.aten._unsafe_view.default


def records_of(
    layout: Layout | None,
    uses: Uses,
    g: Tensor,
    saved: tuple[Tensor, ...],
    places: Sequence[Place] | None = None,
) -> Iterator[tuple[Place, str, Record]]:
    """Make the records of an operation, or some: where each belongs, its parameter, the record."""
    if layout is None:
        raise UnsupportedOperation(
            f"{uses[0][0].of_parameters[0]}: rows of this model lie where values have put them, "
            "and reentrant activation checkpointing runs it where samples are not followed; use "
            "use_reentrant=False"
        )
    if layout.index is not None:
        check_nobodys(layout, g)
    is_whole = type(g) is Tensor and all(type(each) is Tensor for each in saved)
    for i, (tracked, builder) in enumerate(uses):
        if places is not None and all(i != place[0] for place in places):
            continue
        try:
            if is_whole:
                record = builder(layout, g, *saved, shape=tuple(tracked.value.shape))
            else:
                record = record_of(builder, layout, tracked.value, g, saved)
        except BadInput as error:
            if layout.index is None:
                raise
            name = tracked.of_parameters[0]
            raise UnsupportedOperation(
                f"{name}: its rows lie where values have put them, and {error}"
            ) from None
        for j, source in enumerate(tracked.sources):
            if places is None or (i, j) in places:
                own = record if source.back is None else source.back(plain_record(record))
                yield (i, j), source.name, own


class Handover(torch.autograd.Function):
    """Hands tensors on as its own, and calls back when their gradients have come, all at once.

    What is saved goes through autograd, so that activation checkpointing drops it and makes it
    again.

    Args:
        on_gradients: Called with the node, which has `saved_tensors`, and the gradients; returns
            those of the tensors before it.
        pass_on: Makes what is handed on; None marks the tensor itself, which costs no copy, and
            lets it be changed in place later (a view could not). It needs a tensor whose own
            backward does not read it.
        num_tensors: How many tensors are handed on.
        anchor: A scalar that requires a gradient, so that one comes even if no tensor does.
        tensors: Those that are handed on, and those that are saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        on_gradients: OnGradients,
        pass_on: Callable[[Tensor], Tensor] | None,
        num_tensors: int,
        anchor: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Hand tensors on, and save the others."""
        passed, saved = tensors[:num_tensors], tensors[num_tensors:]
        ctx.on_gradients, ctx.num_saved = on_gradients, len(saved)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)  # no gradient is no use, in every pass
        if pass_on is not None:
            return tuple(map(pass_on, passed))
        ctx.mark_dirty(*passed)
        return passed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:  # type: ignore[override]
        """Call back; what only was saved gets no gradient."""
        return *(None,) * 4, *ctx.on_gradients(ctx, gradients), *(None,) * ctx.num_saved


def _followed_apply(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Let the capture of its parameters run a custom `autograd.Function`, if they are all it has.

    What other tensors hold, but for buffers and those of one number, may be samples. Their
    gradients are the function's own matter; one that it makes for a parameter is refused: see
    [Note: no way past].
    """
    # Compiled graphs come here, too, with a thousand tensors: only what is nested is a tree.
    flat = [*args, *kwargs.values()]
    nested = tree_leaves([each for each in flat if not isinstance(each, Tensor)])
    given = [each for each in chain(flat, nested) if isinstance(each, Tensor)]
    tracked = [each for each in given if type(each) is Tracked]
    others = [each for each in given if type(each) is not Tracked and each.ndim]
    if not tracked or any(each.requires_grad for each in others):
        return NotImplemented
    capture = tracked[0].listener
    if others:
        own = chain(capture.module.buffers(), capture.module.parameters())
        held = {each.untyped_storage()._cdata for each in own}
        if any(each.untyped_storage()._cdata not in held for each in others):
            return NotImplemented
    return capture.call_alone(func, args, kwargs)


def refuse_second(*_: Any) -> NoReturn:
    """Raise for a gradient that comes again, or for the record that is made of it."""
    raise BadInput(
        "a second backward pass over one forward pass: its inputs are gone. Call backward once per "
        "batch"
    )


def refuse_changed() -> NoReturn:
    """Raise for an input that is not what went in."""
    raise UnsupportedOperation(
        "an input of a layer was changed in place after the layer had used it, and its gradient is "
        "made of it; use an operation with a result of its own"
    )
