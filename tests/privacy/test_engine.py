"""The engine in the user's own loop: its arguments, what it attaches to and what it refuses."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.privacy.common import (
    NUM_FEATURES,
    attach,
    data,
    loader,
    losses,
    make_model,
    train,
)
from unison.clip import MODES, clipped_gradients
from unison.errors import BadInput, UnsupportedOperation
from unison.privacy import (
    AdaptiveClipping,
    Poisson,
    PrivacyEngine,
)

ALL_MODES = [*MODES, "auto"]
X, Y = data()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clipping": "gost"}, "did you mean 'ghost'"),
        ({"clip_rule": "flaat"}, "did you mean 'flat'"),
        ({"loss_reduction": "none"}, "loss_reduction must be one of 'mean', 'sum'"),
        ({"criterion": nn.MSELoss()}, "no argument 'criterion': the loss is the user's own"),
        ({"grad_sample_mode": "ghost"}, "no argument 'grad_sample_mode': use clipping="),
        ({"sigma": 1.0}, r"no argument 'sigma'; docs/from-opacus\.md"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be 0 or more"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0"),
        ({"expected_batch_size": 0.0}, "expected_batch_size must be above 0"),
        (
            {"sampling": Poisson(rate=0.1), "poisson_sampling": False},
            "leave poisson_sampling out",
        ),
        (
            {
                "adaptive_clipping": AdaptiveClipping(count_noise_multiplier=1),
                "clip_rule": "automatic",
            },
            "clip_rule='flat'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_used(settings, message):
    with pytest.raises(BadInput, match=message):
        attach(**settings)


def test_seeds_and_secrets():
    with pytest.raises(BadInput, match="seed= makes noise and sampling predictable"):
        PrivacyEngine().make_private(
            module=(module := make_model()),
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=loader(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            seed=1,
        )
    with pytest.raises(BadInput, match=r"needs make_private\(seed="):
        PrivacyEngine(secure_noise=False).make_private(
            module=(module := make_model()),
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=loader(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    with pytest.warns(UserWarning, match="Nothing that it gives is private"):
        PrivacyEngine(secure_noise=False).make_private(
            module=(module := make_model()),
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=loader(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            seed=1,
        )


def test_the_optimizer_has_the_modules_parameters_and_no_others():
    module = make_model()
    with pytest.raises(BadInput, match=r"does not have 2\.weight, 2\.bias"):
        attach(module, optimizer=torch.optim.SGD(module[0].parameters(), lr=0.1))
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*module.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(BadInput, match="2 parameters that are not the module's"):
        attach(module, optimizer=optimizer)


class Wrapping:
    """An optimizer of somebody's, around one of torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def test_arguments_of_another_kind_are_refused():
    module = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(BadInput, match=r"found Wrapping.*wraps one, give make_private that one"):
        attach(module, optimizer=Wrapping(optimizer))
    with pytest.raises(BadInput, match=r"data_loader= expects a .*DataLoader.*, found list"):
        attach(module, data_loader=[data()])
    with pytest.raises(BadInput, match=r"module= expects a torch\.nn\.Module, found method"):
        PrivacyEngine().make_private(
            module=module.forward,
            optimizer=optimizer,
            data_loader=loader(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


class Lookahead(torch.optim.Optimizer):
    """As many are written: what it wraps has all that the base class would make."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: None = None) -> None:
        self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def test_an_optimizer_whose_steps_nobody_is_told_of_is_refused():
    module = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(
        BadInput, match=r"Lookahead has not called super\(\).*give make_private that"
    ):
        attach(module, optimizer=Lookahead(optimizer))
    _, _, optimizer, private = attach(module, optimizer=optimizer)
    train(module, Lookahead(optimizer), private, 1)  # the remedy


def test_an_optimizer_of_sparse_gradients_is_refused():
    module = make_model()
    with pytest.raises(UnsupportedOperation, match=r"SparseAdam takes sparse.*use Adam or AdamW"):
        attach(module, optimizer=torch.optim.SparseAdam(module.parameters(), lr=0.1))


def test_a_parameter_without_a_shape_is_refused():
    module = nn.Sequential(nn.Linear(NUM_FEATURES, 4), nn.LazyLinear(3))
    message = r"1\.weight has no shape yet.*call the module once"
    with pytest.raises(BadInput, match=message):
        attach(module)
    with pytest.raises(BadInput, match=message):
        PrivacyEngine().make_private_with_epsilon(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=loader(),
            target_epsilon=3.0,
            target_delta=1e-5,
            epochs=1,
            max_grad_norm=1.0,
        )
    module(torch.zeros(1, NUM_FEATURES))
    attach(module)


def test_several_optimizers_train_behind_the_engines():
    """As the message for an optimizer of some parameters says."""

    def split(module: nn.Sequential) -> list[torch.optim.Optimizer]:
        first, others = list(module[:1].parameters()), list(module[1:].parameters())
        return [torch.optim.AdamW(first, lr=0.1), torch.optim.SGD(others, lr=0.1, momentum=0.9)]

    module, alone = make_model(), make_model()
    few = split(module)
    with pytest.raises(BadInput, match=r"If another optimizer .*lr=0\.0\).*its step\(\) first"):
        attach(module, optimizer=few[0])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    _, _, optimizer, private = attach(module, optimizer=optimizer, max_physical_batch_size=5)
    done, expected = 0, split(alone)
    for x, y in private:
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        for own, each in zip(alone.parameters(), module.parameters(), strict=True):
            own.grad = None if each.grad is None else each.grad.clone()
        for each in (optimizer, *few, *expected):
            each.step()
        done += private.current.is_last
        if done == 3:
            break
    for found, wanted in zip(module.parameters(), alone.parameters(), strict=True):
        assert torch.equal(found, wanted)
        assert found.grad is not None


def test_an_engine_attaches_once():
    engine, module, optimizer, _ = attach()
    with pytest.raises(BadInput, match="attached already"):
        engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=loader(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_detach_gives_the_module_back():
    module = make_model()
    before = set(vars(module[0]))
    engine, module, optimizer, private = attach(module)
    train(module, optimizer, private, 2)
    engine.detach()
    assert set(vars(module[0])) == before
    optimizer.zero_grad()
    cross_entropy(module(X[:9]), Y[:9]).backward()
    plain = make_model()
    plain.load_state_dict(module.state_dict())
    cross_entropy(plain(X[:9]), Y[:9]).backward()
    assert torch.equal(module[0].weight.grad, plain[0].weight.grad)
    optimizer.step()
    with pytest.raises(BadInput, match="not attached"):
        engine.get_epsilon(1e-3)


def test_check_names_what_mixes_samples():
    module = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    engine, *_ = attach(module)
    with pytest.raises(UnsupportedOperation, match="batch norm"):
        engine.check(X[:8])
    engine, *_ = attach()
    assert {each.layer.name for each in engine.check(X[:8]).layers} == {
        *("0.weight", "0.bias", "2.weight", "2.bias")
    }


def test_what_mixes_samples_is_caught_before_anything_is_spent():
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(NUM_FEATURES, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x - x.mean(0))

    engine, module, _, private = attach(Mixes())
    x, _ = next(iter(private))
    with pytest.raises(UnsupportedOperation, match="samples mix"):
        module(x)
    assert engine.ledger.num_intents == 0


def test_a_scheduler_that_steps_too_often_is_warned_of():
    _, module, optimizer, private = attach(max_physical_batch_size=3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    with pytest.warns(UserWarning, match="a scheduler that steps once per loop"):
        train(module, optimizer, private, 2)


def test_time_major_inputs():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(NUM_FEATURES, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:  # [tokens, batch, features]
            return self.head(self.rnn(x)[0])  # [tokens, batch, 3]

    _, module, _, private = attach(Recurrent(), batch_first=False, noise_multiplier=0.0)
    x, _ = next(iter(private))
    tokens = torch.stack([x, 2 * x])  # [2, batch, features]
    module(tokens).square().sum((0, 2)).mean().backward()
    plain = Recurrent()
    plain.load_state_dict(module.state_dict())
    loss = lambda model, rows: model(rows.movedim(0, 1)).square().sum((0, 2))  # noqa: E731
    expected = clipped_gradients(plain, loss, tokens.movedim(0, 1), max_norm=0.5).sums
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad * 12, expected[name], rtol=1e-5, atol=1e-6)


def test_bfloat16_parameters_get_bfloat16_gradients_from_float32_sums():
    x, y = data()
    dataset = torch.utils.data.TensorDataset(x.bfloat16(), y)
    _, module, optimizer, private = attach(
        make_model().bfloat16(), data_loader=torch.utils.data.DataLoader(dataset, batch_size=12)
    )
    train(module, optimizer, private, 2)
    assert module[0].weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_activation_checkpointing(mode, is_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(NUM_FEATURES, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return torch.utils.checkpoint.checkpoint(self.second, x, use_reentrant=is_reentrant)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        _, module, _, private = attach(Checkpointed(), clipping=mode, noise_multiplier=0.0)
        x, y = next(iter(private))
        cross_entropy(module(x), y).backward()
    plain = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, 3))
    names = {"0": "first", "2": "second"}
    plain.load_state_dict(
        {
            f"{a}.{kind}": module.state_dict()[f"{b}.{kind}"]
            for a, b in names.items()
            for kind in ("weight", "bias")
        }
    )
    expected = clipped_gradients(plain, losses, (x, y), max_norm=0.5).sums
    for a, b in names.items():
        found = module.get_parameter(f"{b}.weight").grad * 12
        torch.testing.assert_close(found, expected[f"{a}.weight"], rtol=1e-5, atol=1e-6)
