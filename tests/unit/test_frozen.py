"""The checksum of frozen weights: the same whoever holds which rows, another where values or places are others."""

from __future__ import annotations

import pytest
import torch
from ourshard.runtime.frozen import checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_parts_add_up_to_the_whole(dtype: torch.dtype) -> None:
    values = (100 * torch.rand(30_011, generator=torch.Generator().manual_seed(0))).to(dtype)
    whole = checksum(values, 0)
    for cut in (0, 1, 8191, 20_000, 30_010):
        assert (checksum(values[:cut], 0) + checksum(values[cut:], cut) - whole) % 2**64 == 0


def test_it_is_the_sum_of_words_times_places() -> None:
    words = torch.tensor([3, -5, 7], dtype=torch.int32)
    assert checksum(words.view(torch.float32), 8189) == 3 * 8190 - 5 * 8191 + 7 * 1
    assert checksum(torch.empty(0), 0) == 0


def test_rows_that_changed_places_show() -> None:
    rows = torch.randn(6, 4096, generator=torch.Generator().manual_seed(0))
    swapped = rows[[0, 3, 2, 1, 4, 5]]
    assert checksum(rows, 0) != checksum(swapped, 0)
