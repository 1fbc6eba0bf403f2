"""State of optimizers that only the layout it was made in can read, as that of 8 bits: saved, resumed, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.eight_bits import EightBits, OfClass
from tests.integrations.test_saving import FULL
from tests.same_examples import mean_losses

pytestmark = pytest.mark.ranks

SHARD: dict[str, Any] = {"stage": 3, "persist_below": 100}
ASYNCHRONOUS: dict[str, Any] = {"checkpoint": {"asynchronous": True}}


class Three(nn.Module):
    """Matrices that share blocks of a run, vectors that stay whole, and a branch that a step may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.side, self.last = nn.Linear(13, 71), nn.Linear(71, 71), nn.Linear(71, 13)

    def forward(self, rows: torch.Tensor, side: bool = True) -> torch.Tensor:
        rows = torch.tanh(self.first(rows))
        return self.last(rows + self.side(rows) if side else rows)


def made(config: dict[str, Any], kind: Any = EightBits, **changes: Any) -> Any:
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    torch.set_num_threads(1)
    accelerator = Accelerator(ourshard_plugin=ShardPlugin({**SHARD, **config}))
    model = Three()
    model.side.requires_grad_(changes.get("trained", True))
    return accelerator, *accelerator.prepare(model, kind(model.parameters(), lr=0.05))


def steps(model: Any, optimizer: Any, which: range, side: bool = True) -> list[float]:
    """Train on the same examples on any number of ranks; return the losses of all of them."""
    return mean_losses(lambda rows, step: model(rows, side), optimizer, which, (8, 13))


def goes_on(root: str, config: dict[str, Any], kind: Any = EightBits) -> dict[str, Any]:
    """Save after two steps and go on; load that where other steps were made, and go on."""
    import ourshard

    accelerator, model, optimizer = made(config, kind)
    steps(model, optimizer, range(2))
    accelerator.save_state(root)
    kept = {key for state in optimizer.optimizer.state.values() for key in state}
    kinds = kinds_of(optimizer)
    wanted = steps(model, optimizer, range(2, 5)), ourshard.full_state_dict(model)
    accelerator.free_memory()
    accelerator, model, optimizer = made(config, kind)
    steps(model, optimizer, range(7, 9))
    accelerator.load_state(root)
    told = {"kept": kept, "wanted": wanted, "kinds": kinds, "kinds_then": kinds_of(optimizer)}
    return {**told, "found": (steps(model, optimizer, range(2, 5)), whole(model))}


def kinds_of(optimizer: Any) -> list[str]:
    """Return the classes of all that an optimizer keeps."""
    return sorted(type(value).__name__ for state in optimizer.optimizer.state.values() for value in state.values())


def whole(model: Any) -> dict[str, torch.Tensor]:
    import ourshard

    return ourshard.full_state_dict(model)


