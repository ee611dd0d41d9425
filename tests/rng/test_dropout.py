import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unison.errors import BadInput
from unison.rng import Dropout, Key, dropout_context, name_dropouts
from unison.rng import dropout as dropout_module

KEY = Key.from_seed(4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = Dropout(0.3)

    def forward(self, x):
        return self.drop(torch.tanh(self.linear(self.drop(x))))  # used twice


class Net(nn.Module):
    """Three blocks and one dropout shared by all, each step of it optionally recomputed."""

    def __init__(self, use_reentrant: bool | None):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.shared = Dropout(0.2)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in self.blocks:

            def part(x, block=block):
                return self.shared(block(x))

            if self.use_reentrant is None:
                x = part(x)
            else:
                x = checkpoint(part, x, use_reentrant=self.use_reentrant)
        return x


def gradients(use_reentrant, *, in_context=True, backward_inside=True):
    torch.manual_seed(0)
    net = name_dropouts(Net(use_reentrant))
    x = torch.randn(5, 7, 8, requires_grad=True)
    torch.manual_seed(1)
    if in_context:
        with dropout_context(KEY, 3, [9, 2, 4, 100, 7]):
            y = net(x)
            if backward_inside:
                y.square().sum().backward()
    else:
        y = net(x)
    if not (in_context and backward_inside):
        y.square().sum().backward()
    found = [x.grad, *(p.grad for p in net.parameters())]
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("in_context", [True, False])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_recompute_sees_the_same_masks(use_reentrant, in_context, backward_inside):
    settings = {"in_context": in_context, "backward_inside": backward_inside}
    expected = gradients(None, **settings)
    assert len(expected) == 7
    for a, b in zip(expected, gradients(use_reentrant, **settings), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_of_interleaved_batches(use_reentrant):
    """Two forwards before either backward, as in a pipeline."""

    def run(mode):
        torch.manual_seed(0)
        net = name_dropouts(Net(mode))
        xs = [torch.randn(2, 3, 8, requires_grad=True) for _ in range(2)]
        losses = []
        for i, x in enumerate(xs):
            with dropout_context(KEY, 1, [2 * i, 2 * i + 1]):
                losses.append(net(x).square().sum())
        for loss in losses:
            loss.backward()
        return [x.grad for x in xs if x.grad is not None]

    for a, b in zip(run(None), run(use_reentrant), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_without_saved_generator_raises(use_reentrant):
    drop = Dropout(0.5, name="d")
    x = torch.ones(2, 3, requires_grad=True)
    with dropout_context(KEY, 0, [0, 1]):
        y = checkpoint(
            lambda x: drop(x).square(), x, use_reentrant=use_reentrant, preserve_rng_state=False
        )
        with pytest.raises(BadInput, match="preserve_rng_state"):
            y.sum().backward()


def masks(ids, *, step=0, key=KEY, name="d", calls=1):
    drop = Dropout(0.5, name=name)
    with dropout_context(key, step, ids):
        return [drop(torch.ones(len(ids), 3, 5)) for _ in range(calls)][-1]


def test_mask_follows_the_sample_not_the_row():
    whole = masks(range(12))
    for ids in ([3, 11, 0], [5], list(range(6, 12)), []):
        assert torch.equal(masks(ids), whole[ids])


def test_mask_depends_on_everything_it_should():
    base = masks(range(8))
    assert torch.equal(base, masks(range(8)))
    assert not torch.equal(base, masks(range(8), step=1))
    assert not torch.equal(base, masks(range(8), name="e"))
    assert not torch.equal(base, masks(range(8), key=Key.from_seed(9)))
    assert not torch.equal(base, masks(range(8), calls=2))


def test_micro_batches_do_not_change_the_masks():
    drop = Dropout(0.4, name="d")
    x = torch.ones(6, 10)
    with dropout_context(KEY, 2, range(6)):
        whole = drop(x)
    parts = []
    for begin in (0, 2, 4):
        with dropout_context(KEY, 2, range(begin, begin + 2)):
            parts.append(drop(x[begin : begin + 2]))
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_drop_in_for_nn_dropout(p):
    ours, theirs = Dropout(p), nn.Dropout(p)
    x = torch.ones(400, 500)
    torch.manual_seed(0)
    y = ours(x)
    assert torch.equal(y.unique(), theirs(x).unique())
    assert float((y == 0).float().mean()) == pytest.approx(p, abs=4 * 0.5 / 447)
    assert ours.eval()(x) is x
    assert repr(ours) == repr(theirs)
    assert ours.state_dict() == theirs.state_dict() == {}


def test_in_place_writes_into_the_input():
    x = torch.ones(50, 50)
    y = Dropout(0.5, inplace=True)(x)
    assert y is x
    assert (x == 0).any()


def test_plain_scripts_repeat_with_manual_seed():
    drop, x = Dropout(0.5), torch.ones(20, 20)
    torch.manual_seed(3)
    first, second = drop(x), drop(x)
    torch.manual_seed(3)
    assert torch.equal(drop(x), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradient_has_the_mask_of_the_forward(dtype):
    x = torch.randn(6, 9, dtype=dtype, requires_grad=True)
    with dropout_context(KEY, 0, range(6)):
        y = Dropout(0.3, name="d")(x)
        y.sum().backward()
    assert y.dtype == dtype
    assert x.grad is not None
    assert torch.equal(x.grad == 0, y == 0)
    torch.testing.assert_close(x.grad[y != 0], torch.full_like(x.grad[y != 0], 1 / 0.7))


def test_double_backward():
    source = dropout_module._MaskSource(dropout_module.Stream(KEY, "d"), torch.arange(3), 4)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda x: dropout_module._Drop.apply(x, source, 0.5).pow(3), (x,)
    )


def test_errors():
    with pytest.raises(BadInput, match="between 0 and 1"):
        Dropout(1.5)
    with dropout_context(KEY, 0, range(4)):
        with pytest.raises(BadInput, match="name_dropouts"):
            Dropout(0.5)(torch.ones(4, 2))
        with pytest.raises(BadInput, match="4 samples, the input has 3 rows"):
            Dropout(0.5, name="d")(torch.ones(3, 2))
    with pytest.raises(BadInput, match="0 or more"), dropout_context(KEY, 0, [-1]):
        pass


def test_names_come_from_the_model():
    net = name_dropouts(Net(None))
    names = [module.name for module in net.modules() if isinstance(module, Dropout)]
    assert names == ["blocks.0.drop", "blocks.1.drop", "blocks.2.drop", "shared"]


def test_context_is_left_on_error():
    with pytest.raises(RuntimeError, match="inside"), dropout_context(KEY, 0, [0]):
        raise RuntimeError("inside")
    assert dropout_module._current is None


def test_notes_are_bounded(monkeypatch):
    monkeypatch.setattr(dropout_module, "MAX_NOTES", 5)
    dropout_module._notes.clear()
    drop = Dropout(0.5, name="d")
    with dropout_context(KEY, 0, [0]):
        for _ in range(9):
            drop(torch.ones(1, 2))
    assert len(dropout_module._notes) == 5
