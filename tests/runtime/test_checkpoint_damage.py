"""Damage every file of a checkpoint in every way: it is noticed, and an older one is used."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from rlflow.errors import CheckpointError
from rlflow.runtime.record.checkpoint import LATEST, save_checkpoint
from rlflow.runtime.record.durable import exact_json
from tests.runtime.whole_checkpoints import load_checkpoint

FILES = ["actor.safetensors", "actor.optimizer.safetensors", "manifest.json"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Two good checkpoints, 1 and 2; copied by each test."""
    root = tmp_path_factory.mktemp("saved") / "checkpoints"
    for iteration in (1, 2):
        data = np.full(300, iteration, np.float32)
        parts = {"actor": {"w": data}, "actor.optimizer": {"m": data + 1}}
        state = {"text": "état", "numbers": [0.1, 2]}
        save_checkpoint(root, iteration, parts, state, {"run": "a"})
    return root


@pytest.fixture
def root(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def newest(root: Path) -> Path:
    return root / "iteration-000002"


def assert_falls_back(root: Path, reason: str) -> None:
    """Iteration 1 is loaded, and iteration 2 was rejected for `reason`."""
    loaded = load_checkpoint(root, framework="np")
    assert 1 == loaded.iteration
    assert 1.0 == loaded.components["actor"]["w"][0]
    (rejected,) = loaded.rejected
    assert "iteration-000002" == rejected.name
    assert reason in rejected.reason


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", ["0", "1", "half", "-1"])
def test_truncation(root, name, cut):
    file = newest(root) / name
    size = file.stat().st_size
    os.truncate(file, {"0": 0, "1": 1, "half": size // 2, "-1": size - 1}[cut])
    assert_falls_back(root, name)


@pytest.mark.parametrize("name", FILES)
def test_trailing_bytes(root, name):
    with (newest(root) / name).open("ab") as file:
        file.write(b"\n")
    assert_falls_back(root, name)


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_anywhere(root, name):
    file = newest(root) / name
    good = file.read_bytes()
    places = sorted({*range(0, len(good) * 8, 97), 0, len(good) * 8 - 1})
    for place in places:
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        file.write_bytes(bad)
        assert_falls_back(root, name)


@pytest.mark.slow
def test_flipped_bits_all_over_the_manifest(root):
    file = newest(root) / "manifest.json"
    good = file.read_bytes()
    for place in range(0, len(good) * 8, 3):
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        file.write_bytes(bad)
        (rejected,) = load_checkpoint(root, framework="np").rejected
        assert "manifest.json" in rejected.reason


@pytest.mark.parametrize("name", FILES)
def test_deleted_file(root, name):
    (newest(root) / name).unlink()
    assert_falls_back(root, name)


@pytest.mark.parametrize("name", FILES)
def test_file_swapped_with_the_older_checkpoint(root, name):
    shutil.copy(root / "iteration-000001" / name, newest(root) / name)
    assert_falls_back(root, name)


def test_files_swapped_with_each_other(root):
    first, second = newest(root) / FILES[0], newest(root) / FILES[1]
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    assert_falls_back(root, ".safetensors")


@pytest.mark.parametrize("name", ["extra.safetensors", "payload.pkl", ".hidden"])
def test_extra_file(root, name):
    (newest(root) / name).write_bytes(b"x")
    assert_falls_back(root, f"{name} does not belong to it")


def test_checkpoint_under_the_name_of_another_iteration(root):
    newest(root).rename(root / "iteration-000003")
    loaded = load_checkpoint(root, framework="np")
    assert 1 == loaded.iteration
    assert "manifest.json is of iteration 2" == loaded.rejected[1].reason
    assert "names iteration-000002, which is not here" == loaded.rejected[0].reason


def test_link_in_place_of_a_file_is_refused(root, tmp_path):
    file = newest(root) / "actor.safetensors"
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    assert_falls_back(root, "not a plain file")


def test_link_in_place_of_a_checkpoint_is_refused(root, tmp_path):
    newest(root).rename(tmp_path / "outside")
    newest(root).symlink_to(tmp_path / "outside")
    assert_falls_back(root, "manifest.json")


def test_file_in_place_of_a_checkpoint(root):
    shutil.rmtree(newest(root))
    newest(root).write_text("not a directory")
    assert_falls_back(root, "manifest.json")


def test_manifest_resealed_for_another_format_is_refused(root):
    file = newest(root) / "manifest.json"
    body = json.loads(file.read_text())
    file.write_text(exact_json({**body, "format": 3}))
    assert_falls_back(root, "not of format 2")


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "1", '"x"', "{}", '{"format": 1}', "[" * 100_000, '{"format":1,"a":NaN}',
     '{"format": 1, "$float": "nan", "b": 1}', '{"format": 1, "a": {"$float": "x"}}'],
)  # fmt: skip
def test_manifest_of_another_shape(root, text):
    (newest(root) / "manifest.json").write_text(text)
    assert_falls_back(root, "manifest.json")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "does not name a checkpoint: ''"),
        (b"iteration-000002x\n", "does not name a checkpoint"),
        (b"\xff\x00", "cannot be read"),
        ("itération-000002".encode(), "cannot be read"),
        (b"iteration-000009\n", "names iteration-000009, which is not here"),
        (b"../../etc/passwd", "does not name a checkpoint"),
    ],
)
def test_latest_that_is_wrong_is_said_and_passed_over(root, content, reason):
    (root / LATEST).write_bytes(content)
    loaded = load_checkpoint(root, framework="np")
    assert 2 == loaded.iteration
    (rejected,) = loaded.rejected
    assert LATEST == rejected.name
    assert reason in rejected.reason


def test_latest_that_dangles_or_is_a_directory(root):
    (root / LATEST).unlink()
    assert () == load_checkpoint(root, framework="np").rejected
    (root / LATEST).symlink_to(root / "nowhere")
    assert "cannot be read" in load_checkpoint(root, framework="np").rejected[0].reason
    (root / LATEST).unlink()
    (root / LATEST).mkdir()
    assert "cannot be read" in load_checkpoint(root, framework="np").rejected[0].reason


def test_every_single_bit_of_latest(root):
    good = (root / LATEST).read_bytes()
    for place in range(len(good) * 8):
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        (root / LATEST).write_bytes(bad)
        loaded = load_checkpoint(root, framework="np")
        assert 2 == loaded.iteration
        assert [LATEST] == [rejected.name for rejected in loaded.rejected]


def test_only_damaged_ones_is_an_error_and_never_a_fresh_start(root):
    os.truncate(root / "iteration-000001" / "actor.safetensors", 0)
    (root / "iteration-000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(root, framework="np")
    lines = str(caught.value).splitlines()
    assert f"error[E720]: {root}/iteration-000002: no manifest.json" == lines[0]
    assert "actor.safetensors has 0 bytes, 1," in lines[1]
    assert "never started afresh" in lines[2]
    assert 1 == caught.value.exit_code


def test_checkpoints_that_vanished_are_an_error(root):
    shutil.rmtree(root / "iteration-000001")
    shutil.rmtree(root / "iteration-000002")
    with pytest.raises(CheckpointError, match="LATEST: names iteration-000002, which is not here"):
        load_checkpoint(root)


def test_pickle_in_a_checkpoint_is_never_executed(root, tmp_path):
    canary = tmp_path / "canary"
    payload = b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    for name in FILES:
        (newest(root) / name).write_bytes(payload)
    load_checkpoint(root, framework="np")
    assert not canary.exists()
