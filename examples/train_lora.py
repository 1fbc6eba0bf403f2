"""Teach a model of code to write English with LoRA: its own weights stay frozen and sharded, adapters are trained.

    accelerate launch --config_file accelerate_configs/ourshard.yaml examples/train_clm.py       # makes the base, once
    accelerate launch --config_file accelerate_configs/ourshard.yaml examples/train_lora.py

The text is the docstrings of Python's standard library. The output folder gets the adapter alone, which
`PeftModel.from_pretrained` puts on the base again, and `loss.png`.
"""

import argparse
import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import Dataset, random_split
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments, set_seed

END = 256  # the token after each text; tokens 0 to 255 are bytes
PROMPT = b"Return the "


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("out/train_clm"), help="folder of a model of bytes")
    parser.add_argument("--output_dir", type=Path, default=Path("out/train_lora"))
    parser.add_argument("--max_steps", type=int, default=150, help="optimizer steps")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--max_files", type=int, help="read only the first files")
    args = parser.parse_args()
    if not (args.base / "config.json").is_file():
        parser.error(f"{args.base} has no model; make one with examples/train_clm.py, or name another with --base.")
    return args


def docstrings(max_files: int | None) -> Iterator[str]:
    """Yield the docstrings of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
    files = [path for path in sorted(folder.rglob("*.py")) if not left_out & set(path.relative_to(folder).parts)]
    for path in files[:max_files]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the files that are read
            tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield text


class Rows(Dataset):
    """Texts joined and cut into rows of `length` bytes."""

    def __init__(self, texts: Iterator[str], length: int = 192) -> None:
        tokens = [token for text in texts for token in [*text.encode(), END]]
        self.rows = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def with_adapters(base: PreTrainedModel, rank: int) -> PeftModel:
    """Return `base` frozen, with trainable adapters at all linear layers but the head."""
    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    model = get_peft_model(base, config)
    model.print_trainable_parameters()
    return model


def write_on(model: torch.nn.Module) -> str:
    """Let a whole model go on from the prompt."""
    output = model.generate(input_ids=torch.tensor([[*PROMPT]]), max_new_tokens=120, do_sample=True, top_k=5)
    return bytes(token for token in output[0].tolist() if token < END).decode(errors="replace")


def draw(log: list[dict[str, float]], path: Path) -> None:
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, label, style in (("loss", "training", "-"), ("eval_loss", "docstrings not seen", "o-")):
        points = [(entry["step"], entry[name]) for entry in log if name in entry]
        axes.plot(*zip(*points, strict=True), style, linewidth=1, markersize=4, label=label)
    axes.set(xlabel="step", ylabel="nats a byte", title="LoRA: docstrings on a model of code")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    args = parse_args()
    set_seed(7)
    training = TrainingArguments(
        str(args.output_dir),
        max_steps=args.max_steps,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=16,
        learning_rate=5e-3,
        warmup_steps=args.max_steps // 10,
        eval_strategy="steps",
        eval_steps=max(1, args.max_steps // 3),
        eval_on_start=True,
        logging_steps=max(1, args.max_steps // 30),
        save_strategy="no",
        report_to="none",
    )
    rows = Rows(docstrings(args.max_files))
    held_out = min(160, len(rows) // 10)
    test, train = random_split(rows, [held_out, len(rows) - held_out], torch.Generator().manual_seed(7))
    model = with_adapters(AutoModelForCausalLM.from_pretrained(args.base), args.rank)
    trainer = Trainer(model, training, train_dataset=train, eval_dataset=test)
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        log = trainer.state.log_history
        draw(log, args.output_dir / "loss.png")
        losses = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
        print(f"Loss on docstrings not seen: {losses[0]:.2f} before, {losses[-1]:.2f} nats a byte after.")
        size = sum(path.stat().st_size for path in args.output_dir.glob("adapter_model*"))
        print(f"Saved the adapter, {size:,} bytes, to {args.output_dir}.")
        whole = AutoModelForCausalLM.from_pretrained(args.base)
        print(f"The base writes:\n{write_on(whole)}\n")
        print(f"With the adapter:\n{write_on(PeftModel.from_pretrained(whole, args.output_dir))}")


if __name__ == "__main__":
    main()
