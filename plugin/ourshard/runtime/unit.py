"""A unit on this rank: a module whose parameters are gathered, installed, reduced and released together.

Note [Life of a unit]
---------------------
    state        whole   leaves in place   left by
    resting      no      no                issue_gather (need, or prefetch)
    gathered     yes     no                install (before its forward or backward), release
    installed    yes     yes               uninstall, release

`calls` are the forwards whose backward may still come, `running` is set while a backward has begun and not passed the
unit's input boundary. A unit is released when its forward ends (stage 3, resharding) unless a backward of it is
running, and when the last running backward has passed its input boundary; never because its gradients are complete: a
frozen base weight is needed after its adapter's gradient has arrived. `held` units stay whole until the end of
backward: the root, and units whose parameters were read by others.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ourshard.runtime.hooks import Entry, hook_outputs, tensors_in
from ourshard.runtime.inventory import Parameter
from ourshard.runtime.kept import Taken, close, reopen
from ourshard.runtime.lane import Lane
from ourshard.runtime.layout import UnitLayout
from ourshard.runtime.meter import Spent
from ourshard.runtime.passage import Passage
from ourshard.runtime.placement import At
from ourshard.runtime.schedule import Action
from ourshard.runtime.shown import Shown, hide_gradients, show, take_flags
from ourshard.runtime.streams import Queue

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine


class _Calls:
    """How many forwards of a unit may still have a backward."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open = 0


class Call:
    """One forward with gradient. Its graph alone keeps it alive, so that one without a backward is forgotten."""

    __slots__ = ("__weakref__", "_among", "begun", "is_open")

    def __init__(self, among: _Calls) -> None:
        self.begun = False  # its backward has
        self.is_open = True
        self._among = among
        among.open += 1

    def close(self) -> None:
        """Count it no more."""
        if self.is_open:
            self.is_open = False
            self._among.open -= 1

    __del__ = close


