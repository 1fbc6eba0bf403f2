"""What names tell: wrappers to be stripped, and which names are buffers where the format does not say."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

import torch

from ourshard.runtime.wrap import canonical

from ..source import CheckpointError

Value = TypeVar("Value")

_DDP = "module."
_BUFFERS = frozenset(
    (
        "running_mean", "running_var", "num_batches_tracked",  # torch's norms
        "inv_freq", "original_inv_freq", "cos_cached", "sin_cached",  # rotary embeddings
        "position_ids", "token_type_ids", "masked_bias", "e_score_correction_bias",
    )
)  # fmt: skip


def canonical_keys(values: Mapping[str, Value], where: str, known: Collection[str] | None = ()) -> dict[str, Value]:
    """Return the values under canonical names.

    `module.` of DDP goes if all names have it, unless it is the model's own by the names that are `known` of it: those
    of its parameters, or of its optimizer's. None: what wrote this takes DDP's away itself.
    """
    prefix = _DDP if known is not None and _is_of_ddp(values, known) else ""
    result = {canonical(name.removeprefix(prefix)): value for name, value in values.items()}
    if len(result) != len(values):
        raise CheckpointError(f"{where}: two names differ only by the mark of a wrapper")
    return result


def _is_of_ddp(names: Iterable[str], known: Collection[str]) -> bool:
    names, known = list(names), set(known)
    if not names or not all(name.startswith(_DDP) for name in names):
        return False
    own = sum(canonical(name) in known for name in names)
    return own <= sum(canonical(name.removeprefix(_DDP)) in known for name in names)


def looks_like_buffer(name: str, dtype: torch.dtype) -> bool:
    """Tell whether a tensor of a model is a buffer, for formats that don't say: integers, and names that torch's
    norms and the rotary embeddings of Transformers give to buffers."""
    return not (dtype.is_floating_point or dtype.is_complex) or name.rsplit(".", 1)[-1] in _BUFFERS
