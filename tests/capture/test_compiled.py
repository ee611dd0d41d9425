"""Records of compiled passes: the same per-sample gradients, from slots of the traced graph."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.cases.language import PEFT
from tests.capture.common import BATCH, CASES, Case
from tests.capture.zoo import ZOO
from tests.harness import assert_close
from tests.harness.oracle import per_sample_gradients
from tests.kernels.interpreted import as_on_cuda, interpreted
from unison.capture import Capture, learn_axes
from unison.capture.compiled import CompiledCapture
from unison.ops import Record, per_sample

ALWAYS = {"llama tied"}
# What they compute in whatever the model has: Mamba's scan, the others' queries and keys.
COMPUTED_IN = dict.fromkeys(("mamba", "gpt-j", "gpt-neo"), torch.float32)
# Dynamo does not make one graph of them: layers are dropped at random, code of peft's that it
# cannot trace, a gradient asked for in the middle.
UNTRACED = ("opt", "bart", "whisper", "llama+dora", "long t5", "wav2vec2")
NO_FORWARD = ("clip",)  # but other methods of the model


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def captured(
    model: nn.Module, case: Case, batch: Any, size: int, inner: str, *, is_factored: bool
) -> dict[str, Tensor]:
    """The per-sample gradients of the second of two passes."""
    axes = learn_axes(model, case.loss, batch)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    backend = CompiledCapture(torch._dynamo.lookup_backend(inner))
    eager = model.forward
    compiled = torch.compile(eager, backend=backend, dynamic=False, fullgraph=True)
    found: dict[str, Tensor] = {}

    def add(name: str, record: Record) -> None:
        found[name] += per_sample(record)

    for _ in range(2):
        found.update({name: p.new_zeros(size, *p.shape) for name, p in trained.items()})
        capture = Capture(model, size, axes=axes, on_record=add)
        capture.factored = trained if is_factored else ()
        model.forward = compiled
        with backend.running(capture, {id(each): name for name, each in trained.items()}):
            losses = case.loss(model, batch)
        losses.sum().backward()
        capture.release()
        del model.forward
    assert backend.graphs
    assert all(each.grad is None for each in model.parameters())
    return found


def check(
    case: Case, inner: str, dtype: torch.dtype = torch.float64, *, is_factored: bool = False
) -> None:
    model, batch = case.make().double(), case.batch(BATCH)
    expected = per_sample_gradients(model, case.loss, batch)
    found = captured(model, case, batch, BATCH, inner, is_factored=is_factored)
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, wanted in expected.items():
        # The bias of keys has no gradient: softmax does not see what is added to all scores.
        if float(wanted.abs().max()) < 1e-14 * largest:
            assert float(found.pop(name).abs().max()) < 1e-12 * largest
    assert_close(found, {name: expected[name] for name in found}, dtype=dtype)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.full])
        for name in ZOO
        if name not in (*UNTRACED, *NO_FORWARD)
    ],
)
def test_slots_hold_the_per_sample_gradients(name):
    check(ZOO[name], "aot_eager", COMPUTED_IN.get(name, torch.float64))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param("PEFT OFT", marks=pytest.mark.full), "PEFT FourierFT"]
)
def test_what_is_written_into_zeros(name):
    """A traced tensor cannot become one that is made of parameters; what is written anew can."""
    check(PEFT[name], "aot_eager", torch.float32)


@interpreted
def test_no_kernel_is_launched_while_a_graph_is_traced():
    """On CUDA norms and biases have kernels, which a tensor without memory must not meet."""
    case = ZOO["gpt2"]
    model, batch = case.make().train(), case.batch(BATCH)
    expected = per_sample_gradients(model, case.loss, batch)
    with as_on_cuda():
        found = captured(model, case, batch, BATCH, "aot_eager", is_factored=False)
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, wanted in expected.items():
        assert float((found[name] - wanted).abs().max()) < 1e-5 * largest, name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "gpt2" else [pytest.mark.full])
        for name in ZOO
        if name not in (*UNTRACED, *NO_FORWARD)
    ],
)
def test_factors_are_kept(name):
    check(ZOO[name], "aot_eager", COMPUTED_IN.get(name, torch.float64), is_factored=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.full
@pytest.mark.parametrize("name", UNTRACED)
def test_what_is_not_one_graph_is_not_compiled(name):
    with pytest.raises(torch._dynamo.exc.Unsupported):
        check(ZOO[name], "aot_eager")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(CASES) - {"reentrant checkpoint"}))
@pytest.mark.parametrize("is_factored", [False, True])
def test_parameters_used_in_every_way(name, is_factored):
    check(CASES[name], "aot_eager", is_factored=is_factored)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "llama tied", "bert", "vit", "t5"])
def test_inductor(name):
    check(ZOO[name], "inductor", torch.float32)
