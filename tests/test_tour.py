"""Every file and function that docs/tour.md names is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOUR = (ROOT / "docs" / "tour.md").read_text()
# What is torch's, the user's, or a word.
OTHERS = {"F.linear", "torch.compile", "w.float()", "backward", "make_private"}
QUOTED = sorted(
    set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TOUR, flags=re.S))) - OTHERS
)


@cache
def names_of_package() -> frozenset[str]:
    """All functions, classes, methods and module constants, qualified by their class."""
    found = set()
    for path in (ROOT / "unison").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            match node:
                case ast.ClassDef():
                    found |= {node.name}
                    inner = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                    found |= {f"{node.name}.{each.name}" for each in inner}
                    found |= {each.name for each in inner if each.name.startswith("__")}
                case ast.FunctionDef():
                    found.add(node.name)
                case ast.Assign():
                    found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(name)
    return frozenset(found)


@pytest.mark.parametrize("quoted", QUOTED)
def test_what_is_named_is_there(quoted):
    if "/" in quoted:
        places = [ROOT / "unison" / quoted, ROOT / quoted]
        assert any(place.exists() for place in places)
    else:
        assert quoted in names_of_package()


def test_it_can_be_read_in_an_afternoon():
    assert len(TOUR.splitlines()) <= 250
    assert max(map(len, TOUR.splitlines())) <= 120
