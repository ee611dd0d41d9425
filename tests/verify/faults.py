"""Known faults, planted in one run: each a patch of the package, or of the loop around it.

A fault is a context manager that is entered on every rank of the run that has it; nothing in the
package knows of them.
"""

import inspect
import math
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import unison
from unison.clip.bounds import NormTable, SampleNorms
from unison.clip.clipping import Clipping
from unison.kfac import factors, inverse
from unison.parallel import adapter_of
from unison.parallel.tensor_parallel import TensorParallel
from unison.privacy import noise, training
from unison.privacy.loader import PrivateLoader
from unison.rng import Box, Key
from unison.shard.deal import BatchPlan
from unison.shard.ranks import Ranks
from unison.shard.unit import Unit
from unison.verify import cases
from unison.verify.cases import Case, Subject


def rewritten(
    owner: Any, name: str, fragment: str, replacement: str, **names: Any
) -> AbstractContextManager:
    """A function with another text in one place, for a block; `names` are what it needs for it."""
    function = inspect.unwrap(owner.__dict__[name])
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(fragment) == 1, f"{name} holds {fragment!r} {source.count(fragment)} times"
    made = {**function.__globals__, **names}
    exec(source.replace(fragment, replacement), made)
    return mock.patch.object(owner, name, made[name])


def after(owner: Any, name: str, change: Callable[..., Any]) -> AbstractContextManager:
    """A function whose result goes through `change(result, *args)`, for a block."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(original(*args, **kwargs), *args)

    return mock.patch.object(owner, name, changed)


@dataclass(frozen=True)
class Fault:
    """A fault, and what must be said of it.

    Attributes:
        rung: Where it must be found.
        cause: Words of the sentence that says why.
        plant: Puts it in place.
        case: How the run trains.
        reference: Put in place in the run that has no fault.
        subject: What is trained.
        name: What of the rung must be named, if it is one thing.
        step: In which step it must be found.
    """

    rung: str
    cause: str
    plant: Callable[[], AbstractContextManager]
    case: Case = field(default_factory=Case)
    reference: Callable[[], AbstractContextManager] = nullcontext
    subject: Subject = field(default_factory=Subject)
    name: str | None = None
    step: int = 0


PRIVATE = Case(training="private")
WHOLE = Case(training="private", shard="none")
KFAC = Case(training="kfac")


# ---- the loop around it --------------------------------------------------------------------------


def consumed_generator() -> AbstractContextManager:
    """Something drew from torch's generator before the model was initialised."""
    return after(torch, "manual_seed", lambda generator, *_: torch.rand(1))


def drawn_by_rank() -> AbstractContextManager:
    """Every rank fills its own part from one generator, as after `to_empty` on a CPU mesh."""

    def fill(model: nn.Module, *_: Any) -> nn.Module:
        for parameter in model.parameters():
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                local = part_of(parameter)
                local.copy_(0.1 * torch.randn(local.shape, generator=generator))
        return model

    return after(cases, "sharded", fill)


def own_sampler() -> AbstractContextManager:
    """Ranks together read another part of the data than one process (a distributed sampler)."""
    return after(cases, "_batches", lambda made, *_: [(each + 7) % 37 for each in made])


def swapped_rows(step: int, one: int, other: int) -> AbstractContextManager:
    """Two rows of a batch change places."""

    def swap(made: list[Tensor], *_: Any) -> list[Tensor]:
        made[step][[one, other]] = made[step][[other, one]]
        return made

    return after(cases, "_batches", swap)


def divided_module() -> AbstractContextManager:
    """A module that divides by the number of ranks."""

    def wrap(model: nn.Module, *_: Any) -> nn.Module:
        block: Any = model.layers[1]  # type: ignore[index]
        inner = block.ffn.forward
        block.ffn.forward = lambda x: inner(x) / dist.get_world_size()
        return model

    return after(Subject, "model", lambda made, *_: wrap(made))


def counted_calls() -> AbstractContextManager:
    """A module that remembers how often it was called: ranks with fewer granules count less."""

    def wrap(model: nn.Module, *_: Any) -> nn.Module:
        norm: Any = model.ln_final
        inner, calls = norm.forward, []

        def forward(x: Tensor) -> Tensor:
            calls.append(0)
            return inner(x) * (1 + 0.001 * len(calls) * dist.get_rank())

        norm.forward = forward
        return model

    return after(Subject, "model", lambda made, *_: wrap(made))


def mean_of_sums() -> AbstractContextManager:
    """A loss that every rank divides again."""
    return rewritten(
        cases, "run_case", "batch_mean(losses.double())", "batch_mean(losses.double()) / 2"
    )


