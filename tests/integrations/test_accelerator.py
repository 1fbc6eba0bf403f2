"""The sharded `Accelerator` against plain torch, and what it refuses."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader

from tests.integrations.tiny import adamw, halving, loader, plain_training, rows, tiny

pytestmark = pytest.mark.ranks


def train(
    config: dict[str, Any], steps: int, accumulate: int = 1, order: str = "together", **options: Any
) -> dict[str, Any]:
    """Train as a user does; `order` says how things reach `prepare`."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin(config), gradient_accumulation_steps=accumulate, **options)
    model, data = tiny(), loader()
    optimizer = adamw(model)
    scheduler = halving(optimizer)
    identities = [id(group) for group in optimizer.param_groups]
    if order == "together":
        model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    elif order == "optimizer first":
        optimizer = accelerator.prepare(optimizer)
        data, scheduler, model = accelerator.prepare(data, scheduler, model)
    elif order == "one by one, the optimizer made late":
        model = accelerator.prepare(model)
        optimizer = adamw(model)
        identities = [id(group) for group in optimizer.param_groups]
        optimizer = accelerator.prepare(optimizer)
        scheduler = accelerator.prepare(halving(optimizer))
        data = accelerator.prepare(DataLoader(rows(), batch_sampler=BatchSampler(range(len(rows())), 4, False)))
    losses, norms = [], []
    for batch, (inputs, labels) in enumerate(data):
        if batch == steps * accumulate:
            break
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    kept = identities == [id(group) for group in optimizer.param_groups]
    return {"losses": losses, "norms": norms, "state": state, "groups kept": kept, "type": type(accelerator).__name__}


def assert_same(results: list[dict[str, Any]], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=tolerance)
        assert result["norms"] == pytest.approx(expected["norms"], abs=tolerance)
        assert list(result["state"]) == list(expected["state"])
        for name, value in expected["state"].items():
            torch.testing.assert_close(result["state"][name], value, atol=tolerance, rtol=0, msg=name)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loop_trains_as_in_one_process(ranks, stage, accumulate):
    results = ranks(2)(train, {"stage": stage}, 3, accumulate)
    assert_same(results, plain_training(2, 3, accumulate))
    assert {result["type"] for result in results} == {"ShardAccelerator"}


@pytest.mark.parametrize("order", ["together", "optimizer first", "one by one, the optimizer made late"])
def test_the_order_of_prepare_does_not_matter_and_groups_stay_the_users_own(ranks, order):
    """H03: no loader and no batch size is needed."""
    results = ranks(2)(train, {"stage": 3, "persist_below": 0}, 3, order=order)
    assert_same(results, plain_training(2, 3))
    assert all(result["groups kept"] for result in results)


def test_one_process_trains_as_in_one_process(ranks):
    assert_same(ranks(1)(train, {"stage": 3}, 3), plain_training(1, 3))


def test_bf16_computes_in_bf16_and_keeps_masters(ranks):
    results = ranks(2)(train, {"stage": 3}, 3, mixed_precision="bf16")
    assert_same(results, plain_training(2, 3), tolerance=0.03)
    assert {value.dtype for value in results[0]["state"].values()} == {torch.float32}


# ---- which class is handed out ------------------------------------------------------------------------------


