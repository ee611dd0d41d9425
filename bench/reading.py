"""What a reader must hold: the code that one step enters, and counts of the package's source.

`python -m bench.reading [--json FILE]`. The third step of README's model with a LayerNorm, from
drawing its rows to the optimizer's step, is run under a profiler in four settings, the sharded ones
on the first of two gloo ranks; the package is parsed for the rest. Limits beside the figures are
those that docs/design.md sets.
"""

import argparse
import ast
import io
import json
import sys
import tempfile
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import unison
from bench.runner import ROOT, write_result

PACKAGE = ROOT / "unison"
RANKS = 2
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# What may not be exceeded: (what is counted, figure) -> limit.
STEP_LIMITS = {
    "private": {"files": 30, "classes": 25, "functions": 140, "calls": 1500},
    "private, sharded": {"files": 42, "classes": 36},
    "K-FAC": {"files": 30},
    "sharded": {},
}
PACKAGE_LIMITS = {
    "code_lines": 28_100,
    "tokens_per_line": 9.064,
    "files": 170,
    "classes": 240,
    "repeated_class_names": 0,
    "import_circles": 0,
}


class StepProfile:
    """Counts what the calls of one package enter while it is active.

    A comprehension is part of the function around it, and a generator that goes on is no new call.
    Functions that `dataclass` and its like generate have no file, and are not counted.
    """

    def __init__(self, package: Path):
        self._prefix = f"{package}/"
        self._calls: Counter[CodeType] = Counter()

    def __enter__(self) -> "StepProfile":
        # Autograd may run hooks in a thread of its own.
        threading.setprofile(self._count)
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._prefix):
            return
        if code.co_name == "<lambda>" or not code.co_name.startswith("<"):
            # RESUME's argument is 0 at a function's start, and not after a yield.
            self._calls[code] += code.co_code[frame.f_lasti + 1] == 0

    def figures(self) -> dict[str, Any]:
        """Return the number of distinct files, classes and functions, of calls, and the names."""
        by_file = defaultdict(list)
        for code in self._calls:
            path = Path(code.co_filename).relative_to(Path(self._prefix).parent)
            by_file[str(path)].append(code.co_qualname)
        return {
            "files": len(by_file),
            "classes": len({found for code in self._calls if (found := class_of(code))}),
            "functions": len(self._calls),
            "calls": self._calls.total(),
            "entered": {path: sorted(names) for path, names in sorted(by_file.items())},
        }


def class_of(code: CodeType) -> tuple[str, str] | None:
    """Return file and name of the class whose method this code is, or None."""
    outer = code.co_qualname.rpartition(".")[0]
    is_method = outer and not outer.endswith("<locals>")
    return (code.co_filename, outer) if is_method else None


# ---- the steps -----------------------------------------------------------------------------------


def third_step(rows: Iterator[Any], step: Callable[[Any, Any], None]) -> dict[str, Any]:
    """Run three steps, and profile the third together with drawing its rows."""
    for x, y in islice(rows, 2):
        step(x, y)
    with StepProfile(PACKAGE) as profile:
        x, y = next(rows)
        step(x, y)
    return profile.figures()


def readme_model() -> torch.nn.Sequential:
    """Return the model of README.md, with a LayerNorm."""
    first, last = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)
    return torch.nn.Sequential(first, torch.nn.LayerNorm(32), torch.nn.ReLU(), last)


def readme_loader() -> DataLoader[Any]:
    """Return the rows of README.md."""
    data = TensorDataset(torch.randn(2000, 16), torch.randint(0, 4, (2000,)))
    return DataLoader(data, batch_size=100, shuffle=True)


