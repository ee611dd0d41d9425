"""Imports go one way, and `import unison` is light.

Which folder may import which is a table below; a new folder needs a line in it.
"""

import ast
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BASE = {"errors", "check", "schema", "torch_internals"}
SUBSTRATE = BASE | {"config", "rng", "kernels"}
BELOW_PRIVACY = SUBSTRATE | {"ops", "capture", "clip", "parallel", "kfac"}
LIBRARY = BELOW_PRIVACY | {"privacy", "shard", "models", "data", "run_files"}

# What each module or folder of unison may import. Among equals (rng, kernels, config) one
# direction is chosen; to turn it round, change two lines here.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "check": {"errors"},
    "schema": {"errors"},
    "torch_internals": {"errors"},
    "config": BASE,
    "run_files": BASE | {"config"},
    "kernels": BASE | {"config"},
    "rng": BASE | {"config", "kernels"},
    "ops": SUBSTRATE,
    "capture": SUBSTRATE | {"ops"},
    "clip": SUBSTRATE | {"ops", "capture"},
    "parallel": SUBSTRATE | {"ops", "capture", "shard"},
    "kfac": SUBSTRATE | {"ops", "capture", "parallel"},
    "privacy": BELOW_PRIVACY,
    "shard": SUBSTRATE,
    "models": SUBSTRATE,
    "data": SUBSTRATE,
    "hf": LIBRARY,
    "lightning": LIBRARY,
    "verify": LIBRARY,
    "plan": LIBRARY,
    "replay": BASE | {"shard"},
    "train": LIBRARY | {"verify", "plan", "replay", "__init__"},
    "cli": LIBRARY | {"verify", "plan", "replay", "train", "hf", "__init__"},
    "__main__": {"cli"},
    "__init__": LIBRARY | {"verify", "plan"},
}

# These see other folders as a user does: `from unison.data import X`, never
# `from unison.data.rows import X`.
PUBLIC_NAMES_ONLY = {"hf", "lightning", "verify", "plan", "train", "cli"}

# Where somebody else must know what batches are dealt, what is sharded and how checkpoints are
# written, single files may import it.
ADAPTERS: dict[str, set[str]] = {
    "unison/kfac/kfac.py": {"shard"},
    "unison/kfac/linalg.py": {"shard"},
    "unison/capture/compiled_forward.py": {"shard"},
    "unison/privacy/sampling.py": {"shard"},
    "unison/capture/torch_compile.py": {"shard"},
}

NOT_OURS_TO_IMPORT = {"bench", "tests", "examples"}


@dataclass(frozen=True)
class Import:
    """One import statement of unison, with everything relative resolved."""

    file: str  # from the root, "unison/data/rows.py"
    line: int
    target: str  # absolute, "unison.data.rows"
    level: int  # leading dots
    is_eager: bool  # runs when the module is imported

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def module_name(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str, root: Path) -> bool:
    path = root.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


@cache
def import_statements(text: str) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Return the import statements of a file, and whether they run when it is imported."""
    found: list[tuple[ast.Import | ast.ImportFrom, bool]] = []
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(text), True)]
    for node, eager in waiting:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append((node, eager))
        eager = eager and not (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        )
        waiting += [(each, eager) for each in ast.iter_child_nodes(node) if not is_expression(each)]
    return found


def is_expression(node: ast.AST) -> bool:
    return isinstance(node, ast.expr | ast.arguments)


def imports_of(file: Path, root: Path) -> list[Import]:
    """Return the imports of one file; `from package import name` counts the module it loads."""
    package = module_name(file, root).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    found = []
    for node, eager in import_statements(file.read_text()):
        targets: list[str] = []
        level = 0
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            level = node.level
            start = package[: len(package) - level + 1] if level else []
            origin = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{origin}.{alias.name}"
                targets.append(full if is_module(full, root) else origin)
        name = str(file.relative_to(root))
        found += [Import(name, node.lineno, t, level, eager) for t in dict.fromkeys(targets)]
    return found


def folder_of(file: str) -> str:
    """Return the entry of the table that a file belongs to: its folder, or its own name."""
    return Path(file).with_suffix("").parts[1]


def published(package: str, root: Path) -> set[str]:
    """Return the names that a package's `__init__.py` has in `__all__`, or else imports."""
    init = root.joinpath(*package.split("."), "__init__.py")
    body = ast.parse(init.read_text()).body if init.exists() else []
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {each.asname or each.name for node in imports for each in node.names}


def violations(root: Path) -> list[str]:
    """Return every import under `root/unison` that goes the wrong way, with the remedy."""
    found = []
    for file in sorted((root / "unison").rglob("*.py")):
        name = str(file.relative_to(root))
        here = folder_of(name)
        if here not in MAY_IMPORT:
            found.append(
                f"{name}: `{here}` is not in MAY_IMPORT of tests/test_imports.py; add a line that "
                "says what it may import"
            )
            continue
        allowed = MAY_IMPORT[here] | ADAPTERS.get(name, set()) | {here}
        for statement in imports_of(file, root):
            found += _faults(statement, here, allowed, root)
    return found


def _faults(statement: Import, here: str, allowed: set[str], root: Path) -> list[str]:
    top, *rest = statement.target.split(".")
    if statement.level > 1:
        return [f"{statement} with {statement.level} dots; write it as `from {statement.target}`"]
    if top in NOT_OURS_TO_IMPORT:
        return [f"{statement}, which is not part of the package"]
    if top != "unison":
        return []
    there = rest[0] if rest else "__init__"
    if there not in allowed:
        allows = ", ".join(sorted(allowed - {here})) or "nothing"
        return [f"{statement}, but `{here}` may import only {allows}"]
    if here in PUBLIC_NAMES_ONLY and there != here and len(rest) > 1:
        package = f"unison.{there}"
        if rest[1] not in published(package, root) or len(rest) > 2:
            return [f"{statement}, a private module; use `from {package} import ...`"]
    return []


