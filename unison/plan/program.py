"""One step of training, as unison runs it, with a meter around it.

`measure` is the program: build, shard, make private or precondition, step. It runs on real ranks
as on the meta device; `simulate` runs it there, for one rank of a world that exists only by number.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._prims import rng_prims
from torch.fx import GraphModule, Interpreter, Node
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from unison import check, shard
from unison.config import CLIPPINGS, PRECISIONS
from unison.errors import BadInput, UnisonError
from unison.kfac import KFAC, KFACConfig
from unison.models import per_sample_loss, token_loss_sums
from unison.plan import meter as meter_module
from unison.plan.meter import HOST, OFFLOADED, Meter, Usage
from unison.privacy import PrivacyEngine, Shuffled
from unison.torch_internals import machine_of, without_values

SHARDS = ("full", "zero2", "hybrid")
OFFLOADS = ("params", "optimizer", "grads")
MOST_RANKS = 1 << 16
MOST_TOKENS = 1 << 26  # of a pass on one rank, whose ids are made on the host
WARM_UP = 1  # steps before the one that counts: they make the states of the optimizer

Build = Callable[[], nn.Module]
"""Builds the model; it is called under `unison.meta_init`, where nothing has memory."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How one rank takes a step.

    Attributes:
        world_size: Number of ranks.
        rows: Rows of a pass on each rank.
        row_length: Tokens of a row.
        vocab_size: Token ids are below it.
        shard: full (ZeRO-3), zero2, or hybrid, which keeps several copies.
        replicas: Copies of the model with hybrid.
        passes: Passes of a logical batch; each adds to the gradient.
        precision: bf16 gathers, computes and keeps activations in bfloat16; shards stay float32.
        clipping: How a private step clips; None for an ordinary one.
        kfac: Whether K-FAC preconditions the gradient.
        lora: Rank of the adapters that are trained in the place of all else; 0 for none.
        checkpoint_activations: Whether blocks keep their inputs only, and compute again.
        offload: What lives in the host's memory.
        compiled: Whether blocks go through torch.compile.
    """

    world_size: int = 1
    rows: int = 1
    row_length: int = 1024
    vocab_size: int = 50_257
    shard: str = "full"
    replicas: int = 2
    passes: int = 1
    precision: str = "fp32"
    clipping: str | None = None
    kfac: bool = False
    lora: int = 0
    checkpoint_activations: bool = False
    offload: frozenset[str] = frozenset()
    compiled: bool = False

    def __post_init__(self) -> None:
        check.positive(world_size=self.world_size, rows=self.rows, row_length=self.row_length)
        check.positive(passes=self.passes, replicas=self.replicas)
        check.not_negative(lora=self.lora)
        check.one_of(SHARDS, shard=self.shard)
        check.one_of(PRECISIONS, precision=self.precision)
        if self.clipping is not None:
            check.one_of(CLIPPINGS, clipping=self.clipping)
        for each in self.offload:
            check.one_of(OFFLOADS, offload=each)
        if self.offload and "optimizer" not in self.offload:
            raise BadInput(
                "the optimizer steps where the shards are, so that --offload params or grads needs "
                "optimizer too: --offload params,optimizer"
            )
        if self.kfac and self.clipping is not None:
            raise BadInput("--kfac and --private do not go together; leave one of them out")
        if self.world_size > MOST_RANKS:
            raise BadInput(f"at most {MOST_RANKS:,} GPUs are planned for, found {self.world_size}")
        if self.rows * self.row_length > MOST_TOKENS:
            raise BadInput(
                f"at most {MOST_TOKENS:,} tokens of a pass on each GPU are planned for, found "
                f"{self.rows} rows of {self.row_length}"
            )
        if self.shard == "hybrid" and self.world_size % self.replicas:
            raise BadInput(
                f"replicas={self.replicas} must divide the number of GPUs, {self.world_size}"
            )


class Rows(Dataset):
    """Rows of distinct tokens, made when they are read: (input ids, labels)."""

    def __init__(self, num_rows: int, scenario: Scenario) -> None:
        self._num_rows, self._scenario = num_rows, scenario

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One row, shifted by its number."""
        ids = torch.arange(index, index + self._scenario.row_length + 1)
        ids = ids % self._scenario.vocab_size
        return ids[:-1], ids[1:]


