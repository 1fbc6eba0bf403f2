"""What the scripts of `scripts/` are given: tiny random models with a tokenizer, and files of real text (our pages)."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import torch

from tests.commands import ROOT

SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 77, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODERN: dict[str, Any] = {"cls_token_id": 1, "sep_token_id": 2, "attn_implementation": "eager"}
T5: dict[str, Any] = {
    **{"d_model": 32, "d_kv": 8, "d_ff": 77, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
    **{"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "run_clm": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "run_mlm": ("ModernBertForMaskedLM", "ModernBertConfig", {**SIZES, **MODERN}),
    "run_glue": ("BertModel", "BertConfig", {**SIZES, **STILL}),  # its head is newly made by the script
    "run_summarization": ("T5ForConditionalGeneration", "T5Config", T5),
}


def sentences() -> list[str]:
    """Return sentences of our pages, lower-case words alone."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("c*.md")))
    found = (re.sub(r"[^a-z ]", "", sentence.lower()) for sentence in re.split(r"[.:|\n]", text))
    return [" ".join(words) for words in map(str.split, found) if len(words) >= 6]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for text in sentences()[:200] for word in text.split()})
    ids = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "<mask>", *words])}
    made = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 2)])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, mask_token="<mask>", **special)


def save_model(script: str, folder: Path) -> None:
    import transformers

    torch.manual_seed(0)
    name, config, settings = MODELS[script]
    made = getattr(transformers, config)(vocab_size=len(tokenizer()), **settings)
    getattr(transformers, name)(made).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def save_files(script: str, folder: Path) -> list[str]:
    """Write the data that a script takes; return the arguments that name it."""
    texts = sentences()
    parts = {"train": texts[:44], "validation": texts[44:61], "test": texts[61:72]}
    kind = {"run_glue": "csv", "run_summarization": "json"}.get(script, "txt")
    given = []
    for part, lines in parts.items():
        path = folder / f"{part}.{kind}"
        _write(path, lines)
        if kind != "txt" or part != "test":
            given += [f"--{part}_file", str(path)]
    return given


def _write(path: Path, lines: list[str]) -> None:
    if path.suffix == ".txt":
        path.write_text("\n".join(lines))
    elif path.suffix == ".json":
        rows = [{"text": line, "summary": " ".join(line.split()[:4])} for line in lines]
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        with path.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["sentence1", "sentence2", "label"])
            for number, line in enumerate(lines):
                words = line.split()
                table.writerow([" ".join(words[:3]), " ".join(words[3:]), ["plain", "even", "odd"][number % 3]])
