"""What forward may contain, and what a module may keep: exact, or refused in a sentence."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tests.privacy.common import NUM_CLASSES, NUM_FEATURES, attach, make_model, step_of, train
from unison.errors import BadInput, UnisonError, UnsupportedOperation

# ---- memory --------------------------------------------------------------------------------------


def tiny_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def tiny_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config)


def tiny_sequential() -> nn.Module:
    return nn.Sequential(nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 32))


@pytest.mark.parametrize(
    ("make", "clipping", "is_own_loss"),
    [
        (tiny_sequential, "auto", False),
        (tiny_sequential, "ghost", False),
        (tiny_sequential, "recompute_bk", False),
        (tiny_gpt2, "auto", True),
        (tiny_gpt2, "ghost", False),
        (tiny_llama, "auto", False),
        (tiny_llama, "recompute_bk", True),
    ],
)
def test_memory_is_free_after_detach_and_del(make, clipping, is_own_loss):
    """At once, without the garbage collector; though the user still holds a loss and outputs."""
    data = TensorDataset(torch.randint(0, 32, (20, 7)))
    engine, module, optimizer, private = attach(
        make(), data_loader=DataLoader(data, batch_size=5), clipping=clipping
    )
    for (x,) in private:
        optimizer.zero_grad()
        output = module(x, labels=x) if is_own_loss else module(x)
        logits = output if isinstance(output, Tensor) else output.logits
        losses = cross_entropy(logits.transpose(1, 2), x, reduction="none").mean(1)
        loss = output.loss if is_own_loss else losses.mean()
        loss.backward()
        optimizer.step()
    alive = [weakref.ref(module), *map(weakref.ref, module.parameters())]
    memory = [StorageWeakRef(each.untyped_storage()) for each in module.parameters()]
    gc.collect()  # what transformers and the tests before have left
    gc.disable()
    try:
        engine.detach()
        del engine, module, optimizer, private
        assert not any(each() is not None for each in alive)
        assert all(each.expired() for each in memory)
    finally:
        gc.enable()
    with pytest.raises(RuntimeError):
        loss.backward()  # as ever, of a graph that is gone


def test_a_pass_that_was_under_way_ends_with_the_engine():
    engine, module, optimizer, private = attach()
    x, y = next(iter(private))
    loss = cross_entropy(module(x), y)
    alive = weakref.ref(module)
    engine.detach()
    del engine, private
    with pytest.raises(BadInput, match="engine was detached after this forward pass"):
        loss.backward()
    cross_entropy(module(x), y).backward()  # it is the user's own again
    optimizer.step()
    del module, optimizer
    assert alive() is None


# ---- what forward may contain --------------------------------------------------------------------


class Filter(nn.Module):
    """A filter in frequency space (as in FNet's kin), of a parameter in one of several forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.head = form, nn.Linear(NUM_FEATURES, NUM_CLASSES)
        shapes = {"rfft": (NUM_FEATURES,), "view_as_complex": (4, 2), "to": (4,), "complex": (4,)}
        self.weight = nn.Parameter(torch.randn(shapes[form]))

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "rfft":
            weight = torch.fft.rfft(self.weight)
        elif self.form == "view_as_complex":
            weight = torch.view_as_complex(self.weight)
        elif self.form == "complex":
            weight = torch.complex(self.weight, 2 * self.weight).conj()
        else:
            weight = self.weight.to(torch.complex64 if x.dtype == torch.float32 else torch.cdouble)
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * weight, n=NUM_FEATURES))


class Window(nn.Module):
    """A trained window of a spectrogram."""

    def __init__(self) -> None:
        super().__init__()
        self.window, self.head = nn.Parameter(torch.hann_window(4)), nn.Linear(12, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.stft(
            x, 4, hop_length=2, window=self.window, pad_mode="constant", return_complex=True
        )
        return self.head(found.abs().flatten(1))


@pytest.mark.filterwarnings("ignore:no rule for", "ignore:There is a performance drop")
@pytest.mark.parametrize("clipping", ["auto", "ghost", "recompute_bk"])
@pytest.mark.parametrize("form", ["rfft", "view_as_complex", "to", "complex", "stft"])
def test_fourier_transforms_of_parameters_are_exact(form, clipping):
    module = Window() if form == "stft" else Filter(form)
    plain = copy.deepcopy(module).double()
    _, module, _, private = attach(module, noise_multiplier=0.0, clipping=clipping)
    x, y = step_of(module, private)
    expected = {name: torch.zeros_like(each) for name, each in plain.named_parameters()}
    for one, label in zip(x.double(), y, strict=True):
        plain.zero_grad()
        cross_entropy(plain(one[None]), label[None]).backward()
        norm = torch.stack([each.grad.norm() for each in plain.parameters()]).norm()
        for name, each in plain.named_parameters():
            expected[name] += each.grad * min(1.0, 0.5 / norm)
    for name, each in module.named_parameters():
        torch.testing.assert_close(12 * each.grad.double(), expected[name], rtol=1e-5, atol=1e-6)


class Derivative(nn.Module):
    """A physics-informed network: its output holds its own derivative."""

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.net, self.create_graph = make_model(), create_graph

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = self.net(x)
        (gradient,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u + (gradient if self.create_graph else gradient.detach())[:, :NUM_CLASSES]


class Backward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = self.net(x)
        u.sum().backward(retain_graph=True)
        assert x.grad is not None
        return u + x.grad[:, :NUM_CLASSES]


class Vmapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(self.net)(x)


class FunctionalGradient(Vmapped):
    def forward(self, x: Tensor) -> Tensor:
        derivative = torch.func.vmap(torch.func.grad(lambda row: self.net(row).sum()))(x)
        return self.net(x) + derivative[:, :NUM_CLASSES]


class Nested(Vmapped):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([row[None] for row in x], layout=self.layout)
        return torch.stack([each.sum(0) for each in self.net(rows).unbind()])


class Table(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, **settings)
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((10 * x).abs().long() % 10).mean(1))


class Bag(Table):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, 4, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((10 * x).abs().long() % 10))


