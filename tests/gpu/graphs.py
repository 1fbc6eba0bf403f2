"""Compare steps that are replayed as CUDA graphs with eager ones, on the GPUs of one machine.

    torchrun --nproc_per_node 2 tests/gpu/graphs.py [WORD ...]

Every configuration is trained twice from the same weights, once with `cuda_graph`, on batches of which one has another
shape, with an evaluation and two accumulated batches in between. Losses of every step and the weights at the end must
be the same; slots are poisoned with NaN when they are released. Prints one line a configuration; exits with 1 if any is
off, or if fewer steps were replayed than should be. With words, only configurations that have one of them are run.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
from ourshard.config import ShardConfig
from ourshard.runtime import graphs
from ourshard.runtime.api import clip_grad_norm_, engine_of, full_state_dict, shard_model
from parity import batch, build, poison
from torch import nn
from transformers.models.llama import modeling_llama

STEPS = 14
MASKS = modeling_llama.create_causal_mask  # under a capture it builds whole masks, where otherwise it looks for padding
ODD, EVALUATED, ACCUMULATED = 6, 8, 10  # the step with another shape, before an evaluation, of two batches
REPLAYED = STEPS - 3 - 1  # one a step, but for the warm-up and ODD; the second batch of ACCUMULATED is eager


def train(
    device: torch.device, options: dict[str, Any], captures: bool
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Return the losses, the weights, and how many forwards were replayed."""
    options = dict(options)
    dropout, watched = options.pop("dropout", 0.0), options.pop("watched", False)
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=options.pop("autocast", False))
    modeling_llama.create_causal_mask = MASKS if options.pop("masks", False) else lambda *_, **__: None
    model = build(device)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Dropout(dropout))
    model.train()
    config = {"persist_below": 100, "wrap": {"merge": 0}, "cuda_graph": captures, "ledger": True, **options}
    shard_model(model, ShardConfig.from_dict(config))
    engine = engine_of(model)
    assert engine is not None
    poison(engine)
    if watched:
        engine.measuring.start()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    losses = []
    for step in range(STEPS):
        ids = batch(step, device).chunk(dist.get_world_size())[dist.get_rank()]
        parts = [ids[:, :32]] if step == ODD else [ids, ids.flip(0)] if step == ACCUMULATED else [ids]
        for part in parts:
            with autocast:
                loss = model(input_ids=part, labels=part, use_cache=False).loss
            (loss / len(parts)).backward()
            losses.append(loss.detach())
        clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step == EVALUATED:
            with torch.no_grad(), autocast:
                losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
    result = [loss.item() for loss in losses], full_state_dict(model), engine.replayed
    graphs.let_go_of_graphs()
    return result


def configurations() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"stage": stage} for stage in (3, 1, 2, 0)]
    found += [{"stage": stage, "communication": {"transport": "nccl"}} for stage in (3, 1)]
    found += [{"stage": 3, "prefetch": {"forward": 2, "backward": 2}}, {"stage": 3, "reshard_after_forward": False}]
    found += [{"stage": 3, "keep_last": 400_000}]
    found += [{"stage": 3, "wrap": {"merge": 2**30}}, {"stage": 3, "watched": True}]
    if dist.get_world_size() == 4:
        found += [{"stage": stage, "shard_size": 2} for stage in (3, 1)]
    found += [{"stage": stage, "dropout": 0.3} for stage in (3, 1)]
    found += [{"stage": stage, "autocast": True} for stage in (3, 1)]
    found += [{"stage": 3, "masks": True}]
    bf16 = {"precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
    found += [{**options, **bf16} for options in found]
    words = sys.argv[1:]
    return [options for options in found if not words or any(word in str(options) for word in words)]


def compare(device: torch.device, options: dict[str, Any]) -> tuple[bool, str]:
    """Train both ways; return whether all is as it should be, and a few figures."""
    start = time.perf_counter()
    torch.cuda.manual_seed(7)
    expected, wanted, _ = train(device, options, captures=False)
    torch.cuda.manual_seed(7)
    losses, state, replayed = train(device, options, captures=True)
    worst = max((state[name] - value).abs().max().item() for name, value in wanted.items())
    worst_loss = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    close = 4e-3 if "precision" in options or "autocast" in options else 2e-5
    ok = replayed == REPLAYED and worst < close and worst_loss < 10 * close
    seconds = time.perf_counter() - start
    off = f"weights {worst:.1e}, losses {worst_loss:.1e}, last {losses[-1]:.4f}"
    return ok, f"{replayed} replayed, {off}, {seconds:.1f} s"


def tell_failures() -> None:
    """Print where a capture fails; the log has one line of it."""
    record = graphs.Captured.record

    def run(self: Any, *args: Any) -> None:
        try:
            record(self, *args)
        except Exception:
            traceback.print_exc(limit=-14)
            raise

    graphs.Captured.record = run  # type: ignore[method-assign]


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    torch.backends.cuda.matmul.allow_tf32 = False
    for enable in ("flash", "mem_efficient", "cudnn"):  # the attention that is left repeats its bits
        getattr(torch.backends.cuda, f"enable_{enable}_sdp")(False)
    tell_failures()
    bad = 0
    for options in configurations():
        try:
            ok, figures = compare(device, options)
        except Exception:
            ok, figures = False, traceback.format_exc(limit=-12)
        bad += not ok
        if rank == 0 or not ok:
            print(f"{'ok ' if ok else 'BAD'} rank {rank} {options}: {figures}", flush=True)
        if "Traceback" in figures:
            break  # ranks may be in different places
    graphs.let_go_of_graphs()
    dist.destroy_process_group()
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
