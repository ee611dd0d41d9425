"""The engine's hold on a module: every backward pass becomes norms, coefficients, clipped sums.

    forward ── gate ── loss.backward() ── gate ── records, measured as they come ── end of backward:
    norms of all samples ── coefficients ── clipped sums, parameter by parameter

[Note: one pass, or two] With a plan of one pass, sums are made when the backward pass ends. With
two, the gate runs a backward pass of its own for the norms before it lets the user's go on, whose
records are added up with the coefficients that are known by then.

All outputs of the module go through one gate, so that all their gradients come back at once.
"""

import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from unison.capture import Capture, RngAutocastState, rng_autocast_state
from unison.capture.capture import Gradients, Handover, OnGradients
from unison.capture.torch_compile import uncompile
from unison.capture.tracked import ParamRegistry, find_params
from unison.clip import Clipping, Learned, Plan
from unison.errors import BadInput, UnsupportedOperation
from unison.ops import Record
from unison.parallel import MakeSums, private_trainings
from unison.privacy.arguments import refuse_gradient
from unison.privacy.compiled import CompiledPasses
from unison.privacy.inputs import (
    BufferVersions,
    ForwardWatch,
    Inputs,
    ModuleHook,
    buffer_versions,
    holds_samples,
    inputs_of,
    refuse_scaled_loss,
    refuse_written,
    scaled_losses_noticed,
)
from unison.privacy.learning import ClippingSettings, Learning
from unison.privacy.loss_check import KEPT, is_checked_again, label_check
from unison.privacy.loss_tape import EARLIER, OTHER_ROWS, refuse_unseen
from unison.privacy.sampling import (
    BatchPlan,
    Dealing,
    Part,
    PhysicalBatch,
    granular_pass,
    packed,
    rows_to_plan,
    take_mean_was_used,
    unpacked,
)
from unison.torch_internals import (
    DynamoBackend,
    backend_of_caller,
    compiled_part,
    has_values,
    is_recording,
    tracer,
)

if TYPE_CHECKING:
    from unison.privacy.graph import GraphedPass
    from unison.privacy.training import PrivateTraining

# A view made inside of a Function must not be changed in place, and users change logits in place.
_as_no_view = torch.ops.aten._unsafe_view.default

# Calls back when the running backward pass has ended, after those that asked before.
_queue = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]

Summands = tuple[MakeSums, BatchPlan, Sequence[int], torch.dtype]
"""What `ParallelAdapter.add` takes."""


def _with_thin_zeros(outputs: tuple[Tensor, ...], gradients: Gradients) -> Iterator[Tensor | None]:
    """Gradients of outputs; zeros without memory where a compiled graph needs one and none came.

    Autograd would make zeros of the output's shape and hold them all through the graph's backward
    pass: beside a loss, those of the logits, the largest tensor there is. An expanded scalar the
    graph makes its own, and lets go when it has read it.
    """
    nodes = {each.grad_fn for each, g in zip(outputs, gradients, strict=True) if g is not None}
    for each, g in zip(outputs, gradients, strict=True):
        node = each.grad_fn
        if g is None and node in nodes and type(node).__name__ == "CompiledFunctionBackward":
            g = each.new_zeros(()).expand(each.shape)
        yield g


def gate(output: Any, on_backward: OnGradients) -> Any:
    """Return the same output, of which `on_backward` learns before the module's backward pass.

    Args:
        output: Whatever a module returns; tensors in it that take gradients pass the gate.
        on_backward: Called with a node, which has saved the tensors before the gate, and their
            gradients, once per backward pass; it returns those that go on. It may run a backward
            pass of its own over the tensors.
    """
    leaves, spec = tree_flatten(output)
    places = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]
    if not places:
        return output

    def pass_on(output: Tensor) -> Tensor:
        return _as_no_view(output, output.shape)

    tensors = [unpacked(leaves[place]) for place in places]  # one per granule, or one
    flat = [tensor for each in tensors for tensor in each]
    # A model whose outputs take no gradients: the user's loop calls backward all the same.
    anchor = torch.zeros((), device=flat[0].device, requires_grad=True)
    passed = iter(Handover.apply(on_backward, pass_on, len(flat), anchor, *flat, *flat))  # type: ignore[arg-type]
    for place, each in zip(places, tensors, strict=True):
        leaves[place] = packed(leaves[place], [next(passed) for _ in each])
    return tree_unflatten(leaves, spec)


