"""The flat layout and the canonical tree: arithmetic that must not know the world size."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import assert_same_bits
from unison.shard.layout import ALIGNMENT, FlatLayout
from unison.shard.ranks import Ranks
from unison.shard.reducers import FastReducer, SubtreeSum, aligned_levels, tree_sum

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=6)
WORLD_SIZES = (1, 2, 3, 4, 5, 7, 8, 64)


def layout_of(shapes, num_ranks=1) -> FlatLayout:
    return FlatLayout.of([(f"p{index}", shape) for index, shape in enumerate(shapes)], num_ranks)


@given(SHAPES)
def test_pieces_cover_every_parameter_once(shapes):
    for world_size in WORLD_SIZES:
        layout = layout_of(shapes, world_size)
        assert len(layout.pieces) == world_size
        for slot, *parts in zip(layout.slots, *layout.pieces, strict=True):
            held = [index for part in parts for index in range(*part[:2])]
            assert held == list(range(slot.numel))


@given(SHAPES)
def test_pieces_lie_where_the_layout_says(shapes):
    flat = torch.arange(layout_of(shapes).length + 64 * ALIGNMENT * 2)
    for world_size in WORLD_SIZES:
        layout = layout_of(shapes, world_size)
        length = layout.shard_length
        for rank, pieces in enumerate(layout.pieces):
            shard = flat[rank * length : (rank + 1) * length]
            for slot, (start, stop, offset) in zip(layout.slots, pieces, strict=True):
                held = shard[offset : offset + stop - start]
                expected = range(slot.offset + start, slot.offset + stop)
                assert held.tolist() == list(expected)


@given(SHAPES)
def test_cuts_are_aligned(shapes):
    for world_size in WORLD_SIZES:
        layout = layout_of(shapes, world_size)
        assert layout.shard_length % ALIGNMENT == 0
        assert layout.padded_length >= layout.length
        for pieces in layout.pieces:
            for start, stop, offset in pieces:
                if start < stop:
                    assert start % ALIGNMENT == 0
                    assert offset % ALIGNMENT == 0


@pytest.mark.parametrize("num_leaves", [0, 1, 2, 3, 5, 7, 8, 13, 16, 33])
def test_any_cut_of_the_leaves_gives_the_same_bits(num_leaves, gen):
    leaves = torch.randn(num_leaves, 5, generator=gen)
    expected = tree_sum((0, leaf.clone()) for leaf in leaves)
    shuffle = random.Random(0)
    for world_size in (1, 2, 3, 4, 6, 8, 11):
        edges = [rank * num_leaves // world_size for rank in range(world_size + 1)]
        all_nodes = []
        for low, high in itertools.pairwise(edges):
            part = SubtreeSum(low, high)
            order = list(range(low, high))
            shuffle.shuffle(order)
            for index in order:
                part.put(index, leaves[index].clone())
            nodes = part.take()
            assert [level for level, _ in nodes] == aligned_levels(low, high)
            all_nodes += nodes
        found = tree_sum(all_nodes)
        if expected is None:
            assert found is None
        else:
            assert_same_bits(found, expected)


def test_another_order_of_adding_has_other_bits(gen):
    leaves = torch.randn(13, 1000, generator=gen)
    total = tree_sum((0, leaf.clone()) for leaf in leaves)
    chain = leaves[0].clone()
    for leaf in leaves[1:]:
        chain += leaf
    with pytest.raises(AssertionError):
        assert_same_bits(total, chain)


def test_a_parameter_that_a_later_granule_leaves_out_keeps_its_sum():
    layout = layout_of([(3,), (2, 2), (4,)])
    ranks = Ranks.of(None)
    reducer = FastReducer(layout, ranks, torch.zeros((), dtype=torch.float64))
    first, second = torch.randn(3).double(), torch.randn(2, 2).double()
    reducer.take(0, [first, None, None])
    reducer.take(1, [None, second, None])
    reducer.take(2, [first, second, None])
    assert reducer.used == [True, True, False]
    reducer.start()
    found = reducer.finish()
    assert torch.equal(found[0].flatten(), 2 * first)
    assert torch.equal(found[1].flatten(), 2 * second.flatten())
