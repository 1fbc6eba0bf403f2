"""What does not fit is listed whole, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from ourshard.checkpoint.matching import mismatch, require
from ourshard.checkpoint.sharded import ShardedSource
from ourshard.checkpoint.source import PARAM, CheckpointError, TensorKey

from tests.checkpoint.making import make_state, save


def test_a_checkpoint_fits_its_own_state_and_a_tied_name_counts_as_its_owner(tmp_path: Path) -> None:
    state = make_state()
    save(tmp_path / "c", state, 2)
    wanted = {key: tuple(tensor.shape) for key, tensor in state.items()}
    with ShardedSource(tmp_path / "c") as source:
        assert not mismatch(source, wanted)
        require(source, wanted)
        del wanted[TensorKey(PARAM, "embed.weight")]
        wanted[TensorKey(PARAM, "head.tied")] = (37, 5)
        require(source, wanted)
        require(source, {key: shape for key, shape in wanted.items() if key.kind == PARAM})


def test_missing_unexpected_and_misshapen_are_listed_together(tmp_path: Path) -> None:
    state = make_state()
    save(tmp_path / "c", state, 2)
    wanted = {key: tuple(tensor.shape) for key, tensor in state.items()}
    del wanted[TensorKey(PARAM, "block.gain")]
    wanted[TensorKey(PARAM, "embed.weight")] = (40, 5)
    wanted |= {TensorKey("exp_avg", f"new.{index}"): (1,) for index in range(12)}
    with ShardedSource(tmp_path / "c") as source:
        with pytest.raises(CheckpointError) as raised:
            require(source, wanted)
        text = str(raised.value)
        assert "missing in the checkpoint: new.0 (exp_avg), " in text
        assert "and 2 more" in text
        assert "in the checkpoint only: block.gain" in text
        assert "embed.weight: (37, 5) in the checkpoint, (40, 5) wanted" in text
        found = mismatch(source, wanted)
        assert len(found.missing) == 12
        assert list(found.unexpected) == [TensorKey(PARAM, "block.gain")]
