"""What a run ran on: versions and hardware, nothing that names a person or a machine."""

import os
import platform
from typing import Any

import torch

from unison.verify import cpu_model, version_of

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
