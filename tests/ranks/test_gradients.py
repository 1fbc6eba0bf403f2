"""Gradients that are dropped, zeroed, read, accumulated, or wait; parameters that are frozen and thawed (X09)."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.nets import square_loss, toy
from tests.ranks.pairs import Pair, joined, pair, part
from tests.ranks.training import TOY, adamw, momentum, sgd

pytestmark = pytest.mark.ranks

BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
CONFIGS = {
    **TOY,
    "deferred": {"stage": 3, "persist_below": 0, "accumulate": "deferred"},
    "bf16 whole": {"stage": 0, "precision": BF16},
    "bf16 mixed": {"stage": 3, "persist_below": 100, "precision": BF16},
}
EVERY = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
FP32 = pytest.mark.parametrize("config", [c for c in CONFIGS.values() if "precision" not in c], ids=str)


def plain_in(config: dict[str, Any]) -> float:
    """Return how far a model in bf16 may be from the fp32 one beside it."""
    return 2e-2 if "precision" in config else 1e-6


def skip_a_step(config: dict[str, Any], by: str) -> None:
    """A batch whose gradients are thrown away right after backward, as scripts do with a loss that is not finite."""
    both = pair(config, toy, momentum)
    for step in range(4):
        both.backward(joined(step))
        if step in (0, 2):
            for model, optimizer in ((both.plain, both.plain_optimizer), (both.sharded, both.optimizer)):
                if by == "optimizer":
                    optimizer.zero_grad()
                elif by == "zeros":
                    optimizer.zero_grad(set_to_none=False)
                elif by == "model":
                    model.zero_grad()
                else:
                    for parameter in model.parameters():
                        parameter.grad = None
            continue
        both.assert_same_gradients(plain_in(config))
        both.step()
        both.zero_grad(set_to_none=by != "zeros")
    both.assert_same(plain_in(config))


@EVERY
@pytest.mark.parametrize("by", ["optimizer", "zeros", "model", "parameters"])
def test_gradients_thrown_away_without_a_step_do_not_come_back(ranks, config, by):
    ranks(2)(skip_a_step, config, by)


def zeroed_by_a_fresh_optimizer() -> float:
    from ourshard import shard_model

    model = shard_model(toy(), {"stage": 3, "persist_below": 0})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    square_loss(model, part(joined(0))).backward()
    optimizer.zero_grad(set_to_none=False)
    return sum(p.grad.local.abs().sum().item() for p in model.parameters())


def test_an_optimizer_that_never_stepped_can_zero_gradients_in_one_call(ranks):
    assert ranks(2)(zeroed_by_a_fresh_optimizer) == [0.0, 0.0]


def throw_away_while_accumulating(config: dict[str, Any], by: str) -> None:
    both = pair(config, toy, momentum)
    for step in range(4):
        with both.engine.no_sync():
            both.backward(joined(10 + step))
        if step % 2 == 0:
            both.zero_grad(set_to_none=by == "optimizer") if by != "model" else _zero_models(both)
        with both.engine.no_sync():
            both.backward(joined(20 + step))
        both.backward(joined(30 + step))
        both.assert_same_gradients(plain_in(config))
        both.step()
        both.zero_grad()
    both.assert_same(plain_in(config))


def _zero_models(both: Pair) -> None:
    both.plain.zero_grad()
    both.sharded.zero_grad()


@EVERY
@pytest.mark.parametrize("by", ["optimizer", "zeros", "model"])
def test_gradients_thrown_away_in_the_middle_of_an_accumulation(ranks, config, by):
    ranks(2)(throw_away_while_accumulating, config, by)


def drop_some(config: dict[str, Any]) -> None:
    """X09: `p.grad = None` between backward and step, as SwAV does with its prototypes."""
    both = pair(config, toy, momentum)
    for step in range(5):
        both.zero_grad()
        both.backward(joined(step))
        if step < 3:
            for model in (both.plain, both.sharded):
                for name, parameter in model.named_parameters():
                    if name.startswith("last") or name == "blocks.1.up.weight":
                        parameter.grad = None
        both.assert_same_gradients(plain_in(config))
        both.step()
    both.assert_same(plain_in(config))


@EVERY
def test_a_gradient_set_to_none_between_backward_and_step_is_not_stepped(ranks, config):
    ranks(2)(drop_some, config)


def read_whole_gradients(config: dict[str, Any]) -> None:
    """Plain parameters show their gradient right after backward, as under DDP; no step or clipping in between."""
    both = pair(config)
    both.backward(joined(0))
    for name, parameter in both.sharded.named_parameters():
        wanted = dict(both.plain.named_parameters())[name].grad
        assert parameter.grad is not None, f"{name} shows no gradient after backward"
        if not hasattr(parameter, "row_range"):
            torch.testing.assert_close(parameter.grad.float(), wanted, atol=plain_in(config), rtol=0)
    with both.engine.no_sync():
        both.sharded.zero_grad()
        square_loss(both.sharded, part(joined(1))).backward()
    assert all(parameter.grad is not None for parameter in both.sharded.parameters())


@EVERY
def test_gradients_are_there_right_after_backward(ranks, config):
    ranks(2)(read_whole_gradients, config)


def look_before_a_sync(config: dict[str, Any]) -> None:
    """Clip after each micro-batch, as loops do that do not ask whether it was the last; step with none that synced."""
    from ourshard import clip_grad_norm_, clip_grad_value_

    both = pair(config, toy, momentum)
    for step in range(4):
        for micro in range(3):
            with both.engine.no_sync() if micro < 2 or step < 3 else contextlib.nullcontext():
                both.backward(joined(3 * step + micro))
            if step == 1:
                wanted = nn.utils.clip_grad_norm_(both.plain.parameters(), 0.3)
                got = clip_grad_norm_(both.sharded if micro else both.sharded.parameters(), 0.3)
                torch.testing.assert_close(got, wanted, atol=plain_in(config), rtol=plain_in(config))
            elif step == 2:
                nn.utils.clip_grad_value_(both.plain.parameters(), 0.01)
                clip_grad_value_(both.sharded.parameters(), 0.01)
        both.step()
        both.zero_grad()
    both.assert_same(plain_in(config))


@EVERY
def test_gradients_that_wait_for_a_sync_are_there_for_a_step_and_for_clipping(ranks, config):
    ranks(2)(look_before_a_sync, config)


@pytest.mark.parametrize(
    "config",
    [
        {"stage": 1},
        {"stage": 3},
        {"stage": 3, "accumulate": "deferred"},
        {"stage": 3, "shard_optimizer_over": "all"},
        {"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}},
    ],
    ids=str,
)
def test_they_are_over_replicas_too(ranks, config):
    ranks(4)(look_before_a_sync, {**config, "shard_size": 2, "persist_below": 100})


def accumulate_on_top(config: dict[str, Any]) -> None:
    """Two backwards that both sync, and no zero_grad between."""
    both = pair(config, toy, sgd)
    for step in range(3):
        both.backward(joined(2 * step))
        both.backward(joined(2 * step + 1))
        both.assert_same_gradients()
        both.step()
        both.zero_grad()
    both.assert_same()


@FP32
def test_two_backwards_that_sync_add_up(ranks, config):
    ranks(2)(accumulate_on_top, config)


def freeze_and_thaw(config: dict[str, Any], optimizer: Any, late: bool) -> None:
    """X09: steps 0 to 2 frozen, 3 to 5 trainable, 6 frozen again."""
    both = pair(config, lambda: freeze(toy(), True), optimizer)
    if late:  # the frozen ones join the optimizer when they are thawed, with a rate of their own
        for name, model in (("plain_optimizer", both.plain), ("optimizer", both.sharded)):
            setattr(both, name, optimizer([p for p in model.parameters() if p.requires_grad]))
    for step in range(8):
        if step in (3, 6):
            for model, chosen in ((both.plain, both.plain_optimizer), (both.sharded, both.optimizer)):
                freeze(model, step == 6)
                if late and step == 3:
                    thawed = [p for n, p in model.named_parameters() if n.startswith(("first", "blocks.0"))]
                    chosen.add_param_group({"params": thawed, "lr": 0.01})
        before = {n: p.detach().clone() for n, p in both.plain.named_parameters()}
        both.train(1, first=step)
        both.assert_same(plain_in(config))
        moved = not torch.equal(before["blocks.0.up.weight"], both.plain.blocks[0].up.weight)
        assert moved == (3 <= step < 6)


def freeze(model: Any, frozen: bool) -> nn.Module:
    model.first.requires_grad_(not frozen)
    model.blocks[0].requires_grad_(not frozen)
    return model


@FP32
@pytest.mark.parametrize("optimizer", [adamw, momentum, sgd])
def test_freezing_and_thawing_between_steps_is_honoured(ranks, config, optimizer):
    ranks(2)(freeze_and_thaw_picklable, config, optimizer.__name__, False)


@FP32
def test_thawed_parameters_may_join_the_optimizer_as_a_new_group(ranks, config):
    """I17."""
    ranks(2)(freeze_and_thaw_picklable, config, "momentum", True)


def freeze_and_thaw_picklable(config: dict[str, Any], optimizer: str, late: bool) -> None:
    freeze_and_thaw(config, {"adamw": adamw, "momentum": momentum, "sgd": sgd}[optimizer], late)


def freeze_before_the_first_step(config: dict[str, Any]) -> None:
    """Frozen after sharding and before the optimizer's first step, thawed later: it must not fall out of the groups."""
    both = pair(config, toy, momentum)
    for model in (both.plain, both.sharded):
        freeze(model, True)
    both.train(2)
    for model in (both.plain, both.sharded):
        freeze(model, False)
    both.train(2, first=2)
    both.assert_same()


