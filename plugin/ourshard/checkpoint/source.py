"""What every reader of a checkpoint format gives: names, shapes and plain data at once, tensors by rows on demand.

A reader is a subclass of `Source`. It is registered by name in `registry.py` (formats of others: in
`foreign/__init__.py`), and then `detect`, `convert`, `inspect` and `verify` know it. The rules for readers:

- `find` looks at file names (and at most at a few small files), never at tensors, and does not raise on odd folders.
- The constructor reads metadata only: no tensor. Anything wrong in a file raises `CheckpointError` naming the file.
- `tensors` holds each tensor once, under the name of its owner: aliases are in `description.ties` only. Weights are the
  fp32 masters where the format has them; `description.own_dtypes` then says the dtype of the model's own copy.
- Keys are canonical: names as `model.named_parameters()` and `named_buffers()` give them, with no prefix of a wrapper
  (`module.`, `_orig_mod.`, `_fsdp_wrapped_module.`), for PEFT models the names within the PEFT model.
- Optimizer state of one parameter is `TensorKey(state key, parameter name)`, of the parameter's whole shape or 0-d
  (`step`). What is not a tensor (floats, None) is in `description.param_state`.
- `read` returns CPU tensors that own their memory, contiguous, and only of the rows asked for. It is called from
  several threads at once. It checks sizes before it allocates, and reads by pread rather than by mmap: mapped pages
  count as memory used, and the budget is held against that.
- Everything in the description is plain data: None, bool, int, float, str, list, dict, tuple, and tensors.
"""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from ourshard.runtime.wording import shorten

from .numbered import Models, choose
from .tensor_bytes import bytes_of

if TYPE_CHECKING:
    from typing_extensions import Self

PARAM = "param"
BUFFER = "buffer"
ADAPTER_ALONE = "the adapter alone: weights of the base model are not in this checkpoint"  # an oddity
EXTRA_PREFIX = "extra."  # kinds beside the optimizer's state, such as "extra.ema"; formats of others hold none
LOCAL_PREFIX = "extra.local."  # state of the optimizer that one layout can read: Note [Local state] in local_state.py
OURS = "ourshard"  # the only key of a Trainer's `optimizer.pt` with such state: no torch optimizer takes it by mistake
MASTERS = "ourshard_masters"  # in a file of an optimizer, of weights that are saved in fewer bits
WHOLE_OPTIMIZER = (
    "ourshard_optimizer"  # with its number and .bin: what a whole `save_state` has of an optimizer, by names
)
WHOLE_LOCAL = "local"  # in such a file, state that only the layout can read


class ParameterOrder(tuple[str, ...]):
    """The names of `model.named_parameters()`, with those in each group of the optimizer that is to be loaded."""

    groups: tuple[tuple[str, ...], ...]

    def __new__(cls, names: Iterable[str], groups: Iterable[Iterable[str]]) -> Self:
        """Put the names of a group in the model's order, in which torch numbers them."""
        made = super().__new__(cls, names)
        place = {name: number for number, name in enumerate(made)}
        made.groups = tuple(tuple(sorted(group, key=place.__getitem__)) for group in groups)
        return made


class CheckpointError(ValueError):
    """A checkpoint that is incomplete, damaged, hostile, or not what it was asked to be. Names the file or the key."""


class DiskError(CheckpointError, OSError):
    """A save or a load that failed on another rank's disk, or in the background; what was there before is as it was.

    It is an OSError, as what the rank with that disk raises: which rank meets it first is chance.
    """


class TensorKey(NamedTuple):
    """A tensor of a checkpoint: `kind` is "param", "buffer", or a state key of the optimizer such as "exp_avg".

    A tuple, not a dataclass: a load of 4,000 tensors hashes keys half a million times, 5 times as fast so.
    """

    kind: str
    name: str

    @property
    def is_state(self) -> bool:
        """Tell whether this is state of the optimizer."""
        return self.kind not in (PARAM, BUFFER) and not self.kind.startswith(EXTRA_PREFIX)

    @property
    def is_local(self) -> bool:
        """Tell whether this is state of the optimizer that no other layout can read."""
        return self.kind.startswith(LOCAL_PREFIX)

    def __str__(self) -> str:
        return self.name if self.kind == PARAM else f"{self.name} ({self.kind})"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The whole shape and the stored dtype of one tensor."""

    key: TensorKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.shape and min(self.shape) < 0:
            raise CheckpointError(f"{self.key}: shape {self.shape} has a negative length")

    @property
    def numel(self) -> int:
        """Count the elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def nbytes(self) -> int:
        """Count the bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Return the length of the first dimension; 1 for a 0-d tensor."""
        return self.shape[0] if self.shape else 1

    @property
    def row_numel(self) -> int:
        """Count the elements of one row; 0 if the tensor has no rows."""
        return self.numel // self.rows if self.rows else 0

    @property
    def row_nbytes(self) -> int:
        """Count the bytes of one row; 0 if the tensor has no rows."""
        return self.row_numel * self.dtype.itemsize

    def rows_within(self, start_row: int, stop_row: int | None) -> tuple[int, int]:
        """Return (start, stop) with the default filled in; raise ValueError if they lie outside of the tensor."""
        stop = self.rows if stop_row is None else stop_row
        if not 0 <= start_row <= stop <= self.rows:
            raise ValueError(f"{self.key}: rows {start_row}:{stop} of a tensor with {self.rows} rows")
        return start_row, stop

    def shape_of(self, start_row: int, stop_row: int) -> tuple[int, ...]:
        """Return the shape of these rows; () for a 0-d tensor."""
        return (stop_row - start_row, *self.shape[1:]) if self.shape else ()


