"""`KFAC`: what the user calls.

A step reads top to bottom in `KFAC.step`: statistics of the passes that were kept, factors over all
ranks, inverses on their owners, then gradients to owners, steps, steps back.
"""

import itertools
import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from unison.capture.torch_compile import uncompile, unwrapped
from unison.errors import BadInput, UnsupportedOperation
from unison.kfac.config import Every, KFACConfig, loss_scale, refuse_adaptive, watch_optimizers
from unison.kfac.factors import phase, sum_shapes
from unison.kfac.fisher import CompiledStatistics, PassRecorder, refuse_private
from unison.kfac.inverse import Columns
from unison.kfac.labels import Pass, Sampled, refuse_missing, warn_of_shifts, with_loss
from unison.kfac.layers import Layer, Method, Routes, assign, cost, describe, layers_of
from unison.kfac.linalg import all_finite, is_gpu, largest_elements
from unison.kfac.precondition import Graft, LayerState, Preconditioner, invert_layers, update_layers
from unison.parallel import ParallelAdapter, TensorParallel, adapter_class, adapter_of, curvatures
from unison.parallel.exchange import (
    OwnerSums,
    SharedBlocks,
    added,
    gather_rows,
    largest,
)
from unison.shard.ranks import from_rank_0, gather_objects, meet, together
from unison.shard.state.checkpoint import Manifest, read_manifest, settle, write_folder
from unison.shard.state.entries import require_same
from unison.shard.state.files import FlatPart, SavedTensor, read_parts
from unison.torch_internals import (
    DynamoBackend,
    canonical_name,
    has_values,
    is_dtensor,
    machine_of,
    sent_to_host,
)

