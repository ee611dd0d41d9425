"""The loss of language models and of classifiers of tokens: the mean over labels.

Models of transformers divide by the number of labels in the batch, which other rows change, so that
`PrivateTrainer` computes the mean over rows of each row's own mean from the logits. It may do so
only if the model's loss is that mean and nothing else: what a model adds to it (a regulariser, the
loss of another head), or counts otherwise (weights of classes, another label to ignore), would be
lost without a word. No class tells, so the model is tried.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unison.capture import state_kept
from unison.models import per_sample_loss
from unison.torch_internals import FunctionMode

IGNORED = -100  # a label that losses leave out
_MOST_TRIED = 4  # records


def token_losses(
    logits: Tensor,  # [rows, tokens, classes]
    labels: Tensor,  # [rows, labels]
    *,
    is_shifted: bool,
) -> Tensor:  # [rows]
    """Return each row's mean loss over its own labels; one token predicts the next if shifted."""
    return per_sample_loss(*_aligned(logits, labels, is_shifted=is_shifted))


def logits_of(model: nn.Module, inputs: Mapping[str, Any], *, makes_inputs: bool) -> Any:
    """Run a model for its logits alone, with no loss if it can do without.

    Args:
        model: The model.
        inputs: What it takes, with labels.
        makes_inputs: Whether it makes its decoder's inputs of the labels.

    Returns:
        The logits, if there are any, and all outputs.
    """
    if not makes_inputs:
        inputs = {name: each for name, each in inputs.items() if name != "labels"}
    outputs = model(**inputs)
    return _logits(outputs, has_loss=makes_inputs), outputs


def recognised_shift(
    model: nn.Module,
    pairs: Iterable[dict[str, Any]],
    *,
    makes_inputs: bool,
    padding: int,
) -> bool | None:
    """Find whether a model's loss is the mean over labels, each of its token or of the next.

    It is tried as it trains, in training mode, on rows with their own labels and with made-up ones:
    one record may have just one class, or none of those that the model ignores. Noise in the logits
    tells losses apart where a head begins with zeros. The model is left as it was.

    Args:
        model: The model.
        pairs: Batches of one record that is there twice: with one row alone, a term that compares
            rows would not show. They may be made as they are asked for, and draw random numbers.
        makes_inputs: As in `logits_of`.
        padding: The token that rows are padded with, and that a loss may ignore.

    Returns:
        Whether one token predicts the next; None if the loss is another one.
    """
    candidates, classes, num_classes = [not makes_inputs, makes_inputs], iter(()), 0
    was_training = model.training
    try:
        model.train()
        with state_kept(model) as state, _quiet_passes():
            tried = list(pairs)
            for labels in (pair.get("labels") for pair in tried):
                if not torch.is_tensor(labels) or labels.ndim != 2 or labels.is_floating_point():
                    return None
            # Where there are none, the model may not take them: a loss may ignore another label.
            has_ignored = any((pair["labels"] == IGNORED).any() for pair in tried)
            tried = [pair for pair in tried if (pair["labels"][:, 1:] != IGNORED).any()]
            tried = tried[:_MOST_TRIED]
            # The first one as it is, too, which tells how many classes there are.
            for number, pair in enumerate(tried[:1] + tried):
                labels = pair["labels"].clone()
                if num_classes:  # the first label is no token's next
                    _make_up(labels[1, 1:], classes, has_ignored=has_ignored)
                pair = {**pair, "labels": labels}
                with FunctionMode(partial(_with_noise, num_classes)):
                    state.restore()
                    state.restore_generators(number)  # the same noise and dropout for both passes
                    outputs = model(**pair)
                    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
                    logits = _logits(outputs, has_loss=True)
                    if logits is not None:  # Liger's models leave them out beside a loss
                        candidates = _agreeing(candidates, loss, logits, labels)
                    if not candidates:
                        return None
                    state.restore()
                    state.restore_generators(number)
                    logits, _ = logits_of(model, pair, makes_inputs=makes_inputs)
                candidates = _agreeing(candidates, loss, logits, labels)
                if not candidates:
                    return None
                if not num_classes:
                    num_classes = logits.shape[-1]
                    # The padding, then classes from both ends: there are the tokens that a loss
                    # may ignore.
                    last, both = num_classes - 1, range(num_classes)
                    ends = [k // 2 if k % 2 == 0 else last - k // 2 for k in both]
                    classes = chain([padding % num_classes], cycle(ends))
        return candidates[0] if num_classes else None
    finally:
        model.train(was_training)


@contextmanager
def _quiet_passes() -> Iterator[None]:
    """Neither gradients nor compiled graphs, nor warnings that they are missing."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        yield


def _make_up(labels: Tensor, classes: Iterator[int], *, has_ignored: bool) -> None:
    """Put classes in place of the labels that count, and ignore a third of them."""
    counted = (labels != IGNORED).nonzero().flatten()
    num_kept = len(counted) - has_ignored * (len(counted) // 3)
    labels[counted[:num_kept]] = torch.tensor(list(islice(classes, num_kept))).to(labels)
    labels[counted[num_kept:]] = IGNORED


def _with_noise(
    num_classes: int, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Call a torch function; of a layer with as many outputs as classes, they get noise."""
    output = func(*args, **kwargs)
    is_head = func is F.linear and output.shape[-1] == num_classes
    return output + torch.randn_like(output) if is_head else output


def _agreeing(candidates: list[bool], loss: Any, logits: Any, labels: Tensor) -> list[bool]:
    """Those ways to shift by which the loss is the mean over labels."""
    if not torch.is_tensor(loss) or not torch.is_tensor(logits) or logits.ndim != 3:
        return []
    if ((labels != IGNORED) & ((labels < 0) | (labels >= logits.shape[-1]))).any():
        return []
    # As transformers does; some compute in the logits' own dtype, in which a sum of many is rough.
    dtypes = {loss.dtype, torch.promote_types(loss.dtype, torch.float32)}
    rtol = max(1e-5, torch.finfo(loss.dtype).eps)

    def is_mean(is_shifted: bool) -> bool:
        some, own = _aligned(logits, labels, is_shifted=is_shifted)
        some, own = some.flatten(0, 1), own.flatten()
        means = [F.cross_entropy(some.to(each), own, ignore_index=IGNORED) for each in dtypes]
        return any(torch.isclose(loss.to(m), m, rtol=rtol, atol=1e-5).all() for m in means)

    return list(filter(is_mean, candidates))


def _aligned(logits: Tensor, labels: Tensor, *, is_shifted: bool) -> tuple[Tensor, Tensor]:
    """Return logits, and the label that each of them predicts."""
    prompt = logits.shape[1] - labels.shape[1]  # virtual tokens of prompt tuning come first
    if prompt:
        labels = F.pad(labels, (prompt, 0), value=IGNORED)
    return (logits[:, :-1], labels[:, 1:]) if is_shifted else (logits, labels)


def _logits(outputs: Any, *, has_loss: bool) -> Any:
    """What a model returned as logits; a tuple begins with the loss, if there is one."""
    return outputs.get("logits") if isinstance(outputs, Mapping) else outputs[has_loss]
