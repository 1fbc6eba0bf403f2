"""What can't work is a clear error on every rank before anything trains; an exception can be recovered from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks.nets import WIDTH, Toy, numbers, square_loss, toy
from tests.ranks.training import TOY, Configs, Task, compare, reference, sgd

pytestmark = pytest.mark.ranks


def told_by(attempt: Callable[[], Any]) -> str:
    """Return the text of the `ValueError` that `attempt` ends in."""
    with pytest.raises(ValueError) as caught:
        attempt()
    return str(caught.value)


def refusals() -> dict[str, str]:
    """Try each kind of bad input on this rank, one after the other; a good model is still sharded afterwards."""
    from ourshard import ShardConfig, shard_model

    rank = dist.get_rank()
    with torch.device("meta"):
        empty = Toy()
    deeper = Toy(blocks=3 + rank)
    other_dtype = Toy().to(torch.float64 if rank else torch.float32)
    other_buffers = Toy()
    other_buffers.register_buffer("extra", torch.zeros(3 + rank))
    sharded = shard_model(toy(), {"stage": 3})
    lazy = nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, WIDTH))
    by_memory = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    by_memory[1].weight = nn.Parameter(by_memory[0].weight.data)
    transposed = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH))
    transposed[1].weight = nn.Parameter(transposed[0].weight.data.T)  # as PEFT's ensure_weight_tying does
    return {
        "unknown key": told_by(lambda: ShardConfig.from_dict({"stagee": 3})),
        "stage": told_by(lambda: shard_model(toy(), {"stage": 7})),
        "hybrid": told_by(lambda: shard_model(toy(), {"stage": 3, "shard_size": 3})),
        "meta": told_by(lambda: shard_model(empty, {"stage": 3})),
        "other model": told_by(lambda: shard_model(deeper, {"stage": 3})),
        "other dtype": told_by(lambda: shard_model(other_dtype, {"stage": 3})),
        "other buffers": told_by(lambda: shard_model(other_buffers, {"stage": 3})),
        "twice": told_by(lambda: shard_model(sharded, {"stage": 3})),
        "inner": told_by(lambda: shard_model(nn.Sequential(sharded, nn.Linear(2, 2)), {"stage": 3})),
        "lazy": told_by(lambda: shard_model(lazy, {"stage": 3})),
        "scripted": told_by(lambda: shard_model(nn.Sequential(torch.jit.script(nn.Linear(2, 2))), {"stage": 3})),
        "by memory": told_by(lambda: shard_model(by_memory, {"stage": 3})),
        "transposed": told_by(lambda: shard_model(transposed, {"stage": 3})),
        "class": told_by(lambda: shard_model(toy(), {"wrap": {"policy": "classes", "classes": ["Blok"]}})),
        "module": told_by(lambda: shard_model(toy(), {"wrap": {"policy": "modules", "modules": ["blocks.9"]}})),
        "ignore": told_by(lambda: shard_model(toy(), {"wrap": {"ignore": ["nothing"]}})),
        "good": str(len(list(shard_model(toy(), {"stage": 3}).parameters()))),
    }


WORDS = {
    "unknown key": "Did you mean 'stage'?",
    "stage": "stage: 7",
    "hybrid": "shard_size: 3 (3 ranks) does not divide the world of 2 ranks",
    "meta": "parameters on the meta device, without values",
    "other model": "rank 0 has nothing more, rank 1 has blocks.3.",
    "other dtype": "torch.float32 True, rank 1 has blocks.0.norm.weight (13,) torch.float64",
    "other buffers": "rank 1 has buffer extra (4,)",
    "twice": "sharded already",
    "inner": "'0' inside of the model is sharded already",
    "lazy": "'0.weight' has no shape yet",
    "scripted": "'0' is a RecursiveScriptModule of torch.jit",
    "by memory": "'0.weight' and '1.weight' are two parameters over the same memory",
    "transposed": "shows the other transposed, as those of PEFT's ensure_weight_tying",
    "class": "did you mean Block (3)",
    "module": "no module named 'blocks.9'",
    "ignore": "no module named 'nothing'",
}


def test_each_kind_of_bad_input_is_refused_on_every_rank_and_a_good_model_follows(ranks):
    for told in ranks(2)(refusals):
        assert told.pop("good") == "19"
        assert told.keys() == WORDS.keys()
        for kind, text in told.items():
            assert WORDS[kind] in text, f"{kind}: {text}"


def meta_off_rank_0() -> torch.Tensor:
    """Shard a model that has values on rank 0 alone; return the whole first weight."""
    from ourshard import full_state_dict, shard_model

    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = Toy()
    return full_state_dict(shard_model(model, {"stage": 3, "persist_below": 0}))["first.weight"]


def test_values_of_rank_0_are_enough(ranks):
    assert all(torch.equal(weight, toy().first.weight) for weight in ranks(2)(meta_off_rank_0))


WRAPS: Configs = {
    "by size": {"stage": 3, "persist_below": 0, "wrap": {"policy": "min_params", "min_params": 500}},
    "by list": {"stage": 3, "persist_below": 0, "wrap": {"policy": "modules", "modules": ["blocks.1", "last"]}},
    "by class": {"stage": 3, "persist_below": 0, "wrap": {"policy": "classes", "classes": ["Linear"]}},
}


def labels(config: dict[str, Any]) -> list[str]:
    from ourshard import engine_of, shard_model

    engine = engine_of(shard_model(toy(), config))
    assert engine is not None
    return [unit.label for unit in engine.units]


def test_units_are_cut_by_size_by_list_or_by_class_and_train_as_in_one_process(ranks):
    task = Task(optimizer=sgd, steps=3)
    compare(ranks(2), task, WRAPS, reference(task, 2))
    assert ranks(2)(labels, WRAPS["by size"])[0] == ["blocks.0", "blocks.1", "blocks.2", "the root unit"]
    assert ranks(2)(labels, WRAPS["by list"])[0] == ["blocks.1", "last", "the root unit"]
    assert len(ranks(2)(labels, WRAPS["by class"])[0]) == 9


def on_a_device_mesh(names: tuple[str, ...]) -> tuple[str, torch.Tensor]:
    """Shard over a mesh that the caller made, train a step; return the mesh in words, and a weight."""
    from ourshard import engine_of, full_state_dict, shard_model
    from torch.distributed.device_mesh import init_device_mesh

    shape = (2, 2) if len(names) == 2 else (4,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = shard_model(toy(), {"stage": 3, "persist_below": 0}, mesh)
    optimizer = sgd(model.parameters())
    square_loss(model, numbers(0, 8).chunk(4)[dist.get_rank()]).backward()
    optimizer.step()
    engine = engine_of(model)
    assert engine is not None
    return engine.mesh.describe, full_state_dict(model)["last.weight"]


def test_a_device_mesh_of_the_callers_is_taken(ranks):
    wanted = reference(Task(optimizer=sgd, steps=1), 4).state["last.weight"]
    for names, words in ((("shard",), "4 ranks"), (("replicate", "shard"), "2 replicas x 2 shards")):
        for describe, weight in ranks(4)(on_a_device_mesh, names):
            assert describe == words
            assert torch.allclose(weight, wanted, atol=1e-6)


class Halt(Exception):
    """Raised by a hook in the middle of a pass."""


class CtrlC(KeyboardInterrupt):
    """What a notebook's stop button raises, after which the cell is run again."""


