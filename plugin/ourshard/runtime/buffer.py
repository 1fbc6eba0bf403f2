"""Flat device buffers whose storage can be let go and taken back.

Note [Stable storage]
---------------------
Autograd saves views of a weight in forward and reads them in backward. The views alias the storage object of forward
time, so a unit's whole parameters must come back into the same storage object: it is resized to zero when the unit is
released and resized back before it is gathered again. All leaves are views of it, built once; their version
counters are their own, so that a refill does not look like a forbidden in-place change.
"""

from __future__ import annotations

import torch

from ourshard.runtime.ledger import Kind, Ledger


class Slot:
    """A flat buffer of `numel` elements, allocated or not: Note [Stable storage]. Starts out empty."""

    __slots__ = ("_kind", "_ledger", "_storage", "allocated", "nbytes", "tensor")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, kind: Kind, ledger: Ledger | None) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self.allocated = True
        self._ledger = ledger
        self._kind = kind
        if ledger is not None:
            ledger.hold(kind, self.nbytes)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Say whether `tensor` is a view of this buffer."""
        with torch._C.DisableTorchFunctionSubclass():
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
