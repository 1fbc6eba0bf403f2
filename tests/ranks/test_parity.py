"""Training on two ranks gives what one process gives on the joined batch: every stage, dtype and optimizer."""

from __future__ import annotations

import pytest
import torch

from tests.ranks.training import (
    STAGES,
    VARIANTS,
    adamw,
    compare,
    llama_task,
    momentum,
    reference,
    sgd,
    with_each,
)

pytestmark = pytest.mark.ranks

ALL = {**STAGES, **VARIANTS}
OPTIMIZERS = pytest.mark.parametrize("optimizer", [adamw, momentum], ids=["AdamW", "SGD"])
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
BF16_WIDE = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


@pytest.mark.parametrize("accumulate", [1, 3])
@OPTIMIZERS
def test_fp32_is_within_1e_6(ranks, optimizer, accumulate):
    task = llama_task(optimizer=optimizer, accumulate=accumulate, clip=1.0)
    compare(ranks(2), task, ALL, reference(task, 2))


def test_fp32_sgd_is_the_same_bit_for_bit(ranks):
    """Halving is exact, so the mean over two ranks is the sum of two halved losses."""
    task = llama_task(optimizer=sgd)
    compare(ranks(2), task, ALL, reference(task, 2, one_by_one=True), 0.0)


def test_fp32_is_within_1e_6_where_every_leaf_is_a_unit(ranks):
    """Not bit for bit: the boundary of each projection adds the gradients of their common input in another order."""
    task = llama_task(optimizer=momentum, accumulate=2)
    configs = with_each(STAGES, "leaves", persist_below=0, wrap={"min_params": 1})
    compare(ranks(2), task, configs, reference(task, 2))


@pytest.mark.parametrize("accumulate", [1, 3])
@OPTIMIZERS
def test_bf16_with_fp32_reductions_has_the_losses_and_weights_of_bf16_compute_with_fp32_masters(
    ranks, optimizer, accumulate
):
    """C03: only the order of fp32 additions differs, so a master or a sum that is kept in 16 bits shows."""
    task = llama_task(optimizer=optimizer, accumulate=accumulate)
    expected = reference(task, 2, compute=torch.bfloat16, one_by_one=True)
    compare(ranks(2), task, with_each(ALL, "bf16", precision=BF16_WIDE), expected)


@OPTIMIZERS
def test_bf16_reductions_round_gradients_and_nothing_else(ranks, optimizer):
    """A reduction in bf16 rounds each gradient twice more (before and after the sum), off by 2^-8 of itself at most.

    In five steps of SGD with momentum a weight moves by up to 0.2, so two runs part by 0.2 / 256 = 8e-4 at most.
    """
    task = llama_task(optimizer=optimizer)
    expected = reference(task, 2, compute=torch.bfloat16, one_by_one=True)
    compare(ranks(2), task, with_each(STAGES, "bf16", precision=BF16), expected, 8e-4)
