"""Plans that follow what methods took on the device: a fake timer, and a cache of its own."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.privacy.common import attach, data, train
from unison.clip import MODES, LayerShape, Plan, UseShape, costs, plan_clipping
from unison.clip import calibration as calibrations
from unison.clip.calibration import (
    FOLDER_VARIABLE,
    Calibration,
    cache_folder,
    calibration_of,
    kind_of,
    versions,
)
from unison.clip.plan import alternatives_of
from unison.errors import BadInput
from unison.privacy import learning

MADE_BY = {"gpu": "GPU of the test", "torch": "1.2.3"}
TOGETHER = ("factor_norms", "factors")  # of layers that wait for each other
NORMS = ("gram", "tile", "materialize", "rank_one")
ALL_PARTS = (*NORMS, "kept", "records", "plain_records", *TOGETHER)


def linear(
    name: str = "up.weight", batch: int = 4, tokens: int = 512, rows: int = 1280
) -> LayerShape:
    use = UseShape(kind="product", tokens=tokens, rows=rows, columns=1280)
    return LayerShape(name=name, batch=batch, itemsize=2, uses=(use,))


def alone(name: str = "alone.weight", **changes) -> LayerShape:
    """A layer that does not wait for others."""
    return replace(linear(name), **{"itemsize": 4, **changes})


def table(name: str = "table.weight") -> LayerShape:
    use = UseShape(kind="lookup", tokens=512, rows=50257, columns=1280)
    return LayerShape(name=name, batch=4, itemsize=2, uses=(use,))


def vector(name: str = "norm.weight") -> LayerShape:
    use = UseShape(kind="dense", tokens=1, rows=1280, columns=1)
    return LayerShape(name=name, batch=4, itemsize=4, uses=(use,))


class FakeTimer:
    """Says how long parts take, and remembers for what it was asked."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = dict.fromkeys([*ALL_PARTS, "forward"], 1.0) | seconds
        self.asked: list[LayerShape] = []

    def __call__(self, layer: LayerShape) -> dict[str, float] | None:
        self.asked.append(layer)
        return self.seconds


def plan(layers: list[LayerShape], timer: Callable, **settings) -> Plan:
    timed = Calibration("GPU of the test", timer)
    return plan_clipping(layers, machine="cuda", timed=timed, **settings)


# ---- choices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slow", "expected"),
    [
        (["gram", "tile", "records", "factors"], "materialize+kept"),
        (["materialize", "tile"], "gram+records"),
        (["kept", "gram", "factor_norms"], "tile+records"),
    ],
)
def test_the_choice_is_what_was_fastest(slow, expected):
    layers = [linear(), linear("other.weight", rows=640), alone(), linear("odd.weight", rows=1284)]
    found = plan(layers, FakeTimer(**dict.fromkeys(slow, 9.0)))
    for layer in found.layers:
        assert str(layer.chosen.choice) == expected
        assert layer.chosen.measured == 2.0
        times = [each.measured for each in layer.alternatives]
        assert times == sorted(times)
    assert found.timed_on == "GPU of the test"
    assert found.seconds == 8.0


@pytest.mark.parametrize("slow", [(*NORMS, "records"), TOGETHER], ids=["alone", "together"])
def test_what_layers_that_wait_take_is_timed_together(slow):
    """And what others take is not, nor any other choice of methods."""
    timer = FakeTimer(**dict.fromkeys(slow, 9.0))
    layers = [linear(), alone(), linear("odd.weight", rows=1284)]
    for layer in plan(layers, timer).layers:
        seconds = {str(each.choice): each.measured for each in layer.alternatives}
        is_fast = (slow is TOGETHER) != (layer.layer.name == "up.weight")
        assert seconds["gram+records"] == (2.0 if is_fast else 18.0)
        assert seconds["tile+records"] == (2.0 if slow is TOGETHER else 18.0)
        assert seconds["materialize+kept"] == (2.0 if slow is TOGETHER else 10.0)
        for gradient in ("recomputed", "second_backward"):
            own = seconds[f"gram+{gradient}"]
            assert own is not None
            assert (own > 18.0) == (slow is not TOGETHER)


