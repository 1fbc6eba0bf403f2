"""State of optimizers that is saved and loaded where parameters are odd, frozen for a while, or not ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.test_saving import FULL

pytestmark = pytest.mark.ranks


class Uneven(nn.Module):
    """Rows of 5, 7 and 3 elements with room between them in a lane, and parameters with one element or none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 11))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.randn(0, 4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.body(rows) * self.scale + self.none.sum()


def train(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for _ in range(2):
        losses.append(model(torch.ones(2, 5)).square().sum())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def uneven(root: str, kind: type[torch.optim.Optimizer]) -> tuple[list[float], list[float]]:
    """Return the losses after a whole save, and after it was loaded at another stage."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    def made(stage: int) -> Any:
        accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": stage, "persist_below": 0, **FULL}))
        model = Uneven()
        return accelerator, *accelerator.prepare(model, kind(model.parameters(), lr=0.1))

    accelerator, model, optimizer = made(3)
    train(model, optimizer)
    accelerator.save_state(root)
    after = train(model, optimizer)
    accelerator.free_memory()
    accelerator, model, optimizer = made(1)
    accelerator.load_state(root)
    return after, train(model, optimizer)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_state_of_rows_with_room_between_them_comes_back_from_a_whole_save(
    ranks: Any, tmp_path: Path, kind: type[torch.optim.Optimizer]
) -> None:
    """Once rows were joined without the room, and no whole save of such a model could be resumed from."""
    for saved, loaded in ranks(2)(uneven, str(tmp_path), kind):
        assert saved == loaded


class Pair(nn.Module):
    """Two matrices; rows of the first are on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 71, bias=False), nn.Linear(71, 3, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(rows)))


def step_pair(model: Any, optimizer: Any, which: range) -> list[float]:
    losses = []
    for step in which:
        rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        losses.append(model(rows).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def frozen_for_a_while(root: str, config: dict[str, Any], kind: type[torch.optim.Optimizer]) -> list[float]:
    """Save with all trained; load with the first matrix frozen, step, save; load that, step, thaw it, step."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    def made(trained: bool) -> Any:
        accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 3, "persist_below": 0, **config}))
        model = Pair()
        model.first.requires_grad_(trained)
        return accelerator, *accelerator.prepare(model, kind(model.parameters(), lr=0.01))

    accelerator, model, optimizer = made(trained=True)
    losses = step_pair(model, optimizer, range(2))
    accelerator.save_state(f"{root}/trained")
    accelerator.free_memory()
    for name, which in (("trained", range(2, 3)), ("frozen", range(3, 4))):
        accelerator, model, optimizer = made(trained=False)
        accelerator.load_state(f"{root}/{name}")
        losses += step_pair(model, optimizer, which)
        if name == "trained":
            accelerator.save_state(f"{root}/frozen")
            accelerator.free_memory()
    model.first.requires_grad_(True)
    return losses + step_pair(model, optimizer, range(4, 6))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Muon])
@pytest.mark.parametrize("config", [{}, FULL], ids=["rows", "whole"])
def test_state_waits_for_a_parameter_that_is_frozen_when_it_is_loaded(
    ranks: Any, tmp_path: Path, config: dict[str, Any], kind: type[torch.optim.Optimizer]
) -> None:
    """CASES X09. Rows of other elements, or none, were there once it was trained again."""
    model = Pair()
    optimizer = kind(model.parameters(), lr=0.01)
    expected = step_pair(model, optimizer, range(2))
    model.first.requires_grad_(False)
    expected += step_pair(model, optimizer, range(2, 4))
    model.first.requires_grad_(True)
    expected += step_pair(model, optimizer, range(4, 6))
    for losses in ranks(2)(frozen_for_a_while, str(tmp_path), config, kind):
        assert losses == pytest.approx(expected, abs=1e-7)


def made_and_frozen(root: str) -> list[bool]:
    """Save whole with a frozen parameter in a group; load where it is trained."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    for trained in (False, True):
        accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 3, "persist_below": 0, **FULL}))
        model = Pair()
        model.first.requires_grad_(trained)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        if trained:
            accelerator.load_state(root)
        else:
            step_pair(model, optimizer, range(1))
            accelerator.save_state(root)
        accelerator.free_memory()
    return sorted(bool(optimizer.state.get(parameter)) for parameter in optimizer.param_groups[0]["params"])


def test_a_parameter_that_was_frozen_when_it_was_saved_whole_can_be_trained(ranks: Any, tmp_path: Path) -> None:
    """It was refused as one of another group; torch's own optimizers take it."""
    assert ranks(2)(made_and_frozen, str(tmp_path)) == [[False, True]] * 2


class Nested(torch.optim.Optimizer):
    """Keeps moments in a dict."""

    elementwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("kept", {"first": torch.zeros_like(parameter)})


def save_parts(root: str, config: dict[str, Any]) -> str:
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 3, "persist_below": 0, **config}))
    model = Uneven()
    model, optimizer = accelerator.prepare(model, Nested(model.parameters()))
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="Nested keeps 'kept'") as error:
        accelerator.save_state(root)
    return str(error.value)


@pytest.mark.parametrize("config", [{}, FULL], ids=["rows", "whole"])
def test_tensors_of_one_ranks_rows_in_a_dict_are_refused(ranks: Any, tmp_path: Path, config: dict[str, Any]) -> None:
    """Once the first rank's was saved for all, without a word."""
    for told in ranks(2)(save_parts, str(tmp_path), config):
        assert "in a dict" in told


def save_with_a_stranger(root: str) -> str:
    """Save on one rank, where such a parameter may be stepped, as the temperature of SAC."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 3}))
    model, loose = Pair(), nn.Parameter(torch.zeros(1))
    optimizers = torch.optim.AdamW(model.parameters()), torch.optim.Adam([loose])
    model, *_ = accelerator.prepare(model, *optimizers)
    with pytest.raises(ValueError, match="save_state") as error:
        accelerator.save_state(root)
    return str(error.value)


def test_state_of_a_parameter_of_no_model_is_not_left_out_without_a_word(ranks: Any, tmp_path: Path) -> None:
    (told,) = ranks(1)(save_with_a_stranger, str(tmp_path))
    assert "the Adam steps parameters of no model that was prepared: (1,) in group 0" in told


def from_one_dtype_of_masters_to_another(root: str, kind: str, sharded: bool) -> tuple[list[float], list[float]]:
    """Return the losses after a save with masters in float32, and after it was loaded into masters in float64."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    def made(dtype: str) -> Any:
        config = {"stage": 3, "persist_below": 0, "precision": {"master_dtype": dtype}, **({} if sharded else FULL)}
        accelerator = Accelerator(ourshard_plugin=ShardPlugin(config))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        more = {"eps": (1e-9, 1e-3)} if kind == "Adafactor" else {}  # its own depends on the dtype
        return accelerator, *accelerator.prepare(model, getattr(torch.optim, kind)(model.parameters(), lr=0.1, **more))

    accelerator, model, optimizer = made("float32")
    train(model, optimizer)
    accelerator.save_state(root)
    after = train(model, optimizer)
    accelerator.free_memory()
    accelerator, model, optimizer = made("float64")
    accelerator.load_state(root)
    return after, train(model, optimizer)


@pytest.mark.parametrize("kind", ["AdamW", "Adamax", "Adafactor"])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "by rows"])
def test_state_follows_masters_into_another_dtype(ranks: Any, tmp_path: Path, kind: str, sharded: bool) -> None:
    for wanted, found in ranks(2)(from_one_dtype_of_masters_to_another, str(tmp_path), kind, sharded):
        assert found == pytest.approx(wanted, abs=1e-5)
