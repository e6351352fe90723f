"""Rows recorded on Ray: by the processes that have them, with the bits of a run in one process."""

from __future__ import annotations

import pytest

from rlflow.runtime.record.edges import recorder
from rlflow.runtime.record.edges.names import edge_directory, rank_of
from rlflow.runtime.record.edges.reading import is_whole, read_edge, recorded, recorded_tensors
from tests.conftest import PIPELINES, QUICK, SMALL

NODES = ("actor.rollout", "reward", "advantage")


@pytest.fixture
def written_here(monkeypatch):
    """The nodes whose rows this process writes, in order."""
    nodes = []
    write = recorder.write_edge

    def noting(run, table, **more):
        nodes.append(table.schema.metadata[b"rlflow"])
        return write(run, table, **more)

    monkeypatch.setattr(recorder, "write_edge", noting)
    return nodes


def trained(rlflow, run, placement, backend):
    words = ("--placement", placement, "--backend", backend, "--iterations", 2, "--quiet")
    done = rlflow("run", PIPELINES / "grpo_arithmetic.py", *SMALL, *QUICK, *words, "--run-dir", run)
    assert 0 == done.code, done.err


def ranks(run, node):
    return {rank_of(path.name) for path in edge_directory(run, node).iterdir()}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(("placement", "samples_on"), [("colocate", 0), ("split", 1)])
def test_rows_on_ray_have_the_bits_of_one_process(
    rlflow, tmp_path, written_here, placement, samples_on
):
    here, there = tmp_path / "local", tmp_path / "ray"
    trained(rlflow, here, placement, "local")
    assert written_here
    written_here.clear()
    trained(rlflow, there, placement, "ray")

    assert [] == written_here, "the controller has no rows"
    assert {samples_on} == ranks(there, "actor.rollout")
    assert {None} == ranks(here, "actor.rollout")
    assert recorded(here) == recorded(there) == {node: [0, 1] for node in NODES}
    for node in NODES:
        for iteration in (0, 1):
            one, other = (read_edge(run, node, iteration) for run in (here, there))
            assert is_whole(one) == is_whole(other)
            assert one.schema.names == other.schema.names
            assert one.equals(other), (node, iteration)
            assert len(one) > 0
            assert recorded_tensors(one).keys() == recorded_tensors(other).keys()


@pytest.mark.slow
@pytest.mark.ray
def test_rows_with_pictures_on_ray_have_the_bits_of_one_process(rlflow, tmp_path):
    """Pixels lie once for all samples of a prompt, and are sent so between processes."""
    small = {"prompts_per_iteration": 4, "group_size": 2, "eval_every": 9}
    sets = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    words = ("--placement", "split", "--iterations", 2, "--quiet", *sets)
    for backend in ("local", "ray"):
        run = ("--backend", backend, "--run-dir", tmp_path / backend, "--devices", "cpu:2")
        done = rlflow("run", PIPELINES / "vlm_grpo.py", *words, *run)
        assert 0 == done.code, done.err

    for node in NODES:
        for iteration in (0, 1):
            one, other = (read_edge(tmp_path / each, node, iteration) for each in ("local", "ray"))
            assert one.equals(other), (node, iteration)
    samples = read_edge(tmp_path / "ray", "actor.rollout", 1)
    assert 8 == len(samples["prompt_pixels"])
    assert samples["prompt_pixels"][0] == samples["prompt_pixels"][1]
