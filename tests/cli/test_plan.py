"""`unison plan` as a person runs it."""

import json
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from unison.cli.plan import code_of, fastest
from unison.errors import BadInput
from unison.models import build, preset
from unison.plan import GPUS, Estimate, Scenario, Usage
from unison.privacy import PrivateLoader
from unison.shard import units_of

OWN = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.blocks = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
        self.head = nn.Linear(16, 10)

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))

def build_model():
    return Model()

class Returning(Model):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, ids):
        return self.change(super().forward(ids))

class Masked(Model):
    def forward(self, ids, mask):
        return super().forward(ids)

def build_tuple():
    return Returning(lambda logits: (logits, None))

def build_dict():
    return Returning(lambda logits: {"loss": None, "logits": logits})

def build_classes():
    return Returning(lambda logits: logits.mean(1))

def build_last():
    return Returning(lambda logits: logits[:, -1:])

def build_scalar():
    return Returning(lambda logits: logits.mean())

def build_none():
    return Returning(lambda logits: None)

def build_numpy():
    return Returning(lambda logits: logits.detach().numpy())

def build_masked():
    return Masked()

def build_broken():
    raise RuntimeError("no weights\\nhere")

def build_leaving():
    raise SystemExit(3)

def build_lazy():
    model = Model()
    model.head = nn.LazyLinear(10)
    return model

class Tiring(Model):
    def forward(self, ids):
        self.is_tired = getattr(self, "is_tired", -1) + 1
        if self.is_tired:
            raise KeyError("tired")
        return super().forward(ids)

def build_tiring():
    return Tiring()

def build_nothing():
    return 3

