"""The kernels beside peer copies do what the stand-ins of `cpu_peers.py` compute in torch.

On a CUDA device, and without one in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/unit/test_peer_kernels.py`.
"""

from __future__ import annotations

import importlib.util
import itertools
import os

import pytest
import torch

from tests.ranks import cpu_peers

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (not INTERPRETED)  # which the interpreter cuts

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


def numbers(count: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("numel", [1, 2048, 5000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("into", [torch.float32, torch.float16])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_parts_are_added_and_norms_of_blocks_left(numel, dtype, into, add, parts, device):  # noqa: PLR0917
    from ourshard.runtime import peer

    own, pulled = numbers(numel, dtype, device), numbers(parts * numel, dtype, device, 1)
    found, wanted = (numbers(numel, into, device, 2) for _ in range(2))
    norms, wanted_norms = (torch.full((-(-numel // peer.BLOCK) + 1,), -1.0, device=device) for _ in range(2))
    peer.add_parts(found, norms, own, pulled, parts + 1, add=add)
    cpu_peers.add_parts(wanted, wanted_norms, own, pulled, parts + 1, add=add)
    torch.testing.assert_close(found, wanted, rtol=1e-6 if into is torch.float32 else 1e-3, atol=1e-6)
    torch.testing.assert_close(norms, wanted_norms, rtol=1e-6, atol=1e-6)


def test_norms_tell_what_is_not_finite(device):
    from ourshard.runtime import peer

    own, zeros = numbers(5000, torch.float32, device), torch.zeros(5000, device=device)
    own[3], own[2048] = torch.inf, torch.nan
    norms, out = torch.empty(3, device=device), torch.empty(5000, device=device)
    peer.add_parts(out, norms, own, zeros, 2, add=False)
    assert norms[0] == torch.inf
    assert norms[1].isnan()
    assert norms[2].isfinite()


@pytest.mark.parametrize(
    ("source", "target"),
    [*itertools.product([*DTYPES, torch.float64], DTYPES), (torch.uint8, torch.uint8)],  # bytes travel as they are
)
def test_a_copy_in_two_places_has_the_bits_of_torch(source, target, device):
    from ourshard.runtime import peer

    values = (numbers(5000, torch.float32, device) * 50).to(source)
    first, second = (torch.zeros(5000, dtype=target, device=device) for _ in range(2))
    peer.copy_twice(values, first, second)
    assert torch.equal(first, values.to(target))
    assert torch.equal(second, first)
