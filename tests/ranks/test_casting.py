"""Inputs and outputs meet the dtype of the weights wherever a call comes from outside, without Accelerate too."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from ourshard.runtime.api import shard_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ranks.nets import WIDTH, Block, Toy
from tests.ranks.pairs import gradient_rows, pair

pytestmark = pytest.mark.ranks

HALF = {"precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}, "persist_below": 0}
ROWS = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


@dataclasses.dataclass(frozen=True)
class Batch:
    """What some scripts hand to their models; `number` is left as it is."""

    rows: torch.Tensor
    number: int = 1


class OfBatches(Toy):
    def forward(self, batch: Batch) -> torch.Tensor:  # type: ignore[override]
        return super().forward(batch.rows)


class WideBlock(Block):
    """Adds to a residual in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return x + super().forward(x.to(torch.bfloat16)).float()


class KeepsWide(Toy):
    """Keeps its residual in float32, and casts where it meets weights, as some state space models do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([WideBlock() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).float()
        for block in self.blocks:
            x = block(x)
        return self.last(x.to(torch.bfloat16))


CALLS: dict[str, Any] = {
    "the whole": lambda model, rows: model(rows),
    "by keyword": lambda model, rows: model(x=rows),
    "a parameter": lambda model, rows: model(nn.Parameter(rows)),
    "a unit": lambda model, rows: model.blocks[1](rows),
    "a module of the root": lambda model, rows: model.first(rows),
    "all modules, one by one": lambda model, rows: model.last(model.blocks[0](model.first(input=rows))),
    "a recomputed unit": lambda model, rows: checkpoint(model.blocks[1], rows, use_reentrant=False),
}


def train_by(config: dict[str, Any], call: str) -> None:
    """Compare outputs and gradients of a sharded model, given float32, with a model of 16 bits, given 16 bits."""
    both = pair(config, make=Toy)
    both.plain.to(torch.bfloat16)
    expected, outputs = CALLS[call](both.plain, ROWS.to(torch.bfloat16)), CALLS[call](both.sharded, ROWS)
    assert outputs.dtype == torch.bfloat16
    assert torch.equal(expected, outputs)
    for each in (expected, outputs):
        each.pow(2).sum().backward()
    both.assert_same_gradients(0)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("stage", [0, 3])
def test_floats_given_from_outside_are_cast(ranks, stage, call):
    ranks(2)(train_by, {"stage": stage, **HALF}, call)


class Positions(Toy):
    """Is given positions that 16 bits would round, and casts where it meets weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return super().forward((x % 1).to(torch.bfloat16))


def keep_inputs(stage: int) -> None:
    """Compare outputs and gradients with one process, for inputs that a cast before the model would change."""
    config = {"stage": stage, **HALF, "precision": {**HALF["precision"], "cast_inputs": False}}
    both = pair(config, make=Positions)
    both.plain.to(torch.bfloat16)
    positions = 1000 + ROWS.abs()
    expected, outputs = both.plain(positions), both.sharded(positions)
    assert torch.equal(expected, outputs)
    for each in (expected, outputs):
        each.pow(2).sum().backward()
    both.assert_same_gradients(0)
    with pytest.raises(RuntimeError, match="dtype"):
        both.sharded.first(ROWS)


@pytest.mark.parametrize("stage", [0, 3])
def test_inputs_stay_as_they_are_where_that_is_asked_for(ranks, stage):
    ranks(2)(keep_inputs, stage)


def call_whole(stage: int) -> None:
    """A forward in `gathered` takes what a forward outside takes, and gives what it gives."""
    import ourshard

    precision = {**HALF["precision"], "output_dtype": "float32"}
    model = ourshard.shard_model(Toy(), {"stage": stage, **HALF, "precision": precision})
    with torch.no_grad():
        outside = model(ROWS)
        alone = model.blocks[1](ROWS)
        with ourshard.gathered(model):
            assert torch.equal(model(ROWS), outside)
            assert torch.equal(model.blocks[1](ROWS), alone)
    assert outside.dtype == torch.float32


@pytest.mark.parametrize("stage", [0, 3])
def test_a_forward_in_gathered_casts_as_one_outside(ranks, stage):
    ranks(2)(call_whole, stage)


def give_a_batch() -> None:
    import ourshard

    model, plain = ourshard.shard_model(OfBatches(), {"stage": 3, **HALF}), Toy().to(torch.bfloat16)
    batch = Batch(ROWS)
    assert torch.equal(model(batch), plain(ROWS.to(torch.bfloat16)))
    assert batch.rows is ROWS


def test_floats_in_dataclasses_are_cast_in_a_copy(ranks):
    ranks(2)(give_a_batch)


def keep_wide() -> None:
    import ourshard

    model, plain = ourshard.shard_model(KeepsWide(), {"stage": 3, **HALF}), KeepsWide().to(torch.bfloat16)
    assert torch.equal(model(ROWS), plain(ROWS.to(torch.bfloat16)))


def test_what_a_model_keeps_wide_between_units_stays_wide(ranks):
    ranks(2)(keep_wide)


MIXED = {"precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}, "persist_below": WIDTH + 1}
ALONE = [call for call in CALLS if call not in ("the whole", "by keyword", "a parameter")]


def call_under_autocast(stage: int) -> None:
    """Compare outputs and gradients of modules that are called on their own with those of a model under autocast."""
    for call in ALONE:
        torch.manual_seed(0)
        plain = Toy()
        model = copy.deepcopy(plain)
        shard_model(model, {"stage": stage, **MIXED}, cast_small=False)  # as for Accelerate's autocast
        with torch.autocast("cpu", torch.bfloat16):
            expected = CALLS[call](plain, ROWS)
        outputs = CALLS[call](model, ROWS)
        assert not torch.is_autocast_enabled("cpu")
        assert torch.equal(expected, outputs), call
        for each in (expected, outputs):
            each.float().pow(2).sum().backward()
        for (name, parameter), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (parameter.grad is None) == (wanted.grad is None), (call, name)
            if wanted.grad is not None:
                torch.testing.assert_close(*gradient_rows(parameter, wanted.grad), atol=1e-6, rtol=1e-2)
        with pytest.raises((RuntimeError, TypeError)):
            model.blocks[1](None)
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_module_on_its_own_computes_under_the_autocast_of_its_model(ranks, stage):
    """Small weights are float32 there, and large ones are not: T5's encoder in `generate` ended in a dtype error."""
    ranks(2)(call_under_autocast, stage)
