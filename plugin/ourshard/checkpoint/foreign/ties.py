"""Find tied parameters in formats that write each alias as a tensor of its own and don't say so (DCP, FULL .bin).

A tensor that the optimizer does not know and that equals one that it trains is its alias: an untrained copy would
have been left behind. Where both are untrained, equal values prove nothing (all-ones norms, sinusoidal positions), so
that only output heads are taken for aliases of embeddings. Rows are compared, not whole tensors: opening a checkpoint
has to stay a matter of seconds; `ForeignSource.verify_files` compares all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import xxhash

from ..source import Source, TensorInfo, TensorKey
from ..tensor_bytes import bytes_of
from .stored import Readable

Held = TypeVar("Held", Readable, TensorInfo)

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
    ties: dict[str, str] = {}
    for (shape, _), names in alike.items():
        if len(names) > 1 and sum(shape) > len(shape):
            ties.update(_ties_within(model, names, trained or frozenset()))
    return ties


def _ties_within(model: Mapping[str, Readable], names: Sequence[str], trained: frozenset[str]) -> dict[str, str]:
    """Return the ties among names of one shape and dtype. Each is read at most once: there may be thousands of them."""
    known = [name for name in names if name in trained]
    embeddings = [name for name in names if any(part in name for part in _EMBEDDINGS)]
    aliases = [name for name in names if name not in trained and (known or name.endswith(_HEADS))]
    if not aliases:
        return {}
    trained_owners = _first_of_each(model, known)
    head_owners = _first_of_each(model, embeddings) if any(name.endswith(_HEADS) for name in aliases) else {}
    ties = {}
    for alias in aliases if trained_owners or head_owners else ():
        mark = _mark(model[alias])
        owner = trained_owners.get(mark) or (head_owners.get(mark) if alias.endswith(_HEADS) else None)
        if mark is not None and owner is not None and owner != alias:
            ties[alias] = owner
    return ties


def _first_of_each(model: Mapping[str, Readable], names: Sequence[str]) -> dict[bytes | None, str]:
    """Return mark -> the first name that has it."""
    found: dict[bytes | None, str] = {}
    for name in names:
        found.setdefault(_mark(model[name]), name)
    return found


def _mark(reader: Readable) -> bytes | None:
    """Return a hash of sampled rows; None if all are one value, which proves nothing."""
    state = xxhash.xxh3_128()
    seen: set[int] = set()
    for start, stop in _samples(reader.shape):
        rows = reader.read(start, stop, check=False)
        state.update(bytes_of(rows))
        if len(seen) < 2 and rows.numel():
            bits = rows.reshape(-1).view(_BITS.get(rows.dtype.itemsize, torch.int64))
            seen.update((int(bits.min()), int(bits.max())))
    return state.digest() if len(seen) > 1 else None


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
    return _sampled_equal(one, other, lambda reader, start, stop: reader.read(start, stop, check=False))


def equal_rows(source: Source, one: TensorKey, other: TensorKey) -> bool:
    """Tell it of two tensors of a checkpoint."""
    infos = source.tensors[one], source.tensors[other]
    return _sampled_equal(*infos, lambda info, start, stop: source.read(info.key, start, stop))


def _sampled_equal(one: Held, other: Held, read: Callable[[Held, int, int], torch.Tensor]) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    spans = list(_samples(one.shape)) if one.shape else [(0, 1)]
    return all(same_bits(read(one, *span), read(other, *span)) for span in spans)


def is_copy(copy: Readable, master: Readable) -> bool:
    """Tell whether every element of `copy` is that of `master` in its own dtype, reading both block by block."""
    if copy.shape != master.shape:
        return False
    rows = copy.shape[0] if copy.shape else 1
    nbytes = torch.Size(copy.shape).numel() * max(copy.dtype.itemsize, master.dtype.itemsize)
    block = max(1, BLOCK * rows // max(1, nbytes))
    spans = ((start, min(rows, start + block)) for start in range(0, rows, block))
    return all(same_bits(copy.read(*span), master.read(*span).to(copy.dtype)) for span in spans)