def train_after_exceptions(config: dict[str, Any], place: str, resets: bool) -> dict[str, torch.Tensor]:
    """Let a forward or a backward raise after a step, on every rank; go on training, after `reset` or without."""
    error = CtrlC if place == "interrupted forward" else Halt
    import ourshard

    model = ourshard.shard_model(toy(), config)
    optimizer = sgd(model.parameters())

    def raising(*_: Any) -> None:
        raise error

    for step in range(3):
        if step == 1:
            module = model.blocks[1]
            hook = module.up.register_full_backward_hook if place == "backward" else module.register_forward_hook
            handle = hook(raising)
            with pytest.raises(error):
                square_loss(model, numbers(9, 2)).backward()
            handle.remove()
            if resets:
                ourshard.reset(model)
        square_loss(model, numbers(step, 4).chunk(2)[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return ourshard.full_state_dict(model)


@pytest.mark.parametrize("resets", [True, False], ids=["reset", "no reset"])
@pytest.mark.parametrize("place", ["forward", "backward", "interrupted forward"])
def test_training_goes_on_after_an_exception_that_was_caught(ranks, place, resets):
    wanted = reference(Task(optimizer=sgd, steps=3), 2).state
    for name in ("stage 0", "stage 2", "stage 3"):
        for state in ranks(2)(train_after_exceptions, TOY[name], place, resets):
            for key, value in state.items():
                assert torch.allclose(value, wanted[key], atol=1e-6), (name, key)


def one_rank_goes_on() -> None:
    """Rank 1 catches an exception in the middle of a forward and begins the next, while rank 0 is still in it."""
    from ourshard import shard_model

    model = shard_model(toy(), TOY["stage 3"])
    square_loss(model, numbers(0, 2)).backward()
    if dist.get_rank() == 1:
        handle = model.blocks[1].register_forward_hook(raise_halt)
        with pytest.raises(Halt):
            model(numbers(1, 2))
        handle.remove()
    square_loss(model, numbers(2, 2)).backward()


def raise_halt(*_: Any) -> None:
    raise Halt


@pytest.mark.slow
def test_a_rank_that_goes_on_alone_after_an_exception_says_who_is_where(ranks):
    """Its gathers were once taken for those of the forward that it had left."""
    ended = ranks(2, fresh=True)(one_rank_goes_on)
    assert all(code != 0 for code in ended.exitcodes)
    assert "The ranks are in different places" in ended.stderr[1]
    assert "rank 1: forward of Toy (model 0) begins" in ended.stderr[1]
