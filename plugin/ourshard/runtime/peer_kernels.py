"""The kernels beside peer copies, each one pass: parts of gradients are added up, masters cast to where they go."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ourshard.runtime.peer import BLOCK


@triton.jit
def _add_parts(out, norms, own, pulled, numel, scale, PARTS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    total = tl.load(own + place, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(pulled + part * numel + place, mask=inside, other=0.0).to(tl.float32)
    total *= scale
    if ADD:
        total += tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    stored = total.to(out.dtype.element_ty)
    tl.store(out + place, stored, mask=inside)
    value = stored.to(tl.float32)
    tl.store(norms + tl.program_id(0), tl.sqrt_rn(tl.sum(value * value)))


@triton.jit
def _copy_twice(source, first, second, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    value = tl.load(source + place, mask=inside).to(first.dtype.element_ty)
    tl.store(first + place, value, mask=inside)
    tl.store(second + place, value, mask=inside)


def add_parts(
    out: torch.Tensor, norms: torch.Tensor, own: torch.Tensor, pulled: torch.Tensor, divisor: int, *, add: bool
) -> None:
    """Do what `peer.add_parts` says."""
    numel = own.numel()
    grid = (triton.cdiv(numel, BLOCK),)
    parts = pulled.numel() // numel
    _add_parts[grid](out, norms, own, pulled, numel, 1.0 / divisor, PARTS=parts, ADD=add, BLOCK=BLOCK)


def copy_twice(source: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """Do what `peer.copy_twice` says."""
    numel = source.numel()
    _copy_twice[(triton.cdiv(numel, BLOCK),)](source, first, second, numel, BLOCK=BLOCK)
