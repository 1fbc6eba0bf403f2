"""fp16 under a Trainer: on CPUs, too, losses are scaled, and all ranks agree on an overflow. C05 of CASES.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integrations.client_runs import column, trainer_of
from tests.integrations.trainer_runs import Case

pytestmark = pytest.mark.ranks

SHARD = {"persist_below": 50, "stage": 3}
FP16 = {"fp16": True, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2}


def trains(folder: str, shard: dict[str, Any] | None) -> dict[str, Any]:
    """Train 4 steps, then again the last two from the checkpoint of the second."""
    found = {}
    for name, resume in (("whole", None), ("resumed", f"{folder}/whole/checkpoint-2")):
        trainer = trainer_of(Case(arguments=FP16), f"{folder}/{name}", shard)
        trainer.train(resume_from_checkpoint=resume)
        scaler = trainer.accelerator.scaler
        scale = scaler.get_scale() if scaler is not None else None
        found[name] = {"logs": column(trainer, "loss", "grad_norm"), "scale": scale}
    found["files"] = sorted(path.name for path in Path(folder, "whole", "checkpoint-4").glob("scaler*"))
    return found


def test_a_trainer_learns_in_fp16_as_one_process_and_resumes_with_its_scale(ranks, tmp_path):
    """One process has no scaler on CPUs, so the measure is what it learns without; where scaled sums round is apart."""
    wanted = trains(str(tmp_path / "one"), None)
    first, second = ranks(2)(trains, str(tmp_path / "two"), SHARD)
    assert first["files"] == ["scaler.pt"]
    for found in (first, second):
        assert np.abs(np.subtract(found["whole"]["logs"], wanted["whole"]["logs"])).max() < 2e-3
        assert found["resumed"]["logs"] == found["whole"]["logs"]
        assert found["resumed"]["scale"] == found["whole"]["scale"] == first["whole"]["scale"] > 1
