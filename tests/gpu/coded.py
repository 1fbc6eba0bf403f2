"""Train with codecs and with a secondary shard over NCCL, on the GPUs of one machine.

    torchrun --nproc_per_node 2 tests/gpu/coded.py [WORD ...]

With words, only cases that have one of them in their name are run. Each case trains with the Triton kernels and again
with the torch reference: losses and weights must have the same bits, on all ranks. Beside the exact run, losses stay
within 1% and weights within `NEAR`; they differ, or nothing was coded. A secondary shard changes no bit. Two ranks make
a node for it here, which no config allows, since it pays for nothing: the mesh is made by hand. Four ranks add two
nodes, two replicas, and gathers in two hops, which change no bit either.

Slots are poisoned with NaN when they are released and secondary shards when they are stale, and torch fills new memory
with NaN. `auto` must choose no codec where GPUs reach each other's memory, and says what it measured. Prints one line a
case; exits with 1 if any is off.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products

import torch
import torch.distributed as dist
from ourshard.config import ShardConfig
from ourshard.runtime import codec as codecs
from ourshard.runtime import codec_torch
from ourshard.runtime.api import engine_of, full_state_dict, shard_model
from ourshard.runtime.mesh import Axis, Mesh, build_mesh
from ourshard.runtime.secondary import SecondaryShard
from parity import LR, build, on_all_ranks, tell, train_poisoned

STEPS, ACCUMULATE = 4, 2
NEAR = 2 * STEPS * LR  # Adam's steps, each the other way: where a gradient is near zero a codec may turn its sign
Options = dict[str, Any]


@dataclass
class Run:
    """What a run left: losses (mean over ranks), weights, and what `auto` said."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    chosen: str = ""
    codec: str = ""

    def same_bits(self, other: Run) -> bool:
        return self.losses == other.losses and all(torch.equal(v, other.state[k]) for k, v in self.state.items())

    def apart(self, other: Run) -> tuple[float, float]:
        """Return the largest relative difference of losses, and the largest difference of weights."""
        losses = max(abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True))
        return losses, max((v - other.state[k]).abs().max().item() for k, v in self.state.items())


@contextlib.contextmanager
def reference_codecs(wanted: bool) -> Iterator[None]:
    """Code with plain torch operations, on the device."""
    before = codecs._backend
    if wanted:
        codecs._backend = lambda tensor: codec_torch
    try:
        yield
    finally:
        codecs._backend = before


def poison_stale_secondary_shards() -> None:
    forget = SecondaryShard.forget

    def poisoned(shard: SecondaryShard) -> None:
        shard.tensor.fill_(float("nan"))
        forget(shard)

    SecondaryShard.forget = poisoned  # type: ignore[method-assign]


def mesh_of(options: Options, device: torch.device) -> Mesh | None:
    """Return a mesh whose node is all ranks, for a secondary shard over them; None where the config says the mesh."""
    size = options.get("secondary_shard_size")
    if size is None or size < dist.get_world_size():
        return None
    plain = build_mesh(ShardConfig(), device=device)
    node = Axis("node", size, plain.shard.rank, dist.new_group())
    return replace(plain, node=node)


def train(options: Options, device: torch.device, *, reference: bool = False) -> Run:
    """Train sharded, on this rank's part of each batch."""
    model = build(device)
    model.train()
    with reference_codecs(reference):
        config = ShardConfig.from_dict({"persist_below": 100, "wrap": {"merge": 0}, **options})
        shard_model(model, config, mesh=mesh_of(options, device))
        engine = engine_of(model)
        assert engine is not None
        losses = train_poisoned(model, engine, device, STEPS, ACCUMULATE)
        chosen = engine.config.communication
        return Run(losses, full_state_dict(model), engine.chosen, f"{chosen.weights.value} {chosen.gradients.value}")


def coded(stage: int = 3, **communication: Any) -> Options:
    return {"stage": stage, "communication": {"transport": "nccl", "block": 64, **communication}}


