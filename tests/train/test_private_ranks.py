"""Private runs on several ranks: one result, one ledger, and runs that go on with other ranks."""

import math
from functools import partial
from pathlib import Path

import pytest

from tests.train.private_runs import SEEDED, SMALL, TARGET, config_of
from unison.config import Kfac, TrainConfig
from unison.errors import BadInput, Diverged
from unison.privacy import read_ledger
from unison.run_files import read_metrics
from unison.train import TrainResult, loop, resumed_config, run_on_local_ranks, train

pytestmark = pytest.mark.usefixtures("forked_ranks")

ORDERED = {"reducer": "ordered", "granule": 2, "batch_size": 8}
ORDERED |= {"unsafe_diagnostics": True, "eval_every": 3}


def train_on(num_ranks: int, config: TrainConfig) -> TrainResult:
    return run_on_local_ranks(train, config, num_ranks=num_ranks)


def figures(result: TrainResult) -> list:
    """What must not depend on the ranks: all that was recorded but speed, and the parameters."""
    records = [
        {name: value for name, value in record.items() if "per_second" not in name}
        for record in read_metrics(Path(result.folder))
    ]
    return [records, result.digest, result.eval_loss_after, result.train_loss_after]


def check_same_bits(
    text: Path, folder: Path, num_ranks: int, both: dict | None = None, **settings
) -> None:
    both = ORDERED | (both or {})
    alone = train(config_of(folder / "alone", text, SEEDED, **both))
    together = train_on(num_ranks, config_of(folder / "together", text, SEEDED, **both, **settings))
    assert (alone.world_size, together.world_size) == (1, num_ranks)
    assert figures(together) == figures(alone)
    releases = [
        read_ledger(folder / name / "ledger.jsonl").releases for name in ("alone", "together")
    ]
    assert releases[0] == releases[1]
    assert together.privacy.epsilon_if_secret == alone.privacy.epsilon_if_secret
    assert together.privacy.epsilon == alone.privacy.epsilon == math.inf  # seeds


def test_two_ranks_give_the_bits_of_one(text, tmp_path):
    check_same_bits(text, tmp_path, 2, shard="full")
    ledger = read_ledger(tmp_path / "together/ledger.jsonl")
    assert (ledger.num_intents, ledger.num_commits, ledger.problems) == (6, 6, [])


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (2, {"shard": "ddp"}),
        (2, {"shard": "fsdp2"}),
        (2, {"shard": "hybrid"}),
        (3, {"shard": "zero2", "micro_batch_size": 4}),
        (4, {"shard": "hybrid", "guard": True}),
        (1, {"shard": "fsdp2"}),
        (2, {"shard": "full", "both": {"clipping": "ghost", "precision": "bf16"}}),
    ],
    ids=str,
)
def test_bits_depend_on_no_sharding(text, tmp_path, num_ranks, settings):
    check_same_bits(text, tmp_path, num_ranks, **settings)


@pytest.mark.full
@pytest.mark.parametrize("shard", ["ddp", "fsdp2"])
def test_the_fast_reducer_differs_by_rounding(text, tmp_path, shard):
    settings = {"unsafe_diagnostics": True, "overrides": {"num_layers": 1, "dropout": 0.1}}
    alone = train(config_of(tmp_path / "alone", text, SEEDED, **settings))
    config = config_of(
        tmp_path / "together", text, SEEDED, shard=shard, micro_batch_size=5, **settings
    )
    together = train_on(2, config)
    pairs = zip(figures(alone)[0], figures(together)[0], strict=True)
    for expected, found in pairs:
        assert found == pytest.approx(expected, rel=1e-4)
    assert together.eval_loss_after == pytest.approx(alone.eval_loss_after, rel=1e-5)


def train_until(config: TrainConfig, step: int) -> TrainResult:
    """Train on this rank, with a step that fails on every rank."""
    original = loop.train_step

    def train_step(*args, **kwargs):
        if kwargs["step"] == step:
            raise Diverged("a NaN on purpose")
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        return train(config)


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_a_stopped_run_goes_on_with_other_ranks(text, tmp_path, before, after):
    straight = train(config_of(tmp_path / "straight", text, SEEDED, **ORDERED))
    run = tmp_path / "run"
    asked = config_of(run, text, SEEDED, **ORDERED, shard="full", checkpoint_every=2)
    with pytest.raises(Diverged, match="counts the 5 steps it spent"):
        run_on_local_ranks(partial(train_until, step=6), asked, num_ranks=before)
    result = train_on(after, resumed_config(run, asked, given=set()))
    assert result.digest == straight.digest
    ledger = read_ledger(run / "ledger.jsonl")
    assert [each.step for each in ledger.releases] == [0, 1, 2, 3, 4, 4, 5]
    assert (ledger.num_commits, ledger.problems) == (7, [])
    assert (result.steps, result.privacy.num_counted) == (6, 7)


@pytest.mark.full
def test_a_budget_ends_a_resumed_run_on_all_ranks(text, tmp_path):
    """Ranks that count differently would part: one waits, the other is done."""
    run = tmp_path / "run"
    asked = config_of(run, text, TARGET, shard="full", checkpoint_every=2)
    with pytest.raises(Diverged):
        train_until(asked, step=6)
    result = train_on(2, resumed_config(run, asked, given=set()))
    assert (result.steps, result.privacy.num_counted, result.privacy.is_secure) == (5, 6, True)
    assert "step 6 would have spent" in str(result.privacy.budget_sentence)


def test_a_ledger_that_lost_lines_is_refused_by_all_ranks(text, tmp_path):
    run = tmp_path / "run"
    asked = config_of(run, text, SEEDED, shard="full", checkpoint_every=2)
    with pytest.raises(Diverged):
        train_until(asked, step=4)
    for name in ("ledger.jsonl", "ledger.head.json"):  # as if the run had spent nothing
        (run / name).unlink()
    with pytest.raises(BadInput, match="put the ledger of this run back"):
        train_on(2, resumed_config(run, asked, given=set()))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_compiled_ranks_give_the_bits_of_one(text, tmp_path):
    both = {"compile": True, "overrides": {**SMALL, "num_layers": 2}}
    check_same_bits(text, tmp_path, 2, both, shard="full")


def test_what_is_not_compiled_is_refused(text, tmp_path):
    with pytest.raises(BadInput, match="--shard fsdp2"):
        config_of(tmp_path, text, SEEDED, compile=True, shard="fsdp2")
    with pytest.raises(BadInput, match="--compile and --kfac"):
        config_of(tmp_path, text, None, compile=True, kfac=Kfac(), optimizer="sgd")
