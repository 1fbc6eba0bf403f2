"""The parity of `test_parity.py` on three ranks, which divide nothing, and on two replicas of two shards."""

from __future__ import annotations

import pytest
import torch

from tests.ranks.training import STAGES, VARIANTS, adamw, compare, llama_task, momentum, reference, with_each

pytestmark = pytest.mark.ranks

HYBRID = with_each({**STAGES, **VARIANTS}, "hybrid", shard_size=2)
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
EITHER = pytest.mark.parametrize(
    ("optimizer", "accumulate"),
    [pytest.param(adamw, 1, id="AdamW"), pytest.param(momentum, 3, id="SGD x3", marks=pytest.mark.slow)],
)


@EITHER
def test_fp32_on_three_ranks_is_within_1e_6(ranks, optimizer, accumulate):
    task = llama_task(optimizer=optimizer, accumulate=accumulate, clip=1.0)
    compare(ranks(3), task, STAGES, reference(task, 3))


@EITHER
def test_fp32_on_two_replicas_of_two_shards_is_within_1e_6(ranks, optimizer, accumulate):
    task = llama_task(optimizer=optimizer, accumulate=accumulate, rows=1, clip=1.0)
    compare(ranks(4), task, HYBRID, reference(task, 4))


@EITHER
def test_bf16_on_two_replicas_of_two_shards_is_within_1e_6_where_it_reduces_in_fp32(ranks, optimizer, accumulate):
    task = llama_task(optimizer=optimizer, accumulate=accumulate, rows=1)
    expected = reference(task, 4, compute=torch.bfloat16, one_by_one=True)
    configs = with_each(STAGES, "bf16 hybrid", shard_size=2, precision=BF16)
    compare(ranks(4), task, configs, expected)
