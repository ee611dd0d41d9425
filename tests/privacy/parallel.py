"""Small models cut by torch's own plans, and private runs of them on any number of ranks."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.harness import World
from tests.privacy.loaders import records_of
from unison.privacy import Poisson, PrivacyEngine, PrivateLoader
from unison.torch_internals import canonical_name

VOCAB, WIDTH, HEADS, NUM_TOKENS, NUM_RECORDS = 37, 12, 4, 6, 24  # an odd vocabulary: uneven parts
EXPECTED_BATCH_SIZE = 4


class Block(nn.Module):
    """Attention and an MLP, as torch's tutorials write them for tensor parallelism."""

    def __init__(self, *, has_attention: bool, is_scaled: bool) -> None:
        super().__init__()
        self.has_attention = has_attention
        self.scale = nn.Parameter(torch.ones(20)) if is_scaled else None
        self.factor = nn.Parameter(torch.tensor(0.7)) if is_scaled else None
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        if has_attention:
            self.norm = nn.LayerNorm(WIDTH)
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.has_attention:
            h = self.norm(x)
            # As many heads as this rank has.
            q, k, v = (
                each(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
                for each in (self.q, self.k, self.v)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.up(self.mlp_norm(x))
        if self.scale is not None:
            h = h * self.scale * self.factor
        return x + self.down(F.gelu(h))


class Model(nn.Module):
    """A token table, positions, a block, a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.is_checkpointed = kind == "checkpointed"
        padding = 3 if kind == "padded" else None
        self.tokens = nn.Embedding(VOCAB, WIDTH, padding_idx=padding)
        self.positions = nn.Embedding(NUM_TOKENS, WIDTH)
        has_attention = kind not in ("mlp", "padded", "scaled")
        block = Block(has_attention=has_attention, is_scaled=kind == "scaled")
        self.blocks = nn.ModuleList([block])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if kind == "tied":
            self.head.weight = self.tokens.weight
        with torch.no_grad():
            for parameter in self.parameters():  # gains and biases that do something
                parameter.add_(0.1 * torch.randn_like(parameter))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(self.norm(x))


KINDS = ("attention", "mlp", "tied", "padded", "checkpointed", "scaled")
"""What a model is like; the last one has parameters of its own where columns are cut: one that is
cut too, and a number that stays plain."""


def plan_for(how: str) -> dict[str, Any]:
    """Return one of the plans in `PLANS`: torch's styles by module."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    names = [f"blocks.*.{name}" for name in "qkv"]
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "blocks.*.o": RowwiseParallel(),
        **{name: ColwiseParallel() for name in names},
    }
    by_columns = ColwiseParallel(output_layouts=Replicate())
    match how:
        case "logits cut":
            return plan | {"head": ColwiseParallel(use_local_output=False)}
        case "usual":
            return plan
        case "tables by columns":
            return plan | {"tokens": by_columns, "positions": by_columns}
        case "positions by rows":
            return plan | {"positions": RowwiseParallel(input_layouts=Replicate())}
        case "tables whole":
            del plan["tokens"]
            return plan
        case "norms distributed":  # replicated: gradients come to them as summands
            norms = ("norm", "blocks.*.norm", "blocks.*.mlp_norm")
            layouts = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
            return plan | {name: PrepareModuleInput(**layouts) for name in norms}
        case "sequence" | "sequence, distributed":
            # Tokens are cut wherever features are not.
            is_local = how == "sequence"
            cut = {"output_layouts": Shard(1), "use_local_output": is_local}
            by_rows = {"input_layouts": Replicate(), "use_local_output": is_local}
            return {
                "tokens": RowwiseParallel(output_layouts=Shard(1), **by_rows),
                "positions": RowwiseParallel(output_layouts=Shard(0), **by_rows),
                "norm": SequenceParallel(),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
                "blocks.*.norm": SequenceParallel(),
                "blocks.*.mlp_norm": SequenceParallel(),
                "blocks.*.up": ColwiseParallel(input_layouts=Shard(1), use_local_output=is_local),
                "blocks.*.down": RowwiseParallel(**cut),
                "blocks.*.o": RowwiseParallel(**cut),
                **{name: ColwiseParallel(input_layouts=Shard(1)) for name in names},
            }
        case _:
            raise AssertionError(how)


PLANS = (
    "usual",
    "tables by columns",
    "positions by rows",
    "tables whole",
    "norms distributed",
    "sequence",
    "sequence, distributed",
)


def cut(model: nn.Module, mesh: Any, how: str) -> nn.Module:
    """Cut a model along the axis of a mesh by one of `PLANS`."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    is_tied = model.head.weight is model.tokens.weight  # type: ignore[union-attr]
    if how == "norms distributed":
        for child in model.modules():
            if isinstance(child, nn.LayerNorm):
                distribute_module(child, mesh)
    plan = plan_for(how)
    block: Any = model.blocks[0]  # type: ignore[index]
    if not block.has_attention:
        plan = {n: each for n, each in plan.items() if not n.endswith((".q", ".k", ".v", ".o"))}
        plan.pop("blocks.*.norm", None)
    if block.scale is not None:
        plan["blocks.*.up"] = ColwiseParallel(use_local_output=False)
        block.scale = nn.Parameter(distribute_tensor(block.scale.detach(), mesh, [Shard(0)]))
    parallelize_module(model, mesh, plan)
    if is_tied:  # torch cuts both, and leaves two
        model.head.weight = model.tokens.weight  # type: ignore[union-attr]
    return model


def mesh_for(world: World, degree: int) -> Any:
    """The tensor axis of a mesh of all ranks; what is left is its data axis."""
    if degree == world.size:
        return init_device_mesh("cpu", (degree,), mesh_dim_names=("tensor",))
    shape = (world.size // degree, degree)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))["tensor"]


def records() -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(0, VOCAB, (NUM_RECORDS, NUM_TOKENS + 1), generator=generator)


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    return unison.per_sample_loss(model(ids[:, :-1]), ids[:, 1:])


def full(value: Any) -> Tensor:
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().clone()


def own(value: Any) -> Tensor:
    part = value.to_local() if hasattr(value, "to_local") else value
    return part.detach().clone()


def attach(
    model: nn.Module, *, noise_multiplier: float = 0.5, seed: int | None = 5, **settings: Any
) -> tuple[PrivacyEngine, nn.Module, torch.optim.Optimizer, PrivateLoader]:
    """An engine on a model; `seed=None` takes its key from the operating system."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    engine = PrivacyEngine(
        secure_noise=seed is None, accountant="rdp", ledger=settings.pop("ledger", None)
    )
    settings = {"max_grad_norm": 2.0, "sampling": Poisson(rate=0.2)} | settings
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="noise and sampling come from a seed")
        settings.setdefault("recheck", False)  # it takes passes, of which tests have few
        parts = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(records()), batch_size=EXPECTED_BATCH_SIZE),
            noise_multiplier=noise_multiplier,
            expected_batch_size=EXPECTED_BATCH_SIZE,
            seed=seed,
            **settings,
        )
    return engine, *parts


