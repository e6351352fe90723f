"""Saving and loading checkpoints: what comes back, what stays, what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlflow.errors import CheckpointError
from rlflow.runtime.record.checkpoint import (
    LATEST,
    list_checkpoints,
    save_checkpoint,
    verify_checkpoint,
)
from rlflow.runtime.record.durable import exact_json, exact_value
from tests.runtime.whole_checkpoints import load_checkpoint

IDENTITY = {"graph": "aa", "config": "bb", "torch": "2.13.0"}


def components(seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Two components with wide, narrow, scalar and empty tensors."""
    random = np.random.default_rng(seed)
    return {
        "actor": {
            "weight": random.standard_normal((3, 5)).astype(np.float32),
            "flags": random.integers(0, 2, 7).astype(bool),
            "empty": np.zeros((0, 4), np.float16),
        },
        "actor.optimizer": {"count": np.array(seed, np.int64), "mean": random.standard_normal(3)},
    }


def save(root: Path, iteration: int, **options) -> Path:
    state = {"kl": iteration / 7, "cursor": [iteration, None, "x"]}
    return save_checkpoint(root, iteration, components(iteration), state, IDENTITY, **options)


def same(left, right) -> bool:
    """Bit for bit, dtypes and shapes included."""
    return {
        (name, key, str(t.dtype), t.shape, t.tobytes())
        for name, tensors in left.items()
        for key, t in tensors.items()
    } == {
        (name, key, str(t.dtype), t.shape, t.tobytes())
        for name, tensors in right.items()
        for key, t in tensors.items()
    }


def names(root: Path) -> list[str]:
    return [path.name for path in list_checkpoints(root)]


def test_what_was_saved_comes_back(tmp_path):
    path = save(tmp_path, 40)
    loaded = load_checkpoint(tmp_path, identity=IDENTITY, framework="np")
    assert path == tmp_path / "iteration-000040"
    assert (40, path, ()) == (loaded.iteration, loaded.path, loaded.rejected)
    assert same(components(40), loaded.components)
    assert {"kl": 40 / 7, "cursor": [40, None, "x"]} == loaded.state
    assert loaded.identity == IDENTITY
    assert (tmp_path / LATEST).read_bytes() == b"iteration-000040\n"


def test_files_are_plain_safetensors_and_json(tmp_path):
    path = save(tmp_path, 1)
    assert {"actor.safetensors", "actor.optimizer.safetensors", "manifest.json"} == {
        file.name for file in path.iterdir()
    }
    arrays = load_file(path / "actor.safetensors")
    assert same({"actor": components(1)["actor"]}, {"actor": arrays})
    manifest = json.loads((path / "manifest.json").read_text())
    assert (path / "actor.safetensors").stat().st_size == manifest["files"]["actor.safetensors"][
        "size"
    ]


def test_same_content_gives_same_bytes(tmp_path):
    left, right = save(tmp_path / "a", 3), save(tmp_path / "b", 3)
    for file in left.iterdir():
        assert file.read_bytes() == (right / file.name).read_bytes()


def test_strided_arrays_are_written_in_row_major_order(tmp_path):
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    save_checkpoint(tmp_path, 1, {"m": {"t": array.T, "every": array[:, ::2]}}, {}, {})
    loaded = load_checkpoint(tmp_path, framework="np")
    np.testing.assert_array_equal(array.T, loaded.components["m"]["t"])
    np.testing.assert_array_equal(array[:, ::2], loaded.components["m"]["every"])


def test_no_components_is_a_checkpoint_of_state(tmp_path):
    save_checkpoint(tmp_path, 0, {"none": {}}, {"a": 1}, {})
    assert {"a": 1} == load_checkpoint(tmp_path, framework="np").state


@pytest.mark.parametrize(
    "value",
    [0.1, -0.0, 5e-324, 1.7976931348623157e308, 1 / 3, math.inf, -math.inf, 2**70, True, None],
)
def test_numbers_of_the_state_are_exact(tmp_path, value):
    save_checkpoint(tmp_path, 1, {}, {"value": value, "deep": [{"v": value}]}, {})
    state = load_checkpoint(tmp_path, framework="np").state
    assert repr(value) == repr(state["value"]) == repr(state["deep"][0]["v"])


def test_nan_in_the_state_comes_back():
    text = exact_json({"best": math.nan})
    assert "NaN" not in text
    assert math.isnan(exact_value(json.loads(text))["best"])


