"""A run that stops and goes on is the run that did not stop, to the bit."""

import copy
import io

import pytest
import torch
from torch import nn

import unison
from tests.kfac.common import Transformer
from tests.kfac.test_step import batches, train
from unison.errors import BadInput
from unison.kfac import KFACConfig


@pytest.mark.parametrize(
    "changes",
    [{}, {"inverse": "eigen", "damping_form": "joint"}, {"graft": "sgd", "fisher": "forward"}],
)
@pytest.mark.parametrize("stop", [1, 4])  # in step with the statistics, and between two of them
def test_resuming_is_not_stopping(changes, stop):
    config = KFACConfig(update_every=2, invert_every=3, min_layer_size=0, **changes)
    data = batches(9)

    def start(model):
        return unison.KFAC(model, config), torch.optim.SGD(model.parameters(), lr=1e-2)

    model = Transformer()
    resumed = copy.deepcopy(model)
    train(model, *start(model), data)
    kfac, optimizer = start(resumed)
    train(resumed, kfac, optimizer, data[:stop])
    file = io.BytesIO()
    torch.save(kfac.state_dict(), file)
    kfac.detach()
    file.seek(0)
    kfac, optimizer = start(resumed)
    kfac.load_state_dict(torch.load(file, weights_only=True))
    train(resumed, kfac, optimizer, data[stop:])
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_state_of_another_model_is_refused():
    model = Transformer()
    kfac = unison.KFAC(model, KFACConfig())
    train(model, kfac, torch.optim.SGD(model.parameters(), lr=1e-2), batches(1))
    other = unison.KFAC(nn.Linear(3, 3), KFACConfig())
    with pytest.raises(BadInput, match="another model"):
        other.load_state_dict(kfac.state_dict())
    wider = unison.KFAC(Transformer(d_ff=12), KFACConfig())
    with pytest.raises(BadInput, match=r"f1.weight is \[9, 6\] there and \[12, 6\] here"):
        wider.load_state_dict(kfac.state_dict())


def test_settings_are_compared(tmp_path):
    model = Transformer()
    kfac = unison.KFAC(model, KFACConfig(update_every=lambda step: 3))
    train(model, kfac, torch.optim.SGD(model.parameters(), lr=1e-2), batches(1))
    kfac.save(tmp_path / "a")
    for change in (
        {"fisher": "forward"},
        {"damping_form": "joint"},
        {"damping_form": "factored"},
        {"likelihood": "bernoulli"},
        {"sharing": "reduce"},
        {"inverse": "eigen"},
        {"policy": "kronecker"},
        {"max_factor_size": 7},
        {"graft": "sgd"},
        {"betas": (0.0, 0.9)},
        {"seed": 1},
    ):
        (name, value), *_ = change.items()
        other = unison.KFAC(model, KFACConfig(**change))
        for load in (
            lambda other=other: other.load_state_dict(kfac.state_dict()),
            lambda other=other: other.load(tmp_path / "a"),
        ):
            with pytest.raises(BadInput, match=rf"run with {name}=.* this one has {name}=") as said:
                load()
            stored = list(value) if isinstance(value, tuple) else value
            assert repr(stored) in str(said.value)
        assert not other.layers
    other = unison.KFAC(model, KFACConfig(damping=0.1, owner_fraction=1.0))
    with pytest.warns(UserWarning, match=r"other settings .*: damping=0.1 \(was 0.001\), update_"):
        other.load_state_dict(kfac.state_dict())
    unison.KFAC(model, KFACConfig(update_every=lambda step: 9)).load(tmp_path / "a")


def test_a_fresh_state_can_be_stored(tmp_path):
    model = Transformer()
    kfac = unison.KFAC(model, KFACConfig())
    kfac.save(tmp_path / "fresh")
    for load in (
        lambda other: other.load_state_dict(kfac.state_dict()),
        lambda other: other.load(tmp_path / "fresh"),
    ):
        other = unison.KFAC(model, KFACConfig())
        load(other)
        assert other.num_steps == 0
        assert other.wants_statistics


def test_a_folder_is_what_the_state_is(tmp_path):
    model = Transformer()
    kfac, other = unison.KFAC(model, KFACConfig()), unison.KFAC(model, KFACConfig())
    train(model, kfac, torch.optim.SGD(model.parameters(), lr=1e-2), batches(3))
    kfac.save(tmp_path / "a")
    kfac.save(tmp_path / "a")  # in the place of the first one
    other.load(tmp_path / "a")
    found, expected = other.state_dict(), kfac.state_dict()
    assert found.keys() == expected.keys()
    assert found["num_steps"] == expected["num_steps"] == 3
    for a, b in zip(found["layers"], expected["layers"], strict=True):
        assert a["layer"] == b["layer"]
        assert a["tensors"].keys() == b["tensors"].keys()
        assert all(torch.equal(a["tensors"][key], each) for key, each in b["tensors"].items())


def test_folders_that_do_not_fit_are_refused(tmp_path):
    model = Transformer()
    kfac = unison.KFAC(model, KFACConfig())
    train(model, kfac, torch.optim.SGD(model.parameters(), lr=1e-2), batches(1))
    kfac.save(tmp_path / "curvature")
    other = unison.KFAC(nn.Linear(3, 3), KFACConfig())
    with pytest.raises(BadInput, match="another model"):
        other.load(tmp_path / "curvature")
    unison.save_checkpoint(tmp_path / "model", model)
    with pytest.raises(BadInput, match=r"holds no curvature: it was not written by KFAC\.save"):
        kfac.load(tmp_path / "model")
