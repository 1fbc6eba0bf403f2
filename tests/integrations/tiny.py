"""Small things that the tests of the integrations train, and the same training in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

FEATURES, HIDDEN, CLASSES, ROWS = 31, 67, 5, 48  # odd on purpose; FEATURES x HIDDEN is above persist_below


class Tiny(nn.Module):
    """Two blocks and a head: parameters above and below `persist_below`."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(FEATURES), Block(HIDDEN)])
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


class Block(nn.Module):
    """A linear layer with an activation."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, HIDDEN)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(rows))


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


def rows(seed: int = 1) -> TensorDataset:
    """Return `ROWS` random examples with random classes."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(ROWS, FEATURES, generator=generator), torch.randint(0, CLASSES, (ROWS,), generator=generator)
    )


def loader(batch: int = 4) -> DataLoader:
    return DataLoader(rows(), batch_size=batch)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return an optimizer with two groups, as for weight decay."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step / 10))


def plain_training(world: int, steps: int, accumulate: int = 1, clip: float = 1.0, batch: int = 4) -> dict[str, Any]:
    """Train in one process on what `world` ranks see together; return losses, norms and final weights."""
    model, data = tiny(), rows()
    optimizer = adamw(model)
    scheduler = halving(optimizer)
    losses, norms = [], []
    for step in range(steps):
        for micro in range(accumulate):
            first = (step * accumulate + micro) * world * batch
            inputs, labels = data[first : first + world * batch]
            loss = F.cross_entropy(model(inputs), labels)
            (loss / accumulate).backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        for _ in range(world):  # accelerate steps a scheduler once a process
            scheduler.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "state": {k: v.clone() for k, v in model.state_dict().items()}}
