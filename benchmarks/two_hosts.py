"""Train on two "hosts" with a slow link between them: plain ZeRO-3 beside hpZ, and beside coded collectives.

    sudo python benchmarks/two_hosts.py --mbit 200

The hosts are network namespaces of this machine, joined by a pair of virtual cards that `tc` lets through at the given
rate. Each is started as a machine is, by `accelerate launch --num_machines 2 --machine_rank`, with two gloo ranks. Each
layout trains, saves half-way (`save_state`), and is started anew from there: the losses have to be the same. A line for
each: seconds a step (median of rank 0), bytes that left the first host in a step (the card's own count, both
directions' headers included), and what is sent by formula. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "stage 3": {},
    "hpZ": {"secondary_shard_size": 2},
    "hpZ, int8 weights, int8 gradients": {
        "secondary_shard_size": 2,
        "communication": {"weights": "int8", "gradients": "int8"},
    },
    "hpZ, int8 weights, int4 gradients, feedback": {
        "secondary_shard_size": 2,
        "communication": {"weights": "int8", "gradients": "int4", "error_feedback": True},
    },
}
HOSTS = ("ourshard-a", "ourshard-b")
CARDS = ("ourshard-va", "ourshard-vb")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
RANKS = 2  # on each host


@dataclass(frozen=True, slots=True)
class Told:
    """What rank 0 wrote of one run."""

    losses: list[float]
    seconds: list[float]  # of each step
    sent: list[int]  # bytes that left the host up to the end of each step


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=200, help="rate of the link, each way")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--width", type=int, default=384, help="of each of 8 blocks of two square layers")
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- on each rank ------------------------------------------------------------------------------------------


def work(options: Mapping[str, Any]) -> None:
    """Train as a script of Accelerate does."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    accelerator = Accelerator()
    set_seed(0)
    width, steps = options["width"], options["steps"]
    model = nn.Sequential(*(Block(width) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    begin = 0
    if options["resume"]:
        accelerator.load_state(options["folder"])
        begin = steps // 2
    losses, seconds, sent = [], [], []
    counter = Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes")
    for step in range(begin, steps):
        generator = torch.Generator().manual_seed(1000 * step + accelerator.process_index)
        accelerator.wait_for_everyone()
        started = time.perf_counter()
        x = torch.randn(8, width, generator=generator)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
        seconds.append(time.perf_counter() - started)
        sent.append(int(counter.read_text()))
        if step + 1 == steps // 2 and not options["resume"]:
            accelerator.save_state(options["folder"])
            sent[-1] = int(counter.read_text())
    if accelerator.is_main_process:
        Path(options["told"]).write_text(json.dumps({"losses": losses, "seconds": seconds, "sent": sent}))
    accelerator.end_training()


# ---- the hosts ---------------------------------------------------------------------------------------------


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def two_hosts(mbit: int) -> Iterator[None]:
    """Make the namespaces and the slow pair of cards between them."""
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", CARDS[0], "type", "veth", "peer", "name", CARDS[1])
        for host, card, address in zip(HOSTS, CARDS, ADDRESSES, strict=True):
            ip("link", "set", card, "netns", host)
            ip("-n", host, "addr", "add", f"{address}/24", "dev", card)
            for each in (card, "lo"):
                ip("-n", host, "link", "set", each, "up")
            shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "400ms"]
            subprocess.run(["ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", card, *shape], check=True)
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False)


def run(layout: Mapping[str, Any], options: Mapping[str, Any], folder: Path, port: int) -> Told:
    """Launch both hosts and wait for them; raises RuntimeError with what they wrote where one fails."""
    config = folder / "config.yaml"
    lines = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "OURSHARD", "use_cpu": True}
    config.write_text(json.dumps({**lines, "mixed_precision": "no", "ourshard_config": {"stage": 3, **layout}}))
    told = folder / "told.json"
    told.unlink(missing_ok=True)
    started = []
    for rank, (host, card) in enumerate(zip(HOSTS, CARDS, strict=True)):
        accelerate = Path(sys.executable).with_name("accelerate")
        command = ["ip", "netns", "exec", host, str(accelerate), "launch", "--config_file", str(config)]
        command += ["--num_machines", "2", "--machine_rank", str(rank), "--num_processes", str(2 * RANKS)]
        command += ["--main_process_ip", ADDRESSES[0], "--main_process_port", str(port)]
        command += [__file__, "--worker", json.dumps({**options, "told": str(told)})]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": card, "OMP_NUM_THREADS": "1"}
        out = (folder / f"host-{rank}.log").open("w")
        started.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(codes) or not told.is_file():
        texts = "\n".join((folder / f"host-{rank}.log").read_text()[-3000:] for rank in (0, 1))
        raise RuntimeError(f"a host ended with {codes}:\n{texts}")
    return Told(**json.loads(told.read_text()))


def measure(name: str, args: argparse.Namespace, folder: Path, port: int) -> dict[str, Any]:
    """Train, and once more from the middle."""
    options = {"width": args.width, "steps": args.steps, "folder": str(folder / "saved"), "resume": False}
    whole = run(LAYOUTS[name], options, folder, port)
    resumed = run(LAYOUTS[name], {**options, "resume": True}, folder, port + 1)
    gone = [after - before for before, after in zip(whole.sent, whole.sent[1:], strict=False)]
    if args.steps // 2 - 1 < len(gone):
        del gone[args.steps // 2 - 2]  # the step of the save
    return {
        "layout": name,
        "seconds": round(statistics.median(whole.seconds[1:]), 3),
        "mbytes_sent": round(statistics.median(gone) / 1e6, 3),
        "resumed_alike": resumed.losses == whole.losses[args.steps // 2 :],
        "losses": whole.losses,
        "mbit": args.mbit,
        "parameters": 8 * 2 * (args.width**2 + args.width) + 8 * 2 * args.width,
    }


def main() -> None:
    args = parse_args()
    if args.worker:
        work(args.worker)
        return
    with two_hosts(args.mbit):
        for number, name in enumerate(args.layouts):
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(measure(name, args, Path(folder), 29600 + 2 * number)), flush=True)


if __name__ == "__main__":
    main()
