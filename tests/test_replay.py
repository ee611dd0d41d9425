"""Records: digests of bits, the tree over steps, and their files."""

import itertools
import math
import os
import random
import struct
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import World, run_on_ranks
from tests.shard.common import ODD
from unison.errors import BadInput
from unison.models import build
from unison.replay import (
    RECORD_FILE,
    TREE_FILE,
    Record,
    StepRecord,
    StepRecorder,
    _factors,
    _factors_of_blocks,
    compare_steps,
    first_difference,
    open_record,
    sum_bits,
)
from unison.rng import Key, open_sealed_key, read_passphrase, seal, seal_key
from unison.shard import auto_shard

SIZES = {torch.float32: "<i", torch.bfloat16: "<h", torch.float64: "<i"}


def sum_of_one_at_a_time(values: torch.Tensor, start: int) -> list[int]:
    """What `sum_bits` promises, in Python's own integers."""
    code = SIZES[values.dtype]
    data = values.view(torch.uint8).numpy().tobytes()
    words = [word for (word,) in struct.iter_unpack(code, data)]
    start = start * values.element_size() // struct.calcsize(code)
    own = _factors("element", 1024).tolist()
    blocks = _factors_of_blocks(0, 8, torch.device("cpu")).tolist()
    found = [0, 0]
    for index, word in enumerate(words, start):
        for which in range(2):
            found[which] += word * own[which][index % 1024] * blocks[which][index // 1024]
    return [(each + 2**63) % 2**64 - 2**63 for each in found]


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 1024), (5, 3000), (1023, 2), (256, 2817)])
def test_sums_are_those_of_one_element_at_a_time(dtype, start, count):
    values = torch.randn(count, dtype=torch.float64).to(dtype)
    assert sum_bits(values, start, {}).tolist() == sum_of_one_at_a_time(values, start)


def test_sums_of_parts_add_up_wherever_it_is_cut():
    values, rng, sums = torch.randn(5000), random.Random(0), partial(sum_bits, tables={})
    for _ in range(20):
        edges = sorted(rng.choices(range(5001), k=rng.randrange(1, 9)))
        parts = zip([0, *edges], [*edges, 5000], strict=True)
        total = sum(sums(values[a:b], a) for a, b in parts if a < b)
        assert torch.equal(total, sums(values, 0))  # type: ignore[arg-type]


def test_no_flipped_bit_no_swap_and_no_negation_goes_unseen():
    values, rng, sums = torch.randn(2500), random.Random(1), partial(sum_bits, tables={})
    before = sums(values, 0)
    for _ in range(300):
        changed = values.clone()
        a, b = rng.sample(range(2500), 2)
        match rng.randrange(3):
            case 0:
                changed.view(torch.int32)[a] ^= rng.choice(
                    [*(1 << n for n in range(31)), -(1 << 31)]
                )
            case 1:
                changed[a], changed[b] = values[b], values[a]
            case _:
                changed[[a, b]] *= -1  # the signs of two, whose bits are the highest
        assert not torch.equal(sums(changed, 0), before)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))


def test_the_unit_that_was_changed_is_named():
    torch.manual_seed(0)
    model = Blocks()
    layers = [each for each in model.layers if isinstance(each, nn.Linear)]
    recorder = StepRecorder(model, 0, 1, lambda x: x)
    assert recorder.units == ("layers.0", "layers.1", "layers.2", "(root)")
    _, before = recorder.take()
    with torch.no_grad():
        layers[1].bias[3] += 1
    _, after = recorder.take()
    a, b = (StepRecord(step=7, units=each) for each in (before, after))
    parting = compare_steps(a, b, recorder.units)
    assert parting is not None
    assert (parting.step, parting.unit, parting.units) == (7, "layers.1", ("layers.1",))
    assert "at step 7: the parameters of layers.1" in parting.sentence
    with torch.no_grad():  # two parameters of a unit that change places
        layers[1].bias[3] -= 1
        weight = layers[0].weight.clone()
        layers[0].weight.copy_(layers[1].weight)
        layers[1].weight.copy_(weight)
    assert (
        compare_steps(a, StepRecord(step=7, units=recorder.take()[1]), recorder.units) is not None
    )


def test_ranks_that_hold_copies_add_up_to_one():
    model = Blocks()
    _, whole = StepRecorder(model, 0, 1, lambda x: x).take()
    sums: list[torch.Tensor] = []
    for rank in range(3):
        StepRecorder(model, rank, 3, lambda x: sums.append(x.clone()) or x).take()
    _, added = StepRecorder(model, 0, 3, lambda x: sum(sums)).take()  # type: ignore[arg-type]
    assert added == whole