def simulate(
    build: Build, scenario: Scenario, *, machine: str = "cuda", memory: int | None = None
) -> Usage:
    """Count what a step takes on one rank, without its memory, its values and its other ranks.

    Args:
        build: Builds the model.
        scenario: How a step is taken.
        machine: The kind of device whose choices are made.
        memory: Bytes that it has, which clipping `"auto"` may use; None for no bound.
    """
    if dist.is_initialized():
        raise BadInput("a plan needs a process of its own, found one that has joined a group")
    import_module("torch.testing._internal.distributed.fake_pg")  # the backend "fake"
    dist.init_process_group("fake", rank=0, world_size=scenario.world_size, store=dist.HashStore())
    try:
        with without_values(machine, memory):
            return measure(build, scenario, torch.device("meta"))
    finally:
        dist.destroy_process_group()


def count_trained(build: Build, lora: int = 0) -> int:
    """Count the elements that a model trains, or its adapters.

    Raises:
        BadInput: If it is no module, or trains nothing.
    """
    with shard.meta_init():
        model = build()
    if not isinstance(model, nn.Module):
        raise BadInput(f"expected a function that builds a module, found {type(model).__name__}")
    if lora:
        with shard.meta_init():
            add_lora(model, lora)
    lazy = [name for name, each in model.named_parameters() if nn.parameter.is_lazy(each)]
    if lazy:
        raise BadInput(
            f"{lazy[0]} of {type(model).__name__} has no shape before a first batch; build it with "
            "its sizes (nn.Linear in the place of nn.LazyLinear)"
        )
    count = sum(each.numel() for each in model.parameters() if each.requires_grad)
    if count == 0:
        raise BadInput(f"{type(model).__name__} has no parameter that is trained")
    return count


def check_forward(build: Build, scenario: Scenario) -> None:
    """Make sure that a model can be fed ids alone, and gives logits.

    Raises:
        BadInput: If not.
    """
    with shard.meta_init():
        model = build()
    shape = scenario.rows, scenario.row_length
    wanted = (
        f"a plan calls forward(ids) with ids of shape {list(shape)} and trains on the logits "
        "[rows, tokens, vocabulary] or [rows, classes] that it returns, alone, first of a tuple or "
        "as `logits`"
    )
    try:
        with without_values("cuda"), Meter("meta").counting():
            output = model(torch.zeros(shape, dtype=torch.int64, device="meta"))
    except UnisonError:
        raise
    except Exception as error:
        raise BadInput(f"{type(model).__name__} failed, {first_line(error)}; {wanted}") from error
    logits = _logits_of(output)
    is_tensor = isinstance(logits, Tensor) and logits.requires_grad
    if not is_tensor or logits.ndim not in (2, 3) or logits.shape[0] != shape[0]:
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        what = "a gradient" if isinstance(logits, Tensor) and not is_tensor else "such logits"
        raise BadInput(f"{type(model).__name__} returned {found} without {what}; {wanted}")
    if logits.ndim == 3 and logits.shape[1] > shape[1]:
        raise BadInput(f"{type(model).__name__} returned {list(logits.shape)}; {wanted}")


