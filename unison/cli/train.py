"""`unison train`: the main job.

An option is a setting of `unison.config`, which gives it its name, type, choices and default; its
help stands here.
"""

import inspect
import json
import shlex
import sys
import time
from collections.abc import Iterable
from dataclasses import MISSING, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from unison import config as settings
from unison.errors import BadInput
from unison.models import PRESETS
from unison.train import (
    check_before_launch,
    resumed_config,
    run_on_local_ranks,
    saved_world_size,
    was_launched,
)
from unison.train import train as run

Part = TypeVar("Part", settings.Privacy, settings.Kfac)

HELP: dict[str, dict[str, str]] = {
    "Model": {
        "preset": "Which model (see `unison presets`).",
        "num_layers": "Replace the preset's number of blocks.",
        "vocab_size": "Replace the preset's vocabulary size.",
        "context_length": "Replace the preset's context length.",
        "dropout": "Replace the preset's dropout probability.",
    },
    "Data": {
        "data": "stdlib (this Python's own source files), records (generated customer records), "
        "or the path of a text file, a JSONL file or a folder.",
        "tokenizer": "bytes, or the path of a `tokenizers` JSON file.",
        "text_field": "The field of a JSONL line that holds its text.",
        "layout": "packed: documents are joined and cut into full rows. documents: one document "
        "per row, which is what --private should protect.",
        "long_documents": "With --layout documents: what to do with one too long.",
        "row_length": "Tokens per row; the model's context by default.",
        "eval_fraction": "Part of the documents held out for evaluation.",
    },
    "Optimisation": {
        "steps": "Optimizer steps.",
        "batch_size": "Rows per step, over all ranks.",
        "optimizer": "Which of torch's optimizers; sgd with --kfac.",
        "lr": "Peak learning rate.",
        "weight_decay": "Decay of matrices; vectors are not decayed.",
        "schedule": "How the learning rate falls after the warm-up.",
        "warmup_steps": "Steps of linear warm-up.",
        "clip_norm": "Bound on the batch gradient's norm; 0 for none.",
        "precision": "bf16 computes under autocast; parameters stay fp32.",
        "reducer": "ordered gives the same bits on any number of ranks.",
        "granule": "Rows per granule of the ordered reducer.",
        "threads": "CPU threads per rank; they change bits. 1 with --reducer ordered, otherwise "
        "the cores divided by --nproc.",
        "compile": "Put the model through torch.compile; the first steps take longer, and bits "
        "are others than without.",
        "seed": "Seed of initial values, row order and split.",
    },
    "Privacy: one row is one record": {
        "private": "Train with differential privacy (DP-SGD). What is protected is one row of the "
        "training data; with --layout documents that is one document. Held-out rows are not "
        "protected.",
        "epsilon": "ε that the run may spend; decides the noise for its --steps.",
        "noise_multiplier": "σ, instead of --epsilon: noise of σ·C on the sum.",
        "delta": "δ, below 1 / number of rows.",
        "max_grad_norm": "C: the bound on the gradient of each row.",
        "clipping": "How the clipping is computed; all give the same gradients.",
        "clip_rule": "flat: longer gradients are scaled down to C. automatic: all are scaled to "
        "nearly C. per_layer: each parameter has its part of C.",
        "sampling": "poisson: a step draws each row with probability --batch-size / rows. "
        "truncated: at most --capacity of these. shuffled: fixed batches, for which a larger ε is "
        "counted.",
        "capacity": "Most rows in a batch of --sampling truncated.",
        "accountant": "Whose bound on ε counts; all are upper bounds.",
        "secure_noise": "Without it noise and sampling come from --seed: for experiments, nothing "
        "is private.",
        "unsafe_diagnostics": "Also write what no ε covers to the run's files: training loss, "
        "norms, clipped fractions. A terminal shows them anyway.",
        "data_salt": "A small secret file that stays beside the data, made if it is not there. "
        "With it the ledger commits to the rows, so that `unison account RUN RUN...` knows runs "
        "on one data set.",
    },
    "K-FAC: natural gradient": {
        "kfac": "Divide gradients by the curvature of what the model says (docs/kfac.md). The "
        "step is taken by SGD, with an --lr of AdamW's kind, to be tuned again. Not with "
        "--private.",
        "damping": "λ, added to the curvature before it is inverted.",
        "damping_form": "pi: λ divided between the two factors by their size. factored: evenly. "
        "joint: added to their product.",
        "max_condition_number": "Damp a factor more where it would pass this.",
        "update_every": "Steps between two updates of the factors.",
        "invert_every": "Steps between two inversions; after every update otherwise.",
        "decay": "β of the factors' moving average.",
        "fisher": "Whose labels curvature is of. mc: drawn from the model. empirical: the data's. "
        "exact: all of them, for small vocabularies. forward: none, inputs only.",
        "graft": "Whose step length is taken: adam, sgd, or none for K-FAC's own, best with "
        "--kl-clip.",
        "kl_clip": "Shorten steps whose predicted change is larger.",
        "max_factor_size": "Matrices with a longer side get a diagonal.",
        "owner_fraction": "Part of the ranks that invert each layer: 0 one rank, least memory; 1 "
        "all, least traffic. Changes no bits.",
    },
    "Execution: never changes the experiment": {
        "nproc": "Ranks to start on this machine; with --resume as many as before. Leave out "
        "under torchrun, which starts them.",
        "shard": "full: parameters, gradients and optimizer state split over ranks (ZeRO-3). "
        "zero2: parameters kept between forward and backward. hybrid: several copies, each split. "
        "fsdp2: split by torch's own fully_shard. ddp: a copy on each rank. none: one rank.",
        "replicas": "Copies of the model with --shard hybrid; 2 by default.",
        "guard": "Compare the ranks' collectives while they run; raise on all instead of hanging.",
        "device": "auto takes CUDA where there is one.",
        "micro_batch_size": "Rows per forward pass, at most; the rest of a step is accumulated.",
    },
    "Output": {
        "out": "Folder of the run; runs/PRESET-DATA-TIME by default.",
        "overwrite": "Replace an existing run, and its ledger, once the new one is done.",
        "resume": "Go on with a run that stopped, from its newest checkpoint and with its "
        "settings. Options of execution and output may be given anew.",
        "checkpoint_every": "Steps between checkpoints; 0 for none.",
        "keep_checkpoints": "How many checkpoints to keep, the newest.",
        "eval_every": "Steps between evaluations; 0 for before and after only.",
        "eval_rows": "Rows per evaluation, at most.",
        "log_every": "Steps between two lines where there is no terminal.",
        "tensorboard": "Write TensorBoard events too.",
        "as_json": "Print the result as one JSON object last; progress goes to stderr.",
    },
}

