"""Noise: how much, how often, never twice; and what is kept across a save and a load."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.privacy.common import NUM_FEATURES, attach, make_model, train
from tests.privacy.loaders import records_of
from unison.errors import BadInput
from unison.kernels.random import KEY_AT, RECIPE_LENGTH, Cipher, Distribution, Recipe, secure_floats
from unison.privacy import noise as noises
from unison.privacy.mechanism import Release, grid_of
from unison.privacy.noise import finalise
from unison.privacy.sampling import Poisson
from unison.rng import Key, Stream, noise_spacing

RELEASE = Release(
    step=4,
    sampling=Poisson(rate=0.1),
    max_grad_norm=0.5,
    noise_multiplier=3.0,
    expected_batch_size=8,
)


BITS = [0.8143844604492188, 0.2323474884033203, -1.0659046173095703]


def noise_of(num_elements: int, step: int = 4, name: str = "w") -> Tensor:
    release = Release(**RELEASE.to_fields() | {"step": step, "sampling": RELEASE.sampling})
    return released(torch.zeros(num_elements), release, Key.from_seed(1), name=name)


def released(
    total: Tensor, release: Release, key: Key, divisor: float = 1.0, name: str = "w"
) -> Tensor:
    grid = grid_of(release, 1)
    return finalise(
        (total.double() / grid.spacing).round().to(grid.dtype),
        grid=grid,
        name=name,
        key=key,
        release=release,
        divisor=divisor,
        dtype=torch.float32,
    )


def test_variance_and_independence_over_ten_million_elements():
    num = 10_000_000
    first, second = noise_of(num), noise_of(num, step=5)
    for drawn in (first, second):
        # The variance of n normals has a standard deviation of σ² sqrt(2 / n): 4.5e-4 relative.
        assert float(drawn.double().var()) == pytest.approx(1.5**2, rel=5 * (2 / num) ** 0.5)
        assert abs(float(drawn.double().mean())) < 5 * 1.5 / num**0.5
    for other in (second, noise_of(num, name="v")):
        correlation = float((first.double() * other.double()).mean()) / 1.5**2
        assert abs(correlation) < 5 / num**0.5
    shifted = float((first[1:].double() * first[:-1].double()).mean()) / 1.5**2
    assert abs(shifted) < 5 / num**0.5


def test_noise_is_once_per_element_per_logical_batch(monkeypatch):
    drawn: list[tuple[str, int, int]] = []
    real = noises.secure_normal

    def counted(stream, where, *args, **kwargs):
        assert stream.cipher is Cipher.CHACHA20
        drawn.append((stream.name, stream.step, where.numel()))
        return real(stream, where, *args, **kwargs)

    monkeypatch.setattr(noises, "secure_normal", counted)
    _, module, optimizer, private = attach(max_physical_batch_size=3)
    train(module, optimizer, private, 3)
    expected = [
        (name, step, each.numel()) for step in range(3) for name, each in module.named_parameters()
    ]
    assert drawn == expected


def test_no_copy_of_a_key_stays_in_host_memory(monkeypatch):
    copies: list[Tensor] = []

    def kept(real):
        def call(*args, **kwargs):
            copies.append(real(*args, **kwargs))
            return copies[-1]

        return call

    monkeypatch.setattr(Recipe, "pack", kept(Recipe.pack))
    for name in ("words_of_streams", "empty_table"):
        monkeypatch.setattr(noises, name, kept(getattr(noises, name)))
    noise_of(5)
    shares = noises.Shares(
        ["w"], [torch.zeros(1, 5)], [torch.ones(1)], [nn.Parameter(torch.zeros(5))], [0]
    )
    made = noises.release_all(shares, noises.ReleaseTerms(Key.from_seed(1), RELEASE, 1.0, 1))
    assert made[0].equal(noise_of(5))  # the key was there as long as it was needed
    assert len(copies) >= 4
    noises.erase(copies[0].fill_(7), torch.zeros_like(copies[0]))  # where another device has it
    # All but the recipe without a key, from which the others are made.
    assert not any(each.view(-1)[KEY_AT : KEY_AT + 8].any() for each in copies)
    assert not any(each.any() for each in copies if each.shape != (RECIPE_LENGTH,))


def test_no_parameter_has_the_noise_of_the_count(monkeypatch):
    key, streams, real = Key.from_seed(1), [], noises.secure_normal

    def seen(stream, *args, **kwargs):
        streams.append(stream)
        return real(stream, *args, **kwargs)

    monkeypatch.setattr(noises, "secure_normal", seen)
    counted = noises.noisy_count(
        0.0, key=key, release=replace(RELEASE, count_noise_multiplier=RELEASE.noise_std)
    )
    (stream,) = streams
    assert counted not in (0.0, float(noise_of(1, name=stream.name)))
    # Names can be anything; what a stream is for cannot.
    assert stream.purpose != noises.PURPOSE
    # The bits of a parameter's noise are those of before.
    assert noise_of(3, name="w").tolist() == BITS


def test_the_sum_is_divided_after_the_noise():
    total = torch.full((4,), 0.25)
    key = Key.from_seed(2)
    whole = released(total, RELEASE, key)
    eighth = released(total, RELEASE, key, divisor=8.0)
    torch.testing.assert_close(eighth * 8, whole, rtol=1e-6, atol=0.0)


def test_secret_runs_differ_and_seeded_runs_repeat():
    def gradient(seed: int | None) -> Tensor:
        _, module, optimizer, private = attach(seed=seed)
        train(module, optimizer, private, 2)
        return module[0].weight.grad

    assert torch.equal(gradient(7), gradient(7))
    assert not torch.equal(gradient(7), gradient(8))
    assert not torch.equal(gradient(None), gradient(None))


@pytest.mark.parametrize("noise_multiplier", [3.0, 1e-3])
def test_recipes_of_many_parameters_are_those_of_each(noise_multiplier):
    fields = {"sampling": RELEASE.sampling, "noise_multiplier": noise_multiplier}
    release, key = Release(**RELEASE.to_fields() | fields), Key.from_entropy()
    names, spacing = ["w", "v", "layers.0.weight"], noise_spacing(release.noise_std)
    terms = noises.ReleaseTerms(key, release, 1.0, 1)
    found = noises.recipes_for(names, terms)
    assert found is not None
    for row, name in zip(found, names, strict=True):
        stream = Stream(key, name, release.step, noises.PURPOSE, Cipher.CHACHA20)
        floats = secure_floats(release.noise_std, spacing)
        recipe = Recipe(Cipher.CHACHA20, stream.words, Distribution.SECURE_NORMAL, floats)
        assert torch.equal(row, recipe.pack())
    found.zero_()  # nobody else has it
    again = noises.recipes_for(names, terms)
    assert again is not None
    assert again.any()


# ---- saving and loading --------------------------------------------------------------------------


class Unused(nn.Module):
    """A gradient of noise alone."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(NUM_FEATURES, 3), nn.Parameter(torch.zeros(1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def noises_of(module: Any, private: Any, steps: int) -> list[Tensor]:
    found = []
    for x, y in private:
        module.zero_grad()
        cross_entropy(module(x), y).backward()
        found.append(module.unused.grad.clone())
        if len(found) == steps:
            break
    return found


