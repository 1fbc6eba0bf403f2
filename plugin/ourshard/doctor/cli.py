"""`ourshard doctor`: one process, several that it starts itself, or one rank of a launcher's."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ourshard.doctor.finding import Finding, Verdict
from ourshard.doctor.report import as_table, verdict_line
from ourshard.runtime.wording import counted

_HELP = """Measure what training leans on and take a few training steps, in under a minute; say what to mend.

Looks at versions, GPUs and links, host memory and limits, disk, AdamW on the host; with several ranks also at the rates
of all-gather and reduce-scatter and at the clocks. Then a small model is trained at stages 0 to 3 and compared with one
process.

[bold]Examples[/]

This machine, one process:

  ourshard doctor

Two ranks of this machine:

  ourshard doctor --processes 2

Every rank of a cluster, as training would start; rank 0 prints:

  accelerate launch --config_file config.yaml -m ourshard.doctor

The disk that checkpoints go to, for a script to read:

  ourshard doctor --folder /scratch/run --json

[bold]Exit codes[/]: 0 nothing stands in the way (notes may say what could be better); 1 a problem was found; 2 the
command was not understood."""

_FEW = 64  # ranks that any machine may be asked for; more take as many cores

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command(help="\n\n".join(" ".join(paragraph.split("\n")) for paragraph in _HELP.split("\n\n")))
def doctor(
    *,
    processes: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine, one a GPU.")] = 1,
    folder: Annotated[
        Path,
        typer.Option(exists=True, file_okay=False, writable=True, help="The disk to measure: where checkpoints go."),
    ] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Run the examination and print it on rank 0; see `_HELP`."""
    from ourshard.doctor.examination import Report, examine

    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    try:
        report: Report | None
        if processes > 1:
            _check_processes(processes, launched)
            report = _examine_ranks(processes, folder.resolve())
        else:
            report = examine(folder.resolve())
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    if report is None:  # another rank prints, and gives the exit code
        return
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 150)
        console.print(as_table(report))
        console.print(verdict_line(report), highlight=False)
    raise typer.Exit(0 if report.healthy else 1)


def _check_processes(processes: int, launched: bool) -> None:
    import torch

    from ourshard.doctor.examination import uses_gpus

    if launched:
        raise ValueError("--processes: a launcher has started the ranks already; leave it out.")
    if uses_gpus() and processes > torch.cuda.device_count():
        raise ValueError(
            f"--processes: {counted(processes, 'rank')} and {counted(torch.cuda.device_count(), 'visible GPU')}; each "
            "rank needs one: give fewer, or set ACCELERATE_USE_CPU=true."
        )
    most = max(_FEW, os.cpu_count() or 1)
    if processes > most:
        raise ValueError(
            f"--processes: {counted(processes, 'rank')} are too many for this machine: give at most {most}."
        )


def _examine_ranks(processes: int, folder: Path) -> Any:
    """Run `examine` in processes of their own; a rank that dies is the report."""
    import torch.multiprocessing as mp

    from ourshard.doctor.examination import Report

    answers = mp.get_context("spawn").SimpleQueue()
    arguments = (processes, _free_port(), folder, answers)
    ranks = mp.start_processes(_one_rank, arguments, processes, join=False, daemon=True, start_method="spawn")
    try:
        while answers.empty() and not ranks.join(timeout=0.2):
            pass
        report = answers.get()  # before the ranks are joined: a long one would block its sender
        while not ranks.join():
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        text = f"it ended: {str(error).strip().splitlines()[-1]}"
        fix = "Run it again with NCCL_DEBUG=INFO (or TORCH_CPP_LOG_LEVEL=INFO) and look at what that rank says."
        Console(stderr=True).print(escape(str(error)), highlight=False)
        return Report((Finding("ranks", text, Verdict.PROBLEM, fix, ranks=(error.error_index,)),), processes, 0.0)
    return report


def _one_rank(rank: int, processes: int, port: int, folder: Path, answers: Any) -> None:
    import torch

    from ourshard.doctor.examination import examine

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if "OMP_NUM_THREADS" not in os.environ:  # all of them on all cores would measure how they fight
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
    report = examine(folder)
    if report is not None:
        answers.put(report)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
