"""K-FAC beside torch.compile: statistics come out of compiled graphs, and are the same."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import World, run_on_ranks
from tests.harness.compiling import NUM_RUNS, counting
from tests.kfac.common import Transformer, loss, relative, settings
from tests.kfac.sharded import CONFIG, difference, run
from tests.privacy.common import attach
from tests.privacy.common import make_model as make_private_model
from unison import KFAC, KFACConfig
from unison.capture import compiled as capture
from unison.errors import UnsupportedOperation
from unison.kfac import fisher
from unison.kfac.fisher import CompiledStatistics

# torch's compiler itself meets warnings while it traces, and must not stop at them.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    NUM_RUNS[0] = 0
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """torch leaves its own modules to Python where they are compiled alone."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.inner = nn.Linear(*sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(6, 8), Block(8, 7), nn.Linear(7, 5))


def whole(module: nn.Sequential) -> nn.Module:
    return torch.compile(module, backend=counting)  # type: ignore[return-value]


def in_place(module: nn.Sequential) -> nn.Module:
    module.compile(backend=counting)
    return module


def block(module: nn.Sequential) -> nn.Module:
    module[0].compile(backend=counting)
    return module


def child(module: nn.Sequential) -> nn.Module:
    module[1] = torch.compile(module[1], backend=counting)
    return module


def forward(module: nn.Sequential) -> nn.Module:
    module.forward = torch.compile(module.forward, backend=counting)
    return module


def parameters_after(
    before: Callable[[nn.Sequential], nn.Module] = lambda module: module,
    after: Callable[[nn.Sequential], nn.Module] = lambda module: module,
) -> Tensor:
    own = make_model()
    called = before(own)
    kfac = KFAC(called, KFACConfig(damping=1e-3))
    if called is own:
        called = after(own)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(9, 6, generator=generator)
        y = torch.randint(0, 5, (9,), generator=generator)
        optimizer.zero_grad()
        logits = called(x)
        if kfac.wants_statistics:
            kfac.sample(logits).backward(retain_graph=True)
        F.cross_entropy(logits, y).backward()
        kfac.step()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in own.parameters()])


@pytest.mark.parametrize("how", [whole, in_place, block, child, forward])
@pytest.mark.parametrize("when", ["before", "after"])
def test_training_is_that_of_the_module_as_written(how, when):
    expected = parameters_after()
    torch.testing.assert_close(parameters_after(**{when: how}), expected, rtol=1e-6, atol=1e-7)
    assert NUM_RUNS[0] >= 6  # the user's passes, and those of statistics


# ---- statistics ------------------------------------------------------------------------------


def statistics_of(kfac: KFAC) -> CompiledStatistics:
    assert kfac._compiled is not None
    return kfac._compiled


def factors_after(
    model: nn.Module, backend: Any = None, sizes: tuple[int, ...] = (5, 5), **changes: Any
) -> tuple[dict[tuple[str, str], Tensor], KFAC]:
    """Factors after a few updates on batches of these sizes."""
    torch._dynamo.reset()
    called: Any = model if backend is None else torch.compile(model, backend=backend)
    kfac = KFAC(called, settings(decay=0.5, **changes))
    generator = torch.Generator().manual_seed(1)
    for size in sizes:
        logits = called(torch.randint(0, 11, (size, 7), generator=generator))
        kfac.sample(logits).backward(retain_graph=True)
        loss(logits).backward()
        kfac.step()
    found = {
        (name, side): value.clone()
        for name, sides in kfac.factors().items()
        for side, value in sides.items()
    }
    return found, kfac


def make_transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer().double()


def check_same(
    found: dict[tuple[str, str], Tensor], expected: dict[tuple[str, str], Tensor]
) -> None:
    assert found.keys() == expected.keys()
    for key, wanted in expected.items():
        assert relative(found[key], wanted) < 1e-10, key


@pytest.mark.parametrize(
    ("fisher", "backend"),
    [
        ("exact", "aot_eager"),  # several backward passes through one graph
        pytest.param("mc", "aot_eager", marks=pytest.mark.full),
        pytest.param("empirical", "aot_eager", marks=pytest.mark.full),
        pytest.param("forward", "aot_eager", marks=pytest.mark.full),
        pytest.param("mc", "inductor", marks=pytest.mark.full),
        pytest.param("exact", "inductor", marks=pytest.mark.full),
    ],
)
def test_factors_come_out_of_compiled_graphs(fisher, backend):
    expected, _ = factors_after(make_transformer(), fisher=fisher)
    found, kfac = factors_after(make_transformer(), backend, fisher=fisher)
    check_same(found, expected)
    (made,) = statistics_of(kfac)._backends.values()
    assert statistics_of(kfac).refusal is None
    assert statistics_of(kfac).num_graphs == 1
    assert made.num_runs == 2  # one for each update


