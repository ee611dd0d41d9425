"""Functions of the user's own that look at random values: `register_init`."""

import pytest
import torch
from torch import Tensor, nn

from tests.shard.deferred.common import built, refused
from unison.errors import BadInput, UnsupportedOperation
from unison.shard import digest, register_init


@register_init
def sign_fixed_orthogonal_(tensor: Tensor, gain: float = 1.0, *, shift: Tensor) -> Tensor:
    """Looks at random values to decide what to do."""
    with torch.no_grad():
        q, r = torch.linalg.qr(torch.randn(tensor.shape[::-1]))
        if r[0, 0].item() < 0:
            q = -q
        tensor.copy_(q.T * gain + shift + 0 * torch.rand_like(q.T).exponential_())
    return tensor


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(5, 7))
        self.b = nn.Parameter(torch.empty(5, 7))
        for parameter in (self.a, self.b):
            sign_fixed_orthogonal_(parameter, 2.0, shift=torch.zeros(1))


def test_a_registered_init_draws_from_unisons_streams():
    before = torch.get_rng_state()
    module = built(Custom)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.allclose(module.a @ module.a.T, 4 * torch.eye(5), atol=1e-5)
    assert not torch.equal(module.a, module.b)
    torch.manual_seed(3)
    assert digest(built(Custom)) == digest(module)
    assert digest(built(Custom, seed=1)) != digest(module)
    assert "looks at random" in sign_fixed_orthogonal_.__doc__.lower()


def test_a_registered_init_runs_as_it_is_outside():
    torch.manual_seed(0)
    first = sign_fixed_orthogonal_(torch.empty(3, 3), shift=torch.zeros(1))
    torch.manual_seed(0)
    assert torch.equal(sign_fixed_orthogonal_(torch.empty(3, 3), shift=torch.zeros(1)), first)


def test_a_registered_init_is_refused_by_name():
    @register_init
    def bad_(tensor):
        tensor.copy_(torch.poisson(torch.ones(3)))

    def make():
        module = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3))})
        bad_(module["w"])
        return module

    refused(UnsupportedOperation, r"'w'.*registered init calls aten.poisson", make, at="fill")
    with pytest.raises(BadInput, match="is registered already"):
        register_init(bad_)
    with pytest.raises(BadInput, match="takes a function"):
        register_init(3)
