"""Calibration: what clipping methods take on this GPU, timed on first use and kept in a file.

[Note: calibration] FLOPs and bytes tell methods apart that differ by much. Where they are close, it
depends on the device, on cuBLAS, and on how a shape falls into tiles. So the first time that a
plan is made for a kind of layer on a CUDA device, the parts of all its choices are run on tensors
of its shapes and timed by the GPU's own clock, and the plan takes the fastest. What was found is
kept in a file, per GPU and version: a cache, which counts as empty if anything is wrong with it.

* A kind of layer is: dtype, samples rounded up to a power of two, and the shapes of its uses.
  Batches of another size are timed as one of that many samples, or of fewer that fit into memory,
  and scaled: logical batches that are drawn at random must not be timed one by one.
* A process times for two seconds at most, and compiles kernels for 30 at most. A kind
  that was not timed to its end is planned by prediction, until another process has the time.
* Only methods depend on it, and so nothing but rounding. Where rounding must not change (the
  ordered reducer), or where all ranks must run the same passes and could find different times
  (several ranks), nobody calibrates: see `PrivacyEngine`.

What is timed runs on fresh tensors of random numbers (a GPU multiplies zeros faster), as large as
the layer's records, or as many of its samples as fit into a bounded part of the memory.
"""

import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from unison.clip import measured
from unison.clip.bounds import Grid, is_taken, tensors_of
from unison.clip.costs import (
    CHOICES,
    FACTOR_NORMS,
    FACTORS,
    FORWARD,
    KEPT,
    PLAIN_RECORDS,
    RECORDS,
    WAITING,
    LayerShape,
    method_costs,
    parts_of,
    record_bytes,
    waits,
)
from unison.clip.measured import Factors, can_wait
from unison.clip.norms import NORM_METHODS, from_records, measure, refusal
from unison.kernels import factored, multi_tensor
from unison.kernels.available import has_triton, on_device_of, plain_arithmetic
from unison.ops import Product, Record
from unison.ops.records import shape_of
from unison.schema import version_of

FORMAT = 1
FOLDER_VARIABLE = "UNISON_CACHE_DIR"

Seconds = dict[str, dict[str, float]]
"""By kind of layer, by part."""


def cache_folder() -> Path:
    """Return where caches lie: `UNISON_CACHE_DIR`, or `unison` in the user's cache folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "unison"


Run = Callable[[], object]

MOST_BYTES = 4 << 30
_REPEATS = 5
_LONG = 0.02  # seconds of a run that need not be repeated
# Elements of all layers that are timed together, and how many layers at most.
_FILLING, _MOST_TOGETHER = 1 << 25, 64
_GRID = Grid(2.0**-10)  # coarse enough for sums of random records to stay in 32 bits
_HOPELESS_SECONDS, _HOPELESS_FACTOR = 0.1, 8.0  # predicted, and as a multiple of the best norm
# Cycles that the GPU waits before a run, so that all of it is in its queue: 2 ms; at most 64.
_CYCLES_AHEAD, _MOST_CYCLES_AHEAD = 4_000_000, 128_000_000


def dtype_of(layer: LayerShape) -> torch.dtype:
    """Return the dtype of a layer's records."""
    halves = torch.float16 if layer.is_float16 else torch.bfloat16
    return halves if layer.itemsize == 2 else torch.float32


