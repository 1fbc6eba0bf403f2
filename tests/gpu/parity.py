"""Compare sharded training over NCCL with one process, on the GPUs of one machine.

    torchrun --nproc_per_node 2 tests/gpu/parity.py [WORD ...]

With words, only configurations that have one of them (`shard_optimizer_over`, `secondary`) are run.
Every rank trains the reference by itself on the joined batch. Slots are poisoned with NaN when they are released, so a
read of a parameter that is not there shows. Prints one line a configuration; exits with 1 if any is off. The
environment may say DTYPES (float32 bfloat16), NVME_PATH (a folder), REPEATS (of stage 1), BACKEND (cuda:nccl,cpu:gloo).
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ourshard.config import ShardConfig
from ourshard.runtime import inputs, peer
from ourshard.runtime.api import clip_grad_norm_, engine_of, full_state_dict, shard_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 6
LR = 1e-3
CLIP = 0.5  # where the optimizer does not step in the backward


def build(device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1001,
        hidden_size=144,
        intermediate_size=308,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(device)


def batch(index: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randint(0, 1001, (2 * dist.get_world_size(), 64), generator=generator).to(device)


def reference(
    accumulate: int, device: torch.device, dtype: torch.dtype, clip: float
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train in one process: compute in `dtype` with fp32 masters."""
    masters = build(device)
    model = build(device).to(dtype)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=LR, eps=1e-6)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for index in range(accumulate):
            ids = batch(step * accumulate + index, device)
            loss = model(input_ids=ids, labels=ids).loss / accumulate
            loss.backward()
            total += loss.item()
            for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
                grad = parameter.grad.float()
                master.grad = grad if master.grad is None else master.grad + grad
                parameter.grad = None
        nn.utils.clip_grad_norm_(masters.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        with torch.no_grad():
            for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
                parameter.copy_(master)
    return masters.state_dict(), losses


def train_poisoned(
    model: Any, engine: Any, device: torch.device, steps: int, accumulate: int, *, clip: float = CLIP
) -> list[float]:
    """Train on this rank's part of each batch, with slots poisoned; return the losses, means over ranks."""
    poison(engine)
    share = engine.reducer.divisor(engine.mesh.world) / dist.get_world_size()  # of the mean, where gradients are added
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-6)
    losses = []
    for step in range(steps):
        total = torch.zeros((), device=device)
        for index in range(accumulate):
            ids = batch(step * accumulate + index, device).chunk(dist.get_world_size())[dist.get_rank()]
            with contextlib.nullcontext() if index == accumulate - 1 else engine.no_sync():
                loss = model(input_ids=ids, labels=ids).loss / accumulate
                (loss * share).backward()
            total += loss.detach().float()
        clip_grad_norm_(model, clip)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def on_all_ranks(good: bool, device: torch.device) -> bool:
    """Say whether every rank found it good. Collective."""
    told = torch.tensor(float(good), device=device)
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told.item())


def tell(good: bool, name: str, text: str) -> None:
    """Print the line of a case, on rank 0."""
    if dist.get_rank() == 0:
        print(f"{'ok ' if good else 'BAD'} {name}: {text}", flush=True)


def sharded(
    accumulate: int, device: torch.device, options: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], list[float], str]:
    """Return the state, the losses, and why there were no peer copies, if so."""
    checkpoint = options.pop("checkpoint", None)
    sizes = peer._sizes
    if options.pop("small_arena", False):  # units go through NCCL, the root through the arena in pieces
        peer._sizes = lambda units: (sizes(units)[0], 2**16)
    inputs.LEAST_NBYTES = 1  # those of this model are small
    model = build(device)
    if checkpoint is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoint})
        model.train()
    shard_model(model, ShardConfig.from_dict({"persist_below": 100, "wrap": {"merge": 0}, **options}))
    peer._sizes = sizes
    engine = engine_of(model)
    assert engine is not None
    losses = train_poisoned(model, engine, device, STEPS, accumulate, clip=clip_of(options))
    return full_state_dict(model), losses, engine.without_peers


def clip_of(options: dict[str, Any]) -> float:
    """Return the largest norm that is trained with; steps in the backward leave nothing to clip."""
    return math.inf if options.get("optimizer_in_backward") else CLIP


def poison(engine: Any) -> None:
    """Fill slots with NaN when they are released, in the order of the compute stream."""
    for unit in engine.units:
        for lane in unit.lanes:
            slot = lane.full

            def free(slot: Any = slot, original: Any = slot.free) -> None:
                if slot.allocated and slot.tensor.is_floating_point():
                    slot.tensor.fill_(float("nan"))
                original()

            if not lane.direct and lane.placement.params.value == "shard":
                lane.full = _Poisoned(slot, free)


