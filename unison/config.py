"""Settings of a training run, grouped by what they may change.

The table "what may change the result" of docs/design.md has one class per column here:

* `MechanismConfig`: changes the result. Two runs with equal mechanisms are the same experiment.
* `Execution`: may change rounding, speed and memory, never the experiment.
* `Output`: what is written and shown.

All are frozen, keyword-only and checked when made, so that a run that starts has valid settings.
`unison train --help` shows what is said of each attribute here.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from unison import check
from unison.errors import BadInput

PRECISIONS = ("fp32", "bf16")
LAYOUTS = ("packed", "documents")
LONG_DOCUMENTS = ("error", "truncate")
DEVICES = ("auto", "cpu", "cuda")
SHARDINGS = ("full", "zero2", "hybrid", "fsdp2", "ddp", "none")
REDUCERS = ("fast", "ordered")
# Those that the ordered reducer serves. The sums of a private run are the engine's, not DDP's, so
# that all are.
ORDERED_SHARDINGS = ("full", "zero2", "hybrid", "fsdp2")
WHOLE_SHARDINGS = ("ddp", "none")  # each rank holds all of the model
CLIPPINGS = ("auto", "grad_materialize", "ghost", "ghost_bk", "flash_fuse", "flash_fuse_bk")
CLIPPINGS += ("recompute_bk",)
CLIP_RULES = ("flat", "automatic", "per_layer")
SAMPLINGS = ("poisson", "truncated", "shuffled")
ACCOUNTANTS = ("pld", "rdp", "odometer")
FISHERS = ("mc", "empirical", "exact", "forward")


MAX_COUNT = 2**53  # up to which floats count
MAX_THREADS, MAX_LOCAL_RANKS = 4096, 1024  # beyond what any machine has; some crash at 100,000

CHOICES = {
    "layout": LAYOUTS,
    "long_documents": LONG_DOCUMENTS,
    "optimizer": ("adamw", "sgd"),
    "schedule": ("cosine", "linear", "constant"),
    "precision": PRECISIONS,
    "reducer": REDUCERS,
    "clipping": CLIPPINGS,
    "clip_rule": CLIP_RULES,
    "sampling": SAMPLINGS,
    "accountant": ACCOUNTANTS,
    "damping_form": ("pi", "factored", "joint"),
    "fisher": FISHERS,
    "graft": ("adam", "sgd", "none"),
    "shard": SHARDINGS,
    "device": DEVICES,
}


def _check_choices(settings: Any) -> None:
    """Require every setting that has few values to have one of them."""
    for name, choices in CHOICES.items():
        if hasattr(settings, name):
            check.one_of(choices, **{name: getattr(settings, name)})


def _given(**settings: float | None) -> dict[str, float]:
    """Those of some settings that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """What a private run applies (DP-SGD). The record that it protects is one row.

    Attributes:
        epsilon: ε that the run may spend; decides the noise for its --steps.
        delta: δ, below 1 / number of rows.
        noise_multiplier: σ, instead of --epsilon: noise of σ·C on the sum.
        max_grad_norm: C: the bound on the gradient of each row.
        clip_rule: flat: longer gradients are scaled down to C. automatic: all are scaled to nearly
            C. per_layer: each parameter has its part of C.
        sampling: poisson: a step draws each row with probability --batch-size / rows. truncated: at
            most --capacity of these. shuffled: fixed batches, for which a larger ε is counted.
        capacity: Most rows in a batch of --sampling truncated.
        accountant: Whose bound on ε counts; all are upper bounds.
        secure_noise: Without it noise and sampling come from --seed: for experiments, nothing is
            private.
    """

    epsilon: float | None = None
    delta: float
    noise_multiplier: float | None = None
    max_grad_norm: float = 1.0
    clip_rule: str = "flat"
    sampling: str = "poisson"
    capacity: int | None = None
    accountant: str = "pld"
    secure_noise: bool = True

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            found = "neither" if self.epsilon is None else "both"
            raise BadInput(
                "a private run needs one of epsilon, which decides the noise, and "
                f"noise_multiplier, found {found}"
            )
        check.positive(**_given(epsilon=self.epsilon))
        if self.noise_multiplier is not None and not self.noise_multiplier > 0:
            raise BadInput(
                f"noise_multiplier must be above 0, found {self.noise_multiplier!r}; a run without "
                "noise is not private: leave --private out"
            )
        if not 0 < self.delta < 1:
            raise BadInput(f"delta must lie above 0 and below 1, found {self.delta!r}")
        check.positive(max_grad_norm=self.max_grad_norm)
        _check_choices(self)
        if (self.capacity is not None) != (self.sampling == "truncated"):
            raise BadInput(
                "--capacity and --sampling truncated go together, found "
                f"capacity={self.capacity} and sampling={self.sampling!r}"
            )
        check.positive(**_given(capacity=self.capacity))


