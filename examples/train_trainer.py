"""Train a small Llama on bytes of Python source code with the Trainer, and measure it on files that it has not seen.

    accelerate launch --config_file accelerate_configs/ourshard.yaml examples/train_trainer.py --max_steps 200

Every option of `TrainingArguments` is an option of the script. The output folder gets the model and `loss.png`.
"""

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

END = 256  # the token after each file; tokens 0 to 255 are bytes


@dataclass
class Settings:
    """What this script asks for beside `TrainingArguments`."""

    sequence_length: int = 192  # bytes
    max_files: int | None = None  # read only the first files


class Rows(Dataset):
    """Files joined in order and cut into rows of `length` bytes."""

    def __init__(self, files: list[Path], length: int) -> None:
        text = np.concatenate([np.array([*path.read_bytes(), END], dtype=np.int16) for path in files])
        self.rows = torch.from_numpy(text[: len(text) // length * length]).view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index].long()
        return {"input_ids": row, "labels": row}


def standard_library(max_files: int | None) -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
    files = [path for path in sorted(folder.rglob("*.py")) if not left_out & set(path.relative_to(folder).parts)]
    return [path for path in files if path.stat().st_size][:max_files]


def build_model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 132, "intermediate_size": 365, "num_hidden_layers": 4, "num_attention_heads": 6}
    special = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
    return LlamaForCausalLM(LlamaConfig(vocab_size=END + 1, tie_word_embeddings=True, **sizes, **special))


def draw(log: list[dict[str, float]], path: Path) -> None:
    """Draw the losses that the Trainer logged."""
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, label, style in (("loss", "training", "-"), ("eval_loss", "files not seen", "o-")):
        points = [(entry["step"], entry[name]) for entry in log if name in entry]
        axes.plot(*zip(*points, strict=True), style, linewidth=1, markersize=4, label=label)
    axes.axhline(math.log(END), color="gray", linestyle="--", linewidth=1, label="guessing")
    axes.set(xlabel="step", ylabel="nats a byte", ylim=(0, None), title="Loss")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def defaults() -> dict[str, object]:
    """Return what differs from the Trainer's own defaults."""
    return {
        "output_dir": "out/train_trainer",
        "max_steps": 200,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 16,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 20,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "eval_strategy": "steps",
        "eval_steps": 50,
        "eval_on_start": True,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
    }


def main() -> None:
    parser = HfArgumentParser((Settings, TrainingArguments))
    parser.set_defaults(**defaults())
    settings, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    files = standard_library(settings.max_files)
    held_out = files[::25]
    train = Rows([path for path in files if path not in held_out], settings.sequence_length)
    test = Rows(held_out, settings.sequence_length)
    test.rows = test.rows[:: max(1, len(test) // 200)]
    trainer = Trainer(build_model(), args, train_dataset=train, eval_dataset=test)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        draw(trainer.state.log_history, Path(args.output_dir, "loss.png"))
        print(f"Loss on {len(held_out)} files not seen: {loss:.2f} nats a byte, {loss / math.log(2):.2f} bits.")
        print(f"Saved to {args.output_dir}, with loss.png.")


if __name__ == "__main__":
    main()
