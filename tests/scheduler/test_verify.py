"""The verifier against an oracle that plays plans, and against plans that are wrong."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import rlflow.scheduler.verify.verify as verifier
from rlflow.scheduler.compile import PASSES
from rlflow.scheduler.plan.plan import Plan, Spread
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.verify import MEANING, SHAPE, STAGES, verify
from tests.scheduler.examples import COLOCATE, EXAMPLES, SPLIT, compiled_with, grpo
from tests.scheduler.mutants import with_action, without_action
from tests.scheduler.player import play
from tests.scheduler.proving import unnoticed


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Plan:
    return EXAMPLES[request.param]().plan


def test_stages_are_the_passes_in_their_order() -> None:
    assert [name for name, _ in PASSES] == list(STAGES)


def test_a_stage_that_is_no_pass_is_an_error() -> None:
    with pytest.raises(ValueError, match="tuple"):
        verify(EXAMPLES["grpo_split"]().plan, "never")


def test_examples_hold_after_every_pass() -> None:
    for make in EXAMPLES.values():
        for stage, plan in make().stages:
            assert [] == verify(plan, stage)


def test_examples_between_them_insert_every_kind_of_action() -> None:
    actions = [action for make in EXAMPLES.values() for action in make().plan.actions]
    assert {"run", "transfer", "reshard", "sleep", "wake"} == {a.kind for a in actions}
    assert {None, "offload", "discard"} == {a.mode for a in actions}


@pytest.mark.rows(3)
def test_every_mutant_of_every_example_is_rejected(example: Plan) -> None:
    assert [] == unnoticed(example)


def test_examples_play_without_a_violation(example: Plan) -> None:
    for seed in range(8):
        assert [] == play(example, seed)


def test_the_oracle_sees_what_a_missing_dependency_does() -> None:
    plan = EXAMPLES["grpo_split"]().plan
    update = plan.action("actor.update")
    early = with_action(plan, "actor.update", after=update.after[:1])
    assert any(play(early, seed) for seed in range(30))


def halved(plan: Plan, name: str) -> Spread:
    """The rows of an action dealt out one device at a time, without regard of its layout."""
    parts = tuple((device,) for device in plan.action(name).devices)
    return Spread(parts=parts, rule="balanced")


def reshard_of(plan: Plan) -> str:
    return next(a.id for a in plan.actions if a.kind == "reshard")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("grpo_split", lambda p: without_action(p, "reshard:actor@train->actor@gen"),
         "actor.rollout reads actor@gen, which no reshard ever fills"),
        ("grpo_split", lambda p: replace(p, budgets=dict.fromkeys(p.budgets, 1000)),
         "bytes on device 0, the budget is 1000"),
        ("grpo_colocate", lambda p: with_action(p, "actor.rollout", after=()),
         "actor.rollout may start before prompts has made"),
        ("grpo_colocate", lambda p: with_action(p, "eval", after=()),
         "actor.update and eval may run on device 0 at the same time"),
        ("ray_split", lambda p: without_action(p, "transfer:advantage->train"),
         "nothing carries advantages of advantage to actor.update"),
        ("ray_split", lambda p: with_action(p, "transfer:advantage->train", transport="copy"),
         "transfer:advantage->train goes by copy"),
        ("ray_split", lambda p: replace(p, backend="local"),
         "transfer:advantage->train carries advantages, which nobody reads there"),
        ("ray_mesh", lambda p: with_action(p, "actor.update", takes=p.action("reward").takes),
         "takes rows in parts ((4,), (5,)), it has devices [0, 1, 2, 3]"),
        ("ray_mesh", lambda p: with_action(p, "ref.log_probs", takes=halved(p, "ref.log_probs")),
         "different rows on devices [0, 1], which share them"),
        ("ray_mesh", lambda p: with_action(p, "actor.rollout", makes=None),
         "actor.rollout makes no rows: not what its op declares"),
        ("ray_mesh", lambda p: with_action(p, reshard_of(p), transport="copy"),
         "goes by copy, not by shared memory"),
        ("ray_mesh", lambda p: replace(p, hosts=2), "goes by shared memory, not by collective"),
        ("ray_pressure", lambda p: with_action(p, "wake:actor@all/gradients", mode="offload"),
         "is marked offload, and actor.update is next to use it"),
        ("ray_mesh", lambda p: with_action(p, "eval", after=()),
         "eval of two iterations may be in flight together"),
        ("grpo_pressure", lambda p: without_action(p, "wake:ref@all/weights"),
         "ref.log_probs needs ref@all/weights, which is asleep"),
    ],
)  # fmt: skip
def test_a_sentence_names_actions_and_figures(
    name: str, change: Callable[[Plan], Plan], says: str
) -> None:
    assert says in "\n".join(verify(change(EXAMPLES[name]().plan), "timing"))


def test_a_rule_is_silent_before_its_pass() -> None:
    """Two runs on one device are in no order until pass `chain` writes it."""
    stages = dict(compiled_with(grpo(), COLOCATE).stages)
    assert [] == verify(stages["residency"], "residency")
    assert any("at the same time" in text for text in verify(stages["residency"], "chain"))


def test_iterations_cannot_run_ahead_without_bound() -> None:
    """prompts waits for nothing but the host's last action of the iteration before."""
    plan = compiled_with(grpo(), SPLIT).plan
    free = with_action(plan, "prompts", after=())
    assert Facts(plan=plan).precedes("prompts", "prompts", 1)
    assert any("prompts" in text for text in verify(free, "timing"))


def test_the_verifier_imports_the_plan_and_the_graph_alone() -> None:
    """Every import of every file, inner ones and those for types too."""
    allowed = ("rlflow.graph.", "rlflow.scheduler.plan.plan", "rlflow.scheduler.verify.")
    files = sorted(Path(verifier.__file__).parent.rglob("*.py"))
    assert len(files) > 3
    found = [(file.name, name) for file in files for name in _imported(file)]
    assert any(name.startswith(allowed[0]) for _, name in found)
    assert [] == [each for each in found if not f"{each[1]}.".startswith(allowed)]


def _imported(file: Path) -> list[str]:
    """The modules that a file imports, but for those of Python itself."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.append("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.partition(".")[0] not in sys.stdlib_module_names]


def test_nothing_of_the_scheduler_but_the_plan_is_loaded_with_the_verifier() -> None:
    """What the plan itself imports counts as well."""
    code = "import sys, rlflow.scheduler.verify.verify; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    own = [name for name in loaded if name.startswith("rlflow.scheduler.")]
    assert {"plan", "verify"} == {name.split(".")[2] for name in own}


def test_every_rule_says_what_it_holds() -> None:
    assert all(rule.__doc__ and stage in STAGES for stage, rule in (*SHAPE, *MEANING))


def test_the_order_of_a_thousand_actions_is_no_cubic_work() -> None:
    """150 copies of the pipeline in turn on the same devices: a second; cubic, minutes."""
    plan = compiled_with(grpo(every=0), SPLIT).plan
    long = _repeated(plan, 150)
    began = time.process_time()
    Facts(plan=long).unrolled.past  # noqa: B018
    assert time.process_time() - began < 10
    assert len(long.actions) >= 1000


def _repeated(plan: Plan, times: int) -> Plan:
    actions = []
    for number in range(times):
        for a in plan.actions:
            after = [replace(dep, action=f"{dep.action}.{number}") for dep in a.after]
            if number:
                after += [replace(dep, action=f"{a.id}.{number - 1}") for dep in a.after[:1]]
            actions.append(replace(a, id=f"{a.id}.{number}", after=tuple(after)))
    return replace(plan, actions=tuple(actions))