class Phase(Enum):
    """How far one captured pass has come."""

    FORWARD = auto()  # captured, not sent back yet
    BACKWARD = auto()
    DONE = auto()


@dataclass(eq=False)
class RunningPass:
    """One physical batch on its way through the module.

    Attributes:
        batch: The batch.
        parts: Its rows.
        clippings: What takes their records, by granule.
        captures: What makes them, likewise.
        context: What is put in the module's place for the pass; closed, it lets go of all records.
        num_backwards: Backward passes that clipping takes.
        buffers: Versions of the module's buffers when it began.
        call: What the module is called with, if it is to be run again.
        phase: How far it has come.
        coefficients: Of the samples for each parameter, by granule, once norms are known.
        summands: What makes its sums, once they may be made.
    """

    batch: PhysicalBatch
    parts: Sequence[Part]
    clippings: dict[int, Clipping]
    captures: dict[int, Capture]
    context: ExitStack
    num_backwards: int
    buffers: BufferVersions
    call: tuple[tuple, dict[str, Any], RngAutocastState] | None = None
    phase: Phase = Phase.FORWARD
    coefficients: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    summands: Summands | None = None

    def shares(self) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Return what the sums are made of (`Clipping.shares`); None if there are granules."""
        if len(self.clippings) != 1:
            return None
        ((granule, clipping),) = self.clippings.items()
        return clipping.shares(self.coefficients[granule])


class Attachment:
    """Hooks on a module that turn its backward passes into clipped sums.

    The module itself is not changed: its parameters, their names and its class are the user's. In
    evaluation mode and without gradients nothing is captured.

    Args:
        training: Knows the user's module, the batch in his hands and his loss; decides the
            coefficients, and takes the clipped sums.
        settings: How clipping is computed.
        dealing: What the rows of that batch are.

    Attributes:
        public_terms: Gradients of terms of the logical batch's loss that do not depend on data.
    """

    def __init__(
        self, training: "PrivateTraining", settings: ClippingSettings, dealing: Dealing
    ) -> None:
        module, owner = training.module, training.owner
        self.module, self.settings = module, settings
        self.params = ParamRegistry(*find_params(module))
        self._inputs_of = partial(inputs_of, dim=settings.batch_dim, rows=settings.rows_per_sample)
        self._owner, self._dealing = owner, dealing
        self.plan: Plan | None = None
        self._training: PrivateTraining | GraphedPass | None = training
        self._pass: RunningPass | None = None
        self._recorder = training.recorder
        self.public_terms: dict[str, Tensor] = {}
        self._without_grad: set[int] = set()  # parameters that had none before such a term's
        self._follows_loss = True
        self.learning = Learning(module, settings, owner, self.params)
        self._compiled: CompiledPasses | None = None
        self._is_told = False  # that passes run uncompiled
        self._is_repeating = False  # runs the module again, for what was not kept
        # Of a pass whose own loss was sent back: refuses labels that couple samples.
        self._label_checks: list[Callable[[], None]] = []  # of passes since the last release
        self._hooked: set[nn.Module] = set()  # where users' backward hooks are followed
        # A forward pass: what it draws, and its samples where values move rows.
        self._following = ExitStack()
        names = {id(place.parameter): place.name for place in reversed(self.params.places)}
        with ExitStack() as stack:
            for each in module.parameters():
                if each.requires_grad:
                    for handle in self._public_hooks(names[id(each)], each):
                        stack.callback(handle.remove)
            # Before all others: FSDP2's own gathers parameters, and learning runs the module too.
            before, after = ModuleHook(self._before_forward), ModuleHook(self._after_forward)
            handle = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
            handle = module.register_forward_hook(after, with_kwargs=True, always_call=True)
            stack.callback(handle.remove)
            stack.enter_context(scaled_losses_noticed())
            self._handles = stack.pop_all()
        if settings.compile is not None:
            self._compile_with(settings.compile)

    def _compile_with(self, backend: DynamoBackend) -> None:
        """Compile the module's passes from now on, or say once why they are not."""
        why_not = self._owner.why_uncompiled
        if why_not is not None:
            self._is_told = True
            warnings.warn(f"private passes run uncompiled: {why_not}", stacklevel=2)
            return
        is_granular = self._dealing.granule is not None
        self._compiled = CompiledPasses(
            self.module, backend, self.learning, is_granular=is_granular
        )
        self._dealing.has_fixed_size = True
        self._handles.callback(self._compiled.detach)

    def _public_hooks(self, name: str, parameter: nn.Parameter) -> list[RemovableHandle]:
        """Put hooks on a parameter: gradients that reach it past the capture are kept, or refused.

        Terms such as `loss + 0.01 * sum(p.square().sum() ...)` need no clipping and no noise. Their
        gradients are added to the noisy ones as they are.

        Guarantees:
            A gradient is kept only if the loss of the running pass was found to have terms whose
            gradients are the same bits for any values of the batch; every other gradient that
            reaches a parameter raises.

        They know this object weakly: hooks of tensors are out of the garbage collector's sight.
        """
        attached, own = ref(self), ref(parameter)

        def take(gradient: Tensor) -> Tensor | None:
            held, parameter = attached(), own()
            if held is None or parameter is None:
                return None
            if not held._recorder.has_terms:
                refuse_gradient(name, gradient)
            if held._owner.everyone.size > 1 or parameter.shape != gradient.shape:
                raise UnsupportedOperation(
                    f"the loss has a term of {name!r} that does not depend on the batch, and the "
                    "module is trained on several ranks. Remedy: the optimizer's weight_decay, or "
                    "add the term's gradient to parameter.grad before optimizer.step()"
                )
            # Each pass of a logical batch has the same term: it counts once.
            held.public_terms[name] = gradient.detach().clone()
            if parameter.grad is None:
                held._without_grad.add(id(parameter))
            return torch.zeros_like(gradient)

        def after(parameter: Tensor) -> None:
            held = attached()
            if held is not None and id(parameter) in held._without_grad:
                held._without_grad.discard(id(parameter))
                parameter.grad = None  # undo what autograd did with the zeros

        return [
            parameter.register_hook(take),
            parameter.register_post_accumulate_grad_hook(after),
        ]

    @contextmanager
    def redirected(self, graphed: "GraphedPass") -> Iterator[None]:
        """Let another decide in this block: for passes that are not of the loader's batches.

        Args:
            graphed: Stands in for the dealing (`granule`, `parts`, `most_rows`, `mean_was_used`,
                `max_physical_batch_size`) and for the training (`current`, `coefficients`,
                `add_sums`).
        """
        self.drop_pass()
        kept = self._dealing, self._training
        self._dealing, self._training, self._follows_loss = cast(Any, graphed), graphed, False
        try:
            yield
        finally:
            self.drop_pass()
            self._dealing, self._training = kept
            self._follows_loss = True

    def detach(self) -> None:
        """Give the module back as it was; nothing here keeps it alive."""
        self.drop_pass()
        self._handles.close()
        self.params.modules, self.params.places, self.params.tracked = [], [], {}
        self._hooked.clear()
        self._training = None

    def drop_pass(self) -> None:
        """Forget a pass that is under way; its sums are not added."""
        self._following.close()
        if self._pass is not None:
            self._pass.context.close()
            self._pass.call = self._pass.summands = None
            self._pass = None

    # --- forward ---------------------------------------------------------------------------------

    def check(self, args: tuple, kwargs: dict[str, Any]) -> Plan:
        """Learn what the module does with a batch, and make sure that it can be clipped.

        Raises:
            BadInput: There is no batch, or what is trained is not what was made private.
            UnsupportedOperation: An operation has no rule, or samples mix.
        """
        dim = self.settings.batch_dim
        sizes = [
            leaf.shape[dim]
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and leaf.ndim > dim
        ]
        if not sizes or sizes[0] == 0:
            raise BadInput(
                "expected what the module is called with, a batch of at least one sample"
            )
        inputs = self._inputs_of(args, kwargs, sizes[0])
        num_rows = rows_to_plan(self._dealing, sizes[0])
        learned, is_compiled = self.learning.learn(inputs), self._runs_compiled
        limit = self._dealing.max_physical_batch_size if is_compiled else None
        return self.learning.plan(
            learned, num_rows, inputs.device, is_compiled=is_compiled, most_rows=limit
        )

    @property
    def _runs_compiled(self) -> bool:
        return self._compiled is not None and self._compiled.refusal is None

    def _has_fitting_rows(self, learned: Learned, inputs: Inputs, num_rows: int) -> bool:
        """Whether compiled passes should have as many rows; those that are yet to be drawn do.

        The rows of a pass are known before the module has run. So a logical batch or two come in
        larger passes than they should, which are not worth compiling.
        """
        limit = self._dealing.max_physical_batch_size
        if limit is None or self._dealing.granule is not None or not self._follows_loss:
            return True
        rows = self.learning.rows_per_pass(learned, limit, inputs.device)
        cast("PrivateTraining", self._training).loader.limit_rows(rows)
        return num_rows <= rows

    @property
    def is_aside(self) -> bool:
        """Whether the module runs for our own sake, and not to be trained."""
        is_trying = self._compiled is not None and self._compiled.is_trying
        return self._is_repeating or self.learning.is_running or is_trying

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.is_aside:
            return
        is_trained = module.training and torch.is_grad_enabled()
        if is_trained and (name := tracer()) is not None:
            raise UnsupportedOperation(
                f"{name} would write down what the engine does beside what the module does: call "
                "module.eval() or use torch.no_grad() around it, or give it copy.deepcopy(module)"
            )
        if self._is_differentiated(args, kwargs):
            return
        self._recorder.suspend((args, kwargs))
        if not is_trained:
            return
        if self._training is None:
            raise BadInput("the engine was detached: call make_private again")
        batch = self._training.current
        if batch is None:
            raise BadInput(
                "the module is trained privately, and this is not a batch of its loader. Iterate "
                "over the loader that make_private returned; for anything else call module.eval() "
                "or use torch.no_grad()"
            )
        if self._recorder.unknown_inputs and self._follows_loss:
            self._refuse_foreign(args, kwargs)
        joined = self._pass if self._pass is not None and self._pass.batch is batch else None
        if joined is None:
            self.drop_pass()
        self._following.close()
        if self._dealing.granule is not None:  # what is drawn belongs to samples
            name = type(module).__name__
            drawing = granular_pass(name, module, (args, kwargs), looks_at_writes=False)
            self._following.enter_context(drawing)
        if joined is not None:
            self._join(joined, args, kwargs)
            for capture in joined.captures.values():
                capture.is_outside = False
        self._follow_hooks()
        self._pass = joined or self._begin_pass(batch, args, kwargs)
        if any(each.axes.is_traced for each in self._pass.captures.values()):
            self._follow(self._following, self._pass, args, kwargs)
        recorder = self._recorder
        is_due = recorder.number == 1 or self.settings.recheck
        is_due = is_due and is_checked_again(recorder.number)  # its loss will be
        if self._follows_loss and recorder.is_open and is_due and not self._runs_compiled:
            self._watch(args, kwargs)

    def _is_differentiated(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a pass in evaluation mode is one for gradients of what the module is given.

        Adversarial rows are made so. The recorder follows such a pass operation by operation, so
        that the derivatives can be taken again; of other passes it follows the output alone.
        """
        return (
            not self.module.training
            and torch.is_grad_enabled()
            and self._owner.is_alone
            and any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((args, kwargs)))
        )

    def _watch(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note what forward makes of the batch."""
        recorder = self._recorder
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # What is made of texts is not known as the batch's; what stands beside rows is public.
        of_batch = [leaf for leaf in given if recorder.slot_of(leaf) is not None] or given
        watch = ForwardWatch(self.module, of_batch, recorder)
        self._following.enter_context(watch.running())

    def _follow_hooks(self) -> None:
        """Let the recorder know the gradients that users' hooks of modules see, and may keep."""
        for _, each in self.params.modules:
            if each not in self._hooked and (each._backward_hooks or each._backward_pre_hooks):
                self._hooked.add(each)
                # What it sees of a batch is no longer unknown to the recorder.
                recorder = self._recorder
                hook = ModuleHook(lambda module, *gradients, to=recorder: to.hide(gradients))
                if each._backward_pre_hooks:
                    handle = each.register_full_backward_pre_hook(hook, prepend=True)
                    self._handles.callback(handle.remove)
                if each._is_full_backward_hook is False:  # torch takes one kind at a module
                    self._handles.callback(each.register_backward_hook(hook).remove)
                elif each._backward_hooks:
                    handle = each.register_full_backward_hook(hook, prepend=True)
                    self._handles.callback(handle.remove)

    def _refuse_foreign(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Refuse rows that are known to be others than those of the batch in the user's hands.

        Raises:
            BadInput: They are of an earlier step, or of another engine's loader.
            UnsupportedOperation: They were made of the batch in a way that cannot be followed.
        """
        own, others = self._recorder, [each.recorder for each in private_trainings]
        for leaf in tree_leaves((args, kwargs)):
            if not isinstance(leaf, Tensor):
                continue
            slot, whose = own.slot_of(leaf), None
            if slot == EARLIER:
                whose = "is made of the rows of an earlier step"
            elif slot is None and any(each.slot_of(leaf) is not None for each in others):
                whose = "is made of rows that another engine's loader handed out"
            if whose is not None:
                raise BadInput(
                    f"a tensor of shape {list(leaf.shape)} that the module is given {whose}: these "
                    "rows were not drawn for this step, and the ledger would say otherwise. "
                    + OTHER_ROWS
                )
            if slot is None and own.hidden and own.meets_hidden([leaf]):
                raise UnsupportedOperation(
                    f"a tensor of shape {list(leaf.shape)} that the module is given was made of "
                    "the batch by torch.func or by a backward pass of its own, so that rows may "
                    "meet in it. Use torch functions, or do it in the data set or in collate_fn"
                )

    def _follow(
        self, context: ExitStack, running: RunningPass, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        """Follow samples through a forward pass, where values decide which rows are whose."""
        (first, *others) = running.captures.values()
        if others:
            raise UnsupportedOperation(
                "values decide where rows of this module lie, and samples are not followed through "
                "several granules at once; train it without granule="
            )
        inputs = self._inputs_of(args, kwargs, running.parts[0].num_rows)
        samples = [inputs.leaves[place] for place in inputs.places]
        context.enter_context(first.following(samples, inputs.dim, inputs.rows))

    def _join(self, running: RunningPass, args: tuple, kwargs: dict[str, Any]) -> None:
        """Let several forward passes of one batch end in one backward pass."""
        if running.phase is not Phase.FORWARD:
            raise BadInput(
                "this batch went backward already: a second backward pass would add to each "
                "sample's gradient after it was clipped. Add the losses up and call backward once "
                "per batch; for several batches per step give the loader a larger batch size and "
                "make_private a max_physical_batch_size. To run the module on anything else call "
                "module.eval() or use torch.no_grad()"
            )
        self._inputs_of(args, kwargs, self._dealing.parts[0].num_rows)
        if running.call is not None:
            raise UnsupportedOperation(
                f"clipping {self.settings.mode!r} runs the forward pass again, and several forward "
                "passes of one batch go into this loss. Use a mode that keeps records, such as "
                "'flash_fuse_bk'"
            )

    def _begin_pass(self, batch: PhysicalBatch, args: tuple, kwargs: dict[str, Any]) -> RunningPass:
        if self._follows_loss:  # the user may have compiled the module after `make_private`
            backend = None
            if compiled_part(self.params.modules) is not None:
                backend = uncompile(self.module, self._handles)
            if self._compiled is None and not self._is_told:
                backend = backend or backend_of_caller()
                if backend is not None:
                    self._compile_with(backend)
        if batch.is_first:  # those of a logical batch that was left are of no matter
            self._label_checks = []
        num_rows = self._dealing.parts[0].num_rows  # all granules have as many
        inputs = self._inputs_of(args, kwargs, num_rows)
        anew = self.learning.has_new_number()
        if self._owner.everyone.size > 1:
            anew = self._refuse_other_kinds(inputs, anew)
        learned = self.learning.learn(inputs, anew=anew)
        buffers = buffer_versions(self.params.modules)
        compiled, limit = self._compiled, self._dealing.max_physical_batch_size
        is_compiled = self._runs_compiled
        if is_compiled and not self._has_fitting_rows(learned, inputs, num_rows):
            compiled, is_compiled = None, False
        plan = self.plan = self.learning.plan(
            learned,
            self._dealing.most_rows,
            inputs.device,
            is_compiled=is_compiled,
            most_rows=limit if is_compiled else None,
        )
        num_forwards, num_backwards = plan.num_forwards, plan.num_backwards
        runs_compiled = compiled is not None and compiled.takes(inputs, learned, plan, num_rows)
        if compiled is not None and not runs_compiled and self._follows_loss:
            cast("PrivateTraining", self._training).loader.limit_rows(limit)
        clippings, captures = {}, {}
        for part in self._dealing.parts:
            clipping = Clipping(plan, num_rows, learned.storage)
            capture = Capture(
                self.module,
                num_rows,
                axes=learned.axes,
                on_record=partial(self._take_record, part.granule),
                on_product=clipping.take_product if num_forwards == 2 else None,
                known=self.params,
                streams=num_forwards == 1,
                has_one_backward=num_forwards == num_backwards == 1,
            )
            capture.factored = plan.factored
            clippings[part.granule], captures[part.granule] = clipping, capture
        context = ExitStack()
        context.callback(clippings.clear)
        for capture in captures.values():
            context.callback(capture.release)
        context.enter_context(self._owner.installed(captures))
        if compiled is not None and runs_compiled:
            context.enter_context(compiled.running(list(captures.values())))
        parts = self._dealing.parts
        running = RunningPass(batch, parts, clippings, captures, context, num_backwards, buffers)
        if num_forwards == 2:
            if not self._owner.can_repeat:
                context.close()
                raise UnsupportedOperation(
                    f"clipping {self.settings.mode!r} runs the forward pass again to spare memory, "
                    "which sharded modules do not take yet: use a larger memory_budget, or 'ghost' "
                    "or 'flash_fuse', which keep nothing"
                )
            running.call = (args, kwargs, rng_autocast_state(self.module, (args, kwargs)))
        return running

    def _refuse_other_kinds(self, inputs: Inputs, anew: bool) -> bool:
        """Refuse batches of another kind than other ranks have; a collective if passes are.

        What a kind does is learned by passes of its own. A rank that ran them alone would gather
        units while the others sum gradients.

        Returns:
            Whether a rank that runs with this one has to learn anew.
        """
        everyone = self._owner.everyone
        if not self._owner.runs_together or is_recording():
            return anew
        own = zlib.crc32(repr(inputs.kind).encode())
        kinds = torch.zeros(everyone.size + 1, dtype=torch.float64, device=inputs.device)
        kinds[everyone.rank] = own  # each has one owner and all others add 0: exact
        kinds[-1] = float(anew)
        found = everyone.sum_(kinds).tolist()
        if has_values() and set(found[:-1]) != {own}:
            shapes = [list(inputs.leaves[place].shape) for place in inputs.places]
            raise BadInput(
                f"ranks gave the module batches of different shapes in one pass (here {shapes}), "
                "and parameters are sharded: ranks must run the same passes. Pad all rows to one "
                "length, as make_private(row_shape={...}) does, or use DistributedDataParallel"
            )
        return has_values() and found[-1] > 0

    def _after_forward(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
    ) -> Any:
        if self.is_aside or self._is_differentiated(args, kwargs):
            return output
        self._following.close()
        running, gated = self._pass, output
        if running is not None and module.training:
            if output is None:  # an exception is on its way
                self.drop_pass()
            elif torch.is_grad_enabled() and running.phase is Phase.FORWARD:
                for capture in running.captures.values():  # uses from here on are the user's own
                    capture.is_outside = True
                refuse_written(self.params.modules, running.buffers, self.learning.may_write)
                # Weakly: the loss may outlive the engine, and must not keep the module.
                gated = gate(output, partial(self._on_backward, ref(self), (args, kwargs)))
        # What is exported has no values, and is nothing that the user's loss is made of.
        is_seen = tracer() in (None, "torch.jit.trace")
        self._recorder.resume(gated if is_seen else None, is_trained=gated is not output)
        return gated

    # --- backward --------------------------------------------------------------------------------

    @staticmethod
    def _on_backward(
        attachment: "ref[Attachment]",
        given: Any,
        node: Any,
        gradients: Gradients,
    ) -> Iterator[Tensor | None]:
        """Gradients have come to the gate: the module's own backward pass is next.

        Returns:
            Gradients of the outputs; see `_with_thin_zeros`.
        """
        self = attachment()
        if self is None:
            raise BadInput(
                "the engine was detached after this forward pass: nothing takes its records"
            )
        outputs = node.saved_tensors
        refuse_scaled_loss()
        self._refuse_batch_outputs(given, outputs, gradients)
        if self.module in self._hooked:  # torch has looked for its hooks before ours was there
            self._recorder.hide(gradients)
        running = self._pass
        if running is None or running.phase is Phase.DONE:
            raise BadInput(_TWICE)
        if self._follows_loss and not self._recorder.is_judged:
            refuse_unseen()
        if running.phase is Phase.BACKWARD:
            if running.num_backwards == 2:
                raise UnsupportedOperation(
                    f"clipping {self.settings.mode!r} takes two backward passes, and several "
                    "forward passes of one batch went into this loss. Use a mode of one pass, "
                    "such as 'auto' or 'flash_fuse_bk'"
                )
            return _with_thin_zeros(outputs, gradients)
        running.phase = Phase.BACKWARD
        for capture in running.captures.values():  # checkpointing runs the module again
            capture.is_outside = False
        self._dealing.mean_was_used = take_mean_was_used()
        if running.num_backwards == 2:
            self._measure_first(running, outputs, gradients)
        _queue(self._end_backward)
        return _with_thin_zeros(outputs, gradients)

    def _refuse_batch_outputs(
        self, given: Any, outputs: tuple[Tensor, ...], gradients: Gradients
    ) -> None:
        """Refuse a gradient of an output that is of the whole batch, if samples mix in it."""
        if not self._dealing.parts:
            return
        dim, num_samples = self.settings.batch_dim, self._dealing.parts[0].num_rows
        sizes = {num_samples, num_samples * self.settings.rows_per_sample}
        for output, gradient in zip(outputs, gradients, strict=True):
            dims = (dim, 0)
            if gradient is None or any(holds_samples(output, n, d) for n in sizes for d in dims):
                continue
            if self.learning.refusal is not None:
                raise UnsupportedOperation(self.learning.refusal)
            if self._follows_loss:
                self._refuse_other_reduction(gradient, num_samples)
            labels = [
                torch.cat([part.movedim(dim, 0) for part in unpacked(leaf)])
                for leaf in tree_leaves(given)
                if any(holds_samples(unpacked(leaf)[0], n, dim) for n in sizes)
            ]
            self._label_checks.append(label_check(labels))

    def _check_labels(self, running: RunningPass) -> None:
        """Refuse samples with different numbers of labels, before anything of them is released.

        A GPU is waited for once in a logical batch: the host may be several passes ahead of it.
        """
        assert self.plan is not None
        can_wait = self.plan.machine == "cuda" and running.num_backwards == 1
        if running.batch.is_last or not can_wait:
            checks, self._label_checks = self._label_checks, []
            for check in checks:
                check()

    def _refuse_other_reduction(self, gradient: Tensor, num_samples: int) -> None:
        """Refuse a module's own loss that is a sum where the loss is said to be a mean, or reverse.

        A user who divides it by the rows himself is right.
        """
        said = cast("PrivateTraining", self._training).loss_reduction
        found = self.learning.reduction
        if found in (said, None) or gradient.numel() != 1:
            return
        factor = num_samples if said == "sum" else 1 / num_samples
        factors = factor, factor * self.settings.rows_per_sample ** (1 if said == "sum" else -1)
        if any(math.isclose(float(gradient), each, rel_tol=1e-3) for each in factors):
            return
        remedy = "divide it by" if found == "sum" else "multiply it by"
        raise UnsupportedOperation(
            f"the model's own loss is a {found} over rows and was said to be a {said}, so that a "
            f"row's gradient would depend on how many others its pass has: {remedy} the number of "
            f"rows, let the model's config say {said!r} (as ctc_loss_reduction does), or say "
            f"make_private(loss_reduction={found!r})"
        )

    def _measure_first(
        self,
        running: RunningPass,
        outputs: tuple[Tensor, ...],
        gradients: Gradients,
    ) -> None:
        reached = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        # Records are made at the anchors. They are not named as inputs=, which would forbid what
        # torch cannot do with names: reentrant checkpointing. No leaf of the user's is reached.
        if reached and any(each.anchors for each in running.captures.values()):
            torch.autograd.backward(
                [output for output, _ in reached],
                [gradient for _, gradient in reached],
                retain_graph=True,
            )
        self._decide(running)
        for granule, clipping in running.clippings.items():
            clipping.begin_second_pass(running.coefficients[granule])
        if self._follows_loss:
            self._check_labels(running)
            cast("PrivateTraining", self._training).begin_sums(running)

    def _repeat_forward(
        self, running: RunningPass, args: tuple, kwargs: dict[str, Any], state: RngAutocastState
    ) -> None:
        """Run the forward pass again where inputs were not kept; see `unison.capture.recompute`."""
        again = {key: each for key, each in running.clippings.items() if each.num_forwards == 2}
        if not again:
            return
        with ExitStack() as stack:
            for granule, clipping in again.items():
                clipping.begin_second_pass(running.coefficients[granule])
                stack.enter_context(running.captures[granule].recompute(state))
            self._is_repeating = True  # the hooks let it pass
            stack.callback(setattr, self, "_is_repeating", False)
            if any(each.axes.is_traced for each in running.captures.values()):
                self._follow(stack, running, args, kwargs)
            self.module(*args, **kwargs)

    def _decide(self, running: RunningPass) -> None:
        """Decide the coefficients where that has not been done."""
        assert self._training is not None
        for part in running.parts:
            if part.granule not in running.coefficients:
                clipping = running.clippings[part.granule]
                running.coefficients[part.granule], clipping.grid = self._training.coefficients(
                    running.batch, part, clipping.norms()
                )

    def _take_record(self, granule: int, name: str, record: Record) -> None:
        """Hand a record to clipping, if this is its time."""
        running = self._pass
        is_repeated = running is not None and running.phase is Phase.DONE and self._is_repeating
        if running is not None and running.phase is Phase.FORWARD:
            raise UnsupportedOperation(f"the loss is made of a tensor {KEPT}")
        if running is None or not (running.phase is Phase.BACKWARD or is_repeated):
            raise BadInput(_TWICE)
        running.clippings[granule].take(name, record)

    def _end_backward(self) -> None:
        running = self._pass
        assert running is not None
        assert self._training is not None
        running.phase = Phase.DONE
        try:
            # Hooks may write in the backward pass.
            refuse_written(self.params.modules, running.buffers, self.learning.may_write)
            if self._label_checks:
                self._check_labels(running)
            self._decide(running)
            if running.call is not None:
                self._repeat_forward(running, *running.call)
            self._training.add_sums(running)
        finally:
            running.clippings.clear()
            running.coefficients.clear()
            running.call = running.summands = None
            if running.batch.is_last:
                self.params.tracked = {}
            # Sharded units end their own backward pass after this, and must still know that there
            # are no gradients for them to sum.
            _queue(running.context.close)


_TWICE = (
    "a backward pass of a batch that went backward already, or was left. Call backward once per "
    "batch that the loader hands out"
)
