"""CUDA graphs: a pass, launched as one; and the end of a step, noise and optimizer, as another.

[Note: what a graph holds] Hundreds of small kernels cost Python and the driver more time than the
GPU needs to run them. A CUDA graph records them once, with their addresses, and repeats them. What
changes from step to step must therefore lie at a fixed place: the batch, and how many of its rows
are real. A pass is forward, backward, norms and coefficients. What is not recorded: the ledger, the
noise, and the optimizer, a few launches more; `StepGraph` records the last two where the user asks
for it.

[Note: what may change] A graph repeats its launches, with the numbers and the addresses that they
had. The recipes of the noise, which hold the key of a step, lie at a fixed place and are filled
before every replay. All else is compared before it, and the graph is recorded again where it is
another: hyperparameters that are Python numbers, the optimizer's state (a checkpoint was loaded),
the divisor. A learning rate that is a tensor may change without.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from unison.clip import NormTable, SampleNorms
from unison.clip.bounds import Grid
from unison.clip.measured import stacked
from unison.errors import BadInput, UnsupportedOperation
from unison.kernels import multi_tensor
from unison.kernels.multi_tensor import (
    AdamWStep,
    Tables,
    adamw_rates,
    combine,
    tables_kept,
)
from unison.kernels.random import Cipher, Distribution, Recipe, secure_floats
from unison.parallel import ShardedParam
from unison.privacy.attachment import RunningPass
from unison.privacy.mechanism import CLIP_RULES, grid_of, grid_of_pass
from unison.privacy.noise import (
    ReleaseTerms,
    Shares,
    erase,
    private_gradients,
    recipes_for,
    release_by,
    shares_of,
)
from unison.privacy.sampling import PLAIN, Part, PhysicalBatch, physical_batches
from unison.rng import noise_spacing

if TYPE_CHECKING:
    from unison.privacy.training import LogicalBatch, PrivateTraining

LossOf = Callable[..., Tensor]
"""(*batch) -> one loss per row [rows]."""

NUM_WARM_UPS = 2  # passes before the one that is recorded: kernels are compiled, memory is found


class GraphedPass:
    """One physical batch of a fixed number of rows: `replay` it, then use `shares`.

    Args:
        training: Whose module and C it is.
        loss_of: One loss per row.
        example: A batch: its shapes but for the number of rows, dtypes and device.
        num_rows: Rows of every batch; fewer are padded.

    Attributes:
        clip_norm: C, for which the pass was recorded.
        loss: Mean over the real rows of the last replay, a tensor without dimensions.
        norms: Of all rows [rows], float64.
        shares: What the clipped sums of each used parameter are made of, see `Clipping.shares`.
            Like the other tensors here, they hold the last replay's values.
        current: The batch of the pass that is run; of nobody's records.
        parts: Its rows, which are not cut.
        most_rows: How many.
        max_physical_batch_size: None: other passes may not have fewer.
    """

    granule, max_physical_batch_size, mean_was_used = None, None, False

    def __init__(
        self,
        training: "PrivateTraining",
        loss_of: LossOf,
        example: Sequence[Tensor],
        *,
        num_rows: int,
    ) -> None:
        _check_example(example)
        self.num_rows = self.most_rows = num_rows
        self.clip_norm = training.mechanism.release(training.loader.next_step).max_grad_norm
        is_real = torch.ones(num_rows, dtype=torch.bool)
        self.parts = [Part(PLAIN, is_real, num_rows, torch.arange(num_rows))]
        self._loss_of, self._training = loss_of, training
        device = example[0].device
        self._inputs = [x.new_zeros(num_rows, *x.shape[1:]) for x in example]
        for place, x in zip(self._inputs, example, strict=True):
            place[: len(x)].copy_(x[:num_rows])
        self._rows = torch.arange(num_rows, device=device)
        self._num_real = torch.full((), num_rows, device=device)
        self._spacing = torch.ones(1, dtype=torch.float64, device=device)
        self.loss = torch.zeros((), device=device)
        self.norms = torch.zeros(num_rows, dtype=torch.float64, device=device)
        self.shares: dict[str, tuple[Tensor, Tensor]] = {}
        self._sums: dict[torch.dtype, dict[str, tuple[Tensor, Tensor]]] = {}  # of several replays
        self._graph, self._tables = torch.cuda.CUDAGraph(), Tables(device)
        self._record(device)

    def check(self, batch: Sequence[Tensor], grid: Grid) -> None:
        """Refuse what the graph was not recorded for, before a step is counted.

        Raises:
            BadInput: Naming it, and the remedy.
        """
        if len(batch) != len(self._inputs):
            raise BadInput(
                f"expected {len(self._inputs)} tensors, as when the graph was recorded, found "
                f"{len(batch)}"
            )
        for i, (place, x) in enumerate(zip(self._inputs, batch, strict=True)):
            if x.shape[1:] != place.shape[1:] or len(x) > len(place):
                raise BadInput(
                    f"argument {i}: the graph was recorded for at most {len(place)} rows of shape "
                    f"{list(place.shape[1:])}, found {list(x.shape)}; record another, or give "
                    "make_private a max_physical_batch_size"
                )
        has_integers = any(values.dtype == torch.int32 for values, _ in self.shares.values())
        if has_integers and grid.dtype != torch.int32:
            raise BadInput(
                "the noise is so small that shares would have to be counted in more than 32 bits, "
                "which a recorded pass does not do: use a smaller max_physical_batch_size, "
                "clipping='grad_materialize', or no graph"
            )

    def replay(self, batch: Sequence[Tensor], num_real: int, grid: Grid) -> None:
        """Run the pass on a batch that was checked.

        Args:
            batch: As the loss takes it.
            num_real: How many of its rows count, the first ones.
            grid: To which kernels round the shares that they add up inside of one product.
        """
        for place, x in zip(self._inputs, batch, strict=True):
            place[: len(x)].copy_(x, non_blocking=True)
            if len(x) < len(place):
                place[len(x) :].zero_()
        self._num_real.fill_(num_real)
        self._spacing.fill_(grid.spacing)
        self._graph.replay()

    def added(self, grid: Grid, *, is_first: bool) -> dict[str, tuple[Tensor, Tensor]]:
        """Add the sums of the last replay to those of the replays before it.

        Args:
            grid: On which they lie; the same for all replays of a logical batch.
            is_first: Whether there are none.

        Returns:
            The sums as integers, each of which weighs a spacing, at the same place every time.
        """
        if grid.dtype not in self._sums:
            weight = torch.empty(1, dtype=torch.float64, device=self.loss.device)
            self._sums[grid.dtype] = {
                name: (values.new_empty(1, *values.shape[1:], dtype=grid.dtype), weight)
                for name, (values, _) in self.shares.items()
            }
        sums = self._sums[grid.dtype]
        next(iter(sums.values()))[1].fill_(grid.spacing)
        by_length: dict[int, list[str]] = {}
        for name, (values, _) in self.shares.items():
            by_length.setdefault(len(values), []).append(name)
        for names in by_length.values():
            combine(
                [self.shares[name][0] for name in names],
                stacked([self.shares[name][1] for name in names]),
                [sums[name][0] for name in names],
                add=not is_first,
                spacing=float(grid.spacing),
            )
        return sums

    def _record(self, device: torch.device) -> None:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), self._training.attachment.redirected(self):
            for number in range(NUM_WARM_UPS):
                # A recorded pass runs no Python: what its loss does is looked at once.
                with self._training.followed(self._inputs) if number == 0 else nullcontext():
                    self._run()
                self.shares = {}
            with tables_kept(self._tables), torch.cuda.graph(self._graph, stream=stream):
                self._run()
        self._tables.fill()
        torch.cuda.current_stream(device).wait_stream(stream)

    def _run(self) -> None:
        self.current = next(physical_batches(torch.arange(self.num_rows), step=0))
        losses = self._loss_of(*self._inputs)
        if losses.shape != (self.num_rows,):
            raise BadInput(
                f"expected one loss per row, [{self.num_rows}], found {list(losses.shape)}; "
                "unison.per_sample_loss gives them"
            )
        losses.sum().backward()
        is_real = self._is_real()
        total = losses.detach().masked_fill(~is_real, 0.0).sum()
        self.loss.copy_(total / self._num_real.clamp(min=1))

    def _is_real(self) -> Tensor:
        return self._rows < self._num_real

    def coefficients(
        self, batch: PhysicalBatch, part: Part, norms: Mapping[str, SampleNorms]
    ) -> tuple[Mapping[str, Tensor], Grid]:
        """Return a coefficient per row for each parameter, and the grid of shares."""
        if self.mean_was_used:  # over more rows than those of the pass
            raise BadInput("unison.batch_mean in a recorded pass: return one loss per row instead")
        table = NormTable.of(norms, part.num_rows)
        total = table.total()
        self.norms.copy_(total.squared.clamp(min=0).sqrt())
        is_real, own = self._is_real(), {}
        names = [each.name for each in self._training.owned]
        by_name = CLIP_RULES[self._training.clip_rule](table, total, self.clip_norm, names)
        for each in by_name.values():
            if id(each) not in own:
                own[id(each)] = each.where(is_real, 0.0)
        return {name: own[id(each)] for name, each in by_name.items()}, Grid(self._spacing)

    def add_sums(self, running: RunningPass) -> None:
        """Take what the clipped sums of a pass are made of."""
        shares = running.shares()
        assert shares is not None
        self.shares = shares


def _check_example(example: Sequence[Any]) -> None:
    if not example or not all(isinstance(x, Tensor) and x.is_cuda for x in example):
        raise BadInput(
            "capture_graph needs an example batch of CUDA tensors, as the loss takes them"
        )


@dataclass(frozen=True, eq=False)
class _Recording:
    """A graph, and what it was recorded with.

    Attributes:
        graph: The graph.
        tables: Memory that it reads, filled.
        shares: What the sums are made of, at fixed places.
        recipes: Where the noise's recipes are put; None without noise.
        gradients: What it writes, in the order of the shares.
        numbers: See `_numbers_of`; and the divisor.
        tensors: See `_tensors_of`.
    """

    graph: torch.cuda.CUDAGraph
    tables: Tables
    shares: Shares
    recipes: Tensor | None
    gradients: Sequence[Tensor]
    numbers: Sequence[Any]
    tensors: Sequence[Tensor]


class StepGraph:
    """Noise, division and `optimizer.step()`, recorded when they come for the second time.

    The first time they run as they are: most optimizers make their state in their first step, and a
    graph that made it would make it anew in every step.

    Args:
        optimizer: Its `step` is recorded.
        owned: The parameters, whole, on one CUDA device.

    Attributes:
        has_begun: Whether a step was taken without the graph.
    """

    def __init__(self, optimizer: Optimizer, owned: Sequence[ShardedParam]) -> None:
        _refuse_unfit(optimizer)
        self._optimizer, self._owned = optimizer, owned
        self._recordings: dict[int, _Recording] = {}
        self.has_begun = False

    def replay(
        self,
        source: int,
        shares: Callable[[], Shares],
        *,
        recipes: Tensor | None,
        divisor: float,
    ) -> Iterator[tuple[ShardedParam, Tensor]]:
        """Take the step, and return the gradients that it was taken with.

        Args:
            source: A number for what the sums are made of.
            shares: What they are made of, at places that do not change while the number is the
                same; asked for where a graph is recorded.
            recipes: See `recipes_for`.
            divisor: See `release_by`.
        """
        numbers = [*_numbers_of(self._optimizer), divisor, recipes is None]
        tensors = _tensors_of(self._optimizer)
        found = self._recordings.get(source)
        if found is None or not _is_of(found, numbers, tensors):
            self._recordings.pop(source, None)  # its memory, first
            found = self._recordings[source] = self._record(shares(), recipes, divisor, numbers)
        if recipes is None:
            found.graph.replay()
        else:
            assert found.recipes is not None
            pinned = recipes.pin_memory()
            recipes.zero_()
            found.recipes.copy_(pinned, non_blocking=True)
            found.graph.replay()
            erase(pinned, found.recipes)  # in which the graph has left zeros
        return zip(self._owned, found.gradients, strict=True)

    def _record(
        self, shares: Shares, recipes: Tensor | None, divisor: float, numbers: Sequence[Any]
    ) -> _Recording:
        device = shares.values[0].device
        place = None if recipes is None else torch.zeros_like(recipes, device=device)
        rates = rates_of(self._optimizer, self._owned) if recipes is not None else None
        graph, tables = torch.cuda.CUDAGraph(), Tables(device)
        if rates is None:
            release_by(shares, place, divisor)  # compiles and looks up what a recording cannot
            with tables_kept(tables), torch.cuda.graph(graph):
                gradients = release_by(shares, place, divisor)
                for owned, gradient in zip(self._owned, gradients, strict=True):
                    owned.parameter.grad = owned.as_gradient(gradient)
                self._optimizer.step()
        else:  # the kernels that add the noise take the optimizer's step as well
            rehearsed = adamw_rates(rates, torch.ones_like(rates[:, 0]))
            release_by(shares, place, divisor, lambda x: AdamWStep(x, x, x, rehearsed))
            tables.hold((rates,))
            with tables_kept(tables), torch.cuda.graph(graph):
                step = adamw_step(self._optimizer, self._owned, rates)
                gradients = release_by(shares, place, divisor, lambda _: step)
        tables.fill()
        tensors = _tensors_of(self._optimizer)
        return _Recording(graph, tables, shares, place, gradients, numbers, tensors)


# ---- AdamW in the kernels that add the noise -----------------------------------------------------
#
# What noise costs is arithmetic, and what AdamW costs is memory: in one kernel a part of one is
# hidden behind the other, and gradients are not read again.

LEAST_EPS = 1e-9  # beside which the root of a number that float32 holds no more is nothing


def rates_of(optimizer: Optimizer, owned: Sequence[ShardedParam]) -> Tensor | None:
    """Return learning rate, β1, β2, ε and weight decay of each parameter, float32 [parameters, 5].

    None if the step is not one that `AdamWStep` takes to the bit: another optimizer's, or of a
    version of torch that computes otherwise. A rate that is a tensor is read when the step is
    taken.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    if type(optimizer) is not torch.optim.AdamW or len(groups) != len(owned):
        return None
    rows, dtypes = [], set()
    for parameter in (each.parameter for each in owned):
        group, state = groups.get(id(parameter)), optimizer.state.get(parameter)
        if group is None or not state:
            return None
        tensors = parameter, state["exp_avg"], state["exp_avg_sq"]
        numbers = [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]
        if not (
            group["fused"]
            and group["capturable"]
            and not any(group[each] for each in ("amsgrad", "maximize", "differentiable"))
            and not any(isinstance(each, Tensor) for each in numbers[1:])
            and group["eps"] >= LEAST_EPS
            and parameter.dtype in (torch.float32, torch.bfloat16)
            and all(x.dtype == parameter.dtype and x.is_contiguous() for x in tensors)
            and all(x.data_ptr() % 16 == 0 for x in tensors)  # as what is rehearsed with
        ):
            return None
        rows.append([0.0 if isinstance(numbers[0], Tensor) else numbers[0], *numbers[1:]])
        dtypes.add((parameter.dtype, parameter.device))
    if not all(is_torchs_adamw(*each) for each in dtypes):
        return None
    return torch.tensor(rows, device=owned[0].parameter.device)


