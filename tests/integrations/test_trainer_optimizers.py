"""Optimizers under a Trainer that do more than step: with modes, with groups of their own kind, inside of backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.integrations.client_runs import apart, column, trainer_of
from tests.integrations.trainer_runs import Case, Tokens, llama, whole_state

pytestmark = pytest.mark.ranks

SHARD = {"persist_below": 50}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}


class Averaged(Optimizer):
    """Steps in train mode alone; its weights to evaluate with are others, as those of schedule-free optimizers."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "train_mode": False})

    @torch.no_grad()
    def _swap(self, to_train: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if group["train_mode"] != to_train and "base" in self.state[p]:
                    p.lerp_(self.state[p]["base"], -1.0 if to_train else 0.5)
            group["train_mode"] = to_train

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "not in train mode"
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("base", p.clone())
                    p.sub_(p.grad * group["lr"])


class LowRank(Optimizer):
    """Takes a group with a `rank` apart and projects its matrices, as GaLore does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_((p.grad / p.grad.norm() if "rank" in group else p.grad) * group["lr"])


class WhileBackward(torch.optim.SGD):
    def fused_backward(self, loss: torch.Tensor, rate: float) -> None:
        raise AssertionError("not to be called")


def changes_modes(folder: str, shard: dict[str, Any] | None) -> dict[str, Any]:
    trainer = trainer_of(Case(arguments=EVALUATES), folder, shard, optimizer_cls_and_kwargs=(Averaged, {"lr": 0.1}))
    trainer.train()
    told = torch.as_tensor(trainer.predict(Tokens(8, seed=2)).predictions)  # in the other mode
    return {"told": told, "logs": column(trainer, "loss", "grad_norm"), "state": whole_state(trainer.model)}


@pytest.mark.parametrize("stage", [3, 1])
def test_weights_that_a_change_of_mode_writes_are_those_of_one_process(ranks, tmp_path, stage):
    wanted = changes_modes(str(tmp_path / "one"), None)
    for found in ranks(2)(changes_modes, str(tmp_path / "two"), {**SHARD, "stage": stage}):
        assert apart(found, wanted) < 2e-6


def refusals(folder: str) -> list[str]:
    """Return what is said to optimizers, and to options of the Trainer, that can't be right."""
    said = []
    model = llama()
    projected = [p for name, p in model.named_parameters() if "mlp" in name]
    others = [p for name, p in model.named_parameters() if "mlp" not in name]
    ranked = LowRank([{"params": others}, {"params": projected, "rank": 4}])  # in the order of the Trainer's GaLore
    hooked = llama()
    inside = WhileBackward(hooked.parameters(), 0.1)
    for of, optimizer in ((model, ranked), (hooked, inside)):
        trainer = trainer_of(Case(), folder, {**SHARD, "stage": 3}, of, optimizers=(optimizer, None))
        try:
            trainer.train()
        except ValueError as error:
            said.append(str(error))
    uneven = {"accelerator_config": {"even_batches": False}}
    for arguments, more in ((uneven, {}), ({}, {"communication": {"reduce_op": "sum"}})):
        try:
            trainer_of(Case(arguments=arguments), folder, {**SHARD, "stage": 3, **more})
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_right_on_ranks_is_refused_by_name(ranks, tmp_path):
    for ranked, inside, uneven, sums in ranks(2)(refusals, str(tmp_path)):
        assert "test_trainer_optimizers.LowRank needs whole matrices in its group with rank" in ranked
        assert "The optimizer WhileBackward changes each parameter while backward runs" in inside
        assert "even_batches=False" in uneven
        assert sums.startswith("communication.reduce_op: sum: a Trainer scales its losses for the mean")


def steps(folder: str, shard: dict[str, Any] | None) -> dict[str, Any]:
    found = {}
    for name, options in KINDS.items():
        trainer = trainer_of(Case(arguments={**EVALUATES, **options}), f"{folder}/{name}", shard)
        trainer.train()
        found[name] = {"logs": column(trainer, "loss", "grad_norm"), "state": whole_state(trainer.model)}
    return found


# A rate of 1e-2 with RMSprop is a first step of 0.1 in the direction of each gradient's sign: rounding decides it
# where gradients are near zero. An `eps` above them shows the same arithmetic without that.
KINDS: dict[str, dict[str, Any]] = {
    "adamw_torch": {"optim": "adamw_torch", "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 1},
    "adamw_torch_fused": {"optim": "adamw_torch_fused"},
    "adafactor": {"optim": "adafactor"},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=True"},
    "adagrad": {"optim": "adagrad"},
    "rmsprop": {"optim": "rmsprop", "optim_args": "eps=1e-3"},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_steps": 1, "metric_for_best_model": "loss"},
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_kind_of_torch_that_the_trainer_names_steps_as_in_one_process(ranks, tmp_path, stage):
    wanted = steps(str(tmp_path / "one"), None)
    for found in ranks(2)(steps, str(tmp_path / "two"), {**SHARD, "stage": stage}):
        assert apart(found, wanted) < 1e-5
