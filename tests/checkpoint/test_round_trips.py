"""A -> B -> A: what one format holds comes back from any other that can hold it, bit for bit."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.source import Source, detect

from tests.checkpoint.foreign import made_folder, made_names, same

WITH_STATE = ("ourshard", "dcp", "fsdp-full", "deepspeed-universal", "torch")
WEIGHTS_ALONE = ("hf_shards",)
PAIRS = tuple(permutations(WITH_STATE, 2))


def assert_came_back(one: Source, other: Source, through: str) -> None:
    """Assert equal tensors, groups, ties and schedulers; DeepSpeed wants all moments, and takes no scaler."""
    filled = {key.name for key in other.tensors if key not in one.tensors}
    assert not filled or (through == "deepspeed-universal" and filled == {"unused"})
    for key in one.tensors:
        assert same(one.read(key), other.read(key)), str(key)
    before, after = one.description, other.description
    assert [dict(group) for group in after.param_groups] == [dict(group) for group in before.param_groups]
    assert (after.ties, after.frozen, after.scheduler) == (before.ties, before.frozen, before.scheduler)
    assert after.scaler == (None if through == "deepspeed-universal" else before.scaler)


def go_there_and_back(name: str, first: str, second: str, folder: Path) -> None:
    convert(made_folder() / name, folder / "first", to=first)
    convert(folder / "first", folder / "second", to=second)
    convert(folder / "second", folder / "third", to=first)
    with detect(folder / "first") as one, detect(folder / "third") as other:
        assert_came_back(one, other, "deepspeed-universal" if "deepspeed-universal" in (first, second) else second)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_state_comes_back_from_every_format(first: str, second: str, tmp_path: Path) -> None:
    go_there_and_back("fsdp2_sharded", first, second, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("name", [name for name in made_names() if name not in WEIGHTS_ALONE])
def test_state_of_every_framework_comes_back_from_every_format(
    name: str, first: str, second: str, tmp_path: Path
) -> None:
    go_there_and_back(name, first, second, tmp_path)


@pytest.mark.parametrize(("first", "second"), tuple(permutations(("safetensors", "ourshard", "dcp", "torch"), 2)))
def test_weights_come_back_from_every_format(first: str, second: str, tmp_path: Path) -> None:
    convert(made_folder() / "hf_shards", tmp_path / "first", to=first)
    convert(tmp_path / "first", tmp_path / "second", to=second)
    convert(tmp_path / "second", tmp_path / "third", to=first)
    with detect(tmp_path / "first") as one, detect(tmp_path / "third") as other:
        assert one.tensors.keys() == other.tensors.keys()
        for key in one.tensors:
            assert same(one.read(key), other.read(key)), str(key)
