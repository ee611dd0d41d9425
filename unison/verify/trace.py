"""Looks at a training loop while it runs, and writes down what it computes, step by step.

What is kept of each quantity, and why it does not tell the number of ranks, is [Note: a trace] in
quantities.py. Everything here happens in hooks: of modules, of the optimizer, of units and of
private training.
"""

import functools
import json
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from unison import check
from unison.errors import BadInput
from unison.parallel import MakeSums, ShardedParam, adapter_of, curvatures, private_trainings
from unison.shard import BatchPlan, PerGranule, current_plan, fingerprint, running_granule, units_of
from unison.torch_internals import canonical_name
from unison.verify import quantities

# ---- recording -----------------------------------------------------------------------------------


@contextmanager
def trace(
    file: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    num_values: int = quantities.NUM_VALUES,
    keep: Sequence[tuple[str, str]] = (),
    activations: bool = True,
    first_step: int = 0,
    notes: Mapping[str, Any] | None = None,
) -> Iterator["Tracer"]:
    """Write down what a training loop computes; see [Note: a trace]. Every rank must enter it.

    ```
    with unison.verify.trace("run.trace", model, optimizer) as tracer:
        for x, y in loader:
            optimizer.zero_grad()
            loss = tracer.loss(criterion(model(x), y))
            loss.backward()
            optimizer.step()
    ```

    The loop, the model and the optimizer are the user's: plain, sharded by unison or by torch,
    private (enter it after `make_private`) or with `unison.KFAC`. Gradients before their reduction
    are those of private training and of `unison.fully_shard`. A trace of private training holds
    per-sample norms and sums without noise: no ε covers it.

    Args:
        file: Where to write; the first rank does.
        model: What is trained.
        optimizer: Its steps are the trace's steps.
        num_values: Values that are kept of each tensor, at fixed places.
        keep: (rung, name) of quantities of which all values are kept.
        activations: Whether modules' outputs are looked at; inside compiled code they cannot be.
        first_step: The number of the first step that is seen.
        notes: What to say of the run; values that JSON can hold.

    Raises:
        BadInput: If the file cannot be written, or the model is traced already.
    """
    check.positive(num_values=num_values)
    check.not_negative(first_step=first_step)
    if model in _traced:
        raise BadInput("the model is traced already; leave one of the two `trace` blocks out")
    tracer = Tracer(model, optimizer, num_values, keep, first_step)
    _traced.add(model)
    try:
        tracer._begin(Path(file), notes or {}, activations=activations)
        yield tracer
    finally:
        _traced.discard(model)
        tracer._end()


