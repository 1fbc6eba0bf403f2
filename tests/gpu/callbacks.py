"""Train with all callbacks and with none on the GPUs of one machine: the same losses, and figures that make sense.

    torchrun --nproc_per_node 2 tests/gpu/callbacks.py [cost]

With `cost` only what the monitor takes is measured, which wants the machine for itself.
Prints what the monitor logged last, what a step took with and without it, and what is off; exits with 1 if anything is.
Fused attention adds in an order of its own in backward, so that losses are compared with plain products instead.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ourshard
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from ourshard import trainer_callbacks as ours
from ourshard.runtime.meter import Meter
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

STEPS, LENGTH, VOCAB = 30, 512, 8192


@dataclass(frozen=True, slots=True)
class Work:
    """A model and the rows of one forward on one rank."""

    width: int
    layers: int
    rows: int

    def build(self) -> LlamaForCausalLM:
        """Return it with the same weights each time."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=self.width,
            intermediate_size=11 * self.width // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // 64,
        )
        with torch.device("cuda"):  # one thread of the host takes 10 s to draw the larger one
            return LlamaForCausalLM(config)


HOST_BOUND, GPU_BOUND = Work(1024, 12, 4), Work(2048, 16, 40)


class Rows(torch.utils.data.Dataset):
    """Random tokens."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Clock(TrainerCallback):
    """Takes the time from the end of each step to that of the next one, on the host."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    @property
    def step_ms(self) -> float:
        """The median of the last 20, which passes over the steps at whose end something is logged."""
        ends = self.ends[-21:]
        return 1e3 * statistics.median(after - before for before, after in itertools.pairwise(ends))


def train(folder: Path, callbacks: list[Any], work: Work = HOST_BOUND) -> tuple[list[dict[str, float]], float]:
    """Return the logs of a training, and milliseconds a step of its last 20."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    ourshard.enable({"stage": 3})
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=work.rows, max_steps=STEPS, logging_steps=5, bf16=True,
        save_strategy="no", report_to=[], disable_tqdm=True, seed=1,
    )  # fmt: skip
    clock = Clock()
    trainer = Trainer(work.build(), args, train_dataset=Rows(), callbacks=[clock, *callbacks])
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log], clock.step_ms


@contextmanager
def repeatable() -> Iterator[None]:
    """Let the same training give the same bits again."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def seconds_in(owner: type, *names: str) -> Iterator[dict[str, float]]:
    """Count the seconds that methods of a class take."""
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - start

        return call

    methods = {name: getattr(owner, name) for name in names}
    for name, method in methods.items():
        setattr(owner, name, timed(name, method))
    yield spent
    for name, method in methods.items():
        setattr(owner, name, method)


def compare(folder: Path, work: Work) -> str:
    """Say what a step takes without and with the monitor, in turns, and where the monitor's time goes."""
    alone, monitored = [], []
    with (
        seconds_in(Meter, "open", "close", "totals") as meter,
        seconds_in(ours.ShardMonitorCallback, "on_step_end", "_ask", "before_log", "_count") as callback,
    ):
        for turn in range(2):
            alone.append(train(folder / f"alone-{turn}", [], work)[1])
            monitored.append(train(folder / f"monitored-{turn}", [ours.ShardMonitorCallback(summary=False)], work)[1])
    spent = {name: f"{1e3 * seconds / (2 * STEPS):.2f}" for name, seconds in (meter | callback).items()}
    return f"{work}: ms a step alone {alone}, monitored {monitored}; of it in {spent}"


def check(folder: Path) -> bool:
    """Train with all callbacks and with none; say what is off, and whether anything is."""
    with repeatable():
        plain, _ = train(folder / "none", [])
    profiler = ours.ShardProfilerCallback(wait=8, warmup=2, active=3)
    sentinel = ours.ShardSentinelCallback(every=4, action="raise", straggler_every=15)
    saves = ours.ShardCheckpointCallback(every_steps=15)
    draws = importlib.util.find_spec("matplotlib") is not None
    callbacks = [ours.ShardMonitorCallback(summary=draws), saves, profiler, sentinel, ours.ShardEMACallback(0.9)]
    with repeatable():
        logs, _ = train(folder / "all", callbacks)

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
        print(*(f"off: {problem}" for problem, is_so in problems.items() if is_so), sep="\n")
    return any(problems.values())


def main() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic algorithms ask for it
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    found = [Path(tempfile.mkdtemp()) if os.environ["RANK"] == "0" else None]
    dist.init_process_group("nccl")
    dist.broadcast_object_list(found)
    folder = found[0]
    assert folder is not None
    bad = sys.argv[1:] != ["cost"] and check(folder)
    costs = [compare(folder, work) for work in (HOST_BOUND, GPU_BOUND)]
    if dist.get_rank() == 0:
        print(*costs, sep="\n")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(bad)


if __name__ == "__main__":
    main()
