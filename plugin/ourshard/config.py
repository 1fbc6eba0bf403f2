"""The one configuration object of ourshard.

YAML (`ourshard_config:`), environment, keyword arguments and the flags of FSDP and DeepSpeed all end
as one frozen `ShardConfig`. A value is checked when the object is built; what cannot work raises
`ValueError` with the key, the value and what to do. It stands on the standard library
alone, so that launchers can read a config without importing torch.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from ourshard.values import Except, UnknownKey, build, convert, hints_of, settle, to_plain, unknown_key


class WrapPolicy(str, Enum):
    """How the units of a model are found."""

    AUTO = "auto"  # the model's own `_no_split_modules`, else repeated sibling blocks
    CLASSES = "classes"  # every module whose class name is listed in `classes`
    MODULES = "modules"  # exactly the modules whose dotted names are listed in `modules`
    MIN_PARAMS = "min_params"  # the smallest modules that hold at least `min_params` elements
    NONE = "none"  # one unit: the root


class Accumulate(str, Enum):
    """Where gradients wait between micro-batches."""

    SHARDED = "sharded"  # reduce in every backward, keep one shard (stages 2 and 3)
    DEFERRED = "deferred"  # keep whole gradients, reduce once when syncing


class OptimizerOver(str, Enum):
    """Over which ranks masters and optimizer state are cut."""

    SHARD = "shard"  # those that share one copy of the parameters
    ALL = "all"  # shard x replicate


class Tier(str, Enum):
    """Where a thing lives."""

    NONE = "none"  # on the compute device
    CPU = "cpu"  # in host memory
    NVME = "nvme"  # in files under `nvme_path`


class Codec(str, Enum):
    """How a collective's payload is coded."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    AUTO = "auto"  # measured at start


class FrozenWeights(str, Enum):
    """Whether checkpoints by rows have weights that training does not change."""

    AUTO = "auto"  # not where the model has adapters of PEFT
    INCLUDE = "include"
    EXCLUDE = "exclude"


class ReduceOp(str, Enum):
    """What the gradients of all ranks become."""

    MEAN = "mean"
    SUM = "sum"


# Elements that share one scale, where the config does not say. With 15 levels, what is below 1/14 of the largest one
# of a block is 0: smaller blocks keep more of it (docs/numbers.md), for one byte in eight elements.
BLOCKS = {Codec.INT8: 256, Codec.FP8: 256, Codec.AUTO: 256, Codec.INT4: 32}


class Transport(str, Enum):
    """What moves the bytes of gathers and reductions."""

    AUTO = "auto"  # peer copies where all ranks of the shard axis are GPUs of one host, else NCCL
    NCCL = "nccl"  # the process group's own collectives (gloo on CPUs)
    PEER = "peer"  # the GPUs' copy engines; an error where they can't reach each other


class WhenBusy(str, Enum):
    """What a save does while the one before it is still being written in the background."""

    WAIT = "wait"  # until the earlier one is committed
    SKIP = "skip"  # write nothing, and say so


class CheckpointFormat(str, Enum):
    """What `save_state`, and a Trainer's `checkpoint-N`, are made of."""

    AUTO = "auto"  # `save_state` sharded; a Trainer's whole, as under DDP, unless it is to be asynchronous
    SHARDED = "sharded"
    FULL = "full"


_DTYPES = ("float32", "bfloat16", "float16", "float64")
_DTYPE_ALIASES = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp64": "float64",
    "double": "float64",
}


def dtype_name(value: Any, key: str) -> str | None:
    """Normalise a dtype given as text (`"bf16"`, `"torch.bfloat16"`) or as `torch.dtype`."""
    if value is None:
        return None
    text = str(value).removeprefix("torch.")
    text = _DTYPE_ALIASES.get(text, text)
    if text not in _DTYPES:
        raise ValueError(f"{key}: {value!r} is not a dtype that ourshard computes in; use one of {', '.join(_DTYPES)}.")
    return text


def _set(instance: Any, name: str, value: Any) -> None:
    object.__setattr__(instance, name, value)


def _at_least(value: int, least: int, key: str) -> None:
    if value < least:
        raise ValueError(f"{key}: {value!r} is too small; it must be {least} or more.")