def adamw_step(optimizer: Optimizer, owned: Sequence[ShardedParam], rates: Tensor) -> AdamWStep:
    """Count a step of the optimizer, and return what it takes: see `rates_of`."""
    states = [optimizer.state[each.parameter] for each in owned]
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    given = [groups[id(each.parameter)]["lr"] for each in owned]
    if any(isinstance(each, Tensor) for each in given):
        rates = rates.clone()
        for row, rate in zip(rates, given, strict=True):
            if isinstance(rate, Tensor):
                row[0] = rate
    return AdamWStep(
        [each.parameter for each in owned],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        adamw_rates(rates, torch.stack(steps)),
    )


@cache
def is_torchs_adamw(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether steps of AdamW in our kernels have the bits of torch's, which is tried."""
    generator = torch.Generator(device).manual_seed(0)
    ours = nn.Parameter(torch.randn(1 << 14, device=device, generator=generator).to(dtype))
    theirs = nn.Parameter(ours.detach().clone())
    optimizer = torch.optim.AdamW([theirs], lr=3e-3, fused=True, capturable=True)
    mean, square = torch.zeros_like(ours), torch.zeros_like(ours)
    rates = torch.tensor([[3e-3, 0.9, 0.999, 1e-8, 1e-2]], device=device)
    values, out = torch.zeros(1, len(ours), device=device), torch.empty_like(ours)
    floats, one = secure_floats(0.03, noise_spacing(0.03)), torch.ones(1, 1, device=device)
    for t in range(1, 4):
        recipe = Recipe(Cipher.CHACHA20, (t,) * 10, Distribution.SECURE_NORMAL, floats).pack()
        counted = adamw_rates(rates, torch.full((1,), float(t), device=device))
        step = AdamWStep([ours.detach()], [mean], [square], counted)
        noise = recipe[None].to(device), [0]
        multi_tensor.release([values], one, noise, 1.0, [out.detach()], step)
        theirs.grad = out.detach()
        optimizer.step()
    state = optimizer.state[theirs]
    pairs = (ours, theirs), (mean, state["exp_avg"]), (square, state["exp_avg_sq"])
    return all(torch.equal(a, b) for a, b in pairs)


def _is_of(recording: _Recording, numbers: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    """Whether a recording would be made of these."""
    return (
        recording.numbers == numbers
        and len(recording.tensors) == len(tensors)
        and all(a is b for a, b in zip(recording.tensors, tensors, strict=True))
    )


def _numbers_of(optimizer: Optimizer) -> list[Any]:
    """What a recorded step would go on with, whatever is set later."""
    return [
        (key, value)
        for group in optimizer.param_groups
        for key, value in group.items()
        if key != "params" and not isinstance(value, Tensor)
    ]


def _tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """What a recorded step reads and writes: parameters, state, rates that are tensors."""
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        found += [value for value in group.values() if isinstance(value, Tensor)]
        for parameter in group["params"]:
            found.append(parameter)
            state = optimizer.state.get(parameter)
            if state:
                found += [value for value in state.values() if isinstance(value, Tensor)]
    return found


def _refuse_unfit(optimizer: Optimizer) -> None:
    """Refuse what a graph cannot repeat, before a step is silently left out.

    Raises:
        UnsupportedOperation: Naming the optimizer, and the remedy.
    """
    name = type(optimizer).__name__
    if not all(group.get("capturable", True) for group in optimizer.param_groups):
        raise UnsupportedOperation(
            f"{name} counts its steps on the host, which a CUDA graph cannot repeat: build it with "
            "capturable=True, or capture_graph(..., with_optimizer=False)"
        )
    hooks = chain(
        optimizer._optimizer_step_pre_hooks.values(),
        optimizer._optimizer_step_post_hooks.values(),
        _global_optimizer_pre_hooks.values(),
        _global_optimizer_post_hooks.values(),
    )
    # Our own know of recordings, or have nothing to say of private training.
    if not all(each.__module__.startswith("unison.") for each in hooks):
        raise UnsupportedOperation(
            f"{name} has step hooks, which a CUDA graph would call once and never again: remove "
            "them, or capture_graph(..., with_optimizer=False)"
        )


class RecordedPass:
    """Runs a recorded pass on batches of the loader: what `capture_graph` returns."""

    def __init__(
        self,
        training: "PrivateTraining",
        loss_of: LossOf,
        example: Sequence[Tensor],
        *,
        with_optimizer: bool,
    ) -> None:
        self._training = training
        self._step = StepGraph(training.optimizer, training.owned) if with_optimizer else None
        self._pass = training.record(loss_of, example)

    def __call__(self, *batch: Tensor) -> Tensor:
        """Run the pass on the batch in the user's hands, and return its loss."""
        with self._training.unfollowed():  # it was followed when it was recorded
            return self._run(*batch)

    def _run(self, *batch: Tensor) -> Tensor:
        training, recorded = self._training, self._pass
        current = training.loader.current
        if current is None:
            raise BadInput("expected a batch of the loader that make_private returned")
        running = training.running(current)
        if running.release.max_grad_norm != recorded.clip_norm:
            raise BadInput(
                f"the graph was recorded for max_grad_norm={recorded.clip_norm}, and this step has "
                f"{running.release.max_grad_norm}: record another"
            )
        release, size = running.release, current.logical_size
        grid = grid_of_pass(release, size, recorded.num_rows)
        recorded.check(batch, grid)
        # The device is at work while the host looks at the rest: nothing is out before the release.
        recorded.replay(batch, current.num_samples, grid)
        if current.is_last:
            training.check_trained()
            training.open_release(running, size)
        running.norms.append(recorded.norms[: current.num_samples].clone())
        first = current.first_position
        running.positions.append(torch.arange(first, first + current.num_samples))
        is_only = current.is_last and running.next_pass == 0
        own: Mapping[str, tuple[Tensor, Tensor]] = recorded.shares
        if not is_only:
            own = recorded.added(grid_of(release, size), is_first=running.next_pass == 0)
        running.next_pass += 1
        if current.is_last:
            self._release(running, own)
        return recorded.loss.clone()

    def _release(self, running: "LogicalBatch", own: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Noise, division, `.grad`; and the optimizer's step, if that is asked for."""
        training, step, terms = self._training, self._step, running.terms
        assert terms is not None
        if step is not None and step.has_begun:
            gradients = self._by_graph(step, own, terms)
        else:
            gradients = private_gradients(training.owner, own, terms)
        training.release(running, gradients)
        if step is not None:
            if not step.has_begun:
                training.optimizer.step()
                step.has_begun = True
            training.commit(is_by_graph=True)

    def _by_graph(
        self, step: StepGraph, own: Mapping[str, tuple[Tensor, Tensor]], terms: ReleaseTerms
    ) -> Iterator[tuple[ShardedParam, Tensor]]:
        """Make the gradients by a graph that takes the optimizer's step as well.

        Args:
            step: The graph.
            own: What the sums are made of: the same object, with the same tensors, whenever it is
                of the same kind.
            terms: Noise and division.
        """
        owner = self._training.owner
        recipes = recipes_for([each.name for each in owner.params], terms)
        found = step.replay(
            id(own), lambda: shares_of(owner, own), recipes=recipes, divisor=terms.divisor
        )
        for owned, gradient in found:
            owned.parameter.grad = None  # what it held is trained on: nothing is added to it
            yield owned, owned.as_gradient(gradient)