@dataclass(frozen=True, kw_only=True)
class Kfac:
    """What a run with K-FAC applies; see `unison.KFACConfig`, whose names these are.

    Attributes:
        damping: λ, added to the curvature before it is inverted.
        damping_form: pi: λ divided between the two factors by their size. factored: evenly. joint:
            added to their product.
        max_condition_number: Damp a factor more where it would pass this.
        update_every: Steps between two updates of the factors.
        invert_every: Steps between two inversions; after every update otherwise.
        decay: β of the factors' moving average.
        fisher: Whose labels curvature is of. mc: drawn from the model. empirical: the data's.
            exact: all of them, for small vocabularies. forward: none, inputs only.
        graft: Whose step length is taken: adam, sgd, or none for K-FAC's own, best with --kl-clip.
        kl_clip: Shorten steps whose predicted change is larger.
        max_factor_size: The longest side of a layer that is held as a matrix.
    """

    damping: float = 1e-3
    damping_form: str = "pi"
    max_condition_number: float | None = None
    update_every: int = 10
    invert_every: int | None = None
    decay: float = 0.95
    fisher: str = "mc"
    graft: str = "adam"
    kl_clip: float | None = None
    max_factor_size: int = 8192

    def __post_init__(self) -> None:
        check.not_negative(damping=self.damping)
        check.positive(update_every=self.update_every, **_given(invert_every=self.invert_every))
        check_curvature(self)


def check_curvature(settings: Any) -> None:
    """Check the settings that `Kfac` and `unison.KFACConfig` share.

    Raises:
        BadInput: Naming the setting.
    """
    _check_choices(settings)
    check.positive(max_factor_size=settings.max_factor_size, **_given(kl_clip=settings.kl_clip))
    most = settings.max_condition_number
    if most is not None and not most > 1:
        raise BadInput(f"max_condition_number must be above 1, found {most!r}")
    if not 0 <= settings.decay < 1:
        raise BadInput(f"decay must be at least 0 and below 1, found {settings.decay!r}")


