"""`KFAC`: what the user calls.

A step reads top to bottom in `KFAC.step`: statistics of the passes that were kept, factors over all
ranks, inverses on their owners, then gradients to owners, steps, steps back.
"""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unison.capture.torch_compile import uncompile, unwrapped
from unison.dynamo import DynamoBackend
from unison.errors import BadInput
from unison.kfac.assignment import Assignment, assign
from unison.kfac.checkpoint import (
    gathered_state,
    load_into,
    open_layers,
    read_layers,
    save_layers,
    with_prefix,
)
from unison.kfac.collect import Collector, kinds_of
from unison.kfac.compiled import CompiledStatistics
from unison.kfac.config import Every, KFACConfig
from unison.kfac.graft import graft_of
from unison.kfac.inverse import NotInvertible
from unison.kfac.layers import Layer, cost, unfactored
from unison.kfac.optimizers import refuse_adaptive, watch_optimizers
from unison.kfac.owners import owner_of
from unison.kfac.owners.gather import value_from
from unison.kfac.owners.messages import first_message, largest, summed
from unison.kfac.owners.routes import Routes
from unison.kfac.owners.sums import FactorSums
from unison.kfac.packing import Packing
from unison.kfac.passes import Pass, Watch, asker, refuse_private
from unison.kfac.phases import phase
from unison.kfac.precondition import Preconditioner, products_of
from unison.kfac.sample import Keep, Sampled, what_is_missing
from unison.kfac.state import LayerState, counts_of, invert_layers
from unison.kfac.view import table


