"""`bench/reading.py` counts what it says it counts."""

import sys
from pathlib import Path

import pytest

from bench import reading

INIT = '''"""A package."""

from fake.one import Shape
'''
ONE = '''"""Docstrings
are not code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fake.two  # a comment

if TYPE_CHECKING:
    from fake import three


class Shape:
    """A class."""

    text = """two
    lines"""

    def area(self):
        from fake import three

        return three.area(self)

    def twice(self):
        return [self.area() for _ in range(2)]
'''
TWO = """from . import one
from .three import Shape


def number():
    yield 1
    yield 2
"""
THREE = """class Shape: pass


def area(shape): return 1
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "fake"
    folder.mkdir()
    for name, text in {"__init__": INIT, "one": ONE, "two": TWO, "three": THREE}.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_source_is_counted(package: Path):
    counts = reading.count_package(package)
    assert counts["code_lines"] == 1 + 13 + 5 + 2
    assert counts["files"] == 4
    assert counts["classes"] == 2
    where = counts["repeated_class_names_where"]
    assert where == {"Shape": ["fake/one.py:14", "fake/three.py:1"]}
    assert [set(circle) for circle in counts["import_circles_where"]] == [{"fake.one", "fake.two"}]


def test_docstrings_comments_and_line_ends_are_no_tokens(package: Path):
    for path in package.glob("*.py"):
        path.unlink()
    (package / "__init__.py").write_text(
        '"""A docstring."""\n\nx = 1  # why\n\n\ny = (\n    2\n)\n'
    )
    counts = reading.count_package(package)
    assert counts["code_lines"] == 4
    assert counts["tokens_per_line"] == (3 + 5) / 4


def test_a_step_is_profiled(package: Path, monkeypatch: pytest.MonkeyPatch):
    (package / "one.py").write_text(ONE.replace("import fake.two", ""))
    monkeypatch.syspath_prepend(str(package.parent))
    from fake import one, three, two  # pyright: ignore[reportMissingImports]

    with reading.StepProfile(package) as profile:
        one.Shape().twice()
        list(two.number())
        sorted([1], key=three.area)
    for name in ("fake", "fake.one", "fake.two", "fake.three"):
        del sys.modules[name]
    figures = profile.figures()
    assert figures["entered"] == {
        "fake/one.py": ["Shape.area", "Shape.twice"],
        "fake/three.py": ["area"],
        "fake/two.py": ["number"],
    }
    assert (figures["files"], figures["classes"], figures["functions"]) == (3, 1, 4)
    assert figures["calls"] == 1 + 2 + 3 + 1
