"""What is learned of a model, once per kind of batch: where samples lie, and what it records."""

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from unison.capture import (
    AxisTable,
    Capture,
    check_samples_apart,
    generators_kept,
    learn_rows,
    resized,
    state_kept,
)
from unison.capture.saved import SavedBytes
from unison.clip.clipping import Storage
from unison.clip.layers import Layer, describe, with_shared_inputs
from unison.clip.plan import Plan, Timed, plan_clipping
from unison.ops import Record, Streamed

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
    layers: tuple[Layer, ...]
    storage: Storage = field(default_factory=Storage)
    _plans: dict[tuple, Plan] = field(default_factory=dict)

    def plan(
        self,
        num_samples: int,
        *,
        mode: str,
        memory_budget: int | None,
        machine: str,
        timed: Timed | None = None,
        is_alone: bool = False,
        is_compiled: bool = False,
    ) -> Plan:
        """Return the methods for batches of this size; the same ones every time.

        Args:
            num_samples: Of a batch.
            mode: As in `plan_clipping`.
            memory_budget: Likewise.
            machine: Likewise.
            timed: Likewise.
            is_alone: Whether nobody else has to plan the same. Then clipping may use what autograd
                has freed, which depends on the code of the model, and not on shapes alone.
            is_compiled: As in `plan_clipping`.
        """
        key = (num_samples, mode, memory_budget, machine, timed, is_alone, is_compiled)
        if key not in self._plans:
            layers = [replace(layer, batch=num_samples) for layer in self.layers]
            if not is_alone:
                layers = [replace(layer, freed_per_sample=0) for layer in layers]
            self._plans[key] = plan_clipping(
                layers,
                mode=mode,
                memory_budget=memory_budget,
                machine=machine,
                timed=timed,
                is_compiled=is_compiled,
            )
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
    key = (*kind_of(model, batch), code_of(per_sample_loss))
    tables = _learned.setdefault(model, {})
    if key not in tables:
        with state_kept(model, batch) as state:
            axes = learn_rows(model, per_sample_loss, batch, state=state)
            if is_checked:
                check_samples_apart(model, per_sample_loss, batch, axes, state=state, whole=True)
            tables[key] = Learned(axes, learn_layers(model, per_sample_loss, batch, axes))
    return tables[key]


def axes_of(
    model: nn.Module, per_sample_loss: PerSampleLoss, batch: Any, *, is_checked: bool = True
) -> AxisTable:
    """Where samples lie in the operations of a model; see `learn`."""
    return learn(model, per_sample_loss, batch, is_checked=is_checked).axes


def kind_of(model: nn.Module, batch: Any) -> tuple:
    """All but the number of samples that decides what a model does with a batch.

    Args:
        model: The model.
        batch: A batch, samples first in all of its tensors.
    """
    leaves, spec = tree_flatten(batch)
    kinds = tuple(
        (tuple(leaf.shape[1:]), leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves
    )
    trained = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    return str(spec), kinds, *mode_of(model, trained)


def mode_of(model: nn.Module, trained: tuple[str, ...]) -> tuple:
    """All but its input that decides what a model does.

    Args:
        model: The model.
        trained: Names of the parameters that take gradients.
    """
    autocast = tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    )
    return model.training, trained, autocast


def code_of(function: Callable[..., Any]) -> Any:
    """The code, not the function.

    That of a closure may be made anew for each batch, and hold the model, which then would never be
    forgotten.
    """
    return getattr(function, "__code__", type(function))


_FEW = 2


def learn_layers(
    model: nn.Module, per_sample_loss: PerSampleLoss, batch: Any, axes: AxisTable
) -> tuple[Layer, ...]:
    """Run a few samples forward and backward, and describe what is recorded."""
    found: dict[str, list[Record | Streamed]] = defaultdict(list)
    freed: dict[str, int] = {}
    saved = SavedBytes([*model.parameters(), *model.buffers()])

    def keep(name: str, record: Record | Streamed) -> None:
        found[name].append(record)
        freed.setdefault(name, saved.freed)

    few = resized(batch, _FEW)
    capture = Capture(model, _FEW, axes=axes, on_record=keep, streams=True)
    with capture.installed(), generators_kept(batch), torch.enable_grad():
        with saved.counted(), capture.following(few):
            losses = per_sample_loss(model, few)
        if losses.requires_grad:
            losses.sum().backward()
    layers = with_shared_inputs([describe(name, found[name]) for name in sorted(found)], found)
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
