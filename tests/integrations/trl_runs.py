"""Trainers of TRL on tiny random models, nothing of them changed: `python trl_runs.py FOLDER KIND...` trains each.

Rank 0 prints a JSON line a kind: its name, whether it was sharded, and the logged losses and norms of its steps.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

WORDS = ("a", "good", "day", "to", "go", "out", "and", "see", "the", "sun", "it", "is", "bad", "not", "so", "well")
IDS = {word: number for number, word in enumerate(("<pad>", "<s>", "</s>", "<unk>", *WORDS))}
EXAMPLES = 24
PRECOMPUTED = ("dpo_precomputed", "kto_precomputed")  # by the model itself, before it is trained


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def save_models(folder: Path) -> None:
    """Write a language model and a judge, with their tokenizer, for all processes to load."""
    import transformers

    for name in ("LlamaForCausalLM", "LlamaForSequenceClassification"):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 77, "num_hidden_layers": 2, "num_attention_heads": 4}
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 1}
        config = transformers.LlamaConfig(vocab_size=len(IDS), **sizes, **special)
        getattr(transformers, name)(config).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    for kind in PRECOMPUTED:
        for world in (1, 2):  # what is computed before the training is kept beside the data
            examples(**columns(kind)).save_to_disk(str(folder / f"{kind}{world}data"))


def text(number: int, length: int) -> str:
    return " ".join(WORDS[(number * 5 + j * 3 + number * j) % len(WORDS)] for j in range(length))


def examples(**columns: Any) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{name: make(i) for name, make in columns.items()} for i in range(EXAMPLES)])


def columns(kind: str) -> dict[str, Any]:
    """Return what a preference trainer is to be given, as functions of the example's number."""
    if kind.startswith("kto"):
        return {
            **{"prompt": lambda i: text(i, 3), "completion": lambda i: text(i + 1, 4)},
            **{"label": lambda i: i % 2 == 0},
        }
    pair = {"chosen": lambda i: text(i + 1, 4), "rejected": lambda i: text(i + 7, 4)}
    return pair if kind == "reward" else {"prompt": lambda i: text(i, 3), **pair}


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def trainer(kind: str, folder: Path, world: int) -> Any:
    import trl

    common = {
        **{"output_dir": str(folder / f"{kind}{world}"), "per_device_train_batch_size": 4 // world, "max_steps": 3},
        **{"logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no", "report_to": [], "use_cpu": True},
        **{"bf16": False, "disable_tqdm": True},
    }
    model, judge = str(folder / "LlamaForCausalLM"), str(folder / "LlamaForSequenceClassification")
    if kind == "sft":
        return trl.SFTTrainer(model, trl.SFTConfig(**common), train_dataset=examples(text=lambda i: text(i, 6)))
    if kind in PRECOMPUTED:
        from datasets import load_from_disk

        data = load_from_disk(str(folder / f"{kind}{world}data"))
        preference = (trl.DPOConfig, trl.DPOTrainer) if kind.startswith("dpo") else (trl.KTOConfig, trl.KTOTrainer)
        args = preference[0](**common, precompute_ref_log_probs=True)
        return preference[1](model, args=args, train_dataset=data)
    if kind == "dpo":
        syncing = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
        return trl.DPOTrainer(model, args=trl.DPOConfig(**common, **syncing), train_dataset=examples(**columns(kind)))
    if kind == "kto":
        return trl.KTOTrainer(model, args=trl.KTOConfig(**common), train_dataset=examples(**columns(kind)))
    if kind == "reward":
        return trl.RewardTrainer(judge, args=trl.RewardConfig(**common), train_dataset=examples(**columns(kind)))
    assert kind in ("grpo", "rloo"), kind
    made = (trl.GRPOConfig, trl.GRPOTrainer) if kind == "grpo" else (trl.RLOOConfig, trl.RLOOTrainer)
    config = made[0](**common, num_generations=2, max_completion_length=6, beta=0.1)
    return made[1](model, reward, args=config, train_dataset=examples(prompt=lambda i: text(i, 3)))


def main(folder: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    for kind in kinds:
        made = trainer(kind, folder, world)
        sharded = bool(getattr(made.accelerator, "is_ourshard", False))
        if kind in PRECOMPUTED:
            assert ("_ourshard" in vars(made.model)) == sharded  # not on the host, whole on each rank
        made.train()
        made.save_model()
        if made.accelerator.is_main_process:
            steps = [(log["loss"], log["grad_norm"]) for log in made.state.log_history if "loss" in log]
            print("TOLD" + json.dumps([kind, sharded, steps]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
