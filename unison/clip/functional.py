"""The whole of per-sample clipping as one function: norms, coefficients, the clipped sum.

    forward ─ backward: records ─ norms per sample ─ coefficients ─ Σ_b c_b · gradient_b

The engine is built of the same steps; this function needs no engine.

What it learns of a model once per kind of batch (`learn`): where samples lie, and what is recorded.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from unison import check
from unison.capture import (
    AxisTable,
    Capture,
    batch_size_of,
    check_samples_apart,
    generators_kept,
    learn_rows,
    resized,
    rng_autocast_state,
    state_kept,
)
from unison.capture.recompute import SavedBytes
from unison.clip.bounds import RULES
from unison.clip.clipping import Clipping, Storage
from unison.clip.costs import (
    AUTO,
    MODES,
    LayerShape,
    describe,
    with_shared_inputs,
    without_values,
)
from unison.clip.plan import Plan, plan_clipping
from unison.errors import BadInput
from unison.ops import Product, Record, Streamed
from unison.torch_internals import autocast_dtypes

PerSampleLoss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> one loss per sample [batch]."""


@dataclass(eq=False)
class Learned:
    """What is known of a model that is given batches of one kind.

    Attributes:
        axes: Where samples lie in the operations that touch parameters.
        layers: The shapes of every used parameter's records, for a batch of a few samples.
        storage: Memory for its per-sample gradients.
    """

    axes: AxisTable
    layers: tuple[LayerShape, ...]
    storage: Storage = field(default_factory=Storage)
    _plans: dict[tuple, Plan] = field(default_factory=dict)

    def plan(self, num_samples: int, *, is_alone: bool = False, **settings: Any) -> Plan:
        """Return the methods for batches of this size; the same ones every time.

        Args:
            num_samples: Of a batch.
            is_alone: Whether nobody else has to plan the same. Then clipping may use what autograd
                has freed, which depends on the code of the model, and not on shapes alone.
            settings: Those of `plan_clipping`.
        """
        key = (num_samples, is_alone, *sorted(settings.items()))
        if key not in self._plans:
            layers = [replace(layer, batch=num_samples) for layer in self.layers]
            if not is_alone:
                layers = [replace(layer, freed_per_sample=0) for layer in layers]
            self._plans[key] = plan_clipping(layers, **settings)
        return self._plans[key]


_learned: weakref.WeakKeyDictionary[nn.Module, dict[Any, Learned]] = weakref.WeakKeyDictionary()


