"""Calibration: what clipping methods take on this GPU, timed on first use and kept in a file.

[Note: calibration] FLOPs and bytes tell methods apart that differ by much. Where they are close, it
depends on the device, on cuBLAS, and on how a shape falls into tiles. So the first time that a
plan is made for a kind of layer on a CUDA device, the parts of all its choices are run on tensors
of its shapes and timed by the GPU's own clock (stopwatch.py), and the plan takes the fastest. What
was found is kept per GPU and version (cost_file.py).

* A kind of layer is: dtype, samples rounded up to a power of two, and the shapes of its uses.
  Batches of another size are timed as one of that many samples, or of fewer that fit into memory,
  and scaled: logical batches that are drawn at random must not be timed one by one.
* A process times for two seconds at most, and compiles kernels for 30 at most (`Limits`). A kind
  that was not timed to its end is planned by prediction, until another process has the time.
* Only methods depend on it, and so nothing but rounding. Where rounding must not change (the
  ordered reducer), or where all ranks must run the same passes and could find different times
  (several ranks), nobody calibrates: see `PrivacyEngine`.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from unison.clip.cost_file import CostFile, cache_folder
from unison.clip.layers import Layer
from unison.clip.stopwatch import Stopwatch, dtype_of
from unison.kernels.available import has_triton

VARIABLE = "UNISON_CALIBRATE"

TimeLayer = Callable[[Layer], dict[str, float] | None]
"""Layer -> seconds by part; None if there is no time or no memory to time all of them."""


class Calibration:
    """Seconds of methods for kinds of layers: from a file, or else timed and added to it.

    Args:
        device: The device's name.
        time_layer: Times the parts of one layer.
        file: Where to keep what was found; None keeps nothing.
    """

    def __init__(self, device: str, time_layer: TimeLayer, file: CostFile | None = None) -> None:
        self.device = device
        self._time_layer, self._file = time_layer, file
        self._known = {} if file is None else file.read()

    def of(self, layer: Layer) -> Mapping[str, float] | None:
        """Return seconds by part for a batch of this layer; None if it was not timed."""
        if layer.batch == 0 or all(use.kind == "dense" for use in layer.uses):
            return None  # nothing is formed, whatever the method
        timed = replace(layer, batch=1 << (layer.batch - 1).bit_length())
        kind = kind_of(timed)
        if kind not in self._known:
            found = self._time_layer(timed)
            if found is None:
                return None
            self._known[kind] = found
            if self._file is not None:
                self._file.add({kind: found})
        share = layer.batch / timed.batch
        return {part: share * seconds for part, seconds in self._known[kind].items()}


def kind_of(layer: Layer) -> str:
    """Return all of a layer that its methods' times depend on, as text.

    >>> from unison.clip.layers import Use
    >>> use = Use(kind="product", tokens=512, rows=3840, columns=1280)
    >>> kind_of(Layer(name="qkv.weight", batch=4, itemsize=2, uses=(use,)))
    'bfloat16 4 × product 512×3840×1280'
    """
    uses = ", ".join(f"{use.kind} {use.tokens}×{use.rows}×{use.columns}" for use in layer.uses)
    precision = " tf32" if layer.itemsize == 4 and torch.backends.cuda.matmul.allow_tf32 else ""
    return f"{str(dtype_of(layer)).removeprefix('torch.')}{precision} {layer.batch} × {uses}"


def calibration_of(device: torch.device) -> Calibration | None:
    """Return what is known of a device; None if it cannot be timed, or must not be.

    Environment:
        UNISON_CALIBRATE: 0 keeps GPUs from being timed.
        UNISON_CACHE_DIR: The folder of the file with what was found.
    """
    if device.type != "cuda" or not has_triton() or os.environ.get(VARIABLE) == "0":
        return None
    return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _of_gpu(index: int) -> Calibration:
    name = torch.cuda.get_device_name(index)
    capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
    made_by = {"gpu": name, "capability": capability, **versions()}
    watch = Stopwatch(torch.device("cuda", index))
    return Calibration(name, watch.time_layer, CostFile(cache_folder(), made_by))


def versions() -> dict[str, str]:
    """Return what times depend on beside the GPU: versions, and the text of our own kernels."""
    found = {name: _version(name) for name in ("torch", "triton", "unison")}
    return {**found, "kernels": _digest_of_kernels()}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its source tree
        return "unknown"


def _digest_of_kernels() -> str:
    """Return a digest of the sources that are timed: they change while the version does not."""
    root = Path(__file__).resolve().parents[1]
    digest = sha256()
    for path in [*sorted((root / "kernels").rglob("*.py")), root / "clip" / "measured.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
