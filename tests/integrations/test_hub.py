"""`push_to_hub` of a sharded Trainer, with something in place of the Hub: what would be sent is whole."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.client_runs import trainer_of
from tests.integrations.trainer_runs import Case, whole_state

pytestmark = pytest.mark.ranks


class Hub:
    """Takes folders in place of the Hub, and notes the files in them."""

    def __init__(self) -> None:
        self.taken: list[set[str]] = []

    def create_repo(self, name: str, **options: Any) -> Any:
        return type("Url", (), {"repo_id": f"us/{name}"})()

    def upload_folder(self, folder_path: str, **options: Any) -> Future[None]:
        self.taken.append({path.name for path in Path(folder_path).iterdir()})
        done: Future[None] = Future()
        done.set_result(None)
        return done


def pushes(folder: str) -> tuple[list[set[str]], bool]:
    import torch
    import transformers.trainer
    from safetensors.torch import load_file

    hub, stock = Hub(), transformers.trainer.hf_api
    transformers.trainer.hf_api = lambda *args, **options: hub
    try:
        asked = {"push_to_hub": True, "hub_model_id": "us/tiny", "save_strategy": "steps", "save_steps": 2}
        trainer = trainer_of(Case(arguments=asked), folder, {"persist_below": 50, "stage": 3})
        trainer.train()
        trainer.push_to_hub()
    finally:
        transformers.trainer.hf_api = stock
    state, saved = whole_state(trainer.model), load_file(f"{folder}/model.safetensors")
    return hub.taken, all(torch.equal(saved[name], state[name]) for name in saved)


def test_what_is_pushed_is_the_whole_model_and_the_first_rank_alone_pushes(ranks, tmp_path):
    (taken, whole), (none, _) = ranks(2)(pushes, str(tmp_path), timeout=40)
    assert whole
    assert len(taken) >= 2  # from checkpoints, and at the end
    assert all("model.safetensors" in files for files in taken)
    assert none == []
