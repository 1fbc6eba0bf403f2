"""Train with all callbacks and with none on the GPUs of one machine: the same losses, and figures that make sense.

    torchrun --nproc_per_node 2 tests/gpu/callbacks.py

Prints what the monitor logged last, what a step took with and without, and what is off; exits with 1 if anything is.
Attention's backward adds in an order of its own on GPUs, unless deterministic algorithms are asked for: they are here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ourshard
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from ourshard import trainer_callbacks as ours
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

STEPS, ROWS, LENGTH, VOCAB = 30, 512, 512, 8192


class Rows(torch.utils.data.Dataset):
    """Random tokens."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Clock(TrainerCallback):
    """Takes the time of the steps in which no callback but the monitor and the sentinel does anything."""

    began = took = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (STEPS - 10, STEPS):
            torch.cuda.synchronize()
            self.took, self.began = time.perf_counter() - self.began, time.perf_counter()


def train(folder: Path, callbacks: list[Any]) -> tuple[list[dict[str, float]], float]:
    """Return the logs of a training, and seconds a step of its last 10."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    ourshard.enable({"stage": 3})
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16
    )
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=STEPS, logging_steps=5, bf16=True, save_strategy="no",
        report_to=[], disable_tqdm=True, seed=1,
    )  # fmt: skip
    clock = Clock()
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=Rows(), callbacks=[clock, *callbacks])
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log], clock.took / 10


def make_repeatable() -> None:
    """Let the same training give the same bits again."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def main() -> None:
    make_repeatable()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    found = [Path(tempfile.mkdtemp()) if os.environ["RANK"] == "0" else None]
    dist.init_process_group("nccl")
    dist.broadcast_object_list(found)
    folder = found[0]
    assert folder is not None
    plain, without = train(folder / "none", [])
    profiler = ours.ShardProfilerCallback(wait=8, warmup=2, active=3)
    sentinel = ours.ShardSentinelCallback(every=4, action="raise", straggler_every=15)
    saves = ours.ShardCheckpointCallback(every_steps=15)
    draws = importlib.util.find_spec("matplotlib") is not None
    callbacks = [ours.ShardMonitorCallback(summary=draws), saves, profiler, sentinel, ours.ShardEMACallback(0.9)]
    logs, with_all = train(folder / "all", callbacks)
    _, with_monitor = train(folder / "monitor", [ours.ShardMonitorCallback(summary=False)])

    last = logs[-1]
    parts = profiler.profiles[0].parts
    problems = {
        "other losses": [log["loss"] for log in logs] != [log["loss"] for log in plain],
        "no mfu between 0 and 1": not 0 < last.get("mfu", 0) < 1,
        "waits longer than the step": last["exposed_gather_ms"] + last["exposed_reduce_ms"] > last["step_ms"],
        "no compute in the profile": parts["compute"] <= 0,
        "parts that are not the step": abs(sum(parts.values()) / profiler.profiles[0].step_ms - 1) > 0.02,
        "no units in the profile": not profiler.profiles[0].units,
        "a lost save": bool(saves.lost),
    }
    if dist.get_rank() == 0:
        print(last)
        print(
            f"ms a step: {1e3 * without:.1f} alone, {1e3 * with_monitor:.1f} monitored, {1e3 * with_all:.1f} with all"
        )
        print(*(f"off: {problem}" for problem, is_so in problems.items() if is_so), sep="\n")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(any(problems.values()))


if __name__ == "__main__":
    main()