def first_cycle(root: Path) -> list[str]:
    """Return the modules of one cycle of imports that run at import time, or nothing."""
    graph: dict[str, set[str]] = {}
    for file in sorted((root / "unison").rglob("*.py")):
        name = module_name(file, root)
        graph[name] = {
            statement.target
            for statement in imports_of(file, root)
            if statement.is_eager
            and statement.target.split(".")[0] == "unison"
            and statement.target != name
        }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


# ---- unison ----------------------------------------------------------------------------------


def test_imports_go_one_way():
    found = violations(ROOT)
    assert not found, "\n".join(found)


def test_no_imports_in_a_circle():
    cycle = first_cycle(ROOT)
    assert not cycle, " -> ".join(cycle)


def test_the_table_is_itself_acyclic():
    TopologicalSorter(MAY_IMPORT).prepare()
    assert set().union(*MAY_IMPORT.values()) <= set(MAY_IMPORT)


def test_the_pinned_directions():
    for folder, allowed in MAY_IMPORT.items():
        assert folder == "__main__" or "cli" not in allowed, folder
        assert folder == "cli" or "train" not in allowed, folder
    assert "clip" not in MAY_IMPORT["shard"]
    assert "shard" not in MAY_IMPORT["clip"]


HEAVY = {
    "accelerate",
    "click",
    "curvlinops",
    "datasets",
    "dp_accounting",
    "huggingface_hub",
    "hypothesis",
    "lightning",
    "llvmlite",
    "matplotlib",
    "numba",
    "opacus",
    "pandas",
    "peft",
    "PIL",
    "pygments",
    "pytest",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "tensorboard",
    "tokenizers",
    "transformers",
    "triton",
    "trl",
    "typer",
}

PROBE = """
import json, sys
import numpy, torch
before = set(sys.modules)
import unison
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""


def test_import_unison_loads_torch_and_numpy_only():
    # In a process of its own; what torch loads by itself (it may load triton) does not count.
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert "unison" in loaded
    assert not set(loaded) & HEAVY


HOME = re.compile("|".join([r"/home" + r"/\w", r"/Users" + r"/\w", r"/root" + r"/", r"C:\\Users"]))


def test_no_home_paths():
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for folder in ("unison", "tests", "bench", "examples")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if "peers" not in file.parts
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if HOME.search(line)
    ]
    assert not found, f"paths of one machine in {found}; make them relative, or use Path.home()"


# ---- the checks can fail ---------------------------------------------------------------------


def plant(root: Path, **files: str) -> None:
    """Write files: `plant(tmp, data__rows="import os")` makes unison/data/rows.py."""
    for name, text in {"__init__": "", **files}.items():
        path = root.joinpath("unison", *name.replace("__init__", "%").split("__"))
        path = path.with_name(path.name.replace("%", "__init__") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


BAD = {
    "upwards": ({"rng__fill": "from unison.clip import plan"}, "`rng` may import only"),
    "upwards, lazily": ({"ops__a": "def f():\n    import unison.kfac"}, "`ops` may import only"),
    "sideways": ({"shard__a": "from unison import clip", "clip__b": ""}, "`shard` may import only"),
    "relative": ({"ops__a": "from ..clip import b"}, "with 2 dots"),
    "train": ({"verify__a": "from unison.train import x"}, "`verify` may import only"),
    "public names": ({"shard__a": "import unison"}, "`shard` may import only"),
    "bench": ({"cli__a": "from bench.runner import x"}, "not part of the package"),
    "private": (
        {"train__a": "from unison.data.rows import X", "data__rows": ""},
        "use `from unison.data import ...`",
    ),
    "private module": (
        {"cli__a": "from unison.data import rows", "data__rows": "", "data____init__": ""},
        "a private module",
    ),
    "unknown folder": ({"magic__a": ""}, "add a line that says what it may import"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_import_is_found(case, tmp_path):
    files, message = BAD[case]
    plant(tmp_path, **files)
    found = violations(tmp_path)
    assert len(found) == 1
    assert message in found[0]


def test_good_imports_pass(tmp_path):
    plant(
        tmp_path,
        __init__="from unison.errors import A\nfrom unison.shard import B",
        errors="A = 1",
        shard____init__="from unison import errors\nfrom .unit import B",
        shard__unit="from unison.errors import A\nB = 2",
        train__a="import unison\nfrom unison.shard import B\nfrom unison.train.b import C",
        train__b="import numpy.linalg\nC = 3",
        cli____init__="from unison.train import a",
        train____init__="__all__ = ['a']",
    )
    assert violations(tmp_path) == []
    assert first_cycle(tmp_path) == []


def test_a_circle_is_found_unless_it_is_lazy(tmp_path):
    plant(tmp_path, ops__a="import unison.ops.b", ops__b="from unison.ops import a")
    assert set(first_cycle(tmp_path)) == {"unison.ops.a", "unison.ops.b"}
    plant(tmp_path, ops__b="def f():\n    from unison.ops import a")
    assert first_cycle(tmp_path) == []


def test_a_heavy_import_would_be_found():
    probe = PROBE.replace("numpy, torch", "os").replace("import unison", "import hypothesis")
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert "hypothesis" in set(json.loads(done.stdout)) & HEAVY


def test_a_home_path_would_be_found():
    assert HOME.search("open('/home" + "/someone/data')")
    assert not HOME.search("Path.home() / 'data'")
