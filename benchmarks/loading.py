"""Measure host memory while a model is loaded and sharded, against the law: model / ranks + the largest unit.

python benchmarks/loading.py [--worlds 2,4] [--layers 8]

A Llama of about 400 MB in fp32 is saved once; then ranks load it (or make it at random) and shard it at stage 3. Each
reports the peak of its resident memory above what it had before, and the bytes it read from the files.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

MIB = 2**20
WAYS = ("whole", "rows", "init", "init_context")


def config(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=1000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        tie_word_embeddings=True,
    )


def peak() -> float:
    """Return the peak of this process's resident memory since `reset_peak`, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def reset_peak() -> float:
    """Start a new peak; return the resident memory, in MiB."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss / MIB


def make(way: str, folder: str, layers: int) -> Any:
    """Make the model in one of `WAYS`: stock or lazy, from the file or at random."""
    import ourshard
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    if way == "init":
        return LlamaForCausalLM(config(layers))
    if way == "init_context":
        with ourshard.init_context():
            return LlamaForCausalLM(config(layers))
    ourshard.enable({"low_memory_loading": way == "rows"})
    return LlamaForCausalLM.from_pretrained(folder)


def rank_main(way: str, folder: str, layers: int) -> None:
    """Measure on one rank, and write what was found beside the model."""
    import ourshard
    import torch.distributed as dist
    import transformers
    from ourshard.runtime.source import bytes_read

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    ourshard.shard_model(LlamaOfOneLayer())  # imports and groups are there before the measurement begins
    before = reset_peak()
    began = time.perf_counter()
    model = make(way, folder, layers)
    loaded = peak() - before
    ourshard.shard_model(model)
    engine = ourshard.engine_of(model)
    assert engine is not None
    unit = max(sum(lane.layout.numel * lane.store_dtype.itemsize for lane in u.lanes) for u in engine.units)
    found = {
        "loaded": loaded,
        "sharded": peak() - before,
        "read": bytes_read() / MIB,
        "seconds": time.perf_counter() - began,
        "nbytes": sum(p.numel() * 4 for p in model.parameters()) / MIB,
        "unit": unit / MIB,
    }
    Path(folder, f"{way}-{dist.get_world_size()}-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def LlamaOfOneLayer() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, num_attention_heads=4, **tiny))


def launch(way: str, world: int, folder: str, layers: int) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    command += [__file__, "--rank", way, folder, "--layers", str(layers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    subprocess.run(command, check=True, env=environment)
    return [json.loads(Path(folder, f"{way}-{world}-{rank}.json").read_text()) for rank in range(world)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        way, folder = options.rank
        rank_main(way, folder, options.layers)
        return
    from rich.console import Console
    from rich.table import Table
    from transformers import LlamaForCausalLM

    table = Table(title="Peak of resident memory above the start, MiB a rank (largest of the ranks)")
    for column in ("way", "ranks", "after loading", "after sharding", "law", "read, MiB", "seconds"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config(options.layers)).save_pretrained(folder)
        for world in map(int, options.worlds.split(",")):
            for way in WAYS:
                told = launch(way, world, folder, options.layers)
                most = {key: max(rank[key] for rank in told) for key in told[0]}
                law = most["nbytes"] / world + most["unit"]
                row = [most["loaded"], most["sharded"], law, most["read"]]
                table.add_row(way, str(world), *[f"{value:.0f}" for value in row], f"{most['seconds']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
