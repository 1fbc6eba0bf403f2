"""The shares of a step: each moment goes to one group, and what is exposed is what no computation covers."""

from __future__ import annotations

import pytest
from ourshard.runtime.timeline import (
    CPU_ORDER,
    GAPS,
    GATHER,
    GPU_ORDER,
    OTHER,
    REDUCE,
    cpu_group_of,
    gpu_group_of,
    shares,
    union,
)


def test_overlapping_spans_join_and_others_do_not():
    assert union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (0.6, 0.7)]) == [(0.0, 2.0), (3.0, 4.0)]


def test_on_a_gpu_communication_has_what_computation_leaves():
    spans = {"products and attention": [(0.0, 4.0), (6.0, 8.0)], GATHER: [(1.0, 5.0)], REDUCE: [(4.5, 5.5), (7.0, 7.5)]}
    found = shares(spans, GPU_ORDER, steps=2)
    assert found.step_ms == 4.0
    assert found.share_ms["products and attention"] == 3.0
    assert found.share_ms[GATHER] == 0.5
    assert found.share_ms[REDUCE] == 0.25
    assert found.share_ms[GAPS] == 0.25
    assert found.busy_ms[GATHER] == 2.0
    assert sum(found.parts().values()) == pytest.approx(found.step_ms)
    assert found.parts()["exposed gather"] == 0.5


def test_on_a_cpu_computation_has_what_communication_leaves():
    spans = {"compute": [(0.0, 10.0)], "gather": [(2.0, 5.0)], "optimizer": [(8.0, 9.0)]}
    found = shares(spans, CPU_ORDER, steps=1, whole=(0.0, 12.0))
    assert found.parts() == {
        "compute": 6.0,
        "exposed gather": 3.0,
        "exposed reduce": 0.0,
        "optimizer": 1.0,
        "agreements of the host": 0.0,
        GAPS: 2.0,
    }


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", GATHER),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", REDUCE),
        ("Memcpy PtoP (Device -> Device)", "copies between GPUs"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "products and attention"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu>", OTHER),
    ],
)
def test_kernels_are_known_by_their_names(name, group):
    assert gpu_group_of(name) == group


def test_ranges_and_operators_are_known_by_how_their_names_begin():
    names = ("ourshard::gather model.layers.0", "c10d::allreduce_", "Optimizer.step#AdamW.step", "aten::mm", "my range")
    assert [cpu_group_of(name) for name in names] == ["gather", "reduce", "optimizer", "compute", None]
