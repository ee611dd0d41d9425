"""Uses that are met again: the same records, or an error."""

import random

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.capture.common import BATCH, CASES, TOKENS, WIDTH, floats, make, squares
from tests.harness import assert_same_bits
from unison.capture import Capture, batch_size_of, learn_axes, rng_autocast_state
from unison.capture.probes import fingerprint
from unison.errors import UnsupportedOperation
from unison.ops import Product, Record
from unison.ops.records import shape_of

Records = list[tuple[str, Record]]


def met_twice(model: nn.Module, loss, batch) -> tuple[Records, Records, Records]:
    """Records of products that can be met again, the same ones met again, and all others."""
    first: Records = []
    rest: Records = []
    again: Records = []
    is_again = False

    def on_product(name: str, record: Product) -> bool:
        first.append((name, record))
        return True

    def on_record(name: str, record: Record) -> None:
        (again if is_again else rest).append((name, record))

    size = batch_size_of(batch)
    axes = learn_axes(model, loss, batch)
    capture = Capture(model, size, axes=axes, on_record=on_record, on_product=on_product)
    with capture.installed():
        surroundings = rng_autocast_state(model, batch)
        loss(model, batch).sum().backward()
        is_again = True
        with capture.recompute(surroundings):
            loss(model, batch)
    return first, again, rest


def assert_same_products(first: Records, again: Records) -> None:
    """The same ones in the other direction; those of one operation keep their order."""
    assert len(first) == len(again)
    left = list(again)
    for name, record in first:
        for place, (other_name, other) in enumerate(left):
            is_same = (name, shape_of(record)) == (other_name, shape_of(other)) and all(
                a.shape == b.shape and torch.equal(a, b)
                for a, b in ((record.a, other.a), (record.g, other.g))
            )
            if is_same:
                del left[place]
                break
        else:
            raise AssertionError(f"a product of {name} did not come again")


@pytest.mark.filterwarnings("ignore:no rule for", "ignore:There is a performance drop")
@pytest.mark.parametrize("name", CASES)
def test_products_are_met_again(name):
    model, batch, loss = make(name)
    first, again, rest = met_twice(model, loss, batch)
    assert_same_products(first, again)
    is_reentrant = name.startswith("reentrant")
    assert any(isinstance(record, Product) for _, record in rest) == is_reentrant


def test_dropout_draws_the_same_numbers_and_leaves_the_generator_where_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Linear(WIDTH, 2)
    )
    batch = floats(TOKENS, WIDTH)(BATCH).float()
    learn_axes(model, squares, batch)
    torch.manual_seed(1)
    model(batch)
    expected = torch.get_rng_state()
    torch.manual_seed(1)
    first, again, _ = met_twice(model, squares, batch)
    assert_same_products(first, again)
    assert_same_bits(torch.get_rng_state(), expected)


@pytest.mark.parametrize("is_enabled", [False, True])
def test_autocast_is_as_it_was(is_enabled):
    torch.manual_seed(0)
    model, batch = nn.Linear(WIDTH, 3), floats(TOKENS, WIDTH)(BATCH).float()
    axes = learn_axes(model, squares, batch)
    found: Records = []
    capture = Capture(
        model,
        BATCH,
        axes=axes,
        on_record=lambda name, record: found.append((name, record)),
        on_product=lambda name, record: True,
    )
    with capture.installed():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_enabled):
            surroundings = rng_autocast_state(model, batch)
            loss = squares(model, batch).sum()
        loss.backward()
        found.clear()
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=not is_enabled),
            capture.recompute(surroundings),
        ):
            squares(model, batch)
    ((_, record),) = found
    assert record.a.dtype == (torch.bfloat16 if is_enabled else torch.float32)


class Odd(nn.Module):
    """Does something else every time it is called, in one of many ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.way, self.num_calls, self.is_on = way, 0, False
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += self.is_on
        is_odd = self.num_calls % 2 == 1
        match self.way:
            case "order":
                return self.first(self.second(x)) if is_odd else self.second(self.first(x))
            case "less":
                return self.first(x) if is_odd else self.second(self.first(x))
            case "more":
                return self.second(self.first(x)) if is_odd else self.first(x)
            case "random":
                return self.first(x + (random.random() if self.is_on else 0))
            case "own generator":
                noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
                return self.first(x + noise * self.is_on)
            case "sign of zero":
                return self.first(x * (0.0 if is_odd else -0.0))
            case "buffer":
                if self.is_on:
                    self.mean += 1
                return self.first(x)
            case "gradient":
                x = x.detach().requires_grad_(self.is_on)
                y = self.first(x.sin())
                if is_odd:
                    torch.autograd.grad(x.sin().sum(), x)
                return y
        raise AssertionError(self.way)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("order", r"use 0 of a parameter was linear\(first.* now linear\(second"),
        ("less", r"use 1 of a parameter was linear\(second.* now there is none"),
        ("more", r"use 1 of a parameter was none, now linear\(second"),
        ("random", r"what went into linear\(first.* has other bits"),
        ("own generator", r"what went into linear\(first.* has other bits"),
        ("sign of zero", r"what went into linear\(first.* has other bits"),
        ("buffer", "writes to the buffer 'mean'"),
        ("gradient", "takes gradients itself"),
    ],
)
def test_another_forward_pass_is_refused(way, message):
    torch.manual_seed(0)
    model, batch = Odd(way).double(), floats(TOKENS, WIDTH)(BATCH)
    axes = learn_axes(model, squares, batch)
    both = nn.Sequential(model.first, model.second)  # either may be used alone
    learned = learn_axes(both, squares, batch)
    axes.by_kind |= {
        (func, tuple(_renamed(name) for name in names), ndims): value
        for (func, names, ndims), value in learned.by_kind.items()
    }
    capture = Capture(
        model,
        BATCH,
        axes=axes,
        on_record=lambda name, record: None,
        on_product=lambda name, record: True,
    )
    model.is_on, model.num_calls = True, 1 if way in ("order", "less", "more", "gradient") else 0
    with capture.installed():
        surroundings = rng_autocast_state(model, batch)
        squares(model, batch).sum().backward()
        with (
            pytest.raises(UnsupportedOperation, match=f"{message}.*flash_fuse_bk"),
            capture.recompute(surroundings),
        ):
            squares(model, batch)


def _renamed(name: str) -> str:
    return name.replace("0.", "first.").replace("1.", "second.")


class Aside(nn.Module):
    """Uses a parameter without gradients, one whose output nobody needs, and asks for a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scores: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scores.append(float(self.second(x).mean()))
        self.second(x)
        y = self.first(x)
        if not y.requires_grad:  # as transformers' enable_input_require_grads
            y.requires_grad_()
        return checkpoint(self.second, y.tanh(), use_reentrant=False)


