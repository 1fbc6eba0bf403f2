"""The fixtures that real frameworks wrote, and what was in the live run beside each of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from ourshard.checkpoint.source import BUFFER, Source
from safetensors import safe_open

from tests.checkpoint.making import FIXTURES, assert_same

needs_fixtures = pytest.mark.skipif(not (FIXTURES / "manifest.json").exists(), reason=f"{FIXTURES} is not there")


@dataclass(frozen=True)
class Truth:
    """What the framework's own API said of the run."""

    tensors: dict[str, torch.Tensor]  # "param/NAME", "exp_avg/NAME", "buffer/NAME" or "buffer/rankR/NAME"
    tied: dict[str, str]


@cache
def fixtures() -> dict[str, dict[str, Any]]:
    """Return name -> entry of the manifest."""
    entries = json.loads((FIXTURES / "manifest.json").read_text())["fixtures"]
    return {entry["name"]: entry for entry in entries}


@cache
def truth_of(name: str) -> Truth:
    """Return the truth of a fixture."""
    with safe_open(FIXTURES / fixtures()[name]["truth"], framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - the file is no mapping
        metadata = file.metadata() or {}
    return Truth(tensors, json.loads(metadata.get("tied", "{}")))


def candidates(truth: Truth, kind: str, name: str) -> Iterator[torch.Tensor]:
    """Yield what a tensor may be equal to: buffers differ from rank to rank, and any rank's is right."""
    if f"{kind}/{name}" in truth.tensors:
        yield truth.tensors[f"{kind}/{name}"]
    for key, tensor in truth.tensors.items():
        parts = key.split("/", 2)
        if parts[0] == kind and len(parts) == 3 and parts[1].startswith("rank") and parts[2] == name:
            yield tensor


def assert_is_truth(source: Source, truth: Truth) -> int:
    """Assert that all tensors of the source that the truth knows are equal to it; return how many."""
    checked = 0
    for key in source.tensors:
        found = list(candidates(truth, key.kind, key.name)) or list(candidates(truth, BUFFER, key.name))
        if not found:
            continue
        read = source.read(key)
        if len(found) == 1:
            assert_same(read, found[0].to(read.dtype), str(key))
        else:
            assert any(torch.equal(read, tensor) for tensor in found), str(key)
        checked += 1
    return checked