@dataclass(frozen=True, slots=True)
class Description:
    """What a checkpoint says beside its tensors. None or empty: the checkpoint does not say."""

    world_size: int | None = None  # ranks that wrote it
    stage: int | None = None  # ZeRO stage; 3 for full shard
    step: int | None = None  # optimizer steps taken
    param_groups: tuple[Mapping[str, Any], ...] = ()  # options of each group by name; "params" lists parameter names
    param_state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # parameter -> state that is no tensor
    extra_state: Mapping[str, Any] = field(default_factory=dict)  # what modules gave as `get_extra_state`, by name
    ties: Mapping[str, str] = field(default_factory=dict)  # alias -> owner
    frozen: frozenset[str] = frozenset()  # parameters that are not trained
    left_out: Mapping[str, int] = field(default_factory=dict)  # frozen ones that are not in it -> checksum
    own_dtypes: Mapping[str, torch.dtype] = field(
        default_factory=dict
    )  # dtype in the model, where the stored one differs
    scheduler: Any = None  # state_dict of the learning-rate scheduler; a list if there are several
    scaler: Any = None  # state_dict of the gradient scaler
    client_state: Mapping[str, Any] = field(default_factory=dict)  # what the user's program put in
    adapter_config: Mapping[str, Any] | None = None  # adapter_config.json of PEFT
    versions: Mapping[str, str] = field(default_factory=dict)  # library -> version that wrote it
    files: Mapping[str, Path] = field(default_factory=dict)  # to be carried along: name in the new folder -> file
    losses: tuple[str, ...] = ()  # what this checkpoint has and the reader does not carry, one sentence each
    beside: tuple[str, ...] = ()  # the same of what lies in the folder of the run, and a resumed run reads by itself
    oddities: tuple[str, ...] = ()  # what is unusual here, one sentence each, for `inspect`

    @property
    def is_adapter_alone(self) -> bool:
        """Tell whether the base model's weights are elsewhere."""
        return ADAPTER_ALONE in self.oddities


