"""Train a masked language model on text files, line by line or in blocks, as transformers' example does.

    accelerate launch run_mlm.py --model_name_or_path FOLDER --train_file a.txt --validation_file b.txt \\
        --line_by_line --do_train --do_eval --output_dir out
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain

import evaluating
from datasets import load_dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(metadata={"help": "A folder with weights and a tokenizer."})
    train_file: str | None = field(default=None)
    validation_file: str | None = field(default=None)
    max_seq_length: int = field(default=16)
    line_by_line: bool = field(default=False, metadata={"help": "Each line is a row; else lines are joined and cut."})
    pad_to_max_length: bool = field(default=False)
    mlm_probability: float = field(default=0.15)
    max_eval_samples: int | None = field(default=None)


def rows(given: ScriptArguments, args: TrainingArguments, tokenizer):
    raw = load_dataset("text", data_files={"train": given.train_file, "validation": given.validation_file})
    longest, padding = given.max_seq_length, "max_length" if given.pad_to_max_length else False

    def lines(examples):
        texts = [line for line in examples["text"] if line and not line.isspace()]
        return tokenizer(texts, padding=padding, truncation=True, max_length=longest, return_special_tokens_mask=True)

    def tokenize(examples):
        return tokenizer(examples["text"], return_special_tokens_mask=True)

    def group(examples):
        joined = {name: list(chain(*values)) for name, values in examples.items()}
        whole = len(joined["input_ids"]) // longest * longest
        return {name: [v[i : i + longest] for i in range(0, whole, longest)] for name, v in joined.items()}

    with args.main_process_first(desc="tokenize"):
        if given.line_by_line:
            return raw.map(lines, batched=True, remove_columns=["text"])
        return raw.map(tokenize, batched=True, remove_columns=["text"]).map(group, batched=True)


def main() -> None:
    given, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.model_name_or_path)
    model = AutoModelForMaskedLM.from_pretrained(given.model_name_or_path)
    data = rows(given, args, tokenizer)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=evaluating.first(data["validation"], given.max_eval_samples),
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=given.mlm_probability),
        compute_metrics=evaluating.masked_accuracy,
        preprocess_logits_for_metrics=evaluating.best,
    )
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.save_metrics("eval", metrics)
    trainer.create_model_card(tasks="fill-mask")


if __name__ == "__main__":
    main()
