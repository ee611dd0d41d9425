"""`PrivacyEngine`: private training in the loop that users already write."""

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from unison import check
from unison.capture.torch_compile import uncompile, unwrapped
from unison.clip import AUTO, MODES, Plan
from unison.config import Privacy
from unison.errors import BadInput
from unison.parallel import adapter_of
from unison.privacy.accounting import check_accountant, check_delta
from unison.privacy.arguments import (
    batch_size_of,
    check_compile,
    check_module,
    check_public_buffers,
    make_key,
    num_trainable,
    refuse_opacus_values,
    refuse_unknown,
    sampling_of,
    trainable,
    unprepared,
)
from unison.privacy.calibration import Budget, BudgetGuard, noise_multiplier_for
from unison.privacy.graph import LossOf, RecordedPass
from unison.privacy.learning import ClippingSettings
from unison.privacy.ledger import DataSalt, Ledger, commit_to_data
from unison.privacy.ledger_file import Session
from unison.privacy.loader import PrivateLoader, RowShape
from unison.privacy.mechanism import CLIP_RULES, AdaptiveClipping, Mechanism, Release, Schedule
from unison.privacy.sampling import (
    Dealing,
    Ranks,
    Sampling,
    compare_across_ranks,
    fingerprint,
    sampling_for,
    show_shards,
    steps_per_epoch,
    usual_batch_size,
)
from unison.privacy.training import (
    PrivateTraining,
    check_optimizer,
    refuse_second_trainer,
)
from unison.rng import Key

LOSS_REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """What is known of one logical batch. Un-noised functions of private data: no ε covers them.

    Attributes:
        step: Number of the logical batch.
        num_samples: Samples in it.
        median_norm: Median of the samples' gradient norms before clipping; NaN of an empty batch.
        clipped_fraction: Part of the samples whose gradient was longer than C.
        num_dropped: Samples whose gradient was not finite, and that were left out.
    """

    step: int
    num_samples: int
    median_norm: float
    clipped_fraction: float
    num_dropped: int