class Stopwatch:
    """Times layers on one GPU, within limits that hold for all of them together.

    Args:
        device: The GPU.
        timing: Seconds for everything but first runs.
        warming: Seconds for the first run of each part, in which kernels are compiled.
        seconds_of: Returns how long the GPU takes for a call that has run before.
        free_bytes: Returns how much memory there is.
        clock: Returns seconds; only differences count.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        timing: float = 2.0,
        warming: float = 30.0,
        seconds_of: Callable[[Run], float] | None = None,
        free_bytes: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device, self._clock = device, clock
        self._timing_left, self._warming_left = timing, warming
        self._seconds_of = seconds_of or event_seconds
        self._free_bytes = free_bytes or (lambda: torch.cuda.mem_get_info(device)[0])

    def time_layer(self, layer: LayerShape) -> dict[str, float] | None:
        """Return seconds by part (`costs.parts_of`) for a layer's whole batch.

        Parts that are hopelessly slow are left out.

        Returns:
            None if time or memory do not suffice for all the others, if no kernels take the layer's
            records, or while a CUDA graph is recorded.
        """
        is_cuda = self._device.type == "cuda"
        if layer.itemsize > 4 or (is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        some = None if self._is_over() else self._that_fits(layer)
        if some is None:
            return None
        with on_device_of(torch.empty(0, device=self._device)), plain_arithmetic(self._device):
            try:
                found = self._time(some)
            except torch.OutOfMemoryError:
                return None
        if is_cuda:
            torch.cuda.empty_cache()  # blocks of these sizes may be of no use to the training
        if found is None:
            return None
        return {part: seconds * layer.batch / some.batch for part, seconds in found.items()}

    def _time(self, layer: LayerShape) -> dict[str, float] | None:
        records = draw_records(layer, self._device)
        if not is_taken(records):
            return None
        found = {}
        for part, run, times in runs_of(layer, records, wanted_parts(layer)):
            if self._is_over():
                return None
            begin = self._clock()
            run()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._warming_left -= self._clock() - begin
            begin = self._clock()
            found[part] = self._seconds_of(run) / times
            self._timing_left -= self._clock() - begin
        return found

    def _is_over(self) -> bool:
        return self._timing_left <= 0 or self._warming_left <= 0

    def _that_fits(self, layer: LayerShape) -> LayerShape | None:
        """Return the layer with as many samples as fit, halving them; None if not one fits."""
        most = min(MOST_BYTES, self._free_bytes() // 2)
        while num_bytes(layer) > most:
            if layer.batch == 1:
                return None
            layer = replace(layer, batch=layer.batch // 2)
        return layer


def num_bytes(layer: LayerShape) -> int:
    """Return what timing a layer takes: records, outputs, kept gradients, sums."""
    kept = method_costs(layer, "cuda")["kept"].kept_bytes
    together = 4 * (_FILLING + layer.numel) if waits(layer) else 0
    return 2 * record_bytes(layer) + max(kept, together) + 16 * layer.numel


def wanted_parts(layer: LayerShape) -> list[str]:
    """Return the parts of all choices that take this layer, without those that are hopeless."""
    records, costs = layer.records(), method_costs(layer, "cuda")
    choices = [each for each in CHOICES if refusal(each.norm, records) is None]
    parts = dict.fromkeys(part for each in choices for part in parts_of(layer, each))
    predicted = {part: costs[part].seconds("cuda") for part in parts if part in NORM_METHODS}
    slowest = max(_HOPELESS_SECONDS, _HOPELESS_FACTOR * min(predicted.values()))
    predicted |= dict.fromkeys((FACTOR_NORMS, FACTORS), predicted.get("gram", 0.0))
    return [part for part in parts if predicted.get(part, 0.0) <= slowest]


def draw_records(layer: LayerShape, device: torch.device) -> list[Record]:
    """Return records of a layer's shapes, of random numbers that are nobody else's."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...], num_rows: int | None) -> Tensor:
        if num_rows is not None:
            return torch.randint(num_rows, shape, generator=generator, device=device)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype_of(layer))

    return layer.records(draw)


def runs_of(
    layer: LayerShape, records: Sequence[Record], parts: Sequence[str]
) -> Iterator[tuple[str, Run, int]]:
    """Yield each part, what runs it and how often, one after the other: they share memory.

    Sums are those of private training: integers, which each pass adds to those before.
    """
    shape = shape_of(records[0])
    device = tensors_of(records[0])[0].device
    coefficients = torch.full((layer.batch,), 0.5, dtype=torch.float64, device=device)
    for norm in ("gram", "tile"):
        if norm in parts:
            yield norm, lambda norm=norm: measured.squared_norms(records, norm), 1
    if "rank_one" in parts:
        yield "rank_one", lambda: measure(records, "rank_one"), 1
    if RECORDS in parts:
        yield RECORDS, lambda: measured.clipped_sum(records, coefficients, shape, _GRID), 1
    if FACTORS in parts and can_wait(records, WAITING):
        yield from _together(records, coefficients)
    elif FACTORS in parts:  # a GPU that is too small for it
        yield FACTOR_NORMS, lambda: measured.squared_norms(records, "gram"), 1
        yield FACTORS, lambda: measured.clipped_sum(records, coefficients, shape, _GRID), 1
    if PLAIN_RECORDS in parts:
        yield PLAIN_RECORDS, lambda: from_records(records, coefficients, shape), 1
    if FORWARD in parts:
        yield FORWARD, _forward(records), 1
    if "materialize" in parts:
        kept: list[Tensor] = []

        def materialize() -> Tensor:
            kept.clear()  # no two of them exist at once
            kept.append(measured.materialize(records))
            return multi_tensor.squares(kept)

        yield "materialize", materialize, 1
        if KEPT in parts:
            out = torch.zeros(shape, device=device, dtype=_GRID.dtype)
            weights, spacing = coefficients.float().unsqueeze(0), float(_GRID.spacing)
            add = partial(multi_tensor.combine, add=True, spacing=spacing)
            yield KEPT, lambda: add(kept, weights, [out]), 1


