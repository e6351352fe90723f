"""Recorded edges: what is read is what was written, bit for bit, and torn files are left out."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.batch import flat, is_ragged, offsets, ragged, shared_rows, text
from rlflow.errors import RunDirError
from rlflow.runtime.record.durable import arm_from_environment, is_leftover
from rlflow.runtime.record.edges.names import About, edge_directory
from rlflow.runtime.record.edges.pieces import piece_of
from rlflow.runtime.record.edges.reading import (
    about,
    is_whole,
    read_edge,
    recorded,
    recorded_tensors,
)
from rlflow.runtime.record.edges.writing import edge_table, write_edge
from tests.conftest import ROOT

pytestmark = pytest.mark.torch

DTYPES = [
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]
GRAPH = "60a3d80c"


def bits(values):
    """The bytes of flat values, whatever their dtype."""
    return values.contiguous().reshape(-1).view(torch.uint8).tolist() if values.numel() else []


def same(first, second):
    """Whether two fields have the same dtype, shape and bits."""
    if is_ragged(first) != is_ragged(second) or first.dtype != second.dtype:
        return False
    if is_ragged(first):
        alike = offsets(first).tolist() == offsets(second).tolist()
        return alike and same(flat(first), flat(second))
    return first.shape == second.shape and bits(first) == bits(second)


def of_bits(draw, dtype, *shape):
    """Values of random bits: NaNs of every kind, and both zeros."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if count else None
    empty = torch.empty(shape, dtype=dtype)
    return empty if values is None else values.view(dtype).reshape(shape)


@st.composite
def batches(draw):
    """RowsMade with a field of each of some dtypes, ragged or not, with a width or without."""
    rows = draw(st.integers(0, 4))
    fields = {}
    for dtype in draw(st.lists(st.sampled_from(DTYPES), max_size=4, unique=True)):
        width = draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)]))
        if draw(st.booleans()):
            sizes = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
            sizes = sizes.to(torch.int64)
            field = ragged(of_bits(draw, dtype, int(sizes.sum()), *width), sizes)
        else:
            field = of_bits(draw, dtype, rows, *width)
        fields[str(dtype)] = field
    fields["text"] = text(draw(st.lists(st.text(), min_size=rows, max_size=rows)))
    return fields, rows


def edge(fields, rows, iteration=4, node="actor.rollout", total=None, **options):
    """A table of rows that a node made."""
    numbers = np.asarray(rows, np.int64)
    facts = About(
        node=node, iteration=iteration, how="every", total=total or len(numbers), graph=GRAPH
    )
    return edge_table(facts, fields, numbers, texts=("text",), **options)


@given(batches())
def test_what_is_read_is_what_was_written_bit_for_bit(tmp_path_factory, batch):
    fields, rows = batch
    run = tmp_path_factory.mktemp("run")
    write_edge(run, edge(fields, range(rows)))

    table = read_edge(run, "actor.rollout", 4)
    found = recorded_tensors(table)

    assert {4} == set(recorded(run)["actor.rollout"])
    assert found.keys() == fields.keys()
    assert [] == [name for name in fields if not same(fields[name], found[name])]
    assert is_whole(table)
    assert GRAPH == about(table).graph


def test_bytes_that_are_no_text_stay_bytes(tmp_path):
    broken = ragged(torch.tensor([0xFF, 0xFE, 65], dtype=torch.uint8), torch.tensor([2, 1]))
    write_edge(tmp_path, edge({"text": broken}, range(2)))

    table = read_edge(tmp_path, "actor.rollout", 4)

    assert "binary" == str(table.schema.field("text").type)
    assert same(broken, recorded_tensors(table)["text"])


def test_rows_of_several_ranks_are_joined_in_their_order(tmp_path):
    for rank, rows in enumerate(([3, 0], [1, 2], [1, 2])):
        field = {"reward": torch.tensor(rows, dtype=torch.float32)}
        write_edge(tmp_path, edge(field, rows, total=5), rank=rank)

    table = read_edge(tmp_path, "actor.rollout", 4)

    assert [0, 1, 2, 3] == table.column("row").to_pylist()
    assert [0.0, 1.0, 2.0, 3.0] == recorded_tensors(table)["reward"].tolist()
    assert not is_whole(table)


def test_a_torn_file_is_left_out_and_one_alone_is_an_error(tmp_path):
    for rank in (0, 1):
        write_edge(tmp_path, edge({"reward": torch.ones(1)}, [rank], total=2), rank=rank)
    first, second = sorted(edge_directory(tmp_path, "actor.rollout").iterdir())
    second.write_bytes(second.read_bytes()[:-9])

    assert [0] == read_edge(tmp_path, "actor.rollout", 4).column("row").to_pylist()
    first.write_bytes(b"")
    with pytest.raises(RunDirError, match="E733"):
        read_edge(tmp_path, "actor.rollout", 4)


