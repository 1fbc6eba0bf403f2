"""What coded gradients keep between steps, residuals and noise: counted, saved, and resumed bit by bit."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ourshard import cli
from safetensors.torch import load_file

from tests.ranks.nets import llama, token_loss, tokens
from tests.ranks.training import Configs, adamw, difference, llama_task, reference, train_all

pytestmark = pytest.mark.ranks

Told = dict[str, Any]


def coded(**communication: Any) -> dict[str, Any]:
    return {"persist_below": 0, "ledger": True, "communication": {"gradients": "int4", "block": 64, **communication}}


FEEDBACK = coded(error_feedback=True)
NOISY = coded(error_feedback=True, stochastic_rounding=True, seed=3)


def test_stochastic_rounding_gives_the_same_bits_for_the_same_seed_and_stays_near(ranks):
    task = llama_task(optimizer=adamw, accumulate=2, clip=1.0, steps=3, rows=1)
    noisy: Configs = {f"seed {s} {name}": coded(stochastic_rounding=True, seed=s) for s in (0, 1) for name in "ab"}
    configs: Configs = {**noisy, "feedback": FEEDBACK, "both": NOISY}
    expected = reference(task, 2)
    results = ranks(2)(train_all, task, configs)
    for name in configs:
        assert results[0][name].losses == pytest.approx(expected.losses, rel=1e-2), name
        assert difference(results[0][name].state, results[1][name].state) == 0, name
    states = {name: results[0][name].state for name in configs}
    assert difference(states["seed 0 a"], states["seed 0 b"]) == 0
    assert difference(states["seed 1 a"], states["seed 1 b"]) == 0
    assert difference(states["seed 0 a"], states["seed 1 a"]) > 0


def sums(config: dict[str, Any], steps: int) -> Told:
    """Reduce the same gradients again and again; return the sums of this rank's rows by name, and seeds by lane."""
    from ourshard import engine_of, shard_model

    model = shard_model(llama(tie=False), config)
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    total: Counter[tuple[str, int]] = Counter()  # by name and first row
    coders = [lane.coder for lane in engine.lanes() if lane.coder is not None]
    seeds: list[int] = []
    for _ in range(steps):
        token_loss(model, tokens(engine.mesh.world.rank, 1)).backward()
        for lane in engine.lanes():
            for position in range(len(lane.parameters)):
                place = lane.name_of(position), lane.rows(position).start
                total[place] += lane.local_gradient_rows(position).double().flatten()
        seeds += [coder._seed(site) for coder in coders for site in coder.residuals]
        for parameter in model.parameters():
            parameter.grad = None
    held = sum(4 * residual.numel() for coder in coders for residual in coder.residuals.values())
    assert engine.ledger.held["residual"] == held
    return {"sums": dict(total), "seeds": seeds, "held": held}


