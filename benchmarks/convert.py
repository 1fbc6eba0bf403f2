"""Convert large checkpoints, beside a plain copy of the same bytes and the tools of others: seconds, rate, peak memory.

python benchmarks/convert.py --folder /path/on/the/disk [--gigabytes 6] [--peer-gigabytes 1] [--deepspeed-python PYTHON]
python benchmarks/convert.py --folder /path/on/the/disk --gigabytes 2 --peer-gigabytes 0 --inside

Every line is a process of its own; its peak resident memory is what the kernel counted. With `--inside` it is a call in
this one, without the start of Python and torch. All results of ours are flushed to the disk, and the copies too; those
of the others as they do it. With `--deepspeed-python`, zero_to_fp32 of that environment converts the same ZeRO-2 folder
as we do.
"""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ourshard.checkpoint.conversion import convert as convert_inside
from ourshard.checkpoint.source import detect
from ourshard.runtime.wording import file_text, memory_text
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

WIDTH = 4096
ROWS = 2048  # 32 MiB in fp32

TARGETS: dict[str, dict[str, Any]] = {
    "to ourshard, 4 ranks": {"to": "ourshard", "world_size": 4},
    "to ourshard, 1 rank": {"to": "ourshard"},
    "to safetensors, files of 2 GB": {"to": "safetensors", "max_shard_size": "2GB"},
    "to safetensors, bf16": {"to": "safetensors", "dtype": "bf16"},
    "to torch.save": {"to": "torch", "max_shard_size": "2GB"},
    "to dcp": {"to": "dcp"},
}


def copy_flushed(source: str | Path, target: str | Path) -> None:
    """Copy the files of a folder and flush each."""
    os.mkdir(target)
    for name in sorted(os.listdir(source)):
        shutil.copyfile(os.path.join(source, name), os.path.join(target, name))
        with open(os.path.join(target, name), "rb") as file:
            os.fsync(file.fileno())


COPY = f"""
import os, shutil, sys
from pathlib import Path
{inspect.getsource(copy_flushed)}
copy_flushed(*sys.argv[1:])
"""


@dataclass(frozen=True)
class Run:
    """What a process took."""

    what: str
    seconds: float
    cpu_seconds: float
    peak_nbytes: int
    source_nbytes: int


