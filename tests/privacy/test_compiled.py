"""Private training with compiled passes: the same parameters as without, or a sentence."""

import copy
import math
import operator
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tests.privacy.common import attach, make_model, train
from unison.errors import BadInput, UnsupportedOperation
from unison.models import ModelConfig, build
from unison.ops import Dense, Product
from unison.privacy import PrivacyEngine, attachment
from unison.privacy.compiled import CompiledPasses
from unison.privacy.learning import Learning
from unison.privacy.sampling import cut_passes
from unison.shard import current_plan
from unison.torch_internals import canonical_name

EAGER = {"backend": "aot_eager"}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def parameters_after(module: nn.Module | None = None, **settings) -> dict[str, Tensor]:
    engine, module, optimizer, loader = attach(module, **settings)
    train(module, optimizer, loader, 10)
    engine.detach()
    return {name: each.detach().clone() for name, each in module.named_parameters()}


@cache
def uncompiled(most: int | None) -> dict[str, Tensor]:
    return parameters_after(max_physical_batch_size=most)


def passes_of(engine: PrivacyEngine) -> CompiledPasses:
    passes = engine._attached.attachment._compiled
    assert passes is not None
    return passes


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("most", [None, 4])
def test_poisson_batches_of_every_size(most):
    """Ten steps, noise included: padding has no share in them."""
    check_same(parameters_after(max_physical_batch_size=most, compile=EAGER), uncompiled(most))


@pytest.mark.parametrize("mode", ["ghost_bk", "flash_fuse_bk", "grad_materialize"])
def test_modes_that_keep_factors(mode):
    """What goes in and the gradient of what comes out leave the graph, where the plan says so."""
    engine, module, optimizer, loader = attach(clipping=mode, compile=EAGER, seed=3)
    train(module, optimizer, loader, 5)
    passes = passes_of(engine)
    assert passes.refusal is None
    forms = {
        type(each.record(torch.ones(1, 1, 1), torch.ones(1, 1, 1))) if each.record else Dense
        for backend in passes._backends.values()
        for graph in backend.graphs
        for each in graph.slots
    }
    assert forms == ({Dense} if mode == "grad_materialize" else {Dense, Product})
    found = {name: each.detach().clone() for name, each in module.named_parameters()}
    engine.detach()
    engine, module, optimizer, loader = attach(clipping=mode, seed=3)
    train(module, optimizer, loader, 5)
    check_same(found, {name: each.detach() for name, each in module.named_parameters()})
    engine.detach()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside of torch
def test_inductor():
    expected = parameters_after(max_physical_batch_size=4)
    check_same(parameters_after(max_physical_batch_size=4, compile=True), expected)


def test_few_graphs_are_made():
    engine, module, optimizer, loader = attach(max_physical_batch_size=4, compile=EAGER)
    train(module, optimizer, loader, 10)
    passes = passes_of(engine)
    assert passes.num_graphs == 1
    assert passes.refusal is None
    engine.detach()
    assert "forward" not in vars(module)


def test_passes_have_the_rows_that_the_planner_picks(monkeypatch):
    """Once it has seen the module: passes that were drawn before run as they are."""
    monkeypatch.setattr(Learning, "rows_per_pass", lambda *_: 2)
    found = parameters_after(max_physical_batch_size=4, compile=EAGER)
    check_same(found, uncompiled(4))  # integers add up to the same, however they are cut
    engine, module, optimizer, loader = attach(max_physical_batch_size=4, compile=EAGER)
    sizes: dict[int, set[int | None]] = {}
    for x, y in loader:
        sizes.setdefault(loader.current.step, set()).add(loader.current.max_rows)
        assert len(x) <= (4 if loader.current.step == 0 else 2)
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()
        if loader.current.step == 2 and loader.current.is_last:
            break
    assert sizes == {0: {4}, 1: {2}, 2: {2}}
    passes = passes_of(engine)
    assert (passes.num_graphs, passes.refusal) == (1, None)
    engine.detach()


