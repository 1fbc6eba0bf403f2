"""Checkpoints of other frameworks with their truth: of shared/fixtures, and made by tests/fixtures/make.py."""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint.source import Source, TensorKey
from safetensors import safe_open

from tests.commands import ROOT

SHARED = Path(os.environ.get("OURSHARD_FIXTURES", ROOT.parent / "shared" / "fixtures"))
MADE = ROOT / "tests" / "fixtures" / "made.tar.xz"

_NOT_IN_FILES = ("alone", "left out")  # oddities and losses of checkpoints that hold a part of the model


@dataclass(frozen=True)
class Case:
    """A checkpoint folder and its truth file."""

    name: str
    folder: Path
    truth: Path

    def inner(self) -> Path:
        """Return the folder that a user would name: checkpoint-N of the Trainer, else the folder itself."""
        return next(iter(self.folder.glob("checkpoint-*")), self.folder)


@cache
def made_folder() -> Path:
    """Unpack the committed set once."""
    folder = Path(tempfile.mkdtemp(prefix="ourshard-made-"))
    with tarfile.open(MADE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def shared_cases() -> list[Any]:
    """Return the cases of shared/fixtures as pytest parameters; one that is skipped if they are not there."""
    manifest = SHARED / "manifest.json"
    if not manifest.is_file():
        skip = pytest.mark.skip(reason=f"{SHARED} is not there; OURSHARD_FIXTURES names another place")
        return [pytest.param(None, marks=skip, id="shared")]
    entries = json.loads(manifest.read_text())["fixtures"]
    cases = [Case(entry["name"], SHARED / entry["name"], SHARED / entry["truth"]) for entry in entries]
    return [pytest.param(case, id=case.name) for case in cases]


def made_names() -> list[str]:
    """Return the names in the committed set, without unpacking it."""
    with tarfile.open(MADE) as archive:
        names = archive.getnames()
    return sorted(name.removesuffix(".truth.safetensors") for name in names if name.endswith(".truth.safetensors"))


def made_case(name: str) -> Case:
    """Return a case of the committed set."""
    folder = made_folder()
    return Case(name, folder / name, folder / f"{name}.truth.safetensors")


@dataclass(frozen=True)
class LiveRun:
    """What the live run held."""

    tensors: dict[TensorKey, list[torch.Tensor]]  # several where ranks have their own
    metadata: dict[str, Any]

    @property
    def groups(self) -> list[set[str]]:
        """Return the names in each parameter group; empty if the truth does not say."""
        found = self.metadata.get("groups") or [group["params"] for group in self.metadata.get("param_groups", [])]
        return [set(group) for group in found]


def load_truth(path: Path) -> LiveRun:
    """Read a truth file."""
    tensors: dict[TensorKey, list[torch.Tensor]] = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            kind, rest = name.split("/", 1)
            rest = rest.split("/", 1)[1] if rest.startswith("rank") else rest
            tensors.setdefault(TensorKey(kind, rest), []).append(file.get_tensor(name))
        metadata = {key: json.loads(value) for key, value in (file.metadata() or {}).items() if key != "gathered_by"}
    return LiveRun(tensors, metadata)


def holds_all(source: Source) -> bool:
    """Tell whether the source says that it holds the whole model."""
    said = " ".join((*source.description.oddities, *source.description.losses))
    return not any(words in said for words in _NOT_IN_FILES)


def assert_equals_truth(source: Source, truth: LiveRun) -> None:
    """Assert that each tensor is that of the live run, bit for bit, and that nothing is missing or unknown."""
    tied = truth.metadata.get("tied", {})
    for key in source.tensors:
        if key in truth.tensors:
            read = source.read(key)
            assert any(same(read, tensor) for tensor in truth.tensors[key]), str(key)
        else:
            assert key.kind in ("step", "buffer"), f"{key} is not in the live run"
    missing = [key for key in truth.tensors if key not in source.tensors and key.name not in tied]
    if "optimizer" in " ".join(source.description.losses) or not any(key.is_state for key in source.tensors):
        missing = [key for key in missing if not key.is_state]
    if not holds_all(source):
        missing = [key for key in missing if key.is_state]
    assert not missing, f"missing: {', '.join(map(str, missing[:5]))}"


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether shape, dtype and every byte are equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
