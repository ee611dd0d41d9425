"""What peers get wrong on several ranks: communication, noise, lock step, ties, checkpoints."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.harness import World, ranks, run_on_ranks
from tests.harness.oracle import clipped_sum
from tests.privacy.sharded import CONFIG, losses, private_run, rows, shard
from unison.models import build
from unison.privacy import Poisson, PrivacyEngine
from unison.privacy import noise as noises
from unison.shard import full_optimizer_state_dict, load_checkpoint, save_checkpoint
from unison.shard.sharded_tensor import local_part
from unison.shard.unit import units_of


def attach(model: nn.Module, **settings: Any) -> tuple[PrivacyEngine, Any, Any, Any]:
    engine = PrivacyEngine(
        secure_noise=settings.get("seed") is None,
        accountant="rdp",
        ledger=settings.pop("ledger", None),
    )
    data = settings.pop("data", None)
    options = {
        "module": model,
        "optimizer": torch.optim.SGD(
            [each for each in model.parameters() if each.requires_grad], lr=0.5, momentum=0.9
        ),
        "data_loader": DataLoader(TensorDataset(rows() if data is None else data), batch_size=4),
        "noise_multiplier": 0.5,
        "max_grad_norm": 0.2,
        "sampling": Poisson(rate=0.2),
        "expected_batch_size": 4,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="noise and sampling come from a seed")
        return engine, *engine.make_private(**options | settings)


def train(model: nn.Module, optimizer: Any, loader: Any, steps: int) -> list[tuple[int, int]]:
    """The loop that users write; returns the step and pass of every optimizer step that counted."""
    done: list[tuple[int, int]] = []
    num_passes = 0
    while len(done) < steps:
        for (ids,) in loader:
            optimizer.zero_grad()
            unison.batch_mean(losses(model, ids)).backward()
            num_passes += 1
            if loader.current.is_last:
                done.append((loader.current.step, num_passes))
            optimizer.step()
            if len(done) == steps:
                break
    return done


# ---- communication -------------------------------------------------------------------------------


def count_collectives(world: World, how: str, is_private: bool, mode: str) -> dict[str, Any]:
    model = shard(build(CONFIG, seed=3), how, world, "fast")
    ids = rows()[world.rank * 2 : world.rank * 2 + 2]
    if is_private:
        dataset = rows()[: 2 * world.size]
        _, model, _, loader = attach(
            model, data=dataset, sampling=Poisson(rate=1.0), clipping=mode, seed=1,
            expected_batch_size=2 * world.size, recheck=False,
        )  # fmt: skip
        batches = iter(loader)
    counters = {id(unit.ranks): unit.ranks for unit in units_of(model)}.values()

    def step() -> None:
        if is_private:
            (mine,) = next(batches)
            losses(model, mine).mean().backward()
        else:
            losses(model, ids).mean().backward()

    if is_private:
        (mine,) = next(batches)  # the first step also learns what the model does
        losses(model, mine).mean().backward()
        loader.abandon()
        loader.set_start_step(1)
        batches = iter(loader)
    else:
        step()
        for parameter in model.parameters():
            parameter.grad = None
    for each in counters:
        each.num_calls.clear()
        each.bytes_sent.clear()
    step()
    calls, sent = Counter(), Counter()
    for each in counters:
        calls.update(each.num_calls)
        sent.update(each.bytes_sent)
    kinds = ("gather", "reduce_scatter", "exchange")
    return {"calls": {k: calls[k] for k in kinds}, "bytes": {k: sent[k] for k in kinds}}


@pytest.mark.parametrize(
    "mode",
    ["auto", *(pytest.param(x, marks=pytest.mark.full) for x in ("ghost_bk", "grad_materialize"))],
)
@pytest.mark.parametrize("how", ["zero2", "zero3"])
def test_one_pass_has_the_communication_of_ordinary_training(how, mode):
    """A peer gathers thrice and reduces twice where training gathers twice and reduces once."""
    plain = run_on_ranks(2, count_collectives, how, False, "auto")[0]
    assert plain["calls"]["reduce_scatter"] == 3
    assert run_on_ranks(2, count_collectives, how, True, mode)[0] == plain


def test_two_passes_count_theirs():
    plain = run_on_ranks(2, count_collectives, "zero3", False, "auto")[0]["calls"]
    twice = run_on_ranks(2, count_collectives, "zero3", True, "ghost")[0]["calls"]
    assert twice["reduce_scatter"] == plain["reduce_scatter"]
    assert plain["gather"] < twice["gather"] <= plain["gather"] + 3


# ---- noise ---------------------------------------------------------------------------------------


def drawn_noise(world: World, how: str) -> tuple[int, dict[str, list[float]]]:
    """How many normals this rank drew, and the gradient of a model that no sample used."""
    drawn = 0
    real = noises.secure_normal

    def counted(stream, where, *args, **kwargs):
        nonlocal drawn
        drawn += where.numel()
        return real(stream, where, *args, **kwargs)

    noises.secure_normal = counted
    try:
        model = shard(build(CONFIG, seed=3), how, world, "fast")
        _, model, _, loader = attach(model, sampling=Poisson(rate=1e-9), seed=2)
        (ids,) = next(iter(loader))
        assert loader.current.num_samples == 0
        losses(model, ids).mean().backward()
        grads = {name: local_part(each.grad) for name, each in model.named_parameters()}
        own = {name: grad.flatten().tolist() for name, grad in grads.items()}
    finally:
        noises.secure_normal = real
    return drawn, own


def test_every_rank_draws_its_share_and_shards_are_uncorrelated():
    """A peer draws all normals on every rank; with one seed per rank it could not do otherwise."""
    total = sum(each.numel() for each in build(CONFIG, seed=3).parameters())
    alone = run_on_ranks(1, drawn_noise, "none")[0]
    assert alone[0] == total
    parts = run_on_ranks(3, drawn_noise, "zero3")
    assert sum(drawn for drawn, _ in parts) == total
    whole = torch.tensor([value for own in alone[1].values() for value in own])
    joined = torch.tensor([value for name in alone[1] for _, own in parts for value in own[name]])
    assert torch.equal(joined, whole)  # the noise of an element does not know who drew it
    first, second = ([value for each in own.values() for value in each] for _, own in parts[:2])
    size = min(len(first), len(second))
    assert size > 1000
    both = torch.tensor([first[:size], second[:size]])
    assert abs(float(torch.corrcoef(both)[0, 1])) < 4 / size**0.5


@ranks(4)
def test_replicas_of_a_shard_stay_equal(world):
    """In a peer, replicas with a seed per rank differ after one step."""
    model = shard(build(CONFIG, seed=3), "hybrid", world, "fast")
    _, model, optimizer, loader = attach(model)  # a secret key, shared by the ranks
    train(model, optimizer, loader, 2)
    pieces = torch.cat([local_part(each.detach()).flatten() for each in model.parameters()])
    found = world.gather(pieces.tolist())
    assert found[0] == found[2]
    assert found[1] == found[3]


# ---- lock step -----------------------------------------------------------------------------------


@ranks(3)
def test_ranks_step_at_the_same_passes(world):
    """In a peer, ranks took real steps at passes 3, 7, 10 and 5, 10, 15, and then hung."""
    model = shard(build(CONFIG, seed=3), "zero3", world, "fast")
    _, model, optimizer, loader = attach(model, max_physical_batch_size=1)
    found = world.gather(train(model, optimizer, loader, 4))
    assert found[0] == found[1] == found[2]


def test_ranks_draw_different_records():
    """With one seed everywhere, a peer's ranks take the same positions of their slices."""

    case = {"how": "zero3", "steps": 3, "rate": 0.5}
    found = run_on_ranks(2, _run, case)
    assert found[0]["records"] == found[1]["records"]  # one global draw
    assert [sum(each) for each in zip(found[0]["mine"], found[1]["mine"], strict=True)] == (
        found[0]["sizes"]
    )  # of which each rank has its own part