NUMBER = 3
"""


@pytest.fixture
def plan(unison, monkeypatch):
    """Run `unison plan` in this process; returns exit code, standard output and error."""
    monkeypatch.setenv("COLUMNS", "120")
    return partial(unison, "plan")


def test_a_plan_holds_the_arithmetic_of_zero(plan):
    code, out, err = plan("--preset", "tiny", "--gpus", 4, "--seq", 32, "--num-layers", 2, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    share = found["parameters"] * 4 / 4
    tables = 2 * 256 * 16 * 4  # of rotary positions; allocations begin at multiples of 512 bytes
    assert found["peak"]["bytes"]["parameters"] == pytest.approx(share + tables, rel=0.01)
    assert found["peak"]["bytes"]["optimizer"] == pytest.approx(2 * share, rel=0.02)
    assert found["estimate"]["fits"]
    assert found["fits_on"] == {"h200": True, "h100": True, "a100-80": True}
    assert {each["collective"] for each in found["bytes_sent"]} >= {"all-gather", "reduce-scatter"}
    multiplied = found["parameters"] - 258 * 128  # an embedding is looked up
    assert found["flops"] == pytest.approx(6 * multiplied * 32, rel=0.05)  # and attention


def test_a_private_plan_says_what_is_spent(plan):
    options = "--preset tiny --num-layers 1 --seq 16 --gpus 2 --batch 2 --rows 5000"
    more = "--logical-batch 16 --noise-multiplier 4 --delta 1e-5 --clipping ghost_bk"
    code, out, err = plan(*options.split(), *more.split())
    assert (code, err) == (0, "")
    assert "private, full, fp32, 2 rows of 16 tokens on each GPU, 4 passes a step" in out
    for part in ("313 steps", "noise multiplier σ", "4.0000", "GPU-hours", "fits", "not measured"):
        assert part in out
    assert "the same step fits the 139 GiB of h200, fits the 79 GiB of a100-80" in out


def test_a_model_of_ones_own(plan, tmp_path, monkeypatch):
    (tmp_path / "ownmodel.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    code, out, _ = plan("ownmodel:build_model", "--gpus", 2, "--seq", 8, "--batch", 3, "--json")
    assert code == 0
    assert json.loads(out)["parameters"] == 10 * 16 + 3 * (16 * 16 + 16) + 16 * 10 + 10
    for name, said in {
        "ownmodel:nothing": "cannot be imported",
        "nomodule_at_all:f": "cannot be imported",
        "ownmodel:NUMBER": "must be a function",
        "ownmodel:build_nothing": "builds a module, found int",
        "ownmodel": "expected MODULE:FUNCTION",
        "missing.json": "there is no file",
    }.items():
        code, _, err = plan(name, "--seq", 8)
        assert code == 2
        assert said in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("private", [(), ("--private",)])
def test_logits_may_come_in_several_ways(plan, tmp_path, monkeypatch, private):
    (tmp_path / "ownmodels.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    for name in ("tuple", "dict", "classes", "last"):
        code, _, err = plan(f"ownmodels:build_{name}", "--gpus", 2, "--seq", 8, "--json", *private)
        assert (code, err) == (0, ""), name


def test_a_model_that_cannot_be_fed_is_refused(plan, tmp_path, monkeypatch):
    (tmp_path / "oddmodels.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    for name, said in {
        "scalar": "returned [] without such logits",
        "none": "returned NoneType without such logits",
        "numpy": "failed, ",
        "masked": "failed, TypeError: ",
        "broken": "cannot be built: RuntimeError: no weights",
        "leaving": "cannot be built: SystemExit: 3",
        "lazy": "head.weight of Model has no shape before a first batch",
        "tiring": "a step of oddmodels:build_tiring cannot be planned, it failed with KeyError: 't",
    }.items():
        code, out, err = plan(f"oddmodels:build_{name}", "--seq", 8)
        assert (code, out) == (2, "")
        assert said in err
        assert err.count("\n") == 1


def test_adapters_alone(plan):
    pytest.importorskip("peft")
    options = "--preset tiny --num-layers 2 --seq 16"
    whole, adapters = (
        json.loads(plan(*options.split(), "--json", *more)[1]) for more in ((), ("--lora", 2))
    )
    assert 0 < adapters["parameters"] < whole["parameters"] / 10
    assert adapters["peak"]["bytes"]["optimizer"] < whole["peak"]["bytes"]["optimizer"] / 5
    code, _, err = plan(*options.split(), "--lora", -1)
    assert code == 2
    assert "lora" in err


def step_that_needs(gib: dict[str, float]):
    """Plan scenarios of known size and speed: `full` and computing again are slower, hosts most."""

    def planned(scenario: Scenario) -> tuple[Scenario, Usage, Estimate]:
        name = "+".join(sorted(scenario.offload)) or scenario.shard
        name += " again" if scenario.checkpoint_activations else ""
        seconds = 1.0 + 0.1 * (scenario.shard == "full") + scenario.checkpoint_activations
        needed = int(gib[name] * 2**30)
        estimate = Estimate(
            peak_bytes=needed,
            needed_bytes=needed,
            memory_bytes=79 * 2**30,
            compute_seconds=0.0,
            host_seconds=0.0,
            network_seconds=0.0,
            update_seconds=0.0,
            step_seconds=seconds,
        )
        return scenario, Usage(), estimate

    return planned


SIZES = {"zero2": 90.0, "full": 85, "zero2 again": 84, "full again": 83}
SIZES |= {"optimizer again": 82, "optimizer+params again": 81}


@pytest.mark.parametrize("name", SIZES)
def test_the_fastest_that_fits_is_found(name):
    found, _, _ = fastest(step_that_needs(SIZES | {name: 10}), Scenario(), GPUS["h100"])
    assert step_that_needs(SIZES)(found)[2].needed_bytes == SIZES[name] * 2**30


def test_a_faster_one_is_preferred_to_a_smaller_one():
    fitting = SIZES | {"full": 70, "full again": 10}
    found, _, _ = fastest(step_that_needs(fitting), Scenario(), GPUS["h100"])
    assert (found.shard, found.checkpoint_activations) == ("full", False)


def test_where_nothing_fits_it_says_what_is_needed():
    with pytest.raises(BadInput, match=r"still needs 81\.0 GiB; lower --batch"):
        fastest(step_that_needs(SIZES), Scenario(), GPUS["h100"])


@pytest.mark.parametrize("more", [{}, {"clipping": "auto", "lora": 2}, {"kfac": True}])
def test_the_code_of_a_scenario_runs(more):
    scenario = Scenario(checkpoint_activations=True, precision="bf16", shard="zero2", **more)
    model = build(preset("tiny", num_layers=2), seed=0)
    loader = DataLoader(TensorDataset(torch.zeros(4, 8, dtype=torch.int64)), batch_size=2)
    names: dict[str, Any] = {"model": model, "loader": loader}
    exec(code_of(scenario), names)
    (unit, *_) = units_of(names["model"])
    assert unit.reshard_after_forward is False
    assert unit.precision.param is torch.bfloat16
    assert ("kfac" in names) == scenario.kfac
    assert isinstance(names["loader"], PrivateLoader) == (scenario.clipping is not None)


def named_gpu(name: str) -> str:
    """A file of a GPU with so little memory that nothing fits."""
    sizes = {key: 1 for key in asdict(GPUS["h100"]) if key != "name"}
    return json.dumps(sizes | {"name": name})  # which is YAML


@pytest.mark.parametrize("name", ["[/]", "[red]x", ":warning: [b]", r"$\frac$ $"])
def test_names_are_printed_as_they_are(plan, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(named_gpu(name))
    options = ["--preset", "tiny", "--num-layers", "1", "--seq", "16", "--gpu", "mine.yaml"]
    code, out, err = plan(*options)
    assert (code, err) == (0, "")
    assert f"of the 1 GiB of {name}" in out
    code, out, err = plan(*options, "--sweep", "gpus=1")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].rstrip().endswith(name)


@pytest.mark.full
def test_a_sweep_is_drawn_and_told(plan, tmp_path):
    picture = tmp_path / "sweep.png"
    options = "--preset tiny --num-layers 2 --seq 16 --sweep gpus=1,4 --picture"
    code, out, err = plan(*options.split(), picture)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["1", "4"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_a_config_of_transformers(plan, tmp_path):
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
        max_position_embeddings=64,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    for options in ([], ["--private", "--clipping", "ghost_bk"]):
        code, out, err = plan(path, "--gpus", 2, "--seq", 16, "--batch", 2, "--json", *options)
        assert code == 0, err
        assert json.loads(out)["parameters"] > 10_000
    path.write_text("{}")
    code, _, err = plan(path, "--seq", 16)
    assert code == 2
    assert "is not the config" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "name one model"),
        ("--preset 13c", "preset must be one of"),
        ("--preset tiny --gpu h300", "--gpu must be one of"),
        ("--preset tiny --gpus 0", "--gpus must be above 0"),
        ("--preset tiny --seq 5000", "longer than the model's context"),
        ("--preset tiny --private --kfac", "do not go together"),
        ("--preset tiny --epsilon 3", "needs --rows and --logical-batch"),
        ("--preset tiny --rows 10 --logical-batch 2", "one of --epsilon and --noise-multiplier"),
        ("--preset tiny --offload grads", "needs optimizer too"),
        ("a:b --num-layers 3", "--num-layers is for a --preset"),
        ("--preset tiny --sweep gpus=4,0", "--sweep takes"),
        ("--preset tiny --sweep batch=4", "--sweep takes"),
        ("--preset tiny --sweep gpus=4 --fit", "leave --sweep out"),
        ("--preset tiny --sweep gpus=4 --picture nowhere/at/all.png", "no folder that exists"),
        ("--preset tiny --sweep gpus=4 --picture sweep.txt", "name ends in .png"),
        ("--preset tiny --clipping ghost", "add --private"),
        ("--preset tiny --private --clipping what", "clipping must be one of"),
        ("--preset tiny --private --epochs 3", "needs --rows"),
        ("--preset tiny --seq 0", "--seq must be above 0"),
        ("--preset tiny --batch 0", "--batch must be above 0"),
        ("--preset tiny --gpus 10000000000000000000000", "at most 65,536 GPUs"),
        ("--preset tiny --sweep gpus=1,70000", "at most 65,536 GPUs"),
        ("--preset tiny --batch 100000000000", "at most 67,108,864 tokens"),
    ],
)
def test_bad_input_is_one_sentence(plan, options, said):
    code, out, err = plan(*options.split())
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
