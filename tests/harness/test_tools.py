"""The oracle, the tolerance table and the benchmark runner, against answers known by hand."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import runner, test_full
from tests.harness import (
    assert_close,
    assert_same_bits,
    clipped_sum,
    mean_gradient,
    per_sample_gradients,
    per_sample_norms,
)
from tests.harness.tolerance import TOLERANCES


class Tied(nn.Module):
    """`x · w · w`, with `w` under two names, an unused parameter and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.second = nn.Linear(1, 1, bias=False)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(2, 3))
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)
        nn.init.constant_(self.first.weight, 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.frozen


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum(-1)


BATCH = torch.tensor([[1.0], [-2.0], [0.0]])  # gradients of x·w² are 2·w·x: 6, -12, 0


def test_gradients_of_a_tied_model():
    model = Tied()
    gradients = per_sample_gradients(model, loss, BATCH)
    assert sorted(gradients) == ["first.weight", "unused"]
    assert gradients["first.weight"].flatten().tolist() == [6, -12, 0]
    assert_same_bits(gradients["unused"], torch.zeros(3, 2, 3, dtype=torch.float64))
    assert per_sample_norms(model, loss, BATCH).tolist() == [6, 12, 0]
    assert clipped_sum(model, loss, BATCH, 9.0)["first.weight"].item() == 6 - 9
    assert mean_gradient(model, loss, BATCH)["first.weight"].item() == -2
    assert model.first.weight.dtype == torch.float32
    assert model.first.weight.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_samples_that_are_not_finite_are_left_out(bad):
    batch = torch.tensor([[1.0], [bad], [-1.0], [5.0]])
    total = clipped_sum(Tied(), loss, batch, 12.0)
    assert total["first.weight"].item() == 12
    assert_same_bits(total["unused"], torch.zeros(2, 3, dtype=torch.float64))


def test_batch_of_zero():
    model, empty = Tied(), torch.zeros(0, 1)
    assert per_sample_gradients(model, loss, empty)["unused"].shape == (0, 2, 3)
    assert per_sample_norms(model, loss, empty).shape == (0,)
    assert clipped_sum(model, loss, empty, 1.0)["first.weight"].tolist() == [[0.0]]
    assert mean_gradient(model, loss, empty)["first.weight"].tolist() == [[0.0]]


def test_batches_of_tuples_and_dicts_agree_with_autograd(gen):
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3))
    for p in model.parameters():
        nn.init.normal_(p, generator=gen)
    ids = torch.randint(7, (5, 4), generator=gen)
    weights = torch.rand(5, generator=gen)

    def of_tuple(model, batch):
        ids, weights, _ = batch
        return model(ids).square().mean((1, 2)) * weights

    def of_dict(model, batch):
        return of_tuple(model, (batch["in"]["ids"], batch["w"], None))

    by_tuple = mean_gradient(model, of_tuple, (ids, weights, "label"))
    by_dict = mean_gradient(model, of_dict, {"in": {"ids": ids}, "w": weights})
    assert_same_bits(by_tuple, by_dict)
    of_tuple(model, (ids, weights, None)).mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_close(found, by_tuple)


def test_the_oracle_refuses_what_it_cannot_slice():
    with pytest.raises(ValueError, match="one loss per sample"):
        per_sample_gradients(nn.Linear(1, 2), lambda model, x: model(x), BATCH)
    with pytest.raises(ValueError, match=r"lengths \[2, 3\]"):
        per_sample_norms(Tied(), loss, (BATCH, BATCH[:2]))


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_rounding_passes_and_more_does_not(dtype, gen):
    exact = torch.randn(5, 123, dtype=torch.float64, generator=gen)
    rounded = exact.to(dtype)
    assert_close(rounded, exact)
    step = 10 * (TOLERANCES[dtype].relative + TOLERANCES[dtype].of_largest)
    with pytest.raises(AssertionError, match="not close"):
        assert_close((exact * (1 + step)).to(dtype), exact)
    # A result in float64 is held to the dtype in which it was computed.
    assert_close(rounded.double(), exact, dtype=dtype)


