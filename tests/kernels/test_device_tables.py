"""Tables of many tensors: which program serves which tile, and where a CUDA graph finds them."""

import gc
import weakref

import pytest
import torch

from unison.errors import UnsupportedOperation
from unison.kernels import multi_tensor as table


def test_tiles_of_tensors():
    tensors, first = table.tile_map((5, 0, 4, 9), 4, torch.device("cpu"))
    assert tensors.tolist() == [0, 0, 2, 3, 3, 3]
    assert first.tolist() == [0, 2, 2, 3]
    assert (tensors.dtype, first.dtype) == (torch.int32, torch.int64)


def test_tables_of_a_graph_are_filled_at_the_end():
    tables = table.Tables(torch.device("cpu"), capacity=64)
    with table.tables_kept(tables):
        first = table.on_device([[1, 2, 3], [4, 5, 6]], torch.device("cpu"))
        second = table.on_device([7], torch.device("cpu"))
        assert not first.any()  # a graph that is recorded does not run
        assert not second.any()
    outside = table.on_device([8, 9], torch.device("cpu"))
    assert outside.tolist() == [8, 9]
    for _ in range(2):
        tables.fill()
        assert first.tolist() == [[1, 2, 3], [4, 5, 6]]
        assert second.tolist() == [7]
        first.zero_()
    assert second.data_ptr() % 128 == first.data_ptr() % 128


def test_a_graph_holds_the_maps_that_it_reads():
    """The cache forgets; a graph has recorded addresses."""
    tables, numels = table.Tables(torch.device("cpu"), capacity=32), (5, 11)
    with table.tables_kept(tables):
        recorded = weakref.ref(table.tile_map(numels, 4, torch.device("cpu"))[0])
    table.cached_tile_map.cache_clear()
    gc.collect()
    assert recorded() is not None
    del tables
    gc.collect()
    assert recorded() is None


def test_a_graph_within_a_graph_has_its_own_tables():
    outer, inner = (table.Tables(torch.device("cpu"), capacity=32) for _ in range(2))
    with table.tables_kept(outer):
        with table.tables_kept(inner):
            mine = table.on_device([1], torch.device("cpu"))
        theirs = table.on_device([2], torch.device("cpu"))
    outer.fill()
    assert (mine.tolist(), theirs.tolist()) == ([0], [2])
    inner.fill()
    assert mine.tolist() == [1]


def test_tables_that_are_too_many_are_refused():
    tables = table.Tables(torch.device("cpu"), capacity=32)
    with table.tables_kept(tables):
        table.on_device([1] * 17, torch.device("cpu"))
        with pytest.raises(UnsupportedOperation, match="more than 32 numbers"):
            table.on_device([1], torch.device("cpu"))
    assert table.on_device([3], torch.device("cpu")).tolist() == [3]  # nothing is recorded now
