"""What a run ran on: versions and hardware, nothing that names a person or a machine."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("unison", "torch", "numpy", "numba", "triton", "transformers", "tokenizers")


def describe_environment(world_size: int, device: torch.device) -> dict[str, Any]:
    """Collect the versions and the hardware of this process."""
    return {
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads_per_rank": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "world_size": world_size,
        "device": device.type,
    }


def cpu_model() -> str:
    """The processor's own name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def version_of(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