def first_line(error: BaseException) -> str:
    """What an exception of somebody else's says, in one line."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else 'without a message'}"


def _logits_of(output: Any) -> Any:
    """Find the logits in what a forward pass returned."""
    if isinstance(output, Mapping):  # as the outputs of transformers are
        output = output.get("logits")
    output = getattr(output, "logits", output)
    return output[0] if isinstance(output, tuple | list) and output else output


def measure(build: Build, scenario: Scenario, device: torch.device) -> Usage:
    """Run a few steps on this rank, and count what the last one takes; every rank must call it."""
    meter = Meter(device.type)
    with stepper(build, scenario, device, meter, meter.counting()) as step:
        for _ in range(WARM_UP):
            step(False)
        meter.begin()
        step(True)
        return meter.finish()


@contextmanager
def stepper(
    build: Build,
    scenario: Scenario,
    device: torch.device,
    meter: Meter,
    counting: AbstractContextManager[Any] | None = None,
    num_steps: int = WARM_UP + 1,
) -> Iterator[Callable[[bool], None]]:
    """Give a function that takes one step, with or without all that leaves no memory behind.

    Args:
        build: Builds the model.
        scenario: How a step is taken.
        device: Where.
        meter: Is told what is what, and where in the step we are.
        counting: Entered once the model is sharded, before anything else is made.
        num_steps: How many there are rows for.
    """
    with ExitStack() as stack:
        with shard.meta_init():  # no rank ever holds more than its part
            model = build()
            if scenario.lora:
                add_lora(model, scenario.lora)
        blocks = shard.find_blocks(model)
        if scenario.checkpoint_activations:
            for block in blocks:
                block.forward = functools.partial(  # type: ignore[method-assign]
                    checkpoint, block.forward, use_reentrant=False
                )
        shard.auto_shard(model, **_sharding(scenario, device))
        if device.type != "meta":
            shard.materialize(model, seed=0, device=device)
        if scenario.compiled:
            compiler = metered_backend(meter) if device.type == "meta" else "inductor"
            for block in blocks:
                block.compile(backend=compiler)
        stack.enter_context(counting or nullcontext())
        is_hosted = bool(scenario.offload)
        meter.assign("parameters", model.buffers())
        meter.assign(OFFLOADED if is_hosted else "parameters", model.parameters())
        for group in (group for unit in shard.units_of(model) for group in unit.groups):
            meter.assign("gathered", [] if group.is_alias else [group.full])
        names = {module: name for name, module in model.named_modules()}
        for block in [] if scenario.compiled else blocks:  # hooks would be compiled too
            mark = functools.partial(_mark_place, meter, names[block])
            block.register_forward_pre_hook(mark)
            block.register_forward_hook(mark)
        trained = [each for each in model.parameters() if each.requires_grad]
        # Torch takes all parameters at once on a GPU; it does not know what the meta device is.
        at_once = True if machine_of(device) == "cuda" and not is_hosted else None
        optimizer: Optimizer = (SGD if scenario.kfac else AdamW)(trained, lr=1e-3, foreach=at_once)
        num_rows = scenario.world_size * scenario.rows * scenario.passes
        data = Rows(num_rows * num_steps, scenario)
        kfac, engine = None, None
        if scenario.kfac:
            kfac = KFAC(model, KFACConfig(), optimizer)
            stack.callback(kfac.detach)
        if scenario.clipping is None:
            loader = DataLoader(data, num_rows)
            batches = iter(shard.deal(loader, micro_batch=scenario.rows))
        else:
            engine = PrivacyEngine(secure_noise=False)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="noise and sampling come from a seed")
                _, _, private = engine.make_private(
                    module=model,
                    optimizer=optimizer,
                    data_loader=DataLoader(data, num_rows, shuffle=True, drop_last=True),
                    noise_multiplier=1.0,
                    max_grad_norm=1.0,
                    clipping=scenario.clipping,
                    sampling=Shuffled(batch_size=num_rows, num_records=len(data)),
                    max_physical_batch_size=scenario.rows,
                    recheck=False,  # what counts is a step like most others
                    calibrate=False,  # timings are of a device, and several ranks have none
                    seed=0,
                )
            stack.callback(engine.detach)
            stack.callback(private.abandon)
            batches = iter(private)

        def run_pass(ids: Tensor, labels: Tensor) -> None:
            meter.enter_place("forward")
            ids, labels = ids.to(device, copy=True), labels.to(device, copy=True)
            logits = _logits_of(model(ids))
            if logits.ndim == 2:  # one label a row, of fewer classes than there are tokens
                logits, labels = logits.unsqueeze(1), labels % logits.shape[1]
            labels = labels[:, : logits.shape[1]]
            meter.enter_place("loss")
            if kfac is not None and kfac.wants_statistics:
                kfac.sample(logits, labels >= 0, divisor=labels.numel()).backward(retain_graph=True)
            losses = (token_loss_sums if engine is None else per_sample_loss)(logits, labels)
            loss = shard.batch_mean(losses)
            meter.enter_place("backward")
            loss.backward()

        def step(is_counted: bool) -> None:
            optimizer.zero_grad(set_to_none=True)
            for _ in range(scenario.passes):
                meter.enter_place(HOST)
                meter.mark_pass()
                run_pass(*next(batches))
            meter.mark_pass()
            grads = [each.grad for each in model.parameters()]
            meter.assign(OFFLOADED if is_hosted else "gradients", grads)
            meter.enter_place(HOST if is_hosted else "update")
            if kfac is not None:
                kfac.step()
            elif engine is None and is_counted:  # half of a plan's time, for nothing that stays
                shard.clip_grad_norm_(model, 1.0)
            optimizer.step()
            for value in (value for each in optimizer.state.values() for value in each.values()):
                if isinstance(value, Tensor):  # a count of steps is a scalar, and on the host
                    role = OFFLOADED if is_hosted else "optimizer"
                    meter.assign(role if value.ndim else HOST, [value])

        yield step


def add_lora(model: nn.Module, rank: int) -> None:
    """Freeze a model, and give each linear layer of its blocks an adapter of peft's."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise BadInput("--lora needs peft: pip install peft") from error
    inside = {id(layer) for block in shard.find_blocks(model) for layer in block.modules()}
    names = [
        name
        for name, layer in model.named_modules()
        if id(layer) in inside
        and (isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D")
    ]
    if not names:
        raise BadInput(f"--lora needs linear layers in blocks, and {type(model).__name__} has none")
    model.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=rank, lora_dropout=0.0, target_modules=names), model)