CHOICES: dict[str, tuple[str, ...]] = {
    "layout": settings.LAYOUTS,
    "long_documents": settings.LONG_DOCUMENTS,
    "optimizer": settings.OPTIMIZERS,
    "schedule": settings.SCHEDULES,
    "precision": settings.PRECISIONS,
    "reducer": settings.REDUCERS,
    "clipping": settings.CLIPPINGS,
    "clip_rule": settings.CLIP_RULES,
    "sampling": settings.SAMPLINGS,
    "accountant": settings.ACCOUNTANTS,
    "damping_form": settings.DAMPING_FORMS,
    "fisher": settings.FISHERS,
    "graft": settings.GRAFTS,
    "shard": settings.SHARDINGS,
    "device": settings.DEVICES,
}

# Options whose name is not that of their setting.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "secure_noise": ("--secure-noise/--no-secure-noise",),
    "update_every": ("--kfac-update-every",),
    "invert_every": ("--kfac-invert-every",),
    "decay": ("--factor-decay",),
    "guard": ("--guard/--no-guard",),
    "micro_batch_size": ("--micro-batch-size", "--physical-batch"),
    "tensorboard": ("--tensorboard/--no-tensorboard",),
    "as_json": ("--json",),
}

# Options that are no setting of their own, or of another type than theirs.
TYPES: dict[str, tuple[Any, Any]] = {
    "num_layers": (int | None, None),
    "vocab_size": (int | None, None),
    "context_length": (int | None, None),
    "dropout": (float | None, None),
    "private": (bool, False),
    "delta": (float | None, None),
    "kfac": (bool, False),
    "nproc": (int, 1),
    "out": (str | None, None),
    "resume": (str | None, None),
    "as_json": (bool, False),
}
OVERRIDES = ("num_layers", "vocab_size", "context_length", "dropout")  # fields of the model


def complete_preset(incomplete: str) -> list[str]:
    """Names of presets that begin with what was typed."""
    return [name for name in PRESETS if name.startswith(incomplete)]


DETAILS: dict[str, dict[str, Any]] = {
    "preset": {"autocompletion": complete_preset},
    "data_salt": {"metavar": "FILE"},
    "nproc": {"min": 1},
    "resume": {"metavar": "RUN"},
}


def _parameters() -> Iterable[inspect.Parameter]:
    """The signature that typer makes options of."""
    types: dict[str, tuple[Any, Any]] = {}
    for group in (
        settings.MechanismConfig,
        settings.Privacy,
        settings.Kfac,
        settings.Execution,
        settings.Output,
    ):
        hints = get_type_hints(group)
        for field in fields(group):
            default = None if field.default is MISSING else field.default
            types[field.name] = hints[field.name], default
    types |= TYPES
    keyword = inspect.Parameter.KEYWORD_ONLY
    yield inspect.Parameter("context", keyword, annotation=typer.Context)
    for panel, helps in HELP.items():
        for name, text in helps.items():
            kind, default = types[name]
            if name in CHOICES:
                # Typer turns an enum into a checked choice with completion.
                kind: Any = StrEnum(name, list(CHOICES[name]))
                default = kind(default)
            names = SPELLINGS.get(name, (_spelling(name),))
            details = {"help": text, "rich_help_panel": panel, **DETAILS.get(name, {})}
            annotation = Annotated[kind, typer.Option(*names, **details)]
            yield inspect.Parameter(name, keyword, default=default, annotation=annotation)


