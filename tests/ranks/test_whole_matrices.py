"""Optimizers that need whole matrices give the single-process answer on sharded masters (X08, I08)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.ranks.nets import numbers, square_loss, toy
from tests.ranks.pairs import Pair, joined, pair
from tests.ranks.training import TOY

pytestmark = pytest.mark.ranks

WORLDS = pytest.mark.parametrize("world", [2, 4])
OFTEN_TWO = pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
DIVIDED = {"shard_size": 2, "shard_optimizer_over": "all"}
EVERY = pytest.mark.parametrize("config", TOY.values(), ids=TOY.keys())


class Layered(torch.optim.Optimizer):
    """Momentum scaled by the norms of weight and update of each parameter, as LAMB scales."""

    elementwise = False

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["sum"] = state.get("sum", torch.zeros_like(p)) * 0.9 + p.grad
                    trust = (p.norm() + 1e-3) / (state["sum"].norm() + 1e-3)
                    p.sub_(state["sum"] * trust * group["lr"])


class Global(Layered):
    """Scales by the norm of all gradients: needs all parameters at once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.sub_(p.grad / norm * 0.02)


def adafactor(relative: bool) -> Callable[[Any], torch.optim.Optimizer]:
    from transformers.optimization import Adafactor

    if relative:
        return lambda ps: Adafactor(ps, relative_step=True, scale_parameter=True, warmup_init=False, lr=None)
    return lambda ps: Adafactor(ps, lr=1e-2, relative_step=False, scale_parameter=True, beta1=0.9)


def maker(kind: str) -> Callable[[Any], torch.optim.Optimizer]:
    if kind.startswith("transformers"):
        return adafactor(kind.endswith("relative"))
    if kind == "Adafactor":
        return lambda ps: torch.optim.Adafactor(ps, lr=1e-2)
    return Layered


KINDS = ["Adafactor", "transformers", "transformers relative", "Layered"]


def each_kind(config: dict[str, Any]) -> None:
    for kind in KINDS:
        both = pair(config, toy, maker(kind))
        both.train(4)
        try:
            both.assert_same(5e-6)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from error


@OFTEN_TWO
@EVERY
def test_optimizers_of_whole_matrices_give_the_answer_of_one_process(ranks, world, config):
    ranks(world)(each_kind, config)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"shard_size": 2}, marks=pytest.mark.slow),
        DIVIDED,
        {"offload": {"optimizer": "cpu"}},
        {"accumulate": "deferred"},
    ],
    ids=str,
)
def test_replicas_hosts_and_deferred_reductions_change_nothing(ranks, more):
    ranks(4)(each_kind, {"stage": 3, "persist_below": 0, **more})


def from_disk(folder: str, kinds: list[str]) -> None:
    """Step from a disk, where parameters rest there, too; a save and whole values are as on the device."""
    from ourshard import full_state_dict

    for kind in kinds:
        offload = {"optimizer": "nvme", "params": "nvme", "nvme_path": folder}
        here, there = [
            pair({"stage": 3, "persist_below": 0, **more}, toy, maker(kind)) for more in ({}, {"offload": offload})
        ]
        for both in (here, there):
            both.train(3)
        wanted, found = full_state_dict(here.sharded), full_state_dict(there.sharded)
        assert all(torch.equal(value, found[name]) for name, value in wanted.items()), kind
        states = [both.optimizer.state_dict()["state"] for both in (here, there)]
        assert str(states[0]) == str(states[1]), kind


def test_they_step_from_a_disk_with_the_same_bits(ranks, tmp_path):
    ranks(2)(from_disk, str(tmp_path), ["Adafactor", "transformers"])


@WORLDS
@pytest.mark.slow
def test_they_do_over_more_ranks_and_in_other_kinds_too(ranks, tmp_path, world):
    ranks(world)(from_disk, str(tmp_path), [kind for kind in KINDS if kind != "Layered"])


class Both:
    """Muon for matrices and AdamW for the rest, as one."""

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self.muon = torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.02)
        self.adamw = torch.optim.AdamW([p for p in parameters if p.dim() != 2], lr=1e-3, eps=1e-4)

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)


def muon_and_adamw(config: dict[str, Any]) -> None:
    from ourshard import shard_model

    plain, sharded = toy(), shard_model(toy(), config)
    both = Pair(plain, sharded, Both(plain), Both(sharded))  # type: ignore[arg-type]
    # Muon orthogonalizes in bf16, which makes 1e-2 of one rounding in its input, and 1e-1 with some CPUs' products.
    with mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.float().clone()):
        both.train(3)
    both.assert_same(1e-5)


