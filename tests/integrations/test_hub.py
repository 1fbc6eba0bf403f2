"""`push_to_hub` of a sharded Trainer, with something in place of the Hub: what would be sent is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
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
        self.is_away = False

    def create_repo(self, name: str, **options: Any) -> Any:
        self._reach()
        return type("Url", (), {"repo_id": f"us/{name}"})()

    def upload_folder(self, folder_path: str, **options: Any) -> Future[None]:
        self._reach()
        self.taken.append({path.name for path in Path(folder_path).iterdir()})
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _reach(self) -> None:
        if self.is_away:
            raise ConnectionError("the Hub is away")


@contextmanager
def hub() -> Iterator[Hub]:
    """Put a Hub in the place of the real one."""
    import transformers.trainer

    found = Hub()
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(transformers.trainer, "hf_api"):
            patch.setattr(transformers.trainer, "hf_api", lambda *args, **options: found)
        else:  # before 5.24
            patch.setattr(transformers.trainer, "create_repo", found.create_repo)
            patch.setattr(transformers.trainer, "upload_folder", found.upload_folder)
        yield found


PUSHES = Case(arguments={"push_to_hub": True, "hub_model_id": "us/tiny", "save_strategy": "steps", "save_steps": 2})
SHARD = {"persist_below": 50, "stage": 3}


def pushes(folder: str) -> tuple[list[set[str]], bool]:
    import torch
    from safetensors.torch import load_file

    with hub() as taking:
        trainer = trainer_of(PUSHES, folder, SHARD)
        trainer.train()
        trainer.push_to_hub()
    state, saved = whole_state(trainer.model), load_file(f"{folder}/model.safetensors")
    return taking.taken, all(torch.equal(saved[name], state[name]) for name in saved)


def test_what_is_pushed_is_the_whole_model_and_the_first_rank_alone_pushes(ranks, tmp_path):
    (taken, whole), (none, _) = ranks(2)(pushes, str(tmp_path))
    assert whole
    assert len(taken) >= 2  # from checkpoints, and at the end
    assert all("model.safetensors" in files for files in taken)
    assert none == []


def is_away(folder: str) -> list[str]:
    """Let the Hub be away when a Trainer is made, at a checkpoint and at the end; go on after each, as scripts do."""
    said: list[str] = []

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except ConnectionError as error:
            said.append(str(error))

    with hub() as taking:
        taking.is_away = True
        attempt(lambda: trainer_of(PUSHES, folder, SHARD))
        taking.is_away = False
        trainer = trainer_of(PUSHES, folder, SHARD)
        taking.is_away = True
        attempt(trainer.train)
        trainer.evaluate()
        attempt(trainer.push_to_hub)
        taking.is_away = False
        trainer.push_to_hub()
    return [*said, str(trainer.state.global_step), *(str(sorted(files)[:1]) for files in taking.taken)]


def test_a_hub_that_is_away_is_the_same_error_on_every_rank_and_no_rank_waits(ranks, tmp_path):
    first, second = ranks(2)(is_away, str(tmp_path))
    assert first == [*["the Hub is away"] * 3, "2", "['README.md']"]
    assert second == first[:4]
