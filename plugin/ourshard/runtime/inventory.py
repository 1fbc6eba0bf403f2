"""Take stock of a model: which parameters it has, under which names, at which places, and in which unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ourshard.config import ShardConfig, WrapConfig
from ourshard.runtime.casting import dtype_named
from ourshard.runtime.divided import effective_stage
from ourshard.runtime.wrap import UnitModule, canonical, find_units


@dataclass(frozen=True, slots=True)
class Site:
    """A place where a parameter is registered."""

    module: nn.Module
    attribute: str


@dataclass(slots=True)
class Parameter:
    """One tensor of the model. Tied parameters are one of these, with several names and sites."""

    name: str  # canonical, the first in `named_modules` order
    tensor: nn.Parameter  # the object that the user holds; its identity never changes
    shape: tuple[int, ...]
    dtype: torch.dtype  # as loaded; what is saved by default
    aliases: list[str] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def packs_codes(self) -> bool:
        """Say whether its elements are codes that a floating dtype merely stores (`bnb_4bit_quant_storage`)."""
        return getattr(self.tensor, "quant_state", None) is not None

    def views_of_itself(self) -> list[str]:
        """Return the attributes that show all of its memory, as `CB` of an 8-bit weight of bitsandbytes does."""
        tensor = self.tensor
        return [
            name
            for name, value in vars(tensor).items()
            if type(value) is torch.Tensor
            and (value.shape, value.dtype, value.device) == (tensor.shape, tensor.dtype, tensor.device)
            and value.numel()
            and value.data_ptr() == tensor.data_ptr()
        ]


@dataclass(slots=True)
class UnitParameters:
    """The parameters of one unit and the modules whose forwards use them.

    `rooted` units belong to the root: they are whole from the root's forward to the end of backward. The root itself
    has the name "" and no modules.
    """

    name: str
    modules: list[nn.Module]
    parameters: list[Parameter]
    rooted: bool = False

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


FIXTURE_NUMEL = 1_000_000  # a root parameter of this many elements is a unit of its own: it is reduced when it is ready
RIDERS_NUMEL = 4_000_000  # their gradients in fp32, 16 MiB, take NCCL as long as one would (H200, NVLink)
_MERGE_NBYTES = 64 * 2**20


def merge_numel(config: ShardConfig, device: torch.device) -> int:
    """Return the elements up to which neighbouring units are gathered as one.

    On GPUs a collective of up to 16 MiB takes the same 55 to 85 us whatever its size (H200, NVLink), and each unit
    costs the host about 1 ms a step (48 units: 208 ms where the limit takes 153); on CPUs nothing is gained.
    """
    nbytes = config.wrap.merge
    if nbytes is None:
        nbytes = _MERGE_NBYTES if device.type == "cuda" else 0
    return nbytes // (dtype_named(config.precision.param_dtype) or torch.float32).itemsize


def small_numel(config: ShardConfig, shards: int, replicas: int) -> int:
    """Return the elements below which parameters are whole where others are not: none where all are."""
    return config.persist_below if effective_stage(config, shards, replicas) else 0


def take_stock(
    model: nn.Module, config: WrapConfig, merge_numel: int = 0, small_numel: int = 0
) -> list[UnitParameters]:
    """Return the units of `model` with their parameters, the root last.

    A parameter belongs to the innermost unit that holds all of its sites; one that several units share belongs
    to the root, which is whole while any of them computes, and so do those of fewer than `small_numel` elements, which
    are whole always. Neighbouring units are merged up to `merge_numel` elements.
    """
    units = find_units(model, config)
    owner = _innermost(model, units)
    ignored = _ignored(model, config)
    stock: dict[int | None, UnitParameters] = {id(u.module): UnitParameters(u.name, [u.module], []) for u in units}
    root = stock[None] = UnitParameters("", [], [], rooted=True)
    for parameter in _parameters(model, ignored):
        owners = {owner[id(site.module)] for site in parameter.sites}
        stock[owners.pop() if len(owners) == 1 else None].parameters.append(parameter)
    inner = [entry for entry in stock.values() if entry.parameters and entry is not root]
    _bring_together(inner, root, small_numel)
    inner = _merged(inner, merge_numel)
    return [*inner, *(_fixtures(root) if inner else []), root]


def _bring_together(inner: list[UnitParameters], root: UnitParameters, small_numel: int) -> None:
    """Give small parameters of units to the root: one cast and one reduction, at the end of backward, for all of them.

    A unit that has no others keeps them, and all do where together they are large: then they had better not wait.
    """
    riders = [[p for p in entry.parameters if p.numel < small_numel] for entry in inner]
    moving = [(entry, own) for entry, own in zip(inner, riders, strict=True) if len(own) < len(entry.parameters)]
    if sum(parameter.numel for _, own in moving for parameter in own) > RIDERS_NUMEL:
        return
    for entry, own in moving:
        entry.parameters = [p for p in entry.parameters if p.numel >= small_numel]
        root.parameters += own


def _fixtures(root: UnitParameters) -> list[UnitParameters]:
    """Take the large parameters of the root (embeddings, heads) out of it, each as a rooted unit."""
    large = [parameter for parameter in root.parameters if parameter.numel >= FIXTURE_NUMEL]
    root.parameters = [parameter for parameter in root.parameters if parameter.numel < FIXTURE_NUMEL]
    return [UnitParameters(parameter.name, [], [parameter], rooted=True) for parameter in large]


def _merged(entries: list[UnitParameters], most: int) -> list[UnitParameters]:
    """Join neighbours of one list and class (layers.0, layers.1, ...) while they stay within `most` elements."""
    found: list[UnitParameters] = []
    for entry in entries:
        last = found[-1] if found else None
        if last is not None and _siblings(last, entry) and last.numel + entry.numel <= most:
            first = last.name.split(" to ")[0]
            found[-1] = UnitParameters(
                f"{first} to {entry.name}", last.modules + entry.modules, last.parameters + entry.parameters
            )
        else:
            found.append(entry)
    return found


def _siblings(left: UnitParameters, right: UnitParameters) -> bool:
    same_list = left.name.split(" to ")[0].rpartition(".")[0] == right.name.rpartition(".")[0]
    return same_list and type(left.modules[0]) is type(right.modules[0])


def _ignored(model: nn.Module, config: WrapConfig) -> set[int]:
    modules = {canonical(name): module for name, module in model.named_modules()}
    missing = [name for name in config.ignore if name not in modules]
    if missing:
        raise ValueError(f"wrap.ignore: the model has no module named {', '.join(map(repr, missing))}.")
    return {id(p) for name in config.ignore for p in modules[name].parameters()}


def _innermost(model: nn.Module, units: list[UnitModule]) -> dict[int, int | None]:
    """Map each module's id to the id of the innermost unit around it, None for the root.

    A module that is registered in two units belongs to the root.
    """
    chosen = {id(unit.module) for unit in units}
    owner: dict[int, int | None] = {}

    def visit(module: nn.Module, inside: int | None) -> None:
        inside = id(module) if id(module) in chosen else inside
        if id(module) in owner:
            if owner[id(module)] in (inside, None):
                return
            inside = None
        owner[id(module)] = inside
        for child in module.children():
            visit(child, inside)

    visit(model, None)
    return owner


def _parameters(model: nn.Module, ignored: set[int]) -> Iterator[Parameter]:
    found: dict[int, Parameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in module._parameters.items():
            if tensor is None or id(tensor) in ignored:
                continue
            name = canonical(f"{prefix}.{attribute}" if prefix else attribute)
            entry = found.get(id(tensor))
            if entry is None:
                entry = found[id(tensor)] = Parameter(name, tensor, tuple(tensor.shape), tensor.dtype)
            elif name not in (entry.name, *entry.aliases):
                entry.aliases.append(name)
            if not any(site.module is module and site.attribute == attribute for site in entry.sites):
                entry.sites.append(Site(module, attribute))
    yield from found.values()
