"""What a step asks of a GPU's driver, through a layer that stands for it: events, waits, streams that become current.

The layer knows for each stream how much work of the others lies before it, so that a missing edge is seen.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from ourshard.runtime import collectives, engine
from ourshard.runtime.api import engine_of
from ourshard.runtime.lane import Lane
from ourshard.runtime.ledger import Ledger
from ourshard.runtime.mesh import Axis
from ourshard.runtime.streams import Streams
from ourshard.runtime.unit import Unit
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.unit.test_host_work import WIDTH, make_model, make_step

COMPUTE, GATHER, REDUCE = range(3)  # streams, in the order in which they are made
CUDA = 1  # as torch numbers kinds of devices


class Driver:
    """Streams as lists of work; `behind[a][b]`: how much of `b`'s work the work of `a` comes after."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.current = COMPUTE
        self.behind: dict[int, Counter[int]] = {COMPUTE: Counter()}

    def new_stream(self, device: Any, priority: int) -> Stream:
        number = len(self.behind)
        self.behind[number] = Counter()
        return Stream(self, number)

    def set_stream(self, number: int, device: int, kind: int) -> None:
        self.calls["set"] += 1
        self.current = number

    def work(self) -> int:
        """Put work on the current stream and return its number there."""
        mine = self.behind[self.current]
        mine[self.current] += 1
        return mine[self.current]

    def is_behind(self, other: int, work: int | None = None) -> bool:
        """Say whether the current stream comes after all of another's work, or after one piece of it."""
        return self.behind[self.current][other] >= (self.behind[other][other] if work is None else work)


class Stream:
    """What `torch.cuda.Stream` shows."""

    def __init__(self, driver: Driver, number: int) -> None:
        self.driver = driver
        self.stream_id, self.device_index, self.device_type = number, 0, CUDA

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.driver)
        event.record(other)
        event.wait(self)


class Event:
    """What an event of torch's shows."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._seen: Counter[int] = Counter()

    def record(self, stream: Stream) -> None:
        self._driver.calls["record"] += 1
        self._seen = self._driver.behind[stream.stream_id].copy()

    def wait(self, stream: Stream) -> None:
        self._driver.calls["wait"] += 1
        self._driver.behind[stream.stream_id] |= self._seen


@pytest.fixture(autouse=True)
def absent_rank() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@contextmanager
def driving() -> Iterator[Driver]:
    """Let models on the CPU order their work by streams of a driver; they are gone at the end of the block."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield drive(monkeypatch)
        gc.collect()


def drive(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Put a driver in the place of torch's, and look where each piece of work goes."""
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "Stream", driver.new_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(driver, driver.current))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda device: (driver.current, 0, CUDA), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", driver.set_stream, raising=False)
    monkeypatch.setattr(torch._C, "_CudaEventBase", lambda: Event(driver))
    monkeypatch.setattr(engine, "Streams", lambda device: Streams(torch.device("cuda", 0)))
    filled: WeakKeyDictionary[Unit, int] = WeakKeyDictionary()
    fill, take_gradients, install = Lane.fill, Lane.take_gradients, Unit.install

    def watch_fill(lane: Lane) -> None:
        if lane.placement.whole:
            assert driver.current == COMPUTE
        else:
            assert driver.current == GATHER
            assert driver.is_behind(COMPUTE)
            filled[lane.unit] = driver.work()
        fill(lane)

    def watch_take(lane: Lane) -> list[torch.Tensor]:
        assert driver.current == REDUCE
        assert driver.is_behind(COMPUTE)
        driver.work()
        return take_gradients(lane)

    def watch_install(unit: Unit) -> None:
        assert driver.current == COMPUTE
        assert driver.is_behind(GATHER, filled.get(unit, 0))
        driver.work()
        install(unit)

    monkeypatch.setattr(Lane, "fill", watch_fill)
    monkeypatch.setattr(Lane, "take_gradients", watch_take)
    monkeypatch.setattr(Unit, "install", watch_install)
    return driver


def asked(stage: int, layers: int) -> Counter[str]:
    """Return what a step asks the driver for."""
    with driving() as driver:
        step = make_step(stage, layers)
        driver.calls.clear()
        step()
        del step
    assert driver.current == COMPUTE
    assert driver.is_behind(REDUCE)
    return driver.calls


@pytest.mark.parametrize("stage", [1, 3])
def test_small_lanes_which_users_may_write_to_are_filled_on_the_compute_stream(stage: int):
    with driving():
        make_step(stage, 2, persist_below=WIDTH + 1)()


def step_without_a_forward_after(driver: Driver, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not driver.is_behind(GATHER)


def test_memory_that_gathers_fill_is_given_back_behind_them():
    """At stage 1 they begin with the optimizer's step, and nobody may ask for what they bring."""
    with driving() as driver:
        model = make_model(1, 2)
        step_without_a_forward_after(driver, model)
        model.to(torch.float32)
        assert driver.is_behind(GATHER)
    with driving() as driver:
        model = make_model(1, 2)
        step_without_a_forward_after(driver, model)
        del model
        gc.collect()
        assert driver.is_behind(GATHER)


def test_a_step_while_a_gather_in_two_hops_runs_is_not_undone(monkeypatch: pytest.MonkeyPatch):
    """The rank's own segment may be the master."""
    whole = torch.zeros(6, 16)
    mine = whole[3]

    def step(*_: Any) -> None:
        mine.fill_(2.0)

    monkeypatch.setattr(collectives, "_gather", step)
    monkeypatch.setattr(collectives, "_gather_several", lambda *_: None)
    hops = collectives.Hops(Axis("node", 2, 1, dist.group.WORLD), Axis("cross", 3, 1, dist.group.WORLD))
    control = engine_of(make_model(3, 1)).control
    shard = Axis("shard", 6, 3, dist.group.WORLD)
    collectives.Collectives(control, Ledger(), hops).all_gather(whole.view(-1), mine, shard, "a unit")
    assert bool((mine == 2.0).all())


# A gather and a reduction: an event and a wait on each side, the stream made current and back. At stage 1 all gathers
# follow the optimizer's step, and begin together.
@pytest.mark.parametrize(
    ("stage", "most"), [(1, {"record": 3, "wait": 3, "set": 2}), (3, {"record": 6, "wait": 6, "set": 6})]
)
def test_events_and_waits_of_a_unit_and_step(stage: int, most: dict[str, int]):
    few, many = asked(stage, 3), asked(stage, 7)
    assert {name: (many[name] - few[name]) / 4 for name in most} == most
