"""`ourshard plan`: what each configuration would cost, without a GPU and without weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from ourshard.config import ShardConfig
from ourshard.flags.files import refuse_existing, refuse_json, write_text
from ourshard.flags.result import FlagResult, from_values
from ourshard.flags.sources import resolve
from ourshard.flags.translate import compose
from ourshard.planning.hardware import GB, GIB, Hardware, hardware_of
from ourshard.planning.model import load_model, make_batch, parse_input
from ourshard.planning.plan import Planner, Row, Workload, candidates, cheapest, describe, halved, offloaded, scaling
from ourshard.planning.quantities import parse_rate, parse_size, parse_time
from ourshard.planning.report import as_dict, as_table, check_picture, plot_memory, plot_scaling
from ourshard.planning.variants import variant
from ourshard.runtime.wording import memory_text
from ourshard.values import flatten

_HELP = """Compare stages, hybrid shard and recomputation for MODEL; mark the cheapest that fits, and write its config.

Memory is counted on a run with fake tensors, step time is simulated; it needs no GPU and no weights. Where nothing
fits, or with --all, rows follow that keep optimizer and parameters in host memory, and on a disk where --set gives
offload.nvme_path. docs/plan.md tells how close the numbers are.

[bold]Examples[/]

A model folder on two nodes of eight H100, and the YAML to launch it with:

  ourshard plan path/to/model --gpus 16 --nodes 2 --length 4096 -o config.yaml

Where the memory goes, as a picture, with what a card of yours can really use:

  ourshard plan path/to/model --gpu a100 --memory 78 --plot memory.png

A class of your own, told how it is built and what it is given:

  ourshard plan mypackage.model:Net --with width=1024 --input x=8x1024:float32

Only configurations with coded gathers, for a script to read:

  ourshard plan path/to/model --set communication.weights=int8 --json

[bold]Exit codes[/]: 0 something fits; 1 nothing does; 2 the command was not understood."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
_COUNTS = [2**power for power in range(15)]  # 1 to 16,384


_Names = list[str] | None
_Memory = Annotated[
    float | None,
    typer.Option(
        parser=parse_size,
        metavar="GIB",
        help="GiB that a process can use on a GPU; else the card's, less what CUDA takes.",
    ),
]
_Link = Annotated[
    float | None,
    typer.Option(
        parser=parse_rate, metavar="GB/S", help="GB/s of a GPU to others of its node, one way; else the card's."
    ),
]
_Network = Annotated[
    float | None,
    typer.Option(
        parser=parse_rate, metavar="GB/S", help="GB/s of a GPU to other nodes; else the usual of such machines."
    ),
]
_HostMemory = Annotated[
    float | None,
    typer.Option(
        parser=parse_size, metavar="GIB", help="GiB of a node's memory that its ranks may take; else without a limit."
    ),
]
_Disk = Annotated[
    float | None, typer.Option(parser=parse_rate, metavar="GB/S", help="GB/s of a node's disk; else a guess of 3.")
]
_KernelStart = Annotated[
    float | None,
    typer.Option(
        parser=parse_time,
        metavar="US",
        help="Microseconds of the host to start a kernel, as `ourshard doctor` measures; else a wide guess.",
    ),
]


