"""Lengths as users say them: words, values and files, and what is refused of each."""

from __future__ import annotations

import json

import pytest

import rlflow as rf
from rlflow.errors import GraphError, UsageError
from rlflow.graph.user.length_files import declared_lengths, lengths_file
from rlflow.graph.user.lengths import MOST_TAIL, read_lengths

WORDS = "prompt=512,response=mean:1800,p95:4000,max:8192"


def test_words_and_values_say_the_same():
    said = rf.Lengths(prompt=512, response=rf.Length(mean=1800, p95=4000, max=8192))
    assert said == read_lengths(WORDS)
    assert str(said) == WORDS
    assert read_lengths(str(said)) == said


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("promt=3", "E355", "'prompt'"),
        ("response=mean:4,p59:9", "E355", "'p95'"),
        ("mean:3", "E355", "does not say of which rows"),
        ("response=x", "E355", "'x' is no number"),
        ("response=-3", "E355", "'-3' is no number"),
        ("response=max:9", "E355", "without their mean"),
        ("response=0", "E355", "mean=0"),
        ("response=mean:5,mean:6", "E355", "said twice"),
        ("response=5,response=6", "E355", "twice"),
        ("response=mean:4,max:3.5", "E355", "no whole number"),
        ("response=mean:3,p95:2", "E356", "at least the mean, 3"),
        ("response=mean:30,max:20", "E356", "at most the longest, 20"),
        ("response=mean:10,p95:400", "E356", f"at most {MOST_TAIL} means"),
    ],
)
def test_each_mistake_is_named(words, code, told):
    with pytest.raises(UsageError) as raised:
        read_lengths(words, UsageError)
    (finding,) = raised.value.findings
    assert code == finding.code
    assert told in raised.value.render()


@pytest.mark.parametrize("value", [True, "many", float("nan"), -1])
def test_a_length_is_a_number_of_tokens(value):
    with pytest.raises(GraphError, match="E355"):
        rf.Length(value)


def test_values_are_said_in_words_that_are_read():
    """A tail that no log-normal variable has is said as the longest that one has."""
    seen = rf.Lengths(response=rf.Length.of([1] * 90 + [1000] * 10))
    again = read_lengths(str(seen))
    assert again.responses.mean == pytest.approx(100.9)
    assert again.responses.p95 == 389
    assert 1000 == again.responses.max


def test_values_have_their_own_figures():
    length = rf.Length.of([1, 2, 3, 4, 90])
    assert (20, 90, 90) == (length.mean, length.p95, length.max)
    for none in ([], [0, 0], [1.5], [True]):
        with pytest.raises(GraphError, match="E355"):
            rf.Length.of(none)


@pytest.mark.parametrize(
    ("name", "text", "prompts", "responses"),
    [
        ("a.jsonl", '{"prompt": 5, "response": 3}\n\n{"prompt": 7, "response": [1, 2]}\n', 6, 2.5),
        ("a.csv", "id,output_tokens\n0,4\n1,6\n", None, 5),
        ("a.txt", "3\n4\n8\n", None, 5),
        ("b.jsonl", "3\n5\n", None, 4),
    ],
)
def test_files_say_lengths(tmp_path, name, text, prompts, responses):
    file = tmp_path / name
    file.write_text(text)
    found = lengths_file(file, UsageError)
    assert (prompts, responses) == (found.prompts and found.prompts.mean, found.responses.mean)
    assert name in found.source
    assert found == declared_lengths(name, GraphError, None, tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.txt", "3\nfoo\n", "a.txt:2"),
        ("a.csv", "a,respons\n1,2\n", "'response'"),
        ("a.csv", "response\n1.5\n", "a.csv:2"),
        ("a.jsonl", json.dumps({"response": None}) + "\n", "None"),
        ("a.jsonl", "{", "Expecting"),
        ("a.txt", "", "no length in it"),
        ("a.txt", "0\n", "no length in it"),
    ],
)
def test_files_without_lengths_are_named(tmp_path, name, text, told):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match="E357") as raised:
        lengths_file(tmp_path / name, UsageError)
    assert told in raised.value.render()


def test_a_pipeline_says_lengths_and_its_graph_stays_the_same():
    def declare(cfg: rf.Config) -> None:
        actor = rf.Model("actor", "shape:qwen2.5-7b")
        prompts = rf.ops.prompts(rf.data.arithmetic(), batch=4)
        rf.ops.metrics(rf.ops.rollout(actor, prompts, n=2, max_new_tokens=12))

    plain, said = rf.pipeline()(declare).trace(), rf.pipeline(lengths=WORDS)(declare).trace()
    assert said.lengths == read_lengths(WORDS)
    assert plain.hash == said.hash
    with pytest.raises(GraphError, match="E355"):
        rf.pipeline(lengths=512)