def make_weights(folder: Path, nbytes: int) -> None:
    """Write random fp32 weights in files of about 1 GB, and a few thousand small tensors."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(ROWS, WIDTH, generator=generator)
    count = max(1, nbytes // block.nbytes)
    per_file = 32
    for first in range(0, count, per_file):
        tensors = {f"layers.{n}.weight": block + n for n in range(first, min(count, first + per_file))}
        tensors |= {
            f"layers.{n}.{part}": torch.full((WIDTH,), float(n))
            for n in range(first, first + per_file)
            for part in "abcd"
        }
        save_file(tensors, folder / f"model-{first // per_file + 1:05d}-of-{-(-count // per_file):05d}.safetensors")


def make_zero2(folder: Path, nbytes: int) -> None:
    """Write what zero_to_fp32 reads of a ZeRO-2 checkpoint of two ranks: flat fp32 partitions and the shapes."""
    tag = folder / "global_step1"
    tag.mkdir(parents=True)
    count = max(2, nbytes // (4 * ROWS * WIDTH)) // 2 * 2
    shapes = {f"layers.{number}.weight": torch.Size((ROWS, WIDTH)) for number in range(count)}
    generator = torch.Generator().manual_seed(0)
    for rank in range(2):
        part = torch.randn(count // 2 * ROWS * WIDTH, generator=generator)
        state = {"step": torch.tensor(1.0), "exp_avg": part, "exp_avg_sq": part}
        optimizer = {
            "zero_stage": 2,
            "partition_count": [2],
            "single_partition_of_fp32_groups": [part],
            "base_optimizer_state": {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]},
            "group_paddings": [0],
            "ds_version": "0.19.8",
        }
        content = {"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(content, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        del part, state, optimizer, content
    module = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    model = {
        "module": module,
        "buffer_names": [],
        "param_shapes": [shapes],
        "shared_params": {},
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "ds_version": "0.19.8",
        "dp_world_size": 2,
        "mp_world_size": 1,
    }
    torch.save(model, tag / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step1")


def measure(what: str, command: Sequence[str], source: Path) -> Run:
    """Run a command; raise if it fails."""
    os.sync()
    began = time.perf_counter()
    process = os.spawnvp(os.P_NOWAIT, command[0], list(command))
    _, status, usage = os.wait4(process, 0)
    seconds = time.perf_counter() - began
    if status != 0:
        raise RuntimeError(f"{what} failed: {' '.join(map(str, command))}")
    nbytes = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    return Run(what, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, nbytes)


def convert(src: Path, dst: Path, *options: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "ourshard.cli",
        "convert",
        str(src),
        str(dst),
        "--quiet",
        "--memory",
        "1GiB",
        *options,
    ]


def show(title: str, runs: Sequence[Run], copies: Sequence[Run | None]) -> None:
    """Print a line for each run, and how its rate compares with the copy that was made right before it."""
    table = Table("what", "seconds", "CPU seconds", "rate", "peak memory", "of the copy", title=title)
    for run, copy in zip(runs, copies, strict=True):
        table.add_row(
            run.what,
            f"{run.seconds:.1f}",
            f"{run.cpu_seconds:.1f}",
            f"{file_text(run.source_nbytes / run.seconds)}/s",
            memory_text(run.peak_nbytes),
            f"{100 * copy.seconds / run.seconds:.0f}%" if copy else "",
        )
    Console(width=120).print(table)


def own_runs(folder: Path, nbytes: int, repeat: int, only: Sequence[str]) -> None:
    source = folder / "weights"
    make_weights(source, nbytes)
    copy = [sys.executable, "-c", COPY, str(source), str(folder / "out")]
    runs: list[Run] = []
    copies: list[Run | None] = []
    for what in only:
        wanted = TARGETS[what]
        options = [text for name, value in wanted.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        # A copy before each run, and the pair with the median ratio: the disk and the cores may be shared.
        pairs = []
        for _ in range(repeat):
            made = []
            for name, command in (("copy", copy), (what, convert(source, folder / "out", *options))):
                made.append(measure(name, command, source))
                shutil.rmtree(folder / "out")
            pairs.append(made)
        pairs.sort(key=lambda pair: pair[0].seconds / pair[1].seconds)
        first, second = pairs[len(pairs) // 2]
        runs += [first, second]
        copies += [None, first]
    shutil.rmtree(source)
    show(f"{nbytes / 1e9:g} GB of fp32 weights, --memory 1GiB, median of {repeat}", runs, copies)


def inside_runs(folder: Path, nbytes: int, repeat: int, only: Sequence[str]) -> None:
    """Time calls in this process, each right after a copy; the median ratio of all."""
    source, out = folder / "weights", folder / "out"
    make_weights(source, nbytes)
    table = Table(
        "what", "copy, seconds", "seconds", "CPU seconds", "of the copy", title=f"{nbytes / 1e9:g} GB, inside"
    )
    for what in only:
        options = TARGETS[what]
        pairs = []
        for _ in range(repeat):
            os.sync()
            began = time.perf_counter()
            copy_flushed(source, out)
            copied = time.perf_counter() - began
            shutil.rmtree(out)
            os.sync()
            began, used = time.perf_counter(), time.process_time()
            convert_inside(source, out, memory="1GiB", **options)
            pairs.append((copied, time.perf_counter() - began, time.process_time() - used))
            shutil.rmtree(out)
        copied, seconds, cpu = sorted(pairs, key=lambda pair: pair[0] / pair[1])[repeat // 2]
        table.add_row(what, f"{copied:.2f}", f"{seconds:.2f}", f"{cpu:.2f}", f"{100 * copied / seconds:.0f}%")
    shutil.rmtree(source)
    Console(width=120).print(table)


def peer_runs(folder: Path, nbytes: int, deepspeed_python: str | None) -> None:
    runs: list[Run] = []
    make_weights(folder / "weights", nbytes)
    measure("dcp", convert(folder / "weights", folder / "pytorch_model_fsdp_0", "--to", "dcp"), folder / "weights")
    shutil.rmtree(folder / "weights")
    dcp = folder / "pytorch_model_fsdp_0"
    with detect(dcp) as source:
        inner = source.path if (source.path / ".metadata").exists() else next(source.path.rglob(".metadata")).parent
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    for name, command in (
        ("accelerate merge-weights of DCP", [accelerate, "merge-weights", str(inner), str(folder / "out")]),
        ("ourshard of DCP", convert(dcp, folder / "out", "--to", "safetensors")),
    ):
        runs.append(measure(name, command, dcp))
        shutil.rmtree(folder / "out")
    shutil.rmtree(dcp)
    if deepspeed_python:
        zero = folder / "zero2"
        make_zero2(zero, nbytes)
        tool = [deepspeed_python, "-m", "deepspeed.utils.zero_to_fp32", str(zero), str(folder / "out")]
        options = ("--to", "safetensors", "--weights-only")
        for name, command in (
            ("zero_to_fp32 of ZeRO-2", tool),
            ("zero_to_fp32 of ZeRO-2, safetensors", [*tool, "--safe_serialization"]),
            ("ourshard of ZeRO-2", convert(zero, folder / "out", *options)),
            ("ourshard of ZeRO-2, with the optimizer", convert(zero, folder / "out", "--to", "ourshard")),
        ):
            runs.append(measure(name, command, zero))
            shutil.rmtree(folder / "out")
        shutil.rmtree(zero)
    show(f"{nbytes / 1e9:g} GB of fp32 weights", runs, [None] * len(runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an empty or new folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peer-gigabytes", type=float, default=1.0)
    parser.add_argument("--inside", action="store_true", help="calls in this process, not processes")
    parser.add_argument("--only", action="append", choices=TARGETS, help="this target alone (again for more)")
    parser.add_argument("--deepspeed-python", help="Python of an environment with deepspeed")
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"{folder} is not empty")
    if arguments.gigabytes:
        run = inside_runs if arguments.inside else own_runs
        run(folder, int(arguments.gigabytes * 1e9), arguments.repeat, arguments.only or list(TARGETS))
    if arguments.peer_gigabytes:
        peer_runs(folder, int(arguments.peer_gigabytes * 1e9), arguments.deepspeed_python)


if __name__ == "__main__":
    main()
