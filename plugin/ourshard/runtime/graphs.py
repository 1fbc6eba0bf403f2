"""Run forwards and backwards as CUDA graphs: Note [Captured steps] in graph_policy.py.

Note [Capturing]
----------------
`model.forward` is replaced by `GraphedForward.run`. A capture runs the engine's own forward and backward, hooks and
all, while CUDA records: streams fork from the one that captures and join it, slots and gradients are taken from the
graphs' memory, at addresses that stay. Nothing runs on the GPU meanwhile, and ranks say nothing to each other: they
agree before, and after they compare whether all have succeeded. Then the graphs are replayed, now and later.

Eager forwards with gradient run on the stream that captures, since autograd's nodes that accumulate gradients live as
long as anyone holds a loss, and with them the stream that they were made on.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from ourshard.runtime.graph_policy import Call, Policy, Way, number_of, take_apart
from ourshard.runtime.graph_state import (
    AfterBackward,
    AfterForward,
    bring_in_anew,
    hooked,
    is_fresh,
    rests_on,
    why_not_now,
)

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine

logger = logging.getLogger("ourshard")

_LIVE: weakref.WeakSet[GraphedForward] = weakref.WeakSet()
_PREFIX = "a forward with gradients, "


class _Ticket:
    """One replayed forward: its backward comes once, or never, when nobody holds its outputs any more."""

    __slots__ = ("__weakref__", "used")

    def __init__(self) -> None:
        self.used = False


class _Replayed(torch.autograd.Function):
    """The node of a whole captured forward."""

    @staticmethod
    def forward(ctx: Any, captured: Captured, anchor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.captured, ctx.ticket = captured, captured.open_ticket()
        ctx.set_materialize_grads(False)
        outputs = captured.play_forward()
        ctx.mark_non_differentiable(*(out for place, out in enumerate(outputs) if place not in captured.differentiable))
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None]:
        if ctx.ticket.used:
            raise RuntimeError("cuda_graph: a captured step has one backward; set cuda_graph: false to run two.")
        ctx.ticket.used = True
        ctx.captured.play_backward(grads)
        return None, None


class Captured:
    """The two graphs of one key, and the tensors that go in and come out."""

    def __init__(self, engine: Engine, stream: torch.cuda.Stream, inputs: Call) -> None:
        self._engine = engine
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self._leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in inputs.leaves]
        self._spec = inputs.spec
        self._ticket: weakref.ref[_Ticket] = weakref.ref(_Ticket())
        self.anchor = torch.zeros(1, device=stream.device, requires_grad=True)  # what the outputs depend on
        self.differentiable: set[int] = set()  # places of outputs that need a gradient

    def record(self, forward: Callable[..., Any], graded: list[int]) -> None:
        """Capture `forward` and the backward through its outputs number `graded`. Nothing is computed."""
        engine = self._engine
        args, kwargs = tree_unflatten(self._leaves, self._spec)
        before = engine.ledger.counts() if engine.ledger is not None else None
        with _quiet(engine):
            with self._capturing(self._forward), _no_casts_kept():
                outputs = forward(args, kwargs)
            self.after_forward = AfterForward(engine)
            leaves, self._out_spec = tree_flatten(outputs)
            if not all(isinstance(leaf, torch.Tensor) for leaf in leaves if leaf is not None):
                kinds = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)}
                raise RuntimeError(f"the model returns what is no tensor ({', '.join(sorted(kinds))})")
            self._graded = graded
            self._gradients = [torch.empty_like(leaves[place]) for place in graded]
            with self._capturing(self._backward):
                torch.autograd.backward([leaves[place] for place in graded], self._gradients)
        tensors = [leaf for leaf in leaves if leaf is not None]
        self._outputs = [tensor.detach() for tensor in tensors]
        self._missing = [leaf is None for leaf in leaves]
        self.differentiable = {place for place, tensor in enumerate(tensors) if tensor.requires_grad}
        self.after_backward = AfterBackward(engine)
        if engine.ledger is not None:
            self._counts = engine.ledger.counts(since=before)
            engine.ledger.add(self._counts, -1)  # nothing was done yet

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        streams = self._engine.streams
        current = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                streams.fork()
                try:
                    self._meet()
                    yield
                    self._meet()
                finally:
                    streams.join()
        except BaseException:
            # Where CUDA gives a capture up, torch (2.11) leaves its stream current, and the allocator in the capture.
            torch.cuda.set_stream(current)
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
            raise

    def _meet(self) -> None:
        """Let staging of peers be used out of turn: a replay begins with the turn of the capture."""
        if self._engine.peer is not None:
            with self._engine.streams.gather:
                self._engine.peer.meet()

    # ---- replays -------------------------------------------------------------------------------------------

    def fill(self, inputs: Call) -> None:
        """Copy the tensors of a call to where the graph reads them."""
        mine = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        for static, tensor in zip(mine, inputs.tensors, strict=True):
            static.copy_(tensor, non_blocking=True)

    def open_ticket(self) -> _Ticket:
        ticket = _Ticket()
        self._ticket = weakref.ref(ticket)
        return ticket

    @property
    def is_busy(self) -> bool:
        """Say whether the activations of a forward wait for its backward."""
        ticket = self._ticket()
        return ticket is not None and not ticket.used

    def play_forward(self) -> tuple[torch.Tensor, ...]:
        """Replay the forward; return copies of its outputs, which the next replay overwrites."""
        self._forward.replay()
        self.after_forward.restore()
        return tuple(output.clone() for output in self._outputs)

    def play_backward(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        """Replay the backward, and leave gradients where an eager one leaves them."""
        places = [place for place, missing in enumerate(self._missing) if not missing]
        given = {places[index]: grad for index, grad in enumerate(grads) if grad is not None}
        if extra := set(given) - set(self._graded):
            raise RuntimeError(
                f"cuda_graph: outputs number {sorted(extra)} of the model got gradients, which they did not before the "
                "step was captured; compute the loss from the same outputs in every step, or set cuda_graph: false."
            )
        self._engine.control.agree("the backward of a captured step")
        for place, static in zip(self._graded, self._gradients, strict=True):
            if place in given:
                static.copy_(given[place])
            else:
                static.zero_()
        self._backward.replay()
        self.after_backward.restore()
        if self._engine.ledger is not None:
            self._engine.ledger.add(self._counts)

    def let_go(self) -> None:
        """Destroy the graphs; a backward that has not run can't any more."""
        self._forward.reset()
        self._backward.reset()

    def put_together(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """Return outputs in the form in which the model returns them."""
        fresh = iter(outputs)
        return tree_unflatten([None if missing else next(fresh) for missing in self._missing], self._out_spec)


def let_go_of_graphs() -> None:
    """Destroy all graphs of this process: NCCL takes a group down no sooner than the graphs that have calls of it."""
    for forward in list(_LIVE):
        forward.let_go()


@contextmanager
def _quiet(engine: Engine) -> Iterator[None]:
    """Keep ranks from talking, meters from measuring and garbage from being collected, while CUDA records."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with engine.control.silent(), engine.measuring.paused():
            yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _no_casts_kept() -> Iterator[None]:
    """Let autocast cast weights where they are used: a cast kept from before, or for after, is not in the graph."""
    keeps = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(keeps)


def _first_line(problem: BaseException) -> str:
    """Return the error that came first: ending a capture that failed raises others."""
    while problem.__context__ is not None:
        problem = problem.__context__
    return f"{type(problem).__name__}: {problem}".splitlines()[0]


class GraphedForward:
    """The forward of a model whose steps become graphs: Note [Capturing]. Takes the place of `RootHooks`."""

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine = engine
        self._model = model
        self._modules = dict(model.named_modules())
        self._hooks_then = -1  # how many hooks torch had numbered when none was in the way
        self._forward = model.forward
        self._policy: Policy[Captured] = Policy()
        self._graded: dict[tuple[Any, ...], set[int]] = {}  # by key: outputs that got a gradient in eager steps
        self._said: set[str] = set()
        self._stream = torch.cuda.Stream(engine.mesh.device) if engine.mesh.device.type == "cuda" else None

    def attach(self) -> None:
        """Replace the model's forward; its signature stays."""
        _LIVE.add(self)

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.run(args, kwargs)

        self._model.forward = torch._dynamo.disable(forward, recursive=False)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward in the way that all ranks can."""
        if not torch.is_grad_enabled() or not self._engine.outside_of_forward:
            return self._eager(args, kwargs)
        inputs = take_apart(args, kwargs, self._engine.mesh.device)
        way, why = self.way(inputs)
        if why:
            self._say(why)
        number = 0 if isinstance(inputs, str) else number_of(inputs.key)
        told = self._engine.control.agree_on(f"{_PREFIX}{way.value} {number:08x}", _PREFIX)
        if isinstance(inputs, str) or way is Way.EAGER or len(set(told)) > 1:
            return self._counted(inputs, args, kwargs)
        if way is Way.CAPTURE and not self._capture(inputs):
            return self._counted(inputs, args, kwargs)
        return self._replay(self._policy.captured(inputs.key), inputs)

    def let_go(self) -> None:
        """Destroy all graphs; forwards start anew."""
        for captured in self._policy.all_captured():
            captured.let_go()
        self._policy = Policy()

    def way(self, inputs: Call | str) -> tuple[Way, str]:
        """Return what this rank would do, and, where that is not as usual, why."""
        engine = self._engine
        if self._policy.follow(rests_on(engine, self._modules)):
            logger.info("cuda_graph: captured steps are dropped, since what they rest on has changed")
        if isinstance(inputs, str):
            return Way.EAGER, inputs
        way, why = self._policy.way(inputs.key)
        if way is Way.EAGER:
            return way, why
        why = why_not_now(engine) or self._hooked()
        if not why and any(captured.is_busy for captured in self._policy.all_captured()):
            why = "the backward of the forward before has not run"
        if not why and not self._graded.get(inputs.key):
            why = "no backward followed the forwards before"
        return (Way.EAGER, why) if why else (way, "")

    def _hooked(self) -> str:
        numbered = RemovableHandle.next_id
        if numbered == self._hooks_then:
            return ""
        why = hooked(self._engine, self._modules)
        self._hooks_then = -1 if why else numbered
        return why

    def _say(self, why: str) -> None:
        if why not in self._said and self._engine.mesh.world.rank == 0:
            logger.warning("cuda_graph: a forward with gradients runs without graphs: %s.", why)
        self._said.add(why)

    # ---- eager ---------------------------------------------------------------------------------------------

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run as `RootHooks` do."""
        try:
            taken = self._engine.begin_forward(args, kwargs)
            if taken is not None:
                args, kwargs = taken
            outputs = self._forward(*args, **kwargs)
        except BaseException:
            self._engine.forward_failed()
            raise
        changed = self._engine.end_forward(outputs)
        return outputs if changed is None else changed

    def _counted(self, inputs: Call | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run eagerly, on the stream that captures, and look which outputs get gradients."""
        self._engine.replays = False
        if self._stream is None:
            outputs = self._eager(args, kwargs)
        else:
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                outputs = self._eager(args, kwargs)
            current.wait_stream(self._stream)
        fresh = is_fresh(self._engine)
        for place, output in enumerate(tree_leaves(outputs)):
            if isinstance(output, torch.Tensor):
                if self._stream is not None:
                    output.record_stream(current)
                if output.requires_grad and fresh and not isinstance(inputs, str):
                    output.register_hook(functools.partial(self._note, inputs.key, place))
        if fresh and not isinstance(inputs, str):
            self._policy.count(inputs.key)
        return outputs

    def _note(self, key: tuple[Any, ...], place: int, gradient: torch.Tensor) -> None:
        self._graded.setdefault(key, set()).add(place)

    # ---- graphs --------------------------------------------------------------------------------------------

    def _capture(self, inputs: Call) -> bool:
        """Capture a key on all ranks, or on none; say why not. Collective."""
        engine, why, captured = self._engine, "", None
        bring_in_anew(engine)
        try:
            captured = self._recorded(inputs)
            engine.drop_gradients()
        except Exception as problem:
            why = f"it can't be captured ({_first_line(problem)})"
            engine.reset()
        found = [str(said) for said in engine.control.gather_objects(why, "capturing a step") if said]
        bring_in_anew(engine)
        if found or captured is None:
            self._policy.refuse(inputs.key, found[0])
            self._say(found[0])
            return False
        self._policy.keep(inputs.key, captured)
        return True

    def _recorded(self, inputs: Call) -> Captured:
        assert self._stream is not None
        captured = Captured(self._engine, self._stream, inputs)
        captured.record(self._eager, sorted(self._graded[inputs.key]))
        return captured

    def _replay(self, captured: Captured, inputs: Call) -> Any:
        bring_in_anew(self._engine)
        self._engine.replays = True
        self._engine.replayed += 1
        captured.fill(inputs)
        return captured.put_together(_Replayed.apply(captured, captured.anchor))
