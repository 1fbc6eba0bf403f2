"""An out-of-memory error in training says what would fit, wherever it is raised, and training can go on."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from ourshard.config import ShardConfig
from ourshard.planning.advice import explain, explain_host
from ourshard.planning.moves import MeshSizes
from torch.nn import functional as F

from tests.integrations.tiny import Tiny, loader, tiny

MESSAGE = "CUDA out of memory. Tried to allocate 500 bytes."
PLACES = ("forward", "backward", "step")


class Exhausting(torch.autograd.Function):
    """Identity whose backward finds no memory."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise torch.OutOfMemoryError(MESSAGE)


class Large(Tiny):
    """A model that finds no memory at `place`."""

    place = ""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.blocks[0](rows)
        if self.place == "forward":
            raise torch.OutOfMemoryError(MESSAGE)
        if self.place == "backward":
            rows = Exhausting.apply(rows)
        return self.head(self.blocks[1](rows))


class Greedy(torch.optim.AdamW):
    """An optimizer that finds no memory for its state while `full`."""

    full = False

    def step(self, closure: Any = None) -> Any:
        if self.full:
            raise torch.OutOfMemoryError(MESSAGE)
        return super().step(closure)


def fail_at(place: str, config: dict[str, Any]) -> tuple[str, tuple[Any, ...], list[str], dict[str, torch.Tensor]]:
    """Return the error's text, arguments and notes, and the weights after it was caught and a step was taken."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin(config))
    torch.manual_seed(0)
    model = Large()
    optimizer = Greedy(model.parameters(), lr=1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader())
    inputs, labels = next(iter(data))

    def step() -> None:
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()

    model.place, optimizer.optimizer.full = place, place == "step"
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step()
    model.place, optimizer.optimizer.full = "", False
    optimizer.zero_grad()
    step()
    return (
        str(caught.value),
        caught.value.args,
        getattr(caught.value, "__notes__", []),
        accelerator.get_state_dict(model),
    )


@pytest.mark.ranks
@pytest.mark.parametrize("place", PLACES)
def test_an_out_of_memory_error_names_the_cheapest_change_and_training_goes_on(ranks: Any, place: str) -> None:
    expected = ranks(2)(fail_at, "step", {"stage": 3})[0][3] if place == "backward" else None
    for text, args, notes, state in ranks(2)(fail_at, place, {"stage": 0}):
        assert text.startswith(MESSAGE)
        assert len(args) == 1  # `find_executable_batch_size` of accelerate asks for it
        (advice,) = notes if sys.version_info >= (3, 11) else (text.removeprefix(f"{MESSAGE}\n"),)
        assert "The cheapest change that would fit: stage: 2 saves" in advice
        for name, value in (expected or {}).items():
            torch.testing.assert_close(state[name], value, atol=1e-6, rtol=0, msg=name)


def raised_without_notes() -> str:
    """Raise on a rank as Python 3.10 would, whose exceptions have no notes."""
    from ourshard.planning import advice
    from ourshard.runtime.api import shard_model

    class Plain(torch.OutOfMemoryError):
        add_note = property()  # as if it were not there

    model = shard_model(tiny(), {"stage": 0})
    error = Plain(MESSAGE)
    advice.add_advice(error, model)
    advice.add_advice(error, model)
    return str(error)


@pytest.mark.ranks
def test_where_exceptions_have_no_notes_the_message_itself_says_it_once(ranks: Any) -> None:
    text = ranks(2)(raised_without_notes)[0]
    assert text.startswith(MESSAGE)
    assert text.count("The cheapest change that would fit: stage: 2 saves") == 1


def host_runs_out(kind: str) -> list[str]:
    """Return the notes of an error for want of host memory in a forward on CPUs."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    class Hungry(Tiny):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            if kind == "python":
                raise MemoryError
            return super().forward(rows + torch.empty(10**15))  # torch's own error

    model = Accelerator(ourshard_plugin=ShardPlugin({"stage": 0})).prepare(Hungry())
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        model(torch.zeros(2, 4))
    return getattr(caught.value, "__notes__", list(caught.value.args))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["python", "torch"])
def test_where_a_cpu_trains_host_memory_is_what_the_advice_is_about(ranks: Any, kind: str) -> None:
    for notes in ranks(2)(host_runs_out, kind):
        assert "activations and others" in notes[-1]
        wanted = (
            "The cheapest change that would fit: stage: 2 saves" if kind == "python" else "No single change is enough"
        )
        assert wanted in notes[-1]  # of 4 PB


def test_beside_a_gpu_what_leaves_it_is_weighed_last_and_what_is_on_the_host_comes_back() -> None:
    model, mesh, size = tiny(), MeshSizes(1), 10**9
    on_gpu = {"allocated": size, "on_gpu": True}
    stage3 = ShardConfig(stage=3)
    recomputed = stage3.replace(activation_checkpointing=True)
    assert "activation_checkpointing: true" in explain(model, stage3, mesh, missing=10, **on_gpu)
    assert "would fit: offload.optimizer: cpu saves" in explain(model, recomputed, mesh, missing=10, **on_gpu)
    assert "offload" not in explain(model, recomputed, mesh, missing=10, allocated=size)
    assert "may fit: offload.activations: cpu" in explain(model, recomputed, mesh, missing=size // 2, **on_gpu)

    there = stage3.replace(offload={"optimizer": "cpu"}, activation_checkpointing=True)
    assert "offload.optimizer: cpu" not in explain(model, there, mesh, missing=10, **on_gpu)  # it is
    graphs = stage3.replace(cuda_graph=True)  # goes with neither
    assert "use a smaller batch" in explain(model, graphs, mesh, missing=10, **on_gpu)

    offloaded = stage3.replace(offload={"optimizer": "cpu", "params": "cpu"})
    text = explain_host(model, offloaded, mesh, missing=10)
    assert "would fit: offload.optimizer: none saves" in text
    assert "offload.optimizer: nvme" in text
    assert "hold 0 bytes" in explain_host(model, stage3, mesh, missing=10)


def error_in_evaluation() -> list[str]:
    """Return the notes of an error that is no lack of memory."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    model = Accelerator(ourshard_plugin=ShardPlugin({"stage": 1})).prepare(tiny())
    with pytest.raises(RuntimeError) as caught:
        model(torch.zeros(2, 3))
    return getattr(caught.value, "__notes__", [])


@pytest.mark.ranks
def test_other_errors_stay_as_they_are(ranks: Any) -> None:
    assert ranks(2)(error_in_evaluation) == [[], []]
