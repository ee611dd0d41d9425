"""Small trainings that must come to the same result, each in one of the ways that claims name.

A `Case` says how: plain, private or with K-FAC; how the model lies on ranks; which reducer; and so
on. A `Subject` says what: a model, rows and a loss, unison's own or a user's. `run_cases` trains
some cases on the ranks that it is called on, and leaves a trace of each.
"""

import functools
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from unison import check, shard
from unison.config import REDUCERS
from unison.errors import BadInput, UnisonError
from unison.kfac import KFAC, KFACConfig
from unison.models import build, per_sample_loss, preset
from unison.privacy import PrivacyEngine
from unison.schema import read_json, short
from unison.verify.trace import trace

TRAININGS = ("plain", "private", "kfac")
SHARDINGS = ("none", "ddp", "zero2", "zero3", "root", "hybrid", "fsdp2")
SEED = 4  # whose private draws are of odd sizes: passes with padding

Batch = Any
"""Tensors of as many rows each: one, or a tuple, list or dict of them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train.

    Attributes:
        training: One of `TRAININGS`.
        shard: How the model lies on ranks, one of `SHARDINGS`; the first two hold it whole.
        reducer: `"ordered"`, whose bits must not depend on ranks, or `"fast"`.
        clipping: The private clipping mode.
        micro_batch: At most so many rows per pass; None for all at once.
        recompute: Whether blocks are under activation checkpointing.
        compile: Whether blocks, or private passes, go through torch.compile.
        reduction: How K-FAC's factors are added up.
    """

    training: str = "plain"
    shard: str = "zero3"
    reducer: str = "ordered"
    clipping: str = "auto"
    micro_batch: int | None = None
    recompute: bool = False
    compile: bool = False
    reduction: str = "auto"

    def __post_init__(self) -> None:
        check.one_of(TRAININGS, training=self.training)
        check.one_of(SHARDINGS, shard=self.shard)
        check.one_of(REDUCERS, reducer=self.reducer)

    def __str__(self) -> str:
        said = [self.training, self.shard, self.reducer]
        said += [self.clipping] if self.training == "private" else []
        said += [f"micro-batch {self.micro_batch}"] if self.micro_batch else []
        said += [name for name in ("recompute", "compile") if getattr(self, name)]
        return ", ".join(said + ([self.reduction] if self.training == "kfac" else []))


# ---- what is trained -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What all cases train; it says nothing of ranks.

    Attributes:
        build: `module:function` that returns the model; None for a small GPT-2 with a tied head.
        data: `module:function` that returns the rows, or a file of them; None for random tokens.
        loss: `module:function` of (output, batch) that returns one loss per row; None for the next
            token's, of labels or of the inputs themselves.
        steps: Optimizer steps.
        batch_size: Rows per step.
        granule: Rows per granule.
        lr: Learning rate.
    """

    build: str | None = None
    data: str | None = None
    loss: str | None = None
    steps: int = 2
    batch_size: int = 6
    granule: int = 2
    lr: float = 1e-2

    def __post_init__(self) -> None:
        check.positive(
            steps=self.steps, batch_size=self.batch_size, granule=self.granule, lr=self.lr
        )
        if self.build is not None and self.data is None:
            raise BadInput(
                "--data must be given with a model: a file of rows, or module:function that "
                "returns a batch as the model is called with"
            )

    def model(self, *, drops: bool) -> nn.Module:
        """A fresh model, the same wherever it is built."""
        torch.manual_seed(SEED)
        if self.build is None:
            return build(_TINY if drops else replace(_TINY, dropout=0.0), seed=SEED)
        made = called(self.build)
        if not isinstance(made, nn.Module):
            raise BadInput(f"{self.build}() must return a torch.nn.Module, found {type(made)}")
        return made.train()

    def rows(self) -> Batch:
        """All rows."""
        if self.data is None:
            generator = torch.Generator().manual_seed(SEED)
            shape = (18, _TINY.context_length)
            return torch.randint(0, _TINY.vocab_size, shape, generator=generator)
        found = called(self.data) if ":" in self.data else _rows_of_file(Path(self.data))
        sizes = {
            len(leaf) for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.dim()
        }
        if len(sizes) != 1 or not all(isinstance(leaf, Tensor) for leaf in tree_leaves(found)):
            raise BadInput(
                f"{self.data} must hold tensors with as many rows each, found {sorted(sizes)} rows"
            )
        return found

    def losses(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:  # [rows]
        """The rows' losses, and what the model returned."""
        if self.build is None:
            output = model(batch[:, :-1])
            return per_sample_loss(output, batch[:, 1:]), output
        if isinstance(batch, Mapping):
            output = model(**{name: each for name, each in batch.items() if name != "labels"})
        else:
            output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
        losses = imported(self.loss) if self.loss is not None else _next_token_losses
        return losses(output, batch), output

    def complaint(self) -> str | None:
        """What is wrong with the user's functions, run on the rows of one granule; or None."""
        try:
            rows = tree_map(lambda each: each[: self.granule] if each.dim() else each, self.rows())
            losses, _ = self.losses(self.model(drops=True), rows)
            losses.sum().backward()
        except UnisonError as error:
            return str(error)
        except Exception as error:  # of the user's code, whatever it is
            return (
                f"{self.build} cannot be trained on --granule {self.granule} rows of {self.data}: "
                f"{_said_by(error)}"
            )
        num_rows = {len(leaf) for leaf in tree_leaves(rows) if leaf.dim()}.pop()
        if losses.shape != (num_rows,):
            return (
                f"{self.loss or self.build} must give one loss per row, found shape "
                f"{list(losses.shape)} for {num_rows} rows"
            )
        return None