@OFTEN_TWO
@EVERY
def test_muon_for_matrices_beside_adamw_for_the_rest(ranks, world, config):
    ranks(world)(muon_and_adamw, config)


def owned(kind: str) -> tuple[list[int], int, dict[str, int], dict[str, int]]:
    """Return the bytes each rank owns, the largest parameter, and the bytes sent in a step: counted, and by formula."""
    both = pair({"stage": 2, "persist_below": 0, "ledger": True}, toy, maker(kind))
    both.train(1)
    engine = both.engine
    rank, size = engine.mesh.shard.rank, engine.mesh.shard.size
    loads, largest, there, back = [0] * size, 0, 0, 0
    for lane in engine.lanes():
        for run in lane.runs:
            (position,) = run.positions
            tensor = lane.layout.tensors[position]
            nbytes = tensor.numel * lane.store_dtype.itemsize
            loads[run.owner] += nbytes
            largest = max(largest, nbytes)
            mine = lane.rows(position).numel(tensor.granule) * lane.store_dtype.itemsize
            there += 2 * mine * (run.owner != rank)
            back += (nbytes - mine) * (run.owner == rank)
    both.zero_grad()
    both.backward(joined(1))
    engine.ledger.reset()
    both.step()
    return loads, largest, dict(engine.ledger.wire), {"exchange/shard": there + back}


@WORLDS
def test_owners_are_balanced_and_the_bytes_exchanged_are_as_the_formula_says(ranks, world):
    told = ranks(world)(owned, "Adafactor")
    for loads, largest, _, _ in told:
        assert loads == told[0][0]
        assert max(loads) - min(loads) <= largest
    for _, _, counted, wanted in told:
        moved = {name: nbytes for name, nbytes in counted.items() if name.startswith("exchange")}
        assert moved == wanted
        assert wanted["exchange/shard"] > 0


def held_whole(kind: str) -> tuple[int, list[int]]:
    """Return the bytes of whole parameters that a rank holds at most during a step, and those it owns of each lane."""
    both = pair({"stage": 3, "persist_below": 0, "ledger": True}, toy, maker(kind))
    both.train(1)
    both.zero_grad()
    both.backward(joined(1))
    ledger, rank = both.engine.ledger, both.engine.mesh.shard.rank
    ledger.reset()
    both.optimizer.step()
    owned = []
    for lane in both.engine.lanes():
        mine = [lane.layout.tensors[run.positions[0]].numel for run in lane.runs if run.owner == rank]
        owned.append(sum(mine) * lane.store_dtype.itemsize)
    return ledger.peak["master"] - ledger.held["master"], owned


@pytest.mark.parametrize(("kind", "at_once"), [("Adafactor", 1), ("transformers", 1), ("Layered", None)])
def test_known_optimizers_have_one_lane_open_at_a_time_and_others_all(ranks, kind, at_once):
    for peak, owned in ranks(2)(held_whole, kind):
        assert sum(bool(nbytes) for nbytes in owned) > 2
        assert peak == (max(owned) if at_once else sum(owned))


