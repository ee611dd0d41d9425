"""The whole of per-sample clipping as one function: norms, coefficients, the clipped sum.

    forward ─ backward: records ─ norms per sample ─ coefficients ─ Σ_b c_b · gradient_b

The engine is built of the same steps; this function needs no engine.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unison import check
from unison.capture import Capture, Surroundings, batch_size_of
from unison.clip.clipping import Clipping
from unison.clip.coefficients import RULES
from unison.clip.learned import PerSampleLoss, learn
from unison.clip.plan import AUTO, MODES, Plan, plan_clipping
from unison.errors import BadInput


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
        rule: `"flat"` or `"automatic"`, see `unison.clip.coefficients`.
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
        is_light=plan.num_forwards == plan.num_backwards == 1,
    )
    with capture.installed(), torch.enable_grad():
        surroundings = Surroundings.here(model, batch)
        with capture.following(batch):
            losses = per_sample_loss(model, batch)
        _check_losses(losses, size)
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
            with capture.again(surroundings), capture.following(batch):
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


def _check_losses(losses: Tensor, size: int) -> None:
    if losses.shape != (size,):
        raise BadInput(
            f"expected one loss per sample, [{size}], found {list(losses.shape)}; use "
            "reduction='none' and average over each sample's own tokens"
        )
    if not losses.requires_grad:
        raise BadInput("the losses do not depend on any trainable parameter")