def test_every_choice_is_made_of_parts():
    layers = [linear(), linear(tokens=1), table(), alone(), linear(rows=1284)]
    for layer in (*layers, *[replace(each, is_checkpointed=True) for each in layers]):
        timed = {part: float(i + 1) for i, part in enumerate([*ALL_PARTS, "forward"])}
        for option in alternatives_of(layer, "cuda", timed)[0]:
            parts = costs.parts_of(layer, option.choice)
            assert parts.keys() <= timed.keys()
            least = sum(count * timed[part] for part, count in parts.items())
            assert option.measured is not None
            assert option.measured >= least  # fingerprints are predicted, and added
    once, again = (
        costs.parts_of(replace(linear(), is_checkpointed=is_checkpointed), MODES["ghost"])
        for is_checkpointed in (False, True)
    )
    assert 0 < once["forward"] < again["forward"]
    assert "forward" not in costs.parts_of(table(), MODES["ghost"])  # no GEMM of its own
    assert "gram" not in costs.parts_of(table(), MODES["ghost"])  # rows are added up
    of_layers = [costs.parts_of(each, MODES["ghost_bk"]).keys() for each in layers]
    alone_parts = {"gram", "records"}
    assert of_layers == [{*TOGETHER}, {*TOGETHER}, {"tile", "records"}, alone_parts, alone_parts]


def test_what_takes_a_second_pass_costs_more_than_what_does_not():
    seconds = {str(a.choice): a.time for a in plan([linear()], FakeTimer()).layers[0].alternatives}
    for norm in ("gram", "tile"):
        for gradient in ("recomputed", "second_backward"):
            assert seconds[f"{norm}+{gradient}"] > seconds[f"{norm}+records"]


def test_the_memory_budget_holds_whatever_was_measured():
    layers = [linear(f"{i}.weight", rows=640 * (1 + i % 3), tokens=512) for i in range(8)]
    kept_is_best = FakeTimer(gram=9.0, tile=9.0, records=9.0, factor_norms=9.0, factors=9.0)
    free = plan(layers, kept_is_best)
    assert {str(each.chosen.choice) for each in free.layers} == {"materialize+kept"}
    budget, seconds = free.bytes_needed, [free.seconds]
    while True:
        budget = int(0.8 * budget)
        try:
            found = plan(layers, kept_is_best, memory_budget=budget)
        except BadInput:
            break
        assert found.bytes_needed <= budget
        seconds.append(found.seconds)
    assert len(seconds) > 4
    assert seconds == sorted(seconds)


def test_what_was_too_slow_to_be_timed_is_not_taken_unless_nothing_else_fits():
    timer = FakeTimer()
    for part in ("gram", *TOGETHER):  # predicted in milliseconds; all others took a second
        del timer.seconds[part]
    (layer,) = plan([linear()], timer).layers
    assert layer.chosen.choice.norm != "gram"
    assert {each.measured for each in layer.alternatives if each.choice.norm == "gram"} == {None}
    only = {"materialize": 1.0, "kept": 1.0}
    smallest = plan_clipping([linear()], machine="cuda", mode="ghost").bytes_needed
    (layer,) = plan([linear()], lambda _: only, memory_budget=smallest).layers
    assert (layer.chosen.choice.gradient, layer.chosen.measured) == ("second_backward", None)


def test_layers_that_were_not_timed_are_planned_as_predicted():
    layers = [linear(), table(), vector()]
    predicted = plan_clipping(layers, machine="cuda")
    found = plan(layers, lambda _: None)
    assert found == predicted
    assert found.timed_on is None


def test_a_vector_is_not_timed():
    timer = FakeTimer()
    found = plan([vector(), linear()], timer)
    assert [layer.name for layer in timer.asked] == ["up.weight"]
    assert found.layers[0].chosen.measured is None


def test_a_timed_plan_survives_json():
    found = plan([linear(), table(), vector()], FakeTimer(), memory_budget=10**9)
    assert Plan.from_json(found.to_json()) == found
    assert found.timed_on is not None


