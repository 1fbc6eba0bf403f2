"""The training of `two_hosts.py`: a plain Accelerate loop that times its steps; prints one JSON line on the first rank.

accelerate launch --config_file ... benchmarks/two_hosts_train.py --steps 6 [--save FOLDER] [--resume FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, LENGTH = 512, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--save", type=Path, help="save the state here, halfway")
    parser.add_argument("--resume", type=Path, help="load the state from here, and do the second half alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator()
    torch.manual_seed(0)
    sizes = {"hidden_size": options.hidden, "intermediate_size": 3 * options.hidden, "num_attention_heads": 6}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=options.layers, **sizes))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    if options.resume:
        accelerator.load_state(options.resume)
    half = options.steps // 2
    losses, times = [], []
    for step in range(half if options.resume else 0, options.steps):
        if options.save and step == half:
            accelerator.save_state(options.save)
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        generator = torch.Generator().manual_seed(step * accelerator.num_processes + accelerator.process_index)
        ids = torch.randint(VOCAB, (1, LENGTH), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        times.append(time.perf_counter() - began)
    if accelerator.is_main_process:
        parameters = sum(p.numel() for p in model.parameters())
        told = {"step_s": statistics.median(times[1:] or times), "losses": losses, "parameters": parameters}
        print("RESULT " + json.dumps(told), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