@dataclass(frozen=True, slots=True)
class WrapConfig:
    """Which modules become units. `policy: auto` turns to `classes`, `modules` or `min_params` when one is given."""

    policy: WrapPolicy = WrapPolicy.AUTO
    classes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    min_params: int = 0
    merge: int | None = None  # bytes up to which neighbouring units are gathered as one; None: 64 MiB on GPUs, else 0
    ignore: tuple[str, ...] = ()  # dotted module names whose parameters ourshard leaves alone

    def __post_init__(self) -> None:
        settle(self, "wrap.")
        _at_least(self.min_params, 0, "wrap.min_params")
        if self.merge is not None:
            _at_least(self.merge, 0, "wrap.merge")
        given = [p for p in (WrapPolicy.CLASSES, WrapPolicy.MODULES, WrapPolicy.MIN_PARAMS) if getattr(self, p.value)]
        if self.policy is WrapPolicy.AUTO and len(given) == 1:
            _set(self, "policy", given[0])
        elif given and given != [self.policy]:
            raise ValueError(
                f"wrap: policy {self.policy.value!r} and {', '.join(g.value for g in given)} disagree; "
                "give one of classes, modules and min_params, and leave policy at 'auto'."
            )
        if self.policy.value in ("classes", "modules", "min_params") and not given:
            raise ValueError(f"wrap: policy {self.policy.value!r} needs wrap.{self.policy.value}.")


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """The dtypes of a run; `None` means: from Accelerate's `mixed_precision`."""

    param_dtype: str | None = None  # forward and backward compute in this
    reduce_dtype: str | None = None  # gradients travel in this
    master_dtype: str = "float32"  # the optimizer updates this
    buffer_dtype: str | None = None  # floating-point buffers are cast to this; None leaves them
    output_dtype: str | None = None  # floating-point outputs of the root are cast to this; None leaves them
    cast_inputs: bool = True  # floating-point inputs of the root are cast to `param_dtype`, where no autocast is

    def __post_init__(self) -> None:
        settle(self, "precision.")
        for name in ("param_dtype", "reduce_dtype", "master_dtype", "buffer_dtype", "output_dtype"):
            _set(self, name, dtype_name(getattr(self, name), f"precision.{name}"))
        if self.master_dtype is None:
            _set(self, "master_dtype", "float32")


