"""The arithmetic of the readers: DeepSpeed's cuts, rectangles, strides, and orders of names."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ourshard.checkpoint.foreign.chunked import Chunk, ChunkedTensor
from ourshard.checkpoint.foreign.classes import PickledTensor
from ourshard.checkpoint.foreign.orders import order_by_config, order_by_names
from ourshard.checkpoint.foreign.stored import StoredTensor
from ourshard.checkpoint.foreign.ties import find_ties
from ourshard.checkpoint.foreign.torchfile import TorchFile
from ourshard.checkpoint.foreign.zero_layout import cut_each, cut_flat
from ourshard.checkpoint.source import CheckpointError


def stored(path: Path, tensors: list[torch.Tensor]) -> list[StoredTensor]:
    """Return readers of tensors saved in one file."""
    torch.save(tensors, path)
    file = TorchFile(path)
    return [file.stored(tensor) for tensor in file.load()]


SHAPES = st.lists(st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, world=st.integers(1, 5), align=st.integers(1, 5), stripped=st.booleans())
def test_flat_groups_are_cut_back_into_their_parameters(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], world: int, align: int, stripped: bool
) -> None:
    """Stages 1 and 2: paddings after parameters, end padding kept or not, ranks that hold nothing but padding."""
    tensors = [torch.randn(shape) for shape in shapes]
    paddings = [-tensor.numel() % align for tensor in tensors]
    flat = torch.cat(
        [torch.cat((t.reshape(-1), torch.full((p,), 9.0))) for t, p in zip(tensors, paddings, strict=True)]
    )
    used = flat.numel()
    flat = torch.cat((flat, torch.full((-used % (2 * world),), 7.0)))
    size = flat.numel() // world
    parts = [flat[rank * size : (rank + 1) * size].clone() for rank in range(world)]
    if stripped:
        parts = [part[: max(0, used - rank * size)].clone() for rank, part in enumerate(parts)]
    readers = stored(tmp_path_factory.mktemp("flat") / "parts.pt", parts)
    names = {f"p{index}": shape for index, shape in enumerate(shapes)}
    for (_, reader), tensor in zip(cut_flat(readers, names, paddings, "group").items(), tensors, strict=True):
        assert torch.equal(reader.read(0, tensor.shape[0] if tensor.dim() else 1), tensor)


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, world=st.integers(1, 5), groups=st.integers(1, 3))
def test_parameters_that_are_cut_each_by_itself_are_joined(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], world: int, groups: int
) -> None:
    """Stage 3: every parameter on every rank, in sub-groups, small ones mostly padding."""
    tensors = [torch.randn(shape) for shape in shapes]
    place = [index * groups // len(tensors) for index in range(len(tensors))]
    ranks = []
    for rank in range(world):
        flat: list[list[torch.Tensor]] = [[] for _ in range(max(place) + 1)]
        for tensor, group in zip(tensors, place, strict=True):
            part = -(-tensor.numel() // world)
            padded = torch.cat((tensor.reshape(-1), torch.full((part * world - tensor.numel(),), 9.0)))
            flat[group].append(padded[rank * part : (rank + 1) * part])
        ranks.append([torch.cat(group) for group in flat if group])
    folder = tmp_path_factory.mktemp("each")
    readers = [stored(folder / f"{rank}.pt", group) for rank, group in enumerate(ranks)]
    names = {f"p{index}": shape for index, shape in enumerate(shapes)}
    for (_, reader), tensor in zip(cut_each(readers, names, "group").items(), tensors, strict=True):
        assert torch.equal(reader.read(0, tensor.shape[0] if tensor.dim() else 1), tensor)


def test_shapes_that_do_not_fit_the_partitions_are_refused(tmp_path: Path) -> None:
    parts = stored(tmp_path / "parts.pt", [torch.zeros(8), torch.zeros(8)])
    for shapes in ({"a": (20,)}, {"a": (3,)}):
        with pytest.raises(CheckpointError):
            cut_flat(parts, shapes, [0], "group")
        with pytest.raises(CheckpointError):
            cut_each([[parts[0]], [parts[1]]], shapes, "group")


STRIDED = {
    "column-major": torch.arange(35.0).reshape(7, 5).t(),
    "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "every second row": torch.arange(60.0).reshape(12, 5)[::2],
    "the middle of a row": torch.arange(60.0).reshape(6, 10)[:, 3:7],
    "expanded": torch.arange(4.0).expand(6, 4),
    "a scalar within": torch.arange(9.0)[4],
    "no rows": torch.zeros(0, 4),
}


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("what", STRIDED)
def test_rows_of_any_strides_are_read(what: str, small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:  # as for tensors too large to read their whole span
        monkeypatch.setattr(
            "ourshard.checkpoint.foreign.stored._SPAN_NBYTES",
            0 if what in ("column-major", "channels last") else 1 << 20,
        )
    tensor = STRIDED[what]
    (reader,) = stored(tmp_path / "file.pt", [tensor])
    rows = tensor.shape[0] if tensor.dim() else 1
    for start in range(rows + 1):
        for stop in range(start, rows + 1):
            if tensor.dim():
                assert torch.equal(reader.read(start, stop), tensor[start:stop])
    if not tensor.dim():
        assert torch.equal(reader.read(0, 1), tensor)


def _chunks(tensor: torch.Tensor, path: Path, boxes: list[tuple[slice, slice]]) -> list[Chunk]:
    parts = stored(path, [tensor[box].clone() for box in boxes])
    return [
        Chunk((rows.start, columns.start), part.shape, lambda part=part: part)
        for (rows, columns), part in zip(boxes, parts, strict=True)
    ]


def test_rectangles_cut_along_both_dimensions_are_joined(tmp_path: Path) -> None:
    tensor = torch.arange(70.0).reshape(7, 10)
    boxes = [(slice(a, b), slice(c, d)) for a, b in ((0, 4), (4, 7)) for c, d in ((0, 3), (3, 4), (4, 10))]
    joined = ChunkedTensor((7, 10), torch.float32, _chunks(tensor, tmp_path / "f.pt", boxes), "t")
    for start in range(8):
        for stop in range(start, 8):
            assert torch.equal(joined.read(start, stop), tensor[start:stop])


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([(slice(0, 4), slice(0, 10))], "a piece is missing"),
        ([(slice(0, 4), slice(0, 10)), (slice(3, 7), slice(0, 10))], "overlap"),
        ([(slice(0, 7), slice(0, 6)), (slice(0, 7), slice(5, 10))], "overlap"),
    ],
)
def test_holes_and_overlaps_are_refused(boxes: list[tuple[slice, slice]], words: str, tmp_path: Path) -> None:
    tensor = torch.arange(70.0).reshape(7, 10)
    with pytest.raises(CheckpointError, match=words):
        ChunkedTensor((7, 10), torch.float32, _chunks(tensor, tmp_path / "f.pt", boxes), "t")


def test_pieces_that_form_no_grid_are_joined_too(tmp_path: Path) -> None:
    """Four around one: no cut goes through from edge to edge."""
    tensor = torch.arange(36.0).reshape(6, 6)
    boxes = [(0, 2, 0, 4), (0, 4, 4, 6), (4, 6, 2, 6), (2, 6, 0, 2), (2, 4, 2, 4)]
    slices = [(slice(a, b), slice(c, d)) for a, b, c, d in boxes]
    joined = ChunkedTensor((6, 6), torch.float32, _chunks(tensor, tmp_path / "f.pt", slices), "t")
    for start in range(6):
        assert torch.equal(joined.read(start, 6), tensor[start:])


def test_ten_thousand_pieces_are_checked_at_once_and_as_many_in_disorder_are_refused() -> None:
    """Comparing each with each would take minutes."""
    places = [(row, column) for row in range(100) for column in range(100)]
    ChunkedTensor((100, 100), torch.float32, [Chunk(place, (1, 1), lambda: torch.ones(1, 1)) for place in places], "t")
    row = [Chunk((0, column), (1 + column % 2, 1), lambda: torch.ones(1, 1)) for column in range(10_000)]
    with pytest.raises(CheckpointError, match="form no grid"):
        ChunkedTensor((2, 10_000), torch.float32, row, "t")


def test_a_contiguous_tensor_is_told_from_others() -> None:
    for tensor in (torch.zeros(3, 4), torch.zeros(3, 1, 4), torch.zeros(()), torch.zeros(0, 5), torch.zeros(3, 4).t()):
        pickled = PickledTensor(None, 0, tuple(tensor.shape), tensor.stride(), tensor.dtype)  # type: ignore[arg-type]
        assert pickled.is_contiguous == tensor.is_contiguous()
        assert pickled.numel == math.prod(tensor.shape)


FAMILIES = {
    "LlamaForCausalLM": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 12, "num_attention_heads": 2},
    "Qwen2ForCausalLM": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2},
    "Qwen3ForCausalLM": {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4
    },
    "MistralForCausalLM": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2},
    "Gemma2ForCausalLM": {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4
    },
    "GPT2LMHeadModel": {"n_embd": 8, "n_layer": 11, "n_head": 2},
    "GPTNeoXForCausalLM": {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_orders_known_by_names_are_those_of_the_models(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, family)
    sizes = {"num_key_value_heads": 1} if "num_attention_heads" in FAMILIES[family] else {}
    config = kind.config_class(vocab_size=16, **FAMILIES[family], **sizes)
    with torch.device("meta"):
        defined = [name for name, _ in kind(config).named_parameters()]
    assert order_by_names(sorted(defined)) == defined
    table = {**config.to_dict(), "architectures": [family]}
    found = order_by_config(table, sorted(defined))
    assert found is not None
    assert list(found.names) == defined


def test_adapters_are_ordered_within_their_modules() -> None:
    stem = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.default.weight"
    expected = [stem.format(n, p, ab) for n in range(11) for p in ("q_proj", "v_proj") for ab in "AB"]
    assert order_by_names(sorted(expected)) == expected


@pytest.mark.parametrize(
    "names",
    [
        ["net.first.weight", "net.second.weight"],
        ["model.decoder.layers.0.self_attn.q_proj.weight", "model.decoder.layers.0.self_attn.v_proj.weight"],
    ],
)
def test_an_order_that_is_not_known_is_not_guessed(names: list[str]) -> None:
    assert order_by_names(names) is None


def test_a_config_that_asks_for_a_billion_layers_builds_nothing() -> None:
    pytest.importorskip("transformers")
    assert order_by_config({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 10**9}, ["a"]) is None


READ_ALL = """
import sys
from pathlib import Path
from ourshard.checkpoint.foreign.torchfile import TorchFile
from ourshard.checkpoint.foreign.zero_layout import cut_flat