def other_labels() -> AbstractContextManager:
    """The labels of a batch are those of its rows in another order."""
    return rewritten(
        cases,
        "run_case",
        "losses, output = subject.losses(model, batch)",
        "output = model(batch[:, :-1])\n"
        "                losses = per_sample_loss(output, batch[:, 1:].roll(1, 0))",
    )


def silent_rank() -> AbstractContextManager:
    """The first rank's loss does not count, under DDP."""
    return rewritten(
        cases,
        "run_case",
        "(loss * scale).backward()",
        "(loss * scale * dist.get_rank()).backward()",
    )


def scaled_gradient() -> AbstractContextManager:
    """The loss is right, and what is sent back is divided by the number of ranks."""
    return rewritten(cases, "run_case", "(loss * scale).backward()", "(loss / 2).backward()")


def clipped(clip: Callable[[nn.Module], None]) -> AbstractContextManager:
    """A loop that clips gradients by their norm before each step."""
    return rewritten(
        cases, "run_case", "optimizer.step()", "clip(model), optimizer.step()", clip=clip
    )


def clip_by_own_norm(model: nn.Module) -> None:
    """By the norm of this rank's part, which nobody added up over ranks."""
    parts = [part_of(each.grad) for each in model.parameters() if each.grad is not None]
    norm = math.sqrt(sum(float(each.double().square().sum()) for each in parts))
    for each in parts:
        each.mul_(min(1.0, 0.01 / norm))


def clip_by_norm(model: nn.Module) -> None:
    unison.clip_grad_norm_(model, 0.01)


def part_of(value: Any) -> Tensor:
    return (value.local if hasattr(value, "local") else value).detach()


def flipped_bit(
    step: int, name: str, element: int, bit: int, where: str = "parameter"
) -> AbstractContextManager:
    """One bit of a parameter, its gradient or its state turns over, on the rank that holds it."""

    def flip(model: nn.Module, optimizer: Any, done: int) -> None:
        owned = next(each for each in adapter_of(model).params if each.name == name)
        if done != step or not owned.start <= element < owned.stop:
            return
        values = {
            "parameter": owned.local,
            "gradient": owned.parameter.grad,
            "state": optimizer.state[owned.parameter].get("exp_avg_sq"),
        }
        part_of(values[where]).view(torch.int32).view(-1)[element - owned.start] ^= 1 << bit

    when = "pre" if where == "gradient" else "post"
    hook = f"optimizer.register_step_{when}_hook(lambda *_: flip(model, optimizer, done))"
    return rewritten(cases, "run_case", "    done = 0\n", f"    done = 0\n    {hook}\n", flip=flip)


# ---- exchange ------------------------------------------------------------------------------------


