"""A plan's printed form: the same bytes in every process, and as the golden files have it.

`RLFLOW_GOLDEN=1 pytest tests/scheduler/test_plan_text.py` writes the golden files anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

from rlflow.errors import PlanError
from rlflow.scheduler.compile import dump_plan
from rlflow.scheduler.text import plan_text
from tests.scheduler.examples import EXAMPLES
from tests.scheduler.strategies import Case, cases

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", EXAMPLES)
def test_plans_print_as_the_golden_files_have_them(name: str) -> None:
    text = plan_text(EXAMPLES[name]().plan) + "\n"
    file = GOLDEN / f"{name}.txt"
    if "RLFLOW_GOLDEN" in os.environ:
        file.write_text(text)
    assert file.read_text() == text


@settings(max_examples=40)
@given(case=cases())
def test_compiling_twice_gives_the_same_bytes(case: Case) -> None:
    try:
        first, second = (case.compile().plan for _ in range(2))
    except PlanError:
        return
    assert plan_text(first) == plan_text(second)
    assert dump_plan(first) == dump_plan(second)


SCRIPT = """
from rlflow.scheduler.compile import dump_plan
from rlflow.scheduler.text import plan_text
from tests.scheduler.examples import EXAMPLES
for make in EXAMPLES.values():
    plan = make().plan
    print(plan_text(plan), dump_plan(plan))
import sys
assert not {"torch", "ray"} & set(sys.modules)
"""


def test_every_process_gives_the_same_bytes(models: Path) -> None:
    """Sets and dicts of strings come in another order under another hash seed."""
    printed = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=models,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2, 3)
    }
    (text,) = printed
    assert "reshard" in text


@pytest.mark.parametrize("name", EXAMPLES)
def test_json_names_what_the_text_names(name: str) -> None:
    plan = EXAMPLES[name]().plan
    document = json.loads(dump_plan(plan))
    assert plan.hash == document["hash"]
    assert [a.id for a in plan.actions] == [a["id"] for a in document["actions"]]
    text = plan_text(plan)
    assert all(a.reason.text in text for a in plan.actions)
