"""Models, rows and losses that `unison verify model` is given, as a user would write them."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 24


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH), nn.Linear(WIDTH, 3))


def normalised() -> nn.Module:
    """Takes statistics of a batch, which one row has none of."""
    return nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3))


def unfinished() -> nn.Module:
    raise RuntimeError("weights are missing")


def rows() -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(10, WIDTH, generator=generator),)


def squares(output: Tensor, batch: tuple[Tensor]) -> Tensor:  # [rows]
    return output.square().sum(dim=1)


def mean_square(output: Tensor, batch: tuple[Tensor]) -> Tensor:  # one number
    return output.square().mean()


def llama() -> nn.Module:
    """A transformers model, small."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=41,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {"input_ids": torch.randint(0, 41, (9, 12), generator=generator)}


class Divided(nn.Module):
    """Divides by the number of ranks, as code that averages over them by hand does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) / dist.get_world_size()


def divided_llama() -> nn.Module:
    model = llama()
    block = model.model.layers[1]  # type: ignore[union-attr]
    block.mlp = Divided(block.mlp)
    return model
