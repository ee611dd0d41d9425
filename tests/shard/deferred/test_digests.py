"""One digest of initial values at every world size: our models, and those of transformers."""

import pytest
from torch import nn

from tests.harness import World, run_on_ranks
from tests.shard.common import DECODER, GPT2
from unison.models import build
from unison.shard import auto_shard, digest, materialize, meta_init


def hf_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_embd=24, n_layer=3, n_head=4, n_positions=32)
    )


def hf_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


MODELS = {
    "gpt2": lambda: build(GPT2, device="meta"),
    "decoder": lambda: build(DECODER, device="meta"),
    "GPT2LMHeadModel": hf_gpt2,
    "LlamaForCausalLM": hf_llama,
}


def deferred_digest(world: World, name: str, is_sharded: bool) -> str:
    with meta_init():
        model = MODELS[name]()
    if is_sharded:
        auto_shard(model)
    return digest(materialize(model, seed=7))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("decoder", (1, 2, 3)),
        *(pytest.param(name, (1, 2, 3, 8), marks=pytest.mark.full) for name in MODELS),
    ],
)
def test_every_world_size_has_the_digest_of_one_process(name, sizes):
    eager = run_on_ranks(1, deferred_digest, name, False)[0]
    for size in sizes:
        assert set(run_on_ranks(size, deferred_digest, name, True)) == {eager}
    if name in ("gpt2", "decoder"):
        assert eager == digest(build({"gpt2": GPT2, "decoder": DECODER}[name], seed=7))
