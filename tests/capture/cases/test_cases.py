"""Models that were exact once stay so: none of them may be refused, or be off.

`NOW_EXACT` are those that were once refused for rows chosen by values.
"""

import copy
import zlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from tests.capture.cases.language import NARROW, PEFT, TRANSFORMERS
from tests.capture.cases.operators import OPERATORS
from tests.capture.cases.routed import MIXTURES, ROUTED, LayerDrop, squares_of_sequences
from tests.capture.common import BATCH, TOKENS, WIDTH, Case, floats, squares, squares_time_major
from tests.capture.zoo import ids, llama, lm_loss
from tests.harness.oracle import batch_size, clipped_sum, per_sample_gradients, per_sample_norms
from tests.privacy.common import attach
from unison.clip import AUTO, MODES, clipped_gradients
from unison.privacy import Poisson

pytestmark = pytest.mark.filterwarnings(
    "ignore:no rule for",
    "ignore:There is a performance drop",
    "ignore:`torch.jit.script` is deprecated",  # DeBERTa
    "ignore:mkldnn_matmul failed",  # a CPU without bf16
    "ignore:Unsupported layer type:UserWarning:peft",  # RMSNorm is no layer norm
)

EXACT: dict[str, Case] = {**OPERATORS, **TRANSFORMERS, **PEFT}
NOW_EXACT = ROUTED

# Quick ones of every kind, of which the default suite takes one mode each.
SPREAD = (
    *("LSTM2 bi=True", "GRUCell", "MHA", "MHA kdim biaskv", "MHA T==B", "Transformer full"),
    *("Conv2d grp dil str", "Conv2d reflect", "ConvTranspose2d grp", "EmbeddingBag max"),
    *("EmbeddingBag weights", "Embedding pad", "GroupNorm", "InstanceNorm2d", "PReLU", "Bilinear"),
    *("orthogonal par", "einsum batch last", "a*x+b scalar", "tied emb-head", "cls token repeat"),
    *("torch.gather param", "scatter_add", "cdist param", "matrix_exp", "grid affine"),
    *("func.functional_call", "batch in last dim", "AdaptiveLogSoftmax", "qkv split weights"),
    *("hypernet W(x) per sample", "MoE gather/index_add", "repeat_interleave x"),
    "F.normalize(param)",
    *("OPT", "Mistral sliding", "DistilBERT", "ConvNextV2", "CLIP text"),
    *("PEFT IA3", "PEFT PrefixTuning", "PEFT OFT", "Llama ckpt reentrant=False"),
)
THROUGH_THE_ENGINE = (
    *("LSTM2 bi=False", "MHA", "Conv2d depthwise", "EmbeddingBag sum", "InstanceNorm3d"),
    *("weight_norm conv", "einsum multihead", "pos table T==B", "loop over time"),
    *("Gemma2", "T5", "ALBERT (shared)", "Swin", "Mixtral batched_mm"),
    *("PEFT rsLoRA all-linear+emb", "PEFT VeRA", "PEFT modules_to_save"),
)
CLOSE = 1e-6  # of the whole clipped sum, to the loop over samples in float64
# Parts that are computed in float32, whatever the model has.
COMPUTED_IN_FLOAT32 = {"Mamba", "RecurrentGemma", "PEFT FourierFT", "PEFT WaveFT"}


def modes_of(name: str, quick: Iterable[str]) -> list[Any]:
    """Every mode as a parameter: one of them for a quick model, all where tests may be long."""
    own = [AUTO, *MODES][zlib.crc32(name.encode()) % (1 + len(MODES))]
    return [
        pytest.param(
            *(name, mode),
            marks=[] if name in quick and mode == own else [pytest.mark.full],
            id=f"{name}, {mode}",
        )
        for mode in (AUTO, *MODES)
    ]


def flat(tensors: dict[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([tensors[name].flatten().double() for name in names])


def assert_exact(found: dict[str, Tensor], expected: dict[str, Tensor], close: float) -> None:
    assert found.keys() == expected.keys()
    difference = flat(found, expected) - flat(expected, expected)
    assert difference.norm() <= close * flat(expected, expected).norm()


def prepare(case: Case) -> tuple[nn.Module, Any, float]:
    """A model in float64, a batch, and a C that clips about half of it."""
    torch.manual_seed(0)
    model, batch = case.make().double(), case.batch(BATCH)
    return model, batch, float(per_sample_norms(model, case.loss, batch).median())


@pytest.mark.parametrize(
    ("name", "mode"), [each for name in EXACT for each in modes_of(name, SPREAD)]
)
def test_exact_models_stay_exact(name, mode):
    case = EXACT[name]
    model, batch, max_norm = prepare(case)
    expected = clipped_sum(model, case.loss, batch, max_norm)
    found = clipped_gradients(model, case.loss, batch, max_norm=max_norm, mode=mode)
    assert_exact(found.sums, expected, 1e-5 if name in COMPUTED_IN_FLOAT32 else CLOSE)


@pytest.mark.parametrize(
    ("name", "mode"), [each for name in NARROW for each in modes_of(name, ["none"])]
)
def test_narrow_models_are_as_close_as_their_dtype(name, mode):
    """The loop over samples runs in the same dtype: what is left is the order of sums."""
    torch.manual_seed(0)
    dtype, batch = NARROW[name], ids(BATCH)
    model = llama().to(dtype)
    trainable = dict(model.named_parameters())
    gradients = {key: torch.zeros(BATCH, *each.shape) for key, each in trainable.items()}
    for row in range(BATCH):
        loss = lm_loss(model, batch[row : row + 1]).sum()
        parts = torch.autograd.grad(loss, list(trainable.values()))
        for key, part in zip(trainable, parts, strict=True):
            gradients[key][row] = part.float()
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()]).norm(dim=0)
    max_norm = float(norms.median())
    scales = (max_norm / norms).clamp(max=1.0)
    expected = {k: torch.einsum("b,b...->...", scales, each) for k, each in gradients.items()}
    found = clipped_gradients(model, lm_loss, batch, max_norm=max_norm, mode=mode)
    assert_exact(found.sums, expected, 8 * torch.finfo(dtype).eps)
    torch.testing.assert_close(found.norms.float(), norms, rtol=8 * torch.finfo(dtype).eps, atol=0)


