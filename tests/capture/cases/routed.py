"""Models whose rows are selected, sorted or left out by values: refused once, to be exact."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.capture.cases.language import GROUPED, HEADED, SIZES
from tests.capture.common import TOKENS, VOCAB, WIDTH, Case, floats, ids, squares
from tests.capture.zoo import build, lm_loss
from tests.capture.zoo import ids as words

CLASSES = 3


def lengths(x: Tensor) -> Tensor:  # [batch], each sample's own, from 1 to its tokens
    return 1 + (x.flatten(1).double().sum(1).abs() * 10).long() % x.shape[1]


def squares_of_sequences(model: nn.Module, batch: Tensor) -> Tensor:  # [batch]
    return model(batch.transpose(0, 1)).square().sum(1)


class Packed(nn.Module):
    """A recurrent network of sequences of unequal length."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.network = kind(WIDTH, 4, batch_first=True, **options)
        width = 8 if options.get("bidirectional") else 4
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths(x), batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(
            self.network(packed)[0], batch_first=True, total_length=x.shape[1]
        )
        return self.head(outputs)


class LastOfPacked(nn.Module):
    """The last state of a packed sequence: [batch, classes]."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.head = nn.GRU(WIDTH, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths(x), batch_first=True, enforce_sorted=False)
        return self.head(self.network(packed)[1][0])


class Offsets(nn.Module):
    """A bag of embeddings over one flat list of words, with an offset for each sample."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(VOCAB, WIDTH, **options), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        counts = lengths(x)
        flat = x[torch.arange(x.shape[1]) < counts[:, None]]
        return self.head(self.bag(flat, F.pad(counts.cumsum(0)[:-1], (1, 0))))


class SequenceFirst(nn.Module):
    """A sequence-first LSTM, [tokens, batch, width], with one row of classes per sample."""

    def __init__(self, is_last_state: bool) -> None:
        super().__init__()
        self.network, self.head = nn.LSTM(WIDTH, 4), nn.Linear(4, CLASSES)
        self.is_last_state = is_last_state

    def forward(self, x: Tensor) -> Tensor:
        outputs, (state, _) = self.network(x)
        return self.head(state[-1] if self.is_last_state else outputs[-1])


class MaskedExperts(nn.Module):
    """Tokens of all samples in one tensor; each expert takes those of a boolean mask."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        chosen = (flat[:, 0] > 0).long() + (flat[:, 1] > 0).long()
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            y[mask] = expert(flat[mask])
        return y.view_as(x)


class IndexedExperts(MaskedExperts):
    """The same by `nonzero` and `index_add`, with gates of a router that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        gates, chosen = self.router(flat).softmax(-1).topk(2)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            places, nth = torch.where(chosen == number)
            y = y.index_add(0, places, gates[places, nth, None] * expert(flat[places]))
        return y.view_as(x)


class SortedExperts(MaskedExperts):
    """The same by sorting tokens by their expert, and back."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        chosen = (flat[:, 0] > 0).long() + (flat[:, 1] > 0).long()
        order = chosen.argsort(stable=True)
        parts = flat[order].split(chosen.bincount(minlength=3).tolist())
        done = torch.cat([each(part) for each, part in zip(self.experts, parts, strict=True)])
        return torch.empty_like(done).index_copy(0, order, done).view_as(x)


class SelectedTokens(nn.Module):
    """A head that is applied to the tokens of a mask alone, as masked language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden, mask = self.up(x).tanh(), x[..., 0] > 0
        y = hidden.new_zeros(*x.shape[:2], CLASSES)
        y[mask] = self.head(hidden[mask])
        return y


class LayerDrop(nn.Module):
    """Leaves layers out by chance, for the whole batch, as OPT and Wav2Vec2 do.

    Attributes:
        is_kept: Which layers the last forward pass had.
        fixed: Which layers to have, instead of chance.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.fixed: list[bool] | None = None
        self.is_kept: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.is_kept = self.fixed or [bool(torch.rand([]) > 0.4) for _ in self.layers]
        for layer, is_kept in zip(self.layers, self.is_kept, strict=True):
            if is_kept:
                x = x + layer(x).tanh()
        return self.head(x)


MIXTURES = {
    "Mixtral default": build("Mixtral", "ForCausalLM", **HEADED, num_local_experts=4),
    "Qwen2Moe default": build(
        "Qwen2Moe",
        "ForCausalLM",
        **GROUPED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
        decoder_sparse_step=1,
    ),
    "OlmoE default": build("Olmoe", "ForCausalLM", **GROUPED, num_experts=4, num_experts_per_tok=2),
    "DeepseekV3 default": build(
        "DeepseekV3",
        "ForCausalLM",
        **SIZES,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=12,
        n_shared_experts=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
    "GptOss default": build(
        "GptOss", "ForCausalLM", **HEADED, num_local_experts=4, num_experts_per_tok=2
    ),
    "Mixtral eager": build(
        "Mixtral",
        "ForCausalLM",
        **HEADED,
        num_local_experts=4,
        experts_implementation="eager",
    ),
}

ROUTED: dict[str, Case] = {
    **{name: Case(make, words, lm_loss) for name, make in MIXTURES.items()},
    "PackedSequence": Case(Packed, floats(TOKENS, WIDTH), squares),
    "PackedSequence bidirectional": Case(
        lambda: Packed(nn.GRU, bidirectional=True, num_layers=2), floats(TOKENS, WIDTH), squares
    ),
    "PackedSequence last state": Case(LastOfPacked, floats(TOKENS, WIDTH), squares),
    "EmbeddingBag offsets": Case(Offsets, ids, squares),
    "EmbeddingBag offsets sum": Case(lambda: Offsets(mode="sum"), ids, squares),
    "seq-first LSTM, last output": Case(
        lambda: SequenceFirst(False), floats(TOKENS, WIDTH), squares_of_sequences
    ),
    "seq-first LSTM, last state": Case(
        lambda: SequenceFirst(True), floats(TOKENS, WIDTH), squares_of_sequences
    ),
    "boolean-mask experts": Case(MaskedExperts, floats(TOKENS, WIDTH), squares),
    "indexed experts": Case(IndexedExperts, floats(TOKENS, WIDTH), squares),
    "sorted experts": Case(SortedExperts, floats(TOKENS, WIDTH), squares),
    "head of selected tokens": Case(SelectedTokens, floats(TOKENS, WIDTH), squares),
}
