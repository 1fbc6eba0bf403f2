"""Tensors of classes that stand for others, as plain ones and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from ourshard.checkpoint.source import CheckpointError
from ourshard.checkpoint.tensor_classes import check_classes, flattened, rebuilt

from tests.integrations.eight_bits import TABLE, Coded


def tensors(**changes: Any) -> dict[str, torch.Tensor]:
    """Return one such tensor and a plain one as they are saved, with changes to what is said of the class."""
    coded = Coded(torch.arange(9, dtype=torch.uint8), torch.ones(1), TABLE)
    found = {**flattened("momentum", coded), **flattened("other", torch.ones(2))}
    told = {**json.loads(found["momentum.class"].numpy().tobytes()), **changes}
    return {**found, "momentum.class": torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)}


def test_a_tensor_comes_back_as_it_was() -> None:
    saved = tensors()
    assert saved.keys() == {*(f"momentum.{part}" for part in ("codes", "scales", "codes_table", "class")), "other"}
    assert all(type(value) is torch.Tensor for value in saved.values())
    check_classes(saved)
    found = rebuilt(saved)
    assert found.keys() == {"momentum", "other"}
    assert isinstance(found["momentum"], Coded)
    assert found["momentum"].codes is saved["momentum.codes"]


HOSTILE: list[dict[str, Any]] = [
    {"class": "tests.integrations.eight_bits:Gone"},
    {"class": "not_imported:Coded"},
    {"class": "builtins:exec"},
    {"class": "torch:Tensor"},
    {"class": ["torch"]},
]


@pytest.mark.parametrize("changes", HOSTILE)
def test_a_class_that_is_not_here_or_is_none_is_refused_before_anything_is_made(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"momentum\.class: the optimizer keeps .* which is not there"):
        check_classes(tensors(**changes))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_what_names_no_class_is_refused(text: bytes) -> None:
    damaged = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"momentum\.class is damaged"):
        rebuilt({**tensors(), "momentum.class": damaged})


def test_a_tensor_that_lacks_a_part_is_refused() -> None:
    saved = tensors()
    del saved["momentum.scales"]
    with pytest.raises(CheckpointError, match="can't be made of"):
        rebuilt(saved)