@dataclass(frozen=True, kw_only=True)
class MechanismConfig:
    """What is computed: model, data, optimisation.

    Attributes:
        preset: Which model (see `unison presets`).
        overrides: Fields of the preset's config to replace.
        data: stdlib (this Python's own source files), records (generated customer records), or the
            path of a text file, a JSONL file or a folder.
        tokenizer: bytes, or the path of a `tokenizers` JSON file.
        text_field: The field of a JSONL line that holds its text.
        layout: packed: documents are joined and cut into full rows. documents: one document per
            row, which is what --private should protect.
        long_documents: With --layout documents: what to do with one too long.
        row_length: Tokens per row; the model's context by default.
        eval_fraction: Part of the documents held out for evaluation.
        seed: Seed of initial values, row order and split.
        steps: Optimizer steps.
        batch_size: Rows per step, over all ranks.
        optimizer: Which of torch's optimizers; sgd with --kfac.
        lr: Peak learning rate.
        weight_decay: Decay of matrices; vectors are not decayed.
        schedule: How the learning rate falls after the warm-up.
        warmup_steps: Steps of linear warm-up.
        clip_norm: Bound on the norm of the batch's gradient; None for no bound.
        precision: bf16 computes under autocast; parameters stay fp32.
        reducer: ordered gives the same bits on any number of ranks.
        granule: Rows per granule of the ordered reducer.
        threads: CPU threads per rank; they change bits. 1 with --reducer ordered, otherwise the
            cores divided by --nproc.
        compile: Put the model through torch.compile; the first steps take longer, and bits are
            others than without.
        privacy: What a private run applies; None for an ordinary one.
        kfac: How gradients are preconditioned; None leaves them to the optimizer.
    """

    preset: str = "tiny"
    overrides: dict[str, Any] = field(default_factory=dict)
    data: str = "stdlib"
    tokenizer: str = "bytes"
    text_field: str = "text"
    layout: str = "packed"
    long_documents: str = "error"
    row_length: int | None = None
    eval_fraction: float = 0.05
    seed: int = 0
    steps: int = 300
    batch_size: int = 16
    optimizer: str = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.1
    schedule: str = "cosine"
    warmup_steps: int = 20
    clip_norm: float | None = 1.0
    precision: str = "fp32"
    reducer: str = "fast"
    granule: int = 1
    threads: int | None = None
    compile: bool = False
    privacy: Privacy | None = None
    kfac: Kfac | None = None

    def __post_init__(self) -> None:
        _check_choices(self)
        check.positive(granule=self.granule)
        check.positive(**_given(threads=self.threads))
        if self.threads is not None and self.threads > MAX_THREADS:
            raise BadInput(f"threads must be at most {MAX_THREADS}, found {self.threads}")
        check.positive(steps=self.steps, batch_size=self.batch_size, lr=self.lr)
        check.not_negative(weight_decay=self.weight_decay, warmup_steps=self.warmup_steps)
        check.not_negative(seed=self.seed)
        for name in ("steps", "batch_size", "warmup_steps", "granule", "seed"):
            if getattr(self, name) >= MAX_COUNT:
                raise BadInput(f"{name} must be below 2^53, found {getattr(self, name)}")
        if not 0 < self.eval_fraction < 1:
            raise BadInput(f"eval_fraction must lie between 0 and 1, found {self.eval_fraction}")
        check.positive(**_given(row_length=self.row_length, clip_norm=self.clip_norm))
        kfac = self.kfac
        if kfac is None:
            return
        if self.privacy is not None:
            raise BadInput(
                "--kfac and --private do not go together: curvature of the private rows is not "
                "made of their noisy gradients, so that no ε covers a step that it preconditions. "
                "Leave --kfac out; --optimizer adamw scales the noisy gradient itself, which costs "
                "no ε"
            )
        if self.optimizer != "sgd":
            raise BadInput(
                f"with --kfac the optimizer is 'sgd', found {self.optimizer!r}, which would scale "
                f"every element of K-FAC's step again; leave --optimizer out: --graft {kfac.graft} "
                "decides the length of a step"
            )

    def by_name(self) -> dict[str, Any]:
        """All settings in one dictionary, those of the model, of privacy and of K-FAC included."""
        found = asdict(self)
        overrides, privacy, kfac = (found.pop(name) for name in ("overrides", "privacy", "kfac"))
        parts = {"private": privacy is not None, "kfac": kfac is not None}
        return found | overrides | parts | (privacy or {}) | (kfac or {})


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How it is computed: device and memory.

    Attributes:
        device: auto takes CUDA where there is one.
        micro_batch_size: Rows per forward pass, at most; the rest of a step is accumulated.
        shard: full: parameters, gradients and optimizer state split over ranks (ZeRO-3). zero2:
            parameters kept between forward and backward. hybrid: several copies, each split. fsdp2:
            split by torch's own fully_shard. ddp: a copy on each rank. none: one rank.
        replicas: Copies of the model with --shard hybrid; 2 by default.
        guard: Compare the ranks' collectives while they run; raise on all instead of hanging.
        clipping: How the clipping is computed; all give the same gradients.
        owner_fraction: Part of the ranks that invert each layer: 0 one rank, least memory; 1 all,
            least traffic. Changes no bits.
    """

    device: str = "auto"
    micro_batch_size: int | None = None
    shard: str = "full"
    replicas: int | None = None
    guard: bool = False
    clipping: str = "auto"
    owner_fraction: float = 0.0

    def __post_init__(self) -> None:
        _check_choices(self)
        check.probability(owner_fraction=self.owner_fraction)
        check.positive(**_given(replicas=self.replicas, micro_batch_size=self.micro_batch_size))
        if self.replicas is not None and self.shard != "hybrid":
            raise BadInput(
                f"replicas={self.replicas} is for shard 'hybrid', found {self.shard!r}; add "
                "--shard hybrid or leave --replicas out"
            )


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is written and shown.

    Attributes:
        folder: The folder of the run; it must not exist unless `overwrite` is set.
        overwrite: Replace an existing run, and its ledger, once the new one is done.
        eval_every: Steps between evaluations; 0 for before and after only.
        eval_rows: Rows per evaluation, at most.
        log_every: Steps between two lines where there is no terminal.
        tensorboard: Write TensorBoard events too.
        checkpoint_every: Steps between checkpoints; 0 for none.
        checkpoint_seconds: Seconds between checkpoints, beside or instead of that; 0 for none.
        keep_checkpoints: How many checkpoints to keep, the newest.
        resume: Whether the folder holds a run that stopped, which goes on from its newest
            checkpoint.
        command: The command line that started the run, for the record.
        unsafe_diagnostics: Also write what no ε covers to the run's files: training loss, norms,
            clipped fractions. A terminal shows them anyway.
        data_salt: A small secret file that stays beside the data, made if it is not there. With it
            the ledger commits to the rows, so that `unison account RUN RUN...` knows runs on one
            data set, and a run that goes on whether its rows are those of before.
        record: Keep a digest of every step and unit, so that `unison replay` can check any stretch
            of the run, on any number of ranks. Needs --reducer ordered.
        seal_key: A new file for the secret key of a private run, sealed under a passphrase: whoever
            opens it can replay the run, and take its noise off. With --resume: the run's own, to go
            on under the same key. Without it no key is ever written.
        passphrase_file: A file that holds the passphrase of --seal-key; UNISON_PASSPHRASE in the
            environment, or a prompt, otherwise.
    """

    folder: str
    overwrite: bool = False
    eval_every: int = 50
    eval_rows: int = 64
    log_every: int = 10
    tensorboard: bool = True
    checkpoint_every: int = 0
    checkpoint_seconds: float = 0.0
    keep_checkpoints: int = 2
    resume: bool = False
    command: str = ""
    unsafe_diagnostics: bool = False
    data_salt: str | None = None
    record: bool = False
    seal_key: str | None = None
    passphrase_file: str | None = None

    def __post_init__(self) -> None:
        check.not_negative(eval_every=self.eval_every, checkpoint_every=self.checkpoint_every)
        check.not_negative(checkpoint_seconds=self.checkpoint_seconds)
        check.positive(keep_checkpoints=self.keep_checkpoints)
        check.positive(eval_rows=self.eval_rows, log_every=self.log_every)
        if self.resume and self.overwrite:
            raise BadInput("a run is either resumed or overwritten; leave one of the two out")
        if not self.folder.strip():
            raise BadInput("folder must name the folder of the run, found an empty name")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of one run."""

    mechanism: MechanismConfig
    execution: Execution
    output: Output

    def __post_init__(self) -> None:
        mechanism, shard = self.mechanism, self.execution.shard
        if mechanism.compile and shard == "fsdp2":
            raise BadInput(
                "--compile and --shard fsdp2 do not go together: torch's own hooks lie between the "
                "blocks; use --shard full, or leave --compile out"
            )
        if mechanism.compile and mechanism.kfac is not None:
            raise BadInput(
                "--compile and --kfac do not go together: curvature is taken from what goes in and "
                "out of layers, which compiled blocks do not show; leave --compile out"
            )
        if mechanism.reducer != "ordered":
            return
        if mechanism.privacy is None and shard not in ORDERED_SHARDINGS:
            *others, last = (repr(name) for name in ORDERED_SHARDINGS)
            raise BadInput(
                f"the ordered reducer needs shard {', '.join(others)} or {last}, found {shard!r}"
            )
        rows = self.execution.micro_batch_size
        if rows is not None and rows % mechanism.granule:
            raise BadInput(
                "--micro-batch-size must be a multiple of --granule, found "
                f"{rows} and {mechanism.granule}: the ordered reducer never cuts a granule"
            )

    def check_parts(self) -> None:
        """Refuse what a private run cannot have, and what only private runs or K-FAC have.

        Not when the settings are made: those of a run that goes on get their parts from its folder.

        Raises:
            BadInput: Naming the setting.
        """
        shard, clipping = self.execution.shard, self.execution.clipping
        if self.mechanism.privacy is None:
            if self.output.unsafe_diagnostics or clipping != "auto":
                raise BadInput(
                    "only private runs have --unsafe-diagnostics and --clipping, found "
                    f"unsafe_diagnostics={self.output.unsafe_diagnostics} and {clipping=}; leave "
                    "them out"
                )
        elif clipping == "recompute_bk" and shard not in WHOLE_SHARDINGS:
            raise BadInput(
                "--clipping recompute_bk runs the forward pass again, which needs the whole model "
                f"on each rank: --shard {' or '.join(WHOLE_SHARDINGS)}, found {shard!r}; or use "
                "--clipping ghost or flash_fuse, which keep nothing either"
            )
        if self.output.record and self.mechanism.reducer != "ordered":
            raise BadInput(
                "--record needs --reducer ordered: with the fast one the bits of a step depend on "
                "the ranks, and nothing could be compared"
            )
        if self.output.seal_key is not None:
            privacy = self.mechanism.privacy
            if privacy is None or not privacy.secure_noise or not self.output.record:
                raise BadInput(
                    "--seal-key keeps the secret key of a private run for its replay: it needs "
                    "--private, secure noise and --record"
                )
        if self.mechanism.kfac is None and self.execution.owner_fraction:
            raise BadInput(
                "only runs with --kfac have --owner-fraction, found "
                f"{self.execution.owner_fraction}; add --kfac, or leave it out"
            )
