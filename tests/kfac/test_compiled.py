"""K-FAC beside torch.compile: the user's passes run compiled, statistics are the same."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness.compiling import NUM_RUNS, counting
from unison import KFAC, KFACConfig

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
    assert NUM_RUNS[0] >= 3  # the user's passes, not those of statistics
