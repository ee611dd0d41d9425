"""Autocast, as an operation of our own has to mind it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


def as_autocast(value: Any) -> Any:
    """Cast what autocast would cast for `F.linear`, where it is on; None stays None."""
    if value is None:
        return None
    kind = value.device.type
    if not (_is_known(kind) and torch.is_autocast_enabled(kind)):
        return value
    is_cast = value.is_floating_point() and value.dtype != torch.float64
    return value.to(torch.get_autocast_dtype(kind)) if is_cast else value


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute in the dtypes that tensors have: no autograd, no autocast."""
    kind = device.type
    with torch.no_grad(), torch.autocast(kind, enabled=False) if _is_known(kind) else nullcontext():
        yield


def _is_known(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)  # not on the meta device
