"""A script written for PyTorch's FSDP2: a small GPT, pre-trained. Only one import differs.

    torchrun --nproc-per-node 2 examples/fsdp2_script.py --out runs/gpt

bf16 with float32 sums, compiled and checkpointed blocks, accumulation without sums over ranks,
torch's own gradient clipping, and a distributed checkpoint that goes on with any number of ranks.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from unison import fully_shard  # was: from torch.distributed.fsdp import fully_shard

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 96, 16, 32, 4, 2


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, WIDTH] to the same."""
        rows, tokens, _ = x.shape
        parts = self.qkv(self.ln1(x)).view(rows, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(rows, tokens, WIDTH))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """A decoder with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """[rows, tokens] to logits."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def batch_of(step: int, rank: int) -> Tensor:  # [rows, CONTEXT + 1]
    """Rows that count up in steps of their own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(0, VOCABULARY, (4, 1), generator=generator)
    stride = torch.randint(1, 5, (4, 1), generator=generator)
    return (start + stride * torch.arange(CONTEXT + 1)) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    options = parser.parse_args()

    is_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if is_cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (size,))

    torch.manual_seed(0)
    model = GPT().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, block in enumerate(model.blocks):
        block.compile(backend=options.backend)
        model.blocks[index] = checkpoint_wrapper(block)
        fully_shard(model.blocks[index], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1, fused=True)

    first = 0
    if os.path.exists(os.path.join(options.out, ".metadata")):
        parts, states = get_state_dict(model, optimizer)
        progress = {"step": torch.tensor(0)}
        dcp.load(
            {"model": parts, "optimizer": states, "progress": progress}, checkpoint_id=options.out
        )
        set_state_dict(model, optimizer, model_state_dict=parts, optim_state_dict=states)
        first = int(progress["step"])

    for step in range(first, first + options.steps):
        loss = torch.tensor(0.0)
        for pass_ in range(options.accumulate):
            model.set_requires_gradient_sync(pass_ == options.accumulate - 1)
            rows = batch_of(step * options.accumulate + pass_, rank).to(device)
            logits = model(rows[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
            (loss / options.accumulate).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step == first or step == first + options.steps - 1):
            shown = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {shown.item():.3f}")

    parts, states = get_state_dict(model, optimizer)
    progress = {"step": torch.tensor(first + options.steps)}
    dcp.save({"model": parts, "optimizer": states, "progress": progress}, checkpoint_id=options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