def _run(world: World, case: dict) -> dict:
    return private_run(world, **case)


# ---- tied weights --------------------------------------------------------------------------------


class Tied(nn.Module):
    """Four tokens, where the head's gradient and the embedding's add up: norms of parts lie."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        with torch.no_grad():
            self.table.weight.copy_(torch.linspace(-1, 1, 12).view(4, 3))

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.table(ids), self.table.weight)


def tied_losses(model: nn.Module, ids: Tensor) -> Tensor:
    return unison.per_sample_loss(model(ids[:, :-1]), ids[:, 1:])


@ranks(1, 2)
def test_a_tied_weight_is_clipped_to_c(world):
    """A peer's clipped gradient of a tied weight reached 1.26 C on such a model."""
    ids = torch.tensor([[0, 1, 0, 1, 0], [3, 3, 3, 3, 3]])
    model = unison.fully_shard(Tied(), gradient_divisor=1)
    _, model, _, loader = attach(
        model, data=ids, sampling=Poisson(rate=1.0), noise_multiplier=0.0, expected_batch_size=1
    )
    (mine,) = next(iter(loader))
    tied_losses(model, mine).mean().backward()
    local = torch.zeros(12)
    part = local_part(model.table.weight.grad).flatten()
    start = 0 if world.rank == 0 else 12 - len(part)
    local[start : start + len(part)] = part
    total = torch.tensor(world.gather(local.tolist())).sum(0)
    expected = clipped_sum(Tied(), tied_losses, ids, 0.2)["table.weight"].flatten()
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-8)


# ---- checkpoints ---------------------------------------------------------------------------------


def run_in_parts(world: World, folder: str, part: int) -> dict[str, Any] | None:
    """Two steps, saved; or two more steps from what was saved, on another number of ranks."""
    model = shard(build(CONFIG, seed=3), "zero3", world, "ordered")
    engine, model, optimizer, loader = attach(model, granule=2, seed=9)
    if part == 1:
        extra = load_checkpoint(folder, model, optimizer)
        engine.load_state_dict(extra["privacy"])
    train(model, optimizer, loader, 2)
    if part == 0:
        save_checkpoint(folder, model, optimizer, extra={"privacy": engine.state_dict()})
    steps = engine.ledger.spending.events.total()
    return {"digest": unison.digest(model), "steps": steps}


