"""What names tell: wrappers to be stripped, and which names are buffers where the format does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from ..source import CheckpointError

Value = TypeVar("Value")

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_BUFFERS = frozenset(
    (
        "running_mean", "running_var", "num_batches_tracked",  # torch's norms
        "inv_freq", "original_inv_freq", "cos_cached", "sin_cached",  # rotary embeddings
        "position_ids", "token_type_ids", "masked_bias", "e_score_correction_bias",
    )
)  # fmt: skip


def canonical(name: str) -> str:
    """Return the name without the marks of FSDP, activation checkpointing and torch.compile."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def canonical_keys(values: Mapping[str, Value], where: str) -> dict[str, Value]:
    """Return the values under canonical names; `module.` of DDP goes if all names have it."""
    prefix = "module." if values and all(name.startswith("module.") for name in values) else ""
    result = {canonical(name.removeprefix(prefix)): value for name, value in values.items()}
    if len(result) != len(values):
        raise CheckpointError(f"{where}: two names differ only by the mark of a wrapper")
    return result


def looks_like_buffer(name: str, dtype: torch.dtype) -> bool:
    """Tell whether a tensor of a model is a buffer, for formats that don't say: integers, and names that torch's
    norms and the rotary embeddings of Transformers give to buffers."""
    return not (dtype.is_floating_point or dtype.is_complex) or name.rsplit(".", 1)[-1] in _BUFFERS