def test_a_disk_that_is_full_leaves_the_file_before_and_no_other(tmp_path, monkeypatch):
    write_edge(tmp_path, edge({"reward": torch.ones(1)}, [0]))
    monkeypatch.setenv("RLFLOW_FAULT", "record:write=enospc")
    arm_from_environment()
    try:
        with pytest.raises(OSError, match="No space left"):
            write_edge(tmp_path, edge({"reward": torch.zeros(1)}, [0]))
    finally:
        monkeypatch.delenv("RLFLOW_FAULT")
        arm_from_environment()

    names = [path.name for path in edge_directory(tmp_path, "actor.rollout").iterdir()]
    assert ["iteration-000004.parquet"] == names
    assert not any(is_leftover(name) for name in names)
    assert [1.0] == recorded_tensors(read_edge(tmp_path, "actor.rollout", 4))["reward"].tolist()


def test_an_iteration_that_runs_again_takes_the_place_of_the_one_before(tmp_path):
    write_edge(tmp_path, edge({"reward": torch.ones(3)}, [0, 1, 2]))
    write_edge(tmp_path, edge({"reward": torch.zeros(1)}, [0]))

    assert 1 == len(read_edge(tmp_path, "actor.rollout", 4))


def test_groups_of_a_node_that_makes_none_stand_beside_its_rows(tmp_path):
    groups = np.array([0, 0, 1])
    write_edge(tmp_path, edge({"reward": torch.ones(3)}, [0, 1, 2], groups=groups))

    table = read_edge(tmp_path, "actor.rollout", 4, columns=["group"])

    assert ["row", "group"] == table.column_names
    assert [0, 0, 1] == table.column("group").to_pylist()


def test_nodes_of_any_name_have_a_directory_of_their_own(tmp_path):
    for name in ("a/b", "loop[1]/rollout", "Größe", "a%2Fb"):
        write_edge(tmp_path, edge({"reward": torch.ones(1)}, [0], node=name, iteration=1_234_567))

    assert ["Größe", "a%2Fb", "a/b", "loop[1]/rollout"] == sorted(recorded(tmp_path))
    assert 1_234_567 == about(read_edge(tmp_path, "a/b", 1_234_567)).iteration


def test_what_is_not_recorded_is_named_with_what_is(tmp_path):
    write_edge(tmp_path, edge({"reward": torch.ones(1)}, [0]))

    with pytest.raises(RunDirError, match=r"(?s)E732.*did you mean\s+'actor.rollout'"):
        read_edge(tmp_path, "actor.rolout", 4)
    with pytest.raises(RunDirError, match=r"(?s)E732.*iteration 9.*did you mean\s+'4'"):
        read_edge(tmp_path, "actor.rollout", 9)


def test_a_record_of_a_later_version_is_refused(tmp_path):
    later = About(node="n", iteration=0, how="rows", total=1, graph=GRAPH, format=3)
    write_edge(tmp_path, edge_table(later, {"reward": torch.ones(1)}, np.arange(1)))

    with pytest.raises(RunDirError, match=r"(?s)E733.*format 3"):
        read_edge(tmp_path, "n", 0)


@pytest.mark.slow
def test_reading_needs_no_torch(tmp_path):
    write_edge(tmp_path, edge({"reward": torch.ones(2)}, range(2)))
    code = (
        "import sys, pathlib\n"
        "from rlflow.runtime.record.edges.reading import read_edge, recorded\n"
        f"run = pathlib.Path({str(tmp_path)!r})\n"
        "assert not {'pyarrow', 'torch'} & set(sys.modules)\n"
        "print(recorded(run), read_edge(run, 'actor.rollout', 4).num_rows)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "{'actor.rollout': [4]} 2\n" == done.stdout


@pytest.mark.slow
def test_writing_imports_no_pandas(tmp_path):
    """Of what pyarrow would import by itself: it is most of a second in every process."""
    code = (
        "import sys, pathlib, torch\n"
        "from rlflow.runtime.record.edges.writing import write_edge\n"
        "from tests.runtime.record.test_edges import edge\n"
        "fields = {'a': torch.ones(2), 'b': torch.ones(2, 3, dtype=torch.bfloat16)}\n"
        f"write_edge(pathlib.Path({str(tmp_path)!r}), edge(fields, range(2)))\n"
        "print('pyarrow' in sys.modules, 'pandas' in sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)

    assert "True False\n" == done.stdout


@pytest.mark.parametrize("limit", [None, 3])
def test_rows_that_lie_in_the_same_values_are_written_each(limit):
    once = ragged(torch.arange(12.0).view(6, 2), torch.tensor([4, 2]))
    repeated = torch.tensor([0, 0, 1, 1])
    held = piece_of({"x": shared_rows(once, repeated)}, None, 4, limit).fields["x"]

    assert [4, 4, 2, 2][:limit] == held.bounds.diff().tolist()
    wanted = torch.cat([once.unbind()[row] for row in repeated[:limit]])
    assert torch.equal(wanted, held.values)