def test_large_layers_are_not_multiplied_out():
    """A diagonal of a matrix is made of its factors, a few samples at a time."""
    changes = {"max_factor_size": 8, "policy": "small_only"}
    expected, _ = factors_after(make_transformer(), **changes)
    found, kfac = factors_after(make_transformer(), "aot_eager", **changes)
    check_same(found, expected)
    assert ("f1.weight", "d") in found
    (made,) = statistics_of(kfac)._backends.values()
    kept = {slot.name for graph in made.graphs for slot in graph.slots if slot.record is not None}
    assert {"f1.weight", "f2.weight", "embed.weight"} <= kept


class Branch(Transformer):
    """Python reads a value, so that Dynamo makes several graphs of it."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids if ids.sum() > 0 else -ids)


@pytest.mark.filterwarnings("error:.*uncompiled")
def test_what_cannot_be_compiled_runs_as_it_is():
    torch.manual_seed(0)
    model = Branch().double()
    expected, _ = factors_after(model)
    with pytest.warns(UserWarning, match=r"statistics of Branch run uncompiled: .*[Dd]ata-dep"):
        found, _ = factors_after(model, counting)
    check_same(found, expected)


def test_batches_of_many_shapes(monkeypatch):
    monkeypatch.setattr(fisher.CompiledStatistics, "max_kinds", 2)
    sizes = (5, 3, 5, 1, 3)
    expected, _ = factors_after(make_transformer(), sizes=sizes)
    with pytest.warns(UserWarning, match=r"statistics .* uncompiled: .*more than 2 shapes"):
        found, _ = factors_after(make_transformer(), counting, sizes=sizes)
    check_same(found, expected)


def test_records_that_are_wrong_are_not_used(monkeypatch):
    expected, _ = factors_after(make_transformer())

    def doubled(name: str, shape: tuple[int, ...], dtype: torch.dtype, make: Any) -> Any:
        return slot(name, shape, dtype, make and (lambda a, g: make(a, 2 * g)))

    slot = capture.GradientSlot
    monkeypatch.setattr(capture, "GradientSlot", doubled)
    with pytest.warns(UserWarning, match=r"uncompiled: 'g' of .* differs by 300.0% from that of"):
        found, _ = factors_after(make_transformer(), counting)
    check_same(found, expected)


def test_private_training_is_refused():
    model = make_private_model()
    kfac = KFAC(torch.compile(model, backend="aot_eager"))
    with pytest.raises(UnsupportedOperation, match="preconditioned by a KFAC"):
        attach(model, compile={"backend": "aot_eager"})
    kfac.detach()
    engine, module, _, _ = attach(model, compile={"backend": "aot_eager"})
    with pytest.raises(UnsupportedOperation, match="trained privately"):
        KFAC(torch.compile(module, backend="aot_eager"))
    engine.detach()


# ---- on ranks --------------------------------------------------------------------------------


def run_compiled(world: World, case: dict[str, Any]) -> dict[str, Any]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's compiler
        warnings.filterwarnings("error", message="passes for statistics")
        return run(world, case)


@pytest.mark.full
@pytest.mark.parametrize("how", ["units", "root", "ddp", "fsdp2"])
def test_sharded_models_whose_blocks_are_compiled(how):
    case = {"shares": (4, 2), "counts": (6, 6, 6)}
    expected = run_on_ranks(1, run, {"how": "none", "counts": (6, 6, 6)})[0]
    for found in run_on_ranks(2, run_compiled, {"how": how, "compile": "aot_eager", **case}):
        assert difference(found, expected) < 1e-9
        assert found["compiled"] == (None, 1)  # one graph of the model, or one for both blocks


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_digest_at_1_and_2_ranks(backend):
    """In granules, with dropout."""
    case = {"granule": 2, "compile": backend, "config": replace(CONFIG, dropout=0.3)}
    alone = run_on_ranks(1, run_compiled, {"how": "units", **case})[0]
    for found in run_on_ranks(2, run_compiled, {"how": "units", **case}):
        assert found["compiled"] == alone["compiled"]
        assert found["compiled"][0] is None
        assert found["digest"] == alone["digest"]
        assert difference(found, alone) == 0.0
