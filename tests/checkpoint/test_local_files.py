"""Folders with state that one layout can read: converted, inspected, damaged, on disks of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint import convert, detect, inspect, verify
from ourshard.checkpoint.commit import newest_complete
from ourshard.checkpoint.manifest import NAME, seal, unseal
from ourshard.checkpoint.sharded import ShardedSource
from ourshard.checkpoint.source import CheckpointError

from tests.checkpoint.test_several_disks import copied_into_one, place
from tests.integrations.eight_bits import EightBits
from tests.integrations.test_local_state import SHARD, Three, steps

pytestmark = pytest.mark.ranks


def made() -> Any:
    import ourshard

    torch.set_num_threads(1)
    model = ourshard.shard_model(Three(), SHARD)
    return model, EightBits(model.parameters())


def saved(folder: str, per_node: int | None = None) -> list[float]:
    """Save after two steps; return the losses of the next two. `per_node`: ranks on a disk."""
    import ourshard

    model, optimizer = made()
    steps(model, optimizer, range(2))
    ourshard.save(model, optimizer, folder if per_node is None else place(folder, per_node) / "step")
    return steps(model, optimizer, range(2, 4))


def loaded(folder: str, per_node: int | None = None) -> list[float] | str:
    """Load and go on; return the losses, or what is said against it."""
    import ourshard

    model, optimizer = made()
    try:
        ourshard.load(model, optimizer, folder if per_node is None else place(folder, per_node) / "step")
    except CheckpointError as error:
        return str(error)
    return steps(model, optimizer, range(2, 4))


@pytest.fixture
def folder(ranks: Any, tmp_path: Path) -> Path:
    ranks(2)(saved, str(tmp_path / "c"))
    return tmp_path / "c"


def test_a_folder_says_where_its_optimizer_loads_and_is_checked_as_any_other(folder: Path) -> None:
    with detect(folder) as source:
        found = inspect(source)
        assert "the optimizer's state loads in the layout that saved it alone" in found.oddities[0]
        assert {"extra.local.codes", "extra.local.scales"} <= {kind.kind for kind in found.kinds}
        assert verify(source, against=source).ok
    assert newest_complete(folder.parent, verify=True).path == folder


def test_a_conversion_to_our_format_keeps_it_and_any_other_says_what_it_leaves_out(
    ranks: Any, folder: Path, tmp_path: Path
) -> None:
    wanted = ranks(2)(saved, str(tmp_path / "again"))
    assert convert(folder, tmp_path / "ours", to="ourshard", world_size=3).losses == ()
    assert ranks(2)(loaded, str(tmp_path / "ours")) == wanted
    lost = "the optimizer's state: only the ranks and the layout that saved it can read it"
    for number, (to, options) in enumerate(
        {"safetensors": {}, "torch": {}, "dcp": {}, "ourshard": {"rename": ["^first=last_but_one"]}}.items()
    ):
        report = convert(folder, tmp_path / f"other{number}", to=to, **options)
        assert any(loss.startswith(lost) for loss in report.losses), to
        with detect(tmp_path / f"other{number}") as source:
            assert not any(key.is_local or key.is_state for key in source.tensors)
            assert not source.description.param_groups


def test_a_trainers_whole_folder_with_it_converts_to_weights(ranks: Any, tmp_path: Path) -> None:
    from tests.integrations.test_local_state import trains

    ranks(2)(trains, str(tmp_path), None, {})
    checkpoint = tmp_path / "checkpoint-2"
    content = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    assert content.keys() == {"ourshard"}
    with pytest.raises(KeyError):  # no optimizer without ourshard goes on with half of its state
        EightBits(Three().parameters()).load_state_dict(content)
    report = convert(checkpoint, tmp_path / "weights", to="safetensors")
    assert "the optimizer's state: only the ranks and the layout that saved it can read it" in report.losses


def test_a_manifest_that_is_not_what_was_written_is_refused(ranks: Any, folder: Path) -> None:
    """By its seal; one that was sealed anew, by what its entries say of each other."""
    path = folder / NAME
    data = path.read_bytes()
    body = unseal(data, path)
    kinds = [kind for kind in body["tensors"] if kind.startswith("extra.local.")]
    assert len(kinds) == 3

    def refused(changed: dict[str, Any]) -> None:
        path.write_bytes(seal(changed))
        with pytest.raises(CheckpointError):
            ShardedSource(folder)
        path.write_bytes(data)

    for kind in kinds:
        name, (dtype, shape) = next(iter(body["tensors"][kind].items()))
        others = {key: value for key, value in body["tensors"][kind].items() if key != name}
        for entry in ({}, {name: [dtype, [shape[0] + 1]]}, {name: [dtype, [shape[0] - 1]]}, {name: ["F64", shape]}):
            refused({**body, "tensors": {**body["tensors"], kind: {**others, **entry}}})
        files = [record for record in body["files"] if record["group"] != kind or record["rank"] != 0]
        refused({**body, "files": files})
    path.write_bytes(data.replace(b"extra.local.codes", b"extra.local.modes", 1))
    with pytest.raises(CheckpointError, match="damaged"):
        ShardedSource(folder)
    strange = {kind: {f"x{name}": value for name, value in body["tensors"][kind].items()} for kind in kinds}
    files = [
        {**record, "pieces": [[f"x{piece[0]}", *piece[1:]] for piece in record["pieces"]]}
        if record["group"] in kinds
        else record
        for record in body["files"]
    ]
    path.write_bytes(seal({**body, "tensors": {**body["tensors"], **strange}, "files": files}))
    for told in ranks(2)(loaded, str(folder)):
        assert "laid out for the rows of 2 ranks" in told


def test_each_disk_has_that_of_its_ranks(ranks: Any, tmp_path: Path) -> None:
    """CASES A16."""
    wanted = ranks(2)(saved, str(tmp_path), 1)
    assert ranks(2)(loaded, str(tmp_path), 1) == wanted
    together = copied_into_one(tmp_path, tmp_path / "together")
    assert ranks(2)(loaded, str(together)) == wanted
    for node, other in (("node0", "node1"), ("node1", "node0")):
        (tmp_path / node).rename(tmp_path / f"was-{other}")
    for node in ("node0", "node1"):
        (tmp_path / f"was-{node}").rename(tmp_path / node)
    for told in ranks(2)(loaded, str(tmp_path), 1):
        assert "rows that this rank needs are not on its disk" in told
