"""Laws of the lane planner: docs/design.md, "Lanes with row-aligned cuts"."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ourshard.runtime.layout import LaneLayout, LaneTensor, RowRange, TensorSpec, UnitLayout, plan_unit

from benchmarks.layout import encoder, llama

Shape = tuple[int, ...]


def specs_of(*shapes: Shape, key: str = "bf16") -> list[TensorSpec]:
    return [TensorSpec(f"p{index}", shape, key) for index, shape in enumerate(shapes)]


LLM_LAYERS: dict[str, list[Shape]] = {
    "llama 1B": llama(2048, 512, 8192),
    "llama 8B": llama(4096, 1024, 14336),
    "llama 70B": llama(8192, 1024, 28672),
    "qwen 0.6B": llama(1024, 1024, 3072),
    "gpt2": [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,), (3072, 768), (768,), *[(768,)] * 4],
    "gpt2-xl": [(1600, 4800), (4800,), (1600, 1600), (1600,), (1600, 6400), (6400,), (6400, 1600), *[(1600,)] * 5],
    "moe, one tensor per expert": [
        *[(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (64, 2048)],
        *[(768, 2048), (768, 2048), (2048, 768)] * 64,
    ],
}
OTHER_UNITS: dict[str, list[Shape]] = {
    "vit embeddings": [(1, 1, 768), (1, 197, 768), (768, 3, 16, 16), (768,)],
    "vit layer": encoder(768, 3072),
    "vision 1152x4304": encoder(1152, 4304),
    "conv net": [(64, 3, 7, 7), (64,), (128, 64, 3, 3), (256, 128, 1, 1), (128,), (512, 256, 3, 3), (), (1000, 512)],
    "tiny": [(1,), (), (3,), (5, 3), (2, 2)],
}
MOE_FUSED: list[Shape] = [(4096, 4096), (1024, 4096), (8, 4096), (8, 28672, 4096), (8, 4096, 14336), (4096,)]
WORLDS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 31, 32, 48, 64, 96, 128, 256, 384, 512]


def granules_of(spec: TensorSpec, fine: bool) -> set[int]:
    """The spec's granule, and with `fine` also the elements of whole trailing dimensions, the last one at least."""
    trailing = range(1, len(spec.shape)) if fine else range(0)
    return {spec.granule} | {math.prod(spec.shape[dim:]) for dim in trailing}


def check_laws(layout: UnitLayout, specs: list[TensorSpec], world: int, align: int, fine: bool = False) -> None:
    """Check every law from the definitions, rank by rank, without the planner's own arithmetic."""
    layout.validate(align)
    assert sorted(tensor.index for lane in layout.lanes for tensor in lane.tensors) == list(range(len(specs)))
    for lane in layout.lanes:
        assert lane.world == world
        assert lane.shard_numel % align == 0
        assert lane.shard_numel > 0
        taken_to = [0] * world
        for position, tensor in enumerate(lane.tensors):
            spec = specs[tensor.index]
            assert (tensor.numel, lane.key) == (spec.numel, spec.key)
            assert tensor.granule in granules_of(spec, fine)
            assert tensor.offset % align == 0
            row = 0
            for rank in lane.ranks_of(position):
                part = lane.rows_on(position, rank)
                assert part.start == row, "rows must follow each other from rank to rank"
                assert part.stop > part.start
                assert rank * lane.shard_numel + part.offset == tensor.offset + part.start * tensor.granule
                assert part.offset >= taken_to[rank], "tensors of a lane overlap"
                taken_to[rank] = part.offset + part.numel(tensor.granule)
                assert taken_to[rank] <= lane.shard_numel
                row = part.stop
            assert row * tensor.granule == spec.numel, "every row must lie on exactly one rank"


shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 5000)),
    st.tuples(st.integers(0, 300), st.integers(1, 300)),
    st.tuples(st.integers(1, 4), st.integers(1, 60), st.integers(1, 90)),
    st.tuples(st.integers(1, 40), st.integers(1, 8), st.integers(1, 5), st.integers(1, 5)),
)


@given(
    unit=st.lists(st.tuples(shapes, st.sampled_from(["bf16", "fp32"])), max_size=12),
    world=st.integers(1, 512),
    align=st.sampled_from([1, 16, 256]),
    limit=st.sampled_from([0, 1000, 1_000_000]),
    fine=st.booleans(),
)
@settings(max_examples=300, deadline=None)
@example(unit=[], world=4, align=16, limit=0, fine=True)
@example(unit=[((0,), "bf16"), ((3, 0), "bf16")], world=4, align=16, limit=0, fine=True)
def test_every_element_lies_on_exactly_one_rank_and_cuts_fall_between_rows(
    unit: list[tuple[Shape, str]], world: int, align: int, limit: int, fine: bool
) -> None:
    specs = [TensorSpec(str(index), shape, key) for index, (shape, key) in enumerate(unit)]
    layout = plan_unit(specs, world, align=align, max_padding_numel=limit, fine_granules=fine)
    check_laws(layout, specs, world, align, fine)
    assert len(layout.lanes) <= 3 * len({spec.key for spec in specs})


