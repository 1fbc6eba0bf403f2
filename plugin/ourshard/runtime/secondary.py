"""A second shard within the node, which training gathers from once it is there (hpZ).

Note [Secondary shard]
----------------------
With `secondary_shard_size: K`, runs of K neighbours on the shard axis are the axis `node`, and each of these ranks has
1/K of the whole parameters of every unit but the root, in compute dtype. After the masters changed, the first gather of
a unit in training goes over the shard axis and leaves this rank's part in the secondary shard. Those that follow
(backward, which may recompute; forwards and backwards of later micro-batches) go over `node` alone. So between nodes a
unit is gathered once an optimizer step. The root is whole until the end of backward, and has none.

* The secondary shard has what the codec left, where gathers are coded, and is gathered as it is.
* Evaluation, `gathered`, modules called on their own, and saving take the shard axis, and are exact as ever.
* What makes whole parameters stale (a step, a load, a write) makes it stale. Ranks keep and forget it in the recorded
  order, so all of them take the same axis. Inside of a join there is no such order, and it is left alone.

Source: Wang et al., 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", section 3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ourshard.runtime.ledger import Kind, Ledger

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.mesh import Axis


class SecondaryShard:
    """This rank's part of one lane within its node: Note [Secondary shard]. Starts out stale."""

    __slots__ = ("_coded", "_ledger", "_part", "axis", "tensor")

    def __init__(self, whole: torch.Tensor, axis: Axis, ledger: Ledger | None) -> None:
        numel = whole.numel() // axis.size
        self.axis = axis
        self._part = slice(axis.rank * numel, (axis.rank + 1) * numel)  # of the whole lane
        self._ledger = ledger
        self._coded: bool | None = None  # shows what a codec left of the masters; None: they have changed since
        self.tensor = torch.empty(numel, dtype=whole.dtype, device=whole.device)
        if ledger is not None:
            ledger.hold(Kind.SECONDARY, self.tensor.nbytes)

    def shows(self, coded: bool) -> bool:
        """Say whether it has the parameters as they are now, through the codec or exact, as `coded` asks."""
        return self._coded is coded

    def keep(self, whole: torch.Tensor, coded: bool) -> None:
        """Take this rank's part of the gathered lane; on the stream that gathered it."""
        self.tensor.copy_(whole[self._part])
        self._coded = coded

    def forget(self) -> None:
        """Note that the masters changed."""
        self._coded = None

    def let_go(self) -> None:
        """Tell the ledger that the memory is given back; another one takes its place."""
        if self._ledger is not None:
            self._ledger.hold(Kind.SECONDARY, -self.tensor.nbytes)


def keeps_secondary(engine: Engine) -> bool:
    """Say whether gathers issued now may use secondary shards; the same on every rank. Note [Secondary shard]."""
    if engine.schedule.phase is None or engine.schedule.joins or engine.gathered_depth:
        return False
    return engine.phase_is_backward or engine.forward_has_grad