def add_up(value: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(value)
    return value


def digests_on(world: World, replicas: int) -> tuple[str, ...]:
    mesh = init_device_mesh("cpu", (replicas, world.size // replicas))
    model = auto_shard(build(ODD, seed=0), mesh=mesh)
    return StepRecorder(model, world.rank, world.size, add_up).take()[1]


@pytest.mark.parametrize(
    ("size", "replicas"), [(2, 1), (2, 2), pytest.param(4, 2, marks=pytest.mark.full)]
)
def test_digests_of_shards_are_those_of_the_whole(size, replicas):
    _, whole = StepRecorder(build(ODD, seed=0), 0, 1, lambda x: x).take()
    assert run_on_ranks(size, digests_on, replicas) == [whole] * size


def test_rows_are_known_by_content_and_place_and_not_by_passes():
    model, ids, tokens = Blocks(), torch.arange(10, 16), torch.randint(0, 99, (6, 7))
    digests = set()
    for cuts in ([0, 6], [0, 2, 6], [0, 1, 1, 6]):
        recorder = StepRecorder(model, 0, 1, lambda x: x)
        for a, b in itertools.pairwise(cuts):
            positions = torch.cat([torch.arange(a, b), torch.tensor([-1, -1])])  # and padding
            padding = torch.zeros(2, 7, dtype=torch.int64)
            recorder.see(
                positions, torch.cat([ids[a:b], padding[:, 0]]), torch.cat([tokens[a:b], padding])
            )
        digests.add(recorder.take()[0])
    assert len(digests) == 1
    recorder = StepRecorder(model, 0, 1, lambda x: x)
    recorder.see(torch.arange(6), ids, tokens[[0, 1, 3, 2, 4, 5]])
    assert recorder.take()[0] not in digests


# ---- files ---------------------------------------------------------------------------------------

UNITS = ("layers.0", "(root)")


def record_of(step: int, salt: str = "") -> StepRecord:
    units = tuple(f"{hash((step, unit, salt)) & 2**128 - 1:032x}" for unit in UNITS)
    return StepRecord(step=step, units=units, lr=1 / (step + 3), rows="0" * 32, loss=math.pi)


def write(run, num_lines: int, changed: int | None = None) -> None:
    run.mkdir()
    with open_record(run, UNITS) as append:
        for step in range(num_lines):
            append(record_of(step, "other" if step == changed else ""))


def test_the_first_difference_is_found_by_few_look_ups(tmp_path):
    rng = random.Random(3)
    for number, num_lines in enumerate([1, 2, 3, 7, 8, 100, 1000]):
        write(tmp_path / f"a{number}", num_lines)
        for trial in range(3):
            changed = rng.randrange(num_lines)
            other = tmp_path / f"b{number}-{trial}"
            write(other, rng.choice([num_lines, num_lines + 5]), changed)
            with Record(tmp_path / f"a{number}") as a, Record(other) as b:
                assert first_difference(a, b) == changed
                assert a.num_lookups <= 2 * num_lines.bit_length()
                assert a.step(changed) != b.step(changed)
    with Record(tmp_path / "a5") as a, Record(tmp_path / "a6") as b:
        assert first_difference(a, b) is None  # 100 steps and 1000 of the same


def test_a_record_goes_on_as_if_it_had_never_stopped(tmp_path):
    write(tmp_path / "whole", 23)
    for step in (1, 6, 7, 15, 21):
        run = tmp_path / str(step)
        write(run, 22)
        for name in (RECORD_FILE, TREE_FILE):  # a crash in the middle of a write
            with (run / name).open("ab") as file:
                file.write(b'{"step": 22, ')
        with open_record(run, UNITS, after_step=step) as append:
            for later in range(step + 1, 23):
                append(record_of(later))
        for name in (RECORD_FILE, TREE_FILE):
            assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_record_that_ends_too_early_is_not_gone_on_with(tmp_path):
    write(tmp_path / "run", 5)
    os.truncate(tmp_path / "run" / TREE_FILE, 32 * 4)  # the nodes of three lines
    with Record(tmp_path / "run") as found:
        assert found.num_lines == 3
    with (
        pytest.raises(BadInput, match=r"ends with step 2, .* after step 3; .*--no-record"),
        open_record(tmp_path / "run", UNITS, after_step=3),
    ):
        pass
    (tmp_path / "run" / RECORD_FILE).unlink()
    with (
        pytest.raises(BadInput, match="not recorded from its beginning; leave --record out"),
        open_record(tmp_path / "run", UNITS, after_step=3),
    ):
        pass


def test_a_changed_line_is_noticed(tmp_path):
    write(tmp_path / "run", 5)
    path = tmp_path / "run" / RECORD_FILE
    path.write_bytes(path.read_bytes().replace(b"3.14159", b"3.14158"))
    with Record(tmp_path / "run") as found, pytest.raises(BadInput, match="line 5 was changed"):
        found.step(3)


# ---- sealed keys ---------------------------------------------------------------------------------


DATA = "ab" * 32  # the hash of some data


@pytest.fixture
def quick_scrypt(monkeypatch):
    monkeypatch.setitem(seal._SCRYPT, "n", 2)


def test_a_sealed_key_opens_with_its_passphrase_alone(tmp_path, quick_scrypt):
    key, path = Key.from_entropy(), tmp_path / "key"
    told = seal_key(key, path, "correct horse", DATA)
    opened, commitment = open_sealed_key(path, "correct horse", DATA)
    assert opened == key
    assert commitment == told
    assert seal_key(key, tmp_path / "other", "correct horse", DATA) != told  # salted
    assert path.stat().st_mode & 0o777 == 0o600
    for secret in (key._bytes, key._bytes.hex().encode(), b"horse"):
        assert secret not in path.read_bytes()
    with pytest.raises(BadInput, match="does not open"):
        open_sealed_key(path, "incorrect horse", DATA)
    with pytest.raises(BadInput, match="other rows than these"):
        open_sealed_key(path, "correct horse", "cd" * 32)
    with pytest.raises(BadInput, match="exists"):
        seal_key(Key.from_entropy(), path, "correct horse", DATA)


def test_where_a_passphrase_comes_from(tmp_path, monkeypatch):
    monkeypatch.delenv("UNISON_PASSPHRASE", raising=False)
    with pytest.raises(BadInput, match="--passphrase-file"):
        read_passphrase(None)
    monkeypatch.setenv("UNISON_PASSPHRASE", "of the environment")
    assert read_passphrase(None) == "of the environment"
    (tmp_path / "file").write_text("of the file\nand more")
    assert read_passphrase(str(tmp_path / "file")) == "of the file"
    (tmp_path / "file").write_text("short")
    with pytest.raises(BadInput, match="8 characters"):
        read_passphrase(str(tmp_path / "file"))
