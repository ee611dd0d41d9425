"""The tracker counts what is alive, under what it turns out to be for."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import unison
from bench.memory import MODEL_STATE, Category, MemoryTracker
from tests.harness import assert_same_bits, ranks
from unison.errors import BadInput, UnsupportedOperation

FLOAT = 4  # bytes


def test_views_and_in_place_operations_add_nothing():
    with MemoryTracker() as tracker:
        x = torch.ones(5, 123)
        y = x.t()[3:]
        y.add_(1).mul_(2)
    assert tracker.peak()[Category.TEMPORARIES] == 5 * 123 * FLOAT


def test_the_peak_is_a_moment_and_not_the_sum_of_all():
    with MemoryTracker() as tracker:
        for _ in range(5):
            torch.ones(77)
        x = torch.ones(1000)
        del x
        torch.ones(10)
    assert tracker.peak()[Category.TEMPORARIES] == 1000 * FLOAT


def test_what_autograd_saved_lives_until_backward():
    x = torch.ones(1000, requires_grad=True)
    with MemoryTracker() as tracker:
        with tracker.births_are(Category.ACTIVATIONS):
            y = x.exp().exp().sum()  # saves both results, which no name refers to
        y.backward()
        x.grad = None
        during = torch.ones(10_000)
    peak = tracker.peak()
    assert len(during) == 10_000
    assert peak[Category.TEMPORARIES] == 10_000 * FLOAT
    assert peak[Category.ACTIVATIONS] <= 8  # the loss itself
    at_most = tracker.peak([Category.ACTIVATIONS])[Category.ACTIVATIONS]
    assert 2000 * FLOAT <= at_most <= 2000 * FLOAT + 8


def test_a_label_counts_from_the_first_byte():
    with MemoryTracker() as tracker:
        first = torch.ones(100)
        second = torch.ones(30)
        tracker.label(Category.GRADIENTS, [first, None])
    assert tracker.peak()[Category.GRADIENTS] == len(first) * FLOAT
    assert tracker.peak()[Category.TEMPORARIES] == len(second) * FLOAT


def test_the_first_label_stays():
    x = torch.ones(100)
    with MemoryTracker() as tracker:
        tracker.label(Category.PARAMETERS, [x])
        tracker.label(Category.GATHERED, [x[:3]])
    assert tracker.peak()[Category.PARAMETERS] == len(x) * FLOAT
    assert tracker.peak()[Category.GATHERED] == 0


def test_a_storage_that_is_resized_counts_with_its_size_of_the_moment():
    full = torch.ones(100)
    with MemoryTracker() as tracker:
        tracker.label(Category.GATHERED, [full])
        full.untyped_storage().resize_(0)
        other = torch.ones(50)
        full.untyped_storage().resize_(300 * FLOAT)
        del other
        full.resize_(400)
    assert tracker.peak()[Category.GATHERED] == 400 * FLOAT
    at_other = tracker.peak([Category.TEMPORARIES])
    assert at_other[Category.TEMPORARIES] == 50 * FLOAT
    assert at_other[Category.GATHERED] == 0


def test_resizing_is_as_it_was_after_the_block():
    before = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError), MemoryTracker():
        raise ZeroDivisionError
    assert torch.UntypedStorage.resize_ is before


def test_meta_tensors_take_no_memory():
    with MemoryTracker() as tracker:
        torch.ones(100, device="meta")
    assert sum(tracker.peak().values()) == 0


def test_a_tracker_serves_one_block():
    tracker = MemoryTracker()
    with tracker:
        pass
    with pytest.raises(BadInput, match="make another"), tracker:
        pass


def test_sparse_tensors_are_refused():
    with pytest.raises(UnsupportedOperation, match="sparse"), MemoryTracker():
        torch.ones(3, 3).to_sparse()


# ---- training ------------------------------------------------------------------------------------


def make_model():
    torch.manual_seed(0)
    blocks = [nn.Linear(64, 64) for _ in range(4)]
    return nn.Sequential(nn.Linear(32, 64), nn.Sequential(*blocks), nn.Linear(64, 8))


NUM_PARAMETERS = 33 * 64 + 4 * 65 * 64 + 65 * 8


def train(model, batches, tracker, mean=torch.mean):
    optimizer = torch.optim.AdamW(model.parameters())
    for rows in batches:
        with tracker.births_are(Category.ACTIVATIONS):
            loss = mean(model(rows).square().mean(dim=-1))
        loss.backward()
        tracker.label_training(model, optimizer)
        optimizer.step()
        tracker.label_training(model, optimizer)
        optimizer.zero_grad()


def batches(num=2):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 32, generator=generator) for _ in range(num)]


def test_one_process_holds_each_parameter_four_times():
    model = make_model()
    with MemoryTracker() as tracker:
        train(model, batches(), tracker)
    peak = tracker.peak(MODEL_STATE)
    size = NUM_PARAMETERS * FLOAT
    num_steps = len(list(model.parameters())) * FLOAT  # AdamW counts steps in tensors
    assert peak[Category.PARAMETERS] == size
    assert peak[Category.GRADIENTS] == size
    assert peak[Category.OPTIMIZER_STATE] == 2 * size + num_steps
    assert peak[Category.GATHERED] == 0
    assert tracker.peak([Category.COMMUNICATION])[Category.COMMUNICATION] == 0


def test_bits_do_not_depend_on_the_tracker():
    watched = make_model()
    plain = copy.deepcopy(watched)
    with MemoryTracker() as tracker:
        train(watched, batches(), tracker)
    train(plain, batches(), MemoryTracker())  # one that was never entered
    for a, b in zip(watched.parameters(), plain.parameters(), strict=True):
        assert_same_bits(a, b)


def allocated_at_peak(run):
    """What torch's own allocator of CPU memory reports to its profiler."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        run()
    allocation = torch._C._profiler._EventType.Allocation
    events = list(profiler.profiler.kineto_results.experimental_event_tree())
    changes = []
    while events:
        event = events.pop()
        events += event.children
        if event.typed[0] == allocation:
            changes.append((event.start_time_ns, event.typed[1].alloc_size))
    return max(itertools.accumulate(size for _, size in sorted(changes)))


