"""Train an encoder-decoder to summarize texts of JSON files and generate, as transformers' example does.

    accelerate launch run_summarization.py --model_name_or_path FOLDER --train_file a.json --validation_file b.json \\
        --test_file c.json --source_prefix "sum up :" --predict_with_generate --do_train --do_predict --output_dir out
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import evaluating
import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(metadata={"help": "A folder with weights and a tokenizer."})
    train_file: str = field(metadata={"help": "JSON lines with columns text and summary."})
    validation_file: str | None = field(default=None)
    test_file: str | None = field(default=None)
    source_prefix: str = field(default="")
    max_source_length: int = field(default=24)
    max_target_length: int = field(default=10)
    num_beams: int = field(default=1)


def main() -> None:
    given, args = HfArgumentParser((ScriptArguments, Seq2SeqTrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    files = {"train": given.train_file, "validation": given.validation_file, "test": given.test_file}
    raw = load_dataset("json", data_files={name: file for name, file in files.items() if file})
    tokenizer = AutoTokenizer.from_pretrained(given.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(given.model_name_or_path)

    def prepare(examples):
        inputs = [given.source_prefix + text for text in examples["text"]]
        found = tokenizer(inputs, max_length=given.max_source_length, truncation=True)
        targets = tokenizer(text_target=examples["summary"], max_length=given.max_target_length, truncation=True)
        return {**found, "labels": targets["input_ids"]}

    with args.main_process_first(desc="tokenize"):
        data = raw.map(prepare, batched=True, remove_columns=["text", "summary"])

    def scores(told):
        both = (told.predictions, told.label_ids)
        found, labels = (np.where(ids != -100, ids, tokenizer.pad_token_id) for ids in both)
        texts = [tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in (found, labels)]
        lengths = np.count_nonzero(found != tokenizer.pad_token_id, axis=1)
        return {"rouge1": evaluating.shared_words(*texts), "gen_len": float(lengths.mean())}

    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=data["train"] if args.do_train else None,
        eval_dataset=data["validation"] if args.do_eval else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
        compute_metrics=scores if args.predict_with_generate else None,
    )
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    generating = {"max_length": given.max_target_length, "num_beams": given.num_beams}
    if args.do_eval:
        trainer.save_metrics("eval", trainer.evaluate(**generating, metric_key_prefix="eval"))
    if args.do_predict:
        told = trainer.predict(data["test"], **generating, metric_key_prefix="predict")
        trainer.save_metrics("predict", told.metrics)
        if trainer.is_world_process_zero():
            ids = np.where(told.predictions != -100, told.predictions, tokenizer.pad_token_id)
            lines = [line.strip() for line in tokenizer.batch_decode(ids, skip_special_tokens=True)]
            with open(os.path.join(args.output_dir, "generated_predictions.txt"), "w") as file:
                file.write("\n".join(lines))


if __name__ == "__main__":
    main()
