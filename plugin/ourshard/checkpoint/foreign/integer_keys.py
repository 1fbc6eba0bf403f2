"""Names for the state of an optimizer that numbers its parameters (`optimizer.pt`, `optimizer.bin`, DeepSpeed stage
0).

torch numbers parameters group by group, each group in the order of the model. So the order of the model gives the
names, if it is known which parameters are in which group. Every way of dividing them that people use is tried; one is
taken only if the shape of every moment fits its parameter and no other fits too. Otherwise there are no names, and
the caller says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ourshard.runtime.wrap import canonical

from ..source import CheckpointError, ParameterOrder
from .adapters import is_trained_with_peft
from .draft import Draft
from .names import looks_like_buffer
from .stored import Readable

# The Trainer's rule for what is not decayed, beside parameters of norm layers: these patterns in names.
_NO_DECAY = re.compile(
    r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)(?:ln_\w+|norm\d*)\.", re.IGNORECASE
)

_OWN_NAMES = "param_names"

Split = Callable[[str, Readable], bool]
_SPLITS: tuple[Split, ...] = (
    lambda name, reader: len(reader.shape) >= 2,
    lambda name, reader: not _NO_DECAY.search(name),
)


@dataclass(frozen=True, slots=True)
class Order:
    """An order of the model's parameters and where it comes from."""

    names: tuple[str, ...]
    origin: str
    of_parameters: bool = False  # no buffer is among the names
    groups: tuple[tuple[str, ...], ...] = ()  # those of the optimizer in hand, if there is one


def given_order(names: Sequence[str]) -> Order:
    """Return the order of a model in hand."""
    groups = names.groups if isinstance(names, ParameterOrder) else ()
    return Order(tuple(names), "the model and its optimizer" if groups else "the model", True, groups)


def order_of_model(draft: Draft, given: Sequence[str] | None, origin: str) -> Order:
    """Return the order that is given, else that of the tensors in the draft."""
    return Order(tuple(draft.model), origin) if given is None else given_order(given)


def name_integer_keys(draft: Draft, optimizer: Mapping[str, Any], orders: Iterable[Order]) -> None:
    """Put the optimizer's state into the draft under names, by the first order that fits; else note the loss."""
    state, groups = _checked(optimizer)
    own = _own_names(draft, state, groups)
    if own is not None:
        _give_names(draft, state, groups, own)
        return
    tried = []
    for order in orders:
        names = _assign(draft, state, groups, order)
        if names is not None:
            _give_names(draft, state, groups, names)
            draft.oddities.append(
                f"the optimizer numbers its parameters; names are from {order.origin}, and shapes fit"
            )
            return
        tried.append(order.origin)
    why = f" (tried {', '.join(tried)}: does not fit, or fits in more than one way)" if tried else ""
    draft.losses.append(
        f"the optimizer's state: it numbers its parameters, and the order of the model's parameters is not known{why}; "
        "a JSON list of the names, in the order of model.named_parameters(), is read from parameter_names.json"
    )


def _give_names(
    draft: Draft,
    state: Mapping[int, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
) -> None:
    draft.state = {names[number]: dict(values) for number, values in state.items()}
    draft.groups = []
    for group in groups:
        options = {key: value for key, value in group.items() if key != _OWN_NAMES}
        draft.groups.append({**options, "params": [names[number] for number in group["params"]]})


def _own_names(
    draft: Draft, state: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> dict[int, str] | None:
    """Return the names that torch notes if the optimizer was made with `named_parameters()`; None if there are none."""
    names: dict[int, str] = {}
    for group in groups:
        own = group.get(_OWN_NAMES)
        if not isinstance(own, (list, tuple)) or len(own) != len(group["params"]):
            return None
        names.update(zip(group["params"], (canonical(str(name)) for name in own), strict=True))
    fits = all(name in draft.model and _fits(draft.model[name], state.get(n, {})) for n, name in names.items())
    return names if fits else None


def _checked(optimizer: Mapping[str, Any]) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """Return state and groups of a torch optimizer's state_dict; raise if it is none."""
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, (list, tuple)):
        raise CheckpointError("the optimizer's file holds no state_dict of an optimizer")
    numbers: list[int] = []
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            raise CheckpointError("a group of the optimizer has no list of parameters")
        numbers += group["params"]
    known = set(numbers)
    if any(type(number) is not int for number in numbers) or len(known) != len(numbers) or not state.keys() <= known:
        raise CheckpointError("the numbers of the optimizer's parameters are damaged")
    if any(not isinstance(values, Mapping) for values in state.values()):
        raise CheckpointError("the state of a parameter in the optimizer is no dict")
    return {number: dict(values) for number, values in state.items()}, [dict(group) for group in groups]


def _assign(
    draft: Draft, state: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], order: Order
) -> dict[int, str] | None:
    """Return number -> name if exactly one way of dividing the parameters among the groups fits all shapes."""
    grouped = _as_grouped(draft, state, groups, order.groups) if order.groups else None
    if grouped is not None:
        return grouped
    names = _candidates(draft, order)
    trained = [name for name in names if is_trained_with_peft(name)]
    if len(trained) == sum(len(group["params"]) for group in groups):  # the base beside an adapter is frozen
        names = trained
    found: list[dict[int, str]] = []
    for division in _divisions(draft, names, groups):
        pairs: dict[int, str] = {}
        for numbers, members in division:
            chosen = _only_match(draft, [state.get(number, {}) for number in numbers], members)
            if chosen is None:
                break
            pairs.update(zip(numbers, chosen, strict=True))
        else:
            if pairs not in found:
                found.append(pairs)
    return found[0] if len(found) == 1 else None


