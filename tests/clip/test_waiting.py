"""Gradients that wait to be made with others."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from unison.clip.waiting import Kept, biases_like, norms_like
from unison.errors import UnsupportedOperation
from unison.kernels.affine import MOST_AT_ONCE


class Doubled:
    """A kind that says how many it was given at once."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def make(self, waiting):
        self.sizes.append(len(waiting))
        return [2 * each for tensors in waiting for each in tensors]


def wait(kept: Kept, kind: Doubled, name: str, num_bytes: int = 1) -> Tensor:
    x = torch.randn(3)
    kept.wait(kind, (name,), (x,), x, num_bytes)
    return x


def test_as_many_as_a_launch_takes():
    kept, kind = Kept(), Doubled()
    given = {str(i): wait(kept, kind, str(i)) for i in range(2 * MOST_AT_ONCE + 3)}
    assert kind.sizes == [MOST_AT_ONCE, MOST_AT_ONCE]
    made = kept.made()
    assert kind.sizes[2:] == [3]
    assert list(made) == list(given)
    assert all(torch.equal(made[name], 2 * x) for name, x in given.items())
    assert kept.made() is made
    assert len(kind.sizes) == 3


def test_a_place_in_the_order():
    kept, kind = Kept(), Doubled()
    wait(kept, kind, "first")
    kept.found["second"] = torch.zeros(1)
    assert list(kept.made()) == ["first", "second"]
    assert "first" in kept
    assert len(kept) == 2
    assert not kept.has_none_of({"second", "third"})
    assert kept.has_none_of({"third"})


def test_kinds_do_not_wait_for_each_other():
    kept, one, other = Kept(), Doubled(), Doubled()
    for i in range(MOST_AT_ONCE):
        wait(kept, one, f"one {i}")
        wait(kept, other, f"other {i}") if i else None
    assert (one.sizes, other.sizes) == ([MOST_AT_ONCE], [])


def test_memory_ends_waiting():
    kept, kind = Kept(), Doubled()
    wait(kept, kind, "a", num_bytes=200 << 20)
    assert kind.sizes == []
    wait(kept, kind, "b", num_bytes=100 << 20)
    assert kind.sizes == [2]
    wait(kept, kind, "c", num_bytes=200 << 20)  # what is made holds nothing
    assert kind.sizes == [2]


def test_within_a_budget_nothing_waits():
    kept, kind = Kept(is_bounded=True), Doubled()
    wait(kept, kind, "a")
    wait(kept, kind, "b")
    assert kind.sizes == [1, 1]


def test_what_is_made_is_let_go():
    kept, kind = Kept(), Doubled()
    held = weakref.ref(wait(kept, kind, "a"))
    assert held() is not None
    kept.made()
    gc.collect()
    assert held() is None


def test_what_changed_while_it_waited():
    kept = Kept()
    wait(kept, Doubled(), "a").add_(1)
    with pytest.raises(UnsupportedOperation, match="changed in place"):
        kept.made()


def test_kinds_of_tensors_that_are_alike():
    g = torch.zeros(2, 3, 4)
    assert biases_like(g) is biases_like(torch.ones(2, 3, 7))
    assert biases_like(g) is not biases_like(g.bfloat16())
    assert biases_like(g) is not biases_like(torch.zeros(2, 4, 4))
    options = {"is_centred": True, "has_offset": True}
    assert norms_like(g, g, 1e-5, **options) is norms_like(g, g, 1e-5, **options)
    assert norms_like(g, g, 1e-5, **options) is not norms_like(g, g, 1e-6, **options)
    assert norms_like(g, g, 1e-5, **options) is not norms_like(g[..., :3], g, 1e-5, **options)
