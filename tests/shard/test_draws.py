"""Models as they come, with their dropout and caches: the same bits at any number of ranks."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.harness import World, ranks, run_on_ranks
from tests.privacy.neighbours.harness import Case, Records, judge
from unison.errors import UnsupportedOperation
from unison.privacy import Poisson, PrivacyEngine
from unison.rng import Key, draws_by_sample
from unison.shard import auto_shard, batch_mean, deal, digest, fully_shard

transformers = pytest.importorskip("transformers")

VOCAB, TOKENS, SAMPLES, STEPS, SEED = 23, 7, 7, 5, 3
TEXT = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
ENCODER = {**SIZES, "intermediate_size": 12}
T5 = {"d_model": 8, "d_ff": 12, "d_kv": 4, "num_heads": 2, "num_layers": 2}
GPT2 = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": TOKENS}
POSITIONS = {"max_position_embeddings": TOKENS}

# All else is transformers' default: a cache, and dropout of 0.1 but for Llama and ViT.
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**ENCODER, **POSITIONS, **TEXT)
    ),
    "llama, dropout": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**ENCODER, **POSITIONS, **TEXT, attention_dropout=0.1)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **TEXT)),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(**SIZES, **POSITIONS, **TEXT, ffn_dim=12, word_embed_proj_dim=8)
    ),
    "opt, layers dropped": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            **SIZES, **POSITIONS, **TEXT, ffn_dim=12, word_embed_proj_dim=8, layerdrop=0.3
        )
    ),
    "bert": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**ENCODER, **POSITIONS, **TEXT, num_labels=5)
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(
            **ENCODER, image_size=8, patch_size=4, num_labels=5, hidden_dropout_prob=0.1
        )
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**T5, **TEXT, decoder_start_token_id=0)
    ),
}


def built(name: str) -> Any:
    torch.manual_seed(SEED)
    return MODELS[name]().train()


def batches(name: str) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    labels = [torch.randint(0, 5, (SAMPLES,), generator=generator) for _ in range(STEPS)]
    if name == "vit":
        return [(torch.randn(SAMPLES, 3, 8, 8, generator=generator), each) for each in labels]
    shape = (SAMPLES, TOKENS)
    return [(torch.randint(3, VOCAB, shape, generator=generator), each) for each in labels]


def losses_of(model: Any, x: Tensor, label: Tensor) -> Tensor:  # [rows]
    config = getattr(model, "module", model).config
    others = {"decoder_input_ids": x} if config.is_encoder_decoder else {}
    logits = model(x, **others).logits
    if logits.dim() == 2:
        return F.cross_entropy(logits, label, reduction="none")
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), x[:, 1:], reduction="none")
    return losses.mean(dim=1)


def train(
    world: World | None, name: str, granule: int | None = 2, micro_batch: int | None = None
) -> tuple[list[float], str]:
    model = built(name)
    if world is not None:
        auto_shard(model, reducer="ordered", gradient_divisor=1)
    torch.manual_seed(SEED if world is None or world.rank == 0 else 99)  # the first rank's counts
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, share = [], 0.0
    for x, label in deal(batches(name), granule=granule, micro_batch=micro_batch):
        loss = batch_mean(losses_of(model, x, label))
        loss.backward()
        share += loss.item()
        if unison.current_plan().closes_logical_batch:
            optimizer.step()
            optimizer.zero_grad()
            losses, share = [*losses, share], 0.0
    return losses, digest(model)


def train_plainly(name: str) -> list[float]:
    """One process that knows nothing of ranks and granules; only its draws are by sample."""
    model = built(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step, (x, label) in enumerate(batches(name)):
        with draws_by_sample(Key.from_seed(SEED), step, range(SAMPLES)):
            loss = losses_of(model, x, label).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_models_as_they_come(name):
    """S1, S3: other digests at every world size, without a word."""
    losses, expected = run_on_ranks(1, train, name)[0]
    for size in (2, 3, 5):
        assert run_on_ranks(size, train, name) == [(losses, expected)] * size
    assert run_on_ranks(1, train, name, 2, 4)[0][1] == expected, "micro-batches"
    assert losses == pytest.approx(train_plainly(name), rel=1e-4)
    assert losses == pytest.approx(run_on_ranks(2, train, name, 1)[0][0], rel=1e-4), "granules"


def test_a_model_as_it_comes():
    """The shorter sibling."""
    expected = train(World(0, 1, 0), "gpt2")
    assert run_on_ranks(2, train, "gpt2") == [expected] * 2


def test_a_plain_model_on_granules_draws_the_same():
    """Nothing is sharded: the batch knows."""
    losses, _ = train(None, "gpt2")
    assert losses == pytest.approx(train_plainly("gpt2"), rel=1e-4)


PRIVATE = [name for name in MODELS if name not in ("llama", "opt, layers dropped")]


# ---- private -----------------------------------------------------------------------------------


def train_privately(world: World, name: str, how: str) -> str:
    model = built(name)
    if how == "units":
        auto_shard(model, reducer="ordered", gradient_divisor=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, label = (torch.cat(each) for each in zip(*batches(name), strict=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="noise and sampling come from a seed")
        model, optimizer, loader = PrivacyEngine(secure_noise=False, accountant="rdp").make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(x, label), batch_size=4),
            noise_multiplier=0.5,
            max_grad_norm=0.2,
            sampling=Poisson(rate=0.2),
            expected_batch_size=7,
            granule=2,
            seed=5,
        )
    torch.manual_seed(world.rank)
    for x, label in loader:
        optimizer.zero_grad()
        batch_mean(losses_of(model, x, label)).backward()
        optimizer.step()
    return digest(model)


@pytest.mark.parametrize("how", ["units", "whole"])
@pytest.mark.parametrize("name", PRIVATE)
def test_private_models_as_they_come(name, how):
    expected = run_on_ranks(1, train_privately, name, how)[0]
    for size in (2, 3):
        assert run_on_ranks(size, train_privately, name, how) == [expected] * size


# ---- where and how models draw -----------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run, self.linear = run, nn.Linear(4, 4)

    def forward(self, x):
        return self.run(self, x)


class Net(nn.Module):
    def __init__(self, run, at_root):
        super().__init__()
        self.blocks = nn.ModuleList([Block(run), Block(run)])
        self.at_root = at_root

    def forward(self, x):
        x = self.at_root(x)
        for block in self.blocks:
            x = block(x)
        return self.at_root(x)


def inner_checkpoint(block, x):
    def part(x):
        return F.dropout(torch.tanh(block.linear(F.dropout(x, 0.3))), 0.2) * torch.rand([])

    return checkpoint(part, F.dropout(x, 0.1), use_reentrant=False)


RUNS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout": lambda block, x: F.dropout(block.linear(x), 0.3),
    "drop path": lambda block, x: block.linear(x) * (torch.rand(len(x), 1) < 0.5),
    "noise": lambda block, x: block.linear(x + torch.randn_like(x)),
    "numbers": lambda block, x: block.linear(x) * torch.rand([]),
    "weights": lambda block, x: F.linear(x, F.dropout(block.linear.weight[:3], 0.3)).repeat(1, 2)[
        :, :4
    ],
    "checkpoint inside": inner_checkpoint,
}


def train_net(world: World, name: str, granule: int = 2) -> tuple[list[float], str]:
    torch.manual_seed(SEED)
    run = RUNS[name]
    net = Net(run, lambda x: F.dropout(x, 0.1) * torch.rand(len(x), 1) * torch.rand([]))
    auto_shard(net, reducer="ordered", gradient_divisor=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1))
    losses = []
    for x in deal(list(data), granule=granule):
        loss = batch_mean(net(x).square().sum(dim=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, digest(net)


@pytest.mark.parametrize("name", RUNS)
def test_draws_in_units_and_at_the_root(name):
    losses, expected = run_on_ranks(1, train_net, name)[0]
    assert run_on_ranks(2, train_net, name) == [(losses, expected)] * 2
    assert run_on_ranks(3, train_net, name) == [(losses, expected)] * 3
    if name != "weights":  # of three rows: an odd number is no batch
        assert losses == pytest.approx(run_on_ranks(2, train_net, name, 3)[0][0], rel=1e-4)


@ranks(2)
def test_a_checkpoint_around_units_draws_the_same(world):
    def gradients(is_checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(SEED)
        net = Net(RUNS["dropout"], lambda x: x)
        for block in net.blocks:
            fully_shard(block, reducer="ordered", gradient_divisor=1)
        fully_shard(net, reducer="ordered", gradient_divisor=1)
        for x in deal([torch.ones(6, 4)], granule=2):
            for block in net.blocks:
                x = checkpoint(block, x, use_reentrant=False) if is_checkpointed else block(x)
            batch_mean(x.square().sum(dim=1)).backward()
        return [each.grad.local for each in net.parameters()]

    assert all(map(torch.equal, gradients(False), gradients(True)))


def draw_unseen(block, x):
    """A draw inside of a function of torch's that nobody looks into."""
    return block.linear(nn.init.uniform_(x.clone()))


