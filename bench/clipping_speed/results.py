"""From visits to tables: times, ratios to the baselines around them, and which mode is fastest."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.clipping_speed import peers
from bench.clipping_speed.experiment import BASELINE, Case, Experiment, Planned
from bench.clipping_speed.visits import Visit, baseline_peak
from unison.clip import AUTO

TOLERANCE = 0.02  # how much slower than the fastest mode `auto` may be
EAGER, GRAPH = "eager", "graph"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A step's time over the rounds.

    Attributes:
        ms: The median, in milliseconds.
        ratio: To the baselines around it, the median; None where there are none. Of the baseline
            itself 1, and `low` and `high` say how far its measurements are apart.
        low: The smallest ratio.
        high: The largest.
    """

    ms: float
    ratio: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case at one length.

    Attributes:
        case: Which.
        eager: Without graphs; None if there are no figures.
        graph: With CUDA graphs.
        peak_bytes: Memory at its peak.
        peak_ratio: That, as a multiple of the non-private training's.
        own_ratio: Of a peer, the eager time as a multiple of its own model's without privacy.
        passes: Backward and forward passes of the plan, where there is one.
        trouble: Why there are no figures.
        graph_trouble: Why there are none of the graph.
    """

    case: Case
    eager: Timing | None
    graph: Timing | None
    peak_bytes: int | None
    peak_ratio: float | None
    own_ratio: float | None
    passes: tuple[int, int] | None
    trouble: str | None
    graph_trouble: str | None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether `auto` chose well.

    Attributes:
        how: `"eager"` or `"graph"`.
        noise_multiplier: σ of the modes compared.
        fastest: The fastest private mode.
        ratio: Its ratio to the baseline.
        excess: How much longer `auto` takes, as a fraction; None if it was not measured.
    """

    how: str
    noise_multiplier: float
    fastest: str
    ratio: float
    excess: float | None

    @property
    def is_within(self) -> bool | None:
        """Whether `auto` is as fast, within `TOLERANCE`."""
        return None if self.excess is None else self.excess <= TOLERANCE


@dataclass(frozen=True, kw_only=True)
class AtLength:
    """Everything about one length: the baseline's row, then the cases in their order."""

    tokens: int
    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]


def results_of(experiment: Experiment, visits: Sequence[Visit]) -> list[AtLength]:
    """Make the tables of all lengths that were visited."""
    found = []
    for tokens in experiment.lengths:
        here = [each for each in visits if each.tokens == tokens]
        if here:
            rows = _rows(experiment, here)
            found.append(AtLength(tokens=tokens, rows=rows, verdicts=_verdicts(rows)))
    return found


def figures_of(
    experiment: Experiment, visits: Sequence[Visit], left_out: Sequence[Planned]
) -> dict[str, Any]:
    """Return results as values that JSON can hold."""
    return {
        "experiment": asdict(experiment),
        "model": asdict(experiment.config(max(experiment.lengths))),
        "peers": peers.versions() if experiment.has_peers else {},
        "lengths": {
            str(each.tokens): {
                "rows": {row.case.name: _figures_of_row(row) for row in each.rows},
                "auto": [asdict(v) | {"is_within": v.is_within} for v in each.verdicts],
            }
            for each in results_of(experiment, visits)
        },
        "left_out": [str(each) for each in left_out],
        "visits": [asdict(each) | {"case": each.case.name} for each in visits],
    }


def _figures_of_row(row: Row) -> dict[str, Any]:
    """Return a row without what it does not have."""
    figures = asdict(row)
    figures |= figures.pop("case")
    return {name: value for name, value in figures.items() if value is not None}


def _rows(experiment: Experiment, visits: Sequence[Visit]) -> tuple[Row, ...]:
    own_baseline = _timing(visits, peers.NO_DP, EAGER)
    own_ratio = own_baseline and own_baseline.ratio
    visited = {each.case for each in visits}
    return tuple(
        _row(visits, case, own_ratio) for case in (BASELINE, *experiment.cases) if case in visited
    )


def _row(visits: Sequence[Visit], case: Case, own_baseline: float | None) -> Row:
    own = [each for each in visits if each.case == case]
    eager = _timing(visits, case.name, EAGER)
    peak = max((each.peak_bytes for each in own if each.peak_bytes is not None), default=None)
    usual = baseline_peak(visits, own[0].tokens)
    is_comparable = case.is_peer and eager and eager.ratio and own_baseline
    return Row(
        case=case,
        eager=eager,
        graph=_timing(visits, case.name, GRAPH),
        peak_bytes=peak,
        peak_ratio=peak / usual if peak and usual else None,
        own_ratio=eager.ratio / own_baseline if is_comparable else None,  # type: ignore[union-attr,operator]
        passes=next((each.passes for each in own if each.passes), None),
        trouble=next((each.trouble for each in own if each.trouble), None),
        graph_trouble=next((each.graph_trouble for each in own if each.graph_trouble), None),
    )


def _timing(visits: Sequence[Visit], name: str, how: str) -> Timing | None:
    times, ratios = [], []
    for place, each in enumerate(visits):
        ms = _ms(each, how)
        if each.case.name != name or ms is None:
            continue
        times.append(ms)
        usual = _usual_ms(visits, place, how)
        if usual is not None:
            ratios.append(ms / usual)
    if not times:
        return None
    ratio = statistics.median(ratios) if ratios else None
    return Timing(
        ms=statistics.median(times),
        ratio=1.0 if name == BASELINE.name else ratio,
        low=min(ratios, default=None),
        high=max(ratios, default=None),
    )


def _usual_ms(visits: Sequence[Visit], place: int, how: str) -> float | None:
    """Return the mean of the baselines around a visit; of a baseline, of all in its round."""
    here = visits[place]
    baselines = [
        (number, ms)
        for number, each in enumerate(visits)
        if each.round == here.round and each.case == BASELINE
        if (ms := _ms(each, how)) is not None
    ]
    if here.case != BASELINE:
        before = [each for each in baselines if each[0] < place][-1:]
        baselines = before + [each for each in baselines if each[0] > place][:1]
    return statistics.fmean(ms for _, ms in baselines) if baselines else None


def _ms(visit: Visit, how: str) -> float | None:
    return visit.eager_ms if how == EAGER else visit.graph_ms


def _verdicts(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    found = []
    for how in (EAGER, GRAPH):
        for sigma in dict.fromkeys(row.case.noise_multiplier for row in rows if row.case.is_mode):
            ratios = {
                row.case.mode: timing.ratio
                for row in rows
                if row.case.is_mode and row.case.budget is None
                if row.case.noise_multiplier == sigma
                if (timing := row.eager if how == EAGER else row.graph) is not None
                if timing.ratio is not None
            }
            if ratios:
                found.append(_verdict(how, sigma, ratios))
    return tuple(found)


def _verdict(how: str, sigma: float, ratios: dict[str, float]) -> Verdict:
    fastest = min(ratios, key=lambda mode: ratios[mode])
    return Verdict(
        how=how,
        noise_multiplier=sigma,
        fastest=fastest,
        ratio=ratios[fastest],
        excess=ratios[AUTO] / ratios[fastest] - 1 if AUTO in ratios else None,
    )
