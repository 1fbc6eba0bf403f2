"""C05, G07: fp16 with loss scaling, where an overflow is in one rank's shard only, on the device or on the host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks.nets import llama, square_loss, token_loss, tokens, toy
from tests.ranks.pairs import joined, pair, part
from tests.ranks.training import TOY, adamw, momentum, with_each

pytestmark = pytest.mark.ranks

CONFIGS = TOY | with_each({name: TOY[name] for name in ("stage 1", "stage 3")}, "host", offload={"optimizer": "cpu"})
EVERY = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def poison(model: Any, rank: int) -> None:
    """Put an infinity into the rows that one rank holds of the last gradient it has rows of."""
    if dist.get_rank() != rank:
        return
    for parameter in reversed(list(model.parameters())):
        local = parameter.grad.local if hasattr(parameter, "row_range") else parameter.grad
        if local.numel():
            local.view(-1)[-1] = math.inf
            return


def overflow(config: dict[str, Any], fused: bool, unscale: bool) -> list[tuple[float, bool]]:
    """Return, step by step, the scale and whether weights changed; rank 1 alone overflows in steps 1 and 2."""
    from ourshard import full_state_dict, shard_model
    from ourshard.runtime.scaler import ShardGradScaler

    model = shard_model(toy(), config)
    make = torch.optim.AdamW if fused else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.01, **({} if fused else {"foreach": True}))
    scaler = ShardGradScaler("cpu", init_scale=256.0, growth_interval=2)
    seen = []
    before = full_state_dict(model)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(square_loss(model, part(joined(step)))).backward()
        if step in (1, 2):
            poison(model, 1)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        after = full_state_dict(model)
        seen.append((scaler.get_scale(), any(not torch.equal(after[n], before[n]) for n in after)))
        assert all(torch.isfinite(value).all() for value in after.values())
        before = after
    return seen


@EVERY
def test_an_overflow_in_one_ranks_shard_skips_the_step_and_halves_the_scale_on_all(ranks, config):
    expected = [(256.0, True), (128.0, False), (64.0, False), (64.0, True), (128.0, True)]
    for fused in (True, False):
        for unscale in (True, False):
            assert ranks(2)(overflow, config, fused, unscale) == [expected] * 2, f"fused={fused} unscale={unscale}"


def scaled_training(config: dict[str, Any]) -> None:
    from ourshard.runtime.scaler import ShardGradScaler

    both = pair(config, toy, momentum)
    scaler = ShardGradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        both.zero_grad()
        square_loss(both.plain, joined(step)).backward()
        scaler.scale(square_loss(both.sharded, part(joined(step)))).backward()
        both.plain_optimizer.step()
        scaler.step(both.optimizer)
        scaler.update()
    both.assert_same()


@EVERY
def test_scaled_losses_train_as_unscaled_ones(ranks, config):
    ranks(2)(scaled_training, config)


def half(config: dict[str, Any]) -> tuple[float, float, str]:
    from ourshard import engine_of, shard_model
    from ourshard.runtime.scaler import ShardGradScaler

    model = shard_model(toy(), {**config, "precision": {"param_dtype": "float16"}})
    optimizer, scaler = adamw(model.parameters()), ShardGradScaler("cpu", init_scale=2.0**12)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = square_loss(model, part(joined(0)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    engine = engine_of(model)
    assert engine is not None
    return losses[0], losses[-1], str({lane.store_dtype for lane in engine.lanes()})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_compute_learns_with_fp32_masters(ranks, stage):
    for first, last, masters in ranks(2)(half, {"stage": stage, "persist_below": 0}):
        assert last < 0.9 * first
        assert masters == "{torch.float32}"


def norms_of_unscaled(config: dict[str, Any]) -> list[float]:
    """Return the norm of unscaled gradients, twice, and again after the step has divided them."""
    from ourshard import clip_grad_norm_, shard_model
    from ourshard.runtime.scaler import ShardGradScaler

    model = shard_model(toy(), config)
    optimizer = adamw(model.parameters())
    scaler = ShardGradScaler("cpu", init_scale=1024.0)
    norms = []
    for step in range(2):
        scaler.scale(square_loss(model, part(joined(step)))).backward()
        scaler.unscale_(optimizer)
        norms += [clip_grad_norm_(model, 0.05).item(), clip_grad_norm_(model, 0.04).item()]
        scaler.step(optimizer)
        scaler.update()
        norms.append(clip_grad_norm_(model, 1e9).item())
        optimizer.zero_grad()
    return norms


def test_norms_on_the_host_are_of_unscaled_and_of_clipped_gradients(ranks):
    """The kernels of loss scaling and of fused optimizers change gradients, and their versions do not tell."""
    here = ranks(2)(norms_of_unscaled, TOY["stage 3"])
    there = ranks(2)(norms_of_unscaled, {**TOY["stage 3"], "offload": {"optimizer": "cpu"}})
    assert there == here
    assert here[0][1:3] == pytest.approx([0.05, 0.04], rel=1e-4)


def scales_of(communication: dict[str, Any]) -> list[float]:
    """Compute in fp16 from a scale at which gradients overflow; return the scale after each step."""
    from ourshard import full_state_dict, shard_model
    from ourshard.runtime.scaler import ShardGradScaler

    half = {"param_dtype": "float16", "reduce_dtype": "float16"}
    model = shard_model(llama(), {"persist_below": 0, "precision": half, "communication": communication})
    optimizer = adamw(model.parameters())
    scaler = ShardGradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    scales = []
    for step in range(10):
        optimizer.zero_grad()
        scaler.scale(token_loss(model, tokens(2 * step + dist.get_rank(), 1))).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert all(value.isfinite().all() for value in full_state_dict(model).values())
    return scales


def test_overflows_of_fp16_are_seen_through_codes_on_all_ranks(ranks):
    one, other = ranks(2)(scales_of, {"weights": "int8", "gradients": "int4", "stochastic_rounding": True})
    assert one == other
    assert one[:2] == [2.0**19, 2.0**18]  # the first steps were skipped
    assert one != sorted(one, reverse=True)  # later ones were not
