"""Checkpoints in pieces: who writes what, what a layout reads of another's, what a crash leaves."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlflow.errors import CheckpointError
from rlflow.runtime.record import durable
from rlflow.runtime.record.checkpoint import (
    LATEST,
    find_checkpoint,
    list_checkpoints,
    save_checkpoint,
)
from rlflow.runtime.record.shards.background import Background
from rlflow.runtime.record.shards.places import (
    SavedPiece,
    StoredFile,
    assign_writers,
    parse_piece,
    slices_within,
    whole_piece,
)
from rlflow.runtime.record.shards.reading import StoredTensor, open_component
from rlflow.runtime.record.shards.snapshot import HostBuffers, Keep, take_snapshot
from rlflow.runtime.worker.saving import shards_of
from tests.runtime.test_checkpoint_faults import armed, in_child
from tests.runtime.whole_checkpoints import joined

pytestmark = pytest.mark.torch
__all__ = ["armed"]


def weights(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    shapes = {"embed": (12, 6), "up": (8, 6), "norm": (6,), "scale": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def places(shape, layout: str, rank: int) -> SavedPiece:
    """Half of a weight on each of two ranks, along rows or columns; all of a vector."""
    if len(shape) < 2 or layout == "whole":
        return whole_piece(shape)
    cut = 0 if layout == "rows" else 1
    half = shape[cut] // 2
    box = [(0, size) for size in shape]
    box[cut] = ((0, half), (half, shape[cut]))[rank]
    return SavedPiece(tuple(shape), tuple(box))


@dataclass
class Ranks:
    """Two processes' pieces of a model, each with buffers of its own, snapshots taken."""

    tensors: dict[str, torch.Tensor]
    layout: str = "rows"

    def __post_init__(self):
        count = 1 if self.layout == "whole" else 2
        held = {
            rank: {"m": {n: places(t.shape, self.layout, rank) for n, t in self.tensors.items()}}
            for rank in range(count)
        }
        self.orders = assign_writers(held)
        self.shards = shards_of(self.orders, held)
        self.taken = [self.take(held[rank]["m"], self.orders[rank]["m"]) for rank in range(count)]
        self.size = sum(each.size for each in self.taken)

    def take(self, own, order):
        full = whole_piece
        pieces = {
            name: Keep(
                tensor=self.tensors[name][
                    slices_within(own[name].box, full(own[name].shape).box)
                ].clone(),
                resting=False,
            )
            for name in order.names
        }
        return take_snapshot({order.file: ("m", pieces)}, HostBuffers())

    def write(self, directory):
        return {n: record for one in self.taken for n, record in one.write(directory).items()}

    def give_up(self):
        for one in self.taken:
            one.give_up()


def save(root: Path, iteration: int, layout: str = "rows", keep: int = 2) -> Path:
    return save_checkpoint(
        root, iteration, Ranks(weights(iteration), layout), {"at": iteration}, {}, keep
    )


def test_of_ranks_that_hold_the_same_one_writes_and_all_write_as_much():
    shape = (64, 4)
    halves = [SavedPiece(shape, ((0, 32), (0, 4))), SavedPiece(shape, ((32, 64), (0, 4)))]
    held = {
        rank: {
            "m": {"w": halves[rank % 2]} | {f"norm{n}": whole_piece((4,)) for n in range(8)},
            "o": {"gone": SavedPiece((1,), ((0, 1 - rank % 2),)), "empty": whole_piece((0, 3))},
        }
        for rank in range(4)
    }

    orders = assign_writers(held)

    found = sorted(
        (name, held[rank][part][name].box)
        for rank, parts in orders.items()
        for part, order in parts.items()
        for name in order.names
    )
    assert len(set(found)) == len(found) == 2 + 8 + 2
    sizes = [
        sum(held[rank]["m"][name].numel for name in parts["m"].names if name in held[rank]["m"])
        for rank, parts in orders.items()
        if "m" in parts
    ]
    assert [128, 128, 16, 16] == sizes
    files = [order.file for rank in range(4) for order in orders[rank].values()]
    assert len(set(files)) == len(files)

    lost = {0: held[0]}
    with pytest.raises(AssertionError, match="pieces of w have 128 of 256 elements"):
        assign_writers(lost)


def test_a_place_is_read_back_from_its_text():
    for place in (whole_piece(()), whole_piece((3,)), SavedPiece((9, 4), ((3, 6), (0, 4)))):
        assert place == parse_piece(place.text())
    assert "3:6,0:4 of 9,4" == SavedPiece((9, 4), ((3, 6), (0, 4))).text()
    with pytest.raises(ValueError, match="is no place"):
        parse_piece("3:6 of -1")


@pytest.mark.parametrize("layout", ["rows", "columns", "whole"])
def test_every_layout_reads_back_what_every_other_wrote(tmp_path, layout):
    tensors = weights(1)
    path = save(tmp_path, 1, layout)
    whole = joined(path)
    assert {f"m/{name}" for name in tensors} == set(whole)
    assert all(torch.equal(tensors[name], whole[f"m/{name}"]) for name in tensors)
    with open_component(find_checkpoint(tmp_path).files["m"]) as stored:
        for other in ("rows", "columns", "whole"):
            for rank in range(2):
                for name, tensor in tensors.items():
                    wanted = slices_within(
                        places(tensor.shape, other, rank).box, whole_piece(tensor.shape).box
                    )
                    assert torch.equal(tensor[wanted], stored[name][wanted if wanted else ...])