def test_a_timed_plan_prints_what_was_measured():
    layers = [linear(f"blocks.{i}.up.weight") for i in range(3)] + [vector()]
    found = plan(layers, FakeTimer(materialize=0.001, kept=0.0005))
    header, blocks, norm, _, total, timed = str(found).splitlines()
    assert header.endswith("method            kept MB  predicted ms  measured ms")
    assert blocks.startswith("blocks.*.up.weight       3  4 × product 512×1280×1280")
    assert blocks.split()[-1] == "4.500"
    assert blocks.split()[-2] == f"{3e3 * found.layers[0].chosen.seconds:.3f}"
    assert norm.endswith("–")
    assert "mode auto, machine cuda" in total
    assert timed == "3 of 4 layers timed on GPU of the test"
    first, *_ = found.details().splitlines()[1:]
    assert first.endswith(" 1.500")  # of one layer


# ---- what is timed, and what is known ------------------------------------------------------------


def test_layers_of_one_kind_are_timed_once():
    timer = FakeTimer()
    plan([linear(f"{i}.weight") for i in range(5)] + [linear("last", rows=640)], timer)
    assert [layer.name for layer in timer.asked] == ["0.weight", "last"]


def test_batches_of_any_size_are_timed_as_powers_of_two():
    timer = FakeTimer()
    timed = Calibration("GPU of the test", timer)
    for batch in range(1, 33):
        seconds = timed.of(linear(batch=batch))
        assert seconds is not None
        assert seconds["tile"] == pytest.approx(batch / timer.asked[-1].batch)
    assert [layer.batch for layer in timer.asked] == [1, 2, 4, 8, 16, 32]
    assert timed.of(linear(batch=0)) is None


def test_a_kind_is_all_that_times_depend_on():
    kinds = {
        kind_of(each)
        for each in (
            linear(),
            linear(batch=8),
            linear(tokens=256),
            linear(rows=640),
            table(),
            replace(linear(), itemsize=4),
            replace(linear(), is_float16=True),
            replace(linear(), uses=linear().uses + table().uses),
        )
    }
    assert len(kinds) == 8
    assert kind_of(linear("other")) == kind_of(linear())


def test_what_is_in_the_cache_is_not_timed_again(tmp_path):
    first, second = FakeTimer(kept=0.25), FakeTimer(kept=7.0)
    for timer in (first, second):
        timed = Calibration("GPU of the test", timer, tmp_path, MADE_BY)
        assert timed.of(linear())["kept"] == 0.25  # type: ignore[index]
    assert (len(first.asked), len(second.asked)) == (1, 0)
    other = Calibration("other", second, tmp_path, MADE_BY | {"torch": "1.2.4"})
    assert other.of(linear())["kept"] == 7.0  # type: ignore[index]
    assert len(list(tmp_path.iterdir())) == 2


def test_what_other_processes_have_found_stays_in_the_file(tmp_path):
    one, other = (Calibration("GPU of the test", FakeTimer(), tmp_path, MADE_BY) for _ in range(2))
    one.of(linear())
    other.of(table())
    known = one.read()
    assert known.keys() == {kind_of(linear()), kind_of(table())}
    assert len(list(tmp_path.iterdir())) == 1  # nothing is left of writing


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 1}',
        b"\xff\xfe\x00",
        json.dumps({"format": 99, "made_by": MADE_BY, "seconds": {}}),
        json.dumps({"format": 1, "made_by": {"gpu": "another"}, "seconds": {}}),
        json.dumps({"format": 1, "made_by": MADE_BY, "seconds": {"x": {"tile": "fast"}}}),
        json.dumps({"format": 1, "made_by": MADE_BY, "seconds": {"x": {"tile": -1.0}}}),
        json.dumps({"format": 1, "made_by": MADE_BY, "seconds": {"x": {"tile": float("nan")}}}),
        json.dumps({"format": 1, "made_by": MADE_BY, "seconds": {"x": 3}}),
    ],
)
def test_a_broken_or_foreign_file_is_not_used_and_replaced(tmp_path, content):
    file = Calibration("GPU of the test", FakeTimer(), tmp_path, MADE_BY)
    assert file.path is not None
    file.path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(RuntimeWarning, match="is not used"):
        assert file.read() == {}
    with pytest.warns(RuntimeWarning, match="is not used"):
        file.add({"y": {"tile": 2.0}})
    assert file.read() == {"y": {"tile": 2.0}}