@pytest.mark.parametrize(
    ("state", "culprit"),
    [
        ({"a": {1: 2}}, "state.a has the key 1"),
        ({"a": [0, {2}]}, r"state.a\[1\] is a set"),
        ({"a": np.float32(1)}, "state.a is a float32"),
        ({"a": {"$float": "nan"}}, "state.a has the key"),
    ],
)
def test_state_that_json_would_change_is_refused(tmp_path, state, culprit):
    with pytest.raises(CheckpointError, match=culprit):
        save_checkpoint(tmp_path, 1, {}, state, {})
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../evil", "", ".hidden", "a/b", "-x", "ä", "a\n"])
def test_component_that_cannot_name_a_file_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="E725"):
        save_checkpoint(tmp_path / "c", 1, {name: {}}, {}, {})
    assert not (tmp_path / "c").exists()


def test_dtype_that_safetensors_lacks_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="complex128"):
        save_checkpoint(tmp_path, 1, {"m": {"t": np.zeros(1, np.complex128)}}, {}, {})


@pytest.mark.parametrize(("keep", "left"), [(1, [40]), (2, [30, 40]), (3, [20, 30, 40])])
def test_newest_are_kept(tmp_path, keep, left):
    for iteration in (10, 20, 30, 40):
        save(tmp_path, iteration, keep=keep)
    assert [f"iteration-{iteration:06d}" for iteration in left] == names(tmp_path)


def test_incomplete_ones_do_not_count_as_kept(tmp_path):
    save(tmp_path, 10)
    (save(tmp_path, 20) / "actor.safetensors").unlink()
    save(tmp_path, 30)
    assert ["iteration-000010", "iteration-000020", "iteration-000030"] == names(tmp_path)
    save(tmp_path, 40)
    assert ["iteration-000030", "iteration-000040"] == names(tmp_path)


def test_parent_is_the_previous_checkpoint(tmp_path):
    assert verify_checkpoint(save(tmp_path, 1)).parent is None
    assert "iteration-000001" == verify_checkpoint(save(tmp_path, 2)).parent


def test_iterations_are_ordered_as_numbers(tmp_path):
    for iteration in (999_999, 1_000_000):
        save(tmp_path, iteration)
    assert 1_000_000 == load_checkpoint(tmp_path, framework="np").iteration


def test_complete_checkpoint_is_never_overwritten(tmp_path):
    path = save(tmp_path, 5)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(CheckpointError, match="E722"):
        save_checkpoint(tmp_path, 5, {}, {}, {})
    assert before == {file.name: file.read_bytes() for file in path.iterdir()}
    assert {LATEST, path.name} == {entry.name for entry in tmp_path.iterdir()}


def test_damaged_checkpoint_of_the_same_iteration_is_replaced(tmp_path):
    save(tmp_path, 4)
    (save(tmp_path, 5) / "manifest.json").write_text("{}")
    save(tmp_path, 5)
    assert 5 == load_checkpoint(tmp_path, framework="np").iteration
    assert {LATEST, "iteration-000004", "iteration-000005"} == {
        entry.name for entry in tmp_path.iterdir()
    }


def test_leftovers_of_dead_saves_are_removed(tmp_path):
    dead = tmp_path / "iteration-000009.tmp-0123456789ab"
    dead.mkdir()
    (dead / "actor.safetensors").write_bytes(b"half")
    (tmp_path / "LATEST.tmp-0123456789ab").write_bytes(b"iter")
    (tmp_path / "notes.tmp-mine").write_text("not ours")
    save(tmp_path, 10)
    assert {LATEST, "iteration-000010", "notes.tmp-mine"} == {p.name for p in tmp_path.iterdir()}


def test_nothing_saved_yet_is_not_an_error(tmp_path):
    assert load_checkpoint(tmp_path / "absent") is None
    (tmp_path / "iteration-000009.tmp-0123456789ab").mkdir()
    assert load_checkpoint(tmp_path) is None


def test_another_identity_is_refused_with_a_diff(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    now = {"graph": "aa", "config": "cc", "plan": "dd"}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path, identity=now)
    assert (
        f"error[E721]: {tmp_path}/iteration-000002 was saved by another run: "
        "config, plan, torch changed\n"
        "  got          config: cc\n"
        "               plan: dd\n"
        "               torch: nothing\n"
        "  expected     config: bb\n"
        "               plan: nothing\n"
        "               torch: 2.13.0\n"
        "  fix          go back to what was saved, or start a new run in another --run-dir"
    ) == str(caught.value)
    assert 2 == load_checkpoint(tmp_path, framework="np").iteration


def test_importing_needs_neither_torch_nor_numpy():
    modules = ["rundir", "checkpoint", "spans", "metrics", "durable"]
    code = (
        "import sys, importlib\n"
        f"for name in {modules}: importlib.import_module('rlflow.runtime.record.' + name)\n"
        "print([name for name in ('torch', 'numpy', 'safetensors', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]" == done.stdout.strip()
