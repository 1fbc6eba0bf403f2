"""What ranks import, once: the process that they are forked from imports this module."""

from __future__ import annotations

import gc

import accelerate  # noqa: F401
import ourshard.integrations.accelerator
import ourshard.runtime.api  # noqa: F401
import torch  # noqa: F401
from transformers import LlamaForCausalLM, Trainer  # noqa: F401

# Collecting garbage after each test would look at all that the modules hold: 0.2 s of 420,000 objects.
gc.collect()
gc.freeze()
