"""One page of HTML about claims or a comparison: no script, nothing from elsewhere.

Wide screens get tables. On narrow ones each row becomes a block whose cells carry their column's
name, so that nothing has to be scrolled sideways.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --bad: #cf222e; --soft: #8881; }
@media (prefers-color-scheme: dark) { :root { --good: #3fb950; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 72rem;
  overflow-wrap: anywhere; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0 1rem; max-width: 46rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .5rem .75rem .5rem 0; text-align: left;
  vertical-align: top; }
th { font-weight: 600; overflow-wrap: normal; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
code, .fault { font-family: ui-monospace, monospace; font-size: .875rem; }
.fault { background: var(--soft); border-left: 3px solid var(--bad); margin: .5rem 0;
  padding: .5rem .75rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: 0; }
dt { font-weight: 600; } dd { margin: 0; }
@media (max-width: 640px) {
  body { padding: 1rem; }
  thead { display: none; }
  table, tbody, tr, td { display: block; width: 100%; }
  tr { border-bottom: 1px solid var(--line); padding: .5rem 0; }
  td { border: 0; padding: .125rem 0; }
  td.number, td.good, td.bad { display: inline-block; margin-right: 1.25rem; width: auto; }
  td::before { content: attr(data-name) ": "; font-weight: 600; }
  td.title { font-weight: 600; } td.title::before { content: none; }
  dl { display: block; } dd { margin: 0 0 .5rem; }
}
"""


def page(
    title: str,
    summary: str,
    *,
    is_good: bool,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    faults: Sequence[str],
    about: Mapping[str, Any],
) -> str:
    """Return a page.

    Args:
        title: What it is about.
        summary: What it came to, in a sentence.
        is_good: Whether that is good.
        columns: Names of the table's columns; the first is a row's title, the last its verdict.
        rows: The cells of each row; a verdict that is not "holds" or "equal" is shown as bad.
        faults: What is wrong, in sentences.
        about: Conditions, by name.
    """
    head = "".join(f"<th>{escape(each)}</th>" for each in columns)
    body = "\n".join(f"<tr>{_cells(columns, row)}</tr>" for row in rows)
    wrong = "".join(f'<div class="fault">{escape(each)}</div>' for each in faults)
    facts = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(_said(value))}</dd>"
        for name, value in about.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="{"good" if is_good else "bad"}">{escape(summary)}</p>
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
{f"<h2>Where runs part</h2>{wrong}" if wrong else ""}
<h2>Conditions</h2>
<dl>{facts}</dl>
</body>
</html>
"""


def _said(value: Any) -> str:
    """A condition in words: switches by the names of those that are on.

    >>> _said({"flash": True, "math": False}), _said(None), _said({"OMP_NUM_THREADS": "1"})
    ('flash', 'none', 'OMP_NUM_THREADS=1')
    """
    if isinstance(value, Mapping):
        found = [name if each is True else f"{name}={each}" for name, each in value.items() if each]
        return ", ".join(found) or "none"
    return {None: "none", True: "yes", False: "no"}.get(value, str(value))


def _cells(columns: Sequence[str], row: Sequence[str]) -> str:
    made = []
    for place, (name, value) in enumerate(zip(columns, row, strict=True)):
        kind = "title" if place == 0 else "number" if value[:1].isdigit() else ""
        if place == len(columns) - 1:
            kind = "good" if value in ("holds", "equal") else "bad"
        made.append(f'<td class="{kind}" data-name="{escape(name)}">{escape(value)}</td>')
    return "".join(made)