def test_close_is_about_the_largest_element_and_names_the_tensor():
    expected = torch.tensor([1000.0, 1e-4], dtype=torch.float64)
    assert_close(torch.tensor([1000.0, 2e-4]), expected)
    with pytest.raises(AssertionError, match=r"^w: "):
        assert_close({"w": torch.tensor([1000.0, 0.1])}, {"w": expected})
    with pytest.raises(AssertionError, match="names differ"):
        assert_close({"w": expected}, {"v": expected})
    with pytest.raises(ValueError, match=r"tests/harness/tolerance\.py"):
        assert_close(torch.tensor(1), torch.tensor(1))


def test_same_bits():
    a = torch.tensor([[1.0, math.nan, -0.0], [math.inf, 2.0, 3.0]])
    assert_same_bits(a, a.clone())
    assert_same_bits(a.T, a.clone().T)
    assert_same_bits(torch.zeros(0, 3), torch.zeros(0, 3))
    assert_same_bits(torch.tensor(True), torch.tensor(True))
    b = a.clone()
    b[0, 2], b[1, 1] = 0.0, 2.0000002
    with pytest.raises(AssertionError, match=r"2 of 6 .* first at \[0, 2\]: -0\.0 \(0x80000000\)"):
        assert_same_bits(a, b)
    with pytest.raises(AssertionError, match=r"^w: 1 of 1 .* first at \[\]"):
        assert_same_bits({"w": torch.tensor(1)}, {"w": torch.tensor(2)})
    with pytest.raises(AssertionError, match="shape and dtype"):
        assert_same_bits(a, a.double())


# ---- bench -----------------------------------------------------------------------------------


def test_a_result_says_where_its_figures_come_from(tmp_path):
    path = runner.write_result("speed", {"ratio": 0.5}, directory=tmp_path)
    result = json.loads(path.read_text())
    assert path == tmp_path / "speed.json"
    assert result["figures"] == {"ratio": 0.5}
    assert result["command"].startswith("python ")
    assert str(runner.ROOT) not in path.read_text()
    assert torch.__version__.startswith(result["versions"]["torch"])  # metadata lacks "+cu130"
    assert result["hardware"]["cores"] >= 1
    assert {"commit", "dirty", "date"} <= result.keys()
    with pytest.raises(ValueError, match="JSON compliant"):
        runner.write_result("bad", {"ratio": math.nan}, directory=tmp_path)
    assert not (tmp_path / "bad.json").exists()


def test_pairs_are_interleaved_and_their_ratio_bounded():
    order: list[str] = []
    seconds = {"a": iter([9.0, 2.0, 4.0, 8.0, 6.0]), "b": iter([9.0, 1.0, 2.0, 4.0, 3.0])}

    def measure(fn):
        name = fn()
        order.append(name)
        return next(seconds[name])

    found = runner.interleaved_pairs(lambda: "a", lambda: "b", 4, measure=measure)
    assert "".join(order) == "ab" + "abbaabba"  # the warm-up's 9.0 are not counted
    assert (found.ratio, found.low, found.high) == pytest.approx((2, 2, 2))
    assert (found.median_seconds_a, found.median_seconds_b) == (5, 2.5)


def test_the_interval_of_a_noisy_ratio_is_student_s():
    found = runner.ratio_of([math.e**2, 1.0, math.e], [1.0, 1.0, 1.0])  # logs 2, 0, 1
    half = 4.303 * 1 / math.sqrt(3)
    assert math.log(found.ratio) == pytest.approx(1)
    assert math.log(found.low) == pytest.approx(1 - half)
    assert math.log(found.high) == pytest.approx(1 + half)
    with pytest.raises(ValueError, match="at least 2"):
        runner.interleaved_pairs(int, int, 1)


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_1" time="0.5"/>
<testcase classname="tests.test_a" name="test_2" time="2.5">
  <properties><property name="full" value="True"/></properties><failure message="x">y</failure>
</testcase>
<testcase classname="tests.test_b" name="test_3[2]" time="0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_full_suite_results_are_read_from_junit(tmp_path: Path):
    (tmp_path / "junit.xml").write_text(JUNIT)
    found = test_full.summary(test_full.read_cases(tmp_path / "junit.xml"))
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert next(iter(found["slowest"].items())) == ("tests.test_a::test_2", 2.5)
    assert found["full"] == {"tests.test_a::test_2": "failed"}
