"""What the engine does on the host in a step, counted: calls, allocations, and reads of the device's values.

One process plays rank 0 of two under torch's fake process group, so that nothing but the engine's own work is seen.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ourshard.config import ShardConfig
from ourshard.runtime.api import shard_model
from ourshard.runtime.mesh import Axis, Mesh
from ourshard.runtime.newcomers import Newcomers
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH = 24


@pytest.fixture(scope="module", autouse=True)
def absent_rank() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def make_model(
    stage: int, layers: int, before: Callable[[nn.Module], None] = lambda model: None, persist_below: int = 0
) -> nn.Module:
    """Return a sharded model; `before` sees it as it was."""
    model = nn.ModuleDict({"head": nn.Linear(WIDTH, WIDTH), "blocks": nn.Sequential(*(Block() for _ in range(layers)))})
    model.forward = lambda x: model["head"](model["blocks"](x))  # type: ignore[method-assign]
    wrap = {"modules": [f"blocks.{index}" for index in range(layers)]}
    config = ShardConfig.from_dict(
        {"stage": stage, "persist_below": persist_below, "wrap": wrap, "precision": {"param_dtype": "bfloat16"}}
    )
    world, alone = Axis("world", 2, 0, dist.group.WORLD), Axis("replicate", 1, 0, None)
    mesh = Mesh(Axis("shard", 2, 0, dist.group.WORLD), alone, world, None, torch.device("cpu"))
    before(model)
    return shard_model(model, config, mesh=mesh)


def make_step(stage: int, layers: int, persist_below: int = 0) -> Callable[[], None]:
    """Return a step of a model that has settled: orders are recorded, the optimizer has its state."""
    model = make_model(stage, layers, persist_below=persist_below)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(3, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return step


def calls_of(step: Callable[[], None]) -> int:
    """Return the calls that code of ourshard makes in a step, of Python and of C alike."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call") and "/ourshard/" in frame.f_code.co_filename

    gc.disable()  # what it would find is closed by code of ourshard, too
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


class Seen(TorchDispatchMode):
    """Counts operators, reads of values on the host, and fresh tensors by their number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.reads = 0
        self.fresh: Counter[int] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.operators += 1
        self.reads += operator is torch.ops.aten._local_scalar_dense.default
        if operator in (torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default):
            self.fresh[result.numel()] += 1
        return result


@pytest.mark.parametrize(("stage", "most"), [(1, 157), (2, 157), (3, 195)])
def test_the_calls_for_a_unit_and_step_are_bounded(stage: int, most: int):
    steps = [make_step(stage, layers) for layers in (3, 7)]  # both there: a step looks at all engines
    for step in steps:
        step()  # an optimizer adopts anew once another model is there
    few, many = map(calls_of, steps)
    assert (many - few) / 4 <= most


def test_a_layer_that_is_called_on_its_own_costs_no_more_in_a_model_of_more_layers():
    def call(layers: int) -> Callable[[], None]:
        block = make_model(3, layers)["blocks"][0]

        def step() -> None:
            block(torch.ones(3, WIDTH))

        step()
        return step

    few, many = map(calls_of, [call(layers) for layers in (3, 9)])
    assert few == many


def operators_of(step: Callable[[], None]) -> int:
    """Return the operators of torch, collectives included, that a step issues: on a GPU each may be a kernel."""
    with Seen() as seen:
        step()
    return seen.operators


def make_plain_step(layers: int) -> Callable[[], None]:
    """Return a step of the same layers without the engine."""
    model = nn.Sequential(*(Block() for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(torch.ones(3, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


# Stage 1: a view for the boundary; the gradients' place, copy, scatter, division and cast; the masters' cast and
# gather. At stage 3 these come twice. Gaps between gradients are zeroed once, in the buffer of all units of a backward.
@pytest.mark.parametrize(("stage", "most"), [(1, 10), (2, 10), (3, 12)])
def test_the_operators_for_a_unit_and_step_are_bounded(stage: int, most: int):
    few, many = operators_of(make_step(stage, 3)), operators_of(make_step(stage, 7))
    plain = operators_of(make_plain_step(7)) - operators_of(make_plain_step(3))
    assert (many - few - plain) / 4 <= most


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_value_is_read_on_the_host_in_a_step(stage: int):
    step = make_step(stage, 3)
    with Seen() as seen:
        step()
    assert seen.reads == 0


def test_a_step_makes_no_buffer_of_a_units_size_for_reductions_or_gathers():
    step = make_step(3, 3)
    whole = sum(p.numel() for p in Block().parameters())
    with Seen() as seen:
        step()
    assert sum(count for numel, count in seen.fresh.items() if whole <= numel < 2 * whole) == 0


def test_modules_that_are_registered_elsewhere_cost_a_step_no_search(monkeypatch: pytest.MonkeyPatch):
    step, looks = make_step(3, 2), []
    monkeypatch.setattr(Newcomers, "_names", lambda newcomers: looks.append(newcomers) or [])
    nn.ModuleList([nn.Linear(1, 1)])[:1]  # as forwards of transformers take their layers
    step()
    assert not looks


def test_a_parameter_that_comes_into_a_module_that_came_is_refused():
    model = make_model(3, 2)
    model["later"] = nn.Sequential()
    model(torch.ones(3, WIDTH))
    model["later"].append(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"later\.0\.weight.*came into the model after"):
        model(torch.ones(3, WIDTH))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradient_hooks_of_parameters_run_from_before_and_after_sharding_until_they_are_removed(stage: int):
    ran: list[str] = []
    handles = {}

    def hook(model: nn.Module, when: str, name: str = "blocks.1.up.weight") -> None:
        parameter = model.get_parameter(name)
        handles[when] = parameter.register_hook(lambda gradient: ran.append(when))
        handles[f"{when}, at the end"] = parameter.register_post_accumulate_grad_hook(
            lambda parameter: ran.append(f"{when}, at the end")
        )

    model = make_model(stage, 2, lambda model: hook(model, "before"))
    hook(model, "after")
    hook(model, "after alone", "blocks.0.up.weight")
    model(torch.ones(3, WIDTH)).sum().backward()
    assert sorted(ran) == sorted(handles)
    for handle in handles.values():
        handle.remove()
    model(torch.ones(3, WIDTH)).sum().backward()
    assert len(ran) == len(handles)
