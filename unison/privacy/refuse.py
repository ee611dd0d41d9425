"""What cannot be trained privately, refused: loaders, and gradients past the capture."""

from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from unison.errors import BadInput, UnsupportedOperation
from unison.privacy.sampling import Draws, Shuffled


def refuse_unknown_loader(data_loader: Any) -> None:
    """Make sure that a loader does nothing that private sampling would silently undo.

    Raises:
        BadInput: It is no `DataLoader`, or has no records.
        UnsupportedOperation: Its records have no number, or it chooses or orders them itself.
    """
    if not isinstance(data_loader, DataLoader):
        raise BadInput(
            f"expected a torch.utils.data.DataLoader, found {type(data_loader).__name__}. Remedy: "
            "pass the DataLoader itself, before any wrapper; private sampling does the dealing"
        )
    _refuse_subclass(data_loader)
    if isinstance(data_loader.dataset, IterableDataset):
        raise UnsupportedOperation(
            f"{type(data_loader.dataset).__name__} is an IterableDataset: its records have no "
            "number, so they cannot be drawn independently. Remedy: use a map-style data set with "
            "__getitem__ and __len__"
        )
    _refuse_sampler(data_loader)
    if data_loader.num_workers > 0 and not data_loader.in_order:
        raise UnsupportedOperation(
            "in_order=False lets workers overtake each other, but the passes of a logical batch "
            "must come in order. Remedy: leave in_order=True"
        )


def refuse_contradiction(data_loader: DataLoader[Any], draws: Draws) -> None:
    """Make sure that what the loader was asked for is what the draws give.

    Raises:
        BadInput: Naming the setting and its remedy.
    """
    sampling = draws.sampling
    if isinstance(sampling, Shuffled):
        if isinstance(data_loader.sampler, SequentialSampler):
            raise BadInput(
                "shuffled sampling would shuffle a loader that was built with shuffle=False. "
                "Remedy: DataLoader(..., shuffle=True), or Poisson sampling"
            )
        if data_loader.batch_size != sampling.batch_size:
            raise BadInput(
                f"shuffled sampling has batches of {sampling.batch_size} records, the loader was "
                f"built with batch_size={data_loader.batch_size}. Remedy: give both the same size"
            )
        rest = draws.num_records % sampling.batch_size
        if rest and not data_loader.drop_last:
            raise BadInput(
                f"drop_last=False asks for the last {rest} records of each epoch as a smaller "
                f"batch, but shuffled sampling has batches of {sampling.batch_size} only. Remedy: "
                "DataLoader(..., drop_last=True), or Poisson sampling, which drops nobody"
            )
    elif data_loader.drop_last and len(data_loader) != draws.steps_per_epoch:
        raise BadInput(
            f"drop_last=True asks for {len(data_loader)} full batches an epoch, but Poisson "
            f"sampling has {draws.steps_per_epoch} steps an epoch, with batches of all sizes, and "
            "drops none. Remedy: DataLoader(..., drop_last=False)"
        )


def _refuse_subclass(data_loader: DataLoader[Any]) -> None:
    for name in ("__iter__", "_get_iterator"):
        if getattr(type(data_loader), name) is not getattr(DataLoader, name):
            raise UnsupportedOperation(
                f"{type(data_loader).__name__} has its own {name}, which private sampling would "
                "not run. Remedy: pass a plain torch.utils.data.DataLoader over the same data set"
            )


def _refuse_sampler(data_loader: DataLoader[Any]) -> None:
    batches: Any = data_loader.batch_sampler
    sampler: Any = data_loader.sampler
    if batches is None:
        raise UnsupportedOperation(
            "batch_size=None switches batching off. Remedy: give the loader a batch_size"
        )
    if data_loader.batch_size is None or type(batches) is not BatchSampler:
        raise UnsupportedOperation(
            f"the loader has a batch_sampler ({type(batches).__name__}), which private sampling "
            "would replace: the privacy guarantee rests on how records are drawn. Remedy: pass "
            "batch_size and shuffle instead"
        )
    if isinstance(sampler, DistributedSampler):
        raise UnsupportedOperation(
            "the loader has a DistributedSampler, but every rank draws the same global batch and "
            "loads its own part of it. Remedy: leave the sampler out, and give batch_size for all "
            "ranks together"
        )
    if type(sampler) not in (SequentialSampler, RandomSampler):
        raise UnsupportedOperation(
            f"the loader has a sampler of its own ({type(sampler).__name__}), which private "
            "sampling would replace: a record that is drawn with another probability has another "
            "guarantee. Remedy: leave the sampler out; weight the loss, or select records in the "
            "data set"
        )
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        raise UnsupportedOperation(
            "RandomSampler(replacement=True) may take a record twice in a step, and then its "
            "gradient counts twice. Remedy: shuffle=True instead"
        )
    num_records = _num_records(data_loader)
    if len(sampler) != num_records:
        raise UnsupportedOperation(
            f"the loader's {type(sampler).__name__} takes {len(sampler)} records of {num_records}. "
            "Remedy: take a torch.utils.data.Subset as data set, and leave the sampler out"
        )


def _num_records(data_loader: DataLoader[Any]) -> int:
    try:
        num_records = len(data_loader.dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise UnsupportedOperation(
            f"{type(data_loader.dataset).__name__} has no length, so its records cannot be drawn. "
            "Remedy: give the data set a __len__"
        ) from error
    if num_records == 0:
        raise BadInput("the data set is empty: there is no record to draw")
    return num_records


def refuse_gradient(name: str, _: Tensor) -> None:
    """Raise for a gradient that reaches a parameter itself; a hook of tensors."""
    raise UnsupportedOperation(
        f"a gradient reached {name!r} itself, where it would be neither clipped nor noised. It "
        "came from a pass in evaluation mode, from a custom autograd.Function, or from code that "
        "kept the parameter elsewhere than in its module. Train in training mode, and use torch "
        "functions on the module's attribute"
    )
