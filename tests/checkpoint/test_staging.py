"""Host memory of background saves: taken once, exactly as much as is copied, and pinned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from ourshard.checkpoint.staging import Staging, ToHost

from tests.unit.test_host_memory import GPU, Driver

PAGE = 4096


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(limit=1 << 30)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: made))
    return made


def stage(staging: Staging, tensors: list[torch.Tensor], device: torch.device = GPU) -> list[torch.Tensor]:
    def take(to_host: ToHost) -> list[torch.Tensor]:
        return [to_host(tensor) for tensor in tensors]

    return staging.copy(device, take)


def test_one_block_of_exactly_the_bytes_that_are_copied_is_pinned_once(driver: Driver) -> None:
    staging = Staging()
    tensors = [torch.randn(5_000_000), torch.randn(3, 7).bfloat16(), torch.tensor(4), torch.arange(0)]
    for _ in range(3):
        held = stage(staging, tensors)
        assert list(driver.registered.values()) == [staging.nbytes] == [staging.pinned_nbytes]
        assert staging.nbytes == 20_000_000 + 64 + 64  # two small ones, each at a multiple of 64
    for tensor, copied in zip(tensors, held, strict=True):
        assert torch.equal(tensor, copied)
        assert tensor.dtype == copied.dtype
    assert held[0].data_ptr() % PAGE == 0
    before = tensors[0].clone()
    tensors[0].zero_()
    assert torch.equal(held[0], before)


def test_what_does_not_fit_gets_a_block_of_its_own_and_the_next_save_one_block_again(driver: Driver) -> None:
    staging = Staging()
    small, grown = [torch.ones(1000)], [torch.ones(1000), torch.ones(50_000), torch.ones(16)]
    stage(staging, small)
    held = stage(staging, grown)
    assert all(torch.equal(one, other) for one, other in zip(held, grown, strict=True))
    assert len(driver.registered) == 3
    stage(staging, grown)
    assert list(driver.registered.values()) == [staging.nbytes] == [4032 + 200_000 + 64]
    stage(staging, small)
    assert staging.nbytes == 4032 + 200_000 + 64


def test_a_system_that_refuses_to_pin_is_named_and_the_save_goes_on(
    driver: Driver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ourshard.runtime import host

    monkeypatch.setattr(host, "_forget_error", lambda device: None)
    driver.limit = 100
    staging = Staging()
    (held,) = stage(staging, [torch.ones(1000)])
    assert held.all()
    assert (staging.nbytes, staging.pinned_nbytes) == (4032, 0)
    assert "checkpoint.asynchronous: the system refused to pin" in caplog.text
