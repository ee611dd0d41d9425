"""What kernels know of many tensors without asking, and the tables that are made of it."""

import torch
from torch import Tensor

from tests.harness import assert_same_bits
from tests.kernels.interpreted import as_on_cuda, interpreted
from tests.kernels.many_tensors import (
    SHAPES,
    assert_all_same_bits,
    draw,
    outs_like,
    weights_of,
)
from unison.kernels.many import table


@interpreted
def test_kernels_read_tables_that_were_filled_later():
    """As a graph does: what is launched while recording reads the tables when it is replayed."""
    from unison.kernels.many import launch

    values, tables = draw(2, [(24,), (7,)]), table.Tables(torch.device("cpu"))
    weights, found, expected = weights_of(2, 2), outs_like(values), outs_like(values)
    recorded = []
    release = launch._launch_release._kernel

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **options: recorded.append((grid, args, options))

    with as_on_cuda():
        launch.release(values, weights, None, 1.0, expected)
        launch._launch_release._kernel = Recorder()
        try:
            with table.tables_kept(tables):
                # Weights of the two launches are looked up by tables, which are empty as yet.
                launch.release(values, weights.expand(2, 2), None, 1.0, found)
        finally:
            launch._launch_release._kernel = release
        tables.fill()
        for (grid, args, options), row in zip(recorded, weights, strict=True):
            given = [*args[:4], row.unsqueeze(0), *args[5:]]
            release[grid](*given, **options)
    assert_all_same_bits(found, expected)


@interpreted
def test_tensors_that_were_asked_about_are_not_asked_again():
    from unison.kernels import many

    values, others = draw(3), draw(3)
    with as_on_cuda():
        facts = many.Facts(values)
        asked = many.Asked(others, facts, many.is_fast(values))
        assert facts == many.Facts(others)
        assert hash(facts) == hash(many.Facts(others))
        assert facts != many.Facts(draw(2))
        assert_same_bits(many.squares(asked), many.squares(others))
        weights, found, expected = weights_of(len(values), 3), outs_like(others), outs_like(others)
        many.combine(asked, weights, found)
        many.combine(others, weights, expected)
        assert_all_same_bits(found, expected)


@interpreted
def test_tables_are_made_again_only_where_tensors_lie_elsewhere():
    from unison.kernels import many
    from unison.kernels.many import launch, reference

    values, weights = draw(2, [(8, 16), (7,), (40,)]), weights_of(3, 2)
    others, found = [each + 1 for each in values], outs_like(values)
    made, filled = [], launch._Group._filled
    launch._known.clear()
    for i in range(launch._MOST_KNOWN - 1):  # as after many other sets of tensors
        launch._known[(i,)] = []

    def num_made_for(values: list[Tensor]) -> int:
        expected = outs_like(values)
        many.release(values, weights, None, 1.0, found)
        reference.release(values, weights, None, [0] * 3, 1.0, expected)
        assert_all_same_bits(found, expected)
        squares = reference.squares(values)
        torch.testing.assert_close(many.squares(values), squares, rtol=1e-6, atol=0.0)
        return len(made)

    launch._Group._filled = lambda self, *args: made.append(args) or filled(self, *args)
    try:
        with as_on_cuda():
            assert num_made_for(values) == 4  # of two launches each
            values[0].mul_(2)
            assert num_made_for(values) == 4
            assert num_made_for(others) == 8
            values[1].add_(1)
            assert num_made_for(values) == 8
    finally:
        launch._Group._filled = filled


@interpreted
def test_outputs_that_were_asked_about():
    from unison.kernels import many
    from unison.kernels.many import launch
    from unison.kernels.many.asked import addresses_of

    values, weights = draw(3), weights_of(len(SHAPES), 3)
    expected = outs_like(values)
    with as_on_cuda():
        many.combine(values, weights, expected)
        for addresses in (None, "theirs"):
            outs = outs_like(values)
            known = None if addresses is None else addresses_of(outs)
            found = many.Asked(outs, many.Facts(outs), False, known)
            many.combine(values, weights, found)
            assert_all_same_bits(found, expected)
            assert found.addresses == addresses_of(outs)
        assert launch._alignments(b"") == b""
        offsets = [0, 256, 4, 1 << 40 | 15]
        addresses = b"".join(each.to_bytes(8, "little") for each in offsets)
        assert launch._alignments(addresses[:16]) == b""
        assert list(launch._alignments(addresses)) == [0, 0, 4, 15]


def test_equal_facts_are_compared_once():
    from unison.kernels.many import Facts

    one, other = Facts(draw(2)), Facts(draw(2))
    assert one._facts is not other._facts
    assert one == other
    assert one._facts is other._facts
    assert hash(one) == hash(other)
    assert one != Facts(draw(1))
    assert one != "facts"


# ---- without kernels -----------------------------------------------------------------------------
