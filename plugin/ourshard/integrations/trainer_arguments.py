"""Training arguments that say how to shard: `ShardTrainingArguments`, and what plain ones say for FSDP and DeepSpeed.

    parser = HfArgumentParser(ShardTrainingArguments)     # --ourshard stage=2 --shard_config shard.yaml --shard_stage 2
    args = ShardTrainingArguments("out", ourshard={"stage": 3})

The sources are joined; two that give one key different values are refused. What comes of it is in force for every
Accelerator of the process from then on, as after `ourshard.enable`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from ourshard.flags.objects import from_training_arguments
from ourshard.flags.result import RUN, FlagResult, from_values, merge
from ourshard.flags.sources import from_environment, read
from ourshard.integrations import switch
from ourshard.integrations.notes import say_once
from ourshard.integrations.plugin import ShardPlugin

# The plugin that this module put in force, and what had been said before: the next arguments start from there.
_made: tuple[ShardPlugin, FlagResult] | None = None


@dataclass
class ShardTrainingArguments(TrainingArguments):
    """`TrainingArguments` for a run that ourshard shards, whatever starts its processes.

    With none of the three fields the environment decides (`accelerate launch` writes it), else plain stage 3.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "ourshard"]  # noqa: RUF012 - the base class's own way

    ourshard: dict | str | None = field(  # as `deepspeed` is annotated: HfArgumentParser knows that form
        default=None,
        metadata={"help": "How to shard: a mapping, JSON, 'stage=3,offload.optimizer=cpu', or a YAML or JSON file."},
    )
    shard_config: str | None = field(default=None, metadata={"help": "A YAML or JSON file that says how to shard."})
    shard_stage: int | None = field(default=None, metadata={"help": "0 DDP, 1 ZeRO-1, 2 ZeRO-2, 3 ZeRO-3."})

    def __post_init__(self) -> None:
        _put_in_force(_own(self))
        super().__post_init__()


def _own(args: ShardTrainingArguments) -> FlagResult:
    given: dict[str, Any] = {"ourshard": args.ourshard, "shard_config": args.shard_config}
    if args.shard_stage is not None:
        given["shard_stage"] = {"stage": args.shard_stage}
    return merge([read(value, f"--{name}") for name, value in given.items()], complete=False)


def _put_in_force(result: FlagResult) -> None:
    global _made
    before = _said_before()
    if not result.said and switch.enabled_plugin() is not None:
        return
    plugin = switch.enable(ShardPlugin(merge([result, before]).config))
    _made = (plugin, before)


def _said_before() -> FlagResult:
    """Return what was said outside of training arguments: by `ourshard.enable`, or in the environment."""
    enabled = switch.enabled_plugin()
    if enabled is None:
        return from_environment()
    if _made is not None and enabled is _made[0]:
        return _made[1]
    return from_values(enabled.config.to_dict(), "ourshard.enable()")


def finish(post_init: Callable[[Any], None], args: Any) -> None:
    """Stand around `TrainingArguments.__post_init__`: where ourshard is on, read `fsdp` and `deepspeed` for it.

    transformers would set the other engine up. The fields keep what the user gave.

    Raises:
        ValueError: they ask for what can't be, or for another thing than the other sources do.
    """
    if not switch.flag(switch.SWITCH):
        post_init(args)
        return
    fsdp, fsdp_config = args.fsdp, copy.copy(args.fsdp_config)  # transformers turns the words into keys, in place
    deepspeed, args.deepspeed = args.deepspeed, None
    post_init(args)
    args.deepspeed, args.fsdp_plugin_args = deepspeed, None
    _refuse_other_accumulation(args)
    given = copy.copy(args)
    given.fsdp, given.fsdp_config = fsdp, fsdp_config
    result = from_training_arguments(given)
    if result is None:
        return
    own = [_own(args)] if isinstance(args, ShardTrainingArguments) else []
    _put_in_force(merge([_of_engine(result), *own], complete=False))
    say_once(result.notes)


def _refuse_other_accumulation(args: TrainingArguments) -> None:
    """Refuse accumulation that the launcher was told otherwise: the Trainer goes by its own arguments alone."""
    told = os.environ.get(switch.ACCUMULATION)
    if told is not None and int(told) != args.gradient_accumulation_steps:
        raise ValueError(
            f"gradient_accumulation_steps: accelerate launch was given {told}, by its config or a flag, but the "
            f"training arguments say {args.gradient_accumulation_steps}. Neither overrides the other: let both say "
            "the same, or leave it out of the launch."
        )


def _of_engine(result: FlagResult) -> FlagResult:
    """Leave out what the run itself is told: `trainer_blocks.py` and the Trainer's own arguments see to that."""
    said = {key: value for key, value in result.said.items() if not key.startswith(RUN)}
    return FlagResult(said, {key: result.origins[key] for key in said})
