"""What the planner predicts, against the ledger of real ranks: order, bytes on the wire, bytes held by kind."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ourshard.config import ShardConfig
from ourshard.planning.layouts import plan_model
from ourshard.planning.moves import MeshSizes, Move
from ourshard.planning.rehearsal import Rehearsal
from ourshard.planning.trace import trace
from ourshard.runtime.ledger import Kind
from torch import nn

WIDTH, LENGTH, VOCABULARY = 48, 8, 200


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """A model with the shape of a language model: embedding, blocks, norm, head."""

    def __init__(self, variant: str = "") -> None:
        super().__init__()
        vocabulary = 25_000 if variant == "large vocabulary" else VOCABULARY
        self.times = 2 if variant == "blocks run twice" else 1
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if variant == "frozen base":
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("norm" in name or "down" in name)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x)).float().square().mean()


@dataclass(frozen=True)
class Seen:
    """What one rank's ledger counted in its third step."""

    order: list[str]
    wire: dict[str, int]
    held: dict[str, int]
    peak: dict[str, int]
    peak_total: int


def train(values: dict[str, Any], variant: str, micro_batches: int) -> Seen:
    from ourshard.runtime.api import adopt_optimizer, engine_of, shard_model

    torch.manual_seed(0)
    model = shard_model(Tiny(variant), {**values, "ledger": True}, cast_small=False)
    optimizer = adopt_optimizer(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3))
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    ids = torch.arange(2 * LENGTH).view(2, LENGTH)
    for number in range(3):
        if number == 2:
            engine.ledger.trace = []
            engine.ledger.reset()
        for micro in range(micro_batches):
            engine.require_sync = micro == micro_batches - 1
            with torch.autocast("cpu", torch.bfloat16, enabled="precision" in values):
                loss = model(ids)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ledger = engine.ledger
    return Seen(list(ledger.trace or ()), dict(ledger.wire), ledger.held, ledger.peak, ledger.peak_total)


def rehearse(values: dict[str, Any], variant: str, micro_batches: int, mesh: MeshSizes) -> tuple[Rehearsal, list[Move]]:
    config = ShardConfig.from_dict(values)
    with torch.device("meta"):
        model = Tiny(variant)
        ids = torch.zeros(2, LENGTH, dtype=torch.long)
    planned = plan_model(model, config, mesh)
    autocast = torch.bfloat16 if "precision" in values else None
    visits = trace(model, planned.parts(), {"ids": ids}, autocast=autocast).visits
    rehearsal = Rehearsal(planned, config, mesh, visits, micro_batches, buffers_in_flight=1)
    return rehearsal, rehearsal.settled()


