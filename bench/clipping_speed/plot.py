"""Step times as a picture: the ratio to ordinary training over the length, a line per mode."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.clipping_speed import peers
from bench.clipping_speed.experiment import Case, Experiment
from bench.clipping_speed.results import AtLength
from unison.clip import AUTO, MODES
from unison.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#4c78a8", "#54a24b", "#b279a2", "#f58518", "#72b7b2", "#9d755d", "#eeca3b", "#ff9da6")
_AUTO_COLOR = "#e45756"
_LINEAR_UP_TO = 3.0  # beyond, ratios are drawn on a logarithmic axis
_TICKS = (0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100)


def draw(experiment: Experiment, results: Sequence[AtLength], path: Path, title: str) -> None:
    """Draw the ratios into a PNG file: eager steps, and beside them graphs if they were timed.

    Args:
        experiment: What was measured.
        results: Of all lengths.
        path: Where to.
        title: Above it all.

    Raises:
        BadInput: The file cannot be written.
    """
    # The object interface, not pyplot: no global state and no display needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = ["eager", "graph"] if experiment.has_graphs else ["eager"]
    figure = Figure(figsize=(1.8 + 4.6 * len(kinds), 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, how in zip(panels, kinds, strict=True):
        _draw_panel(axes, results, how)
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from None


def _draw_panel(axes: "Axes", results: Sequence[AtLength], how: str) -> None:
    cases = dict.fromkeys(row.case for each in results for row in each.rows)
    ratios: list[float] = []
    for case in cases:
        points = _points(results, case, how)
        if points and (case.is_mode or case.is_peer):
            axes.plot(*zip(*points, strict=True), **_style(case))
            ratios += [ratio for _, ratio in points]
    axes.axhline(1, color="0.4", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths := [each.tokens for each in results], [f"{n:,}" for n in lengths])
    axes.minorticks_off()
    if max(ratios, default=1) > _LINEAR_UP_TO:
        axes.set_yscale("log")
        low, high = min([1, *ratios]), max(ratios)
        ticks = [tick for tick in _TICKS if low <= tick <= 1.1 * high]
        axes.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])
        axes.minorticks_off()
    else:
        axes.yaxis.set_major_formatter("{x:.2f}×")
    axes.set_xlabel("tokens per row")
    axes.set_ylabel("step time, multiple of the non-private step")
    axes.set_title("eager" if how == "eager" else "CUDA graphs", fontsize=9)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _points(results: Sequence[AtLength], case: Case, how: str) -> list[tuple[int, float]]:
    """Return the case's (tokens, ratio) where there is one."""
    found = []
    for each in results:
        for row in each.rows:
            timing = row.eager if how == "eager" else row.graph
            if row.case == case and timing is not None and timing.ratio is not None:
                found.append((each.tokens, timing.ratio))
    return found


def _style(case: Case) -> dict[str, Any]:
    """Return how a case is drawn: modes by color, `auto` above all, peers dashed and grey."""
    style: dict[str, Any] = {"label": case.name, "marker": "o", "markersize": 3.5}
    if case.is_peer:
        names = [peers.NO_DP, *peers.PACKAGES]
        markers = dict(zip(names, "x^sD", strict=True))
        grey = f"{0.65 - 0.15 * names.index(case.mode):.2f}"
        return style | {"color": grey, "linestyle": "--", "marker": markers[case.mode]}
    colors = dict(zip(MODES, _COLORS, strict=False)) | {AUTO: _AUTO_COLOR}
    style["color"] = colors.get(case.mode, "0.5")
    if case.mode == AUTO:
        style |= {"linewidth": 2.2, "zorder": 3}
    if case.noise_multiplier == 0:
        style["linestyle"] = ":"
    if case.budget is not None:
        style |= {"linestyle": "-.", "linewidth": 1.0, "marker": "v"}
    return style
