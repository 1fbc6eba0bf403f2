"""Buffers of whole gradients between reductions: memory, views and the gaps between parameters."""

from __future__ import annotations

import torch
from ourshard.runtime.in_flight import InFlight
from ourshard.runtime.lane_views import pattern_of
from ourshard.runtime.streams import Streams

CPU = torch.device("cpu")
NUMEL = 10
LEFT, RIGHT = (pattern_of(NUMEL, ((offset, 6, (2, 3)),)) for offset in (0, 4))


def test_a_buffer_comes_back_with_its_views_and_has_no_memory_between_backwards() -> None:
    flight = InFlight(Streams(CPU))
    buffer = flight.take(NUMEL, torch.float32, CPU)
    views = flight.views_of(buffer, LEFT)
    assert flight.give_back(buffer)
    assert flight.take(NUMEL, torch.float32, CPU) is buffer
    assert flight.take(NUMEL, torch.float32, CPU) is not buffer  # it was not given back
    flight.forget()
    assert buffer.untyped_storage().nbytes() == 0
    taken = [flight.take(NUMEL, torch.float32, CPU) for _ in range(2)]
    assert any(tensor is buffer for tensor in taken)
    assert flight.views_of(buffer, LEFT).parameters[0] is views.parameters[0]
    views.parameters[0].fill_(1.0)
    assert buffer[:6].eq(1.0).all()


def test_a_tensor_from_elsewhere_is_not_kept() -> None:
    flight = InFlight(Streams(CPU))
    assert not flight.give_back(torch.zeros(NUMEL))


def test_gaps_are_left_out_where_they_are_zero_since_a_reduction_that_was_alike() -> None:
    flight = InFlight(Streams(CPU))
    buffer = flight.take(NUMEL, torch.float32, CPU)

    def gaps(pattern: object) -> list[int]:
        return [gap.numel() for gap in flight.views_of(buffer, pattern).gaps]

    assert gaps(LEFT) == [4]
    flight.give_back(buffer, LEFT)
    flight.take(NUMEL, torch.float32, CPU)
    assert gaps(LEFT) == []
    assert gaps(RIGHT) == [4]
    flight.give_back(buffer)  # as after a codec, which uses the buffer up
    flight.take(NUMEL, torch.float32, CPU)
    assert gaps(LEFT) == [4]
    flight.give_back(buffer, LEFT)
    flight.forget()
    flight.take(NUMEL, torch.float32, CPU)
    assert gaps(LEFT) == [4]