@FP32
def test_a_parameter_frozen_at_the_first_step_can_be_thawed(ranks, config):
    ranks(2)(freeze_before_the_first_step, config)


def thaw_in_bf16(config: dict[str, Any]) -> dict[str, str]:
    """C03 and X09: a bf16 base, thawed in the middle of a run, has fp32 masters from then on, and small steps count."""
    from ourshard import engine_of, full_state_dict, shard_model

    model = shard_model(freeze(toy(), True).bfloat16(), {**config, "precision": {"param_dtype": "bfloat16"}})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    start = full_state_dict(model, dtype=torch.float32)
    for step in range(4):
        if step == 2:
            freeze(model, False)
        optimizer.zero_grad()
        model(part(joined(step))).float().square().mean().backward()
        optimizer.step()
    end = full_state_dict(model, dtype=torch.float32)
    engine = engine_of(model)
    assert engine is not None
    moved = {n: (end[n] != start[n]).float().mean().item() for n in start}
    assert moved["blocks.0.up.weight"] > 0.9, f"only {moved['blocks.0.up.weight']:.0%} of a thawed weight moved"
    return {p.name: str(lane.store_dtype) for lane in engine.lanes() for p in lane.parameters}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("small", [0, 1000])
def test_a_thawed_bf16_parameter_gets_an_fp32_master(ranks, stage, small):
    for dtypes in ranks(2)(thaw_in_bf16, {"stage": stage, "persist_below": small}):
        assert set(dtypes.values()) == {"torch.float32"}


def count_gradient_bytes(config: dict[str, Any]) -> list[int]:
    """E04: return bytes of gradients alive after each micro-batch, and those of one shard, padding included."""
    from ourshard import engine_of, shard_model

    model = shard_model(toy(), {**config, "ledger": True})
    engine = engine_of(model)
    assert engine is not None
    held = []
    for step in range(4):
        with engine.no_sync() if step < 3 else contextlib.nullcontext():
            square_loss(model, part(joined(step))).backward()
        ledger = engine.ledger
        assert ledger is not None
        held.append(ledger.held["gradient"] + ledger.held["reduce"])
    return [*held, sum(4 * lane.layout.shard_numel for lane in engine.lanes())]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [2, 3])
def test_accumulation_holds_a_shard_of_the_gradients_and_deferred_all_of_them(ranks, stage, world):
    """E04: P/W elements after every micro-batch by default; P until the sync where that was asked for."""
    config = {"stage": stage, "persist_below": 0}
    *sharded, shard = ranks(world)(count_gradient_bytes, config)[0]
    *deferred, _ = ranks(world)(count_gradient_bytes, {**config, "accumulate": "deferred"})[0]
    assert sharded == [shard] * 4
    assert deferred == [shard * world] * 3 + [shard]
