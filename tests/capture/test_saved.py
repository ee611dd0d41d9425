"""What autograd holds, and what it has let go."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unison.capture.recompute import SavedBytes

ROWS, WIDTH = 3, 16
LAYER = 4 * ROWS * WIDTH  # bytes of an input


def deep() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def test_inputs_go_as_their_layers_come():
    model, seen = deep(), []
    saved = SavedBytes(model.parameters())
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.register_hook(lambda _: seen.append((saved.held, saved.freed)))
    with saved.counted():
        loss = model(torch.randn(ROWS, WIDTH)).sum()
    assert (saved.held, saved.freed) == (4 * LAYER, 0)
    loss.backward()
    assert (saved.held, saved.freed) == (0, 4 * LAYER)
    freed = [each for _, each in seen]
    assert freed == sorted(freed)
    assert freed[-1] >= 3 * LAYER
    assert all(sum(each) == 4 * LAYER for each in seen)


def test_parameters_do_not_count_and_shared_memory_does_once():
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    saved = SavedBytes([weight])
    with saved.counted():
        y = (x @ weight).sum() + (x[:1] @ weight).sum() + (x @ weight.mT).sum()
    assert saved.held == LAYER
    del y
    assert (saved.held, saved.freed) == (0, LAYER)


def test_a_checkpoint_saves_its_input_alone():
    model = deep()
    saved = SavedBytes(model.parameters())
    with saved.counted():
        loss = checkpoint(model, torch.randn(ROWS, WIDTH), use_reentrant=False).sum()
    assert saved.held <= LAYER
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