def handed_out() -> dict[str, Any]:
    import os

    import accelerate
    import ourshard
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def name(**arguments: Any) -> str:
        AcceleratorState._reset_state(True)
        made = accelerate.Accelerator(**arguments)
        return f"{type(made).__name__} {getattr(made, 'is_ourshard', False)} {isinstance(made, Accelerator)}"

    class Mine(Accelerator):
        def __init__(self, extra: int, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.extra = extra

    found = {"plain": name(), "none": name(ourshard_plugin=None)}
    plugin = ourshard.ShardPlugin(ourshard.ShardConfig(stage=1))
    found["argument"] = name(ourshard_plugin=plugin)
    found["handler"] = name(kwargs_handlers=[accelerate.utils.GradScalerKwargs(), plugin])
    AcceleratorState._reset_state(True)
    mine = Mine(7, ourshard_plugin=plugin)
    found["subclass"] = f"{type(mine).__name__} {mine.extra} {mine.is_ourshard} {isinstance(mine, Mine)}"
    ourshard.enable({"stage": 2})
    found["enabled"] = name()
    found["enabled stage"] = accelerate.Accelerator().ourshard_plugin.config.stage
    ourshard.disable()
    found["disabled"] = name()
    os.environ["ACCELERATE_USE_OURSHARD"] = "true"
    os.environ["OURSHARD_CONFIG"] = '{"stage": 1}'
    found["environment"] = name()
    found["environment stage"] = accelerate.Accelerator().state.ourshard_plugin.config.stage
    return found


def test_each_way_of_asking_hands_out_the_sharded_class(ranks):
    ours = "ShardAccelerator True True"
    assert ranks(1)(handed_out)[0] == {
        "plain": "Accelerator False True",
        "none": "Accelerator False True",
        "argument": ours,
        "handler": ours,
        "subclass": "ShardMine 7 True True",
        "enabled": ours,
        "enabled stage": 2,
        "disabled": "Accelerator False True",
        "environment": ours,
        "environment stage": 1,
    }


def pickled() -> bool:
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 2}))
    again = pickle.loads(pickle.dumps(accelerator))
    return type(again) is type(accelerator) and again.state.__dict__ == accelerator.state.__dict__


def test_the_class_without_a_name_of_its_own_can_be_pickled(ranks):
    assert ranks(2)(pickled) == [True, True]


def test_the_signature_stays_readable():
    import ourshard  # noqa: F401
    from accelerate import Accelerator

    parameters = inspect.signature(Accelerator).parameters
    assert {"mixed_precision", "cpu", "ourshard_plugin"} <= set(parameters)


# ---- models -------------------------------------------------------------------------------------------------


def prepared_again(change: bool) -> Any:
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 3}))
    model = accelerator.prepare(tiny())
    if change:
        accelerator.ourshard_plugin.for_model(model, stage=1)
    accelerator.free_memory()
    again = accelerator.prepare(model)
    return again is model and accelerator._models == [model]


def test_preparing_a_model_again_changes_nothing(ranks):
    assert ranks(2)(prepared_again, False) == [True, True]


def test_preparing_a_model_again_with_another_config_is_refused(ranks):
    with pytest.raises(AssertionError, match=r"Tiny is sharded already.*stage 3 -> 1") as caught:
        ranks(2)(prepared_again, True)
    assert [failure.type_name for failure in caught.value.failures] == ["ValueError", "ValueError"]


def two_models() -> dict[str, Any]:
    """A generator and a judge in one Accelerator, of different stages, trained in turn."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin, engine_of

    plugin = ShardPlugin({"stage": 3})
    accelerator = Accelerator(ourshard_plugin=plugin)
    first, second = tiny(0), torch.nn.Sequential(torch.nn.Linear(5, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    plugin.for_model(second, stage=1)
    one, two = torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)
    first, second, one, two, data = accelerator.prepare(first, second, one, two, loader())
    for inputs, _ in data:
        accelerator.backward(second(first(inputs)).square().mean())
        accelerator.clip_grad_norm_(first.parameters(), 0.5)
        one.step()
        one.zero_grad()
        two.zero_grad()
        accelerator.backward(second(first(inputs).detach()).sub(1).square().mean())
        two.step()
        two.zero_grad()
    stages = [engine_of(model).config.stage for model in (first, second)]
    return {"stages": stages, "state": [accelerator.get_state_dict(model) for model in (first, second)]}


def two_models_in_one_process() -> list[dict[str, torch.Tensor]]:
    first = tiny(0)
    second = torch.nn.Sequential(torch.nn.Linear(5, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    one, two = torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)
    for inputs, _ in loader(8):
        second(first(inputs)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(first.parameters(), 0.5)
        one.step()
        one.zero_grad()
        two.zero_grad()
        second(first(inputs).detach()).sub(1).square().mean().backward()
        two.step()
        two.zero_grad()
    return [dict(model.state_dict()) for model in (first, second)]


def test_two_models_of_different_stages_train_in_one_accelerator(ranks):
    results = ranks(2)(two_models)
    expected = two_models_in_one_process()
    for result in results:
        assert result["stages"] == [3, 1]
        for mine, plain in zip(result["state"], expected, strict=True):
            for name, value in plain.items():
                torch.testing.assert_close(mine[name], value, atol=1e-5, rtol=0)


def shrinking_batches() -> tuple[list[int], bool]:
    """accelerate's search for a batch size that fits: the first try fails in the middle of a forward."""
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 3}))
    model, tried = tiny(), []
    optimizer = adamw(model)
    prepared = [model, optimizer]

    @find_executable_batch_size(starting_batch_size=8)
    def attempt(batch_size: int) -> bool:
        accelerator.free_memory()
        tried.append(batch_size)
        prepared[:] = accelerator.prepare(*prepared)
        model, optimizer = prepared
        failing = batch_size == 8

        def fail(*_: Any) -> None:
            if failing:
                raise RuntimeError("CUDA out of memory.")

        handle = model.blocks[1].register_forward_pre_hook(fail)
        try:
            accelerator.backward(model(torch.ones(batch_size, 31)).sum())
        finally:
            handle.remove()
        optimizer.step()
        return all(value.isfinite().all() for value in accelerator.get_state_dict(model).values())

    return tried, attempt()


