"""Models as people build them pass the checks: their own dropout, adapters, caches, precision."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.privacy.common import attach
from unison.errors import UnsupportedOperation
from unison.models import per_sample_loss

transformers = pytest.importorskip("transformers")

NUM_TOKENS, VOCAB = 7, 31
TINY = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
WORDS = {"vocab_size": VOCAB, "num_hidden_layers": 1, **TINY}


def llama(**settings) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **WORDS, num_key_value_heads=2, max_position_embeddings=16, **settings
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=1, n_head=2
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(**WORDS, max_position_embeddings=16)
    return transformers.BertForSequenceClassification(config)


def vit() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        **TINY, num_hidden_layers=1, image_size=8, patch_size=4, hidden_dropout_prob=0.1
    )
    return transformers.ViTForImageClassification(config)


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(llama(), config)


def rows(num_rows: int = 24) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, VOCAB, (num_rows, NUM_TOKENS), generator=generator)


def images() -> Tensor:
    return torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(2))


def attached(module: nn.Module, x: Tensor, batch_size: int = 6, **settings):
    loader = DataLoader(TensorDataset(x), batch_size=batch_size)
    return attach(module.train(), data_loader=loader, **settings)


MODELS = {
    "llama": (llama, rows, {}),
    "llama, dropout of attention": (lambda: llama(attention_dropout=0.1), rows, {}),
    "llama, without a cache": (llama, rows, {"use_cache": False}),
    "gpt2": (gpt2, rows, {}),
    "bert": (bert, rows, {"attention_mask": True}),
    "vit": (vit, images, {}),
    "lora": (lora, rows, {}),
    "llama in float64": (lambda: llama().double(), rows, {}),
}


@pytest.mark.parametrize("batch_size", [1, 6])
@pytest.mark.parametrize("name", MODELS)
def test_models_pass(name, batch_size):
    make, data, extra = MODELS[name]
    x = data()
    engine, module, optimizer, private = attached(make(), x, batch_size)
    for step, (x,) in enumerate(private):
        given = dict(extra)
        if "attention_mask" in given:
            given["attention_mask"] = torch.ones_like(x)
        optimizer.zero_grad()
        module(x, **given).logits.float().flatten(1).square().mean(1).mean().backward()
        optimizer.step()
        if step == 3:
            break
    assert engine.ledger.num_commits == 4


@pytest.mark.filterwarnings("ignore:.*mkldnn_matmul")
@pytest.mark.parametrize("how", ["autocast", "bfloat16", "checkpointing"])
def test_precision_and_checkpointing_pass(how):
    module = llama(attention_dropout=0.1)
    if how == "bfloat16":
        module = module.bfloat16()
    if how == "checkpointing":
        enable: Any = module.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    engine, module, _, private = attached(module, rows())
    (x,) = next(iter(private))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            logits = module(x, use_cache=False).logits
        logits.float().flatten(1).square().mean(1).mean().backward()
    assert engine.ledger.num_intents == 1


# ---- losses of a model's own ---------------------------------------------------------------------


@pytest.mark.parametrize("masked", [0, 3])
def test_a_loss_of_its_own_passes(masked):
    engine, module, _, private = attached(gpt2(), rows())
    (x,) = next(iter(private))
    labels = x.clone()
    labels[:, :masked] = -100  # as many in each row
    module(x, labels=labels).loss.backward()
    assert engine.ledger.num_intents == 1


class OwnLoss(nn.Module):
    """Returns outputs of each sample, and a loss of the whole batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.head, self.how = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB), how

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.table(x))
        losses = per_sample_loss(logits, labels)
        match self.how:
            case "mean":
                loss = losses.mean()
            case "weighted by its classes":
                weights = 1.0 + labels[:, 0]
                loss = (losses * weights).sum() / weights.sum()
            case "largest":
                loss = losses.max()
            case "softmax":
                loss = losses.logsumexp(0)
            case "spread":
                loss = losses.mean() + losses.var()
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("how", ["weighted by its classes", "largest", "softmax", "spread"])
def test_a_loss_of_its_own_in_which_samples_mix_is_refused(how):
    engine, module, _, private = attached(OwnLoss(how), rows())
    (x,) = next(iter(private))
    output = module(x, labels=x)
    with pytest.raises(
        UnsupportedOperation, match=r"such as a loss of the whole batch.*per_sample"
    ):
        output["loss"].backward()
    assert engine.ledger.num_intents == 0


def test_a_mean_of_its_own_is_not():
    engine, module, _, private = attached(OwnLoss("mean"), rows())
    (x,) = next(iter(private))
    module(x, labels=x)["loss"].backward()
    assert engine.ledger.num_intents == 1


def test_a_loss_of_its_own_that_is_not_used_may_be_anything():
    engine, module, _, private = attached(OwnLoss("largest"), rows())
    (x,) = next(iter(private))
    per_sample_loss(module(x, labels=x)["logits"], x).mean().backward()
    assert engine.ledger.num_intents == 1