def test_passes_of_poisson_batches():
    """64 samples expected, passes of 8: hardly more of them than of fixed batches, all alike."""
    records, rate = 640, 0.1
    chances = [
        math.comb(records, n) * rate**n * (1 - rate) ** (records - n) for n in range(records + 1)
    ]
    passes = [len(cut_passes(n, max_physical_batch_size=8)) for n in range(records + 1)]
    assert sum(map(operator.mul, chances, passes)) <= 1.10 * len(
        cut_passes(64, max_physical_batch_size=8)
    )
    x = torch.randn(records, 6, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(x, torch.arange(records) % 3)
    engine, module, optimizer, loader = attach(
        data_loader=DataLoader(rows, batch_size=64), max_physical_batch_size=8, compile=EAGER
    )
    num_padded, done = 0, 0
    for x, y in loader:
        plan = current_plan()
        assert plan is not None
        is_real = plan.sample_ids >= 0  # what a metric leaves out
        assert len(x) == len(is_real) == 8
        assert int(is_real.sum()) == loader.current.num_samples
        num_padded += int((~is_real).sum())
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()
        done += loader.current.is_last
        if done == 5:
            break
    assert num_padded > 0
    assert passes_of(engine).num_graphs == 1
    engine.detach()


def parameters_of(kind: str, compile: object) -> dict[str, Tensor]:  # noqa: A002
    """Parameters after steps under autocast, or of rows of several lengths."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    x = torch.randn(32, 4, 6, generator=torch.Generator().manual_seed(1))
    engine, module, optimizer, loader = attach(
        model,
        data_loader=DataLoader(TensorDataset(x), batch_size=8, shuffle=True),
        poisson_sampling=False,
        noise_multiplier=0.0,
        compile=compile,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*compiled")
        for step, (rows,) in enumerate(loader):
            length = 1 + step % 3 if kind == "lengths" else 4
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                output = module(rows[:, :length])
            output.float().square().flatten(1).sum(1).mean().backward()
            optimizer.step()
    if compile:
        assert passes_of(engine).refusal is None
        assert passes_of(engine).num_graphs == (3 if kind == "lengths" else 1)
    engine.detach()
    return {name: each.detach().clone() for name, each in module.named_parameters()}


@pytest.mark.filterwarnings("ignore:.*mkldnn_matmul")  # a CPU without bf16
@pytest.mark.parametrize("kind", ["autocast", "lengths"])
def test_autocast_and_changing_lengths(kind):
    check_same(parameters_of(kind, EAGER), parameters_of(kind, False))


class Branch(nn.Module):
    """Python reads a value, so that Dynamo makes several graphs of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 3)
        self.is_open = torch.tensor(1.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        return self.down(h if self.is_open > 0 else -h)


def test_what_cannot_be_compiled_runs_as_it_is():
    torch.manual_seed(0)
    model = Branch()
    expected = parameters_after(copy.deepcopy(model))
    with pytest.warns(UserWarning, match=r"Branch run uncompiled: .*[Dd]ata-dependent"):
        found = parameters_after(model, compile=EAGER)
    check_same(found, expected)


class Counting(nn.Sequential):
    """Is another program in every pass: a number that Python reads has changed."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return super().forward(x) * (1 + self.number)


def test_blocks_take_over_in_the_pass_in_which_the_whole_was_tried():
    """That call found the whole model's forward, which is gone: it says nothing of its own."""
    config = ModelConfig(
        family="gpt2", vocab_size=64, context_length=8, d_model=16, num_layers=2, num_heads=2,
        d_ff=32,
    )  # fmt: skip
    tokens = torch.randint(64, (24, 8))
    found = {}
    for compiled in (False, EAGER):
        data = DataLoader(TensorDataset(tokens, tokens), batch_size=4)
        engine, module, optimizer, loader = attach(
            build(config, seed=0), data_loader=data, compile=compiled, max_grad_norm=0.1
        )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                module(x, labels=y).mean().backward()
                optimizer.step()
                if step == 2:
                    break
        assert len(told) == bool(compiled)
        assert all("compiled block by block, not as a whole" in str(each.message) for each in told)
        engine.detach()
        found[bool(compiled)] = {n: each.detach() for n, each in module.named_parameters()}
    check_same(found[True], found[False])


def test_what_would_be_compiled_in_every_pass_runs_as_it_is():
    def model() -> nn.Module:
        return Counting(*make_model())

    expected = parameters_after(model(), recheck=False)
    with pytest.warns(
        UserWarning, match=r"Counting runs uncompiled from now on: .*compiled too often"
    ):
        found = parameters_after(model(), compile=EAGER, recheck=False)
    check_same(found, expected)


def test_copies_and_pickles_are_plain():
    engine, module, _, loader = attach(compile=EAGER)
    x = next(iter(loader))[0]
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(made(x), module.eval()(x))
        assert not hasattr(made.forward, "refusal")
    engine.detach()


def doubled(module: nn.Module, x: Tensor) -> Tensor:
    return 2 * nn.Sequential.forward(module, x)  # type: ignore[arg-type]


def test_copies_of_a_forward_of_the_users_own():
    model = make_model()
    model.forward = doubled.__get__(model)
    engine, module, _, loader = attach(model, compile=EAGER)
    x = next(iter(loader))[0]
    made = copy.deepcopy(module)
    torch.testing.assert_close(made(x), module.eval()(x))
    assert made.forward.__self__ is made
    engine.detach()
    assert module.forward.__func__ is doubled


def test_two_forward_passes_of_one_batch():
    def run(compile: object) -> dict[str, Tensor]:  # noqa: A002
        engine, module, optimizer, loader = attach(make_model(), compile=compile)
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            cross_entropy(module(x) + module(-x), y).backward()
            optimizer.step()
            if step == 2:
                break
        engine.detach()
        return {name: each.detach().clone() for name, each in module.named_parameters()}

    check_same(run(EAGER), run(False))


class WithLoss(nn.Module):
    """Returns a loss and what it was made of, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.inner(x)
        return cross_entropy(logits, y), logits


@pytest.mark.parametrize("uses", ["loss", "logits", "both"])
def test_outputs_that_are_not_used(monkeypatch, uses):
    seen: list[tuple[int, ...]] = []
    own = attachment._with_thin_zeros

    def spied(outputs, gradients):
        found = list(own(outputs, gradients))
        seen.extend(each.stride() for each in found if each is not None)
        return found

    def run(compile: object) -> dict[str, Tensor]:  # noqa: A002
        engine, module, optimizer, loader = attach(WithLoss(), compile=compile)
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss, logits = module(x, y)
            other = cross_entropy(logits, y)
            {"loss": loss, "logits": other, "both": loss + 0.5 * other}[uses].backward()
            optimizer.step()
            if step == 2:
                break
        engine.detach()
        return {name: each.detach().clone() for name, each in module.named_parameters()}

    expected = run(False)
    monkeypatch.setattr(attachment, "_with_thin_zeros", spied)
    check_same(run(EAGER), expected)
    assert ((0, 0) in seen) == (uses == "loss")  # zeros of logits that take no memory


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("how", ["backward(inputs=)", "autograd.grad"])
def test_gradients_of_named_tensors_train_nothing_and_it_is_said(how, is_compiled):
    """Parameters take no gradients of autograd's own, so that none of them leaves unclipped."""
    settings = {"compile": EAGER} if is_compiled else {}
    engine, module, optimizer, loader = attach(**settings)
    batches = iter(loader)
    x, y = next(batches)
    before = [each.detach().clone() for each in module.parameters()]
    loss, trained = cross_entropy(module(x), y), list(module.parameters())
    if how == "autograd.grad":
        with pytest.raises(UnsupportedOperation, match=r"asked for the gradient of '0\.weight'"):
            torch.autograd.grad(loss, trained, allow_unused=True)
    else:
        loss.backward(inputs=trained)
    optimizer.step()
    with pytest.raises(BadInput, match="step 0 never went backward"):
        next(batches)
    assert engine.ledger.num_intents == 0
    assert all(map(torch.equal, module.parameters(), before))
    engine.detach()


def test_a_batch_that_mixes_is_refused_as_ever():
    class Mixing(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    torch.manual_seed(0)
    engine, module, _, loader = attach(Mixing(nn.Linear(6, 3)), compile=EAGER)
    with pytest.raises(UnsupportedOperation, match=r"mix|depends on"):
        module(next(iter(loader))[0])
    engine.detach()


def test_arguments():
    with pytest.raises(BadInput, match="backend, mode and options"):
        attach(compile={"fullgraph": False})


@pytest.mark.full
def test_dropout():
    """Steps run, with masks of the compiler's own; per-sample norms were compared before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 3))
    engine, module, optimizer, loader = attach(model, compile=EAGER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(module, optimizer, loader, 10)
    assert passes_of(engine).refusal is None
    engine.detach()


def test_a_number_that_is_drawn_and_multiplied_with():
    """It is a tensor to the compiler, and not the number of `capture/torch_compile.py`."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)

        def forward(self, x):
            return self.inner(x) * (0.999 + 0.001 * torch.rand([]))

    engine, module, optimizer, loader = attach(Scaled(), compile=EAGER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(module, optimizer, loader, 3)
    assert passes_of(engine).refusal is None
    engine.detach()


def compiled_whole(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="aot_eager")
    return module


def compiled_block(module: nn.Module) -> nn.Module:
    next(module.children()).compile(backend="aot_eager")
    return module


def compiled_child(module: nn.Module) -> nn.Module:
    """As torchtitan does: what `torch.compile(block)` returns takes the block's place."""
    name, child = next(module.named_children())
    setattr(module, name, torch.compile(child, backend="aot_eager"))
    return module


def compiled_forward(module: nn.Module) -> nn.Module:
    module.forward = torch.compile(module.forward, backend="aot_eager")
    return module


def canonical(module: nn.Module) -> dict[str, Tensor]:
    return {canonical_name(name): each.detach() for name, each in module.named_parameters()}


def compiled_parts(module: nn.Module) -> list[object]:
    own = getattr(module, "_orig_mod", module)
    found = [(each._compiled_call_impl, vars(each).get("forward")) for each in own.modules()]
    return [vars(module).get("forward"), *found]


@pytest.mark.parametrize(
    "how",
    [
        compiled_whole,
        pytest.param(compiled_in_place, marks=pytest.mark.full),
        pytest.param(compiled_block, marks=pytest.mark.full),
        compiled_child,
        pytest.param(compiled_forward, marks=pytest.mark.full),
    ],
)
def test_what_was_compiled_before(how):
    """It trains as it would uncompiled, with the user's backend, and is given back."""
    given = how(make_model())
    before = compiled_parts(given)
    engine, module, optimizer, loader = attach(given, max_physical_batch_size=4)
    assert module is given
    train(module, optimizer, loader, 10)
    own = getattr(module, "_orig_mod", module)
    assert passes_of(engine).refusal is None
    assert vars(passes_of(engine)._inner)["compiler_name"] == "aot_eager"
    engine.detach()
    check_same(canonical(own), uncompiled(4))
    assert compiled_parts(module) == before
    module(torch.ones(2, 6))


@pytest.mark.parametrize(
    "how",
    [
        compiled_whole,
        compiled_in_place,
        pytest.param(compiled_block, marks=pytest.mark.full),
        compiled_child,
    ],
)
def test_what_is_compiled_after(how):
    """Private passes are compiled from the next one on."""
    engine, module, optimizer, loader = attach(max_physical_batch_size=4)
    given = how(module)
    before = compiled_parts(given)
    train(given, optimizer, loader, 10)
    passes = passes_of(engine)
    assert passes.refusal is None
    assert passes.num_graphs > 0
    assert vars(passes._inner)["compiler_name"] == "aot_eager"
    engine.detach()
    check_same(canonical(module), uncompiled(4))
    assert compiled_parts(given) == before


def test_evaluation_is_compiled():
    num_runs = 0

    def counting(graph: torch.fx.GraphModule, _: list) -> Callable:
        def run(*args: object) -> object:
            nonlocal num_runs
            num_runs += 1
            return graph(*args)

        return run

    engine, module, _, loader = attach(compile={"backend": counting})
    expected = make_model()(torch.ones(2, 6))
    for x, _ in loader:
        module.eval()
        with torch.no_grad():
            torch.testing.assert_close(module(torch.ones(2, 6)), expected)
            module(x)
        break
    assert num_runs == 2
    engine.detach()
