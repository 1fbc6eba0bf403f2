"""Configs from one form to another: the documents that `ourshard config translate` and `write` produce."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ourshard.flags import native
from ourshard.flags.deepspeed import blocks_of, to_deepspeed
from ourshard.flags.files import load
from ourshard.flags.fsdp import FSDP, to_fsdp, to_parallelism
from ourshard.flags.language import Kind, normalise
from ourshard.flags.result import RUN, FlagResult
from ourshard.flags.sources import SECTIONS, read_document
from ourshard.values import flatten, unflatten

FORMS = ("native", "fsdp", "deepspeed")
# Sections that the translation replaces; `parallelism_config` is where FSDP2 says hybrid shard.
_REPLACED = (*SECTIONS, "distributed_type", "parallelism_config")
_HINTS: Mapping[str, str] = {
    "gradient_clipping": "max_grad_norm of TrainingArguments, or accelerator.clip_grad_norm_",
    "gradient_accumulation_steps": "the argument of TrainingArguments or Accelerator",
    "train_batch_size": "it follows from the batch size of your DataLoader",
    "micro_batch_size": "per_device_train_batch_size of TrainingArguments, or your DataLoader",
    "optimizer": "create it in the script, or let TrainingArguments",
    "scheduler": "create it in the script, or let TrainingArguments",
    "grad_scaler": "GradScalerKwargs of Accelerate",
}


@dataclass(frozen=True, slots=True)
class Translation:
    """The files to write, by path, and what could not be taken along."""

    files: Mapping[Path, str]
    notes: tuple[str, ...]


def translate(old: Path, output: Path, form: str = "native") -> Translation:
    """Translate the config file `old` for a file at `output`. Nothing is written.

    A whole Accelerate config keeps its other keys. From a bare section a config is made that lacks only
    `num_processes`, which `accelerate launch` then asks for.

    Raises:
        ValueError: `old` can't be read, says nothing about sharding, or `form` is unknown.
    """
    if form not in FORMS:
        raise ValueError(f"--to: {form!r} is not one of {', '.join(FORMS)}.")
    values = load(old)
    result = read_document(values, old.name)
    if "distributed_type" in values and not any(values.get(section) for section in SECTIONS):
        raise ValueError(f"{old}: nothing to translate; it has none of {', '.join(SECTIONS)}.")
    kept = {key: value for key, value in values.items() if key not in _REPLACED} if "distributed_type" in values else {}
    if result.run.mixed_precision and kept.get("mixed_precision") in (None, False, "no"):
        kept["mixed_precision"] = result.run.mixed_precision
    written = blocks_of(values.get("deepspeed_config") or values)  # with each "auto", which a result does not hold
    run = dataclasses.replace(result.run, **written)
    translation = _WRITERS[form](kept, dataclasses.replace(result, run=run), output, old.name)
    return Translation(translation.files, (*result.notes, *translation.notes))


def _to_native(kept: Mapping[str, Any], result: FlagResult, output: Path, old: str) -> Translation:
    document = {"distributed_type": "OURSHARD", **kept, "ourshard_config": _section(result)}
    comments = {
        f"ourshard_config.{key}": f"{native.comment_of(key)} [{_was(origin)}]" for key, origin in result.origins.items()
    }
    return Translation({output: native.dump(document, comments, f"Translated from {old}.")}, elsewhere(result))


def _was(origin: str) -> str:
    """Shorten an origin to the key and value of the old file."""
    return origin.rpartition(": ")[2]


def elsewhere(result: FlagResult, handed_over: Collection[str] = ()) -> tuple[str, ...]:
    """Say which settings of the old file belong to Accelerate, the Trainer or the script, and where they go.

    Those that somebody hands over are left out.
    """
    said = {key: value for key, value in result.run.said.items() if key in _HINTS and key not in handed_over}
    return tuple(f"{key} = {value!r} is not part of the config: {_HINTS[key]}." for key, value in said.items())


def of_blocks(blocks: Mapping[str, Any]) -> tuple[str, ...]:
    """Say who makes the optimizer and scheduler blocks of a DeepSpeed config that is in force as it is."""
    names = " and ".join(blocks)
    hint = "a Trainer makes them, and DummyOptim and DummyScheduler in a loop; any other loop goes by its own"
    return (f"{names} of the DeepSpeed config: {hint}.",) if blocks else ()


def _to_fsdp(kept: Mapping[str, Any], result: FlagResult, output: Path, old: str) -> Translation:
    said = kept.get("num_processes")
    ranks = None if said is None else normalise(Kind.INT, said, "num_processes")
    section, notes = to_fsdp(result.config, ranks)
    beside = to_parallelism(result.config, ranks)
    document = {"distributed_type": "FSDP", **kept, "fsdp_config": section}
    document |= {"parallelism_config": beside} if beside else {}
    here = flatten(result.config.to_dict())
    flags = {key: FSDP.find(key) for key in section}
    comments = {
        f"fsdp_config.{key}": f"{flag.target}: {native.scalar(here[flag.target])}" if flag.target else flag.reason[:-1]
        for key, flag in flags.items()
    }
    comments |= {f"parallelism_config.{key}": f"shard_size: {here['shard_size']}" for key in beside}
    text = native.dump(document, comments, f"Translated from {old}.")
    return Translation({output: text}, (*notes, *elsewhere(result, ("mixed_precision",))))


def _to_deepspeed(kept: Mapping[str, Any], result: FlagResult, output: Path, old: str) -> Translation:
    """Write a `ds_config.json`, and an Accelerate config that names it when the output is YAML."""
    values, notes = to_deepspeed(result.config, result.run)
    for dtype in ("bf16", "fp16") if "mixed_precision" in kept else ():  # Accelerate refuses it beside a file
        values[dtype]["enabled"] = kept["mixed_precision"] == dtype
    precision = kept.get("mixed_precision")
    if precision not in (None, False, "no", "bf16", "fp16"):
        notes = (
            *notes,
            f"mixed_precision: {precision!r} can't be said in DeepSpeed, which has bf16 and fp16.",
        )
    text = json.dumps(values, indent=2) + "\n"
    if output.suffix == ".json":
        return Translation({output: text}, notes)
    file = output.with_suffix(".ds_config.json")
    loads = result.config.stage == 3 and result.config.low_memory_loading
    section = {"deepspeed_config_file": str(file), "zero3_init_flag": loads}
    others = {key: value for key, value in kept.items() if key != "mixed_precision"}
    document = {"distributed_type": "DEEPSPEED", **others, "deepspeed_config": section}
    comments = {
        "deepspeed_config.deepspeed_config_file": "the settings",
        "deepspeed_config.zero3_init_flag": "shard models while they are created",
    }
    return Translation({output: native.dump(document, comments, f"Translated from {old}."), file: text}, notes)


_WRITERS = {"native": _to_native, "fsdp": _to_fsdp, "deepspeed": _to_deepspeed}


def compose(result: FlagResult, accelerate: Mapping[str, Any]) -> str:
    """Return a new native config: Accelerate's keys as given, then what `result` says."""
    return native.dump({"distributed_type": "OURSHARD", **accelerate, "ourshard_config": _section(result)})


def _section(result: FlagResult) -> dict[str, Any]:
    """Return what was said as a nested `ourshard_config`, in the order of the fields; never empty."""
    order = list(native.KEYS)
    said = {key: value for key, value in result.said.items() if not key.startswith(RUN)}
    return unflatten({key: said[key] for key in sorted(said, key=order.index)}) or {"stage": 3}
