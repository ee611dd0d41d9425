"""Operations of which every part has a rule of its own: always run, one size each.

`test_layers.py` runs all cases at several sizes; `make test` takes a few of them.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.common import BATCH, VOCAB, WIDTH, captured, ids, squares
from tests.capture.layers import LAYERS
from tests.harness import assert_close
from tests.harness.oracle import per_sample_gradients
from unison.errors import UnsupportedOperation

NAMES = ["gru", "lstm", "attention with bias_k", "where", "where not", "where method", "bags"]
NAMES += ["bags of sums", "Tensor.__rsub__", "_VariableFunctionsClass.div over", "einsum to heads"]
NAMES += ["rows of a matrix", "rows of a transposed", "transposed rows", "looked up by index"]


def check(model: nn.Module, loss, batch: Tensor) -> None:
    expected = per_sample_gradients(model, loss, batch)
    assert_close(captured(model, loss, batch), expected, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:no rule for", "ignore:There is a performance drop")
@pytest.mark.parametrize("name", NAMES)
def test_records_are_the_per_sample_gradients(name: str):
    case = LAYERS[name]
    check(case.make().double(), case.loss, case.batch(BATCH))


class Table(nn.Module):
    """A table, looked up by ids and by others that count from its end."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.weight, self.options = nn.Parameter(torch.randn(VOCAB, WIDTH).double()), options

    def forward(self, x: Tensor) -> Tensor:
        if self.options:
            return F.embedding(x, self.weight, **self.options)
        return self.weight[x] * self.weight[x - VOCAB].cos() + self.weight[-1 - x]


def test_ids_may_count_from_the_end():
    check(Table(), squares, ids(BATCH))


@pytest.mark.parametrize("padding", [3, -VOCAB + 3])
def test_the_row_of_padding_has_no_gradient(padding: int):
    model, batch = Table(padding_idx=padding), ids(BATCH)
    assert bool((batch == 3).any())
    check(model, squares, batch)


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_a_table_whose_rows_count_others_is_refused(options: dict):
    with pytest.raises(UnsupportedOperation, match="couple samples"):
        captured(Table(**options), squares, ids(BATCH))


class Scaled(nn.Module):
    """`torch.addmm` with factors before both of its terms."""

    def __init__(self, **factors: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3).double())
        self.bias, self.factors = nn.Parameter(torch.randn(3).double()), factors

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight, **self.factors)  # type: ignore[call-overload]


@pytest.mark.filterwarnings("ignore:no rule for")
@pytest.mark.parametrize("factors", [{}, {"beta": 0.5}, {"alpha": -2.0}])
def test_a_product_and_a_sum_may_have_factors(factors: dict):
    check(Scaled(**factors), squares, torch.randn(BATCH, WIDTH).double())


def test_an_attention_evaluated_drops_nothing():
    model = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True).double().eval()

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return module(x, x, x)[0].square().flatten(1).sum(1)

    check(model, loss, LAYERS["gru"].batch(BATCH))
