"""What a trace keeps of tensors, and what is made of two of them; all in one process."""

import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn

from unison.errors import BadInput
from unison.parallel import ShardedParam
from unison.rng import Box
from unison.verify import Trace, compare, page, quantities, trace
from unison.verify.ladder import OF_ROWS, ulps_between
from unison.verify.quantities import Elements, Quantity, block_digests, positions


@pytest.mark.parametrize("shape", [(1,), (7, 5), (123, 77)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_digests_of_parts_add_up_to_that_of_the_whole(shape, dtype, monkeypatch):
    monkeypatch.setattr(quantities, "_CHUNK", 1000)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = block_digests(value, Elements.all(value.numel()))
    for cuts in ([value.numel() // 3], [0, value.numel() // 2, value.numel() // 2]):
        edges = [0, *cuts, value.numel()]
        parts = [
            block_digests(value.reshape(-1)[a:b], Elements(value.numel(), a, b))
            for a, b in itertools.pairwise(edges)
        ]
        assert np.array_equal(sum(parts), whole)
    if len(shape) == 2:  # columns, as a tensor axis cuts them
        parts = []
        for low, high in ((0, 2), (2, shape[1])):
            box = Box(shape, (0, low), (shape[0], high))
            own = value[:, low:high]
            count = ((0, own.numel()),)
            held = ShardedParam("w", nn.Parameter(own.float()), shape, count, cut=box)
            parts.append(block_digests(own, Elements.of(held)))
        assert np.array_equal(sum(parts), whole)


def test_a_digest_tells_bits_places_and_order():
    value = torch.randn(200)
    own = block_digests(value, Elements.all(200))
    for change in (
        lambda x: x.index_fill(0, torch.tensor([137]), float(x[136])),
        lambda x: x.flip(0),
        lambda x: torch.cat([x[100:], x[:100]]),
        lambda x: -x,
    ):
        assert not np.array_equal(block_digests(change(value), Elements.all(200)), own)
    zeros = torch.zeros(3)
    assert not np.array_equal(
        block_digests(zeros, Elements.all(3)), block_digests(-zeros, Elements.all(3))
    )


def test_linear_digests_of_summands_add_up_to_that_of_the_sum():
    summands = [torch.randint(-(2**40), 2**40, (1000,)) for _ in range(3)]
    index = Elements.all(1000)
    parts = [block_digests(each, index, is_linear=True) for each in summands]
    total = block_digests(sum(summands), index, is_linear=True)
    assert np.array_equal(sum(parts), total)
    narrow = block_digests(
        torch.tensor([-3, 5], dtype=torch.int32), Elements.all(2), is_linear=True
    )
    wide = block_digests(torch.tensor([-3, 5]), Elements.all(2), is_linear=True)
    assert np.array_equal(narrow, wide)


def test_kept_places_are_fixed_and_divide_evenly():
    assert positions(5, 64).tolist() == [0, 1, 2, 3, 4]
    found = positions(10**9, 64)
    assert (len(found), found[0], found[-1]) == (64, 0, 10**9 - 1)


@pytest.mark.parametrize(
    ("a", "b", "dtype", "expected"),
    [
        (1.0, 1.0 + 2**-23, "float32", 1),
        (1.0, 1.0 - 2**-24, "float32", 1),
        (-1e-45, 1e-45, "float32", 2),
        (1.0, 1.0 + 2**-7, "bfloat16", 1),
        (1.0, 2.0, "float64", 2**52),
        (1.0, float("nan"), "float32", None),
        (1, 2, "int64", None),
    ],
)
def test_ulps(a, b, dtype, expected):
    assert ulps_between(a, b, dtype) == expected


# ---- a user's own loop ---------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(9, 11), nn.Linear(11, 3)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, x):
        return self.second(self.second.weight.new_tensor(1.0) * self.first(x).relu())


def loop(file, *, lr=0.1, seed=1, change=None, steps=2, **options):
    torch.manual_seed(seed)
    model = Net()
    rows = torch.randn(6, 9, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    if change is not None:
        rows = change(model, optimizer, rows)
    with trace(file, model, optimizer, **options) as tracer:
        for _ in range(steps):
            optimizer.zero_grad()
            tracer.loss(model(rows).square().mean()).backward()
            optimizer.step()
    assert not model._forward_hooks
    assert not model.first._forward_hooks
    return file


def wide(model, optimizer, rows):
    return rows[:5]


def changed_later(model, optimizer, rows):
    def write(*_):
        if len(optimizer.state[model.first.bias]) and optimizer.state[model.first.bias]["step"] > 1:
            model.first.weight.data.view(-1)[40] += 1.0

    optimizer.register_step_post_hook(write)
    return rows


@pytest.mark.parametrize(
    ("settings", "step", "rung", "name", "cause"),
    [
        ({"seed": 2}, 0, "initial parameters", "first.weight", "another RNG stream"),
        ({"lr": 0.2}, 0, "settings", "lr of group 0", "asked for different things"),
        ({"change": wide}, 0, "inputs", "input 0", "6 samples and 5"),
        ({"change": changed_later}, 1, "updated parameters", "first.weight", "wrote to"),
    ],
)
def test_two_loops_part_where_they_differ(tmp_path, settings, step, rung, name, cause):
    one, other = loop(tmp_path / "a"), loop(tmp_path / "b", **settings)
    found = compare(one, other)
    first = found.first
    assert first is not None
    assert (first.step, first.rung, first.name) == (step, rung, name)
    assert cause in str(first.cause)
    assert f"step {step}, {rung}: {name}" in found.verdict


def test_the_same_loop_twice_agrees(tmp_path):
    found = compare(loop(tmp_path / "a"), loop(tmp_path / "b"))
    assert found.is_equal
    assert found.largest == 0
    assert {each["rung"] for each in found.rungs} == {
        *("initial parameters", "settings", "inputs", "activations", "loss", "gradients"),
        *("optimizer state", "updated parameters"),
    }
    names = {entry.name for entry in Trace.open(tmp_path / "a").entries.values()}
    assert {"frozen", "count", "model", "first", "second.bias: exp_avg"} <= names


def test_a_tolerance_takes_what_is_near(tmp_path):
    def nudge(model, optimizer, rows):
        model.first.weight.data[0, 0] *= 1 + 1e-6
        return rows

    one, other = loop(tmp_path / "a"), loop(tmp_path / "b", change=nudge)
    assert not compare(one, other).is_equal
    assert compare(one, other, tolerance=1e-3).is_equal


def test_all_values_of_one_quantity_are_kept_if_asked(tmp_path):
    file = loop(tmp_path / "a", num_values=4, keep=[("gradients", "first.weight")])
    entries = {(e.rung, e.name): e for e in Trace.open(file).entries.values()}
    assert len(entries["gradients", "first.weight"].values) == 99
    assert len(entries["gradients", "second.weight"].values) == 4


def test_conditions_that_differ_are_named(tmp_path):
    one, other = loop(tmp_path / "a"), loop(tmp_path / "b")
    lines = other.read_text().splitlines()
    header = json.loads(lines[0])
    header["conditions"]["threads"] = 7
    place = next(i for i, line in enumerate(lines) if '"loss"' in line)
    entry = json.loads(lines[place])
    value = np.float32(float.fromhex(entry["values"][0]))
    entry["values"] = [float(np.nextafter(np.nextafter(value, 9), 9)).hex()]
    entry["blocks"][0] = "1"
    lines[0], lines[place] = json.dumps(header), json.dumps(entry)
    other.write_text("\n".join(lines) + "\n")
    first = compare(one, other).first
    assert first is not None
    assert (first.rung, first.ulps) == ("loss", 2)
    assert "different conditions: threads" in str(first.cause)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no trace"),
        ("{}\n", "is no trace"),
        ('{"unison_trace": 1}\n', "damaged"),
        ("HEADER\n[1]\n", "no line of a trace"),
        ('HEADER\n{"step": "x"}\n', "no line of a trace"),
        ("HEADER\nLINE", "cut off"),
        ("HEADER\nLINE\nLINE\n", "repeats"),
        ("HEADER\nLINE\n\x00", "cut off"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, text, words):
    lines = loop(tmp_path / "a", steps=1).read_text().splitlines()
    file = tmp_path / "b"
    file.write_text(text.replace("HEADER", lines[0]).replace("LINE", lines[1]))
    with pytest.raises(BadInput, match=words):
        Trace.open(file)


def test_a_trace_that_cannot_be_written_is_refused_before_training(tmp_path):
    with pytest.raises(BadInput, match="cannot be written"):
        loop(tmp_path / "no" / "such" / "folder")


def test_the_page_needs_nothing_from_elsewhere():
    made = page(
        "a <title>",
        "it holds",
        is_good=True,
        columns=("claim", "verdict"),
        rows=[("x < y", "holds")],
        faults=["one <fault>"],
        about={"torch": "2"},
    )
    assert "a &lt;title&gt;" in made
    assert "<fault>" not in made
    assert not any(word in made for word in ("http", "<script", "<link", "@import", "url("))
    assert "max-width: 640px" in made
    assert "viewport" in made


# ---- causes, of quantities made by hand ----------------------------------------------------------


def quantity(rung, values, name="w", step=0, **flags):
    """What a trace would keep of these values; rows of one value each where it has rows."""
    value = torch.as_tensor(values, dtype=torch.float32)
    blocks = block_digests(value, Elements.all(value.numel())).tolist()
    if rung in OF_ROWS:
        blocks = value.view(torch.int32).tolist()
    return Quantity(
        step=step,
        rung=rung,
        name=name,
        shape=tuple(value.shape),
        dtype="float32",
        blocks=tuple(blocks),
        values=tuple(value.double()[positions(len(value), 64)].tolist()),
        norm=float(value.double().norm()),
        **flags,
    )


def run_of(*quantities, num_ranks=1, is_private=False):
    return Trace("a run", num_ranks, is_private, {}, {}, {each.key: each for each in quantities})


DRAWN = torch.randn(60, generator=torch.Generator().manual_seed(5))
OTHER = torch.randn(60, generator=torch.Generator().manual_seed(6))
FLIPPED = DRAWN.clone()
FLIPPED[41] *= -1  # the bit of the sign


@pytest.mark.parametrize(
    ("rung", "second", "words"),
    [
        ("initial parameters", OTHER, "another RNG stream"),
        ("initial parameters", DRAWN * 2, "every value is 2 times the other's: another init"),
        ("inputs", DRAWN[[1, 0, *range(2, 60)]], "rows 0, 1 are swapped"),
        ("inputs", OTHER, "0 of 60 rows are in both"),
        ("activations", DRAWN / 4, "scaled by 1/world size; a forward"),
        ("activations", DRAWN * 3, "an impure module: every value is 3 times"),
        ("loss", DRAWN[:1] * 4, "world size: a sum for a mean"),
        ("loss", DRAWN[:1] * 1.3, "labels of other rows"),
        ("per-sample norms", DRAWN.abs() * 2, "√world size too large"),
        ("per-sample norms", DRAWN.abs() + 0.1, "counted twice"),
        ("per-sample norms", DRAWN.abs() * (1.002 + 5e-4 * OTHER.tanh()), "counted twice"),
        ("per-sample norms", DRAWN.abs().roll(1), "the norms of others"),
        ("per-sample norms", DRAWN.abs() * (OTHER > 0), "samples without a norm"),
        ("per-sample norms", DRAWN.abs() * 0.8 - 0.01 * DRAWN.abs() ** 2, "left out"),
        ("coefficients", DRAWN * 0.9, "another clip norm C"),
        ("gradients before reduction", DRAWN / 4, "scaled by 1/world size before"),
        ("gradients after reduction", OTHER, "a rank's summand is missing"),
        ("gradients after reduction", torch.cat([DRAWN[:40], OTHER[40:]]), "lost a part"),
        ("noise", DRAWN * 1.5, "σ is 1.5 times"),
        ("noise", DRAWN * 2, "σ is 2 times the other's (√world size: added on every rank)"),
        ("noise", DRAWN * 0, "adds no noise"),
        ("noise", OTHER, "other noise of about the same size"),
        ("curvature", OTHER, "(a ring)"),
        ("curvature", DRAWN * 16, "world size²: by each rank's own count"),
        ("gradients", DRAWN / 4, "scaled by 1/world size"),
        ("gradients", OTHER, "clipping by the whole norm"),
        ("optimizer state", OTHER, "from equal gradients"),
        ("gradients", OTHER, "a rank's summand is missing"),
        ("updated parameters", OTHER, "the update itself"),
        ("updated parameters", FLIPPED, "one flipped bit"),
        ("updated parameters", DRAWN * (1 + 1e-6 * OTHER), "no more than rounding"),
    ],
)
def test_likely_causes(rung, second, words):
    first = DRAWN.abs() if rung == "per-sample norms" else DRAWN
    one = run_of(quantity(rung, first[: len(second)]))
    other = run_of(quantity(rung, second), num_ranks=4)
    found = compare(one, other).first
    assert found is not None
    assert (found.rung, found.name) == (rung, "w")
    assert words in str(found.cause)


def test_a_factor_is_told_by_the_ranks_of_the_run_that_has_it():
    one = run_of(quantity("activations", DRAWN), num_ranks=2)
    other = run_of(quantity("activations", DRAWN / 4), num_ranks=4)
    assert "scaled by 1/world size;" in str(compare(one, other).first)


def test_sums_that_are_not_those_of_their_summands_are_found_in_one_run():
    before = quantity("gradients before reduction", DRAWN)
    after = quantity("gradients after reduction", OTHER)
    run = run_of(before, after, num_ranks=2, is_private=True)
    found = compare(run, run).first
    assert found is not None
    assert found.rung == "gradients after reduction"
    assert "before and after it" in found.where


def test_copies_that_differ_and_equal_draws_are_named():
    one = run_of(quantity("initial parameters", DRAWN))
    for flag, words in (("disagree", "hold different values"), ("repeats", "drawn by rank")):
        other = run_of(quantity("initial parameters", OTHER, **{flag: True}))
        found = compare(one, other).first
        assert found is not None
        assert words in str(found.cause)
    stale = run_of(*(quantity("per-sample norms", DRAWN[:5], step=step) for step in (0, 1)))
    fresh = run_of(
        quantity("per-sample norms", DRAWN[:5]), quantity("per-sample norms", OTHER[:5], step=1)
    )
    found = compare(fresh, stale).first
    assert found is not None
    assert (found.step, str(found.cause)[:12]) == (1, "a stale norm")
