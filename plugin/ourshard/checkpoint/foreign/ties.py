"""Find tied parameters in formats that write each alias as a tensor of its own and don't say so (DCP, FULL .bin).

A tensor that the optimizer does not know and that equals one that it trains is its alias: an untrained copy would
have been left behind. Where both are untrained, equal values prove nothing (all-ones norms, sinusoidal positions), so
that only output heads are taken for aliases of embeddings. Rows are compared, not whole tensors: opening a checkpoint
has to stay a matter of seconds; `ForeignSource.verify_files` compares all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from .stored import Readable

_SAMPLES = 64
_SMALL = 1 << 16  # elements; smaller tensors are compared whole
BLOCK = 16 << 20  # bytes to compare at a time
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HEADS = ("lm_head.weight", "embed_out.weight", "output_projection.weight", "predictions.decoder.weight", "head.weight")
_EMBEDDINGS = ("emb", "wte.weight", "shared.weight")


def find_ties(model: Mapping[str, Readable], trained: frozenset[str] | None) -> dict[str, str]:
    """Return alias -> owner. `trained`: the parameters of the optimizer, None if there is none."""
    alike: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
    for name, reader in model.items():
        alike.setdefault((reader.shape, reader.dtype), []).append(name)
    ties = {}
    for (shape, _), names in alike.items():
        if len(names) < 2 or sum(shape) <= len(shape):
            continue
        for alias in names:
            owner = next(
                (other for other in names if _may_own(other, alias, trained) and _alike(model, alias, other)), None
            )
            if owner is not None:
                ties[alias] = owner
    return ties


def _may_own(owner: str, alias: str, trained: frozenset[str] | None) -> bool:
    if owner == alias or (trained and alias in trained):
        return False
    if trained and owner in trained:
        return True
    return alias.endswith(_HEADS) and any(part in owner for part in _EMBEDDINGS)


def _alike(model: Mapping[str, Readable], alias: str, owner: str) -> bool:
    """Tell whether sampled rows are equal, and not all one value."""
    one, other = model[alias], model[owner]
    seen: set[int] = set()
    for start, stop in _samples(one.shape):
        rows = one.read(start, stop, check=False)
        if not same_bits(rows, other.read(start, stop, check=False)):
            return False
        if len(seen) < 2 and rows.numel():
            bits = rows.reshape(-1).view(_BITS.get(rows.dtype.itemsize, torch.int64))
            seen.update((int(bits.min()), int(bits.max())))
    return len(seen) > 1


def _samples(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    rows, numel = shape[0], torch.Size(shape).numel()
    if numel <= _SMALL or rows <= _SAMPLES:
        yield 0, rows
        return
    for index in range(_SAMPLES):
        row = index * (rows - 1) // (_SAMPLES - 1)
        yield row, row + 1


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors of one dtype have the same bytes (NaN equals NaN)."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def sampled_equal(one: Readable, other: Readable) -> bool:
    """Tell whether sampled rows of two tensors are equal in shape, dtype and bytes."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    spans = list(_samples(one.shape)) if one.shape else [(0, 1)]
    return all(same_bits(one.read(*span, check=False), other.read(*span, check=False)) for span in spans)


def is_copy(copy: Readable, master: Readable) -> bool:
    """Tell whether every element of `copy` is that of `master` in its own dtype, reading both block by block."""
    if copy.shape != master.shape:
        return False
    rows = copy.shape[0] if copy.shape else 1
    nbytes = torch.Size(copy.shape).numel() * max(copy.dtype.itemsize, master.dtype.itemsize)
    block = max(1, BLOCK * rows // max(1, nbytes))
    spans = ((start, min(rows, start + block)) for start in range(0, rows, block))
    return all(same_bits(copy.read(*span), master.read(*span).to(copy.dtype)) for span in spans)
