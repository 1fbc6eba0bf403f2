"""Ranks that are asked for different things, or build different models, are told which before any of them waits."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks.nets import toy

pytestmark = pytest.mark.ranks

# Of these some trained wrongly without a word, some ended the process in gloo, one hung.
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage": ({"stage": 3}, {"stage": 2}),
    "shard_size": ({}, {"shard_size": 1}),
    "communication.reduce_op": ({}, {"communication": {"reduce_op": "sum"}}),
    "precision.reduce_dtype": ({}, {"precision": {"reduce_dtype": "bfloat16"}}),
    "precision.master_dtype": ({}, {"precision": {"master_dtype": "bfloat16"}}),
    "prefetch.forward": ({}, {"prefetch": {"forward": 3}}),
    "ledger": ({}, {"ledger": True}),
}


def ask_for_different_things() -> dict[str, str]:
    """Return what this rank is told where another has another config."""
    import ourshard

    told = {}
    for name, pair in DIFFERENCES.items():
        with pytest.raises(ValueError) as error:
            ourshard.shard_model(toy(), pair[min(dist.get_rank(), 1)])
        told[name] = str(error.value)
    return told


def test_a_config_that_differs_between_ranks_is_refused_by_key_value_and_rank(ranks):
    for told in ranks(3)(ask_for_different_things):
        for name, text in told.items():
            assert text.startswith(f"{name} is "), text
            assert " on rank 0 and " in text, text
            assert " on rank 1; all ranks need the same" in text, text


def ask_beside_nccl() -> tuple[str, list[bool]]:
    """Return what is told where the default group speaks NCCL alone, and which words went over that one."""
    import ourshard

    pair = DIFFERENCES["stage"]
    with (
        patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
        patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gather,
        pytest.raises(ValueError) as error,
    ):
        ourshard.shard_model(toy(), pair[dist.get_rank()], device="cpu")
    return str(error.value), [call.kwargs["group"] is dist.group.WORLD for call in gather.call_args_list]


def test_words_before_a_mesh_make_no_communicator_of_nccl(ranks):
    """It would take memory of the device that is current, which need not be the one that is asked for."""
    for told, over_default in ranks(2)(ask_beside_nccl):
        assert told.startswith("stage is 3 on rank 0 and 2 on rank 1")
        assert over_default == [False]


def shard_alone() -> None:
    """Shard a second model on rank 0 while rank 1 calls the first."""
    import ourshard
    from ourshard.runtime import control

    model = ourshard.shard_model(toy(), {"stage": 3, "persist_below": 0})
    control.REPORT_AFTER = 0.2
    if dist.get_rank() == 0:
        ourshard.shard_model(toy(), {"stage": 2})
    else:
        model(torch.ones(2, 13))


def test_a_rank_that_shards_a_model_alone_is_told_where_the_others_are(ranks):
    ended = ranks(2, fresh=True)(shard_alone, timeout=60)
    told = next(text for text in ended.stderr if "The ranks are in different places" in text)
    assert "rank 0: comparing configs" in told, told
    assert "rank 1: forward of Toy" in told, told


def with_disks_of_their_own(folder: str) -> float:
    import ourshard

    offload = {"optimizer": "nvme", "nvme_path": f"{folder}/{dist.get_rank()}"}
    model = ourshard.shard_model(toy(), {"stage": 3, "persist_below": 0, "offload": offload})
    return model(torch.ones(2, 13)).sum().item()


def test_machines_may_have_disks_of_their_own(ranks, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    first, second = ranks(2)(with_disks_of_their_own, str(tmp_path))
    assert first == second


def made_in_another_order() -> str:
    import ourshard

    names = ["red", "blue"] if dist.get_rank() == 0 else ["blue", "red"]
    model = nn.ModuleDict({name: nn.Linear(13, 13) for name in names})
    with pytest.raises(ValueError) as error:
        ourshard.shard_model(model, {"stage": 3, "persist_below": 0})
    return str(error.value)


def test_a_model_whose_parts_are_in_another_order_on_a_rank_is_named_so(ranks):
    for told in ranks(2)(made_in_another_order):
        assert "rank 1 has blue.weight (13, 13) torch.float32 True where rank 0 has red.weight" in told
        assert "in the same order" in told
