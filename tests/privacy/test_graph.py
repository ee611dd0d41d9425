"""A pass as a CUDA graph: the gradients of the same pass without one."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unison
from unison.errors import BadInput, UnsupportedOperation
from unison.models import build, preset
from unison.privacy import PrivacyEngine, graph, training
from unison.privacy import noise as noises
from unison.privacy.engine import RecordedPass

pytestmark = pytest.mark.filterwarnings("ignore:noise and sampling come from a seed")

TOKENS, RECORDS = 16, 24


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters, **settings):
    return torch.optim.AdamW(parameters, lr=1e-2, capturable=True, fused=True, **settings)


def private(device: str, *, batch_size: int, noise: float = 0.0, optimizer=sgd, **settings):
    """A small model made private, and its loader of ids and labels."""
    config = preset("gpt2", num_layers=2, d_model=64, num_heads=2, context_length=TOKENS)
    if device == "cpu":
        config = replace(config, vocab_size=131)  # nothing there depends on it but seconds
    model = build(config, device=device)
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(0, config.vocab_size, (2, RECORDS, TOKENS), generator=generator)
    engine = PrivacyEngine(secure_noise=False, accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer(model.parameters()),
        data_loader=DataLoader(TensorDataset(ids, labels), batch_size=batch_size, shuffle=True),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        seed=1,
        **settings,
    )
    return engine, model, optimizer, loader


def nothing(num_done: int, optimizer) -> None:
    pass


def trained(
    *, is_recorded: bool, num_steps: int, with_optimizer: bool = False, change=nothing, **settings
):
    """Parameters and the last norms after a few steps, by a graph or without."""
    engine, model, optimizer, loader = private("cuda", **settings)
    run, num_done = None, 0
    while num_done < num_steps:
        for ids, labels in loader:
            ids, labels = ids.cuda(), labels.cuda()
            optimizer.zero_grad()
            if not is_recorded:
                model(ids, labels=labels).mean().backward()
            else:
                if run is None:
                    run = engine.capture_graph(
                        lambda x, y: model(x, labels=y), ids, labels, with_optimizer=with_optimizer
                    )
                run(ids, labels)
            if not (is_recorded and with_optimizer):
                optimizer.step()
            num_done += bool(loader.current.is_last)
            if loader.current.is_last:
                change(num_done, optimizer)
            if num_done == num_steps:
                break
    assert engine.ledger.num_intents == engine.ledger.num_commits == num_steps
    return [each.detach().clone() for each in model.parameters()], engine.per_sample_norms()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("is_recorded", "with_optimizer"), [(False, False), (True, True)])
def test_no_copy_of_a_key_stays_on_the_host(monkeypatch, is_recorded, with_optimizer):
    copies = []

    def kept(real):
        def call(*args, **kwargs):
            copies.append(real(*args, **kwargs))
            return copies[-1]

        return call

    monkeypatch.setattr(noises, "empty_table", kept(noises.empty_table))
    monkeypatch.setattr(noises, "words_of_streams", kept(noises.words_of_streams))
    monkeypatch.setattr(graph, "erase", lambda *two: (copies.extend(two), noises.erase(*two)))
    settings = {"batch_size": 4, "poisson_sampling": False, "noise": 1.0, "num_steps": 3}
    trained(is_recorded=is_recorded, with_optimizer=with_optimizer, **settings)
    torch.cuda.synchronize()
    assert len(copies) >= 6
    assert any(each.is_pinned() for each in copies if not each.is_cuda)
    assert not any(each.any() for each in copies)


def other_rate(num_done: int, optimizer) -> None:
    """A number, which the graph holds: it has to be recorded again."""
    if num_done == 3:
        optimizer.param_groups[0]["lr"] /= 4


def loaded_again(num_done: int, optimizer) -> None:
    """The same state in other tensors, as a checkpoint would put there."""
    if num_done == 3:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 4, "poisson_sampling": False},
        {"batch_size": 8, "max_physical_batch_size": 6},  # Poisson: padded, and several passes
    ],
    ids=["one pass", "several passes"],
)
def test_a_recorded_pass_is_the_pass(settings, noise):
    settings = {**settings, "noise": noise}
    parameters, norms = trained(is_recorded=False, num_steps=4, **settings)
    recorded, recorded_norms = trained(is_recorded=True, num_steps=4, **settings)
    torch.testing.assert_close(recorded_norms, norms, rtol=1e-4, atol=1e-6)
    for one, other in zip(recorded, parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("change", [nothing, other_rate, loaded_again])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 4, "poisson_sampling": False},
        {"batch_size": 8, "max_physical_batch_size": 6},
    ],
    ids=["one pass", "several passes"],
)
def test_a_recorded_step_is_the_step(settings, optimizer, change, noise):
    settings = {**settings, "noise": noise, "optimizer": optimizer, "change": change}
    expected, _ = trained(is_recorded=True, num_steps=6, **settings)
    found, _ = trained(is_recorded=True, num_steps=6, with_optimizer=True, **settings)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_rate_that_is_a_tensor_may_change():
    rates = [torch.tensor(1e-2, device="cuda") for _ in range(2)]
    found = []
    for with_optimizer, rate in zip((False, True), rates, strict=True):
        found.append(
            trained(
                is_recorded=True,
                num_steps=6,
                with_optimizer=with_optimizer,
                batch_size=4,
                poisson_sampling=False,
                noise=1.0,
                optimizer=lambda parameters, rate=rate: torch.optim.AdamW(
                    parameters, lr=rate, capturable=True, fused=True
                ),
                change=lambda _, optimizer: optimizer.param_groups[0]["lr"].mul_(0.5),
            )[0]
        )
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_step_leaves_its_gradients_and_no_key():
    engine, model, _, loader = private(
        "cuda", batch_size=4, noise=1.0, poisson_sampling=False, optimizer=adamw
    )
    run = None
    for ids, labels in loader:
        ids, labels = ids.cuda(), labels.cuda()
        run = run or engine.capture_graph(
            lambda x, y: model(x, labels=y), ids, labels, with_optimizer=True
        )
        model.zero_grad()
        run(ids, labels)
        assert all(each.grad is not None for each in model.parameters())
    assert isinstance(run, RecordedPass)
    assert run._step is not None
    recording = next(iter(run._step._recordings.values()))
    assert recording.recipes is not None
    assert recording.recipes.count_nonzero() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_other_shapes_are_refused():
    engine, model, _, loader = private("cuda", batch_size=4, poisson_sampling=False)
    ids, labels = next(iter(loader))
    run = engine.capture_graph(lambda x, y: model(x, labels=y), ids.cuda(), labels.cuda())
    with pytest.raises(BadInput, match="at most 4 rows of shape"):
        run(ids[:, :3].cuda(), labels[:, :3].cuda())


@pytest.fixture
def recording_on_a_cpu(monkeypatch):
    """Let passes be recorded without a GPU: they run, and nothing is kept of it."""
    monkeypatch.setattr(training, "takes", lambda *_: True)
    monkeypatch.setattr(graph, "_check_example", lambda _: None)
    for name in ("CUDAGraph", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.usefixtures("recording_on_a_cpu")
def test_a_pass_is_followed_when_it_is_recorded(reduction):
    """It adds its rows' losses up whatever the user does with his; losses that mix are refused."""
    engine, model, _, loader = private(
        "cpu", batch_size=4, poisson_sampling=False, loss_reduction=reduction
    )
    batch = next(iter(loader))
    engine.capture_graph(lambda x, y: model(x, labels=y), *batch)

    def mixed(x, y):
        losses = model(x, labels=y)
        return losses * losses.mean()

    with pytest.raises(UnsupportedOperation, match="depend"):
        engine.capture_graph(mixed, *batch)