class PrivacyEngine:
    """Makes a module, an optimizer and a data loader train privately (DP-SGD).

    ```
    engine = unison.PrivacyEngine()
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()
    engine.get_epsilon(delta=1e-5)
    ```

    Guarantees:
        Every sample's gradient is clipped to `max_grad_norm` before it is added to any other's;
        the sum gets noise of standard deviation σ·C once per element; the ledger holds what was
        applied before the noise is drawn. Gradients that would go past this raise.

    Args:
        accountant: `"pld"` or `"rdp"`, for a plan that is fixed in advance; `"odometer"` if σ or
            the number of steps is chosen from what comes out (docs/privacy.md).
        secure_noise: Whether noise and sampling come from a secret key of the operating system's.
            False needs `seed=` in `make_private`, and is for experiments: ε is infinite then.
        ledger: File to write the ledger to, usually RUN/ledger.jsonl. Without one it lives in
            memory and dies with the process.
    """

    def __init__(
        self,
        accountant: str = "pld",
        secure_noise: bool = True,
        ledger: str | os.PathLike[str] | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown("PrivacyEngine", unknown)
        check_accountant(accountant)
        self.accountant, self.secure_noise = accountant, secure_noise
        self._ledger_path = ledger
        self._training: PrivateTraining | None = None
        self._spent: Ledger | None = None  # in memory, of modules that were made private before
        self._users_compile = ExitStack()

    # --- attaching -------------------------------------------------------------------------------

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float | Schedule,
        max_grad_norm: float | Schedule,
        clipping: str = AUTO,
        clip_rule: str = "flat",
        poisson_sampling: bool = True,
        sampling: Sampling | None = None,
        loss_reduction: str = "mean",
        expected_batch_size: float | None = None,
        max_physical_batch_size: int | None = None,
        adaptive_clipping: AdaptiveClipping | None = None,
        batch_first: bool = True,
        memory_budget: int | None = None,
        calibrate: bool = True,
        recheck: bool = True,
        public_buffers: Sequence[str] = (),
        budget: Budget | None = None,
        granule: int | None = None,
        rows_per_sample: int = 1,
        padding_row: Any = None,
        row_shape: RowShape = None,
        compile: bool | Mapping[str, Any] = False,  # noqa: A002 - as torch names it
        seed: int | None = None,
        key: Key | None = None,
        key_commitment: str | None = None,
        data_salt: DataSalt | None = None,
        data_id: str | None = None,
        **unknown: Any,
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        """Return the same module and optimizer, now private, and a loader that samples for them.

        Args:
            module: The model. It is not wrapped: hooks are put on it, which `detach` removes.
            optimizer: Over the module's trainable parameters, all of them and no others.
            data_loader: The user's loader. Its order of records is replaced by the sampling.
            noise_multiplier: σ, or a schedule step -> σ.
            max_grad_norm: C, or a schedule step -> C.
            clipping: How per-sample clipping is computed; every mode gives the same gradients.
            clip_rule: `"flat"` scales gradients longer than C down to C, `"automatic"` scales all
                to nearly C, `"per_layer"` clips each of L parameters to C / sqrt(L).
            poisson_sampling: Whether each record takes part in a step with probability
                batch size / size of the data set. False: a new permutation every epoch, with the
                larger ε that this supports.
            sampling: Another sampling, such as `TruncatedPoisson`; instead of `poisson_sampling`.
            loss_reduction: What the user's loss is of the samples' losses: `"mean"` or `"sum"`.
            expected_batch_size: What the sum is divided by with `"mean"`, a public constant; the
                loader's batch size unless given. It only divides: how often a record is drawn is
                decided by the loader's batch size, or `sampling`.
            max_physical_batch_size: Most samples in one pass; larger logical batches come in
                several, in the same loop.
            adaptive_clipping: Lets C follow a quantile of the norms, with noise of its own.
            batch_first: Whether samples lie in dimension 0 of the module's inputs and outputs;
                otherwise in dimension 1.
            memory_budget: Bytes that clipping may hold beside ordinary training. Unless given,
                `"auto"` keeps to what a GPU has room for (docs/clipping.md).
            calibrate: Whether clipping `"auto"` may time its methods on the GPU, once (see
                docs/clipping.md). With granules, and on several ranks, it never does.
            recheck: Whether it is checked again, at the second, fourth, eighth, … pass of each kind
                of batch, that samples do not mix in the module or in the loss; otherwise at the
                first alone, and wherever the loss takes another path.
            public_buffers: Names of buffers (or patterns, as of `fnmatch`) that the forward pass
                may write values of the batch to: they get no noise, and no ε covers them.
            budget: A bound on ε. The loader raises `BudgetSpent` before a step that would pass it.
            granule: Samples that are computed together, at one shape, and added up in one order
                on any number of ranks: what the ordered reducer needs. Tensors then come as one
                value per granule, and the loss is `unison.batch_mean` of the samples' losses.
            rows_per_sample: Rows that `collate_fn` makes of each record, one after the other, such
                as the chosen and the rejected answer of a preference: they are one unit of privacy.
            padding_row: A record that stands where a pass has none: an empty draw, a granule or a
                rank that is not full. Made up or public, never one of the data; as the data set
                gives records. Zeros unless given, which not every model takes. It
                counts for nothing.
            row_shape: The shape of a record's row in tensors of the batch whose rows are not all of
                one length, by name or place: `{"input_ids": 512, "labels": 512}`. Shorter rows are
                padded, with what `padding_row` has there, or zeros, and -100 for `"labels"`. Rows
                of several shapes are refused, unless lengths are public: `row_shape="public"`.
            compile: Whether the module's private passes go through `torch.compile`; a dictionary
                has its backend, mode and options. They do so too if the module comes compiled. What
                cannot be compiled runs as it is, and a warning says why.
            seed: Makes noise and sampling repeatable, and ε infinite. Needs `secure_noise=False`.
            key: A key of the caller's, the same on every rank, instead of a fresh one. Whoever has
                it can take the noise off what is released.
            key_commitment: A salted hash of that key, for the ledger.
            data_salt: Lets the ledger commit to the data set, so that `unison account RUN RUN ...`
                can tell which runs it adds up were on the same data: 16 secret bytes or more, or a
                file that holds them. It lives with the data, not with the run, and is made if it
                is not there.
            data_id: What the commitment covers beside the number of records, such as a hash of
                the data's files. It is not written itself.
            unknown: Raises, and says what is meant where it is a name of Opacus's.

        Raises:
            BadInput: Arguments that cannot be used together.
            UnsupportedOperation: What cannot be trained privately.
        """
        refuse_unknown("make_private", unknown)
        if self._training is not None:
            raise BadInput("this engine is attached already; detach() it, or make another one")
        check_module(module)
        refuse_opacus_values(clipping, max_grad_norm)
        check.one_of([*MODES, AUTO], clipping=clipping)
        check.one_of(CLIP_RULES, clip_rule=clip_rule)
        check.one_of(LOSS_REDUCTIONS, loss_reduction=loss_reduction)
        if adaptive_clipping is not None and clip_rule != "flat":
            raise BadInput("adaptive_clipping follows norms over all parameters: clip_rule='flat'")
        if expected_batch_size is not None:
            check.positive(expected_batch_size=expected_batch_size)
        if granule is not None:
            check.positive(granule=granule)
        check.positive(rows_per_sample=rows_per_sample)
        batch_device = getattr(data_loader, "device", None)  # accelerate puts batches there
        data_loader, prepared = unprepared(data_loader), optimizer
        optimizer = unprepared(optimizer)
        users = ExitStack()  # gives what the user has compiled back
        with ExitStack() as undo:
            undo.callback(users.close)  # if anything is refused from here on
            own, backend = unwrapped(module), uncompile(module, users)
            show_shards(own)
            parameters = trainable(own)
            refuse_second_trainer(parameters)
            check_optimizer(optimizer, parameters)
            owner = adapter_of(own, is_ordered=granule is not None)
            undo.callback(owner.detach)
            if owner.is_ordered and granule is None:
                raise BadInput(
                    "the module's reducer is 'ordered', which adds granules up in one order at "
                    "every number of ranks: say how many samples a granule has with "
                    "make_private(granule=)"
                )
            if sampling is None:
                sampling = sampling_of(data_loader, poisson_sampling)
            elif not poisson_sampling:
                raise BadInput("sampling= says how records are drawn; leave poisson_sampling out")
            mechanism = Mechanism(
                sampling=sampling,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                expected_batch_size=expected_batch_size or batch_size_of(data_loader),
                adaptive=adaptive_clipping,
                rounded_elements=sum(each.numel for each in owner.params),
                is_chosen=self.accountant == "odometer",
            )
            ranks = owner.ranks
            if owner.everyone.size > 1:  # else ranks would wait for others, or add up other things
                groups = enumerate(optimizer.param_groups)
                given: dict[str, Any] = {
                    "trained parameters": {n: tuple(each.shape) for n, each in parameters.items()},
                    "number of records": len(data_loader.dataset),  # type: ignore[arg-type]
                    **mechanism.describe(),
                    "key": f"of seed {seed}" if key is None else key.fingerprint().hex(),
                    "secure_noise": self.secure_noise,
                    "clipping": (clipping, clip_rule, loss_reduction, granule, memory_budget),
                    "max_physical_batch_size": max_physical_batch_size,
                    "rows": (batch_first, rows_per_sample, row_shape),
                    "recheck": recheck,
                    "budget": budget,
                    "optimizer": type(optimizer).__name__,
                    **{
                        f"{name} of parameter group {i}": _comparable(value)
                        for i, group in groups
                        for name, value in group.items()
                    },
                }
                compare_across_ranks("what make_private is given", given, owner.everyone.group)
            owner.attach()
            key = make_key(seed, key, owner.everyone.group, is_secure=self.secure_noise)
            loader = PrivateLoader(
                data_loader,
                sampling,
                key,
                max_physical_batch_size=max_physical_batch_size,
                rank=ranks.rank,
                num_ranks=ranks.size,
                granule=granule or 1,
                rows_per_record=rows_per_sample,
                device=batch_device,
                row_shape=row_shape,
                padding_row=padding_row,
            )
            compiled = check_compile(compile, backend)
            device = owner.params[0].parameter.device if owner.params else torch.device("cpu")
            ledger = open_on_ranks(
                self._ledger_path,
                mechanism,
                self.accountant,
                owner.everyone,
                Session(
                    key_origin=key.origin,
                    key_commitment=key_commitment,
                    unit=loader.unit,
                    rows_per_sample=rows_per_sample,
                    sampling_source="unison",
                    num_records=len(loader.dataset),  # type: ignore[arg-type]
                    device=str(device),
                    fingerprint=fingerprint(
                        granule=granule,
                        device=device,
                        is_compiled=compiled is not None and owner.why_uncompiled is None,
                    ),
                ),
                data_salt=data_salt,
                data_id=data_id,
                earlier=self._spent,
            )
            batch_dim = 0 if batch_first else 1
            self._training = PrivateTraining(
                own,
                optimizer,
                loader,
                owner=owner,
                dealing=Dealing(
                    ranks,
                    granule,
                    max_physical_batch_size,
                    batch_dim,
                    rows_per_sample,
                    usual_batch_size(sampling, len(loader.dataset)),  # type: ignore[arg-type]
                    key.child("draws"),
                    loader.padding,
                ),
                key=key,
                mechanism=mechanism,
                ledger=ledger,
                guard=budget
                and BudgetGuard(budget, accountant=self.accountant, horizon=budget.steps),
                settings=ClippingSettings(
                    mode=clipping,
                    memory_budget=memory_budget,
                    batch_dim=batch_dim,
                    calibrate=calibrate,
                    rows_per_sample=rows_per_sample,
                    recheck=recheck,
                    public_buffers=check_public_buffers(own, public_buffers),
                    compile=compiled,
                ),
                clip_rule=clip_rule,
                loss_reduction=loss_reduction,
            )
            undo.pop_all()
        self._users_compile = users
        return module, prepared, loader

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        max_grad_norm: float | Schedule,
        **settings: Any,
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        """Choose the noise with which `epochs` over the loader spend at most `target_epsilon`.

        The spending lands within 1 % below the target. It is also the budget: a step that would
        pass it is refused, unless another `budget=` is given.

        Args:
            module: As in `make_private`.
            optimizer: As in `make_private`.
            data_loader: As in `make_private`.
            target_epsilon: ε to land on, from below.
            target_delta: δ.
            epochs: Passes over the loader.
            max_grad_norm: As in `make_private`.
            settings: Other arguments of `make_private`.
        """
        check.positive(target_epsilon=target_epsilon, epochs=epochs)
        if "noise_multiplier" in settings:
            raise BadInput("target_epsilon decides the noise: leave noise_multiplier out")
        sampling = settings.get("sampling") or sampling_of(
            unprepared(data_loader), settings.get("poisson_sampling", True)
        )
        check_delta(target_delta, len(data_loader.dataset))  # type: ignore[arg-type]
        adaptive = settings.get("adaptive_clipping")
        steps = max(1, math.ceil(epochs * steps_per_epoch(sampling)))
        budget = Budget(epsilon=target_epsilon, delta=target_delta, steps=steps)
        planned = _noise_within(budget, module, sampling, self.accountant, adaptive)
        return self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            max_grad_norm=max_grad_norm,
            **planned | settings,
        )

    def detach(self) -> None:
        """Give the user's module and optimizer back as they were. The ledger is closed.

        What it holds stays counted: a module that this engine makes private later goes on with it.
        """
        self._attached.detach()
        self._spent = self.ledger if self.ledger.path is None else None
        self._users_compile.close()
        self._training = None

    # --- asking ----------------------------------------------------------------------------------

    def check(self, *args: Any, **kwargs: Any) -> Plan:
        """Make sure that a batch can be clipped, before any budget is spent.

        Args:
            args: What the module is called with.
            kwargs: The same.

        Raises:
            UnsupportedOperation: An operation has no rule, or samples mix.
        """
        return self._attached.attachment.check(args, kwargs)

    def capture_graph(
        self, loss_of: LossOf, *example: torch.Tensor, with_optimizer: bool = False
    ) -> Callable[..., torch.Tensor]:
        """Record a pass as a CUDA graph: what a GPU does then costs Python next to nothing.

        ```python
        run = engine.capture_graph(lambda x, y: unison.per_sample_loss(module(x), y), x, y)
        for x, y in loader:
            optimizer.zero_grad()
            loss = run(x, y)  # forward, backward, clipping, noise
            optimizer.step()  # with_optimizer=True: `run` takes this step, too
        ```

        Recording runs the model a few times; it spends no budget and changes no parameter. Batches
        of fewer rows are padded, so Poisson sampling works: give `make_private` a
        `max_physical_batch_size` that the GPU likes.

        Args:
            loss_of: One loss per row [rows], of tensors.
            example: A batch as `loss_of` takes it, on the GPU.
            with_optimizer: Whether the noise and `optimizer.step()` are a graph as well, which
                `run` replays after the last batch of a step: do not call `optimizer.step()` then.
                It must be `capturable`, and a learning rate that changes often a tensor:
                `AdamW(..., lr=torch.tensor(1e-4), capturable=True, fused=True)`. With a number it
                is recorded again after each change.

        Returns:
            A function of a batch of the loader, to be called once for each. It returns the mean
            loss of its rows, which like any loss is not covered by ε.

        Raises:
            UnsupportedOperation: The module is sharded, trained in granules, or not on one GPU; or
                the optimizer cannot be recorded.
        """
        return RecordedPass(self._attached, loss_of, example, with_optimizer=with_optimizer)

    def get_epsilon(self, delta: float) -> float:
        """Return ε at δ of what the ledger holds.

        It is infinite, and a warning says why, if noise came from a seed: `epsilon_if_secret` is
        what tests and experiments with seeds look at.
        """
        check_delta(delta, len(self._attached.loader.dataset))  # type: ignore[arg-type]
        ledger = self._attached.ledger
        if ledger.spending.num_seeded:
            warnings.warn(
                f"ε is infinite: the noise of {ledger.spending.num_seeded} steps came from a seed, "
                "and whoever knows it can remove it. engine.epsilon_if_secret(delta) is the ε that "
                "the same steps would have under a secret key",
                stacklevel=2,
            )
        return ledger.epsilon(delta)

    def epsilon_if_secret(self, delta: float) -> float:
        """Return ε at δ as if every key had been secret; of a seeded run, no guarantee."""
        check_delta(delta, len(self._attached.loader.dataset))  # type: ignore[arg-type]
        return self._attached.ledger.epsilon_if_secret(delta)

    def plan(self) -> Plan:
        """Return which methods clipping uses for each parameter: `print(engine.plan())`.

        `print(engine.plan().details())` says what others would cost.
        """
        plan = self._attached.attachment.plan
        if plan is None:
            raise BadInput("nothing is planned before the first batch; engine.check(x) plans one")
        return plan

    def watch(self, module: nn.Module) -> None:
        """Refuse values of records in what another module saves, as in the private one.

        Args:
            module: One that holds the private module, and is saved with it.
        """
        self._attached.watched.append(module)

    def per_sample_norms(self) -> torch.Tensor:
        """Return the last logical batch's norms before clipping, by position in the batch.

        They are functions of private data that no ε covers.
        """
        return self._attached.norms()

    def diagnostics(self) -> Diagnostics:
        """Return what is known of the last logical batch; no ε covers it."""
        norms, release = self._attached.norms(), self._attached.last.release
        finite = norms[norms.isfinite()]
        is_clipped = ~(norms <= release.max_grad_norm)
        return Diagnostics(
            step=release.step,
            num_samples=len(norms),
            median_norm=float(finite.median()) if len(finite) else float("nan"),
            clipped_fraction=float(is_clipped.double().mean()) if len(norms) else 0.0,
            num_dropped=len(norms) - len(finite),
        )

    @property
    def last_release(self) -> Release:
        """What the last step applied."""
        return self._attached.last.release

    @property
    def mechanism(self) -> Mechanism:
        """What each step applies; σ and C may be set between steps."""
        return self._attached.mechanism

    @property
    def ledger(self) -> Ledger:
        """What was applied."""
        return self._attached.ledger

    # --- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as values that JSON can hold. Never a key."""
        return self._attached.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Noise and samples that were drawn are never drawn again.

        Raises:
            BadInput: The state is that of another mechanism, or the ledger has lost lines.
        """
        self._attached.load_state_dict(state)

    # --- within ----------------------------------------------------------------------------------

    @property
    def _attached(self) -> PrivateTraining:
        if self._training is None:
            raise BadInput("the engine is not attached to a module: call make_private first")
        return self._training


def attach(
    privacy: Privacy,
    *,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    steps: int,
    seed: int,
    ledger: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> tuple[PrivacyEngine, PrivateLoader]:
    """Make a planned run private: an engine on the module, and the loader that draws for it.

    Args:
        privacy: What the run applies; its `epsilon`, if given, decides the noise and is a budget.
        module: As in `make_private`.
        optimizer: As in `make_private`.
        data_loader: As in `make_private`; its batch size is that of all ranks together.
        steps: Logical steps of the whole run.
        seed: Used where `privacy.secure_noise` is off.
        ledger: File to write the ledger to.
        settings: Other arguments of `make_private`.
    """
    num_records = len(data_loader.dataset)  # type: ignore[arg-type]
    sampling = sampling_for(privacy, batch_size_of(data_loader), num_records)
    planned: dict[str, Any] = {"noise_multiplier": privacy.noise_multiplier}
    if privacy.noise_multiplier is None:
        assert privacy.epsilon is not None  # one of the two is given
        budget = Budget(epsilon=privacy.epsilon, delta=privacy.delta, steps=steps)
        planned = _noise_within(budget, module, sampling, privacy.accountant)
    engine = PrivacyEngine(privacy.accountant, privacy.secure_noise, ledger)
    _, _, loader = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=data_loader,
        max_grad_norm=privacy.max_grad_norm,
        clip_rule=privacy.clip_rule,
        sampling=sampling,
        seed=None if privacy.secure_noise else seed,
        **planned,
        **settings,
    )
    return engine, loader


def _noise_within(
    budget: Budget,
    module: nn.Module,
    sampling: Sampling,
    accountant: str,
    adaptive: AdaptiveClipping | None = None,
) -> dict[str, Any]:
    """The noise with which the budget's steps spend it, and the budget: for `make_private`."""
    assert budget.steps is not None
    noise_multiplier = noise_multiplier_for(
        target_epsilon=budget.epsilon,
        target_delta=budget.delta,
        sampling=sampling,
        steps=budget.steps,
        accountant=accountant,
        count_noise_multiplier=adaptive and adaptive.count_noise_multiplier,
        rounded_elements=num_trainable(module),
    )
    return {"noise_multiplier": noise_multiplier, "budget": budget}