class Source(ABC):
    """An opened checkpoint. Use as a context manager; nothing but metadata is read before `read`."""

    format: ClassVar[str]  # name in the registry, as `inspect` shows it
    looks_for: ClassVar[str]  # what `find` wants to see, for the error of `detect`: "model.safetensors or ..."

    takes_order: ClassVar[bool] = False  # its constructor has `parameter_order`, for optimizers that number parameters

    is_own = False  # saved by ourshard from a running model, not converted from what another engine saved

    def __init__(self, path: Path) -> None:
        self.path = path
        self.description = Description()
        self.tensors: Mapping[TensorKey, TensorInfo] = {}

    @classmethod
    @abstractmethod
    def find(cls, path: Path) -> Path | None:
        """Return what to open if `path` (a folder, outer or inner, or a file) is of this format, else None."""

    @classmethod
    def models_in(cls, found: Path) -> Models:
        """Return the models in what `find` returned, if the format may hold several: its constructor has `model`."""
        return {}

    @abstractmethod
    def read(self, key: TensorKey, start_row: int = 0, stop_row: int | None = None) -> torch.Tensor:
        """Return rows [start_row, stop_row) of the first dimension (0-d: whole), on the CPU, contiguous, owned.

        Raises KeyError for an unknown key, ValueError for rows outside of it, CheckpointError for a damaged file.
        """

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        """Return what belongs to one rank alone, plain data: random states, the data position. Empty: not known."""
        return {}

    def shards_of(self, key: TensorKey) -> int | None:
        """Return in how many pieces the tensor lies; None: the reader does not count them."""
        return None

    def verify_files(self) -> Iterator[tuple[str, str | None]]:
        """Yield (file, None) for each file that is as its own record says, (file, problem) for each that is not.

        Formats without hashes check what they can: sizes, headers, that all pieces are there.
        """
        yield from ()

    def check_reads(self) -> None:
        """Check what is read from now on against the hashes that the format keeps; most keep none."""
        return None

    def check_sizes(self) -> None:
        """Raise CheckpointError unless all files are there, in their length; most formats see that when they open."""
        return None

    def refuse_damage(self, share: slice = slice(None)) -> None:
        """Raise CheckpointError unless every file is as its own record says; `share`: where ranks divide the work.

        Formats without hashes were checked when they were opened.
        """
        return None

    def read_run(self, key: TensorKey, start: int, stop: int) -> torch.Tensor:
        """Return the elements [start, stop) of the flattened tensor, 1-d: what a rank holds of it in a lane.

        Formats that can cut within a row override this; here whole rows are read.
        """
        info = self.tensors[key]
        if not 0 <= start <= stop <= info.numel:
            raise ValueError(f"{key}: elements {start}:{stop} of a tensor with {info.numel}")
        if start == stop:
            return torch.empty(0, dtype=info.dtype, device="cpu")
        first, last = start // info.row_numel, -(-stop // info.row_numel)
        rows = self.read(key, first, last).reshape(-1)
        skipped = first * info.row_numel
        return rows if rows.numel() == stop - start else rows[start - skipped : stop - skipped].clone()

    def read_run_into(self, key: TensorKey, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes of the elements from `start` on; formats that can do it without a copy do so."""
        stop = start + target.nbytes // self.tensors[key].dtype.itemsize
        target[:] = bytes_of(self.read_run(key, start, stop))

    def read_blocks(self, key: TensorKey, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (start row, rows) over the whole tensor, in blocks of at most `nbytes`, or of one row if larger."""
        info = self.tensors[key]
        if not info.shape or info.numel == 0:
            yield 0, self.read(key)
            return
        block = max(1, nbytes // info.row_nbytes)
        for start in range(0, info.rows, block):
            yield start, self.read(key, start, min(info.rows, start + block))

    def close(self) -> None:
        """Close the files."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def weight_key(self, name: str) -> TensorKey | None:
        """Return where a parameter or buffer is, whichever the format took it for: few tell them apart."""
        name = self.description.ties.get(name, name)
        return next((key for kind in (PARAM, BUFFER) if (key := TensorKey(kind, name)) in self.tensors), None)

    def keys_of(self, kind: str) -> list[TensorKey]:
        """List the keys of one kind, in the order of the checkpoint."""
        return [key for key in self.tensors if key.kind == kind]


def detect(path: str | Path, *, model: int | None = None, parameter_order: Sequence[str] | None = None) -> Source:
    """Open the checkpoint at `path`, an outer folder (checkpoint-N), an inner one, or a file, whatever its format.

    model: which one, where a folder holds several. parameter_order: the names of `model.named_parameters()`, for
    optimizers that number them (`optimizer.pt`); a `ParameterOrder` where the optimizer is known, too. Raises
    FileNotFoundError if nothing is there, ValueError if there are several models and none is chosen, CheckpointError
    listing what was looked for if no format fits.
    """
    from .registry import readers

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    tried = []
    for reader in readers():
        found = reader.find(path)
        if found is not None:
            return _open(reader, found, path, model, parameter_order)
        tried.append(f"  {reader.format}: {reader.looks_for}")
    inner = _inside(path)
    if inner:
        raise CheckpointError(f"{path} is no checkpoint, but holds some; name one of them: {shorten(inner, _NAMED)}.")
    raise CheckpointError(f"{path} is no checkpoint of a known format. Looked for:\n" + "\n".join(tried))


def _open(
    reader: type[Source], found: Path, path: Path, model: int | None, parameter_order: Sequence[str] | None
) -> Source:
    options: dict[str, Any] = {}
    number = choose(path, reader.models_in(found), model)
    if number is not None:
        options["model"] = number
    if reader.takes_order:
        options["parameter_order"] = parameter_order
    return reader(found, **options)


_LOOKS, _NAMED = 500, 12  # folders to look into; checkpoints to name


def _inside(path: Path) -> list[str]:
    """Return the checkpoints in a folder, the highest number first.

    If it has none, look into the folders in it, as accelerate's `checkpoints`.
    """
    children = _folders(path)
    found = [child for child in children if _fits(child)]
    if not found:
        deeper = itertools.chain.from_iterable(map(_folders, children))
        found = [child for child in itertools.islice(deeper, _LOOKS) if _fits(child)]
    return [str(each.relative_to(path)) for each in sorted(found, key=_by_number, reverse=True)]


def _folders(path: Path) -> list[Path]:
    try:
        return [child for child in sorted(path.iterdir())[:_LOOKS] if child.is_dir()] if path.is_dir() else []
    except OSError:  # not ours to read
        return []


def _by_number(path: Path) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", str(path))
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _fits(path: Path) -> bool:
    """Tell whether a folder looks like a checkpoint."""
    from .registry import readers

    try:
        return any(reader.find(path) is not None for reader in readers())
    except OSError:
        return False
