"""Host memory of offloaded lanes: exact sizes, pages, and a system that refuses to pin."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from ourshard.config import OffloadConfig, ShardConfig, Tier
from ourshard.runtime import host as host_module
from ourshard.runtime.host import HostMemory, PinBudget, memory_for_offload
from ourshard.runtime.inputs import on_host
from ourshard.runtime.streams import Streams

PAGE = 4096
GPU = torch.device("cuda", 0)


class Driver:
    """Stands for the CUDA driver, of which this machine has none: registers up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}
        self.resident: list[int] = []  # bytes of this process at each call

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        if sum(self.registered.values()) + nbytes > self.limit:
            return 2
        self.registered[pointer] = nbytes
        self.resident.append(psutil.Process().memory_info().rss)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.registered[pointer]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(limit=10_000)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: made))
    return made


@pytest.mark.parametrize("numel", [1, 1023, 1025, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_start_on_pages_and_count_what_was_asked_for(numel: int, dtype: torch.dtype) -> None:
    host = HostMemory(torch.device("cpu"), pin=True)
    buffer = host.take(numel, dtype)
    assert buffer.shape == (numel,)
    assert buffer.data_ptr() % PAGE == 0
    assert not buffer.any()
    assert host.nbytes == numel * dtype.itemsize
    assert host.pinned_nbytes == 0


def test_pages_are_taken_before_the_driver_is_asked(driver: Driver) -> None:
    """The driver takes those of 6 GiB in 1.8 s; taken before, it needs 0.5 s with that."""
    driver.limit, before = 1 << 30, psutil.Process().memory_info().rss
    assert not HostMemory(GPU, pin=True).take(48 << 20, torch.uint8).any()
    assert driver.resident[0] - before > 40 << 20


def test_exactly_the_bytes_of_the_buffers_are_pinned_and_let_go_with_them(driver: Driver) -> None:
    """G02: nothing is rounded up to a power of two."""
    host = HostMemory(GPU, pin=True)
    buffers = [host.take(numel, torch.float32) for numel in (1001, 333)]
    assert driver.registered == {buffer.data_ptr(): buffer.nbytes for buffer in buffers}
    assert host.pinned_nbytes == host.nbytes == 4 * (1001 + 333)
    del host
    assert driver.registered == {}


def test_a_refusal_to_pin_is_said_once_and_training_goes_on(
    driver: Driver, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostMemory(GPU, pin=True)
    forgotten: list[torch.device] = []
    monkeypatch.setattr(host_module, "_forget_error", forgotten.append)
    with caplog.at_level(logging.WARNING, "ourshard"):
        buffers = [host.take(1500, torch.float32) for _ in range(4)]
    assert len(caplog.records) == len(forgotten) == 1
    assert "refused to pin" in caplog.text
    assert host.pinned_nbytes == 6000
    assert host.nbytes == 4 * 6000
    assert all(buffer.numel() == 1500 for buffer in buffers)


def test_no_more_is_pinned_than_the_budget_of_all_allows(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """G02: `offload.max_pinned` counts what offloaded lanes and inputs of units pin together."""
    budget = PinBudget(8000)
    lanes, inputs = HostMemory(GPU, True, budget), HostMemory(GPU, True, budget)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None, raising=False)
    buffers = [memory.take(nbytes, torch.uint8) for memory, nbytes in ((lanes, 5000), (inputs, 3001), (inputs, 3000))]
    assert [buffer.data_ptr() in driver.registered for buffer in buffers] == [True, False, True]
    inputs.give_back(buffers[2])
    assert inputs.take(2000, torch.uint8).data_ptr() in driver.registered
    assert lanes.pinned_nbytes + inputs.pinned_nbytes == 7000 == sum(driver.registered.values())


def test_the_budget_is_that_of_the_config(driver: Driver) -> None:
    offload = {"optimizer": "cpu", "activations": "cpu", "max_pinned": 5000}
    config = ShardConfig.from_dict({"activation_checkpointing": True, "offload": offload})
    lanes, _ = on_host(config, Streams(torch.device("cpu")), GPU, None)
    assert lanes is not None
    assert [lanes.take(4000, torch.uint8).data_ptr() in driver.registered for _ in range(2)] == [True, False]


def test_nothing_is_pinned_where_the_config_says_so(driver: Driver) -> None:
    HostMemory(GPU, pin=False).take(1000, torch.float32)
    assert driver.registered == {}


@pytest.mark.parametrize(("cores", "ranks", "said"), [(64, 2, "1 of about 32 cores"), (2, 2, None), (1, 1, None)])
def test_idle_cores_are_named(cores: int, ranks: int, said: str | None, caplog: Any, monkeypatch: Any) -> None:
    """G03: a step on one core is slow, and torchrun sets one thread."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_RANK", "0")
    with caplog.at_level(logging.WARNING, "ourshard"):
        memory_for_offload(OffloadConfig(optimizer=Tier.CPU, pin_memory=False), GPU, PinBudget(None))
    assert (said in caplog.text) if said else not caplog.records
