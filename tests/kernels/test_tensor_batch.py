"""Tensors whose metadata is known to kernels, and the tables that are made of it."""

from unittest import mock

import torch
from torch import Tensor

from tests.harness import assert_same_bits
from tests.kernels.interpreted import as_on_cuda, interpreted
from tests.kernels.tensors import (
    SHAPES,
    assert_all_same_bits,
    draw,
    outs_like,
    weights_of,
)
from unison.kernels import multi_tensor


@interpreted
def test_kernels_read_tables_that_were_filled_later():
    """As a graph does: what is launched while recording reads the tables when it is replayed."""
    from unison.kernels import multi_tensor_triton as kernels

    values, tables = draw(2, [(24,), (7,)]), multi_tensor.Tables(torch.device("cpu"))
    weights, found, expected = weights_of(2, 2), outs_like(values), outs_like(values)
    recorded = []
    release = kernels.release_kernel

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **options: recorded.append((grid, args, options))

    with as_on_cuda():
        kernels.release(values, weights, None, 1.0, expected)
        with (
            mock.patch.object(kernels, "release_kernel", Recorder()),
            multi_tensor.tables_kept(tables),
        ):
            # Weights of the two launches are looked up by tables, which are empty as yet.
            kernels.release(values, weights.expand(2, 2), None, 1.0, found)
        tables.fill()
        for (grid, args, options), row in zip(recorded, weights, strict=True):
            given = [*args[:4], row.unsqueeze(0), *args[5:]]
            release[grid](*given, **options)
    assert_all_same_bits(found, expected)


@interpreted
def test_tensors_whose_metadata_is_known_are_not_asked_again():
    values, others = draw(3), draw(3)
    with as_on_cuda():
        meta = multi_tensor.TensorMeta(values)
        batch = multi_tensor.TensorBatch(others, meta, multi_tensor.is_fast(values))
        assert meta == multi_tensor.TensorMeta(others)
        assert hash(meta) == hash(multi_tensor.TensorMeta(others))
        assert meta != multi_tensor.TensorMeta(draw(2))
        assert_same_bits(multi_tensor.squares(batch), multi_tensor.squares(others))
        weights, found, expected = weights_of(len(values), 3), outs_like(others), outs_like(others)
        multi_tensor.combine(batch, weights, found)
        multi_tensor.combine(others, weights, expected)
        assert_all_same_bits(found, expected)


@interpreted
def test_tables_are_made_again_only_where_tensors_lie_elsewhere():
    from unison.kernels import multi_tensor_triton as kernels

    values, weights = draw(2, [(8, 16), (7,), (40,)]), weights_of(3, 2)
    others, found = [each + 1 for each in values], outs_like(values)
    made, filled = [], kernels._LaunchGroup._filled
    kernels._known.clear()
    for i in range(kernels._MOST_KNOWN - 1):  # as after many other sets of tensors
        kernels._known[(i,)] = []

    def num_made_for(values: list[Tensor]) -> int:
        expected = outs_like(values)
        multi_tensor.release(values, weights, None, 1.0, found)
        multi_tensor.release_reference(values, weights, None, 1.0, expected)
        assert_all_same_bits(found, expected)
        squares = multi_tensor.squares_reference(values)
        torch.testing.assert_close(multi_tensor.squares(values), squares, rtol=1e-6, atol=0.0)
        return len(made)

    kernels._LaunchGroup._filled = lambda self, *args: made.append(args) or filled(self, *args)
    try:
        with as_on_cuda():
            assert num_made_for(values) == 4  # of two launches each
            values[0].mul_(2)
            assert num_made_for(values) == 4
            assert num_made_for(others) == 8
            values[1].add_(1)
            assert num_made_for(values) == 8
    finally:
        kernels._LaunchGroup._filled = filled


@interpreted
def test_outputs_whose_addresses_are_known():
    values, weights = draw(3), weights_of(len(SHAPES), 3)
    expected = outs_like(values)
    with as_on_cuda():
        multi_tensor.combine(values, weights, expected)
        for addresses in (None, "theirs"):
            outs = outs_like(values)
            known = None if addresses is None else multi_tensor.as_batch(outs).addresses
            found = multi_tensor.TensorBatch(outs, multi_tensor.TensorMeta(outs), False, known)
            multi_tensor.combine(values, weights, found)
            assert_all_same_bits(found, expected)
            assert found.addresses == multi_tensor.as_batch(outs).addresses
