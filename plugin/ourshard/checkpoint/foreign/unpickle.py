"""Read a pickle without running anything that it names.

A pickle is a program for a small stack machine. This is that machine with the dangerous instructions left out: a name
of a class or function only ever yields an entry of an allow-list (`classes.ALLOWED`), which holds our own stand-ins,
and calls reach nothing but them. All else is refused, naming the class. The standard library's machine is not used
since a single number in a hostile file makes it allocate as much memo as the number says, and nested keys make it
hash for ever.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..source import CheckpointError

MAX_PICKLE_NBYTES = 1 << 30  # the metadata of 100,000 tensors on 1,000 ranks takes about half of that
_MAX_INT_NBYTES = 256
_MAX_KEY_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Builder:
    """A stand-in for a class or function: `make` gets the arguments and returns plain data or a record of ours."""

    name: str
    make: Callable[..., Any]


class Record:
    """What is left of an object of a known class: its class name and its fields. Equal only to itself."""

    __slots__ = ("fields", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fields: dict[str, Any] = {}

    def __getitem__(self, field: str) -> Any:
        try:
            return self.fields[field]
        except KeyError:
            raise CheckpointError(f"a pickled {self.kind} lacks its field {field!r}") from None

    def get(self, field: str, default: Any = None) -> Any:
        """Return a field or the default."""
        return self.fields.get(field, default)

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def unpickle(
    data: bytes | bytearray | memoryview,
    where: str,
    allowed: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return what the pickle holds: plain data, records, and what `persistent` makes of the ids of storages.

    `allowed` maps "module.name" to a `Builder` or to a constant. Raises CheckpointError naming `where`.
    """
    return unpickle_first(data, where, allowed, persistent)[0]


def unpickle_first(
    data: bytes | bytearray | memoryview,
    where: str,
    allowed: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None = None,
) -> tuple[Any, int]:
    """Return the same of the pickle at the begin of the data, and how many bytes it has."""
    if len(data) > MAX_PICKLE_NBYTES:
        raise CheckpointError(f"{where}: a pickle of {len(data)} bytes; more than {MAX_PICKLE_NBYTES} are not read")
    machine = _Machine(data, where, allowed, persistent)
    try:
        return machine.run(), machine.position
    except CheckpointError as error:
        raise error if str(error).startswith(where) else CheckpointError(f"{where}: {error}") from error
    except (IndexError, struct.error) as error:
        raise CheckpointError(f"{where}: the pickle ends early or is damaged ({error})") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{where}: the pickle is damaged ({type(error).__name__}: {error})") from error
    finally:
        machine.data.release()


class _Mark:
    """Where a MARK instruction stands on the stack."""


_MARK = _Mark()