def learn(
    model: nn.Module, per_sample_loss: PerSampleLoss, batch: Any, *, is_checked: bool = True
) -> Learned:
    """Return what is known of a model and batches like this one; learned the first time.

    Args:
        model: The model.
        per_sample_loss: One loss per sample [batch].
        batch: A batch. Its shapes but for the number of samples, the code of the loss, and what is
            trained decide whether what was learned still holds.
        is_checked: Whether to make sure that samples do not mix.
    """
    leaves, spec = tree_flatten(batch)
    kinds = tuple(
        (tuple(leaf.shape[1:]), leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves
    )
    trained = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    # The code, not the function: that of a closure may be made anew for each batch, and hold the
    # model, which then would never be forgotten.
    code = getattr(per_sample_loss, "__code__", type(per_sample_loss))
    key = (str(spec), kinds, model.training, trained, autocast_dtypes(), code)
    tables = _learned.setdefault(model, {})
    if key not in tables:
        with state_kept(model, batch) as state:
            axes = learn_rows(model, per_sample_loss, batch, state=state)
            if is_checked:
                check_samples_apart(model, per_sample_loss, batch, axes, state=state, whole=True)
            tables[key] = Learned(axes, learn_layers(model, per_sample_loss, batch, axes))
    return tables[key]


_FEW = 2


def learn_layers(
    model: nn.Module, per_sample_loss: PerSampleLoss, batch: Any, axes: AxisTable
) -> tuple[LayerShape, ...]:
    """Run a few samples forward and backward, and describe what is recorded."""
    found: dict[str, list[Record | Streamed]] = defaultdict(list)
    inputs: dict[str, list[Any]] = defaultdict(list)
    seen: dict[int, tuple[weakref.ref, int]] = {}  # memory of inputs: itself, and its number
    freed: dict[str, int] = {}
    saved = SavedBytes([*model.parameters(), *model.buffers()])

    def place_of(a: Tensor) -> Any:
        """Tell inputs apart: what others share is alive until the last of them has come."""
        memory = a.untyped_storage()
        if memory._cdata not in seen or seen[memory._cdata][0]() is None:
            seen[memory._cdata] = weakref.ref(memory), sum(map(len, inputs.values()))
        return seen[memory._cdata][1], a.storage_offset(), a.shape

    def keep(name: str, record: Record | Streamed) -> None:
        is_product = isinstance(record, Product | Streamed)
        inputs[name].append(place_of(record.a) if is_product else None)
        found[name].append(without_values(record))
        freed.setdefault(name, saved.freed)

    few = resized(batch, _FEW)
    capture = Capture(model, _FEW, axes=axes, on_record=keep, streams=True)
    with capture.installed(), generators_kept(batch), torch.enable_grad():
        with saved.counted(), capture.following(few):
            losses = per_sample_loss(model, few)
        if losses.requires_grad:
            losses.sum().backward()
    layers = with_shared_inputs([describe(name, found[name]) for name in sorted(found)], inputs)
    return tuple(
        replace(
            layer,
            is_checkpointed=layer.name in capture.used_late,
            is_repeatable=layer.name not in capture.recorded_late,
            freed_per_sample=freed[layer.name] // _FEW,
            is_variable=axes.is_traced,
        )
        for layer in layers
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class ClippedGradients:
    """What clipping a batch gives.

    Attributes:
        sums: Σ_b c_b · gradient_b by parameter name, zeros for one that the batch did not use.
        norms: Each sample's gradient norm before clipping [batch]; a function of private data.
        coefficients: c_b [batch]; 0 for a sample that was not finite.
        num_dropped: How many samples were not finite, a tensor without dimensions.
        plan: Which methods each used parameter was clipped with, and what others would cost.
    """

    sums: dict[str, Tensor]
    norms: Tensor
    coefficients: Tensor
    num_dropped: Tensor
    plan: Plan


def clipped_gradients(
    model: nn.Module,
    per_sample_loss: PerSampleLoss,
    batch: Any,
    *,
    max_norm: float,
    mode: str = AUTO,
    rule: str = "flat",
    memory_budget: int | None = None,
    is_checked: bool = True,
) -> ClippedGradients:
    """Clip every sample's gradient and add them up.

    Guarantees:
        No sample's share of `sums`, as it is computed, has a norm above `max_norm` over all
        trainable parameters together, whatever the dtype, the mode and the other samples. Every
        mode gives the same gradients up to rounding. `"ghost"` and `"flash_fuse"`, which run
        backward twice, need kernels that give the same bits twice: see *The same records* in
        [Note: proved sensitivity].

    Args:
        model: The model as the user wrote it; its `.grad`s are not touched.
        per_sample_loss: Maps the model and a batch to one loss per sample [batch]. It must not mix
            samples.
        batch: Tensors, or tuples, lists and dicts of them, with samples along dimension 0.
        max_norm: C, the bound on one sample's gradient.
        mode: `"auto"`, or one of `unison.clip.MODES`.
        rule: `"flat"` or `"automatic"`, see `unison.clip.bounds`.
        memory_budget: Bytes that clipping may hold beside the model's own training.
        is_checked: Whether to make sure, the first time a model sees batches of this shape, that
            its samples do not mix.

    Raises:
        UnsupportedOperation: If the model mixes samples or does what has no rule.
        BadInput: If the losses are not one per sample, or an argument is not known.
    """
    check.one_of([*MODES, AUTO], mode=mode)
    check.one_of(RULES, rule=rule)
    size = batch_size_of(batch)
    if size == 0:
        return _of_nothing(model, mode)
    learned = learn(model, per_sample_loss, batch, is_checked=is_checked)
    machine = next(model.parameters()).device.type
    plan = learned.plan(size, mode=mode, memory_budget=memory_budget, machine=machine)
    clipping = Clipping(plan, size, learned.storage)
    capture = Capture(
        model,
        size,
        axes=learned.axes,
        on_record=clipping.take,
        on_product=clipping.take_product if plan.num_forwards == 2 else None,
        streams=plan.num_forwards == 1,
        has_one_backward=plan.num_forwards == plan.num_backwards == 1,
    )
    with capture.installed(), torch.enable_grad():
        surroundings = rng_autocast_state(model, batch)
        with capture.following(batch):
            losses = per_sample_loss(model, batch)
        if losses.shape != (size,):
            raise BadInput(
                f"expected one loss per sample, [{size}], found {list(losses.shape)}; use "
                "reduction='none' and average over each sample's own tokens"
            )
        if not losses.requires_grad:
            raise BadInput("the losses do not depend on any trainable parameter")
        losses.sum().backward(retain_graph=plan.num_backwards == 2)
        norms = clipping.norms().total()
        coefficients = RULES[rule](norms, max_norm)
        sums = zeros_of(model)
        by_name = dict.fromkeys(sums, coefficients.values)
        if clipping.num_backwards == 2:
            clipping.begin_second_pass(by_name)
            losses.sum().backward()
        elif clipping.num_forwards == 2:
            del losses  # and what its graph still holds
            clipping.begin_second_pass(by_name)
            with capture.recompute(surroundings), capture.following(batch):
                per_sample_loss(model, batch)
        made = clipping.clipped_sums(by_name)
        sums |= {name: total.to(sums[name].dtype) for name, total in made}
    return ClippedGradients(
        sums=sums,
        norms=norms.squared.clamp(min=0).sqrt(),
        coefficients=coefficients.values,
        num_dropped=coefficients.num_dropped,
        plan=plan,
    )


def zeros_of(model: nn.Module) -> dict[str, Tensor]:
    """The clipped sums of a model that no sample has used, in float32 or wider."""
    return {
        name: torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32))
        for name, each in model.named_parameters()
        if each.requires_grad
    }


def _of_nothing(model: nn.Module, mode: str) -> ClippedGradients:
    """The clipped sum of no samples: zeros."""
    device = next(model.parameters()).device
    empty = torch.zeros(0, dtype=torch.float64, device=device)
    return ClippedGradients(
        sums=zeros_of(model),
        norms=empty,
        coefficients=empty,
        num_dropped=torch.zeros((), dtype=torch.int64, device=device),
        plan=plan_clipping([], mode=mode),
    )
