"""Compiled private training of models of transformers: whole, by blocks, or with a reason."""

import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from tests.capture.cases.language import TRANSFORMERS
from tests.capture.common import Case, floats, squares
from tests.capture.zoo import SMALL, ZOO
from tests.harness.oracle import clipped_sum, per_sample_norms
from tests.privacy.common import attach
from tests.privacy.test_compiled import EAGER, passes_of
from unison.privacy import Poisson

SAMPLES, STEPS = 8, 2


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Rows(Dataset[Any]):
    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return tree_map(lambda each: each[index], self._batch)


def trained(
    case: Case,
    change: Callable[[Any], None],
    compile: Any,  # noqa: A002
) -> tuple[dict[str, Tensor], Tensor, list[str], str | None]:
    """Parameters and per-sample norms after some steps, what was compiled, and why no more."""
    torch.manual_seed(0)
    model = case.make().double().train()
    change(model)
    loader = DataLoader(Rows(case.batch(SAMPLES)), batch_size=4, shuffle=True)
    engine, module, optimizer, private = attach(
        model, data_loader=loader, compile=compile, poisson_sampling=False
    )
    for _ in range(STEPS):
        for batch in private:
            optimizer.zero_grad()
            case.loss(module, batch).mean().backward()
            optimizer.step()
    norms, found, refusal = engine.per_sample_norms(), [], None
    if compile:
        passes = passes_of(engine)
        found = [each.name for each in passes.forwards if each.refusal is None]
        refusal = passes.refusal
        assert (passes.num_graphs > 0) == (refusal is None)
    engine.detach()
    return {n: p.detach() for n, p in module.named_parameters()}, norms, found, refusal


def check(
    name: str, change: Callable[[Any], None] = lambda _: None
) -> tuple[list[str], str | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, norms, *_ = trained(ZOO[name], change, False)
        found, found_norms, compiled, refusal = trained(ZOO[name], change, EAGER)
    torch.testing.assert_close(found_norms, norms, rtol=1e-6, atol=1e-9)
    for each, wanted in expected.items():
        torch.testing.assert_close(found[each], wanted, rtol=1e-6, atol=1e-8)
    return compiled, refusal


def test_a_layer_is_dropped_by_a_drawn_number():
    """Python reads the number: where it decides something, blocks are compiled, not the model."""
    assert check("opt") == (["OPTForCausalLM"], None)

    def dropping(model: Any) -> None:
        model.model.decoder.layerdrop = 1e-12

    compiled, _ = check("opt", dropping)
    assert compiled == ["model.decoder.layers.0", "model.decoder.layers.1"]


@pytest.mark.full
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_blocks_under_activation_checkpointing(is_reentrant):
    """Checkpoints are a part of the graph."""

    def checkpointed(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})

    compiled, _ = check("llama tied", checkpointed)
    assert compiled == ["LlamaForCausalLM"]


# requires_grad is set; rows are padded by a computed length.
BY_BLOCKS = {"wav2vec2", "long t5"}
UNCOMPILED = {"llama+dora"}  # peft looks at the storage of weights
NO_FORWARD = {"clip"}  # but other methods of the model


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in ZOO if name not in NO_FORWARD])
def test_models_train_as_they_do_uncompiled(name):
    compiled, refusal = check(name)
    assert (refusal is not None) == (name in UNCOMPILED), refusal
    assert (len(compiled) > 1) == (name in BY_BLOCKS)


# ---- architectures, beside the oracle ------------------------------------------------------------

CLOSE = 1e-6  # of the whole clipped sum, in float32
BLOCKS_OF = {"Wav2Vec2"}  # see BY_BLOCKS

PERCEPTRON = Case(
    lambda: nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3)),
    floats(4, 5),
    squares,
)


def check_step(case: Case, backend: str) -> list[str]:
    """A compiled step in float32 is that of the loop over samples in float64; what was compiled."""
    torch.manual_seed(0)
    model, batch = case.make().double().train(), case.batch(SAMPLES)
    max_norm = float(per_sample_norms(model, case.loss, batch).median())
    expected = clipped_sum(model, case.loss, batch, max_norm)
    model.float()
    engine, module, _, private = attach(
        model,
        data_loader=DataLoader(Rows(tree_map(as_float32, batch)), batch_size=SAMPLES),
        noise_multiplier=0.0,
        max_grad_norm=max_norm,
        sampling=Poisson(rate=1.0),
        expected_batch_size=SAMPLES,
        compile={"backend": backend},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in private:
            case.loss(module, rows).mean().backward()
    passes = passes_of(engine)
    compiled = [each.name for each in passes.forwards if each.refusal is None]
    assert passes.num_graphs > 0, passes.refusal
    engine.detach()
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    found = [model.get_parameter(name).grad for name in names]
    whole = torch.cat([expected[name].flatten() for name in names])
    parts = [
        torch.zeros_like(expected[name]) if each is None else each.double() * SAMPLES
        for name, each in zip(names, found, strict=True)
    ]
    assert (torch.cat([each.flatten() for each in parts]) - whole).norm() <= CLOSE * whole.norm()
    return compiled


def as_float32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


by_inductor = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ on a CPU")


@by_inductor
@pytest.mark.timeout(300)  # tens of kernels, compiled one by one
@pytest.mark.parametrize("name", ["perceptron", *SMALL])
def test_a_step_through_inductor(name):
    check_step(PERCEPTRON if name == "perceptron" else SMALL[name], "inductor")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # DeBERTa
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=by_inductor)])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_architectures_of_transformers(name, backend):
    """All of them, each of which is one graph or at least has blocks that are."""
    compiled = check_step(TRANSFORMERS[name], backend)
    assert (len(compiled) > 1) == (name in BLOCKS_OF)


def test_a_models_own_loss_is_compiled_with_it():
    """Labels that are the inputs themselves, and a warning that transformers logs once."""
    case = SMALL["gpt2"]
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(len(graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    ids = torch.randint(3, 11, (SAMPLES, 6), generator=torch.Generator().manual_seed(0))
    found = []
    for compiled in (None, {"backend": backend}):
        torch.manual_seed(0)
        model = case.make().train()
        settings = {} if compiled is None else {"compile": compiled}
        engine, module, optimizer, loader = attach(
            model,
            data_loader=DataLoader(Rows((ids,)), batch_size=4, shuffle=True),
            noise_multiplier=0.0,
            poisson_sampling=False,
            max_physical_batch_size=2,
            **settings,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*compiled")
            for (rows,) in loader:
                optimizer.zero_grad()
                module(input_ids=rows, labels=rows).loss.backward()
                optimizer.step()
        found.append({name: each.detach().clone() for name, each in model.named_parameters()})
        engine.detach()
    assert len(graphs) == 1
    for name, each in found[0].items():
        torch.testing.assert_close(found[1][name], each, rtol=1e-5, atol=1e-6)
