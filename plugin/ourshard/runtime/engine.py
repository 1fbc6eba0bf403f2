"""The engine: all that ourshard knows and does about one sharded model.

Read `unit.py` for what happens to a unit, `schedule.py` for the order of collectives, `lane.py` for buffers.
This file opens and closes the phases (forward, backward, step) and holds what the units share.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd import Variable

from ourshard.config import Accumulate, ShardConfig, Tier
from ourshard.runtime.casting import Casts, dtype_named
from ourshard.runtime.coded import codes_now
from ourshard.runtime.collectives import Collectives, Reducer, hops_of
from ourshard.runtime.control import Control
from ourshard.runtime.disk import Disk
from ourshard.runtime.frozen import Mark
from ourshard.runtime.hooks import forward_on_stack, hook_outputs, tensors_in
from ourshard.runtime.in_backward import StepsInBackward
from ourshard.runtime.in_flight import InFlight
from ourshard.runtime.inputs import on_host
from ourshard.runtime.inside import LeftForward
from ourshard.runtime.lane import Lane
from ourshard.runtime.ledger import Ledger
from ourshard.runtime.live import LiveEngines
from ourshard.runtime.mesh import Mesh
from ourshard.runtime.meter import Measuring
from ourshard.runtime.module_buffers import UpdatedBuffers
from ourshard.runtime.newcomers import Newcomers
from ourshard.runtime.peer import PeerCopies
from ourshard.runtime.placement import At
from ourshard.runtime.schedule import Action, Event, Schedule
from ourshard.runtime.settling import settle
from ourshard.runtime.shown import hide_gradients, show, show_gradients, take_shown, take_writes
from ourshard.runtime.streams import Streams, profiler_range
from ourshard.runtime.unit import Unit
from ourshard.runtime.writing import agree_on_writes, take_group_writes

logger = logging.getLogger("ourshard")


ENGINES = LiveEngines()  # the global optimizer hooks ask them
_ORDER = itertools.count()


class Engine:
    """The runtime of one model. Made by `build.build_engine`; found with `engine_of(model)`.

    Attributes that users may read: `config`, `mesh`, `ledger` (None unless asked for), `units`.
    `require_sync` may be set by whoever owns the accumulation: it is read when a forward begins.
    """

    as_sharded: dict[str, Mark]  # frozen parameters that a checkpoint may leave out: frozen.py
    unsynced = False  # a backward did not sync, and none has since: Note [Gradients that wait] in settling.py
    _held_once: tuple[Unit, ...] = ()  # in the backward before, while graphs of that time are left: `begin_backward`

    def __init__(
        self, model: nn.Module, config: ShardConfig, mesh: Mesh, *, cast_small: bool, ledger: Ledger | None
    ) -> None:
        self.model = weakref.ref(model)
        self.asked = config  # as it was given; `config` has what was chosen in the place of `auto`
        self.config = config
        self.mesh = mesh
        self.ledger = ledger
        self.chosen = ""  # what was measured of the links, and decided: Note [Measured links]
        self.param_dtype = dtype_named(config.precision.param_dtype)
        self.reduce_dtype = dtype_named(config.precision.reduce_dtype)
        self.master_dtype = dtype_named(config.precision.master_dtype) or torch.float32
        self.casts = Casts(config.precision, autocast=not cast_small)
        self.streams = Streams(mesh.device)
        self.control = Control(mesh)
        self.collectives = Collectives(self.control, ledger, hops_of(config, mesh))
        self.host, self.inputs = on_host(config, self.streams, mesh.device, ledger)
        self.disk: Disk | None = None  # set before the units are made, where masters rest on one
        self.peer: PeerCopies | None = None  # set once the units are there
        self.buffers = UpdatedBuffers(self.control, self.collectives, mesh.world)
        self.without_peers = ""  # why there are none
        self.reducer = Reducer(self.collectives, config.communication.reduce_op)
        self.measuring = Measuring(self.streams, (self.streams, self.control))
        self.output_watch: Callable[[Unit, list[torch.Tensor]], None] | None = None  # hears of each unit's outputs
        self.units: list[Unit] = []
        self.order = next(_ORDER)  # among the engines of this process; the same on every rank
        name = f" of {type(model).__name__} (model {self.order})"
        self.schedule = Schedule(self.control, self.units, self.perform, name)
        self.require_sync = True
        self.sync_backward = True  # `require_sync` of the last forward
        self.phase_is_backward = False
        self.forward_has_grad = False  # the root's forward runs, with gradient
        self.coded_as_told: bool | None = None  # a rank with work said whether this gather is coded: joining.py
        self.gathered_depth = 0  # inside `gathered(...)`: everything is whole, hooks do nothing
        self.open_writes = 0  # inside `gathered(writeback=True)`, of any module
        self.adoption = 0  # grows when an optimizer must look for parameters anew
        self.writes = 0  # whole values written from outside since the last forward: `writing.py`
        self.own_hooks: set[int] = set()  # numbers of the hooks that the engine put on modules and leaves
        self.clipped: object = None  # what clipping remembers of the model's parameters: clip.py
        self.used_alike = True  # all ranks used the same parameters in the last backward that synced
        self.replays = False  # the last forward was a graph's, which brings in what stays whole by itself
        self.replayed = 0  # how many were
        self._left = LeftForward()
        self.forward_depth = 0  # of the root, where it calls itself
        self._doors = 0  # modules that are called on their own and under way
        self.held: list[Unit] = []
        self.in_flight = InFlight(self.streams)
        self.newcomers = Newcomers(self)
        self.in_backward: StepsInBackward | None = None  # set once the units are there, where the config asks for it
        self._held_before = 0  # units that were held when the forward began
        self.keeps_graph = False  # the backward that runs, or the last one, has `create_graph`
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet(model.modules())

    @property
    def root(self) -> Unit:
        return self.units[-1]

    @cached_property
    def rooted(self) -> list[Unit]:
        """The root and the units that live as long as it does, the root first."""
        return [self.root, *(unit for unit in self.units[:-1] if unit.rooted)]

    @cached_property
    def _unsharded(self) -> list[Unit]:
        """Units that no gather brings in, in the order in which a forward needs them."""
        return [unit for unit in dict.fromkeys((*self.rooted, *self.units)) if not unit.sharded]

    @property
    def read_disk(self) -> Disk | None:
        """Return the disk that gathers read, if they do."""
        return self.disk if self.config.offload.params is Tier.NVME else None

    def lanes(self) -> list[Lane]:
        return [lane for unit in self.units for lane in unit.lanes]

    # ---- forward -------------------------------------------------------------------------------------------

    @property
    def outside_of_forward(self) -> bool:
        return not self.forward_depth and not self.phase_is_backward and not self.gathered_depth

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open the forward phase: the root's parameters become whole and stay so until the end of backward."""
        if self.forward_depth and self._was_interrupted():
            self.reset()
        self.forward_depth += 1
        if self.forward_depth > 1:
            return None
        if self.gathered_depth:
            return self.casts.inputs(args, kwargs)
        if not self._is_recomputed():
            self._open_forward()
        for unit in self.rooted:
            unit.require()
            unit.install()
            self.hold(unit)
        return self.casts.inputs(args, kwargs)

    def _was_interrupted(self) -> bool:
        """Say whether the forward that is under way ended without a word: torch calls no hook for a Ctrl-C."""
        model = self.model()
        return model is not None and not self.phase_is_backward and not forward_on_stack([model])

    def _is_recomputed(self) -> bool:
        """Say whether a checkpoint around the model runs its forward again. A backward that failed is cleared away."""
        if self.phase_is_backward and torch._C._current_graph_task_id() == -1:
            logger.warning("The last backward ended in an exception: its gradients are dropped.")
            self.reset()
            self.forward_depth = 1
        return self.phase_is_backward

    def _open_forward(self) -> None:
        if self.in_backward is not None:
            self.in_backward.check_forward()
        self._doors = 0  # one of which raised closes none
        grad = self.forward_has_grad = torch.is_grad_enabled()
        self.measuring.begin_phase("forward", counts=grad)
        if grad:
            self.newcomers.refuse()
            take_shown(self.held)
            self.sync_backward = self.require_sync
            if not any(unit.calls.open for unit in self.units):
                self._held_once = ()
            self.follow_requires_grad(self.units)
            if self.inputs is not None:
                self.inputs.begin_forward()
        agree_on_writes(self)
        self._bring_in_unsharded()
        for lane in self.lanes():
            if lane.placement.whole and not lane.direct:  # the user may have written to the masters he holds
                lane.follow_moved()
                lane.mark_stale()
                lane.fill()
        self._held_before = len(self.held)
        if len(self._unsharded) < len(self.units):  # else it is local: a rank may evaluate alone, as under DDP
            title = f"{'with' if grad else 'without'} gradients, {self._root_state}"
            self.schedule.begin(("forward", title), self.config.prefetch.forward)

    @property
    def _root_state(self) -> str:
        """Say, for the other ranks, whether the root must be gathered: the order of a phase depends on it."""
        return f"root {'whole' if self.root.whole else 'at rest'}{', coded' if codes_now(self) else ''}"

    def end_forward(self, outputs: Any, hidden: Sequence[torch.Tensor] = ()) -> Any:
        """Close the forward phase; what has no backward is released. `hidden`: results that were not returned."""
        self.forward_depth -= 1
        if self.forward_depth:
            return None
        if self.gathered_depth:
            self.watch_gathered(outputs)
            return self.casts.outputs(outputs)
        has_backward = torch.is_grad_enabled() and hook_outputs([*tensors_in(outputs), *hidden], self.on_root_gradient)
        if not self.phase_is_backward:
            self.schedule.end()
            self.measuring.end_phase()
            self.forward_has_grad = False
            self._release_ahead()
            if has_backward:
                show_gradients(self.held)
            else:
                self._release_held(self._held_before)
            if self.read_disk is not None and not torch.is_grad_enabled() and not self.schedule.joins:
                self.read_disk.agree("the end of a forward without gradients")
        return self.casts.outputs(outputs)

    def forward_failed(self) -> None:
        """Clear away a forward that raised; a checkpoint ends its recomputation so, which is no failure."""
        if self.phase_is_backward:
            self.forward_depth -= 1
        else:
            self.reset()

    def read_sync(self, *owners: Unit) -> None:
        """Let a module of `owners` that is called on its own train their parameters and the root's, and sync."""
        if not self.outside_of_forward:
            return
        units = (*owners, *self.rooted)
        take_group_writes(units)
        if torch.is_grad_enabled():
            self.sync_backward = self.require_sync
            if not self._doors:
                take_shown(self.held)
                self.follow_requires_grad(units)

    def open_door(self, units: Sequence[Unit]) -> None:
        """Make rooted units whole, the root among them, for a module that is called on its own. Doors nest."""
        self._doors += 1
        for unit in units:
            unit.require()
            unit.install()

    def close_door(self, units: Sequence[Unit], outputs: Any) -> None:
        self._doors -= 1
        if torch.is_grad_enabled() and self.root.watch(outputs):
            for unit in units:
                self.hold(unit)
            show_gradients(units)
        elif not self.root.held and not self._doors:
            for unit in units:
                unit.release()

    def hold(self, unit: Unit) -> None:
        """Keep a unit whole until the end of backward (or of a forward that has none)."""
        show(unit)
        if not unit.held:
            unit.held = True
            self.held.append(unit)

    def may_gather(self) -> bool:
        """Say whether code that reads a resting parameter runs inside of a forward (or backward) of this model."""
        return not self.outside_of_forward or forward_on_stack(self._modules)

    def cast_requested(self, lane: Lane, dtype: torch.dtype) -> None:
        """Compute the lane in `dtype`, after `model.to(dtype)`."""
        lane.unit.finish_gather()  # which fills the memory that is given back
        lane.unit.release()
        lane.recast(dtype)
        lane.unit.mark_stale()

    def follow_requires_grad(self, units: Sequence[Unit]) -> None:
        """Take over what the user set `requires_grad` of parameters of `units` to."""
        promoted = False
        with torch._C.DisableTorchFunctionSubclass():
            for lane in [lane for unit in units for lane in unit.lanes]:
                if lane.was_toggled():
                    promoted |= lane.follow_requires_grad(self.master_dtype)
        if promoted:
            self.adoption += 1
            self.schedule.forget()
            for unit in self.units:
                unit.follow_trainable()

    # ---- backward ------------------------------------------------------------------------------------------

    def on_root_gradient(self, gradient: torch.Tensor) -> None:
        """Run as a hook on the root's outputs."""
        self.begin_backward()

    def watch_gathered(self, outputs: Any) -> None:
        """Hear of a backward, after the block, of a forward of the model or of one of its modules inside of `gathered`.

        It syncs as one of a forward outside would.
        """
        if torch.is_grad_enabled() and not self.forward_depth and not self.phase_is_backward:
            self.sync_backward = self.require_sync
            hook_outputs(tensors_in(outputs), self.on_gathered_gradient)

    def on_gathered_gradient(self, gradient: torch.Tensor) -> None:
        """Run as a hook on outputs of a forward inside of `gathered`: its backward outside needs all of it again."""
        if not self.gathered_depth:
            for unit in self.units:
                unit.before_backward()

    def begin_backward(self) -> None:
        """Open the backward phase with its first gradient, and bring the root back if it was released. Idempotent."""
        if self.phase_is_backward or self.gathered_depth:
            return
        if self.in_backward is not None:
            self.in_backward.check_backward()
        take_writes(self.held)
        hide_gradients(self.held)
        self.phase_is_backward = True
        self.measuring.begin_phase("backward")
        self.keeps_graph = torch.is_grad_enabled()
        for unit in self.units:
            unit.reduced = False
        self._left.leave(self.schedule, inside=self.forward_depth > 0)
        self.sync_backward = self.sync_backward and not self._left
        title = f"{'with' if self.sync_backward else 'without'} sync, {self._root_state}"
        self.schedule.begin(("backward", title), self.config.prefetch.backward)
        # Of units that were held, code may have read parameters past the handles: no hook tells of its backward.
        for unit in (*self.rooted, *self._held_once):
            unit.require()
            unit.install()
            self.hold(unit)
        Variable._execution_engine.queue_callback(self.finish_backward)  # type: ignore[attr-defined]

    def finish_backward(self) -> None:
        """Close the backward phase: reduce what is left, release everything, and agree which gradients exist."""
        if not self.phase_is_backward:
            return
        in_order = (*reversed(self.units[:-1]), self.root)
        behind = [unit for unit in in_order if not unit.reduced or unit.has_arrived()]
        for unit in behind:
            if (not unit.reduced or unit.has_arrived()) and unit.lanes_due():
                self.schedule.need(Action.REDUCE, unit)
        self.schedule.end()
        for unit in behind if self.sync_backward else self.units:
            unit.put_aside()
        settle(self, behind)
        self.phase_is_backward = False
        if self.inputs is not None and not self._left:
            self.inputs.end_backward()
        self.streams.join()
        self.measuring.end_phase()
        self.land_masters()
        self.in_flight.forget()
        if self._left:
            self.sync_backward = self.require_sync
            self._left.resume(self.schedule, self.config.prefetch.forward)
        elif not self.keeps_graph:
            self._held_once = tuple(unit for unit in self.held if not unit.rooted)
            self._release_held()
            for unit in self.units:
                unit.close()
                if unit.installed or unit.whole:
                    unit.release()

    def lane_reduces_now(self, lane: Lane) -> bool:
        if self.sync_backward:
            return True
        return lane.placement.grads is At.SHARD and self.config.accumulate is Accumulate.SHARDED

    def _release_held(self, before: int = 0) -> None:
        """Release what was held, from number `before` on: a forward without backward keeps what others hold."""
        for unit in self.held[before:]:
            unit.held = False
            unit.release()
        del self.held[before:]

    def _release_ahead(self) -> None:
        """Release units that were gathered ahead, or joined, and not used; or merged ones that were used in part."""
        for unit in self.units:
            if unit.whole and not unit.held and not unit.running and (unit.is_ahead or unit.passed):
                unit.passed = 0
                unit.release()

    def perform(self, event: Event) -> None:
        """Gather or reduce a unit now, in the order that all ranks follow."""
        unit = self.units[event.unit]
        if self.ledger is not None:
            self.ledger.note(f"{event.action.value} {unit.label}")
        act = unit.issue_gather if event.action is Action.GATHER else unit.reduce
        if not self.measuring.watched:
            act()
            return
        with profiler_range(f"ourshard::{event.action.value} {unit.label}"):
            act()

    # ---- step ----------------------------------------------------------------------------------------------

    def land_masters(self) -> None:
        """Wait until no copy and no step reads or writes masters and gradients on the host: before the CPU does."""
        if self.host is not None:
            for lane in self.lanes():
                lane.await_step()
            self.streams.land()

    def masters_changed(self, sent: Collection[Lane] = ()) -> None:
        """Forget whole parameters that the masters left behind, and start to bring in those that stay whole.

        The masters of `sent` went up already.
        """
        for unit in self.units:
            if unit.sharded:
                unit.held = False
                if unit.installed or unit.whole:
                    unit.release()
            unit.mark_stale()
        self.held = [unit for unit in self.held if unit.held]
        for lane in sent:
            lane.sent = True
        stepping = self.host is not None and any(lane.stepping for lane in self.lanes())
        if not self.replays and not stepping:  # else the next forward does
            self._bring_in_unsharded()

    def _bring_in_unsharded(self) -> None:
        """Start to bring in what stays whole, where it does not show the masters.

        These gathers are in no record, and a rank may skip units: therefore all at once, before any of them is used.
        """
        due = [unit for unit in self._unsharded if not unit.whole]
        if due:
            for unit in due:
                unit.open_gather()
            with self.streams.gather as stream:
                for unit in due:
                    unit.fill(stream)

    def drop_gradients(self) -> None:
        """Forget all gradients, as `zero_grad` does."""
        for lane in self.lanes():
            if lane.direct:
                for leaf in lane.leaves:
                    leaf.grad = None
            lane.drop_gradients(range(len(lane.parameters)))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients wait: the backward of forwards in here reduces only what sharded accumulation needs."""
        before, self.require_sync = self.require_sync, False
        try:
            yield
        finally:
            self.require_sync = before

    def reset(self) -> None:
        """Make the model usable again after an exception in a forward or backward. Gradients are dropped."""
        self.forward_depth = self._doors = 0
        self.phase_is_backward = False
        self._left.forget()
        self.measuring.abandon()
        self.schedule.abandon()
        if self.inputs is not None:
            self.inputs.end_backward()
        self.streams.join()
        self.in_flight.forget()
        self.held.clear()
        if self.peer is not None:
            self.peer.abandon()
        if self.in_backward is not None:
            self.in_backward.abandon()
        for unit in self.units:
            unit.reset()
        self.drop_gradients()

    # ---- words ---------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """Return a few lines for the start of a run; see `summary.summary`."""
        from ourshard.runtime.summary import summary

        return summary(self)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(
            "A sharded model can't be deep-copied: copy it before `prepare` (or before `shard_model`) "
            "and shard the copy too."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError("A sharded model can't be pickled; save it with accelerator.save_model or save_pretrained.")