class _Machine:
    """The stack, the memo and the position of one run."""

    def __init__(
        self,
        data: bytes | bytearray | memoryview,
        where: str,
        allowed: Mapping[str, Any],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self.data = memoryview(data)
        self.position = 0
        self.where = where
        self.allowed = allowed
        self.persistent = persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, steps = self.data, self.steps
        while True:
            opcode = data[self.position]
            self.position += 1
            if opcode == 0x2E:  # STOP
                return self.stack.pop()
            step = steps.get(opcode)
            if step is None:
                raise CheckpointError(
                    f"{self.where}: pickle instruction 0x{opcode:02x} is not read from files of others"
                )
            step(self)

    # -- reading arguments

    def take(self, count: int) -> memoryview:
        start = self.position
        if count < 0 or start + count > len(self.data):
            raise CheckpointError(f"{self.where}: the pickle ends early")
        self.position = start + count
        return self.data[start : self.position]

    def skip(self, count: int) -> None:
        self.take(count)

    def drop(self) -> None:
        self.stack.pop()

    def drop_to_mark(self) -> None:
        self.since_mark()

    def number(self, fmt: struct.Struct) -> Any:
        (value,) = fmt.unpack(self.take(fmt.size))
        return value

    def line(self) -> str:
        stop = bytes(self.data[self.position : self.position + 1024]).find(b"\n")
        if stop < 0:
            raise CheckpointError(f"{self.where}: a name in the pickle has no end")
        text = bytes(self.take(stop)).decode("utf-8")
        self.position += 1
        return text

    def since_mark(self) -> list[Any]:
        stack = self.stack
        for place in range(len(stack) - 1, -1, -1):
            if stack[place] is _MARK:
                items = stack[place + 1 :]
                del stack[place:]
                return items
        raise CheckpointError(f"{self.where}: the pickle is damaged (no mark on the stack)")

    # -- instructions that need more than a line

    def find(self, module: str, name: str) -> None:
        key = f"{module}.{name}"
        if key not in self.allowed:
            raise CheckpointError(
                f"{self.where}: holds {key}, which is not on the list of classes that are read; nothing was executed"
            )
        self.stack.append(self.allowed[key])

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise CheckpointError(f"{self.where}: the pickle is damaged (a class has no name)")
        self.find(module, name)

    def call(self) -> None:
        arguments, builder = self.stack.pop(), self.stack.pop()
        if not isinstance(builder, Builder) or not isinstance(arguments, tuple):
            raise CheckpointError(
                f"{self.where}: the pickle calls something that is no known class; nothing was executed"
            )
        self.stack.append(builder.make(*arguments))

    def build(self) -> None:
        """Give a record its fields. What torch hangs on an OrderedDict (`_metadata`) and empty states are left out."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Record):
            for part in state if isinstance(state, tuple) else (state,):
                if isinstance(part, dict):
                    target.fields.update(part)
                elif part is not None:
                    target.fields["state"] = state
                    break
        elif not isinstance(target, dict):
            raise CheckpointError(f"{self.where}: the pickle sets the state of a {type(target).__name__}")

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise CheckpointError(f"{self.where}: the pickle is damaged (items for what is no dict)")
        for place in range(0, len(pairs), 2):
            key = pairs[place]
            if type(key) is not str and not _is_key(key, _MAX_KEY_DEPTH):
                raise CheckpointError(f"{self.where}: a dict in the pickle has a key of type {type(key).__name__}")
            target[key] = pairs[place + 1]

    def append_all(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise CheckpointError(f"{self.where}: the pickle is damaged (items for what is no list)")
        target.extend(items)

    def add_all(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set or not all(_is_key(item, _MAX_KEY_DEPTH) for item in items):
            raise CheckpointError(f"{self.where}: the pickle is damaged (items for what is no set)")
        target.update(items)

    def long(self, count: int) -> None:
        if count > _MAX_INT_NBYTES:
            raise CheckpointError(f"{self.where}: an integer of {count} bytes in the pickle")
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))

    def text(self, count: int) -> None:
        self.stack.append(str(self.take(count), "utf-8", "surrogatepass"))

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise CheckpointError(f"{self.where}: the pickle is damaged (too little on the stack)")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(items)

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def by_id(self) -> None:
        if self.persistent is None:
            raise CheckpointError(f"{self.where}: the pickle refers to tensor data outside of it")
        self.stack.append(self.persistent(self.stack.pop()))

    def check_protocol(self) -> None:
        protocol = self.take(1)[0]
        if not 2 <= protocol <= 5:
            raise CheckpointError(f"{self.where}: pickle protocol {protocol}; 2 to 5 are read")

    steps: ClassVar[dict[int, Callable[[_Machine], None]]] = {}


def _is_key(value: Any, depth: int) -> bool:
    """Tell whether a value may be hashed: a scalar, a record, or a short nesting of tuples of them."""
    if isinstance(value, tuple):
        return depth > 0 and all(_is_key(part, depth - 1) for part in value)
    return value is None or isinstance(value, (str, int, float, bytes, Record))


_U1, _U2, _I4, _U4, _U8 = (struct.Struct(fmt) for fmt in ("<B", "<H", "<i", "<I", "<Q"))
_F8 = struct.Struct(">d")


def _pushes(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(make(machine))


_Machine.steps = {
    # structure
    0x80: _Machine.check_protocol,
    0x95: lambda m: m.skip(8),  # FRAME: a hint for readers of streams
    0x28: _pushes(lambda m: _MARK),
    0x30: _Machine.drop,
    0x31: _Machine.drop_to_mark,
    0x32: _pushes(lambda m: m.stack[-1]),
    # memo
    0x71: lambda m: m.remember(m.number(_U1)),
    0x72: lambda m: m.remember(m.number(_U4)),
    0x94: lambda m: m.remember(len(m.memo)),
    0x68: _pushes(lambda m: m.memo[m.number(_U1)]),
    0x6A: _pushes(lambda m: m.memo[m.number(_U4)]),
    # scalars
    0x4E: _pushes(lambda m: None),
    0x88: _pushes(lambda m: True),
    0x89: _pushes(lambda m: False),
    0x4B: _pushes(lambda m: m.number(_U1)),
    0x4D: _pushes(lambda m: m.number(_U2)),
    0x4A: _pushes(lambda m: m.number(_I4)),
    0x8A: lambda m: m.long(m.number(_U1)),
    0x8B: lambda m: m.long(m.number(_I4)),
    0x47: _pushes(lambda m: m.number(_F8)),
    0x58: lambda m: m.text(m.number(_U4)),
    0x8C: lambda m: m.text(m.number(_U1)),
    0x8D: lambda m: m.text(m.number(_U8)),
    0x42: _pushes(lambda m: bytes(m.take(m.number(_U4)))),
    0x43: _pushes(lambda m: bytes(m.take(m.number(_U1)))),
    0x8E: _pushes(lambda m: bytes(m.take(m.number(_U8)))),
    0x96: _pushes(lambda m: bytes(m.take(m.number(_U8)))),
    # containers
    0x5D: _pushes(lambda m: []),
    0x61: lambda m: m.append_all([m.stack.pop()]),
    0x65: lambda m: m.append_all(m.since_mark()),
    0x29: _pushes(lambda m: ()),
    0x74: _pushes(lambda m: tuple(m.since_mark())),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    0x7D: _pushes(lambda m: {}),
    0x73: lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
    0x75: lambda m: m.set_items(m.since_mark()),
    0x8F: _pushes(lambda m: set()),
    0x90: lambda m: m.add_all(m.since_mark()),
    # names, calls, storages
    0x63: lambda m: m.find(m.line(), m.line()),
    0x93: _Machine.stack_global,
    0x52: _Machine.call,
    0x81: _Machine.call,
    0x62: _Machine.build,
    0x51: _Machine.by_id,
}
