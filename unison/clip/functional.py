"""The whole of per-sample clipping as one function: norms, coefficients, the clipped sum.

    forward ─ backward: records ─ norms per sample ─ coefficients ─ Σ_b c_b · gradient_b

The engine is built of the same steps; this function needs no engine.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from unison import check
from unison.capture import AxisTable, Capture, batch_size_of, check_samples_apart, learn_axes
from unison.clip.bounds import SampleNorms
from unison.clip.coefficients import RULES
from unison.clip.gradients import GRADIENT_METHODS
from unison.clip.layers import describe
from unison.clip.norms import measure
from unison.clip.plan import AUTO, MODES, Plan, plan_clipping
from unison.errors import BadInput
from unison.ops import Record

PerSampleLoss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> one loss per sample [batch]."""


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


@dataclass
class _Parameter:
    """One parameter on its way from records to a clipped sum."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    records: list[Record] = field(default_factory=list)

    def zeros(self, device: torch.device) -> Tensor:
        """The clipped sum of a parameter that no sample used."""
        return torch.zeros(
            self.shape, dtype=torch.promote_types(self.dtype, torch.float32), device=device
        )


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
        mode gives the same gradients up to rounding.

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
    parameters = {
        name: _Parameter(name, tuple(parameter.shape), parameter.dtype)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    if size == 0:
        return _of_nothing(model, parameters, mode)
    axes = axes_of(model, per_sample_loss, batch, is_checked=is_checked)
    keep = lambda name, record: parameters[name].records.append(record)  # noqa: E731
    capture = Capture(model, size, axes=axes, on_record=keep)
    may_need_second = mode == AUTO or MODES[mode].num_backwards == 2
    with capture.installed(), torch.enable_grad():
        losses = per_sample_loss(model, batch)
        _check_losses(losses, size)
        losses.sum().backward(retain_graph=may_need_second)
        used = [parameter for parameter in parameters.values() if parameter.records]
        plan = plan_clipping(
            [describe(parameter.name, parameter.records) for parameter in used],
            mode=mode,
            memory_budget=memory_budget,
            machine=losses.device.type,
        )
        num_uses = {parameter.name: len(parameter.records) for parameter in used}
        norms = _measured(used, plan, losses)
        coefficients = RULES[rule](norms, max_norm)
        sums = {name: p.zeros(losses.device) for name, p in parameters.items()}
        if plan.num_backwards == 2:
            _second_backward(capture, losses, parameters, num_uses, coefficients.values, sums)
        else:
            for parameter in used:
                sums[parameter.name] = _clipped_sum(parameter, plan, coefficients.values)
    return ClippedGradients(
        sums=sums,
        norms=norms.squared.clamp(min=0).sqrt(),
        coefficients=coefficients.values,
        num_dropped=coefficients.num_dropped,
        plan=plan,
    )


def _measured(used: list[_Parameter], plan: Plan, losses: Tensor) -> SampleNorms:
    """The norms over all parameters; per-sample gradients formed on the way replace records."""
    zeros = torch.zeros(len(losses), dtype=torch.float64, device=losses.device)
    total = SampleNorms(zeros, zeros)
    for parameter in used:
        norms, records = measure(parameter.records, plan.choice(parameter.name).norm)
        parameter.records = list(records) if plan.num_backwards == 1 else []
        total = total + norms
    return total


def _clipped_sum(parameter: _Parameter, plan: Plan, coefficients: Tensor) -> Tensor:
    """Σ_b c_b · gradient_b of one parameter; its records are given back."""
    records, parameter.records = parameter.records, []
    method = GRADIENT_METHODS[plan.choice(parameter.name).gradient]
    return method.clipped_sum(records, coefficients, parameter.shape)


def _second_backward(
    capture: Capture,
    losses: Tensor,
    parameters: dict[str, _Parameter],
    num_uses: dict[str, int],
    coefficients: Tensor,
    sums: dict[str, Tensor],
) -> None:
    """Make the records anew, and use those of a parameter as soon as they are all there.

    The coefficients are applied to the records, not to the losses: on the way through the model
    they would be rounded in its dtype, and nothing could be proved of the result.
    """

    def take(name: str, record: Record) -> None:
        parameter = parameters[name]
        parameter.records.append(record)
        if len(parameter.records) == num_uses[name]:
            records, parameter.records = parameter.records, []
            method = GRADIENT_METHODS["second_backward"]
            sums[name] = method.clipped_sum(records, coefficients, parameter.shape)

    capture.on_record = take
    losses.sum().backward()


def _of_nothing(model: nn.Module, parameters: dict[str, _Parameter], mode: str) -> ClippedGradients:
    """The clipped sum of no samples: zeros."""
    device = next(model.parameters()).device
    empty = torch.zeros(0, dtype=torch.float64, device=device)
    return ClippedGradients(
        sums={name: parameter.zeros(device) for name, parameter in parameters.items()},
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


# ---- where samples lie, learned once per model and shape ----------------------------------------

_learned: weakref.WeakKeyDictionary[nn.Module, dict[Any, AxisTable]] = weakref.WeakKeyDictionary()


def axes_of(
    model: nn.Module, per_sample_loss: PerSampleLoss, batch: Any, *, is_checked: bool = True
) -> AxisTable:
    """Where samples lie in the operations of a model, learned the first time and then remembered.

    Args:
        model: The model.
        per_sample_loss: As in `clipped_gradients`.
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
    key = (str(spec), kinds, model.training, trained, code)
    tables = _learned.setdefault(model, {})
    if key not in tables:
        axes = learn_axes(model, per_sample_loss, batch)
        if is_checked:
            check_samples_apart(model, per_sample_loss, batch, axes)
        tables[key] = axes
    return tables[key]
