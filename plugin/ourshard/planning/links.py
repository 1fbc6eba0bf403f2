"""What `auto` codecs come to on given hardware: the rule of `runtime/links.py` on predicted times.

As there, a buffer of about a layer is gathered and reduced, exact and as int8, over the axes that training takes, by
NCCL; and int8 is taken where that needs less than `PAYS` of the exact time. A codec's kernels read and write memory at
the rate that kernels reach, and the host starts each: on fast links that decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ourshard.config import Codec, ShardConfig
from ourshard.planning.formulas import Reach, copy_seconds
from ourshard.planning.hardware import Hardware
from ourshard.planning.moves import Collective, MeshSizes
from ourshard.planning.simulate import call_seconds
from ourshard.runtime.codec import BlockCodec
from ourshard.runtime.coded_gradients import in_two_hops, replica_part
from ourshard.runtime.divided import divides_masters
from ourshard.runtime.links import MEASURED_NUMEL, Pace, assumed
from ourshard.runtime.mesh import gathers_in_two_hops


@dataclass(frozen=True, slots=True)
class _Coding:
    """What a codec does beside the wire: bytes read and written, kernels started."""

    nbytes: int = 0
    kernels: int = 0


def decide(config: ShardConfig, mesh: MeshSizes, hardware: Hardware) -> tuple[ShardConfig, str]:
    """Return the config with codecs, or none, in the place of `auto`, and what was predicted; "" where there is none.

    `mesh` is that of the config with `auto`. Where a stage has no use for a codec, it gets none.
    """
    wanted, told = config.communication, []
    chosen = dict.fromkeys(("weights", "gradients"), Codec.NONE)
    codec = BlockCodec(Codec.INT8, wanted.block_of(Codec.INT8))
    if mesh.shard > 1 and wanted.weights is Codec.AUTO and config.stage == 3:
        pace = _pace_of_gathers(config, mesh, hardware, codec)
        chosen["weights"] = Codec.INT8 if pace.pays else Codec.NONE
        told.append(pace.told("weights"))
    if mesh.shard > 1 and wanted.gradients is Codec.AUTO and config.stage > 0:
        pace = _pace_of_reductions(config, mesh, hardware, codec)
        chosen["gradients"] = Codec.INT8 if pace.pays else Codec.NONE
        told.append(pace.told("gradients"))
    return assumed(config, **chosen), "; ".join(told)


def _pace_of_gathers(config: ShardConfig, mesh: MeshSizes, hardware: Hardware, codec: BlockCodec) -> Pace:
    numel, width = _numel(config, mesh), _width(config.precision.param_dtype)
    message = codec.nbytes(numel)
    coding = _coding_nbytes(numel // mesh.shard, width, codec) + width * numel + message
    return Pace(
        _seconds(_gather(config, mesh, width * numel), _Coding(), mesh, hardware),
        _seconds(_gather(config, mesh, message), _Coding(coding, 2), mesh, hardware),
    )


def _gather(config: ShardConfig, mesh: MeshSizes, nbytes: int) -> list[Collective]:
    if gathers_in_two_hops(config, mesh.node, mesh.cross):
        return [Collective("all_gather", "cross", nbytes // mesh.node), Collective("all_gather", "node", nbytes)]
    return [Collective("all_gather", "shard", nbytes)]


def _pace_of_reductions(config: ShardConfig, mesh: MeshSizes, hardware: Hardware, codec: BlockCodec) -> Pace:
    numel = _numel(config, mesh)
    width = _width(config.precision.reduce_dtype or config.precision.param_dtype)
    shard, message = numel // mesh.shard, codec.nbytes(numel)
    divided = divides_masters(config, mesh.replicate)
    over_replicas = ["reduce_scatter"] if divided else ["all_reduce"]
    exact = [Collective("reduce_scatter", "shard", width * numel)]
    exact += [Collective(name, "replicate", width * shard) for name in over_replicas]
    coded = [Collective("all_to_all", "shard", message)]
    coding = _coding_nbytes(numel, width, codec) + message + width * shard
    kernels = 2  # codes, sums
    if in_two_hops(config, mesh.node, mesh.cross):
        coded = [Collective("all_to_all", "node", message), Collective("all_to_all", "cross", message // mesh.node)]
        coding += 2 * 2 * message + (4 + 4) * shard * mesh.cross + 2 * message // mesh.node  # two swaps, sums, codes
        kernels += 3 + mesh.cross
    if mesh.replicate > 1:
        part = codec.nbytes(replica_part(shard, mesh.replicate, codec.block) * mesh.replicate)
        names = ["all_to_all"] if divided else ["all_to_all", "all_gather"]
        coded += [Collective(name, "replicate", part) for name in names]
        coding += len(names) * (2 * part + 2 * width * shard)
        kernels += 3 * len(names)
    return Pace(_seconds(exact, _Coding(), mesh, hardware), _seconds(coded, _Coding(coding, kernels), mesh, hardware))


def _numel(config: ShardConfig, mesh: MeshSizes) -> int:
    """Return the elements of a buffer of whole blocks for each rank, as `runtime/links.py` moves."""
    block = config.communication.alignment * mesh.replicate
    return -(-MEASURED_NUMEL["cuda"] // (mesh.shard * block)) * block * mesh.shard


def _width(dtype: str | None) -> int:
    return int(getattr(torch, dtype or "float32").itemsize)


def _coding_nbytes(numel: int, width: int, codec: BlockCodec) -> int:
    """Return the bytes that coding `numel` elements reads and writes."""
    return width * numel + codec.nbytes(numel)


def _seconds(calls: Sequence[Collective], coding: _Coding, mesh: MeshSizes, hardware: Hardware) -> float:
    seconds = copy_seconds(coding.nbytes, hardware, Reach.MIDDLE)
    seconds += coding.kernels * Reach.MIDDLE.of(hardware.forward_call)
    return seconds + sum(call_seconds(call, mesh, hardware, Reach.MIDDLE) for call in calls)