CONFIGS: dict[str, dict[str, Any]] = {
    "rows": {},
    "whole": FULL,
    "background": ASYNCHRONOUS,
    "stage1": {"stage": 1},
    "offload": {"offload": {"optimizer": "cpu"}},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_of_8_bits_go_on_with_the_same_bits(ranks: Any, tmp_path: Path, name: str) -> None:
    """Such state was refused in every save, so that no run with it could be resumed."""
    for told in ranks(2)(goes_on, str(tmp_path), CONFIGS[name]):
        assert {"codes", "scales", "codes_table", "step"} <= told["kept"]
        assert told["found"][0] == told["wanted"][0]
        assert all(torch.equal(told["found"][1][key], value) for key, value in told["wanted"][1].items())


@pytest.mark.parametrize("name", ["rows", "whole", "background"])
def test_tensors_of_a_class_that_stands_for_others_come_back_as_they_were(
    ranks: Any, tmp_path: Path, name: str
) -> None:
    """`optim="adamw_torch_8bit"`, of torchao: its tensors refused to be cut when they were saved."""
    for told in ranks(2)(goes_on, str(tmp_path), CONFIGS[name], OfClass):
        assert told["kept"] == {"momentum", "step", "codes"}  # the last of small parameters
        assert told["found"][0] == told["wanted"][0]
        assert all(torch.equal(told["found"][1][key], value) for key, value in told["wanted"][1].items())


def saves_whole_ones(root: str) -> str:
    accelerator, model, optimizer = made({"stage": 0}, OfClass)
    steps(model, optimizer, range(1))
    with pytest.raises(ValueError, match="OfClass keeps 'momentum'") as error:
        accelerator.save_state(root)
    return str(error.value)


def test_tensors_of_such_a_class_of_whole_parameters_are_refused_by_name(ranks: Any, tmp_path: Path) -> None:
    for told in ranks(2)(saves_whole_ones, str(tmp_path)):
        assert "which is stepped whole, in a Coded" in told


class OfClassOnOwners(OfClass):
    elementwise = False


@pytest.mark.parametrize(("stage", "kind"), [(0, OfClass), (2, OfClassOnOwners)], ids=["whole", "owned"])
def test_tensors_of_such_a_class_of_whole_parameters_come_back_in_whole_checkpoints(
    ranks: Any, tmp_path: Path, stage: int, kind: Any
) -> None:
    """At stage 0 what they stand for was saved, and from then on the optimizer kept float32."""
    both = ranks(2)(goes_on, str(tmp_path), {"stage": stage, **FULL}, kind)
    for told in both:
        assert told["found"][0] == told["wanted"][0]
        assert all(torch.equal(told["found"][1][key], value) for key, value in told["wanted"][1].items())
        assert told["kinds"] == told["kinds_then"]
    assert any("Coded" in told["kinds"] for told in both)  # an owner of small ones alone has none


REPLICAS: dict[str, Any] = {"stage": 3, "shard_size": 2}


@pytest.mark.slow  # four ranks
@pytest.mark.parametrize("config", [REPLICAS, {**REPLICAS, "shard_optimizer_over": "all"}, {**REPLICAS, **FULL}])
def test_replicas_have_the_blocks_of_their_counterparts(ranks: Any, tmp_path: Path, config: dict[str, Any]) -> None:
    for told in ranks(4)(goes_on, str(tmp_path), config):
        assert told["found"][0] == told["wanted"][0]
        assert all(torch.equal(told["found"][1][key], value) for key, value in told["wanted"][1].items())


def saves(root: str, config: dict[str, Any], **changes: Any) -> None:
    accelerator, model, optimizer = made(config, **changes)
    steps(model, optimizer, range(2))
    accelerator.save_state(root)


def refuses(root: str, config: dict[str, Any], **changes: Any) -> str:
    """Load where it does not fit; nothing is changed, bar weights of whole files, which are read first."""
    accelerator, model, optimizer = made(config, **changes)
    before = whole(model)
    with pytest.raises(ValueError, match="loaded") as error:
        accelerator.load_state(root)
    same = all(torch.equal(value, before[name]) for name, value in whole(model).items())
    assert same or "checkpoint" in config
    assert not any(optimizer.optimizer.state.values())
    return str(error.value)


OTHERS: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {"persist_below": 1000}), (2, {"stage": 0})]


@pytest.mark.parametrize("config", [{}, FULL], ids=["rows", "whole"])
def test_another_layout_is_told_what_to_do_and_nothing_is_changed(
    ranks: Any, tmp_path: Path, config: dict[str, Any]
) -> None:
    """CASES A02 asks for any number of ranks. Blocks of other rows are others, and that is said."""
    ranks(2)(saves, str(tmp_path), config)
    for world, other in OTHERS:
        for told in ranks(world)(refuses, str(tmp_path), {**config, **other}):
            assert (
                "(codes, codes_table, scales) is laid out for the rows of 2 ranks, and here each rank has others"
                in told
            )
            assert "docs/checkpoints.md" in told
    for told in ranks(2)(refuses, str(tmp_path), config, trained=False):
        assert "the same parameters trained" in told or "parameter groups" in told


@pytest.mark.parametrize(
    ("config", "kind"), [({}, EightBits), (FULL, EightBits), (FULL, OfClass)], ids=["rows", "whole", "of a class"]
)
def test_blocks_of_whole_parameters_are_not_taken_for_those_of_rows(
    ranks: Any, tmp_path: Path, config: dict[str, Any], kind: Any
) -> None:
    """Once the scales of the whole parameter were given to each rank's rows without a word."""
    ranks(2)(saves, str(tmp_path), {"stage": 0, **config}, kind=kind)
    for told in ranks(2)(refuses, str(tmp_path), config, kind=kind):
        assert "of the whole parameter, in a layout of the optimizer's own" in told


class OnOwners(EightBits):
    elementwise = False


def on_owners(root: str, config: dict[str, Any], load: bool) -> list[float]:
    accelerator, model, optimizer = made(config, OnOwners)
    if load:
        accelerator.load_state(root)
    else:
        steps(model, optimizer, range(2))
        accelerator.save_state(root)
    return steps(model, optimizer, range(2, 4))


@pytest.mark.parametrize("config", [{}, FULL], ids=["rows", "whole"])
def test_an_optimizer_that_steps_whole_parameters_resumes_on_any_number_of_ranks(
    ranks: Any, tmp_path: Path, config: dict[str, Any]
) -> None:
    (wanted, _) = ranks(2)(on_owners, str(tmp_path), config, load=False)
    assert ranks(2)(on_owners, str(tmp_path), config, load=True) == [wanted] * 2
    (alone,) = ranks(1)(on_owners, str(tmp_path), config, load=True)
    assert alone == pytest.approx(wanted, rel=1e-4)


