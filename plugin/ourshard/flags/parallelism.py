"""Accelerate's `parallelism_config`: FSDP2 says hybrid shard there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ourshard.flags.language import Kind, Language, Outcome, idle, mapped, refused

_ONE_AXIS = "only data-parallel training is sharded; leave this size at 1."
_COMPANION = "Only tunes a parallelism that ourshard does not do."


def _read_shard_size(value: int, said: Mapping[str, Any]) -> Outcome:
    hybrid = said.get("dp_replicate_size", 1) > 1
    return Outcome({"shard_size": value} if hybrid else {})


def _read_replicate_size(value: int, said: Mapping[str, Any]) -> Outcome:
    if value > 1 and said.get("dp_shard_size", 1) <= 1:
        return Outcome({"stage": 0})
    return Outcome()


FLAGS = (
    mapped("dp_shard_size", "shard_size", "With dp_replicate_size above 1: ranks that share one sharded copy.",
           Kind.INT, read=_read_shard_size),
    mapped("dp_replicate_size", "shard_size", "Above 1 without dp_shard_size: stage 0. Else it follows from the "
           "number of ranks and shard_size.", Kind.INT, read=_read_replicate_size),
    refused("tp_size", _ONE_AXIS, Kind.INT, asks_nothing=(1,)),
    refused("cp_size", _ONE_AXIS, Kind.INT, asks_nothing=(1,)),
    refused("sp_size", _ONE_AXIS, Kind.INT, asks_nothing=(1,)),
    idle("cp_backend", _COMPANION),
    idle("cp_comm_strategy", _COMPANION),
    idle("cp_handler", _COMPANION, tree=True),
    idle("sp_backend", _COMPANION),
    idle("sp_seq_length", _COMPANION),
    idle("sp_seq_length_is_variable", _COMPANION),
    idle("sp_attn_implementation", _COMPANION),
    idle("sp_handler", _COMPANION, tree=True),
    idle("tp_handler", _COMPANION, tree=True),
)  # fmt: skip

PARALLELISM = Language("parallelism_config", FLAGS, prefix="parallelism_config_")
