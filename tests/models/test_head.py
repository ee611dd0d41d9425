"""Losses straight from the model, against those of its logits."""

import pytest
import torch

from tests.harness import assert_close
from tests.harness.largest import Largest
from tests.models.test_models import TINY_DECODER, TINY_GPT2
from unison.kernels import cross_entropy
from unison.models import ModelConfig, build, per_sample_loss

CONFIGS = [
    ModelConfig(**{**vars(config), "tie_head": is_tied})
    for config in (TINY_GPT2, TINY_DECODER)
    for is_tied in (True, False)
]
MODELS = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.family}, tied {c.tie_head}")


def batch(size: int = 3, tokens: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(0, 61, (2, size, tokens), generator=gen)
    labels[0, 5:] = -100
    return ids, labels


@MODELS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_losses_and_gradients_are_those_of_the_logits(config, dtype):
    model, (ids, labels) = build(config).to(dtype), batch()
    results = []
    for losses in (per_sample_loss(model(ids), labels), model(ids, labels=labels)):
        model.zero_grad()
        losses.mean().backward()
        gradients = {name: each.grad for name, each in model.named_parameters()}
        results.append({"losses": losses, **gradients})
    assert_close(results[1], results[0], dtype=dtype)


@MODELS
def test_hidden_states_go_into_the_head(config):
    model, (ids, _) = build(config), batch()
    hidden = model.hidden_states(ids)
    assert hidden.shape == (3, 11, config.d_model)
    assert torch.equal(model.lm_head(hidden), model(ids))


def test_names_are_as_they_were():
    untied = [name for name, _ in build(CONFIGS[3], device="meta").named_parameters()]
    assert untied[-2:] == ["ln_final.weight", "lm_head.weight"]


def test_logits_never_exist(monkeypatch):
    config = ModelConfig(**{**vars(TINY_GPT2), "vocab_size": 4001})
    model, (ids, labels) = build(config), batch(6)
    monkeypatch.setitem(cross_entropy._ELEMENTS, "cpu", 13 * 4001)
    with Largest() as largest:
        model(ids, labels=labels).mean().backward()
    assert largest.numel < 4001 * config.d_model * 1.1 < 6 * 11 * 4001
