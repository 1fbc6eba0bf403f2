"""What running ranks save loads at any stage and on any number of ranks, bit for bit, or not at all."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist
from ourshard.checkpoint import inspect, verify
from ourshard.checkpoint.commit import newest_complete
from ourshard.checkpoint.io import Buffer, DiskIO
from ourshard.checkpoint.source import BUFFER, PARAM, Source, TensorKey, detect
from torch import nn

from tests.same_examples import mean_losses

pytestmark = pytest.mark.ranks

WIDTH, BATCH = 13, 12  # odd; and examples of one step over all ranks, which divide by 1, 2, 3 and 4
HYBRID = {"stage": 3, "shard_size": 2, "persist_below": 100}
DIVIDED = {**HYBRID, "shard_optimizer_over": "all"}
WRITERS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage{stage}": (2, {"stage": stage, "persist_below": 100}) for stage in range(4)},
    "nothing_whole": (2, {"stage": 3, "persist_below": 0}),
    "hybrid": (4, HYBRID),
    "divided": (4, DIVIDED),
}
READERS: dict[int, list[dict[str, Any]]] = {
    4: [HYBRID, DIVIDED, {"stage": 3, "persist_below": 0}],
    2: [{"stage": stage, "persist_below": 100} for stage in range(4)] + [{"stage": 3, "persist_below": 0}],
    1: [{"stage": 0}],
    3: [{"stage": 1, "persist_below": 100}, {"stage": 3, "persist_below": 100}],
}
EVERY_READER: dict[int, list[dict[str, Any]]] = {
    world: [{"stage": stage, "persist_below": 100} for stage in range(4)] + [HYBRID] * (world == 4)
    for world in (1, 2, 3, 4)
}


class Odd(nn.Module):
    """All kinds: tied, frozen, 0-d and 3-d parameters, one that trains late, buffers that are saved or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = nn.Sequential(nn.Linear(WIDTH, 29), nn.Tanh(), nn.Linear(29, WIDTH))
        self.experts = nn.Parameter(torch.randn(3, 5, WIDTH) / 4)
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.late = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("lost", torch.ones(3), persistent=False)

    def forward(self, rows: torch.Tensor, late: bool) -> torch.Tensor:
        self.seen.add_(1)
        rows = self.fixed(self.middle(self.first(rows)))
        rows = rows + torch.einsum("bw,ekw,ekv->bv", rows, self.experts, self.experts)
        return self.last(self.late(rows) if late else rows) * self.scale


