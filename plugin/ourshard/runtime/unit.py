"""A unit on this rank: a module whose parameters are gathered, installed, reduced and released together.

Note [Life of a unit]
---------------------
    state        whole   leaves in place   left by
    resting      no      no                issue_gather (need, or prefetch)
    gathered     yes     no                install (before its forward or backward), release
    installed    yes     yes               uninstall, release

`calls` counts forwards whose backward is still to come, `running` is set while a backward has begun and not passed
the unit's input boundary. A unit is released when its forward ends (stage 3, resharding) unless a backward of it is
running, and when the last running backward has passed its input boundary; never because its gradients are complete: a
frozen base weight is needed after its adapter's gradient has arrived. `held` units stay whole until the end of
backward: the root, and units whose parameters were read by others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ourshard.runtime.inventory import Parameter
from ourshard.runtime.lane import Lane
from ourshard.runtime.layout import UnitLayout
from ourshard.runtime.placement import At
from ourshard.runtime.schedule import Action

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine


class Unit:
    """The runtime of one unit: Note [Life of a unit]."""

    def __init__(self, engine: Engine, index: int, name: str, modules: list[nn.Module], rooted: bool) -> None:
        self.engine = engine
        self.index = index
        self.name = name
        self.label = name or "the root unit"
        self.modules = modules  # whose forwards use it, in order; none for rooted units
        self.rooted = rooted  # whole from the root's forward to the end of backward
        self.lanes: list[Lane] = []
        self.whole = False
        self.is_ahead = False  # gathered and not asked for since
        self.installed = False
        self.held = False
        self.calls = 0
        self.running = 0
        self.passed = 0  # modules whose forward is over in this pass
        self.recomputes = 0  # forwards without gradient inside of one with: reentrant checkpoints, which come again
        self.reduced = False  # in the current backward
        self.sharded = False  # some lane's parameters are sharded at rest: gathering communicates
        self._gathered: Any = None  # event on the gather stream that compute has not waited for
        self._sites: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []

    def build(self, layout: UnitLayout, parameters: list[Parameter]) -> None:
        """Make the lanes of a layout over `parameters`."""
        reduce_dtype = self.engine.reduce_dtype
        self.lanes = [Lane(self, lane, parameters, reduce_dtype or lane.key.compute_dtype) for lane in layout.lanes]  # type: ignore[attr-defined]
        self.sharded = self.engine.mesh.shard.size > 1 and any(lane.placement.params is At.SHARD for lane in self.lanes)

    def take_over(self) -> None:
        """Turn the model's parameters into what the lanes hold; see `Lane.take_over`."""
        for lane in self.lanes:
            lane.take_over()
            if not lane.direct:
                for parameter, leaf in zip(lane.parameters, lane.leaves, strict=True):
                    for site in parameter.sites:
                        self._sites.append((site.module._parameters, site.attribute, leaf, parameter.tensor))

    # ---- whole parameters ----------------------------------------------------------------------------------

    def issue_gather(self) -> None:
        """Start to bring the parameters in; no-op when they are here or on their way."""
        if self.whole:
            return
        self.whole = self.is_ahead = True
        engine = self.engine
        for lane in self.lanes:
            lane.full.allocate()
        if engine.ledger is not None and self.sharded:
            engine.ledger.gathers[self.label] += 1
        with engine.streams.gather():
            for lane in self.lanes:
                lane.fill()
            self._gathered = engine.streams.event()

    def require(self) -> None:
        """Make the parameters whole and ready for the current stream, through the recorded order."""
        engine = self.engine
        if not self.whole:
            if self.sharded:
                engine.schedule.need(Action.GATHER, self)
            else:
                self.issue_gather()
        elif self.sharded:
            engine.schedule.passed(self)
        self.finish_gather()

    def finish_gather(self) -> None:
        """Make the current stream wait for the gather that brings the parameters."""
        self.is_ahead = False
        if self._gathered is not None:
            self.engine.streams.wait(self._gathered)
            self._gathered = None

    def install(self) -> None:
        """Put the leaves where the modules look for their parameters."""
        if not self.installed:
            self.installed = True
            for registry, attribute, leaf, resting in self._sites:
                if registry.get(attribute) is not resting:
                    raise RuntimeError(
                        f"The parameter {attribute!r} of unit {self.label!r} was replaced after the model was "
                        "sharded; change the model (resize embeddings, add adapters) before `prepare`."
                    )
                registry[attribute] = leaf

    def uninstall(self) -> None:
        if self.installed:
            self.installed = False
            for registry, attribute, _, resting in self._sites:
                registry[attribute] = resting

    def release(self) -> None:
        """Put handles back and, where parameters are sharded at rest, free the whole ones."""
        self.uninstall()
        if not self.whole or not any(lane.placement.params is At.SHARD for lane in self.lanes):
            return
        if self._gathered is not None:  # gathered ahead and not used: the block must not be reused before it lands
            self.engine.streams.wait(self._gathered)
            self._gathered = None
        self.whole = False
        for lane in self.lanes:
            if lane.placement.params is At.SHARD:
                lane.full.free()

    def mark_stale(self) -> None:
        """Note that the masters changed: what is whole no longer shows them."""
        for lane in self.lanes:
            lane.stale = True
        self.whole = False

    def whole_on_access(self, lane: Lane, position: int) -> nn.Parameter | None:
        """Return the leaf of a parameter that code outside of the unit reads, or None where it can't be brought in.

        Inside a forward of the model, or of one of its modules, the unit is gathered and held until backward ends.
        Where whole parameters are at rest, no communication is needed and any reader gets them.
        """
        engine = self.engine
        if not self.whole or self._gathered is not None:
            if self.sharded and not engine.may_gather():
                return None
            self.require()
        if self.sharded:
            engine.hold(self)
        return lane.leaves[position]

    # ---- forward and backward ------------------------------------------------------------------------------

    def before_forward(self) -> None:
        self.require()
        self.install()

    def after_forward(self, has_backward: bool) -> None:
        """Release, unless a backward is running, or will come soon and `reshard_after_forward` is off."""
        if self._more_to_come():
            return
        if self.running or self.held:
            if self.engine.phase_is_backward:
                return  # a recomputation: the backward that asked for it needs everything as it is
            self._rest_in_place()
        elif has_backward and not self.engine.config.reshard_after_forward:
            self._rest_in_place()
        elif self.engine.phase_is_backward and has_backward:
            return  # reentrant checkpointing: its backward comes next
        else:
            self.release()

    def _more_to_come(self) -> bool:
        """Say whether other modules of a merged unit are still to run in this pass."""
        if self.engine.phase_is_backward or len(self.modules) < 2:
            return False
        self.passed = (self.passed + 1) % len(self.modules)
        return self.passed > 0

    def _rest_in_place(self) -> None:
        if not self.held:
            self.uninstall()

    def before_backward(self) -> None:
        """Bring the parameters back before the first gradient reaches the unit. Idempotent while a backward runs."""
        self.engine.begin_backward()
        if not self.running:
            self.require()
            self.install()
        self.running = max(self.running, 1)

    def after_backward(self) -> None:
        """Reduce and release once the gradient has left the unit by its inputs."""
        self.calls = max(0, self.calls - 1)
        self.recomputes = max(0, self.recomputes - 1)
        if self.calls or self.recomputes:
            return
        self.running = 0
        if self.engine.reduces_now(self):
            self.engine.schedule.need(Action.REDUCE, self)
        else:
            self.put_aside()
        if not self.held:
            self.release()

    @torch.no_grad()
    def put_aside(self) -> None:
        """Keep what arrived for a later backward, which will sync."""
        for lane in self.lanes:
            if lane.trainable and any(leaf.grad is not None for leaf in lane.leaves):
                lane.take_gradients(reduce_next=False)

    def close(self) -> None:
        """Forget the calls of a forward and backward that are over."""
        self.calls = self.running = self.passed = self.recomputes = 0

    def on_leaf_gradient(self, leaf: torch.Tensor) -> None:
        """Run as a hook on the leaves of a rooted unit, which no boundary ends: reduce once all have arrived."""
        leaves = [p for lane in self.lanes for p in lane.leaves if p.requires_grad]
        if self.engine.gathered_depth or any(p.grad is None for p in leaves):
            return
        self.engine.begin_backward()
        if self.engine.reduces_now(self):
            self.engine.schedule.need(Action.REDUCE, self)
        else:
            self.put_aside()

    def reset(self) -> None:
        """Forget all that a forward or backward left half done."""
        self.held = False
        self.close()
        for lane in self.lanes:
            if not lane.direct:
                for leaf in lane.leaves:
                    leaf.grad = None
        self.release()

    def on_output_gradient(self, gradient: torch.Tensor) -> None:
        """Run as a hook on the outputs: a gradient is about to enter the unit."""
        self.before_backward()

    @property
    def trainable(self) -> bool:
        return any(lane.trainable for lane in self.lanes)

    def has_arrived(self) -> bool:
        """Say whether a gradient waits to be taken or reduced."""
        return any(lane.trainable and not lane.direct and lane.has_arrived() for lane in self.lanes)

    @torch.no_grad()
    def reduce(self) -> None:
        """Take what arrived, zeros where nothing did, and reduce the lanes whose turn it is."""
        engine = self.engine
        self.reduced = True
        due = []
        for lane in self.lanes:
            if lane.trainable:
                now = engine.lane_reduces_now(lane)
                lane.take_gradients(reduce_next=now)
                due += [lane] if now else []
        if engine.ledger is not None:
            engine.ledger.reduces[self.label] += 1
        with engine.streams.reduce():
            lent = [lane for lane in due if lane.is_lent]
            if lent:
                engine.collectives.peer_reduce([lane.lent_reduction(engine.sync_backward) for lane in lent], self.label)
                for lane in lent:
                    lane.end_loan(engine.sync_backward)
            buffers = [lane.reduce(engine.sync_backward) for lane in due if lane not in lent]
            engine.keep_until_reduced(buffers, engine.streams.event())