def joined(told: list[Told]) -> torch.Tensor:
    """Return all elements once, in the order of names and rows."""
    rows: dict[tuple[str, int], torch.Tensor] = {}
    for each in told:
        rows |= {place: values for place, values in each["sums"].items() if values.numel()}
    return torch.cat([rows[place] for place in sorted(rows)])


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 hop": (2, {}),
    "2x2": (4, {"shard_size": 2}),
    "2x2, divided": (4, {"shard_size": 2, "shard_optimizer_over": "all"}),
    "2 hops": (4, {"secondary_shard_size": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_error_feedback_loses_nothing_over_steps_but_what_the_residuals_hold(name, ranks):
    """The sum over steps is off by the last residuals, so that the mean gets better with the number of steps."""
    world, layout = LAYOUTS[name]
    exact = {**coded(), "communication": {}}
    wanted, plain, fed = (ranks(world)(sums, {**config, **layout}, 8) for config in (exact, coded(), FEEDBACK))
    off, unfed = ((joined(told) - joined(wanted)).norm() for told in (fed, plain))
    assert 0 < off < unfed / 3
    assert all(told["held"] > 0 for told in fed)
    assert not any(told["held"] for told in plain)


def test_the_noise_of_each_rank_lane_and_reduction_is_another(ranks):
    seeds = [seed for told in ranks(2)(sums, NOISY, 3) for seed in told["seeds"]]
    assert len(seeds) == len(set(seeds)) >= 2 * 3


def run(config: dict[str, Any], steps: range, save: Path | None = None, load: Path | None = None) -> Told:
    """Train some steps; return losses, weights, and what was warned of."""
    import ourshard
    from ourshard import full_state_dict, shard_model

    model = shard_model(llama(), config)
    engine = ourshard.engine_of(model)
    assert engine is not None
    optimizer = adamw(model.parameters())
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ourshard").addHandler(handler)
    try:
        if load is not None:
            ourshard.load(model, optimizer, load)
    finally:
        logging.getLogger("ourshard").removeHandler(handler)
    losses = []
    for step in steps:
        loss = token_loss(model, tokens(2 * step + engine.mesh.world.rank, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if save is not None and step == 1:
            ourshard.save(model, optimizer, save)
    return {"losses": losses, "state": full_state_dict(model), "warned": warned}


def test_resuming_with_error_feedback_and_noise_gives_the_same_bits_and_another_world_begins_at_zero(ranks, tmp_path):
    folder = tmp_path / "saved"
    whole = ranks(2)(run, NOISY, range(4), folder)
    again = ranks(2)(run, NOISY, range(2, 4), None, folder)
    for before, after in zip(whole, again, strict=True):
        assert after["losses"] == before["losses"][2:]
        assert difference(after["state"], before["state"]) == 0
        assert after["warned"] == []
    other = ranks(4)(run, NOISY, range(2, 4), None, folder)
    assert ["residuals" in text and "2 ranks in another layout" in text for text in other[0]["warned"]] == [True]
    assert all(told["warned"] == [] for told in other[1:])
    without = ranks(2)(run, {**NOISY, "communication": {"gradients": "int4", "block": 64}}, range(2, 4), None, folder)
    assert difference(without[0]["state"], whole[0]["state"]) > 0


def test_the_checkpoint_verifies_and_converts_without_the_residuals(ranks, tmp_path):
    ranks(2)(run, FEEDBACK, range(2), tmp_path / "saved")
    for command, *more in (["verify"], ["inspect"], ["convert", str(tmp_path / "whole"), "--to", "safetensors"]):
        with pytest.raises(SystemExit) as ended:
            cli.main([command, str(tmp_path / "saved"), *more])
        assert not ended.value.code
    names = set(load_file(tmp_path / "whole" / "model.safetensors"))
    assert names == {name for name, _ in llama().named_parameters()}


def weights_under(scales: list[float], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train with a loss that is scaled by another number in each step; none for no scaler."""
    from ourshard import ShardGradScaler, full_state_dict, shard_model

    model = shard_model(llama(), config)
    optimizer = adamw(model.parameters())
    scaler = ShardGradScaler("cpu", init_scale=scales[0] if scales else 1.0, enabled=bool(scales))
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(token_loss(model, tokens(2 * step + dist.get_rank(), 1))).backward()
        scaler.step(optimizer)
        scaler.update(scales[step + 1] if scales else None)
    return full_state_dict(model)


def test_error_feedback_follows_the_scale_of_the_loss(ranks):
    """Powers of two change no code, so that what is lost of scaled gradients is the scaled loss, to the last bit."""
    plain = ranks(2)(weights_under, [], FEEDBACK)[0]
    scaled = ranks(2)(weights_under, [2.0**12, 2.0**10, 2.0**11, 2.0**3, 2.0**14, 1.0, 2.0], FEEDBACK)[0]
    assert difference(scaled, plain) == 0
    assert difference(ranks(2)(weights_under, [], coded())[0], plain) > 0
