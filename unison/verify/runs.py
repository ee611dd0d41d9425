"""Two runs that should be one experiment: do their folders hold the same bits, and if not, where.

Ranks, sharding and micro-batches may differ between the two; what decides the result may not. The
figures are those that `unison train` left: metrics of every step, the digest of all parameters in
the result, and the parameters themselves.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """What a run that ended left in its folder.

    Attributes:
        folder: The folder.
        config: Every setting, and what the bits depend on besides.
        result: What the run came to.
        series: Values of each metric by step.
    """

    folder: str
    config: run_files.SavedConfig
    result: run_files.TrainResult
    series: dict[str, dict[int, float]]

    @classmethod
    def open(cls, folder: Path) -> "RunFolder":
        """Read a run.

        Raises:
            BadInput: If there is none, it has not ended, or a file of it is damaged.
        """
        missing = [name for name in FILES if not (folder / name).is_file()]
        if missing:
            raise BadInput(
                f"{folder} is not the folder of a run that has ended: no {', '.join(missing)}; "
                "give the --out of two runs of unison train"
            )
        series: dict[str, dict[int, float]] = {}
        for record in run_files.read_metrics(folder):
            step = record.pop("step")
            for name, value in record.items():
                if name not in NOT_COMPARED and value is not None:
                    series.setdefault(name, {})[step] = value
        config, result = run_files.read_config(folder), run_files.read_result(folder)
        return cls(folder=str(folder), config=config, result=result, series=series)

    @property
    def mechanism(self) -> dict[str, Any]:
        """The settings that decide the result, those of the model and of privacy by name."""
        settings = asdict(self.config.mechanism)
        overrides, privacy = settings.pop("overrides"), settings.pop("privacy") or {}
        return {**settings, **overrides, "private": bool(privacy), **privacy}


@dataclass(frozen=True, kw_only=True)
class SeriesDifference:
    """One metric of both runs.

    Attributes:
        name: The metric.
        num_values: Values that were compared.
        first: The last value of the first run.
        second: And of the second.
        largest: The largest relative difference; infinite where one run has a value that the other
            lacks.
        parts_at: The first step at which they differ; None if they never do.
    """

    name: str
    num_values: int
    first: float
    second: float
    largest: float
    parts_at: int | None


@dataclass(frozen=True, kw_only=True)
class ParameterDifference:
    """The parameters of both runs after the last step.

    Attributes:
        num_elements: Elements of all parameters.
        num_differing: Those whose bits differ.
        largest: The farthest that two elements are apart.
        digests: What the runs themselves said.
    """

    num_elements: int
    num_differing: int
    largest: float
    digests: tuple[str, str]

    @property
    def is_none(self) -> bool:
        """Whether every bit is the same, in the files and by what the runs said."""
        return self.num_differing == 0 and self.digests[0] == self.digests[1]


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Two runs of one experiment, side by side.

    Attributes:
        folders: Where they lie.
        num_ranks: Ranks of each.
        shardings: How the model lay on them.
        reducer: How both summed gradients; `"ordered"` promises the same bits.
        conditions: What the bits depend on besides the settings, and is not the same for both.
        series: The metrics.
        parameters: The parameters.
    """

    folders: tuple[str, str]
    num_ranks: tuple[int, int]
    shardings: tuple[str, str]
    reducer: str
    conditions: list[str]
    series: list[SeriesDifference]
    parameters: ParameterDifference

    @property
    def has_same_bits(self) -> bool:
        """Whether everything that was compared is the same, to the bit."""
        return self.parameters.is_none and all(each.parts_at is None for each in self.series)

    @property
    def keeps_its_promise(self) -> bool:
        """Whether the runs agree as far as their reducer promises."""
        return self.has_same_bits or self.reducer != "ordered"

    @property
    def verdict(self) -> str:
        """What the comparison came to, as one sentence."""
        if self.has_same_bits:
            return (
                f"the two runs agree bit for bit: {self.parameters.num_elements:,} parameters, "
                f"{sum(each.num_values for each in self.series):,} figures of their steps"
            )
        where = self._where_they_part()
        if self.conditions:
            return f"{where}; they ran under different conditions: {', '.join(self.conditions)}"
        if self.reducer == "ordered":
            return f"the ordered reducer must give the same bits, but {where}"
        return f"{where}; the fast reducer promises no bits"

    def _where_they_part(self) -> str:
        parted = [each for each in self.series if each.parts_at is not None]
        if parted:
            first = min(parted, key=lambda each: each.parts_at or 0)
            return (
                f"{first.name} differs from step {first.parts_at} on, by up to {first.largest:.1e} "
                "of its value"
            )
        if self.parameters.num_differing:
            return (
                f"all figures are equal, but {self.parameters.num_differing:,} of "
                f"{self.parameters.num_elements:,} parameters differ, by up to "
                f"{self.parameters.largest:.1e}"
            )
        return "the parameters in the files are equal, but not the digests that the runs gave"


