"""Whole models written by all ranks at once, in the files that transformers or accelerate would write.

Note [Outlines]: which names go into which files is theirs to say. They are let save tensors without values: of the
shapes and dtypes that would be saved, in memory that nothing touches. Their function that writes a file is taken away
for that time, and what it was given is the plan. Where a tensor of the plan is none of the outlines (weights that are
split or joined on the way into a file), the whole values are needed, and the caller gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ourshard.checkpoint.agreeing import together
from ourshard.checkpoint.whole import WholeFile, write_by_rows, write_from_here
from ourshard.runtime.engine import Engine
from ourshard.runtime.part import engines_in, is_here, outline, present_state
from ourshard.runtime.state import with_extra_state

Outlines = Mapping[str, torch.Tensor]


class Planned(NamedTuple):
    """The files of a folder."""

    folder: Path  # absolute
    files: tuple[WholeFile, ...]


class Taken(NamedTuple):
    """What a library wanted to write: a file, by name -> tensor, and the metadata for its header."""

    path: str
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str] | None


def plan_of(outlines: Outlines, taken: list[Taken]) -> Planned | None:
    """Return the plan in what was taken; None if not every tensor is one of the outlines, or nothing was taken."""
    names = {id(tensor): name for name, tensor in outlines.items()}
    if not taken or not all(id(tensor) in names for file in taken for tensor in file.tensors.values()):
        return None
    files = (
        WholeFile(
            Path(file.path).name,
            {there: names[id(tensor)] for there, tensor in file.tensors.items()},
            file.metadata or {},
        )
        for file in taken
    )
    return Planned(Path(taken[0].path).parent.absolute(), tuple(files))


def root_engine(model: nn.Module) -> Engine | None:
    """Return the engine of a model that is sharded as a whole; None for a part of one, or one of several."""
    engines = engines_in(model)
    return engines[0] if len(engines) == 1 and engines[0].model() is getattr(model, "_orig_mod", model) else None


def write(
    model: nn.Module,
    make_plan: Callable[[Outlines], Planned | None],
    *,
    writes: bool,
    dtype: torch.dtype | None,
    label: str,
) -> bool:
    """Let the rank that `writes` plan, and write the files; False where whole values are needed, or a shared folder.

    Collective, unless the model `is_here`. `dtype` as in `part_state`. Raises ValueError for an extra state that
    safetensors can't hold.
    """
    refuse_objects(model)
    engine = root_engine(model)
    if engine is None or with_extra_state(model):
        return False
    outlines = outline(model, dtype) if writes else {}
    if is_here(model, dtype):
        plan = make_plan(outlines) if writes else Planned(Path(), ())
        if plan is not None and writes:
            dtypes = {name: tensor.dtype for name, tensor in outlines.items()}
            write_from_here(present_state(model), dtypes, plan.folder, plan.files)
        return plan is not None
    plan = None
    with together(engine, label):
        if writes:
            plan = make_plan(outlines)
    told: list[Any] = engine.control.gather_objects(plan, f"{label}: which files")
    found: Planned | None = next((each for each in told if each is not None), None)
    return found is not None and write_by_rows(engine, found.folder, found.files, dtype)


def refuse_objects(model: nn.Module) -> None:
    """Raise ValueError, on each rank that calls, for an extra state that no file of weights can hold."""
    objects = [
        name for name, module in with_extra_state(model).items() if not torch.is_tensor(module.get_extra_state())
    ]
    if objects:
        raise ValueError(
            f"{objects[0]} is no tensor, and files of weights hold nothing else: let `get_extra_state` of that module "
            "return a tensor, or `torch.save` what `accelerator.get_state_dict` returns. `save_state` by rows keeps it."
        )


def plan_pretrained(save: Callable[..., Any], model: Any, arguments: dict[str, Any]) -> Callable[[Outlines], Any]:
    """Return what plans the files of transformers' `save_pretrained`, and lets it write all others."""

    def make_plan(outlines: Outlines) -> Planned | None:
        if _converts(model, outlines, arguments):
            return None
        with _taking_files() as taken:
            save(model, **{**arguments, "state_dict": dict(outlines), "is_main_process": True})
        return plan_of(outlines, taken)

    return make_plan


@contextmanager
def _taking_files() -> Iterator[list[Taken]]:
    """Take the files that transformers writes."""
    from transformers import modeling_utils as module

    modeling_utils: Any = module
    taken: list[Taken] = []
    save_file = modeling_utils.safe_save_file

    def take(tensors: Mapping[str, torch.Tensor], filename: str, metadata: Mapping[str, str] | None = None) -> None:
        taken.append(Taken(filename, dict(tensors), metadata))

    modeling_utils.safe_save_file = take
    try:
        yield taken
    finally:
        modeling_utils.safe_save_file = save_file


def _converts(model: Any, outlines: Outlines, arguments: dict[str, Any]) -> bool:
    """Tell whether transformers makes other tensors of the model's for the file; it is shown none with memory."""
    from transformers import modeling_utils

    revert = getattr(modeling_utils, "revert_weight_conversion", None)
    if revert is None or not arguments.get("save_original_format", True):
        return False
    shown = {name: torch.empty_like(tensor, device="meta") for name, tensor in outlines.items()}
    known = {id(tensor) for tensor in shown.values()}
    try:
        return not all(id(tensor) in known for tensor in revert(model, dict(shown)).values())
    except Exception:  # an operation that needs values
        return True


def streams(model: Any, arguments: Mapping[str, Any]) -> bool:
    """Tell whether `save_pretrained` leaves the files alone once they are written, and saves the model as it is."""
    from transformers import modeling_utils

    special = getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "hf_quantizer", None) is not None
    return not special and not arguments.get("push_to_hub") and hasattr(modeling_utils, "safe_save_file")
