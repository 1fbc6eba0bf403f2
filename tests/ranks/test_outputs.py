"""Models whose outputs, or whose blocks' outputs, are not one tensor; and views that an in-place operation follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.ranks.nets import WIDTH, Block
from tests.ranks.pairs import pair
from tests.ranks.training import TOY

pytestmark = pytest.mark.ranks

CONFIGS = TOY


@dataclass
class Data:
    hidden: torch.Tensor
    count: int = 1


class Slotted:
    """An object of the user's own, with slots and a tensor two levels down."""

    __slots__ = ("inner",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.inner = {"deep": [Data(hidden)]}


class Named(NamedTuple):
    hidden: torch.Tensor
    nothing: None = None


def wrap_output(kind: str, x: torch.Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    kinds: dict[str, Any] = {
        "dict": lambda: {"hidden": x, "name": "block"},
        "tuple": lambda: (None, x),
        "named tuple": lambda: Named(x),
        "dataclass": lambda: Data(x),
        "object": lambda: Slotted(x),
        "model output": lambda: BaseModelOutput(last_hidden_state=x),
        "nested": lambda: [{"a": (x,)}],
        "view": lambda: x.view(-1, WIDTH),
        "transposed": lambda: x.transpose(0, 1),
        "slice": lambda: x[:, :],
    }
    return kinds[kind]()


def unwrap(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value if value.shape[-1] == WIDTH else value.t()
    if isinstance(value, Slotted):
        return value.inner["deep"][0].hidden
    if isinstance(value, dict):
        return value.get("hidden", value.get("last_hidden_state", value.get("a", [None])[0]))
    if isinstance(value, Data):
        return value.hidden
    return unwrap(next(item for item in value if item is not None))


class Speaking(nn.Module):
    """Each block, and the model, wraps what it returns; views are changed in place by who gets them."""

    def __init__(self, kind: str, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.in_place = kind, in_place
        self.layers = nn.ModuleList([SpeakingBlock(kind), SpeakingBlock(kind)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = unwrap(layer(x))
            if self.in_place:
                x.mul_(0.5)
        return wrap_output(self.kind, self.last(x))


class SpeakingBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.block = kind, Block()

    def forward(self, x: torch.Tensor) -> Any:
        return wrap_output(self.kind, self.block(x))


def speak(config: dict[str, Any], kinds: list[str]) -> None:
    for kind in kinds:
        for in_place in (False, True):
            both = pair({**config, "wrap": {"classes": ["SpeakingBlock"]}}, lambda k=kind, i=in_place: Speaking(k, i))
            both.train(3, loss=lambda model, rows: (unwrap(model(rows)) * 1.0).square().mean())
            both.assert_same()
            assert not any(unit.whole for unit in both.engine.units if unit.sharded)


KINDS = ["dict", "tuple", "named tuple", "dataclass", "object", "model output", "nested"]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_outputs_of_any_kind_hear_of_the_backward(ranks, config):
    ranks(2)(speak, config, KINDS)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_views_as_outputs_that_are_changed_in_place_afterwards(ranks, config):
    """An in-place operation on a view drops the hooks of that view."""
    ranks(2)(speak, config, ["view", "transposed", "slice"])


class NoGradInputs(nn.Module):
    """Blocks that get keyword arguments, tensors in lists, and inputs of which only one needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Mixing(), Mixing()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = [x]
        for layer in self.layers:
            seen.append(layer(past=list(seen), scale={"by": torch.tensor(2.0)}, flag=True))
        return seen[-1]


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, past: list[torch.Tensor], scale: dict[str, torch.Tensor], flag: bool) -> torch.Tensor:
        assert flag
        return self.block(sum(past) / scale["by"])  # type: ignore[arg-type]


def mix(config: dict[str, Any]) -> None:
    both = pair({**config, "wrap": {"classes": ["Mixing"]}}, NoGradInputs)
    both.train(3)
    both.assert_same()


def test_inputs_in_lists_and_keywords_are_boundaries_too(ranks):
    for config in CONFIGS.values():
        ranks(2)(mix, config)
