"""CASES A14: while an optimizer's state is loaded, a rank holds no more than that of one unit besides its own."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.ranks

WIDTH, LAYERS = 768, 24
UNIT = WIDTH * WIDTH * 4 * 2  # bytes of Adam's state of one layer, whole
SLACK = 6 << 20  # the interpreter's own, and what the allocator keeps


def made(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    import ourshard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    ourshard.shard_model(model, {"stage": stage, "wrap": {"classes": ["Linear"]}})
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def resident(field: str) -> int:
    """Return a size of this process in bytes: VmRSS now, VmHWM at its highest."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) << 10


def state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


def loaded(root: str, saved: int, stage: int, stepped: bool) -> tuple[int, int]:
    """Return the bytes above what was there and what was loaded, at the highest, and the bytes of the state."""
    import ourshard

    model, optimizer = made(saved)
    step(model, optimizer)
    ourshard.save(model, optimizer, root)
    del model, optimizer
    model, optimizer = made(stage)
    if stepped:
        step(model, optimizer)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the highest from now on
    before, had = resident("VmRSS"), state_nbytes(optimizer)
    ourshard.load(model, optimizer, root)
    now = state_nbytes(optimizer)
    return resident("VmHWM") - before - (now - had), now


@pytest.mark.parametrize(("saved", "stage", "stepped"), [(3, 3, False), (3, 3, True), (3, 0, False), (1, 3, False)])
def test_loading_the_optimizers_state_takes_a_units_worth_of_memory_besides(
    ranks: Any, tmp_path: Path, saved: int, stage: int, stepped: bool
) -> None:
    for extra, state in ranks(2)(loaded, str(tmp_path / "saved"), saved, stage, stepped):
        assert extra < UNIT + SLACK < state / 3, f"{extra / 2**20:.1f} MiB besides {state / 2**20:.1f}"
