"""Clipping a model whose loss never holds its logits: every mode, as with logits."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.harness import assert_close
from tests.harness.oracle import norms_of, per_sample_gradients
from tests.privacy.common import attach
from unison.clip import MODES, clipped_gradients
from unison.models import ModelConfig, build, per_sample_loss

ALL_MODES = [*MODES, "auto"]
CONFIGS = {
    (family, is_tied): ModelConfig(
        family=family,
        vocab_size=61,
        context_length=13,
        d_model=24,
        num_layers=2,
        num_heads=4,
        d_ff=40,
        tie_head=is_tied,
    )
    for family in ("gpt2", "decoder")
    for is_tied in (True, False)
}
MODELS = pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: f"{kind[0]}, tied {kind[1]}")

Batch = tuple[Tensor, Tensor]


def batch_of(size: int = 4, tokens: int = 9) -> Batch:
    gen = torch.Generator().manual_seed(size)
    ids, labels = torch.randint(0, 61, (2, size, tokens), generator=gen)
    labels[0, 4:], labels[-1, ::2] = -100, -100
    return ids, labels


def with_logits(model: nn.Module, batch: Batch) -> Tensor:
    return per_sample_loss(model(batch[0]), batch[1])


def without_logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0], labels=batch[1])


@MODELS
@pytest.mark.parametrize("mode", ALL_MODES)
def test_equals_one_sample_at_a_time(kind, mode):
    model, batch = build(CONFIGS[kind]).double(), batch_of()
    gradients = per_sample_gradients(model, with_logits, batch)
    norms = norms_of(gradients, len(batch[0]))
    max_norm = float(norms.median())
    found = clipped_gradients(model, without_logits, batch, max_norm=max_norm, mode=mode)
    assert_close(found.norms, norms)
    c = found.coefficients
    assert float(c.min()) < 0.99 < float(c.max())
    expected = {name: torch.einsum("b,b...->...", c, each) for name, each in gradients.items()}
    assert_close(found.sums, expected, dtype=torch.float64)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_float32_agrees_with_the_ordinary_path(mode):
    model, batch = build(CONFIGS["gpt2", True]), batch_of()
    found, expected = (
        clipped_gradients(model, losses, batch, max_norm=0.1, mode=mode)
        for losses in (without_logits, with_logits)
    )
    assert float((found.norms / expected.norms - 1).abs().max()) <= 1e-6
    for name, each in expected.sums.items():
        change = (found.sums[name] - each).norm() / each.norm()
        assert float(change) <= 1e-6, name


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("is_autocast", [False, True])
def test_no_sample_adds_more_than_the_bound_in_bfloat16(mode, is_autocast):
    model, batch = build(CONFIGS["gpt2", True]), batch_of(1)
    model = model if is_autocast else model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        found = clipped_gradients(model, without_logits, batch, max_norm=0.01, mode=mode)
    squares = [float(each.double().square().sum()) for each in found.sums.values()]
    assert 0.0098 < math.sqrt(math.fsum(squares)) <= 0.01


@pytest.mark.parametrize("clipping", ["auto", "flash_fuse"])
def test_private_training_is_the_same_with_and_without_logits(clipping):
    ids, labels = batch_of(40)
    results = []
    for loss in (with_logits, without_logits):
        data = DataLoader(TensorDataset(ids, labels), batch_size=8)
        engine, model, optimizer, loader = attach(
            build(CONFIGS["gpt2", True]), data_loader=data, clipping=clipping
        )
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).mean().backward()
            optimizer.step()
        engine.detach()
        results.append(dict(model.named_parameters()))
    assert_close(results[1], results[0], dtype=torch.float32)


def test_samples_that_mix_are_found():
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 11)

        def forward(self, x: Tensor) -> Tensor:
            labels = torch.zeros(x.shape[:2], dtype=torch.int64)
            rows = x.flip(0), self.head.weight, labels
            return unison.linear_cross_entropy(*rows, reduction="sample_mean").flip(0)

    with pytest.raises(unison.UnsupportedOperation, match=r"samples mix before 'head\.weight'"):
        clipped_gradients(Shuffled(), lambda m, x: m(x), torch.randn(4, 3, 4), max_norm=1.0)


def test_what_lies_between_rows_of_logits_does_not_matter(monkeypatch):
    """Products of halves read it, and memory that was not written may hold anything."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        model, batch = build(CONFIGS["gpt2", True]).bfloat16(), batch_of(3)
        found = clipped_gradients(model, without_logits, batch, max_norm=0.01, mode="ghost")
    finally:
        torch.use_deterministic_algorithms(was)
    assert found.num_dropped == 0