def uneven(root: str, config: dict[str, Any]) -> tuple[list[float], list[float], str]:
    """Leave a branch out of the first steps, so that its state is apart; save, load; then out of a later one."""
    accelerator, model, optimizer = made(config)
    losses = steps(model, optimizer, range(2), side=False)
    losses += steps(model, optimizer, range(2, 3))
    accelerator.save_state(root)
    wanted = steps(model, optimizer, range(3, 5))
    accelerator.free_memory()
    accelerator, model, optimizer = made(config)
    accelerator.load_state(root)
    found = steps(model, optimizer, range(3, 5))
    accelerator.free_memory()
    accelerator, model, optimizer = made(config)
    steps(model, optimizer, range(1))
    with pytest.raises(ValueError, match="EightBits keeps") as error:
        steps(model, optimizer, range(1, 2), side=False)
    return wanted, found, str(error.value)


@pytest.mark.parametrize("config", [{}, FULL], ids=["rows", "whole"])
def test_runs_that_were_split_before_they_had_state_come_back_split(
    ranks: Any, tmp_path: Path, config: dict[str, Any]
) -> None:
    """Split later, each part had the scales of the first blocks, without a word."""
    for wanted, found, told in ranks(2)(uneven, str(tmp_path), {"persist_below": 0, **config}):
        assert found == wanted
        assert "in different steps now" in told
        assert "EightBits.elementwise = False" in told


# ---- a Trainer ---------------------------------------------------------------------------------------------

SAVES = {"save_strategy": "steps", "save_steps": 2}
TRAINED: dict[str, tuple[str | None, dict[str, Any]]] = {
    "default": (None, {}),
    "adapter": ("lora", {}),
    "rows": (None, {"checkpoint": {"format": "sharded"}}),
}


def trains(folder: str, peft: str | None, config: dict[str, Any], resume: Any = None, **more: Any) -> dict[str, Any]:
    """Train four steps, or from a checkpoint to the fourth; return losses, weights and what was said."""
    import logging

    from tests.integrations.client_runs import trainer_of
    from tests.integrations.trainer_runs import Case, logged

    case = Case(arguments={**SAVES, **more}, peft=peft)
    trainer = trainer_of(case, folder, {**SHARD, **config}, optimizer_cls_and_kwargs=(EightBits, {"lr": 0.05}))
    with logged(logging.WARNING) as told:
        trainer.train(resume_from_checkpoint=resume)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {"losses": losses, "state": whole(trainer.model), "told": told}


@pytest.mark.parametrize("name", TRAINED)
def test_a_trainer_resumes_an_optimizer_of_8_bits_with_the_same_bits(ranks: Any, tmp_path: Path, name: str) -> None:
    """`optim="adamw_bnb_8bit"` trained until its first checkpoint, which was refused."""
    first = ranks(2)(trains, str(tmp_path / "first"), *TRAINED[name])
    checkpoint = tmp_path / "first" / "checkpoint-2"
    again = ranks(2)(trains, str(tmp_path / "again"), *TRAINED[name], str(checkpoint))
    for wanted, found in zip(first, again, strict=True):
        assert found["losses"] == wanted["losses"]
        assert all(torch.equal(found["state"][key], value) for key, value in wanted["state"].items())


def begins_anew(folder: str, peft: str | None, config: dict[str, Any], resume: str, **more: Any) -> dict[str, Any]:
    """Be refused on another number of ranks, and do what the page says."""
    with pytest.raises(ValueError, match="is laid out for the rows of 2 ranks") as error:
        trains(folder, peft, config, resume)
    told = str(error.value)
    if (Path(resume) / "optimizer.pt").exists():
        (Path(resume) / "optimizer.pt").unlink()
    else:
        from ourshard.checkpoint import convert

        convert(resume, f"{resume}-weights", to="ourshard", weights_only=True)
        resume, more = f"{resume}-weights", {"save_only_model": True}
    return {**trains(f"{folder}-anew", peft, config, resume, **more), "error": told}


@pytest.mark.parametrize("name", TRAINED)
def test_a_trainer_on_other_ranks_goes_on_from_the_weights_when_told_to(ranks: Any, tmp_path: Path, name: str) -> None:
    (first, _) = ranks(2)(trains, str(tmp_path / "first"), *TRAINED[name])
    checkpoint = tmp_path / "first" / "checkpoint-2"
    (found,) = ranks(1)(begins_anew, str(tmp_path / "alone"), *TRAINED[name], str(checkpoint))
    assert found["losses"][:2] == first["losses"][:2]
    assert found["losses"][2] == pytest.approx(first["losses"][2], abs=1e-4)
    assert found["losses"][3] < found["losses"][2]