def _comparable(setting: Any) -> Any:
    """What ranks can compare of an optimizer's setting: no device, and no address of an object."""
    if isinstance(setting, torch.Tensor):
        return setting.tolist()
    if isinstance(setting, tuple):
        return tuple(map(_comparable, setting))
    if isinstance(setting, list):  # of parameters
        return len(setting)
    is_plain = setting is None or isinstance(setting, bool | int | float | str)
    return setting if is_plain else type(setting).__name__


def open_on_ranks(
    path: str | os.PathLike[str] | None,
    mechanism: Mechanism,
    accountant: str,
    ranks: Ranks,
    session: Session,
    *,
    data_salt: DataSalt | None = None,
    data_id: str | None = None,
    earlier: Ledger | None = None,
) -> Ledger:
    """Open the ledger on the first rank, and copies of what it holds on the others; a collective.

    All ranks know what was spent, so that they decide alike whether a step fits the budget.

    Args:
        path: The file; only the first rank touches it.
        mechanism: What the session applies.
        accountant: The accountant.
        ranks: The ranks that train together.
        session: What the session says of itself.
        data_salt: See `commit_to_data`; only the first rank looks at it.
        data_id: The same.
        earlier: See `Ledger.open`.

    Raises:
        BadInput: On every rank, if the first one cannot open the file.
    """
    ledger, error = None, ""
    if ranks.rank == 0:
        try:
            session = commit_to_data(session, salt=data_salt, data_id=data_id, ledger=path)
            ledger = Ledger.open(
                path, mechanism=mechanism, accountant=accountant, session=session, earlier=earlier
            )
        except Exception as found:
            if ranks.size == 1:
                raise
            error = str(found)
    if ranks.size == 1:
        assert ledger is not None
        return ledger
    state = {"error": error} if ledger is None else ledger.state_dict()
    state = json.loads(ranks.broadcast_object(json.dumps(state) if ranks.rank == 0 else ""))
    if "error" in state:
        raise BadInput(f"the first rank could not open the ledger: {state['error']}")
    if ledger is None:
        ledger = Ledger.open(None, mechanism=mechanism, accountant=accountant, session=session)
        ledger.load_state_dict(state)
        ledger.is_copy = not state["is_in_memory"]
    return ledger