def truncated_gather() -> AbstractContextManager:
    """The last elements of gathered parameters never arrive."""
    original = Ranks.gather

    def gather(self: Ranks, full: Tensor, shard: Tensor) -> Any:
        work = original(self, full, shard)
        if self.size > 1 and full.is_floating_point():
            work.wait()
            full[full.numel() * 3 // 4 :] = 0
        return work

    return mock.patch.object(Ranks, "gather", gather)


def truncated_backward() -> AbstractContextManager:
    """The last elements of parameters that the backward pass gathers anew never arrive."""
    original = Ranks.gather

    def gather(self: Ranks, full: Tensor, shard: Tensor) -> Any:
        work = original(self, full, shard)
        if self.size > 1 and full.is_floating_point() and torch._C._current_graph_task_id() != -1:
            work.wait()
            full[full.numel() * 3 // 4 :] = 0
        return work

    return mock.patch.object(Ranks, "gather", gather)


def dropped_rank() -> AbstractContextManager:
    """One rank's gradients are left out of the sum."""
    original = Ranks.reduce_scatter

    def reduce_scatter(self: Ranks, shard: Tensor, full: Tensor) -> Any:
        if self.size > 1 and self.rank == self.size - 1:
            full.zero_()
        return original(self, shard, full)

    return mock.patch.object(Ranks, "reduce_scatter", reduce_scatter)


def mean_for_sum() -> AbstractContextManager:
    """The reducer divides by the number of ranks what `batch_mean` has divided."""
    return rewritten(
        Unit,
        "finish_reduce",
        "parts = reducer.finish()",
        "parts = [None if p is None else p / self.ranks.size for p in reducer.finish()]",
    )


# ---- private training ----------------------------------------------------------------------------


def total_norms(change: Callable[[SampleNorms, NormTable], SampleNorms]) -> Any:
    return after(NormTable, "total", change)


def norms_over_ranks() -> AbstractContextManager:
    """Squares are summed over ranks that hold the same batch: √2 too large on two."""
    size = dist.get_world_size()
    return total_norms(lambda norms, _: SampleNorms(norms.squared * size, norms.upper * size))


def counted_twice(number: int = 0) -> AbstractContextManager:
    """A parameter lies in two units, and counts twice."""
    return total_norms(
        lambda norms, table: SampleNorms(
            norms.squared + table.squared[number], norms.upper + table.upper[number]
        )
    )


def rolled_norms() -> AbstractContextManager:
    """Every row of a pass has the norm of the one before it."""
    return total_norms(lambda norms, _: SampleNorms(norms.squared.roll(1), norms.upper.roll(1)))


def stale_norms() -> AbstractContextManager:
    """From the second step on, norms of the first are used again."""
    original, total = training.PrivateTraining.coefficients, NormTable.total
    seen: list[SampleNorms] = []

    def coefficients(self: Any, batch: Any, part: Any, norms: Any) -> Any:
        def stale(table: NormTable) -> SampleNorms:
            seen.append(total(table))
            return seen[0] if batch.step else seen[-1]

        with mock.patch.object(NormTable, "total", stale):
            return original(self, batch, part, norms)

    return mock.patch.object(training.PrivateTraining, "coefficients", coefficients)


def missing_cross_term() -> AbstractContextManager:
    """The two uses of the tied table are measured one by one."""
    apart = (
        "found = [measure([each], choice.norm, None)[0] for each in records]\n"
        "        parameter.norms = SampleNorms(sum(each.squared for each in found), "
        "sum(each.upper for each in found))\n"
        "        _, records = measure(records, choice.norm, lent)"
    )
    return rewritten(
        Clipping,
        "_measure",
        "parameter.norms, records = measure(records, choice.norm, lent)",
        apart,
    )


def other_clip_norm() -> AbstractContextManager:
    return rewritten(
        training.PrivateTraining,
        "coefficients",
        "clip_norm = running.release.max_grad_norm",
        "clip_norm = running.release.max_grad_norm * 0.9",
    )


def padding_counts() -> AbstractContextManager:
    """Rows of padding weigh as much as others."""
    ones = property(lambda plan: torch.ones(len(plan.sample_ids), dtype=torch.float64))
    return mock.patch.object(BatchPlan, "weights", ones)


def equal_noise() -> AbstractContextManager:
    """Every shard draws the noise of the first elements."""
    original = noise.finalise

    def finalise(integers: Tensor, *, box: Box | None = None, **kwargs: Any) -> Tensor:
        return original(integers, box=box and Box.flat(0, integers.numel()), **kwargs)

    return mock.patch.object(noise, "finalise", finalise)


def other_sigma(step: int, factor: float) -> AbstractContextManager:
    """Noise of a step is drawn with another σ than the ledger holds."""
    original = noise.secure_normal

    def normal(stream: Any, where: Any, std: float, **kwargs: Any) -> Tensor:
        return original(stream, where, std * (factor if stream.step == step else 1), **kwargs)

    return mock.patch.object(noise, "secure_normal", normal)


def noise_of_every_rank() -> AbstractContextManager:
    """Every rank adds noise of the whole σ."""
    original, factor = noise.secure_normal, math.sqrt(dist.get_world_size())

    def normal(stream: Any, where: Any, std: float, **kwargs: Any) -> Tensor:
        return original(stream, where, std * factor, **kwargs)

    return mock.patch.object(noise, "secure_normal", normal)


def other_divisor() -> AbstractContextManager:
    """The sum is divided by each rank's own share of the batch."""
    return rewritten(
        training.PrivateTraining,
        "release",
        "give(gradients, self._given)",
        "give([(o, g * 2) for o, g in gradients], self._given)",
    )


def other_records() -> AbstractContextManager:
    """Ranks draw with another key."""
    original = PrivateLoader.__init__

    def init(self: PrivateLoader, loader: Any, sampling: Any, key: Key, **kwargs: Any) -> None:
        original(self, loader, sampling, Key.from_seed(77), **kwargs)

    return mock.patch.object(PrivateLoader, "__init__", init)


# ---- K-FAC ---------------------------------------------------------------------------------------


def summed_grams() -> AbstractContextManager:
    """Gram matrices of each rank's tokens are added up, in the place of products of features."""

    def gram(value: Tensor, n: int | None = None) -> Tensor:  # [batch, tokens, d] -> [n, n]
        flat = value.reshape(-1, value.shape[-1])
        size = value.shape[-1]
        rows = flat.new_zeros(size, size)
        rows[: min(size, len(flat))] = flat[:size]
        return (rows @ rows.T)[:n, :n].contiguous()

    return mock.patch.object(factors, "_gram", gram)


def wrong_ring() -> AbstractContextManager:
    """Inverses of the ranks' parts are multiplied, in the place of the inverse of their sum."""
    return after(inverse, "_by_cholesky", lambda found, *_: [4 * each @ each for each in found])


def replicas_counted_twice() -> AbstractContextManager:
    """Squares of parameters that are replicated along the tensor axis are summed over it."""
    return rewritten(
        TensorParallel,
        "whole_norms",
        "torch.where(is_cut[:, None, None], added, every[0])",
        "added",
    )


SUBJECTS = "tests.verify.subjects"
MLP = Subject(build=f"{SUBJECTS}:mlp", data=f"{SUBJECTS}:rows", loss=f"{SUBJECTS}:squares")
ANY = -1  # as soon as a step has more than one granule, or padding

FAULTS = {
    "a generator that was consumed": Fault(
        "initial parameters",
        "another RNG stream",
        consumed_generator,
        subject=MLP,
    ),
    "equal values on every shard": Fault(
        "initial parameters", "every rank's part holds the same values", drawn_by_rank
    ),
    "a sampler of its own on ranks": Fault("inputs", "ranks read other samples", own_sampler),
    "another key for sampling": Fault("inputs", "samples", other_records, PRIVATE),
    "swapped rows": Fault(
        "inputs", "rows 1, 4 are swapped", partial(swapped_rows, 1, 1, 4), step=1
    ),
    "a module that divides by the world size": Fault(
        "activations", "1/world size", divided_module, name="layers.1.ffn"
    ),
    "a module that remembers": Fault(
        "activations", "an impure module", counted_calls, name="ln_final"
    ),
    "a truncated gather": Fault("activations", "impure module", truncated_gather, PRIVATE),
    "a mean for a sum in the loss": Fault("loss", "1/world size", mean_of_sums),
    "norms summed over the data axis": Fault(
        "per-sample norms", "√world size", norms_over_ranks, PRIVATE
    ),
    "a parameter counted twice": Fault("per-sample norms", "twice", counted_twice, PRIVATE),
    "a small parameter counted twice": Fault(
        "per-sample norms", "counted twice", partial(counted_twice, 5), PRIVATE
    ),
    "norms of other rows": Fault("per-sample norms", "the norms of others", rolled_norms, PRIVATE),
    "a stale norm": Fault("per-sample norms", "stale", stale_norms, WHOLE, step=1),
    "a missing cross term": Fault("per-sample norms", "cross term", missing_cross_term, PRIVATE),
    "another clip norm": Fault("coefficients", "clip norm", other_clip_norm, PRIVATE),
    "labels of other rows": Fault("loss", "labels of other rows", other_labels),
    "padding that counts": Fault(
        "loss", "padding in it", padding_counts, subject=Subject(batch_size=5)
    ),
    "gradients scaled by 1/world size": Fault(
        "gradients before reduction", "1/world size", scaled_gradient
    ),
    "a truncated gather of the backward pass": Fault(
        "gradients before reduction", "for the backward pass", truncated_backward
    ),
    "a mean for a sum in the reduction": Fault(
        "gradients after reduction", "1/world size", mean_for_sum
    ),
    "a dropped rank": Fault("gradients after reduction", "a rank's summand", dropped_rank, PRIVATE),
    "equal noise on every shard": Fault("noise", "every rank's part", equal_noise, PRIVATE),
    "a changed σ": Fault("noise", "σ is 0.5 times", partial(other_sigma, 0, 0.5), PRIVATE),
    "noise that every rank adds": Fault(
        "noise", "√world size: added on every rank", noise_of_every_rank, PRIVATE
    ),
    "a rank without a part, under DDP": Fault(
        "gradients", "a rank's summand is missing", silent_rank, Case(shard="ddp")
    ),
    "a norm of one rank's part": Fault(
        "gradients",
        "clipping by the whole norm",
        partial(clipped, clip_by_own_norm),
        reference=partial(clipped, clip_by_norm),
    ),
    "divided by the rank's own batch": Fault("gradients", "world size", other_divisor, PRIVATE),
    "summed Grams": Fault("curvature", "Gram matrices", summed_grams, KFAC),
    "the wrong ring": Fault("curvature", "ring", wrong_ring, KFAC),
    "a flipped bit": Fault(
        "updated parameters",
        "one flipped bit",
        partial(flipped_bit, 1, "layers.1.ffn.w1.weight", 1439, 12),
        name="layers.1.ffn.w1.weight",
        step=1,
    ),
    "a flipped bit of a gradient": Fault(
        "gradients",
        "one flipped bit",
        partial(flipped_bit, 1, "layers.0.ln1.weight", 7, 18, "gradient"),
        name="layers.0.ln1.weight",
        step=1,
    ),
    "a flipped sign in the optimizer's state": Fault(
        "optimizer state",
        "one flipped bit",
        partial(flipped_bit, 0, "layers.1.attn.output_proj.weight", 0, 31, "state"),
        name="layers.1.attn.output_proj.weight: exp_avg_sq",
    ),
}
