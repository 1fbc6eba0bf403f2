"""Norms of gradients that are right in float32 at any length.

Note [Known norms]
------------------
Clipping reads all gradients once for their norm. Where the last to write a lane's gradient had all of it in hand, it
leaves norms whose norm is that of the gradient: the kernel that adds up what peers sent one for each of its blocks,
and a gradient that goes to the host one for all. They hold for as long as nobody writes to the gradient: torch counts
what is written, and whoever asks the runtime for the gradient, or the optimizer's tensor for `grad`, may write past
that count (`p.grad.data`, kernels of loss scalers), so that it is read again from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

_BLOCK = 4096  # elements: 1e-7 of a norm is lost in one, and a pass takes no longer than torch's own
_LONG = 1 << 18  # elements: below it torch's own loses 1.5e-6


def norms_of(tensors: Sequence[torch.Tensor], order: float = 2.0) -> list[torch.Tensor]:
    """Return the norm of `order` of each tensor: real, 0-d, of its precision and on its device.

    A CPU adds up all elements of a tensor in its dtype. In float32 the norm of random numbers comes out 0.06% too
    small at 16M elements, 0.5% at 67M and 4% at 268M, which a lane of a large model has. Long tensors are therefore
    taken there by blocks, whose norms are put together in float64.
    """
    short = [tensor for tensor in tensors if not _is_long(tensor)]
    found = list(torch._foreach_norm(short, order)) if short else []
    for place, tensor in enumerate(tensors):
        if _is_long(tensor):
            found.insert(place, _by_blocks(tensor, order))
    return found


class KnownNorms:
    """Norms that make up that of a gradient, until it changes: Note [Known norms]."""

    __slots__ = ("_gradient", "_version", "norms")

    def __init__(self, norms: torch.Tensor, gradient: torch.Tensor) -> None:
        self.norms = norms
        self._gradient = weakref.ref(gradient)
        self._version = gradient._version

    def are_of(self, gradient: torch.Tensor) -> bool:
        """Say whether they are those of `gradient` as it is, for all that torch knows."""
        return self._gradient() is gradient and gradient._version == self._version


def ordered_bits(norms: torch.Tensor) -> torch.Tensor:
    """Return norms as integers over the same memory, in the same order, with NaN as the largest.

    For the maximum over ranks: that of floats drops a NaN in gloo, by the rank that it comes from. A NaN of
    the processor has its sign set, which the order does not allow; it is cleared in place.
    """
    bits = norms.view(torch.int64 if norms.dtype == torch.float64 else torch.int32)
    return bits.bitwise_and_(torch.iinfo(bits.dtype).max)


def _is_long(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() >= _LONG


def _by_blocks(tensor: torch.Tensor, order: float) -> torch.Tensor:
    flat = tensor.reshape(-1)
    whole = flat.numel() // _BLOCK * _BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), order, dim=1)
    rest = torch.linalg.vector_norm(flat[whole:], order).view(1) if whole < flat.numel() else blocks[:0]
    return torch.linalg.vector_norm(torch.cat([blocks, rest]).double(), order).to(blocks.dtype)
