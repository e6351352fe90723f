"""A run's record: what is taken of which node, how large it gets, and what is never in it."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import pytest
import torch

from rlflow.cli.commands import Target, compile_target
from rlflow.errors import GraphError, UsageError
from rlflow.graph.user.recording import read_rules
from rlflow.runtime.record.edges.choice import recording_of
from rlflow.runtime.record.edges.keeping import RecordKeeper
from rlflow.runtime.record.edges.names import edge_directory, file_name
from rlflow.runtime.record.edges.reading import (
    about,
    is_whole,
    read_edge,
    recorded,
    recorded_tensors,
)
from rlflow.runtime.record.edges.recorder import WAITING, Notes, Recorder, waiting_bytes
from rlflow.runtime.record.edges.secrets import (
    hidden_values,
    is_secret,
    named_like_a_key,
    without_secrets,
)
from rlflow.scheduler.plan.plan import HOST
from tests.conftest import PIPELINES, QUICK, SMALL

pytestmark = pytest.mark.torch
GRPO = str(PIPELINES / "grpo_arithmetic.py")


@pytest.fixture(scope="module")
def planned():
    return compile_target(Target(pipeline=GRPO, placement="colocate"))


def asked(planned, run, *texts, cap=10**9):
    rules = read_rules(texts, UsageError)
    graph = planned.compiled.plan.graph
    return recording_of(graph, rules, run, cap, planned.declared.graph)


def test_rules_are_read_back_as_they_are_said():
    texts = ["actor.rollout", "a=every:10", "b=first:8", "c=rows:3", "d=every:2,first:4"]

    assert texts == [str(rule) for rule in read_rules(texts, UsageError)]
    assert () == read_rules(["none"], UsageError)
    assert None is read_rules([], UsageError)


@pytest.mark.parametrize(
    "text", ["a=", "=every:2", "a=each:2", "a=every:0", "a=first:1,rows:2", "a=every:1,every:2"]
)
def test_what_is_no_rule_is_an_error_with_a_line_to_paste(text):
    with pytest.raises(UsageError, match=r"(?s)E318.*every:N.*fix"):
        read_rules([text], UsageError)


def test_nothing_and_something_do_not_go_together():
    with pytest.raises(GraphError, match="E318"):
        read_rules(["none", "reward"], GraphError)


def test_by_default_rollouts_are_recorded_with_all_that_has_their_rows(planned, tmp_path):
    found = asked(planned, tmp_path)

    assert {"actor.rollout", "reward", "advantage"} == set(found.by_node)
    assert {"actor.rollout"} == {each.rows_of for each in found.chosen}
    assert {64} == {each.limit for each in found.chosen}
    assert {"prompt", "version", "finished"} <= found.by_node["actor.rollout"].extra
    assert "actor.rollout=first:8, reward=first:8, advantage=first:8" in found.line()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("actor.rolout", "did you mean 'actor.rollout'"),
        ("actor.update", "makes no rows"),
        ("ref.log_probs", "drops the node"),
    ],
)
def test_a_node_that_cannot_be_recorded_is_named_with_those_that_can(planned, tmp_path, text, said):
    with pytest.raises(UsageError, match="E319") as caught:
        asked(planned, tmp_path, text)
    assert said in " ".join(str(caught.value).split())


class Made:
    """Rows of an action as a worker has them."""

    def __init__(self, fields, total, rows=None):
        self.fields, self.total, self.rows = fields, total, rows

    def without(self, names):
        return Made({n: f for n, f in self.fields.items() if n not in names}, self.total, self.rows)


def test_what_nobody_reads_is_recorded_and_does_not_stay(planned, tmp_path):
    plan = planned.compiled.plan
    recorder = Recorder(asked(planned, tmp_path, "actor.rollout=rows:2,every:2"), plan)
    fields = {"group": torch.tensor([0, 0, 1]), "finished": torch.tensor([True, False, True])}
    fields["api_key"] = torch.ones(3)

    assert "finished" in recorder.adds("actor.rollout", 0)
    assert frozenset() == recorder.adds("actor.rollout", 1)
    stays = recorder.take(plan.action("actor.rollout"), 0, Made(fields, 3))
    whole = recorder.take(plan.action("actor.rollout"), 1, Made(fields, 3))
    recorder.finish(30)

    table = read_edge(tmp_path, "actor.rollout", 0)
    assert {"group", "api_key"} == set(stays.fields)
    assert {"group", "api_key", "finished"} == set(whole.fields)
    assert {"actor.rollout": [0]} == recorded(tmp_path)
    assert [True, False] == recorded_tensors(table)["finished"].tolist()
    assert (3, "rows", "actor.rollout") == (
        about(table).total,
        about(table).how,
        about(table).rows_of,
    )
    assert "api_key" not in table.column_names


def test_rows_out_of_order_keep_their_numbers(planned, tmp_path):
    plan = planned.compiled.plan
    recorder = Recorder(asked(planned, tmp_path, "reward=rows:3"), plan, own=None)
    made = Made({"reward": torch.tensor([4.0, 1.0, 0.0])}, 5, torch.tensor([4, 1, 0]))
    recorder.take(plan.action("reward"), 7, made)
    recorder.finish(30)

    table = read_edge(tmp_path, "reward", 7)
    assert [0, 1] == table.column("row").to_pylist()
    assert [0.0, 1.0] == recorded_tensors(table)["reward"].tolist()
    assert not is_whole(table)


@pytest.fixture
def short(planned, tmp_path):
    """Seven short iterations, each with two rows of its own, as they are recorded."""
    plan = planned.compiled.plan
    recorder = Recorder(asked(planned, tmp_path, "reward"), plan)
    for iteration in range(7):
        rewards = torch.tensor([iteration, iteration + 0.5])
        recorder.take(plan.action("reward"), iteration, Made({"reward": rewards}, 2))
    notes = recorder.finish(30)
    assert (7, 0, 0) == (notes.written, notes.dropped, notes.failed)
    return tmp_path


def recorded_rewards(run):
    """The rewards of every iteration that a run has recorded."""
    numbers = recorded(run).get("reward", [])
    tables = {number: read_edge(run, "reward", number) for number in numbers}
    assert all(
        is_whole(table) and number == about(table).iteration for number, table in tables.items()
    )
    assert all([0, 1] == table.column("row").to_pylist() for table in tables.values())
    return {n: recorded_tensors(table)["reward"].tolist() for n, table in tables.items()}


def test_short_iterations_become_one_file(short):
    files = [path.name for path in edge_directory(short, "reward").iterdir()]

    assert ["iteration-000000-000006.parquet"] == files
    assert {n: [n, n + 0.5] for n in range(7)} == recorded_rewards(short)
    assert "iteration" not in read_edge(short, "reward", 3).column_names


def test_rows_are_there_while_a_run_goes_on(planned, tmp_path, monkeypatch):
    monkeypatch.setattr("rlflow.runtime.record.edges.recorder.WAIT_SECONDS", 0.05)
    plan = planned.compiled.plan
    recorder = Recorder(asked(planned, tmp_path, "reward=every:2"), plan)
    for iteration in range(4):
        made = Made({"reward": torch.ones(2)}, 2)
        recorder.take(plan.action("reward"), iteration, made)
    until = time.monotonic() + 60
    while recorded(tmp_path) != {"reward": [0, 2]} and time.monotonic() < until:
        time.sleep(0.01)

    assert {"reward": [0, 2]} == recorded(tmp_path)
    recorder.take(plan.action("reward"), 4, Made({"reward": torch.ones(2)}, 2))
    recorder.flush()
    recorder.finish(30)
    assert {"reward": [0, 2, 4]} == recorded(tmp_path)


def test_fields_of_another_type_begin_another_file(planned, tmp_path):
    plan = planned.compiled.plan
    recorder = Recorder(asked(planned, tmp_path, "reward"), plan)
    for iteration, dtype in enumerate((torch.float32, torch.float32, torch.float64)):
        made = Made({"reward": torch.ones(1, dtype=dtype)}, 1)
        recorder.take(plan.action("reward"), iteration, made)
    recorder.finish(30)

    files = [path.name for path in edge_directory(tmp_path, "reward").iterdir()]
    assert ["iteration-000000-000001.parquet", "iteration-000002.parquet"] == sorted(files)
    assert torch.float64 == recorded_tensors(read_edge(tmp_path, "reward", 2))["reward"].dtype


def test_of_a_file_whose_later_iterations_run_again_the_others_stay(planned, short):
    keeper = RecordKeeper(asked(planned, short), lambda _: [], print)
    keeper.begin(3)
    keeper.end(1)

    assert {n: [n, n + 0.5] for n in range(3)} == recorded_rewards(short)


def test_of_a_file_that_the_cap_divides_the_later_iterations_stay(planned, short):
    files(short, range(7, 11), 1_000_000)
    (edge_directory(short, "advantage")).mkdir(parents=True)
    (edge_directory(short, "advantage") / file_name(4)).write_bytes(b"x" * 1_000_000)
    keeper = RecordKeeper(asked(planned, short, cap=4_500_000), lambda _: [], print)
    keeper.begin(11)
    line = keeper.end(1)

    assert [5, 6, 7, 8, 9, 10] == recorded(short)["reward"]
    assert "advantage" not in recorded(short)
    assert [5.0, 5.5] == recorded_tensors(read_edge(short, "reward", 5))["reward"].tolist()
    assert "5 of iterations 0 to 4 dropped" in line


def test_what_waits_is_what_the_plan_leaves_of_a_host(planned):
    plan = planned.compiled.plan
    room = replace(plan, budgets={0: 1, HOST: 2**40}, peaks={HOST: 0})
    tight = replace(plan, budgets={0: 1, HOST: 100}, peaks={HOST: 40})
    ranks = replace(tight, backend="ray", budgets={0: 1, 1: 1, HOST: 100})

    assert WAITING == waiting_bytes(replace(plan, budgets={0: 1})) == waiting_bytes(room)
    assert (60, 20) == (waiting_bytes(tight), waiting_bytes(ranks))
    assert 0 == waiting_bytes(replace(tight, peaks={HOST: 200}))


def test_a_disk_that_refuses_is_noted_and_nothing_is_raised(planned, tmp_path):
    plan = planned.compiled.plan
    run = tmp_path / "file"
    run.write_text("no directory")
    recorder = Recorder(asked(planned, run, "reward"), plan)
    recorder.take(plan.action("reward"), 0, Made({"reward": torch.ones(1)}, 1))

    notes = recorder.finish(30)
    assert (0, 1) == (notes.written, notes.failed)
    assert "file" in notes.problem


def test_what_waits_is_bounded_and_what_is_dropped_is_counted(planned, tmp_path, monkeypatch):
    held = threading.Event()
    monkeypatch.setattr("rlflow.runtime.record.edges.recorder.WAITING", 100)
    monkeypatch.setattr("rlflow.runtime.record.edges.recorder.FILE_BYTES", 1)
    monkeypatch.setattr(
        "rlflow.runtime.record.edges.recorder.write_edge", lambda *_, **__: held.wait(30)
    )
    plan = planned.compiled.plan
    recorder = Recorder(asked(planned, tmp_path, "reward"), plan)
    for iteration in range(3):
        recorder.take(plan.action("reward"), iteration, Made({"reward": torch.ones(20)}, 20))
    held.set()

    notes = recorder.finish(30)
    assert (1, 2) == (notes.written, notes.dropped)


def files(run, iterations, size):
    directory = edge_directory(run, "reward")
    directory.mkdir(parents=True, exist_ok=True)
    for iteration in iterations:
        (directory / file_name(iteration)).write_bytes(b"x" * size)


def test_beyond_the_cap_the_oldest_iterations_go_and_the_run_says_so(planned, tmp_path):
    files(tmp_path, range(10), 100)
    said = []
    notes = [Notes(written=10), Notes(failed=2, problem="disk full")]
    keeper = RecordKeeper(asked(planned, tmp_path, cap=500), lambda _: notes, said.append)
    keeper.begin(10)
    line = keeper.end(1)

    assert [6, 7, 8, 9] == recorded(tmp_path)["reward"]
    assert "4 iterations" in line
    assert "6 of iterations 0 to 5 dropped" in line
    assert [] != [text for text in said if "disk full" in text]
    assert [] != [text for text in said if "--record-cap" in text]


def test_iterations_that_run_again_are_forgotten(planned, tmp_path):
    files(tmp_path, range(10), 1)
    keeper = RecordKeeper(asked(planned, tmp_path), lambda _: [], print)
    keeper.begin(6)
    keeper.end(1)

    assert [0, 1, 2, 3, 4, 5] == recorded(tmp_path)["reward"]


def test_what_is_named_like_a_key_is_hidden():
    words = ["rlflow", "--set", "judge_api_key=sk-1", "--hf-token", "hf_1", "--set", "lr=1"]
    words += ["--address", "http://me:pass@host:1", "password=a=b"]

    assert without_secrets(words) == [
        *("rlflow", "--set", "judge_api_key=***", "--hf-token", "***", "--set", "lr=1"),
        *("--address", "http://***@host:1", "password=***"),
    ]
    values = {"lr": 1, "judge": {"api_key": "sk", "url": "http://a:b@c"}, "openai_key": ""}
    assert hidden_values(values) == {
        "lr": 1,
        "judge": {"api_key": "***", "url": "http://***@c"},
        "openai_key": "",
    }
    key = "sk-" + "e" * 20
    nodes = {"nodes": [{"name": "judge", "params": {"api_key": "a", "ask": f"by {key}"}}]}
    assert hidden_values(nodes) == {
        "nodes": [{"name": "judge", "params": {"api_key": "***", "ask": "by ***"}}]
    }
    plain = ["prompt_tokens", "max_new_tokens", "eos_token", "keyboard", "author", "kl_coef"]
    assert [] == list(filter(named_like_a_key, [*plain, "group"]))
    keys = ["wandbToken", "HF-TOKEN", "DB_PWD", "sort_key", "token", "mysecret", "AZURE_AUTH"]
    assert keys == list(filter(named_like_a_key, keys))
    # A column of a data set may be called so.
    assert [] == list(filter(is_secret, [*plain, "key", "answer_key", "auth"]))


@pytest.mark.slow
def test_a_run_computes_the_same_with_a_record_and_without(rlflow, tmp_path):
    """And what a resumed run does again is recorded once."""
    lines = {}
    for name, said in (("with", "actor.rollout"), ("without", "none")):
        words = ["run", GRPO, *SMALL, *QUICK, "--run-dir", tmp_path / name, "--record", said]
        assert 0 == rlflow(*words, "--iterations", "2").code
        words[words.index("--run-dir")] = "--resume"
        assert 0 == rlflow(*words, "--iterations", "3").code
        log = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        lines[name] = [json.loads(line)["metrics"] for line in log]

    assert lines["with"] == lines["without"]
    assert {"actor.rollout": [0, 1, 2]} == recorded(tmp_path / "with")
    assert {} == recorded(tmp_path / "without")
    assert is_whole(read_edge(tmp_path / "with", "actor.rollout", 2))
    run = json.loads((tmp_path / "with" / "run.json").read_text())
    assert ["actor.rollout"] == run["record"]