@pytest.mark.parametrize("name", [*LLM_LAYERS, *OTHER_UNITS])
def test_real_units_obey_the_laws_at_every_world(name: str) -> None:
    specs = specs_of(*(LLM_LAYERS | OTHER_UNITS)[name])
    for world in WORLDS:
        for align in (16, 256):
            check_laws(plan_unit(specs, world, align=align), specs, world, align)


@pytest.mark.parametrize("name", LLM_LAYERS)
def test_an_llm_layer_takes_one_lane_within_the_padding_limit_up_to_16_ranks(name: str) -> None:
    specs = specs_of(*LLM_LAYERS[name])
    limit = max(0.01 * sum(spec.numel for spec in specs), 1_000_000)
    for world in range(1, 17):
        layout = plan_unit(specs, world)
        assert len(layout.lanes) == 1, f"{len(layout.lanes)} lanes on {world} ranks"
        assert layout.padding <= limit, f"{layout.padding} elements of padding on {world} ranks"


@pytest.mark.parametrize("name", [*LLM_LAYERS, *OTHER_UNITS])
def test_padding_stays_within_the_limit_while_ranks_hold_many_rows(name: str) -> None:
    """Equal shards of whole rows can't pad less than a row a rank, so the bound is the limit plus that."""
    specs = specs_of(*(LLM_LAYERS | OTHER_UNITS)[name])
    numel = sum(spec.numel for spec in specs)
    for world in WORLDS:
        layout = plan_unit(specs, world)
        rows = world * sum(max((tensor.granule for tensor in lane.tensors), default=0) for lane in layout.lanes)
        assert layout.padding <= max(0.01 * numel, 1_000_000) + rows, f"{layout.padding} of {numel} on {world} ranks"


def test_a_second_lane_opens_where_one_would_pad_by_the_common_multiple_of_its_rows() -> None:
    specs = specs_of(*OTHER_UNITS["vision 1152x4304"])
    layout = plan_unit(specs, 64)
    assert len(layout.lanes) == 2
    assert layout.padding < 0.01 * sum(spec.numel for spec in specs)
    one_lane = plan_unit(specs, 64, max_padding=1.0)
    assert len(one_lane.lanes) == 1
    assert one_lane.padding > 0.25 * sum(spec.numel for spec in specs)


def test_many_ranks_of_tiny_tensors_stay_one_lane() -> None:
    for world in WORLDS:
        assert len(plan_unit(specs_of(*OTHER_UNITS["tiny"]), world).lanes) == 1


def test_one_rank_pads_by_no_more_than_alignment() -> None:
    for shapes_of_unit in [*LLM_LAYERS.values(), *OTHER_UNITS.values(), MOE_FUSED]:
        layout = plan_unit(specs_of(*shapes_of_unit), 1)
        assert len(layout.lanes) == 1
        assert layout.padding < 16 * (len(shapes_of_unit) + 1)


def test_fused_experts_are_cut_between_experts() -> None:
    specs = specs_of(*MOE_FUSED)
    for world in (1, 2, 4, 8, 16, 64):
        check_laws(plan_unit(specs, world), specs, world, 16)


def test_fine_granules_cut_fused_experts_inside_an_expert_only_where_the_padding_asks_for_it() -> None:
    specs = specs_of(*MOE_FUSED)
    numel = sum(spec.numel for spec in specs)
    for world in WORLDS:
        layout = plan_unit(specs, world, fine_granules=True)
        check_laws(layout, specs, world, 16, fine=True)
        assert layout.padding <= 0.01 * numel, f"{layout.padding} of {numel} on {world} ranks"
        if plan_unit(specs, world).padding <= 0.01 * numel:
            assert layout == plan_unit(specs, world)


def test_fine_granules_leave_matrices_whole() -> None:
    specs = specs_of(*OTHER_UNITS["vision 1152x4304"])
    assert plan_unit(specs, 512, fine_granules=True) == plan_unit(specs, 512)


def test_tensors_of_different_keys_never_share_a_lane() -> None:
    specs = [TensorSpec("w", (64, 64), ("bf16", True)), TensorSpec("b", (64,), ("bf16", False))]
    layout = plan_unit(specs, 2)
    assert [lane.key for lane in layout.lanes] == [("bf16", True), ("bf16", False)]