class _Poisoned:
    """A slot whose `free` poisons first."""

    def __init__(self, slot: Any, free: Any) -> None:
        self._slot = slot
        self.free = free

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slot, name)


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(os.environ.get("BACKEND", "nccl"), device_id=device)
    torch.backends.cuda.matmul.allow_tf32 = False
    bad = 0
    names = os.environ.get("DTYPES", "float32 bfloat16").split()
    for dtype in (getattr(torch, name) for name in names):
        for accumulate in (1, 3):
            references = {clip: reference(accumulate, device, dtype, clip) for clip in (CLIP, math.inf)}
            tolerance = 2e-5 if dtype is torch.float32 else 4e-3
            for options in configurations(int(os.environ.get("REPEATS", "0"))):
                expected, expected_losses = references[clip_of(options)]
                precision = (
                    {} if dtype is torch.float32 else {"precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
                )
                state, losses, without_peers = sharded(accumulate, device, {**options, **precision})
                worst = max((state[n] - v.float().cpu()).abs().max().item() for n, v in expected.items())
                worst_loss = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
                ok = worst < tolerance and worst_loss < 10 * tolerance
                bad += not ok
                if dist.get_rank() == 0:
                    how = f"NCCL, {without_peers}" if without_peers else "peer copies"
                    case = f"{dtype} accumulate {accumulate} {options} ({how})"
                    print(f"{'ok ' if ok else 'BAD'} {case}: {worst:.2e} {worst_loss:.2e}", flush=True)
    dist.destroy_process_group()
    sys.exit(bad > 0)


def configurations(repeats: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"stage": stage} for stage in range(4)]
    found += [{"stage": 3, "reshard_after_forward": False}, {"stage": 3, "accumulate": "deferred"}]
    found += [{"stage": 3, "keep_last": 400_000}]
    found += [{"stage": 3, "prefetch": {"forward": 2, "backward": 2}}, {"stage": 3, "persist_below": 0}]
    found += [{"stage": 3, "wrap": {"merge": 2**30}, "checkpoint": reentrant} for reentrant in (None, True, False)]
    found += [{"stage": 3, "checkpoint": reentrant} for reentrant in (True, False)]
    found += [{"stage": stage, "communication": {"transport": "nccl"}} for stage in (1, 3)]
    found += [{"stage": stage, "small_arena": True} for stage in (1, 2, 3)]
    sums = {"reduce_op": "sum"}
    found += [{"stage": stage, "communication": sums} for stage in (1, 3)]
    found += [{"stage": 3, "communication": {**sums, "transport": "nccl"}}]
    host = {"optimizer": "cpu"}
    found += [{"stage": stage, "offload": host} for stage in (1, 2, 3)]
    found += [
        {"stage": 3, "offload": {**host, "params": "cpu"}},
        {"stage": 3, "offload": {**host, "pin_memory": False}},
    ]
    found += [{"stage": 3, "offload": host, "communication": {"transport": "nccl"}}]
    found += [{"stage": stage, "offload": {**host, "optimizer_ratio": 0.5}} for stage in (1, 3)]
    files = Path(os.environ.get("NVME_PATH", "/tmp/ourshard-parity"))
    files.mkdir(parents=True, exist_ok=True)
    disk = {"optimizer": "nvme", "nvme_path": str(files)}
    found += [{"stage": 3, "offload": disk}, {"stage": 3, "offload": {**disk, "params": "cpu"}}]
    behind = {**host, "overlap_step": True}
    found += [{"stage": 3, "offload": {**behind, "params": params}} for params in ("none", "cpu")]
    below = {"params": "nvme", "nvme_path": disk["nvme_path"]}
    found += [{"stage": 3, "offload": {**below, **more}} for more in ({}, behind, disk, {**disk, "windows": 2})]
    found += [{"stage": stage, "optimizer_in_backward": True} for stage in (1, 2, 3)]
    found += [{"stage": 3, "optimizer_in_backward": True, "communication": {"transport": "nccl"}}]
    found += [{"stage": 3, "optimizer_in_backward": True, "checkpoint": False}]
    found += [{"stage": 1}] * repeats
    recomputed: dict[str, Any] = {"activation_checkpointing": True}
    there = {"activations": "cpu"}
    found += [{"stage": stage, **recomputed, "offload": there} for stage in range(4)]
    found += [{"stage": 3, **recomputed, "offload": {**there, "pin_memory": False}}]
    found += [{"stage": 3, **recomputed, "offload": {**there, **host, "params": "cpu"}}]
    copies = 1 if dist.get_world_size() == 2 else 2
    over_all = {"shard_size": copies, "shard_optimizer_over": "all"}
    found += [{"stage": stage, **over_all} for stage in (1, 2, 3)]
    found += [{"stage": 3, "offload": {**host, "params": "cpu"}, **over_all}]
    found += [{"stage": 3, "offload": below, **over_all}]
    if dist.get_world_size() == 4:
        found += [{"stage": stage, "shard_size": 2} for stage in range(4)]
        second = {"stage": 3, "secondary_shard_size": 2}
        found += [second, {**second, "communication": {"transport": "nccl"}}, {**second, "checkpoint": False}]
    words = sys.argv[1:]
    return [options for options in found if not words or any(word in str(options) for word in words)]


if __name__ == "__main__":
    main()
