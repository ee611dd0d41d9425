"""The examples in the docstrings of benchmarks."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("name", ["clipping_speed.experiment", "memory", "provenance"])
def test_examples_hold(name):
    found = doctest.testmod(import_module(f"bench.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
