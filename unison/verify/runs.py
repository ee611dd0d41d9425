"""Two runs that should be one experiment: do their folders hold the same bits, and if not, where.

Ranks, sharding and micro-batches may differ between the two; what decides the result may not. The
figures are those that `unison train` left: metrics of every step, the digest of all parameters in
the result, and the parameters themselves.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unison import run_files
from unison.errors import BadInput
from unison.schema import differing
from unison.shard import open_weights
from unison.verify.ladder import both_of
from unison.verify.quantities import bits_of

FILES = (
    run_files.CONFIG_FILE,
    run_files.RESULT_FILE,
    run_files.METRICS_FILE,
    run_files.PARAMETERS_FILE,
)
NOT_COMPARED = frozenset({"train/tokens_per_second"})  # measured, not computed
Series = dict[str, dict[int, float]]
"""Values of each metric by step."""


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Two runs of one experiment, side by side.

    Attributes:
        folders: Where they lie.
        num_ranks: Ranks of each.
        shardings: How the model lay on them.
        reducer: How both summed gradients; `"ordered"` promises the same bits.
        conditions: What the bits depend on besides the settings, and is not the same for both.
        series: Of each metric its `name`, `num_values` that were compared, the last value of the
            `first` run and of the `second`, the `largest` relative difference (infinite where one
            run lacks a value), and the step that it `parts_at`, None if it never does.
        parameters: After the last step: `num_elements`, `num_differing` of them, the `largest`
            distance of two, and the `digests` that the runs themselves gave.
    """

    folders: tuple[str, str]
    num_ranks: tuple[int, int]
    shardings: tuple[str, str]
    reducer: str
    conditions: list[str]
    series: list[dict[str, Any]]
    parameters: dict[str, Any]

    @property
    def has_same_parameters(self) -> bool:
        """Whether every bit of them is the same, in the files and by what the runs said."""
        one, other = self.parameters["digests"]
        return self.parameters["num_differing"] == 0 and one == other

    @property
    def has_same_bits(self) -> bool:
        """Whether everything that was compared is the same, to the bit."""
        return self.has_same_parameters and all(e["parts_at"] is None for e in self.series)

    @property
    def keeps_its_promise(self) -> bool:
        """Whether the runs agree as far as their reducer promises."""
        return self.has_same_bits or self.reducer != "ordered"

    @property
    def verdict(self) -> str:
        """What the comparison came to, as one sentence."""
        parted = [each for each in self.series if each["parts_at"] is not None]
        parameters = self.parameters
        if self.has_same_bits:
            return (
                f"the two runs agree bit for bit: {parameters['num_elements']:,} parameters, "
                f"{sum(each['num_values'] for each in self.series):,} figures of their steps"
            )
        if parted:
            first = min(parted, key=lambda each: each["parts_at"])
            where = (
                f"{first['name']} differs from step {first['parts_at']} on, by up to "
                f"{first['largest']:.1e} of its value"
            )
        elif parameters["num_differing"]:
            where = (
                f"all figures are equal, but {parameters['num_differing']:,} of "
                f"{parameters['num_elements']:,} parameters differ, by up to "
                f"{parameters['largest']:.1e}"
            )
        else:
            where = "the parameters in the files are equal, but not the digests that the runs gave"
        if self.conditions:
            return f"{where}; they ran under different conditions: {', '.join(self.conditions)}"
        if self.reducer == "ordered":
            return f"the ordered reducer must give the same bits, but {where}"
        return f"{where}; the fast reducer promises no bits"


def compare_runs(first: Path, second: Path) -> RunComparison:
    """Compare two runs of one experiment.

    Args:
        first: The folder of a run that has ended.
        second: That of another.

    Raises:
        BadInput: If a folder holds no such run, a file of it is damaged, or the two are not one
            experiment.
    """
    folders = (first, second)
    (a, series_a), (b, series_b) = map(_read, folders)
    mechanisms = [config.mechanism.by_name() for config in (a, b)]
    for folder, mechanism in zip(folders, mechanisms, strict=True):
        if mechanism.get("secure_noise"):
            raise BadInput(
                f"the noise and the sampling of {folder} came from a secret key, which no "
                "other run has; for a comparison train both with --no-secure-noise and one --seed "
                "(such runs are not private)"
            )
    if changes := both_of(*mechanisms):
        raise BadInput(
            f"the runs are different experiments: {', '.join(changes)}; compare runs that differ "
            "in ranks, sharding and micro-batches only"
        )
    if a.rows != b.rows:
        raise BadInput(f"{first} and {second} were trained on different rows")
    one, other = map(run_files.read_result, folders)
    return RunComparison(
        folders=(str(first), str(second)),
        num_ranks=(one.world_size, other.world_size),
        shardings=(one.shard, other.shard),
        reducer=a.mechanism.reducer,
        conditions=differing(a.fingerprint, b.fingerprint),
        series=[
            _compare_series(name, series_a.get(name, {}), series_b.get(name, {}))
            for name in sorted(series_a.keys() | series_b.keys())
        ],
        parameters={
            **_compare_parameters(*(folder / run_files.PARAMETERS_FILE for folder in folders)),
            "digests": (one.digest, other.digest),
        },
    )


def _read(folder: Path) -> tuple[run_files.SavedConfig, Series]:
    """Return the settings of a run that ended, and its metrics."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise BadInput(
            f"{folder} is not the folder of a run that has ended: no {', '.join(missing)}; "
            "give the --out of two runs of unison train"
        )
    series: Series = {}
    for record in run_files.read_metrics(folder):
        step = record.pop("step")
        for name, value in record.items():
            if name not in NOT_COMPARED and value is not None:
                series.setdefault(name, {})[step] = value
    return run_files.read_config(folder), series


def _compare_series(name: str, a: dict[int, float], b: dict[int, float]) -> dict[str, Any]:
    steps = sorted(a.keys() | b.keys())
    differences = {step: _relative(a.get(step), b.get(step)) for step in steps}
    return {
        "name": name,
        "num_values": len(steps),
        "first": a.get(steps[-1], math.nan),
        "second": b.get(steps[-1], math.nan),
        "largest": max(differences.values()),
        "parts_at": next((step for step in steps if differences[step] > 0), None),
    }


def _relative(a: float | None, b: float | None) -> float:
    """How far two values are apart, as a part of the larger one; 0 only for the same value."""
    if a is None or b is None:
        return math.inf
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    scale = max(abs(a), abs(b))
    return abs(a - b) / scale if math.isfinite(scale) else math.inf


def _compare_parameters(first: Path, second: Path) -> dict[str, Any]:
    num_elements, num_differing, largest = 0, 0, 0.0
    with open_weights(first) as a, open_weights(second) as b:
        if set(a.keys()) != set(b.keys()):
            names = sorted(set(a.keys()) ^ set(b.keys()))
            raise BadInput(f"{first} and {second} hold different parameters: {', '.join(names)}")
        for name in a:
            x, y = a[name], b[name]
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                raise BadInput(
                    f"{name} is {list(x.shape)} {x.dtype} in {first}, and {list(y.shape)} "
                    f"{y.dtype} in {second}"
                )
            is_other = bits_of(x) != bits_of(y)
            num_elements += x.numel()
            num_differing += int(is_other.sum())
            if is_other.any():
                largest = max(largest, float((x.double() - y.double()).abs().max()))
    return {"num_elements": num_elements, "num_differing": num_differing, "largest": largest}