def test_the_peak_is_that_of_the_allocator():
    def run(tracker):
        train(make_model(), batches(), tracker)

    with MemoryTracker() as tracker:
        run(tracker)
    expected = allocated_at_peak(lambda: run(MemoryTracker()))
    assert sum(tracker.peak().values()) == pytest.approx(expected, rel=0.01)


@ranks(2, 4)
def test_units_are_found_and_freed(world):
    model = unison.auto_shard(make_model(), gradient_divisor=1)
    units = unison.shard.unit_memory(model)
    with MemoryTracker() as tracker:
        train(model, unison.deal(batches()), tracker, mean=unison.batch_mean)
    gathered = tracker.peak([Category.GATHERED])[Category.GATHERED]
    # Beside the root at most the block that computes, the one before and the one after it.
    blocks = sorted((unit.full for unit in units[1:]), reverse=True)
    assert units[0].full < gathered <= units[0].full + sum(blocks[:3])
    state = tracker.peak([Category.PARAMETERS, Category.OPTIMIZER_STATE])
    shards = sum(unit.shard for unit in units)
    assert state[Category.PARAMETERS] == shards
    assert tracker.peak([Category.COMMUNICATION])[Category.COMMUNICATION] > 0
    held = tracker.peak([Category.GRADIENTS])[Category.GRADIENTS]
    assert held == shards


@ranks(2)
def test_fsdp2_is_counted_alike(world):
    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in unison.shard.find_blocks(model):
        torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(model, mesh=mesh)
    with MemoryTracker() as tracker:
        train(model, [rows.chunk(2)[world.rank] for rows in batches()], tracker)
    shards = NUM_PARAMETERS * FLOAT // 2
    peak = tracker.peak([Category.GRADIENTS, Category.OPTIMIZER_STATE])
    assert peak[Category.PARAMETERS] == shards
    assert peak[Category.GRADIENTS] == shards
    assert 2 * shards <= peak[Category.OPTIMIZER_STATE] < 2 * shards + 100
    # It gathers the root, the largest unit but one, into a buffer, and copies from there.
    assert tracker.peak([Category.GATHERING])[Category.GATHERING] >= 65 * 64 * FLOAT
