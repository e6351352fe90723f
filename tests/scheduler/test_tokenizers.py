"""Models that read each other's tokens: the same vocabulary, or E270 before anything starts."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.conftest import TINY

FILE = """\
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    teacher: str = ""


def right(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline()
def distill(cfg: Config) -> None:
    student = rf.Model("student", "MODEL", optimizer=rf.AdamW(lr=1e-4))
    teacher = rf.Model("teacher", cfg.teacher)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(student, prompts, n=2, max_new_tokens=8)
    scored = ops.log_probs(teacher, samples, field="teacher_log_probs")
    ops.update(student, samples, scored, loss=rf.DistillLoss("supervised"))
"""


@pytest.fixture
def check(rlflow, tmp_path, monkeypatch):
    """Checks the pipeline with a teacher whose tokenizer is changed, in place or anew."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.py").write_text(FILE.replace("MODEL", str(TINY)))
    shutil.copytree(TINY, tmp_path / "teacher")

    def changed(change, *words):
        path = tmp_path / "teacher" / "tokenizer.json"
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))
        return rlflow("check", "pipeline.py", "--set", "teacher=teacher", *words)

    return changed


def swapped(document):
    vocabulary = document["model"]["vocab"]
    vocabulary["3"], vocabulary["4"] = vocabulary["4"], vocabulary["3"]


def test_another_vocabulary_is_refused(check):
    result = check(swapped)
    assert 4 == result.code
    assert "error[E270]" in result.err
    assert "teacher.log_probs: model 'teacher' reads tokens of 'student'" in result.err
    assert "token 6 is '3', and '4' to the other" in result.err
    assert "scored = ops.log_probs" in result.err


def test_a_token_less_is_refused_and_a_token_more_is_not(check):
    def more(document):
        document["added_tokens"].append({"id": 99, "content": "<think>"})

    def less(document):
        del document["model"]["vocab"]["9"]

    assert 0 == check(more).code
    result = check(less)
    assert 4 == result.code
    assert "token 12 is '9', and 'no token' to the other" in result.err


def test_another_form_of_the_same_vocabulary_is_fine(check):
    def listed(document):
        by_id = sorted(document["model"]["vocab"].items(), key=lambda entry: entry[1])
        document["model"]["vocab"] = [[token, 0.0] for token, _ in by_id]
        document["truncation"] = {"max_length": 3}

    assert 0 == check(listed).code


def test_many_differences_are_counted(check):
    def shifted(document):
        vocabulary = document["model"]["vocab"]
        digits = [name for name in vocabulary if name.isdigit() and len(name) == 1]
        numbers = [vocabulary[name] for name in digits]
        for name, number in zip(digits, numbers[1:] + numbers[:1], strict=True):
            vocabulary[name] = number

    assert "7 more" in check(shifted).err


def test_a_model_without_the_file_is_not_compared(check, tmp_path, rlflow):
    assert 4 == check(swapped).code
    (tmp_path / "teacher" / "tokenizer.json").unlink()
    assert 0 == rlflow("check", "pipeline.py", "--set", "teacher=teacher").code


LOOP = """\
    def attempt():
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        found = ops.rollout(student, prompts, n=2, max_new_tokens=8)
        reward = ops.reward(right, found)
        renamed = found.rename(answer_tokens="response_tokens")
        return renamed, reward, ops.informative(found, reward)

    ended = ops.repeat(attempt, until="informative", groups=4, at_most=2, name="enough")
    samples = ended.rename(response_tokens="answer_tokens")
"""


def test_another_vocabulary_is_refused_behind_a_loop(check, tmp_path):
    lines = FILE.replace("MODEL", str(TINY)).splitlines(keepends=True)
    begin = next(n for n, line in enumerate(lines) if "prompts = " in line)
    (tmp_path / "pipeline.py").write_text("".join([*lines[:begin], LOOP, *lines[begin + 2 :]]))

    assert 0 == check(lambda document: None).code
    result = check(swapped)
    assert 4 == result.code
    assert "teacher.log_probs: model 'teacher' reads tokens of 'student'" in result.err
