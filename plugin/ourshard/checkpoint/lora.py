"""What a LoRA adds to one weight, some rows at a time.

Formulas as in LoRA (Hu et al. 2021), rsLoRA (Kalajdzievski 2023: the scale is alpha / sqrt(r) instead of alpha / r) and
DoRA (Liu et al. 2024: the sum, each output's part of it brought to a length that was learned).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .source import CheckpointError, Source, TensorKey

_MATRICES = ({"A", "B"}, {"embedding_A", "embedding_B"})
_MAGNITUDE = "magnitude_vector"


@dataclass(frozen=True, slots=True)
class Update:
    """What is added to one weight: scale * b @ a, transposed for layers that store (in, out) (None: not yet known).

    Of a convolution `a` has its kernel and `b` one of size 1. `magnitude`: the length of each output's part, of DoRA.
    """

    a: TensorKey
    b: TensorKey
    scale: float
    transposed: bool | None
    magnitude: TensorKey | None = None

    def summed(self, adapter: Source, rows: torch.Tensor, start: int) -> torch.Tensor:
        """Return these rows of the weight, from `start` on, with the adapter's product added, in fp32 or wider."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        stop = start + rows.shape[0]
        if self.transposed:
            a, b = adapter.read(self.a)[:, start:stop], adapter.read(self.b)
            product = a.to(wide).T @ b.to(wide).T
        else:
            a, b = adapter.read(self.a), adapter.read(self.b, start, stop)
            product = (b.to(wide).flatten(1) @ a.to(wide).flatten(1)).reshape(rows.shape)
        return rows.to(wide) + product * self.scale

    def norms(self, blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the length of each output's part of the summed weight, of which `blocks` are all rows in order."""
        if self.transposed:
            return torch.stack([block.square().sum(0) for block in blocks]).sum(0).sqrt()
        return torch.cat([torch.linalg.vector_norm(block.flatten(1), dim=1) for block in blocks])

    def stretched(self, adapter: Source, rows: torch.Tensor, start: int, norms: torch.Tensor) -> torch.Tensor:
        """Return the summed rows with each output's part at its learned length; `norms` of those outputs."""
        assert self.magnitude is not None
        lengths = adapter.read(self.magnitude).flatten().to(rows.dtype)
        if self.transposed:
            return rows * (lengths / norms)
        factors = lengths[start : start + rows.shape[0]] / norms
        return rows * factors.view(-1, *(1 for _ in rows.shape[1:]))


def update_of(module: str, plain: str, parts: Mapping[str, TensorKey], config: Mapping[str, Any]) -> Update:
    """Return the update by the parts of one module, whose name in the base model is `plain`."""
    matrices = parts.keys() - {_MAGNITUDE}
    if matrices not in _MATRICES or (_MAGNITUDE in parts) != bool(config.get("use_dora")):
        raise ValueError(
            f"{module} has {', '.join(f'lora_{part}' for part in parts)}: no plain LoRA; merge it with PEFT"
        )
    rank = _pattern(config.get("rank_pattern"), plain, config["r"])
    alpha = _pattern(config.get("alpha_pattern"), plain, config["lora_alpha"])
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    embedding = "embedding_A" in parts
    a, b = (parts["embedding_A"], parts["embedding_B"]) if embedding else (parts["A"], parts["B"])
    return Update(a, b, scale, True if embedding else None, parts.get(_MAGNITUDE))


def _pattern(patterns: Mapping[str, float] | None, module: str, default: float) -> float:
    """Return the value of the first pattern that fits the end of the module's name, as PEFT chooses it."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


def oriented(
    source: Source, updates: Mapping[str, Update], shapes: Mapping[str, tuple[int, ...]], transposed: bool
) -> dict[str, Update]:
    """Return the updates, transposed where the weight is stored (in, out), as its shape shows.

    For a square weight the config's fan_in_fan_out is taken. PEFT keeps one such flag for all layers, so that it says
    nothing where both kinds were adapted; then a square weight is refused.
    """
    fitting = {target: _ways(source, target, update, shapes[target]) for target, update in updates.items()}
    certain = {
        way for target, ways in fitting.items() for way in ways if len(ways) == 1 and updates[target].transposed is None
    }
    result = {}
    for target, ways in fitting.items():
        if len(ways) == 2 and not certain <= {transposed}:
            raise ValueError(f"{target} is square, and fan_in_fan_out is not right for all layers; merge it with PEFT")
        way = transposed if len(ways) == 2 else next(iter(ways))
        result[target] = replace(updates[target], transposed=way)
    return result


def _ways(source: Source, target: str, update: Update, whole: tuple[int, ...]) -> set[bool]:
    """Return whether the parts fit the weight as it is (False), transposed (True), or both."""
    a, b = source.tensors[update.a].shape, source.tensors[update.b].shape
    if not len(a) == len(b) == len(whole) >= 2:
        raise ValueError(f"{target} has shape {whole} and its LoRA {a}, {b}: only matrices and kernels are merged")
    if len(whole) > 2 and a[0] != b[1] and b[1] and a[0] % b[1] == 0:
        raise ValueError(f"{target} is a convolution in groups: its LoRA is not merged, nor is it by PEFT")
    ways = set()
    if a[0] == b[1] and (b[0], *a[1:]) == whole and all(length == 1 for length in b[2:]):
        ways.add(False)
    if len(whole) == 2 and a[0] == b[1] and (a[1], b[0]) == whole:
        ways.add(True)
    if update.transposed is not None:
        ways &= {update.transposed}
    if not ways:
        raise CheckpointError(f"{target} has shape {whole}, its LoRA parts {a} and {b} do not fit it")
    if update.magnitude is not None:
        outputs, lengths = b[0], source.tensors[update.magnitude]
        if lengths.numel != outputs:
            raise CheckpointError(f"{target} has {outputs} outputs, its DoRA {lengths.numel} lengths")
    return ways
