"""From every fixture to every format and back: what a format in between can hold comes back bit for bit (X04, I11)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.registry import writer, writer_names
from ourshard.checkpoint.source import BUFFER, PARAM, Source, TensorKey, detect

from tests.checkpoint.making import FIXTURES, UNFLUSHED, assert_same
from tests.checkpoint.truth import assert_is_truth, fixtures, needs_fixtures, truth_of

NAMES = list(fixtures()) if (FIXTURES / "manifest.json").exists() else ["no fixtures"]


def folder_of(name: str) -> Path:
    """Return the folder of a fixture; the Trainer's have a checkpoint-N inside."""
    return next(iter((FIXTURES / name).glob("checkpoint-*")), FIXTURES / name)


def fold(key: TensorKey) -> TensorKey:
    """Return the key with parameters and buffers as one kind: not every format tells them apart."""
    return key._replace(kind=PARAM) if key.kind == BUFFER else key


def held_by(to: str, source: Source) -> dict[TensorKey, TensorKey]:
    """Return folded key -> key of what the format has to bring back."""
    sink = writer(to)
    groups = {name for group in source.description.param_groups for name in group["params"]}
    return {
        fold(key): key
        for key in source.tensors
        if sink.can_hold(key.kind)
        and (not key.is_state or to == "ourshard" or key.name in groups)
        and (to != "peft" or ".lora_" in key.name)
    }


def why_refused(source: Source, to: str) -> str | None:
    """Return what the message says if the format has no place for this checkpoint at all."""
    if to == "peft" and not source.description.adapter_config:
        return "has no adapter"
    if to == "deepspeed-universal" and not source.description.param_groups:
        return "no parameter groups"
    return None


def assert_same_tensors(found: Source, original: Source, to: str) -> None:
    expected = held_by(to, original)
    back = {fold(key): key for key in found.tensors}
    assert expected.keys() - back.keys() == set()
    for folded, key in expected.items():
        assert_same(found.read(back[folded]), original.read(key), f"{key} through {to}")
    for key in (key for folded, key in back.items() if folded not in expected):
        # DeepSpeed keeps state for every parameter; for one that never had a gradient it is zero.
        assert to == "deepspeed-universal", f"{to} made up {key}"
        assert key.is_state
        assert key.kind == "step" or not found.read(key).any()


def assert_same_groups(found: Source, original: Source) -> None:
    assert [normal(group) for group in found.description.param_groups] == [
        normal(group) for group in original.description.param_groups
    ]


def normal(group: Any) -> str:
    return json.dumps({key: group[key] for key in sorted(group)}, default=str)


def pairs() -> list[Any]:
    """Return each fixture with each format. Every third is quick: all fixtures and all formats are among those."""
    formats = sorted(writer_names())
    return [
        pytest.param(name, to, marks=[pytest.mark.slow] if (row + column) % 3 else [], id=f"{name}-{to}")
        for row, name in enumerate(NAMES)
        for column, to in enumerate(formats)
    ]


@needs_fixtures
@pytest.mark.parametrize(("name", "to"), pairs())
def test_there_and_back(tmp_path: Path, name: str, to: str) -> None:
    folder = folder_of(name)
    with detect(folder) as original:
        refusal = why_refused(original, to)
        if refusal:
            with pytest.raises(ValueError, match=refusal):
                convert(folder, tmp_path / "there", to=to, io=UNFLUSHED)
            assert not list(tmp_path.iterdir())
            return
        convert(folder, tmp_path / "there", to=to, io=UNFLUSHED)
        with detect(tmp_path / "there") as there:
            assert_same_tensors(there, original, to)
            if original.description.param_groups and writer(to).can_hold("exp_avg"):
                assert_same_groups(there, original)
                assert there.description.step == original.description.step
        convert(tmp_path / "there", tmp_path / "back", to="ourshard", io=UNFLUSHED)
        with detect(tmp_path / "back") as back:
            assert_same_tensors(back, original, to)
            assert assert_is_truth(back, truth_of(name)) > 0
            assert [problem for _, problem in back.verify_files() if problem] == []


@needs_fixtures
@pytest.mark.parametrize("name", NAMES)
def test_our_format_keeps_everything(tmp_path: Path, name: str) -> None:
    convert(folder_of(name), tmp_path / "ours", to="ourshard", world_size=3, io=UNFLUSHED)
    with detect(folder_of(name)) as original, detect(tmp_path / "ours") as ours:
        assert set(ours.tensors) == set(original.tensors)
        for key in original.tensors:
            assert_same(ours.read(key), original.read(key), str(key))
        for field in (
            "stage", "step", "param_groups", "param_state", "ties", "frozen", "own_dtypes", "adapter_config",
            "versions",
        ):  # fmt: skip
            assert getattr(ours.description, field) == getattr(original.description, field), field
        for field in ("scheduler", "scaler", "client_state"):
            assert repr(getattr(ours.description, field)) == repr(getattr(original.description, field)), field
        assert {*original.description.files} <= {*ours.description.files}
        assert not any(isinstance(value, torch.Tensor) for value in original.description.versions.values())
