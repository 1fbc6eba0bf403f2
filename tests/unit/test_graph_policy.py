"""Which forwards become CUDA graphs and which stay eager: all that can be told without a GPU.

One process plays rank 0 of two, as in test_host_work.py. Nothing is captured here: the way that a rank would take is
asked before each forward, which then runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ourshard.config import ShardConfig
from ourshard.runtime.api import engine_of, shard_model
from ourshard.runtime.engine import Engine
from ourshard.runtime.graph_policy import MOST, WARMUP, Call, Policy, Way, number_of, take_apart
from ourshard.runtime.graphs import GraphedForward
from ourshard.runtime.mesh import Axis, Mesh
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.integrations.tiny import FEATURES, tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def absent_rank() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Training:
    """A sharded model whose forwards would be captured, and what would happen next."""

    def __init__(self, stage: int = 3) -> None:
        self.model = tiny()
        world, alone = Axis("world", 2, 0, dist.group.WORLD), Axis("replicate", 1, 0, None)
        mesh = Mesh(Axis("shard", 2, 0, dist.group.WORLD), alone, world, None, CPU)
        shard_model(self.model, ShardConfig.from_dict({"stage": stage}), mesh=mesh)
        engine = engine_of(self.model)
        assert engine is not None
        self.engine: Engine = engine
        self.graphs = GraphedForward(engine, self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.way()

    def way(self, rows: int = 4) -> tuple[Way, str]:
        return self.graphs.way(take_apart((torch.ones(rows, FEATURES),), {}, CPU))

    def backward(self, rows: int = 4) -> None:
        """Run an eager forward, as when a capture is not due, and its backward."""
        args = (torch.ones(rows, FEATURES),)
        self.graphs._counted(take_apart(args, {}, CPU), args, {}).sum().backward()

    def step(self, rows: int = 4) -> None:
        self.backward(rows)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def warmed(self) -> Training:
        for _ in range(WARMUP):
            self.step()
        return self


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_forward_is_captured_after_as_many_eager_steps_of_its_shape(stage: int) -> None:
    training = Training(stage)
    for _ in range(WARMUP):
        assert training.way() == (Way.EAGER, "")
        training.step()
    assert training.way() == (Way.CAPTURE, "")
    assert training.way(rows=2) == (Way.EAGER, "")


def test_forwards_without_a_backward_are_not_captured() -> None:
    training = Training()
    for _ in range(WARMUP):
        args = (torch.ones(4, FEATURES),)
        training.graphs._counted(take_apart(args, {}, CPU), args, {})
    assert training.way() == (Way.EAGER, "no backward followed the forwards before")


def no_sync(training: Training) -> None:
    training.engine.require_sync = False


def accumulate(training: Training) -> None:
    training.backward()


def keep_zeros(training: Training) -> None:
    training.backward()
    training.optimizer.zero_grad(set_to_none=False)


def write(training: Training) -> None:
    with torch.no_grad():
        training.model.head.bias.copy_(torch.ones(5))


def hook_module(training: Training) -> None:
    training.model.head.register_forward_hook(lambda *_: None)


def hook_parameter(training: Training) -> None:
    training.model.blocks[1].linear.weight.register_hook(lambda gradient: gradient)


def differ(training: Training) -> None:
    training.engine.used_alike = False


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (no_sync, "no_sync"),
        (accumulate, "gradients of an earlier backward"),
        (keep_zeros, "zeros in place of None"),
        (hook_module, "head has a hook"),
        (hook_parameter, "blocks.1.linear.weight has a hook"),
        (differ, "not all ranks use the same parameters"),
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_forward_stays_eager_where_a_graph_would_do_something_else(
    change: Callable[[Training], None], why: str, stage: int
) -> None:
    training = Training(stage).warmed()
    change(training)
    way, said = training.way()
    assert way is Way.EAGER
    assert why in said


def test_hooks_on_the_root_run_outside_and_are_allowed() -> None:
    training = Training().warmed()
    training.model.register_forward_hook(lambda *_: None)
    assert training.way() == (Way.CAPTURE, "")


def freeze(training: Training) -> None:
    training.model.blocks[0].linear.weight.requires_grad_(False)


def evaluate(training: Training) -> None:
    training.model.blocks[0].eval()


def replace_buffer(training: Training) -> None:
    training.model.register_buffer("scale", torch.ones(1))


@pytest.mark.parametrize("change", [freeze, evaluate, replace_buffer])
def test_captures_are_dropped_when_what_they_rest_on_changes(change: Callable[[Training], None]) -> None:
    training = Training().warmed()
    training.way()
    change(training)
    assert training.way() == (Way.EAGER, "")


def test_gradients_taken_from_a_graph_are_shown_as_those_of_a_backward() -> None:
    """What a replay leaves on the host is what the backward left that was captured."""
    from ourshard.runtime.graph_state import AfterBackward

    for stage in (0, 1, 2, 3):
        training = Training(stage).warmed()
        training.backward()
        expected = [p.grad.clone() for group in training.optimizer.param_groups for p in group["params"]]
        after = AfterBackward(training.engine)
        training.engine.drop_gradients()
        assert all(p.grad is None for group in training.optimizer.param_groups for p in group["params"])
        after.restore()
        found = [p.grad for group in training.optimizer.param_groups for p in group["params"]]
        # What an absent rank leaves in a gather may be no number.
        assert all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in zip(found, expected, strict=True))
        training.optimizer.step()
        training.optimizer.zero_grad()
        assert training.way() == (Way.CAPTURE, "")


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"x": torch.ones(1, requires_grad=True)}, "needs a gradient"),
        ({"x": torch.ones(1, device="meta")}, "is on meta"),
        ({"x": [object()]}, "is a object, neither a tensor nor a plain value"),
    ],
)
def test_inputs_that_a_graph_cant_have_are_named(kwargs: dict[str, Any], why: str) -> None:
    said = take_apart((), kwargs, CPU)
    assert isinstance(said, str)
    assert why in said


def key(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    inputs = take_apart(args, kwargs, CPU)
    assert isinstance(inputs, Call)
    return inputs.key


def test_a_key_is_shapes_dtypes_plain_values_and_their_places_and_not_the_values_of_tensors() -> None:
    same = key(torch.ones(2, 3), scale=1.0)
    assert same == key(torch.zeros(2, 3), scale=1.0)
    assert number_of(same) == number_of(key(torch.zeros(2, 3), scale=1.0))
    others = [
        key(torch.ones(3, 2), scale=1.0),
        key(torch.ones(2, 3, dtype=torch.int64), scale=1.0),
        key(torch.ones(2, 3), scale=2.0),
        key(torch.ones(2, 3), scale=1),
        key(torch.ones(2, 3), other=1.0),
        key([torch.ones(2, 3)], scale=1.0),
    ]
    assert same not in others
    assert len({number_of(other) for other in [same, *others]}) == 7


def test_a_key_tells_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        inside = key(torch.ones(2))
    assert inside != key(torch.ones(2))


def test_only_so_many_keys_are_captured_and_refused_ones_stay_eager() -> None:
    policy: Policy[int] = Policy()
    keys = [key(torch.ones(n)) for n in range(1, MOST + 3)]
    for each in keys:
        for _ in range(WARMUP):
            policy.count(each)
    policy.refuse(keys[0], "it reads a value")
    assert policy.way(keys[0]) == (Way.EAGER, "it reads a value")
    for number, each in enumerate(keys[1 : MOST + 1]):
        assert policy.way(each) == (Way.CAPTURE, "")
        policy.keep(each, number)
        assert policy.way(each) == (Way.REPLAY, "")
    assert policy.way(keys[-1])[0] is Way.EAGER


def test_the_forward_of_a_model_keeps_its_signature() -> None:
    import inspect

    training = Training()
    before = inspect.signature(training.model.forward)
    training.graphs.attach()
    assert inspect.signature(training.model.forward) == before
    assert isinstance(training.model, nn.Module)


@pytest.mark.parametrize(
    "other",
    [
        {"offload": {"optimizer": "cpu"}},
        {"communication": {"gradients": "int8"}},
        {"communication": {"two_hop_gathers": True, "node_size": 2}},
        {"secondary_shard_size": 2},
        {"shard_optimizer_over": "all"},
        {"activation_checkpointing": True},
    ],
)
def test_what_follows_the_host_step_by_step_is_refused_with_graphs(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"cuda_graph can't be combined with {next(iter(other))}"):
        ShardConfig.from_dict({"cuda_graph": True, **other})
