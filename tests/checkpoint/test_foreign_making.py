"""The committed fixtures can be made again: the recipes run, and what they write is read as it was."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from ourshard.checkpoint.source import detect

from tests.checkpoint.foreign import MADE, assert_equals_truth, load_truth, made_names
from tests.fixtures import make


def test_every_recipe_is_in_the_committed_set_which_is_small() -> None:
    assert made_names() == sorted(make.recipes())
    assert MADE.stat().st_size < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp1_rank", "fsdp2_sharded", "ds_z2_round_robin", "ds_z3"])
def test_a_recipe_makes_what_the_readers_read(name: str, tmp_path: Path) -> None:
    if name.startswith("ds_") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (extra: peers)")
    make.run_recipe(name, tmp_path)
    with detect(tmp_path / name) as source:
        assert_equals_truth(source, load_truth(tmp_path / f"{name}.truth.safetensors"))
