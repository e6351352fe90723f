"""A plan sent to another process brings the user's functions along, and only those."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.cli.commands import Target, compile_target
from rlflow.errors import UsageError
from rlflow.runtime.ray.shipping import shipped

pytestmark = [pytest.mark.ray, pytest.mark.torch]

PIPELINE = """
import threading
import helper_of_mine
import rlflow as rf
from rlflow import ops

LOCK = threading.Lock()

def judge(response: str, answer: str) -> float:
    return helper_of_mine.score(response)

def locked(response: str, answer: str) -> float:
    with LOCK:
        return 1.0

def alone(response: str, answer: str) -> float:
    return 1.0

def declare(function):
    def pipeline(cfg: rf.Config) -> None:
        actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=1e-4))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
        advantage = ops.advantage("grpo", samples, ops.reward(function, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))
    return pipeline

class Config(rf.Config):
    model: str = "nowhere"

@rf.pipeline()
def good(cfg: Config) -> None:
    declare(judge)(cfg)

@rf.pipeline()
def by_itself(cfg: Config) -> None:
    declare(alone)(cfg)

@rf.pipeline()
def bad(cfg: Config) -> None:
    declare(locked)(cfg)
"""


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Compile one of the file's pipelines; returns the plan and where the file is."""
    (tmp_path / "helper_of_mine.py").write_text("def score(text):\n    return float(len(text))\n")
    file = tmp_path / "mine.py"
    file.write_text(PIPELINE)
    from tests.conftest import TINY

    def call(name):
        target = Target(
            pipeline=f"{file}:{name}", settings=(f"model={TINY}",), devices="cpu:1", backend="ray"
        )
        return compile_target(target).compiled.plan, file

    yield call
    sys.modules.pop("helper_of_mine", None)
    sys.modules.pop("rlflow_pipeline_mine", None)


def judged(blob):
    """What another process, which has no file of the pipeline, makes of a plan and its reward."""
    program = (
        "import pathlib, sys\n"
        "from rlflow.runtime.ray.shipping import unshipped\n"
        f"plan = unshipped(pathlib.Path({str(blob)!r}).read_bytes())\n"
        "print(plan.hash, dict(plan.graph.node('reward').params)['function']('four', ''))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    return result.stdout.strip()


@pytest.mark.slow
def test_functions_and_the_modules_beside_them_travel_by_value(compiled, tmp_path):
    plan, file = compiled("good")
    blob = tmp_path / "blob"
    blob.write_bytes(shipped(plan, file))
    file.unlink()
    (tmp_path / "helper_of_mine.py").unlink()

    assert f"{plan.hash} 4.0" == judged(blob)


@pytest.mark.slow
def test_a_pipeline_that_another_file_loads_travels_by_value_too(compiled, tmp_path):
    plan, file = compiled("by_itself")
    elsewhere = tmp_path / "elsewhere" / "other.py"
    blob = tmp_path / "blob"
    blob.write_bytes(shipped(plan, elsewhere))
    file.unlink()
    assert f"{plan.hash} 1.0" == judged(blob)


def test_a_function_that_holds_a_lock_is_refused_by_what_it_holds(compiled):
    plan, file = compiled("bad")

    with pytest.raises(UsageError) as caught:
        shipped(plan, file)

    assert "E311" == caught.value.findings[0].code
    assert "lock" in str(caught.value)
