"""Lightning's automatic optimisation with private steps."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

pytest.importorskip("lightning")

from dp_accounting import rdp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger

import unison
from tests.harness import oracle
from tests.privacy.accounts import sampled, times
from tests.privacy.common import NUM_RECORDS, attach, data, losses, make_model
from unison.lightning import PrivacyCallback
from unison.privacy.mechanism import sensitivity_factor

# Lightning says what machines and settings it would like better.
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Experiment logs directory"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),  # a run of no steps
    pytest.mark.filterwarnings("ignore:noise and sampling come from a seed"),
    pytest.mark.filterwarnings("ignore:.*is shown and not written to loggers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
BATCH, SEED = 12, 3
QUIET = {
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Net(LightningModule):
    """Calls its net itself, or by way of `forward`."""

    def __init__(self, calls_itself=False):
        super().__init__()
        self.net, self.calls_itself = make_model(), calls_itself
        self.num_calls, self.grads = 0, None

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        self.num_calls += 1
        x, y = batch
        loss = cross_entropy(self(x) if self.calls_itself else self.net(x), y)
        self.log("train_loss", loss, logger=True)
        self.log_dict({"train_other": loss})
        return loss

    def on_before_optimizer_step(self, optimizer):
        if self.grads is None and self.net[0].weight.grad is not None:
            self.grads = {name: each.grad.clone() for name, each in self.net.named_parameters()}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def privacy(**settings):
    given = {"delta": 1e-5, "max_grad_norm": 0.5, "accountant": "rdp", "secure_noise": False}
    if "epsilon" not in settings:
        given["noise_multiplier"] = 1.0
    return unison.Privacy(**given | settings)


def fit(
    folder,
    model,
    applied=None,
    *,
    passes=None,
    checkpoint=None,
    batch=BATCH,
    rows=None,
    others=(),
    **settings,
):
    callback = PrivacyCallback(
        applied or privacy(),
        ledger=folder / "ledger.jsonl",
        max_physical_batch_size=passes,
        seed=SEED,
    )
    trainer = Trainer(
        callbacks=[callback, *others],
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        **QUIET | {"max_steps": 4, "devices": 1} | settings,
    )
    loader = DataLoader(rows or TensorDataset(*data()), batch_size=batch, shuffle=True)
    trainer.fit(model, train_dataloaders=loader, ckpt_path=checkpoint, weights_only=True)
    return trainer


def counts(folder):
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    return kinds.count("intent"), kinds.count("commit")


@pytest.mark.parametrize("calls_itself", [False, True])
def test_steps_are_those_of_a_private_loop(calls_itself, tmp_path):
    model = Net(calls_itself)
    trainer = fit(tmp_path, model, passes=5)
    assert trainer.global_step == 4
    assert counts(tmp_path) == (4, 4)
    assert model.num_calls > 4  # passes, one closure for each step

    engine, module, optimizer, private = attach(seed=SEED, max_physical_batch_size=5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for x, y in private:
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()
        if private.current.is_last:
            schedule.step()
            if private.next_step == 4:
                break
    engine.detach()
    for mine, plain in zip(model.net.parameters(), module.parameters(), strict=True):
        assert torch.equal(mine, plain)
    assert "training_step" not in vars(model)

    text = (tmp_path / "metrics.csv").read_text()
    assert "train_" not in text
    assert "noise_multiplier" in text
    assert len(text.splitlines()) == 1 + 4


def test_the_first_step_is_the_clipped_sum_of_single_rows(tmp_path):
    silent = privacy()
    object.__setattr__(silent, "noise_multiplier", 0.0)
    model = Net()
    fit(tmp_path, model, silent, passes=5, max_steps=1)
    engine, *_, private = attach(seed=SEED)
    expected = oracle.clipped_sum(make_model(), losses, tuple(next(iter(private))), 0.5)
    engine.detach()
    for name, each in model.grads.items():
        torch.testing.assert_close(each.double() * BATCH, expected[name], rtol=1e-6, atol=1e-7)


def test_epsilon_is_the_accountants_and_training_ends_at_it(tmp_path):
    settings = {"max_steps": -1, "max_epochs": 2, "batch": NUM_RECORDS}
    model = Net()
    trainer = fit(tmp_path, model, privacy(epsilon=2.0), **settings)
    sigma = float(trainer.callback_metrics["noise_multiplier"])
    z = sigma / sensitivity_factor(sigma, sum(each.numel() for each in model.parameters()))
    expected = rdp.RdpAccountant().compose(times(sampled(1.0, z), 2)).get_epsilon(1e-5)
    assert float(trainer.callback_metrics["epsilon_if_secret"]) == pytest.approx(expected, rel=1e-5)
    assert counts(tmp_path) == (2, 2)
    # The ledger is that of the same rows, and is spent.
    trainer = fit(tmp_path, Net(), privacy(epsilon=2.0), **settings)
    assert trainer.global_step == 0
    assert counts(tmp_path) == (2, 2)


class Parts(Net):
    """Two parts that are called one by one, past the module that holds them."""

    def __init__(self):
        super().__init__()
        self.net, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.head(self.net(batch[0])), batch[1])


class Short(Net):
    """Takes no number of the batch, and looks at the batch before."""

    def on_train_batch_start(self, batch, batch_idx):
        self.seen = len(batch[0])

    def training_step(self, batch):
        assert len(batch[0]) == self.seen
        return {"loss": super().training_step(batch, 0)}


def test_hooks_are_called_as_they_are_written(tmp_path):
    assert fit(tmp_path, Short(), max_steps=1).global_step == 1


class Hooked(Net):
    """Logs all over, and changes batches on their way."""

    def __init__(self):
        super().__init__()
        self.sizes, self.batches = [], []

    def on_before_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return 3 * x, y

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x - 1, y

    def training_step(self, batch, batch_idx):
        assert batch[0].dtype == torch.float64
        self.sizes.append(len(batch[0]))
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def on_before_backward(self, loss):
        self.log("backward", loss)

    def on_train_batch_end(self, outputs: Any, batch, batch_idx):
        self.batches.append(len(batch[0]))
        self.log("end", outputs["loss"])
        weight = next(self.net.parameters())
        self.log("norm", unison.public(weight.detach().norm()))

    def on_train_epoch_end(self):
        self.log("epoch", self.trainer.callback_metrics["end"])

    def validation_step(self, batch, batch_idx):
        self.log("held_out", cross_entropy(self.net(batch[0]), batch[1]))

    def val_dataloader(self):
        return DataLoader(TensorDataset(*data()), batch_size=12)


def test_hooks_find_the_batch_and_loggers_nothing_of_it(tmp_path):
    model, silent = Hooked(), privacy()
    object.__setattr__(silent, "noise_multiplier", 0.0)
    with pytest.warns(UserWarning, match="'train_loss', and what else is logged") as told:
        trainer = fit(
            tmp_path,
            model,
            silent,
            passes=5,
            max_steps=-1,
            max_epochs=1,
            precision="64-true",
            num_sanity_val_steps=0,
        )
    assert sum("is shown and not" in str(each.message) for each in told) == 1
    written = (tmp_path / "metrics.csv").read_text().splitlines()[0]
    assert sorted(written.split(",")) == [
        *("epoch", "epsilon_if_secret", "held_out", "noise_multiplier", "norm", "step")
    ]
    assert {"end", "mean_epoch", "backward"} <= trainer.callback_metrics.keys()
    assert "log" not in vars(model)
    assert len(model.batches) == trainer.global_step == counts(tmp_path)[1]
    assert model.batches[0] == model.sizes[0] <= 5 < BATCH

    engine, *_, private = attach(seed=SEED)
    x, y = next(iter(private))
    engine.detach()
    expected = oracle.clipped_sum(make_model(), losses, (3 * x - 1, y), 0.5)
    for name, each in model.grads.items():
        torch.testing.assert_close(each * BATCH, expected[name], rtol=1e-6, atol=1e-7)


class Skips(Net):
    def training_step(self, batch, batch_idx):
        return None


class Remembers(Net):
    """Holds a mean of losses beside its net, for checkpoints."""

    running: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.running.mul_(0.9).add_(loss.detach())
        return loss


class SecondOrder(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Validates(Net):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("loss", cross_entropy(self.net(batch[0]), batch[1]))


def test_rows_that_are_trained_on_are_not_validated_on(tmp_path):
    trained = TensorDataset(*data())
    loaders = [DataLoader(TensorDataset(*data())), DataLoader(Subset(trained, [0]))]
    model = Validates()
    model.val_dataloader = lambda: loaders
    with pytest.raises(unison.BadInput, match="rows that are trained on"):
        fit(tmp_path, model, rows=trained)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_checkpoint_that_is_saved_after_the_run_goes_on(tmp_path):
    whole, parts, again = Net(), Net(), Net()
    fit(tmp_path / "whole", whole)
    trainer = fit(tmp_path / "parts", parts, max_steps=2)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    fit(tmp_path / "parts", again, checkpoint=tmp_path / "saved.ckpt")
    for mine, theirs in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_loop_that_is_not_private_gets_no_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it saves the model meanwhile
    model = Net()
    model.lr = 0.1
    with pytest.raises(unison.UnsupportedOperation, match="LearningRateFinder"):
        fit(tmp_path, model, others=[LearningRateFinder(num_training_steps=3)])
    assert model.num_calls == 0


def test_what_cannot_work_is_refused_before_anything_is_spent(tmp_path):
    with pytest.raises(unison.UnsupportedOperation, match="larger batch size"):
        fit(tmp_path, Net(), accumulate_grad_batches=2)
    with pytest.raises(unison.UnsupportedOperation, match="a gradient reached"):
        fit(tmp_path, Parts())
    with pytest.raises(unison.UnsupportedOperation, match="returned no loss"):
        fit(tmp_path, Skips())
    with pytest.raises(unison.BadInput, match="monitors 'train_loss'"):
        fit(tmp_path, Net(), others=[EarlyStopping("train_loss")])
    with pytest.raises(unison.UnsupportedOperation, match="larger batch size"):
        fit(tmp_path, Net(), others=[GradientAccumulationScheduler({1: 2})])
    named = ModelCheckpoint(tmp_path / "saved", filename="{epoch}-{train_loss:.3f}")
    with pytest.raises(unison.BadInput, match="'train_loss' into the names of files"):
        fit(tmp_path, Net(), others=[named], enable_checkpointing=True)
    with pytest.raises(unison.UnsupportedOperation, match="'running', which is saved"):
        fit(tmp_path, Remembers())
    with pytest.raises(unison.UnsupportedOperation, match=r"LBFGS\.step needs a closure"):
        fit(tmp_path, SecondOrder())
    private = PrivacyCallback(privacy(), ledger=tmp_path / "none")
    trainer = Trainer(callbacks=[private], logger=False, **QUIET)
    loaders = {"a": DataLoader(TensorDataset(*data()))}
    with pytest.raises(unison.BadInput, match="one DataLoader with a batch_size, found dict"):
        trainer.fit(Net(), train_dataloaders=loaders)
    assert counts(tmp_path) == (0, 0)
