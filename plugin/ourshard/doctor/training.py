"""A few training steps over all ranks, beside the same steps in one process."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from ourshard.config import ShardConfig
from ourshard.doctor.finding import Finding, Verdict
from ourshard.runtime.wording import counted

_STEPS = 3
_SAMPLES, _WIDTH = 4, 64  # of one rank's batch, of the model
_TOLERANCE = 1e-3  # of the largest change; ranks and one process add gradients up in another order


def check_training(device: torch.device) -> list[Finding]:
    """Train a small model at every stage, and compare what was learnt with one process. Collective."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    start = _model().state_dict()
    whole = _learnt(_model().to(device), _batches(world, range(world), device))
    errors = {}
    for stage in (0, 1, 2, 3):
        model = _sharded(stage, device)
        mine = _learnt(model, _batches(world, range(rank, rank + 1), device))
        errors[f"stage {stage}"] = _error(start, whole, mine)
    furthest = max(errors.values())
    text = f"{_STEPS} steps at stages 0 to 3 on {counted(world, 'rank')}; furthest from one process: {furthest:.1e}"
    values = {"relative_errors": errors, "tolerance": _TOLERANCE}
    bad = [stage for stage, error in errors.items() if not error <= _TOLERANCE]
    if bad:
        fix = (
            "Do not train here: a card, a link or a build computes wrongly. Run again with one rank a card to find it."
        )
        return [Finding("training", f"{text}; {', '.join(bad)} learnt something else", Verdict.PROBLEM, fix, values)]
    return [Finding("training", text, values=values)]


def _model() -> nn.Module:
    """Return the same model on every rank and in every call, without touching the global seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*blocks, nn.Linear(_WIDTH, 1))


def _sharded(stage: int, device: torch.device) -> nn.Module:
    from ourshard.runtime.api import shard_model

    return shard_model(_model(), ShardConfig(stage=stage, persist_below=100), device=device)


def _batches(world: int, ranks: range, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield each step's samples of `ranks`, drawn alike on every rank."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(_STEPS):
        drawn = torch.randn(world, _SAMPLES, _WIDTH, generator=generator, device="cpu")
        yield drawn[ranks.start : ranks.stop].flatten(0, 1).to(device)


def _learnt(model: nn.Module, batches: Iterator[torch.Tensor]) -> dict[str, torch.Tensor]:
    from ourshard.runtime.api import adopt_optimizer, engine_of, full_state_dict

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sharded = engine_of(model) is not None
    if sharded:
        adopt_optimizer(optimizer)
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(model) if sharded else {k: v.cpu() for k, v in model.state_dict().items()}


def _error(start: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], mine: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, as a part of the largest change from `start`. NaN stays NaN."""
    change = max(float((expected[name] - start[name]).abs().max()) for name in start)
    if not mine:  # on ranks that do not get the whole state
        return 0.0
    return float(torch.stack([(expected[name] - mine[name].cpu()).abs().max() for name in start]).max()) / change