@app.command(no_args_is_help=True, help="\n\n".join(" ".join(part.split("\n")) for part in _HELP.split("\n\n")))
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a config.json, or module:Class.")],
    *,
    options: Annotated[_Names, typer.Option("--with", help="KEY=VALUE of the config or the class.")] = None,
    gpu: Annotated[
        str, typer.Option(help="b200, h200, h100, a100, a100-40, l40s or rtx4090; sets the next ones.")
    ] = "h100",
    gpus: Annotated[int, typer.Option(help="GPUs over all nodes.")] = 8,
    nodes: Annotated[int, typer.Option(help="Nodes that they fill.")] = 1,
    memory: _Memory = None,
    link: _Link = None,
    network: _Network = None,
    host_memory: _HostMemory = None,
    disk: _Disk = None,
    kernel_start: _KernelStart = None,
    batch: Annotated[int, typer.Option(help="Samples of one rank in one forward.")] = 1,
    length: Annotated[int, typer.Option(help="Tokens of a sample.")] = 2048,
    inputs: Annotated[_Names, typer.Option("--input", help="NAME=SHAPE:DTYPE, for your own.")] = None,
    accumulate: Annotated[int, typer.Option(help="Forwards in an optimizer step.")] = 1,
    optimizer: Annotated[str, typer.Option(help="adamw, momentum or sgd.")] = "adamw",
    mixed_precision: Annotated[str, typer.Option(help="no, fp16 or bf16.")] = "bf16",
    base: Annotated[_Names, typer.Option("--set", help="Keep these keys: short form or a file.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Compare shards over half of a node, and offload, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw memory by kind to this PNG.")] = None,
    curve: Annotated[Path | None, typer.Option("--scaling", help="Draw 1 to 16,384 GPUs to this PNG.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the cheapest that fits as YAML.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write over a file that is there.")] = False,
) -> None:
    """Print the plan; see `_HELP`."""
    try:
        if output is not None:
            refuse_existing(output, overwrite=overwrite)
            refuse_json(output)
        for option, path in (("--plot", plot), ("--scaling", curve)):
            if path is not None:
                check_picture(path, option)
        measured = {"link_rate": link, "network_rate": network, "disk_rate": disk}
        sizes = {"memory": memory, "host_memory": host_memory}
        hardware = _adjusted(hardware_of(gpu, gpus, nodes), measured, sizes, kernel_start)
        built = load_model(model, _options(options))
        given = dict(parse_input(text) for text in inputs or ())
        workload = Workload(make_batch(built, batch, length, given), accumulate, optimizer, mixed_precision)
        planner, fixed = Planner(built, workload, hardware), resolve({f"--set {text}": text for text in base or ()}, {})
        rows = _compared(planner, hardware, fixed, every)
        chosen = cheapest(rows)
        _print(rows, hardware, chosen, as_json)
        if plot is not None:
            plot_memory(rows, hardware, plot)
        if curve is not None:
            _draw_scaling(planner, hardware, fixed, curve)
        if output is not None and chosen is not None:
            _write(output, chosen, hardware, mixed_precision, overwrite)
    except (ValueError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(0 if chosen is not None else 1)


def _compared(planner: Planner, hardware: Hardware, fixed: FlagResult, every: bool) -> list[Row]:
    """Return a row for each configuration that has what was fixed; those with offload where asked, or nothing fits."""
    start, kept = fixed.config, set(fixed.said)
    rows = planner.rows(candidates(start, hardware, kept))
    if not rows:
        raise ValueError(f"--set: none of the configurations that are compared has {', '.join(sorted(kept))} so.")
    if every:
        rows += planner.rows(halved(start, hardware, kept))
    if every or cheapest(rows) is None:
        rows += planner.rows(offloaded(start, hardware, kept))
    return rows


def _adjusted(
    hardware: Hardware, rates: dict[str, float | None], sizes: dict[str, float | None], kernel_start: float | None
) -> Hardware:
    """Put what the user knows in the place of the data sheet's numbers: rates in GB/s, sizes in GiB, a start in us."""
    given = {name: value for name, value in (rates | sizes).items() if value is not None}
    changes = {name: int(value * GIB) if name in sizes else value * GB for name, value in given.items()}
    hardware = hardware.replace(**changes)
    return hardware if kernel_start is None else hardware.starting(kernel_start / 1e6)


def _options(given: list[str] | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--with: {text!r} is not KEY=VALUE.")
        options[name] = yaml.safe_load(value)
    return options


def _print(rows: list[Row], hardware: Hardware, chosen: Row | None, as_json: bool) -> None:
    if as_json:
        document = {"rows": [as_dict(row) for row in rows], "cheapest": chosen.name if chosen else None}
        typer.echo(json.dumps(document, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 190)
    console.print(as_table(rows, hardware, chosen))
    if chosen is None:
        least = min(rows, key=lambda row: row.memory.peak).memory
        host = least.host * hardware.ranks_per_node
        needs = memory_text(least.peak) + (f", and {memory_text(host)} on the host of each node" if host else "")
        console.print(f"None fits: the smallest needs {needs}. Use more GPUs, a smaller --batch or --length.")
    else:
        console.print(f"* the cheapest that fits: {chosen.name}")
    if chosen is not None and chosen.codecs:
        console.print(f"Predicted for its links: {chosen.codecs}.")
    if chosen is not None and chosen.memory.host:
        need = chosen.memory.host * hardware.ranks_per_node
        console.print(f"It needs {memory_text(need)} of memory on the host of each node.")


def _draw_scaling(planner: Planner, hardware: Hardware, fixed: FlagResult, path: Path) -> None:
    node = hardware.gpus_per_node
    counts = [count for count in _COUNTS if count <= node or count % node == 0]
    drawn = _curves(fixed.config, set(fixed.said))
    plot_scaling({describe(config): scaling(planner, config, counts) for config in drawn}, path)


def _curves(base: ShardConfig, kept: Collection[str]) -> list[ShardConfig]:
    """Return what to draw over the number of GPUs: each stage, and stage 3 with a copy in each node."""
    drawn = [{"stage": stage, "shard_size": None} for stage in (0, 1, 2, 3)] + [{"stage": 3, "shard_size": "node"}]
    varied = ({key: value for key, value in each.items() if key not in kept} for each in drawn)
    configs = (variant(base, secondary_shard_size=None, **changes) for changes in varied)
    return list(dict.fromkeys(config for config in configs if config is not None))


def _write(path: Path, chosen: Row, hardware: Hardware, mixed_precision: str, overwrite: bool) -> None:
    said = from_values(_differences(chosen.config), "plan")
    accelerate: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": mixed_precision,
        "num_processes": hardware.gpus,
        "num_machines": hardware.nodes,
        "machine_rank": 0,
        "use_cpu": False,
    }
    if hardware.nodes > 1:
        accelerate |= {"main_process_ip": None, "main_process_port": 29500, "rdzv_backend": "static"}
        typer.echo(
            "note: say at the launch where the first machine is, and which this is: --main_process_ip ADDRESS "
            "--machine_rank N",
            err=True,
        )
    write_text(path, compose(said, accelerate), overwrite=overwrite)
    typer.echo(f"wrote {path}", err=True)


def _differences(config: ShardConfig) -> dict[str, Any]:
    """Return the keys in which `config` differs from the defaults, and the stage; dtypes follow mixed precision."""
    mine, default = flatten(config.to_dict()), flatten(ShardConfig().to_dict())
    kept = [key for key in mine if mine[key] != default[key] and key != "precision.param_dtype"]
    return {key: mine[key] for key in ("stage", *(key for key in kept if key != "stage"))}
