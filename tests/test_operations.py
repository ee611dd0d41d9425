"""Every operation that unison registers has a fake and passes `torch.library.opcheck`."""

import importlib
from collections.abc import Iterator

import pytest
import torch

import unison
from tests.harness import operations
from tests.harness.samples import SAMPLES

BROKEN = operations.import_all(unison)
NAMES = operations.registered("unison")


def test_every_module_can_be_imported():
    assert not BROKEN, "\n".join(BROKEN.values())


# One test over all names as well as one per name: with no operation yet, or with a sample for one
# that is gone, the parametrised test alone would be silent.
def test_every_sample_belongs_to_an_operation():
    strangers = sorted(set(SAMPLES) - set(NAMES))
    assert not strangers, f"tests/harness/samples.py has samples of no operation: {strangers}"


@pytest.mark.parametrize("name", NAMES)
def test_operation(name):
    found = operations.problems(name, SAMPLES)
    assert not found, "\n".join(found)


# ---- the checker can fail --------------------------------------------------------------------

SCRATCH = "unison_scratch"


@pytest.fixture
def scratch() -> Iterator[torch.library.Library]:
    """A namespace that is gone after the test."""
    with torch.library._scoped_library(SCRATCH, "FRAGMENT") as library:
        yield library


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


SAMPLE = [(torch.randn(5, 3),), (torch.randn(0, 7),)]


def test_a_sound_operation_passes(scratch):
    scratch.define("sound(Tensor x, *, int times=2) -> Tensor")
    scratch.impl("sound", lambda x, *, times=2: x * times, "CPU")
    torch.library.register_fake(
        f"{SCRATCH}::sound", lambda x, *, times=2: x.new_empty(x.shape), lib=scratch
    )
    name = f"{SCRATCH}::sound"
    assert operations.registered(SCRATCH) == [name]
    assert operations.problems(name, {name: [*SAMPLE, (torch.ones(2), {"times": 5})]}) == []


def test_an_operation_without_a_fake_is_found(scratch):
    scratch.define("real_only(Tensor x) -> Tensor")
    scratch.impl("real_only", double, "CPU")
    name = f"{SCRATCH}::real_only"
    assert "no fake implementation" in operations.problems(name, {name: SAMPLE})[0]


def test_an_operation_without_samples_is_found(scratch):
    scratch.define("untested(Tensor x) -> Tensor")
    scratch.impl("untested", double, "CPU")
    torch.library.register_fake(f"{SCRATCH}::untested", torch.empty_like, lib=scratch)
    found = operations.problems(f"{SCRATCH}::untested", {})
    assert len(found) == 1
    assert "tests/harness/samples.py" in found[0]


def test_a_fake_of_the_wrong_shape_is_found(scratch):
    scratch.define("liar(Tensor x) -> Tensor")
    scratch.impl("liar", double, "CPU")
    torch.library.register_fake(f"{SCRATCH}::liar", lambda x: x.new_empty(1, 2), lib=scratch)
    name = f"{SCRATCH}::liar"
    found = "\n".join(operations.problems(name, {name: SAMPLE}))
    assert "test_faketensor of torch.library.opcheck on sample 0" in found


def test_a_hidden_mutation_is_found(scratch):
    scratch.define("sly(Tensor x) -> Tensor")
    scratch.impl("sly", lambda x: x.add_(1).clone(), "CPU")
    torch.library.register_fake(f"{SCRATCH}::sly", torch.empty_like, lib=scratch)
    name = f"{SCRATCH}::sly"
    sample = torch.zeros(3)
    assert "test_schema" in "\n".join(operations.problems(name, {name: [(sample,)]}))
    assert sample.sum() == 0  # samples are copied before use


def test_modules_that_break_are_named_and_missing_packages_are_not(tmp_path, monkeypatch):
    package = tmp_path / "scratch_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "optional.py").write_text("import a_package_that_nobody_has")
    (package / "typo.py").write_text("from scratch_package import nothing_like_it")
    (package / "sound.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    broken = operations.import_all(importlib.import_module("scratch_package"))
    assert list(broken) == ["scratch_package.typo"]
    assert "nothing_like_it" in broken["scratch_package.typo"]


def test_custom_ops_by_decorator_are_seen_through():
    name = "unison_scratch_custom::twice"
    defined = torch.library.custom_op(name, mutates_args=())(double)
    try:
        # `custom_op` registers a fake that only raises; it must not count as one.
        assert not operations.has_fake(name)
        defined.register_fake(torch.empty_like)
        assert operations.has_fake(name)
        assert operations.problems(name, {name: SAMPLE}) == []
    finally:
        defined._lib._destroy()
