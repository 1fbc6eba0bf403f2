"""Flat device buffers whose storage can be let go and taken back.

Note [Stable storage]
---------------------
Autograd saves views of a weight in forward and reads them in backward. The views alias the storage object of forward
time, so a unit's whole parameters must come back into the same storage object: it is resized to zero when the unit is
released and resized back before it is gathered again. All leaves are views of it, built once; their version
counters are their own, so that a refill does not look like a forbidden in-place change.

Note [One pool]
---------------
On a GPU, buffers and gradients come from the pool that activations come from, since they need memory at other times:
most activations are gone when most gradients are there. With a pool of their own torch reserved 2.3 to 2.8 GiB more
(H200, 1.2B and 4.4B parameters). What it takes is that no block of the start, cached and larger than what stays, is cut
for something that stays: `give_back_unused`.
"""

from __future__ import annotations

import torch

from ourshard.runtime.ledger import Kind, Ledger


def give_back_unused(device: torch.device) -> None:
    """Return cached blocks to the card, before something that stays takes memory: Note [One pool]."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Slot:
    """A flat buffer of `numel` elements, allocated or not: Note [Stable storage]. Starts out empty."""

    __slots__ = ("_kind", "_ledger", "_own_tensors", "_storage", "allocated", "nbytes", "tensor")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, kind: Kind, ledger: Ledger | None) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self.allocated = True
        self._ledger = ledger
        self._kind = kind
        self._own_tensors = 0
        if ledger is not None:
            ledger.hold(kind, self.nbytes)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Say whether `tensor` is a view of this buffer."""
        if type(tensor) is not torch.Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                return tensor.layout is torch.strided and tensor.untyped_storage()._cdata == self._storage._cdata
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata == self._storage._cdata

    def relabel(self, kind: Kind) -> None:
        """Count the buffer as another kind from now on."""
        if self._ledger is not None and self.allocated:
            self._ledger.hold(self._kind, -self.nbytes)
            self._ledger.hold(kind, self.nbytes)
        self._kind = kind

    def allocate(self) -> None:
        """Take memory; the content is undefined."""
        if not self.allocated:
            self._storage.resize_(self.nbytes)
            self.allocated = True
            if self._ledger is not None:
                self._ledger.hold(self._kind, self.nbytes)

    def free(self) -> None:
        """Give the memory back; views stay and come to life with the next `allocate`."""
        if self.allocated:
            self._storage.resize_(0)
            self.allocated = False
            if self._ledger is not None:
                self._ledger.hold(self._kind, -self.nbytes)

    def count_own(self) -> None:
        """Take the tensors that are on the storage now for those of the engine."""
        self._own_tensors = self._count()

    @property
    def has_others(self) -> bool:
        """Say whether there are more than those, which users, or a graph, may hold."""
        return self._count() > self._own_tensors

    def leave(self) -> None:
        """Leave the memory, and the end of it, to the tensors that are on it."""
        if self.allocated and self._ledger is not None:
            self._ledger.hold(self._kind, -self.nbytes)
        self.allocated = False

    def _count(self) -> int:
        count: int = torch._C._storage_Use_Count(self._storage._cdata)  # type: ignore[attr-defined]
        return count
