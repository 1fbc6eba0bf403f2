"""Train on two "hosts" of this machine: network namespaces with a slow link between them. Needs root, `ip` and `tc`.

    python benchmarks/two_hosts.py --mbit 100

Each host has 2 ranks and is started as a machine of its own: accelerate launch --num_machines 2 --machine_rank 0 or 1.
Every variant trains the same model; its bytes are those that the link's interface counted, in both directions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
HOSTS, LINK = ("ourshard0", "ourshard1"), "ourshard"
ADDRESSES, PORT = ("10.77.0.1", "10.77.0.2"), 29577

VARIANTS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "two-hop gathers": {"communication": {"two_hop_gathers": True}},
    "hpZ": {"secondary_shard_size": 2},
    "int8 weights": {"communication": {"weights": "int8"}},
    "hpZ, int8 weights": {"secondary_shard_size": 2, "communication": {"weights": "int8"}},
    "hpZ, int8 weights, int8 gradients": {
        "secondary_shard_size": 2,
        "communication": {"weights": "int8", "gradients": "int8"},
    },
    "hpZ, int8 weights, int4 gradients, error feedback": {
        "secondary_shard_size": 2,
        "communication": {"weights": "int8", "gradients": "int4", "error_feedback": True},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=100, help="megabits a second, in each direction")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--timeout", type=int, default=240, help="seconds for one variant")
    parser.add_argument("--out", type=Path, help="also append the figures to this file, as JSON lines")
    options = parser.parse_args()
    results = []
    with two_hosts(options.mbit):
        for name in options.variants:
            before = link_bytes()
            told = train(VARIANTS[name], ["--steps", str(options.steps)], options.timeout)
            result = {"variant": name, "mbit": options.mbit, **told, "link_bytes": link_bytes() - before}
            results.append(result)
            print(name, f"{result['step_s']:.2f} s a step", flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    show(results, options)


@contextmanager
def two_hosts(mbit: int) -> Iterator[None]:
    """Make two network namespaces that reach each other alone, through a link of limited rate."""
    try:
        for host in HOSTS:
            _ip("netns", "add", host)
            _ip("-n", host, "link", "set", "lo", "up")
        _ip("link", "add", LINK, "netns", HOSTS[0], "type", "veth", "peer", "name", LINK, "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            _ip("-n", host, "address", "add", f"{address}/24", "dev", LINK)
            _ip("-n", host, "link", "set", LINK, "up")
            limit = ["rate", f"{mbit}mbit", "burst", "64k", "latency", "200ms"]
            _run("tc", "-n", host, "qdisc", "add", "dev", LINK, "root", "tbf", *limit)
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


def link_bytes() -> int:
    """Return the bytes that went over the link so far, in both directions."""
    found = 0
    for name in ("rx_bytes", "tx_bytes"):
        command = ["ip", "netns", "exec", HOSTS[0], "cat", f"/sys/class/net/{LINK}/statistics/{name}"]
        found += int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def train(shard: dict[str, Any], words: list[str], timeout: int = 240) -> dict[str, Any]:
    """Run `two_hosts_train.py` on both hosts; return what it told. Raises RuntimeError with the output if one fails."""
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(_config(shard)))
        started = [_start(rank, config, words) for rank in range(len(HOSTS))]
        try:
            outputs = [process.communicate(timeout=timeout)[0] for process in started]
        except subprocess.TimeoutExpired:
            outputs = [_end(process) for process in started]
            raise RuntimeError("no end within the time given:\n" + "\n".join(outputs)) from None
    if any(process.returncode for process in started):
        raise RuntimeError("training failed:\n" + "\n".join(outputs))
    line = next(line for line in outputs[0].splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))  # type: ignore[no-any-return]


def _config(shard: dict[str, Any]) -> dict[str, Any]:
    machines = {"num_machines": 2, "num_processes": 4, "main_process_ip": ADDRESSES[0], "main_process_port": PORT}
    fixed = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "OURSHARD", "rdzv_backend": "static"}
    section = {"stage": 3, "timeout": 60, "persist_below": 500, **shard}
    return {**fixed, **machines, "machine_rank": 0, "use_cpu": True, "ourshard_config": section}


def _start(rank: int, config: Path, words: list[str]) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", HOSTS[rank], sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    command += ["--config_file", str(config), "--num_machines", "2", "--machine_rank", str(rank)]
    command += [str(HERE / "two_hosts_train.py"), *words]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload, no-any-return]


def _end(process: subprocess.Popen[str]) -> str:
    os.killpg(process.pid, 9)
    return process.communicate()[0]


def show(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print a table; ratios are to the first variant."""
    table = Table(title=f"two hosts, 2 ranks each, {options.mbit} Mbit/s; {results[0]['parameters']:,} parameters")
    for column in ("variant", "s a step", "times faster", "MB over the link", "of the bytes", "last loss"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    first = results[0]
    for result in results:
        times, share = first["step_s"] / result["step_s"], result["link_bytes"] / first["link_bytes"]
        figures = [f"{result['step_s']:.2f}", f"{times:.2f}", f"{result['link_bytes'] / 1e6:.0f}", f"{share:.2f}"]
        table.add_row(result["variant"], *figures, f"{result['losses'][-1]:.4f}")
    Console().print(table)


if __name__ == "__main__":
    main()