HALF = {"precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
SMALL = {"persist_below": 100}
CPU = {"offload": {"optimizer": "cpu"}}
BOTH = {"offload": {"optimizer": "cpu", "params": "cpu"}}
HALF_CPU = {"offload": {"optimizer": "cpu", "optimizer_ratio": 0.5}}
INT8 = {"communication": {"weights": "int8"}}
GRADS = {"communication": {"gradients": "int8", "block": 64}}
BOTH_INT8 = {"weights": "int8", "gradients": "int8"}
EARLY = {"optimizer_in_backward": True}
SHORT = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
FP8 = {"communication": {"weights": "fp8", "block": 64}}
CASES: dict[str, tuple[dict[str, Any], str, int]] = {
    "stage 0": ({"stage": 0}, "", 1),
    "stage 1": ({"stage": 1}, "", 1),
    "stage 2": ({"stage": 2}, "", 1),
    "stage 3": ({"stage": 3}, "", 1),
    "stage 3, nothing small": ({"stage": 3, **SMALL}, "", 1),
    "stage 3, kept whole between forward and backward": ({"stage": 3, "reshard_after_forward": False}, "", 1),
    "stage 3, the last layer kept whole": ({"stage": 3, "keep_last": 12_000}, "", 1),
    "stage 3, no prefetch": ({"stage": 3, "prefetch": {"forward": 0, "backward": 0}}, "", 1),
    "stage 3, two ahead": ({"stage": 3, "prefetch": {"forward": 2, "backward": 2}}, "", 1),
    "stage 3, accumulation in shards": ({"stage": 3}, "", 2),
    "stage 3, deferred accumulation": ({"stage": 3, "accumulate": "deferred"}, "", 2),
    "stage 1, accumulation": ({"stage": 1}, "", 2),
    "stage 0, 16 bits": ({"stage": 0, **HALF}, "", 1),
    "stage 1, 16 bits": ({"stage": 1, **HALF}, "", 2),
    "stage 2, 16 bits": ({"stage": 2, **HALF}, "", 1),
    "stage 3, 16 bits": ({"stage": 3, **HALF}, "", 2),
    "stage 3, frozen base": ({"stage": 3, **HALF}, "frozen base", 1),
    "stage 2, frozen base": ({"stage": 2}, "frozen base", 1),
    "stage 3, embedding and head of their own": ({"stage": 3}, "large vocabulary", 2),
    "stage 2, embedding and head of their own": ({"stage": 2, **HALF}, "large vocabulary", 1),
    "stage 3, units merged": ({"stage": 3, "wrap": {"merge": 200_000}}, "", 1),
    "stage 3, blocks run twice": ({"stage": 3}, "blocks run twice", 2),
    "stage 3, int8 weights": ({"stage": 3, **INT8}, "", 1),
    "stage 3, fp8 weights, 16 bits": ({"stage": 3, **HALF, **FP8}, "frozen base", 2),
    "stage 2, int8 gradients": ({"stage": 2, **GRADS}, "", 2),
    "stage 3, int8 gradients, 16 bits": ({"stage": 3, "communication": BOTH_INT8, "precision": SHORT}, "", 2),
    "stage 3, stepped in backward": ({"stage": 3, **EARLY}, "", 1),
    "stage 1, 16 bits, stepped in backward": ({"stage": 1, **HALF, **EARLY}, "blocks run twice", 2),
    "stage 2, frozen base, stepped in backward": ({"stage": 2, **EARLY}, "frozen base", 1),
    "stage 1, optimizer on the host": ({"stage": 1, **CPU}, "", 2),
    "stage 2, optimizer on the host, 16 bits": ({"stage": 2, **CPU, **HALF}, "", 1),
    "stage 3, optimizer on the host": ({"stage": 3, **CPU}, "", 1),
    "stage 3, optimizer on the host, 16 bits": ({"stage": 3, **CPU, **HALF}, "", 2),
    "stage 3, half of it on the host": ({"stage": 3, **HALF_CPU}, "", 2),
    "stage 3, all on the host": ({"stage": 3, **BOTH}, "", 2),
    "stage 3, all on the host, 16 bits, frozen base": ({"stage": 3, **BOTH, **HALF}, "frozen base", 1),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_a_rehearsal_counts_what_the_ledger_counts(name: str, ranks: Callable[..., Any]) -> None:
    values, variant, micro_batches = CASES[name]
    seen: Seen = ranks(2)(train, values, variant, micro_batches)[0]
    compare(seen, *rehearse(values, variant, micro_batches, MeshSizes(2)))


@pytest.mark.ranks
def test_a_rehearsal_of_one_rank_with_a_part_on_the_host_counts_what_the_ledger_counts(
    ranks: Callable[..., Any],
) -> None:
    """Parameters whose masters stay on the device do not stay whole beside them: `params` says they should not."""
    offload = {**BOTH["offload"], "optimizer_ratio": 0.5}
    values = {"stage": 3, "persist_below": 0, "wrap": {"merge": 0}, **HALF, "offload": offload}
    seen: Seen = ranks(1)(train, values, "", 1)[0]
    assert seen.held["slot"] == 0
    compare(seen, *rehearse(values, "", 1, MeshSizes(1)))


@pytest.mark.ranks
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_rehearsal_of_a_hybrid_mesh_counts_what_the_ledger_counts(
    micro_batches: int, ranks: Callable[..., Any]
) -> None:
    values = {"stage": 3, "shard_size": 2}
    seen: Seen = ranks(4)(train, values, "", micro_batches)[0]
    compare(seen, *rehearse(values, "", micro_batches, MeshSizes(2, 2)))


DIVIDED: dict[str, tuple[dict[str, Any], str, int, int]] = {
    "as it is": ({"stage": 3}, "", 1, 2),
    "16 bits, frozen base": ({"stage": 3, **HALF, **SMALL}, "frozen base", 2, 2),
    "optimizer on the host": ({"stage": 3, **CPU, **HALF}, "", 2, 2),
    "all on the host": ({"stage": 3, **BOTH}, "", 2, 2),
    "stage 2": ({"stage": 2}, "", 2, 2),
    "stage 1, 16 bits": ({"stage": 1, **HALF}, "", 2, 2),
    "int8": ({"stage": 3, "communication": {**BOTH_INT8, "block": 64}}, "", 2, 2),
    "one rank a copy": ({"stage": 3}, "", 2, 1),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", DIVIDED)
def test_a_rehearsal_with_masters_over_replicas_counts_what_the_ledger_counts(
    name: str, ranks: Callable[..., Any]
) -> None:
    more, variant, micro_batches, shards = DIVIDED[name]
    values = {"shard_size": shards, "shard_optimizer_over": "all", **more}
    seen: Seen = ranks(4)(train, values, variant, micro_batches)[0]
    compare(seen, *rehearse(values, variant, micro_batches, MeshSizes(shards, 4 // shards)))


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["two hops, sums beside", "two replicas"])
def test_a_rehearsal_of_coded_gradients_on_four_ranks_counts_what_the_ledger_counts(
    name: str, ranks: Callable[..., Any]
) -> None:
    more, mesh = {
        "two hops, sums beside": ({"precision": SHORT}, MeshSizes(4, node=2)),
        "two replicas": ({"shard_size": 2}, MeshSizes(2, 2)),
    }[name]
    node_size = mesh.node if mesh.node > 1 else None
    values = {
        "stage": 3,
        "communication": {**BOTH_INT8, "block": 64, "node_size": node_size, "error_feedback": True},
        **more,
    }
    seen: Seen = ranks(4)(train, values, "", 2)[0]
    compare(seen, *rehearse(values, "", 2, mesh))


@pytest.mark.ranks
@pytest.mark.parametrize("more", [{}, {**HALF, **INT8, "secondary_shard_size": 2}], ids=["exact", "int8, second shard"])
def test_a_rehearsal_of_gathers_in_two_hops_counts_what_the_ledger_counts(
    more: dict[str, Any], ranks: Callable[..., Any]
) -> None:
    communication = {**more.get("communication", {}), "two_hop_gathers": True, "node_size": 2}
    values = {"stage": 3, **more, "communication": communication}
    seen: Seen = ranks(4)(train, values, "large vocabulary", 2)[0]
    compare(seen, *rehearse(values, "large vocabulary", 2, MeshSizes(4, node=2)))


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["as it is", "16 bits, int8, frozen base", "on the host"])
def test_a_rehearsal_with_a_secondary_shard_counts_what_the_ledger_counts(name: str, ranks: Callable[..., Any]) -> None:
    more, variant = {
        "as it is": ({}, "large vocabulary"),
        "16 bits, int8, frozen base": ({**HALF, "communication": {"weights": "int8", "block": 64}}, "frozen base"),
        "on the host": ({**BOTH, **SMALL}, ""),
    }[name]
    values: dict[str, Any] = {"stage": 3, "secondary_shard_size": 2, **more}
    seen: Seen = ranks(4)(train, values, variant, 2)[0]
    compare(seen, *rehearse(values, variant, 2, MeshSizes(4, node=2)))
    assert seen.wire["all_gather/node"] > seen.wire["all_gather/shard"] or name != "on the host"


def compare(seen: Seen, rehearsal: Rehearsal, moves: list[Move]) -> None:
    assert rehearsal.order == seen.order
    wire: Counter[str] = Counter()
    for move in moves:
        for call in move.collectives:
            wire[f"{call.name}/{call.axis}"] += call.wire_nbytes(rehearsal.mesh.of(call.axis))
    assert dict(wire) == seen.wire
    kinds = [kind for kind in Kind if kind is not Kind.STATES]  # a rehearsal knows of no optimizer
    states = sum(2 * lane.master_nbytes for lane in rehearsal.planned.lanes if lane.trainable and lane.on_host)
    assert seen.held.pop("states") == seen.peak.pop("states") == states
    assert {kind.value: max(move.held.get(kind, 0) for move in moves) for kind in kinds} == seen.peak
    assert {kind.value: moves[-1].held.get(kind, 0) for kind in kinds} == seen.held
    total = max(sum(nbytes for kind, nbytes in move.held.items() if kind is not Kind.HOST) for move in moves)
    assert total == pytest.approx(seen.peak_total, rel=0.02)


def run_out_of_memory() -> list[str]:
    from ourshard.planning.advice import add_advice
    from ourshard.runtime.api import shard_model

    model = shard_model(Tiny(), {"stage": 0}, cast_small=False)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 KiB.")
    add_advice(error, model)
    other = ValueError("something else")
    add_advice(other, model)
    assert not hasattr(other, "__notes__")
    return list(error.__notes__)


@pytest.mark.ranks
@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes on exceptions came with Python 3.11")
def test_an_out_of_memory_error_names_the_cheapest_change_that_would_fit(ranks: Callable[..., Any]) -> None:
    (note,) = ranks(2)(run_out_of_memory)[0]
    assert "The cheapest change that would fit: stage: 2 saves" in note
