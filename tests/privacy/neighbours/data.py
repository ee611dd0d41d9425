"""Data sets with one record that others would feel, and the small models that are trained on them.

All records but one are nearly alike, so that their clipped gradients add up: whatever scales or
turns them moves the sum by many C. Record 0 is far away from them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.privacy.neighbours.harness import Batch, Case, Loss, Records

SIZE, FEATURES, CLASSES, TOKENS, VOCAB = 12, 4, 3, 40, 7
FAR = 50.0


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def features(far: float = FAR, seed: int = 4) -> Tensor:  # [records, features]
    """Rows near (1, 0, 0, 0), and one that is not."""
    generator = torch.Generator().manual_seed(seed)
    x = 0.05 * torch.randn(SIZE, FEATURES, generator=generator)
    x[:, 0] += 1.0
    x[0] = far * torch.tensor([0.3, 1.0, -1.0, 0.5])
    return x


def labels() -> Tensor:  # [records]
    """One class for all but the first record, which also has a neighbour of its own kind."""
    y = torch.full((SIZE,), 2)
    y[0], y[1] = 0, 1
    return y


def twins() -> Batch:
    """Two records alone in their class, one opposite the other."""
    x, y = features(far=2.0), labels()
    x[1], y[1] = -x[0], 0
    return x, y


def halves(num_low: int, is_far_low: bool) -> Batch:
    """Two kinds of records, of a small and a large loss, and one whose loss is beyond both."""
    x = torch.zeros(SIZE, FEATURES)
    x[:, 0] = torch.where(torch.arange(SIZE) <= num_low, -1.0, 1.0)
    x[0, 0] = -5.0 if is_far_low else 5.0
    return x, torch.full((SIZE,), 2)


def opposite() -> Batch:
    """Equal records, and one on the other side of 0."""
    x = torch.zeros(SIZE, FEATURES)
    x[:, 0] = 1.0
    x[0, 0] = -3.0
    return x, torch.full((SIZE,), 2)


def tokens() -> Tensor:  # [records, tokens]
    ids = torch.randint(0, VOCAB, (1, TOKENS), generator=_generator()).repeat(SIZE, 1)
    ids[0] = (ids[0] + 3) % VOCAB
    return ids


def padded(is_even: bool = False) -> Batch:
    """Token ids and labels: the first record has all its labels, others only one."""
    ids = tokens()
    mask = torch.arange(TOKENS) < torch.where(torch.arange(SIZE) == 0, TOKENS, 1)[:, None]
    return ids, ids.clone() if is_even else torch.where(mask, ids, -100)


def _constant(*tensors: Tensor, empty: Batch | None = None, record: int = 0) -> Records:
    return Records(lambda _step: tensors, record, empty)


def _bits() -> Tensor:
    return torch.tensor([[0.0, 1.0, 1.0]]).repeat(SIZE, 1)


def _weights() -> Tensor:
    w = torch.full((SIZE,), 0.03)
    w[0] = 2.0
    return w


def _targets() -> Tensor:
    t = torch.zeros(SIZE, CLASSES)
    t[0] = FAR
    return t


def _spellings() -> tuple[Tensor, Tensor]:
    generator = _generator()
    return (
        torch.randint(1, 3, (SIZE, 2), generator=generator),
        torch.randint(1, 3, (SIZE,), generator=generator),
    )


NO_FEATURES = torch.zeros(FEATURES)
OF_MOST = (NO_FEATURES, torch.tensor(2))  # an empty row of the class that most records have
NO_LABELS = (torch.zeros(TOKENS, dtype=torch.long), torch.full((TOKENS,), -100))

KINDS: dict[str, Callable[[], Records]] = {
    "class": lambda: _constant(features(), labels(), empty=OF_MOST),
    "near class": lambda: _constant(features(far=2.0), labels(), empty=OF_MOST),
    "twins": lambda: _constant(*twins(), empty=OF_MOST),
    "halves": lambda: _constant(*halves(6, False), empty=OF_MOST),
    "lower halves": lambda: _constant(*halves(5, True), empty=OF_MOST),
    "opposite": lambda: _constant(*opposite(), empty=OF_MOST),
    "real": lambda: _constant(features(), _targets()),
    "bits": lambda: _constant(features(), _bits()),
    "bit": lambda: _constant(features(far=2.0), _bits()[:, 1]),
    "lm": lambda: _constant(*padded(is_even=True)),
    "pad": lambda: _constant(*padded(), empty=NO_LABELS),
    "first even": lambda: Records(lambda step: padded(is_even=step == 0), empty=NO_LABELS),
    "weight": lambda: _constant(features(far=2.0), labels(), _weights()),
    "two": lambda: _constant(features(), features(seed=5)),
    "three": lambda: _constant(features(), features(seed=5), features(seed=6)),
    "seq": lambda: _constant(features(far=2.0), *_spellings()),
}


# ---- models --------------------------------------------------------------------------------------


def linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


def without_bias() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES, bias=False)


class LanguageModel(nn.Module):
    """A table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


class OwnLoss(LanguageModel):
    """A language model that returns the flat mean over its tokens as well."""

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(ids)
        return logits, nn.functional.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))


class TwoHeads(nn.Module):
    """Outputs in a dict with a tuple in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.first(x), "extra": (self.second(x), None)}


class Probability(nn.Module):
    """One number between 0 and 1 per row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sigmoid().squeeze(1)


def speller() -> nn.Module:
    return nn.Linear(FEATURES, 4 * CLASSES)


def gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=TOKENS,
        n_embd=8,
        n_layer=1,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def case(
    loss: Loss | type,
    kind: str = "class",
    model: Callable[[], nn.Module] = linear,
    *,
    max_grad_norm: float = 0.3,
    **options: Any,
) -> Case:
    """A case on one of the data sets above."""
    return Case(loss, model, KINDS[kind](), max_grad_norm, **options)
