"""Readers fill destinations exactly, in any cut, and none of them outlives an error."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tandem.engine.weights import weight_readers
from tandem.engine.weights.checkpoint import Checkpoint
from tandem.engine.weights.weight_readers import (
    Copied,
    HostLane,
    Lane,
    Piece,
    Read,
    StagedLane,
    Target,
    cut,
    lane_for,
    read_pieces,
)
from tandem.runtime.errors import ModelError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
PIECE_BYTES = 64


class LateCopy:
    """A copy that the device puts off until it is waited for."""

    def __init__(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        self._source, self._destination = source, destination

    def synchronize(self) -> None:
        self._destination.copy_(self._source)


class LateDevice:
    """The least obliging device: whoever does not wait for a copy never gets it."""

    def __init__(self) -> None:
        self.num_host_bytes = 0

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        self.num_host_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> Copied:
        return LateCopy(source, destination)


def make_host_lane(piece_bytes: int = PIECE_BYTES) -> Lane:
    return HostLane(piece_bytes)


def make_staged_lane(piece_bytes: int = PIECE_BYTES) -> Lane:
    return StagedLane(LateDevice(), piece_bytes)


MAKE_LANE = [make_host_lane, make_staged_lane]


def store(folder: Path, files: Sequence[dict[str, torch.Tensor]]) -> Checkpoint:
    places: dict[str, str] = {}
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"{number}.safetensors")
        places |= dict.fromkeys(tensors, f"{number}.safetensors")
    index = json.dumps({"weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index)
    return Checkpoint(folder)


def planned(
    checkpoint: Checkpoint, files: Sequence[dict[str, torch.Tensor]], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], list[Piece]]:
    """Empty destinations by name, and the pieces that fill them."""
    found = [
        (checkpoint.find(name, *tensor.shape), torch.full(tensor.shape, torch.nan, dtype=dtype))
        for tensors in files
        for name, tensor in tensors.items()
    ]
    return {stored.name: part for stored, part in found}, cut(starmap(Target, found), PIECE_BYTES)


def fill(pieces: list[Piece], lanes: Sequence[Lane], advance: Callable[[int], object] = id) -> None:
    read_pieces(pieces, lanes, advance)


@pytest.fixture(autouse=True)
def no_thread_and_no_file_survives() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
    assert not [path for path in open_files() if path.endswith(".safetensors")]


def open_files() -> Iterator[str]:
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            yield str(link.readlink())


@pytest.fixture(params=MAKE_LANE)
def make_lane(request: pytest.FixtureRequest) -> Callable[[], Lane]:
    return request.param  # type: ignore[no-any-return]


@st.composite
def stored_files(draw: st.DrawFn) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def tensor() -> torch.Tensor:
        shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=2))
        values = torch.randn(shape, dtype=torch.float64, generator=generator)
        return values.to(draw(st.sampled_from(DTYPES)))

    return [
        {f"{number}.{index}": tensor() for index in range(draw(st.integers(1, 4)))}
        for number in range(draw(st.integers(1, 3)))
    ]


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(
    files=stored_files(),
    dtype=st.sampled_from(DTYPES),
    piece_bytes=st.sampled_from([8, 24, 64, 4096]),
    num_lanes=st.integers(1, 4),
    make=st.sampled_from(MAKE_LANE),
)
def test_every_tensor_arrives_as_a_plain_load_has_it(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[dict[str, torch.Tensor]],
    dtype: torch.dtype,
    piece_bytes: int,
    num_lanes: int,
    make: Callable[[int], Lane],
) -> None:
    folder = tmp_path_factory.mktemp("stored")
    destinations, _ = planned(store(folder, files), files, dtype)
    checkpoint = Checkpoint(folder)
    pieces = cut(
        (Target(checkpoint.find(name, *part.shape), part) for name, part in destinations.items()),
        piece_bytes,
    )
    assert all(piece.num_bytes <= piece_bytes for piece in pieces)
    advanced: list[int] = []
    fill(pieces, [make(piece_bytes) for _ in range(num_lanes)], advanced.append)
    for number, tensors in enumerate(files):
        plain = load_file(folder / f"{number}.safetensors")
        for name in tensors:
            assert torch.equal(destinations[name], plain[name].to(dtype))
    assert sum(advanced) == sum(t.nbytes for tensors in files for t in tensors.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece_bytes", [64, 4096])
def test_some_columns_of_some_rows_are_read_alone(
    tmp_path: Path, piece_bytes: int, dtype: torch.dtype
) -> None:
    stored = torch.randn(37, 50)
    found = store(tmp_path, [{"a": stored}]).find("a", *stored.shape)
    destination = torch.full((20, 9), torch.nan, dtype=dtype)
    pieces = cut([Target(found, destination, 5 * 50 + 11, 9, 50)], piece_bytes)
    assert sum(piece.num_bytes for piece in pieces) == 20 * 9 * 4
    fill(pieces, [HostLane(piece_bytes)])
    assert torch.equal(destination, stored[5:25, 11:20].to(dtype))


def test_conversion_goes_on_beyond_what_pytorch_converts_in_one_thread(tmp_path: Path) -> None:
    stored = torch.randn(3 * weight_readers._SERIAL_ITEMS + 7).to(torch.bfloat16)
    found = store(tmp_path, [{"a": stored}]).find("a", *stored.shape)
    destination = torch.empty(stored.shape)
    fill(cut([Target(found, destination)]), [HostLane()])
    assert torch.equal(destination, stored.float())


def test_pieces_are_read_in_the_order_of_the_files(tmp_path: Path) -> None:
    files = [{"b": torch.ones(40), "a": torch.ones(40)}, {"c": torch.ones(8)}]
    _, pieces = planned(store(tmp_path, files), files, torch.float32)
    order = [(piece.stored.path.name, piece.offset_bytes) for piece in pieces]
    assert order == sorted(order)


def test_destinations_made_in_inference_mode_are_filled(
    tmp_path: Path, make_lane: Callable[[], Lane]
) -> None:
    files = [{"a": torch.randn(100)}]
    checkpoint = store(tmp_path, files)
    with torch.inference_mode():
        destinations, pieces = planned(checkpoint, files, torch.float32)
        fill(pieces, [make_lane(), make_lane()])
    assert torch.equal(destinations["a"], files[0]["a"])


def test_a_staged_lane_takes_two_pieces_of_host_memory() -> None:
    device = LateDevice()
    StagedLane(device, 1024)
    assert device.num_host_bytes == 2048


def test_the_lane_of_a_cpu_reads_in_place() -> None:
    assert isinstance(lane_for(torch.device("cpu")), HostLane)


def test_a_file_that_shrinks_while_it_is_read_is_named_with_the_tensor(
    tmp_path: Path, make_lane: Callable[[], Lane]
) -> None:
    files = [{"a": torch.ones(100), "b": torch.ones(100)}, {"c": torch.ones(100)}]
    _, pieces = planned(store(tmp_path, files), files, torch.float32)
    path = tmp_path / "0.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 300)
    with pytest.raises(ModelError, match=r"0\.safetensors: tensor b: the file ends") as caught:
        fill(pieces, [make_lane(), make_lane()])
    assert caught.value.param == "b"


def test_a_file_that_is_gone_is_named(tmp_path: Path, make_lane: Callable[[], Lane]) -> None:
    files = [{"a": torch.ones(100)}]
    _, pieces = planned(store(tmp_path, files), files, torch.float32)
    (tmp_path / "0.safetensors").unlink()
    with pytest.raises(ModelError, match=r"0\.safetensors: tensor a: No such file"):
        fill(pieces, [make_lane()])


def test_a_disk_error_is_named_with_file_and_tensor(
    tmp_path: Path, make_lane: Callable[[], Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> int:
        raise OSError(5, "Input/output error")

    files = [{"a": torch.ones(100)}]
    _, pieces = planned(store(tmp_path, files), files, torch.float32)
    monkeypatch.setattr(weight_readers.os, "preadv", broken)
    with pytest.raises(ModelError, match=r"0\.safetensors: tensor a: Input/output error"):
        fill(pieces, [make_lane(), make_lane()])


def test_a_read_may_come_in_parts(
    tmp_path: Path, make_lane: Callable[[], Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = weight_readers.os.preadv

    def five_bytes(file: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(file, [buffers[0][:5]], offset)

    files = [{"a": torch.randn(100)}]
    destinations, pieces = planned(store(tmp_path, files), files, torch.float32)
    monkeypatch.setattr(weight_readers.os, "preadv", five_bytes)
    fill(pieces, [make_lane()])
    assert torch.equal(destinations["a"], files[0]["a"])


class FailingLane:
    """Fails at its first piece, and says so once the failure is known to all readers."""

    def __init__(self) -> None:
        self.finished = threading.Event()

    def fill(self, piece: Piece, read: Read) -> None:
        raise RuntimeError("device lost")

    def finish(self) -> None:
        self.finished.set()


class WaitingLane:
    """Holds its piece until the other lane has failed."""

    def __init__(self, failing: FailingLane) -> None:
        self._failing = failing
        self.num_filled = 0
        self.is_finished = False

    def fill(self, piece: Piece, read: Read) -> None:
        assert self._failing.finished.wait(60)
        self.num_filled += 1

    def finish(self) -> None:
        self.is_finished = True


def test_an_error_ends_the_other_readers_after_the_piece_in_hand(tmp_path: Path) -> None:
    files = [{"a": torch.ones(10_000)}]
    _, pieces = planned(store(tmp_path, files), files, torch.float32)
    failing = FailingLane()
    others = [WaitingLane(failing) for _ in range(3)]
    with pytest.raises(RuntimeError, match="device lost"):
        fill(pieces, [*others, failing])
    assert len(pieces) > 100
    assert all(other.num_filled <= 1 and other.is_finished for other in others)


def test_an_interrupted_load_leaves_no_reader_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = threading.Event()
    filled: list[Piece] = []

    class Pool(ThreadPoolExecutor):
        def __exit__(self, *exc_info: Any) -> None:
            closing.set()
            super().__exit__(*exc_info)

    class Held(HostLane):
        def fill(self, piece: Piece, read: Read) -> None:
            assert closing.wait(60)
            filled.append(piece)

    def interrupt(readers: object) -> None:
        raise KeyboardInterrupt

    files = [{"a": torch.ones(10_000)}]
    _, pieces = planned(store(tmp_path, files), files, torch.float32)
    monkeypatch.setattr(weight_readers, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(weight_readers, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fill(pieces, [Held(PIECE_BYTES), Held(PIECE_BYTES)])
    assert len(filled) <= 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_any_dtype_reach_a_gpu(tmp_path: Path, dtype: torch.dtype) -> None:
    shape = (3000, 1777)  # several pieces
    files = [{str(stored_as): torch.randn(shape).to(stored_as) for stored_as in DTYPES}]
    checkpoint = store(tmp_path, files)
    device = torch.device("cuda")
    found = [
        (checkpoint.find(name, *shape), torch.empty(shape, dtype=dtype, device=device))
        for name in files[0]
    ]
    read_pieces(cut(starmap(Target, found)), [lane_for(device) for _ in range(3)], id)
    for stored, part in found:
        assert torch.equal(part.cpu(), files[0][stored.name].to(dtype))
