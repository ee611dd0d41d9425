"""What `unison account` found, as tables and as a picture."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from unison.errors import BadInput

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_ACCOUNTANTS = ("pld", "rdp")
_BAR_WIDTH = 32


def show(screen: "Console", result: dict[str, Any]) -> None:
    """Print what was found as tables."""
    if "runs" in result:
        rows = _sum_rows(result)
    else:
        rows = _run_rows(result) if "ledger" in result else _plan_rows(result)
    table = _table("", "")
    for name, value in rows:
        table.add_row(name, value)
    screen.print(table)
    runs = result.get("runs", [result])
    for run in runs:
        of = f"{run['ledger']}: " if len(runs) > 1 else ""
        for note in run.get("notes", ()):
            screen.print(f"note: {of}{note}", style="yellow", highlight=False, markup=False)
    if any(run.get("problems") for run in runs):
        screen.print(
            "the ledger is not whole: this ε covers only the lines that are left",
            style="bold red",
            highlight=False,
        )
    if result.get("curve"):
        screen.print()
        screen.print(_curve_table(result["curve"]))


def _plan_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    def answer(name: str, text: str) -> str:
        return f"[bold green]{text}[/]" if result["asked"] == name else text

    rows = [
        ("sampling", _sampling_words(result["sampling"])),
        ("steps", answer("steps", f"{result['steps']:,}")),
        ("noise multiplier σ", answer("noise_multiplier", f"{result['noise_multiplier']:.6g}")),
    ]
    for name, value in result["epsilon"].items():
        is_meant = result["asked"] == "epsilon" or name == result["accountant"]
        text = _epsilon_words(value)
        rows.append(
            (
                f"ε at δ = {result['delta']:g}, {name.upper()}",
                answer("epsilon", text) if is_meant else text,
            )
        )
    if result["target_epsilon"] is not None:
        rows.append((f"target, {result['accountant'].upper()}", f"{result['target_epsilon']:g}"))
    return rows


def _ledger_row(run: dict[str, Any]) -> tuple[str, str]:
    state = "[bold red]edited or cut[/]" if run["problems"] else "[green]chain intact[/]"
    return (
        "ledger",
        f"{escape(run['ledger'])}: {run['lines']:,} lines, "
        f"{run['sessions']} session{'s' * (run['sessions'] != 1)}, {state}",
    )


def _sum_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """What several runs have spent together."""
    rows = []
    for run in result["runs"]:
        rows += [
            _ledger_row(run),
            ("", f"{run['counted']:,} steps counted, key from {_said(run['key_origin'])}"),
        ]
    for group in result["linked"]:
        rows.append(("on the same data", f"{escape(', '.join(group))}: their commitments say so"))
    if result["unlinked"]:
        paths = escape(", ".join(result["unlinked"]))
        rows.append(("not linked", f"{paths}: added up because you named them together"))
    return rows + _epsilon_rows(result)


def _said(values: list[Any]) -> str:
    """What the sessions of a run say, if they say anything."""
    return escape(" and ".join(map(str, values))) or "unknown"


def _data_words(run: dict[str, Any]) -> str:
    sizes = [f"{size:,} records" for size in run["num_records"] if size is not None]
    if not any(run["commitment"]):
        return ", ".join([*sizes, "no commitment"])
    known = ", ".join("none" if each is None else each[:16] for each in run["commitment"])
    covers = _said([each for each in run["committed_to"] if each is not None])
    return f"{', '.join(sizes)}, commitment {known} to the {covers}"


def _epsilon_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The adjacency, and ε under it."""
    rows = [("adjacency", result["adjacency"])]
    for name, value in result["epsilon"].items():
        title = f"ε at δ = {result['delta']:g}, {name.upper()}"
        rows.append((title, f"[bold]{_epsilon_words(value)}[/]"))
    if result["why_infinite"]:
        rows.append(("why", f"[bold red]{result['why_infinite']}[/]"))
        for name, value in result["epsilon_if_secret"].items():
            rows.append((f"ε if it were secret, {name.upper()}", _epsilon_words(value)))
    return rows


