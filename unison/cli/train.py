"""`unison train`: the main job.

An option is a setting of `unison.config`, which gives it its name, type, choices, default and help.
"""

import json
import shlex
import sys
import time
from collections.abc import Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import typer

from unison import config as settings
from unison.cli.options import documented, plain_values, spelling, was_given
from unison.cli.replay import ask_passphrase
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

PANELS = {
    "Model": """
        preset num_layers vocab_size context_length dropout
    """,
    "Data": """
        data tokenizer text_field layout long_documents row_length eval_fraction
    """,
    "Optimisation": """
        steps batch_size optimizer lr weight_decay schedule warmup_steps clip_norm precision
        reducer granule threads compile seed
    """,
    "Privacy: one row is one record": """
        private epsilon noise_multiplier delta max_grad_norm clipping clip_rule sampling
        capacity accountant secure_noise unsafe_diagnostics data_salt seal_key passphrase_file
    """,
    "K-FAC: natural gradient": """
        kfac damping damping_form max_condition_number update_every invert_every decay
        fisher graft kl_clip max_factor_size owner_fraction
    """,
    "Execution: never changes the experiment": """
        nproc shard replicas guard device micro_batch_size
    """,
    "Output": """
        out overwrite resume checkpoint_every checkpoint_seconds keep_checkpoints record eval_every
        eval_rows log_every tensorboard as_json
    """,
}

OVERRIDES = ("num_layers", "vocab_size", "context_length", "dropout")  # fields of the model
# Options whose name is not that of their setting.
SPELLINGS = {
    "secure_noise": ("--secure-noise/--no-secure-noise",),
    "update_every": ("--kfac-update-every",),
    "invert_every": ("--kfac-invert-every",),
    "decay": ("--factor-decay",),
    "guard": ("--guard/--no-guard",),
    "micro_batch_size": ("--micro-batch-size", "--physical-batch"),
    "tensorboard": ("--tensorboard/--no-tensorboard",),
    "record": ("--record/--no-record",),
    "keep_checkpoints": ("--keep-checkpoints", "--keep"),
}
DETAILS: dict[str, dict[str, Any]] = {name: {"names": names} for name, names in SPELLINGS.items()}


def complete_preset(incomplete: str) -> list[str]:
    """Names of presets that begin with what was typed."""
    return [name for name in PRESETS if name.startswith(incomplete)]


@documented(
    settings.MechanismConfig,
    settings.Privacy,
    settings.Kfac,
    settings.Execution,
    settings.Output,
    panels=PANELS,
    choices=settings.CHOICES,
    preset={"autocompletion": complete_preset},
    data_salt={"metavar": "FILE"},
    seal_key={"metavar": "FILE"},
    passphrase_file={"metavar": "FILE"},
    nproc={"min": 1, "max": settings.MAX_LOCAL_RANKS},
    resume={"metavar": "RUN"},
    **DETAILS,
)
def train(
    context: typer.Context,
    *,
    num_layers: int | None = None,
    vocab_size: int | None = None,
    context_length: int | None = None,
    dropout: float | None = None,
    private: bool = False,
    delta: float | None = None,
    kfac: bool = False,
    nproc: int = 1,
    out: str | None = None,
    resume: str | None = None,
    as_json: bool = False,
    **options: Any,
) -> None:
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

    Args:
        num_layers: Replace the preset's number of blocks.
        vocab_size: Replace the preset's vocabulary size.
        context_length: Replace the preset's context length.
        dropout: Replace the preset's dropout probability.
        private: Train with differential privacy (DP-SGD). What is protected is one row of the
            training data; with --layout documents that is one document. Held-out rows are not
            protected.
        clip_norm: Bound on the batch gradient's norm; 0 for none.
        nproc: Ranks to start on this machine; with --resume as many as before. Leave out under
            torchrun, which starts them.
        out: Folder of the run; runs/PRESET-DATA-TIME by default.
        kfac: Divide gradients by the curvature of what the model says (docs/kfac.md). The step is
            taken by SGD, with an --lr of AdamW's kind, to be tuned again. Not with --private.
        resume: Go on with a run that stopped, from its newest checkpoint and with its settings.
            Options of execution and output may be given anew.
        as_json: Print the result as one JSON object last; progress goes to stderr.
    """
    values = plain_values(context)
    given = {name for name in values if was_given(context, name)}

    def of(group: type, *others: str, among: Iterable[str] = values) -> dict[str, Any]:
        names = {*(field.name for field in fields(group)), *others}
        return {name: values[name] for name in among if name in names}

    privacy_given = of(settings.Privacy, "private", among=given)
    kfac_given = of(settings.Kfac, "kfac", among=given)
    parts: dict[str, Any] = {"privacy": None, "kfac": None}
    if resume is None:
        beside = given & {"clipping", "unsafe_diagnostics", "data_salt", "seal_key"}
        parts["privacy"] = _part(settings.Privacy, "private", privacy_given, beside)
        parts["kfac"] = _part(settings.Kfac, "kfac", kfac_given, given & {"owner_fraction"})
    elif given & {"out", "overwrite"}:
        raise BadInput("--resume names the folder itself; leave --out and --overwrite out")
    overrides = {name: values[name] for name in OVERRIDES if values[name] is not None}
    changed = parts | {"overrides": overrides, "clip_norm": values["clip_norm"] or None}
    if kfac and "optimizer" not in given:
        changed["optimizer"] = "sgd"
    mechanism = settings.MechanismConfig(**of(settings.MechanismConfig) | changed)
    if was_launched() and out is None and resume is None:
        raise BadInput("--out must be given under torchrun, so that all ranks name one folder")
    # A name that says what the run is and when it began.
    source, now = Path(values["data"]).stem or "data", time.strftime("%Y%m%d-%H%M%S")
    output = of(settings.Output) | {
        "folder": out or f"runs/{values['preset']}-{source}-{now}",
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
    if config.output.seal_key is not None and not was_launched():
        ask_passphrase(config.output.passphrase_file, is_new=resume is None)
    work = partial(run, on_stderr=as_json)
    result = work(config) if nproc == 1 else run_on_local_ranks(work, config, num_ranks=nproc)
    if as_json:
        typer.echo(json.dumps(result.to_fields()))


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
            names = (SPELLINGS.get(each, (spelling(each),))[0] for each in {*found, *beside})
            listed = ", ".join(sorted(name.partition("/")[0] for name in names))
            runs = "private runs" if flag == "private" else f"runs with --{flag}"
            raise BadInput(f"only {runs} have {listed}; add --{flag}, or leave {listed} out")
        return None
    if kind is settings.Privacy and "delta" not in found:
        raise BadInput("--private needs --delta, below 1 / number of rows, such as --delta 1e-6")
    return kind(**found)
