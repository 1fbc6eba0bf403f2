"""Gathers of weights as blocks of few bits (qwZ).

Note [Coded weights]
--------------------
With `communication.weights` a lane of matrices is gathered as the messages of `codec.py`: the rank codes its segment,
codes and scales travel in one all-gather, and every rank decodes all segments, its own too, so that all compute with
the same weights. Parameters of fewer than two dimensions (norms, biases) are in lanes of their own, which stay exact.

Only training is coded: a forward with gradients of a model in training mode, and backward. Evaluation, `gathered`,
state dicts and saving read the masters exactly. All ranks must agree which it is, so the schedule compares it.

Gradients are in `coded_gradients.py`.
Source: Wang et al., 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ourshard.config import Codec, CommunicationConfig
from ourshard.runtime.codec import BlockCodec
from ourshard.runtime.ledger import Kind

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.mesh import Axis

_CODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weight_codec(config: CommunicationConfig) -> BlockCodec | None:
    """Return the codec of gathers, rounding to the nearest: weights have no sum in which errors average out."""
    return None if config.weights is Codec.NONE else BlockCodec(config.weights, config.block_of(config.weights))


def can_code(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Say whether a parameter travels coded: Note [Coded weights], and coded_gradients.py."""
    return len(shape) > 1 and dtype in _CODED_DTYPES


def codes_now(engine: Engine) -> bool:
    """Say whether gathers issued now are coded; the same on every rank. Note [Coded weights]."""
    if engine.coded_as_told is not None:
        return engine.coded_as_told
    model = engine.model()
    if engine.config.communication.weights is Codec.NONE or model is None or not model.training:
        return False
    if engine.gathered_depth:
        return False
    if engine.phase_is_backward or engine.forward_has_grad:
        return True
    return engine.outside_of_forward and torch.is_grad_enabled()


def gather_coded(engine: Engine, codec: BlockCodec, whole: torch.Tensor, segment: torch.Tensor, label: str) -> None:
    """Fill `whole` with what the codec leaves of every rank's `segment`, on the gather stream; the shard axis."""
    axis: Axis = engine.mesh.shard
    message = codec.nbytes(segment.numel())
    # Made, used and freed on one stream, so that its allocator can give the bytes to the next gather.
    parts = torch.empty(axis.size * message, dtype=torch.uint8, device=whole.device)
    if engine.ledger is not None:
        engine.ledger.hold(Kind.SLOT, parts.nbytes)
    own = parts[axis.rank * message : (axis.rank + 1) * message]
    codec.encode(segment, own)
    engine.collectives.all_gather(parts, own, axis, label)
    codec.decode(parts, whole, parts=axis.size)
    if engine.ledger is not None:
        engine.ledger.hold(Kind.SLOT, -parts.nbytes)
