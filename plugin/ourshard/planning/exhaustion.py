"""Which memory an error says has run out. Light to import: each sharded process asks."""

from __future__ import annotations

from enum import Enum

import torch

_NO_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # torch has no class of its own for it


class Place(Enum):
    """Which memory ran out."""

    GPU = "gpu"
    HOST = "host"


def exhausted(error: BaseException | None) -> Place | None:
    """Return which memory an error says has run out; None for other errors."""
    if isinstance(error, torch.OutOfMemoryError):
        return Place.GPU
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_HOST_MEMORY in str(error)):
        return Place.HOST
    return None
