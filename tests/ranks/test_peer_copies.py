"""Gathers and reductions by peer copies, and what their kernels spare, on CPUs: `cpu_peers.py`. GPUs: `tests/gpu`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.ranks.cpu_peers import peers_on_cpu
from tests.ranks.nets import square_loss, toy
from tests.ranks.pairs import joined, part
from tests.ranks.training import (
    Configs,
    Result,
    adamw,
    assert_same,
    difference,
    llama_task,
    reference,
    train_all,
)

pytestmark = pytest.mark.ranks

PLAIN: Configs = {f"stage {stage}": {"stage": stage, "persist_below": 0} for stage in (1, 2, 3)}
PLAIN["some persist"] = {"stage": 3, "persist_below": 100}
PLAIN["deferred"] = {"stage": 3, "accumulate": "deferred", "persist_below": 0}
PLAIN["whole until backward"] = {"stage": 3, "reshard_after_forward": False, "persist_below": 0}
PLAIN["host"] = {"stage": 3, "persist_below": 0, "offload": {"optimizer": "cpu"}}
PLAIN["part of it"] = {"stage": 3, "persist_below": 0, "offload": {"optimizer": "cpu", "optimizer_ratio": 0.5}}
PLAIN["all on the host"] = {"stage": 3, "persist_below": 0, "offload": {"optimizer": "cpu", "params": "cpu"}}
BF16 = {"precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
TASK = llama_task(optimizer=adamw, clip=0.05, accumulate=2, steps=3)


def train_by_peers(configs: Configs) -> dict[str, Result]:
    with peers_on_cpu() as kernels:
        results = train_all(TASK, configs)
    assert kernels.add_parts.called
    assert kernels.copy_twice.called
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_training_by_peer_copies_is_that_of_one_process(ranks, world):
    expected = reference(TASK, world)
    for result in [ranks(world)(train_by_peers, PLAIN)]:
        for name in PLAIN:
            assert_same([each[name] for each in result], expected, 1e-6, name)


def train_in_pieces() -> Result:
    """Train with a small arena: the root goes through it in pieces, units beside it."""
    from ourshard.runtime import lane_reduced, peer

    sizes, reduce_in_pieces, lanes = peer._sizes, peer.PeerCopies.reduce_in_pieces, []

    def checked(peers: Any, lane: Any) -> None:
        reduce_in_pieces(peers, lane)
        lanes.append(lane.out.numel())
        blocks = [block.norm() for block in lane.out.split(peer.BLOCK)]
        torch.testing.assert_close(lane.norms, torch.stack(blocks))

    with (
        mock.patch.object(peer, "BLOCK", 256),
        mock.patch.object(lane_reduced, "BLOCK", 256),
        mock.patch.object(peer, "_sizes", lambda units: (sizes(units)[0], 4096)),
        mock.patch.object(peer.PeerCopies, "reduce_in_pieces", checked),
    ):
        result = train_by_peers({"stage 3": PLAIN["stage 3"]})["stage 3"]
    assert lanes
    assert min(lanes) > 4096 / 2 / 4
    return result


def test_what_is_larger_than_the_arena_goes_through_it_in_pieces(ranks):
    assert_same(ranks(2)(train_in_pieces), reference(TASK, 2), 1e-6)


def test_in_hybrid_too(ranks):
    expected = reference(TASK, 4)
    configs = {
        f"{name}, optimizer over {over}": {**PLAIN[name], "shard_size": 2, "shard_optimizer_over": over}
        for name in ("stage 1", "stage 3")
        for over in ("shard", "all")
    }
    results = ranks(4)(train_by_peers, configs)
    for name in configs:
        assert_same([each[name] for each in results], expected, 1e-6, name)


def both_ways() -> float:
    """Train in bf16 by peer copies and by collectives; return how far the weights are apart."""
    configs = {"bf16": {**PLAIN["stage 3"], **BF16}}
    mine, theirs = train_by_peers(configs)["bf16"], train_all(TASK, configs)["bf16"]
    assert mine.losses == pytest.approx(theirs.losses, abs=1e-3)
    return difference(mine.state, theirs.state)


def test_bf16_differs_by_no_more_than_where_sums_are_rounded(ranks):
    for apart in ranks(2)(both_ways):
        assert apart < 1e-3


def counted() -> None:
    """Count, in one step, the kernels of peers, and the elements that clipping reads and writes."""
    from ourshard import clip_grad_norm_, engine_of, shard_model
    from ourshard.runtime import clip

    with peers_on_cpu() as kernels:
        model = shard_model(toy(), {**PLAIN["stage 3"], "ledger": True})
        optimizer = adamw(model.parameters())
        for number in range(2):
            kernels.copy_twice.reset_mock()
            before = sum(engine_of(model).ledger.gathers.values())
            square_loss(model, part(joined(number))).backward()
            gathers = sum(engine_of(model).ledger.gathers.values()) - before
            sharded = [
                len([lane for lane in unit.lanes if not lane.placement.whole]) for unit in engine_of(model).units
            ]
            assert set(sharded) == {1}
            assert kernels.copy_twice.call_count == gathers  # no copy beside it
            with (
                mock.patch.object(clip, "norms_of", wraps=clip.norms_of) as norms_of,
                mock.patch.object(torch, "_foreach_div_", wraps=torch._foreach_div_) as divide,
            ):
                clip_grad_norm_(model, 1e-3)
            read = sum(tensor.numel() for call in norms_of.call_args_list for tensor in call.args[0])
            assert read == len(list(engine_of(model).lanes()))  # a block each, where all would be thousands
            assert divide.called == (number == 0)  # the optimizer is not adopted before its first step
            optimizer.step()
            optimizer.zero_grad()


def test_a_step_reads_masters_once_a_gather_and_clipping_reads_no_gradient(ranks):
    ranks(2)(counted)


def _scale(parameters: Any, factor: float) -> None:
    for parameter in parameters:
        parameter.grad.data.mul_(factor)  # which torch does not count


CHANGES = {
    "nothing": lambda model, optimizer: 1.0,
    "the model's, by handle": lambda model, optimizer: [p.grad.mul_(3.0) for p in model.parameters()] and 3.0,
    "the optimizer's, past torch's count": lambda model, optimizer: (
        _scale([p for group in optimizer.param_groups for p in group["params"]], 3.0) or 3.0
    ),
}


def norms_after(change: str) -> list[float]:
    """Return the norm after a change of gradients, over what it should be; with several runs of a lane, too."""
    from ourshard import adopt_optimizer, clip_grad_norm_, shard_model

    found = []
    for two_groups in (False, True):
        with peers_on_cpu():
            model = shard_model(toy(), PLAIN["stage 3"])
            groups: Any = list(model.parameters())
            if two_groups:
                groups = [{"params": groups[::2], "weight_decay": 0.0}, {"params": groups[1::2]}]
            optimizer = adopt_optimizer(torch.optim.AdamW(groups, lr=1e-3))
            square_loss(model, part(joined(0))).backward()
            before = clip_grad_norm_(model, 1e9).item()
            factor = CHANGES[change](model, optimizer)
            found.append(clip_grad_norm_(model, 1e9).item() / before / factor)
            square_loss(model, part(joined(0))).backward()  # adds the same again
            found.append(clip_grad_norm_(model, 1e9).item() / before / (factor + 1.0))
            first = next(model.parameters())
            first.grad = None
            rest = clip_grad_norm_([p for p in model.parameters() if p is not first], 1e9).item()
            found.append(clip_grad_norm_(model, 1e9).item() / rest)
    return found


@pytest.mark.parametrize("change", list(CHANGES))
def test_norms_that_reductions_leave_are_not_used_once_a_gradient_was_seen(ranks, change):
    for found in ranks(2)(norms_after, change):
        assert found == pytest.approx([1.0] * 6, rel=1e-5)
