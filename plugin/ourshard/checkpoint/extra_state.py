"""What modules give as `get_extra_state`, out of a checkpoint."""

from __future__ import annotations

import logging

from torch import nn

from ourshard.runtime.state import with_extra_state
from ourshard.runtime.wording import shorten

from .source import BUFFER, PARAM, Source, TensorKey

logger = logging.getLogger("ourshard")


def load_extra_states(model: nn.Module, source: Source, *, tells: bool) -> None:
    """Give modules their extra state, which formats of others may hold as a tensor; `tells` says which have none."""
    lost = []
    for name, module in with_extra_state(model).items():
        key = next((key for key in (TensorKey(PARAM, name), TensorKey(BUFFER, name)) if key in source.tensors), None)
        if name in source.description.extra_state:
            module.set_extra_state(source.description.extra_state[name])
        elif key is not None:
            module.set_extra_state(source.read(key))
        else:
            lost.append(name)
    if lost and tells:
        logger.warning("load: %s is not in %s and stays as it is here", shorten(lost, 4), source.path)
