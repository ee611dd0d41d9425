"""`unison train`: the main job."""

import json
import shlex
import sys
import time
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from unison import config as settings
from unison.cli import kfac_options
from unison.cli import private_options as options
from unison.errors import BadInput

# Typer turns an enum into a checked choice with completion; the names come from one place.
Optimizer = StrEnum("Optimizer", list(settings.OPTIMIZERS))
Schedule = StrEnum("Schedule", list(settings.SCHEDULES))
Precision = StrEnum("Precision", list(settings.PRECISIONS))
Layout = StrEnum("Layout", list(settings.LAYOUTS))
LongDocuments = StrEnum("LongDocuments", list(settings.LONG_DOCUMENTS))
Device = StrEnum("Device", list(settings.DEVICES))
Shard = StrEnum("Shard", list(settings.SHARDINGS))
Reducer = StrEnum("Reducer", list(settings.REDUCERS))

_DEFAULT = settings.Mechanism()
_OUTPUT = settings.Output(folder="unused")


def complete_preset(incomplete: str) -> list[str]:
    """Names of presets that begin with what was typed."""
    from unison.models import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def _panel(panel: str, *names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **options)


_model = partial(_panel, "Model")
_data = partial(_panel, "Data")
_optim = partial(_panel, "Optimisation")
_exec = partial(_panel, "Execution: never changes the experiment")
_out = partial(_panel, "Output")