def test_equal_shapes_get_equal_plans_whatever_their_names_and_keys() -> None:
    shapes_of_unit = LLM_LAYERS["llama 1B"]
    first = plan_unit(specs_of(*shapes_of_unit, key="a"), 12)
    second = plan_unit([TensorSpec(f"other.{i}", shape, "b") for i, shape in enumerate(shapes_of_unit)], 12)
    assert [lane.tensors for lane in first.lanes] == [lane.tensors for lane in second.lanes]
    assert [lane.shard_numel for lane in first.lanes] == [lane.shard_numel for lane in second.lanes]


@given(
    unit=st.lists(shapes, min_size=1, max_size=8),
    shard=st.integers(1, 16),
    replicate=st.integers(1, 16),
)
@settings(max_examples=100, deadline=None)
def test_joining_the_shards_of_a_plan_for_shard_times_replicate_gives_a_plan_for_shard(
    unit: list[Shape], shard: int, replicate: int
) -> None:
    specs = specs_of(*unit)
    fine = plan_unit(specs, shard * replicate)
    joined = UnitLayout(tuple(lane.joined(replicate) for lane in fine.lanes))
    check_laws(joined, specs, shard, 16)
    for lane, coarse in zip(fine.lanes, joined.lanes, strict=True):
        for position in range(len(lane.tensors)):
            for rank in range(shard):
                parts = [lane.rows_on(position, rank * replicate + local) for local in range(replicate)]
                rows = sum(part.rows for part in parts)
                assert coarse.rows_on(position, rank).rows == rows


def test_joining_refuses_a_count_that_does_not_divide_the_world() -> None:
    lane = plan_unit(specs_of((64,)), 4).lanes[0]
    with pytest.raises(ValueError, match="joined by 3"):
        lane.joined(3)


@pytest.mark.parametrize(
    ("shape", "granule", "rows"),
    [
        ((), 1, 1),
        ((7,), 1, 7),
        ((0,), 1, 0),
        ((3, 0), 1, 0),
        ((5, 3), 3, 5),
        ((1, 5, 3), 3, 5),
        ((1, 1, 768), 1, 768),
        ((8, 4096, 14336), 4096 * 14336, 8),
        ((1, 1), 1, 1),
    ],
)
def test_a_granule_is_what_follows_the_first_dimension_larger_than_one(shape: Shape, granule: int, rows: int) -> None:
    spec = TensorSpec("t", shape, None)
    assert (spec.granule, spec.rows, spec.numel) == (granule, rows, math.prod(shape))


@pytest.mark.parametrize(
    ("tensors", "shard_numel", "message"),
    [
        ((LaneTensor(0, 0, 48, 1), LaneTensor(1, 32, 16, 1)), 32, "overlaps"),
        ((LaneTensor(0, 8, 8, 1),), 16, "does not start at a multiple"),
        ((LaneTensor(0, 0, 48, 3),), 32, "splits a row"),
        ((LaneTensor(0, 16, 96, 24),), 40, "not multiples"),
        ((LaneTensor(0, 0, 96, 1),), 32, "past the lane"),
        ((LaneTensor(0, 0, 33, 2),), 64, "not whole rows"),
    ],
)
def test_validate_names_the_broken_law(tensors: tuple[LaneTensor, ...], shard_numel: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        LaneLayout("k", tensors, shard_numel, 2).validate(16)


def test_spans_of_tensors_are_the_whole_shard_and_hold_their_rows() -> None:
    layout = LaneLayout("key", (LaneTensor(0, 2, 6, 3), LaneTensor(1, 8, 4, 2), LaneTensor(2, 14, 1, 1)), 5, 5)
    for rank in range(layout.world):
        spans = [layout.span_on(position, rank) for position in range(3)]
        assert [i for span in spans for i in range(span.start, span.stop)] == list(range(5))
        for position, span in enumerate(spans):
            rows = layout.rows_on(position, rank)
            numel = rows.numel(layout.tensors[position].granule)
            assert not rows.rows or span.start <= rows.offset <= rows.offset + numel <= span.stop


def test_rows_on_a_rank_that_holds_none_are_empty() -> None:
    lane = LaneLayout("k", (LaneTensor(0, 0, 32, 4),), 32, 2)
    assert lane.rows_on(0, 0) == RowRange(0, 8, 0)
    assert lane.rows_on(0, 1).rows == 0


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="world=0"):
        plan_unit(specs_of((4,)), 0)
    with pytest.raises(ValueError, match="negative"):
        plan_unit(specs_of((4,)), 2, max_padding=-0.1)
    with pytest.raises(ValueError, match="negative dimension"):
        TensorSpec("w", (-1,), None)