class KFAC:
    """Preconditions a module's gradients with Kronecker factors of its Fisher matrix.

        kfac = unison.KFAC(module, unison.KFACConfig(damping=1e-3))
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        for x, y in loader:
            optimizer.zero_grad()
            logits = module(x)
            if kfac.wants_statistics:
                kfac.sample(logits).backward(retain_graph=True)
            criterion(logits, y).backward()
            kfac.step()
            optimizer.step()

    The module may be unsharded, under DDP, under `unison.fully_shard` or under torch's own; shard
    it before, and call everything here on every rank.

    Guarantees:
        Factors are sums over the tokens of all ranks, divided by their number once. With a batch
        from `unison.deal(loader, granule=...)` and gradients of the ordered reducer, steps are the
        same bits on any number of ranks.

    Args:
        module: What the user calls.
        config: Settings; the defaults graft Adam's step length and draw labels from the model.
        optimizer: The optimizer that follows. Not needed, but for `kl_clip`, which reads its
            learning rate.

    Raises:
        BadInput: If the optimizer is adaptive and a step length is grafted, or settings do not go
            together.
        UnsupportedOperation: If the module is trained privately, or spread in an unknown way.

    Attributes:
        config: The settings.
        num_steps: Steps that were taken.
        layers: Every layer, in the model's order; empty before the first statistics.
    """

    def __init__(
        self,
        module: nn.Module,
        config: KFACConfig | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        self.config = config = config or KFACConfig()
        module = unwrapped(module)
        refuse_private(module)
        if optimizer is not None:
            refuse_adaptive(optimizer, config.graft)
        if config.kl_clip is not None and optimizer is None:
            raise BadInput(
                "kl_clip bounds lr²·⟨step, gradient⟩ and reads the learning rate from the "
                "optimizer: KFAC(module, config, optimizer)"
            )
        self._module, self._optimizer = module, optimizer
        self._owner = owner_of(module)
        if not self._owner.held:
            raise BadInput(f"{type(module).__name__} has no parameters to train")
        self._device = self._owner.device
        self._shapes = {each.name: each.shape for each in self._owner.held}
        self.layers: list[Layer] = []
        self.num_steps = 0
        self._last_update: int | None = None
        self._last_inverse: int | None = None
        self._is_ordered = True  # the last update: steps have the bits of any number of ranks
        self._passes: list[Pass] = []
        self._collector = Collector(self._owner, config)
        self._compiled: CompiledStatistics | None = None
        self._states: dict[int, LayerState] = {}
        self._graft = graft_of(config)
        self._watch = Watch(module, self._owner, asker(self))
        handle = watch_optimizers([each.parameter for each in self._owner.held], config.graft)
        self._unwatch = weakref.finalize(self, handle.remove)

    # --- statistics ------------------------------------------------------------------------------

    @property
    def wants_statistics(self) -> bool:
        """Whether this step updates the factors, so that `sample` is to be called in it."""
        has_curvature = self.config.policy != "identity"
        return has_curvature and self._is_due(self.config.update_every, self._last_update)

    def _is_due(self, every: Every, last: int | None) -> bool:
        return last is None or self.num_steps - last >= self.config.period(every, self.num_steps)

    def sample(
        self, logits: Tensor, mask: Tensor | None = None, *, divisor: float | None = None
    ) -> Sampled:
        """Draw labels from the model for the last forward pass; its `backward` keeps them.

        Call it for every pass of a step that `wants_statistics`, on every rank. With
        `fisher="empirical"` it takes the gradients of the loss that is sent back after it.

        Args:
            logits: Made of the module's last output [batch, ..., outputs]: of classes, the last
                dimension.
            mask: Which tokens count [batch, ...]: 0 leaves one out of everything.
            divisor: What the loss divides the sum over labels by. Only for `"empirical"`, and only
                if it is neither a sum nor the mean over this pass's labels.

        Raises:
            BadInput: If there was no forward pass, or the logits are of another one.
        """
        if self._watch.current is None:
            why = "the module has not run since" if self.wants_statistics else "it is not due"
            raise BadInput(
                f"no forward pass to draw labels for ({why}); call the module, then "
                "`if kfac.wants_statistics: kfac.sample(logits).backward(retain_graph=True)`"
            )
        keep = Keep(
            self._watch.current, logits, mask, self.config, self.num_steps, divisor, self._passes
        )
        return Sampled(keep)

    # --- the step --------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """Put the preconditioned step where the gradient is; a collective.

        Call it after the last backward pass of a step, before `optimizer.step()`.

        Raises:
            BadInput: If statistics were wanted and no pass was sampled.
            NotInvertible: Naming the layer, its smallest eigenvalue and the remedy.
        """
        # The user may be under autocast, which would round every product here.
        with torch.autocast(self._device.type, enabled=False):
            self._update()
            self._precondition()
        self.num_steps += 1
        self._watch.forget()

    def _update(self) -> None:
        """Factors and inverses, where they are due."""
        if self.wants_statistics:
            self._update_factors()
        every = self.config.invert_every
        is_fresh = self._last_update == self.num_steps
        if self._last_update is not None and (
            is_fresh if every is None else self._is_due(every, self._last_inverse)
        ):
            self._invert()
        if not self.layers:
            assert self.config.policy == "identity", "statistics are wanted at the first step"
            self._take_layers(unfactored(self._shapes, "policy"))

    def _precondition(self) -> None:
        with phase("gradients"):
            gradients = self._routes.gradients()
        steps = self._preconditioner.steps(gradients, is_together=self._is_together)
        if self.config.kl_clip is not None:
            self._clip(self.config.kl_clip, steps, gradients)
        with phase("write"):
            self._routes.give(steps)

    def _clip(
        self, bound: float, steps: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> None:
        """Shorten the step where its predicted change is too large; a collective."""
        assert self._optimizer is not None
        counted = {i: state.layer for i, state in self._states.items() if self._is_first_owner(i)}
        products = products_of(counted, len(self.layers), steps, gradients, self._device)
        # Each product has one owner, all others add 0.0: exact, and then added in order.
        rate = max(group["lr"] for group in self._optimizer.param_groups)
        change = rate**2 * sum(summed(self._owner.ranks, products).tolist())
        if change > bound:
            for step in steps.values():
                step.mul_((bound / change) ** 0.5)

    def _update_factors(self) -> None:
        ranks = self._owner.ranks
        missing = first_message(ranks, what_is_missing(self._passes), self._device)
        if missing:
            self._passes.clear()
            raise BadInput(f"step {self.num_steps} updates the factors, and {missing}")
        passes, self._passes = self._passes, []
        self._watch.is_paused = True
        try:
            with ExitStack() as undo:
                backend = uncompile(self._module, undo) or self._watch.backend
                num_parts = sum(len(each.parts) for each in passes)
                most, is_plain = largest(ranks, self._device, num_parts, int(backend is None))
                undo.enter_context(self._owner.observing())
                if not self.layers:
                    layers = [each.as_dict() for each in self._collector.find_layers(passes[0])]
                    layers = value_from(ranks, 0, layers)
                    self._take_layers([Layer.from_dict(each) for each in layers])
                like, edges = self._routes.like, passes[0].rows.edges
                self._is_ordered = bool(edges)
                packing = Packing(is_folded=not self._is_together)
                has_g = self.config.fisher != "forward"
                sizes = [each.vector_size(has_g=has_g, packing=packing) for each in self.layers]
                sums = FactorSums(sizes, self._assignment, ranks, like, edges)
                compiled = None
                if backend is not None and not is_plain:  # on any rank
                    compiled = self._compiled_by(backend)
                    undo.enter_context(compiled.attached(kinds_of(passes)))
                with phase("statistics"):
                    for each in self._collector.run(
                        passes, self.layers, most, like, packing, compiled
                    ):
                        sums.take(*each)
        finally:
            self._watch.is_paused = False
        with phase("factors"):
            totals = sums.finish()
            counts = counts_of(totals.values())
            for (index, total), own in zip(totals.items(), counts, strict=True):
                self._states[index].update(total, *own, packing)
        self._last_update = self.num_steps

    def _compiled_by(self, backend: DynamoBackend) -> CompiledStatistics:
        """What compiles passes for statistics with the user's backend."""
        known, ranks, device = self._compiled, self._owner.ranks, self._device
        if known is None or known.settings != (backend, self._is_ordered):
            known = self._compiled = CompiledStatistics(
                self._owner.module,
                backend,
                is_granular=self._is_ordered,
                agree=lambda is_so: bool(largest(ranks, device, int(is_so))[0]),
                keeps_graph=self.config.fisher == "exact",
            )
        return known

    def _invert(self) -> None:
        """Invert this rank's layers; what fails on one rank raises on all, with the same words."""
        message = ""
        try:
            with phase("inverses"):
                invert_layers(self._states.values(), self.config, is_together=self._is_together)
        except NotInvertible as error:
            message = str(error)
        found = first_message(self._owner.ranks, message, self._device)
        if found:
            raise NotInvertible(found)
        self._last_inverse = self.num_steps

    # --- layers and their owners -----------------------------------------------------------------

    def _take_layers(self, layers: list[Layer]) -> None:
        self.layers = layers
        ranks = self._owner.ranks
        costs = [cost(layer) for layer in layers]
        self._assignment: Assignment = assign(costs, ranks.size, self.config.owner_fraction)
        self._routes = Routes(self._owner, layers, self._assignment)
        self._states = {
            index: LayerState(layer, self.config)
            for index, layer in enumerate(layers)
            if self._assignment.owns(ranks.rank, index)
        }
        self._preconditioner = Preconditioner(self._states.values(), self._graft)

    @property
    def _is_together(self) -> bool:  # layers of equal shape are; see stacks.py
        return self._owner.ranks.size == 1 and not self._is_ordered

    def _is_first_owner(self, index: int) -> bool:
        return self._assignment.owners[index][0] == self._owner.ranks.rank

    # --- looking ---------------------------------------------------------------------------------

    def factors(self) -> dict[str, dict[str, Tensor]]:
        """The averaged factors of the layers that this rank owns: `a` and `g`, or `d`."""
        return {state.layer.name: state.factors for state in self._states.values()}

    def memory_usage(self) -> dict[str, int]:
        """Bytes that this rank holds: factors, inverses, grafting, and all together."""
        totals = {"factors": 0, "inverses": 0, "grafting": 0}
        for of_layer in self._bytes().values():
            for what, count in of_layer.items():
                totals[what] += count
        return {**totals, "total": sum(totals.values())}

    def _bytes(self) -> dict[int, dict[str, int]]:
        """Bytes of each layer that this rank owns, by what for."""
        return {
            index: {
                **state.nbytes,
                "grafting": sum(
                    value.nbytes for value in self._graft.tensors(state.layer.parameters).values()
                ),
            }
            for index, state in self._states.items()
        }

    def __repr__(self) -> str:
        if not self.layers:
            return f"KFAC({self.config}; layers are found at the first step)"
        return table(self.layers, self._assignment, self._bytes(), self.memory_usage())

    # --- storage ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run needs to go on, whole and on every rank; a collective.

        Its layers are stored by name, so that any number of ranks, sharded in any way, loads it.
        `save` does the same without any rank having it whole.
        """
        layers: list[dict[str, Any]] = []
        if self.layers:
            layers = gathered_state(self.layers, self._assignment, self._own(), self._owner.ranks)
        return {**self._progress(), "layers": layers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run stopped; the result is that of a run without a stop.

        Raises:
            BadInput: If it is of another model.
        """
        self._take_stored([each["layer"] for each in state["layers"]])
        load_into(self._states, self._graft, dict(enumerate(state["layers"])), self._routes.like)
        self._go_on(state)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint, each layer by its owner; a collective. See docs/checkpoints.md.

        Args:
            folder: Which every rank can reach by this name. It appears when it is complete.

        Raises:
            BadInput: On every rank, if something else has the name.
            CheckpointFailed: On every rank, if any could not write.
        """
        first = {i: tensors for i, tensors in self._own().items() if self._is_first_owner(i)}
        extra = {**self._progress(), "layers": [each.as_dict() for each in self.layers]}
        save_layers(Path(folder), self.layers, first, extra, self._owner.ranks)

    def load(self, folder: str | Path) -> None:
        """Go on from what `save` wrote on any number of ranks, each reads its layers; a collective.

        Raises:
            BadInput: On every rank, if it is damaged or of another model.
            CheckpointFailed: On every rank, if any could not read.
        """
        manifest = open_layers(Path(folder), self._owner.ranks)
        self._take_stored(manifest.extra["layers"])
        found = read_layers(
            Path(folder), manifest, self._states, self._routes.like, self._owner.ranks
        )
        load_into(self._states, self._graft, found, self._routes.like)
        self._go_on(manifest.extra)

    def _own(self) -> dict[int, dict[str, Tensor]]:
        """What is stored of the layers that this rank owns."""
        return {
            index: state.tensors() | with_prefix(self._graft.tensors(state.layer.parameters))
            for index, state in self._states.items()
        }

    def _progress(self) -> dict[str, int | None]:
        return {
            "num_steps": self.num_steps,
            "last_update": self._last_update,
            "last_inverse": self._last_inverse,
            "is_ordered": self._is_ordered,
        }

    def _take_stored(self, described: Sequence[Mapping[str, Any]]) -> None:
        layers = [Layer.from_dict(each) for each in described]
        names = {name for layer in layers for name in layer.parameters}
        if layers and names != set(self._shapes):
            missing = sorted(set(self._shapes) ^ names)[:3]
            raise BadInput(f"the state is of another model: {missing} are not in both")
        self._graft = graft_of(self.config)
        self._take_layers(layers)

    def _go_on(self, state: Mapping[str, Any]) -> None:
        self.num_steps = state["num_steps"]
        self._last_update, self._last_inverse = state["last_update"], state["last_inverse"]
        self._is_ordered = bool(state.get("is_ordered", True))
        self._passes.clear()
        self._watch.forget()

    def detach(self) -> None:
        """Leave the module as it was."""
        self._watch.detach()
        self._unwatch()
