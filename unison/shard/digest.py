"""One hash of all parameters and buffers, and a record of what the bits depend on."""

import hashlib
import os
import platform
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from unison.shard.ranks import Ranks
from unison.shard.sharded_tensor import local_part, show_shards, whole
from unison.shard.unit import units_of
from unison.torch_internals import canonical_name, saved_buffers


def digest(module: nn.Module) -> str:
    """One hash of all parameters and of buffers in `state_dict()`: names, shapes, dtypes, bits.

    It is the same at every world size, and the same for a sharded module and a plain one that hold
    equal parameters, whether unison or torch's own FSDP2 shards it. On a sharded module every rank
    must call it; one parameter is gathered at a time. Of buffers those of the first rank count.
    """
    hashes = {name: _hash(name, value) for name, value in full_parameters(module)}
    named = ((canonical_name(name), value) for name, value in saved_buffers(module))
    buffers = {name: _hash(name, value) for name, value in named}
    if buffers:  # as in checkpoints: with the fast reducer, those of other ranks may differ
        hashes |= _ranks_of(module).broadcast_object(buffers)
    return hashlib.sha256("".join(hashes[name] for name in sorted(hashes)).encode()).hexdigest()


def full_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (canonical name, copy of the full parameter), one by one; every rank must iterate.

    A tied parameter comes once, under its first name.
    """
    show_shards(module)
    for path, value in module.named_parameters():
        name = canonical_name(path)
        full = whole(value, name)
        yield name, full.clone() if local_part(value) is value else full


def _ranks_of(module: nn.Module) -> Ranks:
    """The ranks that hold the parts of a module; one if it is not sharded."""
    for unit in units_of(module):
        return unit.ranks
    mesh = next((getattr(each, "device_mesh", None) for each in module.parameters()), None)
    return Ranks(None) if mesh is None else Ranks.of(mesh)


def _hash(name: str, value: Tensor) -> str:
    header = f"{name} {value.dtype} {list(value.shape)}\0"
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(header.encode() + content.tobytes()).hexdigest()


def fingerprint(
    *,
    granule: int | None = None,
    device: torch.device | None = None,
    is_compiled: bool = False,
) -> dict[str, Any]:
    """What the bits of a run depend on besides its settings.

    Equality of digests is promised between runs with equal fingerprints, and between no others:
    each of these was seen to change bits.

    Args:
        granule: Samples per granule.
        device: Where it computes.
        is_compiled: Whether passes, or blocks, go through torch.compile.
    """
    is_cuda = device is not None and device.type == "cuda"
    capability = torch.backends.cuda
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "blas": _blas(),
        # It may be there and switched off, by torch itself: [Note: oneDNN] in engine.py.
        "mkldnn": torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled(),
        "gpu": torch.cuda.get_device_name(device) if is_cuda else None,
        "cuda": torch.version.cuda if is_cuda else None,
        "cudnn": torch.backends.cudnn.version() if is_cuda else None,
        "attention": {
            "flash": capability.flash_sdp_enabled(),
            "memory_efficient": capability.mem_efficient_sdp_enabled(),
            "cudnn": capability.cudnn_sdp_enabled(),
            "math": capability.math_sdp_enabled(),
        },
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "environment": {name: os.environ[name] for name in _SWITCHES if name in os.environ},
        "granule": granule,
        "compiled": is_compiled,
    }


_SWITCHES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
)


def _blas() -> str:
    for line in torch.__config__.show().splitlines():
        if "BLAS_INFO" in line:
            return line.partition("BLAS_INFO=")[2].partition(",")[0]
    return "unknown"
