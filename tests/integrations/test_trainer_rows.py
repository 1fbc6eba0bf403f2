"""A Trainer's checkpoints by rows: resumed elsewhere, written in the background, kept and removed, lost and damaged."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.test_trainer_resume import CASES, SAVES, SHARD, assert_goes_on, told_of
from tests.integrations.trainer_runs import Case, on_rank, run

pytestmark = pytest.mark.ranks

ROWS = {"format": "sharded"}
BEST = {
    **SAVES,
    "save_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "metric_for_best_model": "loss",
    "greater_is_better": False,  # the first evaluation is the best
    "load_best_model_at_end": True,
}


def trained(case: Case, folder: str, checkpoint: dict[str, Any], resume: Any = None, **shard: Any) -> dict[str, Any]:
    """Train on ranks; return losses, norms, weights, and what ourshard logged."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ourshard")
    logger.addHandler(handler)
    try:
        config = {**SHARD, "stage": 3, "checkpoint": checkpoint, **shard}
        found = on_rank(case, folder, config, resume=resume, level=logging.WARNING)
    finally:
        logger.removeHandler(handler)
    return {**told_of(found), "logged": logged}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train in one process, without ourshard."""
    return run(CASES["full"], tmp_path_factory.mktemp("stock"))


@pytest.fixture
def first(ranks: Any, tmp_path: Path) -> Any:
    """Train on two ranks with checkpoints by rows."""
    folder = tmp_path / "first"
    return {"folder": folder, "runs": ranks(2)(trained, CASES["full"], str(folder), ROWS)}


ELSEWHERE: list[tuple[int, dict[str, Any]]] = [
    (2, {"stage": 3}),
    (1, {"stage": 3}),
    (2, {"stage": 1, "offload": {"optimizer": "cpu"}}),
    (2, {"stage": 0}),
]


def test_a_checkpoint_of_rows_resumes_on_any_world_stage_and_offload(ranks, stock, first, tmp_path):
    """On the same ranks bit for bit, elsewhere as closely as sums in another order can be."""
    whole = first["runs"]
    assert_goes_on(whole, stock)
    checkpoint = first["folder"] / "checkpoint-2"
    assert "ourshard" in names(checkpoint)
    assert not {"model.safetensors", "optimizer.pt"} & set(names(checkpoint))
    assert {"config.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"} <= set(names(checkpoint))
    for number, (world, shard) in enumerate(ELSEWHERE):
        again = str(tmp_path / f"again{number}")
        found = ranks(world)(trained, CASES["full"], again, ROWS, str(checkpoint), **shard)
        assert_goes_on(found, stock)
        said = [text for text in found[0]["logged"] if "of 2 ranks, and 1 go on: a step is now 4 examples" in text]
        assert len(said) == (world == 1)
        if number == 0:
            assert found[0]["losses"] == whole[0]["losses"]
            assert all(torch.equal(value, whole[0]["state"][name]) for name, value in found[0]["state"].items())


def test_the_best_is_loaded_and_kept_and_others_go_when_a_newer_one_is_complete(ranks, tmp_path):
    """Written in the background: the first checkpoint is the best, and the limit is two."""
    case = Case(arguments={**BEST, "save_total_limit": 2})
    first = ranks(2)(trained, Case(arguments=SAVES, steps=1), str(tmp_path / "one"), {})
    found = ranks(2)(trained, case, str(tmp_path / "run"), {"asynchronous": True})
    for told in found:
        assert all(torch.equal(told["state"][name], value) for name, value in first[0]["state"].items())
    assert [name for name in names(tmp_path / "run") if "checkpoint" in name] == ["checkpoint-1", "checkpoint-4"]
    assert (tmp_path / "run" / "latest").read_text().strip() == "checkpoint-4"


def test_a_disk_that_fails_loses_one_checkpoint_and_training_goes_on(ranks, stock, tmp_path):
    """A file lies where checkpoint-2 is to be made: rank 0 alone meets it."""
    (tmp_path / "checkpoint-2").write_text("")
    found = ranks(2)(trained, CASES["full"], str(tmp_path), ROWS)
    assert_goes_on(found, stock)
    assert sum("was not written, and training goes on" in text for text in found[0]["logged"]) == 1
    assert any(text.startswith("1 checkpoints of this training were not written") for text in found[0]["logged"])
    assert found[1]["logged"] == []
    assert "ourshard" in names(tmp_path / "checkpoint-4")


def test_weights_alone_resume_without_an_optimizer(ranks, tmp_path):
    case = Case(arguments={**SAVES, "save_only_model": True})
    ranks(2)(trained, case, str(tmp_path), ROWS)
    checkpoint = tmp_path / "checkpoint-4"
    assert not list((checkpoint / "ourshard").glob("optimizer/*"))
    assert not {"scheduler.pt", "rng_state_0.pth"} & set(names(checkpoint))
    found = ranks(2)(trained, case, str(tmp_path / "more"), ROWS, str(checkpoint))
    assert any("save_only_model: the optimizer and the schedule begin anew" in text for text in found[0]["logged"])


def test_damage_to_any_file_that_a_resume_reads_is_found_and_named(first, tmp_path):
    from ourshard.integrations import trainer_resume

    good = first["folder"] / "checkpoint-2"
    files = [good / name for name in names(good) if name.startswith(("trainer_state", "scheduler", "rng_state"))]
    assert len(files) == 4
    for number, path in enumerate([*files, next((good / "ourshard").glob("shard-*")), good / "ourshard/ourshard.json"]):
        root = tmp_path / str(number)
        shutil.copytree(good, root / "checkpoint-2")
        shutil.copytree(good, root / "checkpoint-4")
        broken = root / "checkpoint-4" / path.relative_to(good)
        data = bytearray(broken.read_bytes())
        if path.suffix == ".safetensors":
            data = data[:-1]
        else:
            data[len(data) // 2] ^= 1
        broken.write_bytes(data)
        assert path.name in (trainer_resume._problem(broken.parents[len(path.relative_to(good).parts) - 1]) or "")
        assert trainer_resume.newest_complete(str(root)) == str(root / "checkpoint-2")
    (good.parent / "checkpoint-4" / "ourshard").rename(good.parent / "checkpoint-4" / ".ourshard.writing")
    assert trainer_resume._problem(good.parent / "checkpoint-4") == "the save was not finished"
