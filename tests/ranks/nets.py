"""Small models of odd sizes that the rank tests train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, TOKENS = 101, 12
WIDTH = 13  # of the toy; divides by no world size


def llama(layers: int = 2, tie: bool = True, seed: int = 0, **options: Any) -> nn.Module:
    """Return a Llama whose sizes divide by nothing; head_dim * heads is not the hidden size either."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=36,
        intermediate_size=77,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        tie_word_embeddings=tie,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    return LlamaForCausalLM(config)


def token_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean loss a token of a language model."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def tokens(batch: int, rows: int) -> torch.Tensor:
    """Return batch number `batch`, shape (rows, TOKENS)."""
    return torch.randint(3, VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(100 + batch))


class Block(nn.Module):
    """Residual block with a bias, a norm and an odd inner width."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 3)
        self.down = nn.Linear(2 * width + 3, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Toy(nn.Module):
    """Blocks between two linear layers; (rows, WIDTH) -> (rows, WIDTH)."""

    def __init__(self, blocks: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def toy() -> Toy:
    return Toy()


def square_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean square of what a toy makes of its input minus the input."""
    return F.mse_loss(model(rows).float(), rows)


def numbers(batch: int, rows: int) -> torch.Tensor:
    """Return batch number `batch`, shape (rows, WIDTH)."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 + batch))