@pytest.mark.usefixtures("recording_on_a_cpu")
def test_a_compiled_pass_is_recorded():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(31, 8), nn.Linear(8, 31))
    engine = PrivacyEngine(accountant="rdp")
    model, _, loader = engine.make_private(
        module=torch.compile(module, backend="aot_eager"),
        optimizer=sgd(module.parameters()),
        data_loader=DataLoader(TensorDataset(torch.arange(24).view(8, 3)), 4, shuffle=True),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        max_physical_batch_size=2,
    )
    (ids,) = next(iter(loader))
    engine.capture_graph(lambda x: unison.per_sample_loss(model(x), x), ids)
    passes = engine._attached.attachment._compiled
    assert (passes.num_graphs, passes.refusal) == (1, None)


def test_a_cpu_has_no_graphs():
    engine, model, _, loader = private("cpu", batch_size=4, poisson_sampling=False)
    ids, labels = next(iter(loader))
    with pytest.raises(UnsupportedOperation, match="on one CUDA device"):
        engine.capture_graph(lambda x, y: model(x, labels=y), ids, labels)


def test_records_of_several_rows_have_no_graphs():
    # Each row would be clipped by itself, and a record would weigh as much as its rows together.
    engine, model, _, loader = private("cpu", batch_size=4, rows_per_sample=2)
    ids, labels = next(iter(loader))
    with pytest.raises(UnsupportedOperation, match="rows_per_sample=2 rows: train without a graph"):
        engine.capture_graph(lambda x, y: model(x, labels=y), ids, labels)


def test_an_optimizer_that_counts_on_the_host_is_refused():
    engine, model, _, loader = private("cpu", batch_size=4, optimizer=torch.optim.AdamW)
    ids, labels = next(iter(loader))
    with pytest.raises(UnsupportedOperation, match="capturable=True"):
        engine.capture_graph(lambda x, y: model(x, labels=y), ids, labels, with_optimizer=True)


def test_hooks_of_an_optimizer_that_is_recorded_are_refused():
    engine, model, optimizer, loader = private("cpu", batch_size=4)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    ids, labels = next(iter(loader))
    with pytest.raises(UnsupportedOperation, match="SGD has step hooks"):
        engine.capture_graph(lambda x, y: model(x, labels=y), ids, labels, with_optimizer=True)
    handle.remove()
    with pytest.raises(UnsupportedOperation, match="on one CUDA device"):
        engine.capture_graph(lambda x, y: model(x, labels=y), ids, labels, with_optimizer=True)


def test_a_step_is_not_taken_twice():
    engine, model, optimizer, loader = private("cpu", batch_size=4, poisson_sampling=False)
    batches = iter(loader)
    for is_by_graph in (True, False):
        ids, labels = next(batches)
        optimizer.zero_grad()
        model(ids, labels=labels).mean().backward()
        engine._attached.commit(is_by_graph=is_by_graph)
        if is_by_graph:
            with pytest.raises(BadInput, match=r"leave optimizer\.step"):
                optimizer.step()
        else:
            optimizer.step()
