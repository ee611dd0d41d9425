"""Recorded runs that are replayed: on other ranks, with planted faults, without some rows."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.train.private_runs import GIVEN, SEEDED, SMALL, config_of
from unison.config import Kfac
from unison.data import RowDataset
from unison.errors import BadInput, Diverged
from unison.models import load
from unison.privacy import Mechanism, read_ledger, sampling_for
from unison.privacy.sampling import drawn_records
from unison.privacy.training import PrivateTraining
from unison.replay import RECORD_FILE, TREE_FILE, Record, first_difference
from unison.rng import Key, seal
from unison.train import ReplayConfig, loop, replay, resumed_config, run_on_local_ranks, train
from unison.verify import RUNGS, Trace, compare

RECORDED = {"reducer": "ordered", "granule": 2, "batch_size": 6, "steps": 3, "shard": "full"}
RECORDED |= {"record": True, "checkpoint_every": 2, "keep_checkpoints": 9}
DROPOUT = RECORDED | {"overrides": SMALL | {"dropout": 0.2, "num_layers": 2}}
FILES = (RECORD_FILE, TREE_FILE)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return path


def recorded(folder: Path, text: Path, privacy, **settings) -> Path:
    torch.set_num_threads(1)
    train(config_of(folder / "run", text, privacy, **settings))
    return folder / "run"


@pytest.fixture(scope="module")
def seeded(tmp_path_factory, text_file) -> Path:
    """A private run whose noise comes from a seed."""
    return recorded(tmp_path_factory.mktemp("seeded"), text_file, SEEDED, **RECORDED)


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory, text_file) -> Path:
    """A run without privacy, with dropout."""
    return recorded(tmp_path_factory.mktemp("ordinary"), text_file, None, **DROPOUT)


def check(run: Path, steps: tuple[int, int] | None = None, **settings):
    return replay(ReplayConfig(run=str(run), steps=steps, device="cpu", **settings))


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def test_a_private_stretch_is_taken_again_from_the_nearest_checkpoint(seeded, tmp_path):
    before = contents(seeded)
    found = check(seeded, (2, 3), trace=str(tmp_path / "a.trace"))
    rungs = {entry.rung for entry in Trace.open(tmp_path / "a.trace").entries.values()}
    assert (found["epsilon"], rungs) == ("inf", set(RUNGS) - {"curvature"})
    assert (found["begins"], found["num_compared"], found["num_equal"]) == (2, 1, 1)
    assert found["digest"] == json.loads((seeded / "result.json").read_text())["digest"]
    assert contents(seeded) == before  # nothing is written there


def test_an_ordinary_run_is_taken_again_in_other_passes(ordinary):
    found = check(ordinary, (1, 3), micro_batch_size=2)
    assert (found["begins"], found["num_compared"], found["num_equal"]) == (0, 2, 2)
    assert found["parting"] is None


def test_a_trace_of_a_stretch_says_why_it_differs(ordinary, tmp_path, monkeypatch):
    a, b, other = (str(tmp_path / name) for name in ("a", "b", "other"))
    check(ordinary, (2, 3), trace=a)
    check(ordinary, (1, 3), trace=b, micro_batch_size=2)
    found = compare(a, b)
    assert found.is_equal
    assert {each["step"] for each in found.rungs} == {3}
    Fault("row", 3, random.Random(0), monkeypatch)
    assert check(ordinary, (2, 3), trace=other)["parting"] is not None
    first = compare(a, other).first
    assert first is not None
    assert (first.step, first.rung) == (3, "inputs")


KINDS = {
    "kfac": (None, {"kfac": Kfac(update_every=2, invert_every=2), "optimizer": "sgd"}),
    "compiled": (None, {"compile": True}),
    "compiled private": (SEEDED, {"compile": True}),
    "truncated": (replace(SEEDED, sampling="truncated", capacity=7), {}),
}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("shard", ["full", "other"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_every_kind_is_replayed_at_other_world_sizes(text_file, tmp_path, kind, shard):
    privacy, settings = KINDS[kind]
    other = "zero2" if privacy is None else "ddp"  # which is not for ordered sums but private ones
    settings = RECORDED | settings | {"shard": other if shard == "other" else shard, "steps": 5}
    run = tmp_path / "run"
    run_on_local_ranks(train, config_of(run, text_file, privacy, **settings), num_ranks=2)
    for num_ranks in (1, 3):
        config = ReplayConfig(run=str(run), steps=(3, 5), device="cpu")
        found = run_on_local_ranks(replay, config, num_ranks=num_ranks)
        assert (found["begins"], found["num_equal"], found["parting"]) == (2, 2, None), (
            num_ranks,
            found,
        )


@pytest.mark.full
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_more_ranks_replay_what_one_did(seeded, ordinary, num_ranks):
    for run in (seeded, ordinary):
        config = ReplayConfig(run=str(run), device="cpu")
        found = run_on_local_ranks(replay, config, num_ranks=num_ranks)
        assert (found["world_size"], found["num_compared"], found["num_equal"]) == (num_ranks, 3, 3)


@pytest.mark.full
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("shard", ["ddp", "hybrid", "fsdp2", "zero2"])
def test_records_do_not_depend_on_sharding(seeded, text_file, tmp_path, shard):
    config = config_of(tmp_path / "run", text_file, SEEDED, **RECORDED | {"shard": shard})
    run_on_local_ranks(train, config, num_ranks=4)
    for name in FILES:
        assert (tmp_path / "run" / name).read_bytes() == (seeded / name).read_bytes()
    assert check(tmp_path / "run")["parting"] is None


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked_ranks")
def test_one_rank_replays_stretches_of_eight(text_file, tmp_path):
    settings = RECORDED | {"steps": 20, "checkpoint_every": 4, "batch_size": 16, "overrides": {}}
    config = config_of(tmp_path / "run", text_file, SEEDED, **settings)  # preset tiny, as it is
    run_on_local_ranks(train, config, num_ranks=8)
    rng = random.Random(0)
    for _ in range(20):
        first, stop = sorted(rng.sample(range(21), 2))
        found = check(tmp_path / "run", (first, stop))
        assert (found["num_compared"], found["num_equal"]) == (stop - first, stop - first), (
            first,
            stop,
        )
        assert found["begins"] == first // 4 * 4


# ---- planted faults ------------------------------------------------------------------------------


class Fault:
    """Lets one step of a run go wrong, as hardware or a bug would."""

    def __init__(self, kind: str, step: int, rng: random.Random, patch: pytest.MonkeyPatch) -> None:
        self.kind, self.step, self.unit, self._rng = kind, step, "", rng
        original = loop.Run.advance

        def advance(run, step, passes):
            if step != self.step:
                return original(run, step, passes)
            with pytest.MonkeyPatch.context() as inner:
                if kind != "bit":
                    getattr(self, kind)(inner)
                found = original(run, step, passes)
            if kind == "bit":
                self.bit(run)
            return found

        patch.setattr(loop.Run, "advance", advance)

    def bit(self, run) -> None:
        names = dict(run.model.named_parameters())
        name = self._rng.choice(sorted(names))
        bits = names[name].data.view(-1).view(torch.int32)
        bits[self._rng.randrange(len(bits))] ^= 1 << self._rng.randrange(20)
        blocks = [unit for unit in run.recorder.units if name.startswith(f"{unit}.")]
        self.unit = blocks[0] if blocks else "(root)"

    def row(self, patch) -> None:
        """A row that was drawn is read as another one, which has other words in it."""
        rows, wrong = RowDataset.rows, self._rng.randrange(1, 5)

        def read(self, indices):
            indices = torch.as_tensor(indices).clone()
            if self.split == "train" and len(indices):
                indices[0] = (indices[0] + wrong) % self.num_rows
            return rows(self, indices.numpy())

        patch.setattr(RowDataset, "rows", read)

    def _other(self, release):
        factor = self._rng.choice([0.9, 1.1, 1.0001])
        return replace(release, noise_multiplier=release.noise_multiplier * factor)

    def sigma(self, patch) -> None:
        begin = Mechanism.begin
        patch.setattr(Mechanism, "begin", lambda own, step: self._other(begin(own, step)))

    def hidden_sigma(self, patch) -> None:
        """The noise is another than the ledger and the record say."""
        terms = PrivateTraining.terms

        def other(own, running, num_samples):
            found = terms(own, running, num_samples)
            return found._replace(release=self._other(found.release))

        patch.setattr(PrivateTraining, "terms", other)


def find_fault(run: Path, kind: str, step: int, rng: random.Random) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault = Fault(kind, step, rng, patch)
        found = check(run, bisect=True)
    parting = found["parting"]
    assert parting is not None
    assert parting.unit is not None
    assert (parting.step, found["num_compared"], found["num_equal"]) == (step, step, step - 1)
    applied = list(parting.applied)
    match kind:
        case "bit":
            assert (applied, parting.units) == ([], (fault.unit,))
        case "row":
            assert applied[:2] == ["rows", "loss"]
        case "sigma":
            assert applied[0] == "noise_multiplier"
            assert "σ" in parting.sentence
        case "hidden_sigma":
            assert applied == ["grad_norm"]


def test_a_changed_sigma_is_found_with_its_step_and_unit(seeded):
    find_fault(seeded, "sigma", 2, random.Random(0))


@pytest.mark.parametrize("kind", ["bit", "row"])
def test_a_fault_is_found_with_its_step_and_unit(ordinary, kind):
    find_fault(ordinary, kind, 2, random.Random(kind))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["bit", "row", "sigma", "hidden_sigma"])
def test_thirty_faults_are_found(seeded, kind):
    rng = random.Random(f"thirty {kind}")
    for _ in range(10):
        find_fault(seeded, kind, rng.randrange(1, 4), rng)


def test_a_fault_in_the_run_itself(text_file, ordinary, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        fault = Fault("bit", 2, random.Random(5), patch)
        run = recorded(tmp_path, text_file, None, **DROPOUT)
    found = check(run, bisect=True)
    assert found["parting"] is not None
    assert (found["parting"].step, found["parting"].unit) == (2, fault.unit)
    assert check(run, (2, 3))["parting"] is None  # from the checkpoint, which has it
    with Record(run) as a, Record(ordinary) as b:
        assert first_difference(a, b) == 2


# ---- runs that go on -----------------------------------------------------------------------------


def resumed(run: Path, **given):
    return resumed_config(run, config_of(run, run, None, **given), given)


def stopped_at(step: int, config) -> None:
    with pytest.MonkeyPatch.context() as patch:
        original = loop.Run.advance

        def advance(run, number, passes):
            if number == step:
                raise Diverged("stopped on purpose")
            return original(run, number, passes)

        patch.setattr(loop.Run, "advance", advance)
        with pytest.raises(Diverged, match="on purpose"):
            train(config)


def test_a_record_goes_on_with_its_run(text_file, ordinary, tmp_path):
    stopped_at(3, config_of(tmp_path / "run", text_file, None, **DROPOUT))
    with (tmp_path / "run" / RECORD_FILE).open("ab") as file:
        file.write(b'{"step": 3, "lr": 0.1, ')  # what a crash may leave
    train(resumed(tmp_path / "run"))
    for name in FILES:
        assert (tmp_path / "run" / name).read_bytes() == (ordinary / name).read_bytes()


# ---- kept keys -----------------------------------------------------------------------------------

PASSPHRASE = "a passphrase of tests"


@pytest.fixture
def sealed(text_file, tmp_path, monkeypatch):
    """Settings of a run whose owner keeps the key."""
    monkeypatch.setitem(seal._SCRYPT, "n", 2)
    monkeypatch.setenv("UNISON_PASSPHRASE", PASSPHRASE)
    settings = RECORDED | {"seal_key": str(tmp_path / "key")}
    return config_of(tmp_path / "run", text_file, GIVEN, **settings)


def test_a_run_with_a_kept_key_is_replayed_by_whoever_opens_it(sealed, tmp_path, monkeypatch):
    keys = []
    original = Key.from_entropy.__func__
    monkeypatch.setattr(
        Key, "from_entropy", classmethod(lambda cls: keys.append(original(cls)) or keys[-1])
    )
    sealed = replace(sealed, mechanism=replace(sealed.mechanism, steps=1))
    train(sealed)
    run, path, secrets = tmp_path / "run", tmp_path / "key", [key._bytes for key in keys]
    (commitment,) = {each.key_commitment for each in read_ledger(run / "ledger.jsonl").sessions}
    assert commitment is not None
    for data in [*contents(run).values(), path.read_bytes()]:
        assert not any(secret in data or secret.hex().encode() in data for secret in secrets)
    found = check(run, seal_key=str(path))
    assert (found["num_compared"], found["num_equal"]) == (1, 1)
    with Record(run) as record:
        assert record.step(1).key == commitment
        assert len(str(record.step(1).loss)) == 32  # not the loss itself
    with pytest.raises(BadInput, match="give the file: --seal-key"):
        check(run)
    with pytest.raises(BadInput, match="exists"):
        train(replace(sealed, output=replace(sealed.output, folder=str(tmp_path / "other-run"))))
    monkeypatch.setenv("UNISON_PASSPHRASE", "another passphrase")
    with pytest.raises(BadInput, match="does not open"):
        check(run, seal_key=str(path))
    monkeypatch.setenv("UNISON_PASSPHRASE", PASSPHRASE)
    monkeypatch.setattr(RowDataset, "digest", lambda rows: "ab" * 32)
    with pytest.raises(BadInput, match="sealed for other rows"):
        check(run, seal_key=str(path))
    seal.seal_key(original(Key), tmp_path / "other", PASSPHRASE, "ab" * 32)
    with pytest.raises(BadInput, match="key of another run"):
        check(run, seal_key=str(tmp_path / "other"))


@pytest.mark.full
def test_a_run_whose_key_is_lost(sealed, tmp_path):
    train(replace(sealed, output=replace(sealed.output, seal_key=None)))
    run = tmp_path / "run"
    with pytest.raises(BadInput, match="died with its process"):
        check(run)
    with Record(run) as record:
        step = record.step(2)
    assert (step.key, step.rows, step.loss) == ("lost", None, None)
    assert not (tmp_path / "key").exists()
    assert read_ledger(run / "ledger.jsonl").sessions[0].key_commitment is None


@pytest.mark.full
def test_a_run_goes_on_under_its_kept_key(sealed, tmp_path):
    run, key = tmp_path / "run", str(tmp_path / "key")
    stopped_at(3, sealed)
    with pytest.raises(BadInput, match=r"these differ .*: clipping"):
        train(resumed(run, seal_key=key, clipping="ghost"))
    train(resumed(run, seal_key=key))
    found = check(run, seal_key=key)
    assert (found["num_compared"], found["num_equal"]) == (3, 3)
    commitments = [each.key_commitment for each in read_ledger(run / "ledger.jsonl").sessions]
    assert len(commitments) > 1
    assert len(set(commitments)) == 1
    assert commitments[0] is not None


@pytest.mark.full
def test_a_run_that_goes_on_without_its_kept_key_has_a_fresh_one(sealed, tmp_path):
    run, key = tmp_path / "run", str(tmp_path / "key")
    stopped_at(3, sealed)
    train(resumed(run))
    assert check(run, (0, 2), seal_key=key)["parting"] is None
    with pytest.raises(BadInput, match="died with its process"):
        check(run, seal_key=key)


# ---- without some rows ---------------------------------------------------------------------------


def rows_of_first_steps(run: Path, num_steps: int) -> list[list[int]]:
    config = json.loads((run / "config.json").read_text())
    num_rows = config["rows"]["train"]["num_rows"]
    sampling = sampling_for(SEEDED, RECORDED["batch_size"], num_rows)
    drawn = drawn_records(sampling, Key.from_seed(0), num_rows, range(num_steps))
    return [each.tolist() for each in drawn]


@pytest.mark.parametrize("num_steps", [1, pytest.param(3, marks=pytest.mark.full)])
def test_without_rows_is_a_run_in_which_they_have_no_gradient(seeded, tmp_path, num_steps):
    drawn = rows_of_first_steps(seeded, num_steps)
    without = sorted({each[-1] for each in drawn})
    original = PrivateTraining.coefficients

    def coefficients(self, batch, part, norms):
        by_name, grid = original(self, batch, part, norms)
        ids = batch.record_ids[part.positions - batch.first_position]
        rows = part.is_real.nonzero().flatten()[torch.isin(ids, torch.tensor(without))]
        return {name: each.index_fill(0, rows, 0.0) for name, each in by_name.items()}, grid

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateTraining, "coefficients", coefficients)
        expected = check(seeded, (0, num_steps))
    assert expected["parting"] is not None
    out = tmp_path / "out"
    found = check(seeded, (0, num_steps), without=tuple(without), out=str(out))
    assert found["digest"] == expected["digest"]
    assert found["epsilon"] == "inf"
    marked = json.loads((out / "counterfactual.json").read_text())
    assert (marked["without"], marked["epsilon"]) == (without, "inf")
    load(out)


def test_rows_that_cannot_be_left_out(seeded, tmp_path):
    rows = json.loads((seeded / "config.json").read_text())["rows"]["train"]["num_rows"]
    with pytest.raises(BadInput, match=f"rows 0 to {rows - 1}"):
        check(seeded, without=(rows,), out=str(tmp_path / "out"))
    with pytest.raises(BadInput, match="begins with the initial values"):
        check(seeded, (2, 3), without=(1,), out=str(tmp_path / "out"))
    with pytest.raises(BadInput, match="go together"):
        check(seeded, without=(1,))
    assert not (tmp_path / "out").exists()