def _spelling(name: str) -> str:
    if name in SPELLINGS:
        return SPELLINGS[name][0].partition("/")[0]
    return f"--{name.replace('_', '-')}"


def train(context: typer.Context, **options: Any) -> None:
    """Train a language model and leave a run folder with its model, metrics and loss curve.

    \b
    unison train                      about a minute, nothing to download
    unison train --nproc 2            the same on two ranks
    unison train --private --epsilon 8 --delta 1e-5 --data records --layout documents
    unison train --private --epsilon 8 --delta 1e-5 --nproc 2 --shard full
    unison train --kfac --damping 1e-3 --nproc 2
    unison train --data notes.jsonl --layout documents --out runs/notes
    torchrun --nproc-per-node 8 -m unison train --data corpus --out runs/c
    unison train --checkpoint-every 100 --out runs/long    and after a crash:
    unison train --resume runs/long
    """
    values: dict[str, Any] = {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in options.items()
    }
    given = {name for name in values if was_given(context, name)}
    resume, nproc = values["resume"], values["nproc"]

    def of(group: type, *others: str, among: Iterable[str] = values) -> dict[str, Any]:
        names = {*(field.name for field in fields(group)), *others}
        return {name: values[name] for name in among if name in names}

    privacy_given = of(settings.Privacy, "private", among=given)
    kfac_given = of(settings.Kfac, "kfac", among=given)
    privacy, kfac = None, None
    if resume is None:
        beside = given & {"clipping", "unsafe_diagnostics", "data_salt"}
        privacy = _part(settings.Privacy, "private", privacy_given, beside)
        kfac = _part(settings.Kfac, "kfac", kfac_given, given & {"owner_fraction"})
    elif given & {"out", "overwrite"}:
        raise BadInput("--resume names the folder itself; leave --out and --overwrite out")
    overrides = {name: values[name] for name in OVERRIDES if values[name] is not None}
    changed = {"overrides": overrides, "privacy": privacy, "kfac": kfac}
    changed["clip_norm"] = values["clip_norm"] or None
    if values["kfac"] and "optimizer" not in given:
        changed["optimizer"] = "sgd"
    mechanism = settings.MechanismConfig(**of(settings.MechanismConfig) | changed)
    if was_launched() and values["out"] is None and resume is None:
        raise BadInput("--out must be given under torchrun, so that all ranks name one folder")
    # A name that says what the run is and when it began.
    source, now = Path(values["data"]).stem or "data", time.strftime("%Y%m%d-%H%M%S")
    output = of(settings.Output) | {
        "folder": values["out"] or f"runs/{values['preset']}-{source}-{now}",
        "command": shlex.join(["unison", *sys.argv[1:]]),
        "resume": False,
    }
    config = settings.TrainConfig(
        mechanism=mechanism,
        execution=settings.Execution(**of(settings.Execution)),
        output=settings.Output(**output),
    )
    if resume is not None:
        config = resumed_config(Path(resume), config, given, privacy_given | kfac_given)
        if "nproc" not in given and not was_launched():
            nproc = saved_world_size(Path(resume))
    check_before_launch(config)
    work = partial(run, on_stderr=values["as_json"])
    result = work(config) if nproc == 1 else run_on_local_ranks(work, config, num_ranks=nproc)
    if values["as_json"]:
        typer.echo(json.dumps(result.to_fields()))


train.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]


def was_given(context: typer.Context, name: str) -> bool:
    """Whether an option was given, rather than left at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def _part(kind: type[Part], flag: str, given: dict[str, Any], beside: set[str]) -> Part | None:
    """The privacy or the K-FAC that was asked for, if any.

    Args:
        kind: Its settings.
        flag: The option that asks for it.
        given: That option and fields of `kind`, as far as they were given.
        beside: Names of the settings of other groups that need the flag and were given.

    Raises:
        BadInput: If options contradict each other, or one is missing.
    """
    found = {name: value for name, value in given.items() if name != flag}
    if not given.get(flag):
        if found or beside:
            listed = ", ".join(sorted(map(_spelling, {*found, *beside})))
            runs = "private runs" if flag == "private" else f"runs with --{flag}"
            raise BadInput(f"only {runs} have {listed}; add --{flag}, or leave {listed} out")
        return None
    if kind is settings.Privacy and "delta" not in found:
        raise BadInput("--private needs --delta, below 1 / number of rows, such as --delta 1e-6")
    return kind(**found)