@dataclass(frozen=True, slots=True)
class PrefetchConfig:
    """How many units are gathered ahead of the one that computes."""

    forward: int = 1
    backward: int = 1

    def __post_init__(self) -> None:
        settle(self, "prefetch.")
        _at_least(self.forward, 0, "prefetch.forward")
        _at_least(self.backward, 0, "prefetch.backward")


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Where masters with optimizer state, parameter shards, and inputs of recomputed units, live between uses."""

    optimizer: Tier = Tier.NONE
    params: Tier = Tier.NONE
    activations: Annotated[
        Tier, Except(Tier.NVME, "nvme is not done, since each input would be written once and read once; use cpu.")
    ] = Tier.NONE  # inputs that recomputed units keep from forward to backward
    optimizer_ratio: float = 1.0  # part of the optimizer elements that leave the device
    nvme_path: str | None = None
    pin_memory: bool = True
    max_pinned: int | None = None  # bytes that a rank pins; what would go beyond them is pageable
    windows: int = 3  # of host memory, through which lanes on a disk pass: for masters, and again for parameters
    overlap_step: bool = False  # the step on the host may go on while the next forward begins

    def __post_init__(self) -> None:
        settle(self, "offload.")
        if self.max_pinned is not None:
            _at_least(self.max_pinned, 0, "offload.max_pinned")
        if not 2 <= self.windows <= 64:
            raise ValueError(f"offload.windows: {self.windows!r} is not between 2 (read one, use one) and 64.")
        if self.overlap_step and self.optimizer is not Tier.CPU:
            on_disk = self.optimizer is Tier.NVME
            why = "a read that fails must stop all ranks before one goes on" if on_disk else "no step is on the host"
            raise ValueError(f"offload.overlap_step needs offload.optimizer: cpu; it is {self.optimizer.value}: {why}.")
        if not 0.0 <= self.optimizer_ratio <= 1.0:
            raise ValueError(f"offload.optimizer_ratio: {self.optimizer_ratio!r} is not between 0 and 1.")
        if Tier.NVME in self.tiers and not self.nvme_path:
            keys = [key for key in ("optimizer", "params") if getattr(self, key) is Tier.NVME]
            raise ValueError(f"offload.{keys[0]}: nvme needs offload.nvme_path, a folder on a local disk.")

    def pinned_of(self, nbytes: int) -> int:
        """Return the most bytes that are pinned, of `nbytes` on the host that travel to the device."""
        if not self.pin_memory:
            return 0
        return nbytes if self.max_pinned is None else min(nbytes, self.max_pinned)

    @property
    def tiers(self) -> tuple[Tier, Tier]:
        return self.optimizer, self.params

    @property
    def active(self) -> bool:
        """Say whether masters or parameters leave the device."""
        return self.tiers != (Tier.NONE, Tier.NONE)


@dataclass(frozen=True, slots=True)
class CommunicationConfig:
    """How bytes go between ranks: codecs, hops, and what is done to gradients."""

    weights: Annotated[Codec, Except(Codec.INT4, "int4 loses too much for weights; use int8 or fp8.")] = Codec.NONE
    gradients: Annotated[Codec, Except(Codec.FP8, "fp8 is for weights; use int8 or int4.")] = Codec.NONE
    error_feedback: bool = False
    stochastic_rounding: bool = False
    seed: int = 0  # of stochastic rounding
    block: int | None = None  # elements that share one scale; None: BLOCKS
    two_hop_gathers: bool = False  # weights go between nodes first, once to each node, then inside of it
    node_size: int | None = None  # ranks of a node, for coded gradients and gathers in two hops; None: as launched
    transport: Transport = Transport.AUTO
    reduce_op: ReduceOp = ReduceOp.MEAN

    def __post_init__(self) -> None:
        settle(self, "communication.")
        if self.block is not None and (self.block < 16 or self.block & (self.block - 1)):
            raise ValueError(f"communication.block: {self.block!r} must be a power of two of 16 or more.")
        if self.error_feedback and self.gradients is Codec.NONE:
            raise ValueError("communication.error_feedback needs communication.gradients: int8 or int4.")
        if self.stochastic_rounding and self.gradients is Codec.NONE:
            raise ValueError("communication.stochastic_rounding is for communication.gradients: int8 or int4.")
        if self.seed < 0 or (self.seed and not self.stochastic_rounding):
            raise ValueError(
                f"communication.seed: {self.seed!r} must be 0 or more, and goes with stochastic_rounding: true."
            )
        if self.node_size is not None:
            _at_least(self.node_size, 1, "communication.node_size")
            if self.gradients is Codec.NONE and not self.two_hop_gathers:
                raise ValueError("communication.node_size is for communication.gradients or two_hop_gathers; set one.")
            if self.node_size == 1 and self.two_hop_gathers:
                raise ValueError("communication.node_size: 1 leaves one hop, and two_hop_gathers asks for two.")

    @property
    def active(self) -> bool:
        return (self.weights, self.gradients) != (Codec.NONE, Codec.NONE)

    def block_of(self, codec: Codec) -> int:
        """Return how many elements share one scale."""
        return self.block if self.block is not None else BLOCKS[codec]

    @property
    def alignment(self) -> int:
        """Elements that are whole blocks of each codec in use; 1 where none is."""
        in_use = {self.weights, self.gradients} - {Codec.NONE}
        return max((self.block_of(codec) for codec in in_use), default=1)


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """What a checkpoint looks like."""

    format: CheckpointFormat = CheckpointFormat.AUTO
    asynchronous: bool = False
    when_busy: WhenBusy = WhenBusy.WAIT  # asynchronous only
    save_dtype: str | None = None  # consolidated weights; None keeps each parameter's own dtype
    keep: int | None = None
    frozen: FrozenWeights = FrozenWeights.AUTO
    save_on_each_node: bool = False  # each machine writes what its ranks hold on a disk of its own

    @property
    def shards_trainer(self) -> bool:
        """Tell whether a Trainer's checkpoints are written by rows."""
        return self.format is CheckpointFormat.SHARDED or (self.format is CheckpointFormat.AUTO and self.asynchronous)

    def __post_init__(self) -> None:
        settle(self, "checkpoint.")
        _set(self, "save_dtype", dtype_name(self.save_dtype, "checkpoint.save_dtype"))
        if self.keep is not None:
            _at_least(self.keep, 1, "checkpoint.keep")
        if self.when_busy is WhenBusy.SKIP and not self.asynchronous:
            raise ValueError(
                "checkpoint.when_busy: skip is for saves in the background; set checkpoint.asynchronous, or use wait."
            )


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """Everything that decides how a model is sharded. See docs/design.md, "The config, by name"."""

    stage: int = 3
    reshard_after_forward: bool = True
    keep_last: int = 0  # stage 3: elements of the last units that stay whole from forward to backward
    shard_size: int | str | None = None  # ranks that share one sharded copy: a number, "node", or None for all
    shard_optimizer_over: OptimizerOver = OptimizerOver.SHARD
    secondary_shard_size: int | None = None  # hpZ: ranks that share a second, node-local shard for backward
    persist_below: int = 1000  # elements; smaller parameters stay whole, with DDP semantics
    wrap: WrapConfig = field(default_factory=WrapConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    accumulate: Accumulate = Accumulate.SHARDED
    optimizer_in_backward: bool = False  # units are stepped, and their gradients freed, while backward runs
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    activation_checkpointing: bool = False
    cuda_graph: bool = False  # replay whole forwards and backwards of static shapes
    low_memory_loading: bool = True
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    timeout: float | None = None  # seconds a collective may wait; None: the process group's own
    ledger: bool = False  # count bytes, calls and peaks

    def __post_init__(self) -> None:
        settle(self, "")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage: {self.stage!r} does not exist; use 0 (DDP), 1, 2 or 3 (full shard).")
        if isinstance(self.shard_size, str) and self.shard_size != "node":
            raise ValueError(f"shard_size: {self.shard_size!r} is not a number, 'node' or null.")
        if isinstance(self.shard_size, int):
            _at_least(self.shard_size, 1, "shard_size")
        if self.secondary_shard_size is not None:
            self._check_secondary()
        _at_least(self.persist_below, 0, "persist_below")
        _at_least(self.keep_last, 0, "keep_last")
        if self.keep_last and not self.reshard_after_forward:
            raise ValueError(
                f"keep_last: {self.keep_last}: with reshard_after_forward: false all units stay whole for backward; "
                "leave one of them out."
            )
        if self.offload.params is not Tier.NONE and self.stage != 3:
            raise ValueError(f"offload.params needs stage 3; stage {self.stage} keeps whole parameters on the device.")
        if self.offload.activations is not Tier.NONE and not self.activation_checkpointing:
            raise ValueError(
                "offload.activations: cpu moves the inputs that recomputed units keep, and without "
                "activation_checkpointing: true ourshard recomputes none; set both. That key takes the place of "
                "gradient_checkpointing_enable() and of the Trainer's gradient_checkpointing, and goes with them."
            )
        if self.cuda_graph:
            self._check_graph()
        if self.optimizer_in_backward:
            self._check_in_backward()
        if self.offload.overlap_step and self.stage != 3:
            raise ValueError("offload.overlap_step needs stage 3: below it all parameters come in before a forward.")
        if self.timeout is not None and self.timeout <= 0:
            raise ValueError(f"timeout: {self.timeout!r} must be a positive number of seconds.")

    def _check_graph(self) -> None:
        others = {
            "offload": (self.offload.active, "copies to and from the host follow what the host does meanwhile"),
            "offload.activations": (
                self.offload.activations is not Tier.NONE,
                "a graph's inputs of units stay where they were when it was captured",
            ),
            "communication": (self.communication.active, "codecs choose on the host, step by step"),
            "communication.two_hop_gathers": (
                self.communication.two_hop_gathers,
                "gathers of two groups in one graph have not been tried on GPUs",
            ),
            "secondary_shard_size": (self.secondary_shard_size is not None, "what it has is followed on the host"),
            "optimizer_in_backward": (self.optimizer_in_backward, "gradients of a graph keep their memory"),
            "shard_optimizer_over": (
                self.shard_optimizer_over is OptimizerOver.ALL,
                "waiting sums are followed on the host",
            ),
            "activation_checkpointing": (
                self.activation_checkpointing,
                "it saves the state of random numbers on the host in each forward",
            ),
        }
        for key, (is_set, why) in others.items():
            if is_set:
                raise ValueError(f"cuda_graph can't be combined with {key}: {why}. Leave one of them out.")

    def _check_in_backward(self) -> None:
        if self.stage == 0:
            raise ValueError("optimizer_in_backward needs stage 1, 2 or 3; stage 0 has whole gradients, as DDP does.")
        if self.offload.optimizer is not Tier.NONE:
            raise ValueError(
                f"optimizer_in_backward can't be combined with offload.optimizer: {self.offload.optimizer.value}: "
                "gradients rest in host memory there already. To hide the step there is offload.overlap_step."
            )

    def _check_secondary(self) -> None:
        if self.stage != 3:
            raise ValueError(f"secondary_shard_size needs stage 3; stage {self.stage} keeps parameters whole.")
        if not self.reshard_after_forward:
            raise ValueError(
                "secondary_shard_size: with reshard_after_forward: false nothing is gathered in backward, which the "
                "secondary shard is for; leave one of them out."
            )
        assert self.secondary_shard_size is not None
        if self.secondary_shard_size < 2:
            raise ValueError(
                f"secondary_shard_size: {self.secondary_shard_size!r} must be 2 or more; a rank that is to keep the "
                "whole until backward does so with reshard_after_forward: false."
            )
        if self.communication.node_size not in (None, 1, self.secondary_shard_size):
            raise ValueError(
                f"communication.node_size: {self.communication.node_size} and secondary_shard_size: "
                f"{self.secondary_shard_size} are one axis; leave one out, or set node_size to 1 for a single hop."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ShardConfig:
        """Build from nested mappings, as YAML gives them. Raises `ValueError` on unknown keys and wrong types."""
        try:
            config: ShardConfig = build(cls, values, "")
        except UnknownKey as error:
            raise error.placed(config_keys()) from None
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested values that `from_dict` takes back to an equal object."""
        result: dict[str, Any] = to_plain(self)
        return result

    def replace(self, **changes: Any) -> ShardConfig:
        """Return a copy with top-level fields changed; nested sections may be mappings that change some keys."""
        merged = self.to_dict()
        for key, value in changes.items():
            change = to_plain(value)
            if isinstance(change, dict) and isinstance(merged.get(key), dict):
                merged[key] = {**merged[key], **change}
            else:
                merged[key] = change
        return ShardConfig.from_dict(merged)


@functools.cache
def config_keys() -> Mapping[str, Any]:
    """Return every leaf key in dotted form (`"offload.optimizer"`) with its annotated type, in order."""
    return types.MappingProxyType(_leaf_keys(ShardConfig, ""))


def _leaf_keys(cls: Any, prefix: str) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, hint in hints_of(cls).items():
        nested = dataclasses.is_dataclass(hint)
        keys.update(_leaf_keys(hint, f"{prefix}{name}.") if nested else {prefix + name: hint})
    return keys


def plain_value(key: str, value: Any) -> Any:
    """Normalise `value` as the dotted `key` takes it, in plain form: `"8"` is 8, `"bf16"` is `"bfloat16"`.

    Raises:
        ValueError: `key` is unknown (the nearest name is given), or `value` has another type.
    """
    hints = config_keys()
    if key not in hints:
        inner = ", ".join(name.removeprefix(f"{key}.") for name in hints if name.startswith(f"{key}."))
        unknown = unknown_key(key, hints)
        raise ValueError(f"{key}: expected keys and values, got {value!r}. Its keys: {inner}." if inner else unknown)
    if key.endswith("_dtype"):
        return dtype_name(value, key)
    return to_plain(convert(hints[key], value, key))