def _together(records: Sequence[Record], coefficients: Tensor) -> Iterator[tuple[str, Run, int]]:
    """Yield the parts that kernels do for many layers at once: see [Note: factors that wait].

    As many layers like this one as fill a GPU: one by itself would leave most of it without work.
    """
    factors = Factors.of(cast(Product, records[0]))
    times = min(_MOST_TOGETHER, -(-_FILLING // math.prod(factors.shape)))
    found = {str(i): factors for i in range(times)}
    names, weights = list(found), measured.stacked([coefficients] * times, _GRID)
    yield FACTOR_NORMS, lambda: measured.measure_factors(names, found), times
    sums = [factors.left.new_zeros(factors.shape, dtype=_GRID.dtype) for _ in names]
    sides = measured.sides_of(names, found)
    yield FACTORS, lambda: factored.weighted_sums(*sides, weights, sums, add=True), times


def _forward(records: Sequence[Record]) -> Run:
    """Return what multiplies the inputs of all products by a weight."""
    pairs = []
    for each in records:
        if isinstance(each, Product):
            generator = torch.Generator(each.a.device).manual_seed(1)
            shape = (each.a.shape[2], each.g.shape[2])
            kind = {"device": each.a.device, "dtype": each.a.dtype}
            pairs.append((each.a, torch.randn(shape, generator=generator, **kind)))
    return lambda: [torch.matmul(a, weight) for a, weight in pairs]


def event_seconds(run: Run) -> float:
    """Return how long the GPU takes for a call, by its own clock.

    The GPU is kept waiting until all of it is in its queue: what Python takes is not counted.
    """
    first = _event_seconds(run, 1)
    return first if first > _LONG else _event_seconds(run, _REPEATS)


def _event_seconds(run: Run, repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = _CYCLES_AHEAD
    while True:
        torch.cuda._sleep(cycles)
        begin.record()
        for _ in range(repeats):
            run()
        is_late = begin.query()  # the GPU has begun, and waits for a host that is slow
        end.record()
        end.synchronize()
        cycles *= 2
        if not is_late or cycles > _MOST_CYCLES_AHEAD:
            return begin.elapsed_time(end) / 1e3 / repeats


VARIABLE = "UNISON_CALIBRATE"

TimeLayer = Callable[[LayerShape], dict[str, float] | None]
"""Layer to seconds by part; None if there is no time or no memory to time all of them."""


class Calibration:
    """Seconds of methods for kinds of layers: from a file, or else timed and added to it.

    Args:
        device: The device's name.
        time_layer: Times the parts of one layer.
        folder: Where the file lies, made when something is written; None keeps nothing.
        made_by: What seconds depend on beside shapes: another value is another file.
    """

    def __init__(
        self,
        device: str,
        time_layer: TimeLayer,
        folder: Path | None = None,
        made_by: Mapping[str, str] | None = None,
    ) -> None:
        self.device, self.made_by = device, dict(made_by or {})
        self._time_layer = time_layer
        digest = sha256(json.dumps(self.made_by, sort_keys=True).encode()).hexdigest()
        self.path = None if folder is None else folder / f"clipping-costs-{digest[:16]}.json"
        self._known = self.read()

    def of(self, layer: LayerShape) -> Mapping[str, float] | None:
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
            self.add({kind: found})
        share = layer.batch / timed.batch
        return {part: share * seconds for part, seconds in self._known[kind].items()}

    def read(self) -> Seconds:
        """Return what the file holds: nothing, if there is none or it cannot be used."""
        found: Seconds = {}
        if self.path is None:
            return found
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT or content["made_by"] != self.made_by:
                raise ValueError(f"made by {content['made_by']}, expected {self.made_by}")
            for kind, parts in content["seconds"].items():
                found[kind] = {str(part): float(value) for part, value in parts.items()}
                if not all(math.isfinite(value) and value > 0 for value in found[kind].values()):
                    raise ValueError(f"seconds of {kind!r}: {parts}")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            self._warn(f"cannot be read ({type(error).__name__}: {error})")
            return {}
        return found

    def add(self, seconds: Mapping[str, Mapping[str, float]]) -> None:
        """Add kinds of layers to the file; what another process has added meanwhile stays."""
        if self.path is None:
            return
        known = self.read() | {kind: dict(each) for kind, each in seconds.items()}
        content = {"format": FORMAT, "made_by": self.made_by, "seconds": known}
        written: str | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A reader sees the old file or the new one, and never a part of it.
            handle, written = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1, sort_keys=True)
            os.replace(written, self.path)
        except OSError as error:
            if written is not None:
                Path(written).unlink(missing_ok=True)
            self._warn(f"cannot be written ({error}): methods are timed again in the next run")

    def _warn(self, what: str) -> None:
        warnings.warn(
            f"the cache of clipping costs {self.path} {what}. It is not used; "
            f"{FOLDER_VARIABLE} names another folder",
            RuntimeWarning,
            stacklevel=4,
        )


def kind_of(layer: LayerShape) -> str:
    """Return all of a layer that its methods' times depend on, as text.

    >>> from unison.clip.costs import UseShape
    >>> use = UseShape(kind="product", tokens=512, rows=3840, columns=1280)
    >>> kind_of(LayerShape(name="qkv.weight", batch=4, itemsize=2, uses=(use,)))
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
    return Calibration(name, watch.time_layer, cache_folder(), made_by)


def versions() -> dict[str, str]:
    """Return what times depend on beside the GPU: versions, and the text of our own kernels.

    The latter change while the version does not.
    """
    found = {name: version_of(name) or "unknown" for name in ("torch", "triton", "unison")}
    root = Path(__file__).resolve().parents[1]
    digest = sha256()
    own = [root / "clip" / "measured.py", Path(__file__).resolve()]
    for path in [*sorted((root / "kernels").rglob("*.py")), *own]:
        digest.update(path.read_bytes())
    return {**found, "kernels": digest.hexdigest()[:16]}
