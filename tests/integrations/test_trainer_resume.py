"""A Trainer's checkpoints: resumed on any number of ranks and at any stage, and exchanged with stock Trainers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integrations.trainer_runs import Case, Run, on_rank, run

pytestmark = pytest.mark.ranks

SAVES = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 1}
SHARD = {"persist_below": 50}
CASES = {"full": Case(arguments=SAVES), "lora": Case(arguments=SAVES, peft="lora")}


def resumed(name: str, folder: str, shard: dict[str, Any] | None, checkpoint: str | None) -> dict[str, Any]:
    found = on_rank(CASES[name], folder, shard, resume=checkpoint)
    return told_of(found)


def told_of(found: Run) -> dict[str, Any]:
    columns = {"losses": "loss", "norms": "grad_norm", "rates": "learning_rate"}
    return {"state": found.state, **{name: found.column(column) for name, column in columns.items()}}


def assert_goes_on(found: list[dict[str, Any]], wanted: Any) -> None:
    """CASES A02, A06: losses, norms, weights as of a run without a stop, and exactly its learning rates."""
    for told in found:
        assert told["rates"] == wanted.column("learning_rate")
        assert np.allclose(told["losses"], wanted.column("loss"), atol=1e-5)
        assert np.allclose(told["norms"], wanted.column("grad_norm"), atol=1e-5)
        apart = {key: (told["state"][key] - value).abs().max().item() for key, value in wanted.state.items()}
        assert max(apart.values()) < 1e-5, max(apart, key=apart.__getitem__)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train in one process, without ourshard, and keep the checkpoints."""
    folder = tmp_path_factory.mktemp("stock")
    return {"folder": folder, **{name: run(case, folder / name) for name, case in CASES.items()}}


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_two_ranks_resumes_on_any_world_and_stage_and_without_ourshard(ranks, stock, tmp_path, name):
    """The losses, norms and weights after resuming are those of a run that was not interrupted."""
    ranks(2)(resumed, name, str(tmp_path / "first"), {**SHARD, "stage": 3}, None)
    checkpoint = str(tmp_path / "first" / "checkpoint-2")
    for world, stage in ((2, 3), (1, 3), (2, 1), (2, 0)):
        again = str(tmp_path / f"again{world}{stage}")
        found = ranks(world)(resumed, name, again, {**SHARD, "stage": stage}, checkpoint)
        assert_goes_on(found, stock[name])
    alone = run(CASES[name], tmp_path / "alone", resume=checkpoint)
    assert_goes_on([told_of(alone)], stock[name])


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_a_stock_trainer_resumes_sharded(ranks, stock, tmp_path, name):
    checkpoint = str(stock["folder"] / name / "checkpoint-2")
    for stage in (3, 2):
        found = ranks(2)(resumed, name, str(tmp_path / str(stage)), {**SHARD, "stage": stage}, checkpoint)
        assert_goes_on(found, stock[name])


def test_the_optimizers_file_is_the_one_that_a_stock_trainer_writes(ranks, stock, tmp_path):
    """The same groups, numbers and shapes, and the parameters' names beside them."""
    ranks(2)(resumed, "full", str(tmp_path), {**SHARD, "stage": 3}, None)
    ours = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)
    theirs = torch.load(stock["folder"] / "full" / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert [group["params"] for group in ours["param_groups"]] == [group["params"] for group in theirs["param_groups"]]
    assert ours["param_groups"][0]["param_names"][0] == "model.embed_tokens.weight"
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert state.keys() == ours["state"][number].keys()
        for key, value in state.items():
            assert ours["state"][number][key].shape == value.shape
            assert torch.allclose(ours["state"][number][key], value, atol=1e-6)


def weights_before_preparing(folder: str, checkpoint: str) -> tuple[int, int]:
    """Return the parameters without memory, and the bytes read, when a checkpoint is loaded and not yet sharded."""
    from ourshard.runtime.lazy import LazyTensor
    from ourshard.runtime.source import bytes_read
    from transformers import AutoModelForCausalLM, Trainer

    from tests.integrations import trainer_runs as runs

    runs.quiet()
    runs.enable({**SHARD, "stage": 3})
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    args = runs.arguments(CASES["full"], Path(folder), 2)
    trainer = Trainer(model=model, args=args, train_dataset=runs.Tokens(8))
    before = bytes_read()
    trainer._load_from_checkpoint(checkpoint)
    return sum(isinstance(parameter, LazyTensor) for parameter in model.parameters()), bytes_read() - before


def test_resuming_reads_no_weights_before_each_rank_knows_its_rows(ranks, stock, tmp_path):
    checkpoint = str(stock["folder"] / "full" / "checkpoint-2")
    assert ranks(2)(weights_before_preparing, str(tmp_path), checkpoint) == [(21, 0)] * 2


def made_with(folder: str, checkpoint: dict[str, Any], peft: str | None = None, **more: Any) -> Any:
    from transformers import Trainer

    from tests.integrations import trainer_runs as runs

    runs.quiet()
    runs.enable({**SHARD, "stage": 3, "checkpoint": checkpoint})
    args = runs.arguments(CASES["full"], Path(folder), 1, **more)
    return Trainer(model=runs.adapted(runs.llama(), peft), args=args, train_dataset=runs.Tokens(8))


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("checkpoint.asynchronous: a Trainer writes an adapter whole", {"asynchronous": True}, {"peft": "lora"}),
    ("hub_strategy", {"asynchronous": True}, {"push_to_hub": True, "hub_strategy": "checkpoint"}),
    (
        "checkpoint.when_busy: skip may leave out the best",
        {"asynchronous": True, "when_busy": "skip"},
        {"load_best_model_at_end": True},
    ),
]


