"""The layers that Opacus tests per-sample gradients of, in the shapes that it tests them in.

Each group is named after one of its test files. Here every layer is compared with the float64 loop
over samples, at an odd number of samples, at one, and at none.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.cases.routed import LastOfPacked, Offsets, Packed
from tests.capture.common import Case, captured, floats, squares, squares_time_major
from tests.capture.layers import Attends
from tests.harness import assert_close
from tests.harness.oracle import PerSampleLoss, per_sample_gradients
from unison.capture import check_samples_apart, learn_rows
from unison.clip import clipped_gradients

SIZES = (3, 1)


def absolute(model: nn.Module, batch: Any) -> Tensor:  # [batch]
    """Mean of absolute outputs, the loss of those tests; of a norm's outputs cubes say more."""
    return model(batch).abs().flatten(1).mean(1)


def cubes(model: nn.Module, batch: Tensor) -> Tensor:  # [batch]
    return model(batch).pow(3).flatten(1).sum(1)


def absolute_time_major(model: nn.Module, batch: Tensor) -> Tensor:  # [batch]
    return model(batch.transpose(0, 1)).abs().transpose(0, 1).flatten(1).mean(1)


def layer(make: Callable[[], nn.Module], *shape: int, loss: PerSampleLoss = absolute) -> Case:
    return Case(make, floats(*shape), loss)


def either_order(make: Callable[[], nn.Module], *shape: int) -> Iterator[tuple[str, Case]]:
    """The layer on samples first, and on samples second where there are two dimensions."""
    yield "", layer(make, *shape)
    if len(shape) > 1:
        yield ", samples second", layer(make, *shape, loss=absolute_time_major)


class SequenceBias(nn.Module):
    """Adds one learned token to the end of every sequence."""

    def __init__(self, width: int, batch_first: bool) -> None:
        super().__init__()
        self.bias, self.dim = nn.Parameter(torch.randn(width)), 1 if batch_first else 0

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1 - self.dim]
        token = self.bias.expand(size, 1, -1) if self.dim else self.bias.expand(1, size, -1)
        return torch.cat([x, token], self.dim)


def convolutions() -> Iterator[tuple[str, Case]]:
    """Strides, paddings, dilations and groups, with more channels out than in and fewer."""
    settings: list[dict[str, Any]] = [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 2, "bias": False},
        {"kernel_size": 3, "padding": "same", "dilation": 2},
        {"kernel_size": 2, "padding": "same"},
        {"kernel_size": 3, "padding": "valid", "dilation": 2, "stride": 2},
        {"kernel_size": 3, "padding": 1, "groups": 3},
        {"kernel_size": 2, "stride": 2, "dilation": 2, "groups": 3},
    ]
    kinds = {1: (nn.Conv1d, (9,)), 2: (nn.Conv2d, (8, 7)), 3: (nn.Conv3d, (5, 6, 7))}
    for dims, (kind, space) in kinds.items():
        for options, outputs in itertools.product(settings, (6, 3)):
            name = ", ".join(f"{key} {value}" for key, value in options.items())
            yield (
                f"conv{dims}d: {name}, to {outputs}",
                layer(lambda k=kind, o=options, n=outputs: k(3, n, **o), 3, *space),
            )
    yield (
        "conv1d: one channel",
        layer(lambda: nn.Conv1d(1, 2, 3, padding=1), 1, 6),
    )
    yield (
        "conv2d: kernel and dilation of unequal sides",
        layer(lambda: nn.Conv2d(1, 1, (3, 1), dilation=(3, 1), bias=False), 1, 8, 1),
    )
    yield (
        "conv3d: unequal sides",
        layer(lambda: nn.Conv3d(2, 4, (1, 2, 3), (1, 2, 3), (1, 2, 3), (1, 2, 2)), 2, 4, 6, 8),
    )


def tables() -> Iterator[tuple[str, Case]]:
    for shape in ((5,), (3, 4), (2, 3, 2)):
        for loss in (absolute, absolute_time_major):
            order = "second" if loss is absolute_time_major else "first"

            def words(size: int, shape: tuple[int, ...] = shape) -> Tensor:
                generator = torch.Generator().manual_seed(6)
                return torch.randint(0, 9, (size, *shape), generator=generator)

            yield (
                f"embedding: {list(shape)}, samples {order}",
                Case(lambda: nn.Embedding(9, 10), words, loss),
            )
    for mode in ("sum", "mean"):
        for name, make in {
            "rows": lambda mode=mode: nn.EmbeddingBag(11, 10, mode=mode),
            "offsets": lambda mode=mode: Offsets(mode=mode),
        }.items():
            yield f"embedding_bag: {mode} of {name}", Case(make, bags, absolute)


def bags(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 11, (size, 6), generator=generator)


def norms() -> Iterator[tuple[str, Case]]:
    for channels, groups in ((1, 1), (4, 1), (4, 4), (8, 4)):
        yield (
            f"group_norm: {channels} channels in {groups}",
            layer(lambda c=channels, g=groups: nn.GroupNorm(g, c), channels, 6, 4, loss=cubes),
        )
    for dims, kind in enumerate((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), 1):
        for channels in (1, 3):
            yield (
                f"instance_norm{dims}d: {channels} channels",
                layer(
                    lambda k=kind, c=channels: k(c, affine=True),
                    *(channels, *(5, 4, 3)[:dims]),
                    loss=cubes,
                ),
            )
    for kind, name in ((nn.LayerNorm, "layer_norm"), (nn.RMSNorm, "rms_norm")):
        for shape, dims in (((7,), 1), ((3, 7), 1), ((3, 7), 2), ((3, 2, 7), 1), ((3, 2, 7), 2),
                            ((3, 2, 7), 3)):  # fmt: skip
            yield (
                f"{name}: {list(shape)} over {dims}",
                layer(lambda k=kind, s=shape, d=dims: k(list(s[-d:])), *shape, loss=cubes),
            )


