"""What is saved from one tier loads into another, at once or in the background; and of several models at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.test_running import made, steps

pytestmark = pytest.mark.ranks


def tiers(root: str) -> dict[str, dict[str, Any]]:
    rows = {"stage": 3, "persist_below": 100}
    return {
        "none": rows,
        "optimizer": {**rows, "offload": {"optimizer": "cpu"}},
        "both": {**rows, "offload": {"optimizer": "cpu", "params": "cpu"}},
        "half": {**rows, "offload": {"optimizer": "cpu", "optimizer_ratio": 0.5}},
        "disk": {**rows, "offload": {"optimizer": "nvme", "nvme_path": root}},
    }


def from_each_into_the_next(root: str, asynchronous: bool) -> list[tuple[str, float]]:
    """Return how far the losses after each load are from those after its save."""
    import ourshard

    known, told = tiers(root), []
    names = list(known)
    for name, following in zip(names, names[1:] + names[:1], strict=True):
        model, optimizer = made({**known[name], "checkpoint": {"asynchronous": asynchronous}})
        steps(model, optimizer, range(3))
        ourshard.save(model, optimizer, f"{root}/{name}")
        losses = steps(model, optimizer, range(3, 5))
        ourshard.wait_for_save()
        for config in (known[name], known[following]):
            other, other_optimizer = made(config)
            ourshard.load(other, other_optimizer, f"{root}/{name}")
            again = steps(other, other_optimizer, range(3, 5))
            told.append((name, max(abs(one - two) for one, two in zip(losses, again, strict=True))))
    return told


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
def test_a_save_of_one_tier_loads_into_another(ranks: Any, tmp_path: Path, asynchronous: bool) -> None:
    for told in ranks(2)(from_each_into_the_next, str(tmp_path), asynchronous):
        assert len(told) == 10
        for name, apart in told[::2]:
            assert apart == 0, name
        for name, apart in told[1::2]:
            assert apart < 1e-6, name


def two_models(root: str, asynchronous: bool) -> tuple[list[float], list[float]]:
    """Train two models of one Accelerator, one of them compiled, with two optimizers over three groups."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from ourshard import ShardPlugin

    def made_both(stage: int) -> tuple[Any, ...]:
        AcceleratorState._reset_state()
        config = {"stage": stage, "persist_below": 20, "checkpoint": {"asynchronous": asynchronous}}
        accelerator = Accelerator(ourshard_plugin=ShardPlugin(config))
        torch.manual_seed(1)
        one, two = nn.Sequential(nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 5)), nn.Linear(5, 7)
        first = torch.optim.AdamW([{"params": one[0].parameters(), "lr": 1e-2}, {"params": one[2].parameters()}])
        second = torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9)
        two = torch.compile(two, backend="eager")
        return accelerator, *accelerator.prepare(one, two, first, second)

    def train(parts: tuple[Any, ...], which: range) -> list[float]:
        accelerator, one, two, first, second = parts
        losses = []
        for step in which:
            generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
            loss = two(one(torch.randn(4, 13, generator=generator))).square().mean()
            accelerator.backward(loss)
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
            losses.append(loss.item())
        return losses

    parts = made_both(3)
    train(parts, range(2))
    parts[0].save_state(f"{root}/both")
    losses = train(parts, range(2, 4))
    others = made_both(3)
    others[0].load_state(f"{root}/both")
    return losses, train(others, range(2, 4))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
def test_two_models_with_two_optimizers_go_on(ranks: Any, tmp_path: Path, asynchronous: bool) -> None:
    """CASES F06."""
    for losses, again in ranks(2)(two_models, str(tmp_path), asynchronous):
        assert losses == again
    assert sorted(path.name for path in (tmp_path / "both").glob("ourshard*")) == ["ourshard", "ourshard_1"]
