"""CASES A14: while an optimizer's state is loaded, a rank holds no more than that of one unit besides its own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

pytestmark = pytest.mark.ranks

WIDTH, LAYERS = 768, 24
UNIT = WIDTH * WIDTH * 4 * 2  # bytes of Adam's state of one layer, whole


class Live(TorchDispatchMode):
    """Count the bytes of live tensors since it was made: `now`, below zero where older ones were freed, and `most`.

    The size of the process would not do: what earlier tests freed and the allocator kept serves this one unseen.
    """

    def __init__(self, older: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._watched: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._watch(older)

    def _watch(self, values: Any) -> int:
        """Return the bytes of the tensors among the values whose storage was not seen before."""
        found = 0
        for value in tree_iter(values):
            if isinstance(value, torch.Tensor) and (storage := value.untyped_storage()) not in self._watched:
                self._watched.add(storage)
                weakref.finalize(storage, self._freed, storage.nbytes())
                found += storage.nbytes()
        return found

    def _freed(self, nbytes: int) -> None:
        self.now -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._watch((args, kwargs))  # older too
        result = func(*args, **(kwargs or {}))
        self.now += self._watch(result)
        self.most = max(self.most, self.now)
        return result


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


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


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
    had = nbytes(state_of(optimizer))
    with Live(state_of(optimizer)) as tensors:
        ourshard.load(model, optimizer, root)
    state = nbytes(state_of(optimizer))
    return tensors.most - (state - had), state


@pytest.mark.parametrize(("saved", "stage", "stepped"), [(3, 3, False), (3, 3, True), (3, 0, False), (1, 3, False)])
def test_loading_the_optimizers_state_takes_a_units_worth_of_memory_besides(
    ranks: Any, tmp_path: Path, saved: int, stage: int, stepped: bool
) -> None:
    for extra, state in ranks(2)(loaded, str(tmp_path / "saved"), saved, stage, stepped):
        assert 0 < extra <= UNIT < state / 3, f"{extra / 2**20:.1f} MiB besides {state / 2**20:.1f}"
