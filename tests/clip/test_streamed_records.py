"""Records that are kept as what they are made of, and made again: measured, added up, and planned.

On CUDA the gradient of a head's logits never exists, whatever the mode. Here Triton's interpreter
stands for CUDA.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.clip.common import explicit_gradients
from tests.clip.test_cross_entropy import CONFIGS, batch_of, with_logits, without_logits
from tests.harness import assert_close, assert_same_bits
from tests.harness.oracle import norms_of, per_sample_gradients
from tests.kernels.interpreted import as_on_cuda, interpreted
from unison.clip import clipped_gradients, describe, measured, plan_clipping
from unison.clip.functional import learn
from unison.kernels.cross_entropy import ChunkedHead
from unison.models import build
from unison.ops import Lookup, Streamed

BATCH, TOKENS, VOCAB, WIDTH = 3, 5, 37, 8


def head_record(dtype: torch.dtype = torch.float32, chunk: int = TOKENS) -> Streamed:
    gen = torch.Generator().manual_seed(5)
    labels = torch.randint(0, VOCAB, (BATCH, TOKENS), generator=gen)
    labels[1, 2] = -100
    head = ChunkedHead(
        hidden=torch.randn(BATCH, TOKENS, WIDTH, generator=gen).to(dtype),
        weight=torch.randn(VOCAB, WIDTH, generator=gen).to(dtype),
        bias=None,
        labels=labels,
        ignore_index=-100,
        chunk=chunk,
    )
    return Streamed(head, head.losses()[1], torch.randn(BATCH, TOKENS, generator=gen).to(dtype))


def lookup_record(dtype: torch.dtype = torch.float32) -> Lookup:
    gen = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCAB, (BATCH, TOKENS), generator=gen)
    return Lookup(ids, torch.randn(BATCH, TOKENS, WIDTH, generator=gen).to(dtype), (VOCAB, WIDTH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["tile", "gram"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["alone", "tied"])
@pytest.mark.parametrize("chunk", [TOKENS, 2 * TOKENS])
@interpreted
def test_what_is_measured_is_what_is_added_up(is_tied, method, dtype, chunk):
    streamed, others = head_record(dtype, chunk), [lookup_record(dtype)] if is_tied else []
    with as_on_cuda():
        exact = explicit_gradients([streamed.as_product(), *others])
        parts = [part for _, part in measured._in_pieces([streamed, *others])]
        whole = torch.cat(parts).view(BATCH, VOCAB, WIDTH)
        norms = measured.squared_norms([streamed, *others], method)
        squared = whole.double().flatten(1).square().sum(1)
        assert_close(norms.squared, squared, dtype=torch.float32)
        assert bool((norms.upper >= squared).all())
        c = torch.tensor([0.5, 0.0, 0.25], dtype=torch.float64)
        found = measured.clipped_sum([streamed, *others], c, (VOCAB, WIDTH))
        assert_close(found, torch.einsum("b,b...->...", c, whole.double()), dtype=torch.float32)
        assert_close(whole, exact, dtype=dtype)
        again = measured.clipped_sum([streamed, *others], c, (VOCAB, WIDTH))
        assert_same_bits(found, again)


@pytest.mark.parametrize("mode", ["ghost_bk", "flash_fuse_bk"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["a head of its own", "tied"])
@interpreted
def test_a_model_never_holds_its_logits(is_tied, mode):
    model, batch = build(CONFIGS["gpt2", is_tied]), batch_of()
    gradients = per_sample_gradients(model.double(), with_logits, batch)
    norms = norms_of(gradients, len(batch[0]))
    max_norm = float(norms.median())
    model.float()
    clipped_gradients(model, without_logits, batch, max_norm=max_norm, mode=mode)  # to learn it
    with as_on_cuda(), mock.patch.object(Streamed, "as_product", side_effect=AssertionError):
        found = clipped_gradients(model, without_logits, batch, max_norm=max_norm, mode=mode)
    torch.testing.assert_close(found.norms, norms, rtol=1e-5, atol=0.0)
    for name, each in gradients.items():
        expected = torch.einsum("b,b...->...", found.coefficients, each)
        error = float((found.sums[name].double() - expected).norm())
        assert error <= 1e-5 * max_norm, name


def test_the_planner_knows_what_need_not_be_kept():
    streamed = describe("head", [head_record(torch.bfloat16)])
    product = describe("head", [head_record(torch.bfloat16).as_product()])
    assert streamed.uses == product.uses  # the same to a method
    kept = {}
    for layer in (streamed, product):
        plan = plan_clipping([replace(layer, batch=32)], mode="ghost_bk", machine="cuda")
        kept[layer.uses[0].is_streamed] = plan.layers[0].chosen.cost.kept_bytes
    assert kept[True] == 32 * TOKENS * WIDTH * 2
    assert kept[False] == 32 * TOKENS * (WIDTH + VOCAB) * 2


def test_what_is_learned_of_a_model_says_what_streams():
    model, batch = build(CONFIGS["gpt2", True]), batch_of()
    layers = {each.name: each for each in learn(model, without_logits, batch).layers}
    streams = {name for name, each in layers.items() if any(u.is_streamed for u in each.uses)}
    assert streams == {"token_embeddings.weight"}