class Unregistered(nn.Module):
    """Has a tensor that takes gradients, and is no parameter; or that of somebody else."""

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.net, self.shift = make_model(), [shift]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.shift[0]


REFUSED = {
    "autograd.grad": (lambda: Derivative(True), "calls torch.autograd.grad in its forward"),
    "autograd.grad, detached": (lambda: Derivative(False), "calls torch.autograd.grad"),
    "backward": (Backward, "calls backward in its forward"),
    "vmap": (Vmapped, "inside of torch.func or vmap"),
    "func.grad": (FunctionalGradient, "inside of torch.func or vmap"),
    "nested": (lambda: Nested(torch.strided), "NestedTensor"),
    "jagged": (lambda: Nested(torch.jagged), "an operation that was not seen"),
    "max_norm": (lambda: Table(max_norm=1.0), "max_norm"),
    "scale_grad_by_freq": (lambda: Table(scale_grad_by_freq=True), "scale_grad_by_freq"),
    "EmbeddingBag(max_norm=)": (Bag, "embedding_bag"),
    "a tensor": (
        lambda: Unregistered(torch.zeros(NUM_CLASSES, requires_grad=True)),
        r"a tensor of shape \[3\] that takes gradients and is none of its parameters",
    ),
    "another's parameter": (
        lambda: Unregistered(nn.Parameter(torch.zeros(NUM_CLASSES))),
        "none of its parameters",
    ),
}


@pytest.mark.filterwarnings(
    "ignore:no rule for", "ignore:There is a performance drop", "ignore:The PyTorch API of nested"
)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_clipped_is_refused_before_budget_is_spent(what):
    make, words = REFUSED[what]
    engine, module, _, private = attach(make())
    x, _ = next(iter(private))
    for use in (module, engine.check):
        with pytest.raises(UnisonError, match=words):
            use(x)
    assert not engine.ledger.spending.events
    assert all(each.grad is None for each in module.parameters())


def test_complex_parameters_are_refused_when_attached():
    module = nn.Sequential(nn.Linear(NUM_FEATURES, NUM_CLASSES, dtype=torch.complex64))
    with pytest.raises(UnsupportedOperation, match=r"0\.weight is complex.*view_as_complex"):
        attach(module)


class RequiresGradients(nn.Module):
    """Features of a frozen part are made to take gradients, as for activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(NUM_FEATURES, 4).requires_grad_(False)
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(x).requires_grad_())


def test_leaves_that_forward_makes_for_itself_are_nobodys():
    _, module, optimizer, private = attach(RequiresGradients())
    train(module, optimizer, private, 2)


class KeepsHidden(nn.Module):
    """Leaves what it computed on itself, and so all of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(NUM_FEATURES, 4), nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.net(x)
        return self.head(self.hidden)


@pytest.mark.parametrize("clipping", ["auto", "ghost"])
def test_a_module_may_keep_what_it_computed(clipping):
    _, module, optimizer, private = attach(KeepsHidden(), clipping=clipping)
    train(module, optimizer, private, 2)


def test_what_a_module_kept_does_not_come_into_the_loss():
    """Nobody looked whether rows meet in it, as they do in the auxiliary losses of experts."""
    engine, module, _, private = attach(KeepsHidden())
    held: list[Tensor] = []
    module.head.register_forward_hook(lambda _, given, output: held.append(output))
    x, y = next(iter(private))
    for kept in (lambda: module.hidden.mean(0).square(), lambda: held[-1]):
        loss = cross_entropy(module(x), y) + kept().sum()
        with pytest.raises(UnsupportedOperation, match=r"add \(test_.*did not return.*Return it"):
            loss.backward()
    module(x)
    with pytest.raises(UnsupportedOperation, match=r"is made of a tensor that .*did not return"):
        cross_entropy(held[-1], y).backward()
    assert engine.ledger.num_intents == 0
    engine.detach()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_parts_are_frozen_or_refused():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(NUM_FEATURES, 4), nn.Tanh()))
    module = nn.Sequential(scripted, nn.Linear(4, NUM_CLASSES))
    with pytest.raises(
        UnsupportedOperation, match=r"0\.0\.weight lies in a scripted module.*freeze"
    ):
        attach(module)
    for each in scripted.parameters():
        each.requires_grad_(False)
    module.append(torch.jit.trace(nn.Softplus(), torch.zeros(1, NUM_CLASSES)))
    engine, module, optimizer, private = attach(module)
    train(module, optimizer, private, 2)
    engine.detach()


class Scaled(nn.Module):
    """Returns a learned scale beside its outputs, or attends by a function of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(NUM_FEATURES, 2 * NUM_CLASSES)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        if self.how == "attends":
            q, k = self.layer(x)[:, None, None].chunk(2, -1)
            return flex_attention(q, k, k)[:, 0, 0] * self.scale
        return self.layer(x), self.scale.exp()


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_what_is_not_followed_out_of_forward_or_into_an_operator_is_refused_in_a_sentence():
    for how, message in (
        ("returns", r"the module returns 'scale', or what it made .*inside of forward"),
        ("attends", r"flex_attention runs a function .*scaled_dot_product_attention"),
    ):
        engine, module, _, private = attach(Scaled(how))
        with pytest.raises(UnsupportedOperation, match=message):
            module(next(iter(private))[0])
        assert engine.ledger.num_intents == 0
        engine.detach()