def compare_runs(first: Path, second: Path) -> RunComparison:
    """Compare two runs of one experiment.

    Args:
        first: The folder of a run that has ended.
        second: That of another.

    Raises:
        BadInput: If a folder holds no such run, or the two are not one experiment.
    """
    a, b = RunFolder.open(first), RunFolder.open(second)
    _check_one_experiment(a, b)
    return RunComparison(
        folders=(a.folder, b.folder),
        num_ranks=(a.result.world_size, b.result.world_size),
        shardings=(a.result.shard, b.result.shard),
        reducer=a.mechanism["reducer"],
        conditions=differing(a.config.fingerprint, b.config.fingerprint),
        series=[
            _series_difference(name, a.series.get(name, {}), b.series.get(name, {}))
            for name in sorted(a.series.keys() | b.series.keys())
        ],
        parameters=_parameter_difference(a, b),
    )


def _check_one_experiment(a: RunFolder, b: RunFolder) -> None:
    for run in (a, b):
        if run.mechanism.get("secure_noise"):
            raise BadInput(
                f"the noise and the sampling of {run.folder} came from a secret key, which no "
                "other run has; for a comparison train both with --no-secure-noise and one --seed "
                "(such runs are not private)"
            )
    if changes := both_of(a.mechanism, b.mechanism):
        raise BadInput(
            f"the runs are different experiments: {', '.join(changes)}; compare runs that differ "
            "in ranks, sharding and micro-batches only"
        )
    if a.config.rows != b.config.rows:
        raise BadInput(f"{a.folder} and {b.folder} were trained on different rows")


def _series_difference(
    name: str, a: Mapping[int, float], b: Mapping[int, float]
) -> SeriesDifference:
    steps = sorted(a.keys() | b.keys())
    differences = {step: _relative(a.get(step), b.get(step)) for step in steps}
    return SeriesDifference(
        name=name,
        num_values=len(steps),
        first=a.get(steps[-1], math.nan),
        second=b.get(steps[-1], math.nan),
        largest=max(differences.values()),
        parts_at=next((step for step in steps if differences[step] > 0), None),
    )


def _relative(a: float | None, b: float | None) -> float:
    """How far two values are apart, as a part of the larger one; 0 only for the same value."""
    if a is None or b is None:
        return math.inf
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    scale = max(abs(a), abs(b))
    return abs(a - b) / scale if math.isfinite(scale) else math.inf


def _parameter_difference(a_run: RunFolder, b_run: RunFolder) -> ParameterDifference:
    first, second = (Path(run.folder) / run_files.PARAMETERS_FILE for run in (a_run, b_run))
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
    return ParameterDifference(
        num_elements=num_elements,
        num_differing=num_differing,
        largest=largest,
        digests=(a_run.result.digest, b_run.result.digest),
    )
