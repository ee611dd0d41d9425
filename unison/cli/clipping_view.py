"""The tables of `unison bench clipping`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from unison.verify import clipping_speed as speed

_NONE = "–"


def show(
    screen: "Console", experiment: "speed.Experiment", results: "list[speed.AtLength]"
) -> None:
    """Print a table per length, and what is to be said of it."""
    model = experiment.config(max(experiment.lengths))
    screen.print()
    screen.print(
        f"[bold]{experiment.preset}[/]  {model.num_layers} blocks of width {model.d_model}, "
        f"vocabulary {model.vocab_size:,}, {experiment.batch_size} rows, {experiment.dtype}, "
        f"{experiment.device}"
    )
    screen.print(
        f"A step is forward, backward, clipping, noise (σ {experiment.noise_multipliers[0]:g}) and "
        f"AdamW; medians of {experiment.rounds} × {experiment.steps} steps. Ratios are to the "
        "non-private steps timed before and after. * is the fastest private mode.",
        style="dim",
        highlight=False,
    )
    for each in results:
        screen.print()
        screen.print(f"[bold]{each.tokens:,} tokens[/]{_spread(each)}", highlight=False)
        screen.print(_table(experiment, each))
        for text, style in _remarks(each):
            screen.print(text, style=style, highlight=False)


def _spread(each: "speed.AtLength") -> str:
    """How far the baselines of this length are apart."""
    words = [
        f"{how} baselines {timing.low - 1:+.1%} to {timing.high - 1:+.1%}"
        for how, timing in (("eager", each.rows[0].eager), ("graph", each.rows[0].graph))
        if timing is not None and timing.low is not None and timing.high is not None
    ]
    return f"  [dim]{', '.join(words)}[/]" if words else ""


def _table(experiment: "speed.Experiment", each: "speed.AtLength") -> "Table":
    from rich.table import Table

    unit, num_bytes = ("GiB", 2**30) if experiment.device == "cuda" else ("MiB", 2**20)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("mode", no_wrap=True)
    timed = ["eager", "graph"] if experiment.has_graphs else ["eager"]
    titles = [title for how in timed for title in (f"{how} ms", "ratio")]
    for title in [*titles, f"peak {unit}", "ratio"]:
        table.add_column(title, justify="right", no_wrap=True)
    fastest = {(v.how, v.fastest, v.noise_multiplier) for v in each.verdicts}
    for row in each.rows:
        cells = []
        for how in timed:
            timing = row.eager if how == "eager" else row.graph
            key = (how, row.case.mode, row.case.noise_multiplier)
            is_fastest = row.case.is_mode and row.case.budget is None and key in fastest
            cells += _cells(timing, row.trouble or row.graph_trouble, is_fastest)
        peak = _NONE if row.peak_bytes is None else f"{row.peak_bytes / num_bytes:,.2f}"
        peak_ratio = _NONE if row.peak_ratio is None else f"{row.peak_ratio:.2f} "
        table.add_row(row.case.name, *cells, peak, peak_ratio, style=_style(row))
    return table


def _cells(timing: "speed.Timing | None", trouble: str | None, is_fastest: bool) -> list[str]:
    """A time and its ratio; the star has a column's last character to itself."""
    if timing is None:
        return [trouble if trouble == "out of memory" else _NONE, ""]
    if timing.ratio is None:
        return [f"{timing.ms:,.2f}", _NONE]
    ratio = f"{timing.ratio:.3f}"
    return [f"{timing.ms:,.2f}", f"[bold green]{ratio}*[/]" if is_fastest else f"{ratio} "]


def _style(row: "speed.Row") -> str | None:
    if row.case.is_peer:
        return "dim"
    return None if row.case.is_mode else "bold"


def _remarks(each: "speed.AtLength") -> Iterator[tuple[str, str]]:
    """What is to be said below a table, and in which style."""
    for verdict in each.verdicts:
        yield _verdict(verdict), "green" if verdict.is_within is not False else "yellow"
    for row in each.rows:
        budget, found = row.case.budget, row.peak_ratio
        if budget is not None and found is not None and found > budget:
            yield f"{row.case.name}: over its budget, {found:.3f}×", "yellow"
        if row.own_ratio is not None and row.own_ratio != 1:
            yield f"{row.case.name}: {row.own_ratio:.2f}× its own model without privacy", "dim"
    for what, names in _troubles(each).items():
        yield f"{', '.join(names)}: {what}", "dim"


def _verdict(verdict: "speed.Verdict") -> str:
    noise = "" if verdict.noise_multiplier else " without noise"
    text = f"{verdict.how}{noise}: fastest is {verdict.fastest}, {verdict.ratio:.3f}×"
    if verdict.excess is None:
        return text
    word = "within" if verdict.is_within else "not within"
    return f"{text}; auto is {word} 2 % of it ({verdict.excess:+.1%})"


def _troubles(each: "speed.AtLength") -> dict[str, list[str]]:
    """The cases that have no figures, by the reason; memory is said in the table."""
    found: dict[str, list[str]] = {}
    for row in each.rows:
        if row.trouble is not None and row.trouble != "out of memory":
            found.setdefault(row.trouble, []).append(row.case.name)
        if row.graph_trouble is not None:
            found.setdefault(f"no graph, {row.graph_trouble}", []).append(row.case.name)
    return found
