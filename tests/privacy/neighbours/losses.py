"""Losses: sums of terms that know one row each, and others."""

import functools
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unison
from tests.privacy.neighbours.data import (
    CLASSES,
    FEATURES,
    TOKENS,
    VOCAB,
    LanguageModel,
    OwnLoss,
    Probability,
    TwoHeads,
    case,
    gpt2,
    speller,
    without_bias,
)
from tests.privacy.neighbours.harness import Batch, Case

ce = F.cross_entropy


def rows(outputs: Tensor, y: Tensor) -> Tensor:  # [batch] or [batch, tokens]
    return ce(outputs.transpose(1, 2) if outputs.ndim == 3 else outputs, y, reduction="none")


def row_losses(module: nn.Module, batch: Batch) -> Tensor:
    return rows(module(batch[0]), batch[1])


def spelled(module: nn.Module, batch: Batch) -> Tensor:  # [time, batch, letters], of CTC
    return module(batch[0]).view(-1, 4, CLASSES).log_softmax(2).transpose(0, 1)


def lengths(batch: Batch, length: int) -> Tensor:
    return torch.full((len(batch[0]),), length)


class StraightThrough(torch.autograd.Function):
    """Signs, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class CoupledBackward(torch.autograd.Function):
    """Squares by row; the backward pass takes the batch's centre away."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x).sum(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * g[:, None] * (x - x.mean(0))


@functools.cache
def compiled(is_centred: bool) -> Any:
    def criterion(outputs: Tensor, y: Tensor) -> Tensor:
        return ce(outputs - outputs.mean(0) if is_centred else outputs * 2, y)

    return torch.compile(criterion, backend="eager")


def scripted_plain(outputs: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs * 2.0, y)


def scripted_centred(outputs: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs - outputs.mean(0), y)