_TINY = preset(
    "gpt2",
    vocab_size=37,
    d_model=20,
    num_layers=2,
    num_heads=2,
    d_ff=72,
    context_length=10,
    dropout=0.1,
)


def imported(path: str) -> Callable[..., Any]:
    """The function that `module:function` names; modules of the working folder are found.

    Raises:
        BadInput: If there is none.
    """
    name, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(name), attribute)
    except (Exception, SystemExit) as error:  # the user's module runs
        told = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(
            f"{path!r} cannot be imported ({told}); name it as module:function, the module in the "
            "working folder or installed"
        ) from None
    if not callable(found):
        raise BadInput(f"{path!r} must be a function, found {type(found).__name__}")
    return found


def called(path: str) -> Any:
    """What the user's function returns, which is called with nothing.

    Raises:
        BadInput: With what it raised.
    """
    function = imported(path)
    try:
        return function()
    except Exception as error:
        raise BadInput(f"{path}() raised {_said_by(error)}") from error


def _said_by(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def _rows_of_file(file: Path) -> Batch:
    """Tensors by name of a .safetensors file, or lists by name of a .json one."""
    if file.suffix == ".safetensors":
        if not file.is_file():
            raise BadInput(f"{file} cannot be read: there is no such file")
        with shard.open_weights(file) as found:
            return {name: found[name] for name in found}
    if file.suffix == ".json":
        found = read_json(file)
        try:
            return {str(name): torch.tensor(value) for name, value in found.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise BadInput(
                f"{file} must hold lists of rows by name, such as "
                f'{{"input_ids": [[1, 2], [3, 4]]}}: {error}'
            ) from None
    raise BadInput(
        f"--data {short(str(file))}: expected module:function, a .safetensors or a .json file"
    )


def _next_token_losses(output: Any, batch: Batch) -> Tensor:  # [rows]
    logits = getattr(output, "logits", output)
    ids = batch.get("labels", batch.get("input_ids")) if isinstance(batch, Mapping) else None
    if not isinstance(logits, Tensor) or logits.dim() != 3 or ids is None:
        raise BadInput(
            "the model's loss cannot be guessed: expected logits [rows, tokens, vocabulary] of "
            "input_ids; give --loss module:function of (output, batch), one loss per row"
        )
    return per_sample_loss(logits[:, :-1], ids[:, 1:])


# ---- one case ------------------------------------------------------------------------------------


def run_cases(
    cases: Sequence[tuple[Case, Path]], *, subject: Subject, keep: Sequence[tuple[str, str]]
) -> list[str | None]:
    """Train a subject in some ways; every rank that a launcher started calls it.

    Args:
        cases: The ways, and where the trace of each goes.
        subject: What is trained.
        keep: (rung, name) of quantities of which all values are kept.

    Returns:
        For each case, why it could not be trained, in a sentence; None if it was.

    Raises:
        BadInput: If what the user gave cannot be trained at all, on any rank.
    """
    torch.set_num_threads(1)  # threads change bits, and ranks would divide them
    dist.init_process_group("gloo")
    if subject.build is not None:
        complaints: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(complaints, subject.complaint())
        if any(complaints):
            raise BadInput(next(filter(None, complaints)))
    refusals: list[str | None] = []
    for case, file in cases:
        try:
            run_case(case, subject, file, keep=keep)
            refusals.append(None)
        except UnisonError as error:  # on every rank alike
            refusals.append(str(error))
    dist.destroy_process_group()
    return refusals


def run_case(
    case: Case, subject: Subject, file: Path, *, keep: Sequence[tuple[str, str]] = ()
) -> None:
    """Train a subject in one way, on the ranks that call it, and write its trace."""
    is_ordered = case.reducer == "ordered"
    model = subject.model(drops=is_ordered)
    blocks = shard.find_blocks(model)
    for block in blocks if case.recompute else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    for block in blocks if case.compile and case.training != "private" else ():
        block.compile(backend="aot_eager")
    model = sharded(model, case)
    parameters = list(model.parameters())
    # An eps at which gradients that are nothing but rounding stay so.
    optimizer: Optimizer = AdamW(parameters, lr=subject.lr, eps=1e-4)
    if case.training == "kfac":
        optimizer = SGD(parameters, lr=subject.lr)
    kfac: KFAC | None = None
    granule = subject.granule if is_ordered else None
    if case.training == "private":
        engine = PrivacyEngine(secure_noise=False, accountant="rdp")
        rows = subject.rows()
        data: Any = [tree_map(itemgetter(i), rows) for i in range(len(tree_leaves(rows)[0]))]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="noise and sampling come from a seed")
            model, optimizer, batches = engine.make_private(
                module=model,
                optimizer=optimizer,
                data_loader=DataLoader(data, subject.batch_size),
                noise_multiplier=0.7,
                max_grad_norm=0.5,
                expected_batch_size=subject.batch_size,
                max_physical_batch_size=case.micro_batch,
                clipping=case.clipping,
                granule=granule,
                compile={"backend": "aot_eager"} if case.compile else False,
                seed=SEED,
            )
    else:
        engine = None
        torch.manual_seed(SEED)
        batches = shard.deal(
            _batches(subject.rows(), subject), granule=granule, micro_batch=case.micro_batch
        )
        if case.training == "kfac":
            settings = KFACConfig(
                update_every=1, min_layer_size=20, reduction=case.reduction, seed=SEED
            )
            kfac = KFAC(model, settings, optimizer)
    # DDP and FSDP2 divide by the number of ranks what `batch_mean` has divided.
    is_divided = case.shard == "ddp" or (case.shard == "fsdp2" and not is_ordered)
    is_divided &= case.training != "private" and dist.is_initialized()
    scale = dist.get_world_size() if is_divided else 1
    notes, is_eager = {"case": str(case)}, not case.compile
    done = 0
    with trace(file, model, optimizer, notes=notes, keep=keep, activations=is_eager) as tracer:
        while done < subject.steps:
            for batch in batches:
                losses, output = subject.losses(model, batch)
                if kfac is not None and kfac.wants_statistics:
                    kfac.sample(getattr(output, "logits", output)).backward(retain_graph=True)
                # In float64: in how many passes a mean came must not show in its bits.
                loss = tracer.loss(shard.batch_mean(losses.double()))
                (loss * scale).backward()
                plan = shard.current_plan()
                if plan is not None and not plan.closes_logical_batch:
                    continue
                if kfac is not None:
                    kfac.step()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if done == subject.steps:
                    break
    for each in (engine, kfac):
        if each is not None:
            each.detach()


def sharded(model: nn.Module, case: Case) -> nn.Module:
    """Lay a model on the ranks."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if case.shard == "none":
        return model
    if case.shard == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if case.shard == "fsdp2":
        from torch.distributed import fsdp

        mesh = dist.init_device_mesh("cpu", (size,))
        for part in (*shard.find_blocks(model), model):
            fsdp.fully_shard(part, mesh=mesh)
        if case.reducer == "ordered" and case.training != "private":
            shard.use_ordered_reduction(model)
        return model
    options: dict[str, Any] = {"reshard_after_forward": case.shard != "zero2"}
    if case.shard == "hybrid":
        shape = (2, size // 2) if size % 2 == 0 else (1, size)
        names = ("replicate", "shard")
        options["mesh"] = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    lay = shard.fully_shard if case.shard == "root" else shard.auto_shard
    return lay(model, reducer=case.reducer, gradient_divisor=1, **options)


def _batches(rows: Batch, subject: Subject) -> list[Batch]:
    """The global batches of all steps, going round through the rows."""
    count = len(tree_leaves(rows)[0])
    made = []
    for step in range(subject.steps):
        chosen = torch.arange(step * subject.batch_size, (step + 1) * subject.batch_size) % count
        made.append(tree_map(lambda each, chosen=chosen: each[chosen], rows))
    return made
