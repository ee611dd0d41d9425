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


CPU = torch.device("cpu")


class Maker:
    """Makes tables, and counts them."""

    def __init__(self) -> None:
        self.num_made = 0

    def __call__(self, device: torch.device) -> torch.Tensor:
        self.num_made += 1
        made = table.empty_table((2, 3), device)
        assert (made.dtype, tuple(made.shape)) == (torch.int64, (2, 3))
        return made.fill_(self.num_made)


def test_a_table_that_was_sent_is_not_sent_again():
    kept, make = table.DeviceTableCache(most=2), Maker()
    first = kept.table("a", CPU, make)
    assert kept.table("a", CPU, make) is first
    second = kept.table("b", CPU, make)
    assert (int(first[0, 0]), int(second[0, 0]), make.num_made) == (1, 2, 2)
    kept.table("c", CPU, make)  # and the oldest is forgotten
    assert kept.table("b", CPU, make) is second
    assert kept.table("a", CPU, make) is not first
    assert make.num_made == 4


def test_tables_of_a_graph_are_nobody_elses():
    """They are filled when it is complete: until then whoever found them would read zeros."""
    kept, make, tables = table.DeviceTableCache(), Maker(), table.Tables(CPU, capacity=64)
    with table.tables_kept(tables):
        recorded = [kept.table("a", CPU, make) for _ in range(2)]
    assert recorded[0].data_ptr() != recorded[1].data_ptr()
    outside = kept.table("a", CPU, make)
    assert int(outside[0, 0]) == 3
    with table.tables_kept(tables):  # nor does a graph read what others may forget
        again = kept.table("a", CPU, make)
    assert again is not outside
    tables.fill()
    assert [int(each[0, 0]) for each in (*recorded, again)] == [1, 2, 4]


def test_memory_is_not_pinned_while_a_graph_is_recorded(monkeypatch):
    devices = []

    def make(device: torch.device) -> torch.Tensor:
        devices.append(device)
        return torch.zeros(1, dtype=torch.int64)

    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(table, "to_device", lambda made, device: made)
    monkeypatch.setattr(table, "_stream_of", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    table.DeviceTableCache().table((), cuda, make)
    with table.tables_kept(table.Tables(CPU, capacity=16)):
        table.DeviceTableCache().table((), cuda, make)
    assert devices == [cuda, CPU]


def test_tables_are_kept_by_stream_and_never_while_one_is_captured(monkeypatch):
    kept, make, cuda = table.DeviceTableCache(), Maker(), torch.device("cuda", 0)
    monkeypatch.setattr(table, "empty_table", lambda shape, device: torch.empty(2, 3).long())
    monkeypatch.setattr(table, "to_device", lambda made, device: made)
    stream, is_capturing = 1, False
    monkeypatch.setattr(table, "_stream_of", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    first = kept.table("a", cuda, make)
    stream = 2
    assert kept.table("a", cuda, make) is not first
    stream, is_capturing = 1, True
    assert kept.table("a", cuda, make) is not first
    is_capturing = False
    assert kept.table("a", cuda, make) is first
