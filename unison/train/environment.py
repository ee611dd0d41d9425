"""What a run ran on: versions and hardware, nothing that names a person or a machine."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("unison", "torch", "numpy", "numba", "triton", "transformers", "tokenizers")


def describe_environment(world_size: int, device: torch.device) -> dict[str, Any]:
    """Collect the versions and the hardware of this process."""
    return {
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads_per_rank": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "world_size": world_size,
        "device": device.type,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
