"""What `make_private` is given: checked, with the remedy, and read where it is not said.

And what cannot be trained privately is refused: loaders, and gradients past the capture.
"""

import fnmatch
import math
import warnings
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from unison.errors import BadInput, UnsupportedOperation
from unison.privacy.sampling import Poisson, Sampling, Shuffled, steps_per_epoch
from unison.rng import Key
from unison.torch_internals import DynamoBackend, backend_of

# What a private loader keeps of the user's, beside the data set.
KEPT_SETTINGS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn")
KEPT_SETTINGS += ("multiprocessing_context", "prefetch_factor", "persistent_workers")
KEPT_SETTINGS += ("pin_memory_device", "in_order")
_HINTS = {
    "criterion": "the loss is the user's own; no wrapper is needed, in any mode",
    "grad_sample_mode": "use clipping='auto', or one of the modes that docs/clipping.md names",
    "noise_generator": "use seed= for runs that can be repeated; noise is secure without it",
    "secure_mode": "noise is secure by default; secure_noise=False with seed= turns it off",
    "wrap_model": "the module is never wrapped",
    "strict": "everything is checked, always",
    "batch_size": "it is the data loader's, and so is the sampling rate; expected_batch_size= only "
    "divides",
    "rand_on_empty": "an empty draw is a row of zeros that counts for nothing",
    "alphas": "the accountants of dp-accounting choose their own orders",
}


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name; there must be some."""
    found = {name: each for name, each in module.named_parameters() if each.requires_grad}
    if not found:
        raise BadInput("the module has no trainable parameter")
    for path, child in module.named_modules():
        for key, each in child.named_parameters() if isinstance(child, ScriptModule) else ():
            if each.requires_grad:
                raise UnsupportedOperation(
                    f"{path + '.' if path else ''}{key} lies in a scripted module, inside of which "
                    "operations are not seen: train the module that it was scripted from, or "
                    "freeze each of its parameters with requires_grad_(False)"
                )
    for name, each in found.items():
        if each.is_complex():
            raise UnsupportedOperation(
                f"{name} is complex, and private gradients are of real parameters: make it a real "
                "parameter of shape [..., 2] and use torch.view_as_complex of it in forward"
            )
    return found


def check_module(module: nn.Module) -> None:
    """Require a module, not its forward, nor several, all of whose parameters have a shape."""
    if not isinstance(module, nn.Module):
        raise BadInput(f"module= expects a torch.nn.Module, found {type(module).__name__}")
    for name, each in module.named_parameters():
        if is_lazy(each):
            raise BadInput(
                f"{name} has no shape yet, as a lazy layer gives it one when it is first called: "
                "call the module once before make_private, on a row that is made up, such as zeros"
            )


def num_trainable(module: nn.Module) -> int:
    """Elements of all trainable parameters, wherever they lie."""
    check_module(module)
    return sum(math.prod(each.shape) for each in module.parameters() if each.requires_grad)


def check_public_buffers(module: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Require every pattern to name a buffer (or a frozen parameter) of the module."""
    if isinstance(patterns, str):
        raise BadInput(f"public_buffers must be a list of names, found {patterns!r}")
    buffers = [name for name, _ in module.named_buffers()]
    names = [
        *buffers,
        *(name for name, each in module.named_parameters() if not each.requires_grad),
    ]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise BadInput(
                f"public_buffers: the module has no buffer {pattern!r}; it has {listed(buffers)}"
            )
    return tuple(patterns)


def check_compile(
    options: bool | Mapping[str, Any], users: DynamoBackend | None
) -> DynamoBackend | None:
    """The backend for private passes; None if they are not to be compiled.

    Args:
        options: What `make_private` was given.
        users: The backend of what the user has compiled before.
    """
    if options is False and users is None:
        return None
    arguments = {} if isinstance(options, bool) else options
    unknown = sorted(set(arguments) - {"backend", "mode", "options"})
    if unknown:
        raise BadInput(
            f"compile= takes backend, mode and options of torch.compile, found {unknown}; graphs "
            "are whole and made for each size of a batch in any case"
        )
    return users if users is not None and not arguments else backend_of(arguments)


def unprepared(prepared: Any) -> Any:
    """What accelerate's `prepare` was given, for an optimizer or a loader that it returned.

    A loader gets the batch size of all processes together. Anything else is returned as it is.
    """
    home = type(prepared).__module__
    if home == "accelerate.optimizer":
        return prepared.optimizer
    if home != "accelerate.data_loader":
        return prepared
    batches: Any = prepared.sampler
    batches = batches if isinstance(batches, BatchSampler) else prepared.batch_sampler
    while not hasattr(batches, "sampler"):  # accelerate's own stand around the user's
        batches = batches.batch_sampler
    is_shuffled = type(batches.sampler).__module__ == home  # a random one, seeded by accelerate
    if type(prepared).__name__ == "DataLoaderDispatcher":  # which fails to count itself
        size = batches.batch_size * (1 if prepared.split_batches else prepared.state.num_processes)
    else:
        size = prepared.total_batch_size
    return resized(
        prepared,
        size,
        RandomSampler(prepared.dataset) if is_shuffled else batches.sampler,
        drop_last=batches.drop_last,
    )


