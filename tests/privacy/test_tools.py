"""Torch's own tools around a private module: training stays exact, or a sentence refuses them."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations, prune
from torch.utils.flop_counter import FlopCounterMode

from tests.harness import oracle
from tests.privacy.common import NUM_FEATURES, attach, losses, make_model
from unison.errors import BadInput, UnsupportedOperation

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean"),
]

BATCH_SIZE = 4

Tool = Callable[[Any, torch.optim.Optimizer, Tensor, Tensor], Any]
"""Does something with (module, optimizer, rows, labels) in the middle of a loop."""


def check_step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Make a step, without noise, and compare it with the float64 loop over rows."""
    optimizer.zero_grad()
    cross_entropy(module(x), y).backward()
    check_gradients(module, x, y)
    optimizer.step()


def check_gradients(module: nn.Module, x: Tensor, y: Tensor) -> None:
    alone = make_model()
    alone.load_state_dict(module.state_dict())
    expected = oracle.clipped_sum(alone, losses, (x.float(), y), 0.5)
    for name, each in module.named_parameters():
        tolerance = 1e-6 if each.dtype != torch.bfloat16 else 2e-2
        torch.testing.assert_close(
            each.grad.double() * BATCH_SIZE, expected[name], rtol=tolerance, atol=tolerance
        )


def steps(drawn: Tool | None, stepped: Tool | None = None) -> None:
    """Three steps, with one tool before the second one's forward pass, and one after the step."""
    engine, module, optimizer, private = attach(noise_multiplier=0.0, batch_size=BATCH_SIZE)
    try:
        for number, (x, y) in enumerate(private):
            if number == 1 and drawn is not None:
                drawn(module, optimizer, x, y)
            check_step(module, optimizer, x.to(next(module.parameters()).dtype), y)
            if number == 1 and stepped is not None:
                stepped(module, optimizer, x, y)
            if number == 2:
                break
    finally:
        engine.detach()


# --- what may be done -----------------------------------------------------------------------------


def without_grad(tool: Tool) -> Tool:
    def run(module: Any, *given: Any) -> None:
        with torch.no_grad():
            tool(module, *given)

    return run


def in_eval_mode(tool: Tool) -> Tool:
    def run(module: Any, *given: Any) -> None:
        module.eval()
        tool(module, *given)
        module.train()

    return run


def on_copy(tool: Tool) -> Tool:
    return lambda module, *given: tool(copy.deepcopy(module), *given)


def other_rows(tool: Tool) -> Tool:
    return lambda module, optimizer, x, y: tool(module, optimizer, torch.ones(31, NUM_FEATURES), y)


def call(module, optimizer, x, y):
    module(x)


def traced(module, optimizer, x, y):
    torch.jit.trace(module, x, check_trace=False)  # which compares, and asks: a condition


def exported(module, optimizer, x, y):
    program = torch.export.export(module, (x,))
    torch.testing.assert_close(program.module()(x), copy.deepcopy(module)(x))


def count_flops(module, optimizer, x, y):
    with FlopCounterMode(display=False) as counter:
        module(x)
    assert counter.get_total_flops() > 0


def profile(module, optimizer, x, y):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        module(x)
    assert found.key_averages()


def called_with_parameters(module, optimizer, x, y):
    functional_call(module, dict(module.named_parameters()), (x,))


def fuse(module, optimizer, x, y):
    nn.utils.fuse_conv_bn_eval(nn.Conv1d(2, 3, 1).eval(), nn.BatchNorm1d(3).eval())


def average(module, optimizer, x, y):
    torch.optim.swa_utils.AveragedModel(module).update_parameters(module)


def prune_for_good(module, optimizer, x, y):
    prune.l1_unstructured(module[0], "weight", amount=0.3)
    prune.remove(module[0], "weight")


def split_group(module, optimizer, x, y):
    group = optimizer.param_groups[0]
    rest = {**group, "params": group["params"][2:]}
    group["params"] = group["params"][1::-1]
    optimizer.add_param_group(rest)
    optimizer.param_groups.reverse()


HARMLESS = {
    "trace without grad": other_rows(without_grad(traced)),
    "trace in eval mode": other_rows(in_eval_mode(traced)),
    "trace a copy": other_rows(on_copy(traced)),
    "export without grad": without_grad(exported),
    "export in eval mode": in_eval_mode(exported),
    "export a copy": on_copy(exported),
    "make_fx without grad": without_grad(lambda module, _, x, y: make_fx(module)(x)),
    "call without grad": without_grad(call),
    "flops without grad": without_grad(count_flops),
    "flops": count_flops,
    "profiler without grad": without_grad(profile),
    "profiler": profile,
    "functional_call without grad": without_grad(called_with_parameters),
    "functional_call": called_with_parameters,
    "copy": on_copy(call),
    "fused": fuse,
    "averaged": average,
    "pruned for good": prune_for_good,
    "groups split and reversed": split_group,
    "float64": lambda module, *_: module.double(),
    "bfloat16": lambda module, *_: module.to(torch.bfloat16),
    "to where it is": lambda module, *_: module.to("cpu:0"),
    "symbolically traced": lambda module, _, x, y: torch.fx.symbolic_trace(module)(x),
}
AGAIN = ("flops", "profiler", "functional_call")  # second passes of a batch that went backward
CHANGING = ("pruned for good", "groups split and reversed", "float64", "bfloat16", "to where it is")