def _sharding(scenario: Scenario, device: torch.device) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "reshard_after_forward": scenario.shard != "zero2",
        "gradient_divisor": 1,
    }
    if scenario.shard == "hybrid":
        shape = scenario.replicas, scenario.world_size // scenario.replicas
        names = ("replicate", "shard")
        kind = "cpu" if device.type == "meta" else device.type
        settings["mesh"] = dist.init_device_mesh(kind, shape, mesh_dim_names=names)
    if scenario.precision == "bf16":
        settings["mp_policy"] = shard.MixedPrecision(param=torch.bfloat16)
    if scenario.offload:
        settings["offload_policy"] = shard.CPUOffload(
            parameters="params" in scenario.offload, gradients="grads" in scenario.offload
        )
    return settings


def _mark_place(meter: Meter, name: str, module: nn.Module, inputs: Any, *output: Any) -> None:
    """Tell the meter that a block computes; a hook before its forward pass, and after it."""
    if not output:
        meter.enter_place("forward", name)
        return
    first = output[0][0] if isinstance(output[0], tuple) else output[0]
    if isinstance(first, Tensor) and first.requires_grad:
        first.register_hook(lambda _: meter.enter_place("backward", name))


# ---- what torch.compile makes of a block, on tensors without values ------------------------------
#
# Dynamo and AOTAutograd trace a block as ever, and the partitioner that Inductor uses decides what
# is kept for the backward pass. Inductor itself writes kernels for a GPU, and there is none: the
# two graphs are run operation by operation instead. Of operations that it would fuse into their
# readers nothing is counted, as their results never reach memory.


def metered_backend(meter: Meter) -> Callable[..., Any]:
    """Return a backend for `torch.compile` whose graphs a meter counts as Inductor's."""
    # Where a graph breaks, what runs in between is Python's, with the meter's own functions.
    skip = import_module("torch._dynamo.decorators").skip
    for function in [*vars(meter_module).values(), *vars(Meter).values()]:
        if isinstance(function, FunctionType) and function.__module__ == meter_module.__name__:
            skip(function)

    def compile_graph(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        common = import_module("torch._dynamo.backends.common")
        partition = import_module("torch._functorch.partitioners")
        decompositions = import_module("torch._inductor.compile_fx").select_decomp_table()

        def run(part: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            fused = {
                node
                for node in part.graph.nodes
                if is_pointwise(node) and not is_read_from_memory(node)
            }
            # An interpreter holds what it has run with.
            call = functools.partial(_run_once, part, fused, meter)
            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        return common.aot_autograd(
            fw_compiler=run,
            bw_compiler=run,
            decompositions=decompositions,
            partition_fn=functools.partial(
                partition.min_cut_rematerialization_partition, compiler="inductor"
            ),
        )(graph, inputs)

    return compile_graph


class FusedGraph(Interpreter):
    """Runs a graph, and lets a meter count what is left of it when pointwise operations are fused.

    Args:
        graph: What is run.
        fused: Its operations that are part of their readers' kernels.
        meter: Counts it.
    """

    def __init__(self, graph: GraphModule, fused: set[Node], meter: Meter) -> None:
        super().__init__(graph)
        self._fused, self._meter = fused, meter

    def run_node(self, n: Node) -> Any:
        """Run one operation."""
        with self._meter.compiled(is_fused=n in self._fused):
            return super().run_node(n)

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function; one that is computed again draws no numbers, and keeps no state."""
        if target is rng_prims.run_and_save_rng_state:
            return torch.get_rng_state(), args[0](*args[1:], **kwargs)
        if target is rng_prims.run_with_rng_state:
            return args[1](*args[2:], **kwargs)
        return super().call_function(target, args, kwargs)


def _run_once(graph: GraphModule, fused: set[Node], meter: Meter, args: list[Any]) -> Any:
    # Compiled frames run without the mode that they were compiled under, and backward with it.
    is_on = any(each is meter for each in _get_current_dispatch_mode_stack())
    with nullcontext() if is_on else meter:
        return FusedGraph(graph, fused, meter).boxed_run(args)


def is_pointwise(node: Node) -> bool:
    """Whether an operation makes each element of one element of each of its inputs."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_read_from_memory(node: Node) -> bool:
    """Whether a reader of a result cannot have it fused into its own kernel."""
    return any(
        is_read_from_memory(user)
        if getattr(user.target, "is_view", False)
        else not (is_pointwise(user) or torch.Tag.reduction in getattr(user.target, "tags", ()))
        for user in node.users
    )
