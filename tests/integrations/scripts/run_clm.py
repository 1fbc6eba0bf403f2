"""Train a causal language model on text files, as transformers' language-modeling example does.

    accelerate launch run_clm.py --model_name_or_path FOLDER --train_file a.txt --validation_file b.txt \\
        --do_train --do_eval --output_dir out
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import evaluating
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "A folder with weights; none: train anew."})
    config_name: str | None = field(default=None)
    tokenizer_name: str | None = field(default=None)
    dtype: str | None = field(default=None)


@dataclass
class DataArguments:
    train_file: str | None = field(default=None)
    validation_file: str | None = field(default=None)
    block_size: int = field(default=16)
    max_train_samples: int | None = field(default=None)
    max_eval_samples: int | None = field(default=None)
    overwrite_cache: bool = field(default=False)


def blocks(data: DataArguments, args: TrainingArguments, tokenizer):
    """Tokenize lines, join them, and cut blocks; the first process does it and the others read its cache."""
    files = {"train": data.train_file, "validation": data.validation_file}
    raw = load_dataset("text", data_files={name: file for name, file in files.items() if file})

    def tokenize(examples):
        return tokenizer(examples["text"])

    def group(examples):
        joined = {name: list(chain(*rows)) for name, rows in examples.items()}
        whole = len(joined["input_ids"]) // data.block_size * data.block_size
        cut = {n: [r[i : i + data.block_size] for i in range(0, whole, data.block_size)] for n, r in joined.items()}
        return {**cut, "labels": cut["input_ids"].copy()}

    fresh = not data.overwrite_cache
    with args.main_process_first(desc="tokenize"):
        tokens = raw.map(tokenize, batched=True, remove_columns=["text"], load_from_cache_file=fresh)
    with args.main_process_first(desc="group"):
        return tokens.map(group, batched=True, load_from_cache_file=fresh)


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    names, data, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    source = names.config_name or names.model_name_or_path
    config = AutoConfig.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(names.tokenizer_name or source)
    if names.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(names.model_name_or_path, config=config, dtype=names.dtype)
    else:
        model = AutoModelForCausalLM.from_config(config)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    rows = blocks(data, args, tokenizer)

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=evaluating.first(rows["train"], data.max_train_samples) if args.do_train else None,
        eval_dataset=evaluating.first(rows["validation"], data.max_eval_samples) if args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=evaluating.next_token_accuracy if args.do_eval else None,
        preprocess_logits_for_metrics=evaluating.best if args.do_eval else None,
    )
    if args.do_train:
        found = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint or found)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if args.push_to_hub:
        trainer.push_to_hub(tasks="text-generation")
    else:
        trainer.create_model_card(tasks="text-generation")


if __name__ == "__main__":
    main()