def _run_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        _ledger_row(result),
        ("steps committed", f"{result['committed']:,}"),
        ("intents without commit", f"{result['uncommitted']:,}" + _counted(result["uncommitted"])),
    ]
    if result["torn"]:
        rows.append(("lines cut short", f"{result['torn']:,}{_counted(result['torn'])}"))
    rows += [("sampling", _sampling_words(sampling)) for sampling in result["sampling"]]
    rows += [
        ("drawn by", _said(result["sampling_source"])),
        ("key from", _said(result["key_origin"])),
        ("data", _data_words(result)),
        ("unit of privacy", _unit_words(result)),
        ("device", _said(result["device"])),
    ]
    for title, name in (
        ("noise multiplier σ", "noise_multiplier"),
        ("count noise σ_b", "count_noise_multiplier"),
        ("effective z", "effective_noise_multiplier"),
        ("clip norm C", "max_grad_norm"),
    ):
        is_news = name != "effective_noise_multiplier" or result[name] != result["noise_multiplier"]
        if result[name] is not None and is_news:
            low, high = result[name]
            rows.append((title, f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"))
    return rows + _epsilon_rows(result)


def _unit_words(run: dict[str, Any]) -> str:
    rows = [f"{number} rows of a batch" for number in run["rows_per_sample"] if number != 1]
    return ", ".join([_said(run["unit"]), *rows])


def _counted(number: int) -> str:
    return "" if number == 0 else ", counted"


def _sampling_words(fields: dict[str, Any]) -> str:
    match fields["kind"]:
        case "poisson":
            return f"Poisson, q = {fields['rate']:.6g}"
        case "truncated":
            return (
                f"Poisson, q = {fields['rate']:.6g}, at most {fields['capacity']:,} of "
                f"{fields['num_records']:,} records"
            )
        case "shuffled":
            return (
                f"shuffled, batches of {fields['batch_size']:,} of {fields['num_records']:,} "
                "records, no amplification"
            )
        case kind:
            raise AssertionError(kind)


def _epsilon_words(value: float | None) -> str:
    if value is None:
        return "no bound for this sampling"
    return "infinite" if value == math.inf else f"{value:.4f}"


def _table(*titles: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=any(titles))
    for title in titles:
        table.add_column(title)
    return table


def _curve_table(curve: list[dict[str, Any]]) -> "Table":
    """The curve as a table with bars, by PLD."""
    table = _table("steps", "ε by PLD", "ε by RDP", "")
    for column in table.columns[:3]:
        column.justify = "right"
    largest = max((point["pld"] for point in curve if point["pld"] < math.inf), default=0)
    for point in curve:
        is_drawn = largest > 0 and point["pld"] < math.inf
        length = point["pld"] / largest * _BAR_WIDTH if is_drawn else 0
        bar = "█" * int(length) + ("▌" if length % 1 >= 0.5 else "")
        words = (
            "–" if point[name] is None else _epsilon_words(point[name]) for name in _ACCOUNTANTS
        )
        table.add_row(f"{point['steps']:,}", *words, f"[cyan]{bar}[/]")
    return table


# ---- the picture ---------------------------------------------------------------------------------


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw ε over the steps into a PNG file."""
    # The object interface, not pyplot: no global state and no display needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, color in (("rdp", "0.6"), ("pld", "#4c78a8")):
        points = [
            (point["steps"], point[name])
            for point in result["curve"]
            if point[name] is not None and point[name] < math.inf
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=color,
                marker="o",
                markersize=3,
                label=f"{name.upper()}: {points[-1][1]:.3f}",
            )
    target = result.get("target_epsilon")
    if target is not None:
        axes.axhline(target, color="#e45756", linestyle="--", linewidth=1, label=f"ε = {target:g}")
    axes.set_xlabel("steps")
    seeded = ", if the seed were secret" if result.get("why_infinite") else ""
    axes.set_ylabel(f"ε at δ = {result['delta']:g}{seeded}")
    axes.set_title("Privacy spent")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from None