def cases() -> tuple[dict[str, Options], dict[str, str]]:
    """Return what is trained, and which of it must have the bits of which other."""
    both = {"weights": "int8", "gradients": "int8"}
    host = {"optimizer": "cpu"}
    found = {
        "int8 weights": coded(weights="int8"),
        "fp8 weights": coded(weights="fp8"),
        "int8 weights, whole until backward": {**coded(weights="int8"), "reshard_after_forward": False},
        **{f"int8 gradients, stage {stage}": coded(stage, gradients="int8") for stage in (1, 2, 3)},
        "int4 gradients": coded(gradients="int4"),
        "int4 gradients, error feedback": coded(gradients="int4", error_feedback=True),
        "int4 gradients, stochastic": coded(gradients="int4", stochastic_rounding=True, seed=3),
        "int4 gradients, both": coded(gradients="int4", stochastic_rounding=True, seed=3, error_feedback=True),
        "int8 both": coded(**both),
        "int8 both, recomputed": {**coded(**both), "activation_checkpointing": True},
        "int8 both, deferred": {**coded(**both), "accumulate": "deferred"},
        "int8 both, masters on the host": {**coded(**both), "offload": host},
        "int8 both, all on the host": {**coded(**both), "offload": {**host, "params": "cpu"}},
    }
    second = {"secondary_shard_size": 2}
    alike = {"exact, secondary shard": "exact"}
    found["exact, secondary shard"] = {**coded(), **second}
    for name in ("int8 weights", "fp8 weights", "int8 both, recomputed", "int8 both, all on the host"):
        found[f"{name}, secondary shard"] = {**found[name], **second}
        alike[f"{name}, secondary shard"] = name
    if dist.get_world_size() == 4:
        found[BOTH_2_NODES] = coded(**both, node_size=2)
        found["int4 gradients, 2 nodes"] = coded(gradients="int4", error_feedback=True, node_size=2)
        found["int8 both, 2 replicas"] = {**coded(**both), "shard_size": 2}
        found["int8 both, 2 replicas, masters over all"] = {**found["int8 both, 2 replicas"], **OVER_ALL}
        alike = {name: other for name, other in alike.items() if "both" not in name}  # those have two hops
        hops = {"two_hop_gathers": True, "node_size": 2}
        for name, options in (("exact", coded()), *((name, found[name]) for name in ("int8 weights", BOTH_2_NODES))):
            communication = {**options["communication"], **hops}
            found[f"{name}, two-hop gathers"] = {**options, "communication": communication}
            alike[f"{name}, two-hop gathers"] = name
    found["int8 both, masters over all"] = {**coded(**both), **OVER_ALL}  # one copy: the same as over shard
    alike["int8 both, masters over all"] = "int8 both"
    return found, alike


BOTH_2_NODES = "int8 both, 2 nodes"
OVER_ALL: Options = {"shard_optimizer_over": "all"}


def check(name: str, run: Run, exact: Run, again: Run, twin: Run | None) -> tuple[bool, str]:
    """Say whether a run is right, and what was found."""
    losses, weights = run.apart(exact)
    coded_run = not name.startswith("exact")
    near = losses < 1e-2 and weights < NEAR and (weights > 1e-7) is coded_run
    same, alike = run.same_bits(again), twin is None or run.same_bits(twin)
    text = f"losses {losses:.1e} weights {weights:.1e} from exact"
    text += f", kernels {'are' if same else 'ARE NOT'} the reference"
    if twin is not None:
        text += f", {'same' if alike else 'OTHER'} bits as its twin"
    return near and same and alike, text


def reach_each_other() -> bool:
    """Say whether NCCL can use peer memory between all GPUs."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return False
    mine, count = torch.cuda.current_device(), dist.get_world_size()
    return all(torch.cuda.can_device_access_peer(mine, other) for other in range(count) if other != mine)


def check_auto(device: torch.device) -> tuple[bool, str]:
    """Say whether `auto` chose as the links are: none where GPUs reach each other, int8 where NCCL must use sockets."""
    auto = {"weights": "auto", "gradients": "auto", "block": 256}
    run = train({"communication": auto, "precision": {"param_dtype": "bfloat16"}}, device)
    fast = reach_each_other()
    wanted = "none none" if fast else "int8 int8"
    return run.codec == wanted, f"{'fast' if fast else 'slow'} links: chose {run.codec} ({run.chosen})"


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    for faster in ("flash", "mem_efficient", "cudnn"):  # attention whose backward may add in another order each time
        getattr(torch.backends.cuda, f"enable_{faster}_sdp")(False)
    poison_stale_secondary_shards()
    words, bad = sys.argv[1:], 0
    found, alike = cases()
    found = {name: options for name, options in found.items() if not words or any(word in name for word in words)}
    for dtype in os.environ.get("DTYPES", "float32 bfloat16").split():
        precision = {"precision": {"param_dtype": dtype, "reduce_dtype": "float32"}}
        runs = {"exact": train({**coded(), **precision}, device)}
        for name, options in found.items():
            runs[name] = train({**options, **precision}, device)
            again = train({**options, **precision}, device, reference=True)
            twin = runs.get(alike.get(name, ""))
            good, text = check(name, runs[name], runs["exact"], again, twin)
            good = on_all_ranks(good, device)
            bad += not good
            tell(good, f"{dtype} {name}", text)
    if not words or "auto" in words:
        good, text = check_auto(device)
        bad += not on_all_ranks(good, device)
        tell(good, "auto", text)
    dist.destroy_process_group()
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
