import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import register_pytree_node
from torch.utils.data import DataLoader, default_collate
from transformers import BatchEncoding

from tests.privacy.loaders import private
from unison.errors import BadInput, UnsupportedOperation
from unison.privacy import Poisson, PrivateLoader
from unison.privacy.loader import Dims, check_rows, learn_dims, map_parts, without_rows
from unison.rng import Key

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


def learned(one: Any, two: Any) -> tuple[Dims, Any]:
    """Where records lie, and an empty batch."""
    dims, _ = learn_dims(one, two)
    return dims, emptied(one, dims)


def emptied(batch: Any, dims: Dims) -> Any:
    return map_parts(batch, dims, without_rows, is_new=True)


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
    dims, empty = learned(build(1), build(2))
    for n in (1, 2, 3, 5):
        check_rows(build(n), dims, n)
    empty = emptied(empty, dims)  # as the loader does
    check_rows(empty, dims, 0)
    if kind == "default_collate":  # cannot collate nothing, which is why an empty batch is made
        assert describe(empty) == describe([torch.ones(0, 3), torch.ones(0).long(), ()])
    elif kind == "transposed records":
        assert empty == ((), ())
    else:
        assert describe(empty) == describe(build(0))


def test_empty_batches_share_nothing():
    dims, empty = learned(*(BATCHES["no batch dimension"](n) for n in (1, 2)))
    first, second = emptied(empty, dims), emptied(empty, dims)
    first["scale"].zero_()
    first["extra"] = 1
    assert float(second["scale"]) == 2.0
    assert "extra" not in second
    assert first["x"].untyped_storage().nbytes() == 0  # the record it was cut from is not kept


def test_the_encoding_keeps_its_class_and_methods():
    build = BATCHES["batch encoding"]
    _, empty = learned(build(1), build(2))
    assert empty.to("cpu").input_ids.shape == (0, 1)


def test_random_lengths_do_not_hide_the_records():
    dims, _ = learned({"x": torch.ones(1, 57)}, {"x": torch.ones(2, 63)})
    check_rows({"x": torch.ones(9, 11)}, dims, 9)


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
    dims, _ = learned(*({"x": x(n), "y": y(n)} for n in (1, 2)))
    with pytest.raises(BadInput, match=message):
        check_rows(batch, dims, 4)


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
        learned(build(1), build(2))
    assert "Remedy" in str(caught.value)


# ---- one shape -----------------------------------------------------------------------------------


def texts(lengths: list[int]) -> list[dict[str, Tensor]]:
    return [
        {"input_ids": torch.arange(1, n + 1), "labels": torch.arange(1, n + 1), "y": torch.ones(())}
        for n in lengths
    ]


def padded_to_the_longest(records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    fill = {"input_ids": 0, "labels": -100}
    longest = {
        name: torch.nn.utils.rnn.pad_sequence(
            [each[name] for each in records], batch_first=True, padding_value=value
        )
        for name, value in fill.items()
    }
    return longest | {"y": torch.stack([each["y"] for each in records])}


def first_batches(
    lengths: list[int], row_shape: Any, padding_row: Any = None
) -> list[dict[str, Tensor]]:
    private = PrivateLoader(
        DataLoader(texts(lengths), batch_size=2, collate_fn=padded_to_the_longest),  # type: ignore[arg-type]
        Poisson(rate=0.5),
        Key.from_seed(1),
        row_shape=row_shape,
        padding_row=padding_row,
    )
    return [batch for _, batch in zip(range(2), private, strict=False)]


@pytest.mark.parametrize("lengths", [[3, 5, 4, 6], [3, 3, 3, 4], [3, 3, 5, 3]])
def test_rows_of_several_lengths_are_refused(lengths):
    """Before the first batch, where one of the first records differs; else when it does."""
    found = r"rows of batch\['input_ids'\] have shape \[\d\] .* row_shape={'input_ids': \[\d\]"
    with pytest.raises(BadInput, match=found):
        first_batches(lengths, None)


def test_rows_are_padded_to_a_public_shape():
    for batch in first_batches([3, 5, 4, 6], {"input_ids": 8, "labels": (8,)}):
        ids, labels = batch["input_ids"], batch["labels"]
        assert ids.shape[1:] == labels.shape[1:] == (8,)
        assert batch["y"].shape == ids.shape[:1]
        assert (labels[ids == 0] == -100).all()
        assert (labels[ids != 0] == ids[ids != 0]).all()


def test_padding_is_the_public_rows():
    public = {"input_ids": torch.full((8,), 7), "labels": torch.full((8,), 9), "y": torch.ones(())}
    for batch in first_batches([3, 3, 3, 3], {"input_ids": 8, "labels": 8}, public):
        assert (batch["input_ids"][:, 3:] == 7).all()
        assert (batch["labels"][:, 3:] == 9).all()
    with pytest.raises(BadInput, match=r"padding_row has shape \[8\] at 'input_ids'"):
        first_batches([3, 3, 3, 3], {"input_ids": 9, "labels": 9}, public)


def test_lengths_that_are_public():
    assert len({batch["labels"].shape[1] for batch in first_batches([1, 2, 3, 9], "public")}) == 2
    assert private(row_shape="public").unit == "one row of the data set, but not its length"
    with pytest.raises(BadInput, match="row_shape"):
        private(row_shape="secret")


def test_a_name_that_is_not_in_the_batch():
    with pytest.raises(BadInput, match=r"row_shape has 'ids', .* \['input_ids', 'labels', 'y'\]"):
        first_batches([3, 3, 3, 3], {"ids": 8})


def test_longer_rows_than_said():
    with pytest.raises(BadInput, match=r"have shape \[6\], and row_shape is \[5\]: cut longer"):
        first_batches([3, 5, 4, 6], {"input_ids": 5, "labels": 5})


def test_arrays_and_rows_along_another_dimension():
    loader = private(row_shape={0: (4, 3)})
    value = np.ones((2, 5, 2), np.float32)
    found = loader._fit(value, 1, (0,))
    assert isinstance(found, np.ndarray)
    assert found.shape == (4, 5, 3)
    assert found.sum() == value.sum()