def private_step(model: torch.nn.Module) -> dict[str, Any]:
    """Profile a private step of a module."""
    model, optimizer, loader = unison.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        data_loader=readme_loader(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return third_step(iter(loader), step)


def kfac_step() -> dict[str, Any]:
    """Profile a K-FAC step that updates factors and inverses."""
    model = readme_model()
    kfac = unison.KFAC(model, unison.KFACConfig(damping=1e-3, update_every=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        logits = model(x)
        if kfac.wants_statistics:
            kfac.sample(logits).backward(retain_graph=True)
        cross_entropy(logits, y).backward()
        kfac.step()
        optimizer.step()

    found = third_step(iter(readme_loader()), step)
    kfac.detach()  # or others would look whether they share a parameter with it
    return found


def sharded_step() -> dict[str, Any]:
    """Profile an ordinary step of a sharded module."""
    model = shard(readme_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return third_step(iter(readme_loader()), step)


def shard(model: torch.nn.Sequential) -> torch.nn.Module:
    """Shard both linear layers as units of their own, and the rest as the outermost one."""
    for module in (model[0], model[3]):
        unison.fully_shard(module, gradient_divisor=1)
    return unison.fully_shard(model, gradient_divisor=1)


def profile_steps() -> dict[str, dict[str, Any]]:
    """Profile the four settings, each by what its third step enters."""
    torch.manual_seed(0)
    # K-FAC first: later it would look at what the private engine, still attached, trains.
    found = {"K-FAC": kfac_step(), "private": private_step(readme_model())}
    with tempfile.TemporaryDirectory() as folder:
        spawn(profile_rank, (Path(folder),), nprocs=RANKS)
        found |= json.loads((Path(folder) / "found.json").read_text())
    return {name: found[name] for name in STEP_LIMITS}


def profile_rank(rank: int, folder: Path) -> None:
    """Profile the sharded settings as one of several ranks; the first writes what it found."""
    torch.manual_seed(0)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    found = {"private, sharded": private_step(shard(readme_model())), "sharded": sharded_step()}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


# ---- the package's source ------------------------------------------------------------------------


def count_package(package: Path) -> dict[str, Any]:
    """Return counts of a package's source, repeated class names and circles of imports."""
    sources = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    lines = tokens = 0
    for path, text in sources.items():
        file_lines, file_tokens = count_code(text, trees[path])
        lines, tokens = lines + file_lines, tokens + file_tokens
    places = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(package.parent)}:{node.lineno}")
    repeated = {name: where for name, where in sorted(places.items()) if len(where) > 1}
    circles = import_circles(package, trees)
    return {
        "code_lines": lines,
        "tokens_per_line": round(tokens / max(lines, 1), 3),
        "files": len(sources),
        "classes": sum(map(len, places.values())),
        "repeated_class_names": len(repeated),
        "import_circles": len(circles),
        "repeated_class_names_where": repeated,
        "import_circles_where": circles,
    }


def count_code(text: str, tree: ast.Module) -> tuple[int, int]:
    """Return lines and tokens of code, without docstrings, comments and blanks."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        has_body = isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
        if has_body and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstrings.update(range(first.lineno, (first.end_lineno or 0) + 1))
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in layout or token.type == tokenize.ENDMARKER:
            continue
        if token.start[0] not in docstrings:
            tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines), tokens


def import_circles(package: Path, trees: dict[Path, ast.Module]) -> list[list[str]]:
    """Return circles of imports that run when modules are loaded, each as a list of modules.

    One circle is found after another, its last import left out for the next search.
    """
    modules = {module_name(package, path): path for path in trees}
    graph = {
        name: set(imported_modules(name, path, trees[path], modules)) - {name}
        for name, path in modules.items()
    }
    circles = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circle = error.args[1]
            circles.append(circle)
            # Listed so that each is an import of its successor's.
            graph[circle[1]].discard(circle[0])
        else:
            return circles


def module_name(package: Path, path: Path) -> str:
    """Return the dotted name of a module of a package."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(
    name: str, path: Path, tree: ast.Module, modules: dict[str, Path]
) -> Iterator[str]:
    """Yield the package's modules that a module imports while it is loaded.

    `from package import name` means the submodule if there is one. The packages around a module
    are loaded before it, but whoever imports `package.module` does not need their names: they are
    not counted, or every package that re-exports its modules' names would be a circle.
    """
    is_package = path.name == "__init__.py"
    for node in statements_at_load(tree.body):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        else:
            above = name.split(".")
            above = above[: len(above) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            inner = [f"{base}.{alias.name}" for alias in node.names]
            wanted = [each if each in modules else base for each in inner]
        yield from (each for each in wanted if each in modules)


def statements_at_load(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield imports outside of functions, and not under `if TYPE_CHECKING`."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements_at_load(node.orelse)
        elif not isinstance(node, FUNCTIONS):
            for field in ("body", "orelse", "finalbody"):
                yield from statements_at_load(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from statements_at_load(handler.body)


# ---- the report ----------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Count, print the tables, and write the result file if asked."""
    parser = argparse.ArgumentParser(prog="python -m bench.reading", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--entered", action="store_true", help="list what each step entered")
    options = parser.parse_args(arguments)
    steps = profile_steps()
    package = count_package(PACKAGE)
    entered = {name: figures.pop("entered") for name, figures in steps.items()}
    console = Console()
    console.print(step_table(steps), package_table(package))
    for name, places in package["repeated_class_names_where"].items():
        console.print(f"{name}: {', '.join(places)}", highlight=False)
    for circle in package["import_circles_where"]:
        console.print(" < ".join(circle), highlight=False)
    if options.entered:
        for name, by_file in entered.items():
            console.rule(name)
            for path, functions in by_file.items():
                console.print(f"{path}: {', '.join(functions)}", highlight=False, markup=False)
    if options.json:
        figures = {
            "steps": steps,
            "step_limits": STEP_LIMITS,
            "package": package,
            "package_limits": PACKAGE_LIMITS,
        }
        path = options.json.resolve()
        print(f"wrote {write_result(path.stem, figures, directory=path.parent)}")


def step_table(steps: dict[str, dict[str, Any]]) -> Table:
    """Return what each step enters, with limits in parentheses."""
    columns = ("files", "classes", "functions", "calls")
    table = Table("step", *columns, title="Entered by the third step")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, figures in steps.items():
        limits = STEP_LIMITS[name]
        table.add_row(name, *(beside(figures[each], limits.get(each)) for each in columns))
    return table


def package_table(package: dict[str, Any]) -> Table:
    """Return the package's counts beside their limits."""
    table = Table("package", "found (limit)", title="Source of the package")
    table.columns[1].justify = "right"
    for name, limit in PACKAGE_LIMITS.items():
        table.add_row(name.replace("_", " "), beside(package[name], limit))
    return table


def beside(value: float, limit: float | None) -> str:
    """Return a figure with its limit, red if it is exceeded."""
    if limit is None:
        return f"{value:,}"
    color = "red" if value > limit else "green"
    return f"[{color}]{value:,}[/] (≤ {limit:,})"


if __name__ == "__main__":
    main(sys.argv[1:])
