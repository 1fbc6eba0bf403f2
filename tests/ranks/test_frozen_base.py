"""A frozen base costs what it weighs: memory and traffic follow the trained parameters (B02); mixed dtypes go (B03)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.ranks.nets import llama, token_loss, tokens

pytestmark = pytest.mark.ranks


def count(stage: int) -> dict[str, Any]:
    """Train LoRA over a bf16 base for two steps; count elements and bytes on this rank."""
    import ourshard
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama().to(torch.bfloat16), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model = ourshard.shard_model(
        model, {"stage": stage, "persist_below": 0, "ledger": True, "precision": {"param_dtype": "bfloat16"}}
    )
    engine = ourshard.engine_of(model)
    assert engine is not None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(2):
        engine.ledger.reset()
        token_loss(model, tokens(step, 2)).backward()
        held = dict(engine.ledger.held)
        optimizer.step()
        optimizer.zero_grad()
    lanes = list(engine.lanes())
    return {
        "elements": sum(p.numel for lane in lanes if lane.trainable for p in lane.parameters),
        "trained": sum(lane.layout.numel for lane in lanes if lane.trainable),
        "frozen": sum(lane.layout.numel for lane in lanes if not lane.trainable),
        "frozen dtypes": {lane.master.dtype for lane in lanes if not lane.trainable},
        "frozen gradients": [lane.name_of(0) for lane in lanes if not lane.trainable and lane.gradient is not None],
        "masters": sum(lane.master.numel() for lane in lanes if lane.master.dtype == torch.float32),
        "gradient bytes": held["gradient"],
        "state": sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.dim()),
        "reduced": {key: nbytes for key, nbytes in engine.ledger.wire.items() if key.startswith("reduce_scatter")},
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_masters_state_and_reductions_are_of_trained_parameters_alone(ranks: Any, stage: int) -> None:
    both = ranks(2)(count, stage)
    assert sum(told["state"] for told in both) == 2 * both[0]["elements"]
    for told in both:
        mine = told["trained"] // 2
        assert told["frozen"] > 20 * told["trained"]
        assert told["frozen dtypes"] == {torch.bfloat16}
        assert told["frozen gradients"] == []
        assert told["masters"] == mine
        assert told["gradient bytes"] == mine * 4
        assert told["reduced"] == {"reduce_scatter/shard": mine * 2}  # computed in bf16, so they travel in it


class Packed(nn.Parameter):
    """I12. Codes as bitsandbytes keeps them: an attribute shows the memory; `quant_state` tells how to read them."""

    CB: torch.Tensor
    quant_state: float


class Quantized(nn.Module):
    """A projection whose weight is codes of 8 bits, in a dtype of more bytes if one is given."""

    def __init__(self, weight: torch.Tensor, storage: torch.dtype) -> None:
        super().__init__()
        codes = (weight * 100).round().to(torch.int8).view(storage)
        self.weight = Packed(codes, requires_grad=False)
        self.weight.quant_state = 0.01
        self.weight.CB = self.weight.data

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.CB  # as its 8-bit layers do in each forward
        weight = self.weight.view(torch.int8).float() * self.weight.quant_state
        return F.linear(rows.float(), weight).to(rows.dtype)


def over_codes(storage: torch.dtype, config: dict[str, Any] | None) -> tuple[list[float], int]:
    """Train a head over codes; return losses, and how many bytes of codes this rank holds at rest."""
    import ourshard

    torch.manual_seed(0)
    model = nn.Sequential(Quantized(torch.randn(64, 32), storage), nn.Linear(64, 5))
    frozen = model[0].weight
    if config is not None:
        ourshard.shard_model(model, {"persist_below": 0, **config})
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    holders = [frozen, frozen.CB]
    if config is not None:
        lane = next(lane for lane in ourshard.engine_of(model).lanes() if not lane.trainable)
        holders += [lane.master, lane.leaves[0], lane.leaves[0].CB]
    with torch._C.DisableTorchFunctionSubclass():
        memory = {st.data_ptr(): st.nbytes() for st in map(torch.Tensor.untyped_storage, holders)}
    return losses, sum(memory.values())


@pytest.mark.parametrize("storage", [torch.int8, torch.float16], ids=str)
def test_codes_travel_as_they_are_and_no_attribute_keeps_them_whole(ranks: Any, storage: torch.dtype) -> None:
    """A dtype of computation and a codec are not for codes, whatever dtype stores them."""
    wanted, _ = over_codes(storage, None)
    coded = {"communication": {"weights": "int8"}}
    for config, most in (({"stage": 3, **coded}, 64 * 32 / 2 + 2), ({"stage": 1}, 64 * 32)):  # a handle has one element
        for told, nbytes in ranks(2)(over_codes, storage, {"precision": {"param_dtype": "bfloat16"}, **config}):
            assert told == pytest.approx(wanted, rel=2e-2)  # the head computes in bf16
            assert nbytes <= most