def _as_grouped(
    draft: Draft,
    state: Mapping[int, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    known: Sequence[Sequence[str]],
) -> dict[int, str] | None:
    """Return number -> name if the saved groups are as long as those of the optimizer in hand, and all shapes fit."""
    if [len(group["params"]) for group in groups] != [len(names) for names in known]:
        return None
    ties = draft.ties or {}
    pairs = {
        number: ties.get(name, name)
        for group, names in zip(groups, known, strict=True)
        for number, name in zip(group["params"], names, strict=True)
    }
    fits = all(name in draft.model and _fits(draft.model[name], state.get(n, {})) for n, name in pairs.items())
    return pairs if fits else None


def _candidates(draft: Draft, order: Order) -> list[str]:
    """Return the names that the optimizer may know: parameters without aliases."""
    aliases = draft.ties or {}
    names = [name for name in order.names if name in draft.model and name not in aliases]
    if order.of_parameters:
        return names
    if draft.buffers is not None:
        return [name for name in names if name not in draft.buffers]
    return [name for name in names if not looks_like_buffer(name, draft.model[name].dtype)]


def _divisions(
    draft: Draft, names: list[str], groups: Sequence[Mapping[str, Any]]
) -> Iterable[list[tuple[list[int], list[str]]]]:
    """Yield the ways of dividing names among groups: the numbers of each with the names it may be made of, in order."""
    numbers = [list(group["params"]) for group in groups]
    if len(groups) == 1:
        yield [(numbers[0], names)]
        return
    if len(names) == sum(map(len, numbers)):
        begins = [sum(map(len, numbers[:place])) for place in range(len(numbers))]
        yield [(own, names[begin : begin + len(own)]) for begin, own in zip(begins, numbers, strict=True)]
    if len(groups) == 2:
        for split in _SPLITS:
            yes = [name for name in names if split(name, draft.model[name])]
            no = [name for name in names if not split(name, draft.model[name])]
            yield [(numbers[0], yes), (numbers[1], no)]
            yield [(numbers[0], no), (numbers[1], yes)]


def _only_match(draft: Draft, states: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str] | None:
    """Return which of the names, in their order, the states belong to; None if no choice fits, or more than one does.

    There are more names than states if parameters are frozen, which a numbered optimizer does not tell.
    """
    spare = len(names) - len(states)
    if spare < 0:
        return None
    # ways[i] for the states from `place` on: in how many ways (2: or more) they fit the names from place + i on.
    ways = [1] * (spare + 1)
    table = [ways]
    for place in range(len(states) - 1, -1, -1):
        row = [0] * (spare + 1)
        for skipped in range(spare, -1, -1):
            here = ways[skipped] if _fits(draft.model[names[place + skipped]], states[place]) else 0
            row[skipped] = min(2, here + (row[skipped + 1] if skipped < spare else 0))
        ways = row
        table.insert(0, ways)
    if table[0][0] != 1:
        return None
    chosen, skipped = [], 0
    for place, values in enumerate(states):
        while not (_fits(draft.model[names[place + skipped]], values) and table[place + 1][skipped]):
            skipped += 1
        chosen.append(names[place + skipped])
    return chosen


def _fits(reader: Readable, values: Mapping[str, Any]) -> bool:
    """Tell whether the moments have the shape of the parameter."""
    moments = [value for value in values.values() if isinstance(value, Readable) and value.shape]
    return all(moment.shape == reader.shape for moment in moments)
