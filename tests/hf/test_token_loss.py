"""Which losses of a model are the mean over labels, and are computed from the logits."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("accelerate")

from transformers import BertForTokenClassification, LlamaForCausalLM

import unison
from tests.hf.common import (
    MAX_LENGTH,
    Gradients,
    arguments,
    bert,
    clipped_mean,
    drawn,
    error_of,
    llama,
    rows,
    silent,
    train,
)
from tests.hf.test_trainer import gpt2, t5
from unison.hf import PrivateTrainer
from unison.hf.token_loss import recognised_shift

NUM_CLASSES = 3


def of_tokens(data, num_alike=1):
    """The rows with a class for each token; the first ones have one class only."""
    for index, row in enumerate(data):
        labels = row["input_ids"] % NUM_CLASSES
        row["labels"] = torch.ones_like(labels) if index < num_alike else labels
    return data


def of_one_length(num_rows=20):
    return [each for each in rows(num_rows=200) if len(each["input_ids"]) == MAX_LENGTH][:num_rows]


def shift_of(model, data, *, makes_inputs=False):
    pairs = [{name: torch.stack([each, each]) for name, each in row.items()} for row in data]
    return recognised_shift(model, pairs, makes_inputs=makes_inputs, padding=0)


class Tagger(BertForTokenClassification):
    """A classifier of tokens whose loss a function computes."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        found = super().forward(input_ids, attention_mask=attention_mask)
        if labels is not None:
            found.loss = self.loss(found.logits, labels)
        return found

    def loss(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tagger(change=None, kind=Tagger):
    model = bert(kind, num_labels=NUM_CLASSES, classifier_dropout=0.3)
    if change is not None:
        model.loss = change
    return model


def without_head(model):
    """As a head often begins: its logits are all zero, and any loss of them is the same."""
    torch.nn.init.zeros_(model.classifier.weight)
    torch.nn.init.zeros_(model.classifier.bias)
    return model


def entropy(logits, labels, **settings):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **settings)


def weighted(logits, labels):
    return entropy(logits, labels, weight=torch.tensor([0.1, 1.0, 5.0]))


def ignoring_a_class(logits, labels):
    return entropy(logits, labels, ignore_index=0)


def smoothed(logits, labels):
    return entropy(logits, labels, label_smoothing=0.001)


def of_all_places(logits, labels):
    return entropy(logits, labels, reduction="sum") / labels.numel()


def with_a_term_of_rows(logits, labels):
    return entropy(logits, labels) + logits.mean((1, 2)).var(correction=0)


@pytest.mark.parametrize(
    "loss", [weighted, ignoring_a_class, smoothed, of_all_places, with_a_term_of_rows]
)
def test_other_losses_are_told_apart_though_records_agree(loss):
    data = of_tokens(of_one_length(3), num_alike=3)
    if loss is of_all_places:
        data[1]["labels"][4:] = -100
    assert shift_of(tagger(), data) is False
    assert shift_of(tagger(loss), data) is None
    assert shift_of(without_head(tagger(loss)), data) is None


def test_usual_losses_are_recognised_and_models_left_as_they_are():
    data = of_one_length(3)
    for dtype in (torch.float32, torch.bfloat16):
        assert shift_of(llama(attention_dropout=0.2).to(dtype), data) is True
        assert shift_of(gpt2().to(dtype), data) is True
        assert shift_of(t5().to(dtype), data, makes_inputs=True) is False
        tags = of_tokens(of_one_length(3))
        for model in (tagger(kind=BertForTokenClassification), without_head(tagger())):
            assert shift_of(model.to(dtype), tags) is False
    classes = [each | {"labels": torch.tensor(1)} for each in data]
    assert shift_of(bert(), classes) is None

    model = tagger().eval()
    model.register_buffer("calls", torch.zeros(()))
    model.bert.register_forward_pre_hook(lambda *_: model.calls.add_(1) and None)
    before = torch.get_rng_state()
    assert shift_of(model, tags) is False
    assert torch.equal(torch.get_rng_state(), before)
    assert model.calls == 0
    assert not model.training


class Regularised(LlamaForCausalLM):
    """Adds a term of the outputs to its loss, in training."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        found = super().forward(input_ids, attention_mask=attention_mask, labels=labels)
        if self.training and found.loss is not None:
            found.loss = found.loss + found.logits.square().mean()
        return found


def test_a_term_of_training_alone_is_not_lost(tmp_path):
    data, seen, model = of_one_length(), Gradients(), Regularised(llama().config).train()
    expected = clipped_mean(model, drawn(data, 8), 8)
    trainer = PrivateTrainer(
        model=model,
        args=arguments(tmp_path, max_steps=1),
        train_dataset=data,
        privacy=silent(),
        callbacks=[seen],
    )
    train(trainer)
    assert error_of(seen.found, expected) < 1e-6


@pytest.mark.parametrize("loss", [weighted, ignoring_a_class])
def test_losses_that_divide_by_what_other_rows_change_are_refused(loss, tmp_path):
    trainer = PrivateTrainer(
        model=tagger(loss),
        args=arguments(tmp_path, max_steps=1),
        train_dataset=of_tokens(of_one_length()),
        privacy=silent(),
    )
    with pytest.raises(unison.UnsupportedOperation, match="one loss per sample"):
        train(trainer)