@pytest.mark.parametrize("seed", [None, 3])
def test_counters_never_repeat_after_load_state_dict(seed):
    engine, module, _, private = attach(Unused(), seed=seed)
    noises_of(module, private, 2)
    state = engine.state_dict()
    first = noises_of(module, private, 3)
    ids = records_of(private, 3)
    engine.load_state_dict(state)
    assert private.next_step == 2
    again = noises_of(module, private, 3)
    for a, b in zip(first, again, strict=True):
        correlation = float((a * b).mean() / (a.std() * b.std()))
        assert abs(correlation) < 0.2
    assert not torch.equal(ids, records_of(private, 3))  # and other records are drawn
    assert engine.ledger.num_intents == 8


def test_a_seeded_run_goes_on_as_if_it_had_not_stopped():
    def run(stops: bool) -> Tensor:
        engine, module, optimizer, private = attach()
        train(module, optimizer, private, 3)
        if stops:
            state, weights = engine.state_dict(), module.state_dict()
            engine, module, optimizer, private = attach()
            module.load_state_dict(weights)
            engine.load_state_dict(state)
        train(module, optimizer, private, 3)
        assert engine.ledger.spending.events.total() == 6
        return module[0].weight

    assert torch.equal(run(False), run(True))


def test_state_holds_no_key_and_is_json(tmp_path):
    import json

    engine, module, optimizer, private = attach(seed=None, ledger=tmp_path / "ledger.jsonl")
    train(module, optimizer, private, 1)
    text = json.dumps(engine.state_dict())
    secret = engine._training._key._bytes
    for form in (secret.hex(), repr(secret)):
        assert form not in text
        assert form not in (tmp_path / "ledger.jsonl").read_text()


def test_no_state_in_the_middle_of_a_logical_batch():
    engine, module, _, private = attach(max_physical_batch_size=3)
    x, y = next(iter(private))
    cross_entropy(module(x), y).backward()
    with pytest.raises(BadInput, match="a logical batch is under way"):
        engine.state_dict()
    private.abandon()
    assert engine.state_dict()["loader"] == {"next_step": 0}


def test_an_abandoned_batch_leaves_nothing_behind():
    engine, module, optimizer, private = attach(max_physical_batch_size=3, noise_multiplier=0.0)
    x, y = next(iter(private))
    cross_entropy(module(x), y).backward()
    private.abandon()
    train(module, optimizer, private, 1)
    other_engine, other, optimizer, private = attach(
        max_physical_batch_size=3, noise_multiplier=0.0
    )
    train(other, optimizer, private, 1)
    assert torch.equal(module[0].weight, other[0].weight)
    assert engine.ledger.num_intents == other_engine.ledger.num_intents == 1


def test_the_intent_is_written_before_the_noise_is_drawn(monkeypatch, tmp_path):
    engine, module, _, private = attach(make_model(), ledger=tmp_path / "ledger.jsonl")
    x, y = next(iter(private))

    def fails(*args, **kwargs):
        raise RuntimeError("no noise today")

    monkeypatch.setattr("unison.privacy.noise.finalise", fails)
    with pytest.raises(RuntimeError, match="no noise today"):
        cross_entropy(module(x), y).backward()
    assert engine.ledger.num_intents == 1
    assert engine.ledger.num_commits == 0
    assert '"intent"' in (tmp_path / "ledger.jsonl").read_text()


def test_the_intent_is_written_before_sums_go_over_ranks(monkeypatch):
    """A rank that has seen the last exchange may go on: the ledger must know of it by then."""
    engine, module, _, private = attach(max_physical_batch_size=5)
    owner = engine._attached.owner

    def lost(*args, **kwargs):
        raise RuntimeError("the other ranks are gone")

    for x, y in private:
        if private.current.is_last:
            monkeypatch.setattr(type(owner), "add", lost)
            with pytest.raises(RuntimeError, match="the other ranks are gone"):
                cross_entropy(module(x), y).backward()
            break
        cross_entropy(module(x), y).backward()
        assert engine.ledger.num_intents == 0
    assert engine.ledger.num_intents == 1
    assert engine.ledger.num_commits == 0
