"""A collate function that mixes records is refused before the first step, others are not."""

import dataclasses
import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate
from transformers import BatchEncoding

from unison.errors import BadInput
from unison.privacy import Poisson, PrivateLoader
from unison.rng import Key

Record = dict[str, Any]


def records(num: int = 40, shape: tuple[int, ...] = (3, 4)) -> list[Record]:
    values = torch.randn(num, *shape, generator=torch.Generator().manual_seed(3))
    return [{"x": values[i], "y": i % 5, "name": f"row {i}"} for i in range(num)]


class Copied:
    """Gives a new record each time, which a collate function may take apart."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> Record:
        return {**self.records[i], "x": self.records[i]["x"].clone()}


class Noisy(Copied):
    """Augments with the global generators while it reads, as often as the record says."""

    def __getitem__(self, i: int) -> Record:
        record = super().__getitem__(i)
        shift = sum(random.random() + np.random.rand() for _ in range(i % 3 + 1))  # noqa: NPY002
        return {**record, "x": record["x"] + shift + torch.rand(())}


def start(collate: Callable[[list[Any]], Any], data: Any = None, **settings: Any) -> Any:
    share = {name: settings.pop(name) for name in ("rows_per_record",) if name in settings}
    data = records() if data is None else data
    inner = DataLoader(data, batch_size=5, collate_fn=collate, **settings)
    loader = PrivateLoader(inner, Poisson(rate=min(1.0, 5 / len(data))), Key.from_seed(2), **share)
    return next(iter(loader))


# ---- mixtures ------------------------------------------------------------------------------------


def mixed(batch: Any, lam: float, order: Tensor) -> Any:
    return {**batch, "x": lam * batch["x"] + (1 - lam) * batch["x"][order]}


def mixup_of_torch(records: list[Record]) -> Any:
    lam = float(torch.distributions.Beta(0.4, 0.4).sample())
    return mixed(default_collate(records), lam, torch.randperm(len(records)))


def mixup_of_numpy(records: list[Record]) -> Any:
    lam = np.random.beta(0.4, 0.4)  # noqa: NPY002
    order = torch.from_numpy(np.random.permutation(len(records)))  # noqa: NPY002
    return mixed(default_collate(records), lam, order)


def mixup_of_python(records: list[Record]) -> Any:
    lam, order = random.betavariate(0.4, 0.4), list(range(len(records)))
    random.shuffle(order)
    return mixed(default_collate(records), lam, torch.tensor(order))


def mixup_half_of_the_time(records: list[Record]) -> Any:
    return mixup_of_torch(records) if torch.rand(()) < 0.5 else default_collate(records)


def cutmix(records: list[Record]) -> Any:
    batch = default_collate(records)
    first, order = int(torch.randint(4, ())), torch.randperm(len(records))
    batch["x"][..., first:] = batch["x"][order][..., first:]
    return batch


def labels_of_others(records: list[Record]) -> Any:
    batch = default_collate(records)
    return {**batch, "y": 0.9 * batch["y"] + 0.1 * batch["y"].roll(1)}


def centred(records: list[Record]) -> Any:
    batch = default_collate(records)
    return {**batch, "x": batch["x"] - batch["x"].mean(0)}


def plus_the_previous(records: list[Record]) -> Any:
    batch = default_collate(records)
    return {**batch, "x": batch["x"] + batch["x"].roll(1, 0)}


def minus_the_first(records: list[Record]) -> Any:
    batch = default_collate(records)
    return {**batch, "x": batch["x"] - batch["x"][:1]}


def names_of_all(records: list[Record]) -> Any:
    batch = default_collate(records)
    return {**batch, "name": [" ".join(batch["name"])] * len(records)}


def sorted_and_centred(records: list[Record]) -> Any:
    return centred(sorted(records, key=lambda each: float(each["x"].sum())))


def a_mean_beside_the_rows(records: list[Record]) -> Any:
    batch = default_collate(records)
    return {**batch, "mean": batch["x"].mean()}


def in_an_encoding(records: list[Record]) -> Any:
    return BatchEncoding({"deep": [(centred(records)["x"],)]})


_generator = np.random.default_rng(5)


def mixup_of_a_generator_of_its_module(records: list[Record]) -> Any:
    order = torch.from_numpy(_generator.permutation(len(records)))
    return mixed(default_collate(records), _generator.beta(0.4, 0.4), order)


class Mixer:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, records: list[Record]) -> Any:
        lam = float(torch.rand((), generator=self.generator))
        order = torch.randperm(len(records), generator=self.generator)
        return mixed(default_collate(records), lam, order)


MIXTURES = [
    mixup_of_torch,
    mixup_of_numpy,
    mixup_of_python,
    mixup_half_of_the_time,
    cutmix,
    labels_of_others,
    centred,
    plus_the_previous,
    minus_the_first,
    names_of_all,
    sorted_and_centred,
    a_mean_beside_the_rows,
    in_an_encoding,
    mixup_of_a_generator_of_its_module,
    Mixer(),
    functools.partial(lambda functions, records: functions[0](records), [Mixer()]),
]
REFUSED = r"collate_fn mixes records: .* at batch\[.*\] changed .* Remedy: "


@pytest.mark.parametrize("collate", MIXTURES, ids=lambda each: getattr(each, "__name__", "object"))
@pytest.mark.parametrize("is_noisy", [False, True], ids=["plain", "augmented"])
def test_a_mixture_is_refused_before_the_first_step(collate, is_noisy):
    with pytest.raises(BadInput, match=REFUSED):
        start(collate, Noisy(records()) if is_noisy else None)


@pytest.mark.parametrize("collate", [mixup_of_numpy, mixup_of_torch, centred])
def test_a_mixture_in_workers_is_refused(collate):
    with pytest.raises(BadInput, match=REFUSED):
        start(collate, Noisy(records()), num_workers=2)


@pytest.mark.full
def test_a_mixture_in_spawned_workers_is_refused():
    with pytest.raises(BadInput, match=REFUSED):
        start(mixup_of_numpy, num_workers=1, multiprocessing_context="spawn")


@pytest.mark.parametrize("num", [2, 3, 4, 5])
def test_a_mixture_of_few_records_is_refused(num):
    with pytest.raises(BadInput, match=REFUSED):
        start(centred, records(num))


def test_a_mixture_of_rows_of_several_lengths_is_refused():
    """Where the longest record stays, so that shapes do."""
    data = [{**each, "x": each["x"].flatten()[: 3 + i % 4]} for i, each in enumerate(records())]

    def collate(records: list[Record]) -> Any:
        x = torch.nn.utils.rnn.pad_sequence([each["x"] for each in records], batch_first=True)
        return x - x.mean(0)

    inner = DataLoader(data, batch_size=5, collate_fn=collate)  # type: ignore[arg-type]
    loader = PrivateLoader(inner, Poisson(rate=0.2), Key.from_seed(2), row_shape="public")
    with pytest.raises(BadInput, match="collate_fn mixes records: a row at batch changed"):
        next(iter(loader))


# ---- what ordinary collate functions do ----------------------------------------------------------


@dataclasses.dataclass
class Batch:
    x: Tensor
    names: list[str]


class Opaque:
    pass


def noise_per_row(records: list[Record]) -> Any:
    batch = default_collate(records)
    return {**batch, "x": batch["x"] + torch.randn(batch["x"].shape) * random.random()}


def noise_without_a_seed(records: list[Record]) -> Any:
    batch = default_collate(records)
    noise = torch.from_numpy(np.random.default_rng().random(batch["x"].shape))
    return {**batch, "x": batch["x"] + noise}


def masks_as_often_as_the_record_says(records: list[Record]) -> Any:
    """As whole-word masking does, whose draws for one record move those for the next."""
    for each in records:
        for _ in range(each["y"] + 1):
            each["x"][random.randrange(3), random.randrange(4)] = random.random()
    return default_collate(records)


def flips_rarely_without_a_seed(records: list[Record]) -> Any:
    flips = np.random.default_rng().random(len(records)) < 0.1
    return default_collate(
        [each["x"] * (-1) ** int(f) for each, f in zip(records, flips, strict=True)]
    )


def pops(records: list[Record]) -> Any:
    labels = torch.tensor([each.pop("y") for each in records])
    return {**default_collate(records), "labels": labels}


def changes_in_place(records: list[Record]) -> Any:
    return torch.stack([each["x"].mul_(0.5) for each in records])


def sorts(records: list[Record]) -> Any:
    return default_collate(sorted(records, key=lambda each: float(each["x"].sum())))


def random_order(records: list[Record]) -> Any:
    return default_collate(random.sample(records, len(records)))


ORDINARY = {
    "default": default_collate,
    "noise": noise_per_row,
    "noise without a seed": noise_without_a_seed,
    "flips without a seed": flips_rarely_without_a_seed,
    "draws of data": masks_as_often_as_the_record_says,
    "pops": pops,
    "in place": changes_in_place,
    "sorts": sorts,
    "random order": random_order,
    "records": lambda records: records,
    "transposed": lambda records: tuple(zip(*[(r["x"], r["name"]) for r in records], strict=True)),
    "dataclass": lambda records: Batch(
        torch.stack([each["x"] for each in records]), [each["name"] for each in records]
    ),
    "time-major": lambda records: torch.stack([each["x"] for each in records], 1),
    "positions": lambda records: {**default_collate(records), "at": torch.arange(len(records))},
    "objects": lambda records: {**default_collate(records), "o": [Opaque() for _ in records]},
    "locks": lambda records, lock=threading.Lock(): default_collate(records),  # noqa: B008
    "not a number": lambda records: default_collate(records)["x"] * float("nan"),
    "bfloat16": lambda records: default_collate(records)["x"].bfloat16(),
    "expanded": lambda records: torch.ones(1, 3).expand(len(records), 3).bfloat16(),
    "a column": lambda records: default_collate(records)["x"][:, :, :1].bfloat16(),
    "no columns": lambda records: [default_collate(records)["x"][:, :0], torch.ones(len(records))],
    "words": lambda records: {**default_collate(records), "words": np.array(["a", "b", "c"])},
    "system": lambda records, draw=random.SystemRandom(): default_collate(records),  # noqa: B008
    "a count": lambda records: {**default_collate(records), "sum": sum(r["y"] for r in records)},
}


@pytest.mark.parametrize("is_noisy", [False, True], ids=["plain", "augmented"])
@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_functions_are_not_refused(kind, is_noisy):
    start(ORDINARY[kind], Noisy(records()) if is_noisy else Copied(records()))


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5])
def test_few_records_are_not_refused(num):
    start(default_collate, records(num))
    start(default_collate, Noisy(records(num)), num_workers=1)


def test_several_rows_of_one_record_may_be_mixed():
    def pairs(records: list[Record]) -> Any:
        return torch.cat([torch.stack([r["x"] - r["x"].mean(), -r["x"]]) for r in records])

    start(pairs, rows_per_record=2)

    def others(records: list[Record]) -> Any:
        rows = pairs(records)
        return rows + rows.roll(1, 0)

    with pytest.raises(BadInput, match="collate_fn mixes records: a row at batch changed"):
        start(others, rows_per_record=2)


@pytest.mark.parametrize("side", ["right", "left", "both"])
@pytest.mark.parametrize("row_shape", ["public", {0: 12}])
def test_padding_to_the_longest_is_not_refused(side, row_shape):
    data = [torch.full((2 + i * 7 % 10,), 1.0 + i) for i in range(40)]

    def collate(records: list[Tensor]) -> Any:
        longest = max(map(len, records))
        rows = []
        for each in records:
            left = {"right": 0, "left": longest - len(each), "both": (longest - len(each)) // 2}
            at = left[side]
            rows.append(torch.nn.functional.pad(each, (at, longest - len(each) - at)))
        return torch.stack(rows), torch.tensor([len(each) / longest for each in records])

    inner = DataLoader(data, batch_size=5, collate_fn=collate)  # type: ignore[arg-type]
    next(iter(PrivateLoader(inner, Poisson(rate=0.2), Key.from_seed(2), row_shape=row_shape)))


def test_a_record_that_cannot_be_read_leaves_the_check_to_others():
    class Broken(Noisy):
        def __getitem__(self, i: int) -> Record:
            if i == 39:
                raise OSError("no such file")
            return super().__getitem__(i)

    start(default_collate, Broken(records()))
    with pytest.raises(BadInput, match=REFUSED):
        start(centred, Broken(records()))


def test_a_function_that_cannot_be_tried_is_refused():
    def only_of_eight(records: list[Record]) -> Any:
        if len(records) in (3, 4):
            raise IndexError("of the eight images of a grid")
        return centred(records)

    with pytest.raises(
        BadInput, match=r"cannot be tried: with records \[0, 9, 19, 29\].*eight images"
    ):
        start(only_of_eight)


def test_a_mixture_that_takes_its_records_apart_is_refused():
    def pops_and_mixes(records: list[Record]) -> Any:
        labels = torch.tensor([each.pop("y") for each in records])
        return {**centred(records), "labels": labels}

    with pytest.raises(BadInput, match=REFUSED):
        start(pops_and_mixes, Copied(records()))


# ---- generators ----------------------------------------------------------------------------------


def test_the_check_takes_nothing_from_generators():
    mixer = Mixer()

    def own(records: list[Record]) -> Any:
        noise = _generator.random() + float(torch.rand((), generator=mixer.generator))
        return {**noise_per_row(records), "noise": torch.full((len(records),), noise)}

    def states() -> list[Any]:
        python, numpy = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        return [python, numpy, torch.get_rng_state().tolist()]

    before = states()
    loader = PrivateLoader(
        DataLoader(records(), batch_size=5, collate_fn=own),  # type: ignore[arg-type]
        Poisson(rate=0.2),
        Key.from_seed(2),
    )
    mine = [_generator.bit_generator.state, mixer.generator.get_state().tolist()]
    loader._refuse_mixing()
    assert states() == before
    loader._refuse_mixing()
    assert [_generator.bit_generator.state, mixer.generator.get_state().tolist()] == mine


def test_steps_call_the_collate_function_once_each():
    calls: list[int] = []

    def collate(records: list[Record]) -> Any:
        calls.append(len(records))
        return default_collate(records)

    inner = DataLoader(records(), batch_size=5, collate_fn=collate)  # type: ignore[arg-type]
    loader = PrivateLoader(inner, Poisson(rate=0.2), Key.from_seed(2))
    batches = iter(loader)
    next(batches)
    before = len(calls)
    assert before < 20
    steps = 1 + sum(1 for _ in batches)
    empty = steps - 1 - (len(calls) - before)
    assert 0 <= empty < 3
