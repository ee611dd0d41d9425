"""A slice of the whole equals that slice drawn alone, bitwise."""

import itertools
import math
import random

import pytest
import torch

from unison.errors import BadInput
from unison.rng import (
    Box,
    Cipher,
    Key,
    Stream,
    bernoulli,
    integers,
    normal,
    secure_normal,
    truncated_normal,
    uniform,
    words,
)

KEY = Key.from_seed(11)
PHILOX = Stream(KEY, "layers.0.weight")
CHACHA = Stream(KEY, "layers.0.weight", cipher=Cipher.CHACHA20)
DRAWS = {
    "words": lambda where: words(PHILOX, where),
    "uniform": lambda where: uniform(PHILOX, where, -1.0, 3.0),
    "uniform64": lambda where: uniform(PHILOX, where, dtype=torch.float64),
    "normal": lambda where: normal(PHILOX, where, 1.0, 0.5),
    "normal_bf16": lambda where: normal(PHILOX, where, dtype=torch.bfloat16),
    "truncated": lambda where: truncated_normal(PHILOX, where),
    "secure": lambda where: secure_normal(CHACHA, where, 1.0),
    "bernoulli": lambda where: bernoulli(CHACHA, where, 0.3),
    "integers": lambda where: integers(PHILOX, where, -3, 1000),
}
SHAPE = (5, 123, 77)


def random_box(generator: random.Random) -> Box:
    sides = [sorted(generator.sample(range(n + 1), 2)) for n in SHAPE]
    for dim, n in enumerate(SHAPE):  # often a dim is spanned whole, as shards do
        if generator.random() < 0.4:
            sides[dim] = [0, n]
    return Box(SHAPE, tuple(a for a, _ in sides), tuple(b for _, b in sides))


@pytest.mark.parametrize("name", DRAWS)
def test_200_random_boxes(name):
    draw, generator = DRAWS[name], random.Random(name)
    whole = draw(SHAPE)
    for _ in range(200):
        box = random_box(generator)
        expected = whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        assert torch.equal(draw(box), expected), box


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 8, 64])
def test_every_shard_of_every_world_size(name, world_size):
    draw, total = DRAWS[name], math.prod(SHAPE)
    whole = draw(SHAPE).view(-1)
    cuts = [total * rank // world_size for rank in range(world_size + 1)]
    shards = [draw(Box.flat(a, b, total)) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(shards), whole)


@pytest.mark.parametrize("name", DRAWS)
def test_indices_beyond_32_bits(name):
    draw = DRAWS[name]
    start = (1 << 34) + 5
    far = draw(Box.flat(start, start + 300))
    assert torch.equal(draw(Box.flat(start + 100, start + 200)), far[100:200])
    assert not torch.equal(far, draw(Box.flat(5, 305)))  # no wrap at 2^32 elements
    rows = Box((1 << 18, 1 << 17), (1 << 17, 7), ((1 << 17) + 2, 19))
    first = ((1 << 17) << 17) + 7
    assert torch.equal(draw(rows)[0], draw(Box.flat(first, first + 12)))


def test_words_beyond_32_bits_are_those_of_the_cipher():
    from unison.kernels.random import philox

    index = (1 << 40) + 6
    block, lane = divmod(index, 4)
    counter = [torch.tensor([c]) for c in (block & 0xFFFFFFFF, block >> 32, *PHILOX.words[2:])]
    expected = philox(counter, PHILOX.words[:2])[lane]
    assert int(words(PHILOX, Box.flat(index, index + 1))) == int(expected)


def test_last_indices_below_2_to_63():
    end = (1 << 63) - 2
    for draw in DRAWS.values():
        tail = draw(Box.flat(end - 20, end))
        assert torch.equal(draw(Box.flat(end - 7, end)), tail[13:])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1)])
def test_odd_shapes(shape):
    for draw in DRAWS.values():
        assert draw(shape).shape == shape


def test_rows_join_whole_trailing_dims():
    starts, run = Box((4, 6, 5), (1, 0, 0), (3, 6, 5)).rows()
    assert (starts.tolist(), run) == ([30], 60)
    starts, run = Box((4, 6, 5), (1, 2, 0), (3, 4, 5)).rows()
    assert (starts.tolist(), run) == ([40, 70], 10)
    starts, run = Box((2, 2, 2), (0, 1, 0), (2, 2, 1)).rows()
    assert (starts.tolist(), run) == ([2, 6], 1)


def test_out_may_be_strided_or_flat():
    whole = normal(PHILOX, (6, 8))
    target = torch.empty(8, 6).t()
    normal(PHILOX, (6, 8), out=target)
    assert torch.equal(target, whole)
    flat = torch.empty(48)
    normal(PHILOX, (6, 8), out=flat)
    assert torch.equal(flat, whole.view(-1))


@pytest.mark.parametrize(("shape", "start", "stop"), [
    ((3,), (0, 0), (1, 1)), ((3,), (2,), (1,)), ((3,), (-1,), (1,)), ((3,), (0,), (4,)),
    ((1 << 40, 1 << 40), (0, 0), (1, 1)),
])  # fmt: skip
def test_bad_boxes_raise(shape, start, stop):
    with pytest.raises(BadInput, match="expected"):
        Box(shape, start, stop)