def resized(
    data_loader: DataLoader[Any],
    batch_size: int,
    sampler: Any = None,
    *,
    drop_last: bool = False,
    **changed: Any,
) -> DataLoader[Any]:
    """A loader of the same records with another batch size, such as that of all processes.

    Args:
        data_loader: The loader.
        batch_size: Of the new one.
        sampler: Another one than the loader's.
        drop_last: As for `DataLoader`.
        changed: Other settings of `DataLoader` that are not to be kept.
    """
    if sampler is None:
        refuse_unknown_loader(data_loader)  # what is special to it would be lost
        sampler = data_loader.sampler
    return DataLoader(
        data_loader.dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        **{name: getattr(data_loader, name) for name in KEPT_SETTINGS} | changed,
    )


def refuse_training_rows(evaluated: Any, trained: Any) -> None:
    """Refuse to evaluate on rows that are trained on, as far as that can be seen.

    Args:
        evaluated: A data set, or several by name.
        trained: The data set that is trained on.
    """
    if isinstance(evaluated, Mapping):
        for each in evaluated.values():
            refuse_training_rows(each, trained)
        return
    if evaluated is None or trained is None:
        return
    fingerprint = getattr(evaluated, "_fingerprint", None)  # of Hugging Face's data sets
    is_same = evaluated is trained
    is_same |= fingerprint is not None and fingerprint == getattr(trained, "_fingerprint", None)
    if is_same or np.isin(_row_ids(evaluated), _row_ids(trained)).any():
        raise BadInput(
            "the rows to evaluate on are rows that are trained on: no ε covers what is found on "
            "them; evaluate on rows that are held out"
        )


def _row_ids(data: Any) -> np.ndarray:
    """A number for each row of a data set that lives, the same in views of it: where it lies."""
    if isinstance(data, Subset):
        return _row_ids(data.dataset)[np.asarray(data.indices, dtype=np.int64)]
    if isinstance(data, ConcatDataset):
        return np.concatenate([_row_ids(each) for each in data.datasets])
    if isinstance(data, list):
        return np.array([id(each) for each in data], dtype=np.uint64)
    if not isinstance(data, Sized):
        return np.empty(0, dtype=np.uint64)
    table: Any = getattr(data, "_data", None)  # of Hugging Face's: views of Arrow's buffers
    if not hasattr(table, "column_names") or not table.num_columns:
        return _places(id(data), 0, len(data))
    ids = []
    for chunk in table.column(0).chunks:
        addresses = [each.address for each in chunk.buffers() if each is not None and each.size]
        ids.append(_places(addresses[-1] if addresses else id(data), chunk.offset, len(chunk)))
    found = np.concatenate([np.empty(0, dtype=np.uint64), *ids])
    chosen = getattr(data, "_indices", None)
    return found if chosen is None else found[chosen.column(0).to_numpy().astype(np.int64)]


def _places(start: int, first: int, length: int) -> np.ndarray:
    """Numbers of rows that lie one after the other; those of another start are far away."""
    spread = start * 0x9E3779B97F4A7C15 % 2**64
    return np.arange(first, first + length, dtype=np.uint64) + np.uint64(spread)


def sampling_of(data_loader: DataLoader[Any], is_poisson: bool) -> Sampling:
    """How records are drawn, from the loader's settings: the rate is its batch size's."""
    if isinstance(data_loader, DataLoader):
        refuse_unknown_loader(data_loader)  # one whose records have no number has no length
    elif not hasattr(data_loader, "dataset"):
        raise BadInput(
            "data_loader= expects a torch.utils.data.DataLoader, from whose data set records are "
            f"drawn, found {type(data_loader).__name__}"
        )
    num_records = len(data_loader.dataset)  # type: ignore[arg-type]
    if num_records == 0:
        raise BadInput("the data set is empty")
    size = batch_size_of(data_loader)
    if not is_poisson:
        return Shuffled(batch_size=size, num_records=num_records)
    return Poisson(rate=min(1.0, size / num_records))


def batch_size_of(data_loader: DataLoader[Any]) -> int:
    """The size that the user's loader was built with."""
    size = data_loader.batch_size
    if size is None and isinstance(getattr(data_loader.batch_sampler, "batch_size", None), int):
        size = data_loader.batch_sampler.batch_size  # type: ignore[union-attr]
    if size is None:
        raise BadInput(
            "the data loader has no batch size; build it with batch_size=, which is the expected "
            "size of a batch"
        )
    return size


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "none") + more


