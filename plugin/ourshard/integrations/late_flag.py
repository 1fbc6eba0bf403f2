"""A flag that any rank may raise at a step's end, and that all ranks see at the next one, without waiting."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ourshard.runtime.mesh import host_group


class LateFlag:
    """Sends this rank's flag over gloo at each call, and reads what all sent at the call before.

    That has arrived by then, so no rank waits, and all see the flag at the same call. Made and called on every rank.
    """

    def __init__(self, purpose: str) -> None:
        self._group = host_group(purpose)
        self._sent: tuple[torch.Tensor, Any] | None = None

    def raised(self, mine: bool) -> bool:
        """Say whether a rank had raised it at the call before; alone, whether this one has now."""
        if self._group is None:
            return mine
        before, flag = self._sent, torch.tensor([mine], dtype=torch.uint8, device="cpu")
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._sent = flag, work
        if before is None:
            return False
        before[1].wait()
        return bool(before[0])

    def finish(self, within: timedelta | None = None) -> None:
        """Let the last flags arrive before the process group may go; RuntimeError if they don't `within` that time."""
        if self._sent is not None:
            work, self._sent = self._sent[1], None
            work.wait(*([] if within is None else [within]))