def run_at_once(world: World) -> dict[str, Any]:
    model = shard(build(CONFIG, seed=3), "zero3", world, "ordered")
    engine, model, optimizer, loader = attach(model, granule=2, seed=9)
    train(model, optimizer, loader, 4)
    assert full_optimizer_state_dict(model, optimizer)
    steps = engine.ledger.spending.events.total()
    return {"digest": unison.digest(model), "steps": steps}


def test_a_checkpoint_of_two_ranks_goes_on_with_three(tmp_path):
    """A peer writes a file per rank, which another number of ranks cannot read."""
    expected = run_on_ranks(1, run_at_once)[0]
    run_on_ranks(2, run_in_parts, str(tmp_path / "saved"), 0)
    found = run_on_ranks(3, run_in_parts, str(tmp_path / "saved"), 1)
    assert all(each == expected for each in found)


@ranks(2)
def test_ranks_count_alike_after_an_older_checkpoint(world, tmp_path):
    """Ranks that know only the checkpoint's count would go on where the first one stops."""
    ledger = tmp_path / "ledger.jsonl"
    engine, model, optimizer, loader = attach(
        shard(build(CONFIG, seed=3), "zero3", world, "fast"), seed=9, ledger=ledger
    )
    train(model, optimizer, loader, 1)
    state = engine.state_dict()
    train(model, optimizer, loader, 2)
    engine.detach()
    engine, *_ = attach(model, seed=9, ledger=ledger)
    engine.load_state_dict(state)
    assert world.gather(engine.ledger.spending.events.total()) == [3, 3]
    engine.detach()


# ---- transformers --------------------------------------------------------------------------------


def llama_with_lora() -> nn.Module:
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


def tied_gpt2() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=37, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


MODELS = {"llama": llama_with_lora, "gpt2": tied_gpt2}


def hf_losses(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return unison.per_sample_loss(logits, ids[:, 1:])


def hf_gradients(world: World, name: str) -> dict[str, list[float]]:
    from unison.shard.digest import full_parameters

    model = MODELS[name]()
    ids = rows()[:6]
    for child in model.modules():
        if type(child).__name__ in ("LlamaDecoderLayer", "GPT2Block"):
            unison.fully_shard(child, gradient_divisor=1)
    unison.fully_shard(model, gradient_divisor=1)
    before = {key: value.clone() for key, value in full_parameters(model)}
    _, model, optimizer, loader = attach(
        model, data=ids, sampling=Poisson(rate=1.0), noise_multiplier=0.0, expected_batch_size=1
    )
    for group in optimizer.param_groups:
        group["lr"], group["momentum"] = 1.0, 0.0
    (mine,) = next(iter(loader))
    hf_losses(model, mine).mean().backward()
    optimizer.step()
    # With a learning rate of 1, the step is the gradient.
    return {key: (before[key] - value).flatten().tolist() for key, value in full_parameters(model)}


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_on_two_ranks(name):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    found = run_on_ranks(2, hf_gradients, name)[0]
    expected = clipped_sum(MODELS[name](), hf_losses, rows()[:6], 0.2)
    total = sum(value.square().sum() for value in expected.values()).sqrt()
    for key, value in expected.items():
        error = torch.tensor(found[key], dtype=torch.float64) - value.flatten()
        assert error.norm() <= 2e-6 * total, (key, float(error.norm() / total))


# ---- precision -----------------------------------------------------------------------------------


class ByNumber(nn.Module):
    """Gives each row a factor that depends on how many rows there are."""

    def __init__(self, factor_of: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self._is_kernel = factor_of == "kernel"

    def forward(self, x: Tensor) -> Tensor:
        """As kernels for bfloat16 do, which round otherwise for other shapes; or as a bug does."""
        factor = 1 + len(x) % 2 / 128 if self._is_kernel else 1 / len(x)
        return self.last(torch.tanh(self.first(x)) * factor)


def narrow_step(world: World, factor_of: str) -> str:
    torch.manual_seed(0)
    model = ByNumber(factor_of)
    unison.fully_shard(model, mp_policy=unison.MixedPrecision(param=torch.bfloat16))
    data = torch.randn(20, 5, generator=torch.Generator().manual_seed(1))
    _, model, optimizer, loader = attach(model, data=data, sampling=Poisson(rate=0.5), seed=1)
    (x,) = next(iter(loader))
    try:
        model(x).square().mean(1).mean().backward()
        optimizer.step()
    except unison.UnsupportedOperation as error:
        return str(error)
    return ""


def test_rounding_of_gathered_weights_is_no_mixing():
    """Parameters are float32; what they are gathered as decides how exact passes are."""
    assert run_on_ranks(1, narrow_step, "kernel") == [""]
    assert "changes with the number of samples" in run_on_ranks(1, narrow_step, "bug")[0]
