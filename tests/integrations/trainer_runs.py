"""Training runs of a Trainer, told by a `Case`: the same in one process and on ranks, so that both can be compared."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCAB, LENGTH, ROWS, EVAL_ROWS = 101, 12, 48, 11  # an odd number of rows to evaluate: the last batch is uneven

SETTINGS: dict[str, Any] = {  # of every run
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


@dataclass(frozen=True)
class Case:
    """What is trained, how, and what is done after training."""

    arguments: dict[str, Any] = field(default_factory=dict)  # of TrainingArguments
    config: dict[str, Any] = field(default_factory=dict)  # changes to the model's config
    batch: int = 4  # examples of a micro-batch over all ranks
    steps: int = 4
    peft: str | None = None
    before: str = ""  # "evaluate"
    after: tuple[str, ...] = ()  # of "predict", "generate", "train", "save"
    callbacks: tuple[str, ...] = ()
    raises: bool = False  # the first batch size is too large


@dataclass
class Run:
    """What came of it."""

    logs: list[dict[str, float]]
    state: dict[str, torch.Tensor]
    results: dict[str, Any]

    def column(self, name: str) -> list[float]:
        return [log[name] for log in self.logs if name in log]


class Tokens(torch.utils.data.Dataset):
    """Random tokens whose labels are masked at the start, in each row differently."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCAB, (rows, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        labels[: index % 7] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = {"hidden_size": 32, "intermediate_size": 77, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, pad_token_id=0, **{**settings, **changes}))


def quiet(level: int = logging.ERROR) -> None:
    """Leave what libraries log at start out of the tests' output, and one core to a process."""
    import transformers

    torch.set_num_threads(1)

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("ourshard").setLevel(level)


@contextmanager
def logged(level: int) -> Iterator[list[str]]:
    """Collect what ourshard logs meanwhile, from `level` on; to be entered after `quiet`."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    ours = logging.getLogger("ourshard")
    before = ours.level
    ours.setLevel(level)
    ours.addHandler(handler)
    try:
        yield told
    finally:
        ours.removeHandler(handler)
        ours.setLevel(before)


def arguments(case: Case, folder: Path, world: int, **more: Any) -> Any:
    from transformers import TrainingArguments

    given = {
        "per_device_train_batch_size": case.batch // world,
        "per_device_eval_batch_size": case.batch // world,
        "max_steps": case.steps,
        **SETTINGS,
        **case.arguments,
        **more,
    }
    return TrainingArguments(str(folder), **given)


def run(
    case: Case,
    folder: Path,
    shard: dict[str, Any] | None = None,
    world: int = 1,
    resume: str | None = None,
    *,
    level: int = logging.ERROR,
    **more: Any,
) -> Run:
    """Train as `case` says, sharded as `shard` says, from the checkpoint `resume`; `more` are training arguments."""
    from transformers import Trainer

    quiet(level)
    enable(shard)
    args = arguments(case, folder, world, **more)
    trainer = Trainer(
        model=adapted(llama(**case.config), case.peft),
        args=args,
        train_dataset=Tokens(ROWS),
        eval_dataset=Tokens(EVAL_ROWS, seed=1),
        compute_metrics=accuracy if case.arguments.get("eval_strategy") or case.before else None,
    )
    results: dict[str, Any] = {}
    if case.before == "evaluate":
        results["before"] = trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume)
    for what in case.after:
        results[what] = AFTER[what](trainer)
    logs = [{k: v for k, v in log.items() if k in KEPT} for log in trainer.state.log_history]
    return Run(logs, whole_state(trainer.model), results)


KEPT = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "learning_rate")


def enable(shard: dict[str, Any] | None) -> None:
    """Let the next Accelerator be sharded so, or, with None, be a stock one."""
    import ourshard
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    ourshard.disable()
    if shard is not None:
        ourshard.enable(shard)


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of right tokens; sums over rows, so that a row counted twice would show."""
    wanted = prediction.label_ids[:, 1:]
    right = (prediction.predictions[:, -LENGTH:-1].argmax(-1) == wanted) & (wanted != -100)
    return {"accuracy": float(right.sum() / (wanted != -100).sum()), "rows": len(wanted)}


def adapted(model: Any, kind: str | None) -> Any:
    """Return the model with adapters, or as it is."""
    if kind is None:
        return model
    import peft

    torch.manual_seed(1)
    configs = {
        "lora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        "dora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True, task_type="CAUSAL_LM"),
        "head": lambda: peft.LoraConfig(
            r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"], task_type="CAUSAL_LM"
        ),
        "ia3": lambda: peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        ),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=40, task_type="CAUSAL_LM"),
    }
    return peft.get_peft_model(model, configs[kind]())


def whole_state(model: Any) -> dict[str, torch.Tensor]:
    import ourshard
    from ourshard.runtime.part import engines_in, part_state

    if engines_in(model):
        return part_state(model, "the test reads the weights")
    assert ourshard.engine_of(model) is None
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def predict(trainer: Any) -> np.ndarray:
    return trainer.predict(Tokens(EVAL_ROWS, seed=2)).predictions


def generate(trainer: Any) -> list[list[int]]:
    """Generate from prompts of a length of its own on each rank: the ranks need different numbers of forwards."""
    rank = trainer.args.process_index
    prompt = Tokens(2, seed=3).tokens[:1, : 4 + rank]
    trainer.model.eval()
    with torch.no_grad():
        found = trainer.model.generate(input_ids=prompt, max_new_tokens=4 + 3 * rank, do_sample=False)
    return found[0, prompt.shape[1] :].tolist()


def train_again(trainer: Any) -> int:
    trainer.train()
    return trainer.state.global_step


def save(trainer: Any) -> list[str]:
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    return sorted(path.name for path in Path(trainer.args.output_dir).iterdir())


AFTER = {"predict": predict, "generate": generate, "train": train_again, "save": save}


def on_rank(case: Case, folder: str, shard: dict[str, Any] | None, **more: Any) -> Run:
    """Run a case on a rank of a pool."""
    import torch.distributed as dist

    return run(case, Path(folder), shard, dist.get_world_size(), **more)


def changed(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, **changes)
