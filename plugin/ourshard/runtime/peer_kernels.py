"""The kernel that adds pulled gradient parts: one pass, fp32 sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _add_parts(out, own, pulled, numel, scale, PARTS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    total = tl.load(own + place, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(pulled + part * numel + place, mask=inside, other=0.0).to(tl.float32)
    total *= scale
    if ADD:
        total += tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def add_parts(out: torch.Tensor, own: torch.Tensor, pulled: torch.Tensor, divisor: int, *, add: bool) -> None:
    """Set `out` (n,) to the sum in fp32 of `own` (n,) and the parts in `pulled`, divided; or add it."""
    numel = own.numel()
    grid = (triton.cdiv(numel, _BLOCK),)
    _add_parts[grid](out, own, pulled, numel, 1.0 / divisor, PARTS=pulled.numel() // numel, ADD=add, BLOCK=_BLOCK)