_traced: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Tracer:
    """Looks at a training loop from hooks of its model and its optimizer; see `trace`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        num_values: int,
        keep: Sequence[tuple[str, str]],
        first_step: int,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._num_values, self._keep = num_values, set(keep)
        trained = {id(each) for each in model.parameters() if each.requires_grad}
        self._private = _who_trains(trained, private_trainings)
        self._kfac = _who_trains(trained, curvatures)
        self._adapter = self._private.owner if self._private else adapter_of(model)
        self._params = list(self._adapter.params)
        self._by_piece = {id(each.parameter): each for each in self._params}
        self._by_name = {each.name: each for each in self._params}
        self._parts: dict[tuple[str, str], quantities.Contribution] = {}
        self._calls: Counter[tuple[str, int]] = Counter()
        self._loss: float | None = None
        self._plan: BatchPlan | None = None  # of the pass under way
        self._step, self._handles = first_step, []
        self._totals: dict[str, Tensor] = {}
        self._divisor = 1.0
        self._file: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tracer":
        """Copies of the module, which are run to try it out, are seen by the same one."""
        return self

    def loss(self, loss: Tensor) -> Tensor:
        """Note the loss of a pass; returns it. Passes of one step are added up.

        Args:
            loss: A single number: the mean over the global batch, or this pass's share of it.
        """
        with _unseen():
            self._loss = (self._loss or 0.0) + float(loss.detach())
        return loss

    # --- begin and end ---------------------------------------------------------------------------

    def _begin(self, file: Path, notes: Mapping[str, Any], *, activations: bool) -> None:
        ranks = self._adapter.everyone
        error = None
        if ranks.rank == 0:
            try:
                self._file = file.open("w")
            except OSError as failed:
                error = f"{file} cannot be written: {failed.strerror}"
        if error := ranks.broadcast_object(error):
            raise BadInput(error)
        self._write(
            {
                "unison_trace": quantities.FORMAT,
                "num_ranks": ranks.size,
                "is_private": self._private is not None,
                "conditions": fingerprint(device=self._adapter.device),
                "notes": dict(notes),
            }
        )
        root = self._adapter.module
        self._sees_activations = activations
        for name, module in root.named_modules() if activations else [("", root)]:
            hook = functools.partial(self._see_module, canonical_name(name))
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        self._handles += [
            root.register_forward_pre_hook(self._see_call, prepend=True, with_kwargs=True),
            self._optimizer.register_step_pre_hook(self._see_gradients),
            self._optimizer.register_step_post_hook(self._see_step),
        ]
        for unit in units_of(root):
            unit.observer = self
        if self._private is not None:
            self._private.observer = self
        self._see_parameters("initial parameters", others=True)
        self._flush()

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        for unit in units_of(self._adapter.module):
            unit.observer = None
        if self._private is not None:
            self._private.observer = None
        if self._file is not None:
            self._file.close()

    def _write(self, made: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(made) + "\n")

    # --- hooks -----------------------------------------------------------------------------------

    def _is_looking(self, module: nn.Module) -> bool:
        """Whether a forward pass is one of training, and neither a trial nor a recompute."""
        if torch.compiler.is_compiling():
            return False
        is_aside = any(each is not None and each.is_aside for each in (self._private, self._kfac))
        is_recompute = torch._C._current_graph_task_id() != -1
        return not is_aside and not is_recompute and module.training and torch.is_grad_enabled()

    def _see_call(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self._is_looking(module):
            return
        self._calls.clear()
        # The plan that was published last may be of another loop, whose rows these are not.
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        dealt = [leaf.plan for leaf in leaves if isinstance(leaf, PerGranule)]
        self._plan = plan = next((each for each in dealt if each is not None), current_plan())
        if plan is not None and not dealt:
            sizes = {len(leaf) for leaf in leaves if leaf.dim()}
            if plan.is_granular or len(plan.sample_ids) not in sizes:
                self._plan = None

    def _see_module(
        self, name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
    ) -> None:
        if not self._is_looking(module):
            return
        if module is self._adapter.module:
            for number, leaf in enumerate(tree_leaves((args, kwargs))):
                if isinstance(leaf, Tensor):
                    self._see_rows("inputs", f"input {number}", leaf)
        if not self._sees_activations:
            return
        granule = running_granule()
        count = self._calls[name, granule or 0]
        self._calls[name, granule or 0] += 1
        title = (name or "model") + (f" (call {count + 1})" if count else "")
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for number, leaf in enumerate(tensors):
            self._see_rows("activations", title + (f"[{number}]" if number else ""), leaf, granule)

    def _see_gradients(self, *_: Any) -> None:
        """The optimizer is about to step: see what it finds."""
        with _unseen():
            for number, group in enumerate(self._optimizer.param_groups):
                for key in ("lr", "betas", "eps", "momentum", "weight_decay"):
                    if key in group:
                        name = f"{key} of group {number}"
                        self._see("settings", name, _number(group[key]))
            for owned in self._params:
                if owned.parameter.grad is not None:
                    self._see("gradients", owned.name, owned.gradient(), owned)

    def _see_step(self, *_: Any) -> None:
        """The optimizer has stepped, if there was a gradient: the logical batch was complete."""
        if all(owned.parameter.grad is None for owned in self._params):
            return
        with _unseen():
            if self._loss is not None:
                value = torch.tensor(self._loss, dtype=torch.float32)
                self._see("loss", "loss", value)
            if self._private is not None:
                norms = self._private.norms()  # a collective; every rank has those of all samples
                if self._adapter.everyone.rank == 0:
                    ids = torch.arange(len(norms))
                    self._add_rows("per-sample norms", "norm", norms, ids, len(norms))
            if self._kfac is not None:
                for layer in self._kfac.state_dict()["layers"]:
                    for key, each in layer["tensors"].items():
                        if isinstance(each, Tensor) and each.is_floating_point():
                            name = f"{layer['layer']['name']}: {key}"
                            is_factor = not key.startswith("graft")
                            rung = "curvature" if is_factor else "optimizer state"
                            self._see(rung, name, each)
            for owned in self._params:
                for key, value in self._optimizer.state.get(owned.parameter, {}).items():
                    if isinstance(value, Tensor) and value.dim():
                        name = f"{owned.name}: {key}"
                        self._see("optimizer state", name, _local(value), owned)
            self._see_parameters("updated parameters")
        self._flush()
        self._step, self._loss = self._step + 1, None

    # --- observer of units -----------------------------------------------------------------------

    def see_gradient(self, piece: nn.Parameter, granule: int, gradient: Tensor) -> None:
        """See this rank's gradient of a whole parameter, of one granule or of its rows."""
        owned = self._by_piece[id(piece)]
        with _unseen():
            index = quantities.Elements.all(owned.numel)
            # Granules are leaves of one tree, whoever computes them: their digests add up.
            digests = quantities.block_digests(gradient, index, salt=granule + 1)
            self._add_summand(owned, index, gradient, digests)

    def see_sum(self, piece: nn.Parameter, part: Tensor) -> None:
        """See this rank's part of the sum over ranks, divided [elements]."""
        with _unseen():
            owned = self._by_piece[id(piece)]
            self._see("gradients after reduction", owned.name, part, owned)

    # --- observer of private training ------------------------------------------------------------

    def see_pass(self, sums: Any, make_sums: MakeSums, grid: Any) -> MakeSums:
        """See a pass whose coefficients are known; returns what makes its sums."""
        with _unseen():
            for part in sums.parts:
                ids = torch.full((part.num_rows,), -1)
                ids[part.is_real] = part.positions
                alike: dict[int, str] = {}
                for name, values in sums.coefficients[part.granule].items():
                    alike.setdefault(id(values), name)
                for name, values in sums.coefficients[part.granule].items():
                    if alike[id(values)] == name:
                        title = name if len(alike) > 1 else "coefficient"
                        self._add_rows("coefficients", title, values, ids, sums.batch.logical_size)
        return functools.partial(self._make_sums, make_sums, grid)

    def _make_sums(
        self,
        make_sums: MakeSums,
        grid: Any,
        granule: int,
        names: Sequence[str],
        before: Sequence[Tensor | None] | None,
    ) -> list[Tensor | None]:
        """Make clipped sums (see `MakeSums`), and see this rank's summands."""
        old = [None if each is None else each.clone() for each in before or [None] * len(names)]
        made = make_sums(granule, names, before)
        with _unseen():
            for name, total, earlier in zip(names, made, old, strict=True):
                if total is None:
                    continue
                own = total if earlier is None else total - earlier.view_as(total)
                owned = self._by_name[name]
                index = quantities.Elements.of(owned, is_whole=True)
                digests = quantities.block_digests(own, index, is_linear=True)
                self._add_summand(owned, index, own.double() * grid.spacing, digests)
        return made

    def see_totals(
        self, totals: Sequence[tuple[ShardedParam, Tensor]], grid: Any, terms: Any
    ) -> None:
        """See the sums over all ranks, before they get noise; integers on the grid."""
        self._divisor = terms.divisor
        release = terms.release
        applied = {
            "noise multiplier σ": release.noise_std / release.max_grad_norm,
            "clip norm C": release.max_grad_norm,
            "divisor": terms.divisor,
        }
        with _unseen():
            for name, value in applied.items():
                self._see("settings", name, _number(value))
            for owned, total in totals:
                values = self._totals[owned.name] = (total.double() * grid.spacing).reshape(-1)
                digests = quantities.block_digests(
                    total, quantities.Elements.of(owned), is_linear=True
                )
                self._see("gradients after reduction", owned.name, values, owned, digests)

    def see_noisy(
        self, gradients: Iterable[tuple[ShardedParam, Tensor]]
    ) -> Iterator[tuple[ShardedParam, Tensor]]:
        """See private gradients as they are made; what was added to the sums is noise."""
        for owned, gradient in gradients:
            with _unseen():
                total = self._totals.pop(owned.name, None)
                if total is not None:
                    local = _local(gradient).detach().reshape(-1)
                    noise = local.double() * self._divisor - total
                    self._see("noise", owned.name, noise, owned)
            yield owned, gradient

    # --- what is kept ----------------------------------------------------------------------------

    def _part(
        self, rung: str, name: str, shape: Sequence[int], like: Tensor
    ) -> quantities.Contribution:
        if (rung, name) not in self._parts:
            dtype = str(like.dtype).removeprefix("torch.")
            self._parts[rung, name] = quantities.Contribution(tuple(shape), dtype)
        return self._parts[rung, name]

    def _count(self, rung: str, name: str) -> int:
        return 1 << 40 if (rung, name) in self._keep else self._num_values

    def _add_values(
        self,
        rung: str,
        name: str,
        part: quantities.Contribution,
        key: Any,
        index: quantities.Elements,
        value: Tensor,
    ) -> None:
        """Add the values at the places that are kept to those that are there."""
        wanted = quantities.positions(index.numel, self._count(rung, name))
        here, places = index.places(wanted)
        chosen = value.detach().reshape(-1)[torch.from_numpy(places.astype(np.int64))]
        values = part.values.setdefault(key, {})
        for place, each in zip(here.tolist(), chosen.double().tolist(), strict=True):
            values[place] = values.get(place, 0.0) + each

    def _add_summand(
        self, owned: ShardedParam, index: quantities.Elements, value: Tensor, digests: np.ndarray
    ) -> None:
        """Add what this rank adds to a sum over ranks."""
        rung, name = "gradients before reduction", owned.name
        part = self._part(rung, name, owned.shape, value)
        # Which ranks add up: one group of them for each place on other axes.
        group, own = self._adapter.ranks.group, self._adapter.everyone.rank
        first = own if group is None else min(dist.get_process_group_ranks(group))
        key = ("summand", first, index)
        part.blocks[key] = part.blocks.get(key, 0) + digests
        self._add_values(rung, name, part, key, index, value)

    def _see(
        self,
        rung: str,
        name: str,
        value: Tensor,
        owned: ShardedParam | None = None,
        digests: np.ndarray | None = None,
    ) -> None:
        """See a whole tensor, or this rank's part of something that lies as a parameter does."""
        whole = quantities.Elements.all(value.numel())
        index = whole if owned is None else quantities.Elements.of(owned)
        part = self._part(rung, name, value.shape if owned is None else owned.shape, value)
        key = ("part", None, index)
        part.blocks[key] = quantities.block_digests(value, index) if digests is None else digests
        part.squares[key] = float(value.detach().double().square().sum())
        self._add_values(rung, name, part, key, index, value)
        head = value.detach().reshape(-1)[: quantities.LENGTH_OF_HEAD].double().tolist()
        if rung in quantities.DRAWN and len(set(head)) == quantities.LENGTH_OF_HEAD:
            part.heads[key] = head

    def _see_parameters(self, rung: str, *, others: bool = False) -> None:
        with _unseen():
            for owned in self._params:
                self._see(rung, owned.name, owned.local.detach(), owned)
            if not others:
                return
            root = self._adapter.module
            frozen: dict[str, Any] = dict(root.named_parameters())
            for path, value in frozen.items():
                if not value.requires_grad:
                    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                    self._see(rung, canonical_name(path), whole)
            for path, value in root.named_buffers():
                if self._adapter.everyone.rank == 0 and value.numel():
                    self._see(rung, canonical_name(path), value)

    def _see_rows(self, rung: str, name: str, value: Tensor, granule: int | None = None) -> None:
        """See a tensor of which each row is a sample's, if it is one."""
        plan = self._plan
        with _unseen():
            if isinstance(value, PerGranule):
                pieces = list(enumerate(value.parts))
            else:
                pieces = [(granule, _local(value).as_subclass(Tensor))]
            for index, piece in pieces:
                if plan is None:
                    ranks = self._adapter.ranks
                    count = len(piece) if piece.dim() else 1
                    ids, total = torch.arange(count) + ranks.rank * count, count * ranks.size
                else:
                    ids, total = plan.sample_ids, plan.num_samples
                    if plan.is_granular:
                        if index is None:  # made of no sample: a table of positions
                            continue
                        ids = ids.split(plan.granule)[index]
                self._add_rows(rung, name, piece, ids, total)

    def _add_rows(self, rung: str, name: str, value: Tensor, ids: Tensor, num_rows: int) -> None:
        """Add rows, each a sample's [len(ids), ...]; other shapes are of no sample and left out."""
        if value.dim() == 0 or not len(ids) or value.shape[0] % len(ids) or not num_rows:
            return
        rows = value.detach().reshape(len(ids), -1)
        width = rows.shape[1]
        shape = tuple(value.shape[1:])
        shape = shape if value.shape[0] == len(ids) else (value.shape[0] // len(ids), *shape)
        part = self._part(rung, name, shape, value)
        part.num_rows = num_rows
        wanted = quantities.positions(num_rows * width, self._count(rung, name))
        bits = quantities.bits_of(rows).reshape(len(ids), -1)
        inside = np.arange(bits.shape[1], dtype=np.uint64)
        for place, row in enumerate(ids.tolist()):
            if row < 0:  # padding
                continue
            words = quantities.hashed(
                inside, quantities.words_of(bits[place], is_linear=False), is_linear=False
            )
            part.blocks[row] = int(words.sum(dtype=np.uint64))
            kept = np.flatnonzero((row * width <= wanted) & (wanted < (row + 1) * width))
            chosen = rows[place][torch.from_numpy(wanted[kept] - row * width)]
            part.values[row] = dict(zip(kept.tolist(), chosen.double().tolist(), strict=True))
            part.squares[row] = float(rows[place].double().square().sum())

    def _flush(self) -> None:
        """Bring the parts of all ranks together, and write the step; a collective."""
        ranks = self._adapter.everyone
        parts, self._parts = self._parts, {}
        of_all: list[Any] | None = [parts]
        if ranks.size > 1:
            of_all = [None] * ranks.size if ranks.rank == 0 else None
            dist.gather_object(parts, of_all, group=ranks.group, group_dst=0)
        if ranks.rank != 0:
            return
        assert of_all is not None
        names = dict.fromkeys(name for each in of_all for name in each)
        repeated = {rung: quantities.alike(rung, of_all) for rung in quantities.DRAWN}
        for rung, name in sorted(names, key=lambda each: quantities.RUNGS.index(each[0])):
            found = [each[rung, name] for each in of_all if (rung, name) in each]
            entry = quantities.merged(self._step, rung, name, found, self._count(rung, name))
            entry.repeats = name in repeated.get(rung, ())
            self._write(entry.as_json())
        self._file.flush()
        os.fsync(self._file.fileno())


def _who_trains(trained: set[int], trainers: Any) -> Any:
    """Return who among these trains any of the parameters; None if nobody does."""
    for each in trainers:
        if any(id(parameter) in trained for parameter in each.trained):
            return each
    return None


def _local(value: Any) -> Tensor:
    """This rank's part of a tensor that may be spread over ranks."""
    return value.to_local() if hasattr(value, "to_local") else value


def _number(value: Any) -> Tensor:
    """A setting as a tensor: a number, or a pair of them."""
    return torch.as_tensor(value, dtype=torch.float64).detach().cpu()


@contextmanager
def _unseen() -> Iterator[None]:
    """Let nobody who follows torch's functions see what is done here."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield
