"""torch's own tools open our folder in a process where ourshard cannot be imported, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from ourshard.checkpoint.source import BUFFER, PARAM, TensorKey
from safetensors.torch import load_file, save_file

from tests.checkpoint.making import State, assert_same, make_state, save

# One process for all jobs: to import torch takes longer than they do.
PROGRAM = """
import json, os, sys
sys.modules["ourshard"] = sys.modules["_ourshard_autoload"] = None
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

try:
    import ourshard
    raise SystemExit("ourshard is importable")
except ImportError:
    pass

for job in json.load(sys.stdin):
    target = {name: torch.full_like(tensor, 1) for name, tensor in load_file(job["shapes"]).items()}
    if job["tool"] == "reader":
        dcp.load(target, storage_reader=HuggingFaceStorageReader(job["folder"]), no_dist=True)
    else:
        whole = job["result"] + ".d"
        os.mkdir(whole)
        consolidate_safetensors_files(job["folder"], whole, fqn_to_index_mapping=dict.fromkeys(target, 1))
        target = load_file(whole + "/model-00001-of-00001.safetensors")
    save_file(target, job["result"])
"""


@dataclass(frozen=True)
class Job:
    """A folder for one of torch's tools, and where it finds the shapes and puts what it read."""

    tool: str
    folder: str
    shapes: str
    result: str


def of_kinds(state: State, *kinds: str) -> dict[str, torch.Tensor]:
    return {key.name: tensor for key, tensor in state.items() if key.kind in kinds}


def can_consolidate(tensor: torch.Tensor) -> bool:
    """torch 2.13 consolidates neither integers (it asks torch.finfo) nor 0-d tensors (they become 0), of any writer."""
    return tensor.is_floating_point() and tensor.dim() > 0


def test_torch_reads_weights_and_moments_of_any_world(tmp_path: Path) -> None:
    jobs: list[Job] = []
    expected: list[dict[str, torch.Tensor]] = []
    for world_size in (1, 3):
        for tool in ("reader", "consolidation"):
            state = make_state(2, torch.bfloat16)
            if tool == "consolidation":
                state = {key: tensor for key, tensor in state.items() if can_consolidate(tensor)}
            folder = tmp_path / f"{tool}-{world_size}"
            save(folder, state, world_size)
            for inner, kinds in (
                (".", (PARAM, BUFFER)),
                *((f"optimizer/{k}", (k,)) for k in ("exp_avg", "exp_avg_sq")),
            ):
                own = {n: tensor for n, tensor in of_kinds(state, *kinds).items() if inner == "." or tensor.dim()}
                stem = str(tmp_path / f"job-{len(jobs)}")
                save_file(own, f"{stem}.shapes")
                jobs.append(Job(tool, str(folder / inner), f"{stem}.shapes", f"{stem}.result"))
                expected.append(own)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([asdict(job) for job in jobs]),
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for job, tensors in zip(jobs, expected, strict=True):
        found = load_file(job.result)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert_same(found[name], tensor, f"{name} by {job.tool} of {job.folder}")


def test_transformers_takes_our_folder_for_a_sharded_checkpoint(tmp_path: Path) -> None:
    checkpoint = pytest.importorskip("transformers.distributed.checkpoint")
    save(tmp_path / "c", {TensorKey(PARAM, "w"): torch.zeros(4, 2)}, 2)
    assert checkpoint.is_sharded_checkpoint(tmp_path / "c")