def asked_for(folder: str) -> tuple[list[str], int, int, list[bool]]:
    from ourshard.integrations import trainer_checkpoint

    errors = []
    for _, checkpoint, more in REFUSED:
        trainer = made_with(folder, checkpoint, peft=more.get("peft"))
        for name, value in more.items():
            setattr(trainer.args, name, value)  # a constructor would ask the hub, and for data to evaluate
        with pytest.raises(ValueError, match=": ") as error:
            trainer_checkpoint.check(trainer)
        errors.append(str(error.value))
    trainer_checkpoint.check(made_with(folder, {"format": "sharded"}, peft="lora"))  # whole all the same
    kept = made_with(folder, {"keep": 2}).args.save_total_limit
    own = made_with(folder, {"keep": 2}, save_total_limit=5).args.save_total_limit
    on_each = [made_with(folder, {"save_on_each_node": each}).args.save_on_each_node for each in (False, True)]
    return errors, kept, own, on_each


def test_a_trainer_keeps_what_the_config_says_where_it_says_and_refuses_what_rows_cannot_be(ranks, tmp_path):
    ((errors, kept, own, on_each),) = ranks(1)(asked_for, str(tmp_path))
    for error, (start, _, _) in zip(errors, REFUSED, strict=True):
        assert error.startswith(start)
    assert (kept, own, on_each) == (2, 5, [False, True])


def damage(folder: Path, number: int, what: str) -> None:
    """Make a small checkpoint and then lose a file, or the end of one."""
    from safetensors.torch import save_file

    path = folder / f"checkpoint-{number}"
    path.mkdir()
    save_file({"weight": torch.ones(5)}, path / "model.safetensors")
    torch.save({"state": {}}, path / "optimizer.pt")
    (path / "trainer_state.json").write_text('{"global_step": 2}')
    if what == "no state":
        (path / "trainer_state.json").unlink()
    elif what:
        file = path / what
        file.write_bytes(file.read_bytes()[:-3])


def test_the_newest_complete_checkpoint_is_taken_and_what_is_skipped_is_said(tmp_path, caplog):
    from ourshard.integrations.trainer_resume import newest_complete

    assert newest_complete(str(tmp_path)) is None
    wrong = ["no state", "trainer_state.json", "model.safetensors", "optimizer.pt"]
    for number, what in enumerate(["", "", *wrong], start=8):  # numbers of one and of two digits
        damage(tmp_path, number, what)
    with caplog.at_level("WARNING", logger="ourshard"):
        assert newest_complete(str(tmp_path)) == str(tmp_path / "checkpoint-9")
    assert [re.search(r"checkpoint-\d+", told)[0] for told in caplog.messages] == [
        f"checkpoint-{n}" for n in (13, 12, 11, 10)
    ]
    assert "optimizer.pt is cut off" in caplog.messages[0]
    assert "written last" in caplog.messages[3]


def stopped_while_saving(folder: str) -> dict[str, Any]:
    """Train, lose what the newest checkpoint's save wrote last, and start anew with `resume_from_checkpoint=True`."""
    import torch.distributed as dist

    shard = {**SHARD, "stage": 3}
    resumed("full", folder, shard, None)
    dist.barrier()
    newest = max(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    if dist.get_rank() == 0:
        (newest / "trainer_state.json").unlink()
        (newest / "optimizer.pt").write_bytes(b"")
    dist.barrier()
    return resumed("full", folder, shard, True)  # type: ignore[arg-type]


def test_a_save_that_a_crash_stopped_is_skipped_at_resume_and_written_anew(ranks, stock, tmp_path):
    found = ranks(2)(stopped_while_saving, str(tmp_path))
    assert_goes_on(found, stock["full"])
    assert len(list(tmp_path.glob("checkpoint-*"))) > 1
    assert all((path / "trainer_state.json").is_file() for path in tmp_path.glob("checkpoint-*"))
