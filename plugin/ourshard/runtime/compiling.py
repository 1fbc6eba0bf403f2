"""What of ours dynamo may meet, and must not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_dynamo_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def outside_of_compile(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep dynamo from tracing a hook: it swaps parameters and storages, which no graph can hold.

    What turns dynamo off for a call takes the host as long as six calls, so that it does so only where dynamo is on.
    """
    apart = torch._dynamo.disable(hook)

    def run(*args: Any) -> Any:
        return (hook if _dynamo_callback() is None else apart)(*args)

    return torch._dynamo.decorators.skip(run)
