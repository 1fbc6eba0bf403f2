"""Which hooks go on which modules of a model: those of its root, of its units, and of what is called on its own."""

from __future__ import annotations

import weakref

from torch import nn

from ourshard.runtime.engine import ENGINES, Engine
from ourshard.runtime.graphs import GraphedForward
from ourshard.runtime.hooks import DoorHooks, RootHooks, UnitHooks
from ourshard.runtime.lane import Lane
from ourshard.runtime.lent import lend_storages
from ourshard.runtime.unit import Unit


def attach(engine: Engine, model: nn.Module) -> None:
    """Put the hooks on the modules of a model whose units are all made."""
    if engine.config.cuda_graph and engine.streams.on_gpu:
        GraphedForward(engine, model).attach()
    else:
        RootHooks(engine).attach(model)
    for unit in engine.units:
        unit.guests = _guests(engine, unit)
        for module in unit.modules:
            UnitHooks(unit).attach(module)
        if unit.rooted and unit is not engine.root:
            for lane in unit.lanes:
                for leaf in lane.leaves:
                    engine.own_hooks.add(leaf.register_post_accumulate_grad_hook(unit.on_leaf_gradient).id)
    _open_doors(engine, model)
    lend_storages(engine)
    ENGINES.add(engine)
    weakref.finalize(engine, engine.streams.join).atexit = False  # gathers after a last step fill what is given back


def _guests(engine: Engine, unit: Unit) -> list[Lane]:
    """Return the root's lanes of whole parameters that have some inside of a unit's modules."""
    inside = {id(m) for module in unit.modules for m in module.modules()}
    lanes = [lane for lane in engine.root.lanes if lane.placement.whole]
    return [lane for lane in lanes if any(id(site.module) in inside for p in lane.parameters for site in p.sites)]


def _open_doors(engine: Engine, model: nn.Module) -> None:
    """Let modules that have parameters of the root be called on their own, and modules around those.

    A forward may read parameters of modules that it does not call: lists of parameters, another layer's weight.
    """
    inside = {id(m) for unit in engine.units for module in unit.modules for m in module.modules()}
    lanes = [lane for unit in engine.rooted for lane in unit.lanes]
    owners = {id(site.module) for lane in lanes for p in lane.parameters for site in p.sites} - inside
    for module in model.modules():
        if module is not model and id(module) not in inside and any(id(m) in owners for m in module.modules()):
            DoorHooks(engine).attach(module)