def all_of(names: Iterable[str]) -> Tool:
    def run(*given: Any) -> None:
        for name in names:
            HARMLESS[name](*given)

    return run


@pytest.mark.parametrize("name", ["looks", *CHANGING])
def test_training_goes_on_as_if_nothing_had_happened(name):
    names = [name] if name in CHANGING else [each for each in HARMLESS if each not in CHANGING]
    once = [each for each in names if each not in AGAIN]
    # Last, what begins a pass that is to be trained: nothing is copied in the middle of one.
    steps(all_of([*once, *(each for each in names if each in AGAIN)]), all_of(once))


# --- a whole step inside of a tool ----------------------------------------------------------------


def profiled_step(module, x, y):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        cross_entropy(module(x), y).backward()


def counted_step(module, x, y):
    with FlopCounterMode(display=False) as counter:
        cross_entropy(module(x), y).backward()
    assert counter.get_total_flops() > 0


def called_step(module, x, y):
    output = functional_call(module, dict(module.named_parameters()), (x,))
    cross_entropy(output, y).backward()


def step_with_graph(module, x, y):
    cross_entropy(module(x), y).backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
@pytest.mark.parametrize("step", [profiled_step, counted_step, called_step, step_with_graph])
def test_a_step_inside_of_a_tool_is_the_clipped_sum(step):
    engine, module, optimizer, private = attach(noise_multiplier=0.0, batch_size=BATCH_SIZE)
    for number, (x, y) in enumerate(private):
        optimizer.zero_grad()
        step(module, x, y)
        check_gradients(module, x, y)
        optimizer.step()
        if number == 1:
            break
    engine.detach()


# --- what is refused ------------------------------------------------------------------------------


def gradients(module, x, y, **settings):
    return torch.autograd.grad(cross_entropy(module(x), y), list(module.parameters()), **settings)


def gradient_penalty(module, _, x, y):
    sum(each.square().sum() for each in gradients(module, x, y, create_graph=True)).backward()


TRACED = r"would write down what the engine does .*module\.eval\(\) .*copy\.deepcopy"
SCRIPTED = r"torch\.jit\.script compiles a module's hooks.* engine\.detach\(\)"
GRADIENT = r"asked for the gradient of '0\.weight'.*Call loss\.backward\(\)"

REFUSED: dict[str, tuple[Tool, str]] = {
    "grad": (lambda module, _, x, y: gradients(module, x, y), GRADIENT),
    "create_graph": (lambda m, _, x, y: gradients(m, x, y, create_graph=True), GRADIENT),
    "unused allowed": (lambda m, _, x, y: gradients(m, x, y, allow_unused=True), GRADIENT),
    "penalty": (gradient_penalty, GRADIENT),
    "trace": (traced, r"torch\.jit\.trace " + TRACED),
    "trace other rows": (other_rows(traced), r"torch\.jit\.trace " + TRACED),
    "export": (exported, r"torch\.export " + TRACED),
    "export other rows": (other_rows(exported), r"torch\.export " + TRACED),
    "make_fx": (lambda module, _, x, y: make_fx(module)(x), "make_fx " + TRACED),
    "script": (lambda module, *_: torch.jit.script(module), SCRIPTED),
    "script a copy": (on_copy(lambda module, *_: torch.jit.script(module)), SCRIPTED),
}


def test_tools_are_refused_and_training_goes_on():
    def refused(*given):
        for act, message in REFUSED.values():
            with pytest.raises(UnsupportedOperation, match=message):
                act(*given)

    def refused_later(*given):
        for act, message in REFUSED.values():
            later = f"went backward already|{GRADIENT}" if message is GRADIENT else message
            with pytest.raises((UnsupportedOperation, BadInput), match=later):
                act(*given)

    steps(refused, refused_later)


def test_gradients_after_the_backward_pass_are_refused():
    engine, module, _, private = attach()
    for x, y in private:
        loss = cross_entropy(module(x), y)
        loss.backward(retain_graph=True)
        with pytest.raises(UnsupportedOperation, match=r"asked for the gradient of '2\.bias'"):
            torch.autograd.grad(loss, module[2].bias, create_graph=True)
        break
    engine.detach()


CHANGED: dict[str, tuple[Tool, str]] = {
    "weight_norm": (lambda module, *_: parametrizations.weight_norm(module[0]), "original0 was"),
    "pruned": (
        lambda module, *_: prune.l1_unstructured(module[0], "weight", amount=0.3),
        "weight_orig was added to the module since make_private; detach",
    ),
    "frozen": (lambda module, *_: module.requires_grad_(False), "0.weight was frozen or thawed"),
    "assigned": (
        lambda module, *_: module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True),
        "0.weight is another parameter than when make_private was called",
    ),
    "resized": (
        lambda module, *_: setattr(module[2].weight, "data", torch.zeros(5, 16)),
        r"2.weight has the shape \[5, 16\] and had \[3, 16\] when make_private was called",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_parameters_of_another_kind_are_refused_at_the_next_step(name):
    act, message = CHANGED[name]
    for tools in ((act, None), (None, act)):
        with pytest.raises(BadInput, match=message):
            steps(*tools)
