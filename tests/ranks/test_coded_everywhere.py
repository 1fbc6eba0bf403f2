"""X03: codecs with everything else. Odd sizes and zero blocks, all ways to accumulate, several forwards, a join."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.integrations.test_joining import join
from tests.ranks.nets import WIDTH, numbers, square_loss, toy
from tests.ranks.pairs import joined, pair, part
from tests.ranks.test_several_forwards import nothing_is_left
from tests.ranks.training import Configs, Task, adamw, difference, reference, train_all

pytestmark = pytest.mark.ranks

BOTH: dict[str, Any] = {"weights": "int8", "gradients": "int8", "block": 16}
INT4: dict[str, Any] = {"gradients": "int4", "error_feedback": True, "block": 16}
NOISY: dict[str, Any] = {**INT4, "stochastic_rounding": True, "seed": 1}


class Odd(nn.Module):
    """Sizes of 1, 3, 5 and 7; an embedding of which most rows are unused, so that their gradients are zero blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(61, 7)
        self.up = nn.Linear(7, 5)
        self.down = nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(1, 1))
        self.shift = nn.Parameter(torch.zeros(()))
        self.last = nn.Linear(3, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        return self.last(self.down(torch.tanh(self.up(self.embed(ids)))) * self.scale + self.shift)


def odd_task(steps: int) -> Task:
    return Task(make=Odd, loss=square_loss, batch=numbers, optimizer=adamw, steps=steps, clip=1.0)


ODD: Configs = {
    "int8 both": {"communication": BOTH},
    "fp8 weights": {"communication": {"weights": "fp8", "block": 16}},
    "int4": {"communication": INT4},
    "int4, noisy": {"communication": NOISY},
    "int4, stage 1": {"stage": 1, "communication": INT4},
    "int8, on the host": {"communication": BOTH, "offload": {"optimizer": "cpu", "params": "cpu"}},
}
ODD_ON_FOUR: Configs = {
    "hpZ, int8 both": {"communication": BOTH, "secondary_shard_size": 2},
    "hpZ, on the host": {**ODD["int8, on the host"], "secondary_shard_size": 2},
    "int4, two hops": {"communication": {**INT4, "node_size": 2}},
    "int8, two hops both ways": {"communication": {**BOTH, "node_size": 2, "two_hop_gathers": True}},
    "2x2": {"communication": BOTH, "shard_size": 2},
    "2x2, divided": {"communication": INT4, "shard_size": 2, "shard_optimizer_over": "all"},
    "1x4": {"communication": BOTH, "shard_size": 1},
    "1x4, divided": {"communication": BOTH, "shard_size": 1, "shard_optimizer_over": "all"},
}


@pytest.mark.parametrize(("world", "configs"), [(2, ODD), (4, ODD_ON_FOUR)])
def test_sizes_of_one_three_and_seven_train_as_without_codecs(world, configs, ranks):
    """20 steps: losses near those of one process, which fall; gradients are there; ranks agree bit by bit."""
    task = odd_task(20)
    small = {name: {"persist_below": 0, **config} for name, config in configs.items()}
    results, expected = ranks(world)(train_all, task, small), reference(task, world)
    for name in configs:
        for result in results:
            found = result[name]
            assert found.losses == pytest.approx(expected.losses, rel=1e-2), name
            assert found.norms == pytest.approx(expected.norms, rel=0.2), name
            assert min(found.norms) > 0, name
            assert difference(found.state, expected.state) < 20 * 2e-3, name  # each step the other way at most
            assert difference(found.state, results[0][name].state) == 0, name


WAYS: Configs = {
    "sharded": {},
    "deferred": {"accumulate": "deferred"},
    "recomputed": {"activation_checkpointing": True},
    "no prefetch": {"prefetch": {"forward": 0, "backward": 0}},
    "one unit": {"wrap": {"policy": "none"}},
    "some persist": {"persist_below": 100},
    "half of it on the host": {"offload": {"optimizer": "cpu", "optimizer_ratio": 0.5}},
    "bf16": {"precision": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}},
}
CODECS = {
    "int8": {"gradients": "int8", "block": 16},
    "int4": {"gradients": "int4", "block": 16},
    "feedback": INT4,
    "noisy": NOISY,
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_codec_goes_with_each_stage_and_way_to_accumulate(stage, accumulate, ranks):
    task = Task(optimizer=adamw, steps=3, accumulate=accumulate, clip=1.0)
    configs: Configs = {}
    for codec, communication in CODECS.items():
        weights = {"weights": "int8" if codec in ("int8", "feedback") else "fp8"} if stage == 3 else {}
        for way, options in WAYS.items():
            configs[f"{codec}, {way}"] = {
                "stage": stage,
                "persist_below": 0,
                "communication": {**communication, **weights},
                **options,
            }
    results, expected = ranks(2)(train_all, task, configs, timeout=240), reference(task, 2)
    for name in configs:
        for result in results:
            assert result[name].losses == pytest.approx(expected.losses, rel=2e-2), name
            assert 1e-7 < difference(result[name].state, expected.state) < 3 * 2e-3, name
            assert difference(result[name].state, results[0][name].state) == 0, name


def several_forwards(config: dict[str, Any]) -> None:
    """Two forwards before one backward, one forward with two backwards, and a part that a step does not use."""
    both = pair({"persist_below": 0, "ledger": True, **config}, toy, adamw)
    for step in range(3):
        both.zero_grad()
        a, b = joined(2 * step), joined(2 * step + 1)
        (both.plain(a).square().mean() + both.plain(b).abs().mean()).backward()
        (both.sharded(part(a)).square().mean() + both.sharded(part(b)).abs().mean()).backward()
        for model, rows in ((both.plain, a), (both.sharded, part(a))):
            out = model(rows)
            out.square().mean().backward(retain_graph=True)
            F.mse_loss(out, rows).backward()
        nothing_is_left(both.engine)
        both.step()
    both.assert_same(3 * 2e-3)


def each_several_forwards() -> None:
    for communication in (BOTH, NOISY, {"weights": "fp8", "block": 16}):
        for more in ({}, {"accumulate": "deferred"}, {"reshard_after_forward": False}):
            several_forwards({"communication": communication, **more})


def test_several_forwards_and_backwards_are_near_those_of_one_process(ranks):
    ranks(2)(each_several_forwards)


@pytest.mark.parametrize("communication", [BOTH, NOISY], ids=["int8", "int4, noisy"])
def test_a_rank_that_runs_out_of_batches_answers_in_codes_too(communication, ranks):
    config = {"stage": 3, "persist_below": 0}
    exact, coded = ranks(2)(join, config), ranks(2)(join, {**config, "communication": communication})
    for result, wanted in zip(coded, exact, strict=True):
        assert result["batches"] == wanted["batches"]
        assert 0 < difference(dict(result["state"]), dict(wanted["state"])) < 3 * 2e-2
        assert difference(dict(result["state"]), dict(coded[0]["state"])) == 0


def overflow(config: dict[str, Any], value: float) -> tuple[list[bool], float, bool]:
    """Poison one element of one rank's loss; say if norms are finite before, in and after that step, and the last."""
    from ourshard import clip_grad_norm_

    both = pair({"persist_below": 0, **config}, toy, adamw)
    finite = []
    for step in range(3):
        both.zero_grad()
        rows = part(joined(step)).clone()
        if step == 1 and torch.distributed.get_rank() == 1:
            rows[0, 0] = value
        square_loss(both.sharded, rows).backward()
        norm = clip_grad_norm_(both.sharded, 1.0)
        finite.append(bool(norm.isfinite()))
        if finite[-1]:  # as a loss scaler does
            both.optimizer.step()
    return finite, norm.item(), all(bool(lane.master.isfinite().all()) for lane in both.engine.lanes())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_value_of_one_rank_is_seen_by_all_and_does_not_outlive_its_step(value, ranks):
    for communication in (BOTH, INT4, NOISY, {"weights": "int8", "block": 16}):
        told = ranks(2)(overflow, {"communication": communication}, value)
        assert all(finite == [True, False, True] and good for finite, _, good in told)
        assert told[0][1] == told[1][1] > 0
