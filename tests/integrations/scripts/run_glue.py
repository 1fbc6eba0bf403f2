"""Train a classifier of texts, or of pairs, from CSV or JSON files, as transformers' text-classification example does.

    accelerate launch run_glue.py --model_name_or_path FOLDER --train_file a.csv --validation_file b.csv \\
        --test_file c.csv --do_train --do_eval --do_predict --output_dir out
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import evaluating
import numpy as np
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(metadata={"help": "A folder with weights and a tokenizer."})
    train_file: str = field(metadata={"help": "CSV or JSON with columns label, sentence1 and perhaps sentence2."})
    validation_file: str | None = field(default=None)
    test_file: str | None = field(default=None)
    max_seq_length: int = field(default=24)
    pad_to_max_length: bool = field(default=True)


def main() -> None:
    given, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    files = {"train": given.train_file, "validation": given.validation_file, "test": given.test_file}
    files = {name: file for name, file in files.items() if file}
    raw = load_dataset(given.train_file.rsplit(".", 1)[-1], data_files=files)
    labels = sorted(raw["train"].unique("label"))
    ids = {label: number for number, label in enumerate(labels)}
    config = AutoConfig.from_pretrained(
        given.model_name_or_path, num_labels=len(labels), label2id=ids, id2label=dict(enumerate(labels))
    )
    tokenizer = AutoTokenizer.from_pretrained(given.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(given.model_name_or_path, config=config)
    texts = [name for name in ("sentence1", "sentence2") if name in raw["train"].column_names]

    def prepare(examples):
        padding = "max_length" if given.pad_to_max_length else False
        columns = [examples[name] for name in texts]
        found = tokenizer(*columns, padding=padding, max_length=given.max_seq_length, truncation=True)
        return {**found, "labels": [ids.get(label, -1) for label in examples["label"]]}

    with args.main_process_first(desc="tokenize"):
        data = raw.map(prepare, batched=True, remove_columns=["label"])
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"] if args.do_train else None,
        eval_dataset=data["validation"] if args.do_eval else None,
        compute_metrics=evaluating.class_scores,
        processing_class=tokenizer,
        data_collator=default_data_collator if given.pad_to_max_length else DataCollatorWithPadding(tokenizer),
    )
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if args.do_eval:
        trainer.save_metrics("eval", trainer.evaluate(eval_dataset=data["validation"]))
    if args.do_predict:
        told = trainer.predict(data["test"].remove_columns("labels"), metric_key_prefix="predict").predictions
        if trainer.is_world_process_zero():
            with open(os.path.join(args.output_dir, "predict_results.txt"), "w") as file:
                file.write("index\tprediction\n")
                for index, item in enumerate(np.argmax(told, axis=1)):
                    file.write(f"{index}\t{labels[item]}\n")


if __name__ == "__main__":
    main()
