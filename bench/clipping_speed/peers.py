"""Other libraries' private training steps, for a comparison in one run.

They hook torch's own layer classes, cannot see a use of a weight outside its module and take no ids
that all samples share. So they get the GPT-2 model made of torch's classes, with a head that is not
tied, logits of the whole batch, and position ids for every sample. `NO_DP` trains that model
without privacy: what is the model's share, and what is the library's?
"""

import contextlib
import importlib
import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.clipping_speed.steps import MAX_GRAD_NORM, Step, Workload, endless
from unison.errors import UnsupportedOperation
from unison.models import LanguageModel, per_sample_loss

NO_DP = "no_dp_logits"
PACKAGES = {"opacus_hooks": "opacus", "opacus_ghost": "opacus", "fastdp": "fastDP"}
REMEDIES = {
    "opacus": "pip install opacus",
    "fastDP": "put a clone of github.com/awslabs/fast-differential-privacy on PYTHONPATH",
}

Losses = Tensor  # one per sample [batch]
Wrapped = tuple[Any, Any, Callable[[Losses], Any]]
"""A model, its optimizer, and what makes of the losses something to send back."""


def missing() -> dict[str, str]:
    """Return the peers that cannot be imported, and what to do about it."""
    found = {package: _is_importable(package) for package in REMEDIES}
    return {peer: REMEDIES[each] for peer, each in PACKAGES.items() if not found[each]}


def versions() -> dict[str, str]:
    """Return the versions of the packages that can be imported."""
    return {
        package: getattr(importlib.import_module(package), "__version__", "unknown")
        for package in REMEDIES
        if _is_importable(package)
    }


def _is_importable(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


class Peer:
    """A peer's training.

    Args:
        workload: What is trained.
        name: `NO_DP` or one of `PACKAGES`.
        noise_multiplier: σ.

    Raises:
        UnsupportedOperation: The model is of a family whose layers the peers do not know.
    """

    def __init__(self, workload: Workload, *, name: str, noise_multiplier: float) -> None:
        if workload.config.family != "gpt2":
            raise UnsupportedOperation("peers know the layers of the gpt2 family only")
        self._batches = endless(workload.loader())
        model = _model_for_peers(workload)
        self._model, self._optimizer, self._reduced = _WRAPPERS[name](
            model, workload.optimizer(model), workload.batch_size, noise_multiplier
        )

    def step(self) -> None:
        """Take a step on the next batch."""
        ids, labels = next(self._batches)
        losses = per_sample_loss(self._model(ids), labels)
        self._reduced(losses).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def record(self) -> Step:
        """Peers run without graphs: their steps wait for the GPU."""
        raise UnsupportedOperation("not recorded")

    def plan(self) -> None:
        """There is none."""

    def close(self) -> None:
        """Hooks die with the model."""


def _not_private(model: nn.Module, optimizer: Any, batch_size: int, sigma: float) -> Wrapped:
    return model, optimizer, torch.mean


def _opacus_hooks(model: nn.Module, optimizer: Any, batch_size: int, sigma: float) -> Wrapped:
    private = importlib.import_module("opacus.optimizers").DPOptimizer(
        optimizer, **_opacus_settings(batch_size, sigma)
    )
    hooked = importlib.import_module("opacus.grad_sample").GradSampleModule(model)
    return hooked, private, torch.mean


def _opacus_ghost(model: nn.Module, optimizer: Any, batch_size: int, sigma: float) -> Wrapped:
    """Norms from the first backward pass, the sum of clipped gradients from a second one."""
    private = importlib.import_module("opacus.optimizers").DPOptimizerFastGradientClipping(
        optimizer, **_opacus_settings(batch_size, sigma)
    )
    hooked = importlib.import_module("opacus.grad_sample").GradSampleModuleFastGradientClipping(
        model, max_grad_norm=MAX_GRAD_NORM
    )
    utils = importlib.import_module("opacus.utils.fast_gradient_clipping_utils")
    return hooked, private, partial(utils.DPTensorFastGradientClipping, hooked, private)


def _opacus_settings(batch_size: int, sigma: float) -> dict[str, Any]:
    return {
        "noise_multiplier": sigma,
        "max_grad_norm": MAX_GRAD_NORM,
        "expected_batch_size": batch_size,
    }


def _fastdp(model: nn.Module, optimizer: Any, batch_size: int, sigma: float) -> Wrapped:
    """Book-keeping with the library's own choice per layer, and the usual min(1, C / norm)."""
    with contextlib.redirect_stdout(io.StringIO()):
        engine = importlib.import_module("fastDP").PrivacyEngine(
            model,
            batch_size=batch_size,
            sample_size=10**6,
            epochs=1,
            noise_multiplier=sigma,
            max_grad_norm=MAX_GRAD_NORM,
            clipping_mode="MixOpt",
            clipping_fn="Abadi",
            # Autograd then forms the plain gradients of these alone.
            origin_params=["token_embeddings", "position_embeddings"],
        )
        engine.attach(optimizer)
    return model, optimizer, torch.mean


_WRAPPERS: Mapping[str, Callable[[nn.Module, Any, int, float], Wrapped]] = {
    NO_DP: _not_private,
    "opacus_hooks": _opacus_hooks,
    "opacus_ghost": _opacus_ghost,
    "fastdp": _fastdp,
}


def _model_for_peers(workload: Workload) -> LanguageModel:
    """Return the model with torch's layers in the place of ours, the same values in them."""
    model = replace(workload, config=replace(workload.config, tie_head=False)).model()
    for name, module in list(model.named_modules()):
        other = _of_torch(module)
        if other is not None:
            other.load_state_dict(module.state_dict(), assign=True)
            model.set_submodule(name, other)

    def for_each_sample(_: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        (positions,) = args  # [tokens] -> [batch, tokens], a copy: not all peers take views
        return positions.repeat(workload.batch_size, 1)

    model.get_submodule("position_embeddings").register_forward_pre_hook(for_each_sample)
    return model


def _of_torch(module: nn.Module) -> nn.Module | None:
    """Return torch's layer of the same kind and shape, without memory; None for no layer of ours.

    Ours are known by the names of their classes, which torch's have too.
    """
    if type(module).__module__.startswith("torch."):
        return None
    weight = getattr(module, "weight", None)
    with torch.device("meta"):
        match type(module).__name__, weight:
            case (("Projection" | "LanguageModelHead"), Tensor()):
                d_out, d_in = weight.shape
                return nn.Linear(d_in, d_out, bias=getattr(module, "bias", None) is not None)
            case "Embedding", Tensor():
                num_rows, width = weight.shape
                return nn.Embedding(num_rows, width)
            case "LayerNorm", Tensor():
                return nn.LayerNorm(weight.shape, eps=module.eps)  # type: ignore[arg-type]
            case _:
                return None