def test_a_batch_size_that_fails_can_be_followed_by_one_that_fits(ranks):
    results = ranks(2)(shrinking_batches)
    assert [result[1] for result in results] == [True, True]
    assert results[0][0][0] == 8
    assert len(results[0][0]) == 2


# ---- fp16 ---------------------------------------------------------------------------------------------------


def overflowing() -> list[Any]:
    """Make one gradient element infinite on one rank only; tell what each rank's scaler does."""
    from accelerate import Accelerator
    from accelerate.utils import GradScalerKwargs
    from ourshard import ShardPlugin

    handlers = [GradScalerKwargs(init_scale=1024.0, growth_interval=1000)]
    accelerator = Accelerator(
        ourshard_plugin=ShardPlugin({"stage": 3}), mixed_precision="fp16", kwargs_handlers=handlers
    )
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    told = []
    for bad in (False, True, False):
        inputs = torch.ones(4, 31) * (1e4 if bad and accelerator.process_index == 1 else 0.1)
        loss = model(inputs).float().square().sum() * (1e30 if bad and accelerator.process_index == 1 else 1.0)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told.append((accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale()))
    return told


def test_ranks_agree_that_fp16_overflowed(ranks):
    told = ranks(2)(overflowing)
    assert told[0] == told[1] == [(False, 1024.0), (True, 512.0), (False, 512.0)]


# ---- other engines' arguments ---------------------------------------------------------------------------------


def taken_over() -> dict[str, Any]:
    import os

    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    os.environ["ACCELERATE_USE_OURSHARD"] = "true"
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False, cpu_offload=False)
    accelerator = Accelerator(fsdp_plugin=fsdp)
    return {
        "config": accelerator.ourshard_plugin.config.to_dict(),
        "type": accelerator.distributed_type.value,
        "fsdp": os.environ.get("ACCELERATE_USE_FSDP"),
    }


def test_an_fsdp_plugin_is_read_and_fsdp_stays_off(ranks):
    told = ranks(2)(taken_over)[0]
    assert (told["config"]["stage"], told["config"]["reshard_after_forward"]) == (3, False)
    assert (told["type"], told["fsdp"]) == ("MULTI_CPU", None)