def peak():
    # The most bytes resident so far. `ru_maxrss` would begin with those of the process that started this one.
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10

file = TorchFile(Path(sys.argv[1]))
parts = [file.stored(part) for part in file.load()]
reader = cut_flat(parts, {"weight": (10_000, 4_000)}, [0], "group")["weight"]
reader.read(0, 1)
before = peak()
for start in range(0, 10_000, 100):
    reader.read(start, start + 100)
print(peak() - before)
"""


def test_memory_for_reading_is_that_of_the_rows_asked_for(tmp_path: Path) -> None:
    """160 MB in partitions, read in blocks of 1.6 MB: neither partitions nor files are loaded or mapped."""
    torch.save(list(torch.zeros(40_000_000).chunk(4)), tmp_path / "parts.pt")
    command = [sys.executable, "-c", READ_ALL, str(tmp_path / "parts.pt")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert int(result.stdout) < 16 << 20


class Counted:
    """A tensor that counts how often it is read."""

    dtype = torch.float32

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.shape, self.reads = value, tuple(value.shape), 0

    def read(self, start_row: int, stop_row: int, check: bool = True) -> torch.Tensor:
        self.reads += 1
        return self.value[start_row:stop_row]


def test_ties_among_ten_thousand_tensors_of_one_shape_are_found_by_reading_each_once() -> None:
    """Experts are so many; to compare each with each would take minutes."""
    model = {f"experts.{number}.weight": Counted(torch.randn(2, 3)) for number in range(10_000)}
    assert find_ties(model, None) == find_ties(model, frozenset(model)) == {}
    assert all(tensor.reads == 0 for tensor in model.values())
    model["again.weight"] = Counted(model["experts.7000.weight"].value.clone())
    model["lm_head.weight"] = Counted(model["experts.3.weight"].value.clone())
    trained = frozenset(f"experts.{number}.weight" for number in range(5000, 10_000))
    assert find_ties(model, trained) == {"again.weight": "experts.7000.weight"}
    assert max(tensor.reads for tensor in model.values()) == 1
