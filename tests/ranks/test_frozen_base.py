"""A frozen base costs what it weighs: memory and traffic follow the trained parameters (B02); mixed dtypes go (B03)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
