import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import register_pytree_node
from torch.utils.data import default_collate
from transformers import BatchEncoding

from unison.errors import BadInput, UnsupportedOperation
from unison.privacy.collate import BatchLayout

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Example:
    x: torch.Tensor
    names: list[str]
    num_rows: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_rows", len(self.x))


class Registered:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


register_pytree_node(Registered, lambda r: ([r.x], None), lambda parts, _: Registered(*parts))


def x(n: int) -> torch.Tensor:
    return torch.arange(n * 6.0, dtype=torch.float64).view(n, 2, 3) + 1


def y(n: int) -> torch.Tensor:
    return torch.full((n,), 7)


# Each builds a batch of n records.
BATCHES = {
    "tensor": x,
    "default_collate": lambda n: default_collate([(torch.ones(3), i, "name") for i in range(n)]),
    "tuple": lambda n: (x(n), y(n)),
    "list": lambda n: [x(n), y(n)],
    "dict": lambda n: {"x": x(n), "y": y(n)},
    "ordered dict": lambda n: OrderedDict(x=x(n), y=y(n)),
    "default dict": lambda n: defaultdict(list, x=x(n), y=y(n)),
    "user dict": lambda n: UserDict(x=x(n), y=y(n)),
    "read-only mapping": lambda n: MappingProxyType({"x": x(n)}),
    "named tuple": lambda n: Pair(x(n), {"deep": [y(n), (x(n), None)]}),
    "dataclass": lambda n: Example(x(n), ["name"] * n),
    "registered class": lambda n: {"graph": Registered(x(n))},
    "batch encoding": lambda n: BatchEncoding({"input_ids": y(n)[:, None], "labels": y(n)}),
    "numpy": lambda n: {"x": x(n).numpy(), "y": y(n)},
    "transposed records": lambda n: tuple(zip(*[(torch.ones(3), "cat")] * n, strict=True)),
    "records as they are": lambda n: [{"x": 1, "y": 2}] * n,
    "time-major": lambda n: {"tokens": y(n).expand(5, n), "mask": torch.ones(5, 5)},
    "no batch dimension": lambda n: {"x": x(n), "scale": torch.tensor(2.0), "ids": torch.arange(4)},
    "constants": lambda n: {"x": x(n), "kind": "train", "epoch": 3, "none": None, "bins": (0, 9)},
}


def describe(batch):
    """Types, shapes, dtypes and constants of a batch, as something that can be compared."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return type(batch), tuple(batch.shape), batch.dtype
    if isinstance(batch, dict | UserDict | MappingProxyType):
        return type(batch), {key: describe(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch), [describe(value) for value in batch]
    if isinstance(batch, Example | Registered):
        return type(batch), {key: describe(value) for key, value in vars(batch).items()}
    return batch


@pytest.mark.parametrize("kind", BATCHES)
def test_the_empty_batch_is_a_batch_of_no_records(kind):
    build = BATCHES[kind]
    layout = BatchLayout(build(1), build(2))
    for n in (1, 2, 3, 5):
        layout.check(build(n), n)
    empty = layout.empty()
    layout.check(empty, 0)
    if kind == "default_collate":  # cannot collate nothing, which is why an empty batch is made
        assert describe(empty) == describe([torch.ones(0, 3), torch.ones(0).long(), ()])
    elif kind == "transposed records":
        assert empty == ((), ())
    else:
        assert describe(empty) == describe(build(0))


def test_empty_batches_share_nothing():
    layout = BatchLayout(*(BATCHES["no batch dimension"](n) for n in (1, 2)))
    first, second = layout.empty(), layout.empty()
    first["scale"].zero_()
    first["extra"] = 1
    assert float(second["scale"]) == 2.0
    assert "extra" not in second
    assert first["x"].untyped_storage().nbytes() == 0  # the record it was cut from is not kept


def test_the_encoding_keeps_its_class_and_methods():
    build = BATCHES["batch encoding"]
    empty = BatchLayout(build(1), build(2)).empty()
    assert empty.to("cpu").input_ids.shape == (0, 1)


def test_random_lengths_do_not_hide_the_records():
    layout = BatchLayout({"x": torch.ones(1, 57)}, {"x": torch.ones(2, 63)})
    layout.check({"x": torch.ones(9, 11)}, 9)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": x(5), "y": y(4)}, r"given 4 records and returned 5 rows in batch\['x'\]"),
        ({"x": x(4), "y": y(8)}, r"given 4 records and returned 8 rows in batch\['y'\]"),
        ({"x": torch.tensor(1.0), "y": y(4)}, r"returned no rows in batch\['x'\]"),
        ({"x": 3, "y": y(4)}, r"returned no rows in batch\['x'\]"),
        ({"y": y(4)}, r"without batch\['x'\]"),
        (y(4), r"without batch\['x'\]"),
    ],
)
def test_another_number_of_rows_raises(batch, message):
    layout = BatchLayout(*({"x": x(n), "y": y(n)} for n in (1, 2)))
    with pytest.raises(BadInput, match=message):
        layout.check(batch, 4)


class Opaque:
    pass


class NotRebuilt(dict):
    def __copy__(self):
        raise TypeError("no copies")


REFUSED = {
    "concatenated tokens": (lambda n: {"t": torch.ones(5 * n)}, r"batch\['t'\] has shape \[5\]"),
    "two views of each record": (lambda n: torch.ones(2 * n, 3), r"\[2, 3\].* and \[4, 3\]"),
    "pairs of records": (lambda n: torch.ones(n, n), r"no single dimension counts the records"),
    "squeezed": (lambda n: torch.ones(n, 3).squeeze(0), r"shape \[3\] for one.* \[2, 3\] for two"),
    "packed": (lambda n: pack_sequence([torch.ones(5, 2)] * n), r"batch\['data'\] has shape"),
    "nested": (lambda n: torch.nested.as_nested_tensor([torch.ones(3)] * n), "nested tensor"),
    "opaque": (lambda n: (x(n), Opaque()), r"batch\[1\], of class Opaque"),
    "other keys": (lambda n: {str(i): x(n) for i in range(n)}, r"\['0', '1'\] and \['0'\]"),
    "other types": (lambda n: [x(n)] if n == 1 else x(n), "list for one record and Tensor for two"),
    "no rows": (lambda n: {"epoch": 3, "scale": torch.ones(4)}, "nothing in the batch"),
    "cannot be rebuilt": (lambda n: NotRebuilt(x=x(n)), "empty NotRebuilt for batch: no copies"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_cut_is_refused_with_a_remedy(kind):
    build, message = REFUSED[kind]
    with pytest.raises(UnsupportedOperation, match=message) as caught:
        BatchLayout(build(1), build(2))
    assert "Remedy" in str(caught.value)
