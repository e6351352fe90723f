"""A pipeline's file in a package: relative imports, its own package, and files beside it."""

from __future__ import annotations

import sys

import pytest

from rlflow.cli.config import load_pipeline
from rlflow.errors import UsageError
from rlflow.rewards.workers import Workers, packed_function
from rlflow.userfiles import own_folder, own_modules, package_of
from tests.conftest import TINY

FILES = {
    "kit_of_mine/__init__.py": "",
    "kit_of_mine/texts.py": """
from . import rewards

def tidy(text):
    return rewards.clean(text)
""",
    "kit_of_mine/rewards.py": """
from . import texts

def clean(text):
    return text.strip()

def score(response: str, answer: str) -> float:
    return float(len(texts.tidy(response)))
""",
    "kit_of_mine/tasks/__init__.py": "",
    "kit_of_mine/tasks/limits.py": "MOST = 5.0\n",
    "kit_of_mine/tasks/helper_beside.py": "SCALE = 2.0\n",
    "kit_of_mine/tasks/mine.py": f"""
import rlflow as rf
from rlflow import ops
import helper_beside
from kit_of_mine.rewards import score
from . import limits
from .. import rewards

def judge(response: str, answer: str) -> float:
    assert rewards.score is score or rewards.score("a", "") == score("a", "")
    return min(helper_beside.SCALE * rewards.score(response, answer), limits.MOST)

class Config(rf.Config):
    model: str = {str(TINY)!r}

@rf.pipeline()
def mine(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=1e-4))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
    reward = ops.reward(judge, samples, timeout=20)
    ops.update(actor, samples, ops.advantage("grpo", samples, reward), loss=rf.PolicyLoss())
""",
}
NAMES = ("kit_of_mine", "helper_beside", "rlflow_pipeline_mine", "rlflow_pipeline_alone")


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def kit(tmp_path):
    """A package with a pipeline in a package of its own; what is loaded of it is forgotten."""
    write(tmp_path, FILES)
    yield tmp_path / "kit_of_mine"
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]


def judge_of(pipeline):
    graph = pipeline.trace(pipeline.config())
    return dict(graph.node("reward").params)["function"]


def test_where_a_file_belongs(kit):
    file = kit / "tasks" / "mine.py"

    assert (kit.parent, "kit_of_mine.tasks") == package_of(file)
    assert kit == own_folder(file)
    assert (kit.parent, "") == package_of(kit.parent / "alone.py")
    assert kit.parent == own_folder(kit.parent / "alone.py")


def test_modules_installed_below_the_folder_are_not_the_files_own(tmp_path):
    def loaded(name, file):
        module = type(sys)(name)
        module.__file__ = str(tmp_path / file)
        sys.modules[name] = module
        return module

    own = loaded("helper_beside", "helper_beside.py")
    loaded("kit_of_mine", ".venv/lib/python3/site-packages/kit_of_mine/__init__.py")
    try:
        assert [own] == own_modules(tmp_path / "mine.py")
    finally:
        del sys.modules["helper_beside"], sys.modules["kit_of_mine"]


def test_a_file_imports_its_package_and_what_is_beside_it(kit, rlflow):
    before = list(sys.path)
    judge = judge_of(load_pipeline(str(kit / "tasks" / "mine.py")))

    assert (4.0, 5.0) == (judge(" ab ", ""), judge("abc", ""))
    assert before == sys.path
    result = rlflow("check", kit / "tasks" / "mine.py")
    assert 0 == result.code, result.err


@pytest.mark.slow
def test_a_reward_in_a_process_of_its_own_brings_them_along(kit):
    judge = judge_of(load_pipeline(str(kit / "tasks" / "mine.py")))
    workers = Workers(1)
    try:
        assert 4.0 == workers.call(packed_function(judge), {"response": " ab ", "answer": ""}, 20)
    finally:
        workers.close()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.torch
def test_a_plan_brings_them_to_other_processes(kit):
    from rlflow.cli.commands import Target, compile_target
    from rlflow.runtime.ray.shipping import shipped
    from tests.runtime.on_ray.test_shipping import judged

    file = kit / "tasks" / "mine.py"
    target = Target(pipeline=str(file), devices="cpu:1", backend="ray")
    plan = compile_target(target).compiled.plan
    blob = kit.parent / "blob"
    blob.write_bytes(shipped(plan, file))
    for name in FILES:
        (kit.parent / name).unlink()

    assert f"{plan.hash} 5.0" == judged(blob)


def test_another_package_of_that_name_is_refused(kit, tmp_path):
    load_pipeline(str(kit / "tasks" / "mine.py"))
    write(tmp_path / "other", FILES)

    with pytest.raises(UsageError) as caught:
        load_pipeline(str(tmp_path / "other" / "kit_of_mine" / "tasks" / "mine.py"))

    (finding,) = caught.value.findings
    assert "E317" == finding.code
    assert str(kit / "__init__.py") in finding.got


def test_a_relative_import_in_no_package_says_what_to_do(tmp_path):
    file = tmp_path / "plain" / "alone.py"
    write(tmp_path, {"plain/alone.py": "from . import rewards\n"})

    with pytest.raises(UsageError) as caught:
        load_pipeline(str(file))

    (finding,) = caught.value.findings
    assert "E307" == finding.code
    assert f"touch {file.with_name('__init__.py')}" in finding.fix
    sys.modules.pop("rlflow_pipeline_alone", None)
