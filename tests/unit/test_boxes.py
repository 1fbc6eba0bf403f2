"""A run of rows as boxes, against numpy's own indexing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ourshard.runtime.boxes import Box, boxes_of
from ourshard.runtime.layout import LaneTensor, RowRange, TensorSpec, plan_unit

shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@given(shape=shapes, data=st.data())
@settings(max_examples=300, deadline=None)
def test_boxes_hold_the_elements_of_the_run_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    granule = data.draw(st.sampled_from([math.prod(shape[dim:]) for dim in range(len(shape) + 1)]))
    start = data.draw(st.integers(0, numel // granule - 1))
    stop = data.draw(st.integers(start + 1, numel // granule))
    boxes = boxes_of(shape, LaneTensor(0, 0, numel, granule), RowRange(start, stop, 40))
    whole = np.arange(numel).reshape(shape)
    offset = 40
    seen: list[int] = []
    for box in boxes:
        assert box.offset == offset
        window = tuple(slice(low, low + size) for low, size in zip(box.starts, box.sizes, strict=True))
        assert whole[window].shape == box.sizes
        seen.extend(whole[window].ravel().tolist())
        offset += box.numel
    assert seen == list(range(start * granule, stop * granule))


def test_whole_rows_are_one_box() -> None:
    assert boxes_of((5, 3), LaneTensor(0, 0, 15, 3), RowRange(1, 4, 7)) == (Box((1, 0), (3, 3), 7),)


def test_fused_experts_cut_below_the_expert_are_at_most_three_boxes() -> None:
    shape = (8, 128, 64)
    layout = plan_unit([TensorSpec("experts", shape, None)], 13, max_padding_numel=0, fine_granules=True)
    (lane,) = layout.lanes
    assert lane.tensors[0].granule == 64
    for rank in range(13):
        assert len(boxes_of(shape, lane.tensors[0], lane.rows_on(0, rank))) <= 3


def test_no_rows_are_no_boxes() -> None:
    assert boxes_of((5, 3), LaneTensor(0, 0, 15, 3), RowRange(0, 0, 0)) == ()


def test_a_shape_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="has 12 elements"):
        boxes_of((4, 3), LaneTensor(0, 0, 15, 3), RowRange(0, 1, 0))