def test_only_the_bytes_that_a_rank_needs_are_read(tmp_path):
    save(tmp_path, 1)
    read = []

    class Counted:
        def __init__(self, stored):
            self.stored = stored

        def __getitem__(self, where):
            read.append(self.stored[where].numel())
            return self.stored[where]

    with open_component(find_checkpoint(tmp_path).files["m"]) as stored:
        pieces = [(place, Counted(slices)) for place, slices in stored["embed"]._pieces]
        column = StoredTensor("embed", pieces)[:, 0:2]
        row = StoredTensor("embed", pieces)[3:5, :]
    assert torch.equal(weights(1)["embed"][:, :2], column)
    assert torch.equal(weights(1)["embed"][3:5], row)
    assert [6 * 2, 6 * 2, 2 * 6] == read


def test_a_tensor_without_elements_reads_back(tmp_path):
    """Rows in flight that have no token yet are a field of no elements."""
    saved = {
        "tokens": torch.zeros(0, dtype=torch.int32),
        "columns": torch.zeros(3, 0, dtype=torch.bfloat16),
    }
    save_file(saved, tmp_path / "rows.safetensors")
    with open_component([StoredFile(path=tmp_path / "rows.safetensors", pieces={})]) as read:
        for name, tensor in saved.items():
            assert tensor.shape == read[name][...].shape
            assert tensor.dtype == read[name][...].dtype
        assert (2, 0) == read["columns"][1:3, :].shape


def test_a_missing_piece_is_an_error_and_not_memory_that_nobody_filled(tmp_path):
    save(tmp_path, 1)
    first, _ = find_checkpoint(tmp_path).files["m"]
    with (
        open_component([first]) as stored,
        pytest.raises(CheckpointError, match=r"E720.*pieces of 'embed' are missing"),
    ):
        stored["embed"][...]


@pytest.mark.parametrize("number", [1, 2])
def test_a_shard_that_is_gone_or_damaged_falls_back_to_the_checkpoint_before(tmp_path, number):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / f"m-{number:05d}-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    found = find_checkpoint(tmp_path)
    assert (1, "sha256" in found.rejected[0].reason) == (found.iteration, True)
    file.unlink()
    found = find_checkpoint(tmp_path)
    assert (1, f"{file.name} is missing") == (found.iteration, found.rejected[0].reason)


@pytest.mark.parametrize(
    "fault",
    [
        "ckpt:component:write=kill9@3",
        "ckpt:component:fsync=kill9@1",
        "ckpt:component:fsync=kill9@2",
        "ckpt:reported=kill9",
        "ckpt:manifest:fsync=kill9",
    ],
)
def test_a_kill_between_shards_or_reports_leaves_the_checkpoint_before(tmp_path, fault):
    save(tmp_path, 1)
    status = in_child(fault, lambda: save(tmp_path, 2))
    assert signal.SIGKILL == os.WTERMSIG(status)
    found = find_checkpoint(tmp_path)
    assert (1, ()) == (found.iteration, found.rejected)
    save(tmp_path, 3)
    assert 3 == find_checkpoint(tmp_path).iteration
    assert not [path for path in tmp_path.iterdir() if durable.is_leftover(path.name)]


def test_a_disk_that_is_full_in_the_background_is_the_callers_error_once(tmp_path, armed):
    save(tmp_path, 1)
    armed("ckpt:component:write=enospc@3")
    saving, ranks = Background(), Ranks(weights(2))
    saving.start(lambda: save_checkpoint(tmp_path, 2, ranks, {}, {}), ranks.give_up)
    saving._thread.join()
    with pytest.raises(CheckpointError, match="E701"):
        saving.check()
    saving.check()
    saving.join()
    assert {LATEST, "iteration-000001"} == {path.name for path in tmp_path.iterdir()}


def test_a_save_that_is_given_up_leaves_nothing(tmp_path):
    save(tmp_path, 1)
    ranks = Ranks(weights(2))
    ranks.give_up()
    with pytest.raises(CheckpointError, match="E705"):
        save_checkpoint(tmp_path, 2, ranks, {}, {})
    assert ["iteration-000001"] == [path.name for path in list_checkpoints(tmp_path)]
    assert {LATEST, "iteration-000001"} == {path.name for path in tmp_path.iterdir()}


def test_a_snapshot_stays_as_it_was_and_its_memory_is_used_again(tmp_path):
    live, buffers = torch.arange(1000.0), HostBuffers(chunk=1 << 10)

    def take(number):
        live.fill_(number)
        taken = take_snapshot({"m": ("m", {"t": Keep(tensor=live, resting=False)})}, buffers)
        live.fill_(-1)
        where = tmp_path / str(number)
        where.mkdir()
        taken.write(where)
        with open_component([type("F", (), {"path": where / "m", "pieces": {}})]) as stored:
            return stored["t"][...], [piece.data_ptr() for piece in buffers._memory]

    first, memory = take(1)
    second, again = take(2)
    assert (1.0, 1.0, 2.0, 2.0) == (*first.aminmax(), *second.aminmax())
    assert memory == again
    assert 4 == len(memory)


def test_what_rests_is_not_copied_and_a_change_of_it_is_found(tmp_path):
    asleep, buffers = torch.arange(8.0), HostBuffers()

    def take():
        return take_snapshot({"m": ("m", {"t": Keep(tensor=asleep, resting=True)})}, buffers)

    taken = take()
    assert [] == buffers._memory
    assert {"m"} == taken.write(tmp_path).keys()
    (tmp_path / "m").unlink()
    taken = take()
    asleep.add_(1)
    with pytest.raises(CheckpointError, match=r"E726.*'t' was changed"):
        taken.write(tmp_path)


def test_one_save_at_a_time():
    saving, gate = Background(), threading.Event()
    saving.start(gate.wait, gate.set)
    saving.check()
    with pytest.raises(AssertionError, match="not over"):
        saving.start(gate.wait, gate.set)
    saving.abandon()
    saving.join()
    saving.start(lambda: None, gate.set)
    saving.join()