class Unit:
    """The runtime of one unit: Note [Life of a unit]."""

    def __init__(self, engine: Engine, index: int, name: str, modules: list[nn.Module], rooted: bool) -> None:
        self.engine = engine
        self.index = index
        self.name = name
        self.label = name or "the root unit"
        self.modules = modules  # whose forwards use it, in order; none for rooted units
        self._is_merged = len(modules) > 1
        self.rooted = rooted  # whole from the root's forward to the end of backward
        self.lanes: list[Lane] = []
        self.guests: list[Lane] = []  # the root's lanes of whole parameters that have some inside of `modules`
        self.kept = False  # stays whole from forward to backward
        self.whole = False
        self.is_ahead = False  # gathered and not asked for since
        self.installed = False
        self.held = False
        self.shown: Shown | None = None  # how the leaves were that modules show while no forward runs
        self.pinned = 0  # `gathered(...)` contexts around it
        self.open_writes = 0  # those of them that write back
        self.calls = _Calls()
        self._begun: list[weakref.ref[Call]] = []  # calls whose backward has
        self.entered: list[Entry] = []  # calls whose forward is under way
        self.running = False
        self.passed = 0  # modules whose forward is over in this pass
        self.recomputes = 0  # forwards without gradient inside of one with: reentrant checkpoints, which come again
        self.reduced = False  # in the current backward
        self.sharded = False  # some lane's parameters are sharded at rest: gathering communicates
        self._passage: Passage | None = None  # the forward or backward under way, if someone looks
        self._gathered: Any = None  # event on the gather stream that compute has not waited for
        self.freed: list[Lane] = []  # lanes whose whole parameters are freed at release
        self.taken: list[Taken] = []  # leaves that the user holds: Note [Kept after gathered] in kept.py
        self._trainable: list[Lane] = []
        self._gather_mark: Any = None  # that event, kept for the next gather
        self._reduce_mark: Any = None  # as `_gather_mark`, on the reduce stream
        self._sites: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []

    def build(self, layout: UnitLayout, parameters: list[Parameter]) -> None:
        """Make the lanes of a layout over `parameters`."""
        reduce_dtype = self.engine.reduce_dtype
        self.lanes = [Lane(self, lane, parameters, reduce_dtype or lane.key.compute_dtype) for lane in layout.lanes]  # type: ignore[attr-defined]
        self.follow_trainable()
        self.sharded = any(lane.gathers for lane in self.lanes)
        self.freed = [lane for lane in self.lanes if lane.placement.params is At.SHARD]

    def take_over(self) -> None:
        """Turn the model's parameters into what the lanes hold; see `Lane.take_over`."""
        for lane in self.lanes:
            lane.take_over()
            if not lane.direct:
                self.add_sites(lane)

    def add_sites(self, lane: Lane) -> None:
        """Note where the leaves of a lane, which are not what the user holds, are put before the modules compute."""
        if self.installed:
            self.uninstall()
        for parameter, leaf in zip(lane.parameters, lane.leaves, strict=True):
            for site in parameter.sites:
                self._sites.append((site.module._parameters, site.attribute, leaf, parameter.tensor))

    # ---- whole parameters ----------------------------------------------------------------------------------

    def issue_gather(self) -> None:
        """Start to bring the parameters in.

        A gather that communicates does so on every rank, also where the unit is whole already: what another rank has
        kept can't be known. Inside of `gathered(...)`, which all ranks enter together, none communicates.
        """
        if self.whole and (self.pinned or not self.sharded):
            return
        engine = self.engine
        self.open_gather()
        with engine.streams.gather as stream:
            self.fill(stream)
        if engine.disk is not None:
            ahead = engine.schedule.upcoming(engine.config.offload.windows)
            engine.disk.shards.read_ahead([lane for unit in ahead for lane in unit.lanes if lane.passes_disk])

    def open_gather(self) -> None:
        """Take the memory that `fill` fills; on the compute stream, whose allocator owns it.

        Lanes whose masters are whole are filled at once: users may write to these, and every forward fills them anew,
        so that no other stream touches them.
        """
        self.is_ahead = self.is_ahead or not self.whole
        self.whole = True
        for lane in self.lanes:
            lane.full.allocate()
            if lane.left:
                lane.come_back()
            if lane.placement.whole:
                lane.fill()
        if self.taken:
            reopen(self)
        if self.engine.ledger is not None and self.sharded:
            self.engine.ledger.gathers[self.label] += 1

    def fill(self, stream: Queue) -> None:
        """Bring the parameters in, on the stream of gathers, which is the current one."""
        for lane in self.lanes:
            if not lane.placement.whole:
                lane.fill()
        self._gathered = self._gather_mark = stream.mark(self._gather_mark)

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
        self.is_ahead = False
        if self._gathered is not None:
            self.finish_gather()

    def finish_gather(self) -> None:
        """Make the current stream wait for the gather that brings the parameters."""
        self.is_ahead = False
        if self._gathered is not None:
            self.engine.streams.wait(self._gathered, Spent.GATHER, self.label)
            self._gathered = None

    def install(self) -> None:
        """Put the leaves where the modules look for their parameters."""
        if not self.installed:
            for number, (registry, attribute, leaf, resting) in enumerate(self._sites):
                if attribute not in registry or registry[attribute] is not resting:
                    self.uninstall(number)
                    raise RuntimeError(
                        f"The parameter {attribute!r} of unit {self.label!r} was replaced after the model was "
                        "sharded; change the model (resize embeddings, add adapters, parametrize or prune weights) "
                        "before `prepare`, and call `torch.func.functional_call` inside of "
                        "`with ourshard.gathered(model):`."
                    )
                registry[attribute] = leaf
            self.installed = True

    def uninstall(self, count: int | None = None) -> None:
        """Put back what the leaves took the places of: all, or the first `count` of an installation that failed."""
        self.installed = False
        if self.shown is not None:
            hide_gradients((self,))
            take_flags(self)
        for registry, attribute, _, resting in self._sites[:count]:
            registry[attribute] = resting

    def release(self) -> None:
        """Put handles back and, where parameters are sharded at rest, free the whole ones."""
        if self.installed:
            self.uninstall()
        if self.pinned or not self.whole or not self.freed:
            return
        if self._gathered is not None:  # gathered ahead and not used: the block must not be reused before it lands
            self.engine.streams.wait(self._gathered, Spent.GATHER, self.label)
            self._gathered = None
        self.whole = False
        for lane in self.freed:
            lane.full.free()
            if lane.left:
                lane.rest_on_left()
        if self.taken:
            close(self)

    def release_unused(self) -> None:
        """Release a unit that was gathered ahead, or only because other ranks did, and not asked for since."""
        if self.is_ahead and not self.held and not self.running:
            self.release()

    def mark_stale(self) -> None:
        """Note that the masters changed: what is whole no longer shows them, unless it is the masters."""
        for lane in self.lanes:
            if not lane.direct:
                lane.mark_stale()
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
        if not self.installed:
            self.install()
        if self.engine.measuring.watched and not self.engine.phase_is_backward:
            self._open_passage("forward")

    def after_forward(self, has_backward: bool) -> None:
        """Release, unless a backward is running, or will come soon and the unit is kept for it."""
        if self._passage is not None and not self.engine.phase_is_backward:  # else a recomputation, part of a backward
            self._close_passage()
        if self._is_merged and self._more_to_come():
            return
        if self.running or self.held:
            if self.engine.phase_is_backward:
                return  # a recomputation: the backward that asked for it needs everything as it is
            self._rest_in_place()
        elif self.kept and (has_backward or self._is_awaited):
            self._rest_in_place()
        elif self.engine.phase_is_backward and has_backward:
            return  # reentrant checkpointing: its backward comes next
        else:
            self.release()

    @property
    def _is_awaited(self) -> bool:
        """Say whether the backward of an earlier forward is still to read what this one has computed with."""
        return self.calls.open > 0 and not any(lane.codec for lane in self.lanes)  # evaluation sees exact weights

    def hold_if_given_away(self, outputs: list[torch.Tensor]) -> None:
        """Stay whole until the end of backward where a module returned a parameter, or a view of one."""
        for tensor in outputs:
            for lane in self.lanes:
                if lane.full.contains(tensor):
                    self.engine.hold(self)

    def _open_passage(self, phase: str) -> None:
        if self._passage is None:
            self._passage = Passage(self.engine.measuring.meter, phase, self.label)

    def _close_passage(self) -> None:
        assert self._passage is not None
        passage, self._passage = self._passage, None
        passage.close()

    def _more_to_come(self) -> bool:
        """Say whether other modules of a merged unit are still to run in this pass."""
        if self.engine.phase_is_backward:
            return False
        self.passed = (self.passed + 1) % len(self.modules)
        return self.passed > 0

    def _rest_in_place(self) -> None:
        if self.held:
            show(self)  # held before its leaves were in their places, since other code had read them
        elif self.installed:
            self.uninstall()

    def enter(self, inputs: list[torch.Tensor]) -> Entry:
        """Note a forward with gradient; `entered` has it until the forward is over."""
        entry = Entry(self, Call(self.calls), inputs)
        self.entered.append(entry)
        return entry

    @property
    def is_pending(self) -> bool:
        """Say whether this backward may still bring gradients."""
        return self.rooted or self.running or self.recomputes > 0 or self.calls.open > 0

    def before_backward(self) -> None:
        """Bring the parameters back before the first gradient reaches the unit. Idempotent while a backward runs."""
        if not self.engine.phase_is_backward:
            self.engine.begin_backward()
        if not self.running:
            self.require()
            if not self.installed:
                self.install()
            if self.engine.measuring.watched:
                self._open_passage("backward")
        self.running = True

    def after_backward(self, call: Call) -> None:
        """Reduce and release once the gradients of all calls have left the unit by its inputs."""
        call.close()
        if self.recomputes:
            self.recomputes -= 1
        if self.recomputes or self.calls.open:
            return
        self.running = False
        if self._passage is not None:
            self._close_passage()
        if self.lanes_due():
            self.engine.schedule.need(Action.REDUCE, self)
        else:
            self.put_aside()
        if self.engine.keeps_graph:
            self.engine.hold(self)  # the gradients are functions of the parameters: another backward reads them
        if not self.held:
            self.release()

    @torch.no_grad()
    def put_aside(self, but: Sequence[Lane] = ()) -> None:
        """Keep what arrived for a later backward, which will sync, except in the lanes of `but`."""
        for lane in self.lanes:
            waits = lane.trainable and lane not in but and not lane.direct  # direct ones add up where they are
            if waits and lane.has_leaf_gradients():
                lane.prepare(reduce_next=False)
                lane.take_gradients()
                lane.show_waiting()

    def close(self) -> None:
        """Forget the calls whose backward is over."""
        begun, self._begun = self._begun, []
        for reference in begun:
            call = reference()
            if call is not None and call.is_open:
                call.close()
        if self._passage is not None:
            self._close_passage()
        self.running = False
        self.passed = self.recomputes = 0

    def on_leaf_gradient(self, leaf: torch.Tensor) -> None:
        """Run as a hook on the leaves of a rooted unit, which no boundary ends: reduce once all have arrived."""
        leaves = [p for lane in self.lanes for p in lane.leaves if p.requires_grad]
        if self.engine.gathered_depth or any(p.grad is None for p in leaves):
            return
        self.engine.begin_backward()
        if self.lanes_due():
            self.engine.schedule.need(Action.REDUCE, self)
        else:
            self.put_aside()

    def reset(self) -> None:
        """Forget all that a forward or backward left half done."""
        self.held = False
        self.calls = _Calls()
        self.entered.clear()
        self.close()
        for lane in self.lanes:
            if lane.secondary is not None:
                lane.secondary.forget()  # ranks may have got to different places
            if not lane.direct:
                for leaf in lane.leaves:
                    leaf.grad = None
        self.release()

    def on_output_gradient(self, call: Call | None, gradient: torch.Tensor) -> None:
        """Run as a hook on the outputs of a call (or of a read from outside): a gradient is about to enter the unit."""
        if call is not None and not call.begun:
            call.begun = True
            self._begun.append(weakref.ref(call))
        self.before_backward()

    def watch(self, outputs: Any) -> bool:
        """Hear of the backward through values that were made of the unit's parameters outside of its modules."""
        return hook_outputs(tensors_in(outputs), partial(self.on_output_gradient, None))

    @property
    def trainable(self) -> bool:
        """Say whether backwards come for parameters inside of its modules."""
        return bool(self._trainable) or any(lane.trainable for lane in self.guests)

    def follow_trainable(self) -> None:
        """Take in which lanes train."""
        self._trainable = [lane for lane in self.lanes if lane.trainable]

    def lanes_due(self) -> list[Lane]:
        """Return the lanes that this backward reduces; the same on every rank."""
        if self.engine.sync_backward:
            return self._trainable
        return [lane for lane in self._trainable if self.engine.lane_reduces_now(lane)]

    def has_arrived(self) -> bool:
        """Say whether a gradient waits to be reduced in this backward."""
        found = False
        for lane in self.lanes_due():  # on the host a generator's turns count
            found = found or lane.has_arrived()
        return found

    def reduce(self) -> None:
        """Take what arrived, zeros where nothing did, and reduce the lanes whose turn it is."""
        if torch.is_grad_enabled():  # a backward has it off, and to turn it off costs the host ten calls
            with torch.no_grad():
                self._reduce()
        else:
            self._reduce()

    def _reduce(self) -> None:
        engine = self.engine
        again, self.reduced = self.reduced, True
        due = self.lanes_due()
        if due != self.lanes:
            self.put_aside(but=due)
        if engine.ledger is not None:
            engine.ledger.reduces[self.label] += 1
        for lane in due:
            lane.prepare(reduce_next=True, again=again)
        read: list[torch.Tensor] = []
        with engine.streams.reduce as stream:
            for lane in due:
                read += lane.take_gradients()
            lent = [] if engine.peer is None else [lane for lane in due if lane.is_lent]
            if lent:
                engine.collectives.peer_reduce([lane.lent_reduction(engine.sync_backward) for lane in lent], self.label)
            for lane in due:
                if lane.is_lent:
                    read += lane.end_loan(engine.sync_backward)
                else:
                    read += lane.reduce(engine.sync_backward)
            self._reduce_mark = stream.mark(self._reduce_mark)
        engine.in_flight.keep(read, self._reduce_mark, self.label)  # not inside: it makes the compute stream wait
        if engine.in_backward is not None:
            engine.in_backward.reduced(self, self._reduce_mark)