def test_a_folder_that_cannot_be_written_is_said_once_and_does_no_harm(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="cannot be"):
        timed = Calibration("GPU of the test", FakeTimer(), blocked, MADE_BY)
    with pytest.warns(RuntimeWarning, match="cannot be"):
        assert timed.of(linear()) is not None
    assert blocked.read_text() == "not a folder"


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert cache_folder() == tmp_path / "xdg" / "unison"
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "unison"


def test_versions_name_what_times_depend_on():
    assert versions().keys() == {"torch", "triton", "unison", "kernels"}
    assert all(isinstance(each, str) and each for each in versions().values())


def test_only_gpus_are_calibrated(monkeypatch):
    assert calibration_of(torch.device("cpu")) is None
    found: list[int] = []
    monkeypatch.setattr(calibrations, "_of_gpu", found.append)
    monkeypatch.setattr(calibrations, "has_triton", lambda: True)
    monkeypatch.setenv("UNISON_CALIBRATE", "0")
    calibration_of(torch.device("cuda", 1))
    assert found == []
    monkeypatch.delenv("UNISON_CALIBRATE")
    calibration_of(torch.device("cuda", 1))
    assert found == [1]
    monkeypatch.setattr(calibrations, "has_triton", lambda: False)
    assert calibration_of(torch.device("cuda", 1)) is None


# ---- the engine ----------------------------------------------------------------------------------

X, _ = data()


@pytest.fixture
def timer(monkeypatch) -> FakeTimer:
    """Let engines calibrate the CPU, with times that no CPU would find."""
    timer = FakeTimer(materialize=0.5, rank_one=0.002, plain_records=0.003)
    timed = Calibration("GPU of the test", timer)
    monkeypatch.setattr(learning, "calibration_of", lambda device: timed)
    return timer


def test_an_engine_plans_with_what_was_measured(timer):
    engine, module, optimizer, loader = attach()
    engine.check(X[:4])
    assert {layer.name for layer in timer.asked} == {"0.weight", "2.weight"}
    train(module, optimizer, loader, 2)
    assert engine.plan().timed_on == "GPU of the test"
    assert str(engine.plan().choice("0.weight")) == "rank_one+records"
    text = str(engine.plan())
    assert "measured ms" in text
    assert "2 of 4 layers timed on GPU of the test" in text
    (line,) = [line for line in text.splitlines() if line.startswith("0.weight")]
    batch = engine.plan().layers[1].layer.batch
    share = batch / (1 << (batch - 1).bit_length())
    assert line.split()[-1] == f"{5 * share:.3f}"


@pytest.mark.parametrize(
    "settings", [{"calibrate": False}, {"clipping": "flash_fuse_bk"}], ids=["not asked", "named"]
)
def test_an_engine_that_need_not_choose_times_nothing(timer, settings):
    engine, *_ = attach(**settings)
    found = engine.check(X[:4])
    assert timer.asked == []
    assert found.timed_on is None
    assert "measured ms" not in str(found)


def test_the_plan_of_granules_depends_on_shapes_alone(timer):
    engine, *_ = attach(granule=4)
    found = engine.check(X[:4])
    assert timer.asked == []
    layers = [each.layer for each in found.layers]
    assert found == plan_clipping(layers)


def test_ranks_that_must_agree_time_nothing(timer, monkeypatch):
    engine, *_ = attach()
    learning_of = engine._attached.attachment.learning
    assert learning_of._is_alone
    with monkeypatch.context() as patch:
        two = SimpleNamespace(is_ordered=False, everyone=SimpleNamespace(size=2))
        patch.setattr(learning_of, "_owner", two)
        assert not learning_of._is_alone
    monkeypatch.setattr(type(learning_of), "_is_alone", False)
    found = engine.check(X[:4])
    assert timer.asked == []
    assert found.timed_on is None
