"""What the machine below can do: which process groups speak NCCL, and which dtypes a device computes in."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ourshard.config import ShardConfig
from ourshard.runtime.checks import refuse_dtype
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


def test_a_dtype_that_the_device_cant_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has no GPU, old or new, so torch's answer about one is given here."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(ValueError, match=r"cuda:0 can't compute in bfloat16; use float16 or float32\.") as caught:
        refuse_dtype(torch.device("cuda", 0), torch.bfloat16)
    assert str(caught.value).startswith("precision.param_dtype: ")
    refuse_dtype(torch.device("cuda", 0), torch.float16)
    refuse_dtype(torch.device("cpu"), torch.bfloat16)
    with pytest.raises(ValueError, match=r"precision\.param_dtype: 'float8_e4m3fn' is not a dtype that ourshard comp"):
        ShardConfig.from_dict({"precision": {"param_dtype": "float8_e4m3fn"}})
