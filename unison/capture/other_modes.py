"""Running a module in another way for a while: in float64, or without dropout."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


@contextmanager
def in_float64(module: nn.Module) -> Iterator[None]:
    """Let a module compute in float64 for this block, with parameters of its own.

    Its parameters and buffers are exchanged for copies and put back; nobody who holds them sees
    anything of it. Code that asks for a smaller dtype gets float64.
    """
    hidden: list[tuple[dict[str, Any], str, Any]] = []
    copies: dict[int, Tensor] = {}
    with ExitStack() as stack:
        stack.callback(_put_back, module, hidden)
        for child in module.modules():
            held: dict[str, Any]
            for held in (child._parameters, child._buffers):
                for key, value in held.items():
                    if value is not None and value.is_floating_point():
                        copy = copies.get(id(value))
                        if copy is None:
                            copy = value.detach().double()
                            if isinstance(value, nn.Parameter):
                                copy = nn.Parameter(copy, requires_grad=value.requires_grad)
                            copies[id(value)] = copy
                        hidden.append((held, key, value))
                        held[key] = copy
        _renew_flat_weights(module)
        default = torch.get_default_dtype()
        stack.callback(torch.set_default_dtype, default)
        torch.set_default_dtype(torch.float64)
        stack.enter_context(_Widening())
        yield


def _put_back(module: nn.Module, hidden: list[tuple[dict[str, Any], str, Any]]) -> None:
    for held, key, value in hidden:
        held[key] = value
    _renew_flat_weights(module)


def _renew_flat_weights(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            child._flat_weights = [getattr(child, name) for name in child._flat_weights_names]


_NARROW = {torch.float32, torch.bfloat16, torch.float16}
_NARROWING = {Tensor.float, Tensor.half, Tensor.bfloat16}


class _Widening(TorchFunctionMode):
    """Gives float64 to whoever asks for a smaller dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if func in _NARROWING:
            func, args, kwargs = Tensor.double, args[:1], {}
        wide: list[Any] = [torch.float64 if _is_narrow(each) else each for each in args]
        named = {k: torch.float64 if _is_narrow(v) else v for k, v in (kwargs or {}).items()}
        if func is F.scaled_dot_product_attention:
            return _attention(*wide, **named)
        return func(*wide, **named)


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Attention that does not keep its weights, which in float64 no kernel of torch's spares."""
    named = {**dict(zip(_OPTIONS, rest, strict=False)), **named}
    mask = named.pop("attn_mask", None)
    is_plain = all(type(each) is Tensor and each.ndim == 4 for each in (q, k, v))
    has_gradient = mask is not None and mask.requires_grad
    if not is_plain or has_gradient or named.get("dropout_p", 0.0):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **named)

    def of_sample(i: int, *parts: Tensor) -> Tensor:
        own = mask
        if mask is not None and mask.ndim == 4 and len(mask) == len(q):
            own = mask[i : i + 1]
        with torch._C.DisableTorchFunction():
            return F.scaled_dot_product_attention(*parts, attn_mask=own, **named)

    return _AttentionBySample.apply(of_sample, q, k, v)  # type: ignore[return-value]


class _AttentionBySample(torch.autograd.Function):
    """Attention of one sample after the other, which is run again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, of_sample: Callable[..., Tensor], *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.of_sample = of_sample
        found = [of_sample(i, *(x[i : i + 1] for x in parts)) for i in range(len(parts[0]))]
        return torch.cat(found) if found else of_sample(0, *parts)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, *tuple[Tensor, ...]]:  # type: ignore[override]
        parts = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in parts]
        for i in range(len(g)):
            own = [x[i : i + 1].detach().requires_grad_() for x in parts]
            with torch.enable_grad():
                output = ctx.of_sample(i, *own)
            for into, grad in zip(
                grads, torch.autograd.grad(output, own, g[i : i + 1]), strict=True
            ):
                into[i : i + 1] = grad
        return None, *grads


_DROPOUTS = {
    getattr(F, name)
    for name in (
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"),
        "feature_alpha_dropout",
    )
} | {torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout}


@contextmanager
def additions_in_order() -> Iterator[None]:
    """Let GPUs run kernels that add in one order, where torch has them: bits can be compared.

    Without atomic additions a module rarely has to be run in float64, which takes many times longer
    than in bfloat16. What has no such kernel runs as it is.
    """
    if not torch.cuda.is_available():
        yield
        return
    mode, settings = torch.get_deterministic_debug_mode(), torch.utils.deterministic
    fills = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        torch.set_deterministic_debug_mode("warn")
        settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            settings.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


class NoDropout(TorchFunctionMode):
    """Lets dropout drop nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            value = args[0] if args else kwargs["input"]
            return value.clone()
        if func is F.scaled_dot_product_attention:
            args, kwargs = args[:4], {**dict(zip(_OPTIONS[1:], args[4:], strict=False)), **kwargs}
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


_OPTIONS = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _NARROW


def as_double(batch: Any) -> Any:
    """The batch with its floating-point tensors in float64."""
    return tree_map(
        lambda leaf: (
            leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        ),
        batch,
    )
