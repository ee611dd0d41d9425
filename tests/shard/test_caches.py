"""Blocks that write into what they are given: caches, lists, objects; each granule has its own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.harness import World, run_on_ranks
from tests.shard.common import shard
from tests.shard.fsdp2.common import fsdp2
from unison.errors import UnsupportedOperation
from unison.shard import PerGranule, batch_mean, clip_grad_norm_, deal, digest, fully_shard
from unison.shard.fsdp2 import use_ordered_reduction

transformers = pytest.importorskip("transformers")

VOCAB, TOKENS = 23, 7
SIZES = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EMBEDDING = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": TOKENS}
OPT = {"hidden_size": 8, "ffn_dim": 12, "word_embed_proj_dim": 8, "dropout": 0.0}
ENCODER = {"d_model": 8, "d_ff": 12, "d_kv": 4, "num_heads": 2, "dropout_rate": 0.0}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": TOKENS}
LLAMA = {"hidden_size": 8, "intermediate_size": 12, **LAYERS, **SIZES}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

MODELS: dict[str, Callable[[], Any]] = {  # use_cache=True is transformers' default
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**EMBEDDING, **NO_DROPOUT, **SIZES)
    ),
    "opt": lambda: transformers.OPTForCausalLM(transformers.OPTConfig(**OPT, **LAYERS, **SIZES)),
    "sliding window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**LLAMA, num_key_value_heads=1, sliding_window=3)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**ENCODER, num_layers=2, decoder_start_token_id=0, **SIZES)
    ),
}


def built(name: str) -> Any:
    torch.manual_seed(3)
    return MODELS[name]()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (8, TOKENS), generator=generator) for _ in range(2)]


def losses_of(model: Any, rows: Tensor, **options: Any) -> Tensor:  # [rows]
    if model.config.is_encoder_decoder:
        options["decoder_input_ids"] = rows
    logits = model(rows, **options).logits
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return losses.view(rows.shape[0], -1).mean(dim=1)


def train(world: World, name: str, how: str, use_cache: bool) -> dict[str, Any]:
    model = built(name)
    if how == "fsdp2":
        use_ordered_reduction(fsdp2(model, world))
    else:
        shard(model, how, reducer="ordered", gradient_divisor=1)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for rows in deal(batches(), granule=2):
        options = {} if use_cache else {"use_cache": False}
        loss = batch_mean(losses_of(model, rows, **options))
        loss.backward()
        clip_grad_norm_(model, 1.0)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "digest": digest(model)}


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_changes_nothing(name):
    (without,) = run_on_ranks(1, train, name, "auto", False)
    alone, two = (run_on_ranks(size, train, name, "auto", True)[0] for size in (1, 2))
    assert alone == two
    if name == "t5":  # rounds otherwise with a cache, also without granules
        assert alone["losses"] == pytest.approx(without["losses"], rel=1e-6)
    else:
        assert alone == without


@pytest.mark.parametrize("name", MODELS)
def test_a_granule_is_what_its_rows_are_alone(name):
    model, alone = built(name), built(name)
    fully_shard_blocks(model)
    for rows in deal(batches()[:1], granule=2):
        for part, loss in zip(rows.parts, losses_of(model, rows).parts, strict=True):
            assert torch.equal(loss, losses_of(alone, part))


@pytest.mark.parametrize("how", ["root", "fsdp2"])
def test_a_cache_changes_nothing_elsewhere(how):
    for size in (1, 2):
        expected = run_on_ranks(size, train, "llama", how, False)[0]
        assert run_on_ranks(size, train, "llama", how, True)[0] == expected


@pytest.mark.parametrize("how", ["auto", "root"])
def test_the_cache_that_comes_out_holds_each_granules_keys(how):
    model, alone = built("llama"), built("llama")
    shard(model, how, reducer="ordered", gradient_divisor=1)
    for rows in deal(batches()[:1], granule=2):
        cache = model(rows).past_key_values
        assert cache.get_seq_length() == TOKENS
        assert len(cache.layers) == 2
        for index, part in enumerate(rows.parts):
            expected = alone(part).past_key_values
            for layer, own in zip(cache.layers, expected.layers, strict=True):
                assert isinstance(layer.keys, PerGranule)
                assert torch.equal(layer.keys.parts[index], own.keys)
                assert torch.equal(layer.values.parts[index], own.values)


def test_a_cache_of_ones_own_is_continued():
    model, alone = built("llama"), built("llama")
    fully_shard_blocks(model)
    with torch.no_grad():
        for rows in deal(batches()[:1], granule=2):
            cache, kept = (transformers.DynamicCache(config=model.config) for _ in range(2))
            model(rows[:, :3], past_key_values=cache)
            found = model(rows[:, 3:], past_key_values=cache).logits
            alone(rows.parts[1][:, :3], past_key_values=kept)
            expected = alone(rows.parts[1][:, 3:], past_key_values=kept).logits
            assert torch.equal(found.parts[1], expected)


@pytest.mark.parametrize("is_allocated", [False, True])
def test_a_cache_of_fixed_length_is_written_by_each_granule_to_its_own(is_allocated):
    model, alone = built("llama"), built("llama")
    fully_shard_blocks(model)

    def cache() -> Any:
        made = transformers.StaticCache(config=model.config, max_cache_len=TOKENS)
        if is_allocated:
            made.early_initialization(2, 2, 4, torch.float32, torch.device("cpu"))
        return made

    with torch.no_grad():
        for rows in deal(batches()[:1], granule=2):
            found = model(rows, past_key_values=cache()).logits
            for part, logits in zip(rows.parts, found.parts, strict=True):
                assert torch.equal(logits, alone(part, past_key_values=cache()).logits)


def fully_shard_blocks(model: nn.Module) -> None:
    shard(model, "auto", reducer="ordered", gradient_divisor=1)


@pytest.mark.parametrize("granule", [1, 3])
def test_a_cache_changes_no_private_gradient(granule):
    def gradients(**options: Any) -> list[Tensor]:
        model = built("llama")
        fully_shard_blocks(model)
        engine = unison.PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(TensorDataset(batches()[0]), batch_size=8),
            noise_multiplier=0.0,
            max_grad_norm=0.01,
            granule=granule,
        )
        for (rows,) in loader:
            logits = model(rows, **options).logits
            batch_mean(unison.per_sample_loss(logits[:, :-1], rows[:, 1:])).backward()
            optimizer.step()
        found = [each.grad.clone() for each in model.parameters()]
        engine.detach()
        return found

    pairs = list(zip(gradients(), gradients(use_cache=False), strict=True))
    assert all(own.any() for own, _ in pairs)
    assert all(torch.equal(own, expected) for own, expected in pairs)


# --- other things that blocks write to ------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []


@dataclass
class Pair:
    x: Tensor


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, to: Any) -> Tensor:
        y = self.layer(x)
        match to:
            case list():
                to.append(y.square().mean(dim=1))
            case dict():
                to["sum"] = to.get("sum", 0) + y.square().mean(dim=1)
            case Counter():
                to.seen.append(y.detach())
            case Tensor():
                to += 1
            case Pair():
                return y + to.x
        return y


class Writers(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make, self.blocks = make, nn.ModuleList(Writer() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        to = self.make(x)
        for block in self.blocks:
            x = block(x, to)
        return x.sum(dim=1), to


def in_granules(make: Callable[[Tensor], Any]) -> Iterator[tuple[nn.Module, Any]]:
    model = Writers(make)
    for block in model.blocks:
        fully_shard(block, reducer="ordered", gradient_divisor=1)
    fully_shard(model, reducer="ordered", gradient_divisor=1)
    for x in deal([torch.arange(12.0).view(4, 3)], granule=2):
        yield model, x


@pytest.mark.parametrize("kind", [list, dict])
def test_what_a_block_appends_reaches_the_model(kind):
    for model, x in in_granules(lambda x: kind()):
        written = model(x)[1]
        for index, part in enumerate(x.parts):
            expected = Writers(lambda x: kind())(part)[1]
            own, others = (w.values() if kind is dict else w for w in (written, expected))
            for value, other in zip(own, others, strict=True):
                assert torch.equal(value.parts[index], other)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda x: Counter(), "changed the Counter that it was given"),
        (lambda x: torch.zeros(2, 3), "changed the Tensor that it was given"),
        (Pair, "is given a Pair, which holds one value per granule"),
    ],
    ids=["object", "tensor", "dataclass"],
)
def test_what_granules_would_share_is_refused(make, sentence):
    for model, x in in_granules(make):
        with pytest.raises(UnsupportedOperation, match=sentence):
            model(x)