def private_run(
    world: World | None,
    *,
    kind: str = "attention",
    plan: str = "usual",
    degree: int | None = None,
    steps: int = 3,
    before: Callable[[Any], Any] = lambda model: model,
    after: Callable[[Any], Any] = lambda model: model,
    **settings: Any,
) -> dict[str, Any]:
    """Train, and return what must not depend on how the model is cut.

    Args:
        world: The ranks; None trains one process, and cuts nothing.
        kind: One of `KINDS`.
        plan: One of `PLANS`.
        degree: Ranks on the tensor axis; all unless given.
        steps: Logical batches.
        before: What the user makes of the model before `make_private`.
        after: What the user makes of it after that.
        settings: For `make_private`.
    """
    cut_model: nn.Module = Model(kind)
    if world is not None:
        cut(cut_model, mesh_for(world, degree or world.size), plan)
    engine, model, optimizer, loader = attach(before(cut_model), **settings)
    model = after(model)
    found: dict[str, Any] = {"losses": [], "norms": [], "records": [], "gradients": []}
    done, loss_of_step = 0, 0.0
    while done < steps:
        for (ids,) in loader:
            optimizer.zero_grad()
            each = losses(model, ids)
            is_sum = settings.get("loss_reduction") == "sum"
            loss = each.sum() if is_sum else unison.batch_mean(each)
            loss.backward()
            loss_of_step += loss.item()
            current = loader.current
            assert current is not None
            if current.is_last:
                found["losses"].append(loss_of_step)
                found["norms"].append(engine.per_sample_norms())
                found["records"].append(records_of(loader, current.step))
                gradients = {name: full(each.grad) for name, each in named(cut_model).items()}
                found["gradients"].append(gradients)
                loss_of_step, done = 0.0, done + 1
            optimizer.step()
            if done == steps:
                break
    found["parameters"] = {name: full(each) for name, each in named(cut_model).items()}
    found["own"] = {name: own(each) for name, each in named(cut_model).items()}
    engine.detach()
    return found


def named(model: nn.Module) -> dict[str, Any]:
    return {canonical_name(name): each for name, each in model.named_parameters()}