@pytest.mark.parametrize("step", [0, 5])
@ranks(2)
def test_draws_that_cannot_be_counted_are_refused(world, step):
    net = auto_shard(Net(draw_unseen, lambda x: x), reducer="ordered", gradient_divisor=1)
    (x,) = deal([torch.ones(6, 4)], granule=2, first_step=step)
    with pytest.raises(UnsupportedOperation, match="at another number of ranks"):
        net(x)


@ranks(1, 2)
def test_a_draw_into_what_granules_share_is_refused(world):
    net = Net(RUNS["dropout"], lambda x: x * torch.empty(len(x), 1).bernoulli_(0.5))
    auto_shard(net, reducer="ordered", gradient_divisor=1)
    (x,) = deal([torch.ones(6, 4)], granule=2)
    with pytest.raises(UnsupportedOperation, match="bernoulli_ draws into a tensor that all"):
        net(x)


def test_a_resumed_loader_goes_on_with_the_same_draws():
    def drawn(loader: Any) -> list[Tensor]:
        return [F.dropout(x).parts[0] for x in loader]

    torch.manual_seed(SEED)
    data = [torch.ones(4, 3)] * 3
    whole = drawn(deal(data, granule=2))
    assert torch.equal(drawn(deal(data[2:], granule=2, first_step=2))[0], whole[2])
    assert not torch.equal(whole[0], whole[1])


@pytest.mark.parametrize("name", PRIVATE)
def test_a_record_moves_the_sum_by_no_more_than_the_bound(name):
    """Masks stay with the other samples when one is emptied; see tests/privacy/neighbours."""
    x, label = batches(name)[0]
    far = x.clone()
    far[2] = x[0] if name != "vit" else 100 * x[2]
    case = Case(
        lambda module, batch: batch_mean(losses_of(module, *batch)),
        lambda: built(name),
        Records(lambda step: (far, label), record=2),
        steps=2,
        settings={"granule": 2, "seed": 5},
        at_one_shape=True,
    )
    verdict = judge(case, "auto")
    assert verdict.refusal is None
    assert verdict.moved["emptied"] > 0
    assert verdict.is_covered, verdict
