"""Train a model whose training does not fit on its devices: masters, gradients and optimizer state are in host memory.

    accelerate launch --config_file accelerate_configs/offload_host.yaml examples/larger_than_memory.py --size 7b
    accelerate launch --config_file accelerate_configs/offload_host.yaml --cpu --num_processes 2 \\
        examples/larger_than_memory.py

The model is made under `init_context`, so no process ever holds it whole. At the end the script tells what was held
where, beside plain training, and draws it to `memory.png`. Without GPUs the "device" is memory of the host, too.
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OURSHARD_LEDGER", "true")  # count bytes by kind

import matplotlib.pyplot as plt
import ourshard
import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {  # hidden size, layers, intermediate size, vocabulary
    "tiny": (64, 2, 172, 256),
    "small": (512, 8, 1376, 8192),
    "7b": (4096, 32, 11008, 32000),
    "34b": (8192, 48, 22016, 32000),
}
KINDS = {  # of the ledger
    "slot": "parameters, whole while a unit computes",
    "full": "parameters that stay whole",
    "shard": "shards of parameters",
    "reduce": "gradients on their way",
    "gradient": "gradients",
    "master": "masters",
}
PLAIN = 16  # bytes a parameter: fp32 weight, gradient and AdamW's two moments
MIB = 2**20


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("out/larger_than_memory"))
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--max_steps", type=int, default=4)
    parser.add_argument("--sequence_length", type=int, default=256)
    return parser.parse_args()


def build_model(size: str) -> LlamaForCausalLM:
    hidden, layers, intermediate, vocabulary = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
    )
    with ourshard.init_context():
        return LlamaForCausalLM(config)


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, float], dict[str, float]]:
    """Return the MiB that this rank held on the device, at the most, and on the host, by what they were for."""
    engine = ourshard.engine_of(model)
    moments = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)) / MIB
    peak = {kind: nbytes / MIB for kind, nbytes in engine.ledger.peak.items()}
    device = {KINDS[kind]: mib for kind, mib in peak.items() if kind in KINDS and mib > 0.05}
    host = {"masters and gradients": peak["host"]} if peak["host"] else {}
    (host if peak["host"] else device)["AdamW's moments"] = moments
    return device, host


def draw(plain: float, device: dict[str, float], host: dict[str, float], path: Path) -> None:
    """Draw three bars, in MiB."""
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    axes.barh("plain: each device", plain, color="lightgray", label="weights, gradients, moments")
    for name, parts in (("here: each device", device), ("here: host, each process", host)):
        left = 0.0
        for part, mib in parts.items():
            axes.barh(name, mib, left=left, label=part)
            left += mib
    axes.invert_yaxis()
    axes.set_xlabel("MiB, without activations")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)


def main() -> None:
    args = parse_args()
    accelerator = Accelerator()
    set_seed(7)
    model = build_model(args.size)
    built = psutil.Process().memory_info().rss / MIB
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    accelerator.print(f"{parameters:,} parameters; a process that has built the model holds {built:,.0f} MiB in all.")
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for step in range(args.max_steps):
        began = time.perf_counter()
        tokens = torch.randint(0, 256, (1, args.sequence_length), generator=generator).to(accelerator.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean, seconds = accelerator.reduce(loss.detach(), "mean").item(), time.perf_counter() - began
        accelerator.print(f"step {step + 1}: loss {mean:.3f}, {seconds:.2f} s")

    device, host = held(model, optimizer)
    resident = gather_object([psutil.Process().memory_info().rss / MIB])
    if accelerator.is_main_process:
        plain = PLAIN * parameters / MIB
        print(f"Plain training holds {plain:,.0f} MiB on each device, without activations. Here, at the most:")
        for where, parts in (("device", device), ("host", host)):
            for part, mib in parts.items():
                print(f"  {where:7}{mib:10,.1f} MiB  {part}")
        if accelerator.device.type == "cuda":
            print(f"  device {torch.cuda.max_memory_allocated() / MIB:10,.1f} MiB  in all, with activations")
        print(f"Each process holds {max(resident):,.0f} MiB of host memory or less, libraries included.")
        args.output_dir.mkdir(parents=True, exist_ok=True)
        draw(plain, device, host, args.output_dir / "memory.png")
    accelerator.end_training()


if __name__ == "__main__":
    main()
