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

from _pytest.assertion.rewrite import rewrite_asserts


class _RewritingLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        # No byte-code cache: the plain .pyc of this file has the asserts as written, and must
        # neither be read here nor be replaced.
        path = self.get_filename(fullname)
        source = self.get_data(path)
        tree = ast.parse(source, filename=path)
        rewrite_asserts(tree, source, path)
        return compile(tree, path, "exec", dont_inherit=True)


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
