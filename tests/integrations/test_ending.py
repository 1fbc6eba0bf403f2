"""A failing rank ends the job in seconds, and its traceback is the last in the log (CASES.md, D05)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from ourshard.integrations.ending import about_a_lost_connection
from packaging.version import Version

from tests.commands import free_port, launch, run_cli

FAILING = """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))
for step in range(5):
    if step == 3 and accelerator.process_index == 1:
        raise KeyError("batch 42 is bad")
    model(torch.ones(2, 64)).sum().backward()
"""

# Trains, and leaves without a word to the process group.
LEAVING = """
import atexit
import torch
import torch.distributed as dist
import glob
import threading
def threads():
    return [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
def last():
    left = [name for name in threads() if "gloo" in name]
    left += [thread.name for thread in threading.enumerate() if "ourshard" in thread.name]
    print(f"DESTROYED {not dist.is_initialized()} LEFT {left} OF {had}\\n", end="", flush=True)
atexit.register(last)
from accelerate import Accelerator
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(64, 64))
model(torch.ones(2, 64)).sum().backward()
accelerator.get_state_dict(model)
accelerator.wait_for_everyone()
had = sum("gloo" in name for name in threads())
"""

LAUNCHERS = """
import sys
import torch
from accelerate import Accelerator, {launcher}
import ourshard

def train(*args):
    accelerator = Accelerator()
    model, start = torch.nn.Linear(64, 64), torch.arange(64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(start + accelerator.process_index).sum())
    optimizer.step()
    stage = ourshard.engine_of(model).config.stage
    print(f"TRAINED {{type(accelerator).__name__}} {{accelerator.num_processes}} {{stage}}\\n", end="", flush=True)

if __name__ == "__main__":
    ourshard.enable({{"stage": 2}})
    {launcher}(train, num_processes=2{port})
"""


@pytest.mark.ranks
def test_the_first_traceback_is_the_last_in_the_log_and_no_rank_waits_for_the_one_that_failed(tmp_path: Path):
    """A rank that waited would do so for half an hour, as long as a collective may take."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    result = launch(script, check=False)
    assert result.returncode == 1
    last = result.stderr[result.stderr.rindex("Root Cause") :]
    assert "rank      : 1" in last
    assert 'raise KeyError("batch 42 is bad")' in last
    assert "KeyError: 'batch 42 is bad'" in last
    assert result.stderr.count("[rank0]: Traceback") == 0


@pytest.mark.ranks
@pytest.mark.parametrize(
    "end",
    [
        pytest.param("", id="just_ends"),
        pytest.param("accelerator.end_training()", id="ends_training", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_ends_leaves_its_process_groups_and_their_threads(tmp_path: Path, end: str):
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING + end)
    told = launch(script).stdout
    assert told.count("DESTROYED True") == 2
    # A thread that frees a tensor while the interpreter goes down aborts the process. Older gloos don't name theirs.
    had = "[1-9]" if Version(torch.__version__) >= Version("2.13") else "[0-9]"
    assert len(re.findall(rf"LEFT \[\] OF {had}", told)) == 2, told


@pytest.mark.ranks
@pytest.mark.parametrize("launcher", [pytest.param("debug_launcher", marks=pytest.mark.slow), "notebook_launcher"])
def test_a_launcher_that_forks_runs_sharded_ranks(tmp_path: Path, launcher: str):
    script = tmp_path / "forking.py"
    port = f", use_port='{free_port()}'" if launcher == "notebook_launcher" else ""
    script.write_text(LAUNCHERS.format(launcher=launcher, port=port))
    assert run_cli([sys.executable, script]).stdout.count("TRAINED ShardAccelerator 2 2") == 2


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (ConnectionResetError(), False),  # of a data set's server, or a worker that was killed
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("gloo"), False),
    ],
)
def test_only_errors_about_connections_count_as_caused_by_another_rank(error: Exception, lost: bool):
    assert about_a_lost_connection(error) is lost