# ---- through the engine --------------------------------------------------------------------------


class Rows(Dataset):
    """The samples of a batch."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return batch_size(self.batch)

    def __getitem__(self, index: int) -> Any:
        return pytree.tree_map(lambda leaf: leaf[index], self.batch)


class Outputs(nn.Module):
    """A recurrent network without its states, whose samples lie in another dimension."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


def engine_sum(case: Case, model: nn.Module, batch: Any, mode: str, max_norm: float) -> Any:
    """The clipped sum of one step of the engine, by the model's own names."""
    size = batch_size(batch)
    module = Outputs(model) if isinstance(model, nn.RNNBase) else model
    engine, _, _, private = attach(
        module,
        data_loader=DataLoader(Rows(batch), batch_size=size),
        clipping=mode,
        noise_multiplier=0.0,
        max_grad_norm=max_norm,
        sampling=Poisson(rate=1.0),
        expected_batch_size=size,
        batch_first=case.loss not in (squares_time_major, squares_of_sequences),
    )
    try:
        for handed_out in private:
            case.loss(module, handed_out).mean().backward()
    finally:
        engine.detach()
    return {
        key: torch.zeros_like(each) if each.grad is None else each.grad * size
        for key, each in model.named_parameters()
        if each.requires_grad
    }


# Samples in the last dimension, a module in evaluation mode, and a penalty that is clipped with the
# sample it is added to: not what the engine trains. (It adds terms on parameters after the noise.)
FUNCTIONAL_ONLY = {"batch in last dim", "spectral_norm par(eval)", "param outside: |w|^2/B reg"}
TRAINED = [name for name in EXACT if name not in FUNCTIONAL_ONLY]


@pytest.mark.parametrize(
    ("name", "mode"),
    [each for name in TRAINED for each in modes_of(name, THROUGH_THE_ENGINE)],
)
def test_exact_models_stay_exact_through_the_engine(name, mode):
    case = EXACT[name]
    model, batch, max_norm = prepare(case)
    expected = clipped_sum(model, case.loss, batch, max_norm)
    found = engine_sum(case, model, batch, mode, max_norm)
    assert_exact(found, expected, 1e-5 if name in COMPUTED_IN_FLOAT32 else CLOSE)


# ---- rows chosen by values -----------------------------------------------------------------------

QUICK_ROUTED = [name for name in NOW_EXACT if "default" not in name and "eager" not in name]


@pytest.mark.parametrize(
    ("name", "mode"), [each for name in NOW_EXACT for each in modes_of(name, QUICK_ROUTED)]
)
def test_models_that_choose_rows_by_values(name, mode):
    case = NOW_EXACT[name]
    torch.manual_seed(0)
    model = case.make()
    reference: Any = copy.deepcopy(model)
    if name in MIXTURES:  # grouped matrix products, the default, know no float64
        reference.set_experts_implementation("eager")
    else:
        model = model.double()
    batch = case.batch(BATCH)
    max_norm = float(per_sample_norms(reference, case.loss, batch).median())
    for size in (BATCH, 1, 3):
        part = case.batch(size)
        expected = clipped_sum(reference, case.loss, part, max_norm)
        found = clipped_gradients(model, case.loss, part, max_norm=max_norm, mode=mode)
        assert_exact(found.sums, expected, CLOSE)
        assert_exact(engine_sum(case, model, part, mode, max_norm), expected, CLOSE)
        model.zero_grad()


@pytest.mark.parametrize("mode", [AUTO, *MODES])
def test_layers_left_out_by_chance(mode):
    torch.manual_seed(1)
    batch = floats(TOKENS, WIDTH)(BATCH)
    plain = LayerDrop().double()
    engine, module, _, private = attach(
        copy.deepcopy(plain),
        data_loader=DataLoader(Rows(batch), batch_size=BATCH),
        clipping=mode,
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        sampling=Poisson(rate=1.0),
        expected_batch_size=BATCH,
    )
    seen = set()
    for _ in range(8):
        for handed_out in private:
            module.zero_grad()
            squares(module, handed_out).mean().backward()
            seen.add(tuple(module.is_kept))
            plain.fixed = list(module.is_kept)
            expected = clipped_sum(plain, squares, batch, 1.0)
            found = {
                key: torch.zeros_like(each) if each.grad is None else each.grad * BATCH
                for key, each in module.named_parameters()
            }
            assert_exact(found, expected, CLOSE)
    engine.detach()
    assert len(seen) > 2


def test_every_model_uses_its_parameters():
    """A gradient that is always 0 would agree with anything."""
    for name in SPREAD[:8]:
        case = EXACT[name]
        model, batch, _ = prepare(case)
        for key, gradient in per_sample_gradients(model, case.loss, batch).items():
            assert gradient.abs().sum() > 0, (name, key)