def test_uses_that_have_no_gradient_are_passed_by():
    torch.manual_seed(0)
    model, batch = Aside().double(), floats(TOKENS, WIDTH)(BATCH)
    first, again, _ = met_twice(model, squares, batch)
    assert [name for name, _ in first] == ["second.weight", "first.weight"]
    assert_same_products(first, again)


def test_a_graph_of_the_second_pass_holds_nothing():
    torch.manual_seed(0)
    model, batch = Aside().double(), floats(TOKENS, WIDTH)(BATCH)
    axes = learn_axes(model, squares, batch)
    capture = Capture(
        model, BATCH, axes=axes, on_record=lambda *_: None, on_product=lambda *_: True
    )
    with capture.installed():
        surroundings = rng_autocast_state(model, batch)
        squares(model, batch).sum().backward()
        with capture.recompute(surroundings):
            losses = squares(model, batch)
    assert losses.requires_grad
    with pytest.raises(UnsupportedOperation, match="takes gradients itself"):
        losses.sum().backward()


def test_two_backward_passes_of_one_forward_pass_have_two_gradients_each():
    torch.manual_seed(0)
    model, batch = nn.Linear(WIDTH, 3).double(), floats(TOKENS, WIDTH)(BATCH)
    axes = learn_axes(model, squares, batch)
    first: Records = []
    again: Records = []
    capture = Capture(
        model,
        BATCH,
        axes=axes,
        on_record=lambda name, record: again.append((name, record)),
        on_product=lambda name, record: not first.append((name, record)),
    )
    with capture.installed():
        surroundings = rng_autocast_state(model, batch)
        losses = squares(model, batch)
        losses.sum().backward(retain_graph=True)
        (2 * losses).sum().backward()
        again.clear()
        with capture.recompute(surroundings):
            squares(model, batch)
    assert len(first) == 2
    assert_same_products(first, again)


def test_a_capture_can_be_used_for_the_next_batch():
    torch.manual_seed(0)
    model, batch = nn.Linear(WIDTH, 3).double(), floats(TOKENS, WIDTH)(BATCH)
    axes = learn_axes(model, squares, batch)
    found: Records = []
    capture = Capture(
        model,
        BATCH,
        axes=axes,
        on_record=lambda name, record: found.append((name, record)),
        on_product=lambda *_: True,
    )
    for _ in range(2):
        with capture.installed():
            surroundings = rng_autocast_state(model, batch)
            squares(model, batch).sum().backward()
            with capture.recompute(surroundings):
                squares(model, batch)
    assert [name for name, _ in found] == ["bias", "weight"] * 2


# ---- fingerprints ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_fingerprint_changes_with_every_bit(dtype, gen):
    x = torch.randn(7, 33, generator=gen).to(dtype)
    seen = {int(fingerprint([x]))}
    bits = x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    for place in ((0, 0), (6, 32), (3, 5)):
        for bit in range(8 * dtype.itemsize):
            flipped = bits.clone()
            flipped[place] ^= torch.tensor(1).to(bits.dtype) << bit
            seen.add(int(fingerprint([flipped.view(dtype)])))
    assert len(seen) == 1 + 3 * 8 * dtype.itemsize


def test_changes_that_cancel_in_sums_do_not_cancel_here(gen):
    x = torch.rand(64, 32, generator=gen)
    reference = int(fingerprint([x]))
    ulp = torch.finfo(torch.float32).eps / 2
    for other in (
        torch.where(torch.arange(32) % 2 == 0, x + ulp, x - ulp),
        x.flip(0),
        x.flip(1),
        -x,
        x.roll(1, 0),
    ):
        assert int(fingerprint([other])) != reference


def test_a_fingerprint_depends_on_values_alone(gen):
    """Neither on strides, nor on tiles, nor on threads."""
    x = torch.randn(37, 5, 1031, generator=gen)
    strided = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert strided.stride() != x.stride()
    assert_same_bits(fingerprint([x]), fingerprint([strided]))
    one_by_one = [int(fingerprint([part])) for part in (x[:0], x[0, 0, :1], x[0, 0, 0])]
    assert one_by_one[0] == 0
    assert one_by_one[1] == one_by_one[2]


def test_nan_is_as_good_as_any_value():
    x = torch.tensor([[1.0, torch.nan], [torch.inf, -torch.inf]])
    assert_same_bits(fingerprint([x]), fingerprint([x.clone()]))
