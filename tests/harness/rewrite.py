"""Pytest's assertion rewriting inside the ranks, so that `assert a == b` shows both values.

The ranks import test modules themselves, without pytest's import hook, which needs a session. The
part of it that rewrites a syntax tree needs none, so a small loader around that part is enough.
"""

import ast
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import pytest
from _pytest.assertion.rewrite import rewrite_asserts


class _RewritingLoader(SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        tree = ast.parse(data, filename=path)
        rewrite_asserts(tree, data, path)
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    # Byte code is that of pytest, which has rewritten test files when it collected them: the plain
    # .pyc has the asserts as written, and must neither be read here nor be replaced.
    def get_data(self, path: str) -> bytes:
        return super().get_data(_renamed(path))

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        super().set_data(_renamed(path), data, _mode=_mode)


def _renamed(path: str) -> str:
    stem = path.removesuffix(".pyc")
    return path if stem == path else f"{stem}-pytest-{pytest.__version__}.pyc"


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("tests."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _RewritingLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Rewrite the asserts of every `tests.*` module that this process imports from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
