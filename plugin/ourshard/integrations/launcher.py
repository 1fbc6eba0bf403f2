"""The launcher's half of the contract: `accelerate launch` tells its workers that ourshard is on, and how.

Each function stands around the function of accelerate with its name, which makes the environment or the command of the
workers. Where ourshard was not asked for, it adds nothing.
"""

from __future__ import annotations

import json
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from ourshard.flags.deepspeed import blocks_of
from ourshard.flags.result import RUN, FlagResult, build, disagreement, merge
from ourshard.flags.sources import for_environment, from_environment
from ourshard.flags.translate import elsewhere, of_blocks
from ourshard.integrations.cluster_config import Section
from ourshard.integrations.notes import say_once
from ourshard.integrations.switch import (
    ACCUMULATION,
    BLOCKS,
    DISABLE,
    GRAD_SCALER,
    GRADIENT_CLIPPING,
    SWITCH,
    ConfigError,
    flag,
)
from ourshard.runtime.wording import counted

logger = logging.getLogger("ourshard")

Environment = dict[str, str]
# Read by accelerate itself in the workers, which would set up the other engine.
_OTHER_ENGINES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
# Flags of accelerate launch that it keeps for DeepSpeed: those that mean the same for every engine, and the rest.
_RUN_FLAGS = ("gradient_accumulation_steps", "gradient_clipping")
_DEEPSPEED_FLAGS = (
    *("deepspeed_config_file", "zero_stage", "zero3_init_flag", "zero3_save_16bit_model"),
    *("offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
)
_ON_CPU = "ACCELERATE_USE_CPU"
# Of a run's settings
_HANDED_OVER = (
    *("mixed_precision", "gradient_accumulation_steps", "gradient_clipping", "grad_scaler"),
    *("optimizer", "scheduler"),
)
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # see `_let_ranks_restart` in `_ourshard_autoload`


def prepare_multi_gpu_env(prepare: Callable[[Namespace], Environment], args: Namespace) -> Environment:
    """Return the environment of workers that torchrun will start."""
    wanted = _wanted(args)
    if wanted is not None:
        if args.num_processes is not None and args.num_processes < 1:
            raise ConfigError(f"num_processes: {args.num_processes} starts no rank; it must be 1 or more.")
        _take_mixed_precision(wanted, args)
    environment = prepare(args)
    if wanted is not None:
        _hand_over(environment, wanted, args)
        # accelerate exports this for one process only; without it n ranks on CPUs would train n models side by side
        environment[_ON_CPU] = str(_on_cpu(args)).lower()
        _say_where_no_gpu_is(args)
        _let_ranks_restart(args)
    return environment


def _take_mixed_precision(wanted: FlagResult, args: Namespace) -> None:
    """Let a block of DeepSpeed's file decide where no flag does, as the config file's reader does for its own."""
    said = wanted.run.mixed_precision
    if said is None or not args.use_deepspeed:
        return
    if "mixed_precision" in args.nondefault and args.mixed_precision != said:
        origin = wanted.origins[f"{RUN}mixed_precision"]
        raise ConfigError(disagreement("mixed_precision", args.mixed_precision, "--mixed_precision", said, origin))
    args.mixed_precision = said


def _say_where_no_gpu_is(args: Namespace) -> None:
    import torch

    if not _on_cpu(args) and not torch.accelerator.is_available():
        logger.warning(
            "use_cpu is false and this machine has no GPU that torch %s can use: the ranks train on its CPUs. "
            "`ourshard doctor` says more; use_cpu: true says that it is meant.",
            torch.__version__,
        )


def _let_ranks_restart(args: Namespace) -> None:
    """Take torchrun's c10d rendezvous where ranks may be started anew, which has a store for each start.

    The static one, accelerate's default, keeps one store; there the new ranks find the addresses of the lost ones.
    """
    if not getattr(args, "max_restarts", 0) or args.rdzv_backend != "static":
        return
    if (args.num_machines or 1) > 1:
        raise ConfigError(
            f"max_restarts: {args.max_restarts} needs rdzv_backend: c10d and same_network: false on several machines; "
            "in the static rendezvous ranks that are started anew find the addresses of the lost ones, and can't join."
        )
    args.standalone = True


def prepare_simple_launcher_cmd_env(
    prepare: Callable[[Namespace], tuple[list[str], Environment]], args: Namespace
) -> tuple[list[str], Environment]:
    """Return command and environment of a launch that accelerate makes without torchrun.

    That is what `--cpu` does, or a launch without a GPU and without a config file: one process, whatever
    `--num_processes` says. For ourshard the command becomes torchrun's.
    """
    wanted = _wanted(args)
    command, environment = prepare(args)
    if wanted is not None:
        _hand_over(environment, wanted, args)
        if (args.num_processes or 1) > 1 and getattr(args, "mpirun_hostfile", None) is None:
            command = _torchrun(args)
            environment[_ON_CPU] = str(_on_cpu(args)).lower()
    return command, environment


def _on_cpu(args: Namespace) -> bool:
    return bool(args.cpu or getattr(args, "use_cpu", False))


def _wanted(args: Namespace) -> FlagResult | None:
    """Return what the launch asks of ourshard; None when it does not ask for it."""
    section = getattr(args, "ourshard_config", None)
    if isinstance(section, Section):
        if args.use_fsdp or args.use_deepspeed:
            other = "--use_fsdp" if args.use_fsdp else "--use_deepspeed"
            raise ConfigError(f"{other} and the config file's ourshard disagree about the engine; leave {other} out.")
        sources = [section.result]
    elif flag(SWITCH):
        sources = []
    else:
        return None
    if flag(DISABLE):
        return None
    try:
        if args.use_fsdp:
            sources.append(_from_flags(args))
        elif args.use_deepspeed:
            sources.append(_from_deepspeed_flags(args))
        sources.append(_from_flags_of_any_engine(args))
        result = merge([*sources, from_environment()])
    except ValueError as error:
        raise ConfigError(" ".join(str(error).split())) from error
    _check_sizes(result, args)
    return result


def _from_flags(args: Namespace) -> FlagResult:
    """Read the `--fsdp_*` flags that were given on the command line, not their defaults, which argparse fills in."""
    from ourshard.flags.fsdp import from_fsdp

    given = {name: getattr(args, name) for name in getattr(args, "nondefault", ()) if name.startswith("fsdp_")}
    return from_fsdp(given, source="--fsdp flags")


def _from_deepspeed_flags(args: Namespace) -> FlagResult:
    """Read the flags beside `--use_deepspeed` that were given, and the file that one of them names."""
    from ourshard.flags.deepspeed import DEEPSPEED, from_deepspeed

    given = {name: getattr(args, name) for name in sorted(args.nondefault) if name in DEEPSPEED.by_spelling}
    return from_deepspeed({"zero_stage": None, **given}, source="--use_deepspeed's flags")  # where none says, 2


def _from_flags_of_any_engine(args: Namespace) -> FlagResult:
    """Read the flags that mean the same for every engine; refuse those of an engine that does not run."""
    given: set[str] = getattr(args, "nondefault", set())
    for name in sorted(given):
        of_deepspeed = name in _DEEPSPEED_FLAGS
        if (of_deepspeed and not args.use_deepspeed) or (name.startswith("fsdp_") and not args.use_fsdp):
            engine = "DeepSpeed's" if of_deepspeed else "FSDP's"
            raise ValueError(
                f"--{name} is {engine} and would do nothing here; say it in the file's ourshard_config, whose keys "
                "docs/flags.md lists beside those of others."
            )
    said = {f"{RUN}{name}": getattr(args, name) for name in _RUN_FLAGS if name in given}
    return build(said, dict.fromkeys(said, "a flag of accelerate launch"))


def _check_sizes(result: FlagResult, args: Namespace) -> None:
    size, world = result.config.shard_size, args.num_processes
    if isinstance(size, int) and world and world % size:
        raise ConfigError(f"shard_size: {size} does not divide the {counted(world, 'process')} of this launch.")


def _hand_over(environment: Environment, wanted: FlagResult, args: Namespace) -> None:
    """Write the switch and the config to the workers' environment."""
    if not getattr(args, "machine_rank", 0):  # the first machine, or the only one
        say_once([*wanted.notes, *of_blocks(_blocks(args)), *elsewhere(wanted, _HANDED_OVER)])
    for name in _OTHER_ENGINES:
        environment.pop(name, None)
    environment[SWITCH] = "true"
    environment.setdefault(_OWN_STORE, "1")
    environment.update(for_environment(wanted))
    if wanted.run.gradient_accumulation_steps is not None:
        steps = str(wanted.run.gradient_accumulation_steps)
        environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = environment[ACCUMULATION] = steps
    if wanted.run.gradient_clipping:
        environment[GRADIENT_CLIPPING] = str(wanted.run.gradient_clipping)
    told = {GRAD_SCALER: wanted.run.grad_scaler, BLOCKS: _blocks(args)}
    environment.update({name: json.dumps(values) for name, values in told.items() if values})


def _blocks(args: Namespace) -> Mapping[str, Any]:
    """Return the optimizer and scheduler blocks of the DeepSpeed config of this launch, for a Trainer to make."""
    section = getattr(args, "ourshard_config", None)
    if isinstance(section, Section):
        return section.blocks
    return blocks_of({"deepspeed_config_file": args.deepspeed_config_file}) if args.use_deepspeed else {}


def _torchrun(args: Namespace) -> list[str]:
    """Return torchrun's command for a launch on this machine alone."""
    if (args.num_machines or 1) > 1:
        raise ConfigError(
            "Several machines on CPUs need torchrun, which --cpu does not start; set use_cpu: true in the config file."
        )
    port = ["--standalone"] if not args.main_process_port else ["--master_port", str(args.main_process_port)]
    kind = ["--no_python"] if args.no_python else ["--module"] if args.module else []
    command: list[Any] = [sys.executable, "-m", "torch.distributed.run", *port]
    if getattr(args, "max_restarts", None):
        command += ["--max-restarts", args.max_restarts]
    command += ["--nproc_per_node", args.num_processes, *kind, args.training_script, *args.training_script_args]
    return [str(part) for part in command]