def refused(what: str) -> None:
    import os

    from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils.dataclasses import DDPCommunicationHookType
    from ourshard import ShardPlugin

    plugin = ShardPlugin({"stage": 3})
    if what == "two plugins":
        Accelerator(ourshard_plugin=plugin, kwargs_handlers=[plugin])
    elif what == "fsdp too":
        Accelerator(ourshard_plugin=plugin, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    elif what == "environment":
        os.environ["OURSHARD_CONFIG"] = '{"stage": 1}'
        Accelerator(ourshard_plugin=plugin)
    elif what == "comm hook":
        Accelerator(
            ourshard_plugin=plugin,
            kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)],
        )
    elif what == "alone":
        os.environ.pop("ACCELERATE_USE_CPU", None)
        PartialState()
        Accelerator(ourshard_plugin=plugin)
    elif what == "shared blocks":
        actor, critic = tiny(), tiny()
        critic.blocks = actor.blocks
        Accelerator(ourshard_plugin=plugin).prepare(actor, critic)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("two plugins", "2 ShardPlugins are given"),
        ("fsdp too", "ourshard_plugin and fsdp_plugin are both given"),
        ("environment", "stage: the ShardPlugin gives 3, but OURSHARD_CONFIG gives 1"),
        ("comm hook", "comm_hook belongs to DDP"),
        ("alone", "each would train alone"),
        ("shared blocks", "belong to a model that is sharded already"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(ranks, what, message):
    with pytest.raises(AssertionError, match=message) as caught:
        ranks(2)(refused, what)
    assert [failure.type_name for failure in caught.value.failures] == ["ValueError", "ValueError"]


def strange_optimizer() -> None:
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 3}))
    model, temperature = tiny(), torch.nn.Linear(5, 5)
    optimizer = torch.optim.SGD([*model.parameters(), *temperature.parameters()], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(temperature(model(torch.ones(2, 31))).sum())
    optimizer.step()


def test_an_optimizer_with_parameters_of_a_model_that_was_not_prepared_is_refused_before_it_steps(ranks):
    with pytest.raises(
        AssertionError, match=r"no model that was prepared: \(5, 5\) in group 0, \(5,\) in group 0"
    ) as caught:
        ranks(2)(strange_optimizer)
    assert [failure.type_name for failure in caught.value.failures] == ["ValueError", "ValueError"]


def clipping_by_plugin(largest: float | None) -> dict[str, torch.Tensor]:
    """Train without a word about clipping; a DeepSpeed config's `gradient_clipping` ends in the plugin."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 2}, gradient_clipping=largest))
    model = tiny()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 31)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize("largest", [None, 0.25])
def test_a_deepspeed_config_clips_each_step(ranks, largest):
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 31)).square().sum().backward()
        if largest:
            torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
        optimizer.step()
        optimizer.zero_grad()
    for state in ranks(2)(clipping_by_plugin, largest):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-6, rtol=0)


def test_a_compiled_model_trains_as_in_one_process_and_keeps_its_names(ranks):
    assert_same(ranks(2)(train, {"stage": 3}, 3, dynamo_backend="eager"), plain_training(2, 3))


def sizes(replicate: int, shard: int) -> tuple[int, Any]:
    from accelerate import Accelerator
    from accelerate.utils import ParallelismConfig
    from ourshard import ShardPlugin, engine_of

    accelerator = Accelerator(
        ourshard_plugin=ShardPlugin({"stage": 3}),
        parallelism_config=ParallelismConfig(dp_replicate_size=replicate, dp_shard_size=shard),
    )
    engine = engine_of(accelerator.prepare(tiny()))
    return engine.config.stage, engine.mesh.shard.size


@pytest.mark.parametrize(("replicate", "shard", "expected"), [(1, 2, (3, 2)), (2, 1, (0, 2))])
def test_the_sizes_of_a_parallelism_config_are_taken_over(ranks, replicate, shard, expected):
    assert ranks(2)(sizes, replicate, shard) == [expected] * 2


def evaluated() -> list[float]:
    """Evaluate before training, as the Trainer does: the model that was prepared to evaluate trains afterwards."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 3}))
    model = accelerator.prepare_model(tiny(), evaluation_mode=True)
    with torch.no_grad():
        before = model(torch.ones(2, 31)).sum().item()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 31) * (1 + accelerator.process_index)).sum())
    optimizer.step()
    return [before, model(torch.ones(2, 31)).sum().item()]


def test_a_model_prepared_to_evaluate_trains_in_step_afterwards(ranks):
    model = tiny()
    before = model(torch.ones(2, 31)).sum().item()
    (sum(model(torch.ones(2, 31) * scale).sum() for scale in (1, 2)) / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected = [before, model(torch.ones(2, 31)).sum().item()]
    for told in ranks(2)(evaluated):
        assert told == pytest.approx(expected, abs=1e-5)
