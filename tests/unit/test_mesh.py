"""Which process groups speak NCCL, under every way to name their backends."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from ourshard.runtime.mesh import speaks_nccl
from torch.distributed.distributed_c10d import Backend, BackendConfig


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("nccl", True),
        ("cuda:nccl,cpu:gloo", True),  # Accelerate's, where it takes a job for FSDP with whole state dicts
        ("cpu:gloo,cuda:nccl", True),
        ("gloo", False),
        ("cuda:gloo,cpu:gloo", False),
        ("fake", False),
    ],
)
def test_a_group_speaks_nccl_if_tensors_on_cuda_go_through_it(
    named: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine makes no NCCL groups, so torch's answer about one is put together from its own reading of names."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: str(BackendConfig(Backend(named))))
    assert speaks_nccl(None) is expected