def order_of_a_step(kind: str) -> tuple[list[str], int]:
    """Return what a step does (exchanges begun, waited for, and parameters updated between them), and its lanes."""
    import torch.distributed as dist
    from ourshard.runtime.collectives import Arrival

    both = pair({"stage": 3, "persist_below": 0}, toy, maker(kind))
    both.train(1)
    both.zero_grad()
    both.backward(joined(1))
    seen: list[str] = []
    begin, wait = dist.all_to_all_single, Arrival.wait
    update = torch.optim._adafactor._single_tensor_adafactor

    def noted(text: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if text != "step" or args[0]:
                seen.append(text)
            return call(*args, **kwargs)

        return run

    try:
        dist.all_to_all_single = noted("begin", begin)
        Arrival.wait = noted("wait", wait)  # type: ignore[method-assign]
        torch.optim._adafactor._single_tensor_adafactor = noted("step", update)
        both.optimizer.step()
    finally:
        dist.all_to_all_single, Arrival.wait = begin, wait  # type: ignore[method-assign]
        torch.optim._adafactor._single_tensor_adafactor = update
    return seen, sum(bool(lane.runs) for lane in both.engine.lanes())


def test_the_next_lane_is_on_its_way_while_one_is_stepped(ranks):
    for seen, lanes in ranks(2)(order_of_a_step, "Adafactor"):
        assert lanes > 3
        wanted = ["begin"]
        for number in range(lanes):
            after, before = number + 1 < lanes, number > 0
            wanted += ["begin"] * after + ["wait", "begin"] + ["wait"] * before  # comes, is there, goes, is back
        assert [what for what in seen if what != "step"] == [*wanted, "wait"]
        steps = [place for place, what in enumerate(seen) if what == "step"]
        assert len(steps) > 1
        assert all((seen[place - 1], seen[place + 1]) == ("wait", "begin") for place in steps)


def clipped_and_partly_used(config: dict[str, Any]) -> None:
    """Clip, keep gradients over a step, drop some, and set a rate from outside."""
    from ourshard import clip_grad_norm_

    both = pair(config, toy, maker("Adafactor"))
    for number in range(3):
        both.zero_grad()
        both.backward(joined(number))
        wanted = nn.utils.clip_grad_norm_(both.plain.parameters(), 0.1)
        torch.testing.assert_close(clip_grad_norm_(both.sharded, 0.1), wanted, atol=1e-6, rtol=1e-5)
        for model in (both.plain, both.sharded):
            if number == 1:
                next(model.parameters()).grad = None
        for optimizer in (both.plain_optimizer, both.optimizer):
            optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
        both.step()
        both.assert_same_gradients(1e-5)
    both.step()  # the same gradients again
    both.assert_same(5e-6)


@EVERY
def test_clipping_dropped_gradients_and_rates_act_as_in_one_process(ranks, config):
    ranks(2)(clipped_and_partly_used, config)


def stepped_before(config: dict[str, Any]) -> None:
    from ourshard import shard_model

    for kind in ("Adafactor", "Layered"):
        plain, model = toy(), toy()
        wanted, optimizer = maker(kind)(plain.parameters()), maker(kind)(model.parameters())
        for each, steps in ((plain, wanted), (model, optimizer)):
            square_loss(each, joined(50)).backward()
            steps.step()
            steps.zero_grad()
        both = Pair(plain, shard_model(model, config), wanted, optimizer)
        both.train(3)
        both.assert_same(5e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_state_that_is_older_than_sharding_goes_to_the_owners(ranks, stage):
    ranks(2)(stepped_before, {"stage": stage, "persist_below": 0})


def after_a_failed_step(config: dict[str, Any]) -> None:
    both = pair(config, toy, maker("Layered"))
    both.train(1)
    both.zero_grad()
    both.backward(joined(1))
    both.optimizer.param_groups[0]["lr"] = None
    with pytest.raises(TypeError):
        both.optimizer.step()
    both.optimizer.param_groups[0]["lr"] = 0.02
    both.optimizer.zero_grad()
    both.plain_optimizer.zero_grad()
    both.train(2, first=2)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_that_raised_leaves_the_optimizer_usable(ranks, stage):
    ranks(2)(after_a_failed_step, {"stage": stage, "persist_below": 0})


def refused(kind: str) -> str:
    both = pair({"stage": 2, "persist_below": 0}, toy, Global if kind == "Global" else maker("Layered"))
    try:
        both.backward(joined(0))
        both.optimizer.step(lambda: None) if kind == "closure" else both.optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


def test_what_needs_all_parameters_at_once_is_refused(ranks):
    assert all("steps a parameter by what others have" in told for told in ranks(2)(refused, "Global"))
    assert all("step(closure)" in told for told in ranks(2)(refused, "closure"))


def save_or_load(config: dict[str, Any], folder: str, first: int) -> None:
    """Load a sharded checkpoint, if there is one, train two steps and save; one process never stops."""
    from ourshard.checkpoint import running
    from ourshard.checkpoint.background import wait_for_save

    for kind in ("Adafactor", "transformers"):
        both, path = pair(config, toy, maker(kind)), Path(folder) / kind
        _train(both, 0, first)
        if first:
            both = Pair(both.plain, *_fresh(config, kind, both.plain_optimizer))
            running.load(both.sharded, both.optimizer, path)
            both.assert_same(1e-5)
        _train(both, first, first + 2)
        both.assert_same(1e-5)
        running.save(both.sharded, both.optimizer, path, replace=True)
        wait_for_save()


def _train(both: Pair, start: int, stop: int) -> None:
    """Step on batches of eight rows, whatever the world."""
    for number in range(start, stop):
        both.zero_grad()
        both.backward(numbers(number, 8))
        both.step()


def _fresh(config: dict[str, Any], kind: str, plain: torch.optim.Optimizer) -> tuple[Any, Any, Any]:
    """Return another sharded model, of other weights, with the plain optimizer and a new one."""
    from ourshard import shard_model

    model = toy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    sharded = shard_model(model, config)
    return sharded, plain, maker(kind)(sharded.parameters())


def test_the_sharded_format_loads_on_another_world_and_stage(ranks, tmp_path):
    folder = str(tmp_path)
    late = {"checkpoint": {"asynchronous": True}}
    ranks(2)(save_or_load, {"stage": 3, "persist_below": 0, **late}, folder, 0)
    ranks(4)(save_or_load, {"stage": 1, "persist_below": 0, "shard_size": 2}, folder, 2)
    ranks(4)(save_or_load, {"stage": 3, "persist_below": 0, **DIVIDED}, folder, 4)
    ranks(2)(save_or_load, {"stage": 0}, folder, 6)
    ranks(2)(save_or_load, {"stage": 2, "persist_below": 100}, folder, 8)


def whole_state(config: dict[str, Any], kind: str, path: str, first: int) -> None:
    """Train two steps from a saved state, if there is one, and save; compare with one process that never stopped."""
    from ourshard import adopt_optimizer, load_full_state_dict
    from ourshard.integrations import optimizer_state

    both = pair(config, toy, maker(kind))
    file = Path(path)
    if file.exists():
        weights, plain, saved = torch.load(file, weights_only=False)
        both.plain.load_state_dict(weights)
        load_full_state_dict(both.sharded, weights)
        both.plain_optimizer.load_state_dict(plain)
        optimizer_state.restore(adopt_optimizer(both.optimizer), [both.engine], saved, file)
    both.train(2, first=first)
    both.assert_same(5e-6)
    saved = optimizer_state.gather(both.optimizer, [both.engine])
    names = [name for name, _ in both.plain.named_parameters()]
    for number, wanted in both.plain_optimizer.state_dict()["state"].items():
        got = saved["state"][f"0/{names[number]}"]
        assert set(got) == set(wanted)
        for key, value in wanted.items():
            torch.testing.assert_close(torch.as_tensor(got[key]), torch.as_tensor(value), atol=1e-5, rtol=1e-4)
    torch.distributed.barrier()
    if both.engine.mesh.world.rank == 0:
        torch.save((both.plain.state_dict(), both.plain_optimizer.state_dict(), saved), file)
    torch.distributed.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_saved_whole_and_loads_on_another_world_and_stage(ranks, kind, tmp_path):
    file = str(tmp_path / "state")
    ranks(2)(whole_state, {"stage": 3, "persist_below": 0}, kind, file, 0)
    ranks(4)(whole_state, {"stage": 1, "persist_below": 0}, kind, file, 2)
    ranks(4)(whole_state, {"stage": 3, "persist_below": 0, **DIVIDED}, kind, file, 4)
    ranks(2)(whole_state, {"stage": 0}, kind, file, 6)
    ranks(2)(whole_state, {"stage": 2, "persist_below": 100}, kind, file, 8)


def kernels() -> nn.Module:
    """Return a small layer of each kind, with kernels one element wide this way and that."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(1, 3, 3, padding=1), nn.Conv1d(3, 1, 3, padding=1))


def state_of_kernels(persist_below: int) -> None:
    from ourshard.integrations import optimizer_state

    both = pair({"stage": 3, "persist_below": persist_below}, kernels, maker("Adafactor"))
    both.train(2, lambda model, x: model(x[:, None]).square().mean())
    saved = optimizer_state.gather(both.optimizer, [both.engine])["state"]
    for name, parameter in both.plain.named_parameters():
        for key, value in both.plain_optimizer.state[parameter].items():
            torch.testing.assert_close(torch.as_tensor(saved[f"0/{name}"][key]), torch.as_tensor(value))


@pytest.mark.parametrize("persist_below", [0, 1000])
def test_a_factor_of_a_parameters_own_shape_is_saved_beside_factors_of_others(ranks, persist_below):
    ranks(2)(state_of_kernels, persist_below)
