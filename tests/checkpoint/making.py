"""Make states of a small odd model and save them as a world of any size would, through the writer of one rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from ourshard.checkpoint import commit
from ourshard.checkpoint.io import DiskIO
from ourshard.checkpoint.shard_writer import LocalBox, ShardWriter
from ourshard.checkpoint.sharded import ShardedSource
from ourshard.checkpoint.source import BUFFER, PARAM, Description, Source, TensorKey
from ourshard.runtime.boxes import boxes_of
from ourshard.runtime.layout import TensorSpec, plan_unit


class Unflushed(DiskIO):
    """The disk without flushes, for tests that are not about them: hundreds of flushes take minutes on a busy disk."""

    def flush(self, file: BinaryIO) -> None:
        """Do nothing."""

    def flush_folder(self, path: Path) -> None:
        """Do nothing."""


UNFLUSHED = Unflushed()
State = dict[TensorKey, torch.Tensor]

FIXTURES = Path(os.environ.get("OURSHARD_FIXTURES", Path(__file__).parents[3] / "shared" / "fixtures"))
SHAPES = {
    "embed.weight": (37, 5),
    "block.norm.weight": (5,),
    "block.gain": (1,),
    "block.scale": (),
    "block.experts.weight": (2, 7, 3),
    "block.empty": (0, 4),
    "head.weight": (3, 5, 2),
}
NAMES = [name for name in SHAPES if name != "block.empty"]


def make_state(seed: int = 0, dtype: torch.dtype = torch.float32) -> State:
    """Return random parameters with Adam state, and buffers; sizes that divide by nothing."""
    torch.manual_seed(seed)
    state: State = {}
    for name, shape in SHAPES.items():
        state[TensorKey(PARAM, name)] = torch.randn(shape).to(dtype)
        if name in NAMES:
            state[TensorKey("exp_avg", name)] = torch.randn(shape)
            state[TensorKey("exp_avg_sq", name)] = torch.rand(shape)
            state[TensorKey("step", name)] = torch.tensor(float(seed + 3))
    state[TensorKey(BUFFER, "block.running_mean")] = torch.randn(5)
    state[TensorKey(BUFFER, "block.count")] = torch.tensor(seed + 7)
    state[TensorKey(BUFFER, "block.mask")] = torch.tensor([True, False, True])
    return state


def describe(world_size: int, step: int = 3) -> Description:
    """Return a description with something in each of its fields."""
    return Description(
        world_size=world_size,
        stage=3,
        step=step,
        param_groups=(
            {"lr": 0.1, "betas": (0.9, 0.95), "fused": None, "params": NAMES[:2]},
            {"lr": float("inf"), "betas": (0.9, 0.95), "fused": None, "params": NAMES[2:]},
        ),
        param_state={"block.gain": {"kind": "rms", "value": 0.25}},
        ties={"head.tied": "embed.weight"},
        frozen=frozenset({"block.empty"}),
        own_dtypes={"embed.weight": torch.bfloat16},
        scheduler={"last_epoch": step, "lr_lambdas": [None, {}], "_last_lr": [0.1, 1e-300]},
        scaler={"scale": 65536.0},
        client_state={"epoch": 1.5, "seen": {3: "three"}, "tensor": torch.arange(3)},
        versions={"torch": torch.__version__},
    )


def boxes_on(state: Mapping[TensorKey, torch.Tensor], rank: int, world_size: int) -> dict[TensorKey, list[LocalBox]]:
    """Return what a rank holds if the runtime's own layout cuts all tensors (fine granules: cuts below rows, too)."""
    keys = [key for key in state if key.kind != BUFFER and state[key].dim()]
    layout = plan_unit(
        [TensorSpec(str(key), tuple(state[key].shape), key.kind) for key in keys],
        world_size,
        align=1,
        fine_granules=True,
        max_padding=0.0,
        max_padding_numel=0,
    )
    held: dict[TensorKey, list[LocalBox]] = {}
    for lane in layout.lanes:
        for position, placed in enumerate(lane.tensors):
            key = keys[placed.index]
            shape, flat = tuple(state[key].shape), state[key].reshape(-1)
            for box in boxes_of(shape, placed, lane.rows_on(position, rank)):
                start = 0
                for length, index in zip(shape, box.starts, strict=True):
                    start = start * length + index
                part = flat[start : start + box.numel].reshape(box.sizes)
                held.setdefault(key, []).append(LocalBox(shape, part, box.starts))
    for key, tensor in state.items():
        alone = key.kind == BUFFER or not tensor.dim() or not tensor.numel()
        if alone and (rank == 0 or key.kind == "step"):
            held[key] = [LocalBox(tuple(tensor.shape), tensor)]
    return held


def save(
    final: Path,
    state: Mapping[TensorKey, torch.Tensor],
    world_size: int,
    *,
    description: Description | None = None,
    ranks: Sequence[int] | None = None,
    replace: bool = False,
    io: DiskIO = UNFLUSHED,
    rank_state: Mapping[str, Any] | None = None,
) -> None:
    """Save as all ranks (or `ranks`, of one node) together would."""
    temporary = commit.begin(final, replace=replace, io=io)
    for rank in range(world_size) if ranks is None else ranks:
        writer = ShardWriter(temporary, rank, world_size, io)
        if rank == 0:
            writer.add_file("config.json", b'{"model_type": "odd"}')
        own = {"rank": rank, "rng": torch.get_rng_state()} if rank_state is None else rank_state
        writer.write(boxes_on(state, rank, world_size), own)
    manifest = commit.assemble(temporary, description or describe(world_size), ranks=ranks, mesh={"shard": world_size})
    commit.publish(temporary, final, manifest, replace=replace, io=io)


def assert_holds(source: Source, state: Mapping[TensorKey, torch.Tensor]) -> None:
    """Assert that a source has exactly these tensors, bit for bit, whole and by rows."""
    assert set(source.tensors) == set(state)
    for key, tensor in state.items():
        assert_same(source.read(key), tensor, str(key))
        if tensor.dim() and tensor.shape[0] > 1:
            assert_same(source.read(key, 1, tensor.shape[0]), tensor[1:], str(key))


def assert_same(one: torch.Tensor, other: torch.Tensor, what: str) -> None:
    """Assert equal shape, dtype and bits."""
    assert one.shape == other.shape, what
    assert one.dtype == other.dtype, what
    same = torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))
    assert same, what


def assert_loads(path: Path, state: Mapping[TensorKey, torch.Tensor]) -> None:
    """Assert that the folder opens and holds this state."""
    with ShardedSource(path, verify_reads=True) as source:
        source.check_sizes()
        assert_holds(source, state)
