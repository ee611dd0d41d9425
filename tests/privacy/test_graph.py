"""A pass as a CUDA graph: the gradients of the same pass without one."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from unison.errors import BadInput, UnsupportedOperation
from unison.models import build, preset
from unison.privacy import PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore:noise and sampling come from a seed")

TOKENS, RECORDS = 16, 24


def private(device: str, *, batch_size: int, noise: float = 0.0, **settings):
    """A small model made private, and its loader of ids and labels."""
    config = preset("gpt2", num_layers=2, d_model=64, num_heads=2, context_length=TOKENS)
    model = build(config, device=device)
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(0, config.vocab_size, (2, RECORDS, TOKENS), generator=generator)
    engine = PrivacyEngine(secure_noise=False, accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(ids, labels), batch_size=batch_size, shuffle=True),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        seed=1,
        **settings,
    )
    return engine, model, optimizer, loader


def trained(*, is_recorded: bool, num_steps: int, **settings):
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
                    run = engine.capture_graph(lambda x, y: model(x, labels=y), ids, labels)
                run(ids, labels)
            optimizer.step()
            num_done += bool(loader.current.is_last)
            if num_done == num_steps:
                break
    return [each.detach().clone() for each in model.parameters()], engine.per_sample_norms()


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
def test_other_shapes_are_refused():
    engine, model, _, loader = private("cuda", batch_size=4, poisson_sampling=False)
    ids, labels = next(iter(loader))
    run = engine.capture_graph(lambda x, y: model(x, labels=y), ids.cuda(), labels.cuda())
    with pytest.raises(BadInput, match="at most 4 rows of shape"):
        run(ids[:, :3].cuda(), labels[:, :3].cuda())


def test_a_cpu_has_no_graphs():
    engine, model, _, loader = private("cpu", batch_size=4, poisson_sampling=False)
    ids, labels = next(iter(loader))
    with pytest.raises(UnsupportedOperation, match="on one CUDA device"):
        engine.capture_graph(lambda x, y: model(x, labels=y), ids, labels)