@functools.cache
def scripted(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


@functools.cache
def teacher(has_batch_norm: bool) -> nn.Module:
    """A frozen model of the user's that sees the batch, too."""
    with torch.random.fork_rng():
        torch.manual_seed(9)
        layers = [nn.Linear(FEATURES, CLASSES)]
        model = nn.Sequential(*layers, nn.BatchNorm1d(CLASSES, track_running_stats=False))
    return model.requires_grad_(False) if has_batch_norm else layers[0].requires_grad_(False)


def taught(batch: Batch, has_batch_norm: bool, temperature: float = 1.0) -> Tensor:
    model = teacher(has_batch_norm).to(batch[0].dtype)
    outputs = model(batch[0]).detach()
    model.float()
    return F.softmax(outputs / temperature, 1)


def distilled(module: nn.Module, batch: Batch) -> Tensor:
    students = F.log_softmax(module(batch[0]) / 2, 1)
    return F.kl_div(students, taught(batch, False, 2.0), reduction="batchmean") * 4


# ---- sums of per-row terms -----------------------------------------------------------------------


def focal(module: nn.Module, batch: Batch) -> Tensor:
    losses = row_losses(module, batch)
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def padded_row_means(module: nn.Module, batch: Batch) -> Tensor:
    losses, mask = row_losses(module, batch), batch[1] != -100
    return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def with_an_auxiliary_loss(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    return ce(outputs["logits"], batch[1]) + 0.3 * outputs["extra"][0].square().mean()


def in_place(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    outputs[:, 0] = outputs[:, 0] * 2
    outputs.mul_(0.5)
    return ce(outputs, batch[1])


def into_a_new_tensor(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    copied = torch.zeros_like(outputs)
    copied.copy_(outputs)
    return F.mse_loss(copied * 1, batch[1])


def metrics_first(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    loss = ce(outputs, batch[1])
    text = f"{loss.item():.3f} {float(loss.detach()):.2f} {loss} {outputs}"
    accuracy = (outputs.argmax(1) == batch[1]).float().mean().item()
    assert text
    assert accuracy >= 0
    return loss


def numpy_metrics_first(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    assert np.isfinite(outputs.detach().numpy().argmax(1).mean())
    return ce(outputs, batch[1])


def kept_metrics(module: nn.Module, batch: Batch) -> Tensor:
    loss = ce(module(batch[0]), batch[1])
    history = [loss.detach(), loss.item()]
    assert np.isfinite(float(np.mean([float(value) for value in history])))
    return loss


def skip_on_nan(module: nn.Module, batch: Batch) -> Tensor:
    loss = ce(module(batch[0]), batch[1])
    return loss * 0 if torch.isnan(loss) else loss


def autocast(module: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return ce(module(batch[0]) @ torch.eye(CLASSES), batch[1])


class Annealed:
    """A weight that grows with the steps, which are public."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        self.step += 1
        outputs = module(batch[0])
        return ce(outputs, batch[1]) + 0.1 * self.step * outputs.square().mean()


def two_gaussian_heads(module: nn.Module, batch: Batch) -> Tensor:
    mean, scale = module(batch[0])["extra"][0].unbind(1)
    return F.gaussian_nll_loss(mean, batch[1].to(mean.dtype), F.softplus(scale))


def autoencoder(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    scale = outputs["extra"][0]
    return F.mse_loss(outputs["logits"], batch[1]) + 0.01 * (scale.exp() - scale).sum(1).mean()


def by_loop(module: nn.Module, batch: Batch) -> Tensor:
    total = torch.zeros(())
    for each, y in zip(module(batch[0]), batch[1], strict=True):
        total = total + ce(each[None], y[None])
    return total / len(batch[0])


def clamped_rows(module: nn.Module, batch: Batch) -> Tensor:
    losses = -module(batch[0]).log_softmax(1).gather(1, batch[1][:, None])[:, 0]
    return torch.where(batch[1] == 0, 0.5, 1.0).mul(losses.clamp(max=3)).mean()


def vmapped(outputs: Tensor, y: Tensor) -> Tensor:
    return torch.func.vmap(ce)(outputs, y)


def shifted_lm(module: nn.Module, batch: Batch) -> Tensor:
    logits = module(batch[0])[:, :-1]
    return ce(logits.reshape(-1, VOCAB), batch[1][:, 1:].reshape(-1))


def own_labels_per_row(module: nn.Module, batch: Batch) -> Tensor:
    return unison.per_sample_loss(module(batch[0]).logits[:, :-1], batch[1][:, 1:]).mean()


def mixup_within_a_row(module: nn.Module, batch: Batch) -> Tensor:
    return ce(module(0.7 * batch[0] + 0.3 * batch[0].flip(1)), batch[1])


def noise_on_inputs(module: nn.Module, batch: Batch) -> Tensor:
    return ce(module(batch[0] + 0.1 * torch.randn_like(batch[0])), batch[1])


LEGITIMATE: dict[str, Case] = {
    "cross entropy": case(lambda m, b: ce(m(b[0]), b[1]), steps=3),
    "label smoothing": case(
        lambda m, b: nn.CrossEntropyLoss(label_smoothing=0.1)(m(b[0]), b[1]), steps=2
    ),
    "sum over a public number": case(
        lambda m, b: ce(m(b[0]), b[1], reduction="sum") / 4,
        steps=2,
        settings={"loss_reduction": "sum"},
    ),
    "binary cross entropy with pos_weight": case(
        lambda m, b: F.binary_cross_entropy_with_logits(
            m(b[0]), b[1], pos_weight=torch.tensor([1.0, 2.0, 3.0])
        ),
        "bits",
    ),
    "binary cross entropy of probabilities": case(
        lambda m, b: F.binary_cross_entropy(m(b[0]), b[1]), "bit", Probability
    ),
    "mse": case(lambda m, b: F.mse_loss(m(b[0]), b[1]), "real", steps=2),
    "huber and l1": case(
        lambda m, b: F.huber_loss(m(b[0]), b[1]) + 0.1 * F.l1_loss(m(b[0]), b[1]), "real"
    ),
    "kl_div batchmean": case(
        lambda m, b: F.kl_div(m(b[0]).log_softmax(1), b[1].softmax(1), reduction="batchmean"),
        "real",
    ),
    "ctc of one length": case(
        lambda m, b: F.ctc_loss(spelled(m, b), b[1], lengths(b, 4), lengths(b, 2)), "seq", speller
    ),
    "ctc by rows": case(
        lambda m, b: F.ctc_loss(spelled(m, b), b[1], lengths(b, 4), b[2], reduction="none").mean(),
        "seq",
        speller,
    ),
    "triplet of three calls": case(
        lambda m, b: F.triplet_margin_loss(m(b[0]), m(b[1]), m(b[2])), "three"
    ),
    "cosine of two calls": case(
        lambda m, b: 1 - F.cosine_similarity(m(b[0]), m(b[1])).mean(), "two"
    ),
    "focal": case(focal),
    "distillation": case(distilled, "near class"),
    "flattened language model without padding": case(shifted_lm, "lm", LanguageModel, steps=2),
    "padded language model, mean of rows": case(
        padded_row_means, "pad", LanguageModel, max_grad_norm=1.0
    ),
    "padded language model, public length": case(
        lambda m, b: row_losses(m, b).sum() / (len(b[0]) * TOKENS),
        "pad",
        LanguageModel,
        max_grad_norm=1.0,
    ),
    "per_sample_loss": case(
        lambda m, b: unison.per_sample_loss(m(b[0]), b[1]).mean(), "pad", LanguageModel, steps=2
    ),
    "weights of rows": case(lambda m, b: (row_losses(m, b) * b[2]).mean(), "weight"),
    "gather by arange": case(
        lambda m, b: -m(b[0]).log_softmax(1)[torch.arange(len(b[0])), b[1]].mean()
    ),
    "dict and tuple with an auxiliary loss": case(with_an_auxiliary_loss, model=TwoHeads),
    "straight-through": case(
        lambda m, b: (StraightThrough.apply(m(b[0])) - F.one_hot(b[1], CLASSES)).square().mean()
    ),
    "in place and views": case(in_place),
    "into a new tensor": case(into_a_new_tensor, "real"),
    "metrics first": case(metrics_first, steps=2),
    "metrics by numpy first": case(numpy_metrics_first, steps=2),
    "metrics that are kept": case(kept_metrics, steps=2),
    "skip on nan": case(skip_on_nan),
    "autocast": case(autocast, has_oracle=False, at_one_shape=True),
    "dropout of outputs": case(
        lambda m, b: ce(F.dropout(m(b[0]), 0.3), b[1]), has_oracle=False, at_one_shape=True
    ),
    "annealed weight": case(Annealed, steps=3, has_oracle=False),
    "loss inside the module, even": case(lambda m, b: m(b[0], b[1])[1], "lm", OwnLoss),
    "compiled criterion": case(lambda m, b: compiled(False)(m(b[0]), b[1])),
    "gaussian of two heads": case(two_gaussian_heads, "near class", TwoHeads),
    "multi-margin": case(lambda m, b: F.multi_margin_loss(m(b[0]), b[1])),
    "scaled by a constant": case(lambda m, b: ce(m(b[0]), b[1]) * torch.tensor(65536.0)),
    "vmap": case(lambda m, b: vmapped(m(b[0]), b[1]).mean(), may_be_refused=True),
    "jit.script": case(lambda m, b: scripted(scripted_plain)(m(b[0]), b[1]), may_be_refused=True),
    "checkpointed loss": case(
        lambda m, b: checkpoint(
            lambda outputs, y: ce(outputs * 2, y), m(b[0]), b[1], use_reentrant=False
        )
    ),
    "loop over rows": case(by_loop),
    "autoencoder": case(autoencoder, "real", TwoHeads),
    "gpt2 with labels, no padding": case(lambda m, b: m(b[0], labels=b[1]).loss, "lm", gpt2),
    "gpt2 with per_sample_loss": case(own_labels_per_row, "pad", gpt2),
    "clamped by row": case(clamped_rows),
    "mixed within a row": case(mixup_within_a_row),
    "noise on inputs": case(noise_on_inputs, "near class", has_oracle=False, at_one_shape=True),
    "mean of rows by hand": case(lambda m, b: row_losses(m, b).sum() / len(b[0])),
}

# ---- coupled in the loss -------------------------------------------------------------------------


def centred(module: nn.Module, batch: Batch, is_detached: bool = False) -> Tensor:
    outputs = module(batch[0])
    centre = outputs.mean(0)
    return ((outputs - (centre.detach() if is_detached else centre)) ** 2).sum(1).mean()


def centred_without_gradient(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    with torch.no_grad():
        centre = outputs.mean(0)
    return (outputs - centre).square().sum(1).mean()


def standardised_outputs(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    return ce((outputs - outputs.mean(0)) / (outputs.var(0) + 1e-5).sqrt(), batch[1])


def trimmed(module: nn.Module, batch: Batch) -> Tensor:
    losses = row_losses(module, batch)
    return (losses * (losses < losses.detach().quantile(0.5))).mean()


def trimmed_by_sort(module: nn.Module, batch: Batch) -> Tensor:
    losses = row_losses(module, batch).sort().values
    return losses[len(losses) // 4 :][:6].sum() / len(losses)


def info_nce(module: nn.Module, batch: Batch) -> Tensor:
    first, second = (F.normalize(module(x), dim=1) for x in batch)
    return ce(first @ second.T / 0.1, torch.arange(len(first)))


def supervised_contrastive(module: nn.Module, batch: Batch) -> Tensor:
    z = module(batch[0])
    return (-(z @ z.T).log_softmax(1) * (batch[1][:, None] == batch[1])).mean()


def batch_hard(module: nn.Module, batch: Batch) -> Tensor:
    distances = torch.cdist(module(batch[0]), module(batch[1]))
    return (distances.max(1).values - distances.min(1).values).relu().mean()


def barlow_twins(module: nn.Module, batch: Batch) -> Tensor:
    first, second = module(batch[0]), module(batch[1])
    return (first.T @ second / len(first) - torch.eye(CLASSES)).square().sum()


def off_diagonal_covariance(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    covariance = torch.cov(outputs.T)
    return ce(outputs, batch[1]) + (covariance - covariance.diag().diag()).square().sum()


def focal_by_sum(module: nn.Module, batch: Batch) -> Tensor:
    losses = row_losses(module, batch)
    weights = (1 - (-losses).exp()).detach() ** 2
    return (weights * losses).sum() / weights.sum()


def weighted_by_softmax(module: nn.Module, batch: Batch) -> Tensor:
    losses = row_losses(module, batch)
    return (losses.detach().softmax(0) * losses).sum()


def by_largest_output(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    return ce(outputs / outputs.detach().abs().max(), batch[1])


def over_itself(module: nn.Module, batch: Batch) -> Tensor:
    loss = ce(module(batch[0]), batch[1])
    return loss / loss.detach()


def times_its_item(module: nn.Module, batch: Batch) -> Tensor:
    loss = ce(module(batch[0]), batch[1])
    return loss * loss.item()


def over_its_float(module: nn.Module, batch: Batch) -> Tensor:
    loss = ce(module(batch[0]), batch[1])
    return loss / float(loss.detach())


def over_its_number_by_format(module: nn.Module, batch: Batch) -> Tensor:
    loss = ce(module(batch[0]), batch[1])
    return loss / float(f"{loss.item():.6f}")


def branch(module: nn.Module, batch: Batch) -> Tensor:
    loss = ce(module(batch[0]), batch[1])
    return loss * 0.01 if loss > 2.0 else loss


def branch_on_item(module: nn.Module, batch: Batch) -> Tensor:
    loss = ce(module(batch[0]), batch[1])
    return loss * 0.01 if loss.item() > 2.0 else loss


def branch_on_float(module: nn.Module, batch: Batch) -> Tensor:
    loss = ce(module(batch[0]), batch[1])
    return loss * 0.01 if float(loss.detach()) > 2.0 else loss


def branch_on_any(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    loss = ce(outputs, batch[1])
    return loss * 0.01 if (outputs.abs() > 10).any() else loss


def chosen_by_where(module: nn.Module, batch: Batch) -> Tensor:
    loss = ce(module(batch[0]), batch[1])
    return torch.where(loss > 2.0, loss * 0.01, loss)


def advantages(module: nn.Module, batch: Batch) -> Tensor:
    normalised = (batch[2] - batch[2].mean()) / batch[2].std()
    return (module(batch[0]).log_softmax(1)[:, 0] * normalised).mean()


def mixed_outputs(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    return F.mse_loss(outputs + 0.3 * outputs[torch.randperm(len(outputs))], batch[1])


def rolled_outputs(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    return ce(outputs + outputs.roll(1, 0).detach(), batch[1])


def gradient_penalty(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    (found,) = torch.autograd.grad(outputs.square().mean() ** 2, outputs, create_graph=True)
    return ce(outputs, batch[1]) + 0.1 * found.square().sum()


def shared_softmax(module: nn.Module, batch: Batch) -> Tensor:
    return -module(batch[0]).log_softmax(0)[:, 0].mean()


def matched_moments(module: nn.Module, batch: Batch) -> Tensor:
    return ce(module(batch[0]), batch[1]) + module(batch[0]).mean(0).square().sum()


def entropy_of_the_mean(module: nn.Module, batch: Batch) -> Tensor:
    shares = module(batch[0]).softmax(1).mean(0)
    return (shares * shares.log()).sum()


def pairs_undeclared(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    return -F.logsigmoid(outputs[1::2].sum(1) - outputs[0::2].sum(1)).mean()


def pairs_with_all_rejected(module: nn.Module, batch: Batch) -> Tensor:
    outputs = module(batch[0])
    chosen, rejected = outputs[0::2].sum(1), outputs[1::2].sum(1)
    return -F.logsigmoid(chosen - rejected[: len(chosen)].sum()).mean()


def norm_of_rows(module: nn.Module, batch: Batch) -> Tensor:
    return row_losses(module, batch).norm()


def soft_maximum(module: nn.Module, batch: Batch) -> Tensor:
    return row_losses(module, batch).logsumexp(0)


def product_of_rows(module: nn.Module, batch: Batch) -> Tensor:
    return (1 + row_losses(module, batch).tanh()).prod()


def cumulative(module: nn.Module, batch: Batch) -> Tensor:
    return module(batch[0]).cumsum(0).square().sum(1).mean()


LOSSES: dict[str, Case] = {
    "centre of the batch": case(centred),
    "detached centre": case(functools.partial(centred, is_detached=True)),
    "centre under no_grad": case(centred_without_gradient),
    "standardised outputs": case(standardised_outputs),
    "class weights": case(
        lambda m, b: ce(m(b[0]), b[1], weight=torch.tensor([1.0, 1.0, 0.05])), "near class"
    ),
    "online hard examples": case(lambda m, b: row_losses(m, b).topk(4).values.mean()),
    "median": case(
        lambda m, b: row_losses(m, b).median(),
        "lower halves",
        without_bias,
        settings={"loss_reduction": "sum"},
    ),
    "trimmed by a quantile": case(trimmed, "halves", without_bias),
    "trimmed by sorting": case(trimmed_by_sort, "halves", without_bias),
    "InfoNCE of two calls": case(info_nce, "two"),
    "supervised contrastive": case(supervised_contrastive),
    "batch-hard triplet": case(batch_hard, "two"),
    "scaled by the largest output": case(by_largest_output),
    "over its own value": case(over_itself, max_grad_norm=1.0),
    "times its item": case(times_its_item, max_grad_norm=3.0),
    "over its float": case(over_its_float, max_grad_norm=1.0),
    "over its printed value": case(over_its_number_by_format, max_grad_norm=1.0),
    "square of the mean": case(lambda m, b: ce(m(b[0]), b[1]) ** 2, max_grad_norm=3.0),
    "RMSE": case(lambda m, b: F.mse_loss(m(b[0]), b[1]).sqrt(), "real"),
    "log of mse": case(lambda m, b: F.mse_loss(m(b[0]), b[1]).log(), "real"),
    "clamped mean": case(lambda m, b: ce(m(b[0]), b[1]).clamp(max=1.5)),
    "branch on the loss": case(branch),
    "branch on its item": case(branch_on_item),
    "branch on its float": case(branch_on_float),
    "branch on any()": case(branch_on_any),
    "where on the loss": case(chosen_by_where),
    "focal over its weights": case(focal_by_sum, max_grad_norm=1.0),
    "softmax of losses": case(weighted_by_softmax, settings={"loss_reduction": "sum"}),
    "decorrelation": case(barlow_twins, "two"),
    "covariance": case(off_diagonal_covariance),
    "mixed outputs": case(mixed_outputs, "real"),
    "rolled outputs": case(rolled_outputs),
    "batch norm in the loss": case(
        lambda m, b: ce(F.batch_norm(m(b[0]), None, None, training=True), b[1])
    ),
    "teacher with batch norm": case(
        lambda m, b: F.kl_div(m(b[0]).log_softmax(1), taught(b, True), reduction="batchmean"),
    ),
    "coupled backward": case(lambda m, b: CoupledBackward.apply(m(b[0])).mean()),
    "pairs not declared": case(
        pairs_undeclared, "opposite", without_bias, max_grad_norm=3.5, at_one_shape=True
    ),
    "pairs with all rejected rows": case(pairs_with_all_rejected),
    "over the batch size twice": case(
        lambda m, b: ce(m(b[0]), b[1]) / len(b[0]),
        "opposite",
        without_bias,
        max_grad_norm=0.07,
        steps=2,
    ),
    "largest of a list": case(
        lambda m, b: max(row_losses(m, b)), settings={"loss_reduction": "sum"}
    ),
    "loss inside the module, padded": case(
        lambda m, b: m(b[0], b[1])[1], "pad", OwnLoss, max_grad_norm=1.0
    ),
    "compiled criterion, centred": case(lambda m, b: compiled(True)(m(b[0]), b[1])),
    "mixed inputs": case(lambda m, b: ce(m(0.7 * b[0] + 0.3 * b[0].flip(0)), b[1])),
    "inputs over their largest": case(lambda m, b: ce(m(b[0] / b[0].abs().max()), b[1])),
    "gradient penalty over the batch": case(gradient_penalty),
    "softmax over the batch": case(shared_softmax),
    "mean output": case(matched_moments),
    "entropy of the mean": case(entropy_of_the_mean),
    "norm of losses": case(norm_of_rows, settings={"loss_reduction": "sum"}),
    "soft maximum of losses": case(soft_maximum, settings={"loss_reduction": "sum"}),
    "product of losses": case(
        product_of_rows, max_grad_norm=300.0, settings={"loss_reduction": "sum"}
    ),
    "cumulative sum of outputs": case(cumulative),
    "jit.script, centred": case(lambda m, b: scripted(scripted_centred)(m(b[0]), b[1])),
}

# ---- coupled by labels and weights ---------------------------------------------------------------


def per_token(module: nn.Module, batch: Batch, count: Any) -> Tensor:
    return row_losses(module, batch).sum() / count(batch[1])


def masked_mean(module: nn.Module, batch: Batch) -> Tensor:
    return row_losses(module, batch)[batch[1] != -100].mean()


def masked_over_length(module: nn.Module, batch: Batch) -> Tensor:
    losses = row_losses(module, batch)[batch[1] != -100]
    return losses.sum() / len(losses)


def masked_over_numel(module: nn.Module, batch: Batch) -> Tensor:
    losses = torch.masked_select(row_losses(module, batch), batch[1] != -100)
    return losses.sum() / losses.numel()


def counted_classes(module: nn.Module, batch: Batch) -> Tensor:
    return (row_losses(module, batch) / batch[1].bincount(minlength=CLASSES)[batch[1]]).mean()


def balanced_weights(module: nn.Module, batch: Batch) -> Tensor:
    counts = F.one_hot(batch[1], CLASSES).sum(0)
    weights = torch.where(counts > 0, 1.0 / counts, 0.0)
    return (row_losses(module, batch) * (weights / weights.sum())[batch[1]]).mean()


def numpy_weights(module: nn.Module, batch: Batch) -> Tensor:
    y = batch[1].numpy()
    weights = (y + 1.0) / (1 + 20 * (y == 0).sum())
    return (row_losses(module, batch) * torch.from_numpy(weights).float()).mean()


def branch_on_labels(module: nn.Module, batch: Batch) -> Tensor:
    return ce(module(batch[0]), batch[1]) * (0.05 if (batch[1] == 0).sum() > 0 else 1.0)


def counted_by_tolist(module: nn.Module, batch: Batch) -> Tensor:
    ones = sum(label == 0 for label in batch[1].tolist())
    return ce(module(batch[0]), batch[1], reduction="sum") / (1 + 20 * ones)


def counted_by_set(module: nn.Module, batch: Batch) -> Tensor:
    return ce(module(batch[0]), batch[1]) / 10.0 ** len(set(batch[1].tolist()))


def counted_by_unique(module: nn.Module, batch: Batch) -> Tensor:
    return ce(module(batch[0]), batch[1]) / 10.0 ** len(batch[1].unique())


def vmapped_over_the_largest(module: nn.Module, batch: Batch) -> Tensor:
    return (vmapped(module(batch[0]), batch[1]) * batch[2] / batch[2].max()).mean()


SUMMED = {"settings": {"loss_reduction": "sum"}}

LABELS: dict[str, Case] = {
    "flat mean over padded rows": case(
        lambda m, b: ce(m(b[0]).view(-1, VOCAB), b[1].view(-1)),
        "pad",
        LanguageModel,
        max_grad_norm=1.0,
    ),
    "flat mean, first batch even": case(
        lambda m, b: ce(m(b[0]).view(-1, VOCAB), b[1].view(-1)),
        "first even",
        LanguageModel,
        max_grad_norm=1.0,
        steps=2,
    ),
    "gpt2 with labels, padded": case(lambda m, b: m(b[0], labels=b[1]).loss, "pad", gpt2),
    "sum over tokens": case(
        lambda m, b: per_token(m, b, lambda y: (y != -100).sum()),
        "pad",
        LanguageModel,
        max_grad_norm=1.0,
    ),
    "sum over tokens by item": case(
        lambda m, b: per_token(m, b, lambda y: (y != -100).sum().item()),
        "pad",
        LanguageModel,
        max_grad_norm=1.0,
    ),
    "sum over tokens by int": case(
        lambda m, b: per_token(m, b, lambda y: max(1, int((y != -100).sum()))),
        "pad",
        LanguageModel,
        max_grad_norm=1.0,
        steps=2,
    ),
    "sum over tokens by numpy": case(
        lambda m, b: per_token(m, b, lambda y: torch.tensor(float((y.numpy() != -100).sum()))),
        "pad",
        LanguageModel,
        max_grad_norm=1.0,
        steps=2,
    ),
    "sum over tokens by tolist": case(
        lambda m, b: per_token(m, b, lambda y: sum(i != -100 for row in y.tolist() for i in row)),
        "pad",
        LanguageModel,
        max_grad_norm=1.0,
    ),
    "sum over tokens, first batch even": case(
        lambda m, b: per_token(m, b, lambda y: (y != -100).sum().item()),
        "first even",
        LanguageModel,
        max_grad_norm=1.0,
        steps=2,
    ),
    "sum over tokens by count_nonzero": case(
        lambda m, b: per_token(m, b, lambda y: torch.count_nonzero(y + 100)),
        "pad",
        LanguageModel,
        max_grad_norm=1.0,
    ),
    "selected by mask, mean": case(masked_mean, "pad", LanguageModel, max_grad_norm=1.0),
    "selected by mask, over len": case(masked_over_length, "pad", LanguageModel, max_grad_norm=1.0),
    "masked_select, over numel": case(masked_over_numel, "pad", LanguageModel, max_grad_norm=1.0),
    "counts of classes": case(counted_classes, "twins", without_bias, max_grad_norm=0.9),
    "weights from the batch's labels": case(balanced_weights, max_grad_norm=0.1),
    "weights over their sum": case(
        lambda m, b: (row_losses(m, b) * b[2]).sum() / b[2].sum(), "weight", **SUMMED
    ),
    "weights over their largest": case(
        lambda m, b: (row_losses(m, b) * (b[2] / b[2].max())).mean(), "weight"
    ),
    "softmax of weights": case(
        lambda m, b: (row_losses(m, b) * b[2].softmax(0)).sum(), "weight", **SUMMED
    ),
    "rank of weights": case(
        lambda m, b: (row_losses(m, b) * b[2].argsort().argsort()).mean(),
        "weight",
        max_grad_norm=6.0,
    ),
    "normalised advantages": case(advantages, "weight"),
    "weights by numpy": case(numpy_weights, steps=2),
    "branch on labels": case(branch_on_labels),
    "labels by tolist": case(counted_by_tolist, steps=3, **SUMMED),
    "labels by a set": case(counted_by_set, max_grad_norm=0.005),
    "labels by unique": case(counted_by_unique, max_grad_norm=0.005),
    "vmap over the largest weight": case(vmapped_over_the_largest, "weight"),
}
