"""What lies outside of the graph and decides a run's numbers: data, source of functions, files."""

from __future__ import annotations

import sys

import pytest

from rlflow.cli.commands import Target, declare
from rlflow.errors import CheckpointError
from rlflow.runtime.record.changes import changes_of, require_allowed
from rlflow.runtime.record.identity.digests import digests_of, unknown_digests
from rlflow.runtime.record.identity.files import WHOLE, file_digest

MINE = '''
import rlflow as rf
from helpers import counted
from rlflow import ops

SCALE = 1.0


@rf.op(per="row")
def longer(sample: rf.Row[int]) -> rf.Row[float]:
    return 2.0 * sample


def judge(response: str) -> float:
    """A reward."""
    return SCALE * counted(response)


class Config(rf.Config):
    iterations: int = 1


@rf.pipeline()
def mine(cfg: Config) -> None:
    actor = rf.Model("actor", "model", optimizer=rf.AdamW(lr=1e-4))
    prompts = ops.prompts(rf.data.jsonl("rows.jsonl"), batch=2)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=6)
    ops.metrics(longer(samples), name="seen")
    adv = ops.advantage("grpo", samples, ops.reward(judge, samples))
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
'''
FILES = {
    "mine.py": MINE,
    "helpers.py": "def counted(text):\n    return len(text) % 7\n\ndef unused():\n    return 1\n",
    "rows.jsonl": '{"prompt": "1+1="}\n{"prompt": "2+2="}\n',
    "model/config.json": '{"vocab_size": 5}',
    "model/README.md": "a model",
}


def written(folder, **files):
    sys.modules.pop("helpers", None)
    for name, text in {**FILES, **files}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    declared = declare(Target(pipeline=str(folder / "mine.py")))
    return {"graph": "same"} | digests_of(declared.graph, declared.pipeline.path)


@pytest.mark.parametrize(
    ("name", "old", "new", "changed"),
    [
        ("rows.jsonl", "2+2", "2+3", "prompts.data"),
        ("rows.jsonl", '{"prompt": "2+2="}\n', "", "prompts.data"),
        ("mine.py", "SCALE = 1.0", "SCALE = 2.0", "reward.source"),
        ("mine.py", "SCALE * counted", "2 + counted", "reward.source"),
        ("mine.py", "2.0 * sample", "3.0 * sample", "longer.source"),
        ("helpers.py", "% 7", "% 5", "reward.source"),
        ("model/config.json", "5", "6", "actor.files"),
        ("helpers.py", "return 1", "return 2", None),
        ("mine.py", "A reward.", "The reward.", None),
        ("mine.py", "SCALE = 1.0", "SCALE = 1.0  # of one", None),
        ("model/README.md", "a model", "the model", None),
    ],
)
def test_what_decides_numbers_is_named_and_what_does_not_is_no_change(
    tmp_path, monkeypatch, name, old, new, changed
):
    monkeypatch.chdir(tmp_path)
    before = written(tmp_path)
    assert old in FILES[name]
    found = changes_of(before, written(tmp_path, **{name: FILES[name].replace(old, new)}), None)

    assert [changed] * bool(changed) == [change.path for change in found]
    if changed:
        kind = changed.rpartition(".")[2]
        with pytest.raises(CheckpointError, match=rf"E721(?s:.*)--allow-changes {kind}"):
            require_allowed("run", found, ())
        require_allowed("run", found, (kind,))


def test_the_difference_is_what_differs_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = written(tmp_path)
    (change,) = changes_of(before, written(tmp_path, **{"helpers.py": "counted = len\n"}), None)

    assert "judge" in before["reward.source"]
    assert "judge" not in change.line()
    assert change.before.startswith("counted ")


def test_a_checkpoint_without_digests_goes_on_and_it_is_known_to_have_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now, old = written(tmp_path), {"graph": "same"}

    assert () == changes_of(old, now, None)
    assert unknown_digests(old, now)
    assert not unknown_digests(now, now)


def test_a_large_file_is_read_at_places_from_all_of_it(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(2 * WHOLE))
    before = file_digest(path)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")

    assert before != file_digest(path)