def recurrent() -> Iterator[tuple[str, Case]]:
    for kind in (nn.RNN, nn.GRU, nn.LSTM):
        for layers, is_first, is_both in itertools.product((1, 2), (True, False), (True, False)):
            options = {
                "num_layers": layers,
                "batch_first": is_first,
                "bidirectional": is_both,
                "bias": layers == 1 or is_both,
            }
            yield (
                f"dp_rnn: {kind.__name__} of {layers}, batch_first {is_first}, both {is_both}",
                layer(
                    lambda k=kind, o=options: k(4, 5, **o),
                    *(3, 4),
                    loss=squares if is_first else squares_time_major,
                ),
            )
    for name, make in {
        "LSTM": Packed,
        "GRU of 2": lambda: Packed(nn.GRU, num_layers=2),
        "RNN both": lambda: Packed(nn.RNN, bidirectional=True),
        "last state": LastOfPacked,
    }.items():
        yield f"dp_rnn: packed {name}", layer(make, 7, 6)


def attention() -> Iterator[tuple[str, Case]]:
    for bias, add_bias_kv, add_zero_attn, has_dims in itertools.product((True, False), repeat=4):
        options: dict[str, Any] = {
            "bias": bias,
            "add_bias_kv": add_bias_kv,
            "add_zero_attn": add_zero_attn,
        }
        options |= {"kdim": 6, "vdim": 6} if has_dims else {}
        said = ", ".join(f"{key} {value}" for key, value in options.items())
        yield (
            f"dp_multihead_attention: {said}",
            Case(lambda o=options: Attends("three", **o), floats(7, 6), squares_time_major),
        )


def linears() -> Iterator[tuple[str, Case]]:
    for shape, bias in itertools.product(((11,), (3, 11), (2, 3, 11)), (True, False)):
        for order, case in either_order(lambda b=bias: nn.Linear(11, 13, bias=b), *shape):
            yield f"linear: {list(shape)}, bias {bias}{order}", case


def biases() -> Iterator[tuple[str, Case]]:
    yield "sequence_bias: samples first", layer(lambda: SequenceBias(5, True), 4, 5)
    yield (
        "sequence_bias: samples second",
        layer(lambda: SequenceBias(5, False), 4, 5, loss=absolute_time_major),
    )


LAYERS: dict[str, Case] = dict(
    itertools.chain(
        linears(), convolutions(), tables(), norms(), recurrent(), attention(), biases()
    )
)
FILES = {name.split(":")[0] for name in LAYERS}
# The default suite takes the first two of a group, and every fourth.
NAMES = [
    pytest.param(name, marks=[] if place % 4 == 0 or place == 1 else [pytest.mark.full])
    for group in sorted(FILES)
    for place, name in enumerate(each for each in LAYERS if each.startswith(f"{group}:"))
]


def test_every_file_of_theirs_has_a_group():
    """Their `embedding_norm_sample` and `unfold2d` test functions that only they have."""
    expected = {
        *("linear", "embedding", "embedding_bag", "sequence_bias", "conv1d", "conv2d", "conv3d"),
        *("group_norm", "instance_norm1d", "instance_norm2d", "instance_norm3d"),
        *("layer_norm", "rms_norm", "dp_rnn", "dp_multihead_attention"),
    }
    assert expected == FILES


@pytest.mark.filterwarnings(
    "ignore:no rule for",
    "ignore:There is a performance drop",
    "ignore:Using padding='same' with even kernel",
)
@pytest.mark.parametrize("name", NAMES)
def test_their_layers_are_exact(name):
    case = LAYERS[name]
    torch.manual_seed(0)
    model, batch = case.make().double(), case.batch(SIZES[0])
    axes = learn_rows(model, case.loss, batch)
    check_samples_apart(model, case.loss, batch, axes)
    for size in SIZES:
        part = case.batch(size)
        expected = per_sample_gradients(model, case.loss, part)
        assert_close(captured(model, case.loss, part, axes), expected, dtype=torch.float64)
    nothing = clipped_gradients(model, case.loss, case.batch(0), max_norm=1.0)
    assert all(not each.any() for each in nothing.sums.values())


def test_norms_of_a_table_whose_words_repeat():
    """Gradients of one word are added up before the norm is taken, within each sample alone."""
    table = nn.Embedding(3, 1).double()
    words = torch.tensor([[1, 1], [2, 0], [2, 0]])
    weights = torch.tensor([[0.2, 0.2], [0.3, 0.1], [0.3, 0.1]], dtype=torch.float64)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0])[..., 0] * batch[1]).sum(1)

    found = clipped_gradients(table, loss, (words, weights), max_norm=1.0)
    expected = torch.tensor([0.4, 0.1**0.5, 0.1**0.5], dtype=torch.float64)
    torch.testing.assert_close(found.norms, expected)