def made(config: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of this config with other values than `trained` ends with, and its optimizer."""
    import ourshard

    model = ourshard.shard_model(Odd(), config)
    wide = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    rest = [p for p in model.parameters() if p.dim() <= 1 and p.requires_grad]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> list[float]:
    """Train on the same examples whatever the number of ranks; `late` joins at step 2. Return the mean losses."""
    return mean_losses(lambda rows, step: model(rows, step >= 2), optimizer, which, (BATCH, WIDTH))


def save_all(root: str, names: Sequence[str]) -> dict[str, Any]:
    """Train and save under each name; return the next losses, and what other code says of weights and moments."""
    import ourshard
    from ourshard.integrations import optimizer_state

    told = {}
    for name in names:
        model, optimizer = made(WRITERS[name][1])
        steps(model, optimizer, range(3))
        ourshard.save(model, optimizer, f"{root}/{name}", client_state={"epoch": 3})
        weights = ourshard.full_state_dict(model)
        engine = ourshard.engine_of(model)
        moments = optimizer_state.gather(optimizer, [engine])["state"]
        told[name] = {"weights": weights, "moments": moments, "losses": steps(model, optimizer, range(3, 6))}
    return told


def load_all(root: str, readers: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Load each name into each reader, save it again, and train on."""
    import ourshard

    told = {}
    stepped: list[int] = []
    world = dist.get_world_size() if dist.is_initialized() else 1
    for number, config in enumerate(readers):
        for name in names:
            model, optimizer = made(config)
            groups = [id(group) for group in optimizer.param_groups]
            optimizer.param_groups[0]["lr"] = 7.0
            optimizer.register_step_pre_hook(lambda *_: stepped.append(1))
            state = ourshard.load(model, optimizer, f"{root}/{name}")
            assert state == {"epoch": 3}
            assert not stepped
            assert [id(group) for group in optimizer.param_groups] == groups
            assert model.get_parameter("last.weight") is model.get_parameter("first.weight")
            again = f"{name}-on{world}-{number}"
            ourshard.save(model, optimizer, f"{root}/{again}", client_state={"epoch": 3}, replace=True)
            told[again] = steps(model, optimizer, range(3, 6))
            assert stepped
            stepped.clear()
    return told


_SAVED: dict[str, Any] = {}


@pytest.fixture
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what `save_all` told of each writer, and under "root" the folder; made once."""
    if not _SAVED:
        root = tmp_path_factory.mktemp("saved")
        for world in (2, 4):
            names = [name for name, (size, _) in WRITERS.items() if size == world]
            _SAVED.update(ranks(world)(save_all, str(root), names)[0])
        _SAVED["root"] = root
    return _SAVED


def assert_same_bits(one: torch.Tensor, other: torch.Tensor, what: str) -> None:
    assert one.dtype == other.dtype, what
    assert one.shape == other.shape, what
    assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), what


def contents(source: Source) -> dict[TensorKey, torch.Tensor]:
    return {key: source.read(key) for key in source.tensors}


@pytest.mark.parametrize("name", WRITERS)
def test_a_save_holds_masters_and_moments_by_name(saved: dict[str, Any], name: str) -> None:
    with detect(saved["root"] / name) as source:
        found, description = contents(source), source.description
        assert all(problem is None for _, problem in source.verify_files())
        assert inspect(source).format == "ourshard"
    weights, moments = saved[name]["weights"], saved[name]["moments"]
    ties = description.ties
    assert ties == {"last.weight": "first.weight"}
    assert {k.name for k in found if k.kind in (PARAM, BUFFER)} == weights.keys() - ties.keys()
    for key in (key for key in found if not key.is_state):
        assert_same_bits(found[key], weights[key.name], str(key))
    assert {key.name for key in found if key.is_state} == {text.partition("/")[2] for text in moments}
    for text, state in moments.items():
        for kind, value in state.items():
            key = TensorKey(kind, text.partition("/")[2])
            assert_same_bits(found[key], value.reshape(found[key].shape), str(key))
    assert (description.step, description.world_size) == (3, WRITERS[name][0])
    assert found[TensorKey("step", "late.weight")] == 1
    assert [group["weight_decay"] for group in description.param_groups] == [0.1, 0.0]
    assert description.frozen == {"fixed.weight", "fixed.bias"}


def test_verify_accepts_the_folder(saved: dict[str, Any]) -> None:
    with detect(saved["root"] / "hybrid") as source:
        result = verify(source, against=source)
    assert not result.findings
    assert result.compared == len(source.tensors)


class FullDisk(DiskIO):
    """Says that the disk is full once a file of this name is written."""

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, file: BinaryIO, buffers: Sequence[Buffer]) -> None:
        if self._name in str(file.name):
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(file, buffers)


def save_twice(root: str, name: str) -> dict[str, Any]:
    """Save, then save over it where one rank's disk is full; return the error and whether training goes on."""
    import ourshard

    model, optimizer = made({"stage": 3, "persist_below": 0})
    steps(model, optimizer, range(3))
    ourshard.save(model, optimizer, f"{root}/checkpoint-1")
    steps(model, optimizer, range(3, 4))
    with pytest.raises((ValueError, OSError)) as error:
        ourshard.save(model, optimizer, f"{root}/checkpoint-1", replace=True, io=FullDisk(name))
    return {"error": str(error.value), "losses": steps(model, optimizer, range(4, 5))}


@pytest.mark.parametrize("name", ["rank-00001.json", "ourshard.json"])
def test_a_rank_that_fails_fails_all_and_the_last_checkpoint_stays(ranks: Any, tmp_path: Path, name: str) -> None:
    for told in ranks(2)(save_twice, str(tmp_path), name):
        assert "No space left on device" in told["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert newest_complete(tmp_path, verify=True).path == tmp_path / "checkpoint-1"
    with detect(tmp_path / "checkpoint-1") as source:
        assert source.description.step == 3


def save_where_old_ones_stay(root: str, asynchronous: bool) -> list[str]:
    import logging

    import ourshard

    def refuse() -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", "older")

    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    model, optimizer = made({"stage": 3, "checkpoint": {"asynchronous": asynchronous}})
    logging.getLogger("ourshard").addHandler(handler)
    ourshard.save(model, optimizer, f"{root}/step", then=refuse)
    ourshard.wait_for_save()
    logging.getLogger("ourshard").removeHandler(handler)
    ourshard.load(model, optimizer, f"{root}/step")
    return logged


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
def test_old_checkpoints_that_cannot_be_removed_do_not_fail_the_new_one(
    ranks: Any, tmp_path: Path, asynchronous: bool
) -> None:
    (logged,) = ranks(1)(save_where_old_ones_stay, str(tmp_path), asynchronous)
    assert [text for text in logged if "step is complete, but clearing up after it failed: [Errno 1]" in text]


def load_a_rate_in_a_tensor(root: str) -> tuple[bool, list[float]]:
    import ourshard

    model, _ = made({"stage": 3})
    rate = torch.tensor(1e-3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    told = []
    for name, value in (("tensor", rate), ("number", 0.25)):
        optimizer.param_groups[0]["lr"] = value
        ourshard.save(model, optimizer, f"{root}/{name}")
        optimizer.param_groups[0]["lr"] = rate
        rate.fill_(7.0)
        ourshard.load(model, optimizer, f"{root}/{name}")
        told.append(rate.item())
    return optimizer.param_groups[0]["lr"] is rate, told


def test_a_rate_that_is_a_tensor_stays_the_tensor_that_others_hold(ranks: Any, tmp_path: Path) -> None:
    """CASES A06."""
    assert ranks(1)(load_a_rate_in_a_tensor, str(tmp_path)) == [(True, pytest.approx([1e-3, 0.25]))]


def load_what_does_not_fit(root: str, what: str) -> str:
    import ourshard

    model, optimizer = made({"stage": 3, "persist_below": 0})
    if what == "model":
        model = ourshard.shard_model(nn.Linear(WIDTH, WIDTH), {"stage": 3})
    if what == "kind":
        optimizer = torch.optim.SGD([{"params": group["params"]} for group in optimizer.param_groups], lr=1.0)
    if what == "dtype":
        model.seen = torch.tensor(False)
    if what == "groups":
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    before = ourshard.full_state_dict(model)
    with pytest.raises(ValueError, match="nothing was loaded") as error:
        ourshard.load(model, None if what == "model" else optimizer, root)
    after = ourshard.full_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] in (1e-3, 1.0)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("model", "missing: weight, bias"),
        ("groups", "2 parameter groups"),
        ("kind", "SGD has dampening, momentum, nesterov: the state is of another kind of optimizer"),
        ("dtype", "of a dtype that does not go into the one here: seen torch.int64, here torch.bool"),
        ("bytes", "damaged"),
    ],
)
def test_what_does_not_fit_or_is_damaged_changes_nothing(
    ranks: Any, saved: dict[str, Any], tmp_path: Path, what: str, message: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved["root"] / "stage3", folder)
    if what == "bytes":
        file = next((folder / "optimizer" / "exp_avg").glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    for error in ranks(2)(load_what_does_not_fit, str(folder), what):
        assert message in error


@pytest.mark.parametrize("world", READERS)
def test_it_loads_at_any_stage_and_world_and_trains_on(ranks: Any, saved: dict[str, Any], world: int) -> None:
    """CASES A02, I01."""
    assert_loads_everywhere(ranks, saved, world, READERS[world])


@pytest.mark.slow
@pytest.mark.parametrize("world", EVERY_READER)
def test_it_loads_at_every_stage_and_world(ranks: Any, saved: dict[str, Any], world: int) -> None:
    """All that the test above leaves out: 17 readers of each of 7 saves."""
    assert_loads_everywhere(ranks, saved, world, EVERY_READER[world])


def assert_loads_everywhere(ranks: Any, saved: dict[str, Any], world: int, readers: list[dict[str, Any]]) -> None:
    told = ranks(world)(load_all, str(saved["root"]), readers, list(WRITERS))[0]
    assert len(told) == len(readers) * len(WRITERS)
    for again, losses in told.items():
        name, _, number = again.partition("-on")
        with detect(saved["root"] / name) as first, detect(saved["root"] / again) as second:
            before, after = contents(first), contents(second)
            assert first.description.param_groups == second.description.param_groups
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert_same_bits(value, after[key], f"{key} of {again}")
        assert losses == pytest.approx(saved[name]["losses"], abs=1e-6), again
        if WRITERS[name] == (world, readers[int(number.partition("-")[2])]):
            assert losses == saved[name]["losses"], again