def refuse_unknown(where: str, unknown: Mapping[str, Any]) -> None:
    """Refuse arguments that nobody knows, with what is meant where they are Opacus's."""
    for name in unknown:
        hint = f": {_HINTS[name]}" if name in _HINTS else "; docs/from-opacus.md lists the names"
        raise BadInput(f"{where} has no argument {name!r}{hint}")


def refuse_opacus_values(clipping: Any, max_grad_norm: Any) -> None:
    """Refuse values that mean something in Opacus and something else, or nothing, here."""
    if clipping in ("flat", "per_layer", "adaptive"):
        instead = {
            "flat": "clip_rule='flat', which is the default",
            "per_layer": "clip_rule='per_layer'",
            "adaptive": "adaptive_clipping=unison.AdaptiveClipping(...)",
        }[clipping]
        raise BadInput(
            f"clipping={clipping!r}: clipping= says how clipping is computed ('auto', 'ghost', "
            f"...); what is clipped is {instead}"
        )
    if isinstance(max_grad_norm, list | tuple):
        raise BadInput(
            f"max_grad_norm must be one number or a schedule, found {max_grad_norm!r}; "
            "clip_rule='per_layer' clips each of L parameters to C / sqrt(L)"
        )


def make_key(
    seed: int | None, own: Key | None, group: dist.ProcessGroup | None, *, is_secure: bool
) -> Key:
    """The run's key: the caller's own, or the operating system's, the same on all ranks of a group.

    Or a seed's.

    Raises:
        BadInput: If a seed is given for a secret key, or none for the other.
    """
    if own is not None:
        if seed is not None or not is_secure:
            raise BadInput("key= says where noise comes from: leave seed= and secure_noise= out")
        return own
    if is_secure:
        if seed is not None:
            raise BadInput(
                "seed= makes noise and sampling predictable, and secure_noise=True asks for the "
                "opposite. For a run that can be repeated: PrivacyEngine(secure_noise=False)"
            )
        return Key.shared(group)
    if seed is None:
        raise BadInput("secure_noise=False needs make_private(seed=...)")
    warnings.warn(
        "noise and sampling come from a seed: the run can be repeated, and whoever knows the seed "
        "can remove the noise. Nothing that it gives is private",
        stacklevel=4,
    )
    return Key.from_seed(seed)


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
    for name in ("__iter__", "_get_iterator"):
        if getattr(type(data_loader), name) is not getattr(DataLoader, name):
            raise UnsupportedOperation(
                f"{type(data_loader).__name__} has its own {name}, which private sampling would "
                "not run. Remedy: pass a plain torch.utils.data.DataLoader over the same data set"
            )
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


def refuse_contradiction(data_loader: DataLoader[Any], sampling: Sampling) -> None:
    """Make sure that what the loader was asked for is what the sampling gives.

    Raises:
        BadInput: Naming the setting and its remedy.
    """
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
        rest = sampling.num_records % sampling.batch_size
        if rest and not data_loader.drop_last:
            raise BadInput(
                f"drop_last=False asks for the last {rest} records of each epoch as a smaller "
                f"batch, but shuffled sampling has batches of {sampling.batch_size} only. Remedy: "
                "DataLoader(..., drop_last=True), or Poisson sampling, which drops nobody"
            )
    elif data_loader.drop_last and len(data_loader) != steps_per_epoch(sampling):
        raise BadInput(
            f"drop_last=True asks for {len(data_loader)} full batches an epoch, but Poisson "
            f"sampling has {steps_per_epoch(sampling)} steps an epoch, with batches of all sizes, "
            "and drops none. Remedy: DataLoader(..., drop_last=False)"
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
    try:
        num_records = len(data_loader.dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise UnsupportedOperation(
            f"{type(data_loader.dataset).__name__} has no length, so its records cannot be drawn. "
            "Remedy: give the data set a __len__"
        ) from error
    if num_records == 0:
        raise BadInput("the data set is empty: there is no record to draw")
    if len(sampler) != num_records:
        raise UnsupportedOperation(
            f"the loader's {type(sampler).__name__} takes {len(sampler)} records of {num_records}. "
            "Remedy: take a torch.utils.data.Subset as data set, and leave the sampler out"
        )


def refuse_gradient(name: str, _: Tensor) -> None:
    """Raise for a gradient that reaches a parameter itself; a hook of tensors."""
    raise UnsupportedOperation(
        f"a gradient reached {name!r} itself, where it would be neither clipped nor noised. It "
        "came from a pass in evaluation mode, from a layer that was called without the module, "
        "from a custom autograd.Function, or from code that took the parameter from parameters(), "
        "state_dict() or a list of its own. Call the module itself in training mode, use torch "
        "functions on the module's attribute (self.layer.weight), and take gradients of rows by "
        "torch.autograd.grad(loss, rows)"
    )