def train(
    context: typer.Context,
    preset: Annotated[
        str,
        _model(
            "--preset", help="Which model (see `unison presets`).", autocompletion=complete_preset
        ),
    ] = _DEFAULT.preset,
    num_layers: Annotated[
        int | None, _model("--num-layers", help="Replace the preset's number of blocks.")
    ] = None,
    vocab_size: Annotated[
        int | None, _model("--vocab-size", help="Replace the preset's vocabulary size.")
    ] = None,
    context_length: Annotated[
        int | None, _model("--context-length", help="Replace the preset's context length.")
    ] = None,
    dropout: Annotated[
        float | None, _model("--dropout", help="Replace the preset's dropout probability.")
    ] = None,
    data: Annotated[
        str,
        _data(
            "--data",
            help="stdlib (this Python's own source files), records (generated customer records), "
            "or the path of a text file, a JSONL file or a folder.",
        ),
    ] = _DEFAULT.data,
    tokenizer: Annotated[
        str, _data("--tokenizer", help="bytes, or the path of a `tokenizers` JSON file.")
    ] = _DEFAULT.tokenizer,
    text_field: Annotated[
        str, _data("--text-field", help="The field of a JSONL line that holds its text.")
    ] = _DEFAULT.text_field,
    layout: Annotated[
        Layout,
        _data(
            "--layout",
            help="packed: documents are joined and cut into full rows. documents: one document "
            "per row, which is what --private should protect.",
        ),
    ] = Layout(_DEFAULT.layout),
    long_documents: Annotated[
        LongDocuments,
        _data("--long-documents", help="With --layout documents: what to do with one too long."),
    ] = LongDocuments(_DEFAULT.long_documents),
    row_length: Annotated[
        int | None, _data("--row-length", help="Tokens per row; the model's context by default.")
    ] = None,
    eval_fraction: Annotated[
        float, _data("--eval-fraction", help="Part of the documents held out for evaluation.")
    ] = _DEFAULT.eval_fraction,
    steps: Annotated[int, _optim("--steps", help="Optimizer steps.")] = _DEFAULT.steps,
    batch_size: Annotated[
        int, _optim("--batch-size", help="Rows per step, over all ranks.")
    ] = _DEFAULT.batch_size,
    optimizer: Annotated[
        Optimizer, _optim("--optimizer", help="Which of torch's optimizers; sgd with --kfac.")
    ] = Optimizer(_DEFAULT.optimizer),
    lr: Annotated[float, _optim("--lr", help="Peak learning rate.")] = _DEFAULT.lr,
    weight_decay: Annotated[
        float, _optim("--weight-decay", help="Decay of matrices; vectors are not decayed.")
    ] = _DEFAULT.weight_decay,
    schedule: Annotated[
        Schedule, _optim("--schedule", help="How the learning rate falls after the warm-up.")
    ] = Schedule(_DEFAULT.schedule),
    warmup_steps: Annotated[
        int, _optim("--warmup-steps", help="Steps of linear warm-up.")
    ] = _DEFAULT.warmup_steps,
    clip_norm: Annotated[
        float, _optim("--clip-norm", help="Bound on the batch gradient's norm; 0 for none.")
    ] = _DEFAULT.clip_norm or 0.0,
    precision: Annotated[
        Precision, _optim("--precision", help="bf16 computes under autocast; parameters stay fp32.")
    ] = Precision(_DEFAULT.precision),
    reducer: Annotated[
        Reducer,
        _optim("--reducer", help="ordered gives the same bits on any number of ranks."),
    ] = Reducer(_DEFAULT.reducer),
    granule: Annotated[
        int, _optim("--granule", help="Rows per granule of the ordered reducer.")
    ] = _DEFAULT.granule,
    threads: Annotated[
        int | None,
        _optim(
            "--threads",
            help="CPU threads per rank; they change bits. 1 with --reducer ordered, otherwise the "
            "cores divided by --nproc.",
        ),
    ] = None,
    compile: Annotated[  # noqa: A002
        bool,
        _optim(
            "--compile",
            help="Put the model through torch.compile; the first steps take longer, and bits are "
            "others than without.",
        ),
    ] = False,
    seed: Annotated[
        int, _optim("--seed", help="Seed of initial values, row order and split.")
    ] = _DEFAULT.seed,
    private: options.PrivateFlag = False,
    epsilon: options.Epsilon = None,
    noise_multiplier: options.NoiseMultiplier = None,
    delta: options.Delta = None,
    max_grad_norm: options.MaxGradNorm = options.DEFAULT.max_grad_norm,
    clipping: options.ClippingMode = options.Clipping("auto"),
    clip_rule: options.ClipRuleName = options.ClipRule(options.DEFAULT.clip_rule),
    sampling: options.SamplingKind = options.Sampling(options.DEFAULT.sampling),
    capacity: options.Capacity = None,
    accountant: options.AccountantName = options.Accountant(options.DEFAULT.accountant),
    secure_noise: options.SecureNoise = options.DEFAULT.secure_noise,
    unsafe_diagnostics: options.UnsafeDiagnostics = False,
    data_salt: options.DataSalt = None,
    kfac: kfac_options.KfacFlag = False,
    damping: kfac_options.Damping = kfac_options.DEFAULT.damping,
    damping_form: kfac_options.DampingFormName = kfac_options.DampingForm(
        kfac_options.DEFAULT.damping_form
    ),
    max_condition_number: kfac_options.MaxConditionNumber = None,
    update_every: kfac_options.UpdateEvery = kfac_options.DEFAULT.update_every,
    invert_every: kfac_options.InvertEvery = None,
    decay: kfac_options.Decay = kfac_options.DEFAULT.decay,
    fisher: kfac_options.FisherKind = kfac_options.Fisher(kfac_options.DEFAULT.fisher),
    graft: kfac_options.GraftKind = kfac_options.Graft(kfac_options.DEFAULT.graft),
    kl_clip: kfac_options.KLClip = None,
    max_factor_size: kfac_options.MaxFactorSize = kfac_options.DEFAULT.max_factor_size,
    owner_fraction: kfac_options.OwnerFraction = 0.0,
    nproc: Annotated[
        int,
        _exec(
            "--nproc",
            min=1,
            help="Ranks to start on this machine; with --resume as many as before. Leave out under "
            "torchrun, which starts them.",
        ),
    ] = 1,
    shard: Annotated[
        Shard,
        _exec(
            "--shard",
            help="full: parameters, gradients and optimizer state split over ranks (ZeRO-3). "
            "zero2: parameters kept between forward and backward. hybrid: several copies, each "
            "split. fsdp2: split by torch's own fully_shard. ddp: a copy on each rank. none: one "
            "rank.",
        ),
    ] = Shard("full"),
    replicas: Annotated[
        int | None,
        _exec("--replicas", help="Copies of the model with --shard hybrid; 2 by default."),
    ] = None,
    guard: Annotated[
        bool,
        _exec(
            "--guard/--no-guard",
            help="Compare the ranks' collectives while they run; raise on all instead of hanging.",
        ),
    ] = False,
    device: Annotated[
        Device, _exec("--device", help="auto takes CUDA where there is one.")
    ] = Device("auto"),
    micro_batch_size: Annotated[
        int | None,
        _exec(
            "--micro-batch-size",
            "--physical-batch",
            help="Rows per forward pass, at most; the rest of a step is accumulated.",
        ),
    ] = None,
    out: Annotated[
        str | None, _out("--out", help="Folder of the run; runs/PRESET-DATA-TIME by default.")
    ] = None,
    overwrite: Annotated[
        bool,
        _out(
            "--overwrite",
            help="Replace an existing run, and its ledger, once the new one is done.",
        ),
    ] = False,
    resume: Annotated[
        str | None,
        _out(
            "--resume",
            metavar="RUN",
            help="Go on with a run that stopped, from its newest checkpoint and with its settings. "
            "Options of execution and output may be given anew.",
        ),
    ] = None,
    checkpoint_every: Annotated[
        int, _out("--checkpoint-every", help="Steps between checkpoints; 0 for none.")
    ] = _OUTPUT.checkpoint_every,
    keep_checkpoints: Annotated[
        int, _out("--keep-checkpoints", help="How many checkpoints to keep, the newest.")
    ] = _OUTPUT.keep_checkpoints,
    eval_every: Annotated[
        int, _out("--eval-every", help="Steps between evaluations; 0 for before and after only.")
    ] = _OUTPUT.eval_every,
    eval_rows: Annotated[
        int, _out("--eval-rows", help="Rows per evaluation, at most.")
    ] = _OUTPUT.eval_rows,
    log_every: Annotated[
        int, _out("--log-every", help="Steps between two lines where there is no terminal.")
    ] = _OUTPUT.log_every,
    tensorboard: Annotated[
        bool, _out("--tensorboard/--no-tensorboard", help="Write TensorBoard events too.")
    ] = True,
    as_json: Annotated[
        bool,
        _out("--json", help="Print the result as one JSON object last; progress goes to stderr."),
    ] = False,
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
    """
    from unison.train import (
        check_before_launch,
        resumed_config,
        run_on_local_ranks,
        saved_world_size,
        was_launched,
    )
    from unison.train import train as run

    overrides = {
        "num_layers": num_layers,
        "vocab_size": vocab_size,
        "context_length": context_length,
        "dropout": dropout,
    }
    given = {name for name in context.params if _was_said(context, name)}
    said = options.said_of_privacy(
        {
            "private": private,
            "epsilon": epsilon,
            "noise_multiplier": noise_multiplier,
            "delta": delta,
            "max_grad_norm": max_grad_norm,
            "clip_rule": clip_rule,
            "sampling": sampling,
            "capacity": capacity,
            "accountant": accountant,
            "secure_noise": secure_noise,
        },
        given,
    )
    said_of_kfac = kfac_options.said_of_kfac(
        {
            "kfac": kfac,
            "damping": damping,
            "damping_form": damping_form,
            "max_condition_number": max_condition_number,
            "update_every": update_every,
            "invert_every": invert_every,
            "decay": decay,
            "fisher": fisher,
            "graft": graft,
            "kl_clip": kl_clip,
            "max_factor_size": max_factor_size,
        },
        given,
    )
    mechanism = settings.Mechanism(
        preset=preset,
        overrides={name: value for name, value in overrides.items() if value is not None},
        data=data,
        tokenizer=tokenizer,
        text_field=text_field,
        layout=layout.value,
        long_documents=long_documents.value,
        row_length=row_length,
        eval_fraction=eval_fraction,
        seed=seed,
        steps=steps,
        batch_size=batch_size,
        optimizer="sgd" if kfac and "optimizer" not in given else optimizer.value,
        lr=lr,
        weight_decay=weight_decay,
        schedule=schedule.value,
        warmup_steps=warmup_steps,
        clip_norm=clip_norm or None,
        precision=precision.value,
        reducer=reducer.value,
        granule=granule,
        threads=threads,
        compile=compile,
        privacy=None if resume is not None else options.make_privacy(said, given),
        kfac=None if resume is not None else kfac_options.make_kfac(said_of_kfac, given),
    )
    if resume is not None and given & {"out", "overwrite"}:
        raise BadInput("--resume names the folder itself; leave --out and --overwrite out")
    if was_launched() and out is None and resume is None:
        raise BadInput("--out must be given under torchrun, so that all ranks name one folder")
    output = settings.Output(
        folder=out or default_folder(preset, data),
        overwrite=overwrite,
        eval_every=eval_every,
        eval_rows=eval_rows,
        log_every=log_every,
        tensorboard=tensorboard,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        command=shlex.join(["unison", *sys.argv[1:]]),
        unsafe_diagnostics=unsafe_diagnostics,
        data_salt=data_salt,
    )
    config = settings.TrainConfig(
        mechanism=mechanism,
        execution=settings.Execution(
            device=device.value,
            micro_batch_size=micro_batch_size,
            shard=shard.value,
            replicas=replicas,
            guard=guard,
            clipping=clipping.value,
            owner_fraction=owner_fraction,
        ),
        output=output,
    )
    if resume is not None:
        config = resumed_config(Path(resume), config, given, said | said_of_kfac)
        if "nproc" not in given and not was_launched():
            nproc = saved_world_size(Path(resume))
    check_before_launch(config)
    work = partial(run, on_stderr=as_json)
    result = work(config) if nproc == 1 else run_on_local_ranks(work, config, num_ranks=nproc)
    if as_json:
        typer.echo(json.dumps(result.to_fields()))


def _was_said(context: typer.Context, name: str) -> bool:
    """Whether an option was given, rather than left at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def default_folder(preset: str, data: str) -> str:
    """A folder name that says what the run is and when it began."""
    source = Path(data).stem or "data"
    return f"runs/{preset}-{source}-{time.strftime('%Y%m%d-%H%M%S')}"