MOST_HEAD_TOKENS = 2048  # of an update, about, whose probabilities make columns


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
        UnsupportedOperation: If a parameter is trained privately, whatever modules hold it, or
            they are spread in an unknown way.

    Attributes:
        config: The settings.
        num_steps: Steps that were taken.
        skipped: Steps that were left out, since something was not finite; not in `num_steps`.
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
        refuse_private(dict(module.named_parameters()))
        if optimizer is not None:
            refuse_adaptive(optimizer, config.graft)
        if config.kl_clip is not None and optimizer is None:
            raise BadInput(
                "kl_clip bounds lr²·⟨step, gradient⟩ and reads the learning rate from the "
                "optimizer: KFAC(module, config, optimizer)"
            )
        self._module, self._optimizer = module, optimizer
        self._adapter = _adapter_of(module)
        if not self._adapter.params:
            raise BadInput(f"{type(module).__name__} has no parameters to train")
        self._device = self._adapter.device
        if config.storage_device == "cuda" and self._device.type == "cpu":
            raise BadInput(
                "storage_device='cuda' keeps factors on a GPU, and the module is on the CPU: pass "
                "storage_device='auto'"
            )
        self._shapes = {each.name: each.shape for each in self._adapter.params}
        self.layers: list[Layer] = []
        self.num_steps = self.skipped = 0
        self._last_update: int | None = None
        self._last_inverse: int | None = None
        self._is_ordered = True  # the last update: steps have the bits of any number of ranks
        self._passes: list[Pass] = []
        self._shifts: list[Tensor] = []  # see `Sampled`
        self._compiled: CompiledStatistics | None = None
        self._states: dict[int, LayerState] = {}
        self._owners: list[tuple[int, ...]] = []
        self._graft = Graft(config)
        # The module has hooks that ask; they must not keep this object.
        own = weakref.ref(self)

        def is_wanted() -> bool:
            return (kfac := own()) is not None and kfac.wants_statistics

        self._last_trained: frozenset[str] = frozenset()
        self._recorder = PassRecorder(module, self._adapter, config, is_wanted)
        handle = watch_optimizers([each.parameter for each in self._adapter.params], config.graft)
        self._unwatch = weakref.finalize(self, handle.remove)
        curvatures.add(self)

    @property
    def is_aside(self) -> bool:
        """Whether the module runs for statistics, and not to be trained."""
        return self._recorder.is_paused

    @property
    def trained(self) -> list[nn.Parameter]:
        """All parameters that are preconditioned, as this rank holds them."""
        return [each.parameter for each in self._adapter.params]

    # --- statistics ------------------------------------------------------------------------------

    @property
    def wants_statistics(self) -> bool:
        """Whether this step updates the factors, so that `sample` is to be called in it."""
        has_curvature = self.config.policy != "identity"
        return has_curvature and self._is_due(self.config.update_every, self._last_update)

    def _is_due(self, every: Every, last: int | None) -> bool:
        return last is None or self.num_steps - last >= self.config.period(every, self.num_steps)

    def sample(
        self,
        logits: Tensor,
        mask: Tensor | None = None,
        *,
        token_mask: Tensor | None = None,
        divisor: float | None = None,
    ) -> Sampled:
        """Draw labels from the model for the last forward pass; its `backward` keeps them.

        Call it for every pass of a step that `wants_statistics`, on every rank. With
        `fisher="empirical"` it takes the gradients of the loss that is sent back after it.

        Args:
            logits: Made of the module's last output [batch, ..., outputs]: of classes, the last
                dimension.
            mask: Which labels count [batch, ...]: 0 leaves one out of everything.
            token_mask: Which tokens inside of the module are real [batch, tokens], where they are
                not those of the labels: of a classifier, 0 for padding. Layers that see as many
                tokens leave the others out.
            divisor: What the loss divides the sum over labels by. Only for `"empirical"`, and only
                if it is neither a sum nor the mean over this pass's labels.

        Raises:
            BadInput: If there was no forward pass, or the logits are of another one.
        """
        if self._recorder.current is None:
            why = "the module has not run since" if self.wants_statistics else "it is not due"
            raise BadInput(
                f"no forward pass to draw labels for ({why}); call the module, then "
                "`if kfac.wants_statistics: kfac.sample(logits).backward(retain_graph=True)`"
            )
        current = self._recorder.current
        shifts = self._shifts if self._last_update is None else None
        of_step = self.config, self.num_steps, divisor, self._passes, shifts
        return Sampled(current, logits, mask, token_mask, *of_step)

    def forget(self) -> None:
        """Drop the passes since the last step, where the loop gives a batch up; on every rank.

        The next pass is then the first of its step, and draws the labels of one. A pass that no
        loss was sent back through, beside others that have one, is left out without this, and a
        warning says so; a batch whose gradients were cleared again is not.
        """
        self._passes = []
        self._shifts.clear()
        self._recorder.forget()

    # --- the step --------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, *, grad_scaler: GradScaler | None = None) -> None:
        """Put the preconditioned step where the gradient is; a collective.

        Call it after the last backward pass of a step, before `optimizer.step()`.

        Guarantees:
            A gradient, or a sum for the factors, that is not finite on any rank changes nothing on
            all of them: no factor, moment or number of a step, and later steps are those of a run
            without this one. It is counted in `skipped`, a warning says what it was, and `.grad` is
            None, so that the optimizer changes nothing either.

        Args:
            grad_scaler: What scaled the loss. `grad_scaler.unscale_(optimizer)` comes before; the
                empirical Fisher divides the gradients of the loss by its scale.

        Raises:
            BadInput: If statistics were wanted and no pass was sampled, if there is no gradient, if
                gradients are scaled, or a parameter is new to the module.
            NotInvertible: Naming the layer, its smallest eigenvalue and the remedy.
            UnsupportedOperation: If a parameter has come to be trained privately.
        """
        refuse_private({each.name: each.parameter for each in self._adapter.params})
        self._check_params()
        scale = loss_scale(grad_scaler)
        # The user may be under autocast, which would round every product here.
        with torch.autocast(machine_of(self._device), enabled=False):
            # A GPU leaves a bad step out by itself, and the host asks when it has queued all of it,
            # or all of the statistics: factors change only if gradients are known to be finite.
            is_overflow, find_overflow = self._overflow()
            is_known = self._has_update or not is_gpu(is_overflow)
            is_first = not (self.layers and self.wants_statistics and is_gpu(is_overflow))
            reason = find_overflow() if is_known and is_first else None
            reason = reason or self._update(scale, lambda: None if is_first else find_overflow())
            if reason is None:
                self._precondition(None if is_known else is_overflow)
                reason = None if is_known else find_overflow()
            if reason is None:
                self.num_steps += 1
            else:
                self._skip(reason)
                if not is_known:
                    self._graft.uncount()
        self.forget()

    def _check_params(self) -> None:
        known = {id(each) for each in self.trained}
        named = self._module.named_parameters()
        trained = {name: each for name, each in named if each.requires_grad}
        for name, each in trained.items():
            if id(each) not in known:
                raise BadInput(
                    f"{canonical_name(name)} was added, replaced or thawed since KFAC(module), and "
                    "its gradient would stay as it is beside others' steps: detach() this KFAC "
                    "and make another"
                )
        if (names := frozenset(trained)) != self._last_trained:  # operations are learned by names
            self._last_trained, self._recorder.axes = names, None
        # What else an update may lack is told where it is made.
        is_sampled = bool(self._passes) and self.config.fisher != "empirical"
        has_none = bool(trained) and all(each.grad is None for each in self.trained)
        if has_none and (is_sampled or not self.wants_statistics):
            raise BadInput(
                "no parameter has a gradient: call kfac.step() after loss.backward(), whose "
                "gradients it preconditions, and before optimizer.zero_grad()"
            )

    @property
    def _has_update(self) -> bool:
        """Whether this step changes factors or inverses."""
        every = self.config.invert_every
        is_inverted = every is not None and self._is_due(every, self._last_inverse)
        return self.wants_statistics or not self.layers or is_inverted

    def _overflow(self) -> tuple[Tensor, Callable[[], str | None]]:
        """Whether any rank's gradients cannot be used [], 1.0 or 0.0; a collective.

        Returns:
            Beside it, what waits for that and finds out why, a collective; None if they can.
        """
        ranks = self._adapter.ranks
        held = [each for each in self._adapter.params if each.parameter.grad is not None]
        sizes = largest_elements(
            [each.gradient(each.shape if not each.is_part else (-1,)) for each in held]
        )
        largest_of = torch.stack(sizes) if held else torch.zeros(1, device=self._device)
        # Squares, since Adam takes them: those of 2^64 are no float32, those of 2^512 no float64.
        is_double = largest_of.dtype == torch.float64
        is_finite = largest_of < (2.0**512 if is_double else 2.0**64)
        is_overflow = ranks.max_((~is_finite).any().float())
        on_host = sent_to_host(torch.cat([is_overflow.view(1), is_finite.float()]))

        def find() -> str | None:
            if not has_values() or not (values := on_host().tolist())[0]:
                return None
            bad = [each.name for each, own in zip(held, values[1:], strict=False) if not own]
            own = [f"the gradient of {name!r} on rank {ranks.rank} is not finite" for name in bad]
            return self._agreed(own[0] if own else None)

        return is_overflow, find

    def _agreed(self, reason: str | None) -> str | None:
        """The first reason that any rank has; a collective."""
        is_any = largest(self._adapter.ranks, self._device, int(reason is not None))[0]
        if not is_any or not has_values():
            return None
        reasons = gather_objects(self._adapter.ranks, reason)
        return next(each for each in reasons if each is not None)

    def _skip(self, reason: str) -> None:
        self.skipped += 1
        for each in self._adapter.params:
            each.parameter.grad = None
        warnings.warn(
            f"K-FAC left step {self.num_steps} out ({self.skipped} in this run): {reason}. "
            "Nothing was changed, and gradients are None, so that the optimizer changes nothing",
            stacklevel=4,  # of whoever calls `step`, past torch.no_grad
        )

    def _update(self, scale: float, find_overflow: Callable[[], str | None]) -> str | None:
        """Factors and inverses, where they are due; returns why the step is to be left out."""
        if self.wants_statistics:
            reason = self._update_factors(scale, find_overflow)
            if reason is not None:
                return reason
        every, states = self.config.invert_every, self._states.values()
        is_due = self._last_update == self.num_steps
        if every is not None:
            is_due = self._last_update is not None and self._is_due(every, self._last_inverse)
        if is_due:
            with phase("inverses"):  # what fails on one rank raises on all, with the same words
                together(
                    self._adapter.ranks,
                    lambda: invert_layers(states, self.config, is_together=self._is_together),
                )
            self._last_inverse = self.num_steps
        if not self.layers:
            assert self.config.policy == "identity", "statistics are wanted at the first step"
            self._take_layers(layers_of({}, self._shapes, self.config))
        return None

    def _precondition(self, is_overflow: Tensor | None) -> None:
        """Put steps in the gradients' place.

        Args:
            is_overflow: 1.0 if gradients are not finite [], and nothing is to be remembered of
                them; None if they are known to be.
        """
        with phase("gradients"):
            gradients = self._routes.gradients()
        steps = self._preconditioner.steps(
            gradients,
            is_together=self._is_together,
            is_overflow=is_overflow,
            shared=self._with_shared_rows(),
            is_spent=self.config.kl_clip is None,
        )
        if self.config.kl_clip is not None:
            self._clip(self.config.kl_clip, steps, gradients)
        with phase("write"):
            self._routes.give(steps)

    def _clip(
        self, bound: float, steps: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> None:
        """Shorten the step where its predicted change is too large; a collective."""
        assert self._optimizer is not None
        products = torch.zeros(len(self.layers), dtype=torch.float64, device=self._device)
        shared = self._with_shared_rows()
        for index, state in self._states.items():
            pairs = [
                [(steps[key].reshape(-1), gradients[key].reshape(-1)) for key in own]
                for own in state.keys_of_blocks
                if own[0] in steps
            ]
            zero = products.new_zeros(())
            dots = (sum((a.double() @ b.double() for a, b in own), zero) for own in pairs)
            total: Any = 0.0
            if state in shared and state.shared is not None:
                total = state.shared.add(dots, (), products)
            elif state.shared is None:
                total = sum(dots)
            if self._owners[index][0] == self._adapter.ranks.rank:
                products[index] = total
        # Each product has one owner, all others add 0.0: exact, and then added in order.
        rate = max(group["lr"] for group in self._optimizer.param_groups)
        change = rate**2 * sum(self._adapter.ranks.sum_(products).tolist())
        if change > bound:
            for step in steps.values():
                step.mul_((bound / change) ** 0.5)

    def _update_factors(self, scale: float, find_overflow: Callable[[], str | None]) -> str | None:
        """Average new factors in, unless some are not finite, or gradients; returns which."""
        ranks, passes = self._adapter.ranks, with_loss(self._passes, self.num_steps)
        if not self.layers:  # owners would damp with settings of their own
            require_same(ranks, self.config.stored(), what="the settings of KFAC")
        together(ranks, lambda: refuse_missing(passes, self.num_steps))
        warn_of_shifts(self._shifts, self.config.likelihood)
        self._shifts.clear()
        before = self.layers, self._is_ordered
        if self.config.fisher == "empirical":
            for part in (part for each in passes for part in each.parts):
                part.scale /= scale
        if self.config.head == "exact":  # all ranks choose the same tokens, whoever has them
            parts = [part for each in passes for part in each.parts]
            labels = added(ranks, self._device, sum(each.num_terms for each in parts))
            share = MOST_HEAD_TOKENS / max(*labels, 1)
            for part in parts:
                part.head_share = share
        self._recorder.is_paused = True
        try:
            with ExitStack() as undo:
                backend = uncompile(self._module, undo) or self._recorder.backend
                num_parts = sum(len(each.parts) for each in passes)
                columns = max(len(part.gradients) for each in passes for part in each.parts)
                numbers = num_parts, int(backend is None), columns
                most, is_plain, columns = largest(ranks, self._device, *numbers)
                undo.enter_context(self._adapter.observing())
                if self._last_update is None:
                    rows = added(ranks, self._device, sum(each.num_real for each in passes))
                    found = self._recorder.find_layers(passes[0], *rows)
                    self._take_layers(ranks.broadcast_object(found))
                like, edges = self._routes.like, passes[0].edges
                self._is_ordered = bool(edges)
                is_folded = not self._is_together  # what is sent, or kept for many granules
                shapes = [sum_shapes(each, self.config, is_folded) for each in self.layers]
                entries = [(i, key) for i, own in enumerate(shapes) for key in own]
                sizes = [math.prod(shapes[i][key]) for i, key in entries]
                owners = [self._owners[i] for i, _ in entries]
                sums = OwnerSums(sizes, owners, ranks, like, edges)
                counts = {layer.name: [0, 0] for layer in self.layers}  # tokens, labels
                compiled = None
                if backend is not None and not is_plain:  # on any rank
                    compiled = self._compiled_by(backend)
                    undo.enter_context(compiled.attached(passes))
                with phase("statistics"):
                    run, pieces = self._recorder.run, []
                    for granule, part in run(passes, self.layers, most, columns, compiled):
                        used = {name for name, _ in part.sums} | part.num_tokens.keys()
                        names = [(self.layers[i].name, key) for i, key in entries]
                        vectors = part.vectors(names, like, is_folded=is_folded)
                        if sums.take(granule, vectors):
                            for name in used:
                                counts[name][0] += part.num_tokens.get(name, 0)
                                counts[name][1] += part.num_terms
                        pieces.append((granule, part.take_columns(like)))
        finally:
            self._recorder.is_paused = False
        with phase("factors"):
            totals = sums.finish()
            rows = self._gather_columns(pieces, like)
            numbers = added(ranks, self._device, *itertools.chain(*counts.values()))
            # A GPU is waited for once.
            sizes = largest_elements(list(totals.values()))
            largest_of = torch.stack(sizes).tolist() if sizes else []
            is_bad = zip(totals, largest_of, strict=True)
            bad = [entries[number][0] for number, size in is_bad if not math.isfinite(size)]
            blocks = {i: [b for u in own.values() for b in u.blocks] for i, own in rows.items()}
            bad += [i for i, own in blocks.items() if not all_finite(own)]
            names = [repr(self.layers[i].name) for i in bad]
            reason = f"sums for the factors of {names[0]} are not finite" if bad else None
            if bad and len(passes) > 1:
                reason = (
                    f"{reason}, made of {len(passes)} sampled passes (call kfac.forget() where the "
                    "loop gives a batch up)"
                )
            if (reason := find_overflow() or self._agreed(reason)) is not None:
                self._forget_update(*before)
                return reason
            if not any(numbers[1::2]):  # no labels: nothing to learn, and the next step is due
                return None
            of_layers: dict[int, dict[str, Tensor]] = {i: {} for i in self._states}
            for number, total in totals.items():
                i, key = entries[number]
                of_layers[i][key] = total.view(shapes[i][key])
            update_layers(
                (self._states[i], own, rows.get(i, {}), numbers[2 * i], numbers[2 * i + 1])
                for i, own in of_layers.items()
            )
        self._last_update = self.num_steps
        return None

    def _gather_columns(
        self, pieces: Sequence[tuple[int | None, dict[tuple[str, str], Tensor]]], like: Tensor
    ) -> dict[int, dict[str, Columns]]:
        """The columns of all ranks of this rank's layers, by layer and side; a collective."""
        held = [(i, layer, side) for i, layer in enumerate(self.layers) for side in layer.low_rank]
        if not held:
            return {}
        places: dict[tuple[str, str], tuple[str, int, int]] = {}  # a side, and rows of it
        owners: dict[tuple[str, str], Sequence[int]] = {}
        for i, layer, side in held:
            shared = self._states[i].shared if side == "g" and layer.block_rows else None
            if shared is None:
                places[layer.name, f"u_{side}"] = side, 0, layer.side(side)
                owners[layer.name, f"u_{side}"] = self._owners[i]
                continue
            for number, (low, high) in enumerate(layer.blocks):
                places[layer.name, f"u_g#{number}"] = "g", low, high
                owners[layer.name, f"u_g#{number}"] = (shared.owner(number),)
        cut = [
            (
                granule,
                {
                    (name, key): own[name, side][:, low:high]
                    for (name, key), (side, low, high) in places.items()
                    if (name, side) in own
                },
            )
            for granule, own in pieces
        ]
        widths = {key: high - low for key, (_, low, high) in places.items()}
        found, counts = gather_rows(self._adapter.ranks, cut, owners, widths, like)
        by_layer: dict[int, dict[str, Columns]] = defaultdict(dict)
        for i, layer, side in held:
            if i in self._states:
                own = {key: rows for (name, key), rows in found.items() if name == layer.name}
                count = counts.get((layer.name, "u_g#0"), 0)  # as many in every block
                by_layer[i][side] = self._states[i].columns(side, own, count)
        return by_layer

    def _forget_update(self, layers: list[Layer], is_ordered: bool) -> None:
        """Leave nothing of an update behind: what it was made of was not finite."""
        self._is_ordered = is_ordered
        if not layers:  # found in it
            self.layers, self._states, self._owners = [], {}, []
            self._recorder.axes = None
        if self._compiled is not None:
            self._compiled.forget_kinds()

    def _compiled_by(self, backend: DynamoBackend) -> CompiledStatistics:
        """What compiles passes for statistics with the user's backend."""
        known, ranks, device = self._compiled, self._adapter.ranks, self._device
        if known is None or known.settings != (backend, self._is_ordered):
            known = self._compiled = CompiledStatistics(
                self._adapter.module,
                backend,
                is_granular=self._is_ordered,
                agree=lambda is_so: bool(largest(ranks, device, int(is_so))[0]),
                keeps_graph=self.config.fisher == "exact",
            )
        return known

    # --- layers and their owners -----------------------------------------------------------------

    def _take_layers(self, layers: list[Layer]) -> None:
        self.layers = layers
        ranks = self._adapter.ranks
        costs = [cost(layer) for layer in layers]
        owners = assign(costs, ranks.size, self.config.owner_fraction)
        everyone = tuple(range(ranks.size))  # share the rows of some layers
        self._owners = [
            everyone if layer.block_rows else own for layer, own in zip(layers, owners, strict=True)
        ]
        self._routes, self._states = Routes(self._adapter, layers, self._owners), {}
        for index, layer in enumerate(layers):
            if ranks.rank in self._owners[index]:
                shared = SharedBlocks(ranks, len(layer.blocks)) if layer.block_rows else None
                state = LayerState(layer, self.config, self._graft, self._routes.like, shared)
                self._states[index] = state
        self._preconditioner = Preconditioner(self._states.values(), self._graft)

    def _with_shared_rows(self) -> list[LayerState]:
        """The layers with gradients whose rows ranks share; the same on every rank."""
        shared = [each for each in self._states.values() if each.shared is not None]
        return [each for each in shared if self._routes.has_gradient(each.layer)]

    @property
    def _is_together(self) -> bool:  # layers of equal shape are; see precondition.py
        return self._adapter.ranks.size == 1 and not self._is_ordered

    # --- looking ---------------------------------------------------------------------------------

    def factors(self) -> dict[str, dict[str, Tensor]]:
        """The averaged factors of the layers that this rank owns: `a` and `g`, or `d`."""
        return {state.layer.name: state.factors for state in self._states.values()}

    def memory_usage(self) -> dict[str, int]:
        """Bytes that this rank holds: factors, inverses, grafting, and all together."""
        totals = {"factors": 0, "inverses": 0, "grafting": 0}
        for state in self._states.values():
            for what, count in state.nbytes.items():
                totals[what] += count
        return {**totals, "total": sum(totals.values())}

    def __repr__(self) -> str:
        """Method, size, owners and bytes of every layer."""
        if not self.layers:
            return f"KFAC({self.config}; layers are found at the first step)"
        rows = [("layer", "method", "size", "owner", "bytes here", "")]
        for index, layer in enumerate(self.layers):
            is_factored, own = layer.method is Method.KRONECKER, self._owners[index]
            state, everyone = self._states.get(index), self._adapter.ranks.size
            rows.append(
                (
                    layer.name if layer.bias is None else f"{layer.name} + bias",
                    layer.method.value,
                    f"G {layer.d_out} x A {layer.d_in}" if is_factored else f"{layer.numel}",
                    "all" if len(own) == everyone else ", ".join(map(str, sorted(own))),
                    "-" if state is None else _size(sum(state.nbytes.values())),
                    layer.why,
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        cells = [map(str.ljust, row, widths) for row in rows]
        lines = [f"  {'  '.join(each).rstrip()}" for each in cells]
        used = ", ".join(f"{what} {_size(count)}" for what, count in self.memory_usage().items())
        return "\n".join(["KFAC(", *lines, f"  here: {used}", ")"])

    def describe(self) -> str:
        """A paragraph for a paper's methods: what was used, and what of it is approximate."""
        return describe(self.config, self.layers, self.num_steps, self.skipped)

    # --- storage ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run needs to go on, whole and on every rank; a collective.

        Its layers are stored by name, so that any number of ranks, sharded in any way, loads it.
        `save` does the same without any rank having it whole.
        """
        ranks = self._adapter.ranks
        meet(ranks, "KFAC.state_dict", may_be_late=True)
        layers = []
        for index, layer in enumerate(self.layers):
            first = self._owners[index][0]
            own = {key: each.cpu().clone() for key, each in self._stored(index).items()}
            if layer.block_rows:
                parts = gather_objects(ranks, own)
                tensors = {key: each for part in parts for key, each in part.items()}
            else:
                tensors = ranks.broadcast_object(own, first)
            layers.append({"layer": layer.as_dict(), "tensors": tensors})
        return {**self._progress(), "layers": layers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run stopped; the result is that of a run without a stop.

        Raises:
            BadInput: If it is of another model, or of settings that make another state.
        """
        self._take_stored([each["layer"] for each in state["layers"]], state.get("settings"))
        for index, own in self._states.items():
            tensors = {}
            for key, each in state["layers"][index]["tensors"].items():
                if own.holds(key):  # copies where layers compute; single numbers stay on the host
                    tensors[key] = each.to(self._device if each.ndim else "cpu", copy=True)
            own.load(tensors)
        self._go_on(state)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint, each layer by its owner; a collective. See docs/checkpoints.md.

        Args:
            folder: Which every rank can reach by this name. It appears when it is complete.

        Raises:
            BadInput: On every rank, if something else has the name.
            CheckpointFailed: On every rank, if any could not write.
        """
        ranks, parts = self._adapter.ranks, {}
        meet(ranks, "KFAC.save", may_be_late=True)
        for index, layer in enumerate(self.layers):
            for key, each in self._stored(index).items():
                parts[f"kfac/{layer.name}/{key}"] = tuple(each.shape), 0, each.reshape(-1)
        mine = {key: SavedTensor(shape, held.dtype) for key, (shape, _, held) in parts.items()}
        tensors = {key: each for own in gather_objects(ranks, mine) for key, each in own.items()}
        extra = {**self._progress(), "layers": [each.as_dict() for each in self.layers]}
        write_folder(Path(folder), parts, tensors, ranks, optimizer=None, extra=extra)

    def load(self, folder: str | Path) -> None:
        """Go on from what `save` wrote on any number of ranks, each reads its layers; a collective.

        Raises:
            BadInput: On every rank, if it is damaged, of another model, or of settings that make
                another state.
            CheckpointFailed: On every rank, if any could not read.
        """
        folder, ranks = Path(folder), self._adapter.ranks
        meet(ranks, "KFAC.load", may_be_late=True)

        def read() -> Manifest:
            settle(folder)
            manifest = read_manifest(folder)
            if "layers" not in manifest.extra:
                raise BadInput(f"{folder} holds no curvature: it was not written by KFAC.save")
            return manifest

        manifest = from_rank_0(ranks, read)
        self._take_stored(manifest.extra["layers"], manifest.extra.get("settings"))
        found: list[dict[str, Tensor]] = []
        parts: dict[str, FlatPart] = {}
        for state in self._states.values():
            prefix, tensors = f"kfac/{state.layer.name}/", {}
            for key, saved in manifest.tensors.items():
                if key.startswith(prefix) and state.holds(key):
                    device = self._device if saved.shape else "cpu"  # numbers stay on the host
                    value = torch.empty(saved.shape, dtype=saved.dtype, device=device)
                    tensors[key.removeprefix(prefix)] = value
                    parts[key] = saved.shape, 0, value.view(-1)
            found.append(tensors)
        read_parts(folder, parts, manifest.tensors, ranks)
        for state, tensors in zip(self._states.values(), found, strict=True):
            state.load(tensors)
        self._go_on(manifest.extra)

    def _stored(self, index: int) -> dict[str, Tensor]:
        """What this rank stores of a layer: all as its first owner, else its blocks."""
        if index not in self._states:
            return {}
        is_first = self._owners[index][0] == self._adapter.ranks.rank
        own = self._states[index].tensors()
        return {key: each for key, each in own.items() if is_first or "#" in key}

    def _progress(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "skipped": self.skipped,
            "last_update": self._last_update,
            "last_inverse": self._last_inverse,
            "is_ordered": self._is_ordered,
            "settings": self.config.stored(),
        }

    def _take_stored(
        self, described: Sequence[Mapping[str, Any]], settings: Mapping[str, Any] | None
    ) -> None:
        if settings is not None:
            self.config.compare(settings)
        layers = [Layer.from_dict(each) for each in described]
        names = {name for layer in layers for name in layer.parameters}
        if layers and names != set(self._shapes):
            missing = sorted(set(self._shapes) ^ names)[:3]
            raise BadInput(f"the state is of another model: {missing} are not in both")
        for each in layers:
            if each.shape != (own := self._shapes[each.name]):
                raise BadInput(
                    f"the state is of another model: {each.name} is {list(each.shape)} there and "
                    f"{list(own)} here"
                )
        self._graft = Graft(self.config)
        self._take_layers(layers)

    def _go_on(self, state: Mapping[str, Any]) -> None:
        self.num_steps, self.skipped = state["num_steps"], state.get("skipped", 0)
        self._last_update, self._last_inverse = state["last_update"], state["last_inverse"]
        self._is_ordered = bool(state.get("is_ordered", True))
        self.forget()

    def detach(self) -> None:
        """Leave the module as it was."""
        curvatures.discard(self)
        self._recorder.detach()
        self._unwatch()


def _adapter_of(module: nn.Module) -> ParallelAdapter:
    """Return the adapter of a module.

    Raises:
        UnsupportedOperation: If its parameters are spread in a way that K-FAC does not know.
    """
    if adapter_class(module) is TensorParallel:
        name = next(name for name, each in module.named_parameters() if is_dtensor(each))
        raise UnsupportedOperation(
            f"{name} is cut for tensor parallelism, which K-FAC does not know yet; leave the "
            "module out of the parallel plan, or shard it with unison.fully_shard"
        )
    adapter = adapter_of(module)
    adapter.params = [each for each in adapter.params if each.parameter.requires_grad]
    return adapter


def _size(count: int) -> str:
    """Bytes, for people.

    >>> [_size(count) for count in (0, 1500, 2_500_000)]
    ['0 B', '1.5 kB', '2.5 MB']
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
