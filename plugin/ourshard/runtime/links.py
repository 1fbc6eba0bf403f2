"""Choose codecs by what the links do, where the config says `auto`.

Note [Measured links]
---------------------
When a model is prepared with `weights: auto` or `gradients: auto`, every rank moves a buffer as training will, with its
codec and without, over the same groups: a gather, and a reduction with what `replicate` adds. What the slowest rank
took counts, the same for all, and int8 is taken where it needs less than `PAYS` of the exact time; else nothing is
coded. int4 and fp8 are never chosen: whoever takes more error for fewer bytes says so. Rank 0 says what was measured.

Collectives are measured alone, not beside compute, and exact ones as NCCL or gloo moves them, also where peer copies
(Note [Peer copies]) would take their place and be faster. A run that is resumed measures anew, and may choose
otherwise: for the same bits name the codec.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ourshard.config import Codec, OptimizerOver, ShardConfig
from ourshard.runtime.codec import BlockCodec
from ourshard.runtime.coded import gather_coded
from ourshard.runtime.coded_gradients import GradientCoder, gradient_codec

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine

PAYS = 0.9  # of the exact time: what is closer is not worth the error, nor sharp enough
MEASURED_NUMEL = {"cuda": 1 << 24, "cpu": 1 << 20}  # about a layer of a model that is trained there
REPEATS = 3
_LABEL = "measuring the links"


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that the slowest rank took, without a codec and with it."""

    exact: float
    coded: float

    @property
    def pays(self) -> bool:
        """Say whether the codec is worth it; the same on every rank."""
        return self.coded < PAYS * self.exact

    def told(self, what: str) -> str:
        """Return what was measured and decided, in words."""
        verdict = "int8" if self.pays else "none"
        return f"{what} auto: {1000 * self.exact:.1f} ms exact, {1000 * self.coded:.1f} ms as int8, so {verdict}"


def assumed(config: ShardConfig, weights: Codec, gradients: Codec) -> ShardConfig:
    """Return the config with these codecs for `auto`; where gradients get none, without their codec's options."""
    wanted = config.communication
    changes: dict[str, Any] = {}
    if wanted.weights is Codec.AUTO:
        changes["weights"] = weights.value
    if wanted.gradients is Codec.AUTO:
        changes["gradients"] = gradients.value
        if gradients is Codec.NONE:
            changes |= {"error_feedback": False, "stochastic_rounding": False, "seed": 0}
            changes |= {} if wanted.two_hop_gathers else {"node_size": None}
    return config.replace(communication=changes)


def choose_codecs(engine: Engine) -> str:
    """Put codecs, or none, in the place of `auto` in the engine's config; return what was measured. Collective."""
    config, told = engine.config, []
    chosen = dict.fromkeys(("weights", "gradients"), Codec.NONE)
    engine.config = assumed(config, Codec.INT8, Codec.INT8)
    with _uncounted(engine):
        for what, measure in (("weights", _pace_of_gathers), ("gradients", _pace_of_reductions)):
            if getattr(config.communication, what) is not Codec.AUTO:
                continue
            if engine.mesh.shard.size == 1:
                told.append(f"{what} auto: one rank has a copy, so none")
                continue
            pace = measure(engine)
            chosen[what] = Codec.INT8 if pace.pays else Codec.NONE
            told.append(pace.told(what))
    engine.config = assumed(config, **chosen)
    return "; ".join(told)


@contextmanager
def _uncounted(engine: Engine) -> Iterator[None]:
    """Keep what is measured out of the ledger."""
    ledger = engine.ledger
    engine.ledger = engine.collectives.ledger = None
    try:
        yield
    finally:
        engine.ledger = engine.collectives.ledger = ledger


def _pace_of_gathers(engine: Engine) -> Pace:
    shard = engine.mesh.shard
    whole, segment = _buffers(engine, engine.param_dtype)
    codec = BlockCodec(Codec.INT8, engine.config.communication.block_of(Codec.INT8))
    return Pace(
        _seconds(engine, lambda: engine.collectives.all_gather(whole, segment, shard, _LABEL)),
        _seconds(engine, lambda: gather_coded(engine, codec, whole, segment, _LABEL)),
    )


def _pace_of_reductions(engine: Engine) -> Pace:
    mesh = engine.mesh
    whole, segment = _buffers(engine, engine.reduce_dtype or engine.param_dtype)
    codec = gradient_codec(engine.config.communication)
    assert codec is not None
    coder = GradientCoder(engine, codec, _LABEL, 0, whole.numel())

    own = segment.view(mesh.replicate.size, -1)[mesh.replicate.rank]
    divided = engine.config.shard_optimizer_over is OptimizerOver.ALL

    def exact() -> None:
        engine.reducer.scatter(segment, whole, mesh.shard, _LABEL)
        if divided:
            engine.reducer.scatter(own, segment, mesh.replicate, _LABEL)
        else:
            engine.reducer.reduce(segment, mesh.replicate, _LABEL)

    def coded() -> None:
        coder.scatter(segment, whole)
        if mesh.replicate.size > 1 and divided:
            coder.reduce_part(own, segment)
        elif mesh.replicate.size > 1:
            coder.reduce_replicas(segment)

    return Pace(_seconds(engine, exact), _seconds(engine, coded))


def _buffers(engine: Engine, dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a buffer of whole blocks for each rank, and this rank's part of it."""
    shard, block = engine.mesh.shard, engine.config.communication.alignment * engine.mesh.replicate.size
    part = -(-MEASURED_NUMEL[engine.mesh.device.type] // (shard.size * block)) * block
    whole = torch.ones(shard.size * part, dtype=dtype or torch.float32, device=engine.mesh.device)
    return whole, whole[shard.rank * part : (shard.rank + 1) * part]


def _seconds(engine: Engine, run: Callable[[], None]) -> float:
    """Return the best of some runs after one to warm up, on the slowest rank. Collective."""
    found = []
    for _ in range(1 + REPEATS):
        engine.control.agree(_LABEL)
        _wait_for(engine.mesh.device)
        begin = time.perf_counter()
        run()
        _wait_for(engine.mesh.device)
        found.append(time.perf_counter() - begin)
    told = engine.control.gather_objects(min(found[1:]), _LABEL)
    return max(seconds for seconds in told if isinstance(seconds, float))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
